"""`/v1/completions` at a replica that has no such route but takes token ids: the same answer, made from its deltas."""

from __future__ import annotations

import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from engines.contract import Delta, GenerateRequest, IdsPrompt, Sampling, TokenLogprob, Unsupported
from gateway.api.asked import plain, shape_of
from gateway.api.stateless_schemas import CompletionBody
from gateway.fleet.replica import Replica
from gateway.sessions.command import grammar_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def by_ids(
    asked: CompletionBody, request_id: str, clock: Callable[[], float]
) -> Callable[[Replica, str], AsyncGenerator[dict[str, Any], None]] | None:
    """How to answer it by ids; None where ids cannot: several prompts or answers, echo, suffix."""
    prompt = asked.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            return None
        prompt = prompt[0]
    if (asked.n or 1) > 1 or (asked.best_of or 1) > 1 or asked.echo or asked.suffix:
        return None
    one: Any = prompt

    def events(replica: Replica, salt: str) -> AsyncGenerator[dict[str, Any], None]:
        return _events(replica, salt, asked, one, request_id, int(clock()))

    return events


async def _events(
    replica: Replica, salt: str, asked: CompletionBody, prompt: str | list[int], request_id: str, created: int
) -> AsyncGenerator[dict[str, Any], None]:
    ids = await replica.engine.tokenize(prompt, model=asked.model) if isinstance(prompt, str) else prompt
    if ids is None:
        raise Unsupported(f"{replica.name} takes only token ids here", param="prompt", replica=replica.name)
    packed = array.array("I", ids).tobytes()

    async def whole() -> bytes:
        return packed

    request = GenerateRequest(
        request_id, asked.model, IdsPrompt(packed, len(ids), whole), _sampling(asked), cache_salt=salt
    )
    frame = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": created, "model": asked.model}
    answer = _Answer()
    async with aclosing(replica.engine.generate(request)) as deltas:
        async for delta in deltas:
            choice = answer.add(delta, with_ids=bool(asked.return_token_ids))
            if asked.stream:
                yield {**frame, "choices": [choice]}
    if not asked.stream:
        yield {**frame, "choices": [answer.choice(with_ids=bool(asked.return_token_ids))], "usage": answer.usage}
    elif asked.stream_options is not None and asked.stream_options.include_usage:
        yield {**frame, "choices": [], "usage": answer.usage}


def _sampling(asked: CompletionBody) -> Sampling:
    shape = shape_of(asked, max_tokens=None, logprobs=asked.logprobs is not None, top=asked.logprobs)
    given = {
        name: value
        for name in (
            "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logit_bias", "logprobs",
        )
        if (value := getattr(shape, name)) is not None
    }  # fmt: skip
    return Sampling(
        max_tokens=asked.max_tokens or DEFAULT_MAX_TOKENS,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=bool(asked.ignore_eos),
        grammar=grammar_of(plain(asked.response_format)),
        **given,
    )


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Delta = field(default_factory=Delta)

    def add(self, delta: Delta, *, with_ids: bool) -> dict[str, Any]:
        """The choice of a chunk that says what the delta adds."""
        self.text.append(delta.text)
        self.ids.extend(delta.ids)
        self.logprobs.extend(delta.logprobs)
        self.last = delta
        return _choice(delta.text, delta.ids, delta.logprobs, delta, with_ids=with_ids)

    def choice(self, *, with_ids: bool) -> dict[str, Any]:
        return _choice("".join(self.text), self.ids, self.logprobs, self.last, with_ids=with_ids)

    @property
    def usage(self) -> dict[str, Any]:
        used = self.last.usage
        prompt, output = (used.prompt_tokens, used.output_tokens) if used is not None else (0, len(self.ids))
        told: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
        if used is not None and used.cached_tokens is not None:
            told["prompt_tokens_details"] = {"cached_tokens": used.cached_tokens}
        return told


def _choice(text: str, ids: Any, logprobs: Any, last: Delta, *, with_ids: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": last.finish}
    if logprobs:
        choice["logprobs"] = {
            "tokens": [entry.text for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [{text: value for _, text, value in entry.top} for entry in logprobs],
        }
    return choice | ({"token_ids": list(ids)} if with_ids else {})
