"""Long conversations with planted facts, from a seed: what is said, and what may be asked about it later.

Facts stand inside ordinary messages, between questions, small talk and advice that nobody will ask for. A superseded
fact is told twice, the second time with another value; the fact counts from then on. A tool's result stands in the JSON
of a function_call_output that the turn after the call brings in, as a client does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from random import Random

from bench.compaction.bank import Topic, amount, count, day, identifier, path, reference, url
from bench.compaction.chat import CJK_CHAT, SMALL_TALK, filled, own_exchanges, public_exchanges
from bench.compaction.ruled import RULED
from bench.compaction.score import Kept, normalised
from bench.compaction.unruled import UNRULED
from compression.conversation import Item, Turn

Topics = Mapping[str, tuple[Topic, ...]]
SYSTEM = (
    "You are a patient assistant. You help one person with the household, travel, work and everything that comes up."
    " Remember what you are told about their life, and answer in the language you are asked in."
)
IDENTIFIERS: frozenset[object] = frozenset({reference, path, url, identifier})  # makers of identifiers
SUPERSEDED_AFTER = (4, 30)  # turns between the old value and the new one
NOISE_CALL = 0.04  # of turns: a tool call that nobody asks about later
NOTED = ("Noted.", "Got it.", "I will keep that in mind.", "Thank you for telling me.", "All right.")
ASKED = ("Could you look that up for me?", "Please check where things stand.", "What does the system say today?")
DONE = ("The look-up is through, tell me if you need more of it.", "I have checked; it is as you see above.")
TOOLS = ("lookup_order", "check_account", "get_record", "query_inventory")


@dataclass(frozen=True, slots=True)
class Fact:
    """`turn`: index of the turn in which its value was told. `choices`: three values of the same kind, never told
    (the old value is the first of them, where there is one)."""

    id: str
    kind: str
    ruled: bool
    turn: int
    by: str
    ask: str
    value: str
    keys: tuple[str, ...]
    choices: tuple[str, ...]
    statement: str
    old: str | None = None
    language: str = "en"
    identifier: bool = False  # an id, a path, an address, a name in code


@dataclass(frozen=True, slots=True)
class Conversation:
    seed: int
    source: str  # of its chat: "own", "mtbench101"
    system: str
    turns: tuple[Turn, ...]
    facts: tuple[Fact, ...]

    def told(self, turns: int) -> list[Fact]:
        """The facts whose value stands in the first `turns` turns."""
        return [fact for fact in self.facts if fact.turn < turns]


@dataclass(slots=True)
class _Said:
    """One exchange in the making."""

    user: list[str]
    answer: str
    told: list[str] = field(default_factory=list)  # of the user's part: what was planted
    call: tuple[str, str, str] | None = None  # tool, arguments, output


def generate(
    seed: int,
    *,
    turns: int = 200,
    density: float = 0.6,
    dialogues: Sequence[list[tuple[str, str]]] | None = None,
    ruled: Topics = RULED,
    unruled: Topics = UNRULED,
) -> Conversation:
    """`density`: facts a turn, until every topic was told once. `dialogues`: what to talk about; None: our own."""
    random = Random(seed)
    source = own_exchanges(random) if dialogues is None else public_exchanges(random, list(dialogues))
    said = [_Said([question], answer) for question, answer in islice(source, turns)]
    for each in said:
        small = [filled(random, one) for one in random.sample(SMALL_TALK, random.choice((0, 1, 1, 2)))]
        each.user = _shuffled(random, [*each.user, *small])
    heard = normalised(" ".join(chain.from_iterable((*each.user, each.answer) for each in said)))
    facts: list[Fact] = []
    values: set[str] = set()
    queue = _topics(random, chain(ruled.items(), unruled.items()))
    for at, each in enumerate(said):
        if random.random() < density:
            if (next_up := next(queue, None)) is not None:
                kind, topic = next_up
                told = _tell(random, kind, topic, said, at, heard, values)
                facts += [replace(fact, ruled=kind in ruled) for fact in told]
        elif random.random() < NOISE_CALL:
            each.call = _call(random, {})
    made = tuple(_turns(said))
    return Conversation(
        seed,
        "own" if dialogues is None else "mtbench101",
        SYSTEM,
        made,
        tuple(_told_once(_renumbered(facts, said), made)),
    )


def _topics(random: Random, given: Iterable[tuple[str, tuple[Topic, ...]]]) -> Iterator[tuple[str, Topic]]:
    """Every topic once, kinds taking turns, so that each kind is told early and late."""
    kinds = {kind: random.sample(topics, len(topics)) for kind, topics in given}
    while kinds:
        for kind in random.sample(list(kinds), len(kinds)):
            yield kind, kinds[kind].pop()
            if not kinds[kind]:
                del kinds[kind]


def _tell(
    random: Random, kind: str, topic: Topic, said: list[_Said], at: int, heard: str, values: set[str]
) -> list[Fact]:
    """Put the topic into the exchange at `at` (and a later one, if superseded); none where it would find no room."""
    told = at
    old = None
    if topic.first:
        told = at + random.randint(*SUPERSEDED_AFTER)
        if told >= len(said):
            return []
        if (old := _fresh(random, topic, heard, values)) is None:
            return []
    value = _fresh(random, topic, heard, values)
    if value is None:
        return []
    if old is not None:
        _say(random, said[at], topic, random.choice(topic.first).format(v=old))
    if topic.by == "tool":
        (field,) = topic.say
        said[told].call = _call(random, {field: value})
        said[told].user.append(random.choice(ASKED))
        statement = f"{field.replace('_', ' ')}: {value}"
    else:
        statement = random.choice(topic.say).format(v=value, old=old)
        _say(random, said[told], topic, statement)
    choices = _choices(random, topic, value, old)
    id = f"{kind}-{topic.keys[0]}"
    exact = topic.values in IDENTIFIERS if callable(topic.values) else False
    return [
        Fact(
            id,
            kind,
            True,
            told,
            topic.by,
            topic.ask,
            value,
            topic.keys,
            choices,
            statement,
            old,
            topic.language,
            exact,
        )
    ]


def _fresh(random: Random, topic: Topic, heard: str, values: set[str]) -> str | None:
    """A value that nothing else in the conversation holds."""
    for _ in range(50):
        value = topic.value(random)
        plain = normalised(value)
        if plain not in heard and not any(plain in other or other in plain for other in values):
            values.add(plain)
            return value
    return None


def _say(random: Random, said: _Said, topic: Topic, sentence: str) -> None:
    if topic.by == "assistant":
        said.answer = random.choice((f"{sentence} {said.answer}", f"{said.answer} {sentence}"))
        return
    if topic.language != "en":
        question, said.answer = random.choice(CJK_CHAT[topic.language])
        said.user = _shuffled(random, [question, *said.told])
    said.told.append(sentence)
    said.user.insert(random.randint(0, len(said.user)), sentence)
    if random.random() < 0.3 and topic.language == "en":
        said.answer = f"{random.choice(NOTED)} {said.answer}"


def _choices(random: Random, topic: Topic, value: str, old: str | None) -> tuple[str, ...]:
    others: list[str] = [old] if old is not None else []
    pool = [] if callable(topic.values) else random.sample(topic.values, len(topic.values))
    while len(others) < 3:
        other = topic.value(random) if callable(topic.values) else pool.pop()
        if other != value and other not in others:
            others.append(other)
    return tuple(others)


def _call(random: Random, fields: dict[str, str]) -> tuple[str, str, str]:
    """A tool's call and its answer: the fields among others that nobody asks about."""
    noise = {
        "request": reference(random),
        "checked_at": day(random),
        "rows": int(count(random)),
        "balance": amount(random),
        "region": random.choice(("north", "harbour", "inland", "upper valley")),
        "retries": random.randint(0, 9),
    }
    result = dict(random.sample(list((noise | fields).items()), len(noise) + len(fields)))
    arguments = json.dumps({"key": reference(random)})
    return random.choice(TOOLS), arguments, json.dumps(result, ensure_ascii=False)


