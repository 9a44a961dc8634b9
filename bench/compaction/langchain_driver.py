"""Runs LangChain's own code in its own environment: trim_messages and SummarizationMiddleware, driven by lines of JSON.

    in    {"op": "trim" | "summarise", "messages": [...], "tokens": n, "keep": ["messages" | "tokens", n]}
    out   {"ask": prompt} while it wants the model, {"count": [message, ...]} while it wants tokens counted;
          answered by {"text": ...} and {"tokens": [n, ...]}
    out   {"messages": [...]}

A message is {"role", "content", "calls"?: [{"id", "name", "args"}], "call_id"?, "at": its place or null}. Needs nothing
of ours.
"""

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.messages.utils import trim_messages
from langchain_core.outputs import ChatGeneration, ChatResult


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def hear() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    heard: dict[str, Any] = json.loads(line)
    return heard


class Asked(BaseChatModel):
    """A chat model that is on the other side of the pipe."""

    @property
    def _llm_type(self) -> str:
        return "asked"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **more: Any
    ) -> ChatResult:
        say({"ask": "\n\n".join(str(message.content) for message in messages)})
        return ChatResult(generations=[ChatGeneration(message=AIMessage(hear()["text"]))])


def as_langchain(value: dict[str, Any]) -> BaseMessage:
    role, content = value["role"], value["content"]
    extra = {"additional_kwargs": {"at": value["at"]}, "id": str(value["at"])}
    if role == "tool":
        return ToolMessage(content, tool_call_id=value["call_id"], **extra)
    if role == "assistant":
        calls = [{"id": call["id"], "name": call["name"], "args": call["args"]} for call in value.get("calls", ())]
        return AIMessage(content, tool_calls=calls, **extra)
    return (SystemMessage if role == "system" else HumanMessage)(content, **extra)


def as_json(message: BaseMessage) -> dict[str, Any]:
    roles = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}
    value: dict[str, Any] = {"role": roles[message.type], "content": message.content}
    value["at"] = message.additional_kwargs.get("at")
    if isinstance(message, ToolMessage):
        value["call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and message.tool_calls:
        value["calls"] = [{"id": call["id"], "name": call["name"], "args": call["args"]} for call in message.tool_calls]
    return value


known: dict[str, int] = {}


def count(messages: Iterable[Any]) -> int:
    """Tokens as the model counts them."""
    values = [as_json(message) for message in messages]
    keys = [json.dumps({**value, "at": None}, sort_keys=True) for value in values]
    if missing := [(key, value) for key, value in zip(keys, values, strict=True) if key not in known]:
        say({"count": [value for _, value in missing]})
        for (key, _), tokens in zip(missing, hear()["tokens"], strict=True):
            known[key] = tokens
    return sum(known[key] for key in keys)


def trim(messages: list[BaseMessage], tokens: int) -> list[BaseMessage]:
    """As its documentation shows it; what is not named is at its default."""
    kept = trim_messages(
        messages, max_tokens=tokens, strategy="last", token_counter=count, start_on="human", include_system=True
    )
    return list(kept)


def summarise(messages: list[BaseMessage], keep: tuple[str, int]) -> list[BaseMessage]:
    """All at its defaults but the trigger, which it has none of, `keep` and the counter."""
    middleware: Any = SummarizationMiddleware(Asked(), trigger=("messages", 1), keep=keep, token_counter=count)
    changed = middleware.before_model({"messages": messages}, None)
    if changed is None:
        return messages
    return [message for message in changed["messages"] if not isinstance(message, RemoveMessage)]


def main() -> None:
    say({"langchain": version("langchain"), "langchain_core": version("langchain-core")})
    while True:
        job = hear()
        given = [as_langchain(value) for value in job["messages"]]
        made = trim(given, job["tokens"]) if job["op"] == "trim" else summarise(given, (job["keep"][0], job["keep"][1]))
        say({"messages": [as_json(message) for message in made]})


if __name__ == "__main__":
    main()
