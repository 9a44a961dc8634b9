"""Facts told in a chat's first turn, asked for after other turns, over full and over sealed pages.

    system | five facts | other turns | question | "Your dog is called" -> which of six names comes next?

The small model recalls little when it may say what it likes; with the answer's beginning given and six words to choose
from by the likelihood of their first token it is right four times in five. The facts lie behind the first unit, and far
before the tail: where pages are sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from bench.quant_scores import Scorer
from bench.quant_texts import texts
from bench.quant_windows import expected_units

QUESTIONS = {  # what is told, what is asked, how the answer begins, and the words that it may go on with
    "dog": (
        "My dog is called {}.",
        "What is my dog called?",
        "Your dog is called",
        "Max Luna Rocky Bella Cooper Daisy",
    ),
    "city": ("I live in {}.", "Which city do I live in?", "You live in", "Paris London Berlin Tokyo Chicago Madrid"),
    "colour": (
        *("My favourite colour is {}.", "What is my favourite colour?", "Your favourite colour is"),
        "blue red green yellow purple orange",
    ),
    "sister": (
        *("My sister's name is {}.", "What is my sister's name?", "Your sister's name is"),
        "Anna Maria Sarah Emma Lucy Julia",
    ),
    "job": ("I work as a {}.", "What do I work as?", "You work as a", "teacher nurse driver painter lawyer farmer"),
}
SYSTEM = (
    "You are a helpful assistant in a chat with one person. You listen to what the person tells you about themselves, "
    "you remember it, and you answer questions about it briefly and truthfully. You do not make anything up. When you "
    "are asked about something else, you explain it in plain words, as to a friend, and you keep to what is known. You "
    "never repeat the question, and you do not ask questions yourself."
)
TURNS = 3  # between telling and asking
WORDS = 75  # of each of their answers


@dataclass(frozen=True, slots=True)
class Chat:
    ids: list[int]  # up to where the question begins
    questions: tuple[tuple[list[int], tuple[int, ...], int], ...]  # ids, first tokens of the words, which is right


@dataclass(frozen=True, slots=True)
class Recalled:
    """Of the questions asked so far: `right`, and as the full pages had it: `same` first token, `same_choice`."""

    asked: int = 0
    right: int = 0
    same: int = 0
    same_choice: int = 0

    def plus(self, other: Recalled) -> Recalled:
        return Recalled(*(getattr(self, n) + getattr(other, n) for n in ("asked", "right", "same", "same_choice")))


def chats(tokenizer: Path, count: int) -> list[Chat]:
    encode = Tokenizer.from_file(str(tokenizer)).encode
    words = texts()["docstrings"].split()
    sentences = [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS, WORDS)]
    return [_chat(encode, Random(number), sentences) for number in range(count)]


def _chat(encode: Callable[..., Any], chance: Random, sentences: Sequence[str]) -> Chat:
    def ids(text: str) -> list[int]:
        return list(encode(text, add_special_tokens=False).ids)

    told = {kind: chance.choice(words.split()) for kind, (_, _, _, words) in QUESTIONS.items()}
    order = list(QUESTIONS)
    chance.shuffle(order)
    facts = " ".join(QUESTIONS[kind][0].format(told[kind]) for kind in order)
    text = f"{_said('system', SYSTEM)}{_said('user', facts)}{_said('assistant', 'Thank you, I will remember that.')}"
    for sentence in chance.sample(sentences, TURNS):
        text += _said("user", "Tell me something else.") + _said("assistant", sentence)
    asked = []
    for kind, (_, question, begun, words) in QUESTIONS.items():
        choices = tuple(ids(f" {word}")[0] for word in words.split())
        assert len(set(choices)) == len(choices), f"two words of {kind} begin alike"
        right = words.split().index(told[kind])
        asked.append((ids(f"{_said('user', question)}<|im_start|>assistant\n{begun}"), choices, right))
    return Chat(ids(text), tuple(asked))


def _said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def recall(number: int, chat: Chat, full: Scorer, sealing: Mapping[str, Scorer]) -> dict[str, Recalled]:
    """Ask one chat's questions at every scorer -> by policy, and `full`."""
    name = f"chat-{number}"
    for scorer in (full, *sealing.values()):
        scorer.run(name, chat.ids, 16)
        before = scorer.room().sealed_units
        if scorer is not full:
            scorer.run(name, chat.ids, 0)
            scorer.settle(before + expected_units(len(chat.ids) + 1))
    got = dict.fromkeys((*sealing, "full"), Recalled())
    for at, (ids, choices, right) in enumerate(chat.questions):
        prompt, session = chat.ids + ids, f"{name}-{at}"
        first: tuple[int, int] | None = None
        for policy, scorer in {"full": full, **sealing}.items():
            logs = scorer.score(session, prompt, len(prompt) - 1, 16 if policy == "full" else 0)[0]
            chosen = max(range(len(choices)), key=lambda i: float(logs[choices[i]]))
            first = first or (int(logs.argmax()), chosen)
            seen = Recalled(1, chosen == right, int(logs.argmax()) == first[0], chosen == first[1])
            got[policy] = got[policy].plus(seen)
            scorer.forget(session)
    for scorer in (full, *sealing.values()):
        scorer.forget(name)
    return got
