"""The official ``openai`` SDK against a served demo model: every feature, by the SDK's own means."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import KEYS
from tests.e2e.server import PATIENCE, scheduler, wait_for

MODEL = "helios-demo"
COUNTED = ", ".join(map(str, range(1, 11)))
GREETING = "Hello! How can I help you?"
PAGES = "The grass is green. The sky is blue. " * 40  # more than a page of 256 tokens
WILD: Any = {"temperature": 1.5, "top_p": 1, "max_tokens": 16, "extra_body": {"ignore_eos": True}}


def function(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


WEATHER = function("get_weather", "Get the current weather in a city.")
TIME = function("get_time", "Get the current time in a city.")
OSLO = "What is the weather in Oslo?"
TWO_CITIES = "What is the weather in Oslo and in Rome?"


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def connect(url: str, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, **{"max_retries": 0, "timeout": PATIENCE, **options}
    )


@pytest.fixture(scope="module")
def client(demo: str) -> Iterator[openai.OpenAI]:
    with connect(demo) as made:
        yield made


@pytest.fixture(scope="module")
def http(demo: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo, timeout=PATIENCE) as made:
        yield made


def chat(client: openai.OpenAI, messages: list[Any] | str, **fields: Any) -> Any:
    sent: Any = user(messages) if isinstance(messages, str) else messages
    return client.chat.completions.create(**{"model": MODEL, "messages": sent, "temperature": 0, **fields})


def say(client: openai.OpenAI, messages: list[Any] | str, **fields: Any) -> str:
    """The answer's text."""
    return chat(client, messages, **fields).choices[0].message.content


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "temperature": 0, **fields})


