"""A checked body as the turn's own words. What cannot be done is refused by name. Plain functions."""

from __future__ import annotations

from typing import Any

from compression.budget import Reasoning
from gateway.api.asked import check_schema, checked_tools, refuse_but, shape_of, unsupported
from gateway.api.responses.schemas import AllowedTools, ContextFields, JsonSchemaFormat, ResponseCreate
from gateway.errors import BadRequest
from gateway.sessions.command import Shape
from gateway.sessions.terms import Tools, chat_tools

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
INCLUDED = (ENCRYPTED, LOGPROBS)
MOOT = (  # of OpenAI's own tools, images and inputs: there are none here, so that nothing is left out
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
)
# Fields of OpenAI's that change what is done, with the values that are fine: what would be done without them.
FINE: dict[str, tuple[Any, ...]] = {
    "prompt": (),
    "max_tool_calls": (),
    "moderation": (),
    "access_programs": (),
    "background_options": ({}, {"completion_window": "soonest"}),
    "image": ({},),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "24h"),
    "prompt_cache_options": ({}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
    "personality": (),
}


def refuse_undone(raw: dict[str, Any]) -> None:
    """Raises BadRequest for a field, a tool or a choice that nothing here can do."""
    refuse_but(raw, FINE, tools="function")
    choice = raw.get("tool_choice")
    if isinstance(choice, dict) and isinstance(kind := choice.get("type"), str):
        if kind not in ("function", "allowed_tools"):
            raise unsupported("tool_choice.type", f"tool_choice: there are no {kind[:64]!r} tools here")
        if kind == "function" and "function" in choice:
            raise BadRequest("tool_choice: the name stands beside the type here", param="tool_choice.name")
    _refuse_within(raw, "text", "verbosity", ("medium",))
    for name in ("summary", "generate_summary"):
        _refuse_within(raw, "reasoning", name, ("auto",))
    _refuse_within(raw, "reasoning", "mode", ("standard",))
    _refuse_within(raw, "stream_options", "include_obfuscation", (False,))


def _refuse_within(raw: dict[str, Any], field: str, name: str, fine: tuple[Any, ...]) -> None:
    inner = raw.get(field)
    if isinstance(inner, dict) and inner.get(name) is not None and inner[name] not in fine:
        shown = f"{field}.{name}"
        raise unsupported(shown, f"{shown}: only {fine[0]!r} is supported here")


def check_together(asked: ResponseCreate) -> None:
    """Fields that say different things, or need each other. Raises BadRequest."""
    check_place(asked)
    for i, name in enumerate(asked.include or ()):
        if name not in (*INCLUDED, *MOOT):
            raise unsupported(f"include[{i}]", f"include[{i}]: there is no {name!r} here; there are {INCLUDED}")
    if asked.background and asked.store is False:
        raise BadRequest("background needs store: who would find the response later?", param="background")
    if asked.context_management and asked.store is False:
        raise BadRequest(
            "context_management needs store: use /v1/responses/compact for what you keep yourself",
            param="context_management",
        )
    if asked.truncation == "auto" and asked.store is False:
        raise unsupported("truncation", "truncation: auto leaves out turns that are kept here: it needs store")


def check_place(asked: ContextFields) -> None:
    if asked.previous_response_id is not None and asked.conversation is not None:
        raise BadRequest("previous_response_id and conversation cannot be used together", param="previous_response_id")


def conversation_of(asked: ContextFields) -> str | None:
    named = asked.conversation
    return named.id if named is not None and not isinstance(named, str) else named


def flat_tools(asked: ContextFields) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]


def tools_and_choice(asked: ContextFields, session_tools: Tools = ()) -> tuple[Tools, Any]:
    """Tools and tool_choice as chat completions have them. Raises BadRequest.

    Of `allowed_tools` the others are left out of the prompt. `session_tools` stand in where the request names none.
    """
    tools = checked_tools(chat_tools(flat_tools(asked)), at="") or session_tools
    choice, names = asked.tool_choice, {tool["function"]["name"] for tool in tools}
    if choice is None or isinstance(choice, str):
        if choice == "required" and not tools:
            raise BadRequest("tool_choice 'required' needs tools", param="tool_choice")
        return tools, choice if tools else None
    wanted = [tool.name for tool in choice.tools] if isinstance(choice, AllowedTools) else [choice.name]
    for name in wanted:
        if name not in names:
            raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    if isinstance(choice, AllowedTools):
        return tuple(tool for tool in tools if tool["function"]["name"] in wanted), choice.mode
    return tools, {"type": "function", "function": {"name": choice.name}}


def format_of(asked: ContextFields) -> dict[str, Any] | None:
    """The answer's format as chat completions have it. Raises BadRequest."""
    format = asked.text.format if asked.text is not None else None
    if format is None:
        return None
    if not isinstance(format, JsonSchemaFormat):
        return {"type": format.type}
    check_schema(format, "text.format")
    told = {"name": format.name, "schema": format.schema_}
    return {"type": "json_schema", "json_schema": told | ({} if format.strict is None else {"strict": format.strict})}


def response_shape(asked: ResponseCreate) -> Shape:
    wants = LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs)
    return shape_of(asked, max_tokens=asked.max_output_tokens, logprobs=wants or None, top=asked.top_logprobs or None)


def old_reasoning(asked: ContextFields, policy: Reasoning) -> Reasoning:
    context = asked.reasoning.context if asked.reasoning is not None else None
    if context == "all_turns":
        return "keep"
    return "strip" if context == "current_turn" else policy


def settings_of(asked: ResponseCreate, *, conversation: str | None) -> dict[str, Any]:
    """What a response shows of its request, and keeps with its turn."""
    choice, reasoning = asked.tool_choice, asked.reasoning
    format = asked.text.format if asked.text is not None else None
    return {
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "conversation": conversation,
        "tools": flat_tools(asked),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice is not None else "auto",
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_logprobs": asked.top_logprobs,
        "max_output_tokens": asked.max_output_tokens,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "text": {"format": format.model_dump(by_alias=True, exclude_none=True) if format else {"type": "text"}},
        "truncation": asked.truncation or "disabled",
        "metadata": asked.metadata or {},
        "background": bool(asked.background),
        "store": asked.store is not False,
        "user": asked.user,
        "safety_identifier": asked.safety_identifier,
        "prompt_cache_key": asked.prompt_cache_key,
        **({"include": list(asked.include)} if asked.include else {}),
    }
