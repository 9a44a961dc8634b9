"""Decides how a turn goes out: which replica, by ids or by chat, with which prompt and sampling.

Everything that can be refused is refused here, before anything is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from compression.budget import answer_tokens
from engines.contract import Capabilities, ChatPrompt, Grammar, IdsPrompt, Sampling
from gateway.errors import BadRequest, NotFound, Unavailable
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement import Placement, choose
from gateway.fleet.replica import Replica
from gateway.sessions.answer import AnswerFormat
from gateway.sessions.command import Ask, Shape, grammar_of
from gateway.sessions.counting import count_chat
from gateway.sessions.failures import overflow
from gateway.sessions.history import History
from gateway.sessions.items import has_images, messages_from_items
from gateway.sessions.models import Models
from gateway.sessions.prompt import BuiltPrompt, aside, build, chat_messages
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.tool_choice import tool_grammar

Mode = Literal["ids", "chat"]

_SHAPING = tuple(f.name for f in fields(Shape) if f.name != "max_tokens")
_NEUTRAL = Sampling(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Prepared:
    placement: Placement
    mode: Mode
    prompt: IdsPrompt | ChatPrompt
    sampling: Sampling
    prompt_tokens: int  # exact by ids, estimated by chat
    window: int | None
    tokens: ModelTokens | None = None  # by ids: the model's tokenizer and template
    format: AnswerFormat | None = None  # how the model writes reasoning and tool calls
    built: BuiltPrompt | None = None
    counted_by: str = "the model's own template"
    notes: dict[str, Any] = field(default_factory=dict)


async def prepare(
    ask: Ask,
    history: History,
    *,
    fleet: Fleet,
    models: Models,
    session_name: str | None,
    default_max_tokens: int,
    param: str = "input",
) -> Prepared:
    """Raises NotFound (model), Unavailable (no replica), BadRequest (cannot be done; too long, with the numbers)."""
    placement = place(ask.model, history, fleet)
    caps = placement.replica.capabilities
    assert caps is not None
    tokens = models.by_ids(ask.model, placement.replica)
    format = models.format(ask.model) if tokens is not None else None
    mode: Mode = "ids" if format is not None and not needs_chat(ask, history, format, caps) else "chat"
    if mode == "chat":
        _check_chat(ask, caps, history, placement.replica, tokens, models)
    if mode == "ids":
        assert tokens is not None
        assert format is not None
        return await _by_ids(ask, history, placement, tokens, format, caps, session_name, default_max_tokens, param)
    return await _by_chat(ask, history, placement, caps, models.tokens(ask.model), default_max_tokens, param)


def place(model: str, history: History, fleet: Fleet, tried: Sequence[str] = ()) -> Placement:
    placement = choose(
        list(fleet),
        model=model,
        pin=history.pin,
        path_tokens=history.used_tokens,
        now=fleet.now(),
        tried=tried,
    )
    if placement is not None:
        return placement
    if model not in fleet.models and any(r.healthy for r in fleet):
        raise NotFound(
            f"the model {model[:100]!r} is not served here; served are: {', '.join(fleet.models) or 'none'}",
            code="model_not_found",
            param="model",
        )
    raise Unavailable(f"no replica that serves {model[:100]!r} can take the turn right now", retry_after_s=1.0)


def needs_chat(ask: Ask, history: History, format: AnswerFormat, caps: Capabilities) -> bool:
    """What ids cannot carry to this replica: images, tools of a family we do not parse, an unknown grammar."""
    if history.pictured or has_images(ask.sent):
        return True
    if caps.takes_chat and not format.supports(tools=bool(ask.tools), reasoning=False):
        return True
    grammar = grammar_of(ask.response_format)
    return caps.takes_chat and grammar is not None and grammar.kind not in caps.grammars


def _check_chat(
    ask: Ask, caps: Capabilities, history: History, replica: Replica, tokens: ModelTokens | None, models: Models
) -> None:
    if (history.pictured or has_images(ask.sent)) and not (caps.takes_chat and caps.takes_images):
        raise BadRequest(
            f"{ask.model} on {replica.name} takes no images", code="unsupported_parameter", param="messages"
        )
    if not caps.takes_chat:
        why = models.problems.get(ask.model, "its tokenizer is still being loaded")
        raise Unavailable(f"{replica.name} takes only token ids, and {why}", retry_after_s=1.0)


async def _by_ids(
    ask: Ask,
    history: History,
    placement: Placement,
    tokens: ModelTokens,
    format: AnswerFormat,
    caps: Capabilities,
    session_name: str | None,
    default_max_tokens: int,
    param: str,
) -> Prepared:
    if not format.supports(tools=bool(ask.tools), reasoning=False):
        raise BadRequest(
            f"tools: the chat template of {ask.model} declares no tool calls",
            code="unsupported_parameter",
            param="tools",
        )
    if ask.parallel_tool_calls is False and ask.tools and ask.tool_choice not in ("none", "required"):
        raise BadRequest(
            "parallel_tool_calls: false cannot be enforced for this model; leave it out",
            code="unsupported_parameter",
            param="parallel_tool_calls",
        )
    if ask.kv_shift and not caps.takes_shift:
        ask = replace(ask, kv_shift=False)
    built = await build(tokens, ask, history.head, session=session_name)
    window = min(tokens.window, caps.window or tokens.window)
    if built.ids.num_tokens >= window:
        raise overflow(prompt_tokens=built.ids.num_tokens, window=window, asked=ask.shape.max_tokens, param=param)
    grammar = grammar_of(ask.response_format) or tool_grammar(tokens, ask.tools, ask.tool_choice)
    sampling = sampling_of(
        ask.shape, window, built.ids.num_tokens, default_max_tokens, stop_ids=tokens.stop_ids, grammar=grammar
    )
    check_sampling(sampling, ask.shape, caps, placement.replica.name)
    return Prepared(
        placement, "ids", built.ids, sampling, built.ids.num_tokens, window, tokens=tokens, format=format, built=built
    )


async def _by_chat(
    ask: Ask,
    history: History,
    placement: Placement,
    caps: Capabilities,
    tokens: ModelTokens | None,
    default_max_tokens: int,
    param: str,
) -> Prepared:
    folded = await history.head.load_items(tokens.placement if tokens is not None else "exchange", ask.old_reasoning)
    messages = chat_messages(ask, folded)
    pictured = has_images((*folded.items, *ask.sent))
    if tokens is not None and not pictured:
        counted = await aside(lambda: tokens.count_messages(messages, tools=ask.tools), messages)
        counted_by = "the model's own template"
        if caps.window is not None and counted >= caps.window:
            raise overflow(prompt_tokens=counted, window=caps.window, asked=ask.shape.max_tokens, param=param)
    else:
        new = messages[-len(messages_from_items(ask.sent)) :] if history.counted else messages
        found = await aside(lambda: count_chat(ask.model, new, ask.tools), new)
        before = history.used_tokens if history.counted else 0
        counted, counted_by = before + found.tokens, found.method
    estimate, window = counted, caps.window
    prompt = ChatPrompt(
        messages=messages,
        tools=ask.tools,
        tool_choice=ask.tool_choice,
        parallel_tool_calls=ask.parallel_tool_calls,
        response_format=ask.response_format,
        template_options=ask.template_options,
        reasoning_effort=ask.reasoning_effort,
    )
    sampling = sampling_of(ask.shape, window or estimate + default_max_tokens + 1, estimate, default_max_tokens)
    check_sampling(sampling, ask.shape, caps, placement.replica.name)
    return Prepared(placement, "chat", prompt, sampling, estimate, window, counted_by=counted_by)


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
