"""Whether this client and independent ones see the same: one server, one workload, several clients in turn.

    python benchmarks/agree.py --base-url http://127.0.0.1:8000 --model-folder FOLDER --label 0.6b

Clients: this repository's (run.py's own code), ``vllm bench serve``, and a plain one on httpx, written here with
nothing of the first in it. All send random text of about ``--input`` tokens, ask for ``--output`` tokens and keep
``--concurrency`` requests in flight; prompts are fresh for every client and round, since a server may cache them.

Against ``stand_in.py``, which answers by the clock, only what the clients themselves do differs. That does not
replace the comparison on a real server, where a client on few cores also takes time from what it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.load import SAMPLING, Target, run_loop
from benchmarks.run import measure, prepare, warm_up
from benchmarks.workloads import Ask, Session, Workload

METRICS = {
    "ttft_ms": "TTFT p50, ms",
    "tpot_ms": "TPOT p50, ms",
    "itl_ms": "ITL p50, ms",
    "output_tokens_per_second": "output tokens/s",
}
ALLOWED = 0.05  # difference that still counts as agreement


def texts(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[str]:
    """Random texts that the tokenizer makes about ``tokens`` tokens of."""
    rng = random.Random(f"agree/{seed}")
    below = min(tokenizer.get_vocab_size(with_added_tokens=False), 10_000)
    made: list[str] = []
    for _ in range(count):
        text = tokenizer.decode(rng.choices(range(below), k=tokens))
        made.append(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids[:tokens]))
    return made


def ours(options: argparse.Namespace, target: Target, prompts: list[str]) -> dict[str, float]:
    """The client of run.py and compare.py."""
    sessions = tuple(Session((Ask("agree", options.output, prompt=text),)) for text in prompts)
    found, _ = measure(target, Workload("agree", 0, sessions, options.concurrency))
    if found["completion_ratio"] < 1:
        raise RuntimeError(f"requests failed: {found['errors']}")
    return {
        "ttft_ms": 1e3 * found["time_to_first_token_seconds"]["p50"],
        "tpot_ms": 1e3 * found["time_per_output_token_seconds"]["p50"],
        "itl_ms": 1e3 * found["inter_token_seconds"]["p50"],
        "output_tokens_per_second": found["output_tokens_per_second"],
        "prompt_tokens": found["prompt_tokens"],
        "output_tokens": found["output_tokens"],
    }


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[float], int, int]:
    """Moments of sending and of each token's line, and the server's token counts."""
    times, usage = [time.perf_counter()], {"prompt_tokens": 0, "completion_tokens": 0}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            choice = event["choices"][0] if event["choices"] else None
            if choice is not None and (choice["text"] or choice["finish_reason"] is None):
                times.append(time.perf_counter())
    return times, usage["prompt_tokens"], usage["completion_tokens"]


async def _plain(options: argparse.Namespace, target: Target, prompts: list[str]) -> dict[str, float]:
    body = {"model": target.model, "max_tokens": options.output, "stream": True, **SAMPLING}
    body["stream_options"] = {"include_usage": True}
    gate = asyncio.Semaphore(options.concurrency)
    limits = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency)
    async with httpx.AsyncClient(base_url=options.base_url, timeout=300, limits=limits) as client:

        async def one(prompt: str) -> tuple[list[float], int, int]:
            async with gate:
                return await _ask(client, {**body, "prompt": prompt})

        began = time.perf_counter()
        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        elapsed = time.perf_counter() - began
    output = sum(made for _, _, made in answers)
    told = [(times, made) for times, _, made in answers if len(times) > 2]  # more than one piece of text
    if len(told) < len(answers) / 2:
        raise RuntimeError("most answers came in one piece: they have no time per token")
    per_token = [(times[-1] - times[1]) / (made - 1) for times, made in told]
    gaps = np.concatenate([np.diff(times[1:]) for times, _ in told])
    return {
        "ttft_ms": 1e3 * statistics.median(times[1] - times[0] for times, _ in told),
        "tpot_ms": 1e3 * statistics.median(per_token),
        "itl_ms": 1e3 * float(np.median(gaps)),
        "output_tokens_per_second": output / elapsed,
        "prompt_tokens": sum(asked for _, asked, _ in answers),
        "output_tokens": output,
    }


def plain(options: argparse.Namespace, target: Target, prompts: list[str]) -> dict[str, float]:
    """A second opinion in sixty lines."""
    return asyncio.run(_plain(options, target, prompts))


def vllm_command(options: argparse.Namespace, target: Target, seed: int, folder: str) -> list[str]:
    """``vllm bench serve`` on the same workload (flags of vLLM 0.32)."""
    values = {
        "backend": "openai", "base-url": options.base_url, "endpoint": "/v1/completions", "model": target.model,
        "tokenizer": str(options.model_folder), "dataset-name": "random", "random-input-len": options.input,
        "random-output-len": options.output, "num-prompts": options.count,
        "max-concurrency": options.concurrency, "temperature": SAMPLING["temperature"], "top-p": SAMPLING["top_p"],
        "seed": seed, "num-warmups": 1,
        "percentile-metrics": "ttft,tpot,itl,e2el", "result-dir": folder, "result-filename": "vllm.json",
    }  # fmt: skip
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    head = [options.vllm_python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    return [*head, *flags, "--ignore-eos", "--save-result", "--disable-tqdm"]


def from_vllm(found: dict[str, Any]) -> dict[str, float]:
    """The figures of its result file under this script's names."""
    if found["completed"] != found["num_prompts"]:
        raise RuntimeError(f"vllm bench serve completed {found['completed']} of {found['num_prompts']}")
    return {
        "ttft_ms": found["median_ttft_ms"],
        "tpot_ms": found["median_tpot_ms"],
        "itl_ms": found["median_itl_ms"],
        "output_tokens_per_second": found["output_throughput"],
        "prompt_tokens": found["total_input_tokens"],
        "output_tokens": found["total_output_tokens"],
    }


