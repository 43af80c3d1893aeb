"""Attention over paged keys and values: one function for CUDA, one for the CPU, one interface.

    attend(q [T, heads, head_dim], k_pages, v_pages [pages, 256, kv_heads, head_dim], plan) -> like q

CUDA goes through ``torch.nn.attention.varlen.varlen_attn`` (FlashAttention-2 inside torch 2.13), which
has wrong answers behind some of its arguments. :func:`_decode_cuda` and :func:`prefill_attention` are the
only callers and fix every one of them:

* Decode rows and prefill rows are separate calls. Only ``max_q=1`` with ``window_size=(-1, -1)`` packs
  the query heads of a group into one tile (3 to 4 times faster), and for one query the full window and
  the causal one are the same.
* Split-KV without that packing writes only the first row's output (pytorch#194167), so it is switched
  off (``num_splits=1``) for prefill and for models whose heads are not grouped.
* The functional form, never ``varlen_attn_out``: with packed heads the latter leaves ``out`` unwritten
  for two rows or more.
* ``max_k`` decides how the keys are split, so it follows the batch's page table, not the pool.
"""

from __future__ import annotations

import torch

from helios.runtime.batch import AttentionPlan
from helios.runtime.qwen3.attention_cpu import paged_attention_cpu


def attend(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Causal attention of every packed query over its row's pages. Returns ``[T, heads, head_dim]``."""
    arguments = (
        q,
        k_pages,
        v_pages,
        plan.page_table,
        plan.kv_lengths,
        plan.prefill_cu_q,
        plan.num_decode,
        plan.max_prefill_q,
        plan.max_kv,
    )
    if torch.compiler.is_compiling():
        # An opaque operator: the plain numbers would otherwise be guarded and recompiled for.
        return torch.ops.helios.paged_attention(*arguments)
    return _paged_attention(*arguments)


def _paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    prefill_cu_q: torch.Tensor,
    num_decode: int,
    max_prefill_q: int,
    max_kv: int,
) -> torch.Tensor:
    if q.device.type == "cpu":
        return paged_attention_cpu(q, k_pages, v_pages, page_table, kv_lengths, prefill_cu_q, num_decode)
    decode, prefill = num_decode, page_table.shape[0] - num_decode
    if not prefill:
        return _decode_cuda(q, k_pages, v_pages, page_table, kv_lengths, max_kv)
    out_prefill = prefill_attention(
        q[decode:],
        k_pages,
        v_pages,
        page_table[decode:],
        kv_lengths[decode:],
        prefill_cu_q,
        max_prefill_q,
        max_kv,
    )
    if not decode:
        return out_prefill
    out_decode = _decode_cuda(q[:decode], k_pages, v_pages, page_table[:decode], kv_lengths[:decode], max_kv)
    return torch.cat((out_decode, out_prefill))


@torch.library.custom_op("helios::paged_attention", mutates_args=())
def _paged_attention_op(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    prefill_cu_q: torch.Tensor,
    num_decode: int,
    max_prefill_q: int,
    max_kv: int,
) -> torch.Tensor:
    return _paged_attention(
        q, k_pages, v_pages, page_table, kv_lengths, prefill_cu_q, num_decode, max_prefill_q, max_kv
    ).contiguous()


@_paged_attention_op.register_fake
def _(  # pyright: ignore[reportUnusedFunction]
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    prefill_cu_q: torch.Tensor,
    num_decode: int,
    max_prefill_q: int,
    max_kv: int,
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _decode_cuda(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    max_kv: int,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows, heads = q.shape[0], q.shape[1]
    kv_heads = k_pages.shape[2]
    cu_q = torch.arange(rows + 1, device=q.device, dtype=torch.int32)
    out = varlen_attn(
        q,
        k_pages,
        v_pages,
        cu_q,
        cu_q,  # must be given; its values are unused with a page table
        1,
        max_kv,
        window_size=(-1, -1),
        enable_gqa=heads != kv_heads,
        seqused_k=kv_lengths,
        block_table=page_table,
        num_splits=None if heads != kv_heads else 1,
    )
    assert isinstance(out, torch.Tensor)
    return out


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    cu_q: torch.Tensor,
    max_q: int,
    max_kv: int,
) -> torch.Tensor:
    """Prefill rows on CUDA: ``q [T, heads, head_dim]``, row ``i`` from ``cu_q[i]`` to ``cu_q[i + 1]``.

    The candidate ``fa2`` of :mod:`helios.runtime.prefill_backend`, which captured graphs choose from.
    """
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q,
        k_pages,
        v_pages,
        cu_q,
        cu_q,
        max_q,
        max_kv,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k_pages.shape[2],
        seqused_k=kv_lengths,
        block_table=page_table,
        num_splits=1,
    )
    assert isinstance(out, torch.Tensor)
    return out
