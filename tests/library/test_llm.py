"""LLM: the engine in the caller's thread."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from helios import LLM, Grammar, HeliosError, InvalidRequestError, SamplingParams, StartupError
from helios.errors import ContextLengthError, InternalError, NotReadyError
from tests.demo.conftest import serving
from tests.library.conftest import GREEDY, TEXTS, engine_of, question


def test_importing_helios_does_not_import_torch() -> None:
    """Would catch `helios --version`, or a tool that reads SamplingParams, waiting for torch."""
    code = "import sys, helios; helios.SamplingParams(n=2); assert 'torch' not in sys.modules; dir(helios)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError, match="cannot import name 'LLMM'"):
        from helios import LLMM  # type: ignore[attr-defined]  # noqa: F401


# -- whole answers -----------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Would catch results in the order in which they end: lengths differ, and only four run at once."""
    lengths = [20, 2, 9, 1, 14, 5]
    each = [replace(GREEDY, max_tokens=length, ignore_eos=True) for length in lengths]
    results = llm.generate(TEXTS, each)
    assert [result.prompt for result in results] == TEXTS
    assert [len(result.token_ids) for result in results] == lengths
    assert all(result.finish_reason == "length" for result in results)
    alone = [llm.generate(text, params)[0].text for text, params in zip(TEXTS, each, strict=True)]
    assert [result.text for result in results] == alone


def test_texts_and_token_ids_are_the_same_prompts(llm: LLM) -> None:
    """Would catch ids that are taken for several prompts, or that are encoded once more."""
    ids = [llm.encode(text) for text in TEXTS[:2]]
    texts = llm.generate(TEXTS[:2], GREEDY)
    assert [result.prompt_token_ids for result in texts] == ids
    assert [result.text for result in llm.generate(ids, GREEDY)] == [result.text for result in texts]
    assert llm.generate(ids[0], GREEDY)[0].text == texts[0].text
    assert texts[0].text == llm.decode(texts[0].token_ids)
    assert llm.generate([]) == []


def test_answers_equal_those_over_http(llm: LLM) -> None:
    """Would catch a library that renders, samples or cuts differently from the server."""
    params = replace(GREEDY, stop=("pages",))
    text, chat = llm.generate(TEXTS[1], params)[0], llm.chat(question(), params)[0]
    sampled = llm.generate(TEXTS[1], SamplingParams(temperature=1.0, seed=7, max_tokens=12))[0]
    with serving(max_batch_size=4) as url, httpx.Client(base_url=url) as client:
        body = {"prompt": TEXTS[1], "temperature": 0, "max_tokens": 24, "stop": ["pages"]}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text.text, text.finish_reason)
        body["messages"] = question()
        del body["prompt"]
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["message"]["content"] == chat.text
        assert choice["finish_reason"] == chat.finish_reason
        body = {"prompt": TEXTS[1], "temperature": 1.0, "seed": 7, "max_tokens": 12}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == sampled.text


def test_several_choices_stop_strings_and_logprobs(llm: LLM) -> None:
    """Would catch choices that share their text, a stop string that is left in, probabilities that are lost."""
    params = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=8, logprobs=2, ignore_eos=True)
    result = llm.generate("The", params)[0]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({output.text for output in result.outputs}) > 1
    for output in result.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 2 for entry in output.logprobs)
    whole = llm.generate(TEXTS[1], GREEDY)[0].text
    word = whole.split()[4]
    stopped = llm.generate(TEXTS[1], replace(GREEDY, stop=(word,)))[0]
    assert stopped.text == whole[: whole.index(word)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert llm.generate(TEXTS[1], replace(GREEDY, prompt_logprobs=0))[0].prompt_logprobs is not None


def test_a_chat_separates_thinking_and_tool_calls(llm: LLM) -> None:
    """Would catch a chat whose text holds the markers of its structure."""
    thought = llm.chat(question(), replace(GREEDY, max_tokens=200), enable_thinking=True)[0]
    assert thought.reasoning
    assert "think>" not in thought.text + thought.reasoning
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
            },
        },
    }
    called = llm.chat(
        question("Weather in Oslo?"), replace(GREEDY, max_tokens=80), tools=[tool], tool_choice="required"
    )[0]
    assert called.finish_reason == "tool_calls"
    function = called.message["tool_calls"][0]["function"]
    assert function["name"] == "get_weather"
    assert list(json.loads(function["arguments"])) == ["city"]


