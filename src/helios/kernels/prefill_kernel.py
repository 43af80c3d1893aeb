"""The Triton program behind :func:`helios.kernels.prefill_attention.paged_prefill`."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportConstantRedefinition=false

from __future__ import annotations

from helios.kernels.common import constant, cuda, jit, tl

# Score of a masked key, and the running maximum before the first. Finite: no inf - inf anywhere.
_MASKED = constant(-1.0e30)
# Most parts that the keys of a tile are cut into, and the fewest keys that are worth a part.
_MAX_PARTS = constant(8)
_KEYS_OF_PART = constant(512)


@jit()
def _order_rows(cu_q, kv_lengths, rows, BLOCK_Q: tl.constexpr, ROWS_PAD: tl.constexpr):
    """Longest rows first: each row's tiles, the tiles before its own, and the number of all."""
    ids = tl.arange(0, ROWS_PAD)
    live = ids < rows
    first = tl.load(cu_q + ids, mask=live, other=0)
    last = tl.load(cu_q + ids + 1, mask=live, other=0)
    lengths = tl.load(kv_lengths + ids, mask=live, other=0)
    tiles = tl.cdiv(last - first, BLOCK_Q)
    longer = lengths[None, :] > lengths[:, None]
    earlier = (lengths[None, :] == lengths[:, None]) & (ids[None, :] < ids[:, None])
    before = tl.sum(tl.where(longer | earlier, tiles[None, :], 0), 1)
    return ids, tiles, before, tl.sum(tiles, 0)


