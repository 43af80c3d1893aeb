"""``x [R, K] @ weight [N, K].T`` for 1 to 128 rows: two Triton kernels, and one for SM90.

At so few rows a linear only streams its weight; what decides is how many bytes are in flight and how soon.
cuBLAS is near the card's copy speed for large weights and at half of it for small ones.

* ``gemv`` (1 to 4 rows): a program reads whole weight rows with 16-byte loads straight into registers, the
  next tile while the last is multiplied, and sums in float32. No cooperation between programs.
* ``split`` (1 to 128 rows): tensor cores, rows padded to 16, 32, 64 or 128, weight tiles through shared
  memory, the K axis cut into ``splits``; the program that arrives last adds the parts up in a fixed order, so
  results repeat.
* ``stream`` (1 to 32 rows, SM90): :mod:`helios.kernels.linear_hopper`, one program on each multiprocessor.

Under :func:`helios.kernels.common.use_pdl` (SM90) a kernel starts while the one before it drains. The weights
do not depend on that one, so ``gemv`` has its first tile on the way to its registers, ``split`` on the way to
the second-level cache and ``stream`` to shared memory, before they wait for its output.

Which of them, or cuBLAS, is the fastest for a shape is measured by :mod:`helios.kernels.linear_table`.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportConstantRedefinition=false

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from helios.kernels.common import cuda, launch_options, multiprocessors, tl, triton

MAX_GEMV_ROWS = 4  # more rows make the arithmetic outweigh the loads
_GEMV_K_PER_WARP = 256  # 32 lanes x 8 elements of 2 bytes: one 16-byte load per lane and weight row


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a linear; ``kind`` is ``"torch"``, ``"gemv"``, ``"split"`` or ``"stream"``."""

    kind: str = "torch"
    block_n: int = 0  # weight rows per program, or of a tile
    num_warps: int = 4
    block_k: int = 0  # split and stream; a gemv's is 256 for each warp
    num_stages: int = 1  # split and stream
    splits: int = 1  # more than one in split only
    pad: int = 16  # split and stream: the most rows
    half: bool = False  # stream only: a program on every other multiprocessor, for few tiles

    def fits(self, rows: int, n: int, k: int) -> bool:
        """Whether this variant computes a linear of that shape."""
        if self.kind == "gemv":
            return rows <= MAX_GEMV_ROWS and k % 8 == 0
        if self.kind in ("split", "stream"):
            return rows <= self.pad and k % self.block_k == 0 and k // self.block_k >= self.splits
        return True

    def __str__(self) -> str:
        if self.kind == "gemv":
            return f"gemv n{self.block_n} w{self.num_warps}"
        if self.kind == "split":
            pad = f" m{self.pad}" if self.pad != 16 else ""
            return f"split{self.splits}{pad} n{self.block_n} k{self.block_k} w{self.num_warps} s{self.num_stages}"
        if self.kind == "stream":
            return f"stream m{self.pad} s{self.num_stages}{' half' if self.half else ''}"
        return self.kind


TORCH = Variant()


def gemv(block_n: int, num_warps: int) -> Variant:
    """A gemv variant, see :class:`Variant`."""
    return Variant("gemv", block_n, num_warps)


def split(block_n: int, block_k: int, splits: int, num_warps: int, num_stages: int, pad: int = 16) -> Variant:
    """A split variant, see :class:`Variant`."""
    return Variant("split", block_n, num_warps, block_k, num_stages, splits, pad)


def stream(num_stages: int, pad: int = 16, *, half: bool = False) -> Variant:
    """A stream variant, see :class:`Variant`."""
    return Variant("stream", 64, 4, 128, num_stages, 1, pad, half)


