"""Prefill attention for SM90 (H100, H200) in Gluon, Triton's lower-level language. Import it only there.

It computes what :func:`helios.kernels.prefill_attention.paged_prefill` computes, with the same tiles in the same
order and the same cut of the tail's keys. What differs is who does what in a program. One warp fetches blocks of
keys and values with the tensor memory accelerator into a ring in shared memory. Two groups of four warps take
half of the tile's queries each; while the tensor cores multiply for one group, the other computes exponentials.
Within a group, too, the scores of a block are multiplied before the values of the block before it, and its
softmax runs beside that second product.

Blocks are walked from the last key to the first: the masked ones, at most two, come first.

Source of the division of work: FlashAttention-3 (Shah et al., 2024).
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

from helios.kernels.common import LOG2_E, launch_options, multiprocessors
from helios.kernels.gluon_common import page_blocks
from helios.kernels.prefill_attention import (
    MAX_ROWS,
    PrefillConfig,
    check,
    heads_of_tile,
    new_counters,
    num_tiles,
)

# Queries times packed heads of a tile, keys of a block, and blocks of keys, and of values, in shared memory.
CONFIG = PrefillConfig(block_m=128, block_n=128, num_warps=4, num_stages=2, tma=True)
CONSUMER_REGISTERS = 240  # of a thread of the second group; the first gets what is left, as many
PRODUCER_REGISTERS = 24

_MASKED = gl.constexpr(-1.0e30)
_MAX_PARTS = gl.constexpr(8)
_KEYS_OF_PART = gl.constexpr(512)


def paged_prefill_hopper(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    cu_q: torch.Tensor,
    *,
    counters: torch.Tensor | None = None,
    at_once: int | None = None,
) -> torch.Tensor:
    """Causal attention of each row's newest tokens over its pages. Returns ``[T, heads, head_dim]``.

    Arguments, and what is left unwritten or unread, as for :func:`paged_prefill`. Raises ValueError where that
    one does, for a head_dim other than 128, and for pages that are not contiguous or no multiple of 128 tokens.
    """
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    if head_dim != CONFIG.block_n:  # scores and outputs then have one layout
        raise ValueError(f"head_dim {head_dim} is not {CONFIG.block_n}")
    check(q, k_pages, v_pages, CONFIG)
    pack = heads_of_tile(heads // kv_heads, CONFIG)
    out = torch.empty((tokens, heads, head_dim), device=q.device, dtype=q.dtype)
    if not tokens:
        return out
    keys, values = (page_blocks(pages, CONFIG.block_n) for pages in (k_pages, v_pages))
    at_once = at_once or multiprocessors(q.device)  # a program fills a multiprocessor
    counters = new_counters(q.device) if counters is None else counters
    for first in range(0, kv_lengths.shape[0], MAX_ROWS):
        rows = min(kv_lengths.shape[0] - first, MAX_ROWS)
        programs = num_tiles(tokens, rows, CONFIG.block_m // pack) * (heads // pack)
        prefill_sm90_kernel[((programs // at_once + 1) * at_once,)](
            q,
            keys,
            values,
            page_table[first:],
            kv_lengths[first:],
            cu_q[first:],
            out,
            torch.empty((at_once, CONFIG.block_m, head_dim), device=q.device, dtype=torch.float32),
            torch.empty((at_once, 2, CONFIG.block_m), device=q.device, dtype=torch.float32),
            counters,
            rows,
            at_once,
            head_dim**-0.5 * LOG2_E,
            q.stride(0),
            q.stride(1),
            page_table.stride(0),
            PAGE=page_size,
            HEADS=heads,
            GROUP=heads // kv_heads,
            PACK=pack,
            HEAD_DIM=head_dim,
            M=CONFIG.block_m,
            N=CONFIG.block_n,
            STAGES=CONFIG.num_stages,
            ROWS_PAD=MAX_ROWS,
            REGISTERS=CONSUMER_REGISTERS,
            PRODUCER_REGISTERS=PRODUCER_REGISTERS,
            **launch_options(CONFIG.num_warps),
        )
    return out


@gluon.jit
def _order_rows(cu_q, kv_lengths, rows, BLOCK_Q: gl.constexpr, ROWS_PAD: gl.constexpr):
    """Longest rows first: each row's tiles, the tiles before its own, and the number of all."""
    pairs: gl.constexpr = gl.BlockedLayout([1, ROWS_PAD], [32, 1], [4, 1], [1, 0])
    mine: gl.constexpr = gl.SliceLayout(1, pairs)
    theirs: gl.constexpr = gl.SliceLayout(0, pairs)
    ids = gl.arange(0, ROWS_PAD, layout=mine)
    live = ids < rows
    first = gl.load(cu_q + ids, mask=live, other=0)
    last = gl.load(cu_q + ids + 1, mask=live, other=0)
    lengths = gl.load(kv_lengths + ids, mask=live, other=0)
    tiles = gl.cdiv(last - first, BLOCK_Q)
    other_ids = gl.expand_dims(gl.arange(0, ROWS_PAD, layout=theirs), 0)
    other_lengths = gl.expand_dims(gl.convert_layout(lengths, theirs), 0)
    other_tiles = gl.expand_dims(gl.convert_layout(tiles, theirs), 0)
    length = gl.expand_dims(lengths, 1)
    earlier = (other_lengths == length) & (other_ids < gl.expand_dims(ids, 1))
    before = gl.sum(gl.where((other_lengths > length) | earlier, other_tiles, 0), 1)
    return ids, tiles, before, gl.sum(tiles, 0)


