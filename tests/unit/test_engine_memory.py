"""Pages on demand, preemption, priorities and offload to host memory, over the fake model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helios.config import PAGE_SIZE
from helios.runtime.request import FinishReason, Job
from tests.unit.fakes import next_token
from tests.unit.harness import Bench, output, prompt


def expected_output(prompt_ids: list[int], count: int) -> list[int]:
    """What a job alone says, end tokens ignored."""
    tokens = list(prompt_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt_ids) :]


def pressed(**config: Any) -> tuple[Bench, list[Job]]:
    """Three jobs of one prompt page each that grow to three pages, over a pool of six."""
    bench = Bench(pages=6, on_demand=True, **config)
    jobs = [bench.add(f"job{number}", prompt(200, number), 500) for number in range(3)]
    bench.tick()
    return bench, jobs


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_the_newest_is_put_back_and_goes_on_where_it_was(lookahead: bool, cache: bool) -> None:
    """Would catch tokens lost or repeated by a preemption, the wrong victim, and a row or page that it keeps."""
    bench, jobs = pressed(lookahead=lookahead, prefix_cache=cache)
    assert len(bench.engine.running) == 3, "each got pages for its prompt only"
    bench.run()
    for job in jobs:
        assert output(job) == expected_output(job.prompt_ids, 500)
        assert bench.ends(job) == [FinishReason.LENGTH]
    counts = [job.timings.preemptions for job in jobs]
    assert counts[0] == 0
    assert counts[2] >= 1
    assert bench.engine.num_preemptions == sum(counts)


def test_reserving_never_preempts() -> None:
    """Would catch a pool that is overbooked although admission reserves."""
    bench = Bench(pages=6, on_demand=False)
    jobs = [bench.add(f"job{number}", prompt(200, number), 500) for number in range(3)]
    bench.tick()
    assert len(bench.engine.running) == 2
    bench.run()
    assert [job.timings.preemptions for job in jobs] == [0, 0, 0]


def test_what_was_computed_comes_back_from_the_prefix_cache() -> None:
    """Would catch a resumed sequence that computes its full blocks again although they are still cached."""
    bench = Bench(pages=8, on_demand=True)
    bench.add("old", prompt(PAGE_SIZE - 10, 1), 60)
    bench.add("new", prompt(3 * PAGE_SIZE + 10, 2), 60)
    bench.tick(3)
    bench.engine._preempt(list(bench.engine._jobs)[-1])
    bench.runner.plans.clear()
    bench.tick()
    resumed = next(plan for plan in bench.runner.plans[0] if plan[0] == "new")
    assert resumed[1] == 3 * PAGE_SIZE
    bench.run()


def test_a_choice_that_is_put_back_shares_its_prompt_again() -> None:
    """Would catch choices of one job that come back without the pages of their prompt, or wait for ever."""
    bench = Bench(pages=9, batch=8, on_demand=True)
    first = bench.add("first", prompt(250, 1), 700)
    many = bench.add("many", prompt(300, 2), 400, n=3)
    bench.run()
    assert many.timings.preemptions >= 1
    assert output(first) == expected_output(first.prompt_ids, 700)
    for index in range(3):
        assert output(many, index) == expected_output(many.prompt_ids, 400)


@pytest.mark.parametrize("lookahead", [False, True])
def test_64_pages_and_200_mixed_requests(lookahead: bool) -> None:
    """Would catch a deadlock, a leak, or an answer changed by preemption under real pressure."""
    chosen = random.Random(7)
    bench = Bench(pages=64, batch=48, chunk=1024, on_demand=True, lookahead=lookahead)
    jobs: list[Job] = []
    for number in range(200):
        length, tokens = chosen.choice([(40, 600), (700, 100), (1500, 30), (PAGE_SIZE, 300), (3000, 5)])
        jobs.append(bench.add(f"job{number}", prompt(length + number % 7, number % 40), tokens))
    bench.run(limit=20_000)
    for job in jobs:
        assert output(job) == expected_output(job.prompt_ids, job.max_tokens)
        assert bench.ends(job) == [FinishReason.LENGTH]
    assert bench.engine.num_preemptions > 0
    assert bench.engine.num_finished_jobs == 200


def test_cancelled_and_late_jobs_that_were_put_back_end_in_the_queue() -> None:
    """Would catch a preempted job that can no longer be cancelled, and a second end."""
    bench, jobs = pressed()
    while not jobs[2].timings.preemptions:
        bench.tick()
    jobs[2].cancelled = True
    bench.run()
    assert bench.ends(jobs[2]) == [FinishReason.ABORT]
    assert output(jobs[2]) == expected_output(jobs[2].prompt_ids, 500)[: len(output(jobs[2]))]


def test_the_watermark_keeps_new_jobs_from_putting_back_running_ones() -> None:
    """Would catch admission into the last free page, which the next token of a running job needs."""
    bench = Bench(pages=4, on_demand=True)
    bench.add("a", prompt(2 * PAGE_SIZE, 1), 200)
    bench.add("b", prompt(200, 2), 50)
    bench.add("c", prompt(10, 3), 5)
    bench.tick()
    assert [sequence.job.job_id for sequence in bench.engine.running] == ["a", "b"]
    bench.run()
    assert bench.engine.num_preemptions == 0


# -- priorities -----------------------------------------------------------------------------------


def test_lower_values_go_first_and_equals_in_order() -> None:
    """Would catch the order turned round, or arrival ignored among equals."""
    bench = Bench(batch=1, by_priority=True)
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0)):
        bench.add(name, prompt(5), 2, priority=priority)
    bench.run()
    order = [event.job.job_id for event in bench.events if event.finish_reason is not None]
    assert order == ["c", "b", "d", "a"]


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("on_demand", [False, True])
def test_an_urgent_job_puts_back_a_less_urgent_one(on_demand: bool, lookahead: bool) -> None:
    """Would catch priority inversion: an urgent request that waits for the rows or pages of others."""
    bench = Bench(pages=4, batch=2, by_priority=True, on_demand=on_demand, lookahead=lookahead)
    slow = [bench.add(f"slow{number}", prompt(100, number), 300, priority=1) for number in range(2)]
    bench.tick(5)
    urgent = bench.add("urgent", prompt(300, 9), 3, priority=0)
    bench.tick(5)
    assert urgent.is_finished
    assert slow[1].timings.preemptions == 1
    assert slow[0].timings.preemptions == 0
    bench.run()
    for job in slow:
        assert output(job) == expected_output(job.prompt_ids, 300)


def test_equal_priorities_do_not_displace_each_other() -> None:
    """Would catch two requests of one priority that put each other back for ever."""
    bench = Bench(batch=1, by_priority=True)
    bench.add("a", prompt(5), 20)
    bench.tick()
    bench.add("b", prompt(5), 20)
    bench.run()
    assert bench.engine.num_preemptions == 0


def test_nothing_starves_behind_urgent_ones() -> None:
    """Would catch a low priority that waits as long as urgent requests keep coming."""
    bench = Bench(batch=1, by_priority=True, priority_age=1.0)
    starved = bench.add("starved", prompt(5), 40, priority=9)
    for number in range(300):
        bench.add(f"urgent{number}", prompt(5), 4, priority=0)
        bench.tick()
        if starved.is_finished:
            break
    assert starved.is_finished
    assert bench.now - starved.timings.received < 2.5
    bench.run()


def test_fcfs_ignores_priorities() -> None:
    """Would catch a priority that has an effect although the policy is first come, first served."""
    bench = Bench(batch=1)
    bench.add("a", prompt(5), 2, priority=5)
    bench.add("b", prompt(5), 2, priority=0)
    bench.run()
    order = [event.job.job_id for event in bench.events if event.finish_reason is not None]
    assert order == ["a", "b"]


# -- offload --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [False, True])
def test_evicted_blocks_come_back_from_the_host(lookahead: bool) -> None:
    """Would catch blocks lost on eviction, pages read before their copy has ended, and a stale hit."""
    bench = Bench(pages=6, slots=8, lookahead=lookahead)
    bench.add("a", prompt(4 * PAGE_SIZE + 5, 1), 3)
    bench.run()
    bench.add("b", prompt(5 * PAGE_SIZE + 5, 2), 3)  # needs all pages: evicts a's
    bench.run()
    assert bench.engine.kv.host is not None
    assert bench.engine.kv.host.saved >= 3
    again = bench.add("again", prompt(4 * PAGE_SIZE + 5, 1), 3)
    bench.run()
    assert again.num_cached_tokens == 4 * PAGE_SIZE
    assert output(again) == expected_output(again.prompt_ids, 3)
    books = bench.engine.kv.snapshot()["offload"]
    assert isinstance(books, dict)
    assert books["restored_blocks"] >= 3
    assert books["loading_blocks"] == 0


def test_others_run_while_a_page_is_on_its_way() -> None:
    """Would catch a whole engine that waits for one request's copies."""
    bench = Bench(pages=7, slots=8)
    bench.add("a", prompt(4 * PAGE_SIZE + 5, 1), 3)
    bench.run()
    bench.add("b", prompt(6 * PAGE_SIZE + 5, 2), 3)
    bench.run()
    bench.runner.plans.clear()
    other = bench.add("other", prompt(20, 3), 30)
    bench.tick(2)
    bench.add("again", prompt(4 * PAGE_SIZE + 5, 1), 3)
    bench.tick()
    assert [plan[0] for plan in bench.runner.plans[-1]] == ["other"]
    bench.run()
    assert output(other) == expected_output(other.prompt_ids, 30)


