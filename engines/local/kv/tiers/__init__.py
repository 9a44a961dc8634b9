"""What the device pool lets go, kept further down: host memory, then files."""
