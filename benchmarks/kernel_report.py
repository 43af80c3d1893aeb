"""A report of kernel timings: printed line by line as they come, and kept for a JSON file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from helios.kernels.measure import time_in_graph

DEVICE = torch.device("cuda")


@dataclass
class Report:
    """Results as they come: printed, and kept for the JSON file."""

    deadline: float
    records: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0

    def late(self) -> bool:
        """Whether time is up; counts what is skipped."""
        late = time.monotonic() > self.deadline
        self.skipped += late
        return late

    def measure(
        self, label: str, step: Callable[[], None], calls: int, traffic: float, **facts: Any
    ) -> float | None:
        """Time ``step`` (``calls`` calls of ``traffic`` bytes each); print and keep one line."""
        if self.late():
            return None
        try:
            seconds = time_in_graph(step, DEVICE, replays=5) / calls
        except Exception as error:
            print(f"    {label:<46} failed: {type(error).__name__}: {first_line(error)}")
            self.records.append({**facts, "label": label, "error": repr(error)})
            return None
        self.records.append({**facts, "label": label, "us": seconds * 1e6, "tb_s": traffic / seconds / 1e12})
        note = f"  error {facts['error_vs_torch']:.4f}" if "error_vs_torch" in facts else ""
        print(
            f"    {label:<46} {seconds * 1e6:8.2f} us  {traffic / seconds / 1e12:5.2f} TB/s{note}", flush=True
        )
        return seconds


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:90]
