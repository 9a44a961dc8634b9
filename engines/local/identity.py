"""Names a model by what lies in its folder: weights, configuration, tokenizer and template. Knows no torch.

Two replicas under one name serve the same model where this name is the same. Of the weights it reads samples: weights
that were trained further, merged with an adapter or quantized differ nearly everywhere.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from engines.local.texts import fingerprint

WEIGHTS = ("*.safetensors", "*.bin")
HEAD_BYTES = 64 << 10  # of each file: names, shapes and types begin there
PIECE_BYTES = 4 << 10
PIECES = 256  # of each file, from its first byte to its last: if 5% of it changed, one of them did (1 - 2e-6)


def model_fingerprint(folder: Path) -> str:
    """32 hex digits; the same for the same files on every machine. Blocking: about 1 MiB is read of each file."""
    told = hashlib.sha256(b"turnkeep model\0" + fingerprint(folder).encode())
    if (config := folder / "config.json").is_file():
        told.update(hashlib.sha256(config.read_bytes()).digest())
    for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        told.update(_sampled(file))
    return told.hexdigest()[:32]


def _sampled(file: Path) -> bytes:
    size = file.stat().st_size
    told = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as opened:
        told.update(opened.read(HEAD_BYTES))
        last = max(0, size - PIECE_BYTES)
        for piece in range(PIECES):
            opened.seek(last * piece // (PIECES - 1))
            told.update(opened.read(PIECE_BYTES))
    return told.digest()
