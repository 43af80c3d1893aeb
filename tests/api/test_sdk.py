"""The official SDKs against a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn

from helios.errors import InternalError
from tests.api.conftest import MODEL, Server, ServerFactory

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@contextmanager
def served(server: Server) -> Iterator[str]:
    """Run uvicorn in a thread; gives the base URL."""
    config = uvicorn.Config(server.app, host="127.0.0.1", port=0, log_level="error", http="httptools")
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    deadline = time.perf_counter() + 10
    while not runner.started and time.perf_counter() < deadline:
        time.sleep(0.01)
    port = runner.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        runner.should_exit = True
        thread.join(10)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with (
        served(server) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as sdk,
    ):
        yield sdk


def test_openai_chat(server: Server, client: openai.OpenAI) -> None:
    server.say("<think>\nHm.\n</think>\n\nHi.")
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body=extra
    )
    message: Any = answer.choices[0].message
    assert message.content == "Hi."
    assert message.reasoning_content == message.reasoning == "Hm."
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens
    assert answer.choices[0].logprobs is not None
    assert answer._request_id
    # What the SDK gave can be sent back as it is.
    again: Any = [*MESSAGES, message.model_dump(), {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model=MODEL, messages=again).choices[0].message.content


def test_openai_stream(server: Server, client: openai.OpenAI) -> None:
    server.say("Hello there, friend.")
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello there, friend."
    assert chunks[-1].usage is not None
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["timings"]["decode_tokens_per_second"] >= 0
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there, friend."


def test_openai_tools_in_several_steps(server: Server, client: openai.OpenAI) -> None:
    server.say(f"I look.\n{CALL}\n{CALL}")
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["get_weather"] * 2
    assert json.loads(message.tool_calls[1].function.arguments) == {"city": "Oslo"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    history: Any = [*MESSAGES, message.model_dump(exclude_none=True), *results]
    server.say("It rains.")
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."


def test_openai_completions_models_and_responses(server: Server, client: openai.OpenAI) -> None:
    server.say(" world")
    answer = client.completions.create(model=MODEL, prompt=["Hello", "Bye"], echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello world", "Bye world"]
    streamed = client.completions.create(model=MODEL, prompt="Hello", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == " world"
    assert client.models.retrieve(MODEL).id == MODEL
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    response = client.responses.create(model=MODEL, input="Hello")
    assert response.output_text == " world"
    kinds = [event.type for event in client.responses.create(model=MODEL, input="Hello", stream=True)]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        assert stream.get_final_response().output_text == " world"


def test_openai_parses_structured_output(server: Server, client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    server.say('{"name": "Oslo"}')
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Oslo")
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_openai_raises_for_an_error_within_the_stream(server: Server, client: openai.OpenAI) -> None:
    server.say("Hello world and more")
    server.scheduler.error = InternalError("broken in the middle")
    server.scheduler.fail_after = 2
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="broken in the middle"):
        list(stream)
    responses = client.responses.create(model=MODEL, input="Hello", stream=True)
    with pytest.raises(openai.APIError, match="broken in the middle"):
        list(responses)


def test_each_status_is_raised_as_its_class(make_server: ServerFactory) -> None:
    """400, 401, 404, 413, 429, 500 and 503, each from its own cause."""
    server = make_server(api_keys="key", max_body_bytes=20_000, max_requests_per_key=1)
    server.say("a b c d")
    with served(server) as url:
        good = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=20)
        bad = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0, timeout=20)

        def ask(sdk: openai.OpenAI, **fields: Any) -> Any:
            return sdk.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})

        with pytest.raises(openai.BadRequestError) as invalid:
            ask(good, temperature=9)
        assert (invalid.value.param, invalid.value.code) == ("temperature", "integer_above_max_value")
        assert invalid.value.request_id
        with pytest.raises(openai.AuthenticationError) as unknown_key:
            ask(bad)
        assert unknown_key.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError) as unknown_model:
            ask(good, model="nope")
        assert unknown_model.value.code == "model_not_found"
        with pytest.raises(openai.APIStatusError) as too_large:
            ask(good, messages=[{"role": "user", "content": "x" * 30_000}])
        assert too_large.value.status_code == 413
        server.scheduler.tick_seconds = 0.1
        first = ask(good, stream=True)
        with pytest.raises(openai.RateLimitError):
            ask(good)
        assert list(first)
        server.scheduler.error = InternalError("broken")
        with pytest.raises(openai.InternalServerError) as failed:
            ask(good)
        assert failed.value.status_code == 500
        server.scheduler.error = None
        server.scheduler.queue_size = 0
        with pytest.raises(openai.InternalServerError) as full:
            ask(good)
        assert (full.value.status_code, full.value.code) == (503, "queue_full")
        good.close()
        bad.close()


def test_closing_an_sdk_stream_cancels(server: Server, client: openai.OpenAI) -> None:
    server.scheduler.tick_seconds = 0.01
    server.scheduler.script = lambda job, choice: [5] * 2000
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, max_tokens=1900, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.perf_counter() + 5
    while not server.scheduler.jobs[-1].is_finished and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert server.scheduler.jobs[-1].cancelled
    assert server.scheduler.jobs[-1].num_output_tokens < 1000


def test_async_sdk_with_many_at_once(server: Server) -> None:
    server.say("One answer", "another")

    async def go(url: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
            calls = [sdk.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(16)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    with served(server) as url:
        assert asyncio.run(go(url)) == ["One answer"] * 16


def test_anthropic_sdk(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    with served(server) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as sdk:
        server.say(f"I look.\n{CALL}")
        tools = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}]
        fields: Any = {"model": MODEL, "max_tokens": 100, "messages": MESSAGES, "tools": tools}
        message = sdk.messages.create(**fields, system="Be brief.")
        assert [block.type for block in message.content] == ["text", "tool_use"]
        assert message.content[1].input == {"city": "Oslo"}
        assert message.stop_reason == "tool_use"
        with sdk.messages.stream(**fields) as stream:
            final = stream.get_final_message()
        assert final.content[0].text == "I look."
        assert final.content[1].input == {"city": "Oslo"}
        history = [
            *MESSAGES,
            {
                "role": "assistant",
                "content": [block.model_dump(exclude_none=True) for block in final.content],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": final.content[1].id, "content": "rain"}],
            },
        ]
        server.say("<think>\nHm.\n</think>\n\nIt rains.")
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = sdk.messages.create(
            **{**fields, "messages": history, "thinking": thinking, "max_tokens": 1500}
        )
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert sdk.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            sdk.messages.create(**{**fields, "model": "nope"})
        with pytest.raises(anthropic.BadRequestError):
            sdk.messages.create(**{**fields, "max_tokens": 0})
        server.say("Hello world and more")
        server.scheduler.error, server.scheduler.fail_after = InternalError("broken"), 2
        stream = sdk.messages.create(**fields, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="broken"):
            list(stream)
