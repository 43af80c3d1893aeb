"""Text completions: prompts of every form, echo, logprobs, batches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api.conftest import Server

PATH = "/v1/completions"


def test_prompt_forms_give_indexed_choices(server: Server) -> None:
    """Text, ids, and lists of either; choices follow the prompts."""
    one, two = server.ids("one"), server.ids("two words")
    for prompt, texts in (
        ("one", ["one"]),
        (one, ["one"]),
        (["one", "two words"], ["one", "two words"]),
        ([one, two], ["one", "two words"]),
    ):
        body = asyncio.run(server.post(PATH, {"prompt": prompt})).json()
        assert body["object"] == "text_completion"
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
        assert body["usage"]["prompt_tokens"] == sum(len(server.ids(text)) for text in texts)


def test_n_choices_of_each_prompt_follow_each_other(server: Server) -> None:
    """OpenAI numbers prompt 0's choices first."""
    body = asyncio.run(server.post(PATH, {"prompt": ["a", "b"], "n": 2})).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "b", "b"]
    events = asyncio.run(server.events(PATH, {"prompt": ["a", "b"], "n": 2}))
    texts = ["", "", "", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["a", "a", "b", "b"]


def test_special_tokens_in_a_raw_prompt_are_tokens(server: Server) -> None:
    """A completion's caller writes the whole prompt, template included."""
    server.say("x")
    asyncio.run(server.post(PATH, {"prompt": "<|im_start|>user\nHi<|im_end|>"}))
    ids = server.scheduler.jobs[-1].prompt_ids
    assert ids[0] == server.tokenizer.token_to_id("<|im_start|>")


@pytest.mark.parametrize("as_ids", [True, False])
def test_echo_with_logprobs_scores_the_prompt(server: Server, as_ids: bool) -> None:
    """lm-eval's request: token ids, echo, one logprob, one or no new token."""
    server.say("z")
    text = "The cat sat"
    ids = server.ids(text)
    body = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    answer = asyncio.run(server.post(PATH, body)).json()
    choice = answer["choices"][0]
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-1.5] * (len(ids) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert all(max(top.values()) == -1.5 for top in logprobs["top_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"][0] == 0
    assert answer["usage"]["completion_tokens"] == 0
    assert server.scheduler.jobs[-1].params.prompt_logprobs == 1
    one = asyncio.run(server.post(PATH, {**body, "max_tokens": 1})).json()["choices"][0]
    assert one["text"] == text + "z"
    assert len(one["logprobs"]["tokens"]) == len(ids) + 1


def test_stream_with_echo_and_logprobs_equals_the_body(server: Server) -> None:
    """Both forms report the same tokens."""
    server.say(" more text")
    body: dict[str, Any] = {"prompt": "The cat", "echo": True, "logprobs": 2}
    whole = asyncio.run(server.post(PATH, body)).json()["choices"][0]
    events = asyncio.run(server.events(PATH, {**body, "stream_options": {"include_usage": True}}))
    chunks = [event["choices"][0] for event in events[:-2]]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [entry for chunk in chunks for entry in chunk["logprobs"][key]]
        assert streamed == whole["logprobs"][key]
    assert events[-2]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True}])
def test_every_token_has_a_chunk(server: Server, fields: dict[str, Any]) -> None:
    """A byte of an unfinished character has no text yet. Without a chunk of its own, a client would see a gap of
    two steps; with half a character in it, it would see rubbish."""
    server.say("a🚀é")
    body = {"prompt": "The cat", "stream_options": {"include_usage": True}, **fields}
    events = asyncio.run(server.events(PATH, body))
    texts = [event["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts).endswith("a🚀é")
    assert len(texts) == events[-2]["usage"]["completion_tokens"] == 1 + 4 + 2 + 1  # bytes, and the end
    assert texts[1:4] == ["", "", ""]
    assert texts[4] == "🚀"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"n": 129}, "n"),
    ],
)
def test_bad_fields_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    """With the field's name."""
    response = asyncio.run(server.post(PATH, {"prompt": "a", **fields}))
    assert response.status_code == 400
    assert response.json()["error"]["param"].split("[")[0] == param


def test_batch_is_refused_as_a_whole(server: Server) -> None:
    """When the queue takes only a part, nothing of the request may run."""
    server.scheduler.queue_size = 0
    response = asyncio.run(server.post(PATH, {"prompt": ["a", "b"]}))
    assert response.status_code == 503
    assert all(job.cancelled for job in server.scheduler.jobs)


def test_structured_completion(server: Server) -> None:
    """Constraints hold for raw prompts as well."""
    server.say("a")
    asyncio.run(server.post(PATH, {"prompt": "x", "choice": ["a", "b"]}))
    grammar = server.scheduler.jobs[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("choice", '["a", "b"]')
