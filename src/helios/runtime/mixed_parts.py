"""The inputs of a mixed CUDA graph, as the host packs them: decoding rows' tokens, prompts' chunks, padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from helios.config import PAGE_SIZE
from helios.runtime.policy import RowPlan

PREFILL_ROWS = 32  # prompts in one mixed graph


@dataclass(frozen=True, slots=True)
class MixedParts:
    """The inputs of a mixed graph of R rows and T tokens, parts of one int32 buffer: a numpy array on the host,
    where they are filled in, or a tensor on the device."""

    ids: Any  # [T]; -1 - batch row where the token is still on the device
    positions: Any  # [T]
    slots: Any  # [T]
    logit_rows: Any  # [R], of all rows: the newest token of each
    logit_keys: Any  # [R], likewise: where its length and pages stand in the two below
    kv_lengths: Any  # [R + PREFILL_ROWS], of decoding rows, then of prompts
    table: Any  # [R + PREFILL_ROWS, pages], likewise
    cu_q: Any  # [PREFILL_ROWS + 1], of prompts
    total: int

    @staticmethod
    def _sizes(rows: int, tokens: int, pages: int) -> tuple[int, ...]:
        both = rows + PREFILL_ROWS
        return tokens, tokens, tokens, rows, rows, both, both * pages, PREFILL_ROWS + 1

    @staticmethod
    def size(rows: int, tokens: int, pages: int) -> int:
        """Numbers in the buffer of a graph."""
        return sum(MixedParts._sizes(rows, tokens, pages))

    @staticmethod
    def of(buffer: Any, rows: int, tokens: int, pages: int) -> MixedParts:
        """Cut ``buffer`` for a graph."""
        parts: list[Any] = []
        at = 0
        for size in MixedParts._sizes(rows, tokens, pages):
            parts.append(buffer[at : at + size])
            at += size
        parts[6] = parts[6].reshape(-1, pages)
        return MixedParts(*parts, total=at)

    def clear(self) -> None:
        """No rows. Padding tokens write to the dummy page; padding prompts have one key, decoding rows none."""
        for part in (
            self.ids,
            self.positions,
            self.slots,
            self.logit_rows,
            self.logit_keys,
            self.kv_lengths,
            self.table,
            self.cu_q,
        ):
            part[:] = 0
        self.kv_lengths[-PREFILL_ROWS:] = 1

    def fill(self, rows: list[RowPlan], decode: int, tables: np.ndarray) -> None:
        """Write ``rows``, of which the first ``decode`` bring one token. ``tables`` are those of all batch
        rows, by row."""
        self.clear()
        self.logit_keys[:] = np.arange(len(self.logit_keys))  # behind the last row: no keys
        sequences = [row.sequence for row in rows]
        pages = tables[[sequence.row for sequence in sequences]]
        starts = np.array([row.start for row in rows], dtype=np.int32)
        # A fully cached prompt's last token: its shared page holds it, the dummy page takes it.
        sealed = np.array([sequence.num_sealed_blocks for sequence in sequences], dtype=np.int32) * PAGE_SIZE
        self.ids[:decode] = [
            sequence.token_ids[row.start] if row.start < len(sequence.token_ids) else -1 - sequence.row
            for row, sequence in zip(rows[:decode], sequences, strict=False)
        ]
        begin = starts[:decode]
        self.positions[:decode] = begin
        slots = pages[np.arange(decode), begin // PAGE_SIZE] * PAGE_SIZE + begin % PAGE_SIZE
        self.slots[:decode] = np.where(begin < sealed[:decode], 0, slots)
        self.kv_lengths[:decode] = begin + 1
        self.table[:decode] = pages[:decode]
        self.logit_rows[:decode] = np.arange(decode)
        at = decode
        self.cu_q[:] = at
        for index, row in enumerate(rows[decode:]):
            last = at + row.count
            where = np.arange(row.start, row.end, dtype=np.int32)
            table = pages[decode + index]
            self.ids[at:last] = row.sequence.token_ids[row.start : row.end]
            self.positions[at:last] = where
            self.slots[at:last] = table[where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE
            place = len(self.logit_rows) + index
            self.kv_lengths[place] = row.end
            self.table[place] = table
            self.cu_q[index + 1 :] = last
            self.logit_rows[decode + index] = last - 1
            self.logit_keys[decode + index] = place
            at = last
