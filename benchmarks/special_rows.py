"""What one unusual row costs the others: 64 decoding rows, all plain or one of them special.

    python benchmarks/special_rows.py --model FOLDER --load-format dummy --label 0.6b

Special: constrained by a JSON schema, with log probabilities, with penalties. A row that needs the host between
two tokens must not slow the batch down: the target is a step at most 10 % longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.inprocess import (
    SAMPLING,
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
from helios.runtime.request import Grammar, SamplingParams

TARGET = 1.10
# Long enough never to end while it is measured; strings leave most of the vocabulary open, as real ones do.
_SCHEMA = {
    "type": "object",
    "properties": {"list": {"type": "array", "items": {"type": "string"}, "minItems": 5000}},
    "required": ["list"],
    "additionalProperties": False,
}
KINDS: dict[str, SamplingParams] = {
    "plain": SAMPLING,
    "json schema": replace(SAMPLING, grammar=Grammar("json_schema", json.dumps(_SCHEMA))),
    "logprobs": replace(SAMPLING, logprobs=5),
    "penalties": replace(SAMPLING, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "top_k, top_p": replace(SAMPLING, top_k=20, top_p=0.95),
}


def step_seconds(
    built: Built, engine: Engine, params: SamplingParams, rows: int, context: int, steps: int
) -> float:
    """Mean step (a row that delays every second step must show) of ``rows``, the first with ``params``."""
    jobs = decoding_jobs(engine, rows, context, steps, vocabulary(built), [params])
    before = len(engine.running)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = (time.perf_counter() - began) / steps
    if len(engine.running) < before:
        print(f"note: {before - len(engine.running)} rows ended while they were measured")
    cancel(engine, jobs)
    return seconds


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(made)
    made.add_argument("--rows", type=int, default=64)
    made.add_argument("--context", type=int, default=640)
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--rounds", type=int, default=3)
    return made


def main() -> int:
    options = arguments().parse_args()
    built = build_engine(options)
    engine = steady(built)
    rows = min(options.rows, built.engine.config.max_batch_size)
    for params in KINDS.values():
        step_seconds(built, engine, params, rows, options.context, 8)
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):  # in turn, so that a drift of the clocks meets all alike
        for name, params in KINDS.items():
            times[name].append(step_seconds(built, engine, params, rows, options.context, options.steps))
    found: dict[str, Any] = {}
    for name, values in times.items():
        ratios = [value / plain for value, plain in zip(values, times["plain"], strict=True)]
        found[name] = {"step_seconds": statistics.median(values), "over_plain": statistics.median(ratios)}
        verdict = "" if name == "plain" else "met" if found[name]["over_plain"] <= TARGET else "MISSED"
        print(
            f"{name:14} {1e3 * found[name]['step_seconds']:8.3f} ms  x {found[name]['over_plain']:.3f} {verdict}"
        )
    write_result(
        "special-rows", built, options, rows=rows, context=options.context, target=TARGET, kinds=found
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
