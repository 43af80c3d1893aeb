"""``x [R, K] @ weight [N, K].T`` for up to 32 rows on SM90 (H100, H200) in Gluon. Import it only there.

At so few rows a linear streams its weight, and what decides is that every multiprocessor streams all the time.
So there is one program on each, and the work, tiles of the output times blocks of K, is divided evenly among
them, wherever in a tile that cuts ("stream-K"). A tile cut in two or more has its parts in a workspace; the
program that arrives last adds them up in their order, so that results repeat.

Weights come through the tensor memory accelerator into a ring that takes most of the shared memory. They do not
depend on the kernel before, so with programmatic dependent launch the ring is filled while that one still runs;
only then is its output, ``x``, waited for. For the tensor cores the weight is the left operand: its 64 or 128
rows fill theirs, and ``x`` is padded no further than to ``PAD`` rows.

Source of the division of work: Stream-K (Osama et al., 2023).
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
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from helios.kernels.common import launch_options
from helios.kernels.gluon_common import descriptor

BLOCK_K = 128
LINES = 64  # weight rows of one fetch


def stream_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    parts: torch.Tensor,
    counters: torch.Tensor,
    *,
    gated: bool,
    block_n: int,
    pad: int,
    stages: int,
    programs: int,
) -> None:
    """Write ``residual + x @ weight.T + bias``, or ``silu(gate(x)) * up(x)`` with ``gated``, to ``out``.

    ``x [R, K]`` with R up to ``pad`` and K a multiple of 128; ``weight [N, K]``, twice as many rows if gated.
    ``block_n``: weight rows of a tile, 64 or 128 (gated: 128, of which half are the gate's). ``parts`` holds
    ``2 * programs * block_n * pad`` float32, ``counters`` an int32 zero for each tile; they return to zero.
    """
    rows, k = x.shape
    n = out.shape[1]
    tiles = -(-n // (LINES if gated else block_n))
    programs = min(
        programs, tiles * (k // BLOCK_K)
    )  # each has something to do: the parts of a tile are counted
    linear_sm90_kernel[(programs,)](
        descriptor(x, pad, BLOCK_K),
        descriptor(weight, LINES, BLOCK_K),
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        parts,
        counters,
        rows,
        n,
        k,
        0 if bias is None else n,
        0 if residual is None else rows,
        0 if residual is None else residual.stride(0),
        PAD=pad,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        LINES=LINES,
        STAGES=stages,
        GATED=gated,
        **launch_options(4),
    )


@gluon.jit
def _fetch_weights(
    weight,
    ring,
    ready,
    i,
    unit,
    tiles_k,
    up,
    GATED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    LINES: gl.constexpr,
    STAGES: gl.constexpr,
    BYTES: gl.constexpr,
    live,
):
    """Start bringing one block of a tile's weight rows to its stage of the ring."""
    stage = i % STAGES
    tile, column = unit // tiles_k, unit % tiles_k * BLOCK_K
    first = tile * (LINES if GATED else BLOCK_N)
    mbarrier.expect(ready.index(stage), BYTES, pred=live)
    for part in gl.static_range(BLOCK_N // LINES):
        line = first + part * (up if GATED else LINES)
        place = ring.index(stage).slice(part * LINES, LINES)
        tma.async_copy_global_to_shared(weight, [line, column], ready.index(stage), place, pred=live)


@gluon.jit
def _fetch_x(x, ring, ready, i, unit, tiles_k, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, live):
    stage = i % STAGES
    column = unit % tiles_k * BLOCK_K
    tma.async_copy_global_to_shared(x, [0, column], ready.index(stage), ring.index(stage), pred=live)


@gluon.jit
def _finish(
    y,
    bias,
    residual,
    out,
    tile,
    rows,
    n_out,
    bias_n,
    residual_rows,
    residual_stride,
    COLUMNS: gl.constexpr,
    PAD: gl.constexpr,
    GATED: gl.constexpr,
):
    """Write a tile ``y [weight rows, PAD]``: bias in float32, then round, then the residual."""
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if GATED:
        halves = y.to(dtype).to(gl.float32).reshape([2, COLUMNS, PAD]).permute([1, 2, 0])
        gate, up = gl.split(halves)
        y = (gate / (1 + gl.exp(-gate))).to(dtype).to(gl.float32) * up
    y = gl.convert_layout(y, layout)
    n = gl.expand_dims(tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout)), 1)
    row = gl.expand_dims(gl.arange(0, PAD, layout=gl.SliceLayout(0, layout)), 0)
    live = (n < n_out) & (row < rows)
    y += gl.load(bias + n, mask=n < bias_n, other=0.0).to(gl.float32)
    y = y.to(dtype)
    added = gl.load(residual + row * residual_stride + n, mask=live & (row < residual_rows), other=0.0)
    y = (y.to(gl.float32) + added.to(gl.float32)).to(dtype)
    gl.store(out + row * n_out + n, y, mask=live)


