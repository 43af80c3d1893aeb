"""Concurrent HTTP benchmark of one running OpenAI-compatible server.

python benchmarks/run.py --label first-try                       # dataset.json at the repository's root
python benchmarks/run.py --workload poisson:rate=16 --seed 3 --label rate16
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.client import HttpClient, ProtocolError, clock
from benchmarks.dataset import DatasetError, load_dataset
from benchmarks.floor import Card, ModelShape, add_card_arguments, card_from_arguments
from benchmarks.health import check_health, first_model
from benchmarks.load import SAMPLING, Record, Run, Target, run_loop, run_workload
from benchmarks.metrics import Limits, lookup, row, summarise, time_to_first_token
from benchmarks.ticks import fetch_ticks, trimmed
from benchmarks.workloads import LARGEST_TOKEN_ID, WORKLOADS, Ask, Session, Workload, build

WARM_UP = Workload(
    "warm-up", 0, (Session((Ask("warm_up", 16, messages=({"role": "user", "content": "Hi"},)),)),)
)


async def prepare(target: Target, wait_seconds: float = 0.0) -> Target:
    """Check the server's health and fill in the model's name. ConnectionError says what the server said."""
    async with HttpClient(target.base_url, target.api_key) as client:
        deadline = clock() + wait_seconds
        healthy, word = await check_health(client)
        while not healthy and clock() < deadline:
            await asyncio.sleep(0.5)
            healthy, word = await check_health(client)
        if not healthy:
            raise ConnectionError(f"{target.base_url} is not ready: {word}")
        return target if target.model else replace(target, model=await first_model(client))


def warm_up(target: Target) -> None:
    """One request, alone; its time counts nowhere. RuntimeError where even that fails."""
    record = run_workload(target, WARM_UP).records[0]
    if record.error is not None:
        # A base model may have no chat template: ask it through completions before giving up.
        plain = Workload("warm-up", 0, (Session((Ask("warm_up", 16, prompt="Hello"),)),))
        record = run_workload(target, plain).records[0]
    if record.error is not None:
        raise RuntimeError(f"the warm-up request failed: {record.error}")


def measure(
    target: Target,
    workload: Workload,
    *,
    concurrency: int | None = None,
    processes: int = 1,
    limits: Limits | None = None,
    shape: ModelShape | None = None,
    card: Card | None = None,
    limit_seconds: float | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> tuple[dict[str, Any], Run]:
    """Run a workload once: its aggregates and its raw run."""
    run = run_workload(
        target,
        workload,
        concurrency=concurrency,
        processes=processes,
        limit_seconds=limit_seconds,
        on_record=on_record,
    )
    return summarise(run, len(workload.asks), limits, shape, card), run


def warnings(found: dict[str, Any], cpu_limit: float) -> list[str]:
    """What makes the figures doubtful, in words for the terminal and the results file."""
    words = []
    client = found.get("client")
    if client and client["cpu_share_max"] > cpu_limit:
        words.append(
            f"a client process used {client['cpu_share_max']:.0%} of a core (limit {cpu_limit:.0%}; loop "
            f"{1000 * client['loop_lag_p99_seconds']:.1f} ms late at p99): the client may be the bottleneck; "
            "use more --processes"
        )
    if found["completion_ratio"] < 1:
        words.append(f"only {found['completion_ratio']:.1%} of the requests completed: {found['errors']}")
    if (found.get("tokens_per_chunk") or 1) > 1.05:
        words.append(
            f"chunks hold {found['tokens_per_chunk']:.2f} tokens: inter_token_seconds is between chunks, "
            "time_per_output_token_seconds is per token"
        )
    if found.get("submission_lag_seconds", 0) > 0.05:
        words.append(
            f"the client was overloaded: a request left {found['submission_lag_seconds']:.3f} s late"
        )
    return words


def show_summary(found: dict[str, Any]) -> None:
    if not found.get("completed_requests"):
        print("no request completed:", found["errors"])
        return
    print(f"\n{'':34}{'p50':>12}{'p95':>12}{'p99':>12}{'max':>12}")
    for name, value in found.items():
        if isinstance(value, dict) and "p50" in value:
            print(f"{name:34}" + "".join(f"{value[key]:12.4f}" for key in ("p50", "p95", "p99", "max")))
    for name, value in found.items():
        if isinstance(value, int | float):
            print(f"{name:34}{value:12.4f}" if isinstance(value, float) else f"{name:34}{value:12}")
    for name, value in {**found.get("goodput", {}), **found.get("floor", {}).get("of_limit", {})}.items():
        shown = f"goodput {name}" if name in found.get("goodput", {}) else f"share of limit, {name}"
        print(f"{shown}: {value if value is None else round(value, 4)}")


class Printer:
    """Prints every answer as it finishes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0

    def __call__(self, record: Record) -> None:
        self.count += 1
        head = f"[{self.count:>4}/{self.total}] {record.category:14}"
        if record.error is not None:
            print(f"{head} failed: {record.error}", flush=True)
            return
        first = time_to_first_token(record)
        shown = "-" if first is None else f"{first:.3f}"
        print(
            f"{head} {record.prompt_tokens:>6} in ({record.cached_tokens} cached) "
            f"{record.completion_tokens:>5} out  "
            f"first token {shown} s  all {record.ended - record.sent:.3f} s  {record.finish_reason}",
            flush=True,
        )
        if record.text:
            print("       " + record.text.strip().replace("\n", "\n       "), flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_mutually_exclusive_group()
    what.add_argument("--dataset", type=Path, default=results.ROOT.parent / "dataset.json")
    what.add_argument("--workload", help=f"name[:key=value,...]; one of {', '.join(WORKLOADS)}")
    made.add_argument("--label", default="unlabelled", help="goes into the result and its file name")
    made.add_argument("--base-url", default=os.environ.get("HELIOS_BASE_URL", "http://127.0.0.1:8000"))
    made.add_argument("--model", default="", help="model name to send (default: the first of /v1/models)")
    made.add_argument(
        "--api-key-env", default="HELIOS_API_KEY", help="variable that holds the API key, if any"
    )
    made.add_argument("--concurrency", type=int, help="requests in flight (default: the workload's own)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--largest-id", type=int, default=LARGEST_TOKEN_ID, help="largest token id in prompts")
    made.add_argument("--no-stream", action="store_true", help="ask for whole answers")
    made.add_argument(
        "--body", type=json.loads, default={}, help="JSON fields for every request; null removes one"
    )
    made.add_argument("--processes", type=int, default=1, help="client processes")
    made.add_argument("--client-cpu-limit", type=float, default=0.7, help="warn above this share of a core")
    made.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS")
    made.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop the run after this long")
    made.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait this long for health")
    made.add_argument("--goodput-ttft-ms", type=float)
    made.add_argument("--goodput-itl-ms", type=float)
    made.add_argument("--no-warm-up", action="store_true")
    made.add_argument("--quiet", action="store_true", help="no line per answer")
    made.add_argument(
        "--out", type=Path, help="result file (default: benchmarks/results/run-LABEL-TIME.json)"
    )
    add_card_arguments(made)
    return made


def limits_from(options: argparse.Namespace) -> Limits:
    def seconds(value: float | None) -> float | None:
        return None if value is None else value / 1000

    return Limits(seconds(options.goodput_ttft_ms), seconds(options.goodput_itl_ms))


def main() -> int:
    options = parser().parse_args()
    try:
        if options.workload:
            workload = build(options.workload, options.seed, options.largest_id)
        else:
            workload = load_dataset(options.dataset)
        card = card_from_arguments(options)
        shape = ModelShape.from_file(options.model_config) if options.model_config else None
        # A dataset's answers end where the model ends them; synthetic ones have a stated length.
        sampling = dict(SAMPLING) if options.workload else {}
        target = Target(
            options.base_url,
            options.model,
            os.environ.get(options.api_key_env) or None,
            not options.no_stream,
            sampling | options.body,
            options.request_timeout,
        )
        target = run_loop(prepare(target, options.wait))
        if not options.no_warm_up:
            warm_up(target)
    except (DatasetError, ValueError, OSError, RuntimeError, ProtocolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found, run = measure(
        target,
        workload,
        concurrency=options.concurrency,
        processes=options.processes,
        limits=limits_from(options),
        shape=shape,
        card=card,
        limit_seconds=options.time_limit,
        on_record=None if options.quiet else Printer(len(workload.asks)),
    )
    doubts = warnings(found, options.client_cpu_limit)
    show_summary(found)
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    settings = {
        "stream": target.stream,
        "sampling": target.sampling,
        "model": target.model,
        "seed": options.seed,
    }
    settings["concurrency"] = options.concurrency or workload.concurrency
    start = min((record.sent for record in run.records), default=run.started)
    result = results.envelope(
        "run",
        options.label,
        workload=workload.name,
        settings=settings,
        warnings=doubts,
        aggregates=found,
        requests=[row(record, start) for record in run.records],
    )
    end = max((record.ended for record in run.records), default=run.started)
    if (
        ticks := trimmed(run_loop(fetch_ticks(target.base_url, target.api_key)), run.started, end)
    ) is not None:
        result["ticks"] = ticks
    path = options.out or results.result_path("run", options.label)
    results.write(path, result)
    print(f"\n{path.name}: {lookup(found, 'output_tokens_per_second') or 0:.1f} output tokens/s")
    return 0 if found["completion_ratio"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
