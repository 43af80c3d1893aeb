"""The engine in this process, without HTTP: building one, and playing arrivals on it by the clock.

What the studies and profiles share. An engine is built (and captured) once; :func:`variant` gives another
engine over the same runner, so that a policy, a budget or a smaller pool is compared without a new start.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.metrics import distribution
from helios.config import load
from helios.runtime.build import Built, build
from helios.runtime.engine import Engine
from helios.runtime.page_store import HostPageStore
from helios.runtime.progress import StartupProgress
from helios.runtime.qwen3.kv_cache import page_bytes
from helios.runtime.request import FinishReason, Job, SamplingParams

SAMPLING = SamplingParams(temperature=0.6, top_p=1.0, ignore_eos=True)
_NAP_SECONDS = 0.001


@dataclass(slots=True)
class Item:
    """One request: when it comes, its prompt, and its answer's length.

    ``asked`` is the ``max_tokens`` it names (default: ``output``); it is cancelled after ``output`` tokens
    where that is less, as a model would end its answer before the limit. ``turns`` are the new tokens of
    later turns of a chat: each is sent, after everything before it, when the answer before it has ended.
    """

    arrival: float
    prompt: list[int]
    output: int
    asked: int | None = None
    params: SamplingParams = SAMPLING
    turns: tuple[list[int], ...] = ()
    kind: str = "request"


@dataclass(slots=True)
class Played:
    """What happened to one request; seconds from the run's start."""

    kind: str
    turn: int
    due: float
    prompt: int
    cached: int = 0
    preemptions: int = 0
    error: str | None = None
    token_times: list[float] = field(default_factory=list[float])
    ended: float = 0.0


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --load-format and --set, --label and --out, as all in-process scripts take them."""
    parser.add_argument("--model", required=True, help="model folder, or demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings")
    parser.add_argument("--label", default="unlabelled")
    parser.add_argument("--out", type=Path)


def build_engine(options: argparse.Namespace, **settings: Any) -> Built:
    """Build the engine that the arguments name; ``settings`` are the script's own defaults."""
    given = dict(item.split("=", 1) for item in options.set)
    named = {"model_id": options.model, "load_format": options.load_format}
    values = {name: value for name, value in (settings | named | given).items() if value is not None}
    return build(load(values), StartupProgress(say=print))


def write_result(kind: str, built: Built, options: argparse.Namespace, **content: Any) -> dict[str, Any]:
    """Write what was measured on ``built``, under the arguments' label; returns the whole result."""
    result = results.envelope(
        kind, options.label, model=built.snapshot.name, device=built.device.name,
        settings=dict(item.split("=", 1) for item in options.set), **content,
    )  # fmt: skip
    results.write(options.out or results.result_path(kind, options.label), result)
    return result


def variant(built: Built, host_bytes: int = 0, **changes: Any) -> Engine:
    """Another engine over the same runner, with other limits and ``host_bytes`` for evicted pages.

    Everything of the engine before it must have ended. The runner stays as it was captured: ``num_pages``
    and ``prefill_chunk_size`` may only be smaller.
    """
    cache = built.runner.cache
    slots = host_bytes // page_bytes(built.snapshot.config, cache.data.itemsize)
    store = HostPageStore(cache, slots) if slots else None
    config = dataclasses.replace(built.engine.config, **changes)
    return Engine(config, built.runner, built.vocabulary, built.grammars, cost=built.engine.cost, store=store)


def vocabulary(built: Built) -> int:
    """Token ids below this are plain words to the model and the tokenizer."""
    return min(built.vocabulary.size, built.snapshot.config.vocab_size, 10_000)


def random_ids(rng: random.Random, count: int, below: int) -> list[int]:
    """``count`` random token ids."""
    return rng.choices(range(below), k=count)


