"""Who gets in, when, and what a request that never fits is told."""

from __future__ import annotations

import pytest

from helios.config import PAGE_SIZE
from helios.errors import ContextLengthError, InvalidRequestError
from helios.runtime.request import FinishReason, Job, SequenceStatus
from tests.unit.fakes import expected_output, next_token
from tests.unit.harness import Bench, output, prompt


def running(bench: Bench) -> list[str]:
    return [sequence.job.job_id for sequence in bench.engine.running]


def waiting(bench: Bench) -> list[str]:
    return [job.job_id for job in bench.engine.waiting]


def test_jobs_are_admitted_in_order_while_rows_last() -> None:
    """Would catch a later request that overtakes an earlier one."""
    bench = Bench(batch=2)
    for name in "abcd":
        bench.add(name, prompt(10), 3)
    bench.tick()
    assert (running(bench), waiting(bench)) == (["a", "b"], ["c", "d"])
    bench.tick(2)
    assert (running(bench), waiting(bench)) == ([], ["c", "d"])
    bench.tick()
    assert running(bench) == ["c", "d"]
    bench.run()


def test_large_job_at_the_head_blocks_smaller_ones_behind_it() -> None:
    """Would catch a large request starved for ever by small ones that fit beside those running."""
    bench = Bench(pages=4)
    bench.add("two", prompt(300), 100)
    bench.add("four", prompt(900, 1), 100)
    bench.add("one", prompt(10, 2), 10)
    bench.tick(5)
    assert (running(bench), waiting(bench)) == (["two"], ["four", "one"])
    while running(bench) == ["two"]:
        bench.tick()
    bench.tick()
    assert (running(bench), waiting(bench)) == (["four"], ["one"])
    bench.run()


def test_the_maximum_length_is_reserved_in_whole_pages() -> None:
    """Would catch a request admitted on its prompt alone that runs out of pages while it decodes, or one
    page too many for an answer that ends at a page border: the last token is never computed."""
    for prompt_tokens, max_tokens, pages in ((1, 1, 1), (256, 1, 1), (256, 2, 2), (255, 2, 1), (250, 300, 3)):
        bench = Bench()
        job = bench.add("a", prompt(prompt_tokens), max_tokens)
        bench.tick()
        if not job.is_finished:
            assert len(job.sequences[0].page_table) == pages
        assert bench.engine.pool.num_free + bench.engine.pool.num_cached_only == (
            32 if job.is_finished else 32 - pages
        )
        bench.run()
        assert len(output(job)) == max_tokens


def test_request_beyond_the_context_is_refused_with_the_numbers() -> None:
    """Would catch a refusal that does not say how long the request was and what would fit."""
    bench = Bench(context=1000)
    with pytest.raises(ContextLengthError) as raised:
        bench.add("a", prompt(900), 101)
    for number in ("1000", "1001", "900", "101"):
        assert number in raised.value.message
    assert raised.value.status == 400
    bench.add("b", prompt(900), 100)
    bench.run()


def test_request_beyond_the_pool_is_refused_with_the_numbers() -> None:
    """Would catch a request that waits at the head of the queue for ever because it can never fit, and
    blocks everybody behind it."""
    bench = Bench(pages=3)
    with pytest.raises(ContextLengthError) as raised:
        bench.add("a", prompt(700), 100)
    assert "needs 4 KV pages" in raised.value.message
    assert "has 3" in raised.value.message
    job = bench.add("b", prompt(700), 60)
    bench.run()
    assert len(output(job)) == 60


def test_too_many_choices_are_refused_whole() -> None:
    """Would catch a job of which some choices run and others never do."""
    bench = Bench(batch=2)
    with pytest.raises(InvalidRequestError, match="n is 3") as raised:
        bench.add("a", prompt(10), 4, n=3)
    assert raised.value.param == "n"
    # Choices count in the pages too: full prompt pages once, the rest for each.
    bench = Bench(pages=6, batch=4)
    bench.add("b", prompt(2 * PAGE_SIZE), 256, n=4)
    with pytest.raises(ContextLengthError, match="needs 7 KV pages"):
        bench.add("c", prompt(3 * PAGE_SIZE), 256, n=4)
    bench.run()


def test_job_with_choices_waits_for_enough_rows() -> None:
    """Would catch a job admitted in part, or choices that take rows the engine does not have."""
    bench = Bench(batch=3)
    bench.add("a", prompt(10), 5)
    bench.add("b", prompt(10), 5)
    bench.add("c", prompt(10), 5, n=2)
    bench.tick()
    assert (running(bench), waiting(bench)) == (["a", "b"], ["c"])
    assert bench.engine.num_free_rows == 1
    bench.run()


