"""Writes benchmarks/REPORT.md, with its figures, from the result files. Nothing in it is written by hand.

python benchmarks/report.py
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.compare import METRICS, table
from benchmarks.metrics import lookup


def hardware(result: dict[str, Any]) -> str:
    """One line: card, driver, processor, versions, commit."""
    around = result["environment"]
    cards = [f"{card['name']} ({card['memory']}, driver {card['driver']})" for card in around["cards"]]
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    commit = f"commit {around['commit']}" + (" with local changes" if around["uncommitted_changes"] else "")
    machine = "; ".join(cards) or "no GPU"
    host = f"{around['processor']}, {around['cores']} cores"
    return f"{result['created'][:10]}: {machine}; {host}; {versions}; {commit}."


def _code(lines: list[str]) -> list[str]:
    return ["```sh", *lines, "```", ""]


def merged(comparisons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Comparisons of one label, servers and card become one: several short sittings give more rounds.

    Servers, cards and commit have to agree too; what differs stays a comparison of its own.
    """
    found: dict[str, dict[str, Any]] = {}
    for sitting, result in enumerate(comparisons):
        around = result["environment"]
        key = repr((result["label"], result["servers"], around["cards"], around["commit"]))
        rounds = [{**entry, "sitting": sitting} for entry in result["rounds"]]
        if key in found:
            found[key]["rounds"] += rounds
            found[key]["sittings"] += 1
            found[key]["commands"].append(result["command"])
        else:
            found[key] = {**result, "rounds": rounds, "sittings": 1, "commands": [result["command"]]}
    return list(found.values())


def comparison_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    names = [server["name"] for server in result["servers"]]
    versions = ", ".join(f"{name} {version}" for name, version in result.get("server_versions", {}).items())
    lines = [f"### {result['label']}", "", hardware(result), ""]
    ready = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["ready_seconds"].items())
    resident = result["settings"]["resident"]
    lines += [
        f"Servers on the card: {resident}; sittings: {result['sittings']}; healthy after {ready}; {versions}."
    ]
    lines += ["", table(result["rounds"], names, result["baseline"]), ""]
    lines += ["Commands:", ""]
    commands = [
        f"# {server['name']}\n{server['command']}" for server in result["servers"] if server["command"]
    ]
    lines += _code([*commands, *("python " + " ".join(command) for command in result["commands"])])
    doubts = sorted({f"{e['server']}, {e['workload']}: {w}" for e in result["rounds"] for w in e["warnings"]})
    lines += [f"- warning: {doubt}" for doubt in doubts] + ([""] if doubts else [])
    if figures is not None:
        from benchmarks.figures import draw_comparison  # needs matplotlib, which --no-figures does without

        for path in draw_comparison(result, figures):
            lines += [f"![{path.stem}]({figures.parent.name}/{figures.name}/{path.name})", ""]
    return lines


def run_section(result: dict[str, Any]) -> list[str]:
    lines = [
        f"### {result['label']}: {result['workload']}",
        "",
        hardware(result),
        "",
        "| metric | value |",
        "|---|---|",
    ]
    for metric in METRICS:
        value = lookup(result["aggregates"], metric.path)
        if value is not None:
            lines.append(f"| {metric.title} | {metric.scale * value:.4g} |")
    for name in ("requests_per_second", "mean_client_concurrency", "drain_fraction", "completion_ratio",
                 "max_token_hit_rate", "cache_hit_rate", "goodput.requests_per_second"):  # fmt: skip
        value = lookup(result["aggregates"], name)
        if value is not None:
            lines.append(f"| {name} | {value:.4g} |")
    doubts = [f"- warning: {doubt}" for doubt in result["warnings"]]
    return [*lines, "", *doubts, *([""] if doubts else []), *_code(["python " + " ".join(result["command"])])]


def startup_section(result: dict[str, Any]) -> list[str]:
    names = list(result["starts"])
    lines = [f"### {result['label']}", "", hardware(result), "", f"| seconds | {' | '.join(names)} |"]
    lines.append("|---" * (1 + len(names)) + "|")
    for key in (key for key in result["starts"][names[0]][0] if key != "stages"):
        cells = [f"{statistics.median(start[key] for start in result['starts'][name]):.3g}" for name in names]
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return [*lines, "", *_code(["python " + " ".join(result["command"])])]


def offline_section(result: dict[str, Any]) -> list[str]:
    rate = result["output_tokens_per_second"]
    reached = [one["of_limit"] for one in result["rounds"] if "of_limit" in one]
    share = f", {statistics.median(reached):.0%} of the card's limit" if reached else ""
    spread = (
        f"{rate['p50']:,.0f} output tokens/s ({rate['min']:,.0f}-{rate['max']:,.0f}, {rate['count']} rounds)"
    )
    command = "python " + " ".join(result["command"])
    heading = f"### {result['label']}: {result['workload']}"
    return [heading, "", hardware(result), "", f"{spread}{share}.", "", *_code([command])]


def cpu_section(result: dict[str, Any]) -> list[str]:
    lines = [f"### {result['label']}", "", hardware(result), ""]
    lines += ["| rows | matrix products, ms | decode step, ms | step / products |", "|---|---|---|---|"]
    for one in result["steps"]:
        step = (
            f"{1000 * one['step_seconds']:.3g} | {one['step_over_products']:.2f}"
            if "step_seconds" in one
            else "- | -"
        )
        lines.append(f"| {one['rows']} | {1000 * one['matrix_product_seconds']:.3g} | {step} |")
    return [*lines, "", *_code(["python " + " ".join(result["command"])])]


def report(found: list[dict[str, Any]], figures: Path | None) -> str:
    """The whole page; of single runs, starts and the like the newest of each label."""
    lines = [
        "# Benchmark report",
        "",
        "Generated by benchmarks/report.py from benchmarks/results; do not edit.",
    ]
    lines += ["The protocol and the meaning of every figure: [README.md](README.md).", ""]
    comparisons = merged([result for result in found if result["kind"] == "compare"])
    if comparisons:
        lines += ["## Side by side", ""]
        lines += ["Medians (smallest-largest) over rounds; ratios are formed within each round.", ""]
        for result in comparisons:
            lines += comparison_section(result, figures)
    kinds = (("startup", "Start", startup_section), ("run", "Single runs", run_section),
             ("offline", "Engine without HTTP", offline_section), ("cpu", "CPU", cpu_section))  # fmt: skip
    for kind, title, section in kinds:
        newest = {(r["label"], r.get("workload")): r for r in found if r["kind"] == kind}
        if newest:
            lines += [f"## {title}", ""]
            for result in newest.values():
                lines += section(result)
    if len(found) == 0:
        lines += ["No results yet.", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--out", type=Path, default=results.ROOT / "REPORT.md")
    parser.add_argument("--no-figures", action="store_true")
    options = parser.parse_args()
    figures = None if options.no_figures else options.results / "figures"
    options.out.write_text(report(results.load_all(options.results), figures), encoding="utf-8")
    print(options.out.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
