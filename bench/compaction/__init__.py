"""What compaction costs and what it loses, beside what people use now: `python -m bench.compaction`."""
