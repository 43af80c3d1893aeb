"""What choices at start by measurement need: how far results are apart and how long launches take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """``|got - expected| / |expected|`` in the Euclidean norm; NaN if one of them holds a NaN."""
    wide = expected.float()
    return float(((got.float() - wide).square().sum() / wide.square().sum()).sqrt())


def time_in_graph(step: Callable[[], object], device: torch.device, replays: int = 3) -> float:
    """Seconds one replay of ``step`` takes as a CUDA graph: the fastest of ``replays``."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            step()  # compiles, and cuBLAS makes its workspace, outside the capture
            torch.cuda.synchronize()
            graph.capture_begin()  # not torch.cuda.graph: emptying the allocator's cache costs more than all this
            step()
            graph.capture_end()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
            graph.replay()
            for mark in marks[:-1]:
                mark.record()
                graph.replay()
            marks[-1].record()
        stream.synchronize()
        torch.cuda.current_stream().wait_stream(stream)
        return min(start.elapsed_time(end) for start, end in pairwise(marks)) / 1e3
