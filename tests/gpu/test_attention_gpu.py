"""Paged attention on the GPU against a float32 reference, with NaN in every page outside the sequences."""

from __future__ import annotations

import pytest
import torch

from helios.config import PAGE_SIZE
from helios.runtime.batch import AttentionPlan
from helios.runtime.qwen3.attention import attend

pytestmark = pytest.mark.gpu
D = 128


def make_pages(
    lengths: list[int], kv_heads: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key and value pages in shuffled order with NaN in pages of nobody, and the page table.

    The unused tail of a sequence's own last page is zero, as a fresh pool's is.
    """
    counts = [(length + PAGE_SIZE - 1) // PAGE_SIZE for length in lengths]
    total = sum(counts) + 5
    order = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    pages = torch.full((2, total, PAGE_SIZE, kv_heads, D), torch.nan)
    pages[:, 0] = 0
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(own)
        for index, page in enumerate(own):
            pages[:, page] = 0
            used = min(PAGE_SIZE, length - index * PAGE_SIZE)
            pages[:, page, :used] = torch.randn(2, used, kv_heads, D, generator=generator)
    return pages[0], pages[1], table


def reference(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    counts: list[int],
) -> torch.Tensor:
    """Causal attention of each row's last ``count`` positions, in float32."""
    out, at = [], 0
    group = q.shape[1] // k_pages.shape[2]
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        k = k_pages[table[row].long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
        v = v_pages[table[row].long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[at : at + count].float(), k) * D**-0.5
        where = torch.arange(length - count, length, device=q.device)[:, None]
        scores.masked_fill_(torch.arange(length, device=q.device) > where, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        at += count
    return torch.cat(out)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (32, 8), (14, 2), (40, 8)])
@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ([1], []),
        ([700], []),
        ([1, 255, 256, 257, 1000, 5000], []),
        ([9] * 40, []),
        ([], [(300, 300)]),
        ([], [(700, 44), (256, 256), (3, 3), (2000, 1024)]),
        ([513, 12], [(700, 200), (20, 2)]),
    ],
)
def test_mixed_rows_equal_the_reference(
    gpu: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    decode: list[int],
    prefill: list[tuple[int, int]],
) -> None:
    """Would catch every wrong form of the varlen call, a read outside a sequence's keys, or rows mixed up."""
    generator = torch.Generator().manual_seed(heads)
    lengths = decode + [length for length, _ in prefill]
    counts = [1] * len(decode) + [count for _, count in prefill]
    k, v, table = (t.to(gpu) for t in make_pages(lengths, kv_heads, generator))
    k, v = k.to(dtype), v.to(dtype)
    q = torch.randn(sum(counts), heads, D, generator=generator).to(gpu, dtype)
    offsets = torch.tensor([0, *torch.tensor([c for _, c in prefill]).cumsum(0).tolist()] if prefill else [0])
    plan = AttentionPlan(
        len(decode),
        table,
        torch.tensor(lengths, dtype=torch.int32, device=gpu),
        offsets.to(gpu, torch.int32),
        max([c for _, c in prefill], default=0),
        table.shape[1] * PAGE_SIZE,
    )
    got = attend(q, k, v, plan)
    assert not got.isnan().any()
    assert relative_error(got, reference(q, k, v, table, lengths, counts)) < 5e-3


def test_why_the_other_forms_are_never_called(gpu: torch.device) -> None:
    """Shows the wrong answers that attention.py avoids. If this fails, torch has mended them."""
    from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

    generator = torch.Generator().manual_seed(1)
    lengths = [5000, 3000, 4000]
    k, v, table = (t.to(gpu) for t in make_pages(lengths, 8, generator))
    k, v = k.bfloat16(), v.bfloat16()
    q = torch.randn(3, 16, D, generator=generator).to(gpu, torch.bfloat16)
    expected = reference(q, k, v, table, lengths, [1, 1, 1])
    used = torch.tensor(lengths, dtype=torch.int32, device=gpu)
    cu = torch.arange(4, dtype=torch.int32, device=gpu)
    common = {"enable_gqa": True, "seqused_k": used, "block_table": table}

    right = varlen_attn(q, k, v, cu, cu, 1, 5120, window_size=(-1, -1), **common)
    assert relative_error(right, expected) < 5e-3
    split = varlen_attn(q, k, v, cu, cu, 1, 5120, window_size=(-1, 0), num_splits=4, **common)
    assert not relative_error(split, expected) < 5e-3
    out = torch.full_like(q, torch.nan)
    varlen_attn_out(out, q, k, v, cu, cu, 1, 5120, window_size=(-1, -1), **common)
    assert not relative_error(out, expected) < 5e-3
