"""For each route that takes a body one that it takes: the fuzz changes them."""

from __future__ import annotations

from typing import Any

from tests.security.fuzzed import ENGINE, HELLO

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
SAMPLED = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "presence_penalty": 0.1, "logit_bias": {"1": 1}}
TURN = {"input": "hello", "max_output_tokens": 8, "stream": False, **SAMPLED}
LIMITS = {"requests_per_minute": 60, "tokens_per_minute": 1000, "concurrent_turns": 4, "sessions": 10}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/chat/completions"): {
        "model": "echo", "messages": [{"role": "system", "content": "be brief"}, HELLO], "max_tokens": 8,
        "stream": True,
        "metadata": {"a": "b"}, "stream_options": {"include_usage": True}, "user": "ann", **SAMPLED,
    },
    ("POST", "/v1/completions"): {"model": "echo", "prompt": ["hello"], "max_tokens": 8, **SAMPLED},
    ("POST", "/v1/embeddings"): {"model": "echo", "input": ["hello"], "encoding_format": "float"},
    ("POST", "/v1/rerank"): {"model": "echo", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    ("POST", "/v1/messages"): {
        "model": "echo", "max_tokens": 8, "system": [{"type": "text", "text": "be brief"}], "messages": [HELLO],
        "stream": True,
        "metadata": {"user_id": "ann"}, "stop_sequences": ["x"],
    },
    ("POST", "/v1/messages/count_tokens"): {"model": "echo", "messages": [HELLO], "system": "be brief"},
    ("POST", "/v1/responses"): {
        "model": "echo", "input": [{"type": "message", **HELLO}], "instructions": "be brief", "max_output_tokens": 8,
        "stream": True,
        "store": True, "truncation": "auto", "metadata": {"a": "b"}, "text": {"format": {"type": "text"}},
        "temperature": 0.5,
    },
    ("POST", "/v1/responses/input_tokens"): {"model": "echo", "input": "hello", "instructions": "be brief"},
    ("POST", "/v1/responses/compact"): {"model": "echo", "input": [{"type": "message", **HELLO}]},
    ("POST", "/v1/conversations"): {"items": [{"type": "message", **HELLO}], "metadata": {"a": "b"}},
    ("POST", "/v1/conversations/{conversation_id}"): {"metadata": {"a": "b"}},
    ("POST", "/v1/conversations/{conversation_id}/items"): {"items": [{"type": "message", **HELLO}]},
    ("POST", "/v1/erasures"): {"user": "nobody"},
    ("POST", "/v1/sessions"): {
        "model": "echo", "title": "t", "system": "be brief", "tools": [TOOL], "metadata": {"a": "b"}, "user_ref": "ann",
        "policy": {"trigger_ratio": 0.7, "strategy": "extract"}, "ttl_seconds": 3600,
    },
    ("PATCH", "/v1/sessions/{session_id}"): {"title": "t", "metadata": {"a": "b", "c": "d"},
    "policy": {"mode": "auto"}},
    ("POST", "/v1/sessions/import"): [
        {"object": "session", "format": 1, "model": "echo", "head_turn_id": "t1", "metadata": {"a": "b"}},
        {
            "object": "turn", "id": "t1", "parent_id": None, "status": "completed", "pinned": False,
            "input": [{"type": "message", **HELLO}], "output": [{"type": "message", "role": "assistant",
            "content": "hi"}],
        },
    ],
    ("POST", "/v1/sessions/{session_id}/count"): {"input": [{"type": "message", **HELLO}], "instructions": "x"},
    ("POST", "/v1/sessions/{session_id}/turns"): TURN,
    ("POST", "/v1/sessions/{session_id}/turns/{turn}/edit"): {**TURN, "stream": True},
    ("POST", "/v1/sessions/{session_id}/turns/{turn}/regenerate"): {"max_output_tokens": 8, **SAMPLED},
    ("POST", "/v1/sessions/{session_id}/compact"): {"dry_run": True, "strategy": "extract"},
    ("POST", "/admin/v1/replicas"): {
        "url": ENGINE, "name": "far", "kind": "turnkeep", "api_key": "k", "connect_timeout_s": 1,
        "max_in_flight": 4, "queue_max_waiting": 4, "fallback": True,
    },
    ("POST", "/admin/v1/replicas/{name}/drain"): {"timeout_s": 1, "reason": "r"},
    ("POST", "/admin/v1/replicas/{name}/undrain"): {"reason": "r"},
    ("POST", "/admin/v1/keys"): {"tenant": "default", "name": "n", "scopes": ["chat"], "ttl_seconds": 60},
    ("POST", "/admin/v1/keys/{key_id}/rotate"): {"grace_s": 1, "force": True},
    ("POST", "/admin/v1/keys/{key_id}/revoke"): {"force": True},
    ("PUT", "/admin/v1/limits/{tenant}"): LIMITS,
    ("PUT", "/admin/v1/limits/{tenant}/keys/{key}"): LIMITS,
    ("POST", "/admin/v1/tenants"): {"id": "acme", "name": "Acme"},
}  # fmt: skip
