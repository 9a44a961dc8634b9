"""What a template writes after an answer, without rendering the history: found on a stand-in, proven on samples.

    stand-in    user | answer = sentinel |closing, new messages, generation prompt
                                         `------------ the continuation --------'
    proof       history + generation prompt          = P
                history + answer + new messages + .. = P | answer | the same continuation     for every sample history

A template that rewrites old turns (drops their reasoning, moves the tools to the last user message) fails the proof
for those shapes and is rendered whole instead. Nothing here assumes a family. Knows no tokens beyond the name of the
control token that ends an answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.sessions.template import Message, Rendered, TemplateRefused

CALL_NAME = "look_up"
OTHER_NAME = "unrelated"


@dataclass(frozen=True, slots=True)
class Tail:
    """How a token path ends: an answer, and what there was in it.

    `reasoning`: an answer of this path, since it was last rendered whole, holds reasoning. `calls`: the last answer's
    tool calls in chat-completions form, where the caller has them (some templates repeat a call's name with its
    result). `open_answer`: the generated ids did not end in the end-of-turn id. `foreign_end`: they ended in another
    stop id than the template's own. `system`: the path begins with a system message, or may.
    """

    path_tokens: int
    digest: bytes
    open_answer: bool
    reasoning: bool
    tool_calls: bool
    calls: tuple[Mapping[str, Any], ...] = ()
    foreign_end: bool = False
    system: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a continuation the template might look at. `named`: the calls' names are known."""

    open_answer: bool
    reasoning: bool
    tool_calls: bool
    named: bool
    system: bool
    roles: tuple[str, ...]

    @classmethod
    def of(cls, tail: Tail, messages: Sequence[Message]) -> Shape:
        results = [message for message in messages if message.get("role") == "tool"]
        named = bool(tail.calls) or all(message.get("name") for message in results)
        roles = tuple(str(message.get("role")) for message in messages)
        return cls(tail.open_answer, tail.reasoning, tail.tool_calls, named, tail.system, roles)


class Render(Protocol):
    """Messages to text with the tools and options of one prompt; raises TemplateRefused."""

    def __call__(self, messages: Sequence[Message]) -> Rendered: ...


class Cut(Protocol):
    """First control token of a text: start, end, name."""

    def __call__(self, rendered: Rendered) -> tuple[int, int, str] | None: ...


@dataclass(frozen=True, slots=True)
class Continuation:
    """Text that follows an answer. `closed`: its first control token is the one that the answer ended with."""

    rendered: Rendered
    closed: bool


def continuation(
    render: Render, cut: Cut, end: str | None, shape: Shape, messages: Sequence[Message], calls: Sequence[Message] = ()
) -> Continuation | None:
    """The text after the answer, up to and with the generation prompt. None where the answer's end is not plain."""
    word = _word()
    answer = _answer(word, shape, calls or _calls_for(messages, OTHER_NAME))
    rendered = render([{"role": "user", "content": "Hi"}, answer, *messages])
    return _cut_after(rendered, word, cut, end, shape)


def proven(render: Render, stand_in: Render, cut: Cut, end: str | None, shape: Shape, *, tools: bool) -> bool:
    """Whether the continuation holds after every sample history that this template takes, and rewrites none of it.

    `stand_in` renders the continuation's short conversation, perhaps with fewer tools than `render` has.
    """
    if shape.tool_calls and (shape.open_answer or shape.roles[:1] != ("tool",)):
        return False
    if shape.reasoning and shape.open_answer:
        return False  # the answer may have been cut inside its reasoning
    if not shape.tool_calls and "tool" in shape.roles[:1]:
        return False
    news = _sample_messages(shape)
    try:
        expected = continuation(stand_in, cut, end, shape, news, _calls_for(news, CALL_NAME) if shape.named else ())
    except TemplateRefused:
        return False
    if expected is None or any(message["content"] not in expected.rendered.text for message in news):
        return False
    held = [_holds(render, cut, end, shape, news, expected, list(history)) for history in _histories(shape, tools)]
    return held[0] is True and False not in held