def test_many_dialogues_are_answered_in_order(llm: LLM) -> None:
    texts = ["What is paged attention?", "What is a KV cache?", "What is a KV cache?"]
    results = llm.chat([question(text) for text in texts], GREEDY)
    assert results[0].text != results[1].text == results[2].text
    assert results[0].text == llm.chat(question(texts[0]), GREEDY)[0].text


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (Grammar.choice(["north", "south"]), lambda text: text in ("north", "south")),
        (Grammar.regex("[0-9]{3}"), lambda text: len(text) == 3 and text.isdigit()),
        (
            Grammar.json_schema(
                {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "required": ["a"],
                    "additionalProperties": False,
                }
            ),
            lambda text: json.loads(text)["a"] in (1, 2),
        ),
    ],
)
def test_constrained_output(llm: LLM, grammar: Grammar, fits: Callable[[str], bool]) -> None:
    """Would catch a constraint that is not compiled, or that ends the text too late."""
    assert fits(llm.generate("The answer is", replace(GREEDY, max_tokens=200, grammar=grammar))[0].text)
    assert fits(llm.chat(question(), replace(GREEDY, max_tokens=200, grammar=grammar))[0].text)


def test_results_say_what_was_cached_and_how_long_it_took(llm: LLM) -> None:
    ids = [5 + index % 300 for index in range(600)]
    llm.generate(ids, GREEDY)
    again = llm.generate(ids, GREEDY)[0]
    assert again.num_cached_tokens == 512
    assert again.timings["cached_tokens"] == 512
    assert 0 < again.timings["time_to_first_token_seconds"] <= again.timings["end_to_end_seconds"]


def test_without_parameters_the_defaults_hold(llm: LLM) -> None:
    """Would catch a default answer length that is refused near the end of the context."""
    assert llm.default_params == SamplingParams()
    result = llm.generate([7] * 1000)[0]
    assert len(result.token_ids) <= 24
    all_room = llm.generate([7] * 1000, SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(all_room.token_ids) == 24


# -- pieces ------------------------------------------------------------------------------------------


def test_stream_deltas_join_to_the_answer(llm: LLM) -> None:
    """Would catch pieces that are lost, or a stop string of which a part was sent."""
    params = replace(GREEDY, stop=("pages",))
    deltas = list(llm.stream(TEXTS[1], params))
    whole = llm.generate(TEXTS[1], params)[0]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].finish_reason == whole.finish_reason
    chat = list(llm.stream(question(), replace(GREEDY, max_tokens=200), enable_thinking=True))
    assert chat[-1].output is not None
    assert "".join(delta.text for delta in chat) == chat[-1].output.text
    assert "".join(delta.reasoning for delta in chat) == chat[-1].output.reasoning


def test_streams_interleave_and_leaving_one_ends_it(llm: LLM) -> None:
    """Would catch events that go to whoever runs the engine, or a left stream that holds its pages."""
    first, second = llm.stream(TEXTS[0], GREEDY), llm.stream(TEXTS[2], replace(GREEDY, ignore_eos=True))
    pieces = [next(first).text, next(second).text]
    second.close()  # type: ignore[attr-defined]
    pieces += [delta.text for delta in first]
    whole = llm.generate(TEXTS[0], GREEDY)[0].text
    assert "".join([pieces[0], *pieces[2:]]) == whole
    unread = llm.stream(TEXTS[0], GREEDY)
    del unread


def test_steps_return_updates_and_whole_outputs(llm: LLM) -> None:
    """Would catch a generate in between that takes away what step has to return."""
    names = [llm.add_request(TEXTS[0], GREEDY, "mine"), llm.add_request(question(), GREEDY)]
    assert names[0] == "mine"
    between = llm.generate(TEXTS[3], GREEDY)[0]
    texts, outputs = dict.fromkeys(names, ""), {}
    while llm.has_unfinished:
        for delta in llm.step():
            texts[delta.request_id] += delta.text
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
    assert texts == {name: outputs[name].text for name in names}
    assert texts["mine"] == llm.generate(TEXTS[0], GREEDY)[0].text
    assert between.text == llm.generate(TEXTS[3], GREEDY)[0].text
    assert llm.step() == []


