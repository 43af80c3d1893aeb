"""Decode attention over paged keys and values: one query token a row, split over the keys (Triton).

The idea is flash-decoding with one difference: nobody chooses a number of splits. All rows' keys are cut
into tiles of ``tile`` tokens and laid end to end, and this line of tiles is dealt out evenly ("stream-K"):

    rows      |----- row 0 -----|-- row 1 --|- 2 -|---------- row 3 ----------|
    columns   |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |  8  |  9  | ...

A program is one (column, kv head). It walks its stretch of the line, row by row, with an online softmax
in float32. A row inside one column is written straight to the output; a row that crosses columns leaves
partial results (running maximum, sum, weighted values) that are merged in column order, so the answer
does not depend on which program finishes first. Where the columns lie is computed on the device from
``kv_lengths``: a CUDA graph captured for a context of 40,960 spreads a context of 1,024 over the whole
card, and a batch of mixed lengths keeps every multiprocessor busy to the end.

The query heads that share a kv head form one 16-row tile for the tensor cores, so keys and values are
read once. Partial results are merged by the program that arrives last (``fused``, one kernel) or by a
second kernel. Sources: flash-decoding (Dao et al., 2023), Stream-K (Osama et al., 2023).
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportConstantRedefinition=false

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from helios.kernels.common import (
    LOG2_E,
    constant,
    cuda,
    launch_options,
    multiprocessors,
    next_power_of_2,
    sm90_kernels,
    tl,
    triton,
)

# Score of a masked key, and the running maximum before the first. Finite: no inf - inf anywhere, so a row
# without keys gives weights over values that are loaded as zeros, which is the right answer.
_MASKED = constant(-1.0e30)
_QUERY_ROWS = 16  # the smallest tile tl.dot takes


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled and launched.

    With head_dim 128 a tile of 64 tokens is 16 KiB of keys and 16 of values; ``num_stages`` less one such
    pairs lie in shared memory. ``programs_per_sm`` should be what fits there: a multiprocessor needs some
    40 KiB on the way to reach an H200's bandwidth (4.3 TB/s x 1 us / 132), and other programs' loads while
    one of them starts a row.
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3
    fused: bool = True  # merge in the same kernel rather than in a second one
    sm90_rows: int = 0  # up to so many rows are left to :mod:`helios.kernels.decode_hopper`


def default_config(device: torch.device, head_dim: int) -> DecodeConfig:
    """The configuration for a card, by its shared memory: two programs for each multiprocessor where they fit, and
    stages until a third does not. With programmatic dependent launch programs come while the kernel before still
    holds some multiprocessors; where three fit, some get three and others one, and the step waits for the three.
    """
    if device.type != "cuda":
        return DecodeConfig()
    memory = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    pair = 2 * 64 * head_dim * 2
    stages = next((s for s in (4, 3) if memory >= 2 * ((s - 1) * pair + 8192)), 2)
    fits = memory // ((stages - 1) * pair + 8192)
    # The kernel for SM90 is faster with few rows, and slower with many.
    sm90_rows = 16 if sm90_kernels(device) and head_dim in (64, 128) else 0
    return DecodeConfig(num_stages=stages, programs_per_sm=min(max(fits, 1), 2), sm90_rows=sm90_rows)


def num_columns(rows: int, max_kv: int, kv_heads: int, multiprocessors: int, config: DecodeConfig) -> int:
    """Columns the line of tiles is cut into: as many as run at once, or as there can be tiles.

    More columns than run at once would only add partial results; the columns are equal in work, so there
    is no tail to fill. 132 multiprocessors, 8 kv heads and 2 programs each give 33 columns of 8 programs.
    """
    at_once = max(multiprocessors * config.programs_per_sm // kv_heads, 1)
    return min(at_once, rows * max(-(-max_kv // config.tile), 1))


class DecodeWorkspace:
    """Scratch memory of :func:`paged_decode`, shared by calls on one stream (all layers of a model).

    The counters return to zero by themselves, so a CUDA graph can be replayed without clearing them.
    """

    def __init__(
        self, device: torch.device, max_rows: int, columns: int, kv_heads: int, group: int, head_dim: int
    ) -> None:
        # A column can hold the end of one row and the beginning of another: two slots each.
        slots = columns * kv_heads * 2
        self.columns = columns
        self.values = torch.empty((slots, group, head_dim), device=device, dtype=torch.float32)
        self.stats = torch.empty((slots, 2, group), device=device, dtype=torch.float32)  # maximum, sum
        self.counters = torch.zeros(max_rows * kv_heads, device=device, dtype=torch.int32)


def paged_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    max_kv: int,
    *,
    config: DecodeConfig | None = None,
    workspace: DecodeWorkspace | None = None,
    columns: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per row over the first ``kv_lengths[row]`` keys of its pages.

    ``q [R, heads, head_dim]``; ``k_pages, v_pages [pages, page size, kv_heads, head_dim]``; ``page_table
    [R, P]`` and ``kv_lengths [R]`` int32. Returns ``[R, heads, head_dim]`` in q's dtype; zeros for a row
    of length 0. With ``out``, contiguous and of that shape, the answer is written there, and rows of length 0,
    all of which must come last, are left as they are: they may belong to someone else.
    ``max_kv`` only bounds the grid. Without a ``workspace`` one is allocated for the call.
    ``columns`` overrides :func:`num_columns`. No key or value outside the sequences is read. With programmatic
    dependent launch, ``kv_lengths`` must not come from the kernel directly before this one: it is read while
    that may still run.
    """
    rows, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group = heads // kv_heads
    if heads % kv_heads or group > _QUERY_ROWS:
        raise ValueError(f"{heads} query heads over {kv_heads} kv heads: groups of 1 to {_QUERY_ROWS} only")
    config = default_config(q.device, head_dim) if config is None else config
    if page_size % config.tile:
        raise ValueError(f"a tile of {config.tile} does not divide a page of {page_size} tokens")
    if k_pages.stride() != v_pages.stride() or k_pages.stride(3) != 1 or q.stride(2) != 1:
        raise ValueError("keys and values must have the same strides, and head_dim must be contiguous")
    if columns is None:
        columns = num_columns(rows, max_kv, kv_heads, max(multiprocessors(q.device), 1), config)
    if workspace is None:
        workspace = DecodeWorkspace(q.device, rows, columns, kv_heads, group, head_dim)
    columns = min(columns, workspace.columns)
    least_tiles = 1 if out is None else 0
    if out is None:
        out = torch.empty((rows, heads, head_dim), device=q.device, dtype=q.dtype)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError("out must be contiguous and have q's shape and dtype")
    # Few values, so that a server compiles few kernels.
    rows_pad = 32 if rows <= 32 else max(next_power_of_2(rows), 256)
    scale = head_dim**-0.5 * LOG2_E
    if rows <= config.sm90_rows and k_pages.is_contiguous() and v_pages.is_contiguous():
        importlib.import_module("helios.kernels.decode_hopper").decode_hopper(
            q,
            k_pages,
            v_pages,
            page_table,
            kv_lengths,
            out,
            workspace.values,
            workspace.stats,
            workspace.counters,
            scale,
            columns=columns,
            least_tiles=least_tiles,
            rows_pad=rows_pad,
        )
        return out
    group_pad = next_power_of_2(group)
    shared: dict[str, int] = {
        "LEAST_TILES": least_tiles,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "HEAD_DIM": head_dim,
        "TILE": config.tile,
        "ROWS_PAD": rows_pad,
        # Partial results merged at a time: as many as leave room in registers for three programs per SM.
        "MERGE": 16 if group_pad <= 4 else 32 // group_pad,
    }
    _decode_kernel[(kv_heads, columns)](
        q,
        k_pages,
        v_pages,
        page_table,
        kv_lengths,
        out,
        workspace.values,
        workspace.stats,
        workspace.counters,
        rows,
        scale,
        q.stride(0),
        q.stride(1),
        k_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        page_table.stride(0),
        PAGE=page_size,
        QUERY_ROWS=_QUERY_ROWS,
        FUSED=config.fused,
        num_stages=config.num_stages,
        **launch_options(config.num_warps),
        **shared,
    )
    if not config.fused and columns > 1:
        _merge_kernel[(kv_heads, rows)](
            kv_lengths,
            out,
            workspace.values,
            workspace.stats,
            rows,
            columns,
            **launch_options(4),
            **shared,
        )
    return out