def _holds(
    render: Render,
    cut: Cut,
    end: str | None,
    shape: Shape,
    news: Sequence[Message],
    expected: Continuation,
    history: list[Message],
) -> bool | None:
    """None: the template does not take this history at all, so no path can have it."""
    try:
        before = render(history).text
    except TemplateRefused:
        return None
    word = _word()
    try:
        whole = render([*history, _answer(word, shape, _calls_for(news, CALL_NAME)), *news])
    except TemplateRefused:
        return False
    if not whole.text.startswith(before):
        return False
    answer = whole.text[len(before) :]
    if not shape.reasoning and not shape.tool_calls and not answer.lstrip(" ").startswith(word):
        return False
    if shape.reasoning and f"{word}0" not in answer:
        return False
    return _cut_after(whole, word, cut, end, shape) == expected


def _cut_after(rendered: Rendered, word: str, cut: Cut, end: str | None, shape: Shape) -> Continuation | None:
    # Reasoning is `word` with a digit, so the last bare occurrence is the content or the last call's argument.
    at = rendered.text.rfind(word)
    if at < 0:
        return None
    rest = rendered.after(at + len(word))
    first = cut(rest)
    if shape.tool_calls:  # what stands between is part of the call, which the model wrote
        while first is not None and first[2] != end:
            rest = rest.after(first[1])
            first = cut(rest)
        if first is None:
            return None
        rest = rest.after(first[0])
        first = cut(rest)
    if shape.open_answer:
        return Continuation(rest, closed=False)
    if first is None or first[0] != 0 or first[2] != end:
        return None
    return Continuation(rest, closed=True)


def _word() -> str:
    return f"9{secrets.randbits(96):029d}"


def _answer(word: str, shape: Shape, calls: Sequence[Message]) -> Message:
    answer: dict[str, Any] = {"role": "assistant", "content": word}
    if shape.reasoning:
        answer["reasoning_content"] = f"{word}0"
    if shape.tool_calls:
        *others, last = [dict(call) for call in calls]
        last["function"] = {**last["function"], "arguments": {"q": word}}
        answer["content"] = ""
        answer["tool_calls"] = [*others, last]
    return answer


def _calls_for(messages: Sequence[Message], name: str) -> list[Message]:
    """Calls that the leading tool results answer."""
    calls: list[Message] = []
    for message in messages:
        if message.get("role") != "tool":
            break
        function = {"name": message.get("name") or name, "arguments": {"q": "x"}}
        calls.append({"id": message.get("tool_call_id", "call00000"), "type": "function", "function": function})
    return calls or [{"id": "call00000", "type": "function", "function": {"name": name, "arguments": {"q": "x"}}}]


def _sample_messages(shape: Shape) -> list[dict[str, Any]]:
    """One message for each role of the shape, with words of their own."""
    messages: list[dict[str, Any]] = []
    for number, role in enumerate(shape.roles):
        message: dict[str, Any] = {"role": role, "content": f"{_word()}"}
        if role == "tool":
            message["tool_call_id"] = f"call{number:05d}"
            if shape.named:
                message["name"] = CALL_NAME
        messages.append(message)
    return messages


def _histories(shape: Shape, tools: bool) -> Iterator[list[Message]]:
    """Conversations that a path may have behind it; the first is the simplest."""
    system: Message = {"role": "system", "content": "Be brief."}
    user: Message = {"role": "user", "content": "What is it?"}
    again: Message = {"role": "user", "content": "And then?"}
    answer: dict[str, Any] = {"role": "assistant", "content": "That."}
    call = {"id": "call00000", "type": "function", "function": {"name": CALL_NAME, "arguments": {"q": "it"}}}
    other = {**call, "id": "call00001"}
    calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "name": CALL_NAME, "tool_call_id": "call00000", "content": "42"}
    second: Message = {**result, "tool_call_id": "call00001"}
    if shape.reasoning:
        answer["reasoning_content"] = calling["reasoning_content"] = "Let me think."
    yield [user]
    yield [user, answer, again, answer, user]
    if shape.system:
        yield [system, user]
        yield [system, user, answer, again]
    if tools:
        yield [user, calling, result]
        yield [user, calling, result, answer, again]
        yield [user, {**calling, "tool_calls": [call, other]}, result, second]
        yield [user, calling, result, {**calling, "content": "Once more."}, result]
    if tools and shape.system:
        yield [system, user, calling, result, answer, again]
