"""A model that is plain arithmetic over a page memory which it checks at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from helios.config import PAGE_SIZE
from helios.runtime.interfaces import StepResult
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

    ``break_next`` makes the next forward raise; ``poison`` names jobs whose logits come out as NaN;
    ``scripts`` holds the output of jobs that must not follow :func:`next_token`; ``forward_seconds`` is what a
    forward says it took.
    """

    def __init__(self, num_pages: int) -> None:
        self.memory = np.full((num_pages + 1) * PAGE_SIZE, -1, dtype=np.int64)
        self.rows_in_use: set[int] = set()
        self.last_tokens: dict[int, int] = {}
        self.break_next = self.break_admit = self.break_copy = False
        self.poison: set[str] = set()
        self.scripts: dict[str, list[int]] = {}
        self.plans: list[list[tuple[str, int, int]]] = []
        self.forward_seconds = 0.001

    def admit(self, sequence: Sequence) -> None:
        assert sequence.row not in self.rows_in_use
        self.rows_in_use.add(sequence.row)
        if self.break_admit:
            self.break_admit = False
            raise MemoryError("no room for what a row needs")

    def release(self, sequence: Sequence) -> None:
        self.rows_in_use.remove(sequence.row)

    def set_pages(self, sequence: Sequence) -> None:
        assert sequence.row in self.rows_in_use

    def copy_page(self, source: int, target: int) -> None:
        if self.break_copy:
            self.break_copy = False
            raise RuntimeError("a broken copy")
        a, b = source * PAGE_SIZE, target * PAGE_SIZE
        self.memory[b : b + PAGE_SIZE] = self.memory[a : a + PAGE_SIZE]

    def forward(self, rows: list[RowPlan], samplers: list[int]) -> FakePending:
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
                known = position < len(sequence.token_ids)
                self.memory[slot] = sequence.token_ids[position] if known else self.last_tokens[sequence.row]
        outputs: list[list[int]] = []
        for row in rows:
            sequence = row.sequence
            table = np.array(sequence.page_table[: (row.end + PAGE_SIZE - 1) // PAGE_SIZE])
            read = self.memory.reshape(-1, PAGE_SIZE)[table].ravel()[: row.end]
            known = sequence.token_ids[: row.end]
            assert (read[: len(known)] == known).all(), "a page does not hold this sequence's tokens"
            outputs.append(read.tolist())
        sequences = [rows[index].sequence for index in samplers]
        return FakePending(sequences, [outputs[index] for index in samplers])

    def sample(self, pending: object) -> None:
        assert isinstance(pending, FakePending)
        pending.tokens = [
            self._choose(sequence, read)
            for sequence, read in zip(pending.sequences, pending.read, strict=True)
        ]
        for sequence, token in zip(pending.sequences, pending.tokens, strict=True):
            if sequence.row >= 0:
                self.last_tokens[sequence.row] = token

    def _choose(self, sequence: Sequence, read: list[int]) -> int:
        if sequence.forced:
            return sequence.forced[-1]
        script = self.scripts.get(sequence.job.job_id)
        return next_token(read) if script is None else script[len(read) - sequence.num_prompt_tokens]

    def collect(self, pending: object) -> StepResult:
        assert isinstance(pending, FakePending)
        finite = [sequence.job.job_id not in self.poison for sequence in pending.sequences]
        return StepResult(pending.tokens, finite, [None] * len(finite), self.forward_seconds)


class FakeStore:
    """Host slots over a fake runner's memory. A load ends only when it is asked for; until then its page
    holds garbage, which the runner's own check finds if anybody reads it."""

    def __init__(self, runner: FakeRunner, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pages = runner.memory.reshape(-1, PAGE_SIZE)
        self._slots = np.full((num_slots, PAGE_SIZE), -3, dtype=np.int64)
        self._under_way: list[tuple[int, np.ndarray]] = []
        self.polls_until_done = 2

    def save(self, page: int, slot: int) -> None:
        self._slots[slot] = self._pages[page]

    def load(self, slot: int, page: int) -> None:
        self._pages[page] = -2
        self._under_way.append((page, self._slots[slot].copy()))

    def loaded(self, *, wait: bool = False) -> list[int]:
        self.polls_until_done -= 1
        if self.polls_until_done > 0 and not wait:
            return []
        self.polls_until_done = 2
        done = self._under_way[:1]
        del self._under_way[:1]
        for page, content in done:
            self._pages[page] = content
        return [page for page, _ in done]


@dataclass
class FakePending:
    """A forward between its launch and its tokens."""

    sequences: list[Sequence]
    read: list[list[int]]  # what each sampled row's pages hold
    tokens: list[int] = field(default_factory=list)


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What a job alone would produce."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]
