"""The LongMemEval slice: one history of 745 messages with planted facts, for evaluation only.

Facts whose answer stands literally in the history, beside a word of the question, are looked for in what is kept. The
history is longer than the small model's window, so there is no reader, and no summary is asked of a model.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.compaction.context import Sizer, message
from bench.compaction.generate import Fact
from bench.compaction.ours import Ours
from bench.compaction.peers import DropOldest, Full, HeadTail, Method
from bench.compaction.score import STOP, Kept, clauses, normalised
from compression.budget import Policy
from compression.conversation import Turn
from gateway.sessions.tokens import ModelTokens

FILE = Path("longmemeval_derived") / "longmemeval_facts_190k.json"
SYSTEM = "You are a helpful assistant."
WINDOW = 32_768  # tokens: a compaction for each tenth of the history
RESERVE = 1_024
POINTS = (1, 5, 10)
WORD = re.compile(r"[a-z]{4,}")
COMMON = 0.25  # of the turns: a word in more of them names no subject
ASKING = STOP | set(
    re.findall(r"\w+", "what when where who how which long many much take did do does name kind current")
)


def data_folder() -> Path:
    """Where the shared data lies: `$TURNKEEP_DATA`, else beside the project."""
    return Path(os.environ.get("TURNKEEP_DATA") or Path(__file__).parents[3] / "shared" / "data")


@dataclass(frozen=True, slots=True)
class History:
    turns: tuple[Turn, ...]
    facts: tuple[Fact, ...]

    def told(self, turns: int) -> list[Fact]:
        return [fact for fact in self.facts if fact.turn < turns]


def load(file: Path) -> History:
    """Messages in a row of one role are one message's worth; a turn is what came and what answered it."""
    value = json.loads(file.read_text())
    turns: list[Turn] = []
    of_message: list[int] = []
    asked: list[str] = []
    answered: list[str] = []

    def close() -> None:
        number = len(turns) + 1
        inputs = tuple(message("user", text) for text in asked)
        outputs = tuple(message("assistant", text) for text in answered)
        turns.append(Turn(f"turn_{number:04}", None, number, "completed", inputs, outputs))
        asked.clear()
        answered.clear()

    for each in value["messages"]:
        if each["role"] == "user" and answered:
            close()
        (asked if each["role"] == "user" else answered).append(each["content"])
        of_message.append(len(turns))
    close()
    return History(tuple(turns), tuple(_facts(value["facts"], turns, of_message)))


def _facts(values: Sequence[dict[str, Any]], turns: Sequence[Turn], of_message: Sequence[int]) -> Iterator[Fact]:
    """Those whose answer's words the history says near a word of the question that is not all over it."""
    spoken = Counter(
        word for turn in turns for word in set(re.findall(WORD, " ".join(item.text for item in turn.items).casefold()))
    )
    for value in values:
        answer = value["answer"].rstrip(".")
        if normalised(answer) in ("yes", "no") or value["question_type"] == "single-session-preference":
            continue  # what would say it, is not in the answer
        asked = dict.fromkeys(re.findall(WORD, value["question"].casefold()))
        keys = tuple(word for word in asked if word not in ASKING and spoken[word] <= COMMON * len(turns))
        at = value["literal_answer_at"] or value["approx_message"]
        near = range(max(0, of_message[at] - 2), min(len(turns), of_message[at] + 3))
        fact = Fact(value["fact_id"], "plain", True, of_message[at], "user", value["question"], answer, keys, (), "")
        for turn in sorted(near, key=lambda turn: abs(turn - fact.turn)):
            if says("\n".join(item.text for item in turns[turn].items), fact):
                yield replace(fact, turn=turn)
                break


def says(text: str, fact: Fact) -> bool:
    """The words of the answer and one of the subject's stand in three clauses in a row."""
    parts = clauses(text)
    return any(
        Kept(near.replace(". ", ", ")).connected(fact)
        for near in (", ".join(parts[at : at + 3]) for at in range(len(parts)))
    )


def history() -> History | None:
    """The slice, where it lies there."""
    file = data_folder() / FILE
    return load(file) if file.is_file() else None


async def measure(
    history: History | None,
    tokens: ModelTokens,
    most: int | None = None,
    late: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Facts lost by ours and by those of the others that ask no model, at equal kept tokens. `most`: compactions after
    which the rest of the history is left out; `late`: the time is up, and what is left is left out."""
    if history is None:
        return {"skipped": f"{FILE} is not in {data_folder()}"}
    sizer = Sizer(tokens, SYSTEM)
    ours = Ours("ours, extraction only", sizer, Policy(strategy="extract"), window=WINDOW, reserve=RESERVE)
    others: tuple[Method, ...] = (Full(sizer), DropOldest(sizer), HeadTail(sizer))
    rows: list[dict[str, Any]] = []
    made = 0
    for number in range(1, len(history.turns) + 1):
        turns = history.turns[:number]
        moment = await ours.step(turns)
        last = number == len(history.turns) or late()
        made += moment is not None
        if not (last or (moment is not None and made in POINTS)):
            continue
        facts = history.told(number)
        mine = ours.context(turns)
        contexts = {ours.name: mine, **{each.name: await each.compact(turns, mine.tokens) for each in others}}
        for name, context in contexts.items():
            rows.append(
                {
                    "method": name,
                    "compactions": made,
                    "turns": number,
                    "kept_tokens": context.tokens,
                    "facts": len(facts),
                    "lost": sum(not says(context.text, fact) for fact in facts),
                }
            )
        if made == most or late():
            break
    return {"compactions": made, "window": WINDOW, "reserve": RESERVE, "facts": len(history.facts), "rows": rows}
