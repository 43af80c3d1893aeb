"""Tools over HTTP: choice, order of deltas, malformed calls, dialogues in several steps."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from helios.runtime.prompt_encoder import StructuralTokens
from helios.runtime.tool_grammar import tool_call_grammar
from tests.api.conftest import Server

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_call_is_returned_and_streamed_in_order(server: Server) -> None:
    """First id, type, name and empty arguments; then pieces of arguments; then the reason."""
    server.say(f"I look.\n{CALL}")
    choice = asyncio.run(server.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    called = choice["message"]["tool_calls"][0]
    assert called["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert called["id"].startswith("call_")
    events = asyncio.run(server.events(CHAT, {"messages": MESSAGES, "tools": [WEATHER]}))
    chunks = [event["choices"][0] for event in events[:-1]]
    deltas = [chunk["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["delta"]]
    first, *rest = deltas
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert all(set(delta) == {"index", "function"} for delta in rest)
    assert len(rest) > 1
    assert "".join(delta["function"]["arguments"] for delta in rest) == '{"city": "Oslo"}'
    assert chunks[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_function_without_arguments_gets_an_empty_object(server: Server, stream: bool) -> None:
    """``arguments: ""`` makes json.loads fail in every client."""
    server.say('<tool_call>\n{"name": "now"}\n</tool_call>')
    if stream:
        events = asyncio.run(server.events(CHAT, {"messages": MESSAGES, "tools": [NOW]}))
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert "".join(pieces) == "{}"
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    else:
        choice = asyncio.run(server.chat(tools=[NOW])).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
        assert choice["message"]["content"] is None


def test_malformed_call_is_content(server: Server) -> None:
    """Nothing the model wrote may vanish."""
    text = "<tool_call>\n{oops}\n</tool_call>"
    server.say(text)
    choice = asyncio.run(server.chat(tools=[NOW])).json()["choices"][0]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_tool_choice_none_leaves_tools_out(server: Server) -> None:
    """The model must neither see them nor have its text parsed for them."""
    server.say(CALL)
    choice = asyncio.run(server.chat(tools=[WEATHER], tool_choice="none")).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    prompt = server.tokenizer.decode(server.scheduler.jobs[-1].prompt_ids, skip_special_tokens=False)
    assert "get_weather" not in prompt


def test_tools_reach_the_prompt_as_they_were_sent(server: Server) -> None:
    """Reordered keys change the prompt's tokens and miss the prefix cache."""
    server.say("x")
    tool = {
        "function": {"parameters": {"type": "object"}, "name": "f", "description": "ü"},
        "type": "function",
    }
    assert asyncio.run(server.chat(tools=[tool])).status_code == 200
    prompt = server.tokenizer.decode(server.scheduler.jobs[-1].prompt_ids, skip_special_tokens=False)
    assert json.dumps(tool, ensure_ascii=False) in prompt


def test_single_calls_end_the_turn(server: Server) -> None:
    """``parallel_tool_calls: false`` stops at the first call's end."""
    server.say("x")
    asyncio.run(server.chat(tools=[NOW], parallel_tool_calls=False))
    end = server.tokenizer.token_to_id("</tool_call>")
    assert server.scheduler.jobs[-1].params.stop_token_ids == (end,)
    asyncio.run(server.chat(tools=[NOW]))
    assert server.scheduler.jobs[-1].params.stop_token_ids == ()


def test_dialogue_of_several_steps(server: Server) -> None:
    """What an agent sends back: its call with id, the result, reasoning in either spelling."""
    server.say("Done.")
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "I need the city.",
            "tool_calls": [
                {"id": "call_1", "index": 0, "type": "function",
                 "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]  # fmt: skip
    assert asyncio.run(server.chat(messages=messages, tools=[WEATHER])).status_code == 200
    prompt = server.tokenizer.decode(server.scheduler.jobs[-1].prompt_ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Oslo"}}\n</tool_call>' in prompt
    assert "<think>\nI need the city.\n</think>" in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].function"),
        ({"tools": [NOW], "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tools": [{**NOW, "x": 1}]}, "tools[0].x"),
    ],
)
def test_bad_tools_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    """With the field's name."""
    response = asyncio.run(server.chat(**fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param or param in response.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_forced_choice_constrains_the_output(server: Server, choice: object) -> None:
    """Without a grammar a forced call is only a hope."""
    server.say(CALL_NOW)
    response = asyncio.run(server.chat(tools=[WEATHER, NOW], tool_choice=choice))
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert ("get_weather" in grammar.text) == (choice == "required")
    assert server.grammars.seen[-1] == grammar


@pytest.mark.parametrize("after_thinking", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_grammar_allows_calls_and_nothing_else(
    demo_tokenizer: Tokenizer, parallel: bool, after_thinking: bool
) -> None:
    """The grammar is checked by the library that runs it."""
    tokens = StructuralTokens.of(demo_tokenizer)
    shared = {
        "name": "place",
        "parameters": {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/Point"}},
            "required": ["at"],
            "$defs": {
                "Point": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
    }
    functions = [WEATHER["function"], {"name": "now"}, shared]
    grammar = tool_call_grammar(functions, tokens, parallel=parallel, after_thinking=after_thinking)  # type: ignore[arg-type]
    assert grammar.starts_after == (tokens.think_end if after_thinking else None)
    end = demo_tokenizer.token_to_id("<|im_end|>")
    library = LLTokenizer(demo_tokenizer.to_str(), eos_token=end)
    assert LLMatcher.validate_grammar(grammar.text, library) == ""

    def taken(text: str) -> tuple[bool, bool]:
        matcher = LLMatcher(library, grammar.text)
        ids = demo_tokenizer.encode(text, add_special_tokens=False).ids
        whole = matcher.validate_tokens(ids) == len(ids)
        if whole:
            matcher.consume_tokens(ids)
        return whole, whole and matcher.is_accepting()

    gap = "\n\n" if after_thinking else ""
    point = '<tool_call>\n{"name": "place", "arguments": {"at": {"x": 3}}}\n</tool_call>'
    assert taken(gap + CALL) == (True, True)
    assert taken(gap + CALL_NOW) == (True, True)
    assert taken(gap + point) == (True, True)
    assert taken(f"{gap}{CALL}\n{CALL_NOW}")[0] == parallel
    assert not taken(gap + "Hello")[0]
    assert not taken(gap + CALL.replace("Oslo", 'Oslo", "x": "y'))[0]
    assert not taken(gap + CALL_NOW.replace("now", "later"))[0]
    assert not taken(gap + CALL_NOW.replace("{}", '{"a": 1}'))[0]
    assert not taken(gap + point.replace("3", '"3"'))[0]


def test_tools_beside_a_schema_allow_both(server: Server, demo_tokenizer: Tokenizer) -> None:
    """Agents with a typed result call tools first and answer in JSON last."""
    server.say(CALL)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = asyncio.run(server.chat(tools=[WEATHER], response_format=form))
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    library = LLTokenizer(demo_tokenizer.to_str(), eos_token=demo_tokenizer.token_to_id("<|im_end|>"))
    assert LLMatcher.validate_grammar(grammar.text, library) == ""
    for text, allowed in ((CALL, True), ('{"city": "Oslo"}', True), ("Oslo", False), ('{"town": 1}', False)):
        ids = demo_tokenizer.encode(text, add_special_tokens=False).ids
        assert (LLMatcher(library, grammar.text).validate_tokens(ids) == len(ids)) == allowed
