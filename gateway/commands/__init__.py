"""The `turnkeep` command, one module for each word."""
