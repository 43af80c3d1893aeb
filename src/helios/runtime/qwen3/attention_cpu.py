"""Attention over paged keys and values on the CPU, in plain torch: the form that every other one is held to.

Rows go one after the other through torch's own attention, which reads exactly the valid keys of each.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from helios.runtime.batch import HostRow

# Prefill scores are computed in tiles of this many queries: bounds the score matrix.
CPU_QUERY_TILE = 512


def paged_attention_cpu(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    prefill_cu_q: torch.Tensor,
    num_decode: int,
) -> torch.Tensor:
    """:func:`attend_rows` for rows that are described by tensors, as in :class:`AttentionPlan`."""
    offsets = [*range(num_decode), *(num_decode + at for at in cast(list[int], prefill_cu_q.tolist()))]
    tables = cast(list[list[int]], page_table.tolist())
    lengths = cast(list[int], kv_lengths.tolist())
    rows = [
        HostRow.of(table, length, offsets[row], offsets[row + 1])
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True))
    ]
    k, v = slots_by_head(k_pages), slots_by_head(v_pages)
    return attend_rows(q, k, v, rows, num_decode)


def slots_by_head(pages: torch.Tensor) -> torch.Tensor:
    """Pages ``[pages, PAGE_SIZE, kv_heads, head_dim]`` as ``[1, kv_heads, slots, head_dim]``: no copy."""
    return pages.flatten(0, 1).transpose(0, 1).unsqueeze(0)


def attend_rows(
    q: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor, rows: list[HostRow], num_decode: int
) -> torch.Tensor:
    """Causal attention of ``q [T, heads, head_dim]``; the first ``num_decode`` rows have one query each.

    Keys and values are the pool's, ``[1, kv_heads, slots, head_dim]``.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k_slots.shape[1]
    parts: list[torch.Tensor] = []
    if num_decode:
        # One query sees all keys. Without a mask the query heads of a group are as good as several queries of
        # their one KV head, whose keys are then read once.
        grouped = q.view(-1, kv_heads, heads // kv_heads, head_dim)
        for index, row in enumerate(rows[:num_decode]):
            query = grouped.narrow(0, index, 1)
            parts.append(
                F.scaled_dot_product_attention(query, _keys_of(row, k_slots), _keys_of(row, v_slots))
            )
        parts = [(parts[0] if num_decode == 1 else torch.cat(parts)).reshape(num_decode, heads, head_dim)]
    for row in rows[num_decode:]:
        k, v = _keys_of(row, k_slots), _keys_of(row, v_slots)
        for tile in range(row.start, row.stop, CPU_QUERY_TILE):
            stop = min(tile + CPU_QUERY_TILE, row.stop)
            keys = row.length - (row.stop - stop)  # visible to the tile's last query
            where = torch.arange(keys - (stop - tile), keys)
            mask = torch.arange(keys) <= where[:, None]  # [tile, keys]
            result = F.scaled_dot_product_attention(
                q[tile:stop].transpose(0, 1)[None],
                k[:, :, :keys],
                v[:, :, :keys],
                attn_mask=mask,
                enable_gqa=heads > kv_heads,
            )
            parts.append(result[0].transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keys_of(row: HostRow, slots: torch.Tensor) -> torch.Tensor:
    """The keys (or values) of a row: ``[1, kv_heads, row.length, head_dim]``."""
    if len(row.runs) == 1:
        return slots.narrow(2, *row.runs[0])  # neighbours in the pool: no copy
    by_slot = slots.transpose(1, 2)  # as they lie in memory
    return torch.cat([by_slot.narrow(1, *run) for run in row.runs], dim=1).transpose(1, 2)