def play(
    engine: Engine,
    items: Sequence[Item],
    *,
    concurrency: int | None = None,
    limit_seconds: float | None = None,
    after_step: Callable[[float, float], object] | None = None,
) -> list[Played]:
    """Run ``items`` to the end, each submitted when it is due (and below ``concurrency``, if given).

    ``after_step`` hears the start and end of every step. After ``limit_seconds`` what is left is cancelled
    and comes back with an error. Token times are the moments at which the engine handed a token over.
    """
    return _Player(engine, concurrency, limit_seconds, after_step).run(items)


class _Player:
    def __init__(
        self,
        engine: Engine,
        concurrency: int | None,
        limit_seconds: float | None,
        after_step: Callable[[float, float], object] | None,
    ) -> None:
        self.engine = engine
        self.concurrency = concurrency
        self.limit = limit_seconds
        self.after_step = after_step
        self.live: dict[Job, tuple[Item, Played]] = {}
        self.done: list[Played] = []
        self.number = 0
        self.start = 0.0

    def run(self, items: Sequence[Item]) -> list[Played]:
        """All of ``items``; see :func:`play`."""
        order = sorted(items, key=lambda item: item.arrival)
        position, stopped = 0, False
        self.start = time.perf_counter()
        while position < len(order) or self.live:
            now = time.perf_counter() - self.start
            if self.limit is not None and now > self.limit and not stopped:
                stopped, position = True, len(order)
                for job in self.live:
                    job.cancelled = True
            while position < len(order) and order[position].arrival <= now and self._room():
                self._submit(order[position], order[position].prompt, 0, order[position].arrival)
                position += 1
            if not self.engine.has_work:
                if not self.live and position < len(order):
                    wait = order[position].arrival - (time.perf_counter() - self.start)
                    time.sleep(min(max(wait, 0.0), 5 * _NAP_SECONDS))
                continue
            self._step()
        return self.done

    def _room(self) -> bool:
        return self.concurrency is None or len(self.live) < self.concurrency

    def _submit(self, item: Item, prompt: list[int], turn: int, due: float) -> None:
        asked = max(item.output, item.asked or 0)
        job = Job(f"p{self.number}", prompt, item.params, max_tokens=asked)
        self.number += 1
        self.engine.check_fits(job)
        self.live[job] = (item, Played(item.kind, turn, due, len(prompt)))
        self.engine.waiting.append(job)

    def _step(self) -> None:
        began = time.perf_counter()
        events = self.engine.step()
        ended = time.perf_counter()
        if self.after_step is not None:
            self.after_step(began, ended)
        at = ended - self.start
        for event in events:
            if event.job not in self.live:
                continue
            item, played = self.live[event.job]
            if len(played.token_times) < item.output:
                played.token_times += [at] * len(event.token_ids)
            if len(played.token_times) >= item.output and event.finish_reason is None:
                event.job.cancelled = True
            if event.finish_reason is not None:
                self._end(event.job, item, played, event.finish_reason, at)

    def _end(self, job: Job, item: Item, played: Played, reason: FinishReason, at: float) -> None:
        del self.live[job]
        played.ended = played.token_times[-1] if played.token_times else at
        played.cached, played.preemptions = job.num_cached_tokens, job.timings.preemptions
        if reason is FinishReason.ERROR or len(played.token_times) < item.output:
            played.error = str(job.error) if job.error is not None else "stopped before its end"
        self.done.append(played)
        if item.turns and played.error is None:
            rest = dataclasses.replace(item, turns=item.turns[1:])
            prompt = [*job.sequences[0].token_ids, *item.turns[0]]
            self._submit(rest, prompt, played.turn + 1, at)


