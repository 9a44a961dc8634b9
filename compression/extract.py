"""A summary without a model: the clauses that tell most for each token, in order, with who said them.

Also `merge`, which makes one text of several older summaries. Calls `count` a handful of times whatever the length of
the conversation, since it may be a real tokenizer.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from compression.change import Changes, superseded
from compression.clauses import Clause, ClauseKind, clauses_of
from compression.conversation import Turn
from compression.guard import Fact, Haystack, Ledger, facts_in
from compression.salience import Option, options
from compression.statements import Reader, Role, Said, Statement, statements_of
from compression.transcript import elide, mask
from compression.words import Vocabulary, language_of, normalise

__all__ = ["Extraction", "choose", "elide", "extract", "mask", "merge", "statements_in"]

Count = Callable[[str], int]
ROUNDS = 5  # of choosing against the real count
CALIBRATION = 60  # clauses: so few are counted one by one, of more the first are counted to scale an estimate
FULL = 0.95  # of the budget used is full enough
FLOOR = 0.12  # worth for each token; what tells less is left out though it would fit
LABEL_COST = 3.0  # tokens of "User: " and the line end
POOL = 8.0  # times the budget: what is looked at closely


@dataclass(frozen=True, slots=True)
class Extraction:
    """`kept` and `lost` together are the ledger of the turns."""

    text: str
    kept: tuple[Fact, ...]
    lost: tuple[Fact, ...]


def extract(turns: Sequence[Turn], *, budget_tokens: int, count: Count) -> Extraction:
    """The most telling clauses of the turns, at most `budget_tokens` tokens by `count`."""
    statements = statements_of(turns)
    changed = superseded(statements)
    text = choose(statements, budget_tokens=budget_tokens, count=count, changed=changed)
    ledger = Ledger(facts_in(statements, changed))
    return Extraction(text, ledger.kept(text), ledger.missing(text))


def merge(texts: Sequence[str], *, budget_tokens: int, count: Count) -> str:
    """One summary of several, oldest first: no sentence twice, newest values, at most `budget_tokens` tokens."""
    return choose(statements_in(texts), budget_tokens=budget_tokens, count=count, grouped=True)


_LINE = re.compile(r"^(User|Assistant|System|Reasoning|Tool(?: [\w.\-]{1,60})?|Call(?: [\w.\-]{1,60})?): (.*)$")


_FIELD = re.compile(r"^[\w.\-]{1,60}: ")


def statements_in(texts: Sequence[str]) -> list[Statement]:
    """Summaries read back into statements: ours by their speaker lines, a model's as plain sentences."""
    reader = Reader(german=language_of(" ".join(texts)[:6000]) == "de", chosen=True)
    for number, text in enumerate(texts):
        for line in text.splitlines():
            for said in _said(line):
                reader.read(said, f"segment {number}", number)
    return reader.statements


def _said(line: str) -> Iterator[Said]:
    match = _LINE.match(line)
    if match is None:
        for clause in clauses_of(line):
            yield Said(clause, "summary", "")
        return
    speaker, rest = match.groups()
    role: Role = speaker.partition(" ")[0].lower()  # type: ignore[assignment]
    for piece in rest.split("; "):
        if text := piece.strip():
            yield Said(Clause(text, _kind(text, role), False), role, speaker)


def _kind(piece: str, role: Role) -> ClauseKind:
    if role in ("tool", "call") and _FIELD.match(piece):
        return "field"
    return "question" if piece.rstrip().endswith(("?", "？")) else "statement"


def choose(
    statements: Sequence[Statement],
    *,
    budget_tokens: int,
    count: Count,
    covered: str = "",
    grouped: bool = False,
    changed: Changes | None = None,
    floor: float = FLOOR,
) -> str:
    """The statements worth most under the budget, rendered. What stands in `covered` is worth nothing again; `grouped`
    brings together what each speaker said, in the order of their first, which saves naming them again and again."""
    if budget_tokens <= 0 or not statements:
        return ""
    pool = options(statements, superseded(statements) if changed is None else changed)
    known = _known(covered, pool)
    if len(pool) <= CALIBRATION:
        pool = [replace(option, price=count(option.text) + 1.0) for option in pool]
        allowed = float(budget_tokens)
    else:
        sample = pool[:CALIBRATION]
        scale = count("\n".join(option.text for option in sample)) / sum(option.price for option in sample)
        allowed = budget_tokens / max(0.02, scale)
    best, best_worth = "", 0.0
    for _ in range(ROUNDS):
        tried, worth = _greedy(pool, allowed, known, grouped, floor)
        text = render(tried, grouped)
        real = count(text)
        if real <= budget_tokens and worth > best_worth:
            best, best_worth = text, worth
        if real > budget_tokens:
            allowed = min(0.97 * allowed, _cost(tried, grouped) * budget_tokens / real)
        elif real < FULL * budget_tokens and len(tried) < len(statements):
            allowed = max(1.2 * allowed, min(2 * allowed, _cost(tried, grouped) * budget_tokens / max(1, real)))
        else:
            break
    return best or _shrink(_greedy(pool, allowed, known, grouped, floor)[0], budget_tokens, count, grouped)


