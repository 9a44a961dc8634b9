"""Measurements side by side; each prints one JSON object as its last line."""
