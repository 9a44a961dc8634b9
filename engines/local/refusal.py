"""What the engine server answers when it does not generate: one shape, one table of statuses.

{"error": {"code", "message", "param"?, "limit"?, "requested"?}}
"""

from __future__ import annotations

from typing import Any

import orjson

from engines.contract import ContextOverflow, EngineError, EngineOverloaded, RequestRefused, UnknownBase

STATUS = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "unsupported_parameter": 400,
    "not_found": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "unknown_base": 409,
    "session_busy": 409,
    "other_model": 409,
    "kv_file_refused": 422,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "engine_error": 500,
    "unsupported": 501,
    "storage_failed": 503,
    "storage_full": 507,
    "overloaded": 503,
    "loading": 503,
    "engine_dead": 503,
}
RETRY_AFTER_S = 1  # a place in the queue is free after a few steps


class Refusal(Exception):
    """An answer without generation, or the event that ends a stream; `code` is a key of STATUS."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code if code in STATUS else "invalid_request"
        self.message = message
        self.details = {name: value for name, value in details.items() if value is not None}

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def fields(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, **self.details}

    def body(self) -> bytes:
        return orjson.dumps({"error": self.fields()})

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Refusal:
        """The inverse of `fields`."""
        details = {name: value for name, value in fields.items() if name not in {"code", "message"}}
        return cls(fields["code"], fields["message"], **details)


def refusal(error: EngineError) -> Refusal:
    """How an EngineError reads on the wire."""
    match error:
        case ContextOverflow():
            return Refusal(error.code, str(error), limit=error.limit, requested=error.requested)
        case RequestRefused():
            return Refusal(error.code, str(error), param=error.param)
        case UnknownBase():
            return Refusal("unknown_base", str(error))
        case EngineOverloaded():
            return Refusal("overloaded", str(error))
        case _:
            return Refusal("engine_error", str(error))
