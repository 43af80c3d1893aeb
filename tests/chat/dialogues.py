"""Dialogues whose prompts must be byte-equal to what transformers renders."""

from __future__ import annotations

from typing import Any

SYSTEM = {"role": "system", "content": "You are terse."}
HELLO = {"role": "user", "content": "Hello"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city & its <surroundings>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
CLOCK = {"function": {"parameters": {"type": "object", "properties": {}}, "name": "now"}, "type": "function"}
UMLAUT = {
    "type": "function",
    "function": {"name": "straße", "description": "größer 'als' \"null\" 你好 \u2028 😀", "strict": None},
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **more}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


MESSAGE_LISTS: dict[str, list[dict[str, Any]]] = {
    "one": [HELLO],
    "system": [SYSTEM, HELLO],
    "late_system": [HELLO, assistant("Hi"), {"role": "system", "content": "Now rhyme."}, user("Go")],
    "multi_turn": [SYSTEM, HELLO, assistant("Hi."), user("Why?"), assistant("Because."), user("So?")],
    "empty_content": [user("")],
    "white_space": [user("  \n\n padded \t\n")],
    "non_ascii": [SYSTEM, user("Grüße aus Köln, 你好，мир 😀 e\u0301")],
    "code": [user("def f(x):\n    return {'a': x < 3 and \"b\" & 'c'}\n")],
    "html": [user("<b>bold</b> &amp; <script>1</script>")],
    "jinja": [user("{{ 7 * 7 }} {% raw %}{# no #}")],
    "no_think_switch": [user("Hello /no_think")],
    "assistant_last": [HELLO, assistant("I was saying")],
    "thinking_kept_out": [HELLO, assistant("<think>\nhm\n</think>\n\nHi."), user("Again")],
    "thinking_field": [HELLO, assistant("Hi.", reasoning_content="hm"), user("Again")],
    "thinking_field_last": [HELLO, assistant("Hi.", reasoning_content="\nhm\n")],
    "thinking_null": [HELLO, assistant("Hi.", reasoning_content=None), user("Again")],
    "one_call": [
        user("Weather?"),
        assistant("", tool_calls=[call("get_weather", '{"city": "Köln"}')]),
        tool("sunny"),
    ],
    "call_object": [
        user("Weather?"),
        assistant("", tool_calls=[call("get_weather", {"city": "Köln", "days": 2})]),
        tool("sunny"),
    ],
    "call_with_text": [
        user("Weather?"),
        assistant("Let me see.", tool_calls=[call("get_weather", '{"city":"Rom"}', id="call_1")]),
        tool('{"t": 21}', tool_call_id="call_1"),
        assistant("21 degrees."),
        user("Thanks"),
    ],
    "two_calls": [
        user("Both?"),
        assistant("", tool_calls=[call("get_weather", {"city": "A"}), call("now", {})]),
        tool("rain"),
        tool("12:00"),
    ],
    "multi_step": [
        user("Plan"),
        assistant("", reasoning_content="first", tool_calls=[call("now", "{}")]),
        tool("12:00"),
        assistant("", reasoning_content="second", tool_calls=[call("get_weather", {"city": "B"})]),
        tool("snow"),
    ],
    "multi_step_done": [
        user("Plan"),
        assistant("", reasoning_content="first", tool_calls=[call("now", "{}")]),
        tool("12:00"),
        assistant("It is noon.", reasoning_content="easy"),
        user("And now?"),
    ],
    "typed_tool_response": [user("Plan"), assistant("x"), user("<tool_response>\nby hand\n</tool_response>")],
    "multi_line_tool": [user("Q"), assistant("", tool_calls=[call("now", {})]), tool("a\n\nb\n<c>\n")],
}
TOOL_LISTS: dict[str, list[dict[str, Any]] | None] = {
    "none": None,
    "weather": [WEATHER],
    "three": [CLOCK, WEATHER, UMLAUT],
}
