"""How much of a served run the device stands idle, and what the host does meanwhile.

    python benchmarks/idle.py --model FOLDER --load-format dummy --label 0.6b

The workloads are played on the engine in this process while torch.profiler records the device's kernels:
idle = 1 - union(kernel times) / wall, over the time in which the engine had work. A few milliseconds are kept
as a timeline beside the host's spans. Then the same with a Python profiler around the engine's steps.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device_trace import Trace, exclusive, recording, span, top_kernels
from benchmarks.inprocess import (
    Item,
    Played,
    add_engine_arguments,
    build_engine,
    offline_items,
    play,
    poisson_items,
    single_items,
    summary,
    variant,
    vocabulary,
    write_result,
)
from helios.runtime import policy
from helios.runtime.build import Built
from helios.runtime.engine import Engine

WORKLOADS = ("batch1", "offline256", "poisson")
_SPANS = {"_admit": "admit", "_launch": "launch", "_commit": "commit"}
_WINDOW_TICKS = 3
_TIMELINE_BARS = 450  # more would make a large figure: the window ends with the last one


def items_of(name: str, built: Built, options: argparse.Namespace) -> tuple[list[Item], int | None]:
    """A workload's requests, cut to ``--scale``, and its concurrency."""
    below, scale = vocabulary(built), options.scale
    room = built.engine.config.max_model_len
    if name == "batch1":
        prompt = min(512, room // 4)
        return single_items(max(1, round(4 * scale)), prompt, min(256, room // 4), 1, below), 1
    if name == "offline256":
        return offline_items(max(2, round(256 * scale)), 1, below, min(1024, room // 3)), None
    return poisson_items(options.rate, max(1.0, 6 * scale), 1, below, min(7680, room // 2)), None


def watched(built: Built, engine: Engine, trace: Trace) -> Callable[[], None]:
    """Note the host's spans in ``trace``; the returned function puts everything back."""
    plan = policy.plan
    policy.plan = span(trace, "plan", plan)
    for method, name in _SPANS.items():
        setattr(engine, method, span(trace, name, getattr(engine, method)))
    runner: Any = built.runner
    collect = runner.collect
    runner.collect = span(trace, "wait", collect)  # inside a commit: for the device

    def restore() -> None:
        policy.plan = plan
        runner.collect = collect

    return restore


Step = tuple[int, int, bool]  # began, ended (nanoseconds), whether there was work left


def idle_share(trace: Trace, steps: list[Step]) -> dict[str, float]:
    """Idle time while the engine had work. Waiting for the next arrival is no idleness: it is left out."""
    stretches: list[list[int]] = []
    going_on = False
    for began, ended, more in steps:
        if going_on:  # whatever lies between two such steps, there was something to do
            stretches[-1][1] = ended
        else:
            stretches.append([began, ended])
        going_on = more
    kernels, position = trace.kernels, 0
    gaps = wall = 0
    for began, ended in stretches:
        while position < len(kernels) and kernels[position].end < began:
            position += 1
        gaps += exclusive(kernels[position:], began, ended)["gaps"]
        wall += ended - began
    return {"working_seconds": wall / 1e9, "recorded_seconds": trace.wall / 1e9, "idle": gaps / max(wall, 1)}


def timeline(trace: Trace, steps: list[Step]) -> dict[str, Any]:
    """The kernels and host spans of a few ticks from the middle of the run; microseconds."""
    middle = len(steps) // 2
    shown = steps[middle : middle + _WINDOW_TICKS]
    if not shown:
        return {"kernels": [], "spans": []}
    start, end = shown[0][0], shown[-1][1]

    def cut(began: int, ended: int) -> list[float]:
        return [round((began - start) / 1e3, 1), round((ended - start) / 1e3, 1)]

    bars: list[list[Any]] = []  # neighbours of a class are one bar: a layer is a dozen kernels
    for kernel in trace.kernels:
        if kernel.end < start or kernel.start > end:
            continue
        if bars and bars[-1][0] == kernel.kind and kernel.start - bars[-1][2] < 3000:
            bars[-1][2] = max(bars[-1][2], kernel.end)
        else:
            bars.append([kernel.kind, kernel.start, kernel.end])
    if len(bars) > _TIMELINE_BARS:
        bars = bars[:_TIMELINE_BARS]
        end = bars[-1][2]
    kernels = [[kind, *cut(began, ended)] for kind, began, ended in bars]
    spans = [[name, *cut(began, ended)] for name, began, ended in trace.spans if start <= began < end]
    return {"microseconds": (end - start) / 1e3, "kernels": kernels, "spans": spans}


def play_recorded(built: Built, items: list[Item], concurrency: int | None) -> dict[str, Any]:
    """Play a workload while the device is recorded."""
    engine = variant(built)
    offset = time.time_ns() - time.perf_counter_ns()
    steps: list[Step] = []

    def after(began: float, ended: float) -> None:
        steps.append((int(began * 1e9) + offset, int(ended * 1e9) + offset, engine.has_work))

    played: list[Played] = []
    with recording() as trace:
        restore = watched(built, engine, trace)
        try:
            played = play(engine, items, concurrency=concurrency, after_step=after)
        finally:
            restore()
    totals: dict[str, float] = {}
    for name, began, ended in trace.spans:
        totals[name] = totals.get(name, 0.0) + (ended - began) / 1e3
    totals["commit"] = totals.get("commit", 0.0) - totals.get("wait", 0.0)
    return {
        **idle_share(trace, steps),
        "ticks": len(steps),
        "kernels": len(trace.kernels),
        "host_microseconds_per_tick": {name: value / max(1, len(steps)) for name, value in totals.items()},
        "recorded": summary(played),
        "top_kernels": top_kernels(trace.kernels, 10),
        "timeline": timeline(trace, steps),
    }


def play_profiled(built: Built, items: list[Item], concurrency: int | None) -> list[dict[str, Any]]:
    """Where the engine's thread spends its time: the functions with most time of their own."""
    engine = variant(built)
    profiler = cProfile.Profile()
    profiler.enable()
    play(engine, items, concurrency=concurrency)
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    rows: list[dict[str, Any]] = []
    for (file, line, name), (_, calls, own, total, _) in stats.stats.items():
        where = f"{Path(file).parent.name}/{Path(file).name}:{line}" if line else "built in"
        rows.append({"function": name[:60], "where": where, "calls": calls, "own_seconds": own,
                     "total_seconds": total})  # fmt: skip
    # Sleeping and waiting for the device is not work.
    rows = [row for row in rows if "sleep" not in row["function"] and "synchronize" not in row["function"]]
    return sorted(rows, key=lambda row: -row["own_seconds"])[:15]


def measure(built: Built, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One workload: plainly, recorded, and under the Python profiler."""
    items, concurrency = items_of(name, built, options)
    plain = summary(play(variant(built), items, concurrency=concurrency))
    found = play_recorded(built, items, concurrency)
    return {"workload": name, "plain": plain, **found, "python": play_profiled(built, items, concurrency)}


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(made)
    made.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    made.add_argument("--rate", type=float, default=16.0, help="arrivals a second of poisson")
    made.add_argument("--scale", type=float, default=1.0, help="share of the requests, for small machines")
    made.add_argument("--figures", type=Path, help="folder for figures of this result")
    return made


def main() -> int:
    options = arguments().parse_args()
    with recording():
        pass  # the profiler's library is loaded before graphs are captured
    built = build_engine(options)
    found: list[dict[str, Any]] = []
    for name in options.workloads:
        found.append(one := measure(built, name, options))
        print(
            f"{name:12} idle {one['idle']:6.1%} of {one['working_seconds']:.2f} s at work; "
            f"{one['plain'].get('output_tokens_per_second', 0):,.0f} tokens/s plain, "
            f"{one['recorded'].get('output_tokens_per_second', 0):,.0f} recorded",
            flush=True,
        )
    result = write_result("idle", built, options, workloads=found)
    if options.figures is not None:
        from benchmarks.engine_figures import draw_idle

        draw_idle(result, options.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
