"""The summariser of all methods: the real model, greedy, on our engine, many requests at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.compaction.context import Answer
from bench.processes import unwind_on_sigterm
from bench.sessions import PATIENCE, start_engine
from engines.contract import GenerateRequest, IdsPrompt, Sampling
from engines.remote.http import Upstream
from engines.remote.turnkeep import TurnkeepEngine
from gateway.sessions.tokens import ModelTokens

AT_ONCE = 6  # requests; each waits for its turn beyond that
LOOP = re.compile(r"(.{12,200}?)\1{3}$", re.DOTALL)  # the same again and again, to the end
LOOP_CHARACTERS = 1000
LOOK_EVERY = 8  # tokens


class Answers:
    """What the model wrote before, by its prompt, in a file of JSON lines; greedy answers are the same again."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.known: dict[str, Answer] = {}
        if file is not None and file.is_file():
            for line in file.read_text().splitlines():
                value = json.loads(line)
                key = value.pop("key")
                self.known[key] = Answer(**value)

    def keep(self, key: str, answer: Answer) -> None:
        self.known[key] = answer
        if self.file is not None:
            with self.file.open("a") as sink:
                sink.write(json.dumps({"key": key, **asdict(answer)}) + "\n")


class Writer:
    """`write` is what methods are given. Counts what was asked of the model."""

    def __init__(self, engine: TurnkeepEngine, model: str, tokens: ModelTokens, answers: Answers) -> None:
        self.engine, self.model, self.tokens, self.answers = engine, model, tokens, answers
        self.calls = 0
        self.output_tokens = 0
        self._free = asyncio.Semaphore(AT_ONCE)

    async def write(self, messages: list[dict[str, Any]], most_tokens: int) -> Answer:
        """What the model writes to these messages. A prompt too long for its window loses the oldest part of its last
        message, as a summariser's input is cut in the field. An answer that only repeats itself is stopped."""
        ids = self.tokens.render(self._fitting(messages, most_tokens))
        self.calls += 1
        key = hashlib.sha256(f"{self.tokens.revision} {most_tokens} ".encode() + ids).hexdigest()
        if (answer := self.answers.known.get(key)) is None:
            async with self._free:
                answer = await self._asked(ids, most_tokens)
            self.answers.keep(key, answer)
        self.output_tokens += answer.output_tokens
        return answer

    async def _asked(self, ids: bytes, most_tokens: int) -> Answer:
        sampling = Sampling(max_tokens=most_tokens, temperature=0.0, stop_token_ids=self.tokens.stop_ids)

        async def whole() -> bytes:
            return ids

        prompt = IdsPrompt(ids, len(ids) // 4, whole)
        request = GenerateRequest(f"summary-{self.calls}", self.model, prompt, sampling, cache_salt="bench")
        text, output, finish, cached = "", 0, None, 0
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                text += delta.text
                output += len(delta.ids)
                finish = delta.finish or finish
                if delta.usage is not None:
                    cached = delta.usage.cached_tokens or 0
                if output % LOOK_EVERY == 0 and LOOP.search(text[-LOOP_CHARACTERS:]):
                    break
        return Answer(text.strip(), finish == "stop", len(ids) // 4, output, cached)

    def _fitting(self, messages: list[dict[str, Any]], most_tokens: int) -> list[dict[str, Any]]:
        room = self.tokens.window - most_tokens
        while (over := self.tokens.count_messages(messages) - room) > 0:
            last = messages[-1]["content"]
            messages = [*messages[:-1], {**messages[-1], "content": last[max(64, 2 * over) :]}]
        return messages


@asynccontextmanager
async def writer(
    model: Path, tokens: ModelTokens, threads: int | None, answers: Path | None = None
) -> AsyncIterator[Writer]:
    """An engine process for as long as the context lasts. `answers`: a file in which what it writes is kept."""
    unwind_on_sigterm()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = await asyncio.to_thread(start_engine, stack, Path(folder), model, threads)
        ready = json.loads(next(line for line in running.said.splitlines() if '"event":"ready"' in line))
        engine = TurnkeepEngine(Upstream(ready["url"], timeouts=PATIENCE))
        try:
            yield Writer(engine, ready["model"], tokens, Answers(answers))
        finally:
            await engine.aclose()
