"""Prefill attention over paged keys and values: many query tokens a row, causal (Triton).

A program computes one tile of queries of one row. The query heads of a group lie side by side in a tile
(``pack``), so that a tile of 128 holds 32 tokens of 4 heads: it reads keys and values once for the group, and
the diagonal, where half of the work is thrown away, is narrow. The tile walks the row's keys in blocks with an
online softmax in float32: first the blocks that all its queries see whole, without a mask, then the few on the
diagonal. A block divides a page, so it is one plain strided load whose address comes from one page number.

Which tile a program takes is worked out on the device from ``cu_q`` and ``kv_lengths``, the tiles with the most
keys first: those run longest, and the short ones fill the gaps at the end. The grid only needs an upper bound,
so a CUDA graph serves any rows; programs beyond the last tile come last and leave at once.

Source of the algorithm: FlashAttention-2 (Dao, 2023).
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportConstantRedefinition=false

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from helios.kernels.common import constant, cuda, jit, launch_options, tl

# Score of a masked key, and the running maximum before the first. Finite: no inf - inf anywhere.
_MASKED = constant(-1.0e30)
_LOG2_E = 1.4426950408889634
# Rows of one launch, which the search for a tile compares pairwise. One number, so that one form is compiled.
MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is compiled. Shared memory holds the queries and ``num_stages`` blocks of keys and of
    values; with head_dim 128 a block of 64 is 16 KiB."""

    block_m: int = 128  # queries times packed heads of a tile
    block_n: int = 64  # keys of a block
    num_warps: int = 8
    num_stages: int = 3
    pack: bool = True  # the heads of a group in one tile, where their number is a power of two
    tma: bool = False  # blocks through the tensor memory accelerator (SM90)
    one_loop: bool = False  # the diagonal in the main loop, behind a branch: its pipeline fills only once
    registers: int | None = None  # most of a thread: with 128, two programs of 8 warps run side by side

    def __str__(self) -> str:
        options = "".join(
            f" {name}"
            for name, on in (("unpacked", not self.pack), ("tma", self.tma), ("one loop", self.one_loop))
            if on
        )
        limit = f" r{self.registers}" if self.registers else ""
        return f"m{self.block_m} n{self.block_n} w{self.num_warps} s{self.num_stages}{limit}{options}"


# (most new tokens, configuration): the first line that reaches the number of tokens in a call.
DEFAULT_CONFIGS: tuple[tuple[int, PrefillConfig], ...] = (
    (512, PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3, one_loop=True)),
    (1 << 30, PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)),
)


def default_config(tokens: int) -> PrefillConfig:
    """The configuration of :data:`DEFAULT_CONFIGS` for ``tokens`` new tokens."""
    return next(config for most, config in DEFAULT_CONFIGS if tokens <= most)


