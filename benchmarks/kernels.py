"""Times the Triton kernels against torch's plain forms and the memory's bandwidth, on one GPU.

    python benchmarks/kernels.py [--out results/kernels.json] [--model 0.6B] [--quick]

Every figure is the median over replays of a CUDA graph that holds many calls, divided by their number: it
includes the gap between two kernels of a graph, as a decode step pays it. Inputs rotate through buffers
larger than the L2 cache where the size of a call would matter. The floor is the bytes a call must move over
the bandwidth that a plain copy reaches on this card. ``pdl`` is the same with programmatic dependent launch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from helios.config import PAGE_SIZE
from helios.kernels.activation import silu_mul, silu_mul_reference
from helios.kernels.common import use_pdl
from helios.kernels.norm import add_rms_norm, add_rms_norm_reference
from helios.kernels.qkv import qk_norm_rope_write, qk_norm_rope_write_reference
from helios.kernels.sampling import sample, sample_reference

# hidden, heads, kv_heads, head_dim, intermediate
MODELS = {"0.6B": (1024, 16, 8, 128, 3072), "4B": (2560, 32, 8, 128, 9728)}
VOCABULARY, PADDED = 151_669, 151_936
ROWS = (1, 8, 32, 256, 2048)
SAMPLING_ROWS = (1, 8, 64, 256)
BEYOND_L2 = 160 << 20
MAX_BUFFERS = 24
DEVICE = torch.device("cuda")

Call = Callable[[int], Any]


def microseconds(call: Call, budget_ms: float = 60) -> float:
    """Time of one ``call(index)`` in a CUDA graph of many, in µs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    stream.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for index in range(3):
        call(index)
    end.record()
    end.synchronize()
    eager_ms = begin.elapsed_time(end) / 3
    count = max(2, min(50, int(20 / max(eager_ms, 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            call(index)
    graph.replay()
    times: list[float] = []
    spent = 0.0
    while len(times) < 5 or (spent < budget_ms and len(times) < 40):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        spent += times[-1]
    return statistics.median(times) / count * 1000


def rotating(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Enough copies of an input to leave the L2 cache between two uses of one, at most ``MAX_BUFFERS``."""
    first = make()
    return [first, *(make() for _ in range(min(BEYOND_L2 // first.nbytes, MAX_BUFFERS - 1)))]


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


def packed(
    rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, filtered: int | None = None
) -> torch.Tensor:
    """Sampling parameters; only the last ``filtered`` rows (None: all) have top_k and top_p."""
    values = np.empty((7, rows), np.int32)
    floats = values[:3].view(np.float32)
    floats[0] = 1 / temperature if temperature else 0
    floats[1], floats[2], values[3] = 2.0, -26.0, 2**31 - 1
    with_filters = slice(rows - (rows if filtered is None else filtered), rows)
    if top_k:
        values[3, with_filters] = top_k
    if top_p < 1:
        floats[1, with_filters] = top_p
    values[4:6] = np.random.default_rng(0).integers(-(2**31), 2**31, (2, rows))
    values[6] = np.arange(rows) + 100
    return torch.from_numpy(values).to(DEVICE)


class Table:
    """Measures cases and keeps their rows."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.rows: list[dict[str, Any]] = []
        print(
            f"{'kernel':32}{'rows':>6}{'µs':>9}{'pdl µs':>9}{'floor µs':>10}{'torch µs':>11}{'TB/s':>7}",
            flush=True,
        )

    def add(self, name: str, rows: int, nbytes: float, kernel: Call, plain: Call | None) -> None:
        taken = microseconds(kernel)
        with_pdl = None
        if use_pdl(True):
            with_pdl = microseconds(kernel)
        use_pdl(False)
        plain_taken = None if plain is None else microseconds(plain, 25)
        row = {
            "kernel": name,
            "rows": rows,
            "us": round(taken, 2),
            "pdl_us": None if with_pdl is None else round(with_pdl, 2),
            "floor_us": round(nbytes / self.bandwidth * 1e6, 2),
            "torch_us": None if plain_taken is None else round(plain_taken, 2),
        }
        self.rows.append(row)
        shown = [
            f"{row[key]:.2f}" if row[key] is not None else "-"
            for key in ("us", "pdl_us", "floor_us", "torch_us")
        ]
        print(
            f"{name:32}{rows:6}{shown[0]:>9}{shown[1]:>9}{shown[2]:>10}{shown[3]:>11}{nbytes / taken / 1e6:7.2f}",
            flush=True,
        )


def copy_bandwidth() -> float:
    """Bytes per second that a large copy moves, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds(lambda _: target.copy_(source)) / 1e6)


def layer_kernels(table: Table, model: str, rows: int) -> None:
    hidden, heads, kv_heads, dim, width = MODELS[model]
    weight = randn(hidden)
    xs, stream = rotating(lambda: randn(rows, hidden)), rotating(lambda: randn(rows, hidden))
    n = len(xs)
    table.add(
        f"{model} add_rms_norm",
        rows,
        rows * hidden * 2 * 4,
        lambda i: add_rms_norm(xs[i % n], stream[i % n], weight, 1e-6),
        lambda i: add_rms_norm_reference(xs[i % n], stream[i % n], weight, 1e-6),
    )

    total = (heads + 2 * kv_heads) * dim
    qkvs = rotating(lambda: randn(rows, total))
    n_qkv = len(qkvs)
    norm = randn(heads + kv_heads, dim)
    rope = torch.rand(40_960, 2, dim // 2, device=DEVICE)
    count = 128
    pages = torch.zeros(2, count, PAGE_SIZE, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    positions = torch.randint(4096, (rows,), device=DEVICE)
    slots = torch.randperm(count * PAGE_SIZE, device=DEVICE)[:rows]
    rest = (norm, 1e-6, rope, positions, slots, pages[0], pages[1])
    table.add(
        f"{model} qk_norm_rope_write",
        rows,
        rows * (total * 2 * 2 + dim * 4),
        lambda i: qk_norm_rope_write(qkvs[i % n_qkv], *rest),
        lambda i: qk_norm_rope_write_reference(qkvs[i % n_qkv], *rest),
    )

    gate_ups = rotating(lambda: randn(rows, 2 * width))
    n_mlp = len(gate_ups)
    table.add(
        f"{model} silu_mul",
        rows,
        rows * width * 2 * 3,
        lambda i: silu_mul(gate_ups[i % n_mlp]),
        lambda i: silu_mul_reference(gate_ups[i % n_mlp]),
    )


def sampling(table: Table, rows: int, quick: bool) -> None:
    """Flat logits, as random weights give them, and steep ones, nearer to a trained model's."""
    flat = rotating(lambda: randn(rows, PADDED))
    steep = [logits * 3 for logits in flat]
    n = len(flat)
    cases: list[tuple[str, list[torch.Tensor], torch.Tensor, bool]] = [
        ("greedy", flat, packed(rows, 0), False),
        ("T 0.6", flat, packed(rows, 0.6), False),
        ("T 0.6, filters looked for", flat, packed(rows, 0.6), True),
        ("T 0.6 k 20 p .95, flat", flat, packed(rows, 0.6, 20, 0.95), True),
        ("T 0.6 k 20 p .95, steep", steep, packed(rows, 0.6, 20, 0.95), True),
        ("T 1 p .95, flat", flat, packed(rows, 1.0, 0, 0.95), True),
        ("T 1 p .95, steep", steep, packed(rows, 1.0, 0, 0.95), True),
        ("T 1 k 1000, flat", flat, packed(rows, 1.0, 1000), True),
    ]
    if rows > 1:
        cases.insert(3, ("T 0.6, one row k 20 p .95", flat, packed(rows, 0.6, 20, 0.95, filtered=1), True))
    for name, logits, parameters, filters in cases:

        def kernel(
            i: int, logits: Any = logits, parameters: Any = parameters, filters: bool = filters
        ) -> Any:
            return sample(logits[i % n], parameters, VOCABULARY, filters)

        def plain(i: int, logits: Any = logits, parameters: Any = parameters, filters: bool = filters) -> Any:
            return sample_reference(logits[i % n], parameters, VOCABULARY, filters)

        table.add(f"sample {name}", rows, rows * VOCABULARY * 2, kernel, None if quick else plain)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time Helios's Triton kernels on one GPU.")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="default: all")
    parser.add_argument("--label", default="kernels")
    parser.add_argument("--quick", action="store_true", help="leave out torch's plain sampling")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    table = Table(bandwidth)
    for model in arguments.model or MODELS:
        for rows in ROWS:
            layer_kernels(table, model, rows)
    for rows in SAMPLING_ROWS:
        sampling(table, rows, arguments.quick)
    if arguments.out:
        result = results.envelope(
            "kernels",
            arguments.label,
            device=torch.cuda.get_device_name(),
            copy_bytes_per_second=bandwidth,
            rows=table.rows,
        )
        results.write(arguments.out, result)


if __name__ == "__main__":
    main()
