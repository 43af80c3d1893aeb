"""The packed batch against a plain packing, token by token."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helios.config import PAGE_SIZE
from helios.runtime.batch import BatchPacker, ForwardBatch
from helios.runtime.page_pool import DUMMY_PAGE
from helios.runtime.policy import RowPlan
from helios.runtime.request import Job, SamplingParams, Sequence

CPU = torch.device("cpu")
MAX_ROWS, MAX_PAGES = 9, 6
PACKER = BatchPacker(CPU, 9 * 1000, MAX_ROWS, MAX_PAGES)
LAST_TOKENS = torch.arange(MAX_ROWS) + 900_000


@st.composite
def plans(draw: st.DrawFn) -> list[RowPlan]:
    """Rows as a policy makes them: single tokens first, then chunks, over pages in any order."""
    count = draw(st.integers(1, MAX_ROWS))
    pages = draw(st.permutations(range(1, count * MAX_PAGES + 1)))
    rows: list[RowPlan] = []
    for number in range(count):
        length = draw(st.integers(1, MAX_PAGES * PAGE_SIZE))
        job = Job(
            f"job{number}", [number * 2000 + position for position in range(length)], SamplingParams(),
            max_tokens=1,
        )  # fmt: skip
        sequence = job.sequences[0]
        sequence.row = MAX_ROWS - 1 - number
        needed = -(-length // PAGE_SIZE)
        reserved = draw(st.integers(needed, MAX_PAGES))
        sequence.page_table = pages[number * MAX_PAGES : number * MAX_PAGES + reserved]
        if draw(st.booleans()):  # one token, of which the whole prompt may be cached
            start = length - 1
            sequence.num_sealed_blocks = draw(st.sampled_from([0, start // PAGE_SIZE, length // PAGE_SIZE]))
            if start and draw(st.booleans()) and start >= sequence.num_sealed_blocks * PAGE_SIZE:
                sequence.token_ids.pop()  # it is still on the device
            rows.append(RowPlan(sequence, start, 1))
        else:
            start = draw(st.integers(0, length - 1))
            end = draw(st.integers(start + 1, min(length, start + 900)))
            sequence.num_sealed_blocks = draw(st.integers(0, start // PAGE_SIZE))
            rows.append(RowPlan(sequence, start, end - start))
    rows.sort(key=lambda row: row.count != 1)
    return rows


def plain_slot(sequence: Sequence, position: int) -> int:
    block, offset = divmod(position, PAGE_SIZE)
    if block < sequence.num_sealed_blocks:
        return -1
    return sequence.page_table[block] * PAGE_SIZE + offset


def check(batch: ForwardBatch, rows: list[RowPlan], samplers: list[int]) -> None:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    for row in rows:
        for position in range(row.start, row.end):
            known = position < len(row.sequence.token_ids)
            tokens.append(row.sequence.token_ids[position] if known else 900_000 + row.sequence.row)
            positions.append(position)
            slots.append(plain_slot(row.sequence, position))
        ends.append(len(tokens) - 1)
    assert batch.input_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    got = batch.slots.tolist()
    assert len(got) == len(slots)
    for mine, plain in zip(got, slots, strict=True):
        if plain < 0:
            assert mine // PAGE_SIZE == DUMMY_PAGE, "a shared page is written"
        else:
            assert mine == plain
    assert batch.logit_rows.tolist() == [ends[index] for index in samplers]

    plan = batch.attention
    decode = [row for row in rows if row.count == 1]
    prefill = rows[len(decode) :]
    assert plan.num_decode == len(decode)
    assert plan.num_prefill == len(prefill)
    assert plan.kv_lengths.tolist() == [row.end for row in rows]
    offsets = [sum(row.count for row in prefill[:number]) for number in range(len(prefill) + 1)]
    assert plan.prefill_cu_q.tolist() == offsets
    assert plan.max_prefill_q == max((row.count for row in prefill), default=0)
    assert plan.max_kv >= max(row.end for row in rows)
    for row, table in zip(rows, plan.page_table.tolist(), strict=True):
        needed = -(-row.end // PAGE_SIZE)
        assert table[:needed] == row.sequence.page_table[:needed]
        # What follows is never read, but it must name a page that exists.
        assert all(page == DUMMY_PAGE or page in row.sequence.page_table for page in table[needed:])
    # The same rows as plain numbers: the slots of a row's keys, run by run, and its place among the tokens.
    assert plan.host_rows is not None
    stop = 0
    for row, host in zip(rows, plan.host_rows, strict=True):
        table = row.sequence.page_table
        lie = [table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(row.end)]
        assert [first + step for first, count in host.runs for step in range(count)] == lie
        assert all(sum(run) != following[0] for run, following in pairwise(host.runs))
        assert (host.start, host.stop, host.length) == (stop, stop + row.count, row.end)
        stop = host.stop
    for tensor in (plan.page_table, plan.kv_lengths, plan.prefill_cu_q):
        assert tensor.dtype == torch.int32
    for tensor in (batch.input_ids, batch.positions, batch.slots, batch.logit_rows):
        assert tensor.dtype == torch.int64


@settings(max_examples=150, deadline=None)
@given(rows=plans(), data=st.data())
def test_packing_equals_a_plain_packing(rows: list[RowPlan], data: st.DataObject) -> None:
    """Would catch a token written into another's slot, a position off by one, a write into a shared page,
    logits of the wrong row, leftovers of the tick before in the reused buffer, or a token still on the
    device taken from the wrong row."""
    samplers = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1))))
    check(PACKER.pack(rows, samplers, LAST_TOKENS), rows, samplers)


def test_largest_tick_fits_the_buffer() -> None:
    """Would catch a buffer sized for the budget alone: every decoder may add a token to it, and all rows
    may have tables of full length."""
    budget, rows_wanted = 64, 5
    packer = BatchPacker(CPU, budget + rows_wanted + 1, rows_wanted, MAX_PAGES)
    rows: list[RowPlan] = []
    for number in range(rows_wanted):
        length = MAX_PAGES * PAGE_SIZE
        sequence = Job("a", list(range(length)), SamplingParams(), max_tokens=1).sequences[0]
        sequence.row = number
        sequence.page_table = list(range(1 + number * MAX_PAGES, 1 + (number + 1) * MAX_PAGES))
        count = 1 if number else budget + 1
        rows.insert(0, RowPlan(sequence, length - count, count))
    rows.sort(key=lambda row: row.count != 1)
    samplers = list(range(rows_wanted))
    check(packer.pack(rows, samplers, LAST_TOKENS), rows, samplers)
