"""The least time that a card's memory and arithmetic allow, from a model's config.json.

    decode step  = max(W/BW, 2*B*P/F) + context*KV/BW + 4*B*V/BW
    prefill of S = max(W/BW, (2*P_body*(S - cached) + 2*L*Hq*d*(S^2 - cached^2)) / F)

W: bytes of the weights that a step reads; P: their number, P_body without the vocabulary head; BW, F: bytes
and bf16 operations a second; B: rows; context: tokens of all rows together; KV: bytes of one token's keys and
values; V: vocabulary (logits are written and read once). No launch, host or network time is in it: a floor is
what nothing can beat, not what somebody reached. One exception: the last layer is counted for all tokens of a prompt,
and an engine may leave out most of it (a 36th of a 4B model's products). Run as a script it measures BW and F of this
machine's GPU, or prints what a server at given limits would make of a workload (--workload).
"""

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes a second and matrix operations a second, measured where possible."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense Qwen3 or Qwen2 model that decide its floors; widths in bytes."""

    layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    weight_bytes: int = 2
    cache_bytes: int = 2

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelShape":
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            query_heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
        )

    @classmethod
    def from_file(cls, path: Path) -> "ModelShape":
        """From a config.json or the folder that holds it."""
        file = path / "config.json" if path.is_dir() else path
        return cls.from_config(json.loads(file.read_text(encoding="utf-8")))

    def products(self) -> list[tuple[str, int, int, int]]:
        """(name, inputs, outputs, how often) of a step's matrix products, packed as engines pack them."""
        queries, keys = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            ("qkv", self.hidden, queries + 2 * keys, self.layers),
            ("o", queries, self.hidden, self.layers),
            ("gate_up", self.hidden, 2 * self.inner, self.layers),
            ("down", self.inner, self.hidden, self.layers),
            ("lm_head", self.hidden, self.vocab, 1),
        ]

    @property
    def parameters(self) -> int:
        """Weights that a decode step reads: the layers and the head (an input embedding is a few rows)."""
        return sum(inputs * outputs * count for _, inputs, outputs, count in self.products())

    @property
    def body_parameters(self) -> int:
        return self.parameters - self.hidden * self.vocab

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.cache_bytes * self.layers * self.kv_heads * self.head_dim

    @property
    def weight_read_bytes(self) -> int:
        return self.weight_bytes * self.parameters


def decode_seconds(shape: ModelShape, card: Card, rows: int, context_tokens: int) -> float:
    """One decode step of `rows` sequences with `context_tokens` tokens in all."""
    products = max(shape.weight_read_bytes / card.bandwidth, 2 * rows * shape.parameters / card.flops)
    cache = context_tokens * shape.kv_bytes_per_token / card.bandwidth
    return products + cache + 4 * rows * shape.vocab / card.bandwidth


def prefill_flops(shape: ModelShape, tokens: int, cached: int = 0) -> float:
    """Operations for a prompt of `tokens`, `cached` of them restored; causal attention is half a square."""
    attention = 2 * shape.layers * shape.query_heads * shape.head_dim * (tokens**2 - cached**2)
    return 2 * shape.body_parameters * (tokens - cached) + attention


def prefill_seconds(shape: ModelShape, card: Card, tokens: int, cached: int = 0) -> float:
    """The least time to the first token of one prompt."""
    return max(shape.weight_read_bytes / card.bandwidth, prefill_flops(shape, tokens, cached) / card.flops)


@dataclass(frozen=True, slots=True)
class Work:
    """One request for the ideal run: when it comes, and its tokens in (cached among them) and out."""

    arrival_seconds: float
    prompt: int
    output: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class IdealRun:
    """What a server at the card's limit would have needed (seconds)."""

    elapsed_seconds: float
    first_token_seconds: list[float]
    per_output_token_seconds: list[float]

    def output_tokens_per_second(self, works: Sequence[Work]) -> float:
        return sum(work.output for work in works) / self.elapsed_seconds


