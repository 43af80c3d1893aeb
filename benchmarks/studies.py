"""What each scheduling decision is worth: the engine against itself, in this process, without HTTP.

    python benchmarks/studies.py --model FOLDER --load-format dummy --label 0.6b [--only budgets offline]

* budgets: token budgets of a tick, prompts first, and chunks cut by time, under Poisson arrivals
* offline: throughput of a batch by token budget
* attention: decode rows beside a prompt in two attention calls (as served) or in one
* admission: pages for the longest possible answer, or as tokens come, in a small pool
* offload: growing chats in a small pool, with evicted blocks kept in host memory or dropped

One engine is built; the studies change its rules, so every configuration runs on the same captured graphs.
Prompts are equal for all configurations of a study, and each starts with an empty prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.attention_study import attention
from benchmarks.inprocess import (
    Item,
    add_engine_arguments,
    build_engine,
    offline_items,
    play,
    poisson_items,
    random_ids,
    summary,
    variant,
    vocabulary,
    write_result,
)
from helios.runtime.build import Built
from helios.runtime.page_pool import pages_for

Rows = list[dict[str, Any]]


def run(built: Built, items: list[Item], changes: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Play ``items`` under changed rules: one line of a study."""
    row = {**facts, **summary(play(variant(built, **changes), items))}
    rate, first, gap = (row.get(name) for name in _SHOWN)
    shown = " ".join(f"{key}={value}" for key, value in facts.items())
    if first and gap:
        print(
            f"  {shown:44} {rate:9,.0f} tokens/s  TTFT p50/p99 {1e3 * first['p50']:.1f}/{1e3 * first['p99']:.1f} ms  "
            f"ITL p50/p99/max {1e3 * gap['p50']:.2f}/{1e3 * gap['p99']:.1f}/{1e3 * gap['max']:.1f} ms  "
            f"cached {row['cached_fraction']:.0%}  put back {row['preemptions']}",
            flush=True,
        )
    return row


_SHOWN = ("output_tokens_per_second", "time_to_first_token_seconds", "inter_token_seconds")


def warm(built: Built, options: argparse.Namespace) -> None:
    """A little of everything, uncounted: kernels compile at their first shape."""
    play(variant(built), poisson_items(16.0, 1.0, 99, vocabulary(built), longest(built, options)))


