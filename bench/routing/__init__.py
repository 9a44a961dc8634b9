"""Where turns land: the production placement on simulated replicas, replaying a trace of a large chat service."""
