"""A lean HTTP/1.1 and SSE client on asyncio protocols: one callback per read, no task switch per token.

General clients hand each chunk through a stream, a queue and a coroutine; at tens of thousands of one-token
chunks a second they, not the server, become the limit. Here every read is stamped once and split in place,
and a chunk is parsed as JSON only when it must be: the first, those that carry usage, a finish reason or an
error, and all of them when the text is wanted. Events that arrive in one read share its time.
"""

import asyncio
import json
import ssl
import time
from array import array
from typing import Any, cast
from urllib.parse import urlsplit

clock = time.perf_counter  # one clock for all processes of a host (CLOCK_MONOTONIC on Linux)


class ProtocolError(Exception):
    """The server's bytes are not what HTTP or SSE allow here."""


class ResponseParser:
    """One HTTP/1.1 response, in pieces of any size: `feed` returns the body bytes that became complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._rest = b""
        self._left: int | None = None  # bytes still to come; None: until the server closes
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._rest = data
                return b""
            self._head(data[:end])
            data = data[end + 4 :]
        if self._chunked:
            return self._dechunk(data)
        if self._left is not None:
            self._left -= len(data)
            self.done = self._left <= 0
        return data

    def end(self) -> None:
        """The server closed: the end of a body without a length, an error for any other."""
        if self.status and not self._chunked and self._left is None:
            self.done = True

    def _head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if not first.startswith("HTTP/1.") or len(parts) < 2 or not parts[1].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 answer: {first[:80]!r}")
        self.status = int(parts[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            length = "0"
        if not self._chunked and length is not None:
            self._left = int(length)
            self.done = self._left == 0

    def _dechunk(self, data: bytes) -> bytes:
        pieces, position = [], 0
        while True:
            line = data.find(b"\r\n", position)
            if line < 0:
                break
            try:
                size = int(data[position:line].partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError(f"bad chunk size {data[position:line][:20]!r}") from None
            if size == 0:
                if data.startswith(b"\r\n", line + 2) or data.find(b"\r\n\r\n", line + 2) >= 0:
                    self.done = True
                    return b"".join(pieces)
                break
            stop = line + 2 + size
            if len(data) < stop + 2:
                break
            pieces.append(data[line + 2 : stop])
            position = stop + 2
        self._rest = data[position:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class SseReader:
    """Splits a server-sent event stream into the data of its events; comments (keep-alives) vanish."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            held = b"\r" if data.endswith(b"\r") else b""  # its \n may be in the next read
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            *events, rest = data.split(b"\n\n")
            self._rest = rest + held
        else:
            *events, self._rest = data.split(b"\n\n")
        found = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                found.append(event[6:])
            elif payload := self._fields(event):
                found.append(payload)
        return found

    @staticmethod
    def _fields(event: bytes) -> bytes:
        lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        return b"\n".join(lines)