def ideal_run(
    shape: ModelShape, card: Card, works: Sequence[Work], concurrency: int | None = None
) -> IdealRun:
    """Continuous batching at the card's limit: waiting prompts first, together; then one step for all rows.

    Prompts first gives the fullest decode batches, hence the best throughput; elapsed time and token rate
    are limits. Its per-token times include the pauses for others' prompts, as any one-stream server's do.
    """
    limit = concurrency or len(works)
    order = sorted(range(len(works)), key=lambda i: works[i].arrival_seconds)
    now, position, context, step = 0.0, 0, 0, 0
    running: list[tuple[int, int]] = []  # (step at which it ends, request)
    first = [0.0] * len(works)
    per_token: list[float] = []
    while position < len(order) or running:
        if not running and works[order[position]].arrival_seconds > now:
            now = works[order[position]].arrival_seconds
        fresh = []
        while position < len(order) and works[order[position]].arrival_seconds <= now:
            if len(running) + len(fresh) >= limit:
                break
            fresh.append(order[position])
            position += 1
        if fresh:
            flops = sum(prefill_flops(shape, works[i].prompt, works[i].cached) for i in fresh)
            now += max(shape.weight_read_bytes / card.bandwidth, flops / card.flops)
            for i in fresh:
                first[i] = now
                if works[i].output > 1:
                    heapq.heappush(running, (step + works[i].output - 1, i))
                    context += works[i].prompt
            continue
        context += len(running)  # every row's new token is written and read
        now += decode_seconds(shape, card, len(running), context)
        step += 1
        while running and running[0][0] == step:
            _, i = heapq.heappop(running)
            context -= works[i].prompt + works[i].output - 1
            per_token.append((now - first[i]) / (works[i].output - 1))
    waits = [first[i] - works[i].arrival_seconds for i in range(len(works))]
    return IdealRun(now, waits, per_token)


def measure_card() -> Card:
    """Copy bandwidth and bf16 matmul rate of the current CUDA device (needs torch and some 6 GB)."""
    import torch

    def best(work: Callable[[], object], repeats: int = 20) -> float:
        work()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    source = torch.empty(2 * 1024**3, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_seconds = best(lambda: target.copy_(source))
    size = 8192
    left = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    return Card(2 * source.numel() / copy_seconds, 2 * size**3 / best(lambda: left @ left))


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    """--model-config, --card, --bandwidth-tb-s and --tflops, for every script that prints floors."""
    parser.add_argument(
        "--model-config", type=Path, help="config.json (or its folder) to compute floors from"
    )
    parser.add_argument(
        "--card", type=Path, help="JSON written by floor.py --out: the card's measured limits"
    )
    parser.add_argument("--bandwidth-tb-s", type=float, help="memory bandwidth, 10^12 bytes a second")
    parser.add_argument("--tflops", type=float, help="bf16 matrix rate, 10^12 operations a second")


def card_from_arguments(options: argparse.Namespace) -> Card | None:
    """The card's limits, or None where the options give none. ValueError where they are incomplete."""
    if options.card is not None:
        return Card(**json.loads(options.card.read_text()))
    if options.bandwidth_tb_s is None and options.tflops is None:
        return None
    if options.bandwidth_tb_s is None or options.tflops is None:
        raise ValueError("floors need both --bandwidth-tb-s and --tflops, or --card")
    return Card(options.bandwidth_tb_s * 1e12, options.tflops * 1e12)


def show_ideal_runs(shape: ModelShape, card: Card, spec: str, seeds: Sequence[int]) -> None:
    """What :func:`ideal_run` makes of a workload without chats, for each seed."""
    from benchmarks.metrics import distribution  # which needs this module
    from benchmarks.workloads import build

    for seed in seeds:
        sessions = build(spec, seed).sessions
        works = [
            Work(s.arrival_seconds, len(ask.prompt or ()), ask.max_tokens) for s in sessions for ask in s.asks
        ]
        ideal = ideal_run(shape, card, works)
        first = distribution(ideal.first_token_seconds)
        assert first is not None, "a workload without requests"
        print(
            f"{spec} seed {seed}: first token p50 {1e3 * first['p50']:.1f}, p99 {1e3 * first['p99']:.1f}, "
            f"max {1e3 * first['max']:.1f} ms; {ideal.output_tokens_per_second(works):,.0f} tokens/s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the limits as JSON, for --card")
    parser.add_argument(
        "--workload", help="print the ideal run of this one instead; needs --model-config and a card"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of --workload")
    add_card_arguments(parser)
    options = parser.parse_args()
    if options.workload:
        given = card_from_arguments(options)
        if given is None or options.model_config is None:
            parser.error("--workload needs --model-config, and --card or --bandwidth-tb-s and --tflops")
        show_ideal_runs(ModelShape.from_file(options.model_config), given, options.workload, options.seeds)
        return 0
    card = measure_card()
    print(f"{card.bandwidth / 1e12:.2f} TB/s, {card.flops / 1e12:.0f} TFLOP/s")
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(card)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
