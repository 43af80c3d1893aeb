"""Writes benchmarks/REPORT.md, with its figures, from the result files; what notes.md says goes in as it is.

python benchmarks/report.py
"""

import argparse
import statistics
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.compare import METRICS, complete_rounds, table
from benchmarks.metrics import lookup
from benchmarks.report_engine import SECTIONS, attention_files, attention_section, image, markdown_table

TARGETS = results.ROOT / "targets.toml"
TARGETS_BASELINE = "vllm"  # whom targets with over_baseline mean
NOTES = results.ROOT / "notes.md"


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


def targets_of(result: dict[str, Any], targets: list[dict[str, Any]]) -> list[list[str]]:
    """Rows (workload, metric, target, then what each server beside the baseline reached, and whether that meets
    it) for the targets that the comparison speaks to."""
    names, baseline = [server["name"] for server in result["servers"]], result["baseline"]
    judged = [name for name in names if name != baseline]
    titles = {metric.path: (metric.title, metric.scale) for metric in METRICS}
    rows: list[list[str]] = []
    for workload, found in complete_rounds(result["rounds"], names).items():
        for target in targets:
            path = target["metric"]
            if not found or not workload.startswith(target["workload"]):
                continue
            if target.get("model", "") not in result["label"]:
                continue
            relative = target.get("over_baseline", False)
            if relative and baseline != TARGETS_BASELINE:
                continue
            most = "at_most" in target
            limit = target["at_most"] if most else target["at_least"]
            title, scale = titles.get(path, (path, 1.0))
            scale, unit = (1.0, f" x {baseline}") if relative else (scale, "")
            row = [workload, title, f"{'at most' if most else 'at least'} {scale * limit:.3g}{unit}"]
            for name in judged:
                pairs = [(lookup(one[name], path), lookup(one[baseline], path)) for one in found]
                values = [ours / theirs if relative else ours for ours, theirs in pairs if ours and theirs]
                if not values:
                    row += ["-", "-"]
                    continue
                reached = statistics.median(values)
                met = reached <= limit if most else reached >= limit
                row += [f"{scale * reached:.3g}{unit}", "met" if met else "missed"]
            if any(cell != "-" for cell in row[3:]):
                rows.append(row)
    return rows


def _ticks(result: dict[str, Any], figures: Path) -> list[str]:
    """The tick timelines of the workloads that mix prompts with decoding."""
    from benchmarks.engine_figures import draw_ticks

    lines: list[str] = []
    seen: set[str] = set()
    for entry in result["rounds"]:
        workload, name = entry["workload"], f"{entry['server']}-{entry['workload']}"
        if not entry.get("ticks") or name in seen or not workload.startswith(("poisson", "mixed30")):
            continue
        seen.add(name)
        ticks = entry["ticks"]
        mixed, plain = ticks["mixed_seconds"], ticks["decode_only_seconds"]
        shown = [
            f"{word} p50 {1e3 * one['p50']:.2f}, p99 {1e3 * one['p99']:.2f}, max {1e3 * one['max']:.2f} ms"
            for word, one in (("decoding only", plain), ("with prompts", mixed))
            if one
        ]
        lines += [
            f"Ticks of {entry['server']}, {workload} ({ticks['ticks']} of them): {'; '.join(shown)}.",
            "",
        ]
        lines += image(draw_ticks(result["label"], name, ticks, figures), figures)
    return lines


def comparison_section(result: dict[str, Any], figures: Path | None) -> list[str]:
    names = [server["name"] for server in result["servers"]]
    versions = ", ".join(f"{name} {version}" for name, version in result.get("server_versions", {}).items())
    lines = [f"### {result['label']}", "", hardware(result), ""]
    ready = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["ready_seconds"].items()) or "-"
    resident = result["settings"]["resident"]
    lines += [
        f"Servers on the card: {resident}; sittings: {result['sittings']}; healthy after {ready}; {versions}."
    ]
    lines += ["", table(result["rounds"], names, result["baseline"]), ""]
    targets: list[dict[str, Any]] = tomllib.loads(TARGETS.read_text(encoding="utf-8"))["targets"]
    if rows := targets_of(result, targets):
        judged = [name for name in names if name != result["baseline"]]
        head = ["reached"] if len(judged) == 1 else judged
        columns = [column for name in head for column in (name, "")]
        lines += markdown_table(["workload", "metric", "target", *columns], rows)
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
            lines += image(path, figures)
        lines += _ticks(result, figures)
    return lines


