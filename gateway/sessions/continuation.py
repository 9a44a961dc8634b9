"""An answer that broke off, gone on with at another replica: from the prompt and the ids generated so far.

    told to the client     t e x t ............|
    ids generated          i d s ..................|      what lies between is held back: half a character, or
    asked of the other     prompt, ids ............| ->    what may begin a stop string; it comes with what follows

Our own engine takes the ids as its own (`Capabilities.continues`). Of any other, only the new ids are taken: the
gateway reads the whole answer with its own tokenizer and sends what was not told. Decides and decodes; asks nobody.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from engines.contract import (
    Capabilities,
    Delta,
    EngineBroken,
    EngineError,
    EngineLost,
    EngineOverloaded,
    EngineTimeout,
    FinishReason,
    Generated,
    IdsPrompt,
    RequestRefused,
    Sampling,
    Usage,
)
from engines.output import TextStream
from gateway.fleet.placement import Placement
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.vocabulary import unpack_ids

ID_BYTES = 4  # u32
CONTEXT_IDS = 8  # of the prompt's end, in front of the answer's first id


@dataclass(frozen=True, slots=True)
class Begun:
    """What there is of an answer."""

    ids: bytes  # u32 little-endian, every generated one
    told: str  # the engine's text of them, as far as it let it out

    @property
    def count(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Continuation:
    """How an answer goes on at a replica. `text`: the gateway's own reading; None where the replica continues."""

    placement: Placement
    prompt: IdsPrompt
    sampling: Sampling  # as the whole answer has it
    text: TextStream | None
    made: int  # ids generated before

    def asked(self) -> Sampling:
        """What is asked of the replica: one that knows nothing of the beginning generates only what is left."""
        if self.text is None:
            return self.sampling
        return replace(self.sampling, max_tokens=self.sampling.max_tokens - self.made)

    def whole(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The replica's deltas as those of one answer."""
        if self.text is None:
            return deltas
        return retold(
            deltas, self.text, self.sampling, prompt_tokens=self.prompt.num_tokens - self.made, made=self.made
        )


def reason_of(error: EngineError) -> str:
    """Why a replica was left, in one word."""
    match error:
        case EngineLost():
            return "lost"
        case EngineTimeout():
            return "silent"
        case EngineBroken():
            return "malformed"
        case EngineOverloaded():
            return "overloaded"
        case RequestRefused():
            return "refused"
    return "unreachable"


def may_go_on(error: EngineError) -> bool:
    """Whether an answer that broke off so may go on elsewhere: not where its own time is up."""
    return not (isinstance(error, EngineTimeout) and error.stage == "total")


def obstacle(sampling: Sampling, before: Capabilities | None, there: Capabilities) -> str | None:
    """Why a replica could not go on exactly; None where it can. `before`: of the one that began."""
    if before is None or not before.returns_ids:
        return "the ids generated so far are not known"
    if before.tokenizer is not None and there.tokenizer is not None and before.tokenizer != there.tokenizer:
        return "it has another tokenizer"
    if there.continues:
        return None
    if not there.returns_ids:
        return "it does not return token ids"
    if sampling.grammar is not None:
        return "it would begin the grammar anew"
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        return "it would count penalties anew"
    return None


def room_for(sampling: Sampling, prompt_tokens: int, made: int, window: int) -> Sampling | str:
    """`sampling` with as many tokens as the window has; or why there is none left, with the numbers."""
    most = min(sampling.max_tokens, window - prompt_tokens)
    if most <= made:
        return f"its window of {window} tokens has no room after {prompt_tokens + made}"
    return sampling if most == sampling.max_tokens else replace(sampling, max_tokens=most)


def prompt_from(prompt: IdsPrompt, begun: Begun) -> IdsPrompt:
    """The prompt with what was generated behind it. K/V of another position is not asked for again."""
    if not begun.count:
        return replace(prompt, shift=None)

    async def whole(before: Callable[[], Awaitable[bytes]] = prompt.whole) -> bytes:
        return await before() + begun.ids

    return replace(
        prompt,
        delta=prompt.delta + begun.ids,
        num_tokens=prompt.num_tokens + begun.count,
        whole=whole,
        shift=None,
        generated=Generated(begun.count, len(begun.told)),
    )


def read_again(tokens: ModelTokens, prompt: IdsPrompt, sampling: Sampling, begun: Begun) -> TextStream | None:
    """The answer so far as we read it; None where what was told is not what its ids say."""
    tail = unpack_ids(prompt.delta[-ID_BYTES * CONTEXT_IDS :])
    text = TextStream(tokens.vocabulary.plain_text, stops=sampling.stop, prompt_tail=tail)
    stops = frozenset(sampling.stop_token_ids)
    said = text.resume([i for i in unpack_ids(begun.ids) if i not in stops], len(begun.told))
    both = min(len(said), len(begun.told))
    return text if said[:both] == begun.told[:both] else None


def ended_already(text: TextStream, sampling: Sampling, begun: Begun, prompt_tokens: int) -> Delta | None:
    """The last delta of an answer whose last id had come, but not the word that it was the last."""
    ids = unpack_ids(begun.ids)
    finish: FinishReason | None = None
    if text.met is not None or (ids and ids[-1] in sampling.stop_token_ids):
        finish = "stop"
    elif len(ids) >= sampling.max_tokens:
        finish = "length"
    if finish is None:
        return None
    rest = text.flush()
    return Delta(rest.text, finish="stop" if rest.stop else finish, stop=rest.stop,
                 usage=Usage(prompt_tokens, len(ids)))  # fmt: skip


async def retold(
    deltas: AsyncGenerator[Delta, None], text: TextStream, sampling: Sampling, *, prompt_tokens: int, made: int
) -> AsyncGenerator[Delta, None]:
    """Deltas of an engine that knows nothing of the answer's beginning, with the text and usage of the whole answer.

    A stop string that began before its time is met here, and ends the answer.
    """
    stops = frozenset(sampling.stop_token_ids)
    async with aclosing(deltas):
        async for delta in deltas:
            said, taken = "", 0
            for token_id in delta.ids:
                taken += 1
                said += text.push(token_id).text if token_id not in stops else ""
                if text.met is not None:
                    break
            made += taken
            finish = delta.finish if text.met is None else "stop"
            if finish is None:
                yield Delta(said, delta.ids, logprobs=delta.logprobs)
                continue
            rest = text.flush()
            cached = delta.usage.cached_tokens if delta.usage is not None else None
            yield Delta(
                said + rest.text,
                delta.ids[:taken],
                logprobs=delta.logprobs[:taken],
                finish="stop" if rest.stop is not None else finish,
                stop=rest.stop,
                usage=Usage(prompt_tokens, made, None if cached is None else min(cached, prompt_tokens)),
            )
            return
