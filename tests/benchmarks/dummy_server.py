"""A dummy OpenAI-compatible server: counts and times are exact, no model. Also a script, for process tests.

python dummy_server.py --port 8000 --interval-ms 1
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Behaviour:
    """How the dummy answers; intervals in seconds."""

    first_token_seconds: float = 0.0
    interval_seconds: float = 0.0
    tokens_per_chunk: int = 1
    keep_alive: bool = False
    error_after: int | None = None  # an error event instead of this token
    drop_after: int | None = None  # close the connection instead of this token
    usage: bool = True
    cached_tokens: int = 0
    health: bool = True
    close: bool = False  # answer with Connection: close
    refuse: tuple[int, str] | None = None
    ready_after: int = 0  # health checks that are answered 503 before
    bodies: list[dict[str, Any]] = field(default_factory=list)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class DummyServer:
    """Serves on a free port of 127.0.0.1 inside `async with`."""

    def __init__(self, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        self.port = port
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "DummyServer":
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = int(head.lower().partition("content-length:")[2].partition("\r")[0] or 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self.answer(writer, method, path, body)
                if self.behaviour.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            writer.close()

    def whole(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        closing = "Connection: close\r\n" if self.behaviour.close else ""
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n{closing}\r\n".encode() + data)

    async def answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: dict[str, Any]
    ) -> None:
        how = self.behaviour
        if path == "/health":
            if not how.health:
                self.whole(writer, 404, {"error": {"message": "no such page"}})
            elif how.ready_after > 0:
                how.ready_after -= 1
                self.whole(writer, 503, {"status": "starting", "stage": "loading weights"})
            else:
                self.whole(writer, 200, {"status": "ok", "stage": "ready"})
        elif path == "/v1/models":
            self.whole(writer, 200, {"object": "list", "data": [{"id": "dummy", "object": "model"}]})
        elif method != "POST":
            self.whole(writer, 404, {"error": {"message": "no such page"}})
        else:
            how.bodies.append(body)
            if how.refuse is not None:
                self.whole(writer, how.refuse[0], {"error": {"message": how.refuse[1]}})
            elif body.get("stream"):
                await self.stream(writer, "messages" in body, body)
            else:
                await self.complete(writer, "messages" in body, body)

    def counts(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"]).split()
        made = body.get("max_tokens", 16)
        details = {"cached_tokens": self.behaviour.cached_tokens}
        return {"prompt_tokens": len(prompt), "completion_tokens": made, "prompt_tokens_details": details}

    async def complete(self, writer: asyncio.StreamWriter, chat: bool, body: dict[str, Any]) -> None:
        text = "word " * body["max_tokens"]
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        timings = {"time_to_first_token_seconds": 0.25, "decode_tokens_per_second": 80.0}
        usage = self.counts(body)
        choices = [{"index": 0, "finish_reason": "length", **choice}]
        self.whole(writer, 200, {"choices": choices, "usage": usage, "timings": timings})

    async def stream(self, writer: asyncio.StreamWriter, chat: bool, body: dict[str, Any]) -> None:
        how = self.behaviour
        made = body.get("max_tokens", 16)

        def part(text: str, reason: str | None = None) -> bytes:
            inner = {"delta": {"content": text}} if chat else {"text": text, "logprobs": None}
            choice = {"index": 0, **inner, "finish_reason": reason}
            return chunk(event({"id": "c-1", "object": "chunk", "model": "dummy", "choices": [choice]}))

        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head)
        if chat:
            writer.write(
                chunk(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
            )
        token = part(" word" * how.tokens_per_chunk)
        await asyncio.sleep(how.first_token_seconds)
        for index in range(0, made, how.tokens_per_chunk):
            if index and how.interval_seconds:
                await asyncio.sleep(how.interval_seconds)
            if how.error_after is not None and index >= how.error_after:
                writer.write(
                    chunk(event({"error": {"message": "the page pool is gone", "code": 500}})) + b"0\r\n\r\n"
                )
                return
            if how.drop_after is not None and index >= how.drop_after:
                await writer.drain()
                writer.close()
                return
            if how.keep_alive:
                writer.write(chunk(b": keep-alive\n\n"))
            writer.write(token)
        tail = part("", "length")
        if how.usage:
            tail += chunk(event({"choices": [], "usage": self.counts(body)}))
        writer.write(tail + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true", help="end at once with a complaint")
    options = parser.parse_args()
    if options.fail:
        sys.exit("cannot start: no such model")
    async with DummyServer(Behaviour(interval_seconds=options.interval_ms / 1000), options.port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