class LinearWorkspace:
    """Parts of the split and the stream kernel and their arrival counters, shared by calls on one stream.

    The counters return to zero by themselves, as a replayed CUDA graph needs.
    """

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(0, device=device, dtype=torch.float32)
        self.counters = torch.zeros(0, device=device, dtype=torch.int32)

    def grow(self, n: int, variant: Variant) -> None:
        """Make room for ``variant`` on ``n`` outputs. Call before a capture: memory must not move later."""
        if variant.kind != "stream" and variant.splits == 1:
            return
        blocks = -(-n // variant.block_n)
        parts = blocks * variant.splits
        if variant.kind == "stream":  # two of each program, of tiles twice as high if gated
            parts = 4 * multiprocessors(self.parts.device)
        size = parts * variant.pad * variant.block_n
        if self.parts.numel() < size:
            self.parts = torch.empty(size, device=self.parts.device, dtype=torch.float32)
        if self.counters.numel() < blocks:
            self.counters = torch.zeros(blocks, device=self.parts.device, dtype=torch.int32)


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    variant: Variant,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    workspace: LinearWorkspace | None = None,
) -> torch.Tensor:
    """``residual + F.linear(x, weight, bias)`` by ``variant``; ``x [R, K]``, ``weight [N, K]``.

    ``gated``: the weight holds a gate and an up projection, ``silu(gate(x)) * up(x)`` is returned,
    ``[R, N / 2]``. Intermediate results are rounded to x's dtype where the separate operations would.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if variant.kind == "torch" or not variant.fits(rows, n, k) or (gated and variant.kind == "split"):
        return linear_reference(x, weight, bias, residual=residual, gated=gated)
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("x must be contiguous along K, and the weight contiguous")
    out = torch.empty((rows, n), device=x.device, dtype=x.dtype)
    if workspace is None:
        workspace = LinearWorkspace(x.device)
        workspace.grow(n, variant)
    if variant.kind == "stream":
        height = 2 if gated else 1  # of a tile, whose ring has as many fewer stages
        importlib.import_module("helios.kernels.linear_hopper").stream_linear(
            x,
            weight,
            bias,
            residual,
            out,
            workspace.parts,
            workspace.counters,
            gated=gated,
            block_n=variant.block_n * height,
            pad=variant.pad,
            stages=variant.num_stages // height,
            programs=multiprocessors(x.device) // (2 if variant.half else 1),
        )
        return out
    blocks = -(-n // variant.block_n)
    epilogue = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    bias = weight if bias is None else bias  # never read then
    residual_stride = 0 if residual is None else residual.stride(0)
    residual = x if residual is None else residual
    if variant.kind == "gemv":
        _gemv_kernel[(blocks,)](
            x,
            weight,
            bias,
            residual,
            out,
            n,
            k,
            x.stride(0),
            residual_stride,
            ROWS=rows,
            BLOCK_N=variant.block_n,
            BLOCK_K=_GEMV_K_PER_WARP * variant.num_warps,
            GATED=gated,
            **epilogue,
            **launch_options(variant.num_warps),
        )
        return out
    _split_kernel[(blocks, variant.splits)](
        x,
        weight,
        bias,
        residual,
        out,
        workspace.parts,
        workspace.counters,
        rows,
        n,
        k,
        x.stride(0),
        residual_stride,
        PAD=variant.pad,
        BLOCK_N=variant.block_n,
        BLOCK_K=variant.block_k,
        SPLITS=variant.splits,
        num_stages=variant.num_stages,
        **epilogue,
        **launch_options(variant.num_warps),
    )
    return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """The same in plain torch, rounding between the operations."""
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def _jit(*unspecialised: str) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` that does not compile again when one of these integers is 1 or a multiple of 16."""
    return lambda kernel: kernel if triton is None else triton.jit(kernel, do_not_specialize=unspecialised)


@_jit()
def _finish(
    y, bias, residual, n, live, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, dtype: tl.constexpr
):
    """Bias in float32, then round, then the residual: as separate operations round."""
    if HAS_BIAS:
        y += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    y = y.to(dtype)
    if HAS_RESIDUAL:
        y = (y.to(tl.float32) + tl.load(residual + n, mask=live, other=0.0).to(tl.float32)).to(dtype)
    return y


