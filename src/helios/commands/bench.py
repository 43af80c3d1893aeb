"""``helios bench``: how fast a model is in this process, without HTTP."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from helios.commands.common import open_llm
from helios.errors import StartupError
from helios.outputs import RequestOutput
from helios.runtime.request import SamplingParams

WARM_UP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--num-prompts", type=int, default=64, metavar="N", help="all sent at once (64)")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of a prompt (128)")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens of an answer (64)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts (0)")


def run(flags: dict[str, Any], options: dict[str, Any]) -> int:
    """Answer random prompts once and print rates and latencies."""
    count, length, answer = options["num_prompts"], options["input_len"], options["output_len"]
    for name in ("num_prompts", "input_len", "output_len"):
        if options[name] < 1:
            raise StartupError(f"--{name.replace('_', '-')} {options[name]}: at least 1")
    with open_llm(flags) as llm:
        numbers = random.Random(options["seed"])
        highest = llm.model.vocab_size
        prompts = [[numbers.randrange(highest) for _ in range(length)] for _ in range(count)]
        params = SamplingParams(max_tokens=answer, temperature=1.0, top_p=1.0, seed=0, ignore_eos=True)
        report = llm.report()
        print(f"{report['model']} on {report['device']}, {report['dtype']}")
        print(f"{count} random prompts of {length} tokens, all sent at once, {answer} tokens each")
        warm = SamplingParams(max_tokens=min(answer, WARM_UP_TOKENS), ignore_eos=True)
        llm.generate([[0] * length], warm)
        started = time.perf_counter()
        results = llm.generate(prompts, params)
        _report(results, time.perf_counter() - started)
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise failed[0]
    return 0


def _report(results: Sequence[RequestOutput], seconds: float) -> None:
    read = sum(len(result.prompt_token_ids) - result.num_cached_tokens for result in results)
    written = sum(len(result.token_ids) for result in results)
    first = [float(result.timings["time_to_first_token_seconds"]) for result in results]
    between = [
        float(result.timings["decode_seconds"]) / (len(result.token_ids) - 1)
        for result in results
        if len(result.token_ids) > 1
    ]
    print(f"seconds               {seconds:10.2f}")
    print(f"output tokens/s       {written / seconds:10,.1f}")
    print(f"all tokens/s          {(read + written) / seconds:10,.1f}")
    print(f"first token, ms       {_spread(first)}   waiting for a place included")
    if between:
        print(f"between tokens, ms    {_spread(between)}   means of the answers")


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    middle = ordered[len(ordered) // 2]
    late = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{1e3 * middle:10,.1f} median {1e3 * late:10,.1f} p99"
