"""Prometheus metrics: names with vLLM's stems and bucket edges, under ``helios:`` (and ``vllm:`` on request).

The hot paths add to plain integers; Prometheus objects are made only while a scrape is answered. Counts
are taken on the event loop and on the worker thread: each field has one writing thread, and a scrape may
read a value one step old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from helios.runtime.request import FinishReason, Job

# Seconds
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKEN_LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# Tokens
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

Snapshot = Callable[[], Mapping[str, object]]


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to the model's context."""
    edges: list[int] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > max_model_len:
                return tuple(edges)
            edges.append(digit * scale)
        scale *= 10


class Histogram:
    """A histogram whose ``observe`` is one binary search and two additions."""

    __slots__ = ("_counts", "_edges", "_sum")

    def __init__(self, edges: Iterable[float]) -> None:
        self._edges = list(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper edge, values up to it), as Prometheus wants them."""
        total = 0
        rows: list[tuple[str, float]] = []
        for edge, count in zip([*map(_edge_name, self._edges), "+Inf"], self._counts, strict=True):
            total += count
            rows.append((edge, total))
        return rows

    @property
    def sum(self) -> float:
        """Sum of the observed values."""
        return self._sum


def _edge_name(edge: float) -> str:
    return str(float(edge))


class Metrics(Collector):
    """All metrics of one server. ``alias='vllm'`` exposes each also under vLLM's name."""

    def __init__(self, model_name: str, max_model_len: int, alias: Literal["none", "vllm"] = "none") -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._prefixes = ("helios:", "vllm:") if alias == "vllm" else ("helios:",)
        self._snapshot: Snapshot | None = None
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.rejections: dict[str, int] = {}
        self.http_responses: dict[tuple[str, int], int] = {}
        tokens = token_buckets(max_model_len)
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_LATENCY_BUCKETS)
        self.time_per_output_token = Histogram(TOKEN_LATENCY_BUCKETS)
        self.end_to_end = Histogram(LATENCY_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.prefill_time = Histogram(LATENCY_BUCKETS)
        self.decode_time = Histogram(LATENCY_BUCKETS)
        self.inference_time = Histogram(LATENCY_BUCKETS)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.iteration_tokens = Histogram(ITERATION_BUCKETS)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def watch(self, snapshot: Snapshot) -> None:
        """Read gauges from ``scheduler.snapshot`` at each scrape."""
        self._snapshot = snapshot

    def observe_tick(self, prompt_tokens: int, generation_tokens: int) -> None:
        """Count the tokens of one tick. Called by the worker thread."""
        self.iteration_tokens.observe(prompt_tokens + generation_tokens)

    def observe_finished(self, job: Job) -> None:
        """Count one finished job. Called once per job, after its last event."""
        clock = job.timings
        self.prompt_tokens += job.num_prompt_tokens
        self.cached_prompt_tokens += job.num_cached_tokens
        self.preemptions += clock.preemptions
        self.request_prompt_tokens.observe(job.num_prompt_tokens)
        for sequence in job.sequences:
            reason = FinishReason.ERROR if job.error else (sequence.finish_reason or FinishReason.ABORT)
            self.finished[reason.value] += 1
            self.request_generation_tokens.observe(sequence.num_output_tokens)
        if clock.admitted and clock.queued:
            self.queue_time.observe(clock.admitted - clock.queued)
        if not clock.first_token:
            return
        self.time_to_first_token.observe(clock.first_token - clock.received)
        if clock.admitted:
            self.prefill_time.observe(clock.first_token - clock.admitted)
        decode = max(0.0, clock.last_token - clock.first_token)
        self.decode_time.observe(decode)
        longest = max(sequence.num_output_tokens for sequence in job.sequences)
        if longest > 1:
            self.time_per_output_token.observe(decode / (longest - 1))
        if clock.finished:
            self.end_to_end.observe(clock.finished - clock.received)
            if clock.admitted:
                self.inference_time.observe(clock.finished - clock.admitted)

    def observe_rejection(self, code: str) -> None:
        """Count a request that was refused before it reached the queue."""
        self.rejections[code] = self.rejections.get(code, 0) + 1

    def observe_response(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        key = (route, status)
        self.http_responses[key] = self.http_responses.get(key, 0) + 1

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Prometheus's entry point: build every family from the counts."""
        snapshot: Mapping[str, object] = self._snapshot() if self._snapshot else {}

        def number(name: str) -> float:
            value = snapshot.get(name, 0)
            return float(value) if isinstance(value, int | float) else 0.0

        for prefix in self._prefixes:
            yield from self._gauges(prefix, number)
            yield from self._counters(prefix, number)
            yield from self._histograms(prefix)

    def _gauges(self, prefix: str, number: Callable[[str], float]) -> Iterable[Metric]:
        keys, values = list(self._labels), list(self._labels.values())
        total = number("pages_total")
        used = number("pages_referenced") / total if total else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", number("running")),
            ("num_requests_waiting", "Requests waiting in the queue.", number("waiting")),
            ("num_waiting_tokens", "Prompt tokens waiting in the queue.", number("waiting_tokens")),
            ("kv_cache_usage_perc", "Part of the KV pages that running requests hold; 1 is all.", used),
        ):
            gauge = GaugeMetricFamily(prefix + name, text, labels=keys)
            gauge.add_metric(values, value)
            yield gauge
        info = InfoMetricFamily(prefix + "cache_config", "The KV cache.", labels=keys)
        info.add_metric(values, {"block_size": "256", "num_gpu_blocks": str(int(total))})
        yield info

    def _counters(self, prefix: str, number: Callable[[str], float]) -> Iterable[Metric]:
        keys, values = list(self._labels), list(self._labels.values())
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of finished requests.", self.prompt_tokens),
            ("prompt_tokens_cached", "Of those, found in the prefix cache.", self.cached_prompt_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.cached_prompt_tokens),
            ("generation_tokens", "Generated tokens.", self.generation_tokens),
            ("num_preemptions", "Times a sequence gave up its pages.", self.preemptions),
            ("kv_offloaded_blocks", "Cached blocks copied to host memory.", number("offloaded_blocks")),
            ("kv_restored_blocks", "Cached blocks copied back from host memory.", number("restored_blocks")),
        ):
            counter = CounterMetricFamily(prefix + name, text, labels=keys)
            counter.add_metric(values, value)
            yield counter
        success = CounterMetricFamily(
            prefix + "request_success", "Finished sequences.", labels=[*keys, "finished_reason"]
        )
        for reason, value in self.finished.items():
            success.add_metric([*values, reason], value)
        yield success
        rejected = CounterMetricFamily(
            prefix + "admission_rejections", "Requests refused at the door.", labels=[*keys, "reason"]
        )
        for code, value in self.rejections.items():
            rejected.add_metric([*values, code], value)
        yield rejected
        responses = CounterMetricFamily(
            prefix + "http_responses", "HTTP responses.", labels=[*keys, "route", "status"]
        )
        for (route, status), value in self.http_responses.items():
            responses.add_metric([*values, route, str(status)], value)
        yield responses

    def _histograms(self, prefix: str) -> Iterable[Metric]:
        keys, values = list(self._labels), list(self._labels.values())
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of a sequence.", self.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "Mean time per token after the first.",
                self.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "Arrival to end.", self.end_to_end),
            ("request_queue_time_seconds", "In the queue.", self.queue_time),
            ("request_prefill_time_seconds", "Admission to first token.", self.prefill_time),
            ("request_decode_time_seconds", "First token to last.", self.decode_time),
            ("request_inference_time_seconds", "Admission to end.", self.inference_time),
            ("request_prompt_tokens", "Prompt tokens per request.", self.request_prompt_tokens),
            ("request_generation_tokens", "Tokens per sequence.", self.request_generation_tokens),
            ("iteration_tokens_total", "Tokens per tick.", self.iteration_tokens),
        ):
            family = HistogramMetricFamily(prefix + name, text, labels=keys)
            family.add_metric(values, histogram.buckets(), histogram.sum)
            yield family
