"""A grammar that makes the model call a tool, in its own format, for `tool_choice` "required" or a named function.

Lark in llguidance's dialect: `<[id]>` is a control token, `%json` the language of a JSON schema. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engines.contract import Grammar
from gateway.errors import BadRequest
from gateway.sessions.answer import AnswerFormat
from gateway.sessions.tokens import ModelTokens

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
ToolChoice = str | Mapping[str, Any] | None


def tool_grammar(
    tokens: ModelTokens,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    *,
    parallel: bool = True,
    opened: bool = False,
) -> Grammar | None:
    """The grammar; None where the choice asks for nothing ("auto", "none").

    `parallel`: several calls may follow one another. `opened`: the prompt ends inside a think block. Raises BadRequest
    for a choice that names no tool of the request, and for a model whose format of calls is not known here.
    """
    chosen = _chosen(tools, tool_choice)
    if chosen is None:
        return None
    kind = AnswerFormat.of(tokens).kind
    one = not parallel or not isinstance(tool_choice, str)
    if kind == "json":
        return Grammar("json_schema", json.dumps(_any_call(chosen, "parameters"), ensure_ascii=False))
    if kind == "marked":
        return Grammar("lark", _marked(tokens, chosen, one=one, opened=opened))
    if kind == "mistral":
        return Grammar("lark", _mistral(tokens, chosen, one=one))
    if kind == "harmony":
        return Grammar("lark", _harmony(tokens, chosen))
    message = f"{tokens.name} cannot be made to call a tool here: how it writes calls is not known."
    raise BadRequest(message, code="unsupported_parameter", param="tool_choice")


def _chosen(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[Mapping[str, Any]] | None:
    """The functions of which one must be called; None where none must."""
    functions = [tool["function"] for tool in tools if tool.get("type", "function") == "function"]
    if choice is None or choice in ("auto", "none"):
        return None
    if choice == "required":
        if not functions:
            raise BadRequest("tool_choice is required, and there are no tools.", param="tool_choice")
        return functions
    name = choice.get("function", choice).get("name") if isinstance(choice, Mapping) else None
    named = [function for function in functions if function["name"] == name]
    if not named:
        raise BadRequest(f"tool_choice names {name!r:.80}, which is none of the tools.", param="tool_choice")
    return named


def _call(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    """JSON schema of a call of one function."""
    properties = {"name": {"const": function["name"]}, key: function.get("parameters") or ANY_OBJECT}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


def _any_call(functions: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    calls = [_call(function, key) for function in functions]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _mark(tokens: ModelTokens, name: str) -> str:
    """A control token by its id; a mark that the tokenizer has no token for as text."""
    id = tokens.vocabulary.controls.get(name)
    return json.dumps(name) if id is None else f"<[{id}]>"


def _marked(tokens: ModelTokens, functions: Sequence[Mapping[str, Any]], *, one: bool, opened: bool) -> str:
    opens, closes = _mark(tokens, "<tool_call>"), _mark(tokens, "</tool_call>")
    thought = f"{_mark(tokens, '<think>')} TEXT {_mark(tokens, '</think>')} /\\n*/"
    start = f"TEXT {_mark(tokens, '</think>')} /\\n*/ calls" if opened else "calls | thought calls"
    lines = [
        f"start: {start}",
        f"thought: {thought}",
        "calls: call" + ("" if one else ' ("\\n" call)*'),
        f'call: {opens} "\\n" body "\\n" {closes}',
        f"body: {_json(_any_call(functions, 'arguments'))}",
        "TEXT: /(.|\\n)*/",
    ]
    if not AnswerFormat.of(tokens).reasoning:
        lines = [line for line in lines if not line.startswith(("thought", "TEXT"))]
        lines[0] = "start: calls"
    return "\n".join(lines) + "\n"


def _mistral(tokens: ModelTokens, functions: Sequence[Mapping[str, Any]], *, one: bool) -> str:
    mark = _mark(tokens, "[TOOL_CALLS]")
    if "[ARGS]" in tokens.template.source:
        rules = [
            f"call_{n}: {mark} {json.dumps(function['name'])} {_mark(tokens, '[ARGS]')} arguments_{n}\n"
            f"arguments_{n}: {_json(function.get('parameters') or ANY_OBJECT)}"
            for n, function in enumerate(functions)
        ]
        either = " | ".join(f"call_{n}" for n in range(len(functions)))
        return "\n".join([f"start: ({either}){'' if one else '+'}", *rules]) + "\n"
    calls = {"type": "array", "items": _any_call(functions, "arguments"), "minItems": 1}
    if one:
        calls["maxItems"] = 1
    return f"start: {mark} calls\ncalls: {_json(calls)}\n"


def _harmony(tokens: ModelTokens, functions: Sequence[Mapping[str, Any]]) -> str:
    """An analysis message may come first; harmony has one call an answer."""
    start, channel, message = (_mark(tokens, f"<|{name}|>") for name in ("start", "channel", "message"))
    end, constrain, call = (_mark(tokens, f"<|{name}|>") for name in ("end", "constrain", "call"))
    rules = [
        f"call_{n}: {channel} {json.dumps('commentary to=functions.' + function['name'] + ' ')} "
        f'{constrain} "json" {message} arguments_{n} {call}\n'
        f"arguments_{n}: {_json(function.get('parameters') or ANY_OBJECT)}"
        for n, function in enumerate(functions)
    ]
    either = " | ".join(f"call_{n}" for n in range(len(functions)))
    lines = [
        "start: calls | thought calls",
        f'thought: {channel} "analysis" {message} TEXT {end} {start} "assistant"',
        f"calls: {either}",
        *rules,
        "TEXT: /(.|\\n)*/",
    ]
    return "\n".join(lines) + "\n"
