"""From records to numbers. Names carry their units; times are seconds; benchmarks/README.md defines each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.floor import Card, ModelShape, Work, ideal_run, prefill_seconds
from benchmarks.load import Record, Run

HISTOGRAM_EDGES = np.logspace(-5, 1, 121)  # seconds, 20 bins a decade: committed results stay small
TIMELINE_BINS = 120


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to count for goodput (seconds); None: no such limit."""

    first_token_seconds: float | None = None
    inter_token_seconds: float | None = None

    @property
    def given(self) -> bool:
        return self.first_token_seconds is not None or self.inter_token_seconds is not None


def distribution(values: Iterable[float | None]) -> dict[str, float | int] | None:
    """Mean, extremes and percentiles (linear interpolation) of what is not None; None where nothing is."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if known.size == 0:
        return None
    p50, p95, p99 = np.percentile(known, (50, 95, 99))
    return {
        "count": int(known.size),
        "mean": float(known.mean()),
        "min": float(known.min()),
        "p50": float(p50),
        "p95": float(p95),
        "p99": float(p99),
        "max": float(known.max()),
    }


def time_to_first_token(record: Record) -> float | None:
    """Streamed: seen by the client. Not streamed: the server's own figure, if it sends timings."""
    if record.first is not None:
        return record.first - record.sent
    return record.timings.get("time_to_first_token_seconds")


def decode_seconds(record: Record) -> float | None:
    """From the first token to the last, as the client saw them."""
    if record.first is None or record.last is None or record.completion_tokens < 2:
        return None
    return record.last - record.first


def time_per_output_token(record: Record) -> float | None:
    """Decode time over tokens after the first: right whether a chunk holds one token or several."""
    seconds = decode_seconds(record)
    return None if seconds is None else seconds / (record.completion_tokens - 1)


def decode_rate(record: Record) -> float | None:
    seconds = decode_seconds(record)
    if seconds is None:
        return record.timings.get("decode_tokens_per_second")
    return (record.completion_tokens - 1) / seconds if seconds > 0 else None


def prefill_rate(record: Record) -> float | None:
    """Prompt tokens over the time to the first token: queueing and network are in it, cache hits raise it."""
    first = time_to_first_token(record)
    return record.prompt_tokens / first if first and record.prompt_tokens else None


def gaps(record: Record) -> np.ndarray:
    """Seconds between a request's chunks."""
    return np.diff(np.asarray(record.chunk_times, dtype=float))


def concurrency(records: Sequence[Record]) -> tuple[int, float, float]:
    """Peak and mean number of requests in flight at the client, and the last moment at the peak."""
    moments = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])  # ends before starts
    level = peak = 0
    area = last_peak = 0.0
    previous = moments[0][0]
    for moment, change in moments:
        area += level * (moment - previous)
        if level == peak:
            last_peak = moment
        level += change
        if level > peak:
            peak, last_peak = level, moment
        previous = moment
    elapsed = moments[-1][0] - moments[0][0]
    return peak, area / elapsed if elapsed > 0 else float(peak), last_peak


def meets(record: Record, limits: Limits) -> bool:
    """Whether a completed request kept the limits: its first token, and 99 % of its gaps."""
    first = time_to_first_token(record)
    if limits.first_token_seconds is not None and (first is None or first > limits.first_token_seconds):
        return False
    if limits.inter_token_seconds is None or len(record.chunk_times) < 2:
        return True
    return float(np.percentile(gaps(record), 99)) <= limits.inter_token_seconds


def timeline(done: Sequence[Record], start: float, end: float) -> dict[str, Any]:
    """Tokens by equal slices of the run: output where it arrived, a prompt where its first token came."""
    edges = np.linspace(start, max(end, start + 1e-9), TIMELINE_BINS + 1)
    output = np.zeros(TIMELINE_BINS)
    prompt = np.zeros(TIMELINE_BINS)
    for record in done:
        if record.first is None or not record.chunk_times:
            continue
        per_chunk = record.completion_tokens / len(record.chunk_times)
        output += per_chunk * np.histogram(record.chunk_times, edges)[0]
        slot = min(TIMELINE_BINS - 1, int((record.first - start) / (edges[1] - edges[0])))
        prompt[slot] += record.prompt_tokens - record.cached_tokens
    return {
        "slice_seconds": round(float(edges[1] - edges[0]), 6),
        "output_tokens": [round(float(x), 1) for x in output],
        "prompt_tokens": [int(x) for x in prompt],
    }


def floors(
    done: Sequence[Record], found: dict[str, Any], shape: ModelShape, card: Card, start: float, limit: int
) -> dict[str, Any]:
    """The card's limits for this work, and `of_limit`: the share of each that was reached (at most 1)."""
    # Due times, not sending times: under a concurrency limit a faster server would have been asked sooner.
    works = [
        Work(max(0.0, r.due - start), r.prompt_tokens, r.completion_tokens, r.cached_tokens) for r in done
    ]
    first = distribution(prefill_seconds(shape, card, w.prompt, w.cached) for w in works)
    per_token, rate = None, None
    reached: dict[str, float] = {}
    if all(r.turn == 0 for r in done):  # a later turn is due when the server has answered the one before
        ideal = ideal_run(shape, card, works, limit)
        per_token = distribution(ideal.per_output_token_seconds)
        rate = ideal.output_tokens_per_second(works)
        reached["output_tokens_per_second"] = found["output_tokens_per_second"] / rate
    for name, floor in (("time_to_first_token_seconds", first), ("time_per_output_token_seconds", per_token)):
        if floor is not None and found[name] is not None:
            reached[f"{name}_p50"] = floor["p50"] / found[name]["p50"]
            reached[f"{name}_p99"] = floor["p99"] / found[name]["p99"]
    return {
        "time_to_first_token_seconds": first,  # each prompt alone on the card
        "time_per_output_token_seconds": per_token,
        "output_tokens_per_second": rate,
        "of_limit": reached,
    }


