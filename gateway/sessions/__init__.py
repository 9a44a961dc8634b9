"""One conversation: its history as items and as token ids, its lease, its turns."""
