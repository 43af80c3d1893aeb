"""Server-sent events: one write per batch of tokens, comments in silence, and a watch on the client.

The response begins with the first token, so whatever fails before it is a proper HTTP error; only a
silence longer than the keep-alive interval starts it earlier, since proxies close silent connections.
After it has begun, an error is an event of its own, in the shape that SDKs raise, and then the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helios.errors import RequestError
from helios.runtime.generation import Generation, RequestCancelledError
from helios.runtime.request import TokenEvent

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_KEEP_ALIVE = b": keep-alive\n\n"


class StreamEncoder(Protocol):
    """Turns a request's events into the bytes of its stream."""

    def encode(self, events: list[tuple[int, TokenEvent]]) -> bytes:
        """The chunks for some events; may be empty."""
        ...

    def end(self) -> bytes:
        """What follows the last event: usage, end markers."""
        ...

    def error(self, error: RequestError) -> bytes:
        """An error after the stream has begun, and the end."""
        ...


@contextlib.asynccontextmanager
async def cancel_on_disconnect(
    receive: Receive, generation: Generation, on_end: Callable[[], None]
) -> AsyncGenerator[None, None]:
    """Stop the generation within a tick of the client's going, and in any case when the block is left.

    ``on_end`` is called last.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        generation.cancel()
        on_end()


class EventStream(Response):
    """Streams a generation through an encoder; ``on_end`` is called when nothing more will be sent."""

    def __init__(
        self,
        generation: Generation,
        encoder: StreamEncoder,
        keepalive_seconds: float,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__()
        self._on_end = on_end
        self._generation = generation
        self._encoder = encoder
        self._keepalive = keepalive_seconds
        self._last_write = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        self._timer = asyncio.get_running_loop().call_later(self._keepalive, self._on_timer)
        try:
            async with cancel_on_disconnect(receive, self._generation, self._on_end):
                await self._stream(send, scope["state"].get("plain_send", send))
        except RequestCancelledError:
            return
        finally:
            self._timer.cancel()

    def _on_timer(self) -> None:
        silence = time.perf_counter() - self._last_write
        if silence >= self._keepalive * 0.99:
            self._generation.interrupt()
            silence = 0.0
        self._timer = asyncio.get_running_loop().call_later(self._keepalive - silence, self._on_timer)

    async def _stream(self, send: Send, plain_send: Send) -> None:
        """``plain_send`` leaves out the layers that only look at a response's begin and end."""
        generation, encoder = self._generation, self._encoder
        events = await generation.next_events()
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        try:
            while True:
                chunk = encoder.encode(events) if events else _KEEP_ALIVE
                if chunk:
                    self._last_write = time.perf_counter()
                    await plain_send({"type": "http.response.body", "body": chunk, "more_body": True})
                if generation.ended:
                    break
                events = await generation.next_events()
            last = encoder.end()
        except RequestCancelledError:
            raise
        except RequestError as error:
            last = encoder.error(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})
