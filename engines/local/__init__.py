"""Our own engine on torch: any transformers causal LM over a paged KV pool."""
