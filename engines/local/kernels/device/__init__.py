"""What runs on the device, in Triton's language: the one folder that mypy does not hold to Python's types."""
