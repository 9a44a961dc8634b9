"""Token ids in, token ids out: the contract, adapters to other engines, and `local` (ours)."""
