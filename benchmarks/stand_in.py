"""A server that computes nothing and answers on time: for comparing clients, not servers.

    python benchmarks/stand_in.py --port 8200 --tokenizer FOLDER --first-ms 60 --gap-ms 8

``POST /v1/completions`` streams ``max_tokens`` pieces of text, the first after ``--first-ms`` and the others
``--gap-ms`` apart, kept to the clock and not to the last piece. What a client reports beyond that is its own
doing, so two clients that measure rightly report the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

MODEL = "stand-in"


def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """One event of a stream."""
    body = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": choices,
        **more,
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, output: int) -> dict[str, int]:
    """Token counts."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


class StandIn:
    """``first`` and ``gap`` are seconds."""

    def __init__(self, tokenizer: Tokenizer, first: float, gap: float) -> None:
        self._tokenizer = tokenizer
        self._first = first
        self._gap = gap

    async def complete(self, request: Request) -> Response:
        """Answer one request; times count from its arrival."""
        arrived = time.perf_counter()
        body = json.loads(await request.body())
        prompt, count = body["prompt"], int(body.get("max_tokens", 16))
        tokens = len(self._tokenizer.encode(prompt).ids) if isinstance(prompt, str) else len(prompt)
        if body.get("stream"):
            return StreamingResponse(self._stream(arrived, tokens, count), media_type="text/event-stream")
        await asyncio.sleep(self._first + (count - 1) * self._gap)
        choice = {"index": 0, "text": " x" * count, "finish_reason": "length"}
        return JSONResponse({"model": MODEL, "choices": [choice], "usage": usage(tokens, count)})

    async def _stream(self, arrived: float, tokens: int, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            due = arrived + self._first + number * self._gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            reason = "length" if number == count - 1 else None
            yield chunk([{"index": 0, "text": " x", "finish_reason": reason}])
        yield chunk([], usage=usage(tokens, count))
        yield b"data: [DONE]\n\n"


def application(tokenizer: Tokenizer, first: float, gap: float) -> Starlette:
    """The server's routes."""

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/completions", StandIn(tokenizer, first, gap).complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder with tokenizer.json, for counting"
    )
    parser.add_argument("--first-ms", type=float, default=60.0)
    parser.add_argument("--gap-ms", type=float, default=8.0)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    app = application(tokenizer, options.first_ms / 1e3, options.gap_ms / 1e3)
    uvicorn.run(app, port=options.port, log_level="warning", loop="uvloop", http="httptools")


if __name__ == "__main__":
    main()
