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
import time
from pathlib import Path
from typing import Any

import torch

from helios.config import load
from helios.runtime.build import build
from helios.runtime.engine import Engine
from helios.runtime.progress import StartupProgress
from helios.runtime.request import Job, SamplingParams


def decode_ms(engine: Engine, vocab: int, rows: int, context: int, ticks: int) -> dict[str, float]:
    """Median tick of ``rows`` sequences whose context grows from ``context``."""
    params = SamplingParams(temperature=0.6, top_p=1.0, ignore_eos=True)
    base = int(time.time() * 1000) % 50_000
    jobs = [
        Job(
            f"b{n}",
            [(base + 7 * n + 13 * p) % vocab for p in range(context)],
            params,
            max_tokens=ticks + 40,
        )
        for n in range(rows)
    ]
    engine.waiting.extend(jobs)
    times: list[float] = []
    while any(job.sequences[0].num_output_tokens < 8 for job in jobs):
        engine.step()
    busy = jobs[0].timings.decode_compute_seconds
    for _ in range(ticks):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    device = (jobs[0].timings.decode_compute_seconds - busy) / ticks
    for job in jobs:
        job.cancelled = True
    while engine.has_work:
        engine.step()
    return {
        "median_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * sorted(times)[int(0.99 * len(times))],
        "device_ms": 1e3 * device,
    }


def first_token_ms(engine: Engine, vocab: int, prompt: int, repeats: int = 7) -> float:
    """Median time from a prompt to its first token."""
    times: list[float] = []
    for n in range(repeats):
        ids = [(31 * n + 17 * p + int(time.time() * 1e3)) % vocab for p in range(prompt)]
        job = Job(f"t{n}", ids, SamplingParams(temperature=0.6, top_p=1.0), max_tokens=1)
        engine.waiting.append(job)
        started = time.perf_counter()
        while not job.is_finished:
            engine.step()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


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
    vocab = min(built.vocabulary.size, built.snapshot.config.vocab_size)
    for shape in args.shapes.split(","):
        rows, context = (int(part) for part in shape.split("x"))
        result["steps"][shape] = step = decode_ms(built.engine, vocab, rows, context, args.ticks)
        print(shape, {name: round(value, 3) for name, value in step.items()}, flush=True)
    result["first_token_ms"] = {str(n): first_token_ms(built.engine, vocab, n) for n in (64, 512, 1024, 3000)}
    print("first token", {k: round(v, 2) for k, v in result["first_token_ms"].items()})
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