def row(record: Record, start: float) -> dict[str, Any]:
    """One request's raw timings for the results file; moments are seconds from the run's start."""

    def moment(value: float | None) -> float | None:
        return None if value is None else round(value - start, 6)

    steps = gaps(record)
    return {
        "session": record.session,
        "turn": record.turn,
        "category": record.category,
        "due_at_seconds": moment(record.due),
        "sent_at_seconds": moment(record.sent),
        "first_token_at_seconds": moment(record.first),
        "last_token_at_seconds": moment(record.last),
        "ended_at_seconds": moment(record.ended),
        "time_to_first_token_seconds": time_to_first_token(record),
        "end_to_end_seconds": record.ended - record.sent,
        "time_per_output_token_seconds": time_per_output_token(record),
        "inter_token_p99_seconds": float(np.percentile(steps, 99)) if steps.size else None,
        "inter_token_max_seconds": float(steps.max()) if steps.size else None,
        "decode_tokens_per_second": decode_rate(record),
        "prefill_tokens_per_second": prefill_rate(record),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "max_tokens": record.max_tokens,
        "chunks": len(record.chunk_times),
        "counted_from": record.counted_from,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "timings": record.timings,
    }


def _latencies(done: Sequence[Record]) -> dict[str, Any]:
    return {
        "time_to_first_token_seconds": distribution(map(time_to_first_token, done)),
        "end_to_end_seconds": distribution(r.ended - r.sent for r in done),
        "time_per_output_token_seconds": distribution(map(time_per_output_token, done)),
        "decode_tokens_per_second": distribution(map(decode_rate, done)),
        "prefill_tokens_per_second": distribution(map(prefill_rate, done)),
    }


def summarise(
    run: Run,
    submitted: int,
    limits: Limits | None = None,
    shape: ModelShape | None = None,
    card: Card | None = None,
) -> dict[str, Any]:
    """The aggregates of a run. `submitted` counts all requests of the workload, also those never sent."""
    limits = limits or Limits()
    records = run.records
    done = [record for record in records if record.error is None]
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    found: dict[str, Any] = {
        "submitted_requests": submitted,
        "completed_requests": len(done),
        "completion_ratio": len(done) / submitted if submitted else 0.0,
        "errors": errors,
    }
    if not done:
        return found
    start, end = min(r.sent for r in records), max(r.ended for r in records)
    elapsed = max(end - start, 1e-9)
    peak, mean, last_peak = concurrency(records)
    drain = max(0.0, end - max(last_peak, max(r.sent for r in records)))
    output = sum(r.completion_tokens for r in done)
    prompt = sum(r.prompt_tokens for r in done)
    restored = sum(r.cached_tokens for r in done)
    chunks = sum(len(r.chunk_times) for r in done)
    steps = np.concatenate([gaps(r) for r in done])
    found |= _latencies(done)
    found |= {
        "inter_token_seconds": distribution(steps.tolist()),
        "elapsed_seconds": elapsed,
        "output_tokens_per_second": output / elapsed,
        "total_tokens_per_second": (prompt + output) / elapsed,
        "requests_per_second": len(done) / elapsed,
        "peak_client_concurrency": peak,
        "mean_client_concurrency": mean,
        "drain_seconds": drain,
        "drain_fraction": drain / elapsed,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "max_token_hit_rate": sum(r.finish_reason == "length" for r in done) / len(done),
        "cache_hit_rate": sum(r.cached_tokens > 0 for r in done) / len(done),
        "restored_tokens": restored,
        "restored_fraction": restored / prompt if prompt else 0.0,
        "tokens_per_chunk": output / chunks if chunks else None,
        "submission_lag_seconds": max(r.sent - r.free for r in records),
        "client": {
            "processes": len(run.clients),
            "cpu_share_max": max(c.cpu_share for c in run.clients),
            "loop_lag_p99_seconds": max(c.loop_lag_p99_seconds for c in run.clients),
        },
        "categories": {
            name: _latencies([r for r in done if r.category == name])
            for name in sorted({r.category for r in done})
        },
        "inter_token_histogram": np.histogram(steps, HISTOGRAM_EDGES)[0].tolist(),
        "timeline": timeline(done, start, end),
    }
    if limits.given:
        good = sum(meets(record, limits) for record in done)
        found["goodput"] = {
            "time_to_first_token_limit_seconds": limits.first_token_seconds,
            "inter_token_limit_seconds": limits.inter_token_seconds,
            "requests_per_second": good / elapsed,
            "fraction": good / submitted,
        }
    if shape is not None and card is not None:
        found["floor"] = floors(done, found, shape, card, start, peak)
    return found


def lookup(aggregates: dict[str, Any], path: str) -> float | None:
    """The number at a dotted path such as "time_to_first_token_seconds.p99"; None where there is none."""
    value: Any = aggregates
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None
