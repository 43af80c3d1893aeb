"""Attention over paged keys and values on the CPU, in plain torch: the form that every other one is held to."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from helios.config import PAGE_SIZE

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
    """Row by row with torch's own attention; reads exactly the valid keys of each row."""
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    out = torch.empty_like(q)
    lengths = cast(list[int], kv_lengths.tolist())
    offsets = cast(list[int], prefill_cu_q.tolist())
    tables = cast(list[list[int]], page_table.tolist())
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        k = _gather_keys(k_pages, table, length).transpose(0, 1)  # [kv_heads, length, head_dim]
        v = _gather_keys(v_pages, table, length).transpose(0, 1)
        if row < num_decode:
            # The group's query heads share a KV head: one small matrix product for each KV head.
            query = q[row].view(kv_heads, group, head_dim)
            scores = torch.bmm(query, k.transpose(1, 2)).mul_(head_dim**-0.5)  # [kv_heads, group, length]
            out[row] = torch.bmm(scores.softmax(-1), v).view(heads, head_dim)
            continue
        first, last = (num_decode + offsets[row - num_decode + step] for step in (0, 1))
        for tile in range(first, last, CPU_QUERY_TILE):
            stop = min(tile + CPU_QUERY_TILE, last)
            keys = length - (last - stop)  # visible to the tile's last query
            where = torch.arange(keys - (stop - tile), keys)
            mask = torch.arange(keys) <= where[:, None]  # [tile, keys]
            result = F.scaled_dot_product_attention(
                q[tile:stop].transpose(0, 1)[None],
                k[None, :, :keys],
                v[None, :, :keys],
                attn_mask=mask,
                enable_gqa=group > 1,
            )
            out[tile:stop] = result[0].transpose(0, 1)
    return out


def _gather_keys(pages: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    """The first ``length`` keys (or values) of a row: ``[length, kv_heads, head_dim]``."""
    count = (length + PAGE_SIZE - 1) // PAGE_SIZE
    first = table[0]
    if table[:count] == list(range(first, first + count)):
        return pages[first : first + count].flatten(0, 1)[:length]  # neighbours in the pool: no copy
    return pages[table[:count]].flatten(0, 1)[:length]
