"""What every refusal must be, whatever was wrong: checked in one place for all tables of bad inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.gateway.served import Served

FIELDS = {"type", "code", "message", "param", "request_id", "details"}
LONGEST_MESSAGE = 600  # characters; of the input at most 200 are in it
ECHO = "wmwmwmwm" * 26  # 208 characters that no message may hold


def refused(answer: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The error of an answer with this status, after its shape, its id and its length were checked."""
    assert answer.status_code == status, f"{answer.status_code} {answer.text[:300]}"
    assert answer.headers["content-type"] == "application/json"
    told: dict[str, Any] = answer.json()
    assert set(told) == {"error"}
    error: dict[str, Any] = told["error"]
    assert set(error) <= FIELDS
    assert FIELDS - {"details"} <= set(error)
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["request_id"].startswith("req_")
    assert all(isinstance(error[name], str) and error[name] for name in ("type", "code", "message"))
    assert len(error["message"]) <= LONGEST_MESSAGE, error["message"][:700]
    assert len(error["param"] or "") <= 256
    assert ECHO not in answer.text
    assert "Traceback" not in answer.text
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error
    return error


@contextmanager
def nothing_saved(served: Served) -> Iterator[None]:
    """The tables hold as many rows afterwards, and the gateway is well."""
    before = served.rows()
    yield
    assert served.rows() == before
    assert served.client.get("/livez").status_code == 200
