"""A conversation with a running engine, seen from the client: exact ids over the engine's own wire, arrivals stamped.

    system + user --ids--> reply --ids--> + user --ids--> reply ...     every message is made to an exact length

Times are this process's, in seconds of `time.perf_counter`; the engine is another process.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from bench.conversations import WORDS
from engines.contract import EMPTY_DIGEST, Base, Engine, GenerateRequest, IdsPrompt, Sampling, chain_digest
from gateway.sessions.tokens import ModelTokens, Tail

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: when it was asked for, when each token came, and what the engine says of its prompt."""

    asked_s: float
    arrivals_s: tuple[float, ...]  # one for each token
    cpu_s: float  # of the engine, from the request to the first token
    ids: Ids
    prompt_tokens: int
    cached_tokens: int | None  # None: the engine does not tell

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.asked_s

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.arrivals_s[-1] - self.arrivals_s[0]


@dataclass(frozen=True, slots=True)
class Client:
    """How answers are asked for: greedy, of `reply_tokens` exactly."""

    engine: Engine
    model: str
    reply_tokens: int
    cpu_s: Callable[[], float]  # of the engine's processes

    async def ask(self, prompt: IdsPrompt, *, name: str, salt: str) -> Answer:
        sampling = Sampling(max_tokens=self.reply_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(name, self.model, prompt, sampling, cache_salt=salt)
        ids: list[int] = []
        arrivals: list[float] = []
        usage = None
        cpu, asked = self.cpu_s(), time.perf_counter()
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                now = time.perf_counter()
                if delta.ids and not ids:
                    cpu = self.cpu_s() - cpu
                ids += delta.ids
                arrivals += [now] * len(delta.ids)
                usage = delta.usage or usage
        assert usage is not None, "the engine told no usage"
        assert len(ids) == self.reply_tokens, f"{len(ids)} tokens came, {self.reply_tokens} were asked for"
        return Answer(asked, tuple(arrivals), cpu, tuple(ids), usage.prompt_tokens, usage.cached_tokens)


class Asker(Protocol):
    """Whoever answers a prompt of ids: `Client`, and what stands for another engine."""

    async def ask(self, prompt: IdsPrompt, *, name: str, salt: str) -> Answer: ...


@dataclass(slots=True)
class Talk:
    """The client's side of one session. `next_prompt` adds a user's message, `ask` has it answered."""

    tokens: ModelTokens
    name: str  # of the session
    salt: str
    words: Random
    system_tokens: int
    user_tokens: int  # what a turn adds to the path: the last answer's end, the message and the template's markup
    system: str | None = None  # the system prompt, where it is given; else it is made to its length
    path: array[int] = field(default_factory=lambda: array("I"))  # whole prompt, ids
    _base: Base | None = None
    _tail: Tail | None = None
    _delta: bytes = b""

    def next_prompt(self) -> list[int]:
        """The whole prompt of the next turn, ids."""
        if self._tail is None:
            self._delta = self._first()
        else:
            tail = self._tail
            self._delta = self._sized(self.user_tokens, lambda text: self._extended(text, tail))
        self.path.frombytes(self._delta)
        return self.path.tolist()

    async def ask(self, client: Asker) -> Answer:
        """Send what is new of the prompt, on the path that the engine keeps; the answer goes on the path."""
        whole = self.path.tobytes()
        prompt = IdsPrompt(self._delta, len(self.path), given(whole), self.name, self._base)
        answer = await client.ask(prompt, name=f"{self.name}-{len(self.path)}", salt=self.salt)
        output = array("I", answer.ids).tobytes()
        before = self._base.digest if self._base else EMPTY_DIGEST
        digest = chain_digest(chain_digest(before, self._delta), output)
        self.path.frombytes(output)
        self._base = Base(len(self.path), digest)
        self._tail = self.tokens.tail(answer.ids, path_tokens=len(self.path), digest=digest)
        return answer

    def _first(self) -> bytes:
        if self.system is not None:
            system = {"role": "system", "content": self.system}
            return self._sized(
                self.system_tokens + self.user_tokens,
                lambda text: self.tokens.render([system, {"role": "user", "content": text}]),
            )
        opening = " ".join(self.words.choices(WORDS, k=self.user_tokens // 3))

        def rendered(text: str) -> bytes:
            return self.tokens.render([{"role": "system", "content": text}, {"role": "user", "content": opening}])

        return self._sized(self.system_tokens + self.user_tokens, rendered)

    def _extended(self, text: str, tail: Tail) -> bytes:
        ids = self.tokens.extend([{"role": "user", "content": text}], after=tail)
        if ids is None:
            raise ValueError(f"{self.tokens.name}: its template does not let a path be extended exactly")
        return ids

    def _sized(self, wanted: int, render: Callable[[str], bytes]) -> bytes:
        """What `render` makes of a text that gives exactly `wanted` ids."""
        text = self.words.choice(WORDS)
        while (missing := wanted - len(render(text)) // 4) > 0:
            longer = f"{text} {self.words.choice(WORDS)}"
            text = longer if len(render(longer)) // 4 <= wanted else f"{text}{'.' if missing < 2 else ' a'}"
        ids = render(text)
        if len(ids) // 4 != wanted:
            raise ValueError(f"no text of exactly {wanted} tokens was found: {len(ids) // 4}")
        return ids


async def ask_without_reuse(client: Asker, whole: list[int], *, name: str) -> Answer:
    """The same prompt with nothing to reuse: no session, and a salt that nobody else has."""
    ids = array("I", whole).tobytes()
    answer = await client.ask(IdsPrompt(ids, len(whole), given(ids)), name=name, salt=f"nobody-else-{name}")
    assert answer.cached_tokens == 0, f"{answer.cached_tokens} tokens were reused in spite of a new salt"
    return answer


def given(whole: bytes) -> Callable[[], Awaitable[bytes]]:
    async def give() -> bytes:
        return whole

    return give