@gluon.jit
def _softmax(scores, maximum, total, scale):
    """One block of an online softmax: weights, the new maximum and sum, and the decay of what was summed."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - gl.expand_dims(new_maximum, 1))
    decay = gl.exp2(maximum - new_maximum)
    return weights, new_maximum, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def _merge(
    values,
    stats,
    cut,
    m,
    flat,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Sum of a tile's parts, in their order: weighted values and sums of weights, of the rows ``m``."""
    parts, shared_job, shared_jobs = cut
    maximum = gl.full([ROWS], _MASKED, gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, LAYOUT)
    for part in range(parts):
        slot = shared_job + part * shared_jobs
        # .cg: from the second-level cache, where the other multiprocessors' writes are.
        part_maximum = gl.load(stats + slot * (2 * M) + m, cache_modifier=".cg")
        part_total = gl.load(stats + slot * (2 * M) + M + m, cache_modifier=".cg")
        part_acc = gl.load(values + slot * (M * HEAD_DIM) + flat, cache_modifier=".cg")
        new_maximum = gl.maximum(maximum, part_maximum)
        decay, weight = gl.exp2(maximum - new_maximum), gl.exp2(part_maximum - new_maximum)
        total = total * decay + part_total * weight
        acc = acc * gl.expand_dims(decay, 1) + part_acc * gl.expand_dims(weight, 1)
        maximum = new_maximum
    return acc, total


