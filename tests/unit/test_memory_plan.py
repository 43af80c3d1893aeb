"""The memory plan's arithmetic, on devices that need not be there, and what warm-up leaves behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helios.config import PAGE_SIZE, DeviceInfo, Limits, Settings, load
from helios.errors import StartupError
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.kv_cache import page_bytes
from helios.runtime.warmup import DECODE_STEPS, MemoryPlan, plan_memory, rehearse, row_buckets, warm_up
from tests.unit.harness import Bench
from tests.unit.test_model_config import QWEN3_4B

pytestmark = pytest.mark.usefixtures("clean_environment")

GIB = 1 << 30
CONFIG = ModelConfig.from_dict(QWEN3_4B)
LIMITS = Limits(max_batch_size=8, prefill_chunk_size=256, max_queue_size=32)
CPU = DeviceInfo("cpu", "a CPU", 64 * GIB)


def card(gib: float) -> DeviceInfo:
    return DeviceInfo("cuda", "a GPU", int(gib * GIB), (9, 0), 132)


def plan(device: DeviceInfo, *, used: int = 0, measured: int | None = None, **values: Any) -> MemoryPlan:
    settings: Settings = load({name: str(value) for name, value in values.items()})
    return plan_memory(settings, CONFIG, device, LIMITS, 2, used, measured)


def test_page_bytes() -> None:
    """Would catch a page of the wrong size: 2 × 36 layers × 8 heads × 128 × 256 tokens × 2 bytes."""
    assert page_bytes(CONFIG, 2) == 2 * 36 * 8 * 128 * 256 * 2


def test_parts_add_up_to_the_budget() -> None:
    """Would catch memory that is planned twice or forgotten."""
    made = plan(card(80))
    assert made.budget == int(80 * GIB * 0.9)
    assert made.weights == CONFIG.num_parameters * 2
    assert made.kv == made.num_pages * made.page
    left = made.budget - made.weights - made.activations - made.kv
    assert 0 <= left < made.page
    assert not made.measured


def test_utilization_and_other_processes_shrink_the_pool() -> None:
    """Would catch a fraction of the free instead of the total memory, or memory of others planned for."""
    base = plan(card(80))
    half = plan(card(80), max_gpu_utilization=0.45)
    assert base.num_pages - half.num_pages == pytest.approx(0.45 * 80 * GIB / base.page, abs=2)
    shared = plan(card(80), used=10 * GIB)
    assert base.num_pages - shared.num_pages == pytest.approx(10 * GIB / base.page, abs=2)


def test_measured_peak_replaces_the_estimate_with_its_margin() -> None:
    """Would catch a warm-up whose reading is not used, or a margin that is not added."""
    small, large = (plan(card(80), measured=size) for size in (1 * GIB, 3 * GIB))
    assert small.measured
    assert large.activations - small.activations == pytest.approx(2.4 * GIB, abs=2)
    assert small.num_pages - large.num_pages == pytest.approx(2.4 * GIB / small.page, abs=2)
    wide = plan(card(80), measured=3 * GIB, kv_cache_headroom_ratio=1.0)
    assert wide.activations - large.activations == pytest.approx(0.8 * 3 * GIB, abs=2)


def test_weights_that_do_not_fit_with_headroom_are_refused() -> None:
    """Would catch a load that dies in the middle; the message names the numbers and the setting."""
    with pytest.raises(StartupError) as raised:
        plan(card(8))
    message = str(raised.value)
    for word in ("7.49 GiB", "8.99 GiB", "8.00 GiB", "HELIOS_WEIGHT_HEADROOM_RATIO (0.2)"):
        assert word in message
    with pytest.raises(StartupError, match="HELIOS_WEIGHT_HEADROOM_RATIO"):
        plan(card(80), used=72 * GIB)
    # The headroom is wanted before loading; afterwards the reading decides.
    plan(card(12), measured=GIB, weight_headroom_ratio=4)


def test_no_room_for_pages_names_the_settings() -> None:
    """Would catch a server that starts with no page, or an error that does not say what to change."""
    with pytest.raises(StartupError) as raised:
        plan(card(10), max_gpu_utilization=0.75)
    message = str(raised.value)
    for word in (
        "HELIOS_MAX_GPU_UTILIZATION (0.75)", "HELIOS_MAX_BATCH_SIZE (8)", "HELIOS_PREFILL_CHUNK_SIZE (256)",
    ):  # fmt: skip
        assert word in message
    assert "\n" not in message


def test_number_of_pages_by_hand() -> None:
    """Would catch an override that is ignored, or that is taken although it does not fit."""
    assert plan(card(80), num_pages=8).num_pages == 8
    assert plan(CPU, num_pages=8).num_pages == 8
    with pytest.raises(StartupError, match="not enough for HELIOS_NUM_PAGES=5000"):
        plan(card(80), num_pages=5000)


def test_cpu_pool_has_its_own_size() -> None:
    """Would catch a CPU server that takes nine tenths of the machine's memory for KV pages."""
    made = plan(CPU)
    assert made.num_pages == GIB // made.page
    assert plan(CPU, cpu_kv_bytes=1 << 20).num_pages == 2


