"""Prefix sharing through the engine: between turns, between neighbours, between choices."""

from __future__ import annotations

import pytest

from helios.config import PAGE_SIZE
from helios.runtime.page_pool import DUMMY_PAGE
from helios.runtime.request import Job
from tests.unit.harness import Bench, output, prompt


def memory_of(bench: Bench, pages: list[int]) -> list[list[int]]:
    return [bench.runner.memory[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].tolist() for page in pages]


def test_full_hit_computes_one_token_and_writes_no_shared_page() -> None:
    """Would catch the crash of a prompt that is cached whole (nothing is left to compute), a count of 512
    cached tokens of 512, and a write into the page that others read."""
    bench = Bench()
    first = bench.add("first", prompt(2 * PAGE_SIZE), 4)
    bench.run()
    pages = [block.page for block in bench.engine.prefix_cache.blocks()]
    before = memory_of(bench, pages)
    bench.runner.memory[DUMMY_PAGE * PAGE_SIZE :][:PAGE_SIZE] = -1
    second = bench.add("second", prompt(2 * PAGE_SIZE), 4)
    bench.tick()
    assert bench.runner.plans[-1] == [("second", 2 * PAGE_SIZE - 1, 1)]
    assert bench.runner.memory[:PAGE_SIZE].max() == prompt(2 * PAGE_SIZE)[-1], "the write went elsewhere"
    assert memory_of(bench, pages) == before
    bench.run()
    assert second.num_cached_tokens == 2 * PAGE_SIZE - 1
    assert first.num_cached_tokens == 0
    assert output(second) == output(first)


def test_partial_hit_computes_only_the_rest() -> None:
    """Would catch a cached prefix that is computed again, or a start in the middle of a page."""
    bench = Bench()
    bench.add("first", prompt(700), 1)
    bench.run()
    second = bench.add("second", [*prompt(600), 1, 2, 3], 4)
    bench.tick()
    assert second.num_cached_tokens == 512
    assert bench.runner.plans[-1] == [("second", 512, 91)]
    bench.run()


def test_the_next_turn_reuses_generated_blocks() -> None:
    """Would catch a cache of prompts only: in a chat, the answer is the larger part of the next prompt."""
    bench = Bench()
    first = bench.add("first", prompt(200), 400)
    bench.run()
    second = bench.add("second", [*first.sequences[0].token_ids, 1, 2, 3], 4)
    bench.run()
    assert second.num_prompt_tokens == 603
    assert second.num_cached_tokens == 512


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("chunk", [PAGE_SIZE, 2 * PAGE_SIZE])
def test_equal_prompts_that_arrive_together_share_while_in_prefill(lookahead: bool, chunk: int) -> None:
    """Would catch a look-up at admission only: of equal prompts that arrive together each would compute
    every block itself."""
    bench = Bench(chunk=chunk, batch=4, lookahead=lookahead)
    shared = prompt(4 * PAGE_SIZE)
    jobs = [bench.add(f"job{number}", [*shared, number], 2) for number in range(4)]
    bench.run()
    computed = sum(count for plan in bench.runner.plans for _, _, count in plan)
    # Each block once, each job's own tail, a decode step for each job, and one chunk that was in flight.
    assert computed <= 4 * PAGE_SIZE + 4 + 4 + chunk
    assert sum(job.num_cached_tokens for job in jobs) >= 3 * 3 * PAGE_SIZE
    for job in jobs:
        alone = Bench()
        again = alone.add(job.job_id, job.prompt_ids, 2)
        alone.run()
        assert output(job) == output(again)


def test_pages_given_up_for_shared_ones_go_back_at_once() -> None:
    """Would catch reserved pages that are lost, or kept until the end, when a waiting prompt finds its next
    blocks in the cache."""
    bench = Bench(chunk=PAGE_SIZE, batch=2, pages=10)
    jobs = [bench.add(name, prompt(4 * PAGE_SIZE + 1), 2) for name in "ab"]
    bench.tick()
    assert bench.engine.pool.num_free == 0
    shared: set[int] = set()
    for _ in range(12):
        bench.tick()
        tables = [set(job.sequences[0].page_table) for job in jobs if not job.is_finished]
        if len(tables) == 2:
            shared = max(shared, tables[0] & tables[1], key=len)
            assert bench.engine.pool.num_free == len(tables[0] & tables[1])
    assert len(shared) >= 3
    bench.run()


def test_salt_keeps_tenants_apart() -> None:
    """Would catch a hit, and so a timing signal, across two cache_salt values."""
    bench = Bench()
    hits = []
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", None)):
        job = bench.add(name, prompt(600), 2, salt=salt)
        bench.run()
        hits.append(job.num_cached_tokens)
    assert hits == [0, 0, 0, 512, 512]


def test_prefix_cache_can_be_switched_off() -> None:
    """Would catch a switch that still holds pages back, or still hits."""
    bench = Bench(prefix_cache=False)
    for name in "ab":
        job = bench.add(name, prompt(600), 2)
        bench.run()
        assert job.num_cached_tokens == 0
    assert bench.engine.pool.num_free == 32
    assert bench.engine.prefix_cache.query_tokens == 0


