"""One long prompt, taken apart: its ticks, and the device's time by kernel class.

    python benchmarks/profile_prompt.py --model FOLDER --load-format dummy --card card.json --label 4b

A prompt comes while some rows decode, as under load, or alone (`--beside 0`). Its time to the first token is
measured a few times without recording, with a pause before each, and several times in a row without any: a card
that is at its power limit takes longer for the same products. Then one is recorded.
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

from benchmarks.device_trace import recording
from benchmarks.floor import ModelShape, add_card_arguments, card_from_arguments, prefill_seconds
from benchmarks.inprocess import (
    add_engine_arguments,
    build_engine,
    cancel,
    decoding_jobs,
    first_token_seconds,
    variant,
    vocabulary,
    write_result,
)
from benchmarks.profile_step import breakdown
from helios.runtime.build import Built
from helios.runtime.engine import Engine
from helios.runtime.interfaces import TickRecord

DECODE_CONTEXT = 512  # tokens of the rows beside the prompt
PAUSE_STEPS = 60  # decode steps before a prompt; a pause of 0.3 s where nothing decodes


def first_token(engine: Engine, tokens: int, below: int) -> tuple[float, list[TickRecord]]:
    """Seconds from a prompt of fresh tokens to its first token, and its ticks."""
    engine.tick_log.clear()
    seconds = first_token_seconds(engine, tokens, below)
    return seconds, [tick for tick in engine.tick_log if tick.prefill_tokens]


def pause(engine: Engine) -> None:
    """Let the card cool: decode only, or nothing."""
    if not engine.has_work:
        time.sleep(0.3)
        return
    for _ in range(PAUSE_STEPS):
        engine.step()


def take_apart(built: Built, tokens: int, beside: int, repeats: int) -> dict[str, Any]:
    """Time and record a prompt of ``tokens`` beside ``beside`` decoding rows."""
    engine, below = variant(built, tick_log=1000), vocabulary(built)
    most = built.engine.config.max_model_len - DECODE_CONTEXT - 128
    rows = decoding_jobs(engine, beside, DECODE_CONTEXT, min(8 * repeats * PAUSE_STEPS, most), below)
    times: list[float] = []
    for _ in range(repeats):
        pause(engine)
        seconds, ticks = first_token(engine, tokens, below)
        times.append(seconds)
    in_a_row = [first_token(engine, tokens, below)[0] for _ in range(3 * repeats)][-repeats:]
    pause(engine)
    with recording() as trace:
        recorded, _ = first_token(engine, tokens, below)
    cancel(engine, rows)
    taken_apart = breakdown(trace, 1)
    return {
        "tokens": tokens,
        "beside": beside,
        "seconds": statistics.median(times),
        "seconds_in_a_row": statistics.median(in_a_row),
        "recorded_seconds": recorded,
        "ticks": [{"tokens": tick.prefill_tokens, "seconds": tick.finished - tick.started} for tick in ticks],
        "microseconds": taken_apart["microseconds"],
        "top_kernels": taken_apart["top_kernels"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    add_card_arguments(parser)
    parser.add_argument("--prompts", default="512,2048,7000", help="tokens")
    parser.add_argument("--beside", default="0,6", help="decoding rows")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    card = card_from_arguments(options)
    with recording():
        pass  # the profiler's library is loaded before graphs are captured
    built = build_engine(options)
    shape = ModelShape.from_file(built.snapshot.folder)
    longest = built.engine.config.max_model_len - 8
    found: list[dict[str, Any]] = []
    for tokens in (min(int(word), longest) for word in options.prompts.split(",")):
        for beside in map(int, options.beside.split(",")):
            found.append(one := take_apart(built, tokens, beside, options.repeats))
            if card is not None:
                one["floor_seconds"] = prefill_seconds(shape, card, tokens)
            parts = "  ".join(
                f"{name} {value / 1e3:.2f}" for name, value in one["microseconds"].items() if value
            )
            print(
                f"{tokens} tokens beside {beside}: {1e3 * one['seconds']:.2f} ms (in a row "
                f"{1e3 * one['seconds_in_a_row']:.2f}, floor {1e3 * one.get('floor_seconds', 0):.2f}), "
                f"ticks {[tick['tokens'] for tick in one['ticks']]}; ms: {parts}",
                flush=True,
            )
    write_result("prompt", built, options, card=asdict(card) if card else None, prompts=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
