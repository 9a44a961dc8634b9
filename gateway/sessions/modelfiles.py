"""The files of a model's folder that the gateway reads: tokenizer, chat template, window, end-of-sequence ids."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")

# call:name{key:<escape>text<escape>,other:3} between its marks, several after one another
FUNCTION_GEMMA: Mapping[str, Any] = {
    "start_anchor": "<start_of_turn>model\n",
    "fields": {
        "content": {"close_pattern": "<end_of_turn>|<start_function_response>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<start_function_call>call:(?P<name>[\w.-]+)",
            "close": "<end_function_call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


class MissingFile(Exception):
    """A model's folder lacks something that rendering needs; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`revision`: SHA-256 (hex) over the bytes of every file read."""

    tokenizer_json: str
    template: str
    special_tokens: Mapping[str, str]
    response_template: Mapping[str, Any] | None
    window: int
    eos_ids: tuple[int, ...]
    revision: str

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """Raises MissingFile for tokenizer.json, config.json, or a chat template that is nowhere."""
        names = (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
        )
        raw = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        for needed in ("tokenizer.json", "config.json"):
            if needed not in raw:
                raise MissingFile(f"{folder} has no {needed}.")
        tokenizer_config = json.loads(raw.get("tokenizer_config.json", b"{}"))
        config = json.loads(raw["config.json"])
        generation = json.loads(raw.get("generation_config.json", b"{}"))
        return cls(
            tokenizer_json=raw["tokenizer.json"].decode(),
            template=(template := _template(folder, raw, tokenizer_config)),
            special_tokens=_special_tokens(tokenizer_config),
            response_template=tokenizer_config.get("response_template") or _known_format(template),
            window=_window(folder, config),
            eos_ids=_eos_ids(generation, config),
            revision=_revision(raw),
        )


def tokenizer_digest(tokenizer_json: bytes, template: str) -> str:
    """SHA-256 (hex) over tokenizer.json and the chat template: `Capabilities.tokenizer` of an engine that tells."""
    return hashlib.sha256(tokenizer_json + template.encode()).hexdigest()


def give_back_memory() -> None:
    """Return what loading used and freed to the system: 50 MB for a vocabulary of 49,000. Nothing where no glibc is."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _template(folder: Path, raw: Mapping[str, bytes], tokenizer_config: Mapping[str, Any]) -> str:
    if "chat_template.jinja" in raw:
        return raw["chat_template.jinja"].decode()
    declared = tokenizer_config.get("chat_template")
    if isinstance(declared, list):  # the older form: named templates
        named = {entry["name"]: entry["template"] for entry in declared}
        declared = named.get("tool_use", named.get("default"))
    if not isinstance(declared, str):
        raise MissingFile(f"{folder} has no chat template, neither chat_template.jinja nor in tokenizer_config.json.")
    return declared


def _known_format(template: str) -> Mapping[str, Any] | None:
    """The response template of a family whose tokenizers declare none."""
    return FUNCTION_GEMMA if "<start_function_call>" in template else None


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key in SPECIAL_KEYS:
        value = tokenizer_config.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _window(folder: Path, config: Mapping[str, Any]) -> int:
    for part in (config, config.get("text_config") or {}):
        for key in WINDOW_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    raise MissingFile(f"{folder}/config.json does not say how long the window is ({', '.join(WINDOW_KEYS)}).")


def _eos_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    declared = generation.get("eos_token_id", config.get("eos_token_id"))
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list) else (declared,)


def _revision(raw: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(raw):
        digest.update(f"{name}:{len(raw[name])}:".encode() + raw[name])
    return digest.hexdigest()