def test_plan_is_told_in_tokens_and_sequences() -> None:
    """Would catch numbers in the banner that are not the plan's."""
    text = "\n".join(plan(card(80), num_pages=100).lines(max_model_len=12_800))
    assert "100 pages of 256 tokens, 25,600 tokens" in text
    assert "25 sequences of 1,024 tokens, or 2.0 of 12,800" in text
    assert "(estimated)" in text
    assert "(measured)" in "\n".join(plan(card(80), measured=GIB).lines(1000))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 64, 100, 256, 1000])
def test_row_buckets(size: int) -> None:
    """Would catch a largest batch that was never warmed, or buckets so far apart that padding doubles the
    work."""
    buckets = row_buckets(size)
    assert buckets == sorted(set(buckets))
    assert buckets[0] == 1
    assert buckets[-1] == size
    assert all(after <= max(2 * before, before + 32) for before, after in itertools.pairwise(buckets))
    assert row_buckets(size, "cpu") == sorted({1, size})


@pytest.mark.parametrize(
    ("pages", "context", "chunk"), [(2, 512, 256), (2, 16, 256), (8, 2048, 4096), (40, 300, 16), (20, 16, 1)]
)
@pytest.mark.parametrize("lookahead", [False, True])
def test_warmed_engine_is_clean(pages: int, context: int, chunk: int, lookahead: bool) -> None:
    """Would catch made-up prompts that a client can hit in the cache, counters that start above zero, rows
    or pages that stay taken, and a warm-up beyond a small context or pool."""
    bench = Bench(pages=pages, context=context, chunk=chunk, batch=8, lookahead=lookahead)
    limits = Limits(max_batch_size=8, prefill_chunk_size=chunk, max_queue_size=32)
    told: list[tuple[int, int]] = []
    warmed = warm_up(bench.engine, limits, [1, 2, 4, 8], lambda done, total: told.append((done, total)))
    rehearse(bench.engine)
    assert warmed == [size for size in (1, 2, 4, 8) if size <= pages // 2]
    assert told[-1][0] == told[-1][1] == len(told)
    longest = max(start + count for plan in bench.runner.plans for _, start, count in plan)
    assert longest <= context - 1
    engine = bench.engine
    assert not engine.has_work
    assert engine.pool.num_free == pages
    assert engine.num_free_rows == 8
    assert engine.num_ticks == engine.num_finished_jobs == 0
    cache = engine.prefix_cache
    assert (len(cache), cache.query_tokens, cache.hit_tokens, cache.evictions, cache.expirations) == (0,) * 5
    engine.check_integrity()


def test_warm_up_takes_every_path() -> None:
    """Would catch a path that the first client has to warm: a prompt over a page border, one restored from
    the cache, a full tick, and every batch size for a fixed number of steps."""
    bench = Bench(pages=40, chunk=1000, batch=8)
    limits = Limits(max_batch_size=8, prefill_chunk_size=1000, max_queue_size=32)
    warm_up(bench.engine, limits, [1, 4, 8], lambda done, total: None)
    plans = bench.runner.plans
    assert [row[1:] for row in plans[0]] == [(0, PAGE_SIZE + 1)]
    assert [row[1:] for row in plans[DECODE_STEPS]] == [(PAGE_SIZE, 1)]
    # Again from its first token, which only log probabilities of the prompt ask for: no graph holds such a tick.
    assert sum([row[1:] for row in plan] == [(0, PAGE_SIZE + 1)] for plan in plans) == 2
    assert max(sum(count for _, _, count in plan) for plan in plans) == 1000
    for size in (1, 4, 8):
        decode_ticks = [
            plan for plan in plans if len(plan) == size and all(count == 1 for _, _, count in plan)
        ]
        assert len(decode_ticks) >= 2 * (DECODE_STEPS - 1)


def test_warm_up_fails_loudly() -> None:
    """Would catch a server that reports healthy although its warm-up failed."""
    bench = Bench()
    bench.runner.break_next = True
    with pytest.raises(Exception, match="failed"):
        warm_up(bench.engine, LIMITS, [1], lambda done, total: None)
