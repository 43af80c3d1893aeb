"""Attention and few-row linears on this machine's GPU, kernel by kernel, in CUDA graphs.

    python -m benchmarks.attention [--quick] [--json FILE] [--only prefill,attention,linear,chain] [--budget SECONDS]

Prefill: see prefill_attention.py. Attention: Helios's paged_decode in several configurations against varlen_attn
(FlashAttention-2) in its right decode form, with max_k = context and max_k = 40960. Linears: the Triton variants
against cuBLAS. Chain: the four linears of a layer one after another, as a decode step runs them, with and without
dependent launch.

Buffers rotate over several layers whose sum is far larger than the second-level cache; a time is one call's share
of a graph replay, the fastest of five. Every result is checked against torch before it is timed; a configuration
that fails or is wrong is reported and skipped. TB/s counts keys and values, or the weight, once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_report import DEVICE, Report, first_line
from benchmarks.prefill_attention import run_prefill
from helios.kernels.common import multiprocessors, use_pdl
from helios.kernels.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    default_config,
    num_columns,
    paged_decode,
)
from helios.kernels.linear import TORCH, LinearWorkspace, Variant, gemv, small_linear, split, stream
from helios.kernels.linear_table import LinearTable, candidates
from helios.kernels.measure import relative_error, time_in_graph

PAGE = 256
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
LONGEST = 40960
HEAD_DIM = 128
KV_HEADS = 8
ROTATE_BYTES = 400e6  # several times the second-level cache
DTYPE = torch.bfloat16


# --- attention ---------------------------------------------------------------------------------------------


class KVBuffers:
    """Pages of several layers in shuffled order, and rows of the given lengths."""

    def __init__(self, lengths: Sequence[int], heads: int) -> None:
        counts = [-(-length // PAGE) for length in lengths]
        pages = sum(counts) + 1
        self.traffic = sum(lengths) * KV_HEADS * HEAD_DIM * 2 * 2
        self.layers = int(min(max(ROTATE_BYTES // self.traffic, 2), 48))
        self.data = torch.empty(
            (self.layers, 2, pages, PAGE, KV_HEADS, HEAD_DIM), device=DEVICE, dtype=DTYPE
        ).normal_()
        self.q = torch.randn((len(lengths), heads, HEAD_DIM), device=DEVICE, dtype=DTYPE)
        order = (torch.randperm(pages - 1) + 1).tolist()
        table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.table = table.to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.max_kv = max(counts) * PAGE

    def over_layers(self, attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            for layer in self.data:
                attend(layer[0], layer[1])

        return step


def flash_attention_2(buffers: KVBuffers, max_k: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    cu_q = torch.arange(buffers.q.shape[0] + 1, device=DEVICE, dtype=torch.int32)

    def attend(k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        out = varlen_attn(
            buffers.q,
            k_pages,
            v_pages,
            cu_q,
            cu_q,
            1,
            max_k,
            window_size=(-1, -1),
            enable_gqa=True,
            seqused_k=buffers.lengths,
            block_table=buffers.table,
        )
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def own_attention(
    buffers: KVBuffers, config: DecodeConfig, max_kv: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    rows, heads = buffers.q.shape[:2]
    sms = multiprocessors(DEVICE)
    columns = num_columns(rows, max_kv, KV_HEADS, sms, config)
    workspace = DecodeWorkspace(DEVICE, rows, columns, KV_HEADS, heads // KV_HEADS, HEAD_DIM)

    def attend(k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        return paged_decode(
            buffers.q,
            k_pages,
            v_pages,
            buffers.table,
            buffers.lengths,
            max_kv,
            config=config,
            workspace=workspace,
        )

    return attend


def describe(config: DecodeConfig) -> str:
    merge = "" if config.fused else " two kernels"
    return f"tile {config.tile} w{config.num_warps} s{config.num_stages} x{config.programs_per_sm}/SM{merge}"


def attention_configs(quick: bool) -> list[DecodeConfig]:
    base = default_config(DEVICE, HEAD_DIM)
    found = [base, replace(base, programs_per_sm=2), replace(base, num_stages=4, programs_per_sm=2)]
    found.append(replace(base, fused=False))
    if quick:
        return found
    found += [
        replace(base, programs_per_sm=1),
        replace(base, programs_per_sm=6),  # twice what fits: does a second wave even things out?
        replace(base, num_stages=2, programs_per_sm=3),
        replace(base, num_stages=5, programs_per_sm=1),
        replace(base, num_warps=8, programs_per_sm=2),
        replace(base, num_warps=8, programs_per_sm=3),
        replace(base, num_warps=2, programs_per_sm=3),
        replace(base, tile=32, num_stages=4, programs_per_sm=3),
        replace(base, tile=32, num_warps=2, num_stages=4, programs_per_sm=4),
        replace(base, tile=128, num_stages=2, programs_per_sm=2),
        replace(base, tile=128, num_warps=8, num_stages=3, programs_per_sm=1),
    ]
    return found


def attention_cases(quick: bool) -> list[tuple[str, list[int]]]:
    spread = [100 + (index * 1899) // 255 for index in range(256)]
    cases = [
        ("1 x 1024", [1024]),
        ("8 x 1024", [1024] * 8),
        ("32 x 1024", [1024] * 32),
        ("256 x 800", [800] * 256),
    ]
    if quick:
        return cases
    return [
        *cases,
        ("1 x 8192", [8192]),
        ("8 x 8192", [8192] * 8),
        ("64 x 1024", [1024] * 64),
        ("256 x 2048", [2048] * 256),
        ("256 x 100..1999", [spread[index * 37 % 256] for index in range(256)]),
        ("1 x 16384 + 63 x 512", [512] * 40 + [16384] + [512] * 23),
    ]


def run_attention(report: Report, quick: bool) -> None:
    configs = attention_configs(quick)
    for name, lengths in attention_cases(quick):
        for heads in (32,) if quick else (32, 16):
            if not report.late():
                # The second head count only repeats the leading configurations.
                run_attention_case(report, name, lengths, heads, configs if heads == 32 else configs[:4])
                torch.cuda.empty_cache()


def run_attention_case(
    report: Report, name: str, lengths: list[int], heads: int, configs: list[DecodeConfig]
) -> None:
    buffers = KVBuffers(lengths, heads)
    facts = {"part": "attention", "case": name, "heads": heads}
    print(f"\n{name}, {heads} query heads, {KV_HEADS} kv heads, {buffers.layers} layers in turn")
    expected: torch.Tensor | None = None

    def run(label: str, attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        try:
            out = attend(*buffers.data[0])
            torch.cuda.synchronize()
        except Exception as error:
            print(f"    {label:<46} failed: {type(error).__name__}: {first_line(error)}")
            return None
        known = {} if expected is None else {"error_vs_torch": relative_error(out, expected)}
        step = buffers.over_layers(attend)
        report.measure(label, step, buffers.layers, buffers.traffic, **facts, **known)
        return out

    expected = run("FA2, max_k = context", flash_attention_2(buffers, buffers.max_kv))
    run("FA2, max_k = 40960", flash_attention_2(buffers, LONGEST))
    for config in configs:
        run(describe(config), own_attention(buffers, config, LONGEST))
    run("default, max_kv = context", own_attention(buffers, configs[0], buffers.max_kv))
    if use_pdl(True):
        run("default, dependent launch", own_attention(buffers, configs[0], LONGEST))
    use_pdl(False)


# --- linears -----------------------------------------------------------------------------------------------

MODELS = {
    "4B": {
        "qkv": (6144, 2560),
        "o": (2560, 4096),
        "gate_up": (19456, 2560),
        "down": (2560, 9728),
        "head": (151936, 2560),
    },
    "0.6B": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    },
}


def wide_candidates(rows: int) -> list[Variant]:
    """Everything worth a try once, to find what :func:`helios.kernels.linear_table.candidates` should hold."""
    found: list[Variant] = []
    if rows <= 4:
        found += [
            gemv(n, w) for n, w in ((1, 4), (2, 4), (4, 4), (8, 4), (2, 8), (4, 8), (4, 2), (8, 2), (16, 1))
        ]
    for splits in (1, 2, 4, 8):
        found += [split(32, 256, splits, 4, 3), split(64, 128, splits, 4, 4), split(32, 128, splits, 4, 5)]
    found += [split(16, 256, 4, 4, 4), split(16, 512, 2, 4, 3), split(64, 256, 4, 8, 3)]
    if SM90:
        found += [stream(stages, half=half) for stages in (4, 6, 8, 10) for half in (False, True)]
    return found


def layers_of(n: int, k: int) -> list[torch.Tensor]:
    count = int(min(max(ROTATE_BYTES // (n * k * 2), 1), 40))
    return [torch.randn((n, k), device=DEVICE, dtype=DTYPE) / k**0.5 for _ in range(count)]


def run_linears(report: Report, quick: bool) -> None:
    workspace = LinearWorkspace(DEVICE)
    for model, shapes in MODELS.items():
        for name, (n, k) in shapes.items():
            if report.late():
                continue
            layers = layers_of(n, k)
            for rows in (1, 4, 16) if quick else (1, 2, 4, 8, 16):
                variants = [TORCH, *(candidates(rows, SM90) if quick else wide_candidates(rows))]
                times = time_linears(report, f"{model} {name}", layers, rows, variants, workspace)
                if TORCH in times:
                    show_linear(report, f"{model} {name}", rows, n, k, times)
            del layers
            torch.cuda.empty_cache()


def time_linears(
    report: Report,
    name: str,
    layers: list[torch.Tensor],
    rows: int,
    variants: list[Variant],
    workspace: LinearWorkspace,
) -> dict[Variant, float]:
    """Seconds of one call of each variant that runs and agrees with torch."""
    n, k = layers[0].shape
    x = torch.randn((rows, k), device=DEVICE, dtype=DTYPE)
    expected = F.linear(x, layers[0])
    calls = max(len(layers), 4)
    times: dict[Variant, float] = {}
    for variant in variants:
        if not variant.fits(rows, n, k) or report.late():
            continue
        workspace.grow(n, variant)

        def step(variant: Variant = variant) -> None:
            for index in range(calls):
                small_linear(x, layers[index % len(layers)], variant=variant, workspace=workspace)

        try:
            got = small_linear(x, layers[0], variant=variant, workspace=workspace)
            if (error := relative_error(got, expected)) > 0.01:
                raise ArithmeticError(f"relative error {error:.3f}")
            times[variant] = time_in_graph(step, DEVICE, replays=5) / calls
        except Exception as failure:
            print(f"    {name} rows {rows} {variant} failed: {type(failure).__name__}: {first_line(failure)}")
    return times


def show_linear(report: Report, name: str, rows: int, n: int, k: int, times: dict[Variant, float]) -> None:
    ranked = sorted((seconds, str(variant)) for variant, seconds in times.items() if variant != TORCH)
    for label, seconds in [("torch", times[TORCH]), *((label, seconds) for seconds, label in ranked)]:
        record = {"part": "linear", "case": name, "rows": rows, "n": n, "k": k, "label": label}
        report.records.append({**record, "us": seconds * 1e6, "tb_s": n * k * 2 / seconds / 1e12})
    best = "   ".join(f"{label} {seconds * 1e6:.2f}" for seconds, label in ranked[:4])
    torch_us, top = times[TORCH] * 1e6, ranked[0][0] if ranked else times[TORCH]
    rate = n * k * 2 / top / 1e12
    print(
        f"  {name:<13} rows {rows:<2} torch {torch_us:7.2f}  best {top * 1e6:7.2f} us "
        f"({rate:4.2f} TB/s, x{torch_us / top / 1e6:.2f}) | {best}",
        flush=True,
    )


def run_chain(report: Report, quick: bool) -> None:
    """The linears of a layer in their order, over all layers: what a decode step pays for them."""
    for model, shapes in MODELS.items():
        if report.late():
            continue
        body = {name: shape for name, shape in shapes.items() if name != "head"}
        count = 12 if model == "4B" else 28
        weights = {
            name: [torch.randn(shape, device=DEVICE, dtype=DTYPE) / shape[1] ** 0.5 for _ in range(count)]
            for name, shape in body.items()
        }
        traffic = sum(n * k * 2 for n, k in body.values())
        for rows in (1,) if quick else (1, 4, 16):
            x = torch.randn((rows, body["qkv"][1]), device=DEVICE, dtype=DTYPE)
            print(
                f"\nchain {model}, {rows} rows: qkv, o (+ residual), gate_up (SiLU * up), down (+ residual), per layer"
            )
            for pdl in (False, True):
                if use_pdl(pdl) != pdl:
                    continue
                table = LinearTable(DEVICE)
                started = time.monotonic()
                table.tune(weights, rows=(rows,), budget_s=20)
                tuned = time.monotonic() - started
                for label, gated in (("torch", False), ("table", False), ("table, gated epilogue", True)):
                    if label == "torch" and pdl:
                        continue
                    step = chain(x, weights, count, table if label != "torch" else None, gated)
                    label = f"{label}{', dependent launch' if pdl else ''}"
                    report.measure(label, step, count, traffic, part="chain", case=model, rows=rows)
                print(f"    (tuned in {tuned:.2f} s)\n      " + str(table).replace("\n", "\n      "))
            use_pdl(False)
        started = time.monotonic()
        table = LinearTable(DEVICE)
        table.tune(weights, budget_s=30)
        seconds = time.monotonic() - started
        report.records.append({"part": "tune", "case": model, "seconds": seconds})
        print(f"  tuning four shapes at all row buckets: {seconds:.2f} s (kernels partly compiled before)")
        del weights
        torch.cuda.empty_cache()


def chain(
    x: torch.Tensor,
    weights: dict[str, list[torch.Tensor]],
    count: int,
    table: LinearTable | None,
    gated: bool,
) -> Callable[[], None]:
    """``gated``: SiLU * up and the residual adds inside the linears where the row count allows."""
    width = weights["o"][0].shape[1]

    def linear(y: torch.Tensor, weight: torch.Tensor, **epilogue: Any) -> torch.Tensor:
        return F.linear(y, weight) if table is None else table(y, weight, **epilogue)

    def step() -> None:
        h = x
        for layer in range(count):
            y = linear(h, weights["qkv"][layer])[:, :width]
            if gated:
                h = linear(y, weights["o"][layer], residual=h)
                g = linear(h, weights["gate_up"][layer], gated=True)
                h = linear(g, weights["down"][layer], residual=h)
            else:
                h = h + linear(y, weights["o"][layer])
                gate, up = linear(h, weights["gate_up"][layer]).chunk(2, dim=-1)
                h = h + linear(F.silu(gate) * up, weights["down"][layer])

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the main cases and configurations only")
    parser.add_argument("--json", type=Path, default=Path("attention.json"), help="where results are written")
    parser.add_argument(
        "--only", default="prefill,attention,linear,chain", help="parts to run, comma-separated"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds after which the rest is skipped (120; quick 40)"
    )
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    properties = torch.cuda.get_device_properties(DEVICE)
    torch.manual_seed(0)
    started = time.monotonic()
    budget = arguments.budget or (40 if arguments.quick else 120)
    report = Report(started + budget)
    print(f"{properties.name}, {properties.multi_processor_count} multiprocessors, torch {torch.__version__}")
    runners = {"prefill": run_prefill, "attention": run_attention, "linear": run_linears, "chain": run_chain}
    for index, part in enumerate(parts):
        # Parts share what is left of the time, so that none starves.
        report.deadline = time.monotonic() + (started + budget - time.monotonic()) / (len(parts) - index)
        print(f"\n== {part}")
        with torch.inference_mode():
            runners[part](report, arguments.quick)
    facts = {"gpu": properties.name, "torch": torch.__version__, "seconds": time.monotonic() - started}
    arguments.json.write_text(json.dumps({**facts, "results": report.records}, indent=1))
    print(
        f"\n{time.monotonic() - started:.0f} s, {report.skipped} skipped for time; results in {arguments.json}"
    )


if __name__ == "__main__":
    main()
