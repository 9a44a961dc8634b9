"""Whole processes, as a user starts them."""
