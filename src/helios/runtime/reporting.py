"""What an answer says about itself: token usage and timings."""

from __future__ import annotations

from collections.abc import Sequence

from helios.runtime.request import Job

TimingReport = dict[str, float | int]


def usage_report(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0
) -> dict[str, object]:
    """OpenAI's ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def timings_report(jobs: Sequence[Job]) -> TimingReport:
    """The ``timings`` object: seconds, and rates in tokens per second.

    ``prefill_seconds`` and ``decode_seconds`` are wall-clock spans and include scheduling and sampling.
    The ``*_compute_seconds`` cover the shared forwards in which the request took part, each charged whole
    to the request's current phase: no isolated cost, and not to be summed over requests. For a batch of
    prompts the spans are those of the one that finished last, the token counts those of all.
    """
    job = max(jobs, key=lambda each: each.timings.finished)
    clock = job.timings
    prompt_tokens = sum(each.num_prompt_tokens for each in jobs)
    cached_tokens = sum(each.num_cached_tokens for each in jobs)
    output_tokens = sum(each.num_output_tokens for each in jobs)
    prefill = _span(clock.admitted, clock.first_token)
    decode = _span(clock.first_token, clock.last_token)
    # The first token of each sequence belongs to prefill.
    decoded = max(0, output_tokens - sum(len(each.sequences) for each in jobs))
    computed = prompt_tokens - cached_tokens
    return {
        "tokenization_seconds": _span(clock.received, clock.tokenized),
        "queue_seconds": _span(clock.queued, clock.admitted),
        "prefix_lookup_seconds": round(clock.prefix_lookup_seconds, 6),
        "restore_seconds": round(clock.restore_seconds, 6),
        "prefill_seconds": prefill,
        "prefill_compute_seconds": round(clock.prefill_compute_seconds, 6),
        "decode_seconds": decode,
        "decode_compute_seconds": round(clock.decode_compute_seconds, 6),
        "cache_store_seconds": round(clock.cache_store_seconds, 6),
        "time_to_first_token_seconds": _span(clock.received, clock.first_token),
        "end_to_end_seconds": _span(clock.received, clock.finished or clock.last_token),
        "prefill_tokens_per_second": _rate(computed, prefill),
        "prefill_compute_tokens_per_second": _rate(computed, clock.prefill_compute_seconds),
        "decode_tokens_per_second": _rate(decoded, decode),
        "decode_compute_tokens_per_second": _rate(decoded, clock.decode_compute_seconds),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": output_tokens,
        "prefix_cache_hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
        "preemptions": clock.preemptions,
    }


def _span(start: float, end: float) -> float:
    """Seconds between two clock readings; 0 where either was never taken."""
    return round(max(0.0, end - start), 6) if start and end else 0.0


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
