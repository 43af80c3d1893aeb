"""The official ``anthropic`` SDK against a served demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import pytest

from tests.e2e.conftest import KEYS
from tests.e2e.server import PATIENCE, scheduler, wait_for

MODEL = "helios-demo"
GREEDY: Any = {"extra_body": {"temperature": 0}}  # this SDK no longer names the field
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: Any = {
    "name": "get_time",
    "description": "Get the current time in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def connect(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def client(demo: str) -> Iterator[anthropic.Anthropic]:
    with connect(demo) as made:
        yield made


def create(client: anthropic.Anthropic, messages: list[Any] | str, **fields: Any) -> anthropic.types.Message:
    sent = user(messages) if isinstance(messages, str) else messages
    return client.messages.create(**{"model": MODEL, "max_tokens": 200, "messages": sent, **GREEDY, **fields})


def test_message_whole_and_streamed(client: anthropic.Anthropic) -> None:
    """Would catch events out of order, a stream that differs from the whole message, or wrong usage."""
    whole = create(client, "Count to 10")
    assert [block.type for block in whole.content] == ["text"]
    assert whole.content[0].text == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
    assert (whole.stop_reason, whole.stop_sequence, whole.model) == ("end_turn", None, MODEL)
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=user("Count to 10"), **GREEDY
    ) as stream:
        kinds: list[str] = []
        deltas: list[str] = []
        for event in stream:
            kinds.append(event.type)
            if event.type == "text":
                deltas.append(event.text)
        final = stream.get_final_message()
    assert len(deltas) > 3
    assert "".join(deltas) == whole.content[0].text
    assert final.content[0].text == whole.content[0].text
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert final.usage.input_tokens == whole.usage.input_tokens > 0
    assert final.usage.output_tokens == whole.usage.output_tokens > 10
    assert final.stop_reason == "end_turn"


def test_length_and_stop_sequences(client: anthropic.Anthropic) -> None:
    """Would catch stop reasons in OpenAI's words, or a stop sequence left in the text."""
    assert create(client, "Count to 10", max_tokens=3).stop_reason == "max_tokens"
    stopped = create(client, "Count to 10", stop_sequences=["11", "7, 8"])
    assert stopped.content[0].text == "1, 2, 3, 4, 5, 6, "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "7, 8")
    # max_tokens is compulsory in this protocol: agents send their model's full answer length.
    assert create(client, "Count to 10", max_tokens=64000).stop_reason == "end_turn"


def test_system_as_text_and_as_blocks(client: anthropic.Anthropic) -> None:
    """Would catch a system prompt that does not reach the template, or cache_control being refused."""
    assert create(client, "Hello!", system="Answer in upper case.").content[0].text.isupper()
    blocks = [{"type": "text", "text": "Answer in upper case.", "cache_control": {"type": "ephemeral"}}]
    answer = create(
        client, [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}], system=blocks
    )
    assert answer.content[0].text.isupper()


def test_count_tokens_is_what_a_message_takes(client: anthropic.Anthropic) -> None:
    """Would catch a count that leaves out the system prompt, the tools or the template."""
    fields: Any = {
        "model": MODEL,
        "system": "Be brief.",
        "tools": [WEATHER],
        "messages": user("What is the weather in Oslo?"),
    }
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(**fields, max_tokens=5).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model=MODEL, messages=fields["messages"]).input_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_in_several_steps(client: anthropic.Anthropic, streamed: bool) -> None:
    """Would catch tool input that the SDK cannot put together, or SDK objects that cannot be sent back."""
    fields: Any = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER, TIME], **GREEDY}
    messages: list[Any] = user("What is the weather in Oslo?")
    if streamed:
        with client.messages.stream(**fields, messages=messages) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**fields, messages=messages)
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    result = [{"type": "text", "text": '{"temperature": 7, "sky": "clear"}'}]
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": result}]},
    ]
    answer = client.messages.create(**fields, messages=messages)
    assert answer.content[0].text == "The result is: temperature 7, sky clear"
    assert answer.stop_reason == "end_turn"


def test_tool_choice(client: anthropic.Anthropic) -> None:
    """Would catch a forced choice that is only a hope, or one that is not translated."""

    def calls(text: str, **choice: Any) -> list[str]:
        answer = create(client, text, tools=[WEATHER, TIME], tool_choice=choice)
        return [block.name for block in answer.content if block.type == "tool_use"]

    two = "What is the weather in Oslo and in Rome?"
    assert calls("Tell me about Oslo.", type="auto") == []
    assert len(calls("Tell me about Oslo.", type="any")) >= 1
    assert calls("What is the weather in Oslo?", type="tool", name="get_time") == ["get_time"]
    assert calls("What is the weather in Oslo?", type="none") == []
    assert calls(two, type="auto") == ["get_weather"] * 2
    assert calls(two, type="auto", disable_parallel_tool_use=True) == ["get_weather"]


