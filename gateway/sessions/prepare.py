"""Decides how a turn goes out: which replica, by ids or by chat, with which prompt and sampling.

Everything that can be refused is refused here, before anything is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from compression.budget import answer_tokens
from engines.contract import Capabilities, ChatPrompt, IdsPrompt, Sampling
from gateway.errors import BadRequest, ContextTooLong, GatewayError, Unavailable
from gateway.fleet.chain import Chain
from gateway.fleet.fleet import Fleet
from gateway.fleet.outlook import Path
from gateway.fleet.placement import Placement
from gateway.fleet.replica import Replica
from gateway.sessions.answer import AnswerFormat
from gateway.sessions.command import Ask, grammar_of
from gateway.sessions.counting import count_chat
from gateway.sessions.demands import Suits, check_sampling, has_room, needs_chat, pictured, sampling_of, suiting
from gateway.sessions.failures import numbers_of, overflow
from gateway.sessions.history import History
from gateway.sessions.homes import place
from gateway.sessions.items import has_images, messages_from_items
from gateway.sessions.models import Models
from gateway.sessions.paths import prompt_path
from gateway.sessions.prompt import BuiltPrompt, aside, build, chat_messages
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.tool_choice import tool_grammar
from gateway.sessions.windows import window_at

Mode = Literal["ids", "chat"]


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
    path: Path | None = None  # the prompt, as placement sees it
    kept: Chain | None = None  # where the session's path stands before the answer


async def prepare(
    ask: Ask,
    history: History,
    *,
    fleet: Fleet,
    models: Models,
    session_name: str | None,
    default_max_tokens: int,
    param: str = "input",
    tenant_id: str = "",
    salt: str = "",
    placement: Placement | None = None,
) -> Prepared:
    """For the replica that `placement` names, or that is placed here: one that can do what is asked, and whose window
    leaves room for an answer; else the smaller one that was found first.

    Raises NotFound (model), Unavailable (no replica), QueueRefused (no place there even to wait), BadRequest (cannot
    be done; too long, with the numbers).
    """
    turn = _Turn(ask, history, fleet, models, session_name, default_max_tokens, param, tenant_id, salt)
    if placement is not None:
        return await _at(placement, turn, movable=False)
    placement = turn.placed(turn.suits(history.used_tokens if history.counted else 0))
    found: Prepared | ContextTooLong
    try:
        found = await _at(placement, turn, movable=True)
        tokens, window = found.prompt_tokens, found.window
    except ContextTooLong as error:
        found, (tokens, window) = error, numbers_of(error)
    if has_room(window, tokens, ask.shape.max_tokens, default_max_tokens):
        return _unless_too_long(found)
    suits = turn.suits(tokens)
    try:
        placement = turn.placed(suits)
    except GatewayError:
        return _unless_too_long(found)
    if not suits(placement.replica):
        return _unless_too_long(found)
    return await _at(placement, turn, movable=True)


def _unless_too_long(found: Prepared | ContextTooLong) -> Prepared:
    if isinstance(found, ContextTooLong):
        raise found
    return found


@dataclass(frozen=True, slots=True)
class _Turn:
    """What `prepare` was given."""

    ask: Ask
    history: History
    fleet: Fleet
    models: Models
    session_name: str | None
    default_max_tokens: int
    param: str
    tenant_id: str
    salt: str

    def suits(self, prompt_tokens: int) -> Suits:
        return suiting(
            self.ask,
            self.history,
            self.models,
            prompt_tokens=prompt_tokens,
            default_max_tokens=self.default_max_tokens,
        )

    def placed(self, suits: Suits) -> Placement:
        return place(self.ask.model, self.history, self.fleet, tenant_id=self.tenant_id, key=self.key(b""), suits=suits)

    def key(self, else_: bytes) -> bytes:
        """What the ring knows the session by."""
        return self.session_name.encode() if self.session_name is not None else else_


async def _at(placement: Placement, turn: _Turn, *, movable: bool) -> Prepared:
    ask, history, models = turn.ask, turn.history, turn.models
    caps = placement.replica.capabilities
    assert caps is not None
    tokens = models.by_ids(ask.model, placement.replica)
    format = models.format(tokens) if tokens is not None else None
    if tokens is None or format is None or needs_chat(ask, history, format, caps):
        _check_chat(ask, caps, history, placement.replica, tokens, models)
        counting = models.tokens(ask.model, at=placement.replica.name)
        return await _by_chat(turn, placement, caps, counting)
    prepared = await _by_ids(turn, placement, tokens, format, caps)
    assert prepared.built is not None
    path, kept = await prompt_path(prepared.built, history, salt=turn.salt, model=ask.model)
    prepared = replace(prepared, path=path, kept=kept)
    if not movable or placement.reason == "pinned":
        return replace(prepared, placement=replace(placement, expected_cached_tokens=_held(placement, path)))
    return _where_cheapest(prepared, turn, path)


def _where_cheapest(prepared: Prepared, turn: _Turn, path: Path) -> Prepared:
    """The same prompt, at the cheapest of the replicas that read the same ids and can do what was asked."""
    ask, models, placement = turn.ask, turn.models, prepared.placement
    answered = turn.history.answered(ask.model)

    def fits(replica: Replica) -> bool:
        caps = replica.capabilities
        if caps is None or models.by_ids(ask.model, replica) is not prepared.tokens:
            return False
        if answered is not None and replica.fingerprint(ask.model) != placement.fingerprint:
            return False  # the prompt was made for this model
        if replica is placement.replica:
            return True
        window = window_at(ask.model, replica, models) or prepared.prompt_tokens + prepared.sampling.max_tokens
        room = answer_tokens(window, prepared.prompt_tokens, ask.shape.max_tokens, turn.default_max_tokens)
        if room != prepared.sampling.max_tokens or caps.takes_shift != _caps(prepared).takes_shift:
            return False
        try:
            check_sampling(prepared.sampling, ask.shape, caps, replica.name)
        except BadRequest:
            return False
        return True

    among = frozenset(r.name for r in turn.fleet if r.serves(ask.model) and fits(r))
    key = turn.key(path.end.key)
    found = place(ask.model, turn.history, turn.fleet, tenant_id=turn.tenant_id, key=key, path=path, among=among)
    if placement.reason == "pin_unfit":
        found = replace(found, reason="pin_unfit")
    return replace(prepared, placement=found, window=window_at(ask.model, found.replica, models))


def _held(placement: Placement, path: Path) -> int:
    """What was expected of the path before, now that the prompt is known: no more than the prompt has in common with
    it."""
    return min(placement.expected_cached_tokens, path.base_tokens)


def _caps(prepared: Prepared) -> Capabilities:
    caps = prepared.placement.replica.capabilities
    assert caps is not None
    return caps


def _check_chat(
    ask: Ask, caps: Capabilities, history: History, replica: Replica, tokens: ModelTokens | None, models: Models
) -> None:
    if pictured(ask, history) and not (caps.takes_chat and caps.takes_images):
        raise BadRequest(
            f"{ask.model} on {replica.name} takes no images", code="unsupported_parameter", param="messages"
        )
    if not caps.takes_chat:
        why = models.problems.get(ask.model, "its tokenizer is still being loaded")
        raise Unavailable(f"{replica.name} takes only token ids, and {why}", retry_after_s=1.0)


async def _by_ids(
    turn: _Turn, placement: Placement, tokens: ModelTokens, format: AnswerFormat, caps: Capabilities
) -> Prepared:
    ask = turn.ask
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
    changed = placement.changed_from is not None
    built = await build(
        tokens,
        ask,
        turn.history.head,
        session=turn.session_name,
        model_changed=changed,
        marked=(caps.takes_bits or caps.retains) and turn.session_name is not None,
    )
    window = min(tokens.window, caps.window or tokens.window)
    if built.ids.num_tokens >= window:
        raise overflow(prompt_tokens=built.ids.num_tokens, window=window, asked=ask.shape.max_tokens, param=turn.param)
    grammar = grammar_of(ask.response_format) or tool_grammar(tokens, ask.tools, ask.tool_choice)
    sampling = sampling_of(
        ask.shape, window, built.ids.num_tokens, turn.default_max_tokens, stop_ids=tokens.stop_ids, grammar=grammar
    )
    check_sampling(sampling, ask.shape, caps, placement.replica.name)
    return Prepared(
        placement, "ids", built.ids, sampling, built.ids.num_tokens, window, tokens=tokens, format=format, built=built
    )


async def _by_chat(turn: _Turn, placement: Placement, caps: Capabilities, tokens: ModelTokens | None) -> Prepared:
    ask, history, default_max_tokens = turn.ask, turn.history, turn.default_max_tokens
    folded = await history.head.load_items(tokens.placement if tokens is not None else "exchange", ask.old_reasoning)
    messages = chat_messages(ask, folded)
    pictured = has_images((*folded.items, *ask.sent))
    if tokens is not None and not pictured:
        counted = await aside(lambda: tokens.count_messages(messages, tools=ask.tools), messages)
        counted_by = "the model's own template"
        if caps.window is not None and counted >= caps.window:
            raise overflow(prompt_tokens=counted, window=caps.window, asked=ask.shape.max_tokens, param=turn.param)
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