def tokens(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def clear(http: httpx.Client) -> int:
    return http.post("/internal/cache/clear").raise_for_status().json()["cleared_blocks"]


# -- text and streams ------------------------------------------------------------------------------


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    """Would catch a stream that loses, repeats or reorders text, chunks that are not one answer's, or usage
    that a stream counts differently."""
    whole = chat(client, "Count to 10")
    assert whole.choices[0].message.content == COUNTED
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(chat(client, "Count to 10", stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    *middle, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == COUNTED
    assert sum(bool(chunk.choices[0].delta.content) for chunk in middle) > 5
    assert [c.choices[0].finish_reason for c in middle if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in middle)
    assert last.choices == []
    assert last.usage == whole.usage
    assert last.model_extra["timings"]["completion_tokens"] == whole.usage.completion_tokens
    running = list(
        chat(
            client,
            "Count to 10",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in running]
    assert counts == sorted(counts)
    assert counts[-1] == whole.usage.completion_tokens


def test_streamed_unicode_is_whole(client: openai.OpenAI) -> None:
    """Would catch characters of several tokens that are sent in halves."""
    text = "👍🏽 héllo 世界"
    chunks = chat(client, f"Repeat: {text}", stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_messages_in_every_form(client: openai.OpenAI) -> None:
    """Would catch a developer role that is refused or dropped, list content that the template loses, and
    null content."""
    loud = {"role": "developer", "content": "Answer in upper case."}
    assert say(client, [loud, *user("Hello!")]) == GREETING.upper()
    parts = [{"type": "text", "text": "Count"}, {"type": "text", "text": "to 10"}]
    hello = [{"type": "text", "text": "Hello!"}]
    assert say(client, [{"role": "user", "content": hello}]) == GREETING
    joined = chat(client, [{"role": "user", "content": parts}], max_tokens=1).usage.prompt_tokens
    assert joined == chat(client, "Count\nto 10", max_tokens=1).usage.prompt_tokens
    assert say(client, [*user("Hi"), {"role": "assistant", "content": None}, *user("Count to 10")]) == COUNTED
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, [{"role": "user", "content": None}])
    assert refused.value.param == "messages[0].content"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, [{"role": "user", "content": [image]}])
    assert "messages[0].content[0]" in (refused.value.param or "")


def test_continue_final_message(client: openai.OpenAI) -> None:
    """Would catch an opened answer that is closed by the template, so that the model starts anew."""
    opened = [*user("Count to 10"), {"role": "assistant", "content": "1, 2, 3, 4"}]
    extra = {"continue_final_message": True}
    assert say(client, opened, extra_body=extra) == COUNTED.removeprefix("1, 2, 3, 4")
    extra["add_generation_prompt"] = False
    assert say(client, opened, extra_body=extra) == COUNTED.removeprefix("1, 2, 3, 4")


# -- sampling --------------------------------------------------------------------------------------


def test_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    """Would catch choices that share their random numbers, a seed that depends on n, and greedy choices that
    differ because one of them reads another's page."""
    texts = [choice.text for choice in complete(client, "Once", n=3, seed=8, **WILD).choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in complete(client, "Once", n=3, seed=8, **WILD).choices] == texts
    assert complete(client, "Once", seed=8, **WILD).choices[0].text == texts[0]
    other = [choice.text for choice in complete(client, "Once", n=3, seed=9, **WILD).choices]
    assert not set(other) & set(texts)
    answer = chat(client, "Count to 10", n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [COUNTED] * 3
    one = chat(client, "Count to 10").usage
    assert answer.usage.prompt_tokens == one.prompt_tokens  # computed, and counted, once
    assert answer.usage.completion_tokens == 3 * one.completion_tokens
    streamed: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in complete(client, "Once", n=3, seed=8, stream=True, **WILD):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


def test_a_seed_repeats_beside_other_requests(client: openai.OpenAI) -> None:
    """Would catch random numbers that depend on a row's place in the batch or on its neighbours."""
    long = {**WILD, "max_tokens": 48}
    alone = complete(client, PAGES, seed=77, **long).choices[0].text

    def ask(seed: int) -> str:
        prompt = PAGES if seed == 77 else "Once " * seed
        return complete(client, prompt, seed=seed, **long).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, [1, 2, 3, 77, 4, 5, 6, 7, 77, 8, 9, 10]))
    assert [texts[3], texts[8]] == [alone, alone]
    assert len(set(texts)) == 11


def test_logprobs(client: openai.OpenAI) -> None:
    """Would catch log probabilities that miss tokens, alternatives in the wrong order, or bytes that do not
    make up the text."""
    text = "👍🏽 ok"
    for stream in (False, True):
        answer = chat(client, f"Repeat: {text}", logprobs=True, top_logprobs=3, stream=stream)
        chunks = list(answer) if stream else [answer]
        entries = [
            entry
            for chunk in chunks
            if chunk.choices and chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
        raw = b"".join(bytes(entry.bytes) for entry in entries)
        assert raw.decode().removesuffix("<|im_end|>") == text
        for entry in entries:
            values = [top.logprob for top in entry.top_logprobs]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert entry.logprob == values[0] <= 0  # greedy
            assert entry.token == entry.top_logprobs[0].token
    plain = chat(client, "Hello!", logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in plain)
    assert chat(client, "Hello!").choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError):
        chat(client, "Hello!", top_logprobs=2)


def test_logit_bias(client: openai.OpenAI, http: httpx.Client) -> None:
    """Would catch a bias without effect, on the wrong token, or on the first token only."""
    first, how = tokens(http, "Hello")[0], tokens(http, " How")[0]
    banned = say(client, "Hello!", logit_bias={str(first): -100}, max_tokens=12)
    assert banned
    assert not banned.startswith("Hello")
    assert " How" not in say(client, "Hello!", logit_bias={str(how): -100}, max_tokens=12)
    assert say(client, "Hello!", logit_bias={str(how): 100}, max_tokens=5) == " How" * 5
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "Hello!", logit_bias={"999999": 1})
    assert refused.value.param == "logit_bias"


def test_penalties(client: openai.OpenAI) -> None:
    """Would catch penalties that are accepted and ignored, or of the wrong sign."""

    def different(**fields: Any) -> float:
        """The share of distinct words in free text."""
        answers = complete(client, "Once", n=4, seed=3, **{**WILD, "max_tokens": 32}, **fields)
        drawn = [choice.text.split() for choice in answers.choices]
        return sum(len(set(words)) / len(words) for words in drawn) / 4

    plain = different()
    assert different(frequency_penalty=2) > plain > different(frequency_penalty=-2)
    assert different(presence_penalty=2) > different(presence_penalty=-2)
    assert say(client, "Count to 20", frequency_penalty=2) != say(client, "Count to 20")
    greedy, ignore = complete(client, "Once", max_tokens=30).choices[0].text, {"ignore_eos": True}
    repeated = complete(client, "Once", max_tokens=30, extra_body={"repetition_penalty": 1.5, **ignore})
    assert repeated.choices[0].text != greedy


def test_other_samplers(client: openai.OpenAI) -> None:
    """Would catch top_k, min_p or a small top_p that does not narrow the choice to the best token."""
    greedy = complete(client, "Once", max_tokens=16, extra_body={"ignore_eos": True}).choices[0].text
    for narrow in ({"top_k": 1}, {"min_p": 1.0}):
        fields = {**WILD, "extra_body": {**WILD["extra_body"], **narrow}}
        assert complete(client, "Once", seed=1, **fields).choices[0].text == greedy
    assert complete(client, "Once", seed=1, **{**WILD, "top_p": 1e-6}).choices[0].text == greedy


# -- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, http: httpx.Client, stream: bool) -> None:
    """Would catch a stop string that is missed across tokens, sent in part, or found too late in a list."""
    across = "lo! Ho"
    strings = http.post("/tokenize", json={"prompt": GREETING, "return_token_strs": True}).json()
    assert not any(across in text for text in strings["token_strs"])

    def stopped(**fields: Any) -> tuple[str, Any]:
        extra = fields.pop("extra", {})
        answer = chat(client, fields.pop("text", "Hello!"), stream=stream, extra_body=extra, **fields)
        if not stream:
            choice = answer.choices[0]
            assert choice.finish_reason == "stop"
            return choice.message.content, choice.model_extra["stop_reason"]
        chunks = [chunk.choices[0] for chunk in answer]
        assert chunks[-1].finish_reason == "stop"
        return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].model_extra["stop_reason"]

    assert stopped(stop=across) == ("Hel", across)
    assert stopped(stop=["nowhere", "7, 8", "9"], text="Count to 10") == ("1, 2, 3, 4, 5, 6, ", "7, 8")
    assert stopped(stop="can", extra={"include_stop_str_in_output": True}) == ("Hello! How can", "can")
    how = tokens(http, " How")[0]
    assert stopped(extra={"stop_token_ids": [how]}) == ("Hello!", how)


