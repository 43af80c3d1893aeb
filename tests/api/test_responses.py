"""OpenAI's Responses API over HTTP, the stateless subset."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.api.conftest import Server

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def ask(server: Server, **fields: Any) -> Any:
    return asyncio.run(server.post(PATH, {"input": "Hello", **fields}))


def events_of(text: str) -> list[Any]:
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_response_shape(server: Server) -> None:
    server.say("Hi.")
    body = ask(server, instructions="Be brief.", metadata={"a": "b"}).json()
    assert body["object"] == "response"
    assert body["status"] == "completed"
    assert body["output"][0]["content"][0]["text"] == "Hi."
    assert body["usage"]["output_tokens"] == len(server.ids("Hi.")) + 1
    assert body["metadata"] == {"a": "b"}
    prompt = server.tokenizer.decode(server.scheduler.jobs[-1].prompt_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
    cut = ask(server, max_output_tokens=1).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_stream_of_reasoning_text_and_call(server: Server) -> None:
    """Every item is announced, grows and is sent whole; the last event carries the response."""
    server.say(f"<think>\nHm.\n</think>\n\nI call.\n{CALL}")
    response = ask(server, stream=True, tools=[TOOL], reasoning={"effort": "low", "summary": "auto"})
    events = events_of(response.text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "I call."
    done = events[-1]["response"]
    assert [item["type"] for item in done["output"]] == ["reasoning", "message", "function_call"]
    assert done["output"][2]["arguments"] == "{}"
    assert done["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    server.say(f"<think>\nHm.\n</think>\n\nI call.\n{CALL}")
    whole = ask(server, tools=[TOOL], reasoning={"effort": "low"}).json()

    def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]

    assert without_ids(whole["output"]) == without_ids(done["output"])


def test_conversation_items_reach_the_template(server: Server) -> None:
    """The output of one answer is the input of the next."""
    server.say("ok")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Call f"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Yes"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a":1}',
         "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]  # fmt: skip
    response = ask(server, input=items, tools=[TOOL])
    assert response.status_code == 200, response.text
    prompt = server.tokenizer.decode(server.scheduler.jobs[-1].prompt_ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>' in prompt
    assert "<think>\nYes\n</think>" in prompt
    assert "<tool_response>\n42\n</tool_response>" in prompt


def test_structured_text_and_forced_tool(server: Server) -> None:
    server.say("{}")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    assert ask(server, text={"format": form, "verbosity": "medium"}).status_code == 200
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    ask(server, tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == "lark"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ],
)
def test_stateful_and_unknown_fields_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    response = ask(server, **fields)
    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param
