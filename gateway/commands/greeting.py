"""What `turnkeep serve` prints when it answers: where, as whom, and a line to paste. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from gateway.settings import DEMO_MODEL, Settings, masked_url


def greeting(settings: Settings, address: Sequence[object], key: str | None, revision: str) -> str:
    """`address`: host and port it really listens on; `key`: the key made for this first run, shown this once."""
    host, port = str(address[0]), address[1]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lines = [
        "",
        f"Turnkeep answers on {url}",
        f"  API        {url}/v1   (OpenAI-compatible, and the session API /v1/sessions)",
        f"  admin      {url}/admin",
        f"  docs       {url}/docs",
        f"  database   {masked_url(settings.database_url)} (schema {revision})",
        f"  engine     {_engines(settings)}",
        f"  key        {_key_line(settings, key)}",
    ]
    if key:
        lines += ["", f"  export TURNKEEP_API_KEY={key}"]
    lines += ["", *_curl(settings, url, key), "", f"  turnkeep chat --url {url}", ""]
    return "\n".join(lines + _advice(settings))


def _engines(settings: Settings) -> str:
    if settings.embedded:
        return f"embedded, {settings.model}"
    return ", ".join(f"{upstream.name} ({upstream.url})" for upstream in settings.upstreams)


def _key_line(settings: Settings, key: str | None) -> str:
    if not settings.auth:
        return "none is asked for: auth is off, and only this machine can connect"
    if key:
        return f"{key}   made for this first run and shown this once"
    return "one made before; `turnkeep keys create` makes another"


def _curl(settings: Settings, url: str, key: str | None) -> list[str]:
    """A line that works when pasted; without an upstream's model name, the list of models."""
    token = key or "$TURNKEEP_API_KEY"
    header = f" \\\n    -H {_quoted('Authorization: Bearer ' + token)}" if settings.auth else ""
    if not settings.embedded:
        return [f"  curl {url}/v1/models{header}"]
    asked = [{"role": "user", "content": "Say hello in one sentence."}]
    message = {"model": settings.model, "temperature": 0, "messages": asked}
    body = shlex.quote(json.dumps(message))
    return [f"  curl {url}/v1/chat/completions{header} \\\n    -H 'Content-Type: application/json' \\\n    -d {body}"]


def _quoted(text: str) -> str:
    return f'"{text}"' if "$" in text else shlex.quote(text)


def _advice(settings: Settings) -> list[str]:
    if not settings.embedded or settings.model != DEMO_MODEL:
        return []
    return [
        f"{DEMO_MODEL} is a demonstration: 135 million parameters know little. A better model:",
        "  turnkeep serve --model NAME_OR_FOLDER        any causal language model that transformers reads",
        "  turnkeep serve --upstream http://HOST:8000   vLLM, SGLang, llama.cpp, or any OpenAI-compatible server",
        "",
    ]
