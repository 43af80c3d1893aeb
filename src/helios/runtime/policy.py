"""Which tokens of which sequences run in this tick. Pure: sequences in, a plan out.

Decode goes first: every sequence with exactly one uncomputed token gets it. What is left of the token
budget goes to prompts: first one chunk for the oldest prompt that has made no progress for ``age``
seconds, then the prompts that fit whole, then one chunk of the first that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helios.runtime.request import Sequence


@dataclass(frozen=True, slots=True)
class RowPlan:
    """``count`` tokens of one sequence, from position ``start``."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


def plan(sequences: Iterable[Sequence], budget: int, now: float, age: float) -> list[RowPlan]:
    """The rows of one tick, decode rows first.

    ``budget`` is the number of tokens, raised to one per decoding sequence plus one so that both kinds
    always progress. A prompt that gets a chunk has its ``aged_since`` set to ``now``.
    """
    rows: list[RowPlan] = []
    prompts: list[Sequence] = []
    for sequence in sequences:
        if sequence.num_uncomputed_tokens == 1:
            rows.append(RowPlan(sequence, sequence.num_computed_tokens, 1))
        else:
            prompts.append(sequence)
    left = max(budget, len(rows) + 1) - len(rows)

    def take(sequence: Sequence) -> None:
        nonlocal left
        count = min(left, sequence.num_uncomputed_tokens)
        rows.append(RowPlan(sequence, sequence.num_computed_tokens, count))
        sequence.aged_since = now
        left -= count

    oldest = min(prompts, key=lambda sequence: sequence.aged_since, default=None)
    if oldest is not None and now - oldest.aged_since >= age:
        prompts.remove(oldest)
        take(oldest)
    longer: list[Sequence] = []
    for sequence in prompts:
        if 0 < sequence.num_uncomputed_tokens <= left:
            take(sequence)
        else:
            longer.append(sequence)
    if left and longer:
        take(longer[0])
    # A chunk of one token is computed as a decode row, wherever it stands in its prompt.
    rows.sort(key=lambda row: row.count != 1)
    return rows
