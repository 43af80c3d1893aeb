"""Changes to the logits before sampling: bias, penalties, minimum length and grammar masks.

State lives in tensors with one entry per batch row, allocated when the first request needs them, so a
steady batch is edited by a handful of kernels however many rows take part, and a batch in which no row
asks for anything costs one dictionary look-up per row. The order is vLLM's: bias, then the repetition,
frequency and presence penalties; what is forbidden (minimum length, grammar) comes last.

A tick of the engine::

    plan = edits.plan(rows)                       # None: nothing to do
    for index, words in edits.mask_rows(plan):    # while the forward runs
        sequences[index].grammar.fill_mask(words)
    logits = edits.apply(logits, plan)
    ...sample...
    edits.append(rows_on_device, token_ids)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from helios.runtime.request import Sequence
from helios.runtime.transfer import to_device


@dataclass(frozen=True, slots=True)
class _Row:
    """What one batch row asks for."""

    bias: tuple[tuple[int, float], ...]
    banned: tuple[int, ...]  # ids that may not come before min_tokens are written
    penalised: bool
    constrained: bool


@dataclass(frozen=True, slots=True)
class EditPlan:
    """Which rows of one batch get which edits. ``index`` tensors count within the batch, ``row`` tensors
    name the persistent row; both int64. It holds until the batch's composition changes."""

    bias: tuple[Tensor, Tensor, Tensor] | None  # index, token id, value; one entry each
    penalties: tuple[Tensor, Tensor] | None  # index, row
    bans: tuple[Tensor, Tensor, Tensor] | None  # index, row, token id
    masked: tuple[int, ...]  # batch indices of constrained rows
    masked_index: Tensor | None


class _PenaltyState:
    """Token counts of every row. Takes 5 bytes per row and vocabulary id (196 MB for 256 rows of Qwen3)."""

    def __init__(self, max_rows: int, vocabulary_size: int, device: torch.device) -> None:
        self.output_counts = torch.zeros(max_rows, vocabulary_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(max_rows, vocabulary_size, dtype=torch.bool, device=device)
        # [3, rows]: repetition, frequency, presence
        self.strength = torch.zeros(3, max_rows, device=device)

    def admit(self, row: int, sequence: Sequence) -> None:
        params = sequence.job.params
        device = self.output_counts.device
        self.output_counts[row] = 0
        self.in_prompt[row] = False
        tokens = to_device(torch.tensor(sequence.token_ids), device)
        self.in_prompt[row, tokens[: sequence.num_prompt_tokens]] = True
        self.append(
            torch.full_like(tokens, row)[sequence.num_prompt_tokens :], tokens[sequence.num_prompt_tokens :]
        )
        strength = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.strength[:, row] = to_device(torch.tensor(strength), device)

    def append(self, rows: Tensor, token_ids: Tensor) -> None:
        flat = rows * self.output_counts.shape[1] + token_ids
        self.output_counts.view(-1).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))

    def apply_(self, logits: Tensor, rows: Tensor) -> None:
        """Penalise ``logits`` [n, vocab] float32, which belong to ``rows`` [n], in place."""
        repetition, frequency, presence = self.strength[:, rows, None]  # [n, 1] each
        counts = self.output_counts[rows].float()  # [n, vocab]
        seen = self.in_prompt[rows].logical_or_(counts > 0)
        logits.mul_(torch.where(logits > 0, 1 / repetition, repetition).masked_fill_(~seen, 1))
        logits.sub_(counts.clamp(max=1).mul_(presence)).sub_(counts.mul_(frequency))


