"""The CPU's paged attention against a plain softmax, on random ragged batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.config import PAGE_SIZE
from helios.runtime.batch import AttentionPlan
from helios.runtime.qwen3 import attention_cpu
from helios.runtime.qwen3.attention import attend

HEAD_DIM = 16
NUM_PAGES = 24


def make_case(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, seed: int, *, in_order: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan]:
    """``rows`` are (queries, keys), single queries first. All memory outside of the keys is NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_PAGES, PAGE_SIZE, kv_heads, HEAD_DIM)
    k_pages, v_pages = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    free = list(range(NUM_PAGES)) if in_order else torch.randperm(NUM_PAGES, generator=generator).tolist()
    tables: list[list[int]] = []
    for _, keys in rows:
        table = [free.pop(0) for _ in range(-(-keys // PAGE_SIZE))]
        for block, page in enumerate(table):
            used = min(PAGE_SIZE, keys - block * PAGE_SIZE)
            k_pages[page, :used] = torch.randn(used, kv_heads, HEAD_DIM, generator=generator)
            v_pages[page, :used] = torch.randn(used, kv_heads, HEAD_DIM, generator=generator)
        tables.append(table)
    width = max(len(table) for table in tables)
    page_table = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    chunks = [queries for queries, _ in rows if queries > 1]
    plan = AttentionPlan(
        num_decode=len(rows) - len(chunks),
        page_table=page_table,
        kv_lengths=torch.tensor([keys for _, keys in rows], dtype=torch.int32),
        prefill_cu_q=torch.tensor([sum(chunks[:n]) for n in range(len(chunks) + 1)], dtype=torch.int32),
        max_prefill_q=max(chunks, default=0),
        max_kv=width * PAGE_SIZE,
    )
    q = torch.randn(sum(queries for queries, _ in rows), heads, HEAD_DIM, generator=generator)
    return q, k_pages, v_pages, plan


def plain(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttentionPlan,
    rows: list[tuple[int, int]],
) -> torch.Tensor:
    """One row at a time in float64, with the mask written out."""
    group = q.shape[1] // k_pages.shape[2]
    out: list[torch.Tensor] = []
    for number, (queries, keys) in enumerate(rows):
        pages = plan.page_table[number].tolist()
        k = torch.cat([k_pages[page] for page in pages])[:keys].double().repeat_interleave(group, dim=1)
        v = torch.cat([v_pages[page] for page in pages])[:keys].double().repeat_interleave(group, dim=1)
        at = sum(length for length, _ in rows[:number])
        scores = torch.einsum("qhd,khd->hqk", q[at : at + queries].double(), k) * HEAD_DIM**-0.5
        for query in range(queries):
            scores[:, query, keys - queries + query + 1 :] = -torch.inf
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).float())
    return torch.cat(out)


@st.composite
def ragged(draw: st.DrawFn) -> list[tuple[int, int]]:
    rows: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 5))):
        keys = draw(st.one_of(st.integers(1, 900), st.sampled_from([1, 2, 255, 256, 257, 512, 513])))
        queries = 1 if draw(st.booleans()) else draw(st.integers(1, min(keys, 60)))
        rows.append((queries, keys))
    rows.sort(key=lambda row: row[0] != 1)
    return rows


@settings(max_examples=50, deadline=None)
@given(
    rows=ragged(),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1), (7, 1)]),
    seed=st.integers(0, 1000),
    in_order=st.booleans(),
)
@torch.inference_mode()
def test_paged_attention_equals_a_plain_softmax(
    rows: list[tuple[int, int]], heads: tuple[int, int], seed: int, in_order: bool
) -> None:
    """Would catch a key too many or too few, a wrong page, query heads grouped wrongly, a chunk that is
    aligned to its first key, or any read outside of a sequence (it is NaN there)."""
    q, k_pages, v_pages, plan = make_case(rows, *heads, seed, in_order=in_order)
    got = attend(q, k_pages, v_pages, plan)
    torch.testing.assert_close(got, plain(q, k_pages, v_pages, plan, rows), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tile", [1, 7, 64])
@torch.inference_mode()
def test_chunks_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """Would catch a tile that sees the keys of another, or the last, shorter tile left out."""
    monkeypatch.setattr(attention_cpu, "CPU_QUERY_TILE", tile)
    rows = [(1, 300), (64, 64), (65, 400), (130, 513)]
    q, k_pages, v_pages, plan = make_case(rows, 4, 2, 5, in_order=False)
    got = attend(q, k_pages, v_pages, plan)
    torch.testing.assert_close(got, plain(q, k_pages, v_pages, plan, rows), atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_chunk_longer_than_the_real_tile() -> None:
    """Would catch a tile size that only works when it divides the chunk."""
    size = attention_cpu.CPU_QUERY_TILE + 3
    rows = [(size, size + 100)]
    q, k_pages, v_pages, plan = make_case(rows, 2, 1, 6, in_order=True)
    got = attend(q, k_pages, v_pages, plan)
    torch.testing.assert_close(got, plain(q, k_pages, v_pages, plan, rows), atol=2e-5, rtol=1e-4)


def test_opaque_operator_gives_the_same_answer() -> None:
    """Would catch a compiled model that attends differently from the eager one, and a fake kernel whose
    shape or layout is not the real one's."""
    rows = [(1, 300), (20, 64)]
    arguments = make_case(rows, 4, 2, 7, in_order=False)
    q, k_pages, v_pages, plan = arguments
    with torch.inference_mode():
        expected = attend(*arguments)
    inputs = (
        q, k_pages, v_pages, plan.page_table, plan.kv_lengths, plan.prefill_cu_q, plan.num_decode,
        plan.max_prefill_q, plan.max_kv,
    )  # fmt: skip
    assert torch.equal(torch.ops.helios.paged_attention(*inputs), expected)
    torch.library.opcheck(
        torch.ops.helios.paged_attention, inputs, test_utils=("test_schema", "test_faketensor")
    )
