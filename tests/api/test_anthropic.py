"""Anthropic's messages API over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from helios.errors import InternalError
from tests.api.conftest import CONTEXT, Server

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hello"}
TOOL = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def ask(server: Server, **fields: Any) -> Any:
    body = {"model": "alias", "max_tokens": 100, "messages": [USER], **fields}
    return asyncio.run(server.post(PATH, body))


def events_of(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert payload["type"] == name.removeprefix("event: ")
        found.append((payload["type"], payload))
    return found


def test_message_shape(server: Server) -> None:
    server.say("Hi.")
    body = ask(server, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "x"}}]).json()
    assert body["type"] == "message"
    assert body["role"] == "assistant"
    assert body["content"] == [{"type": "text", "text": "Hi."}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == len(server.ids("Hi.")) + 1
    prompt = server.tokenizer.decode(server.scheduler.jobs[-1].prompt_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_stop_reasons(server: Server) -> None:
    server.say("one two three")
    assert ask(server, max_tokens=1).json()["stop_reason"] == "max_tokens"
    stopped = ask(server, stop_sequences=["two"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    server.say(CALL)
    called = ask(server, tools=[TOOL]).json()
    assert called["stop_reason"] == "tool_use"
    assert called["content"][0]["input"] == {"city": "Oslo"}
    assert called["content"][0]["id"].startswith("toolu_")


def test_answer_longer_than_the_context_is_shortened(server: Server) -> None:
    """The field is compulsory here, and agents send what their largest model can."""
    server.say("x")
    assert ask(server, max_tokens=32_000).status_code == 200
    job = server.scheduler.jobs[-1]
    assert job.max_tokens == CONTEXT - job.num_prompt_tokens


def test_stream_of_thinking_text_and_tool(server: Server) -> None:
    """Blocks open and close one after the other, numbered."""
    server.say(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    thinking = {"type": "enabled", "budget_tokens": 50}
    response = ask(server, stream=True, tools=[TOOL], thinking=thinking)
    events = events_of(response.text)
    assert server.scheduler.jobs[-1].params.thinking_budget == 50
    names = [name for name, _ in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    starts = [event for name, event in events if name == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["thinking", "text", "tool_use"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    assert names.count("content_block_stop") == 3
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}
    for name, event in events:
        if name == "content_block_delta":
            delta = event["delta"]
            pieces[event["index"]] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            )
    assert pieces == {0: "Hm.", 1: "I look.", 2: '{"city": "Oslo"}'}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"]["output_tokens"] > 0


def test_agent_history_reaches_the_template(server: Server) -> None:
    """Tool results, thinking and text in the blocks that agents send."""
    server.say("ok")
    messages = [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I call.", "signature": "s"},
            {"type": "redacted_thinking", "data": "zzz"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    assert ask(server, messages=messages, tools=[TOOL]).status_code == 200
    prompt = server.tokenizer.decode(server.scheduler.jobs[-1].prompt_ids, skip_special_tokens=False)
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert "<|im_start|>user\nAnd now?" in prompt
    assert "zzz" not in prompt


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True)],
)
def test_tool_choice(server: Server, choice: dict[str, str], constrained: bool) -> None:
    server.say(CALL)
    assert ask(server, tools=[TOOL], tool_choice=choice).status_code == 200
    assert (server.scheduler.jobs[-1].params.grammar is not None) == constrained


def test_what_coding_agents_send_is_taken(server: Server) -> None:
    """Housekeeping fields must not stop an agent from connecting."""
    server.say("x")
    response = ask(
        server,
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": []},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        temperature=1,
        tools=[{**TOOL, "type": "custom", "eager_input_streaming": True}],
    )
    assert response.status_code == 200, response.text


def test_errors_have_anthropics_shape(server: Server) -> None:
    for fields, status, kind in (
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"model": "nope"}, 404, "not_found_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"frobnicate": 1}, 400, "invalid_request_error"),
    ):
        response = ask(server, **fields)
        assert response.status_code == status
        body = response.json()
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
    server.scheduler.queue_size = 0
    assert ask(server).json()["error"]["type"] == "overloaded_error"


def test_failure_within_a_stream(server: Server) -> None:
    server.say("Hello world and more")
    server.scheduler.error = InternalError("broken")
    server.scheduler.fail_after = 2
    events = events_of(ask(server, stream=True).text)
    assert events[-1][0] == "error"
    assert events[-1][1]["error"] == {"type": "api_error", "message": "broken"}


def test_tokens_are_counted(server: Server) -> None:
    server.say("x")
    ask(server, tools=[TOOL], system="Be brief.")
    body = {"model": "alias", "messages": [USER], "tools": [TOOL], "system": "Be brief."}
    counted = asyncio.run(server.post(f"{PATH}/count_tokens", body)).json()
    assert counted == {"input_tokens": len(server.scheduler.jobs[-1].prompt_ids)}


def test_json_schema_output(server: Server) -> None:
    server.say("{}")
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert ask(server, output_config={"format": form}).status_code == 200
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
