"""Prompt attention: FlashAttention-2, the Triton kernel in many configurations, FlashAttention-3 if installed.

Part ``prefill`` of benchmarks/attention.py. A rate counts the multiplications of the causal half only. Every
result is checked against FlashAttention-2 before it is timed. Configurations that win here belong into
``DEFAULT_CONFIGS`` of helios/kernels/prefill_attention.py; see also
helios/runtime/prefill_backend.py.

"fa2, no page table" reads keys and values that lie together, as those of a first chunk could. Nothing serves
prompts that way: rotated keys exist in the pages only, since one kernel rotates them and writes them there, and
a tick may hold first chunks beside later ones. The line shows what a second copy of them could gain.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from benchmarks.kernel_report import DEVICE, Report, first_line
from helios.kernels.measure import relative_error
from helios.kernels.prefill_attention import PrefillConfig, default_config
from helios.runtime.prefill_backend import (
    FA2,
    TOLERANCE,
    Candidate,
    Problem,
    choose_prefill,
    fa3_candidate,
    fa3_installed,
    hopper_candidate,
    triton_candidate,
)

KV_HEADS = 8
HEAD_DIM = 128
NEW_TOKENS = (64, 512, 640, 1024, 1280, 2048, 4096, 8192)
CACHED_TOKENS = (0, 4096)
# block_m, block_n, num_warps, num_stages, tma, one loop, registers
SWEEP: tuple[PrefillConfig, ...] = tuple(
    PrefillConfig(m, n, w, s, tma=tma, one_loop=one_loop, registers=registers)
    for m, n, w, s, tma, one_loop, registers in (
        (64, 64, 4, 3, False, False, None),
        (64, 64, 4, 3, False, True, None),
        (64, 64, 4, 2, False, True, None),
        (64, 64, 4, 3, True, False, None),
        (64, 128, 4, 2, True, False, None),
        (128, 64, 8, 3, False, False, None),
        (128, 64, 8, 3, False, True, None),
        (128, 64, 8, 2, False, True, 128),
        (128, 64, 8, 2, True, False, 128),
        (128, 64, 8, 3, True, False, None),
        (128, 128, 8, 2, False, True, None),
        (128, 128, 8, 2, True, False, None),
        (128, 128, 8, 3, True, False, None),
        (128, 32, 8, 3, True, False, 128),
    )
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One row: ``new`` tokens after ``cached``."""

    new: int
    cached: int
    heads: int

    @property
    def flops(self) -> float:
        """Of both products, over the keys that each query sees."""
        keys = self.new * self.cached + self.new * (self.new + 1) / 2
        return 4 * keys * self.heads * HEAD_DIM


def run_prefill(report: Report, quick: bool) -> None:
    """Time all candidates at all shapes; ``quick`` leaves out half of the shapes."""
    show_choice()
    for heads in (32, 16):
        tried = compile_all(heads, quick)
        wins: dict[str, int] = {}
        for cached in CACHED_TOKENS:
            for new in NEW_TOKENS[::2] if quick else NEW_TOKENS:
                if not report.late():
                    best = run_shape(report, Shape(new, cached, heads), tried)
                    wins[best] = wins.get(best, 0) + 1
                    torch.cuda.empty_cache()
        print(f"\n  best Triton configuration, {heads} heads: {wins}")


def show_choice() -> None:
    """What a start would choose, and how long it takes with nothing compiled before."""
    started = time.monotonic()
    backend = choose_prefill("auto", DEVICE, torch.bfloat16, heads=32, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    print(f"  chosen in {time.monotonic() - started:.2f} s: {backend}")


def compile_all(heads: int, quick: bool) -> list[Candidate]:
    """The candidates that run and agree with FlashAttention-2; the others are named with the reason."""
    served = [default_config(512), default_config(1 << 20)]
    served += [replace(config, tail=True) for config in served]
    configs = dict.fromkeys([*served, *(() if quick else SWEEP)])
    found = [triton_candidate(config) for config in configs]
    if torch.cuda.get_device_capability(DEVICE) == (9, 0):
        found.append(hopper_candidate())
    if fa3_installed():
        found.append(fa3_candidate())
    # Few tokens take the form of the kernel that cuts keys into parts, many the other, or a tail.
    problems = [
        make_problem([(4100, 60), (90, 3)], heads),
        make_problem([(2500, 1240), (47, 47), (9, 1)], heads),
    ]
    expected = [problem.run(FA2) for problem in problems]

    def check(candidate: Candidate) -> str:
        try:
            with torch.inference_mode():
                error = max(
                    relative_error(problem.run(candidate), answer)
                    for problem, answer in zip(problems, expected, strict=True)
                )
        except Exception as failure:
            return f"{type(failure).__name__}: {first_line(failure)}"
        return "" if error < TOLERANCE else f"relative error {error:.3f}"

    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(check, found))
    for candidate, why in zip(found, verdicts, strict=True):
        if why:
            print(f"    {candidate.name}, {heads} heads: left out: {why}")
    return [candidate for candidate, why in zip(found, verdicts, strict=True) if not why]


def make_problem(rows: list[tuple[int, int]], heads: int) -> Problem:
    return Problem(DEVICE, torch.bfloat16, heads, KV_HEADS, HEAD_DIM, rows)


def run_shape(report: Report, shape: Shape, tried: list[Candidate]) -> str:
    """Time every candidate at one shape; the name of the best Triton configuration."""
    print(f"\n{shape.new} new tokens after {shape.cached}, {shape.heads} query heads, {KV_HEADS} kv heads")
    problem = make_problem([(shape.cached + shape.new, shape.new)], shape.heads)
    every = [FA2, *tried] + ([contiguous(problem)] if not shape.cached else [])
    times: dict[str, float] = {}
    for candidate in every:
        try:
            seconds = problem.seconds(candidate, calls=16 if shape.new <= 1024 else 4)
        except Exception as failure:
            print(f"    {candidate.name:<32} failed: {type(failure).__name__}: {first_line(failure)}")
            continue
        times[candidate.name] = seconds
        report.records.append(
            {
                "part": "prefill",
                "new": shape.new,
                "cached": shape.cached,
                "heads": shape.heads,
                "label": candidate.name,
                "us": seconds * 1e6,
                "tflop_s": shape.flops / seconds / 1e12,
            }
        )
    ranked = sorted((name for name in times if name.startswith("triton")), key=times.__getitem__)
    for name in [name for name in times if name not in ranked] + ranked:
        seconds = times[name]
        gain = times[FA2.name] / seconds
        rate = shape.flops / seconds / 1e12
        print(f"    {name:<32} {seconds * 1e6:9.1f} us  {rate:6.1f} TFLOP/s  x{gain:.2f}", flush=True)
    return ranked[0] if ranked else "none"


def contiguous(problem: Problem) -> Candidate:
    """FlashAttention-2 over keys and values without pages."""
    from torch.nn.attention.varlen import varlen_attn

    tokens = problem.q.shape[0]
    keys, values = problem.pool.flatten(1, 2)[:, :tokens]

    def run(q: torch.Tensor, *_: torch.Tensor | int) -> torch.Tensor:
        out = varlen_attn(
            q, keys, values, problem.cu_q, problem.cu_q, tokens, tokens, window_size=(-1, 0), enable_gqa=True
        )
        assert isinstance(out, torch.Tensor)
        return out

    return Candidate("fa2, no page table", run)
