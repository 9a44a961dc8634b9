"""What the official `openai` and `anthropic` clients do with the APIs they know: the same flows for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anthropic import Anthropic
from openai import OpenAI

TOKENS = 8


def chat(client: OpenAI, model: str) -> None:
    asked: Any = [{"role": "user", "content": "Name a colour."}]
    answer = client.chat.completions.create(model=model, messages=asked, max_tokens=TOKENS, temperature=0)
    assert answer.choices[0].message.content
    stream = client.chat.completions.create(model=model, messages=asked, max_tokens=TOKENS, temperature=0, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert said == answer.choices[0].message.content


def chained_responses(client: OpenAI, model: str) -> None:
    common: dict[str, Any] = {
        "model": model,
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "instructions": "Be brief.",
    }
    first = client.responses.create(input="Name a colour.", **common)
    assert first.output_text
    assert first.usage is not None
    second = client.responses.create(input="And another.", previous_response_id=first.id, **common)
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    beside = client.responses.create(input="Or a number.", previous_response_id=first.id, **common)
    assert beside.previous_response_id == second.previous_response_id == first.id
    counted = client.responses.input_tokens.count(
        model=model, input="And another.", previous_response_id=first.id, instructions="Be brief."
    )
    assert counted.input_tokens == second.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(second.id)
    shorter = client.responses.compact(model=model, previous_response_id=first.id)
    assert shorter.output[-1].type == "compaction"
    carried: Any = [item.to_dict(warnings=False) for item in shorter.output]
    onward = client.responses.create(
        model=model, input=[*carried, {"role": "user", "content": "Go on."}], store=False, max_output_tokens=TOKENS
    )
    assert onward.output_text


def streamed_responses(client: OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Count to three.", max_output_tokens=TOKENS) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    last: Any = events[-1]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == last.response.output_text
    half = len(kinds) // 2
    again = list(client.responses.retrieve(last.response.id, stream=True, starting_after=half))
    assert [event.type for event in again] == kinds[half + 1 :]
    waiting = client.responses.create(model=model, input="Count on.", background=True, max_output_tokens=TOKENS)
    assert waiting.status == "in_progress"
    assert client.responses.cancel(waiting.id).status in ("cancelled", "completed", "incomplete")


def conversations(client: OpenAI, model: str) -> None:
    made = client.conversations.create(
        metadata={"topic": "colours"}, items=[{"type": "message", "role": "user", "content": "I like blue."}]
    )
    for word in ("Name a colour.", "And another."):
        answer = client.responses.create(
            model=model, input=word, conversation=made.id, max_output_tokens=TOKENS, temperature=0
        )
        assert answer.conversation is not None
        assert answer.conversation.id == made.id
    client.conversations.items.create(made.id, items=[{"type": "message", "role": "user", "content": "Thanks."}])
    items: list[Any] = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant", "user"]
    one: Any = client.conversations.items.retrieve(items[2].id, conversation_id=made.id)
    assert one.content[0].text == items[2].content[0].text
    assert client.conversations.update(made.id, metadata={"topic": "more"}).metadata == {"topic": "more"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "more"}
    assert client.conversations.delete(made.id).deleted


def anthropic_messages(client: Anthropic, model: str) -> None:
    common: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
    asked: Any = [{"role": "user", "content": "Name a colour."}]
    first = client.messages.create(messages=asked, **common)
    assert first.content[0].type == "text"
    with client.messages.stream(messages=asked, **common) as stream:
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in first.content]
    more: Any = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And another."}]
    second = client.messages.create(messages=more, **common)
    assert second.usage.cache_read_input_tokens
    whole = second.usage.input_tokens + second.usage.cache_read_input_tokens
    assert client.messages.count_tokens(model=model, messages=more).input_tokens == whole


FLOWS: tuple[Callable[[OpenAI, str], None], ...] = (chat, chained_responses, streamed_responses, conversations)
