"""Anthropic's messages as those of chat completions; what cannot be carried over is refused by name. Plain code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gateway.api.asked import refuse_but, unsupported
from gateway.api.messages.schemas import CountBody, MessagesBody
from gateway.errors import BadRequest

# Fields that change what is done, with the values that are fine: what would be done without them.
FINE: dict[str, tuple[Any, ...]] = {
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "context_management": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}


def refuse_undone(raw: Mapping[str, Any]) -> None:
    """Raises BadRequest for a field or a tool that nothing here can do."""
    refuse_but(raw, FINE, tools="custom")
    thinking = raw.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") not in ("disabled", "adaptive"):
        raise unsupported("thinking.type", "thinking: a budget cannot be held here; there are disabled and adaptive")


def chat_body(asked: CountBody) -> dict[str, Any]:
    """The same as the body of a chat completion. Raises BadRequest that names the place in Anthropic's."""
    output = asked.output_config
    told: dict[str, Any] = {
        "model": asked.model,
        "messages": _messages(asked),
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in asked.tools or ()] or None,
        "tool_choice": _choice(asked),
        "reasoning_effort": output.effort if output is not None else None,
        "response_format": _format(asked),
    }
    choice = asked.tool_choice
    if choice is not None and choice.disable_parallel_tool_use and asked.tools:
        told["parallel_tool_calls"] = False
    if isinstance(asked, MessagesBody):
        told |= {
            "max_completion_tokens": asked.max_tokens,
            "stop": list(asked.stop_sequences) if asked.stop_sequences else None,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "user": asked.metadata.user_id if asked.metadata is not None else None,
        }
    return {name: value for name, value in told.items() if value is not None}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if name in tool:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _choice(asked: CountBody) -> Any:
    choice = asked.tool_choice
    if choice is not None and not asked.tools and choice.type in ("any", "tool"):
        raise BadRequest(f"tool_choice of type {choice.type} needs tools", param="tool_choice")
    if choice is None or not asked.tools:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice of type tool needs a name", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _format(asked: CountBody) -> dict[str, Any] | None:
    format = asked.output_config.format if asked.output_config is not None else None
    if format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format.schema_}}


def _messages(asked: CountBody) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if asked.system is not None:
        out.append({"role": "system", "content": _system(asked.system, "system")})
    for i, message in enumerate(asked.messages):
        where = f"messages[{i}].content"
        if message.role == "system":
            out.append({"role": "system", "content": _system(message.content, where)})
        elif isinstance(message.content, str):
            out.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            out.append(_assistant(message.content, where))
        else:
            out += _user(message.content, where)
    return out


def _system(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(_text(block, f"{where}[{n}]") for n, block in enumerate(content))


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise _unknown(block, where)
    if not isinstance(text := block.get("text"), str):
        raise BadRequest(f"{where}.text must be a string", param=f"{where}.text")
    return text


def _unknown(block: Mapping[str, Any], where: str) -> BadRequest:
    kind = str(block.get("type"))[:64]
    return unsupported(f"{where}.type", f"{where}: blocks of type {kind!r} cannot be taken here")


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for n, block in enumerate(blocks):
        at, kind = f"{where}[{n}]", block.get("type")
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("input"), dict):
            function = {"name": block.get("name"), "arguments": orjson.dumps(block["input"]).decode()}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            texts.append(_text(block, at))
    if texts or not calls:
        said["content"] = "".join(texts)
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    return {**said, **({"tool_calls": calls} if calls else {})}


def _user(blocks: list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Tool results, each a message of its own, then what the user says."""
    parts = []
    for n, block in enumerate(blocks):
        at = f"{where}[{n}]"
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, at)}
        else:
            parts.append(_part(block, at))
    if parts:
        yield {"role": "user", "content": parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts}


def _result(block: Mapping[str, Any], where: str) -> Any:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    parts = [_part(part, f"{where}.content[{n}]") for n, part in enumerate(content)]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if block.get("type") != "image":
        return {"type": "text", "text": _text(block, where)}
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
        }
    if isinstance(source, dict) and kind == "url":
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    raise unsupported(f"{where}.source", f"{where}.source: an image comes as base64 or by its url")
