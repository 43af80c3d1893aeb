"""Start-up measurements: the memory plan, and the warm-up that turns its estimates into readings.

The plan is printed before any weight is loaded. Warm-up drives a real engine over a small provisional
pool through every path that serving takes (cold prefill, prefix restoration, decode at each row bucket
with equal and mixed lengths, a full packed tick); its memory peak decides the final pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from helios.config import PAGE_SIZE, DeviceInfo, Limits, Settings
from helios.errors import StartupError
from helios.runtime.engine import Engine
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.kv_cache import page_bytes
from helios.runtime.request import Job, SamplingParams

DECODE_STEPS = 4  # per row bucket; always all of them, whatever the model emits


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the device's memory is meant to be used, in bytes, before or after measuring."""

    budget: int
    weights: int
    activations: int
    kv: int
    page: int
    num_pages: int
    measured: bool

    def lines(self, max_model_len: int) -> list[str]:
        """The plan as text for the start-up banner."""
        tokens = self.num_pages * PAGE_SIZE
        how = "measured" if self.measured else "estimated"
        full = tokens / max_model_len
        return [
            f"memory budget   {_gib(self.budget)}",
            f"weights         {_gib(self.weights)}",
            f"activations     {_gib(self.activations)} ({how})",
            f"KV pages        {_gib(self.kv)}: {self.num_pages} pages of {PAGE_SIZE} tokens, {tokens:,} tokens",
            f"                room for {tokens // 1024} sequences of 1,024 tokens, or {full:.1f} of {max_model_len:,}",
        ]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def plan_memory(
    settings: Settings,
    config: ModelConfig,
    device: DeviceInfo,
    limits: Limits,
    itemsize: int,
    used_by_others: int,
    activations: int | None = None,
) -> MemoryPlan:
    """Divide the device's memory. ``activations`` is the measured peak, or None before warm-up.

    Raises StartupError, with the numbers and what to change, if the weights or a useful pool do not fit.
    """
    weights = config.num_parameters * itemsize
    page = page_bytes(config, itemsize)
    measured = activations is not None
    if activations is None:
        activations = _estimate_activations(config, limits, itemsize)
    # Token counts for penalties are allocated when a request first asks for one.
    penalties = 5 * limits.max_batch_size * config.vocab_size
    reserve = int(activations * (1 + settings.kv_cache_headroom_ratio)) + penalties
    if device.kind == "cpu":
        count = settings.num_pages or max(2, settings.cpu_kv_bytes // page)
        budget = weights + reserve + count * page
        return MemoryPlan(budget, weights, reserve, count * page, page, count, measured)
    budget = int(device.total_memory * settings.max_gpu_utilization) - used_by_others
    wanted = int(weights * (1 + settings.weight_headroom_ratio))
    free = device.total_memory - used_by_others
    if not measured and wanted > free:
        raise StartupError(
            f"the weights take {_gib(weights)} and {_gib(wanted)} must be free to load them, but {device.name} has "
            f"{_gib(free)} free: serve a smaller model or lower HELIOS_WEIGHT_HEADROOM_RATIO "
            f"({settings.weight_headroom_ratio})"
        )
    kv = budget - weights - reserve
    count = settings.num_pages or kv // page
    if count < 2 or count * page > kv:
        raise StartupError(
            f"{_gib(max(kv, 0))} are left for KV pages of {_gib(page)} each"
            + (f" beside {_gib(used_by_others)} that others hold" if used_by_others > 2**30 else "")
            + (f", not enough for HELIOS_NUM_PAGES={settings.num_pages}" if settings.num_pages else "")
            + f": raise HELIOS_MAX_GPU_UTILIZATION ({settings.max_gpu_utilization}), or lower "
            f"HELIOS_MAX_BATCH_SIZE ({limits.max_batch_size}) or HELIOS_PREFILL_CHUNK_SIZE "
            f"({limits.prefill_chunk_size})"
        )
    return MemoryPlan(budget, weights, reserve, count * page, page, count, measured)


def _estimate_activations(config: ModelConfig, limits: Limits, itemsize: int) -> int:
    """A tick's widest moments: the MLP of every token, and float32 logits with copies for sampling."""
    tokens = limits.prefill_chunk_size + limits.max_batch_size
    mlp = tokens * (3 * config.intermediate_size + 4 * config.hidden_size) * itemsize
    logits = limits.max_batch_size * config.vocab_size * (itemsize + 4 * 6)
    return mlp + logits


def row_buckets(max_batch_size: int, device_kind: str = "cuda") -> list[int]:
    """Batch sizes that are warmed: 1, 2, 4, then multiples of 8 growing apart, and the largest.

    On the CPU nothing depends on the size, so the smallest and the largest do.
    """
    if device_kind == "cpu":
        return sorted({1, max_batch_size})
    buckets = [size for size in (1, 2, 4) if size < max_batch_size]
    size = 8
    while size < max_batch_size:
        buckets.append(size)
        size += 8 if size < 64 else 32
    return [*buckets, max_batch_size]


def warm_up(
    engine: Engine,
    limits: Limits,
    buckets: list[int],
    report: Callable[[int, int], object],
    *,
    calibrate: bool = False,
) -> list[int]:
    """Drive ``engine`` through every serving path. Returns the warmed batch sizes, those of ``buckets``
    that the pool can hold.

    ``report(done, all)`` is called after each stage. ``calibrate`` also runs the prompts that the engine's cost
    model learns from.
    """
    chunk = min(limits.prefill_chunk_size, (engine.config.num_pages - 1) * PAGE_SIZE - DECODE_STEPS)

    stages: list[Callable[[], None]] = [
        lambda: _run(engine, [PAGE_SIZE + 1]),  # cold prefill over a page border
        lambda: _run(engine, [PAGE_SIZE + 1]),  # the same again: prefix restoration
        lambda: _run_cold(engine, chunk),  # a full packed tick
        lambda: _run(engine, [PAGE_SIZE + 1], prompt_logprobs=1),  # a tick that no graph holds
    ]
    if calibrate:
        stages += [lambda length=length: _run_cold(engine, length) for length in _calibration(engine)]
    warmed: list[int] = []
    for bucket in buckets:
        if bucket > engine.config.num_pages // 2:
            break
        warmed.append(bucket)
        stages.append(lambda rows=bucket: _run(engine, [8] * rows))
        stages.append(lambda rows=bucket: _run(engine, [2 + index % 13 for index in range(rows)]))
    _drive(engine, stages, report)
    engine.cost.keep_samples()
    return warmed


def rehearse(engine: Engine) -> None:
    """Serve one made-up request: the first tick of a thread takes longer than its others, and is not to be a
    client's."""
    _drive(engine, [lambda: _run(engine, [PAGE_SIZE + 1])], lambda done, total: None)


def _drive(engine: Engine, stages: list[Callable[[], None]], report: Callable[[int, int], object]) -> None:
    """Run the stages, and leave no trace of their requests."""
    engine_log = logging.getLogger("helios.engine")
    level = engine_log.level
    engine_log.setLevel(logging.WARNING)  # made-up requests are no events
    for number, stage in enumerate(stages, 1):
        stage()
        report(number, len(stages))
    engine_log.setLevel(level)
    engine.kv.clear()
    cache = engine.prefix_cache
    cache.query_tokens = cache.hit_tokens = cache.evictions = cache.expirations = 0
    engine.num_ticks = engine.num_finished_jobs = engine.num_preemptions = 0
    engine.tick_log.clear()
    engine.check_integrity()


def _calibration(engine: Engine) -> list[int]:
    """Prompt lengths whose times tell prompt tokens from attention: the padded sizes, and some whose last chunk
    is of such a size behind a full one."""
    config = engine.config
    room = min((config.num_pages - 1) * PAGE_SIZE, config.max_model_len) - DECODE_STEPS
    sizes = engine.cost.sizes or [32, 64, 128, 256]
    behind = [size for size in sizes if size <= config.prefill_chunk_size][::-3]
    lengths = [*sizes, *(config.prefill_chunk_size + size for size in behind)]
    return sorted({min(length, room) for length in lengths if length >= 32}) if room >= 32 else []


def _run_cold(engine: Engine, length: int) -> None:
    """One prompt without a cached block: a hit would make its ticks smaller."""
    engine.prefix_cache.clear()
    _run(engine, [length])


def _run(engine: Engine, prompt_lengths: list[int], prompt_logprobs: int | None = None) -> None:
    """Serve one batch of made-up prompts, cut to the context, to the end; half of the rows sample, half are
    greedy."""
    longest = engine.config.max_model_len - DECODE_STEPS
    for index, length in enumerate(min(length, longest) for length in prompt_lengths):
        params = SamplingParams(
            max_tokens=DECODE_STEPS, ignore_eos=True, temperature=float(index % 2), top_p=0.9, seed=index,
            prompt_logprobs=prompt_logprobs,
        )  # fmt: skip
        ids = [(7 * index + position) % 97 for position in range(length)]
        engine.waiting.append(Job(f"warmup-{index}", ids, params, max_tokens=DECODE_STEPS))
    while engine.has_work:
        for event in engine.step():
            if event.job.error is not None:
                raise event.job.error


def reset_peak(device: torch.device) -> int:
    """Forget the memory peak so far; returns the bytes that the allocator holds now."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def peak_since(device: torch.device, base: int) -> int:
    """Bytes that the allocator reserved beyond ``base`` at the peak since :func:`reset_peak`."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return max(torch.cuda.max_memory_reserved() - base, 0)
