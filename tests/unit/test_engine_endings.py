"""How sequences end: stops and lengths, cancellation, deadlines, failures; and the figures they leave."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from helios.config import PAGE_SIZE
from helios.errors import DeadlineError, EngineDeadError, InternalError
from helios.runtime.reporting import timings_report, usage_report
from helios.runtime.request import FinishReason, Job, SequenceStatus, TokenEvent
from tests.unit.harness import END, TOKENIZER, Bench, ids, output, prompt

IM_END = TOKENIZER.token_to_id("<|im_end|>")
END_OF_TEXT = TOKENIZER.token_to_id("<|endoftext|>")
THINK, END_THINK = TOKENIZER.token_to_id("<think>"), TOKENIZER.token_to_id("</think>")


def scripted(text: str, max_tokens: int = 100, end: int = END, **params: Any) -> tuple[Bench, Job]:
    """Serve one job whose model wants to say ``text`` and then end; with lookahead it must end the same."""
    served: list[tuple[Bench, Job]] = []
    for lookahead in (True, False):
        bench = Bench(eos_token_ids=frozenset({END, IM_END, END_OF_TEXT}), lookahead=lookahead)
        script = [*ids(text), *[end] * (max_tokens + 2)]
        job = bench.add("a", ids("question"), max_tokens, script=script, **params)
        bench.run()
        served.append((bench, job))
    (ahead, same), (bench, job) = served
    assert (ahead.text(same), ahead.ends(same)) == (bench.text(job), bench.ends(job))
    assert output(same) == output(job)
    assert same.sequences[0].stop_match == job.sequences[0].stop_match
    return bench, job


# -- stop and length -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [END, IM_END, END_OF_TEXT])
def test_any_end_token_of_the_set_ends_the_answer(end: int) -> None:
    """Would catch an answer that runs on past the second of Qwen's two end tokens, or an end token whose
    text is sent."""
    bench, job = scripted("hello", end=end)
    assert bench.ends(job) == [FinishReason.STOP]
    assert bench.text(job) == "hello"
    assert job.num_output_tokens == 6
    assert job.sequences[0].stop_match is None


def test_end_token_on_the_last_allowed_place_is_a_stop() -> None:
    """Would catch "length" for an answer that is complete."""
    for extra, reason in ((1, FinishReason.STOP), (0, FinishReason.LENGTH)):
        bench, job = scripted("hello", max_tokens=5 + extra)
        assert bench.ends(job) == [reason]
        assert bench.text(job) == "hello"


def test_ignore_eos_runs_to_the_length() -> None:
    """Would catch a benchmark whose answers are shorter than asked for."""
    bench, job = scripted("hello", max_tokens=20, ignore_eos=True)
    assert bench.ends(job) == [FinishReason.LENGTH]
    assert job.num_output_tokens == 20


def test_ignore_eos_still_honours_stop_tokens_and_strings() -> None:
    """Would catch ignore_eos that also ignores what the client asked to stop at."""
    bench, job = scripted("hello", max_tokens=20, ignore_eos=True, stop_token_ids=(END,))
    assert bench.ends(job) == [FinishReason.STOP]
    assert job.sequences[0].stop_match == END
    bench, job = scripted("hello", max_tokens=20, ignore_eos=True, stop=("ll",))
    assert (bench.text(job), bench.ends(job)) == ("he", [FinishReason.STOP])


def test_stop_token_ends_without_its_text() -> None:
    """Would catch a stop token whose text is sent although nobody asked for it, or the other way round."""
    (l_token,) = set(ids("ll"))
    bench, job = scripted("hello", stop_token_ids=(l_token,))
    assert (bench.text(job), bench.ends(job)) == ("he", [FinishReason.STOP])
    assert job.sequences[0].stop_match == l_token
    assert bench.events[-1].stop_match == l_token
    bench, job = scripted("hello", stop_token_ids=(l_token,), include_stop_str_in_output=True)
    assert bench.text(job) == "hel"


def test_stop_string_across_tokens() -> None:
    """Would catch a stop string that is found only inside one token, or whose first half is sent."""
    bench, job = scripted("one two three", stop=("two",))
    assert (bench.text(job), bench.ends(job)) == ("one ", [FinishReason.STOP])
    assert job.sequences[0].stop_match == "two"
    assert job.num_output_tokens == len("one two")
    bench, job = scripted("one two three", stop=("two",), include_stop_str_in_output=True)
    assert bench.text(job) == "one two"


def test_no_part_of_a_stop_string_that_was_not_met_is_lost() -> None:
    """Would catch held-back text that never comes out, at the end token and at the length."""
    bench, job = scripted("alphabet: ABCDEF", stop=("DEFGHIJ",))
    assert bench.text(job) == "alphabet: ABCDEF"
    bench, job = scripted("alphabet: ABCDEFGH", stop=("DEFGHIJ",), max_tokens=16)
    assert bench.text(job) == "alphabet: ABCDEF"
    assert bench.ends(job) == [FinishReason.LENGTH]


def test_stop_match_on_the_last_allowed_token_is_a_stop() -> None:
    """Would catch "length" that hides a stop string completed by the very last token."""
    bench, job = scripted("one two", max_tokens=7, stop=("two",))
    assert (bench.text(job), bench.ends(job)) == ("one ", [FinishReason.STOP])
    bench, job = scripted("one two", max_tokens=6, stop=("two",))
    assert (bench.text(job), bench.ends(job)) == ("one tw", [FinishReason.LENGTH])


def test_min_tokens_delays_every_kind_of_stop() -> None:
    """Would catch a stop string or stop token that ends an answer before min_tokens."""
    bench, job = scripted("ab ab ab ab", stop=("ab",), min_tokens=4)
    assert bench.text(job) == "ab "
    assert job.num_output_tokens == 5
    (b_token,) = ids("b")
    bench, job = scripted("ab ab ab ab", stop_token_ids=(b_token,), min_tokens=4)
    assert bench.text(job) == "ab a"


def test_each_tick_gives_each_sequence_one_event_and_one_end() -> None:
    """Would catch lost or doubled tokens on the way out, and a second finish reason."""
    bench = Bench()
    jobs = [bench.add(f"job{number}", prompt(20, number), 6, n=1 + number % 2) for number in range(3)]
    bench.run()
    for job in jobs:
        for index, sequence in enumerate(job.sequences):
            events = [event for event in bench.events if event.job is job and event.index == index]
            assert [token for event in events for token in event.token_ids] == output(job, index)
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
            assert events[-1].finish_reason is FinishReason.LENGTH
            assert sequence.status is SequenceStatus.FINISHED
            assert sequence.row == -1
            assert not sequence.page_table


# -- thinking budget -----------------------------------------------------------------------------------


def thinking(text: str, budget: int, prompt_text: str = "q", max_tokens: int = 60) -> str:
    texts: list[str] = []
    for lookahead in (True, False):
        bench = Bench(end_thinking_ids=tuple(ids("\n</think>\n\n")), lookahead=lookahead)
        script = [*ids(text), *[END] * (max_tokens + 2)]
        job = bench.add("a", ids(prompt_text), max_tokens, script=script, thinking_budget=budget)
        bench.run()
        assert not job.sequences[0].forced
        texts.append(bench.text(job))
    assert texts[0] == texts[1]
    return texts[0]


def test_thinking_budget_writes_the_end_of_thinking() -> None:
    """Would catch a budget that is not kept, cut short, or enforced without the closing tag."""
    assert thinking("<think>abcdefghij</think>answer", 4).startswith("<think>abcd\n</think>\n\n")
    assert thinking("<think>ab</think>answer", 4) == "<think>ab</think>answer"
    assert thinking("no thoughts at all", 2) == "no thoughts at all"


def test_thinking_budget_counts_from_a_block_that_the_prompt_opened() -> None:
    """Would catch a budget that waits for a <think> which the template has written already."""
    assert thinking("abcdefghij", 3, "q<think>").startswith("abc\n</think>\n\n")
    assert thinking("abcdefghij", 0, "q<think>").startswith("\n</think>\n\n")
    assert thinking("abcdefghij", 3, "q<think></think>") == "abcdefghij"


# -- cancellation --------------------------------------------------------------------------------------


def test_cancelled_while_waiting() -> None:
    """Would catch a queue slot that stays taken, or an abort that nobody is told of."""
    bench = Bench(batch=1)
    first = bench.add("first", prompt(10), 50)
    second = bench.add("second", prompt(10, 1), 50)
    bench.tick(2)
    second.cancelled = True
    bench.tick()
    assert bench.ends(second) == [FinishReason.ABORT]
    assert not bench.engine.waiting
    assert not first.is_finished
    bench.run()
    assert bench.ends(first) == [FinishReason.LENGTH]


@pytest.mark.parametrize("ticks", [1, 2, 5, 8])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("lookahead", [False, True])
def test_cancelled_in_prefill_or_decode_frees_everything_within_one_tick(
    ticks: int, n: int, lookahead: bool
) -> None:
    """Would catch pages or rows kept by a cancelled job: during its prefill, in choices that have not been
    forked yet, or while it decodes; and tokens sent after the abort."""
    bench = Bench(chunk=PAGE_SIZE, lookahead=lookahead)
    job = bench.add("a", prompt(1000), 50, n=n)
    other = bench.add("other", prompt(30, 1), 60)
    bench.tick(ticks)
    assert len(bench.engine.running) == (2 if ticks < 5 + lookahead else 1 + n)
    job.cancelled = True
    events = [event for event in bench.tick() if event.job is job]
    assert [(event.finish_reason, event.token_ids) for event in events] == [(FinishReason.ABORT, [])] * n
    assert bench.engine.pool.num_referenced == len(other.sequences[0].page_table)
    assert bench.engine.num_free_rows == 3
    bench.run()
    assert len(bench.ends(job)) == n
    assert bench.ends(other) == [FinishReason.LENGTH]


def test_cancelling_a_finished_job_is_harmless() -> None:
    """Would catch a second end when the client goes at the last token."""
    bench = Bench()
    job = bench.add("a", prompt(10), 3)
    bench.run()
    job.cancelled = True
    bench.add("b", prompt(10), 3)
    bench.run()
    assert bench.ends(job) == [FinishReason.LENGTH]


# -- deadlines -----------------------------------------------------------------------------------------


def test_deadline_of_a_waiting_job() -> None:
    """Would catch a request that is still served when its client has long given up."""
    bench = Bench(batch=1)
    bench.add("first", prompt(10), 50)
    late = bench.add("late", prompt(10, 1), 5, deadline=bench.now + 0.045)
    bench.tick(4)
    assert not late.is_finished
    bench.tick()
    assert bench.ends(late) == [FinishReason.ERROR]
    assert isinstance(late.error, DeadlineError)
    assert late.error.status == 503
    bench.run()


def test_deadline_of_a_running_job() -> None:
    """Would catch a running request that overruns its limit, or one that takes others with it."""
    bench = Bench()
    late = bench.add("late", prompt(300), 500, deadline=bench.now + 0.045)
    other = bench.add("other", prompt(10, 1), 20)
    bench.tick(4)
    assert late.num_output_tokens == 4
    bench.tick()
    assert isinstance(late.error, DeadlineError)
    assert late.num_output_tokens == 4
    bench.run()
    assert bench.ends(other) == [FinishReason.LENGTH]
    assert other.error is None


# -- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [False, True])
def test_one_bad_row_fails_only_its_job(lookahead: bool) -> None:
    """Would catch NaN logits of one request that end the batch, or that are served as token 0."""
    bench = Bench(lookahead=lookahead)
    bad = bench.add("bad", prompt(300), 20)
    good = bench.add("good", prompt(300, 1), 20)
    bench.tick(3 + lookahead)
    bench.runner.poison.add("bad")
    bench.tick()
    assert bench.ends(bad) == [FinishReason.ERROR]
    assert isinstance(bad.error, InternalError)
    assert bad.num_output_tokens == 3
    bench.run()
    alone = Bench()
    same = alone.add("good", prompt(300, 1), 20)
    alone.run()
    assert output(good) == output(same)
    assert bench.ends(good) == [FinishReason.LENGTH]


def test_bad_first_row_of_a_job_with_choices_ends_all_of_them_once() -> None:
    """Would catch choices that are forked from a failed prompt, or told of their failure twice."""
    bench = Bench()
    bench.runner.poison.add("bad")
    bad = bench.add("bad", prompt(300), 20, n=3)
    bench.run()
    assert bench.ends(bad) == [FinishReason.ERROR] * 3
    assert bench.free() == 32


def test_broken_tick_fails_only_the_rows_in_it() -> None:
    """Would catch an exception in a forward that kills the engine, or that ends requests which took no part:
    those that wait, and prompts that got no chunk in that tick."""
    bench = Bench(batch=3, chunk=PAGE_SIZE)
    decoding = bench.add("decoding", prompt(10), 40)
    bench.tick()
    first = bench.add("first", prompt(1000, 1), 5)
    second = bench.add("second", prompt(1000, 2), 5)
    waiting = bench.add("waiting", prompt(10, 3), 5)
    bench.tick()
    assert {name for name, _, _ in bench.runner.plans[-1]} == {"decoding", "first"}
    bench.runner.break_next = True
    bench.tick()
    for job in (decoding, first):
        assert bench.ends(job) == [FinishReason.ERROR]
        assert isinstance(job.error, InternalError)
        assert not job.sequences[0].page_table
    assert "broken tick" not in str(decoding.error), "the client sees the inside of the server"
    bench.run()
    for job in (second, waiting):
        assert bench.ends(job) == [FinishReason.LENGTH]
        assert job.error is None


def test_dead_engine_ends_waiting_and_running_jobs_with_the_error() -> None:
    """Would catch requests that hang when the engine is given up."""
    bench = Bench(batch=1)
    jobs = [bench.add(name, prompt(10), 50) for name in "abc"]
    bench.tick(2)
    events = bench.engine.fail_all(EngineDeadError("gone"))
    assert {event.job for event in events} == set(jobs)
    assert all(event.finish_reason is FinishReason.ERROR for event in events)
    assert all(isinstance(job.error, EngineDeadError) for job in jobs)
    assert not bench.engine.has_work
    bench.engine.check_integrity()


# -- figures -------------------------------------------------------------------------------------------


def test_usage_counts_prompt_and_output_tokens() -> None:
    """Would catch counts that include stop text cut away, or a prompt that grows by its answer."""
    bench, job = scripted("one two three", stop=("two",))
    report = usage_report(job.num_prompt_tokens, job.num_output_tokens, job.num_cached_tokens)
    assert report["prompt_tokens"] == len(ids("question"))
    assert report["completion_tokens"] == 7
    assert report["total_tokens"] == len(ids("question")) + 7
    assert report["prompt_tokens_details"] == {"cached_tokens": 0}
    told = sum(len(event.token_ids) for event in bench.events)
    assert told == 7


def test_timings_are_filled_and_in_order() -> None:
    """Would catch a reading that is never taken or taken at the wrong moment."""
    bench = Bench(chunk=PAGE_SIZE, batch=1)
    bench.add("before", prompt(10), 3)
    job = bench.add("a", prompt(600), 5)
    clock = job.timings
    clock.received = clock.tokenized = clock.queued = bench.now
    bench.run()
    assert clock.queued < clock.admitted < clock.first_token < clock.last_token == clock.finished
    assert clock.admitted - clock.queued == pytest.approx(0.04)  # after the three ticks of the first
    assert clock.first_token - clock.admitted == pytest.approx(0.02)  # three chunks
    assert clock.last_token - clock.first_token == pytest.approx(0.04)  # four more tokens
    # The fake forward takes 1 ms; each tick is charged to the phase the job was in.
    assert clock.prefill_compute_seconds == pytest.approx(0.003)
    assert clock.decode_compute_seconds == pytest.approx(0.004)
    report = timings_report([job])
    assert report["decode_compute_seconds"] == pytest.approx(0.004)
    assert report["decode_tokens_per_second"] == pytest.approx(4 / 0.04)
    assert report["decode_compute_tokens_per_second"] == pytest.approx(1000)
    assert report["prefill_tokens_per_second"] == pytest.approx(600 / 0.02)
    assert report["queue_seconds"] == pytest.approx(0.04)
    assert report["time_to_first_token_seconds"] == pytest.approx(0.06)
    assert report["completion_tokens"] == 5
    for name in ("prefix_lookup_seconds", "restore_seconds", "cache_store_seconds", "tokenization_seconds"):
        assert report[name] == 0.0  # this clock stands still within a tick
    assert {field.name for field in fields(clock)} >= {"received", "tokenized", "queued", "admitted"}


def test_mixed_forward_is_charged_to_each_participant_in_its_phase() -> None:
    """Would catch the prompt's share of a mixed tick left out of the decoders' compute time."""
    bench = Bench(chunk=PAGE_SIZE)
    first = bench.add("first", prompt(10), 10)
    bench.tick()
    second = bench.add("second", prompt(400, 1), 2)
    bench.tick(2)
    assert first.timings.decode_compute_seconds == pytest.approx(0.002)
    assert second.timings.prefill_compute_seconds == pytest.approx(0.002)
    bench.run()


def test_job_that_never_ran_reports_zeros() -> None:
    """Would catch negative spans, or a division by zero, in the report of a cancelled request."""
    bench = Bench(batch=1)
    bench.add("first", prompt(10), 5)
    job = bench.add("a", prompt(10), 5)
    job.cancelled = True
    bench.run()
    report = timings_report([job])
    assert all(value >= 0 for value in report.values())
    assert report["completion_tokens"] == 0
    assert report["decode_tokens_per_second"] == 0


def test_on_tick_tells_prompt_tokens_and_sampled_tokens() -> None:
    """Would catch metrics that count cached tokens as computed, or decode tokens as prompt."""
    bench = Bench(chunk=PAGE_SIZE)
    ticks: list[tuple[int, int]] = []
    bench.engine.on_tick = lambda prompt_tokens, sampled: ticks.append((prompt_tokens, sampled))
    bench.add("a", prompt(300), 3)
    bench.run()
    assert ticks == [(256, 0), (44, 1), (0, 1), (0, 1)]
    ticks.clear()
    bench.add("b", prompt(300), 2)
    bench.run()
    assert ticks == [(44, 1), (0, 1)]
    assert bench.engine.num_finished_jobs == 2
    assert bench.engine.num_ticks == 6


def test_idle_engine_does_nothing() -> None:
    """Would catch an empty forward, or ticks counted while nothing runs."""
    bench = Bench()
    assert bench.tick(3) == []
    assert bench.engine.num_ticks == 0
    assert bench.runner.plans == []


def test_logs_name_requests_and_never_their_text(caplog: pytest.LogCaptureFixture) -> None:
    """Would catch prompts or answers in the log."""
    caplog.set_level("DEBUG")
    secret = "the launch code is 0000"
    bench = Bench(batch=1)
    bench.add("request-1", ids(secret), 30, script=[*ids(secret), END])
    bench.add("request-2", ids(secret), 3)
    bench.run()
    assert "request-1" in caplog.text
    assert "request-2" in caplog.text
    assert "admission blocked" in caplog.text
    assert "launch" not in caplog.text
    events: list[TokenEvent] = bench.events
    assert any(event.text for event in events)
