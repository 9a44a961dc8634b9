"""The gateway's error tree, drawn once; `api` translates it to one JSON shape.

    {"error": {"type", "code", "message", "param", "request_id"}}

Code strings are OpenAI's where OpenAI has one, because clients match on them.
"""

from __future__ import annotations


class GatewayError(Exception):
    """Something to tell the client. Subclasses fix status, type and code."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details or {}
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class BadRequest(GatewayError):
    status, type, code = 400, "invalid_request_error", "invalid_request"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(GatewayError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(GatewayError):
    status, type, code = 403, "permission_error", "insufficient_scope"


class NotFound(GatewayError):
    status, type, code = 404, "not_found_error", "not_found"


class SessionBusy(GatewayError):
    status, type, code = 409, "conflict_error", "session_busy"


class TooSlow(GatewayError):
    status, type, code = 408, "invalid_request_error", "request_timeout"


class Conflict(GatewayError):
    status, type, code = 409, "conflict_error", "conflict"


class PreconditionFailed(GatewayError):
    status, type, code = 412, "precondition_error", "version_mismatch"


class PreconditionRequired(GatewayError):
    status, type, code = 428, "precondition_error", "if_match_required"


class TooLarge(GatewayError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMedia(GatewayError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Unprocessable(GatewayError):
    status, type, code = 422, "invalid_request_error", "unprocessable"


class RateLimited(GatewayError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class QueueRefused(RateLimited):
    """No place at a replica: `queue_full` (429), or none within the time that a turn waits: `queue_timeout` (503)."""

    code = "queue_full"


class UpstreamFailed(GatewayError):
    status, type, code = 502, "upstream_error", "upstream_failed"


class Unavailable(GatewayError):
    status, type, code = 503, "unavailable_error", "no_replica"


class ShuttingDown(Unavailable):
    """Another gateway, or this one once it is back, will take it."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down: ask again", retry_after_s=1.0)


class UpstreamTimeout(GatewayError):
    status, type, code = 504, "upstream_error", "upstream_timeout"
