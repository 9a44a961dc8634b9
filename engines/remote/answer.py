"""One streamed answer as JSON events: opens it, splits it, parses it, and says in the contract's errors what broke.

    open -> next() -> [event, …] -> next() -> … -> None (end) -> close()

Every adapter reads its answers through this; what an event means is the adapter's business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson

from engines.contract import Delta, EngineBroken, EngineError, EngineLost, EngineUnreachable
from engines.remote.chunks import ChunkReader
from engines.remote.http import JSON, ByteStream, Upstream
from engines.remote.refusal import complaint_of, engine_error, read_complaint
from engines.remote.replies import STUMBLES
from engines.remote.sse import EventTooLarge, SseParser

TAIL_S = 5.0  # after the finish reason only the usage is missing: not worth a whole idle timeout


class AnswerStream:
    """The events of one answer. The caller closes it, also after an error."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._parser = SseParser()
        self._begun = False
        self._done = False
        self._finished = False

    @classmethod
    async def open(
        cls,
        upstream: Upstream,
        path: str,
        body: bytes,
        *,
        request_id: str,
        patient: bool = False,
        content_type: str = JSON,
    ) -> AnswerStream:
        """Raises EngineError, also for an answer that is an error (any status) or is no event stream.

        `patient`: background work, which may pause for long.
        """
        stream = await upstream.open(path, body, content_type=content_type, request_id=request_id, patient=patient)
        if stream.status == 200 and stream.content_type == "text/event-stream":
            return cls(stream)
        try:
            complaint = read_complaint(await stream.read_all())
        finally:
            stream.close()
        if stream.status == 200 and stream.content_type != JSON:
            message = f"{upstream.name} answered {stream.content_type or 'no content type'}, not an event stream"
            raise EngineBroken(message, replica=upstream.name)
        raise engine_error(stream.status, complaint, replica=upstream.name, retry_after_s=stream.retry_after_s)

    async def next(self) -> list[dict[str, Any]] | None:
        """The events of the next read, perhaps none; None after `[DONE]` or the end of the response."""
        if self._done:
            return None
        try:
            chunk = await self._stream.read()
            found = self._parser.data_of(chunk) if chunk else []
        except EventTooLarge as error:
            raise self.broken(str(error)) from error
        except EngineUnreachable as error:
            raise self.lost(str(error)) from error
        if not chunk:
            self._done = True
            return None
        events = []
        for data in found:
            if data == b"[DONE]":
                self._done = True
                break
            events.append(self._parse(data))
        return events

    @property
    def has_begun(self) -> bool:
        return self._begun

    def begun(self) -> None:
        """A delta goes out: from here on a break is EngineLost and each wait has the idle limit."""
        if not self._begun:
            self._begun = True
            self._stream.begun()

    def finished(self) -> None:
        """The finish reason is known; only usage and the end of the response may follow."""
        if not self._finished:
            self._finished = True
            self._stream.hurry(TAIL_S)

    def lost(self, message: str) -> EngineError:
        """The error for an answer that stopped short."""
        kind = EngineLost if self._begun else EngineUnreachable
        return kind(message, replica=self._stream.name)

    def failed(self, event: Any) -> EngineError:
        """The error for an error event inside the stream."""
        complaint = complaint_of(event)
        if self._begun:
            return EngineLost(
                f"{self._stream.name} failed in mid-answer: {complaint.message[:500]}", replica=self._stream.name
            )
        return engine_error(200, complaint, replica=self._stream.name)

    async def close(self) -> None:
        """Unless the answer is complete, closes the connection at once: that cancels it in the engine."""
        if self._finished:
            await self._stream.finish()
        else:
            self._stream.close()

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise self.broken(f"an event is not JSON: {error}") from error
        if type(event) is not dict:
            raise self.broken("an event is no JSON object")
        return event

    def broken(self, message: str) -> EngineBroken:
        """The error for what is not the protocol; retryable only before the first delta."""
        error = EngineBroken(f"{self._stream.name}: {message}", replica=self._stream.name)
        error.retryable = not self._begun
        return error


async def chunk_deltas(stream: AnswerStream) -> AsyncGenerator[Delta, None]:
    """The Deltas of a stream of OpenAI's chunks. Closes the stream."""
    reader = ChunkReader()
    try:
        while (events := await _next(stream, reader)) is not None:
            for event in events:
                if event.get("error") or event.get("object") == "error":
                    raise stream.failed(event)
                if (delta := reader.read(event)) is not None:
                    stream.begun()
                    yield delta
                if reader.finished:
                    stream.finished()
                    if (last := reader.take_last(ended=False)) is not None:
                        yield last
                        return
        if (last := reader.take_last(ended=True)) is None:
            raise stream.lost("the answer ended without a finish reason")
        yield last
    except STUMBLES as error:
        raise stream.broken(f"a chunk is not of the protocol: {error!r}") from error
    finally:
        await stream.close()


async def _next(stream: AnswerStream, reader: ChunkReader) -> list[dict[str, Any]] | None:
    """As `stream.next`; a break after the finish reason only ends the stream: the answer is whole."""
    try:
        return await stream.next()
    except EngineError:
        if reader.finished:
            return None
        raise