def test_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    """Would catch an end token or a stop string that ends an answer before its least length."""
    assert chat(client, "Hello!", extra_body={"min_tokens": 30}).usage.completion_tokens >= 30
    late = chat(client, "Count to 10", stop=",", extra_body={"min_tokens": 8})
    assert late.usage.completion_tokens >= 8
    assert late.choices[0].message.content.startswith("1, 2, 3")
    endless = chat(client, "Hello!", max_tokens=50, extra_body={"ignore_eos": True})
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 50)


def test_max_tokens_default_clamp_and_refusal(client: openai.OpenAI, http: httpx.Client) -> None:
    """Would catch a default that does not fit and is refused, or an explicit limit that is silently cut."""
    endless = {"ignore_eos": True}
    assert chat(client, "Hello!", extra_body=endless).usage.completion_tokens == 256
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    close = tokens(http, "Once")[:1] * (limit - 20)
    answer = complete(client, close, extra_body=endless)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (20, "length")
    with pytest.raises(openai.BadRequestError, match=str(limit)) as refused:
        chat(client, "Hello!", max_completion_tokens=limit)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, close + close[:30])
    assert refused.value.code == "context_length_exceeded"
    assert chat(client, "Count to 10", max_completion_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError):
        chat(client, "Hello!", max_completion_tokens=3, max_tokens=4)