def paged_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    cu_q: torch.Tensor,
    *,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention of each row's newest tokens over its pages. Returns ``[T, heads, head_dim]``.

    ``q [T, heads, head_dim]``, of which row ``i`` has tokens ``cu_q[i]`` to ``cu_q[i + 1]``: the last positions
    of its ``kv_lengths[i]``. ``k_pages, v_pages [pages, page size, kv_heads, head_dim]``, ``page_table [R, P]``,
    ``kv_lengths [R]`` and ``cu_q [R + 1]`` int32. head_dim is a power of two from 16 on. Tokens of no row are
    left unwritten. No key or value outside the rows is used, and no page outside of them is read. Raises
    ValueError for shapes or configurations the kernel cannot do.

    With programmatic dependent launch, ``kv_lengths`` and ``cu_q`` must not come from the kernel directly
    before this one: they are read while it may still run.
    """
    config = config or default_config(q.shape[0])
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    _check(q, k_pages, v_pages, config)
    group = heads // kv_heads
    pack = group if config.pack and group & (group - 1) == 0 and group <= config.block_m else 1
    out = torch.empty((tokens, heads, head_dim), device=q.device, dtype=q.dtype)
    keys, values = (
        (_blocks(pages, config.block_n) for pages in (k_pages, v_pages)) if config.tma else (k_pages, v_pages)
    )
    limit = {"maxnreg": config.registers} if config.registers else {}
    for first in range(0, kv_lengths.shape[0], MAX_ROWS):
        rows = min(kv_lengths.shape[0] - first, MAX_ROWS)
        _prefill_kernel[(num_tiles(tokens, rows, config.block_m // pack) * (heads // pack),)](
            q,
            keys,
            values,
            page_table[first:],
            kv_lengths[first:],
            cu_q[first:],
            out,
            rows,
            head_dim**-0.5 * _LOG2_E,  # scores in powers of two: exp2 is one instruction
            q.stride(0),
            q.stride(1),
            k_pages.stride(0),
            k_pages.stride(1),
            k_pages.stride(2),
            page_table.stride(0),
            PAGE=page_size,
            HEADS=heads,
            GROUP=group,
            PACK=pack,
            HEAD_DIM=head_dim,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            ROWS_PAD=MAX_ROWS,
            TMA=config.tma,
            ONE_LOOP=config.one_loop,
            num_stages=config.num_stages,
            **limit,
            **launch_options(config.num_warps),
        )
    return out


def num_tiles(tokens: int, rows: int, queries: int) -> int:
    """Most tiles of ``queries`` that ``tokens`` in up to ``rows`` rows can need: the last tile of each row
    may hold a single one."""
    rows = min(rows, tokens)
    return (tokens + rows * (queries - 1)) // queries


def paged_prefill_reference(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    cu_q: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch: gathers each row's keys and computes in float32."""
    heads, head_dim = q.shape[1:]
    page_size, group = k_pages.shape[1], heads // k_pages.shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    offsets = cu_q.tolist()
    for row, length in enumerate(kv_lengths.tolist()):
        first, last = offsets[row : row + 2]
        if first == last:
            continue
        pages = page_table[row, : (length + page_size - 1) // page_size].long()
        k, v = (
            pool[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1).transpose(0, 1)
            for pool in (k_pages, v_pages)
        )  # [heads, length, head_dim]
        scores = q[first:last].float().transpose(0, 1) @ k.transpose(1, 2) * head_dim**-0.5
        where = torch.arange(length - (last - first), length, device=q.device)[:, None]
        scores.masked_fill_(torch.arange(length, device=q.device) > where, -torch.inf)
        out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
    return out


def _check(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, config: PrefillConfig) -> None:
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} kv heads")
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim {head_dim} is not a power of two from 16 on")
    if page_size % config.block_n:
        raise ValueError(f"a block of {config.block_n} keys does not divide a page of {page_size}")
    if k_pages.stride() != v_pages.stride() or k_pages.stride(3) != 1 or q.stride(2) != 1:
        raise ValueError("keys and values must have the same strides, and head_dim must be contiguous")
    if config.tma and config.one_loop:
        raise ValueError("values behind a row can be blanked on the way only in a loop of their own with tma")
    if config.tma and not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("tensor descriptors need contiguous pages")


def _blocks(pages: torch.Tensor, block_n: int) -> Any:
    """A tensor descriptor that loads ``block_n`` tokens of one kv head."""
    descriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return descriptor.from_tensor(pages.flatten(0, 1).flatten(1, 2), [block_n, pages.shape[3]])


@jit()
def _find_tile(rank, cu_q, kv_lengths, rows, BLOCK_Q: tl.constexpr, ROWS_PAD: tl.constexpr):
    """The row and the tile in it that comes ``rank``-th: longest rows first, each from its last tile on.
    The row is -1 beyond the last tile."""
    ids = tl.arange(0, ROWS_PAD)
    live = ids < rows
    first = tl.load(cu_q + ids, mask=live, other=0)
    last = tl.load(cu_q + ids + 1, mask=live, other=0)
    lengths = tl.load(kv_lengths + ids, mask=live, other=0)
    tiles = tl.cdiv(last - first, BLOCK_Q)
    longer = lengths[None, :] > lengths[:, None]
    earlier = (lengths[None, :] == lengths[:, None]) & (ids[None, :] < ids[:, None])
    start = tl.sum(tl.where(longer | earlier, tiles[None, :], 0), 1)  # tiles before each row's
    hit = (start <= rank) & (rank < start + tiles)
    row = tl.sum(tl.where(hit, ids + 1, 0), 0) - 1
    tile = tl.sum(tl.where(hit, start + tiles - 1 - rank, 0), 0)
    return row, tile


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


# Slices of packed buffers begin at any address: alignment must not choose a compiled form.
@jit(
    do_not_specialize=("rows", "table_stride"),
    do_not_specialize_on_alignment=("page_table", "kv_lengths", "cu_q"),
)
def _prefill_kernel(
    q,
    keys,
    values,
    page_table,
    kv_lengths,
    cu_q,
    out,
    rows,
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
    PDL: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    HEAD_TILES: tl.constexpr = HEADS // PACK
    # Heads vary fastest: programs that run side by side read the same tokens.
    first_head = tl.program_id(0) % HEAD_TILES * PACK
    kv_head = first_head // GROUP
    row, tile = _find_tile(tl.program_id(0) // HEAD_TILES, cu_q, kv_lengths, rows, BLOCK_Q, ROWS_PAD)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if row < 0:
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
            whole if step == 1 else 0,
            seen if step == 1 or ONE_LOOP else whole,
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
    where = ((begin + token) * HEADS + head) * HEAD_DIM
    result = acc / total[:, None]
    tl.store(out + where[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=live)
