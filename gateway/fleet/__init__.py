"""The replicas: what they can do, how they are, which one a turn goes to."""