def _shuffled(random: Random, parts: list[str]) -> list[str]:
    return random.sample(parts, len(parts))


def _turns(said: Sequence[_Said]) -> Iterator[Turn]:
    """A tool's answer comes in with a turn of its own, after the turn whose output is the call."""
    seq = 0
    for each in said:
        asked = _message("user", " ".join(each.user))
        if each.call is None:
            seq += 1
            yield _turn(seq, (asked,), (_message("assistant", each.answer),))
            continue
        name, arguments, output = each.call
        call_id = f"call_{seq + 1:05}"
        call = Item(
            "function_call", {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        )
        came = Item("function_call_output", {"type": "function_call_output", "call_id": call_id, "output": output})
        yield _turn(seq + 1, (asked,), (call,))
        seq += 2
        yield _turn(seq, (came,), (_message("assistant", DONE[seq % 2]),))


def _renumbered(facts: Sequence[Fact], said: Sequence[_Said]) -> Iterator[Fact]:
    """From exchanges to turns: an exchange with a tool call is two."""
    before = [0]
    for each in said:
        before.append(before[-1] + (1 if each.call is None else 2))
    for fact in facts:
        yield replace(fact, turn=before[fact.turn] + (fact.by == "tool"))


def _told_once(facts: Iterable[Fact], turns: Sequence[Turn]) -> Iterator[Fact]:
    """Less the few whose value chance has put into another turn too."""
    texts = ["\n".join(item.text for item in turn.items) for turn in turns]
    for fact in facts:
        if not Kept("\n".join((*texts[: fact.turn], *texts[fact.turn + 1 :]))).survives(fact):
            yield fact


def _turn(seq: int, input: tuple[Item, ...], output: tuple[Item, ...]) -> Turn:
    parent = f"turn_{seq - 1:04}" if seq > 1 else None
    return Turn(f"turn_{seq:04}", parent, seq, "completed", input, output)


def _message(role: str, text: str) -> Item:
    return Item("message", {"type": "message", "role": role, "content": text})
