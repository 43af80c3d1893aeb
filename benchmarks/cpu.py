"""The CPU path: a decode step beside the bare matrix products of the same shapes.

    python benchmarks/cpu.py --model-config src/helios/demo_model --rows 1 8

On a CPU a small model's step should cost little more than its products; the ratio says what the rest costs
(attention, norms, sampling, Python). This measures the products. The step's own time comes from the engine:
pass what was measured with --step-ms, one value per row count, and the ratio is printed and kept.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import results
from benchmarks.floor import ModelShape


def matrix_product_seconds(
    shape: ModelShape, rows: int, repeats: int = 20, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Seconds of every repeat of one step's matrix products for `rows` rows.

    Each layer has weights of its own: with shared ones a small model would run from the caches and the
    comparison would flatter the products.
    """
    weights = [
        torch.randn(outputs, inputs, dtype=dtype)
        for _, inputs, outputs, count in shape.products()
        for _ in range(count)
    ]
    vectors = {inputs: torch.randn(rows, inputs, dtype=dtype) for _, inputs, _, _ in shape.products()}
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(vectors[weight.shape[1]], weight)
            times.append(time.perf_counter() - start)
    return times[1:]  # the first one allocates


def step_ratio(step_seconds: Sequence[float], product_seconds: Sequence[float]) -> float:
    """Median decode step over median products: 1 is the least possible. ValueError where one is missing."""
    if not step_seconds or not product_seconds:
        raise ValueError("a ratio needs at least one time on each side")
    return statistics.median(step_seconds) / statistics.median(product_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-config", type=Path, required=True, help="config.json or its folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument(
        "--step-ms", type=float, nargs="+", help="the engine's measured step, one for each of --rows"
    )
    parser.add_argument("--label", default="unlabelled")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step_ms is not None and len(options.step_ms) != len(options.rows):
        parser.error("--step-ms needs one value for each of --rows")
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = ModelShape.from_file(options.model_config)
    measured = []
    for index, rows in enumerate(options.rows):
        products = matrix_product_seconds(shape, rows, options.repeats)
        one = {
            "rows": rows,
            "matrix_product_seconds": statistics.median(products),
            "fastest_seconds": min(products),
        }
        if options.step_ms is not None:
            one["step_seconds"] = options.step_ms[index] / 1000
            one["step_over_products"] = step_ratio([one["step_seconds"]], products)
        measured.append(one)
        print("  ".join(f"{key} {value:.5g}" for key, value in one.items()), flush=True)
    result = results.envelope(
        "cpu", options.label, threads=torch.get_num_threads(), dtype="float32", steps=measured
    )
    results.write(options.out or results.result_path("cpu", options.label), result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
