"""Time from a server's process start to healthy, by the stages its /health names, and to its first tokens.

    python benchmarks/startup.py benchmarks/configs/h200-0.6b.toml --only helios --repeats 3 --label warm

Compilation caches decide much of it. To measure a cold start give the server an empty cache folder through
its `env` in the TOML file (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR, VLLM_CACHE_ROOT), and label it so.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.client import ProtocolError, clock
from benchmarks.load import SAMPLING, Target, run_loop, run_workload
from benchmarks.metrics import time_to_first_token
from benchmarks.run import prepare
from benchmarks.servers import (
    RunningServer,
    ServerError,
    ServerSpec,
    exit_on_sigterm,
    load_config,
    variables_from,
)
from benchmarks.workloads import build

STEADY_REQUESTS = 6


def start_once(spec: ServerSpec, log: Path, largest_id: int, seed: int) -> dict[str, Any]:
    """Start a server, ask it STEADY_REQUESTS + 1 times for 512 tokens in and 16 out, stop it. Seconds."""
    stages: list[dict[str, Any]] = []
    with RunningServer(spec, log) as server:
        healthy = run_loop(
            server.wait_ready(0.02, lambda word, at: stages.append({"stage": word, "at_seconds": at}))
        )
        target = run_loop(prepare(Target(spec.base_url, spec.model, sampling={**SAMPLING, **spec.body})))
        asked = clock() - server.started
        run = run_workload(target, build(f"batch1:count={STEADY_REQUESTS + 1},output=16", seed, largest_id))
        server.check()
    records = sorted(run.records, key=lambda record: record.sent)
    first = [time_to_first_token(record) for record in records if record.error is None]
    if len(first) <= STEADY_REQUESTS or any(value is None for value in first):
        raise ServerError(f"{spec.name}: a first request failed: {[record.error for record in records]}")
    known = [value for value in first if value is not None]
    steady = statistics.median(known[2:])
    return {
        "stages": stages,
        "healthy_seconds": healthy,
        "first_token_seconds": asked + known[0],  # from process start; the request leaves once healthy
        "first_request_time_to_first_token_seconds": known[0],
        "steady_time_to_first_token_seconds": steady,
        "first_request_over_steady": known[0] / steady,
    }


def show(name: str, starts: list[dict[str, Any]]) -> None:
    print(f"\n{name}: medians of {len(starts)} starts")
    for stage in starts[-1]["stages"]:
        print(f"  {stage['at_seconds']:8.2f} s  {stage['stage']}")
    for key in (key for key in starts[0] if key != "stages"):
        print(f"  {key:45}{statistics.median(start[key] for start in starts):10.4f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--label", default="unlabelled")
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    exit_on_sigterm()
    measured: dict[str, list[dict[str, Any]]] = {}
    try:
        config = load_config(options.config, variables_from(options.set))
        specs = [spec for spec in config.servers if not options.only or spec.name in options.only]
        if missing := [spec.name for spec in specs if spec.command is None]:
            raise ServerError(f"{missing[0]} has no command to start")
        for number in range(options.repeats):
            for spec in specs:  # in turn, so that a drift of the machine meets all alike
                log = options.logs / f"startup-{spec.name}.log"
                once = start_once(spec, log, config.largest_id, 1000 + number)
                measured.setdefault(spec.name, []).append(once)
    except (ValueError, OSError, ServerError, ProtocolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, starts in measured.items():
        show(name, starts)
    result = results.envelope(
        "startup", options.label, commands={s.name: s.command for s in specs}, starts=measured
    )
    path = options.out or results.result_path("startup", options.label)
    results.write(path, result)
    print(f"\n{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
