#!/usr/bin/env python3
"""Milliseconds of one decode tick, in the engine without HTTP: by rows and context, for any model folder.

    python benchmarks/decode_step.py --model FOLDER --load-format dummy --shapes 1x640,32x640,256x800 --out R.json

Prints the tick's wall time, the time the device was busy (CUDA events around the forward), and the first
token's time of one prompt of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.inprocess import cancel, decoding_jobs, first_token_seconds, vocabulary
from helios.config import load
from helios.runtime.build import build
from helios.runtime.engine import Engine
from helios.runtime.progress import StartupProgress


def decode_ms(engine: Engine, below: int, rows: int, context: int, ticks: int) -> dict[str, float]:
    """Median tick of ``rows`` sequences whose context grows from ``context``."""
    jobs = decoding_jobs(engine, rows, context, ticks, below)
    times: list[float] = []
    busy = jobs[0].timings.decode_compute_seconds
    for _ in range(ticks):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    device = (jobs[0].timings.decode_compute_seconds - busy) / ticks
    cancel(engine, jobs)
    return {
        "median_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * sorted(times)[int(0.99 * len(times))],
        "device_ms": 1e3 * device,
    }


def first_token_ms(engine: Engine, below: int, prompt: int, repeats: int = 7) -> float:
    """Median time from a prompt to its first token."""
    return 1e3 * statistics.median(first_token_seconds(engine, prompt, below) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--shapes", default="1x640,8x640,32x640,64x1024,256x800")
    parser.add_argument("--ticks", type=int, default=100)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = load(
        {"model_id": args.model, "load_format": args.load_format}
        | dict(item.split("=", 1) for item in args.set)
    )
    began = time.perf_counter()
    built = build(settings, StartupProgress(say=print))
    result: dict[str, Any] = {
        "model": built.snapshot.name, "device": built.device.name, "torch": torch.__version__,
        "start_seconds": time.perf_counter() - began, "startup": built.startup_seconds, "steps": {},
    }  # fmt: skip
    print(json.dumps(built.startup_seconds))
    below = vocabulary(built)
    for shape in args.shapes.split(","):
        rows, context = (int(part) for part in shape.split("x"))
        result["steps"][shape] = step = decode_ms(built.engine, below, rows, context, args.ticks)
        print(shape, {name: round(value, 3) for name, value in step.items()}, flush=True)
    result["first_token_ms"] = {str(n): first_token_ms(built.engine, below, n) for n in (64, 512, 1024, 3000)}
    print("first token", {k: round(v, 2) for k, v in result["first_token_ms"].items()})
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