def test_a_job_cancelled_while_its_pages_load_leaks_nothing() -> None:
    """Would catch a page that is handed on while its copy is still being written."""
    bench = Bench(pages=6, slots=8)
    bench.add("a", prompt(4 * PAGE_SIZE + 5, 1), 3)
    bench.run()
    bench.add("b", prompt(5 * PAGE_SIZE + 5, 2), 3)
    bench.run()
    again = bench.add("again", prompt(4 * PAGE_SIZE + 5, 1), 3)
    bench.tick()
    assert bench.engine.kv.host is not None
    assert bench.engine.kv.host.loading
    again.cancelled = True
    bench.run()
    assert bench.ends(again) == [FinishReason.ABORT]
    assert not bench.engine.kv.host.loading


def test_host_memory_is_bounded_and_expires() -> None:
    """Would catch a host cache that grows without bound or outlives the lifetime of a block."""
    bench = Bench(pages=4, slots=2)
    for number in range(4):
        bench.add(f"job{number}", prompt(3 * PAGE_SIZE + 1, number), 2)
        bench.run()
    host = bench.engine.kv.host
    assert host is not None
    assert len(host) == 2
    assert host.dropped > 0
    bench.now += 1000.0
    bench.engine.kv.expire(bench.now)
    assert len(host) == 0


def test_salt_keeps_tenants_apart_on_the_host_too() -> None:
    """Would catch a block that comes back from the host to another tenant."""
    bench = Bench(pages=6, slots=8)
    bench.add("a", prompt(4 * PAGE_SIZE + 5, 1), 3, salt="one")
    bench.run()
    bench.add("b", prompt(5 * PAGE_SIZE + 5, 2), 3)
    bench.run()
    other = bench.add("again", prompt(4 * PAGE_SIZE + 5, 1), 3, salt="two")
    bench.run()
    assert other.num_cached_tokens == 0


# -- ticks ----------------------------------------------------------------------------------------


def test_tick_log_keeps_the_last_ticks() -> None:
    """Would catch a log that grows for ever, or counts a prompt's tokens as decoding."""
    bench = Bench(tick_log=3)
    bench.add("a", prompt(50), 6)
    bench.run()
    log = list(bench.engine.tick_log)
    assert len(log) == 3
    assert [record.decode_tokens for record in log] == [1, 1, 1]
    assert all(record.finished >= record.started for record in log)
    first = Bench(tick_log=10)
    first.add("a", prompt(50), 6)
    first.run()
    assert first.engine.tick_log[0].prefill_tokens == 50
