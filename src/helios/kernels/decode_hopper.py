"""Decode attention for SM90 (H100, H200) in Gluon, Triton's lower-level language. Import it only there.

It computes what :func:`helios.kernels.decode_attention.paged_decode` computes, from the same line of tiles dealt
out in the same columns, with the same merge. What differs is that one warp of a program does nothing but fetch:
blocks of keys and values come through the tensor memory accelerator into a ring in shared memory, across the ends
of rows, so that memory never waits for arithmetic.

Only a row's newest key is written by the kernel before. With programmatic dependent launch the blocks of older
keys are on their way while that kernel still runs.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportConstantRedefinition=false, reportMissingTypeStubs=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from helios.kernels.common import launch_options
from helios.kernels.gluon_common import page_blocks

TILE = 64  # keys of a block
STAGES = 3  # blocks of keys, and of values, in shared memory
QUERY_ROWS = 64  # the tensor cores' left operand, of which a group of heads fills a few
REGISTERS = 128  # of a thread, on average: two programs of 8 warps on a multiprocessor
FETCH_REGISTERS = 40  # of a thread of the warp that fetches

_MASKED = gl.constexpr(-1.0e30)
_TOGETHER = gl.constexpr(4)  # partial results on their way at once in a merge


def decode_hopper(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    out: torch.Tensor,
    values: torch.Tensor,
    stats: torch.Tensor,
    counters: torch.Tensor,
    scale: float,
    *,
    columns: int,
    least_tiles: int,
    rows_pad: int,
) -> None:
    """Launch the kernel for :func:`paged_decode`, which has checked the arguments. ``scale`` of scores in powers
    of two. head_dim is 64 or 128, and pages are contiguous."""
    rows, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    decode_sm90_kernel[(kv_heads, columns)](
        q,
        page_blocks(k_pages, TILE),
        page_blocks(v_pages, TILE),
        page_table,
        kv_lengths,
        out,
        values,
        stats,
        counters,
        rows,
        scale,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        PAGE=page_size,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        TILE=TILE,
        STAGES=STAGES,
        QUERY_ROWS=QUERY_ROWS,
        ROWS_PAD=rows_pad,
        LEAST_TILES=least_tiles,
        FETCH_REGISTERS=FETCH_REGISTERS,
        maxnreg=REGISTERS,
        **launch_options(4),
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _fetch(
    keys,
    values,
    page_table,
    kv_lengths,
    table_stride,
    rings,
    stretch,
    head,
    PAGE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    LEAST_TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    """One warp: fetches the blocks of a stretch of the line of tiles."""
    k_ring, v_ring, k_ready, v_ready, free = rings
    at, stop, row, row_begin = stretch
    column = head * HEAD_DIM
    i = 0
    while at < stop:
        length = gl.load(kv_lengths + row)
        row_end = row_begin + gl.maximum(gl.cdiv(length, TILE), LEAST_TILES)
        until = gl.minimum(row_end, stop)
        table = page_table + row * table_stride
        page = gl.load(table + (at - row_begin) * TILE // PAGE)
        for tile in range(at - row_begin, until - row_begin):
            start = tile * TILE
            # Look the next page up now, so that it is known when its keys are to be fetched.
            following = gl.load(table + gl.minimum(start + TILE, gl.maximum(length - 1, 0)) // PAGE)
            line = page * PAGE + start % PAGE
            stage = i % STAGES
            if PDL:  # noqa: SIM102 (the outer branch is the compiler's)
                if start + TILE >= length:  # holds the newest key
                    gdc_wait()
            mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(k_ready.index(stage), keys.block_type.nbytes)
            tma.async_copy_global_to_shared(keys, [line, column], k_ready.index(stage), k_ring.index(stage))
            mbarrier.expect(v_ready.index(stage), values.block_type.nbytes)
            tma.async_copy_global_to_shared(values, [line, column], v_ready.index(stage), v_ring.index(stage))
            page = following
            i += 1
        at = until
        row_begin = row_end
        row += 1


@gluon.jit
def _merge(
    values,
    stats,
    slots,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """A row's output from its partial results, in their order. ``slots``: where the first lies, where it would lie
    if it were like the others, from one to the next, and how many there are."""
    first, base, stride, count = slots
    lane = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    flat = gl.expand_dims(lane * HEAD_DIM, 1) + gl.expand_dims(dim, 0)
    live = lane < GROUP
    maximum = gl.full([GROUP_PAD], _MASKED, gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([GROUP_PAD], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([GROUP_PAD, HEAD_DIM], gl.float32, LAYOUT)
    for group in range(0, count, _TOGETHER):
        for one in gl.static_range(_TOGETHER):
            part = group + one
            slot = gl.where(part == 0, first, base + part * stride)
            there = part < count
            # .cg: from the second-level cache, where the other multiprocessors' writes are.
            part_maximum = gl.load(
                stats + slot * (2 * GROUP) + lane, mask=live & there, other=_MASKED, cache_modifier=".cg"
            )
            part_total = gl.load(
                stats + slot * (2 * GROUP) + GROUP + lane, mask=live & there, other=0.0, cache_modifier=".cg"
            )
            part_acc = gl.load(
                values + slot * (GROUP * HEAD_DIM) + flat,
                mask=gl.expand_dims(live & there, 1),
                other=0.0,
                cache_modifier=".cg",
            )
            new_maximum = gl.maximum(maximum, part_maximum)
            decay, weight = gl.exp2(maximum - new_maximum), gl.exp2(part_maximum - new_maximum)
            total = total * decay + part_total * weight
            acc = acc * gl.expand_dims(decay, 1) + part_acc * gl.expand_dims(weight, 1)
            maximum = new_maximum
    return acc / gl.expand_dims(gl.where(total > 0, total, 1.0), 1), flat, gl.expand_dims(live, 1)


@gluon.jit
def _attend(
    q,
    out,
    parts_of_rows,  # values, stats, counters
    query_tile,
    rings,
    kv_lengths,
    stretch,
    place,  # head, column, tiles of a column
    q_strides,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_ROWS: gl.constexpr,
    LEAST_TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Four warps: the outputs of a stretch of the line of tiles, or its parts of them."""
    GROUP_PAD: gl.constexpr = (
        1 if GROUP == 1 else 2 if GROUP == 2 else 4 if GROUP <= 4 else 8 if GROUP <= 8 else 16
    )
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    merge_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    scores_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    values, stats, counters = parts_of_rows
    k_ring, v_ring, k_ready, v_ready, free = rings
    begin, stop, row, row_begin = stretch
    head, column, per_column = place

    lanes = gl.arange(0, QUERY_ROWS, layout=gl.SliceLayout(1, load_layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, load_layout))
    from_q = gl.expand_dims((head * GROUP + lanes) * q_strides[1], 1) + gl.expand_dims(dims, 0)
    tokens = gl.arange(0, TILE, layout=gl.SliceLayout(0, scores_layout))
    lines = gl.arange(0, TILE, layout=gl.SliceLayout(1, load_layout))
    out_lanes = gl.arange(0, QUERY_ROWS, layout=out_rows)
    out_dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    flat = gl.expand_dims(out_lanes * HEAD_DIM, 1) + gl.expand_dims(out_dims, 0)
    of_group = gl.expand_dims(out_lanes < GROUP, 1)
    none = gl.zeros([QUERY_ROWS, TILE], gl.float32, scores_layout)
    if PDL:
        gdc_wait()
    i = 0
    at = begin
    while at < stop:
        length = gl.load(kv_lengths + row)
        row_end = row_begin + gl.maximum(gl.cdiv(length, TILE), LEAST_TILES)
        until = gl.minimum(row_end, stop)
        query = gl.load(q + row * q_strides[0] + from_q, mask=gl.expand_dims(lanes < GROUP, 1), other=0.0)
        query_tile.store(query)
        fence_async_shared()
        maximum = gl.full([QUERY_ROWS], _MASKED, gl.float32, scores_rows)
        total = gl.zeros([QUERY_ROWS], gl.float32, scores_rows)
        acc = gl.zeros([QUERY_ROWS, HEAD_DIM], gl.float32, out_layout)
        for tile in range(at - row_begin, until - row_begin):
            start = tile * TILE
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(k_ready.index(stage), phase)
            scores = warpgroup_mma(
                query_tile, k_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = gl.where(gl.expand_dims(start + tokens < length, 0), scores * scale, _MASKED)
            new_maximum = gl.maximum(maximum, gl.max(scores, 1))
            weights = gl.exp2(scores - gl.expand_dims(new_maximum, 1))
            decay = gl.exp2(maximum - new_maximum)
            total = total * decay + gl.sum(weights, 1)
            maximum = new_maximum
            acc = acc * gl.expand_dims(gl.convert_layout(decay, out_rows), 1)
            p = gl.convert_layout(weights.to(q.dtype.element_ty), weights_layout)
            mbarrier.wait(v_ready.index(stage), phase)
            if start + TILE > length:
                # What lies behind the sequence in its last page may be NaN, which a weight of zero does not hide.
                block = v_ring.index(stage)
                inside = gl.expand_dims(start + lines < length, 1)
                block.store(gl.where(inside, block.load(load_layout), 0.0))
                fence_async_shared()
            acc = warpgroup_mma(p, v_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index(stage), count=1)
            i += 1

        total = gl.convert_layout(total, out_rows)
        first_column = row_begin // per_column
        last_column = (row_end - 1) // per_column
        out_row = out + (row * KV_HEADS + head) * (GROUP * HEAD_DIM)
        if first_column == last_column:
            result = acc / gl.expand_dims(gl.where(total > 0, total, 1.0), 1)
            gl.store(out_row + flat, result.to(out.dtype.element_ty), mask=of_group)
        else:
            slot = (column * KV_HEADS + head) * 2 + gl.where(at != begin, 1, 0)
            part_stats = stats + slot * (2 * GROUP) + out_lanes
            gl.store(part_stats, gl.convert_layout(maximum, out_rows), mask=out_lanes < GROUP)
            gl.store(part_stats + GROUP, total, mask=out_lanes < GROUP)
            gl.store(values + slot * (GROUP * HEAD_DIM) + flat, acc, mask=of_group)
            gl.barrier()  # every thread's part is written before one of them says so
            counter = counters + row * KV_HEADS + head
            arrived = gl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == last_column - first_column:
                gl.store(counter, 0)  # for the next launch
                first_slot = (first_column * KV_HEADS + head) * 2 + gl.where(
                    row_begin != first_column * per_column, 1, 0
                )
                base = (first_column * KV_HEADS + head) * 2
                slots = (first_slot, base, 2 * KV_HEADS, last_column - first_column + 1)
                merged, where, live = _merge(values, stats, slots, GROUP, GROUP_PAD, HEAD_DIM, merge_layout)
                gl.store(out_row + where, merged.to(out.dtype.element_ty), mask=live)
        at = until
        row_begin = row_end
        row += 1


@gluon.jit(do_not_specialize=("rows", "table_stride"))
def decode_sm90_kernel(
    q,
    keys,  # descriptors of the pages
    values,
    page_table,
    kv_lengths,
    out,
    part_values,
    part_stats,
    counters,
    rows,
    scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    PAGE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_ROWS: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    LEAST_TILES: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One (kv head, column): its stretch of the line of tiles."""
    head, column = gl.program_id(0), gl.program_id(1)
    THREADS: gl.constexpr = 128
    EACH: gl.constexpr = ROWS_PAD // THREADS if ROWS_PAD > THREADS else 1
    line: gl.constexpr = gl.BlockedLayout([EACH], [32], [4], [0])
    ids = gl.arange(0, ROWS_PAD, layout=line)
    lengths = gl.load(kv_lengths + ids, mask=ids < rows, other=0)
    # Least 1: a row of length 0 still needs its zeros written.
    tiles = gl.where(ids < rows, gl.maximum(gl.cdiv(lengths, TILE), LEAST_TILES), 0)
    ends = gl.associative_scan(tiles, 0, _add)
    total = gl.sum(tiles, 0)
    per_column = gl.maximum(gl.cdiv(total, gl.num_programs(1)), 1)
    begin = column * per_column
    stop = gl.minimum(begin + per_column, total)
    passed = ends <= begin
    row = gl.sum(passed.to(gl.int32), 0)
    row_begin = gl.max(gl.where(passed, ends, 0), 0)
    if PDL:
        gdc_launch_dependents()

    dtype: gl.constexpr = q.dtype.element_ty
    one: gl.constexpr = mbarrier.MBarrierLayout()
    query_tile = gl.allocate_shared_memory(
        dtype, [QUERY_ROWS, HEAD_DIM], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], keys.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], values.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    rings = (k_ring, v_ring, k_ready, v_ready, free)
    stretch = (begin, stop, row, row_begin)
    kept = (part_values, part_stats, counters)
    place = (head, column, per_column)
    strides = (q_row_stride, q_head_stride)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q, out, kept, query_tile, rings, kv_lengths, stretch, place, strides, scale,
                    KV_HEADS, GROUP, HEAD_DIM, TILE, STAGES, QUERY_ROWS, LEAST_TILES, PDL,
                ),
            ),
            (
                _fetch,
                (
                    keys, values, page_table, kv_lengths, table_stride, rings, stretch, head,
                    PAGE, HEAD_DIM, TILE, STAGES, LEAST_TILES, PDL,
                ),
            ),
        ],
        [1],
        [FETCH_REGISTERS],
    )  # fmt: skip
