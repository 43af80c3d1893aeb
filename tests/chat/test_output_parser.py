"""The output parser: whatever way the text is cut, the pieces are the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest

from helios.runtime.output_parser import DeltaKind, OutputParser, parse_tool_body
from helios.runtime.prompt_encoder import StructuralTokens

TOKENS = StructuralTokens(think=1, think_end=2, tool_call=3, tool_call_end=4, turn_start=5)
TEXTS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}
LENGTHS = {token: len(text) for text, token in TEXTS.items()}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": null}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": null}]}'
Result = dict[str, object]


def markers_of(text: str) -> list[tuple[int, int]]:
    """Where structural tokens stand in a text in which each spelling is the token."""
    found = [
        (at, token)
        for spelling, token in TEXTS.items()
        for at in range(len(text))
        if text.startswith(spelling, at)
    ]
    return sorted(found)


def parse(pieces: Iterable[str], markers: list[tuple[int, int]], **options: bool) -> Result:
    """Feed pieces; each marker is reported with the piece that holds its first character."""
    parser = OutputParser(TOKENS, LENGTHS, **options)
    deltas = []
    position = 0
    for piece in pieces:
        end = position + len(piece)
        reported = tuple(marker for marker in markers if position <= marker[0] < end)
        deltas += parser.feed(piece, reported)
        position = end
    deltas += parser.finish()
    result: Result = {"reasoning": "", "content": "", "calls": []}
    calls: list[list[str]] = []
    for delta in deltas:
        assert delta.text or delta.kind is DeltaKind.TOOL_START
        if delta.kind is DeltaKind.REASONING:
            result["reasoning"] += delta.text
        elif delta.kind is DeltaKind.CONTENT:
            result["content"] += delta.text
        elif delta.kind is DeltaKind.TOOL_START:
            assert delta.tool == len(calls)
            calls.append([delta.text, ""])
        else:
            assert delta.tool == len(calls) - 1
            calls[-1][1] += delta.text
    result["calls"] = [tuple(entry) for entry in calls]
    assert parser.num_tool_calls == len(calls)
    return result


OUTPUTS: dict[str, tuple[str, dict[str, bool], Result]] = {
    "plain": ("Hello\n\nthere\n", {}, {"reasoning": "", "content": "Hello\n\nthere\n", "calls": []}),
    "thinking": (
        "<think>\nhm\nhm\n</think>\n\nYes\n",
        {},
        {"reasoning": "hm\nhm", "content": "Yes\n", "calls": []},
    ),
    "empty thinking": ("<think>\n\n</think>\n\nYes", {}, {"reasoning": "", "content": "Yes", "calls": []}),
    "opened by the template": (
        "hm\n</think>\n\nYes",
        {"starts_in_thinking": True},
        {"reasoning": "hm", "content": "Yes", "calls": []},
    ),
    "cut while thinking": ("<think>\nhm", {}, {"reasoning": "hm", "content": "", "calls": []}),
    "one call": (CALL, {"tools": True}, {"reasoning": "", "content": "", "calls": [("f", ARGUMENTS)]}),
    "text and two calls": (
        f"Let me see.\n{CALL}\n{CALL}\n",
        {"tools": True},
        {"reasoning": "", "content": "Let me see.", "calls": [("f", ARGUMENTS)] * 2},
    ),
    "thinking and call": (
        f"<think>\nhm\n</think>\n\n{CALL}",
        {"tools": True},
        {"reasoning": "hm", "content": "", "calls": [("f", ARGUMENTS)]},
    ),
    "call inside unfinished thinking": (
        f"<think>\nhm\n{CALL}",
        {"tools": True},
        {"reasoning": "hm", "content": "", "calls": [("f", ARGUMENTS)]},
    ),
    "tools are off": (CALL, {}, {"reasoning": "", "content": CALL, "calls": []}),
    "no arguments": (
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        {"tools": True},
        {"reasoning": "", "content": "", "calls": [("f", "{}")]},
    ),
    "empty arguments": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        {"tools": True},
        {"reasoning": "", "content": "", "calls": [("f", "{}")]},
    ),
    "null arguments": (
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        {"tools": True},
        {"reasoning": "", "content": "", "calls": [("f", "{}")]},
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        {"tools": True},
        {"reasoning": "", "content": "", "calls": [("f", '{"a": 1}')]},
    ),
    "not json": (
        "<tool_call>\nnot json\n</tool_call>",
        {"tools": True},
        {"reasoning": "", "content": "<tool_call>\nnot json\n</tool_call>", "calls": []},
    ),
    "end of call missing": (
        CALL.removesuffix("</tool_call>"),
        {"tools": True},
        {"reasoning": "", "content": "", "calls": [("f", ARGUMENTS)]},
    ),
    "stray end of thinking": ("a</think>b", {}, {"reasoning": "", "content": "a</think>b", "calls": []}),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("incremental", [True, False])
def test_every_split_gives_the_same(name: str, incremental: bool) -> None:
    """Text arrives in pieces of any size; a marker's text may come in two."""
    text, options, wanted = OUTPUTS[name]
    markers = markers_of(text)
    assert parse([text], markers, incremental=incremental, **options) == wanted
    assert parse(text, markers, incremental=incremental, **options) == wanted
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert parse(pieces, markers, incremental=incremental, **options) == wanted