def http_section(offline: list[dict[str, Any]], comparisons: list[dict[str, Any]]) -> list[str]:
    """Throughput without HTTP beside the same workload over HTTP, where both were measured: of the seeds that both
    had, if there are any, since a seed's requests are its own."""
    rows: list[list[str]] = []
    for alone in {(r["label"], r["workload"]): r for r in offline}.values():
        for result in comparisons:
            name = result["servers"][0]["name"]
            rates = [
                (entry.get("seed"), lookup(entry["aggregates"], "output_tokens_per_second"))
                for entry in result["rounds"]
                if entry["server"] == name and entry["workload"] == alone["workload"]
            ]
            known = [(seed, rate) for seed, rate in rates if rate]
            if result["label"] != alone["label"] or not known:
                continue
            of_seed = {one["seed"]: one["output_tokens_per_second"] for one in alone.get("rounds", [])}
            shared = [(of_seed[seed], rate) for seed, rate in known if seed in of_seed]
            if shared:
                without, over = (statistics.median(side) for side in zip(*shared, strict=True))
            else:
                without = alone["output_tokens_per_second"]["p50"]
                over = statistics.median(rate for _, rate in known)
            rows.append(
                [
                    alone["label"],
                    alone["workload"],
                    f"{without:,.0f}",
                    f"{over:,.0f}",
                    f"{over / without:.1%}",
                ]
            )
    if not rows:
        return []
    head = ["model", "workload", "without HTTP, tokens/s", "over HTTP", "ratio"]
    heading = "Medians over the seeds that both had; over all where they had none in common."
    return ["## Offline beside HTTP", "", heading, "", *markdown_table(head, rows)]


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


def missing(found: list[dict[str, Any]], scripts: Mapping[str, str]) -> list[str]:
    """One line for what no result speaks of."""
    known = {result["kind"] for result in found}
    absent = [f"{kind} ({script})" for kind, script in scripts.items() if kind not in known]
    return [f"Not measured: {', '.join(absent)}.", ""] if absent else []


def report(found: list[dict[str, Any]], figures: Path | None, notes: str = "") -> str:
    """The whole page; of single runs, starts and the like the newest of each label. ``notes`` is Markdown."""
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
        for result in reversed(comparisons):  # the newest first
            lines += comparison_section(result, figures)
    if notes:
        lines += ["## What is lost, and where", "", notes.strip(), ""]
    lines += http_section([r for r in found if r["kind"] == "offline"], comparisons)
    for kind, title, section, _ in SECTIONS:
        newest = {r["label"]: r for r in found if r["kind"] == kind}
        if newest:
            lines += [f"## {title}", ""]
        for result in newest.values():
            lines += [f"### {result['label']}", "", hardware(result), "", *section(result, figures)]
            lines += _code(["python " + " ".join(result["command"])])
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
    scripts = {"compare": "compare.py", "startup": "startup.py", "offline": "offline.py", "cpu": "cpu.py"}
    lines += missing(found, scripts | {kind: script for kind, _, _, script in SECTIONS})
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
    notes = NOTES.read_text(encoding="utf-8") if NOTES.exists() else ""
    page = report(results.load_all(options.results), figures, notes)
    for number, (name, data) in enumerate(attention_files(options.results)):
        page += "" if number else "\n## Attention and linears, kernel by kernel\n"
        page += "\n" + "\n".join(attention_section(name, data)).rstrip() + "\n"
    options.out.write_text(page, encoding="utf-8")
    print(options.out.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
