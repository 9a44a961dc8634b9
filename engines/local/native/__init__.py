"""A compiled decoder for the models most people run. The torch path is always there beside it."""