def vllm(options: argparse.Namespace, target: Target, seed: int) -> dict[str, float]:
    """Run ``vllm bench serve``; RuntimeError, with the end of its output, where it cannot be run."""
    with tempfile.TemporaryDirectory() as folder:
        command = vllm_command(options, target, seed, folder)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        file = Path(folder) / "vllm.json"
        if done.returncode or not file.exists():
            raise RuntimeError("vllm bench serve failed: " + (done.stderr or done.stdout).strip()[-800:])
        return from_vllm(json.loads(file.read_text()))


def differences(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds by client, and each other client's difference from ours."""
    medians = {
        name: {metric: statistics.median(one[metric] for one in found) for metric in METRICS}
        for name, found in rounds.items()
        if found
    }
    return {
        name: {**values, "difference": {m: values[m] / medians["ours"][m] - 1 for m in METRICS}}
        for name, values in medians.items()
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    for metric, title in METRICS.items():
        cells = [
            f"{name} {one[metric]:.4g} ({one['difference'][metric]:+.1%})" for name, one in found.items()
        ]
        print(f"{title:18}" + "   ".join(cells))


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--base-url", default="http://127.0.0.1:8000")
    made.add_argument("--model", default="", help="name to send (default: the server's first)")
    made.add_argument("--model-folder", type=Path, required=True, help="folder with the tokenizer")
    made.add_argument("--clients", nargs="+", choices=("vllm", "plain"), default=["vllm", "plain"])
    made.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM")
    made.add_argument("--count", type=int, default=128)
    made.add_argument("--input", type=int, default=512)
    made.add_argument("--output", type=int, default=128)
    made.add_argument("--concurrency", type=int, default=16)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--label", default="unlabelled")
    made.add_argument("--out", type=Path)
    return made


def main() -> int:
    options = arguments().parse_args()
    tokenizer = Tokenizer.from_file(str(options.model_folder / "tokenizer.json"))
    target = run_loop(prepare(Target(options.base_url, options.model, sampling=dict(SAMPLING)), 60.0))
    warm_up(target)
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], **{name: [] for name in options.clients}}
    ours(options, target, texts(tokenizer, options.count, options.input, -1))  # counts nowhere
    for number in range(options.rounds):
        seed = 10 * (options.seed + number)
        rounds["ours"].append(ours(options, target, texts(tokenizer, options.count, options.input, seed)))
        if "plain" in options.clients:
            prompts = texts(tokenizer, options.count, options.input, seed + 1)
            rounds["plain"].append(plain(options, target, prompts))
        if "vllm" in options.clients:
            try:
                rounds["vllm"].append(vllm(options, target, seed + 2))
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"warning: {error}", file=sys.stderr)
                options.clients.remove("vllm")  # it will not work in the next round either
    found = differences(rounds)
    show(found)
    workload = {key: getattr(options, key) for key in ("count", "input", "output", "concurrency")}
    result = results.envelope(
        "agreement", options.label, workload=workload, model=target.model, allowed=ALLOWED,
        clients=found, rounds=rounds,
    )  # fmt: skip
    results.write(options.out or results.result_path("agreement", options.label), result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
