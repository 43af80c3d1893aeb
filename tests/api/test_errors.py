"""Errors: OpenAI's body, the right code, the field's name, and never more than a little of the input."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from helios.errors import InternalError, InvalidRequestError
from tests.api.conftest import Server, ServerFactory

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]

BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
    ({"temperature": -1}, "temperature", "integer_below_min_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "integer_below_min_value"),
    ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"min_p": 2}, "min_p", "integer_above_max_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"seed": 2**64}, "seed", "integer_above_max_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "integer_above_max_value"),
    ({"max_tokens": 10**9}, "messages", "context_length_exceeded"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop[0]", "invalid_value"),
    ({"stop": ["a"] * 65}, "stop", "array_above_max_length"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "integer_above_max_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "integer_above_max_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "integer_below_min_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"messages": []}, "messages", "array_below_min_length"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text",
     "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].image_url", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]",
     "unsupported_content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": ""}}]}]},
     "messages[0].tool_calls", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "color": "red"}]}, "messages[0].color",
     "unsupported_parameter"),
    ({"frobnicate": 1}, "frobnicate", "unsupported_parameter"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template",
     "unsupported_parameter"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking",
     "invalid_type"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"prediction": {"type": "content"}}, "prediction", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"reasoning_effort": "hard"}, "reasoning_effort", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema",
     "missing_required_parameter"),
    ({"regex": "a", "choice": ["b"]}, "choice", "invalid_value"),
    ({"guided_json": "not json"}, "guided_json", "invalid_value"),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "unsupported_parameter"),
    ({"timeout_seconds": 0}, "timeout_seconds", "integer_below_min_value"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS)
def test_bad_fields_are_named(server: Server, fields: dict[str, Any], param: str, code: str) -> None:
    """400 with the field and a string code; SDKs and people act on these."""
    response = asyncio.run(server.chat(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error["message"]
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"
    assert not server.scheduler.jobs


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_priority_needs_its_policy(make_server: ServerFactory, path: str, fields: dict[str, Any]) -> None:
    """Would catch a client that believes to be first, or a priority that does not reach the scheduler."""
    plain, urgent = make_server(), make_server(scheduling_policy="priority")
    refused = asyncio.run(plain.post(path, {**fields, "priority": -3}))
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "'priority'" in message
    assert "HELIOS_SCHEDULING_POLICY=fcfs" in message
    plain.say("x")
    urgent.say("x")
    assert asyncio.run(plain.post(path, {**fields, "priority": 0})).status_code == 200
    for priority in (-(2**31), 2**31 - 1):
        assert asyncio.run(urgent.post(path, {**fields, "priority": priority})).status_code == 200
        assert urgent.scheduler.jobs[-1].priority == priority
    for priority in (-(2**31) - 1, 2**31, 1.5, "1"):
        refused = asyncio.run(urgent.post(path, {**fields, "priority": priority}))
        assert refused.status_code == 400
        assert "'priority'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "y"},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "top_k": -1},
        {"temperature": None, "top_p": None, "stop": None, "seed": None, "n": None, "stream": None},
        {"tools": None, "tool_choice": None, "response_format": None, "logprobs": False},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"best_of": 1, "suffix": "", "functions": [], "modalities": ["text"], "verbosity": "medium"},
        {"anything_at_all": None, "chat_template": None, "length_penalty": 1.0, "use_beam_search": False},
        {"response_format": {"type": "text"}, "echo": False, "add_generation_prompt": True},
        {"chat_template_kwargs": {}, "stop": [], "stop_token_ids": []},
    ],
)
def test_neutral_and_harmless_fields_are_accepted(server: Server, fields: dict[str, Any]) -> None:
    """Frameworks send their defaults always."""
    server.say("x")
    response = asyncio.run(server.chat(**fields))
    assert response.status_code == 200, response.text


def send_raw(server: Server, content: bytes, kind: str = "application/json") -> Any:
    async def go() -> Any:
        async with server.client() as client:
            return await client.post(CHAT, content=content, headers={"content-type": kind})

    return asyncio.run(go())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": "\\ud800"}',
        b'{"temperature": NaN}',
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    ],
)
def test_unreadable_bodies(server: Server, content: bytes) -> None:
    """Malformed JSON is the client's fault: 400, quickly, whatever it is."""
    response = send_raw(server, content)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_wrong_content_type(server: Server) -> None:
    response = send_raw(server, b"messages=1", "application/x-www-form-urlencoded")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_content_type"


