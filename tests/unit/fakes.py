"""A model that is plain arithmetic over a page memory which it checks at every step."""

from __future__ import annotations

import numpy as np

from helios.config import PAGE_SIZE
from helios.runtime.engine import StepResult
from helios.runtime.page_pool import DUMMY_PAGE
from helios.runtime.policy import RowPlan
from helios.runtime.request import Sequence

END = 7


def next_token(token_ids: list[int]) -> int:
    """The fake model: a function of all tokens so far."""
    value = (sum(token_ids[-5:]) * 31 + len(token_ids) * 17 + token_ids[0]) % 251
    return value if value != END or len(token_ids) % 3 == 0 else value + 1


class FakeRunner:
    """Implements the engine's ``Runner``. Pages hold token ids; a row must read back exactly its own.

    ``break_next`` makes the next forward raise; ``poison`` names jobs whose logits come out as NaN.
    """

    def __init__(self, num_pages: int) -> None:
        self.memory = np.full((num_pages + 1) * PAGE_SIZE, -1, dtype=np.int64)
        self.rows_in_use: set[int] = set()
        self.break_next = False
        self.poison: set[str] = set()
        self.plans: list[list[tuple[str, int, int]]] = []

    def admit(self, sequence: Sequence) -> None:
        assert sequence.row not in self.rows_in_use
        self.rows_in_use.add(sequence.row)

    def release(self, sequence: Sequence) -> None:
        self.rows_in_use.remove(sequence.row)

    def copy_page(self, source: int, target: int) -> None:
        a, b = source * PAGE_SIZE, target * PAGE_SIZE
        self.memory[b : b + PAGE_SIZE] = self.memory[a : a + PAGE_SIZE]

    def run(self, rows: list[RowPlan], samplers: list[int]) -> StepResult:
        if self.break_next:
            self.break_next = False
            raise RuntimeError("a broken tick")
        self.plans.append([(row.sequence.job.job_id, row.start, row.count) for row in rows])
        written: set[int] = set()
        for row in rows:
            sequence = row.sequence
            assert sequence.row in self.rows_in_use
            for position in range(row.start, row.end):
                block, offset = divmod(position, PAGE_SIZE)
                page = sequence.page_table[block] if block >= sequence.num_sealed_blocks else DUMMY_PAGE
                slot = page * PAGE_SIZE + offset
                if page != DUMMY_PAGE:
                    assert slot not in written, "two rows write one slot"
                    written.add(slot)
                self.memory[slot] = sequence.token_ids[position]
        for row in rows:
            sequence = row.sequence
            table = np.array(sequence.page_table[: (row.end + PAGE_SIZE - 1) // PAGE_SIZE])
            read = self.memory.reshape(-1, PAGE_SIZE)[table].ravel()[: row.end]
            assert (read == sequence.token_ids[: row.end]).all(), (
                "a page does not hold this sequence's tokens"
            )
        tokens = [next_token(rows[index].sequence.token_ids) for index in samplers]
        finite = [rows[index].sequence.job.job_id not in self.poison for index in samplers]
        return StepResult(tokens, finite, [None] * len(samplers), 0.001)


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What a job alone would produce."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]
