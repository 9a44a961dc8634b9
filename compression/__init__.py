"""What to keep of a conversation: pure planning, no I/O, no await, no tokenizer."""