def test_an_aborted_request_ends_at_the_next_step(llm: LLM) -> None:
    """Would catch an abort that leaves rows or pages behind, running or waiting."""
    endless = replace(GREEDY, ignore_eos=True, max_tokens=500)
    running = llm.add_request(TEXTS[0], endless)
    llm.step()
    waiting = [llm.add_request(TEXTS[1], endless) for _ in range(20)]  # more than the engine is given
    for name in [running, *waiting, "unknown"]:
        llm.abort(name)
    ends = [delta for delta in llm.step() if delta.output is not None]
    while llm.has_unfinished:
        ends += [delta for delta in llm.step() if delta.output is not None]
    assert {delta.request_id for delta in ends} == {running, *waiting}
    assert {delta.finish_reason for delta in ends} == {"abort"}


# -- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"seed": 1 << 64}, "seed"),
    ],
)
def test_a_wrong_parameter_is_named(fields: dict[str, Any], param: str) -> None:
    """Would catch a value that is refused over HTTP and means something else here."""
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**fields)
    assert raised.value.param == param
    assert f"'{param}'" in str(raised.value)


def test_loose_forms_of_parameters_become_plain_ones() -> None:
    loose: dict[str, Any] = {
        "stop": "x",
        "stop_token_ids": [1, 2],
        "logit_bias": {3: 1},
        "top_k": -1,
        "seed": -1,
    }
    assert SamplingParams(**loose) == SamplingParams(
        stop=("x",), stop_token_ids=(1, 2), logit_bias=((3, 1.0),), top_k=0, seed=(1 << 64) - 1
    )
    assert SamplingParams(**{"stop": ["a", "b"]}).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate(["a", ""]), "prompts[1]: Invalid 'prompt': the prompt is empty"),
        (lambda llm: llm.generate([[1], [4096]]), "prompts[1]: Invalid 'prompt': token ids"),
        (lambda llm: llm.generate(["a", 5]), "Invalid type for 'prompts[1]'"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "Invalid 'params': 1 for 2 prompts"),
        (lambda llm: llm.generate("a", {"n": 1}), "params"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY, replace(GREEDY, n=9)]), "prompts[1]: n is 9"),
        (lambda llm: llm.generate("a", replace(GREEDY, min_tokens=25)), "'min_tokens'"),
        (lambda llm: llm.generate("a", replace(GREEDY, stop_token_ids=(9999,))), "'stop_token_ids'"),
        (lambda llm: llm.generate("a", replace(GREEDY, grammar=Grammar.regex("("))), "regular expression"),
        (
            lambda llm: llm.chat([question(), [{"role": "x"}]]),
            "messages[1]: Invalid value for 'messages[0].role'",
        ),
        (lambda llm: llm.chat(question(), colour="red"), "'colour'"),
        (lambda llm: llm.chat(question(), tool_choice="required"), "'tool_choice'"),
        (lambda llm: llm.chat(question(), replace(GREEDY, thinking_budget=5)), "'thinking_budget'"),
        (lambda llm: llm.stream("a", enable_thinking=True), "'enable_thinking'"),
        (lambda llm: llm.add_request("a", priority=1), "HELIOS_SCHEDULING_POLICY=fcfs"),
        (lambda llm: llm.add_request("a", priority=1 << 31), "'priority'"),
    ],
)
def test_a_refused_prompt_is_named_before_anything_runs(
    llm: LLM, call: Callable[[LLM], object], words: str
) -> None:
    """Would catch a batch that runs for an hour and then fails on its last prompt."""
    ticks = engine_of(llm).num_ticks
    with pytest.raises(InvalidRequestError) as raised:
        call(llm)
    assert words in str(raised.value)
    assert engine_of(llm).num_ticks == ticks


