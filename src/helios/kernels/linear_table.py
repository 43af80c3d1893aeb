"""Picks the kernel of a few-row linear by measurement: cuBLAS or a variant of :mod:`helios.kernels.linear`.

Each alone first, then together: a kernel of ours that starts while its predecessor ends gains nothing by it when it
follows itself, and one of cuBLAS's between two of ours takes it from both.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from helios.kernels.common import available, sm90_kernels
from helios.kernels.linear import (
    MAX_GEMV_ROWS,
    TORCH,
    LinearWorkspace,
    Variant,
    gemv,
    small_linear,
    split,
    stream,
)
from helios.kernels.measure import relative_error, time_in_graph

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
ENOUGH_BYTES = 200 << 20  # of weights read in turn, so that none is found in the second-level cache
FASTEST = 4  # variants of a linear that are tried among the others
CHAIN_MARGIN = 0.004  # what a whole step must win by


def candidates(rows: int, sm90: bool = False) -> list[Variant]:
    """What :meth:`LinearTable.tune` tries at ``rows``. Few: each is compiled once on a new machine."""
    found: list[Variant] = []
    if rows <= MAX_GEMV_ROWS:
        found += [gemv(2, 4), gemv(4, 4), gemv(4, 2), gemv(8, 2)]
    if 1 < rows <= 16:
        if sm90:
            found += [stream(6), stream(10), stream(6, half=True)]
        else:
            found += [split(32, 256, splits, 4, 3) for splits in (1, 2, 4, 8)]
    elif rows == 32:
        if sm90:
            found += [stream(6, 32)]
        found += [split(32, 256, splits, 4, 3, 32) for splits in (1, 2, 4)]
        found += [split(64, 128, splits, 4, 4, 32) for splits in (1, 4)]
    elif rows == 64:
        found += [split(64, 128, splits, 4, 4, 64) for splits in (1, 2, 4)]
        found += [split(128, 64, 2, 8, 4, 64)]
    elif rows == 128:
        found += [split(64, 128, splits, 8, 3, 128) for splits in (1, 2, 4)]
        found += [split(128, 64, 2, 8, 4, 128)]
    return found


@dataclass(slots=True)
class Measurement:
    """Seconds a call of each variant took for one shape and row bucket, and the one chosen."""

    name: str
    n: int
    k: int
    rows: int
    seconds: dict[Variant, float] = field(default_factory=dict[Variant, float])
    choice: Variant = TORCH

    @property
    def ranking(self) -> list[Variant]:
        """The variants, the fastest first."""
        return sorted(self.seconds, key=lambda variant: self.seconds[variant])

    def fastest(self, kind: str) -> Variant:
        """The fastest variant of a kind, or the one chosen where there is none."""
        return next((variant for variant in self.ranking if variant.kind == kind), self.choice)

    def __str__(self) -> str:
        best, torch_time = self.seconds[self.choice], self.seconds[TORCH]
        rate = self.n * self.k * 2 / best / 1e12
        return (
            f"{self.name:<12} {self.k:>6} -> {self.n:<7} rows {self.rows:<3} torch {torch_time * 1e6:7.1f} us   "
            f"{self.choice!s:<26} {best * 1e6:7.1f} us  {rate:5.2f} TB/s  x{torch_time / best:.2f}"
        )


def _choose(choices: Sequence[tuple[Measurement, Variant]]) -> None:
    for one, variant in choices:
        one.choice = variant


class LinearTable:
    """Picks the fastest variant for each weight shape and row bucket; torch wherever nothing was measured.

    One table serves one stream: its workspace is shared by all calls.
    """

    def __init__(self, device: torch.device, *, margin: float = 0.03) -> None:
        self.device = device
        self.measurements: dict[tuple[int, int, int], Measurement] = {}
        self.workspace = LinearWorkspace(device)
        self._margin = margin  # what a variant must win by: cuBLAS is the tried one

    def choose(self, n: int, k: int, rows: int) -> Variant:
        """The variant for ``rows`` rows through a weight ``[n, k]``."""
        bucket = next((bucket for bucket in ROW_BUCKETS if bucket >= rows), None)
        found = None if bucket is None else self.measurements.get((n, k, bucket))
        return TORCH if found is None else found.choice

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """:func:`small_linear` by the chosen variant; the choice depends on shapes only."""
        variant = self.choose(weight.shape[0], weight.shape[1], x.shape[0])
        return small_linear(
            x, weight, bias, variant=variant, residual=residual, gated=gated, workspace=self.workspace
        )

    def tune(
        self,
        weights: Mapping[str, Sequence[torch.Tensor]],
        *,
        rows: Sequence[int] = ROW_BUCKETS,
        budget_s: float = 3.0,
        variants: Callable[[int], Sequence[Variant]] | None = None,
    ) -> None:
        """Measure every weight in ``weights`` (name -> the same projection of several layers) at ``rows``.

        The layers' weights are used in turn, so that they come from memory and not from the cache, as in a
        decode step. Stops after ``budget_s`` of measuring; what was not reached stays with torch. Kernels are
        compiled before, side by side, since on a new machine that takes longer than all measurements.
        """
        if self.device.type != "cuda" or not available(self.device) or budget_s <= 0:
            return
        if variants is None:
            variants = partial(candidates, sm90=sm90_kernels(self.device))
        first = {name: layers[0] for name, layers in weights.items()}
        broken = self._compile(
            [(weight, count, v) for weight in first.values() for count in rows for v in variants(count)]
        )
        deadline = time.monotonic() + budget_s
        for count in rows:
            tried = [variant for variant in variants(count) if variant not in broken]
            for name, layers in weights.items():
                if time.monotonic() > deadline:
                    return
                enough = -(-ENOUGH_BYTES // layers[0].nbytes)
                self._measure(name, layers[:enough], count, tried, deadline)

    def refine(
        self, names: Collection[str], chains: Mapping[int, Callable[[], object]], *, budget_s: float = 2.0
    ) -> None:
        """Choose again among what was measured, by the time of whole steps.

        ``chains`` (rows -> some layers of a step of so many rows) hold the linears ``names``. Tried are the choices
        there are; for each kind of kernel, that kind in all linears, since one of another kind between them may
        hide what it gains; and from the best of these on, one linear after the other, its fastest variants.
        """
        deadline = time.monotonic() + budget_s
        for rows, chain in chains.items():
            found = [one for one in self.measurements.values() if one.rows == rows and one.name in names]
            found = [one for one in found if len(one.seconds) > 1]
            if found and time.monotonic() < deadline:
                self._refine(found, lambda chain=chain: time_in_graph(chain, self.device, 5), deadline)

    def _refine(self, found: list[Measurement], measure: Callable[[], float], deadline: float) -> None:
        best = measure()

        def attempt(choices: Sequence[tuple[Measurement, Variant]]) -> None:
            """Make ``choices``, and keep them if that is faster."""
            nonlocal best
            before = [(one, one.choice) for one, _ in choices]
            _choose(choices)
            seconds = measure()
            if seconds < best * (1 - CHAIN_MARGIN):
                best = seconds
            else:
                _choose(before)

        kinds = sorted({variant.kind for one in found for variant in one.seconds} - {TORCH.kind})
        for choices in [[(one, one.fastest(kind)) for one in found] for kind in kinds]:
            attempt(choices)
        for one in found:
            for variant in one.ranking[:FASTEST]:
                if variant != one.choice and time.monotonic() < deadline:
                    attempt([(one, variant)])

    def _compile(self, jobs: Sequence[tuple[torch.Tensor, int, Variant]]) -> set[Variant]:
        """Compile what these (weight, rows, variant) need; returns the variants that this card cannot run."""
        # One shape stands for all: sizes are no part of a kernel. A gemv is another one for each row count.
        needed: dict[tuple[Variant, int], torch.Tensor] = {}
        for weight, rows, variant in jobs:
            n, k = weight.shape
            if variant.fits(rows, n, k):
                needed.setdefault((variant, rows if variant.kind == "gemv" else 0), weight)
                self.workspace.grow(n, variant)
        triton_error: type[Exception] = importlib.import_module("triton.errors").TritonError

        def run(variant: Variant, rows: int, weight: torch.Tensor) -> Variant | None:
            with torch.inference_mode(), torch.cuda.device(self.device):
                x = torch.zeros((rows or 1, weight.shape[1]), device=self.device, dtype=weight.dtype)
                try:
                    small_linear(x, weight, variant=variant, workspace=self.workspace)
                    if variant.kind == "stream":  # whose gated form is another one
                        small_linear(x, weight, variant=variant, gated=True, workspace=self.workspace)
                except triton_error:  # more registers or shared memory than this card has
                    return variant
            return None

        with ThreadPoolExecutor(8) as pool:
            runs = [pool.submit(run, variant, rows, weight) for (variant, rows), weight in needed.items()]
            return {broken for one in runs if (broken := one.result()) is not None}

    def _measure(
        self,
        name: str,
        layers: Sequence[torch.Tensor],
        rows: int,
        variants: Sequence[Variant],
        deadline: float,
    ) -> None:
        n, k = layers[0].shape
        x = torch.randn((rows, k), device=self.device, dtype=layers[0].dtype)
        result = Measurement(name, n, k, rows)
        result.seconds[TORCH] = self._time(x, layers, TORCH)
        expected = F.linear(x, layers[0])
        best = result.seconds[TORCH] * (1 - self._margin)
        for variant in variants:
            if not variant.fits(rows, n, k) or time.monotonic() > deadline:
                continue
            if not self._agrees(x, layers[0], variant, expected):
                continue
            seconds = result.seconds[variant] = self._time(x, layers, variant)
            if seconds < best:
                best, result.choice = seconds, variant
        self.measurements[n, k, rows] = result

    def _agrees(
        self, x: torch.Tensor, weight: torch.Tensor, variant: Variant, expected: torch.Tensor
    ) -> bool:
        y = small_linear(x, weight, variant=variant, workspace=self.workspace)
        return relative_error(y, expected) < 0.01

    def _time(self, x: torch.Tensor, layers: Sequence[torch.Tensor], variant: Variant) -> float:
        """Seconds a call, in a CUDA graph over all layers' weights."""
        calls = max(len(layers), 4)

        def step() -> None:
            for index in range(calls):
                small_linear(x, layers[index % len(layers)], variant=variant, workspace=self.workspace)

        return time_in_graph(step, self.device) / calls

    def __str__(self) -> str:
        return "\n".join(str(measurement) for measurement in self.measurements.values())
