"""A turn's state as bytes, from a gateway that stops to one that goes on with it; and the taking.

    stops     pump stopped -> events stored -> offered ... taken: readers are told to ask elsewhere
    goes on               finds the offer -> takes it -> reads the answer again from its ids -> generates what is left

What was generated and told is carried whole, so the answer goes on as after the loss of a replica (`continuation`).
Only turns of a session that went out as ids are offered. Read by the same or another version of the gateway: one that
does not know the state's version leaves the offer alone.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import structlog

from compression.conversation import Item
from engines.contract import Base, IdsPrompt, RequestRefused, Sampling
from engines.local.checks import sampling as read_sampling
from engines.local.wire import sampling_fields
from gateway.errors import GatewayError
from gateway.fleet.identity import ModelIdentity
from gateway.fleet.placement import Placement
from gateway.limits.admission import Admission
from gateway.sessions.command import Ask, Input, TurnCommand
from gateway.sessions.continuation import Begun
from gateway.sessions.history import History, load
from gateway.sessions.homes import place
from gateway.sessions.paths import prompt_path
from gateway.sessions.prepare import Prepared
from gateway.sessions.prompt import BuiltPrompt, Marks
from gateway.sessions.reader import AnswerReader
from gateway.sessions.room import TurnRoom
from gateway.sessions.tokens import ModelTokens
from gateway.store.handovers import Offer
from gateway.store.records import TurnRecord

VERSION = 1
TAKE_EVERY_S = 0.25  # how often a gateway looks for offers
PLAIN = (  # fields of a Handover that are JSON as they stand
    *("model", "num_events", "stored_events", "window", "system", "tools", "tool_choice", "view", "model_fingerprint"),
    *("replica", "epoch", "tokenizer", "moves", "handed", "move_head", "param", "notes"),
)
IDENTITIES = ("answered", "changed_from")  # fields that are a ModelIdentity or None, which is left out
MOST_VOCAB = 1 << 31  # the sampling was checked where it was asked for

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Handover:
    """A running turn, as far as the store does not know it."""

    model: str
    begun: Begun
    call_ids: Mapping[int, str]  # of the tool calls that were told
    num_events: int  # that were emitted
    stored_events: bool  # they are in the store, where a reader may resume them
    prompt: IdsPrompt  # `whole` is put together anew from the store
    built: BuiltPrompt
    sampling: Sampling
    window: int | None
    system: str | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: Any
    view: str
    model_fingerprint: str
    replica: str
    epoch: str | None
    tokenizer: str | None  # the replica's, where it tells
    answered: ModelIdentity | None  # who began the answer; None: an older gateway does not say
    changed_from: ModelIdentity | None  # who answered the path before, where that was another
    moves: list[dict[str, Any]]
    handed: Sequence[Mapping[str, Any]]  # from (a gateway), at_tokens
    move_head: bool
    param: str
    notes: Mapping[str, Any] = field(default_factory=dict)
    min_bits: int = 0  # that was asked for
    key_id: str = ""  # of the API key that asked
    admission: Admission | None = None  # what it holds of its tenant's limits

    def to_bytes(self) -> bytes:
        prompt, built = self.prompt, self.built
        base = {"length": prompt.base.length, "digest": prompt.base.digest.hex()} if prompt.base is not None else None
        told = {
            "version": VERSION,
            "ids": _text(self.begun.ids),
            "told": self.begun.told,
            "call_ids": {str(index): id for index, id in self.call_ids.items()},
            "delta": _text(prompt.delta),
            "num_tokens": prompt.num_tokens,
            "session": prompt.session,
            "base": base,
            "kept_ids": None if built.kept_ids == prompt.delta else _text(built.kept_ids),
            "fingerprint": built.fingerprint,
            "base_tokens": built.base_tokens,
            "kept_digest": built.kept_digest.hex(),
            "kept_tokens": built.kept_tokens,
            "report": built.report,
            "marks": built.marks.as_json(),
            "min_bits": self.min_bits,
            "key_id": self.key_id,
            "admission": self.admission.as_json() if self.admission is not None else None,
            "sampling": sampling_fields(self.sampling),
            **{
                name: {"fingerprint": who.fingerprint}
                for name in IDENTITIES
                if (who := getattr(self, name)) is not None
            },
        }
        return orjson.dumps(told | {name: getattr(self, name) for name in PLAIN})

    @classmethod
    def from_bytes(cls, state: bytes) -> Handover | None:
        """None: of a version that is not known here. Raises ValueError, KeyError, TypeError for what is no state."""
        told = orjson.loads(state)
        if told["version"] != VERSION:
            return None
        delta, base = b64decode(told["delta"]), told["base"]

        async def whole() -> bytes:
            return delta

        marks = Marks.of_json(told.get("marks"))
        prompt = IdsPrompt(
            delta,
            told["num_tokens"],
            whole,
            told["session"],
            Base(base["length"], bytes.fromhex(base["digest"])) if base is not None else None,
            system_tokens=marks.system_tokens,
            recent_from=marks.recent_from,
        )
        built = BuiltPrompt(
            ids=prompt,
            fingerprint=told["fingerprint"],
            base_tokens=told["base_tokens"],
            kept_ids=delta if told["kept_ids"] is None else b64decode(told["kept_ids"]),
            kept_digest=bytes.fromhex(told["kept_digest"]),
            kept_tokens=told["kept_tokens"],
            report=told["report"],
            marks=marks,
        )
        return cls(
            begun=Begun(b64decode(told["ids"]), told["told"]),
            call_ids={int(index): id for index, id in told["call_ids"].items()},
            prompt=prompt,
            built=built,
            sampling=read_sampling(told["sampling"], MOST_VOCAB),
            answered=_identity(told.get("answered")),
            changed_from=_identity(told.get("changed_from")),
            min_bits=told.get("min_bits", 0),
            key_id=told.get("key_id", ""),
            admission=Admission.of_json(held) if (held := told.get("admission")) is not None else None,
            **{name: told[name] for name in PLAIN},
        )


def _identity(told: Mapping[str, Any] | None) -> ModelIdentity | None:
    return ModelIdentity(told["fingerprint"]) if told is not None else None


def _text(raw: bytes) -> str:
    return b64encode(raw).decode()


def handover_of(
    command: TurnCommand,
    history: History,
    prepared: Prepared,
    reader: AnswerReader,
    placement: Placement,
    *,
    moves: list[dict[str, Any]],
    handed: Sequence[Mapping[str, Any]],
    num_events: int,
    stored_events: bool,
    admission: Admission | None = None,
) -> Handover | None:
    """What another gateway needs to go on exactly; None where it could not."""
    prompt, ask, caps = prepared.prompt, command.ask, placement.replica.capabilities
    if not isinstance(prompt, IdsPrompt) or prepared.built is None or prepared.tokens is None:
        return None
    if caps is None or not caps.returns_ids:
        return None
    return Handover(
        model=ask.model,
        begun=reader.begun,
        call_ids=reader.call_ids,
        num_events=num_events,
        stored_events=stored_events,
        prompt=prompt,
        built=prepared.built,
        sampling=prepared.sampling,
        window=prepared.window,
        system=ask.system,
        tools=ask.tools,
        tool_choice=ask.tool_choice,
        view=history.head.view,
        model_fingerprint=prepared.tokens.fingerprint(),
        replica=placement.replica.name,
        epoch=placement.epoch,
        tokenizer=caps.tokenizer,
        answered=ModelIdentity(prepared.placement.fingerprint),
        changed_from=prepared.placement.changed_from,
        moves=moves,
        handed=handed,
        move_head=command.move_head,
        param=command.param,
        notes=command.metadata,
        min_bits=ask.min_bits,
        key_id=command.key_id,
        admission=admission,
    )


@dataclass(frozen=True, slots=True)
class TakenUp:
    """A turn that another gateway began, ready to go on here."""

    handover: Handover
    command: TurnCommand
    history: History
    prepared: Prepared


def readable(offer: Offer) -> Handover | None:
    """What is offered; None where this version cannot read it."""
    try:
        return Handover.from_bytes(offer.state)
    except (ValueError, KeyError, TypeError, RequestRefused) as error:
        log.warning("an offered turn cannot be read", turn_id=offer.turn_id, reason=str(error))
        return None


def speaks(room: TurnRoom, handover: Handover) -> bool:
    """Whether some replica of this gateway serves the same model by the same ids."""
    return _tokens_of(room, handover) is not None


def _tokens_of(room: TurnRoom, handover: Handover) -> ModelTokens | None:
    model, now = handover.model, room.fleet.now()
    for replica in room.fleet:
        if not replica.serves(model) or not replica.available(now):
            continue
        tokens = room.models.by_ids(model, replica)
        if tokens is None or tokens.fingerprint() != handover.model_fingerprint:
            continue
        if handover.answered in (None, ModelIdentity(replica.fingerprint(model))):
            return tokens
    return None


async def take_up(room: TurnRoom, handover: Handover, record: TurnRecord) -> TakenUp:
    """The turn as it would stand here, had it begun here. Raises GatewayError, StoreUnavailable."""
    tokens = _tokens_of(room, handover)
    session = await room.store.get_session(record.tenant_id, record.session_id)
    if tokens is None or session is None:
        raise GatewayError("the turn that was taken over is gone")
    history = await load(room.store, session, record.turn.parent_id)
    history = replace(history, head=replace(history.head, view=handover.view))
    before = history.head.load_ids if handover.prompt.base is not None else None

    async def whole() -> bytes:
        return (await before() if before is not None else b"") + handover.prompt.delta

    prompt = replace(handover.prompt, whole=whole)
    built = replace(handover.built, ids=prompt)
    salt = room.cache_salt(record.tenant_id)
    path, kept = await prompt_path(built, history, salt=salt, model=record.model)
    at, answered = _pinned(history, handover), handover.answered
    placement = place(record.model, at, room.fleet, tenant_id=record.tenant_id, answered=answered)
    prepared = Prepared(
        replace(placement, fingerprint=(answered or placement).fingerprint, changed_from=handover.changed_from),
        "ids",
        prompt,
        handover.sampling,
        prompt.num_tokens,
        handover.window,
        tokens=tokens,
        format=room.models.format(tokens),
        built=built,
        path=path,
        kept=kept,
    )
    return TakenUp(handover, command_of(handover, record), history, prepared)


def _pinned(history: History, handover: Handover) -> History:
    """The replica that was at it has the prompt and the answer cached."""
    if history.last is None:
        return history
    at = {"replica": handover.replica, "epoch": handover.epoch}
    return replace(history, last=replace(history.last, placement=at))


def command_of(handover: Handover, record: TurnRecord) -> TurnCommand:
    ask = Ask(
        model=record.model,
        input=_inputs(record.turn.input),
        system=handover.system,
        tools=tuple(handover.tools),
        tool_choice=handover.tool_choice,
        min_bits=handover.min_bits,
    )
    return TurnCommand(
        tenant_id=record.tenant_id,
        ask=ask,
        key_id=handover.key_id,
        session_id=record.session_id,
        parent=record.turn.parent_id,
        idempotency_key=record.idempotency_key,
        request_hash=record.request_hash,
        on_disconnect=record.on_disconnect,
        persist_events=handover.stored_events,
        move_head=handover.move_head,
        metadata=handover.notes,
        param=handover.param,
    )


def _inputs(items: Sequence[Item]) -> tuple[Input, ...]:
    return tuple(Input(item) for item in items)
