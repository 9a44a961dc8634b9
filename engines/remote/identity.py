"""Names for the model behind a server, of what it tells about it. Knows no HTTP.

Such a name is as good as what is told: two that differ are two models; two that are equal may still be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

GGUF_FACTS = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")  # `meta` of llama.cpp's model card
NAME_CHARS = 128


def sglang_model(server: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """`--revision`, and the version of the weights that whoever put them there gave them; None: neither was given."""
    version = model.get("weight_version") or server.get("weight_version")
    named = [server.get("revision"), version if version != "default" else None]
    return "@".join(str(part) for part in named if part)[:NAME_CHARS] or None


def llamacpp_model(card: Mapping[str, Any], template: object) -> str | None:
    """The file's shape and size, and its template: another base or quantization shows, other weights of the very same
    shape do not. None: the release does not tell."""
    meta = card.get("meta")
    if not isinstance(meta, Mapping) or not meta.get("n_params") or not meta.get("size"):
        return None
    told = orjson.dumps([[meta.get(fact) for fact in GGUF_FACTS], template], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(told).hexdigest()[:32]
