"""Where keys and values live: pages, references, the prefix index, eviction."""
