"""Prefill attention over paged keys and values: many query tokens a row, causal (Triton).

A program computes one tile of queries of one row. The query heads of a group lie side by side in a tile
(``pack``), so that a tile of 128 holds 32 tokens of 4 heads: it reads keys and values once for the group, and
the diagonal, where half of the work is thrown away, is narrow. The tile walks the row's keys in blocks with an
online softmax in float32: first the blocks that all its queries see whole, without a mask, then the few on the
diagonal. A block divides a page, so it is one plain strided load whose address comes from one page number.

Which tile a program takes is worked out on the device from ``cu_q`` and ``kv_lengths``, the tiles with the most
keys first: those run longest, and the short ones fill the gaps at the end. The grid only needs an upper bound,
so a CUDA graph serves any rows; programs beyond the last tile come last and leave at once.

A few tokens behind a long context would keep a few programs busy for long, and tiles of equal length that fill
the card once and a little more take as long as two whole rounds. So programs can share the keys of a tile. The
card runs ``at_once`` programs side by side. As many tiles as fill it an exact number of times are computed whole,
by the first programs. The tiles left, fewer than ``at_once``, are the tail: as many programs as fit on the card
once are divided among them, each with its part of the keys. A part leaves its maximum, sum and values in a slot
of its own, and the part that arrives last merges them in order, so that results repeat. A prompt that begins at
its first token has its shortest tiles in the tail, with too few keys to be worth a cut. The cutting form of the
kernel serves calls whose tiles fill less than half of the card, where all are tail, and every call of a
configuration with ``tail``.

Source of the algorithm: FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, cast

import torch

from helios.kernels.common import LOG2_E, launch_options, multiprocessors
from helios.kernels.prefill_kernel import prefill_kernel

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
    tail: bool = False  # keys of the last tiles cut into parts in every call, not only where tiles are few
    registers: int | None = None  # most of a thread: with 128, two programs of 8 warps run side by side

    def __str__(self) -> str:
        options = "".join(
            f" {name}"
            for name, on in (
                ("unpacked", not self.pack),
                ("tma", self.tma),
                ("one loop", self.one_loop),
                ("tail", self.tail),
            )
            if on
        )
        limit = f" r{self.registers}" if self.registers else ""
        return f"m{self.block_m} n{self.block_n} w{self.num_warps} s{self.num_stages}{limit}{options}"


# (most new tokens, configuration): the first line that reaches the number of tokens in a call.
DEFAULT_CONFIGS: tuple[tuple[int, PrefillConfig], ...] = (
    (1024, PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3, one_loop=True)),
    (1 << 30, PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2, tma=True, registers=128)),
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
    counters: torch.Tensor | None = None,
    at_once: int | None = None,
) -> torch.Tensor:
    """Causal attention of each row's newest tokens over its pages. Returns ``[T, heads, head_dim]``.

    ``q [T, heads, head_dim]``, of which row ``i`` has tokens ``cu_q[i]`` to ``cu_q[i + 1]``: the last positions
    of its ``kv_lengths[i]``. ``k_pages, v_pages [pages, page size, kv_heads, head_dim]``, ``page_table [R, P]``,
    ``kv_lengths [R]`` and ``cu_q [R + 1]`` int32. head_dim is a power of two from 16 on. Tokens of no row are
    left unwritten. No key or value outside the rows is used, and no page outside of them is read.

    ``counters``: :func:`new_counters`, shared by calls on one stream; without them they are made for the call.
    ``at_once``: programs that the card is taken to run side by side, two for each multiprocessor. Raises
    ValueError for shapes or configurations the kernel cannot do.

    With programmatic dependent launch, ``kv_lengths`` and ``cu_q`` must not come from the kernel directly
    before this one: they are read while it may still run.
    """
    config = config or default_config(q.shape[0])
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    check(q, k_pages, v_pages, config)
    pack = heads_of_tile(heads // kv_heads, config)
    out = torch.empty((tokens, heads, head_dim), device=q.device, dtype=q.dtype)
    if not tokens:
        return out
    keys, values = (
        (_blocks(pages, config.block_n) for pages in (k_pages, v_pages)) if config.tma else (k_pages, v_pages)
    )
    limit = {"maxnreg": config.registers} if config.registers else {}
    at_once = 2 * multiprocessors(q.device) if at_once is None else at_once
    queries, head_tiles = config.block_m // pack, heads // pack
    few = 2 * -(-tokens // queries) * head_tiles <= at_once
    split = at_once > 0 and (few or config.tail)
    slots = at_once if split else 0
    for first in range(0, kv_lengths.shape[0], MAX_ROWS):
        rows = min(kv_lengths.shape[0] - first, MAX_ROWS)
        programs = num_tiles(tokens, rows, queries) * head_tiles
        if split:  # whole tiles and a full round for the tail, however many tiles there are
            programs = (programs // at_once + 1) * at_once
        if split and counters is None:
            counters = new_counters(q.device)
        prefill_kernel[(programs,)](
            q,
            keys,
            values,
            page_table[first:],
            kv_lengths[first:],
            cu_q[first:],
            out,
            torch.empty((slots, config.block_m, head_dim), device=q.device, dtype=torch.float32),
            torch.empty((slots, 2, config.block_m), device=q.device, dtype=torch.float32),
            counters if split else cu_q,
            rows,
            at_once,
            head_dim**-0.5 * LOG2_E,
            q.stride(0),
            q.stride(1),
            k_pages.stride(0),
            k_pages.stride(1),
            k_pages.stride(2),
            page_table.stride(0),
            PAGE=page_size,
            HEADS=heads,
            GROUP=heads // kv_heads,
            PACK=pack,
            HEAD_DIM=head_dim,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            ROWS_PAD=MAX_ROWS,
            TMA=config.tma,
            ONE_LOOP=config.one_loop,
            SPLIT=split,
            num_stages=config.num_stages,
            **limit,
            **launch_options(config.num_warps),
        )
    return out


def new_counters(device: torch.device) -> torch.Tensor:
    """Arrivals at each tile of the tail, for :func:`paged_prefill`. They return to zero by themselves, as a
    replayed CUDA graph needs."""
    return torch.zeros(1 << 14, device=device, dtype=torch.int32)


def heads_of_tile(group: int, config: PrefillConfig) -> int:
    """Heads of a group of ``group`` that lie side by side in a tile: all of them, or one."""
    return group if config.pack and group & (group - 1) == 0 and group <= config.block_m else 1


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
    offsets = cast(list[int], cu_q.tolist())
    for row, length in enumerate(cast(list[int], kv_lengths.tolist())):
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


def check(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, config: PrefillConfig) -> None:
    """Raise ValueError for what :func:`paged_prefill` cannot do."""
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
