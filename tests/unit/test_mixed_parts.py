"""The inputs of a mixed CUDA graph as the host packs them, against the plain packing of the same rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.config import PAGE_SIZE
from helios.runtime.graph_runner import MIXED_TOKENS, mixed_ladder, token_ladder
from helios.runtime.mixed_parts import PREFILL_ROWS, MixedParts
from helios.runtime.page_pool import DUMMY_PAGE
from helios.runtime.policy import RowPlan
from tests.unit.test_batch import LAST_TOKENS, MAX_PAGES, MAX_ROWS, PACKER, plans

TOKENS = 9 * 1000
BUFFER = np.full(MixedParts.size(MAX_ROWS, TOKENS, MAX_PAGES), -7, dtype=np.int32)


@settings(max_examples=100, deadline=None)
@given(rows=plans(), spare=st.integers(0, 200))
def test_filling_equals_the_plain_packing(rows: list[RowPlan], spare: int) -> None:
    """Would catch a token at a wrong place or slot, a write into a shared page, a page table or length of
    another row, padding that writes to a page that is someone's, and leftovers of the tick before."""
    plain = PACKER.pack(rows, range(len(rows)), LAST_TOKENS)
    decode, count = plain.attention.num_decode, sum(row.count for row in rows)
    tables = np.full((MAX_ROWS, MAX_PAGES), DUMMY_PAGE, dtype=np.int32)
    for row in rows:
        tables[row.sequence.row, : len(row.sequence.page_table)] = row.sequence.page_table
    parts = MixedParts.of(BUFFER, MAX_ROWS, max(count + spare, MAX_ROWS), MAX_PAGES)
    parts.fill(rows, decode, tables)

    ids = parts.ids[:count]
    known = np.where(ids < 0, LAST_TOKENS.numpy()[np.maximum(-1 - ids, 0)], ids)
    assert known.tolist() == plain.input_ids.tolist()
    assert parts.positions[:count].tolist() == plain.positions.tolist()
    for mine, slot in zip(parts.slots[:count].tolist(), plain.slots.tolist(), strict=True):
        assert mine == slot or mine // PAGE_SIZE == slot // PAGE_SIZE == DUMMY_PAGE
    assert not (parts.slots[count:] // PAGE_SIZE != DUMMY_PAGE).any()
    assert parts.logit_rows[: len(rows)].tolist() == plain.logit_rows.tolist()

    places = [*range(decode), *range(MAX_ROWS, MAX_ROWS + len(rows) - decode)]
    assert parts.kv_lengths[places].tolist() == plain.attention.kv_lengths.tolist()
    assert not parts.kv_lengths[decode:MAX_ROWS].any(), "a padding row would write over a prompt's token"
    for place, row in zip(places, rows, strict=True):
        assert parts.table[place].tolist() == tables[row.sequence.row].tolist()
    assert parts.logit_keys[: len(rows)].tolist() == places
    assert not parts.kv_lengths[parts.logit_keys[len(rows) :]].any(), "a padding row has no keys"
    prompts = len(rows) - decode
    offsets = [decode + offset for offset in plain.attention.prefill_cu_q.tolist()]
    assert parts.cu_q.tolist() == offsets + [offsets[-1]] * (PREFILL_ROWS - prompts)


def test_every_tick_of_the_token_budget_has_a_graph() -> None:
    """Would catch a ladder that ends below the budget, or below one token of each row and a prompt: such a tick
    meets kernels that nothing has compiled, and stands still for a second."""
    for max_rows, max_tokens in ((256, 4096), (24, 512), (256, 64), (8, 3000), (256, 8192), (256, 50_000)):
        tokens = token_ladder(max_rows, max_tokens)
        assert tokens == sorted(set(tokens))
        assert tokens[-1] == max(max_tokens, max_rows + MIXED_TOKENS[0])
        assert mixed_ladder(max_rows)[-1] == max_rows <= tokens[-1]
    assert token_ladder(256, 9000)[-6:] == [4096, 5120, 6144, 7168, 8192, 9000]
