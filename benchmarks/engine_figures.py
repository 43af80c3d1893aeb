"""Figures of the in-process measurements: step breakdown, roofline, timelines, studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.device_trace import CLASSES
from benchmarks.figures import draw, figure_file

_COLOURS = {name: f"C{index}" for index, name in enumerate(CLASSES)} | {"gaps": "0.8"}
_SPAN_LANES = ("admit", "plan", "launch", "commit", "wait")


def _bars(axis: Any, profiles: Sequence[dict[str, Any]]) -> None:
    """One stacked bar for each batch size, as shares: steps differ tenfold in length."""
    names = [f"{one['rows']} rows\n{one['traced_step_microseconds'] / 1e3:.2f} ms" for one in profiles]
    bottom = np.zeros(len(profiles))
    for kind in CLASSES:
        part = np.array([one["microseconds"][kind] / one["traced_step_microseconds"] for one in profiles])
        if not part.any():
            continue
        axis.bar(names, 100 * part, 0.6, bottom=100 * bottom, label=kind, color=_COLOURS[kind])
        bottom += part
    axis.set(ylabel="share of the recorded step, %", ylim=(0, 100))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _roofline(axis: Any, result: dict[str, Any]) -> None:
    card, steps = result["card"], result["ladder"]
    intensity = np.array([one["flops"] / one["bytes"] for one in steps])
    rate = np.array([one["flops_per_second"] for one in steps])
    span = np.geomspace(intensity.min() / 2, max(intensity.max() * 4, card["flops"] / card["bandwidth"] * 2))
    axis.plot(span, np.minimum(span * card["bandwidth"], card["flops"]) / 1e12, color="0.3", label="the card")
    axis.plot(intensity, rate / 1e12, "o", label="decode steps")
    for one, x, y in zip(steps, intensity, rate / 1e12, strict=True):
        axis.annotate(str(one["rows"]), (x, y), textcoords="offset points", xytext=(3, -10), fontsize=7)
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="10^12 operations a second")
    axis.legend()


def _of_limit(axis: Any, steps: Sequence[dict[str, Any]]) -> None:
    rows = [one["rows"] for one in steps]
    axis.plot(rows, [one["step_microseconds"] / 1e3 for one in steps], marker="o", label="measured")
    axis.plot(
        rows, [one["floor_microseconds"] / 1e3 for one in steps], marker="o", label="floor", color="0.3"
    )
    axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="decode step, ms")
    axis.set_xticks(rows, labels=[str(row) for row in rows])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.legend()


def draw_step(result: dict[str, Any], folder: Path) -> list[Path]:
    """Where a step's time goes, and how far it is from the card's limits."""
    drawn: list[Path] = []
    label = result["label"]
    if result["profiles"]:
        path = figure_file(folder, label, "step-breakdown")
        drawn.append(draw(path, 1, lambda axes: _bars(axes[0], result["profiles"])))
    if result["card"] and result["ladder"]:

        def fill(axes: Any) -> None:
            _roofline(axes[0], result)
            _of_limit(axes[1], result["ladder"])

        drawn.append(draw(figure_file(folder, label, "roofline"), 2, fill))
    return drawn


def _timeline(axis: Any, line: dict[str, Any]) -> None:
    """Kernels on one lane, each host span on its own, microseconds."""
    kinds = {name: index for index, name in enumerate(reversed(_SPAN_LANES))}
    gpu = len(kinds)
    for kind in CLASSES:
        pieces = [(began, ended - began) for name, began, ended in line["kernels"] if name == kind]
        if pieces:
            axis.broken_barh(pieces, (gpu - 0.4, 0.8), color=_COLOURS[kind], label=kind)
    for name, lane in kinds.items():
        pieces = [(began, ended - began) for span, began, ended in line["spans"] if span == name]
        axis.broken_barh(pieces, (lane - 0.4, 0.8), color="0.45")
    axis.set_yticks([*kinds.values(), gpu], labels=[*kinds, "device"])
    axis.set(xlabel="µs", xlim=(0, line.get("microseconds", 1)))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)


def draw_idle(result: dict[str, Any], folder: Path) -> list[Path]:
    """A few ticks of every workload."""
    drawn: list[Path] = []
    for one in result["workloads"]:
        if not one["timeline"]["kernels"]:
            continue
        path = figure_file(folder, result["label"], f"{one['workload']}-device-timeline")
        line = one["timeline"]
        drawn.append(draw(path, 1, lambda axes, line=line: _timeline(axes[0], line), width=8.0))
    return drawn


def _tick_bars(axes: Any, ticks: dict[str, Any]) -> None:
    started, finished = np.array(ticks["started_ms"]), np.array(ticks["finished_ms"])
    axes[0].step(started, ticks["decode_tokens"], where="post", label="decode tokens")
    prefill = np.array(ticks["prefill_tokens"])
    axes[0].vlines(
        started[prefill > 0], 0, prefill[prefill > 0], color="C1", alpha=0.7, label="prompt tokens"
    )
    axes[0].set(xlabel="ms", ylabel="tokens in the tick", yscale="symlog", ylim=0)
    axes[0].legend()
    axes[1].plot(started, finished - started, ".", markersize=3)
    axes[1].plot(started[prefill > 0], (finished - started)[prefill > 0], ".", markersize=4, color="C1")
    axes[1].set(xlabel="ms", ylabel="tick from launch to commit, ms", ylim=0)


def draw_ticks(label: str, workload: str, ticks: dict[str, Any], folder: Path) -> Path:
    """Decode and prompt tokens of each tick, and how long each took."""
    path = figure_file(folder, label, f"{workload}-ticks")
    return draw(path, 2, lambda axes: _tick_bars(axes, ticks))


def _budgets(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["budget"] for row in rows))
    panels = (("time_to_first_token_seconds", "TTFT p99, ms"), ("inter_token_seconds", "ITL p99, ms"))
    for axis, (metric, title) in zip(axes, panels, strict=True):
        for rate in dict.fromkeys(row["rate"] for row in rows):
            found = {row["budget"]: row for row in rows if row["rate"] == rate and metric in row}
            shown = [name for name in names if name in found]
            axis.plot(shown, [1e3 * found[name][metric]["p99"] for name in shown], "o-", label=f"{rate:g}/s")
        axis.set(ylabel=title, xlabel="tokens a tick")
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.tick_params(axis="x", rotation=30)
        axis.legend()


def _compared(axes: Any, rows: Sequence[dict[str, Any]], name: Any) -> None:
    names = [name(row) for row in rows]
    axes[0].bar(names, [row.get("output_tokens_per_second", 0) for row in rows])
    axes[0].set(ylabel="output tokens/s")
    first = [row.get("time_to_first_token_seconds") or {"p50": 0, "p99": 0} for row in rows]
    axes[1].bar(names, [1e3 * one["p99"] for one in first], label="p99", alpha=0.5)
    axes[1].bar(names, [1e3 * one["p50"] for one in first], label="p50")
    axes[1].set(ylabel="TTFT, ms")
    axes[1].legend()
    for axis in axes:
        axis.tick_params(axis="x", rotation=30)


_NAMES: dict[str, Any] = {
    "offline": lambda row: row["budget"],
    "admission": lambda row: f"{row['admission']}, {row['pages']} pages",
    "offload": lambda row: row["host_memory"],
}


def draw_studies(result: dict[str, Any], folder: Path) -> dict[str, Path]:
    """One figure for each study that has one."""
    drawn: dict[str, Path] = {}
    for study, rows in result["studies"].items():
        path = figure_file(folder, result["label"], f"study-{study}")
        if study == "budgets" and rows:
            drawn[study] = draw(path, 2, lambda axes, rows=rows: _budgets(axes, rows))
        elif study in _NAMES and rows:
            name = _NAMES[study]
            drawn[study] = draw(path, 2, lambda axes, rows=rows, name=name: _compared(axes, rows, name))
    return drawn
