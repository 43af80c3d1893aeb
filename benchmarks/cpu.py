"""The CPU path: a decode step of the engine beside the bare matrix products of the same shapes.

    python benchmarks/cpu.py --label demo                       # the bundled demo model, 1 and 8 sequences
    python benchmarks/cpu.py --model FOLDER --rows 1 2 4 8
    python benchmarks/cpu.py --model-config FOLDER              # the products alone: needs no weights

On a CPU a small model's step should cost little more than its products; the ratio says what the rest costs
(attention, norms, sampling, Python). A step is one tick of the real engine, from planning the batch to the
committed tokens, greedy, without HTTP. Steps and products take turns in short blocks, so that a change of the
machine's speed meets both, and each ratio is formed within its block.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import results
from benchmarks.floor import ModelShape

BLOCK = 10  # steps, then as many rounds of products
PROMPT = 16  # tokens: attention over a short text, so that the products are most of the work


def product_weights(shape: ModelShape, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random matrices of one step's products, `[outputs, inputs]`, in layer order.

    Each layer has weights of its own: with shared ones a small model would run from the caches and the
    comparison would flatter the products.
    """
    *per_layer, head = shape.products()
    matrices = [
        torch.randn(outputs, inputs, dtype=dtype)
        for _ in range(shape.layers)
        for _, inputs, outputs, _ in per_layer
    ]
    return [*matrices, torch.randn(head[2], head[1], dtype=dtype)]


def matrix_product_seconds(weights: Sequence[torch.Tensor], rows: int, repeats: int = 20) -> list[float]:
    """Seconds of every repeat of the products of `rows` rows with all `weights`."""
    vectors = {weight.shape[1]: torch.randn(rows, weight.shape[1], dtype=weight.dtype) for weight in weights}
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


def model_products(model: Any) -> list[torch.Tensor]:
    """The weights of a served model's products: the very tensors that its steps read."""
    matrices = [
        weight
        for layer in model.layers
        for weight in (
            layer.attention.qkv_proj.weight,
            layer.attention.o_proj.weight,
            layer.mlp.gate_up_proj.weight,
            layer.mlp.down_proj.weight,
        )
    ]
    tied = model.config.tie_word_embeddings
    return [*matrices, model.embed_tokens if tied else model.lm_head]


class Decoding:
    """Some sequences of an engine that decode, greedily, as long as they are asked to."""

    def __init__(self, engine: Any, rows: int, steps: int) -> None:
        from helios.runtime.request import Job, SamplingParams

        self.engine, self.rows = engine, rows
        room = min(engine.config.max_model_len - PROMPT, steps + rows + 8)
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        for index in range(rows):
            prompt = [(7 * index + place) % 97 for place in range(PROMPT)]
            engine.waiting.append(Job(f"cpu-{index}", prompt, params, max_tokens=room))
        for _ in range(4):  # prefill, and the first steps
            engine.step()

    def step_seconds(self, count: int) -> list[float]:
        """Seconds of each of the next `count` ticks; every one gives every sequence a token."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            events = self.engine.step()
            times.append(time.perf_counter() - start)
            if len(events) != self.rows:
                raise RuntimeError(f"a step gave {len(events)} tokens to {self.rows} sequences")
        return times

    def end(self) -> None:
        for sequence in list(self.engine.running):
            sequence.job.cancelled = True
        while self.engine.has_work:
            self.engine.step()


def measure(built: Any, rows: int, blocks: int) -> dict[str, Any]:
    """Steps of `rows` sequences beside the products of `rows` rows with the same weights."""
    weights = model_products(built.runner.model)
    decoding = Decoding(built.engine, rows, blocks * BLOCK)
    steps: list[float] = []
    products: list[float] = []
    ratios: list[float] = []
    for _ in range(blocks):
        some_steps = decoding.step_seconds(BLOCK)
        some_products = matrix_product_seconds(weights, rows, BLOCK)
        ratios.append(step_ratio(some_steps, some_products))
        steps += some_steps
        products += some_products
    decoding.end()
    return {
        "rows": rows,
        "step_seconds": statistics.median(steps),
        "fastest_step_seconds": min(steps),
        "matrix_product_seconds": statistics.median(products),
        "fastest_seconds": min(products),
        "step_over_products": statistics.median(ratios),
        "fastest_step_over_fastest_products": min(steps) / min(products),
        "tokens_per_second": rows / statistics.median(steps),
    }


def load_engine(model: str, max_rows: int) -> Any:
    """A warmed engine of `model` on the CPU. StartupError where it cannot be loaded."""
    from helios.config import load
    from helios.runtime.build import build

    return build(load(model_id=model, device="cpu", max_batch_size=max_rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", default="demo", help="what to serve: 'demo' or a folder")
    source.add_argument("--model-config", type=Path, help="config.json or its folder: products only")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=20, help=f"blocks of {BLOCK} (or products, alone)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: two blocks, nothing written")
    parser.add_argument("--label", default="unlabelled")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    measured: list[dict[str, Any]] = []
    if options.model_config is not None:
        shape = ModelShape.from_file(options.model_config)
        weights = product_weights(shape)
        for rows in options.rows:
            products = matrix_product_seconds(weights, rows, options.repeats)
            one = {"matrix_product_seconds": statistics.median(products), "fastest_seconds": min(products)}
            measured.append({"rows": rows, **one})
    else:
        from helios.errors import StartupError

        try:
            built = load_engine(options.model, max(options.rows))
        except StartupError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        measured = [measure(built, rows, 2 if options.quick else options.repeats) for rows in options.rows]
    for one in measured:
        print("  ".join(f"{key} {value:.5g}" for key, value in one.items()), flush=True)
    if options.quick:
        return 0
    result = results.envelope(
        "cpu",
        options.label,
        model="config only" if options.model_config is not None else Path(options.model).name,
        threads=torch.get_num_threads(),
        dtype="float32",
        steps=measured,
    )
    path = options.out or results.result_path("cpu", options.label)
    results.write(path, result)
    print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
