"""The server that answers on time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
from benchmarks.stand_in import application
from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "src" / "helios" / "demo_model"


def test_pieces_come_when_they_are_due_and_are_counted() -> None:
    """Would catch pieces that drift from the clock, which would make every client look wrong alike."""
    app = application(Tokenizer.from_file(str(DEMO / "tokenizer.json")), 0.05, 0.01)
    sent: list[float] = []
    bodies: list[bytes] = []

    async def ask() -> None:
        body = json.dumps({"prompt": "one two three", "max_tokens": 6, "stream": True}).encode()
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
            "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        asked = False

        async def receive() -> dict[str, object]:
            nonlocal asked
            if asked:
                await asyncio.sleep(10)
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                sent.append(time.perf_counter())
                bodies.append(message["body"])  # type: ignore[arg-type]

        start = time.perf_counter()
        await app(scope, receive, send)
        sent.insert(0, start)

    asyncio.run(ask())
    events = [json.loads(part[6:]) for part in bodies[:-1]]
    assert bodies[-1] == b"data: [DONE]\n\n"
    assert [event["choices"][0]["finish_reason"] for event in events[:6]] == [None] * 5 + ["length"]
    assert events[6]["usage"]["completion_tokens"] == 6
    assert events[6]["usage"]["prompt_tokens"] >= 3
    assert sent[6] - sent[0] >= 0.05 + 5 * 0.01 - 0.002, "no piece comes early"


def test_a_whole_answer_counts_alike() -> None:
    """Would catch counts that depend on streaming."""

    async def ask() -> dict[str, object]:
        app = application(Tokenizer.from_file(str(DEMO / "tokenizer.json")), 0.001, 0.001)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://stand-in"
        ) as client:
            return (await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 4})).json()

    assert asyncio.run(ask())["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