class Exchange:
    """One request's answer as it arrives; all times are `clock` readings in seconds."""

    def __init__(self, stream: bool, keep_text: bool) -> None:
        self.stream = stream
        self.keep_text = keep_text
        self.sent = 0.0
        self.first: float | None = None  # first token
        self.last: float | None = None  # last token
        self.ended: float | None = None  # last byte
        self.chunk_times = array("d")
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.timings: dict[str, Any] = {}
        self.error: str | None = None
        self.text: list[str] = []
        self.received = False
        self.closes = False
        self.parser = ResponseParser()
        self._sse = SseReader()
        self._body: list[bytes] = []
        self._saw_done = False

    def feed(self, data: bytes, now: float) -> bool:
        """Take one read; True when the answer is complete."""
        self.received = True
        body = self.parser.feed(data)
        if body:
            if self.stream and self.parser.status == 200:
                for event in self._sse.feed(body):
                    self._event(event, now)
            else:
                self._body.append(body)
        if self.parser.done:
            self._finish(now)
        return self.parser.done

    def closed(self, now: float) -> bool:
        """The server closed the connection; True when that was a proper end."""
        self.parser.end()
        if self.parser.done:
            self._finish(now)
        return self.parser.done

    def json(self) -> Any:
        """The body of an answer that was not streamed; None where it is no JSON."""
        try:
            return json.loads(b"".join(self._body))
        except ValueError:
            return None

    def _event(self, event: bytes, now: float) -> None:
        if (
            self.first is None
            or self.keep_text
            or b'"finish_reason":"' in event
            or b'"finish_reason": "' in event
            or b'"usage":{' in event
            or b'"usage": {' in event
            or b'"error":' in event
            or event == b"[DONE]"
        ):
            self._parse(event, now)
        else:
            self.chunk_times.append(now)
            self.last = now

    def _parse(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._saw_done = True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            raise ProtocolError(f"event is no JSON: {event[:80]!r}") from None
        if chunk.get("error"):
            self.error = f"in the stream: {_message(chunk)}"
            return
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta")
            text = _text(delta if delta is not None else choice)
            reason = choice.get("finish_reason")
            # A completions chunk may have no text (half a character) and still be a token. A chat chunk
            # without any only names the role; one that only gives the reason is a token if none came before.
            if text or (self.first is None if reason else delta is None or self.first is not None):
                self.first = now if self.first is None else self.first
                self.chunk_times.append(now)
                self.last = now
            self.finish_reason = reason or self.finish_reason
            if self.keep_text and text:
                self.text.append(text)

    def _finish(self, now: float) -> None:
        self.ended = now
        self.closes = self.parser.headers.get("connection", "").lower() == "close"
        if self.parser.status != 200:
            self.error = f"HTTP {self.parser.status}: {_message(self.json())}"
        elif self.stream:
            if not self._saw_done and self.error is None:
                self.error = "the stream ended without [DONE]"
        else:
            body = self.json()
            if not isinstance(body, dict):
                self.error = "the answer is no JSON object"
                return
            self.usage, self.timings = body.get("usage") or {}, body.get("timings") or {}
            for choice in body.get("choices") or ():
                self.finish_reason = choice.get("finish_reason")
                self.text.append(_text(choice.get("message") or choice))


def _text(part: dict[str, Any]) -> str:
    """The visible and the thought text of a choice, delta or message; a tool call counts by its arguments."""
    text = (
        part.get("content")
        or part.get("text")
        or part.get("reasoning_content")
        or part.get("reasoning")
        or ""
    )
    for call in part.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _message(body: Any) -> str:
    if isinstance(body, dict):
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    return str(body)[:300]


class _Channel(asyncio.Protocol):
    """One keep-alive connection, which carries one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    async def carry(self, request: bytes, exchange: Exchange) -> None:
        assert self.transport is not None
        self._exchange = exchange
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._waiter
        finally:
            if exchange.ended is None or exchange.closes:
                self.close()
            self._exchange = self._waiter = None

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        now = clock()
        if self._exchange is None:
            self.close()  # bytes nobody asked for: never reuse this connection
            return
        try:
            if self._exchange.feed(data, now):
                self._settle(None)
        except Exception as error:
            self._settle(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._exchange is not None:
            proper = self._exchange.closed(clock())
            self._settle(
                None if proper else ConnectionError(f"connection lost in mid-answer ({exc or 'closed'})")
            )

    def _settle(self, error: BaseException | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None) if error is None else self._waiter.set_exception(error)


class HttpClient:
    """Requests to one server over reused connections; make and use it inside one event loop.

    Close it there too: uvloop waits for ever when a loop ends with an open connection.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base URL must look like http://host:port, not {base_url!r}")
        self._host = url.hostname
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._ssl else 80)
        # Both http://host:8000 and http://host:8000/v1 are common spellings of a base URL.
        self._path = url.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._fixed = f"Host: {url.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{key}"
        self._idle: list[_Channel] = []

    async def send(self, exchange: Exchange, method: str, path: str, body: bytes = b"") -> None:
        """Carry out one exchange; OSError, ProtocolError or CancelledError when it breaks.

        `exchange.sent` is taken before a connection is found or made: the user waits for that too.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._fixed}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        exchange.sent = clock()
        while self._idle:
            channel = self._idle.pop()
            if not channel.usable:
                continue
            try:
                await channel.carry(request, exchange)
            except ConnectionError:
                if exchange.received:
                    raise
                continue  # the server had dropped this idle connection; another one may do
            self._keep(channel)
            return
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(_Channel, self._host, self._port, ssl=self._ssl)
        await channel.carry(request, exchange)
        self._keep(channel)

    async def get(self, path: str, seconds: float = 5.0) -> tuple[int, Any]:
        """Status and JSON body of a GET; OSError or TimeoutError when there is no answer."""
        exchange = Exchange(stream=False, keep_text=False)
        async with asyncio.timeout(seconds):
            await self.send(exchange, "GET", path)
        return exchange.parser.status, exchange.json()

    def _keep(self, channel: _Channel) -> None:
        if channel.usable:
            self._idle.append(channel)

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._idle:
            channel.close()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports finish closing