def longest(built: Built, options: argparse.Namespace) -> int:
    """The longest prompt of the Poisson arrivals."""
    return min(options.longest, built.engine.config.max_model_len // 2)


def sizes(built: Built, options: argparse.Namespace) -> list[int]:
    """The budgets that the captured engine allows."""
    return [size for size in options.budgets if size <= built.engine.config.prefill_chunk_size]


def budgets(built: Built, options: argparse.Namespace) -> Rows:
    """Latencies under arrivals, by the rule that decides how much prompt goes into a tick."""
    usual = built.engine.config.target_itl
    largest = sizes(built, options)[-1]
    cases: list[tuple[str, dict[str, Any]]] = [
        (str(size), {"prefill_chunk_size": size, "target_itl": 0.0}) for size in sizes(built, options)
    ]
    cases.append(("prompts first", {"prefill_chunk_size": largest, "target_itl": 0.0, "prefill_first": True}))
    if usual:
        cases.append((f"cut to {1e3 * usual:.0f} ms", {"prefill_chunk_size": largest, "target_itl": usual}))
    rows: Rows = []
    for rate in options.rates:
        items = poisson_items(rate, options.seconds, 1, vocabulary(built), longest(built, options))
        for name, changes in cases:
            rows.append(run(built, items, changes, rate=rate, budget=name))
    return rows


def offline(built: Built, options: argparse.Namespace) -> Rows:
    """Throughput of requests that are all there at once."""
    reach = min(options.offline_length, built.engine.config.max_model_len // 3)
    items = offline_items(options.offline_count, 1, vocabulary(built), reach)
    rows = [
        run(built, items, {"prefill_chunk_size": size, "target_itl": 0.0}, budget=str(size))
        for size in sizes(built, options)
    ]
    rows.append(run(built, items, {"target_itl": 0.0, "prefill_first": True}, budget="prompts first"))
    return rows


def longest_answer(built: Built) -> int:
    """The ``max_tokens`` that the requests of the admission study ask for."""
    return min(2048, built.engine.config.max_model_len // 2)


def admission(built: Built, options: argparse.Namespace) -> Rows:
    """Requests that may answer at length and mostly do not, in a pool that holds few long answers."""
    limits = built.engine.config
    asked = longest_answer(built)
    below, rng = vocabulary(built), random.Random(5)
    items: list[Item] = []
    for _ in range(options.admission_count):
        prompt = random_ids(rng, rng.randint(asked // 16, asked // 4), below)
        items.append(Item(0.0, prompt, rng.randint(asked // 16, asked // 4), asked=asked))
    one = pages_for(asked + asked // 4)  # pages of the longest possible request
    rows: Rows = []
    for pages, on_demand in itertools.product((24 * one, 8 * one), (False, True)):
        changes = {"num_pages": min(pages, limits.num_pages), "on_demand": on_demand}
        name = "on_demand" if on_demand else "reserve"
        rows.append(run(built, items, changes, pages=changes["num_pages"], admission=name))
    return rows


def chats(built: Built, sessions: int, turns: int, tokens: int) -> list[Item]:
    """Growing chats whose turns bring ``tokens`` new tokens each and get a sixteenth of that back."""
    rng, below = random.Random(11), vocabulary(built)
    items: list[Item] = []
    for index in range(sessions):
        parts = [random_ids(rng, tokens, below) for _ in range(turns)]
        items.append(Item(0.02 * index, parts[0], max(4, tokens // 16), turns=tuple(parts[1:]), kind="chat"))
    return items


def offload(built: Built, options: argparse.Namespace) -> Rows:
    """Chats of which the pool holds a third: what is evicted is computed again, or comes back from the host."""
    limits = built.engine.config
    tokens = min(1024, limits.max_model_len // 6)
    turns = 4
    one = pages_for(turns * (tokens + tokens // 16))  # pages of a whole chat
    pages = min(limits.num_pages, max(2 * one, options.sessions * one // 3))
    items = chats(built, options.sessions, turns, tokens)
    # Few at once, or the pool is full of running ones and holds no cache at all.
    at_once = max(1, min(limits.max_batch_size, pages // (2 * one)))
    rows: Rows = []
    for nbytes in (0, options.offload_bytes):
        facts = {"host_memory": f"{nbytes >> 20} MiB", "pages": pages}
        changes = {"host_bytes": nbytes, "num_pages": pages, "max_batch_size": at_once}
        rows.append(run(built, items, changes, **facts))
    return rows


STUDIES: dict[str, Callable[[Built, argparse.Namespace], Rows]] = {
    "budgets": budgets,
    "offline": offline,
    "attention": attention,
    "admission": admission,
    "offload": offload,
}


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(made)
    made.add_argument("--only", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    made.add_argument("--budgets", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    made.add_argument("--rates", nargs="+", type=float, default=[4.0, 8.0], help="arrivals a second")
    made.add_argument("--seconds", type=float, default=6.0, help="of arrivals, for each configuration")
    made.add_argument("--longest", type=int, default=7680, help="longest prompt of the arrivals")
    made.add_argument("--offline-count", type=int, default=256)
    made.add_argument("--offline-length", type=int, default=512, help="longest prompt and answer, offline")
    made.add_argument("--admission-count", type=int, default=192)
    made.add_argument("--sessions", type=int, default=12, help="chats of the offload study")
    made.add_argument("--offload-bytes", type=int, default=6 << 30)
    made.add_argument("--figures", type=Path, help="folder for figures of this result")
    return made


def main() -> int:
    options = arguments().parse_args()
    built = build_engine(options, prefill_chunk_size=str(max(options.budgets)))
    warm(built, options)
    options.out = options.out or results.result_path("studies", options.label)  # one file for all studies
    found: dict[str, Any] = {}
    result: dict[str, Any] = {}
    for name in options.only:
        print(f"{name}:", flush=True)
        try:
            found[name] = STUDIES[name](built, options)
        except (RuntimeError, ValueError) as error:  # the other studies are still worth having
            print(f"  failed: {error}", file=sys.stderr)
        result = write_result("studies", built, options, studies=found)
    if options.figures is not None:
        from benchmarks.engine_figures import draw_studies

        draw_studies(result, options.figures)
    return 0 if len(found) == len(options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