@jit()
def _walk(
    query,  # [BLOCK_M, HEAD_DIM]
    position,  # [BLOCK_M] of each query in its row
    maximum,
    total,
    acc,
    keys,  # pages, or their descriptor
    values,
    table,  # at this row
    kv_head,
    length,
    begin,
    end,
    whole,
    scale,
    page_stride,
    token_stride,
    kv_head_stride,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIAGONAL: tl.constexpr,
    TMA: tl.constexpr,
):
    """Online softmax over the blocks of the keys ``begin`` to ``end``. Those from ``whole`` on are the diagonal's,
    which needs a mask: all of them, if ``DIAGONAL`` is 1, none, if it is 0, or some, if it is 2."""
    tokens = tl.arange(0, BLOCK_N)
    offsets = tokens[:, None] * token_stride + tl.arange(0, HEAD_DIM)[None, :]
    last = tl.maximum(end - 1, 0)
    page = tl.load(table + tl.minimum(begin, last) // PAGE)
    for start in tl.range(begin, end, BLOCK_N):
        # Look the next page up now, so that its address is known when its keys are to be fetched.
        following = tl.load(table + tl.minimum(start + BLOCK_N, last) // PAGE)
        live = (start + tokens < length)[:, None]
        block = page.to(tl.int64) * page_stride + (start % PAGE) * token_stride + kv_head * kv_head_stride
        in_pool = page * PAGE + start % PAGE
        k = keys.load([in_pool, kv_head * HEAD_DIM]) if TMA else tl.load(keys + block + offsets)
        scores = tl.dot(query, tl.trans(k))
        if DIAGONAL == 1:
            scores = tl.where(start + tokens[None, :] <= position[:, None], scores, _MASKED)
        elif DIAGONAL == 2:  # noqa: SIM102 (the outer branch is the compiler's)
            if start >= whole:
                scores = tl.where(start + tokens[None, :] <= position[:, None], scores, _MASKED)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weights, 1)
        # What lies behind the sequence in its last page may be NaN, which a weight of zero does not hide.
        if TMA:
            v = values.load([in_pool, kv_head * HEAD_DIM])
            if DIAGONAL == 1:
                v = tl.where(live, v, 0.0)
        elif DIAGONAL:
            v = tl.load(values + block + offsets, mask=live, other=0.0)
        else:
            v = tl.load(values + block + offsets)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        maximum = new_maximum
        page = following
    return maximum, total, acc


@jit()
def _merge(
    out,
    values,
    stats,
    shared_job,
    shared_jobs,
    parts,
    first_token,
    tokens,
    first_head,
    HEADS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Output of one tile, of ``tokens`` from ``first_token`` on, from its parts in their order. One half of the
    tile after the other: two whole ones at a time, the sum and a part, would not fit into the registers."""
    dims = tl.arange(0, HEAD_DIM)
    for half in range(2):
        m = half * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
        flat = m[:, None] * HEAD_DIM + dims[None, :]
        maximum = tl.full([BLOCK_M // 2], _MASKED, tl.float32)
        total = tl.zeros([BLOCK_M // 2], tl.float32)
        acc = tl.zeros([BLOCK_M // 2, HEAD_DIM], tl.float32)
        for part in range(parts):
            slot = shared_job + part * shared_jobs
            # .cg: from the second-level cache, where the other multiprocessors' writes are.
            part_maximum = tl.load(stats + slot * (2 * BLOCK_M) + m, cache_modifier=".cg")
            part_total = tl.load(stats + slot * (2 * BLOCK_M) + BLOCK_M + m, cache_modifier=".cg")
            part_acc = tl.load(values + slot * (BLOCK_M * HEAD_DIM) + flat, cache_modifier=".cg")
            new_maximum = tl.maximum(maximum, part_maximum)
            decay, weight = tl.exp2(maximum - new_maximum), tl.exp2(part_maximum - new_maximum)
            total = total * decay + part_total * weight
            acc = acc * decay[:, None] + part_acc * weight[:, None]
            maximum = new_maximum
        where = ((first_token + m // PACK) * HEADS + first_head + m % PACK) * HEAD_DIM
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + where[:, None] + dims[None, :], result, mask=(m // PACK < tokens)[:, None])


# Slices of packed buffers begin at any address: alignment must not choose a compiled form.
@jit(
    do_not_specialize=("rows", "at_once", "table_stride"),
    do_not_specialize_on_alignment=("page_table", "kv_lengths", "cu_q", "counters"),
)
def prefill_kernel(
    q,
    keys,
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
    page_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    TMA: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile's output, or one part's contribution to it; see :mod:`helios.kernels.prefill_attention`."""
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    HEAD_TILES: tl.constexpr = HEADS // PACK
    ids, tiles, before, all_tiles = _order_rows(cu_q, kv_lengths, rows, BLOCK_Q, ROWS_PAD)
    jobs = all_tiles * HEAD_TILES
    job, part, most_parts = tl.program_id(0), 0, 1
    slot, shared_jobs = 0, 1
    if SPLIT:
        # Jobs that fill the card are computed whole; the programs behind them share those of the tail.
        whole_jobs = jobs // at_once * at_once
        shared_jobs = tl.maximum(jobs - whole_jobs, 1)
        slot = tl.maximum(job - whole_jobs, 0)  # the program's number among those of the tail
        most_parts = tl.where(job < whole_jobs, 1, tl.minimum(at_once // shared_jobs, _MAX_PARTS))
        job = tl.minimum(job, whole_jobs) + slot % shared_jobs
        part = slot // shared_jobs
    # Heads vary fastest: programs that run side by side read the same tokens.
    first_head = job % HEAD_TILES * PACK
    kv_head = first_head // GROUP
    rank = job // HEAD_TILES
    hit = (before <= rank) & (rank < before + tiles)
    row = tl.sum(tl.where(hit, ids, 0), 0)
    tile = tl.sum(tl.where(hit, before + tiles - 1 - rank, 0), 0)  # a row's last tile first
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if (job >= jobs) | (part >= most_parts):
        return
    begin = tl.load(cu_q + row)
    count = tl.load(cu_q + row + 1) - begin
    length = tl.load(kv_lengths + row)
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    token = tile * BLOCK_Q + m // PACK
    live = (token < count)[:, None]
    head = first_head + m % PACK
    query = tl.load(
        q + ((begin + token) * q_token_stride + head * q_head_stride)[:, None] + dims[None, :],
        mask=live,
        other=0.0,
    )
    first_position = length - count + tile * BLOCK_Q
    position = length - count + token
    whole = (first_position + 1) // BLOCK_N * BLOCK_N  # keys of the blocks that even the first query sees
    seen = tl.minimum(first_position + BLOCK_Q, length)  # keys that the last query sees

    # A part's keys: whole blocks, the same number in each but the last.
    parts = tl.minimum(most_parts, tl.cdiv(seen, _KEYS_OF_PART)) if SPLIT else 1
    keys_of_part = tl.cdiv(tl.cdiv(seen, parts), BLOCK_N) * BLOCK_N
    parts = tl.cdiv(seen, keys_of_part)
    if part >= parts:
        return
    key = part * keys_of_part
    last_key = tl.minimum(key + keys_of_part, seen)

    maximum = tl.full([BLOCK_M], _MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    table = page_table + row * table_stride
    for step in tl.static_range(2 - ONE_LOOP):
        maximum, total, acc = _walk(
            query,
            position,
            maximum,
            total,
            acc,
            keys,
            values,
            table,
            kv_head,
            length,
            tl.maximum(whole, key) if step == 1 else key,
            last_key if step == 1 or ONE_LOOP else tl.minimum(whole, last_key),
            whole,
            scale,
            page_stride,
            token_stride,
            kv_head_stride,
            HEAD_DIM,
            PAGE,
            BLOCK_N,
            2 if ONE_LOOP else step,
            TMA,
        )
    if SPLIT:  # noqa: SIM102 (the outer branch is the compiler's)
        if parts > 1:
            flat = m[:, None] * HEAD_DIM + dims[None, :]
            tl.store(part_stats + slot * (2 * BLOCK_M) + m, maximum)
            tl.store(part_stats + slot * (2 * BLOCK_M) + BLOCK_M + m, total)
            tl.store(part_values + slot * (BLOCK_M * HEAD_DIM) + flat, acc)
            tl.debug_barrier()  # every thread's values are written before one of them says so
            counter = counters + slot % shared_jobs
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == parts - 1:  # the last one to come writes the output
                tl.store(counter, 0)  # for the next launch
                _merge(
                    out,
                    part_values,
                    part_stats,
                    slot % shared_jobs,
                    shared_jobs,
                    parts,
                    begin + tile * BLOCK_Q,
                    count - tile * BLOCK_Q,
                    first_head,
                    HEADS,
                    PACK,
                    BLOCK_M,
                    HEAD_DIM,
                )
            return
    where = ((begin + token) * HEADS + head) * HEAD_DIM
    result = acc / total[:, None]
    tl.store(out + where[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=live)
