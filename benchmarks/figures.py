"""Figures of a comparison, as small SVG files that stay equal when drawn again."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.metrics import HISTOGRAM_EDGES, lookup

# Fixed ids and text as text: a figure's diff shows what changed, and its file stays small.
STYLE: Any = {"svg.hashsalt": "benchmarks", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}


def figure_file(folder: Path, label: str, what: str) -> Path:
    """The file of a figure; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{label}-{what}").strip("-") + ".svg")


def draw(path: Path, columns: int, fill: Callable[[Any], None], width: float = 4.6) -> Path:
    """Let ``fill`` draw into ``columns`` axes and save them; ``width`` in inches each."""
    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, columns, figsize=(width * columns, 3.2), squeeze=False, layout="constrained"
        )
        fill(axes[0])
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    return path


def _latency(axes: Any, by_server: dict[str, list[dict[str, Any]]]) -> None:
    """Share of requests above a TTFT, share of gaps above an ITL: the tail is what one looks for."""
    for name, entries in by_server.items():
        firsts = np.sort([1000 * value for entry in entries for value in entry["first_token_seconds"]])
        if firsts.size:
            axes[0].plot(firsts, 1 - np.arange(firsts.size) / firsts.size, label=name)
        counts = np.sum([entry["aggregates"]["inter_token_histogram"] for entry in entries], axis=0)
        if counts.sum():
            above = 1 - np.cumsum(counts) / counts.sum()
            shown = (counts > 0) & (above > 0)
            if shown.any():
                axes[1].plot(1000 * HISTOGRAM_EDGES[1:][shown], above[shown], label=name)
    for axis, title in zip(axes, ("time to first token, ms", "gap between chunks, ms"), strict=True):
        if not axis.lines:  # nothing to put on a logarithmic scale
            continue
        axis.set(xlabel=title, ylabel="share above", xscale="log", yscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.legend()


def _timeline(axes: Any, by_server: dict[str, list[dict[str, Any]]]) -> None:
    for axis, (name, entries) in zip(axes, by_server.items(), strict=True):
        line = entries[-1]["aggregates"]["timeline"]
        width = line["slice_seconds"]
        at = width * np.arange(len(line["output_tokens"]))
        axis.step(at, np.array(line["output_tokens"]) / width, where="post", label="output")
        prompts = np.array(line["prompt_tokens"]) / width
        axis.vlines(at[prompts > 0], 0, prompts[prompts > 0], label="prompt", color="C1", alpha=0.6)
        axis.set(title=name, xlabel="seconds", ylabel="tokens/s", yscale="symlog", ylim=0)
        axis.legend()


def _concurrency(axis: Any, points: dict[str, list[tuple[int, float]]]) -> None:
    for name, values in points.items():
        levels = sorted({level for level, _ in values})
        rates = [float(np.median([rate for level, rate in values if level == wanted])) for wanted in levels]
        axis.plot(levels, rates, marker="o", label=name)
    axis.set(xlabel="requests in flight", ylabel="output tokens/s", xscale="log", ylim=0)
    every = sorted({level for values in points.values() for level, _ in values})
    axis.set_xticks(every, labels=[str(level) for level in every])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.legend()


def draw_comparison(result: dict[str, Any], folder: Path) -> list[Path]:
    """Every figure that a comparison's rounds allow; returns the files."""
    drawn: list[Path] = []
    workloads: dict[str, dict[str, list[dict[str, Any]]]] = {}
    place = {server["name"]: i for i, server in enumerate(result["servers"])}  # one colour each everywhere
    for entry in sorted(result["rounds"], key=lambda entry: place[entry["server"]]):
        if entry["aggregates"].get("completed_requests"):
            workloads.setdefault(entry["workload"], {}).setdefault(entry["server"], []).append(entry)
    points: dict[str, list[tuple[int, float]]] = {}
    for workload, by_server in workloads.items():
        path = figure_file(folder, result["label"], f"{workload}-latency")
        drawn.append(draw(path, 2, lambda axes, found=by_server: _latency(axes, found)))
        path = figure_file(folder, result["label"], f"{workload}-timeline")
        drawn.append(draw(path, len(by_server), lambda axes, found=by_server: _timeline(axes, found)))
        for name, entries in (
            by_server.items() if "concurrency=" in workload or workload == "offline256" else ()
        ):
            for entry in entries:
                peak = lookup(entry["aggregates"], "peak_client_concurrency") or 0
                rate = lookup(entry["aggregates"], "output_tokens_per_second") or 0
                points.setdefault(name, []).append((int(peak), rate))
    if any(len({level for level, _ in values}) > 1 for values in points.values()):
        path = figure_file(folder, result["label"], "throughput-by-concurrency")
        drawn.append(draw(path, 1, lambda axes: _concurrency(axes[0], points)))
    return drawn