@_jit()
def _multiply(weights, x, k, limit, LINES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of one tile, summed over each lane's 8 neighbours: ``[LINES, BLOCK_K / 8]`` float32."""
    # x as [1, BLOCK_K], so that it has the weights' layout and no lane exchanges anything.
    row = tl.load(x + k[None, :], mask=k[None, :] < limit, other=0.0).to(tl.float32)
    return tl.sum(tl.reshape(weights.to(tl.float32) * row, (LINES, BLOCK_K // 8, 8)), 2)


@_jit()
def _gemv_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    n_out,
    k_size,
    x_stride,
    residual_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    LINES: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    first = tl.program_id(0) * BLOCK_N
    lines = tl.arange(0, LINES)
    if GATED:  # gate 0, up 0, gate 1, up 1, ...
        n = first + lines // 2
        weight_row = n + (lines % 2) * n_out
    else:
        n = first + lines
        weight_row = n
    live = (n < n_out)[:, None]
    k = tl.arange(0, BLOCK_K)
    tile = weight + weight_row.to(tl.int64)[:, None] * k_size + k[None, :]

    # The first weights are on their way before the previous kernel's output is waited for.
    weights = tl.load(tile, mask=live & (k < k_size)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    acc0 = tl.zeros([LINES, BLOCK_K // 8], tl.float32)
    acc1 = tl.zeros([LINES, BLOCK_K // 8], tl.float32)
    acc2 = tl.zeros([LINES, BLOCK_K // 8], tl.float32)
    acc3 = tl.zeros([LINES, BLOCK_K // 8], tl.float32)
    for start in range(0, k_size, BLOCK_K):
        tile += BLOCK_K
        ahead = start + BLOCK_K + k < k_size
        following = tl.load(tile, mask=live & ahead[None, :], other=0.0, eviction_policy="evict_first")
        acc0 += _multiply(weights, x, start + k, k_size, LINES, BLOCK_K)
        if ROWS > 1:
            acc1 += _multiply(weights, x + x_stride, start + k, k_size, LINES, BLOCK_K)
        if ROWS > 2:
            acc2 += _multiply(weights, x + 2 * x_stride, start + k, k_size, LINES, BLOCK_K)
        if ROWS > 3:
            acc3 += _multiply(weights, x + 3 * x_stride, start + k, k_size, LINES, BLOCK_K)
        weights = following

    dtype: tl.constexpr = out.dtype.element_ty
    for row in tl.static_range(ROWS):
        if row == 0:
            y = tl.sum(acc0, 1)
        elif row == 1:
            y = tl.sum(acc1, 1)
        elif row == 2:
            y = tl.sum(acc2, 1)
        else:
            y = tl.sum(acc3, 1)
        if GATED:
            y = y.to(dtype).to(tl.float32)
            gate, up = tl.split(tl.reshape(y, (BLOCK_N, 2)))
            y = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        at = first + tl.arange(0, BLOCK_N)
        y = _finish(y, bias, residual + row * residual_stride, at, at < n_out, HAS_BIAS, HAS_RESIDUAL, dtype)
        tl.store(out + row * n_out + at, y, mask=at < n_out)


@_jit()
def _prefetch(weight, n, k_size, begin, count, BLOCK_K: tl.constexpr):
    """Start bringing weight rows ``n``, columns ``begin`` to ``begin + count``, to the second-level cache."""
    at = tl.arange(0, BLOCK_K // 16) * 16  # 32 bytes of a 2-byte dtype: one sector
    rows = weight + n.to(tl.int64)[:, None] * k_size + begin + at[None, :]
    for start in range(0, count, BLOCK_K):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(rows + start).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@_jit("rows")
def _split_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    parts,
    counters,
    rows,
    n_out,
    k_size,
    x_stride,
    residual_stride,
    PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.arange(0, PAD)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tiles = k_size // BLOCK_K
    begin = (tiles * part // SPLITS) * BLOCK_K
    end = (tiles * (part + 1) // SPLITS) * BLOCK_K
    if PDL:
        cuda.gdc_launch_dependents()
        _prefetch(
            weight, tl.minimum(n, n_out - 1), k_size, begin, tl.minimum(end - begin, 3 * BLOCK_K), BLOCK_K
        )
        cuda.gdc_wait()
    x_tile = x + row[:, None] * x_stride + k[None, :]
    weight_tile = weight + n.to(tl.int64)[:, None] * k_size + k[None, :]
    acc = tl.zeros([PAD, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        x_part = tl.load(x_tile + start, mask=(row < rows)[:, None], other=0.0)
        weights = tl.load(weight_tile + start, mask=(n < n_out)[:, None], other=0.0)
        acc = tl.dot(x_part, tl.trans(weights), acc)

    dtype: tl.constexpr = out.dtype.element_ty
    live = (row < rows)[:, None] & (n < n_out)[None, :]
    out_tile = out + row[:, None] * n_out + n[None, :]
    residual_tile = residual + row[:, None] * residual_stride
    columns = n[None, :]
    if SPLITS == 1:
        tl.store(
            out_tile,
            _finish(acc, bias, residual_tile, columns, live, HAS_BIAS, HAS_RESIDUAL, dtype),
            mask=live,
        )
    else:
        where = parts + row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        first = block * SPLITS
        # Rows of padding are neither stored nor read.
        tl.store(where + (first + part) * (PAD * BLOCK_N), acc, mask=(row < rows)[:, None])
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counters + block, 0)  # for the next launch
            total = tl.zeros([PAD, BLOCK_N], tl.float32)
            for index in tl.static_range(SPLITS):
                # .cg: from the second-level cache, where the other multiprocessors' writes are.
                total += tl.load(
                    where + (first + index) * (PAD * BLOCK_N),
                    mask=(row < rows)[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
            y = _finish(total, bias, residual_tile, columns, live, HAS_BIAS, HAS_RESIDUAL, dtype)
            tl.store(out_tile, y, mask=live)