@gluon.jit(do_not_specialize=("rows", "bias_n", "residual_rows", "residual_stride"))
def linear_sm90_kernel(
    x,  # descriptors
    weight,
    bias,
    residual,
    out,
    parts,
    counters,
    rows,
    n_out,
    k_size,
    bias_n,
    residual_rows,
    residual_stride,
    PAD: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    LINES: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program's share of all (tile, block of K) pairs."""
    COLUMNS: gl.constexpr = LINES if GATED else BLOCK_N  # of the output in a tile
    BYTES: gl.constexpr = (BLOCK_N + PAD) * BLOCK_K * 2
    VALUES: gl.constexpr = BLOCK_N * PAD // 128  # of a thread, in a tile
    TOGETHER: gl.constexpr = 8 if VALUES <= 8 else 4 if VALUES <= 16 else 2  # parts on their way at once
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAD, 16])
    dtype: gl.constexpr = out.dtype.element_ty
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, PAD, BLOCK_K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(STAGES):
        mbarrier.init(ready.index(one), count=1)

    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles_k = k_size // BLOCK_K
    units = gl.cdiv(n_out, COLUMNS) * tiles_k
    begin = program * units // programs
    count = (program + 1) * units // programs - begin

    # The ring is filled with weights before the previous kernel's output is waited for.
    for one in gl.static_range(STAGES):
        _fetch_weights(
            weight, w_ring, ready, one, begin + one, tiles_k, n_out, GATED, BLOCK_N, BLOCK_K, LINES, STAGES, BYTES,
            one < count,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for one in gl.static_range(STAGES):
        _fetch_x(x, x_ring, ready, one, begin + one, tiles_k, BLOCK_K, STAGES, one < count)

    first_tile = begin // tiles_k
    last_tile = (begin + count - 1) // tiles_k
    n_in_tile = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, PAD, layout=gl.SliceLayout(0, layout))
    flat = gl.expand_dims(n_in_tile * PAD, 1) + gl.expand_dims(row, 0)
    used = gl.expand_dims(row < rows, 0)
    for tile in range(first_tile, last_tile + 1):
        start = gl.maximum(tile * tiles_k, begin)
        end = gl.minimum((tile + 1) * tiles_k, begin + count)
        acc = gl.zeros([BLOCK_N, PAD], gl.float32, layout)
        for unit in range(start, end):
            i = unit - begin
            stage = i % STAGES
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            acc = warpgroup_mma(w_ring.index(stage), x_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.barrier()  # all four warps have read the stage
            _fetch_weights(
                weight, w_ring, ready, i, unit + STAGES, tiles_k, n_out, GATED, BLOCK_N, BLOCK_K, LINES, STAGES, BYTES,
                i + STAGES < count,
            )  # fmt: skip
            _fetch_x(x, x_ring, ready, i, unit + STAGES, tiles_k, BLOCK_K, STAGES, i + STAGES < count)
        complete = True
        if end - start < tiles_k:
            slot = 2 * program + gl.where(tile == first_tile, 0, 1)
            gl.store(parts + slot * (BLOCK_N * PAD) + flat, acc, mask=used)
            gl.barrier()  # every thread's part is written before one of them says so
            first_program = ((tile * tiles_k + 1) * programs - 1) // units
            last_program = ((tile + 1) * tiles_k * programs - 1) // units
            arrived = gl.atomic_add(counters + tile, 1, sem="acq_rel")
            complete = arrived == last_program - first_program
            if complete:
                gl.store(counters + tile, 0)  # for the next launch
                acc = gl.zeros([BLOCK_N, PAD], gl.float32, layout)
                for group in range(first_program, last_program + 1, TOGETHER):
                    for one in gl.static_range(TOGETHER):
                        other = group + one
                        its_first_tile = other * units // programs // tiles_k
                        from_slot = 2 * other + gl.where(tile == its_first_tile, 0, 1)
                        # .cg: from the second-level cache, where the other multiprocessors' writes are.
                        acc += gl.load(
                            parts + from_slot * (BLOCK_N * PAD) + flat,
                            mask=used & (other <= last_program),
                            other=0.0,
                            cache_modifier=".cg",
                        )
        if complete:
            _finish(
                acc,
                bias,
                residual,
                out,
                tile,
                rows,
                n_out,
                bias_n,
                residual_rows,
                residual_stride,
                COLUMNS,
                PAD,
                GATED,
            )
