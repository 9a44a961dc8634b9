"""EchoEngine: a deterministic engine without a model, for tests and demonstrations.

It keeps the contract whole: sessions by base and delta, block-wise prefix reuse, stop strings and ids, window,
overload, cancel. What it says is a function of the prompt (`answer`), its distribution a point mass: temperature,
top_p, top_k, min_p, penalties and biases therefore change nothing. It cannot follow a grammar or call tools.

Its tokenizer is bytes (`echo_tokens`). Log-probabilities are made up: token `id` at place `n` of the answer has
`-((31 * id + n) % 97 + 1) / 100`, and the alternatives are the ids that follow, each 1 less.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from random import Random

from engines.contract import (
    Base,
    Capabilities,
    ChatPrompt,
    ContextOverflow,
    Delta,
    EngineLoad,
    EngineLost,
    EngineOverloaded,
    EngineUnreachable,
    FinishReason,
    GenerateRequest,
    IdsPrompt,
    Kept,
    RequestRefused,
    Sampling,
    TokenLogprob,
    Unsupported,
    Usage,
)
from engines.echo_paths import PathStore
from engines.echo_tokens import ECHO_MODEL_DIR as ECHO_MODEL_DIR
from engines.echo_tokens import ID_BYTES, IM_END, decode, encode, last_user_text, pack, render, unpack
from engines.kv_events import FeedItem
from engines.kv_log import KvLog
from engines.kv_stream import KvStream

MAX_LOGPROBS = 20
MAX_RUNNING = 4096  # it has no batch that could be full; more at once than this nobody has tried
_WORDS = ("lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "do", "eiusmod")
_HONOURED = frozenset(Sampling.__dataclass_fields__) - {"max_tokens", "grammar"}

Answer = Callable[[str, Sampling], str]


def echo(text: str, sampling: Sampling) -> str:
    """The last user message, said back."""
    return text


def lorem(text: str, sampling: Sampling) -> str:
    """Filler words, the same for the same message and seed; stops at max_tokens."""
    random = Random(f"{sampling.seed}/{text}")
    words: list[str] = []
    size = 0
    while size < sampling.max_tokens:
        words.append(random.choice(_WORDS))
        size += len(words[-1]) + 1
    return " ".join(words)


class EchoEngine:
    """One replica of nothing. `tokens_per_s`, `prefill_tokens_per_s`: None is as fast as it goes.

    What its cache stores and drops goes to `kv`; without one it tells nothing.
    Faults on demand: the first `fail_first` requests raise EngineUnreachable before their first delta; the next
    `die_times` requests raise EngineLost after `die_after` deltas.
    """

    def __init__(
        self,
        *,
        name: str = "echo",
        model: str = "echo",
        answer: Answer = echo,
        window: int = 131_072,
        block_size: int = 32,
        num_blocks: int = 65_536,
        max_running: int | None = None,
        tokens_per_s: float | None = None,
        prefill_tokens_per_s: float | None = None,
        chunk_tokens: int = 4,
        epoch: str = "echo-0",
        fingerprint: str | None = None,
        fail_first: int = 0,
        die_after: int = 0,
        die_times: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        kv: KvStream | None = None,
    ) -> None:
        self._name, self._model, self._answer = name, model, answer
        self._window, self._max_running, self._epoch = window, max_running, epoch
        self._fingerprints = {} if fingerprint is None else {model: fingerprint}
        self._tokens_per_s, self._prefill_tokens_per_s = tokens_per_s, prefill_tokens_per_s
        self._chunk_tokens = chunk_tokens
        self._fail_first, self._die_after, self._die_times = fail_first, die_after, die_times
        self._sleep = sleep
        self._running = 0
        self._kv = kv
        self._log = KvLog(block_size) if kv is not None else None
        self.paths = PathStore(block_size=block_size, num_blocks=num_blocks, log=self._log)

    @property
    def name(self) -> str:
        return self._name

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            kind="echo",
            models=(self._model,),
            window=self._window,
            takes_ids=True,
            takes_delta=True,
            continues=True,
            takes_salt=True,
            takes_chat=True,
            sampling=_HONOURED,
            max_logprobs=MAX_LOGPROBS,
            returns_ids=True,
            reports_cached=True,
            max_running=self._max_running or MAX_RUNNING,
            block_size=self.paths.block_size,
            keeps_sessions=True,
            prefills=True,
            kv_events=self._kv is not None,
            epoch=self._epoch,
            fingerprints=self._fingerprints,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Streams the answer, `chunk_tokens` a delta.

        What `prompt.whole()` raises goes through: a server that puts this engine behind a wire has no whole prompt
        and answers `unknown_base` there.
        """
        self._refuse(request)
        self._running += 1
        try:
            async with aclosing(self._run(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._running -= 1

    async def load(self) -> EngineLoad:
        cached, total = self.paths.cached_blocks, self.paths.num_blocks
        return EngineLoad(self._running, 0, cached / total, total, cached, 0)

    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        return encode(text)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens spelt out."""
        return decode(ids)

    async def forget(self, session: str, salt: str) -> dict[str, int]:
        gone = self.paths.forget(session, salt)
        self._tell()
        return {"device": gone}

    async def kept(self) -> list[Kept]:
        return [Kept(session, size) for session, size in self.paths.kept()]

    def kv_feed(self) -> AsyncGenerator[FeedItem, None] | None:
        return self._kv.feed() if self._kv is not None else None

    async def aclose(self) -> None:
        """Holds nothing open."""

    def _refuse(self, request: GenerateRequest) -> None:
        sampling, prompt = request.sampling, request.prompt
        if request.model != self._model:
            raise RequestRefused(
                f"no model {request.model!r}", code="model_not_found", param="model", replica=self._name
            )
        if sampling.grammar is not None:
            raise Unsupported("echo cannot follow a grammar", param="response_format", replica=self._name)
        if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
            raise Unsupported(f"at most {MAX_LOGPROBS} logprobs", param="logprobs", replica=self._name)
        if sampling.max_tokens < 1:
            raise RequestRefused("max_tokens is at least 1", param="max_tokens", replica=self._name)
        if isinstance(prompt, ChatPrompt):
            for param in ("tools", "response_format"):
                if getattr(prompt, param):
                    raise Unsupported(f"echo cannot do {param}", param=param, replica=self._name)
            self._fit(len(render(prompt.messages)), sampling)
        else:
            if prompt.num_tokens < 1:
                raise RequestRefused("the prompt is empty", param="prompt", replica=self._name)
            self._fit(prompt.num_tokens - _generated(prompt), sampling)
        if self._max_running is not None and self._running >= self._max_running:
            raise EngineOverloaded("every place is taken", retry_after_s=1.0, replica=self._name)
        if self._fail_first > 0:
            self._fail_first -= 1
            raise EngineUnreachable("told to fail before the first delta", replica=self._name)

    def _fit(self, num_tokens: int, sampling: Sampling) -> None:
        requested = num_tokens + sampling.max_tokens
        if requested > self._window:
            message = (
                f"the prompt has {num_tokens} tokens and the answer up to {sampling.max_tokens}: over {self._window}"
            )
            raise ContextOverflow(message, limit=self._window, requested=requested, replica=self._name)

    async def _run(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        session, base, delta = await self._prompt(request.prompt, request.cache_salt)
        delta, begun = _parted(delta, request.prompt)
        run = self.paths.start(session, request.cache_salt, base, delta, keep=request.priority <= 0)
        self._tell()
        said = self._answer(last_user_text(run.path.ids), request.sampling)
        ids, text, finish, stop = plan_answer(said, request.sampling)
        if ids[: len(begun)] != begun:
            message = f"the {len(begun)} generated ids are not those of this answer"
            raise RequestRefused(message, param="generated", replica=self._name)
        if self._prefill_tokens_per_s:
            await self._sleep((run.prompt_tokens - run.cached_tokens) / self._prefill_tokens_per_s)
        dies = self._die_times > 0
        self._die_times -= dies
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        sent, told = len(begun), _told(request.prompt)
        read = decoder.decode(text[:sent])
        chars, owed = len(read), read[told:]
        try:
            for number, at in enumerate(range(sent, max(len(ids), sent + 1), self._chunk_tokens)):
                if dies and number == self._die_after:
                    raise EngineLost(f"told to die after {number} deltas", replica=self._name)
                piece = ids[at : at + self._chunk_tokens]
                await self._sleep(len(piece) / self._tokens_per_s if self._tokens_per_s else 0)
                last = at + self._chunk_tokens >= len(ids)
                sent = at + len(piece)
                read = decoder.decode(text[at:sent], final=last)
                said, owed, chars = owed + read[max(0, told - chars) :], "", chars + len(read)
                yield Delta(
                    said,
                    piece,
                    logprobs=_logprobs(piece, at, request.sampling.logprobs),
                    finish=finish if last else None,
                    stop=stop if last else None,
                    usage=Usage(run.prompt_tokens, sent, run.cached_tokens) if last else None,
                )
        finally:
            self.paths.append(run, pack(ids[:sent]))
            self._tell()

    def _tell(self) -> None:
        if self._kv is not None and self._log is not None:
            self._kv.publish(self._log.drain())

    async def _prompt(self, prompt: IdsPrompt | ChatPrompt, salt: str) -> tuple[str | None, Base | None, bytes]:
        if isinstance(prompt, ChatPrompt):
            return None, None, pack(render(prompt.messages))
        if prompt.base is None or self.paths.holds(prompt.session, salt, prompt.base):
            return prompt.session, prompt.base, prompt.delta
        return prompt.session, None, await prompt.whole()


def _generated(prompt: IdsPrompt | ChatPrompt) -> int:
    """How many ids at the prompt's end are the answer's own."""
    return prompt.generated.ids if isinstance(prompt, IdsPrompt) and prompt.generated is not None else 0


def _told(prompt: IdsPrompt | ChatPrompt) -> int:
    return prompt.generated.chars if isinstance(prompt, IdsPrompt) and prompt.generated is not None else 0


def _parted(delta: bytes, prompt: IdsPrompt | ChatPrompt) -> tuple[bytes, tuple[int, ...]]:
    """What is asked, and what is answered already."""
    end = len(delta) - ID_BYTES * _generated(prompt)
    return delta[:end], tuple(unpack(delta[end:]))


def plan_answer(answer: str, sampling: Sampling) -> tuple[tuple[int, ...], bytes, FinishReason, str | None]:
    """(ids, the bytes of the text in them, finish reason, the stop string that matched) of an answer.

    ids   0 ........... text ends ........ end          a stop string or a stop id lies between the two
    """
    said = answer.encode("utf-8", "replace")
    if sampling.ignore_eos:
        said = (said or b" ") * (sampling.max_tokens // max(len(said), 1) + 1)
    ids = list(said) if sampling.ignore_eos else [*said, IM_END]
    finish: FinishReason = "stop"
    stop: str | None = None
    text_end, end = len(said), len(ids)
    for candidate in sampling.stop:
        at = said.find(candidate.encode())
        if at >= 0 and at + len(candidate.encode()) < end:
            text_end, end, stop = at, at + len(candidate.encode()), candidate
    for place, token in enumerate(ids[:end]):
        if token in sampling.stop_token_ids:
            text_end, end, stop = min(text_end, place), place + 1, None
            break
    if end > sampling.max_tokens:
        text_end = end = sampling.max_tokens
        finish, stop = "length", None
    return tuple(ids[:end]), said[:text_end], finish, stop


def _logprobs(ids: Sequence[int], at: int, wanted: int | None) -> tuple[TokenLogprob, ...]:
    if wanted is None:
        return ()
    entries = []
    for place, token in enumerate(ids, at):
        value = -((31 * token + place) % 97 + 1) / 100
        top = tuple((other, decode([other]), value - n) for n, other in enumerate(range(token, token + wanted)))
        entries.append(TokenLogprob(token, decode([token]), value, top))
    return tuple(entries)
