"""The engine without HTTP: how fast `LLM.generate` works through a workload of token-id prompts.

    python benchmarks/offline.py --model models/qwen3-0.6b --set load_format=dummy --label offline

Seed 0 of offline256 is the workload of nano-vllm's bench.py. The gap between this figure and run.py's on the
same workload is the price of HTTP, streaming and the client.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.floor import ModelShape, Work, add_card_arguments, card_from_arguments, ideal_run
from benchmarks.metrics import distribution
from benchmarks.workloads import LARGEST_TOKEN_ID, Workload, build


def token_prompts(workload: Workload) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths; ValueError for workloads of text or of arrivals."""
    prompts: list[list[int]] = []
    for session in workload.sessions:
        for ask in session.asks:
            if not isinstance(ask.prompt, tuple) or session.arrival_seconds:
                raise ValueError(f"{workload.name}: offline runs take token-id prompts that all come at once")
            prompts.append(list(ask.prompt))
    return prompts, [ask.max_tokens for ask in workload.asks]


def generate(
    llm: Any, prompts: list[list[int]], outputs: list[int], parameters: type[Any]
) -> tuple[float, int]:
    """Seconds and tokens of one `generate` call over everything."""
    sampling = [
        parameters(temperature=0.6, top_p=1.0, ignore_eos=True, max_tokens=count) for count in outputs
    ]
    start = time.perf_counter()
    answers = llm.generate(prompts, sampling, progress=False)
    elapsed = time.perf_counter() - start
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    tokens = sum(len(answer.token_ids) for answer in answers)
    if tokens != sum(outputs):
        raise RuntimeError(f"{sum(outputs)} tokens were asked for, {tokens} came")
    return elapsed, tokens


def setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"takes name=value, not {text!r}")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="name=value", help="a setting"
    )
    parser.add_argument("--workload", default="offline256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each further one adds 1")
    parser.add_argument("--largest-id", type=int, help="default: 10000, or what the model has")
    parser.add_argument("--label", default="unlabelled")
    parser.add_argument("--out", type=Path)
    add_card_arguments(parser)
    options = parser.parse_args()
    try:
        from helios import LLM, SamplingParams
    except ImportError as error:
        print(f"error: this needs the helios package with its offline interface: {error}", file=sys.stderr)
        return 2
    card = card_from_arguments(options)
    shape = ModelShape.from_file(options.model_config) if options.model_config else None
    begun = time.perf_counter()
    llm = LLM(options.model, **dict(options.set))
    load_seconds = time.perf_counter() - begun
    largest_id = options.largest_id or min(LARGEST_TOKEN_ID, llm.model.vocab_size - 256)  # plain tokens
    generate(llm, [[1, 2, 3]], [8], SamplingParams)  # isolated warm-up
    rounds = []
    for number in range(options.rounds):
        workload = build(options.workload, options.seed + number, largest_id)
        prompts, outputs = token_prompts(workload)
        elapsed, tokens = generate(llm, prompts, outputs, SamplingParams)
        one: dict[str, Any] = {
            "seed": workload.seed,
            "elapsed_seconds": elapsed,
            "prompt_tokens": sum(map(len, prompts)),
            "output_tokens": tokens,
            "output_tokens_per_second": tokens / elapsed,
        }
        if shape is not None and card is not None:
            works = [Work(0.0, len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]
            one["of_limit"] = ideal_run(shape, card, works, workload.concurrency).elapsed_seconds / elapsed
        rounds.append(one)
        print("  ".join(f"{key} {value:.4g}" for key, value in one.items()), flush=True)
    result = results.envelope(
        "offline",
        options.label,
        workload=options.workload,
        settings=dict(options.set),
        load_seconds=load_seconds,
        output_tokens_per_second=distribution(one["output_tokens_per_second"] for one in rounds),
        rounds=rounds,
    )
    results.write(options.out or results.result_path("offline", options.label), result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