def test_a_request_never_evicts_its_own_prefix() -> None:
    """Would catch eviction before pinning: the pool is full of cached blocks, the request's own prefix is
    the least recently used of them, and room must be made for the rest of it."""
    bench = Bench(pages=4)
    own = prompt(2 * PAGE_SIZE)
    first = bench.add("first", own, 1)
    bench.run()
    bench.add("other", prompt(2 * PAGE_SIZE, 1), 1)
    bench.run()
    assert bench.engine.pool.num_cached_only == 4
    again = bench.add("again", [*own, *prompt(400, 2)], 100)
    bench.tick()
    assert again.num_cached_tokens == 2 * PAGE_SIZE
    assert len(set(again.sequences[0].page_table)) == len(again.sequences[0].page_table) == 4
    bench.run()
    assert output(again) == expected_output_without_end(again)
    assert output(first) == expected_output_without_end(first)


def expected_output_without_end(job: Job) -> list[int]:
    tokens = list(job.prompt_ids)
    for _ in range(job.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[job.num_prompt_tokens :]


def test_reservation_that_fails_takes_nothing() -> None:
    """Would catch a blocked head of the queue that pins its prefix on every tick, or evicts for nothing."""
    bench = Bench(pages=7)
    shared = prompt(2 * PAGE_SIZE)
    bench.add("warm", shared, 1)
    bench.add("cold", prompt(PAGE_SIZE, 3), 1)
    bench.run()
    bench.add("long", prompt(600, 1), 100)
    bench.tick()
    blocked = bench.add("blocked", [*shared, *prompt(500, 2)], 100)
    for _ in range(3):
        bench.tick()
        assert blocked.sequences[0].status is SequenceStatus.WAITING
        assert bench.engine.pool.num_cached_only == 3, "evicted for a request that does not fit yet"
        assert not blocked.sequences[0].page_table
    bench.run()
    assert blocked.num_cached_tokens == 2 * PAGE_SIZE


def test_cached_pages_are_reclaimed_for_new_requests() -> None:
    """Would catch a server that fills up with cached prefixes and then admits nobody; and stale pages: the
    first prompt is computed anew, into other pages, with the same result."""
    bench = Bench(pages=8)
    first = bench.add("first", prompt(700), 4)
    bench.run()
    for seed in range(1, 7):
        bench.add(f"filler{seed}", prompt(700, seed), 4)
        bench.run()
    assert bench.engine.prefix_cache.evictions > 0
    again = bench.add("again", prompt(700), 4)
    bench.run()
    assert again.num_cached_tokens == 0
    assert output(again) == output(first)


def test_tiny_pool_with_a_shared_prefix_and_long_answers() -> None:
    """Would catch an allocator that breaks when sixteen answers grow over several pages in a pool of
    eight: lost pages, an answer that depends on its neighbours, counts beyond max_tokens."""
    bench = Bench(pages=8, batch=8, chunk=64)
    shared = prompt(300)
    jobs = [bench.add(f"job{number}", [*shared, number], 400, ignore_eos=False) for number in range(16)]
    bench.run(limit=20_000)
    for job in jobs:
        assert output(job) == expected_output(job.prompt_ids, 400)
        assert job.num_prompt_tokens == 301
        assert job.num_output_tokens <= 400
        assert bench.ends(job) in ([FinishReason.STOP], [FinishReason.LENGTH])
    assert jobs[-1].num_cached_tokens == PAGE_SIZE


def test_the_next_tick_is_due_when_most_of_a_decode_tick_has_passed() -> None:
    """Never behind prompts, behind a tick of unknown length, or without lookahead."""
    bench = Bench(lookahead=True)
    bench.runner.forward_seconds = 0.1
    job = bench.add("a", prompt(20), max_tokens=20)
    assert bench.engine.seconds_until_due() == 0
    bench.tick()  # the prompt is on its way
    assert bench.engine.seconds_until_due() == 0
    bench.tick()  # its first decode tick: how long one takes is not known yet
    assert bench.engine.seconds_until_due() == 0
    bench.tick(2)
    due = bench.engine.seconds_until_due()
    assert 0.05 < due < 0.1
    bench.now += 0.05
    assert bench.engine.seconds_until_due() == pytest.approx(due - 0.05)
    other = bench.add("b", prompt(20, 1), max_tokens=20)
    bench.tick()
    assert bench.engine.seconds_until_due() == 0
    bench.run()
    assert len(output(job)) == len(output(other)) == 20
    for options in ({"lookahead": True, "late_launch": False}, {"lookahead": False}):
        bench = Bench(**options)
        bench.add("a", prompt(20), max_tokens=20)
        bench.tick(5)
        assert bench.engine.seconds_until_due() == 0