def test_large_bodies_are_refused_before_parsing(make_server: ServerFactory) -> None:
    """Announced or not."""
    server = make_server(max_body_bytes=1024)
    response = send_raw(server, b" " * 2000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"

    async def chunked() -> Any:
        async def parts() -> Any:
            for _ in range(100):
                yield b" " * 100

        async with server.client() as client:
            return await client.post(CHAT, content=parts(), headers={"content-type": "application/json"})

    assert asyncio.run(chunked()).status_code == 413


def test_messages_never_echo_much(server: Server) -> None:
    """An error body must not become as large as the request."""
    long = "x" * 50_000
    for fields in (
        {"temperature": long},
        {long: 1},
        {"model": long},
        {"messages": [{"role": long, "content": "x"}]},
        {"messages": [{"role": long}] * 100},
        {"stop": [5] * 1000},
        {"logit_bias": {long: "x"}},
        {"seed": 10**4000},
        {"tool_choice": {"type": "function", "function": {"name": long}}},
        {"response_format": {"type": long}},
        {"chat_template_kwargs": {long: 1}},
    ):
        response = asyncio.run(server.chat(**fields))
        assert response.status_code in (400, 404)
        assert len(response.content) < 6000, fields.keys()
        assert "x" * 250 not in response.text


def test_unknown_model_is_404(server: Server) -> None:
    response = asyncio.run(server.chat(model="gpt-9"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"
    server.say("x")
    assert asyncio.run(server.chat(model="alias")).json()["model"] == "org/model"


def test_routes_and_methods_have_the_same_shape(server: Server) -> None:
    """FastAPI's ``detail`` gives SDKs no code."""

    async def go() -> list[Any]:
        async with server.client() as client:
            return [await client.get("/nowhere"), await client.get(CHAT), await client.delete("/v1/models")]

    missing, wrong, delete = asyncio.run(go())
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]
    assert delete.status_code == 405


def test_full_queue_is_503_with_retry_after(server: Server) -> None:
    server.scheduler.queue_size = 0
    response = asyncio.run(server.chat())
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_full"
    assert response.headers["retry-after"] == "3"
    assert response.headers["x-should-retry"] == "true"


def test_failure_before_the_first_token_is_a_status(server: Server) -> None:
    """Also for a stream: its response has not begun."""
    server.scheduler.error = InternalError("The engine failed while computing this request.")
    for stream in (False, True):
        response = asyncio.run(server.chat(stream=stream))
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert response.headers["x-should-retry"] == "false"


def test_failure_within_a_stream_is_a_nested_event_and_done(server: Server) -> None:
    """A stream that just ends looks like a short answer; a flat error is swallowed."""
    server.say("Hello world and more")
    server.scheduler.error = InternalError("broken")
    server.scheduler.fail_after = 2
    events = asyncio.run(server.events(CHAT, {"messages": MESSAGES}))
    assert events[-1] == "[DONE]"
    assert events[-2] == {
        "error": {"message": "broken", "type": "server_error", "param": None, "code": "internal_error"}
    }
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_unexpected_exception_is_500_without_its_text(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug must not show its inside to clients, nor break the connection."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.frontend, "submit", broken)
    response = asyncio.run(server.chat())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-request-id"]


def test_unsupported_schema_is_400(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's refusal arrives before the request is queued."""

    def refuse(grammar: Any, param: str) -> object:
        raise InvalidRequestError("unsupported keyword 'not'", param=param)

    monkeypatch.setattr(server.grammars, "compile", refuse)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    response = asyncio.run(server.chat(response_format=schema))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    assert not server.scheduler.jobs


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "{}"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True,
          "schema": {"type": "object"}}}}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "ü"]}, "choice", '["a", "ü"]'),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_regex": "b"}, "regex", "b"),
        ({"guided_json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ],
)  # fmt: skip
def test_constraints_reach_the_engine(server: Server, fields: dict[str, Any], kind: str, text: str) -> None:
    """Under each of their names; after thinking where the model thinks."""
    server.say("x")
    assert asyncio.run(server.chat(**fields)).status_code == 200
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.starts_after) == (kind, None)
    if kind in ("json_schema", "choice"):
        assert json.loads(grammar.text) == json.loads(text)
    else:
        assert grammar.text == text
    asyncio.run(server.chat(**fields, enable_thinking=True))
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert grammar.starts_after == server.tokenizer.token_to_id("</think>")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 2000},
        {"messages": [{"role": "user", "content": "x"}] * 2049},
        {"messages": [{"role": "user", "content": [5] * 200_000}]},
        {"logit_bias": dict.fromkeys(map(str, range(200_000)), "x")},
        {"stop": [5] * 200_000},
        {"tools": [{}] * 200_000},
    ],
)
def test_a_million_problems_are_one(server: Server, fields: dict[str, Any]) -> None:
    """Building an error object for every entry of a large body would stop the event loop for seconds."""
    response = asyncio.run(server.chat(**fields))
    assert response.status_code == 400
    assert len(response.json()["error"]["message"]) < 300
    assert response.json()["error"]["param"].split("[")[0] == next(iter(fields))
