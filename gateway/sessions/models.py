"""The served models' tokenizers and templates, loaded once, and which replica is proven to read the same ids."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from engines.contract import EngineError
from gateway.fleet.replica import Replica
from gateway.sessions.answer import AnswerFormat
from gateway.sessions.modelfiles import MissingFile
from gateway.sessions.tokens import ModelTokens

# Read by both tokenizers before a replica is trusted with ids: words, digits, spaces, scripts, code, emoji.
PROOF_TEXTS = (
    "Hello, world! The year 2026 has 365 days.",
    "  two  spaces\n\n\tand a tab; naïve café, Straße, 北京, こんにちは, مرحبا, 👩‍👩‍👧 1234567890",
    'def f(x):\n    return {"a": [x ** 2, -1e-9]}  # comment',
)
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")


class Models:
    """`folders` names the tokenizer folder of a model, by settings; a Turnkeep engine sends its own."""

    def __init__(self, *, folders: Mapping[str, Path], cache_dir: Path) -> None:
        self._folders = dict(folders)
        self._cache_dir = cache_dir
        self._tokens: dict[str, ModelTokens] = {}
        self._formats: dict[str, AnswerFormat] = {}
        self._loaded_from: dict[str, Path] = {}
        self._proven: dict[tuple[str, str, str | None], bool] = {}
        self.problems: dict[str, str] = {}  # model -> why it goes by chat, for the dashboard

    def format(self, model: str) -> AnswerFormat:
        """How the model writes reasoning and tool calls; of a model whose tokens are loaded."""
        return self._formats[model]

    def tokens(self, model: str) -> ModelTokens | None:
        return self._tokens.get(model)

    def by_ids(self, model: str, replica: Replica) -> ModelTokens | None:
        """The model's tokens where this replica is proven to read the same ids, else None: it goes by chat."""
        caps = replica.capabilities
        if caps is None or not caps.takes_ids or not self._proven.get((model, replica.name, caps.epoch)):
            return None
        return self._tokens.get(model)

    async def learn(self, replica: Replica) -> None:
        """Load and prove what a freshly probed replica serves; nothing to do where that was done before."""
        caps = replica.capabilities
        assert caps is not None
        if not caps.takes_ids:
            return
        for model in caps.models:
            key = (model, replica.name, caps.epoch)
            if key in self._proven:
                continue
            try:
                self._proven[key] = await self._load_and_prove(model, replica)
            except EngineError as error:
                self.problems[model] = f"{replica.name}: {error}"
            except MissingFile as error:
                self._proven[key] = False
                self.problems[model] = str(error)

    async def _load_and_prove(self, model: str, replica: Replica) -> bool:
        folder = self._folders.get(model) or await self._fetched(replica)
        if folder is None:
            self.problems[model] = f"no tokenizer folder is set for {model}: it is served by chat messages"
            return False
        tokens = await self._loaded(model, folder)
        for text in PROOF_TEXTS:
            theirs = await replica.engine.tokenize(text, model=model)
            if theirs is None:
                self.problems[model] = f"{replica.name} cannot show how it tokenizes {model}"
                return False
            if theirs != tokens.vocabulary.encode_text(text):
                self.problems[model] = f"{replica.name} reads other ids than {folder} for {model}"
                return False
        self._tokens[model] = tokens
        self._formats[model] = AnswerFormat.of(tokens)
        self.problems.pop(model, None)
        return True

    async def _loaded(self, model: str, folder: Path) -> ModelTokens:
        known = self._tokens.get(model)
        if known is not None and self._loaded_from.get(model) == folder:
            return known
        tokens = await asyncio.to_thread(ModelTokens.load, folder, name=model)
        self._loaded_from[model] = folder
        return tokens

    async def _fetched(self, replica: Replica) -> Path | None:
        """The replica's own tokenizer files, kept by content under the cache folder; None where it sends none."""
        fetch = getattr(replica.engine, "tokenizer_file", None)
        if fetch is None:
            return None
        files = {name: body for name in FILES if (body := await fetch(name)) is not None}
        if "tokenizer.json" not in files:
            return None
        digest = hashlib.sha256(b"".join(name.encode() + files.get(name, b"") for name in FILES)).hexdigest()[:32]
        folder = self._cache_dir / digest
        await asyncio.to_thread(_write, folder, files)
        return folder


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if name in files:
            draft = folder / f".{name}.part"
            draft.write_bytes(files[name])
            draft.rename(folder / name)