def test_cached_blocks_expire_and_use_renews_them() -> None:
    """Would catch a TTL that starts at computation instead of at the last use."""
    bench = Bench(prefix_cache_ttl=50.0)
    bench.add("a", prompt(300), 2)
    bench.run()
    bench.now += 40
    hit = bench.add("b", prompt(300), 2)
    bench.run()
    assert hit.num_cached_tokens == PAGE_SIZE
    bench.now += 40
    hit = bench.add("c", prompt(300), 2)
    bench.run()
    assert hit.num_cached_tokens == PAGE_SIZE
    bench.now += 51
    miss = bench.add("d", prompt(300), 2)
    bench.run()
    assert miss.num_cached_tokens == 0


def test_blocks_of_a_cancelled_prompt_are_reused() -> None:
    """Would catch work thrown away: a block is published when it is computed, not when its request ends."""
    bench = Bench(chunk=PAGE_SIZE)
    job = bench.add("a", prompt(4 * PAGE_SIZE), 2)
    bench.tick(2)
    job.cancelled = True
    bench.tick()
    again = bench.add("b", prompt(4 * PAGE_SIZE), 2)
    bench.run()
    assert again.num_cached_tokens == 2 * PAGE_SIZE


def test_failed_tick_publishes_nothing() -> None:
    """Would catch a block published before the forward that fills it: later prompts would read garbage."""
    bench = Bench()
    bench.add("a", prompt(600), 2)
    bench.runner.break_next = True
    bench.tick()
    assert len(bench.engine.prefix_cache) == 0
    again = bench.add("b", prompt(600), 2)
    bench.run()
    assert again.num_cached_tokens == 0


def test_clearing_the_cache_leaves_running_requests_alone() -> None:
    """Would catch pages taken from a running request by a cleared cache, and blocks published behind a
    parent that is gone."""
    bench = Bench(chunk=PAGE_SIZE)
    reference = Bench()
    job = bench.add("a", prompt(700), 400)
    expected = reference.add("a", prompt(700), 400)
    reference.run()
    bench.tick(2)
    assert bench.engine.prefix_cache.clear() == 2
    bench.engine.check_integrity()
    bench.run()
    assert output(job) == output(expected)
    assert len(bench.engine.prefix_cache) == 0


def choices_share(bench: Bench, length: int, n: int = 3) -> Job:
    job = bench.add("a", prompt(length), 8, n=n)
    while len(bench.engine.running) < n:
        bench.tick()
    return job


def test_choices_share_the_pages_of_their_prompt() -> None:
    """Would catch a prompt computed or stored once for each choice, and a shared partial page: each choice
    writes its own tokens into that."""
    bench = Bench()
    job = choices_share(bench, 600)
    tables = [sequence.page_table for sequence in job.sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert bench.engine.pool.num_free == 32 - 2 - 3
    bench.run()
    assert output(job, 0) == output(job, 1) == output(job, 2)
    prefilled = sum(count for plan in bench.runner.plans for _, start, count in plan if start < 599)
    assert prefilled == 600


def test_choices_of_a_page_aligned_prompt_share_all_of_it() -> None:
    """Would catch choices that rewrite the last prompt token into the shared page."""
    bench = Bench()
    job = choices_share(bench, 512)
    pages = job.sequences[0].page_table[:2]
    before = memory_of(bench, pages)
    assert bench.engine.pool.num_free == 32 - 2 - 3
    bench.run()
    assert memory_of(bench, pages) == before
    assert output(job, 0) == output(job, 1) == output(job, 2)


def test_choices_end_independently() -> None:
    """Would catch a page that goes back while another choice still reads it."""
    bench = Bench()
    job = choices_share(bench, 600)
    first = job.sequences[0]
    while not first.is_finished:
        bench.tick()
    assert bench.engine.pool.references(job.sequences[1].page_table[0]) == 2
    bench.run()
    assert [len(bench.ends(job))] == [3]
    assert bench.free() == 32


def test_counts_of_the_cache_snapshot_add_up() -> None:
    """Would catch /internal/cache fields that are missing or contradict the pool."""
    bench = Bench(pages=16)
    bench.add("a", prompt(600), 2)
    bench.run()
    bench.add("b", prompt(600), 2)
    bench.run()
    books = bench.engine.kv.snapshot()
    assert books["num_blocks"] == books["reclaimable_blocks"] == 2
    assert books["num_tokens"] == 512
    assert books["capacity_blocks"] == 16
    assert (books["query_tokens"], books["hit_tokens"]) == (1200, 512)
    blocks = books["blocks"]
    assert isinstance(blocks, list)
    assert [block["hits"] for block in blocks] == [1, 1]
    assert blocks[0]["parent"] is None
    assert blocks[1]["parent"] == blocks[0]["hash"]