def paged_decode_reference(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch: gathers each row's keys and computes in float32."""
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, length in enumerate(kv_lengths.tolist()):
        if not length:
            continue
        pages = page_table[row, : (length + page_size - 1) // page_size].long()
        k = k_pages[pages].flatten(0, 1)[:length].float().transpose(0, 1)  # [kv_heads, length, head_dim]
        v = v_pages[pages].flatten(0, 1)[:length].float().transpose(0, 1)
        query = q[row].float().view(kv_heads, heads // kv_heads, head_dim)
        weights = (query @ k.transpose(1, 2) * head_dim**-0.5).softmax(-1)  # [kv_heads, group, length]
        out[row] = (weights @ v).reshape(heads, head_dim).to(q.dtype)
    return out


def _jit(*unspecialised: str) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` that does not compile again when one of these integers is 1 or a multiple of 16."""
    return lambda kernel: kernel if triton is None else triton.jit(kernel, do_not_specialize=unspecialised)


@_jit()
def _line_of_tiles(
    kv_lengths, rows, columns, TILE: tl.constexpr, ROWS_PAD: tl.constexpr, LEAST_TILES: tl.constexpr
):
    """Tiles of each row, where each row ends on the line (inclusive sums), all tiles, tiles per column."""
    row_ids = tl.arange(0, ROWS_PAD)
    lengths = tl.load(kv_lengths + row_ids, mask=row_ids < rows, other=0)
    # Least 1: a row of length 0 still needs its zeros written.
    tiles = tl.where(row_ids < rows, tl.maximum(tl.cdiv(lengths, TILE), LEAST_TILES), 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    return row_ids, tiles, ends, total, tl.cdiv(total, columns)


@_jit()
def _attend(
    query,  # [QUERY_ROWS, HEAD_DIM]
    k_pages,  # at this kv head
    v_pages,
    table,  # at this row
    length,
    first,
    last,
    scale,
    page_stride,
    token_stride,
    QUERY_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Online softmax over the row's tiles ``first`` to ``last - 1``: maximum, sum, unscaled output."""
    maximum = tl.full([QUERY_ROWS], _MASKED, tl.float32)
    # One sum for each place in the tile, added up at the end: spares the warps a meeting for each tile.
    totals = tl.zeros([QUERY_ROWS, TILE], tl.float32)
    acc = tl.zeros([QUERY_ROWS, HEAD_DIM], tl.float32)
    tokens = tl.arange(0, TILE)
    offsets = tokens[:, None] * token_stride + tl.arange(0, HEAD_DIM)[None, :]
    page = tl.load(table + first * TILE // PAGE)
    for tile in range(first, last):
        start = tile * TILE
        # Look the next page up now, so that its address is known when its keys are to be fetched.
        following = tl.load(table + tl.minimum(start + TILE, (last - 1) * TILE) // PAGE)
        base = page.to(tl.int64) * page_stride + (start % PAGE) * token_stride
        live = start + tokens < length
        k = tl.load(k_pages + base + offsets, mask=live[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k)) * scale
        scores = tl.where(live[None, :], scores, _MASKED)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        totals = totals * decay[:, None] + weights
        # Masked too, not only weighted with zero: what lies beyond the sequence may be NaN.
        v = tl.load(v_pages + base + offsets, mask=live[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        maximum = new_maximum
        page = following
    return maximum, tl.sum(totals, 1), acc


@_jit()
def _merge(
    values,
    stats,
    head,
    first_column,
    last_column,
    first_slot,  # which slot of the first column holds the row's beginning
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """One row's output ``[GROUP_PAD, HEAD_DIM]`` from the partial results of its columns, in their order."""
    lanes = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_DIM)
    maximum = tl.full([GROUP_PAD], _MASKED, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM], tl.float32)
    for start in range(first_column, last_column + 1, MERGE):
        columns = start + tl.arange(0, MERGE)
        slots = (columns * KV_HEADS + head) * 2 + tl.where(columns == first_column, first_slot, 0)
        live = (columns <= last_column)[:, None] & (lanes < GROUP)[None, :]  # [MERGE, GROUP_PAD]
        at = slots[:, None] * (2 * GROUP) + lanes[None, :]
        # .cg: from the second-level cache, where the other multiprocessors' writes are.
        part_maximum = tl.load(stats + at, mask=live, other=_MASKED, cache_modifier=".cg")
        part_total = tl.load(stats + at + GROUP, mask=live, other=0.0, cache_modifier=".cg")
        at = (slots[:, None] * GROUP + lanes[None, :]) * HEAD_DIM
        part = tl.load(
            values + at[:, :, None] + dims[None, None, :],
            mask=live[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        weights = tl.exp2(part_maximum - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(part_total * weights, 0)
        acc = acc * decay[:, None] + tl.sum(part * weights[:, :, None], 0)
        maximum = new_maximum
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@_jit("rows", "table_stride")
def _decode_kernel(
    q,
    k_pages,
    v_pages,
    page_table,
    kv_lengths,
    out,
    values,
    stats,
    counters,
    rows,
    scale,
    q_row_stride,
    q_head_stride,
    page_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    PAGE: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    FUSED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads vary fastest: programs that run side by side read the same tokens, 256 bytes from each other.
    head = tl.program_id(0)
    column = tl.program_id(1)
    _, _, ends, total, per_column = _line_of_tiles(
        kv_lengths, rows, tl.num_programs(1), TILE, ROWS_PAD, LEAST_TILES
    )
    begin = column * per_column
    stop = tl.minimum(begin + per_column, total)
    passed = ends <= begin
    row = tl.sum(passed.to(tl.int32), 0)
    row_begin = tl.max(tl.where(passed, ends, 0), 0)
    if PDL:
        # Lengths and pages were written long before: the division of work needs no waiting, queries and keys do.
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()

    lanes = tl.arange(0, QUERY_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    at = begin
    while at < stop:
        length = tl.load(kv_lengths + row)
        row_end = row_begin + tl.maximum(tl.cdiv(length, TILE), 1)
        until = tl.minimum(row_end, stop)
        query = tl.load(
            q + row * q_row_stride + (head * GROUP + lanes)[:, None] * q_head_stride + dims[None, :],
            mask=(lanes < GROUP)[:, None],
            other=0.0,
        )
        maximum, weight, acc = _attend(
            query,
            k_pages + head * kv_head_stride,
            v_pages + head * kv_head_stride,
            page_table + row * table_stride,
            length,
            at - row_begin,
            until - row_begin,
            scale,
            page_stride,
            token_stride,
            QUERY_ROWS,
            HEAD_DIM,
            PAGE,
            TILE,
        )
        first_column = row_begin // per_column
        last_column = (row_end - 1) // per_column
        out_row = out + (row * KV_HEADS + head) * (GROUP * HEAD_DIM)
        flat = lanes[:, None] * HEAD_DIM + dims[None, :]
        if first_column == last_column:
            result = acc / weight[:, None]
            tl.store(out_row + flat, result.to(out.dtype.element_ty), mask=(lanes < GROUP)[:, None])
        else:
            slot = (column * KV_HEADS + head) * 2 + (at != begin).to(tl.int32)
            tl.store(stats + slot * (2 * GROUP) + lanes, maximum, mask=lanes < GROUP)
            tl.store(stats + slot * (2 * GROUP) + GROUP + lanes, weight, mask=lanes < GROUP)
            tl.store(values + slot * (GROUP * HEAD_DIM) + flat, acc, mask=(lanes < GROUP)[:, None])
            if FUSED:
                counter = counters + row * KV_HEADS + head
                tl.debug_barrier()  # every thread's part is written before one of them says so
                arrived = tl.atomic_add(counter, 1, sem="acq_rel")
                if arrived == last_column - first_column:
                    tl.store(counter, 0)  # for the next launch
                    first_slot = (row_begin != first_column * per_column).to(tl.int32)
                    merged = _merge(
                        values,
                        stats,
                        head,
                        first_column,
                        last_column,
                        first_slot,
                        KV_HEADS,
                        GROUP,
                        GROUP_PAD,
                        HEAD_DIM,
                        MERGE,
                    )
                    _store_merged(out_row, merged, GROUP, GROUP_PAD, HEAD_DIM)
        at = until
        row_begin = row_end
        row += 1


@_jit()
def _store_merged(out_row, merged, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr):
    lanes = tl.arange(0, GROUP_PAD)
    where = out_row + lanes[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(where, merged.to(out_row.dtype.element_ty), mask=(lanes < GROUP)[:, None])


@_jit("rows", "columns")
def _merge_kernel(
    kv_lengths,
    out,
    values,
    stats,
    rows,
    columns,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The second kernel of the unfused form: one program per (row, kv head)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row_ids, tiles, ends, _, per_column = _line_of_tiles(
        kv_lengths, rows, columns, TILE, ROWS_PAD, LEAST_TILES
    )
    row_end = tl.sum(tl.where(row_ids == row, ends, 0), 0)
    row_begin = row_end - tl.sum(tl.where(row_ids == row, tiles, 0), 0)
    per_column = tl.maximum(per_column, 1)
    first_column = row_begin // per_column
    last_column = (row_end - 1) // per_column
    if (first_column != last_column) & (row_end > row_begin):
        first_slot = (row_begin != first_column * per_column).to(tl.int32)
        merged = _merge(
            values,
            stats,
            head,
            first_column,
            last_column,
            first_slot,
            KV_HEADS,
            GROUP,
            GROUP_PAD,
            HEAD_DIM,
            MERGE,
        )
        _store_merged(out + (row * KV_HEADS + head) * (GROUP * HEAD_DIM), merged, GROUP, GROUP_PAD, HEAD_DIM)
