"""The served models' tokenizers and templates, loaded once, and which replica is proven to read the same ids.

Replicas may serve two revisions of a model under one name, with tokenizers or templates of their own: what is proven
is proven of one replica in one life.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from engines.contract import Capabilities, EngineError
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
        self._tokens: dict[str, ModelTokens] = {}  # by model, those that were proven last
        self._formats: dict[ModelTokens, AnswerFormat] = {}
        self._loaded: dict[tuple[str, Path], ModelTokens] = {}
        self._proven: dict[tuple[str, str, str | None], ModelTokens | None] = {}  # by model, replica, epoch
        self.problems: dict[str, str] = {}  # model -> why it goes by chat, for the dashboard

    def format(self, tokens: ModelTokens) -> AnswerFormat:
        """How the model of these tokens writes reasoning and tool calls."""
        if tokens not in self._formats:
            self._formats[tokens] = AnswerFormat.of(tokens)
        return self._formats[tokens]

    def tokens(self, model: str, *, at: str | None = None) -> ModelTokens | None:
        """The model's tokens as the replica `at` reads them; where it reads none, or none is named, as another does."""
        found = [tokens for (name, replica, _), tokens in self._proven.items() if (name, replica) == (model, at)]
        return next((tokens for tokens in reversed(found) if tokens is not None), self._tokens.get(model))

    def by_ids(self, model: str, replica: Replica) -> ModelTokens | None:
        """The model's tokens where this replica is proven to read the same ids, else None: it goes by chat."""
        caps = replica.capabilities
        return self._proven.get((model, replica.name, caps.epoch)) if caps is not None and caps.takes_ids else None

    async def learn(self, replica: Replica, caps: Capabilities) -> None:
        """Load and prove what a freshly probed replica serves; nothing to do where that was done before."""
        if not caps.takes_ids:
            return
        for model in caps.models:
            key = (model, replica.name, caps.epoch)
            if key in self._proven:
                continue
            try:
                self._proven[key] = await self._load_and_prove(model, replica)
                self._drop(replica, caps.epoch)
            except EngineError as error:
                self.problems[model] = f"{replica.name}: {error}"
            except MissingFile as error:
                self._proven[key] = None
                self.problems[model] = str(error)

    def forget(self, replica: Replica) -> None:
        """It left, or another one takes its name: nothing is proven of that one."""
        self._keep(lambda name, epoch: name != replica.name)

    def _drop(self, replica: Replica, epoch: str | None) -> None:
        """What it read in former lives; it is still asked as in its last one until this probe is over."""
        last = replica.capabilities.epoch if replica.capabilities is not None else epoch
        self._keep(lambda name, one: name != replica.name or one in (epoch, last))

    def _keep(self, wanted: Callable[[str, str | None], bool]) -> None:
        self._proven = {key: tokens for key, tokens in self._proven.items() if wanted(key[1], key[2])}
        used = {*self._proven.values(), *self._tokens.values()}
        self._loaded = {key: tokens for key, tokens in self._loaded.items() if tokens in used}
        self._formats = {tokens: format for tokens, format in self._formats.items() if tokens in used}

    async def _load_and_prove(self, model: str, replica: Replica) -> ModelTokens | None:
        folder = self._folders.get(model) or await self._fetched(replica)
        if folder is None:
            self.problems[model] = f"no tokenizer folder is set for {model}: it is served by chat messages"
            return None
        tokens = await self._read(model, folder)
        for text in PROOF_TEXTS:
            theirs = await replica.engine.tokenize(text, model=model)
            if theirs is None:
                self.problems[model] = f"{replica.name} cannot show how it tokenizes {model}"
                return None
            if theirs != tokens.vocabulary.encode_text(text):
                self.problems[model] = f"{replica.name} reads other ids than {folder} for {model}"
                return None
        self._tokens[model] = tokens
        self.format(tokens)  # now, and not in the first answer
        self.problems.pop(model, None)
        return tokens

    async def _read(self, model: str, folder: Path) -> ModelTokens:
        known = self._loaded.get((model, folder))
        if known is not None:
            return known
        tokens = await asyncio.to_thread(ModelTokens.load, folder, name=model)
        return self._loaded.setdefault((model, folder), tokens)

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
    """Replicas of one model, and gateways with one folder, may do this at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if name in files:
            draft = folder / f".{name}.{secrets.token_hex(4)}.part"
            draft.write_bytes(files[name])
            draft.rename(folder / name)
