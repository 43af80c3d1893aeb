"""The scheduling rules: which tokens run in a tick, which job is next, who makes room. Pure functions.

Decode goes first: every sequence with exactly one uncomputed token gets it. What is left of the token
budget goes to prompts: first one chunk for the oldest prompt that has made no progress for ``prefill_age``
seconds, then the prompts that fit whole, then one chunk of the first that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from helios.runtime.request import Job, Sequence


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules in force. ``budget`` is a tick's tokens, ages are seconds.

    ``prefill_first`` lets prompts go before decoding, ``long_prefill`` bounds one prompt's tokens in a tick and
    ``max_prompts`` the prompts (0: no bound), ``by_priority`` orders jobs by their priority, lower first, except
    those that have waited for ``priority_age``, which go before all others.
    """

    budget: int
    prefill_age: float = 0.1
    prefill_first: bool = False
    long_prefill: int = 0
    by_priority: bool = False
    priority_age: float = 30.0
    max_prompts: int = 0


@dataclass(slots=True, eq=False)  # not frozen: one is made for each row of each tick
class RowPlan:
    """``count`` tokens of one sequence, from position ``start``."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class TimeBudget(Protocol):
    """How long a tick may take, in prompt tokens; see :class:`helios.runtime.cost_model.TickBudget`."""

    def cut(self, start: int, count: int) -> int:
        """How many of ``count`` tokens from position ``start`` still fit."""
        ...

    def add(self, start: int, count: int) -> None:
        """They are in the tick."""
        ...


def plan(
    sequences: Iterable[Sequence],
    rules: Rules,
    now: float,
    time_beside: Callable[[int], TimeBudget | None] | None = None,
) -> list[RowPlan]:
    """The rows of one tick, decode rows first.

    The token budget is raised to one per decoding sequence plus one so that both kinds always progress. Beside
    decoding, the budget that ``time_beside(decode rows)`` gives bounds the prompt tokens further. A prompt that
    gets a chunk has its ``aged_since`` set to ``now``.
    """
    rows: list[RowPlan] = []
    prompts: list[Sequence] = []
    for sequence in sequences:
        start = (
            sequence.num_computed_tokens
        )  # num_uncomputed_tokens, without a call for each row of each tick
        if len(sequence.token_ids) + sequence.num_pending_tokens - start == 1:
            rows.append(RowPlan(sequence, start, 1))
        else:
            prompts.append(sequence)
    time = None
    if rules.prefill_first and prompts:
        # The last token of a fully cached prompt is prefill, however short.
        rows = [row for row in rows if row.end == row.sequence.num_prompt_tokens]
    elif rows and prompts and time_beside is not None:
        time = time_beside(len(rows))
    if rules.by_priority:
        prompts.sort(key=lambda sequence: urgency(sequence.job, now, rules))
    left = max(rules.budget, len(rows) + 1) - len(rows)
    places = rules.max_prompts or len(prompts)

    def chunk(sequence: Sequence) -> int:
        if not places:
            return 0
        count = min(left, sequence.num_uncomputed_tokens)
        if rules.long_prefill:
            count = min(count, rules.long_prefill)
        return time.cut(sequence.num_computed_tokens, count) if time is not None and count else count

    def take(sequence: Sequence, count: int) -> None:
        nonlocal left, places
        rows.append(RowPlan(sequence, sequence.num_computed_tokens, count))
        places -= 1
        sequence.aged_since = now
        left -= count
        if time is not None:
            time.add(sequence.num_computed_tokens, count)

    oldest = min(prompts, key=lambda sequence: sequence.aged_since, default=None)
    if oldest is not None and now - oldest.aged_since >= rules.prefill_age:
        prompts.remove(oldest)
        take(oldest, chunk(oldest))
    longer: list[Sequence] = []
    for sequence in prompts:
        count = chunk(sequence)
        if 0 < count == sequence.num_uncomputed_tokens:
            take(sequence, count)
        else:
            longer.append(sequence)
    for sequence in longer:
        count = chunk(sequence)
        if count:
            take(sequence, count)
        if not rules.long_prefill:
            break  # what is left after one chunk would only cut a second prompt into small ones
    # A chunk of one token is computed as a decode row, wherever it stands in its prompt.
    rows.sort(key=lambda row: row.count != 1)
    return rows


def urgency(job: Job, now: float, rules: Rules) -> tuple[int, int, float]:
    """Sorts jobs by who goes first: those that have waited too long, then by priority, then by arrival."""
    received = job.timings.received
    if not rules.by_priority:
        return (0, 0, received)
    if now - received >= rules.priority_age:
        return (0, 0, received)
    return (1, job.priority, received)


def next_job(waiting: Seq[Job], now: float, rules: Rules) -> Job:
    """The waiting job that is admitted next; under first come, first served the head of the queue."""
    if not rules.by_priority:
        return waiting[0]
    return min(waiting, key=lambda job: urgency(job, now, rules))


def victim(running: Iterable[Job], now: float, rules: Rules) -> Job:
    """The running job that is put back when memory is short: the least urgent, of equals the newest.

    ``running`` is in the order of admission.
    """
    jobs = list(running)
    if not rules.by_priority:
        return jobs[-1]
    return max(enumerate(jobs), key=lambda pair: (urgency(pair[1], now, rules)[:2], pair[0]))[1]


def yields_to(running: Iterable[Job], job: Job, now: float, rules: Rules) -> Job | None:
    """The running job that makes room for waiting ``job``, if one is strictly less urgent."""
    jobs = list(running)
    if not rules.by_priority or not jobs:
        return None
    least = victim(jobs, now, rules)
    return least if urgency(least, now, rules)[:2] > urgency(job, now, rules)[:2] else None