def test_a_prompt_that_is_too_long_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"^prompts\[1\]: .* 1024 tokens"):
        llm.generate(["a", [5] * 1020], GREEDY)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_batch": 4}, "no setting named 'max_batch'; did you mean max_batch_size?"),
        ({"max_batch_size": 0}, "HELIOS_MAX_BATCH_SIZE=0: "),
        ({"device": "tpu"}, "HELIOS_DEVICE='tpu': "),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(settings: dict[str, Any], words: str) -> None:
    """Would catch a misspelt setting without effect."""
    with pytest.raises(StartupError) as raised:
        LLM("demo", **settings)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_failing_tick_is_the_error_of_its_requests_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch one broken tick that takes the other answers with it."""
    runner = engine_of(llm)._runner
    forward, calls = runner.forward, []

    def breaks_once(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return forward(*arguments)

    monkeypatch.setattr(runner, "forward", breaks_once)
    results = llm.generate(TEXTS, GREEDY)
    assert [isinstance(result.error, InternalError) for result in results] == [True] * 4 + [False] * 2
    assert {result.finish_reason for result in results[:4]} == {"error"}
    monkeypatch.undo()
    assert [result.text for result in results[4:]] == [r.text for r in llm.generate(TEXTS[4:], GREEDY)]
    monkeypatch.setattr(runner, "forward", lambda *_: 1 / 0)
    with pytest.raises(InternalError):
        list(llm.stream("a", GREEDY))


def test_an_interrupt_ends_the_batch_and_the_llm_lives(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch Ctrl-C in the middle of a tick: half of its books written, pages lost."""
    engine = engine_of(llm)
    step, whole = engine.step, []

    def interrupted() -> object:
        if len(whole) == 2:
            signal.raise_signal(signal.SIGINT)
        events = step()
        whole.append(1)
        return events

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS * 10, GREEDY)
    assert len(whole) == 4, "the tick ended, and one more gave everything back"
    assert not llm.has_unfinished
    engine.check_integrity()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate(TEXTS[0], GREEDY)[0].finish_reason in ("stop", "length")


# -- surroundings ------------------------------------------------------------------------------------


def test_works_within_a_running_event_loop_and_from_threads(llm: LLM) -> None:
    """Would catch an asyncio.run inside the library, or threads that take each other's results."""
    expected = [result.text for result in llm.generate(TEXTS, GREEDY)]

    async def inside() -> str:
        return llm.generate(TEXTS[0], GREEDY)[0].text

    assert asyncio.run(inside()) == expected[0]
    found: dict[int, str] = {}

    def work(index: int) -> None:
        found[index] = llm.generate(TEXTS[index], GREEDY)[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(6)] == expected


def test_progress_is_for_terminals(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch escape codes in a log file, or a bar that cannot be switched off."""
    llm.generate(TEXTS, GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes anything for a terminal
    llm.generate(TEXTS, GREEDY, progress=False)
    assert capsys.readouterr().err == ""
    llm.generate(TEXTS, GREEDY)
    shown = capsys.readouterr()
    assert "/6 prompts" in shown.err
    assert "tokens/s" in shown.err
    assert shown.out == ""


def test_priorities_reach_the_jobs() -> None:
    """Would catch priorities that are accepted and forgotten: one row, so the order is the priorities'."""
    with LLM("demo", device="cpu", max_batch_size=1, max_model_len=512, scheduling_policy="priority") as llm:
        names = [
            llm.add_request(text, replace(GREEDY, max_tokens=2, ignore_eos=True), priority=priority)
            for text, priority in zip(TEXTS[:4], [3, 1, -2, 0], strict=True)
        ]
        assert [llm._open[name].job.priority for name in names] == [3, 1, -2, 0]
        ends = []
        while llm.has_unfinished:
            ends += [delta.request_id for delta in llm.step() if delta.output is not None]
        assert ends == [names[2], names[3], names[1], names[0]]
        assert len(llm.generate(TEXTS[:2], GREEDY, priorities=[5, -5])) == 2


def test_closing_frees_the_engine_and_its_threads() -> None:
    """Would catch a second model that does not fit because the first is still there."""
    torch_threads = torch.get_num_threads()
    before = set(threading.enumerate())
    with LLM("demo", device="cpu", max_batch_size=1, max_model_len=512, cpu_kv_bytes=1 << 22) as llm:
        llm.generate("a", replace(GREEDY, grammar=Grammar.regex("[0-9]{3}")))
        engine = weakref.ref(engine_of(llm))
        stream = llm.stream("a", GREEDY)
        next(stream)
    del stream
    gc.collect()
    assert engine() is None
    assert torch.get_num_threads() == torch_threads
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    llm.close()
    assert not llm.has_unfinished
    with pytest.raises(NotReadyError, match="closed"):
        llm.generate("a")
    assert issubclass(NotReadyError, HeliosError)
