"""Limits of tenants and keys: what they are, how they are counted, and who is let through."""
