"""Sessions, placement, HTTP and dashboard: the only room with a database, a clock and a public face."""
