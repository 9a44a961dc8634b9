"""Attention and sealing in Triton, for GPUs; the same code runs on a CPU in Triton's interpreter, where tests hold it
against the torch reference. Nothing here is imported unless the Triton path was chosen (`path`)."""
