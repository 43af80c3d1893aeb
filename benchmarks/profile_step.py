"""One decode step, taken apart: time by kernel class, gaps, and its distance from the card's limits.

    python benchmarks/profile_step.py --model FOLDER --load-format dummy --card card.json --label 0.6b

For a few batch sizes the device's kernels of some twenty steady steps are recorded; for each size of the row
ladder the step is timed without recording and compared with the floor (floor.py) and the roofline. Recording
lengthens the gaps between kernels, so the step time without it stands beside the one with it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device_trace import Trace, exclusive, recording, top_kernels
from benchmarks.floor import Card, ModelShape, add_card_arguments, card_from_arguments, decode_seconds
from benchmarks.inprocess import (
    add_engine_arguments,
    build_engine,
    cancel,
    decoding_jobs,
    steady,
    vocabulary,
    write_result,
)
from helios.runtime.build import Built
from helios.runtime.engine import Engine

_SPARE = 80  # tokens between a row's context and its end


def step_seconds(engine: Engine, steps: int) -> tuple[float, float]:
    """Median and 99th percentile of ``steps`` steps of whatever is decoding."""
    times: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times), sorted(times)[int(0.99 * (len(times) - 1))]


def breakdown(trace: Trace, steps: int) -> dict[str, Any]:
    """Microseconds of one step by class, from the first kernel to the last one's end."""
    if not trace.kernels:
        raise RuntimeError("the profiler recorded no kernel (is CUPTI there?)")
    start, end = trace.kernels[0].start, max(kernel.end for kernel in trace.kernels)
    shares = exclusive(trace.kernels, start, end)
    per_step = {name: nanoseconds / 1e3 / steps for name, nanoseconds in shares.items()}
    return {
        "microseconds": per_step,
        "traced_step_microseconds": (end - start) / 1e3 / steps,
        "busy_microseconds": sum(value for name, value in per_step.items() if name != "gaps"),
        "kernels_per_step": len(trace.kernels) / steps,
        "top_kernels": [
            row | {"microseconds": row["microseconds"] / steps, "calls": row["calls"] / steps}
            for row in top_kernels(trace.kernels)
        ],
    }


def fitting(built: Built, context: int, steps: int) -> int:
    """``context``, or as much of it as the model takes."""
    return min(context, built.engine.config.max_model_len - steps - _SPARE - 64)


def profile(built: Built, rows: int, context: int, steps: int) -> dict[str, Any]:
    """Time and take apart the step of ``rows`` sequences of ``context`` tokens."""
    engine, context = steady(built), fitting(built, context, 3 * steps)
    jobs = decoding_jobs(engine, rows, context, 3 * steps, vocabulary(built))
    plain, slowest = step_seconds(engine, 2 * steps)
    with recording() as trace:
        for _ in range(steps):
            engine.step()
    cancel(engine, jobs)
    found: dict[str, Any] = {"rows": rows, "context": context, "step_microseconds": 1e6 * plain,
             "step_p99_microseconds": 1e6 * slowest, **breakdown(trace, steps)}  # fmt: skip
    # Kernels take as long as they take, recorded or not; only the gaps between them grow by recording.
    found["idle_share"] = max(0.0, 1 - found["busy_microseconds"] / found["step_microseconds"])
    found["traced_idle_share"] = found["microseconds"]["gaps"] / found["traced_step_microseconds"]
    return found


def against_limits(shape: ModelShape, card: Card | None, rows: int, tokens: float, seconds: float) -> Any:
    """Bytes and operations of a step over its time, and the floor's share of it."""
    nbytes = shape.weight_read_bytes + tokens * shape.kv_bytes_per_token + 4 * rows * shape.vocab
    flops = 2 * rows * shape.parameters + 4 * tokens * shape.layers * shape.query_heads * shape.head_dim
    found: dict[str, Any] = {
        "bytes": nbytes,
        "flops": flops,
        "bytes_per_second": nbytes / seconds,
        "flops_per_second": flops / seconds,
        "tokens_per_second": rows / seconds,
    }
    if card is not None:
        floor = decode_seconds(shape, card, rows, round(tokens))
        found |= {"floor_microseconds": 1e6 * floor, "of_limit": floor / seconds}
    return found


def ladder(
    built: Built, shape: ModelShape, card: Card | None, sizes: list[int], context: int, steps: int
) -> list[dict[str, Any]]:
    """The step of every size, against the card's limits."""
    found: list[dict[str, Any]] = []
    engine, length = steady(built), fitting(built, context, steps)
    for rows in sizes:
        jobs = decoding_jobs(engine, rows, length, steps, vocabulary(built))
        reached = sum(job.sequences[0].num_tokens for job in jobs) + rows * steps / 2
        median, slowest = step_seconds(engine, steps)
        cancel(engine, jobs)
        found.append(
            {"rows": rows, "context": length, "step_microseconds": 1e6 * median,
             "step_p99_microseconds": 1e6 * slowest, **against_limits(shape, card, rows, reached, median)}
        )  # fmt: skip
        share = f"{found[-1]['of_limit']:7.1%} of the limit" if card else ""
        print(f"{rows:5} rows x {length}: {1e3 * median:8.3f} ms {share}", flush=True)
    return found


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(made)
    add_card_arguments(made)
    made.add_argument("--shapes", default="1x640,32x640,256x800", help="rows x context that are taken apart")
    made.add_argument("--ladder", default="1,2,4,8,16,32,64,128,256", help="rows timed against the limits")
    made.add_argument("--ladder-context", type=int, default=640)
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--figures", type=Path, help="folder for figures of this result")
    return made


def main() -> int:
    options = arguments().parse_args()
    card = card_from_arguments(options)
    with recording():
        pass  # the profiler's library is loaded before graphs are captured
    built = build_engine(options)
    shape = ModelShape.from_file(built.snapshot.folder)
    most = built.engine.config.max_batch_size
    profiles: list[dict[str, Any]] = []
    for item in options.shapes.split(","):
        rows, context = (int(part) for part in item.split("x"))
        if rows > most:
            print(f"left out: {rows} rows are more than the engine's {most}")
            continue
        profiles.append(one := profile(built, rows, context, options.steps))
        parts = "  ".join(f"{name} {value:.0f}" for name, value in one["microseconds"].items() if value)
        print(
            f"{item}: {one['step_microseconds']:.0f} µs a step ({one['traced_step_microseconds']:.0f} recorded), "
            f"{one['kernels_per_step']:.0f} kernels, idle {one['idle_share']:.1%}: {parts}",
            flush=True,
        )
    sizes = [size for size in map(int, options.ladder.split(",")) if size <= most]
    steps = ladder(built, shape, card, sizes, options.ladder_context, 2 * options.steps)
    result = write_result(
        "step", built, options, card=asdict(card) if card else None, startup_seconds=built.startup_seconds,
        profiles=profiles, ladder=steps,
    )  # fmt: skip
    if options.figures is not None:
        from benchmarks.engine_figures import draw_step

        draw_step(result, options.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
