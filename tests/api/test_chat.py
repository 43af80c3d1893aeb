"""Chat completions over HTTP: bodies, streams, reasoning, tools."""

from __future__ import annotations

import asyncio

from tests.api.conftest import MODEL, Server

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def test_answer_has_openais_shape(server: Server) -> None:
    """A missing key breaks the SDK's typed models."""
    server.say("Hi there.")
    response = asyncio.run(server.chat())
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"]["content"] == "Hi there."
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(server.ids("Hi there.")) + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["timings"]["time_to_first_token_seconds"] > 0


def test_stream_order_is_role_deltas_finish_usage_done(server: Server) -> None:
    """SDKs rely on this order."""
    server.say("Hi there.")
    body = {"messages": MESSAGES, "stream_options": {"include_usage": True}}
    events = asyncio.run(server.events(CHAT, body))
    assert events[-1] == "[DONE]"
    first, *deltas, finish, usage = events[:-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in deltas) == "Hi there."
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(server.ids("Hi there.")) + 1
    assert usage["timings"]["end_to_end_seconds"] > 0
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in events[:-1]}) == 1
    assert {chunk["object"] for chunk in events[:-1]} == {"chat.completion.chunk"}