# -- tools -----------------------------------------------------------------------------------------


def calls(answer: Any) -> list[tuple[str, Any]]:
    found = answer.choices[0].message.tool_calls or []
    assert len({call.id for call in found}) == len(found)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


def test_tool_choice(client: openai.OpenAI) -> None:
    """Would catch a forced call that is only a hope, tools that are seen although none may be called, and
    parallel calls that cannot be switched off."""
    both = {"tools": [WEATHER, TIME]}
    answer = chat(client, OSLO, **both)
    assert calls(answer) == [("get_weather", {"city": "Oslo"})]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert calls(chat(client, OSLO, tool_choice="auto", **both)) == calls(answer)
    named = {"type": "function", "function": {"name": "get_time"}}
    assert calls(chat(client, OSLO, tool_choice=named, **both)) == [("get_time", {"city": "Oslo"})]
    assert calls(chat(client, "Tell me about Oslo.", **both)) == []
    forced = chat(client, "Tell me about Oslo.", tool_choice="required", **both)
    assert forced.choices[0].finish_reason == "tool_calls"
    assert all(set(arguments) == {"city"} for _, arguments in calls(forced))
    none = chat(client, OSLO, tool_choice="none", **both)
    assert calls(none) == []
    assert none.usage.prompt_tokens == chat(client, OSLO).usage.prompt_tokens
    two = [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})]
    assert calls(chat(client, TWO_CITIES, **both)) == two
    assert calls(chat(client, TWO_CITIES, parallel_tool_calls=False, **both)) == two[:1]
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, OSLO, tool_choice="required")
    assert refused.value.param == "tool_choice"


