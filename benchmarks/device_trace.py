"""What the device did and when, from torch.profiler: kernels by class, busy time, and the gaps between.

Kernels that overlap (programmatic dependent launch starts the next one early) share their time: each gets
what no earlier kernel has, so the classes and the gaps add up to the wall time. Without a GPU the outermost
torch operators of the host stand in for kernels, which is enough to try everything.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CLASSES: tuple[str, ...] = (
    "linears",
    "attention",
    "norm, rope, kv write",
    "activation",
    "lm_head",
    "sampling",
    "begin/end",
    "other",
    "gaps",
)

_CLOCKS_APART = 50_000_000  # nanoseconds beyond which two clocks are not the same

_KINDS: tuple[tuple[str, str], ...] = (
    ("begin/end", r"_begin_kernel|_end_kernel|memcpy|memset"),
    (
        "attention",
        r"_decode_kernel|_merge_kernel|prefill_kernel|(decode|prefill)_sm90|flash|fmha|attention|attend",
    ),
    ("norm, rope, kv write", r"rms_norm|_qkv_kernel|aten::(mul|rsqrt|mean|pow|index_put|add)\b"),
    ("activation", r"silu"),
    (
        "sampling",
        r"^_draw|^_chunk|^_count|^_collect|^_finish|sort|topk|multinomial|softmax|argmax|exponential",
    ),
    (
        "linears",
        r"gemv|_split_kernel|linear_sm90|nvjet|gemm|cutlass|cublas|splitk|xmma|aten::(linear|mm|addmm|bmm|matmul)",
    ),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KINDS)


def kernel_class(name: str) -> str:
    """The class of a kernel by its name; the head is told from other linears by its place (:func:`label`)."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


@dataclass(slots=True)
class Kernel:
    """One kernel (or copy) on the device; nanoseconds since the epoch."""

    name: str
    start: int
    end: int
    kind: str = ""


@dataclass(slots=True)
class Trace:
    """Kernels in order of their start, and the host's spans ``(name, start, end)`` beside them."""

    kernels: list[Kernel] = field(default_factory=list[Kernel])
    spans: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    start: int = 0
    end: int = 0

    @property
    def wall(self) -> int:
        """Nanoseconds from the beginning to the end of what was recorded."""
        return self.end - self.start


@contextmanager
def recording() -> Generator[Trace]:
    """Record what the device does inside; the trace is filled in at the end, after a synchronisation."""
    found = Trace()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        # Taking CUPTI down and up again between recordings breaks the replay of captured graphs.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        torch.cuda.synchronize()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=False) as profiler:
        found.start = time.time_ns()
        yield found
        if on_gpu:
            torch.cuda.synchronize()
        found.end = time.time_ns()
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    wanted = on_device if on_gpu else _operator
    kernels = [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if wanted(event)
    ]
    kernels.sort(key=lambda kernel: (kernel.start, -kernel.end))
    found.kernels = kernels if on_gpu else outermost(kernels)
    align(found)
    label(found.kernels)


def on_device(event: Any) -> bool:
    """Kernels, copies and fills; not the ranges that annotate them, nor waits."""
    kind = event.activity_type()
    on_gpu = str(event.device_type()).endswith("CUDA")
    return on_gpu and not ("annotation" in kind or "sync" in kind)


def _operator(event: Any) -> bool:
    return event.activity_type() == "cpu_op"


def align(trace: Trace) -> None:
    """Put kernels onto the host's clock where the profiler's is another: the last one ended with the trace."""
    if not trace.kernels:
        return
    last = max(kernel.end for kernel in trace.kernels)
    if trace.start <= last <= trace.end + _CLOCKS_APART:
        return
    for kernel in trace.kernels:
        kernel.start += trace.end - last
        kernel.end += trace.end - last


def outermost(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Without those that lie inside an earlier one."""
    kept: list[Kernel] = []
    for kernel in kernels:
        if not kept or kernel.end > kept[-1].end:
            kept.append(kernel)
    return kept


def label(kernels: Sequence[Kernel]) -> None:
    """Fill in the classes. A linear with no norm between it and the sampling behind it is the head's."""
    after_norm: list[Kernel] = []
    for kernel in kernels:
        kernel.kind = kernel_class(kernel.name)
        if kernel.kind in ("norm, rope, kv write", "attention", "activation"):
            after_norm = []
        elif kernel.kind == "linears":
            after_norm.append(kernel)
        elif kernel.kind == "sampling":
            for linear in after_norm:
                linear.kind = "lm_head"
            after_norm = []


def exclusive(kernels: Sequence[Kernel], start: int, end: int) -> dict[str, int]:
    """Nanoseconds between ``start`` and ``end`` by class; "gaps" is what no kernel filled."""
    found = dict.fromkeys(CLASSES, 0)
    reached = start
    for kernel in kernels:
        if kernel.start >= end:
            break
        begin, stop = max(kernel.start, reached), min(kernel.end, end)
        if stop > begin:
            found[kernel.kind or "other"] += stop - begin
            reached = stop
    found["gaps"] = (end - start) - sum(found.values())
    return found


def top_kernels(kernels: Sequence[Kernel], count: int = 14) -> list[dict[str, Any]]:
    """The kernels that took most time: name, class, calls, microseconds in all."""
    totals: dict[tuple[str, str], list[int]] = {}
    for kernel in kernels:
        totals.setdefault((kernel.name[:60], kernel.kind), []).append(kernel.end - kernel.start)
    order = sorted(totals.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"kernel": name, "class": kind, "calls": len(times), "microseconds": sum(times) / 1e3}
        for (name, kind), times in order
    ]


def span(trace: Trace, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` that also notes when the host was in it."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            trace.spans.append((name, began, time.time_ns()))

    return timed
