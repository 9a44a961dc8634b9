"""LangChain's SummarizationMiddleware and trim_messages, in an environment of their own, as methods beside ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.compaction.context import Context, Sizer, Write, units
from bench.compaction.peers import filled_up
from bench.peers import Peer, installed
from compression.conversation import Item, Turn
from gateway.sessions.items import items_from_messages, messages_from_items

PEER = Peer("langchain", "langchain", "langchain", lambda *_: (), "")
DRIVER = Path(__file__).with_name("langchain_driver.py")
KEEP_MESSAGES = 20  # the middleware's default
LINE_BYTES = 1 << 26


class LangChainFailed(Exception):
    """Its process ended, or answered with something else than was asked for."""


def interpreter(folder: Path) -> tuple[Path | None, str | None]:
    """Python of an environment in `folder` with LangChain in it, made where it is not there; or why there is none."""
    if reason := installed(folder, PEER):
        return None, reason
    return folder / PEER.name / "bin" / "python", None


class LangChain:
    """One process. `run` sends a job and serves what it asks for on the way."""

    def __init__(self, process: asyncio.subprocess.Process, versions: dict[str, str]) -> None:
        self.process, self.versions = process, versions
        self.busy = asyncio.Lock()

    async def run(
        self, job: dict[str, Any], sizer: Sizer, write: Write | None, most_tokens: int
    ) -> list[dict[str, Any]]:
        async with self.busy:
            await self._say(job)
            while True:
                heard = await self._hear()
                if "messages" in heard:
                    made: list[dict[str, Any]] = heard["messages"]
                    return made
                if "count" in heard:
                    await self._say({"tokens": [sizer.of(_items(value)) for value in heard["count"]]})
                elif "ask" in heard and write is not None:
                    answer = await write([{"role": "user", "content": heard["ask"]}], most_tokens)
                    await self._say({"text": answer.text})
                else:
                    raise LangChainFailed(f"{heard!r:.200}")

    async def _say(self, value: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        await self.process.stdin.drain()

    async def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise LangChainFailed((await self.process.stderr.read()).decode(errors="replace")[-1000:])
        heard: dict[str, Any] = json.loads(line)
        return heard


@asynccontextmanager
async def langchain(python: Path) -> AsyncIterator[LangChain]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        str(python), "-W", "ignore", str(DRIVER), stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES
    )
    started = LangChain(process, {})
    try:
        started.versions = await started._hear()
        yield started
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            process.kill()
            await process.wait()


class TrimMessages:
    """trim_messages: the newest messages that fit, beginning with a user's."""

    name = "LangChain trim_messages"

    def __init__(self, sizer: Sizer, langchain: LangChain) -> None:
        self.sizer, self.langchain = sizer, langchain

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        job = {"op": "trim", "messages": _messages(turns, 0), "tokens": budget - self.sizer.overhead}
        kept = await self.langchain.run(job, self.sizer, None, 0)
        return self.sizer.context(item for value in kept for item in _items(value))


class Summarization:
    """SummarizationMiddleware on a state that goes on from compaction to compaction. It keeps its default of 20
    messages where they and a summary fit the budget, else as many tokens as do; what room is left is filled with the
    newest turns that it took away."""

    name = "LangChain SummarizationMiddleware"

    def __init__(self, sizer: Sizer, langchain: LangChain, write: Write, most_tokens: int) -> None:
        self.sizer, self.langchain, self.write, self.most_tokens = sizer, langchain, write, most_tokens
        self.state: list[dict[str, Any]] = []
        self.seen = 0  # turns

    async def compact(self, turns: Sequence[Turn], budget: int) -> Context:
        self.state += _messages(turns[self.seen :], self.seen)
        self.seen = len(turns)
        room = budget - self.sizer.overhead - self.most_tokens
        last = sum(self.sizer.of(_items(value)) for value in self.state[-KEEP_MESSAGES:])
        keep = ["messages", KEEP_MESSAGES] if last <= room else ["tokens", room]
        job = {"op": "summarise", "messages": self.state, "keep": keep}
        self.state = await self.langchain.run(job, self.sizer, self.write, self.most_tokens)
        first = min((int(value["at"].partition(".")[0]) for value in self.state if value["at"]), default=len(turns))
        items = [item for value in self.state for item in _items(value)]
        return filled_up(self.sizer, items, 1, units(turns[:first]), budget)


def _messages(turns: Sequence[Turn], first: int) -> list[dict[str, Any]]:
    """Turns as the driver's messages; `at` says which turn each is of."""
    return [
        {**value, "at": f"{number}.{n}"}
        for number, turn in enumerate(turns, first)
        for n, value in enumerate(_driven(tuple(turn.items)))
    ]


def _driven(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items in the driver's form."""
    made = []
    for said in messages_from_items(items):
        value: dict[str, Any] = {"role": said["role"], "content": said.get("content") or ""}
        if calls := said.get("tool_calls"):
            value["calls"] = [
                {"id": call["id"], "name": call["function"]["name"], "args": json.loads(call["function"]["arguments"])}
                for call in calls
            ]
        if "tool_call_id" in said:
            value["call_id"] = said["tool_call_id"]
        made.append(value)
    return made


def _items(value: dict[str, Any]) -> list[Item]:
    said: dict[str, Any] = {"role": value["role"], "content": value["content"]}
    if calls := value.get("calls"):
        said["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["args"])},
            }
            for call in calls
        ]
    if "call_id" in value:
        said["tool_call_id"] = value["call_id"]
    return items_from_messages([said])
