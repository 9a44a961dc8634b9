"""Small model folders for the tests: the real SmolLM2 tokenizer, with a family's control tokens added to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.sessions.tokens import ModelTokens

TEMPLATES = Path(__file__).parents[2] / "fixtures" / "templates"
CHATML = ("<|im_start|>", "<|im_end|>")
QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL_MARKS = ("INST", "/INST", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_RESULTS", "/TOOL_RESULTS", "TOOL_CALLS")
MISTRAL = ("<s>", "</s>", *(f"[{mark}]" for mark in MISTRAL_MARKS))
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>")
FUNCTION_MARKS = [
    f"<{edge}_function_{what}>" for what in ("declaration", "call", "response") for edge in ("start", "end")
]
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
NOW = datetime(2026, 11, 29, tzinfo=UTC)
Loader = Callable[[str], ModelTokens]


@dataclass(frozen=True)
class Family:
    special: Sequence[str]
    plain: Sequence[str] = ()  # added tokens that are not special
    bos: str | None = None
    eos: Sequence[str] = ()
    tools: bool = False
    parallel: bool = False
    system: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "smollm2": Family(CHATML, eos=["<|im_end|>"]),
    "smollm3": Family(CHATML, QWEN_PLAIN[:4], eos=["<|im_end|>"], tools=True, parallel=True),
    "qwen2.5": Family(CHATML, QWEN_PLAIN[:2], eos=["<|im_end|>", "<|endoftext|>"], tools=True, parallel=True),
    "qwen3": Family(CHATML, QWEN_PLAIN, eos=["<|im_end|>", "<|endoftext|>"], tools=True, parallel=True),
    "llama3.1": Family(LLAMA, bos=LLAMA[0], eos=["<|eot_id|>", "<|eom_id|>"], tools=True),
    "llama3.2": Family(LLAMA, bos=LLAMA[0], eos=["<|eot_id|>", "<|eom_id|>"], tools=True),
    "mistral-nemo": Family(MISTRAL, bos="<s>", eos=["</s>"], tools=True, parallel=True),
    "mistral-v3": Family(MISTRAL, bos="<s>", eos=["</s>"], tools=True, parallel=True),
    "gemma2": Family(GEMMA, bos="<bos>", eos=["<eos>", "<end_of_turn>"], system=False),
    "gemma3": Family(GEMMA, bos="<bos>", eos=["<eos>", "<end_of_turn>"]),
    "function-gemma": Family(
        (*GEMMA, *FUNCTION_MARKS, "<escape>"),
        bos="<bos>",
        eos=["<end_of_turn>", "<start_function_response>"],
        tools=True,
    ),
    "gpt-oss": Family(HARMONY, eos=["<|return|>", "<|call|>"], tools=True),
}


def template_of(name: str) -> str:
    """The family's template: of the folder that TURNKEEP_TEMPLATES names where it is there, else ours."""
    own = Path(os.environ.get("TURNKEEP_TEMPLATES", TEMPLATES)) / f"{name}.jinja"
    return (own if own.is_file() else TEMPLATES / f"{name}.jinja").read_text()


def build(name: str, model_dir: Path, folder: Path) -> Path:
    """Write the folder of a model of this family."""
    family = FAMILIES[name]
    declared = json.loads((model_dir / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in declared["added_tokens"]}
    size = max(declared["model"]["vocab"].values())
    for token in (*family.special, *family.plain):
        if token not in ids:
            ids[token] = size = max(size, *ids.values()) + 1
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            entry = {"id": ids[token], "content": token, "special": token in family.special, **flags}
            declared["added_tokens"].append(entry)
    folder.mkdir(parents=True, exist_ok=True)
    write = {
        "tokenizer.json": declared,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": family.eos[0],
            **({"bos_token": family.bos} if family.bos else {}),
        },
        "config.json": {"model_type": "llama", "max_position_embeddings": 8192},
        "generation_config.json": {"eos_token_id": [ids[token] for token in family.eos]},
    }
    for file, content in write.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template_of(name))
    return folder