def summary(played: Sequence[Played]) -> dict[str, Any]:
    """Rates and latencies of a run, in the terms of benchmarks/README.md."""
    good = [one for one in played if one.error is None]
    found: dict[str, Any] = {"requests": len(played), "failed": len(played) - len(good)}
    if not good:
        return found
    start, end = min(one.due for one in played), max(one.ended for one in good)
    output, prompt = sum(len(one.token_times) for one in good), sum(one.prompt for one in good)
    gaps = np.concatenate([np.diff(one.token_times) for one in good])
    return found | {
        "elapsed_seconds": end - start,
        "output_tokens_per_second": output / (end - start),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_fraction": sum(one.cached for one in good) / prompt,
        "preemptions": sum(one.preemptions for one in good),
        "time_to_first_token_seconds": distribution(one.token_times[0] - one.due for one in good),
        "inter_token_seconds": distribution(gaps.tolist()),
    }


def poisson_items(rate: float, seconds: float, seed: int, below: int, longest: int = 7680) -> list[Item]:
    """The workload ``poisson`` for ``seconds``: a tenth of the prompts are of 0.53-1 times ``longest``,
    the rest of a sixtieth to a fifteenth of it; answers of 128-256 tokens (fewer for small contexts)."""
    rng = random.Random(f"{rate}/{seed}")
    scale = longest / 7680
    items: list[Item] = []
    now = 0.0
    count = max(1, round(rate * seconds))
    for index in range(count):
        is_long = index % 10 == 4
        low, high = (4096, 7680) if is_long else (128, 512)
        length = max(4, int(scale * rng.randint(low, high)))
        output = max(4, int(min(1.0, 4 * scale) * rng.randint(128, 256)))
        kind = "long" if is_long else "short"
        items.append(Item(now, random_ids(rng, length, below), output, kind=kind))
        now += rng.expovariate(rate)
    return items


def offline_items(count: int, seed: int, below: int, longest: int = 1024) -> list[Item]:
    """``offline256`` with ``count`` requests: a tenth of ``longest`` to ``longest`` tokens in and out."""
    rng = random.Random(seed)
    low = max(4, longest // 10)
    return [
        Item(0.0, random_ids(rng, rng.randint(low, longest), below), rng.randint(low, longest))
        for _ in range(count)
    ]


def single_items(count: int, prompt: int, output: int, seed: int, below: int) -> list[Item]:
    """``batch1``: play them with ``concurrency=1``."""
    rng = random.Random(seed)
    return [Item(0.0, random_ids(rng, prompt, below), output, kind="batch1") for _ in range(count)]


def steady(built: Built) -> Engine:
    """An engine whose prompts all run before any decoding, so that rows start to decode together; a step of
    decoding rows alone is the same under every rule."""
    return variant(built, prefill_first=True, target_itl=0.0)


def decoding_jobs(
    engine: Engine, rows: int, context: int, steps: int, below: int, params: Sequence[SamplingParams] = ()
) -> list[Job]:
    """Bring ``rows`` sequences of ``context`` tokens to steady decoding; they hold for ``steps`` more.

    ``params`` are those of the first rows; all others sample plainly. End them with :func:`cancel`.
    """
    rng = random.Random(time.time_ns())
    jobs = [
        Job(f"d{index}", random_ids(rng, context, below), params[index] if index < len(params) else SAMPLING,
            max_tokens=steps + 64)
        for index in range(rows)
    ]  # fmt: skip
    engine.waiting.extend(jobs)
    while any(not job.is_finished and job.sequences[0].num_output_tokens < 8 for job in jobs):
        engine.step()
    return jobs


def first_token_seconds(engine: Engine, tokens: int, below: int) -> float:
    """From a prompt of fresh tokens to its first token."""
    job = Job("prompt", random_ids(random.Random(time.time_ns()), tokens, below), SAMPLING, max_tokens=1)
    began = time.perf_counter()
    engine.waiting.append(job)
    while not job.is_finished:
        engine.step()
    return time.perf_counter() - began


def cancel(engine: Engine, jobs: Sequence[Job]) -> None:
    """End ``jobs`` and run the engine empty."""
    for job in jobs:
        job.cancelled = True
    while engine.has_work:
        engine.step()