def test_streamed_tool_calls_are_put_together(client: openai.OpenAI) -> None:
    """Would catch deltas without index, id or name, or arguments that do not join to JSON."""
    body: Any = {
        "model": MODEL,
        "messages": user(TWO_CITIES),
        "tools": [WEATHER, TIME],
        "temperature": 0,
    }
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion()
    assert calls(final) == [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})]
    assert final.choices[0].finish_reason == "tool_calls"
    chunks = list(client.chat.completions.create(**body, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [delta.index for delta in deltas if delta.id] == [0, 1]
    assert "tool_call" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_dialogue_to_the_answer(client: openai.OpenAI, streamed: bool) -> None:
    """Would catch SDK objects that cannot be sent back, or results that do not reach the model."""
    body: Any = {"model": MODEL, "tools": [WEATHER, TIME], "temperature": 0}
    messages: list[Any] = user(OSLO)
    results = {"get_weather": '{"temperature": 7, "sky": "clear"}', "get_time": '{"time": "noon"}'}

    def step() -> Any:
        if not streamed:
            return client.chat.completions.create(**body, messages=messages)
        with client.chat.completions.stream(**body, messages=messages) as stream:
            return stream.get_final_completion()

    asked: list[str] = []
    for question in (None, "What time is it in Rome?"):
        if question:
            messages += user(question)
        while (answer := step()).choices[0].finish_reason == "tool_calls":
            message = answer.choices[0].message
            messages.append(message.model_dump() if streamed else message)
            for call in message.tool_calls:
                asked.append(call.function.name)
                result = results[call.function.name]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            assert len(asked) < 6
        messages.append(answer.choices[0].message)
        if question is None:
            assert answer.choices[0].message.content == "The result is: temperature 7, sky clear"
    assert asked == ["get_weather", "get_time"]
    assert messages[-1].content == "The result is: time noon"


# -- constrained output ----------------------------------------------------------------------------


class Mood(BaseModel):
    mood: Literal["calm", "cross"]
    old: bool
    tag: Literal["a", "b"] | None


def test_json_object_and_schema(client: openai.OpenAI) -> None:
    """Would catch output that is no JSON, or a schema that does not bind, alone, streamed, after thinking,
    and beside unconstrained neighbours."""
    form = {"type": "json_object"}
    assert isinstance(json.loads(say(client, "Give me JSON", response_format=form)), dict)
    body: Any = {
        "model": MODEL,
        "messages": user("Hello!"),
        "response_format": Mood,
        "temperature": 0,
    }
    parsed = client.chat.completions.parse(**body).choices[0].message.parsed
    assert isinstance(parsed, Mood)
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    thought = client.chat.completions.parse(**body, extra_body={"enable_thinking": True}).choices[0].message
    assert isinstance(thought.parsed, Mood)
    assert thought.model_extra
    assert thought.model_extra["reasoning_content"]

    def ask(number: int) -> Any:
        if number % 2:
            return say(client, "Count to 10")
        return client.chat.completions.parse(**body).choices[0].message.parsed

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [parsed, COUNTED] * 4


def test_json_beside_tools_allows_both(client: openai.OpenAI) -> None:
    """Would catch an agent with a typed result that can no longer call its tools."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "result", "schema": schema}}
    assert calls(chat(client, OSLO, tools=[WEATHER], response_format=form)) == [
        ("get_weather", {"city": "Oslo"})
    ]
    assert json.loads(say(client, "Hello!", response_format=form))["ok"] in (True, False)


@pytest.mark.parametrize("name", ["regex", "guided_regex", "structured_outputs"])
def test_regex_and_choice(client: openai.OpenAI, name: str) -> None:
    """Would catch a constraint that only one of its names switches on."""
    pattern, words = "[0-9]{3}-[ab]+c", ["never", "seldom"]
    nested = name == "structured_outputs"
    extra: dict[str, Any] = {name: {"regex": pattern} if nested else pattern}
    assert re.fullmatch(pattern, say(client, "Hello!", extra_body=extra))
    extra = {name.replace("regex", "choice"): {"choice": words} if nested else words}
    assert say(client, "Hello!", extra_body=extra) in words
    assert complete(client, "Once", extra_body=extra).choices[0].text in words


def test_schema_that_cannot_be_served(client: openai.OpenAI) -> None:
    """Would catch a keyword that is silently ignored, or a 500 for a schema that is none."""
    for schema, said in (
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "no such type"}, "schema"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            chat(client, "Hello!", response_format=form)
        assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "Hello!", extra_body={"regex": "(["})
    assert refused.value.param == "regex"
    with pytest.raises(openai.BadRequestError):
        chat(client, "Hello!", extra_body={"regex": "a", "choice": ["a"]})


# -- thinking --------------------------------------------------------------------------------------


def test_thinking(client: openai.OpenAI) -> None:
    """Would catch thinking within the content, under one name only, without a count, or that cannot be
    switched off, limited or sent back."""
    question = "What is 17 + 25?"
    on: Any = {"extra_body": {"enable_thinking": True}}
    answer = chat(client, question, **on)
    message = answer.choices[0].message
    assert message.content == "17 + 25 = 42"
    assert message.reasoning_content == message.reasoning
    assert "carry" in message.reasoning
    assert answer.usage.completion_tokens_details.reasoning_tokens > 10
    streamed: dict[str, str] = {"content": "", "reasoning": "", "reasoning_content": ""}
    for chunk in chat(client, question, stream=True, **on):
        for name, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
            if name in streamed:
                streamed[name] += value
    assert streamed["content"] == message.content
    assert streamed["reasoning"] == streamed["reasoning_content"] == message.reasoning
    for effort, thinks in (("low", True), ("high", True), ("none", False)):
        other = chat(client, question, reasoning_effort=effort).choices[0].message
        assert bool(other.reasoning_content) == thinks
        assert other.content == message.content
    nested = chat(client, question, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert nested.choices[0].message.reasoning == message.reasoning
    short = chat(client, question, extra_body={"enable_thinking": True, "thinking_budget": 3})
    assert short.usage.completion_tokens_details.reasoning_tokens <= 5
    assert len(short.choices[0].message.reasoning) < len(message.reasoning)
    assert short.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, question, extra_body={"thinking_budget": 3})
    assert refused.value.param == "thinking_budget"
    for name in ("reasoning", "reasoning_content"):
        said = {"role": "assistant", "content": message.content, name: message.reasoning}
        assert say(client, [*user(question), said, *user("What is 3 + 4?")]) == "3 + 4 = 7"
    both = chat(client, OSLO, tools=[WEATHER], **on)
    assert both.choices[0].message.reasoning
    assert calls(both) == [("get_weather", {"city": "Oslo"})]


# -- completions -----------------------------------------------------------------------------------


def test_completions(client: openai.OpenAI, http: httpx.Client) -> None:
    """Would catch prompts that are numbered wrongly, text and ids that differ, or an echo that loses the
    prompt or its log probabilities."""
    prompts = ["Once upon", "The KV cache"]
    alone = [complete(client, prompt, max_tokens=8).choices[0].text for prompt in prompts]
    together = complete(client, prompts, max_tokens=8).choices
    assert [(choice.index, choice.text) for choice in together] == list(enumerate(alone))
    ids = [tokens(http, prompt) for prompt in prompts]
    assert complete(client, ids[0], max_tokens=8).choices[0].text == alone[0]
    assert [choice.text for choice in complete(client, ids, max_tokens=8).choices] == alone
    several = complete(client, prompts, n=2, max_tokens=8).choices
    assert [choice.text for choice in several] == [alone[0], alone[0], alone[1], alone[1]]
    streamed = ["", ""]
    for chunk in complete(client, prompts, max_tokens=8, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone
    echoed = complete(client, prompts[1], max_tokens=4, echo=True, logprobs=2).choices[0]
    assert echoed.text.startswith(prompts[1])
    logprobs = echoed.logprobs
    assert "".join(logprobs.tokens) == echoed.text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(ids[1]) + 4
    assert logprobs.text_offset == list(itertools.accumulate(map(len, logprobs.tokens[:-1]), initial=0))
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
    scored = complete(client, prompts[1], max_tokens=0, echo=True, logprobs=0)
    assert scored.choices[0].text == prompts[1]
    assert scored.usage.completion_tokens == 0
    for bad in ({"suffix": "x"}, {"best_of": 3}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, "Once", **bad)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", next(iter(bad)))


# -- responses, models -----------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    """Would catch a listed name that cannot be retrieved or asked."""
    names = [model.id for model in client.models.list()]
    assert MODEL in names
    for name in names:
        assert client.models.retrieve(name).id == name
        assert say(client, "Hello!", model=name) == GREETING
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        say(client, "Hello!", model="gpt-4")


def test_responses(client: openai.OpenAI) -> None:
    """Would catch events that the SDK cannot put together, or items that cannot be sent back."""
    fields: Any = {"model": MODEL, "temperature": 0}
    whole = client.responses.create(**fields, input="Count to 10", instructions="Be brief.")
    assert (whole.output_text, whole.status) == (COUNTED, "completed")
    events = list(client.responses.create(**fields, input="Count to 10", stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == COUNTED
    with client.responses.stream(**fields, input="Count to 10") as stream:
        assert stream.get_final_response().output_text == COUNTED
    cut = client.responses.create(**fields, input="Count to 10", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"
    thought = client.responses.create(**fields, input="What is 17 + 25?", reasoning={"effort": "low"})
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    mood = client.responses.parse(**fields, input="Hello!", text_format=Mood)
    assert isinstance(mood.output_parsed, Mood)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**fields, input="Hello!", previous_response_id=whole.id)
    assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_with_tools(client: openai.OpenAI, streamed: bool) -> None:
    """Would catch a call or its result that is lost in the flat form of this API."""
    fields: Any = {
        "model": MODEL,
        "temperature": 0,
        "tools": [{"type": "function", **WEATHER["function"]}],
    }
    items: list[Any] = user(OSLO)
    if streamed:
        with client.responses.stream(**fields, input=items) as stream:
            first = stream.get_final_response()
    else:
        first = client.responses.create(**fields, input=items)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Oslo"},
    )
    result = '{"temperature": 7, "sky": "clear"}'
    dumped = call.model_dump(exclude_none=True, exclude={"parsed_arguments"})
    items += [dumped, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    assert client.responses.create(**fields, input=items).output_text == (
        "The result is: temperature 7, sky clear"
    )


# -- fields ----------------------------------------------------------------------------------------


def test_unknown_fields_are_refused_by_name(client: openai.OpenAI) -> None:
    """Would catch a field that a caller believes in and that has no effect."""
    for fields, param in (
        ({"extra_body": {"beam_width": 4}}, "beam_width"),
        ({"extra_body": {"best_of": 4}}, "best_of"),
        ({"extra_body": {"stream_options": {"x": 1}, "stream": True}}, "stream_options.x"),
        ({"extra_body": {"messages": [{**user("x")[0], "colour": 1}]}}, "messages[0].colour"),
        ({"verbosity": "low"}, "verbosity"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, "Hello!", **fields)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
    for fields, param in (
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"max_tokens": "many"}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, "Hello!", **fields)
        assert refused.value.param == param


def test_neutral_and_harmless_values_are_accepted(client: openai.OpenAI) -> None:
    """Would catch a framework that sends its defaults and is refused."""
    harmless: Any = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "verbosity": "medium",
        "modalities": ["text"],
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "stop": None,
    }
    extra = {"best_of": 1, "length_penalty": 1.0, "use_beam_search": False, "top_k": -1, "min_p": 0.0}
    extra |= {"repetition_penalty": 1.0, "audio": None, "prediction": None, "add_special_tokens": False}
    assert say(client, "Hello!", **harmless, extra_body=extra) == GREETING


# -- prefix cache ----------------------------------------------------------------------------------


def cached(client: openai.OpenAI, **extra: Any) -> int:
    answer = chat(client, PAGES + "What colour is the grass?", max_tokens=2, extra_body=extra)
    return answer.usage.prompt_tokens_details.cached_tokens


def test_prefix_cache_salt_and_clearing(client: openai.OpenAI, http: httpx.Client) -> None:
    """Would catch hits that are not reported, prefixes shared between salts, or a cache that stays."""
    clear(http)
    assert cached(client) == 0
    assert cached(client) >= 256
    assert cached(client) % 256 == 0
    assert cached(client, cache_salt="a") == 0
    assert cached(client, cache_salt="a") >= 256
    assert cached(client, cache_salt="b") == 0
    assert clear(http) >= 3
    assert cached(client) == 0
    assert http.request("DELETE", "/internal/cache").json()["cleared_blocks"] >= 1
    assert cached(client) == 0


# -- operation -------------------------------------------------------------------------------------


def test_request_id(client: openai.OpenAI) -> None:
    """Would catch an answer or an error that cannot be found in the log."""
    answer = chat(client, "Hello!", extra_headers={"x-request-id": "trace-1"})
    assert answer._request_id == "trace-1"
    assert answer.id != "trace-1"
    assert chat(client, "Hello!")._request_id
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "Hello!", n=0, extra_headers={"x-request-id": "trace-2"})
    assert refused.value.request_id == "trace-2"


def test_a_client_that_goes_frees_its_row(client: openai.OpenAI, http: httpx.Client, demo: str) -> None:
    """Would catch an answer that is computed for nobody, streamed or not."""
    wait_for(lambda: scheduler(http)["running"] == 0)
    endless: Any = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    stream = chat(client, "Hello!", stream=True, n=3, **endless)
    next(iter(stream))
    assert scheduler(http)["running"] == 3
    stream.close()
    wait_for(lambda: scheduler(http)["running"] == 0, seconds=2)

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=f"{demo}/v1", api_key="none", max_retries=0) as sdk:
            body: Any = {"model": MODEL, "messages": user("Hello!"), **endless}
            task = asyncio.create_task(sdk.chat.completions.create(**body))
            await asyncio.to_thread(wait_for, lambda: scheduler(http)["running"] == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())
    wait_for(lambda: scheduler(http)["running"] == 0, seconds=2)
    assert scheduler(http)["pages_referenced"] == 0


def test_async_client_with_many_at_once(demo: str) -> None:
    """Would catch answers that are mixed up when there are more requests than rows."""

    async def go() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{demo}/v1", api_key="none", max_retries=0) as sdk:
            body: Any = {"model": MODEL, "temperature": 0}
            made = [
                sdk.chat.completions.create(**body, messages=user(f"Count to {number}"))
                for number in range(2, 22)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*made)]

    assert asyncio.run(go()) == [", ".join(map(str, range(1, number + 1))) for number in range(2, 22)]


def test_deadline(client: openai.OpenAI) -> None:
    """Would catch a deadline that is not kept, or that ends in another class than retries look for."""
    endless: Any = {"max_tokens": 1900, "extra_body": {"ignore_eos": True, "timeout_seconds": 0.2}}
    with pytest.raises(openai.InternalServerError) as late:
        chat(client, "Hello!", **endless)
    assert (late.value.status_code, late.value.code) == (503, "deadline_exceeded")
    with pytest.raises(openai.APIError, match="deadline"):
        list(chat(client, "Hello!", stream=True, **endless))


def test_keys_and_sizes(guarded: str) -> None:
    """Would catch a route without a guard, a size that is not checked, or a wrong class of error."""
    with connect(guarded, "key-on") as bad:
        for ask in (lambda: chat(bad, "Hello!"), bad.models.list, lambda: complete(bad, "x")):
            with pytest.raises(openai.AuthenticationError) as refused:
                ask()
            assert refused.value.code == "invalid_api_key"
    open_to_all = [httpx.get(guarded + path).status_code for path in ("/health", "/ready", "/live")]
    assert open_to_all == [200] * 3
    closed = ("/metrics", "/version", "/internal/cache", "/v1/models", "/openapi.json")
    assert [httpx.get(guarded + path).status_code for path in closed] == [401] * len(closed)
    assert httpx.post(f"{guarded}/internal/cache/clear").status_code == 401
    with connect(guarded, KEYS[0]) as good:
        assert say(good, "Hello!") == GREETING
        with pytest.raises(openai.APIStatusError) as large:
            chat(good, "x" * 5000)
        assert (large.value.status_code, large.value.code) == (413, "payload_too_large")
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    assert httpx.post(f"{guarded}/internal/cache/clear", headers=headers).status_code == 200


def test_rate_limit_and_full_queue(guarded: str) -> None:
    """Would catch a limit that another key's requests use up, one that is not given back, or a queue without
    a bound."""
    endless: Any = {"max_tokens": 3900, "extra_body": {"ignore_eos": True}}
    with ExitStack() as stack:
        one, two, three = (stack.enter_context(connect(guarded, key)) for key in KEYS)
        probe = stack.enter_context(httpx.Client(base_url=guarded))
        wait_for(lambda: scheduler(probe)["running"] == 0)
        running = chat(one, "Hello!", stream=True, **endless)
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as limited:
            chat(one, "Hello!")
        assert limited.value.code == "rate_limit_exceeded"
        assert limited.value.response.headers["x-should-retry"] == "true"
        said: list[str] = []
        waiting = threading.Thread(target=lambda: said.append(say(two, "Hello!")))
        waiting.start()
        wait_for(lambda: scheduler(probe)["waiting"] == 1)
        with pytest.raises(openai.InternalServerError) as full:
            chat(three, "Hello!")
        assert (full.value.status_code, full.value.code) == (503, "queue_full")
        assert int(full.value.response.headers["retry-after"]) >= 1
        running.close()
        waiting.join(PATIENCE)
        assert said == [GREETING]  # it waited, and was served
        assert say(one, "Hello!") == GREETING  # the limit was given back
