"""Requests of OpenAI's shape passed on as they are: the reply whole, or its events as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson

from engines.remote.answer import AnswerStream
from engines.remote.http import Upstream
from engines.remote.replies import STUMBLES, json_of


async def forward(upstream: Upstream, path: str, fields: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """The whole reply. Raises EngineError, also for a reply that is none."""
    reply = await upstream.post(
        path, orjson.dumps(fields), timeout_s=upstream.timeouts.first_delta_s, request_id=request_id
    )
    return json_of(reply, upstream.name)


async def forward_stream(
    upstream: Upstream, path: str, fields: Mapping[str, Any], request_id: str
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a streamed reply; an error among them is raised. Ends with `[DONE]`."""
    stream = await AnswerStream.open(upstream, path, orjson.dumps(fields), request_id=request_id)
    try:
        ended = False
        while (events := await stream.next()) is not None:
            for event in events:
                if event.get("error") or event.get("object") == "error":
                    raise stream.failed(event)
                stream.begun()
                ended = any(choice.get("finish_reason") for choice in event.get("choices") or ()) or ended
                yield event
        if not ended:
            raise stream.lost("the answer ended without a finish reason")
        stream.finished()
    except STUMBLES as error:
        raise stream.broken(f"an event is not of the protocol: {error!r}") from error
    finally:
        await stream.close()