def test_spelled_markers_are_text() -> None:
    """The characters ``</think>`` made of ordinary tokens must not end anything."""
    text = "<think>\nI write </think> and <tool_call>{} here\n</think>\n\nok"
    markers = [marker for marker in markers_of(text) if marker[0] in (0, text.rindex("</think>"))]
    for pieces in ([text], list(text)):
        assert parse(pieces, markers, tools=True) == {
            "reasoning": "I write </think> and <tool_call>{} here",
            "content": "ok",
            "calls": [],
        }


def test_markers_may_come_before_their_text() -> None:
    """A stop string can hold text back while its token is already known."""
    parser = OutputParser(TOKENS, LENGTHS)
    assert parser.feed("", ((0, 1),)) == []
    assert parser.feed("<thi") == []
    first = parser.feed("nk>\nhm</th", ((10, 2),))
    assert [delta.text for delta in first] == ["hm"]
    assert [delta.text for delta in parser.feed("ink>\n\nyes")] == ["yes"]


def test_arguments_stream_as_they_come() -> None:
    """A long argument (a file) must not wait for its end."""
    parser = OutputParser(TOKENS, LENGTHS, tools=True)
    parser.feed("<tool_call>", ((0, 3),))
    assert parser.feed('{"name": "wri') == []
    started = parser.feed('te", "arguments": {"te')
    assert [(delta.kind, delta.text) for delta in started] == [
        (DeltaKind.TOOL_START, "write"),
        (DeltaKind.TOOL_ARGUMENTS, '{"te'),
    ]
    assert [delta.text for delta in parser.feed('xt": "abc')] == ['xt": "abc']
    assert [delta.text for delta in parser.feed('"}}\n')] == ['"}']


def test_truncated_call_is_content_unless_streamed() -> None:
    """Half a call must not be run; a stream cannot take back what it sent."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1'
    assert parse([text], markers_of(text), tools=True, incremental=False)["content"] == text
    assert parse([text], markers_of(text), tools=True)["calls"] == [("f", '{"a": 1')]


def test_reasoning_tokens_are_counted_by_id() -> None:
    """Usage reports what lies between the markers."""
    parser = OutputParser(TOKENS, LENGTHS)
    parser.count([1], True)
    parser.count([9, 9], False)
    parser.count([9, 2], True)
    parser.count([9, 9, 9], False)
    assert parser.reasoning_tokens == 3
    inside = OutputParser(TOKENS, LENGTHS, starts_in_thinking=True)
    inside.count([9, 9], False)
    inside.count([2, 9], True)
    assert inside.reasoning_tokens == 2


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ("f", '{"a": 1}')),
        ('{"name": "f", "arguments": ""}', ("f", "{}")),
        ('{"name": "f", "parameters": {"a": 1}}', ("f", '{"a": 1}')),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": "no json"}', None),
        ('{"name": 3, "arguments": {}}', None),
        ('{"arguments": {}}', None),
        ("[]", None),
        ("", None),
        ("[" * 100_000, None),
        ('{"name": "\\u00fc", "arguments": {"k":1}}', ("ü", '{"k":1}')),
    ],
)
def test_bodies_of_calls(body: str, wanted: tuple[str, str] | None) -> None:
    """Models write several forms; what is no call is text."""
    parsed = parse_tool_body(body)
    assert parsed == wanted
    if parsed is not None:
        json.loads(parsed[1])
