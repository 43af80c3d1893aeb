"""The packed batch of one forward: decode rows first, then prefill chunks, in one flat token axis.

    tokens   [d0][d1]...[dn] [p0 p0 p0 ...][p1 p1 ...]
    rows      0   1      n    n+1            n+2

A row is one sequence's part of the tick. Decode rows bring one token; prefill rows any number. The
:class:`BatchPacker` writes all integers into a preallocated (on CUDA: pinned) host buffer and moves
them to the device in a single copy.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from helios.config import PAGE_SIZE
from helios.runtime.page_pool import DUMMY_PAGE, pages_for
from helios.runtime.policy import RowPlan


class HostRow(NamedTuple):
    """A row as plain numbers, for the CPU's attention, which would else read them from tensors per layer."""

    start: int  # first of its tokens in the batch
    stop: int
    length: int  # keys visible to the row's last token
    runs: list[tuple[int, int]]  # where these lie, in order: first slot and number of each run of neighbours

    @staticmethod
    def of(table: list[int], length: int, start: int, stop: int) -> HostRow:
        """From the sequence's page table, which may be longer than the keys need."""
        runs: list[tuple[int, int]] = []
        for at in range(0, length, PAGE_SIZE):
            slot, count = table[at // PAGE_SIZE] * PAGE_SIZE, min(PAGE_SIZE, length - at)
            if runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((slot, count))
        return HostRow(start, stop, length, runs)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs to know of the rows. ``R = num_decode + prefill rows``; int32 tensors.

    ``max_*`` are upper bounds that FlashAttention takes as plain numbers.
    """

    num_decode: int
    page_table: torch.Tensor  # [R, pages]
    kv_lengths: torch.Tensor  # [R] keys visible to the row's last token
    prefill_cu_q: torch.Tensor  # [prefill rows + 1] offsets among the prefill tokens
    max_prefill_q: int
    max_kv: int
    host_rows: list[HostRow] | None = None  # on a CPU

    @property
    def num_prefill(self) -> int:
        return self.page_table.shape[0] - self.num_decode


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one model forward over ``T`` tokens in ``R`` rows; int64 unless said."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T] page * PAGE_SIZE + offset where the token's K and V are written
    logit_rows: torch.Tensor  # [S] token indices whose logits are wanted
    attention: AttentionPlan


class BatchPacker:
    """Packs row plans into a :class:`ForwardBatch` on ``device``.

    ``max_rows`` bounds the rows of a tick and ``max_pages`` the pages of a sequence.
    """

    def __init__(self, device: torch.device, max_tokens: int, max_rows: int, max_pages: int) -> None:
        self._device = device
        # Per token: id, position, slot, logit row; per row: length, offset, page table.
        size = 4 * max_tokens + max_rows * (max_pages + 2) + 1
        pinned = device.type == "cuda"
        # Two in turn: with lookahead the last tick's copy to the device may still be reading the other one.
        self._hosts = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]

    def pack(self, rows: Seq[RowPlan], samplers: Seq[int], last_tokens: torch.Tensor) -> ForwardBatch:
        """Pack ``rows`` (decode rows first) and ask for the logits of the last token of each row in
        ``samplers`` (indices into ``rows``). One host-to-device copy. A token that is still on the device
        is taken from ``last_tokens`` at its sequence's batch row."""
        num_rows = len(rows)
        num_decode = 0
        while num_decode < num_rows and rows[num_decode].count == 1:
            num_decode += 1
        num_tokens = sum(row.count for row in rows)
        pages = max(pages_for(row.end) for row in rows)
        wide = [num_tokens, num_tokens, num_tokens, len(samplers)]  # what becomes int64
        narrow = [num_rows, num_rows - num_decode + 1, num_rows * pages]
        self._hosts.reverse()
        host = self._hosts[0][: sum(wide) + sum(narrow)]
        ids, positions, slots, logit_rows, lengths, cu_q, tables = (
            part.numpy() for part in host.split_with_sizes(wide + narrow)
        )
        tables = tables.reshape(num_rows, pages)
        at = prefill = 0
        ends: list[int] = []
        host_rows: list[HostRow] | None = [] if self._device.type == "cpu" else None
        any_pending = False
        cu_q[0] = 0
        for index, row in enumerate(rows):
            sequence, start, end = row.sequence, row.start, row.end
            table = sequence.page_table
            used = min(len(table), pages)
            tables[index, :used] = table[:used]
            tables[index, used:] = DUMMY_PAGE
            lengths[index] = end
            stop = at + row.count
            if row.count == 1:
                pending = start == len(sequence.token_ids)
                ids[at] = -1 - sequence.row if pending else sequence.token_ids[start]
                any_pending |= pending
                positions[at] = start
                slots[at] = table[start // PAGE_SIZE] * PAGE_SIZE + start % PAGE_SIZE
            else:
                ids[at:stop] = sequence.token_ids[start:end]
                places = np.arange(start, end, dtype=np.int32)
                positions[at:stop] = places
                slots[at:stop] = tables[index][places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            if start < sequence.num_sealed_blocks * PAGE_SIZE:
                # Only the last token of a fully cached prompt: its page is shared and already holds it.
                slots[at:stop] = DUMMY_PAGE * PAGE_SIZE
            if index >= num_decode:
                prefill += 1
                cu_q[prefill] = cu_q[prefill - 1] + row.count
            if host_rows is not None:
                host_rows.append(HostRow.of(table, end, at, stop))
            ends.append(stop - 1)
            at = stop
        for index, sampler in enumerate(samplers):
            logit_rows[index] = ends[sampler]
        device = host.to(self._device, non_blocking=True)
        input_ids, where, slot_ids, wanted = device[: sum(wide)].long().split_with_sizes(wide)
        kv_lengths, prefill_cu_q, page_table = device[sum(wide) :].split_with_sizes(narrow)
        if any_pending:
            input_ids = torch.where(input_ids < 0, last_tokens[(-1 - input_ids).clamp_(min=0)], input_ids)
        plan = AttentionPlan(
            num_decode,
            page_table.view(num_rows, pages),
            kv_lengths,
            prefill_cu_q,
            max((row.count for row in rows[num_decode:]), default=0),
            pages * PAGE_SIZE,
            host_rows,
        )
        return ForwardBatch(input_ids, where, slot_ids, wanted, plan)