def test_thinking(client: anthropic.Anthropic) -> None:
    """Would catch thinking as text, a budget without effect, or thinking blocks that cannot be sent back."""
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    messages: list[Any] = user("What is 17 + 25?")
    answer = create(client, messages, max_tokens=1500, thinking=thinking)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking
    assert answer.content[1].text == "17 + 25 = 42"
    with client.messages.stream(
        model=MODEL, max_tokens=1500, messages=messages, thinking=thinking, **GREEDY
    ) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == answer.content[0].thinking
    assert final.content[1].text == answer.content[1].text
    more = [*messages, {"role": "assistant", "content": answer.content}, *user("What is 3 + 4?")]
    assert create(client, more).content[0].text == "3 + 4 = 7"
    off = create(client, messages, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]
    short = create(client, messages, max_tokens=1500, thinking={"type": "enabled", "budget_tokens": 3})
    assert len(short.content[0].thinking) < len(answer.content[0].thinking)


def test_structured_output(client: anthropic.Anthropic) -> None:
    """Would catch output_config.format without effect."""
    schema = {"type": "object", "properties": {"mood": {"enum": ["calm", "cross"]}}, "required": ["mood"]}
    schema["additionalProperties"] = False
    answer = create(client, "Hello!", output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.content[0].text) in ({"mood": "calm"}, {"mood": "cross"})


def test_prompt_cache_is_reported(client: anthropic.Anthropic, demo: str) -> None:
    """Would catch cached tokens that are counted as input too."""
    httpx.post(f"{demo}/internal/cache/clear").raise_for_status()
    text = "The grass is green. The sky is blue. " * 40 + "What colour is the grass?"
    first, second = (create(client, text, max_tokens=4).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens
    assert second.cache_read_input_tokens % 256 == 0
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_async_client_with_many_at_once(demo: str) -> None:
    """Would catch answers that are mixed up between concurrent requests."""

    async def go() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=demo, api_key="none", max_retries=0) as sdk:
            calls = [
                sdk.messages.create(model=MODEL, max_tokens=60, messages=user(f"Count to {number}"), **GREEDY)
                for number in range(2, 14)
            ]
            return [answer.content[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(go()) == [", ".join(map(str, range(1, number + 1))) for number in range(2, 14)]


def test_bad_requests(client: anthropic.Anthropic) -> None:
    """Would catch OpenAI's error shape on this route, or a field without effect that is taken silently."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(client, "Hello!", model="claude-opus")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    for messages, fields in (
        ([{"role": "user", "content": [image]}], {}),
        (user("Hello!"), {"max_tokens": 0}),
        (user("Hello!"), {"extra_body": {"beam_width": 4}}),
        (user("Hello! " * 5000), {}),
        (user("Hello!"), {"tool_choice": {"type": "any"}}),
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            create(client, messages, **fields)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        assert refused.value.body["type"] == "error"  # type: ignore[index]


def test_keys_limits_and_a_full_queue(guarded: str) -> None:
    """Would catch an SDK that raises another class than the case has, or that a limit does not hold."""
    with ExitStack() as stack:
        one, three = (stack.enter_context(connect(guarded, key)) for key in (KEYS[0], KEYS[2]))
        with pytest.raises(anthropic.AuthenticationError):
            create(stack.enter_context(connect(guarded, "wrong")), "Hello!")
        with pytest.raises(anthropic.RequestTooLargeError):
            create(one, "x" * 5000)
        assert create(one, "Hello!", max_tokens=5).content
        probe = stack.enter_context(httpx.Client(base_url=guarded))
        body: Any = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}

        stack.enter_context(
            probe.stream(
                "POST", "/v1/completions", json=body, headers={"x-api-key": KEYS[0]}, timeout=PATIENCE
            )
        )
        with pytest.raises(anthropic.RateLimitError):
            create(one, "Hello!")
        waiting = asyncio.run(_refused_while_one_waits(guarded, probe, three))
        assert isinstance(waiting, anthropic.InternalServerError)
        assert waiting.status_code == 503
        assert int(waiting.response.headers["retry-after"]) >= 1


async def _refused_while_one_waits(
    url: str, probe: httpx.Client, third: anthropic.Anthropic
) -> anthropic.APIStatusError:
    """Key two's request waits behind key one's stream; gives what key three's is refused with."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEYS[1], max_retries=0) as second:
        waits = asyncio.create_task(
            second.messages.create(model=MODEL, max_tokens=5, messages=user("Hello!"))
        )
        await asyncio.to_thread(wait_for, lambda: scheduler(probe)["waiting"] == 1)
        with pytest.raises(anthropic.APIStatusError) as refused:
            await asyncio.to_thread(create, third, "Hello!")
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        return refused.value
