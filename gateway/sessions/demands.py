"""What a turn asks of the replica that takes it, and who can do that. Decides; asks nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from compression.budget import answer_reserve, answer_tokens, least_answer
from engines.contract import Capabilities, Grammar, Sampling
from gateway.errors import BadRequest
from gateway.fleet.replica import Replica
from gateway.sessions.answer import AnswerFormat
from gateway.sessions.command import Ask, Shape, grammar_of
from gateway.sessions.history import History
from gateway.sessions.items import has_images
from gateway.sessions.models import Models
from gateway.sessions.windows import window_at

Suits = Callable[[Replica], bool]

_SHAPING = tuple(f.name for f in fields(Shape) if f.name != "max_tokens")
_NEUTRAL = Sampling(max_tokens=1)


def suiting(ask: Ask, history: History, models: Models, *, prompt_tokens: int, default_max_tokens: int) -> Suits:
    """Whether a replica can do what is asked, and a prompt of so many tokens leaves room there for an answer."""

    def suits(replica: Replica) -> bool:
        caps = replica.capabilities
        return (
            caps is not None
            and has_room(window_at(ask.model, replica, models), prompt_tokens, ask.shape.max_tokens, default_max_tokens)
            and can(ask, history, replica, caps, models)
        )

    return suits


def has_room(window: int | None, prompt_tokens: int, asked: int | None, default_max_tokens: int) -> bool:
    """Whether an answer worth beginning has room after the prompt."""
    if window is None:
        return True
    return prompt_tokens + least_answer(window, answer_reserve(window, asked, default_max_tokens)) <= window


def can(ask: Ask, history: History, replica: Replica, caps: Capabilities, models: Models) -> bool:
    """Images, tools, a grammar, fields of sampling: whether they can be had there, by ids or by chat."""
    if pictured(ask, history):
        return caps.takes_chat and caps.takes_images
    grammar, tokens = grammar_of(ask.response_format), models.by_ids(ask.model, replica)
    format = models.format(tokens) if tokens is not None else None
    if format is None or needs_chat(ask, history, format, caps):
        if not caps.takes_chat or (ask.tools and ask.tool_choice != "none" and not caps.parses_tools):
            return False
    elif not format.supports(tools=bool(ask.tools), reasoning=False):
        return False
    try:
        check_sampling(sampling_of(ask.shape, 2, 1, 1, grammar=grammar), ask.shape, caps, replica.name)
    except BadRequest:
        return False
    return True


def pictured(ask: Ask, history: History) -> bool:
    return history.pictured or has_images(ask.sent)


def needs_chat(ask: Ask, history: History, format: AnswerFormat, caps: Capabilities) -> bool:
    """What ids cannot carry to this replica: images, tools of a family we do not parse, an unknown grammar."""
    if pictured(ask, history):
        return True
    if caps.takes_chat and not format.supports(tools=bool(ask.tools), reasoning=False):
        return True
    grammar = grammar_of(ask.response_format)
    return caps.takes_chat and grammar is not None and grammar.kind not in caps.grammars


def sampling_of(
    shape: Shape,
    window: int,
    prompt_tokens: int,
    default_max_tokens: int,
    *,
    stop_ids: tuple[int, ...] = (),
    grammar: Grammar | None = None,
) -> Sampling:
    given = {name: value for name in _SHAPING if (value := getattr(shape, name)) is not None}
    return Sampling(
        max_tokens=answer_tokens(window, prompt_tokens, shape.max_tokens, default_max_tokens),
        stop_token_ids=stop_ids,
        grammar=grammar,
        **given,
    )


def check_sampling(sampling: Sampling, shape: Shape, caps: Capabilities, replica: str) -> None:
    """Refuse what this replica would ignore."""
    for name in _SHAPING:
        if name != "logprobs" and getattr(sampling, name) != getattr(_NEUTRAL, name) and name not in caps.sampling:
            raise BadRequest(f"{replica} does not take {name}", code="unsupported_parameter", param=name)
    if sampling.logprobs is not None and sampling.logprobs > caps.max_logprobs:
        raise BadRequest(
            f"{replica} gives at most {caps.max_logprobs} logprobs, {sampling.logprobs} were asked for",
            code="unsupported_parameter",
            param="top_logprobs",
        )
    if sampling.grammar is not None and sampling.grammar.kind not in caps.grammars:
        raise BadRequest(
            f"{replica} cannot hold its output to a {sampling.grammar.kind}",
            code="unsupported_parameter",
            param="response_format",
        )
