"""Anthropic's Messages on the same conversations as chat completions: another shape, the same history modes."""
