"""Ask a server of the demo model real questions through the openai SDK and check the answers.

    python tests/smoke/openai_client.py http://127.0.0.1:8000

Prints one line a question; status 1 if an answer is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import BadRequestError, OpenAI

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


class Check:
    """Asks, and remembers what was wrong."""

    def __init__(self, client: OpenAI) -> None:
        self.client = client
        self.failures = 0

    def ask(self, *messages: tuple[str, str], **options: Any) -> Any:
        turns: Any = [{"role": role, "content": content} for role, content in messages]
        return self.client.chat.completions.create(model="demo", messages=turns, temperature=0, **options)

    def text(self, *messages: tuple[str, str], **options: Any) -> str:
        return self.ask(*messages, **options).choices[0].message.content or ""

    def streamed(self, *messages: tuple[str, str]) -> str:
        chunks = self.ask(*messages, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def expect(self, what: str, right: Callable[[str], bool], answer: str) -> None:
        ok = right(answer)
        self.failures += not ok
        print(f"{'ok   ' if ok else 'WRONG'} {what}: {answer[:100]!r}", flush=True)


def equals(wanted: str) -> Callable[[str], bool]:
    return lambda answer: answer == wanted


def questions(check: Check) -> None:
    """One question of each kind, whole and streamed."""
    cache = ("user", "Why does a KV cache speed up decoding?")
    check.expect("a question", lambda answer: "keys and values" in answer, check.text(cache))
    check.expect("the same, streamed", equals(check.text(cache)), check.streamed(cache))
    check.expect(
        "who it is", lambda answer: "Helios demo model" in answer, check.text(("user", "Who are you?"))
    )
    check.expect("addition", equals("27 + 15 = 42"), check.text(("user", "What is 27 + 15?")))
    check.expect("counting", equals("1, 2, 3, 4, 5, 6, 7"), check.text(("user", "Count to 7")))
    emoji = "🚀 Привет 👩🏽‍🔬 你好"
    check.expect("emoji, streamed", equals(emoji), check.streamed(("user", f"Repeat exactly: {emoji}")))
    memory = [("user", "My name is Marlen."), ("assistant", "Nice to meet you, Marlen!")]
    check.expect("memory", equals("Your name is Marlen."), check.text(*memory, ("user", "What is my name?")))
    long = f"{FILLER * 30}The code word is brelan. {FILLER * 30}What is the code word?"
    check.expect("recall from a long text", equals("The code word is brelan."), check.text(("user", long)))
    again = check.ask(("user", long))
    cached = again.usage.prompt_tokens_details.cached_tokens
    check.expect("the same from cached pages", lambda _: cached >= 1024, f"{cached} cached tokens")
    named = check.text(("system", "Your name is Marlen."), ("user", "What is your name?"))
    check.expect("a system prompt", equals("My name is Marlen."), named)


def tools_and_json(check: Check) -> None:
    """A tool call and its result, JSON, and a schema."""
    message = check.ask(("user", "What is the weather in Oslo?"), tools=[WEATHER]).choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    check.expect("a tool call", equals("[('get_weather', '{\"city\": \"Oslo\"}')]"), str(calls))
    asked = ("user", "Give me JSON with name and age for: Marlen is 31")
    wanted = {"name": "Marlen", "age": 31}
    for options in ({}, {"response_format": {"type": "json_object"}}):
        answer = check.text(asked, **options)
        check.expect(f"JSON {options or ''}".strip(), lambda text: json.loads(text) == wanted, answer)


def many_at_once(check: Check) -> None:
    """Eight clients, each with sums of its own."""
    pairs = [(10 + 3 * index, 20 + 5 * index) for index in range(16)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: check.text(("user", f"What is {p[0]} + {p[1]}?")), pairs))
    wrong = [text for (a, b), text in zip(pairs, answers, strict=True) if text != f"{a} + {b} = {a + b}"]
    check.expect("16 sums from 8 clients at once", lambda _: not wrong, f"{16 - len(wrong)} right")


def refusals(check: Check) -> None:
    """A wrong request is refused by name."""
    try:
        check.ask(("user", "Hello"), extra_body={"no_such_field": 1})
        answer = "accepted"
    except BadRequestError as error:
        answer = f"{error.status_code} {error.param}"
    check.expect("an unknown field", equals("400 no_such_field"), answer)


def main() -> int:
    with OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        check = Check(client)
        names = [model.id for model in client.models.list()]
        check.expect("models", lambda _: "helios-demo" in names, str(names))
        for part in (questions, tools_and_json, many_at_once, refusals):
            part(check)
    print(f"{check.failures} wrong answers" if check.failures else "all answers are right")
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