class LogitEdits:
    """Edits of all batch rows. ``vocabulary_size`` is the width of the logits, padding included.

    ``end_token_ids`` end a sequence by themselves (the model's end tokens). A row is admitted when its
    sequence joins the batch, with whatever output it has by then, so a sequence that was put back and
    resumed needs nothing special; rows that need no edits may be admitted and released all the same.
    """

    def __init__(
        self, max_rows: int, vocabulary_size: int, device: torch.device, end_token_ids: Iterable[int]
    ) -> None:
        self._max_rows = max_rows
        self._vocabulary_size = vocabulary_size
        self._device = device
        self._end_token_ids = tuple(end_token_ids)
        self._rows: dict[int, _Row] = {}
        self._penalties: _PenaltyState | None = None
        self._until_end_allowed: Tensor | None = None  # [rows] int64: tokens to go before min_tokens
        self._mask_table: Tensor | None = None  # see mask_table
        self._masks: list[Tensor] = []  # two [rows, words] int32 on the host, used in turn
        self._plan: tuple[tuple[int, ...], EditPlan | None] | None = None

    @property
    def mask_words(self) -> int:
        """Length of a grammar mask row, in 32-bit words."""
        return (self._vocabulary_size + 31) // 32

    def admit(self, row: int, sequence: Sequence) -> None:
        """Take a sequence into ``row``."""
        self.release(row)
        params = sequence.job.params
        if not params.needs_logit_edits:
            return
        # A finished grammar allows nothing but an end token, so there it alone decides when to end.
        to_go = params.min_tokens - sequence.num_output_tokens if params.grammar is None else 0
        ends = () if params.ignore_eos else self._end_token_ids
        edits = _Row(
            bias=params.logit_bias,
            banned=tuple({*ends, *params.stop_token_ids}) if to_go > 0 else (),
            penalised=bool(
                params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
            ),
            constrained=params.grammar is not None,
        )
        if edits.penalised:
            if self._penalties is None:
                self._penalties = _PenaltyState(self._max_rows, self._vocabulary_size, self._device)
            self._penalties.admit(row, sequence)
        if edits.banned:
            if self._until_end_allowed is None:
                self._until_end_allowed = torch.zeros(self._max_rows, dtype=torch.long, device=self._device)
            self._until_end_allowed[row] = to_go
        self._rows[row] = edits
        self._plan = None

    def append(self, rows: Tensor, token_ids: Tensor) -> None:
        """Record new output tokens, ``rows`` and ``token_ids`` [n] int64 on the device. A row may occur
        more than once."""
        if self._penalties is not None:
            self._penalties.append(rows, token_ids)
        if self._until_end_allowed is not None:
            self._until_end_allowed.scatter_add_(0, rows, torch.full_like(rows, -1))

    def release(self, row: int) -> None:
        """Forget a row. Its tensors are cleared when it is used again."""
        if self._rows.pop(row, None) is not None:
            self._plan = None

    def plan(self, rows: Rows[int]) -> EditPlan | None:
        """The edits of a batch whose logits belong to ``rows``, or None when it needs none."""
        if not self._rows:
            return None
        key = tuple(rows)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, self._make_plan(key)
        return self._plan[1]

    def _make_plan(self, rows: tuple[int, ...]) -> EditPlan | None:
        edits = [(index, row, self._rows[row]) for index, row in enumerate(rows) if row in self._rows]
        if not edits:
            return None
        bias = [(index, *entry) for index, _, edit in edits for entry in edit.bias]
        bans = [(index, row, token_id) for index, row, edit in edits for token_id in edit.banned]
        penalties = [(index, row) for index, row, edit in edits if edit.penalised]
        masked = tuple(index for index, _, edit in edits if edit.constrained)
        values = to_device(torch.tensor([value for _, _, value in bias]), self._device)
        where = self._columns([(index, token_id) for index, token_id, _ in bias])
        ban_columns, penalty_columns = self._columns(bans), self._columns(penalties)
        return EditPlan(
            bias=(where[0], where[1], values) if bias else None,
            penalties=(penalty_columns[0], penalty_columns[1]) if penalties else None,
            bans=(ban_columns[0], ban_columns[1], ban_columns[2]) if bans else None,
            masked=masked,
            masked_index=to_device(torch.tensor(masked), self._device) if masked else None,
        )

    def _columns(self, entries: Rows[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """Tuples as one int64 tensor per place, in one copy."""
        columns = torch.tensor(list(zip(*entries, strict=True)), dtype=torch.long)
        return to_device(columns, self._device).unbind()

    def mask_rows(self, plan: EditPlan | None) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """The batch index of each constrained row and the words its grammar must fill before ``apply``
        (bit ``i % 32`` of word ``i // 32`` allows token ``i``)."""
        if plan is None or not plan.masked:
            return
        if not self._masks:
            shape, pinned = (self._max_rows, self.mask_words), self._device.type == "cuda"
            self._masks = [torch.empty(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        # The last tick's copy to the device may still be reading the other one.
        self._masks.reverse()
        words: NDArray[np.int32] = self._masks[0].numpy()
        for place, index in enumerate(plan.masked):
            yield index, words[place]

    def apply(self, logits: Tensor, plan: EditPlan | None) -> Tensor:
        """Edited logits, float32 [n, vocab]; the very same tensor when there is nothing to do. The input
        is never changed: log probabilities are reported from it."""
        if plan is None:
            return logits
        edited = logits.to(torch.float32, copy=True)
        if plan.bias is not None:
            index, token_ids, values = plan.bias
            edited.index_put_((index, token_ids), values, accumulate=True)
        if plan.penalties is not None and self._penalties is not None:
            index, rows = plan.penalties
            if len(index) == len(edited):
                self._penalties.apply_(edited, rows)
            else:
                some = edited[index]
                self._penalties.apply_(some, rows)
                edited[index] = some
        if plan.bans is not None and self._until_end_allowed is not None:
            index, rows, token_ids = plan.bans
            values = torch.zeros_like(rows, dtype=torch.float32)
            values.masked_fill_(self._until_end_allowed[rows] > 0, -math.inf)
            edited.index_put_((index, token_ids), values, accumulate=True)
        if plan.masked_index is not None:
            words = self._masks[0][: len(plan.masked)].to(self._device, non_blocking=True)
            if self._mask_table is None:
                self._mask_table = mask_table(self._device)
            edited.index_add_(0, plan.masked_index, mask_values(words, logits.shape[1], self._mask_table))
        return edited


def mask_table(device: torch.device) -> Tensor:
    """For each value of a byte what its bits add to eight logits: 0 where set, else minus infinity. [256, 8]"""
    byte, bit = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    return torch.zeros(256, 8, device=device).masked_fill_((byte >> bit) & 1 == 0, -math.inf)


def mask_values(words: Tensor, vocabulary_size: int, table: Tensor) -> Tensor:
    """What to add to the logits: 0 for each set bit of ``words`` [n, words] int32, lowest bit first, and
    minus infinity for the others, by ``table``, a :func:`mask_table`. Float32, [n, vocabulary_size]."""
    # A look-up by byte: seven times as fast on the CPU as shifting the bits out. Words and bytes are both
    # little-endian on every supported machine.
    return functional.embedding(words.view(torch.uint8).int(), table).flatten(1)[:, :vocabulary_size]
