"""Measures two or more servers against one another, in one sitting, with the same requests.

    python benchmarks/compare.py benchmarks/configs/h200-0.6b.toml --set MODEL=models/qwen3-0.6b \
        --workloads batch1 offline256 poisson:rate=8 --rounds 3 --time-limit 420 --label 0.6b
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.client import HttpClient, ProtocolError, clock
from benchmarks.load import SAMPLING, Run, Target, run_loop
from benchmarks.metrics import lookup, time_to_first_token
from benchmarks.run import measure, prepare, warm_up, warnings
from benchmarks.servers import (
    Config,
    ConfigError,
    RunningServer,
    ServerError,
    ServerSpec,
    exit_on_sigterm,
    load_config,
    variables_from,
)
from benchmarks.ticks import fetch_ticks, trimmed
from benchmarks.workloads import build, parse

WARM_SEED = 987_654_321  # no round has it: what warms a server must not fill its prefix cache for a round


@dataclass(frozen=True, slots=True)
class Metric:
    """A line of the table: where it is in the aggregates, how it is shown, which direction is better."""

    path: str
    title: str
    scale: float = 1.0
    higher_is_better: bool = False


METRICS = (
    Metric("output_tokens_per_second", "output tokens/s", 1, True),
    Metric("time_to_first_token_seconds.p50", "TTFT p50, ms", 1000),
    Metric("time_to_first_token_seconds.p99", "TTFT p99, ms", 1000),
    Metric("time_per_output_token_seconds.p50", "TPOT p50, ms", 1000),
    Metric("inter_token_seconds.p50", "ITL p50, ms", 1000),
    Metric("inter_token_seconds.p99", "ITL p99, ms", 1000),
    Metric("inter_token_seconds.max", "ITL max, ms", 1000),
    Metric("end_to_end_seconds.p50", "end to end p50, s"),
    Metric("restored_fraction", "prompt tokens from cache", 1, True),
    Metric("floor.of_limit.output_tokens_per_second", "share of the card's limit, tokens/s", 1, True),
    Metric("floor.of_limit.time_per_output_token_seconds_p50", "share of the card's limit, TPOT", 1, True),
    Metric("floor.of_limit.time_to_first_token_seconds_p50", "share of the card's limit, TTFT p50", 1, True),
)


@dataclass(slots=True)
class Spread:
    """Median and extremes over the rounds."""

    values: list[float] = field(default_factory=list)

    def show(self, scale: float = 1.0) -> str:
        if not self.values:
            return "-"
        shown = [_number(scale * value) for value in (statistics.median(self.values), *self.ends)]
        return shown[0] if len(self.values) == 1 else f"{shown[0]} ({shown[1]}-{shown[2]})"

    @property
    def ends(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def complete_rounds(
    rounds: Sequence[dict[str, Any]], servers: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """By workload, the rounds in which every server completed every request: {server: aggregates} each."""
    grouped: dict[tuple[str, Any], dict[str, Any]] = {}
    for entry in rounds:
        key = (entry["workload"], (entry.get("sitting", 0), entry["round"]))
        grouped.setdefault(key, {})[entry["server"]] = entry["aggregates"]
    found: dict[str, list[dict[str, Any]]] = {}
    for (workload, _), by_server in grouped.items():
        whole = all(name in by_server and by_server[name]["completion_ratio"] == 1 for name in servers)
        found.setdefault(workload, [])
        if whole:
            found[workload].append(by_server)
    return found


def verdict(ratios: Sequence[float], higher_is_better: bool) -> str:
    """ "ahead" or "behind" only if every round agrees and the median differs by over 2 %; else "level"."""
    oriented = [ratio if higher_is_better else 1 / ratio if ratio else float("inf") for ratio in ratios]
    if min(oriented) > 1 and statistics.median(oriented) > 1.02:
        return "ahead"
    return "behind" if max(oriented) < 1 and statistics.median(oriented) < 0.98 else "level"


def table(rounds: Sequence[dict[str, Any]], servers: Sequence[str], baseline: str) -> str:
    """Markdown: medians (smallest-largest) over the rounds; ratios are formed within each round first."""
    others = [name for name in servers if name != baseline]
    lines = [
        f"| workload | metric | {' | '.join(servers)} | {' | '.join(f'{o} / {baseline}' for o in others)} |",
        "|---" * (2 + len(servers) + len(others)) + "|",
    ]
    for workload, found in complete_rounds(rounds, servers).items():
        if not found:
            lines.append(f"| {workload} | no complete round |" + " |" * (len(servers) + len(others)))
        for metric in METRICS:
            values = {name: [lookup(one[name], metric.path) for one in found] for name in servers}
            if not found or any(value is None for column in values.values() for value in column):
                continue
            if not any(value for column in values.values() for value in column):
                continue  # all zero, as cache hits are where prompts share nothing
            known: dict[str, list[float]] = {n: [v for v in c if v is not None] for n, c in values.items()}
            cells = [Spread(known[name]).show(metric.scale) for name in servers]
            for other in others:
                pairs = zip(known[other], known[baseline], strict=True)
                ratios = [ours / theirs for ours, theirs in pairs if theirs]
                cells.append(
                    f"{Spread(ratios).show()} {verdict(ratios, metric.higher_is_better)}" if ratios else "-"
                )
            lines.append(f"| {workload} | {metric.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _entry(server: str, workload: str, number: int, seed: int, order: int, run: Run, found: dict[str, Any],
           doubts: list[str]) -> dict[str, Any]:  # fmt: skip
    firsts = [time_to_first_token(record) for record in run.records if record.error is None]
    return {
        "server": server,
        "workload": workload,
        "round": number,
        "seed": seed,
        "order": order,
        "aggregates": found,
        "first_token_seconds": [value for value in firsts if value is not None],
        "warnings": doubts,
    }


async def version_of(base_url: str) -> str:
    """What GET /version says, as Helios and vLLM answer it; "unknown" elsewhere."""
    async with HttpClient(base_url) as client:
        _, body = await client.get("/version")
    return str(body.get("version", "unknown")) if isinstance(body, dict) else "unknown"


class Comparison:
    """The measuring part: warmed targets in, entries out; the result file is rewritten after each pair."""

    def __init__(self, config: Config, options: argparse.Namespace, path: Path) -> None:
        self.config = config
        self.options = options
        self.path = path
        self.began = clock()
        self.entries: list[dict[str, Any]] = []
        self.ready_seconds: dict[str, float] = {}
        self.server_versions: dict[str, str] = {}
        self.cost: dict[str, float] = {}  # seconds that a workload last took, all servers together
        names = [server.name for server in config.servers]
        self.result = results.envelope(
            "compare",
            options.label,
            servers=[
                {"name": s.name, "command": s.command, "env": sorted(s.env), "body": dict(s.body)}
                for s in config.servers
            ],
            baseline=options.baseline or names[-1],
            settings={
                "resident": "one at a time" if options.sequential else "all at once",
                "sampling": SAMPLING,
                "processes": options.processes,
                "warm_up": list(config.warm_up),
                "card": asdict(config.card) if config.card else None,
            },
        )

    def left(self) -> float:
        limit = self.options.time_limit
        return float("inf") if limit is None else limit - (clock() - self.began)

    def warm(self, server: RunningServer) -> Target:
        """Wait for health, then the same requests for every server; none of them counts."""
        spec = server.spec
        if spec.name not in self.ready_seconds:
            self.wait_ready(server)
        target = Target(spec.base_url, spec.model, sampling={**SAMPLING, **spec.body})
        target = run_loop(prepare(target))
        self.server_versions[spec.name] = run_loop(version_of(spec.base_url))
        warm_up(target)
        for spec_text in self.config.warm_up:
            workload = build(spec_text, WARM_SEED, self.config.largest_id)
            found, _ = measure(target, workload, processes=self.options.processes)
            print(
                f"{spec.name}: warmed by {spec_text}, {found['completion_ratio']:.0%} completed", flush=True
            )
            server.check()
        return target

    def one(self, name: str, target: Target, workload: str, number: int, order: int) -> None:
        seed = self.options.seed + number
        found, run = measure(
            target,
            build(workload, seed, self.config.largest_id),
            processes=self.options.processes,
            shape=self.config.shape,
            card=self.config.card,
            limit_seconds=None if self.left() == float("inf") else max(5.0, self.left()),
        )
        doubts = warnings(found, self.options.client_cpu_limit)
        for doubt in doubts:
            print(f"warning: {name}, {workload}: {doubt}", file=sys.stderr, flush=True)
        entry = _entry(name, workload, number, seed, order, run, found, doubts)
        self.entries.append(entry)
        if number == 1:  # one round's ticks show the policy; the files are committed
            end = max((record.ended for record in run.records), default=run.started)
            entry["ticks"] = trimmed(run_loop(fetch_ticks(target.base_url)), run.started, end)
        rate = lookup(found, "output_tokens_per_second") or 0
        first = lookup(found, "time_to_first_token_seconds.p50") or 0
        print(
            f"round {number} {workload:24} {name:12} {rate:9.0f} tokens/s  TTFT p50 {1000 * first:.1f} ms",
            flush=True,
        )

    def save(self) -> None:
        self.result |= {
            "ready_seconds": self.ready_seconds,
            "server_versions": self.server_versions,
            "rounds": self.entries,
        }
        results.write(self.path, self.result)

    def start(self, stack: ExitStack, logs: Path) -> tuple[list[RunningServer], dict[str, Target]]:
        """Start and warm every server. Each sizes its cache by what memory is free, so the next one is
        started when the one before is healthy, and loads while that one is warmed; or, with --together, all
        at once, for servers whose share of the memory does not depend on the others'."""
        servers: list[RunningServer] = []
        targets: dict[str, Target] = {}
        together = self.options.together
        for spec in self.config.servers:
            server = stack.enter_context(
                RunningServer(spec, logs / f"{spec.name}.log", attach=spec.name in self.options.attach)
            )
            if servers and not together:
                targets[servers[-1].spec.name] = self.warm(servers[-1])
            servers.append(server)
            if not together:
                self.wait_ready(server)
        for server in servers:
            if server.spec.name not in targets:
                targets[server.spec.name] = self.warm(server)
        return servers, targets

    def wait_ready(self, server: RunningServer) -> None:
        """Wait, and note how long it took, unless the server was started before."""
        seconds = run_loop(server.wait_ready())
        if not server.attach:
            self.ready_seconds[server.spec.name] = seconds

    def resident(self, logs: Path) -> None:
        """All servers up; each round asks them in turn, and every round another one begins."""
        with ExitStack() as stack:
            servers, targets = self.start(stack, logs)
            names = list(targets)
            skipped: set[str] = set()
            for number in range(1, self.options.rounds + 1):
                for position, workload in enumerate(self.options.workloads):
                    if self.cost.get(workload, 0.0) > self.left():
                        if workload not in skipped:
                            print(f"no time left for {workload} from round {number} on", flush=True)
                        skipped.add(workload)
                        continue
                    before, turn = clock(), (number + position) % len(names)
                    for order, name in enumerate(names[turn:] + names[:turn]):
                        self.one(name, targets[name], workload, number, order)
                    for server in servers:
                        server.check()
                    self.cost[workload] = clock() - before
                    self.save()

    def sequential(self, logs: Path) -> None:
        """For cards that hold one server at a time: all rounds of one, then all of the next, same seeds."""
        for spec in self.config.servers:
            with RunningServer(spec, logs / f"{spec.name}.log") as server:
                target = self.warm(server)
                for number in range(1, self.options.rounds + 1):
                    for workload in self.options.workloads:
                        if self.left() > 0:
                            self.one(spec.name, target, workload, number, 0)
                        server.check()
                self.save()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("config", type=Path, help="TOML file with the servers")
    made.add_argument(
        "--workloads", nargs="+", default=["batch1", "mixed30", "offline256", "poisson:rate=8", "prefix"]
    )
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seed", type=int, default=1, help="round N uses seed + N; change per sitting")
    made.add_argument("--label", default="unlabelled")
    made.add_argument("--baseline", help="server that ratios are formed to (default: the last in the file)")
    made.add_argument("--only", nargs="+", metavar="NAME", help="leave out the other servers of the file")
    made.add_argument(
        "--attach", nargs="+", metavar="NAME", default=[], help="servers whose command has been run already"
    )
    made.add_argument("--sequential", action="store_true", help="one server on the card at a time")
    made.add_argument(
        "--together", action="store_true", help="start all servers at once, not each when the last is healthy"
    )
    made.add_argument("--processes", type=int, default=1, help="client processes")
    made.add_argument("--client-cpu-limit", type=float, default=0.7)
    made.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="begin no round that would end later"
    )
    made.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="for ${NAME} in the file"
    )
    made.add_argument(
        "--logs", type=Path, default=Path("benchmark-logs"), help="folder for the servers' output"
    )
    made.add_argument("--out", type=Path, help="result file")
    made.add_argument("--figures", type=Path, help="folder for figures of this result")
    return made


def main() -> int:
    options = parser().parse_args()
    exit_on_sigterm()
    try:
        config = load_config(options.config, variables_from(options.set))
        if options.only:
            kept: tuple[ServerSpec, ...] = tuple(s for s in config.servers if s.name in options.only)
            config = Config(kept, config.warm_up, config.largest_id, config.shape, config.card)
        names = [server.name for server in config.servers]
        if (options.baseline or names[-1]) not in names:
            raise ConfigError(f"--baseline {options.baseline!r} is none of {', '.join(names)}")
        for workload in options.workloads:
            parse(workload)
    except (ValueError, OSError, IndexError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = options.out or results.result_path("compare", options.label)
    comparison = Comparison(config, options, path)
    failed = None
    try:
        comparison.sequential(options.logs) if options.sequential else comparison.resident(options.logs)
    except (ServerError, RuntimeError, OSError, ProtocolError) as error:
        failed = str(error)
    if comparison.entries:
        comparison.save()
        print("\n" + table(comparison.entries, names, comparison.result["baseline"]) + f"\n\n{path.name}")
        if options.figures is not None:
            from benchmarks.figures import draw_comparison

            draw_comparison(comparison.result, options.figures)
    if failed:
        print(f"error: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