@gluon.jit
def _consume(
    HALF: gl.constexpr,
    q,
    out,
    parts_of_tiles,  # values, stats, counters
    query_tile,  # [M / 2, HEAD_DIM]
    rings,
    tile,
    keys_to_walk,
    cut,
    slot,
    q_strides,
    scale,
    HEADS: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps: the output of one half of the tile's queries, or the tile's part of it."""
    ROWS: gl.constexpr = M // 2
    gl.static_assert(N == HEAD_DIM)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])  # of scores and outputs
    in_rows: gl.constexpr = gl.SliceLayout(1, layout)
    in_columns: gl.constexpr = gl.SliceLayout(0, layout)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    k_ring, v_ring, k_ready, k_free, v_ready, v_free = rings
    first_row, tokens, first_head, first_position = tile
    blocks, last_start = keys_to_walk
    if blocks > 0:
        m = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
        dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, load_layout))
        where = (first_row + m // PACK) * q_strides[0] + (first_head + m % PACK) * q_strides[1]
        live = gl.expand_dims(m // PACK < tokens, 1)
        query_tile.store(
            gl.load(q + gl.expand_dims(where, 1) + gl.expand_dims(dims, 0), mask=live, other=0.0)
        )
        fence_async_shared()

        position = gl.expand_dims(
            first_position + (HALF * ROWS + gl.arange(0, ROWS, layout=in_rows)) // PACK, 1
        )
        columns = gl.expand_dims(gl.arange(0, N, layout=in_columns), 0)
        maximum = gl.full([ROWS], _MASKED, gl.float32, in_rows)
        total = gl.zeros([ROWS], gl.float32, in_rows)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
        none = gl.zeros([ROWS, N], gl.float32, layout)

        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(
            query_tile, k_ring.index(0).permute((1, 0)), none, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_free.index(0), count=1)
        scores = gl.where(last_start + columns <= position, scores, _MASKED)
        weights, maximum, total, decay = _softmax(scores, maximum, total, scale)
        p = gl.convert_layout(weights.to(q.dtype.element_ty), weights_layout)
        mbarrier.wait(k_ready.index(1 % STAGES), (1 // STAGES) & 1, pred=blocks > 1)
        for whole in gl.static_range(2):  # the second masked block, if there is one; then the others
            begin = gl.minimum(2, blocks) if whole else 1
            end = blocks if whole else gl.minimum(2, blocks)
            for i in range(begin, end):
                here, before, following = i % STAGES, (i - 1) % STAGES, (i + 1) % STAGES
                keys = k_ring.index(here).permute((1, 0))
                scores = warpgroup_mma(query_tile, keys, none, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(before), ((i - 1) // STAGES) & 1)
                acc = warpgroup_mma(p, v_ring.index(before), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(k_free.index(here), count=1)
                if whole == 0:
                    scores = gl.where(last_start - i * N + columns <= position, scores, _MASKED)
                weights, maximum, total, decay = _softmax(scores, maximum, total, scale)
                p = gl.convert_layout(weights.to(q.dtype.element_ty), weights_layout)
                # The next keys are waited for here, not where they are used: the branch of this wait keeps the
                # assembler from moving the next one above the softmax, which is to run beside the product.
                mbarrier.wait(k_ready.index(following), ((i + 1) // STAGES) & 1, pred=i + 1 < blocks)
                acc, p = warpgroup_mma_wait(0, deps=(acc, p))
                mbarrier.arrive(v_free.index(before), count=1)
                acc = acc * gl.expand_dims(decay, 1)
        final = (blocks - 1) % STAGES
        mbarrier.wait(v_ready.index(final), ((blocks - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_ring.index(final), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))

        m_out = HALF * ROWS + gl.arange(0, ROWS, layout=in_rows)
        d_out = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=in_columns), 0)
        complete = True
        if cut[0] > 1:
            values, stats, counters = parts_of_tiles
            flat = gl.expand_dims(m_out * HEAD_DIM, 1) + d_out
            gl.store(stats + slot * (2 * M) + m_out, maximum)
            gl.store(stats + slot * (2 * M) + M + m_out, total)
            gl.store(values + slot * (M * HEAD_DIM) + flat, acc)
            gl.barrier()  # every thread's values are written before one of them says so
            counter = counters + 2 * cut[1] + HALF
            arrived = gl.atomic_add(counter, 1, sem="acq_rel")
            complete = arrived == cut[0] - 1  # the last one to come writes the output
            if complete:
                gl.store(counter, 0)  # for the next launch
                acc, total = _merge(values, stats, cut, m_out, flat, M, ROWS, HEAD_DIM, layout)
        if complete:
            result = (acc / gl.expand_dims(total, 1)).to(out.dtype.element_ty)
            place = ((first_row + m_out // PACK) * HEADS + first_head + m_out % PACK) * HEAD_DIM
            gl.store(
                out + gl.expand_dims(place, 1) + d_out, result, mask=gl.expand_dims(m_out // PACK < tokens, 1)
            )


@gluon.jit
def _produce(
    keys,
    values,
    table,  # at this row
    rings,
    fetched,
    kv_head,
    keys_to_walk,
    length,
    PAGE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: fetches the blocks, the last one first."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    k_ring, v_ring, k_ready, k_free, v_ready, v_free = rings
    blocks, last_start = keys_to_walk
    column = kv_head * HEAD_DIM
    if blocks > 0:
        page = gl.load(table + last_start // PAGE)
        for i in range(0, blocks):
            stage, phase = i % STAGES, ((i // STAGES) & 1) ^ 1
            start = last_start - i * N
            # Look the next page up now, so that it is known when its keys are to be fetched.
            following = gl.load(table + gl.maximum(start - N, 0) // PAGE)
            row = page * PAGE + start % PAGE
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), keys.block_type.nbytes)
            tma.async_copy_global_to_shared(keys, [row, column], k_ready.index(stage), k_ring.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            inside = start + N <= length
            block = v_ring.index(stage)
            mbarrier.expect(v_ready.index(stage), values.block_type.nbytes, pred=inside)
            tma.async_copy_global_to_shared(values, [row, column], v_ready.index(stage), block, pred=inside)
            if start + N > length:
                # What lies behind the sequence in its last page may be NaN, which a weight of zero does not hide.
                mbarrier.expect(fetched, values.block_type.nbytes)
                tma.async_copy_global_to_shared(values, [row, column], fetched, block)
                mbarrier.wait(fetched, 0)
                rows = start + gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, layout)), 1)
                for at in gl.static_range(0, N, 8):
                    if start + at + 8 > length:
                        some = block.slice(at, 8)
                        some.store(gl.where(rows + at < length, some.load(layout), 0.0))
                fence_async_shared()
                mbarrier.arrive(v_ready.index(stage), count=1)
            page = following


# Slices of packed buffers begin at any address: alignment must not choose a compiled form.
@gluon.jit(
    do_not_specialize=("rows", "at_once", "table_stride"),
    do_not_specialize_on_alignment=("page_table", "kv_lengths", "cu_q", "counters"),
)
def prefill_sm90_kernel(
    q,
    keys,  # descriptors of the pages
    values,
    page_table,
    kv_lengths,
    cu_q,
    out,
    part_values,
    part_stats,
    counters,
    rows,
    at_once,
    scale,
    q_token_stride,
    q_head_stride,
    table_stride,
    PAGE: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One tile's output, or one part's contribution to it. Which, is worked out as in
    :func:`helios.kernels.prefill_kernel.prefill_kernel`, whose comments say why."""
    BLOCK_Q: gl.constexpr = M // PACK
    HEAD_TILES: gl.constexpr = HEADS // PACK
    ids, tiles, before, all_tiles = _order_rows(cu_q, kv_lengths, rows, BLOCK_Q, ROWS_PAD)
    jobs = all_tiles * HEAD_TILES
    whole_jobs = jobs // at_once * at_once
    shared_jobs = gl.maximum(jobs - whole_jobs, 1)
    program = gl.program_id(0)
    slot = gl.maximum(program - whole_jobs, 0)
    most_parts = gl.where(program < whole_jobs, 1, gl.minimum(at_once // shared_jobs, _MAX_PARTS))
    job = gl.minimum(program, whole_jobs) + slot % shared_jobs
    part = slot // shared_jobs
    first_head = job % HEAD_TILES * PACK
    kv_head = first_head // GROUP
    rank = job // HEAD_TILES
    hit = (before <= rank) & (rank < before + tiles)
    row = gl.sum(gl.where(hit, ids, 0), 0)
    tile = gl.sum(gl.where(hit, before + tiles - 1 - rank, 0), 0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin = gl.load(cu_q + row)
    count = gl.load(cu_q + row + 1) - begin
    length = gl.load(kv_lengths + row)
    first_position = length - count + tile * BLOCK_Q
    seen = gl.minimum(first_position + BLOCK_Q, length)
    parts = gl.minimum(most_parts, gl.cdiv(seen, _KEYS_OF_PART))
    keys_of_part = gl.cdiv(gl.cdiv(seen, parts), N) * N
    parts = gl.cdiv(seen, keys_of_part)
    key = part * keys_of_part
    blocks = gl.cdiv(gl.minimum(key + keys_of_part, seen) - key, N)
    blocks = gl.where((job >= jobs) | (part >= most_parts) | (part >= parts), 0, blocks)

    dtype: gl.constexpr = q.dtype.element_ty
    one: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2, M // 2, HEAD_DIM], gl.NVMMASharedLayout(128, 16, rank=2))
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, N, HEAD_DIM], keys.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, N, HEAD_DIM], values.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    fetched = gl.allocate_shared_memory(gl.int64, [1], one)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)  # both groups
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(fetched, count=1)

    rings = (k_ring, v_ring, k_ready, k_free, v_ready, v_free)
    where = (begin + tile * BLOCK_Q, count - tile * BLOCK_Q, first_head, first_position)
    walk = (blocks, key + (blocks - 1) * N)
    cut = (parts, slot % shared_jobs, shared_jobs)
    kept = (part_values, part_stats, counters)
    strides = (q_token_stride, q_head_stride)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, q, out, kept, queries.index(0), rings, where, walk, cut, slot, strides, scale,
                    HEADS, PACK, HEAD_DIM, M, N, STAGES,
                ),
            ),
            (
                _consume,
                (
                    1, q, out, kept, queries.index(1), rings, where, walk, cut, slot, strides, scale,
                    HEADS, PACK, HEAD_DIM, M, N, STAGES,
                ),
            ),
            (
                _produce,
                (
                    keys, values, page_table + row * table_stride, rings, fetched, kv_head, walk, length,
                    PAGE, HEAD_DIM, N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