def _known(covered: str, pool: Sequence[Option]) -> set[str]:
    if not covered:
        return set()
    there = Haystack(covered)
    known = {term.stem for term in Vocabulary().terms(covered)}
    known.update(key for option in pool for key, worth in option.units if worth > 1.5 and there.has(key))
    return known


def _greedy(
    pool: Sequence[Option], budget: float, known: set[str], grouped: bool, floor: float
) -> tuple[list[Option], float]:
    """Lazy greedy over worth for each token: what a choice has told lowers the others, so they are weighed again."""
    ranked = sorted(pool, key=lambda option: (-option.worth / option.cost, option.statement.index))
    looked, total = [], 0.0
    for option in ranked:
        if total > POOL * budget + 200:
            break
        looked.append(option)
        total += option.price
    heap = [(-option.worth / option.cost, number) for number, option in enumerate(looked)]
    heapq.heapify(heap)
    told = set(known)
    chosen: dict[int, Option] = {}
    labels: set[tuple[int, str]] = set()
    spent, worth, misses = 0.0, 0.0, 0
    while heap and misses < 60:
        rank, number = heapq.heappop(heap)
        option = looked[number]
        before = chosen.get(option.statement.index)
        if before is not None and len(before.text) >= len(option.text):
            continue
        gain = option.gain(told)
        label = _label(option, grouped)
        named = 0.0 if label in labels else LABEL_COST
        cost = option.cost - (before.cost if before else 0.0) + named
        price = option.price - (before.price if before else 0.0) + named
        now = -gain / max(cost, 0.5)
        if heap and now > heap[0][0] + 1e-12 and now > rank + 1e-12:
            heapq.heappush(heap, (now, number))
            continue
        if gain < floor * max(cost, 0.5):
            break
        if spent + price > budget:
            misses += 1
            continue
        chosen[option.statement.index] = option
        labels.add(label)
        told.update(key for key, _ in option.units)
        spent += price
        worth += gain
    return [chosen[index] for index in sorted(chosen)], worth


def _label(option: Option, grouped: bool) -> tuple[int, str]:
    return (0 if grouped else option.statement.turn), option.statement.speaker


def _cost(chosen: Sequence[Option], grouped: bool) -> float:
    labels = {_label(option, grouped) for option in chosen}
    return sum(option.price for option in chosen) + LABEL_COST * len(labels)


def render(chosen: Sequence[Option], grouped: bool = False) -> str:
    """One line for each change of speaker, statements joined by "; "."""
    if grouped:
        first: dict[str, int] = {}
        for option in chosen:
            first.setdefault(option.statement.speaker, len(first))
        chosen = sorted(chosen, key=lambda option: (first[option.statement.speaker], option.statement.index))
    lines: list[str] = []
    speaker: str | None = None
    for option in chosen:
        text = option.text.replace("; ", ", ").replace("\n", " ")
        if option.statement.speaker == speaker and speaker != "":
            lines[-1] += f"; {text}"
        elif option.statement.speaker == "":
            lines.append(text)
        else:
            lines.append(f"{option.statement.speaker}: {text}")
        speaker = option.statement.speaker
    return "\n".join(lines)


def _shrink(chosen: Sequence[Option], budget_tokens: int, count: Count, grouped: bool) -> str:
    """The last resort where the estimate would not meet the real count: halve until it fits."""
    kept = sorted(chosen, key=lambda option: -option.worth / option.cost)
    while kept:
        kept = kept[: len(kept) // 2]
        text = render(sorted(kept, key=lambda option: option.statement.index), grouped)
        if kept and count(text) <= budget_tokens:
            return text
    return ""


def coverage(texts: Sequence[str], statements: Sequence[Statement], changed: Changes) -> list[float]:
    """Which share of what the statements tell stands in each text, by worth; 1.0 where they tell nothing."""
    worth: dict[str, float] = {}
    for option in options(statements, changed):
        for key, value in option.units:
            worth[key] = max(value, worth.get(key, 0.0))
    total = sum(worth.values())
    return [_told(text, worth) / total if total else 1.0 for text in texts]


def _told(text: str, worth: Mapping[str, float]) -> float:
    there, stems = Haystack(text), {term.stem for term in Vocabulary().terms(text)}
    return sum(value for key, value in worth.items() if key in stems or there.has(normalise(key)))
