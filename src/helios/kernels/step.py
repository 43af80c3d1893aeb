"""The two ends of a captured decode step: from the rows' state to the model's inputs, and back.

A decode row's state lives on the device: where it stands (``positions``), its page table, its sampling
parameters and, per batch row, its newest token. So a step whose rows are those of the last step needs
nothing from the host.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch

from helios.kernels.common import cuda, jit, launch_options, next_power_of_2, tl
from helios.runtime.sampler import POSITION


def begin_step(
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    input_ids: torch.Tensor,
    token_positions: torch.Tensor,
    slots: torch.Tensor,
    kv_lengths: torch.Tensor,
    page_size: int,
) -> None:
    """Fill the model's inputs from the rows' state and move ``positions`` on.

    ``row_ids [R]`` int32, the batch row of each graph row, or -1 for padding; ``positions [R]`` int32;
    ``page_table [R, P]`` int32; ``last_tokens [batch rows]`` int64. Written: ``input_ids [R]`` int64,
    ``token_positions``, ``slots`` and ``kv_lengths [R]`` int32. Padding reads and writes slot 0.
    """
    rows = row_ids.shape[0]
    _begin_kernel[(1,)](
        row_ids,
        positions,
        page_table,
        last_tokens,
        input_ids,
        token_positions,
        slots,
        kv_lengths,
        rows,
        page_table.stride(0),
        PAGE=page_size,
        BLOCK=next_power_of_2(rows),
        **launch_options(4),
    )


def begin_step_reference(
    row_ids: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    input_ids: torch.Tensor,
    token_positions: torch.Tensor,
    slots: torch.Tensor,
    kv_lengths: torch.Tensor,
    page_size: int,
) -> None:
    """The plain form of :func:`begin_step`."""
    live = row_ids >= 0
    input_ids.copy_(torch.where(live, last_tokens[row_ids.clamp(min=0).long()], 0))
    token_positions.copy_(torch.where(live, positions, 0))
    block = (token_positions // page_size).long()
    page = page_table.gather(1, block[:, None])[:, 0]
    slots.copy_(torch.where(live, page * page_size + token_positions % page_size, 0))
    kv_lengths.copy_(token_positions + 1)
    positions += live


@jit
def _begin_kernel(
    row_ids,
    positions,
    page_table,
    last_tokens,
    input_ids,
    token_positions,
    slots,
    kv_lengths,
    rows,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = tl.arange(0, BLOCK)
    inside = row < rows
    row_id = tl.load(row_ids + row, inside, other=-1)
    live = inside & (row_id >= 0)
    position = tl.load(positions + row, live, other=0)
    token = tl.load(last_tokens + row_id, live, other=0)
    page = tl.load(page_table + row * table_stride + position // PAGE, live, other=0)
    tl.store(input_ids + row, token, inside)
    tl.store(token_positions + row, position, inside)
    tl.store(slots + row, tl.where(live, page * PAGE + position % PAGE, 0), inside)
    tl.store(kv_lengths + row, position + 1, inside)
    tl.store(positions + row, position + 1, live)


def end_step(
    row_ids: torch.Tensor,
    token_ids: torch.Tensor,
    finite: torch.Tensor,
    packed: torch.Tensor,
    last_tokens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Keep the sampled tokens for the next step and lay them out for the host.

    ``row_ids [R]`` int32 (-1: padding), ``token_ids [R]`` int64, ``finite [R]`` bool. Written:
    ``last_tokens`` at the rows, ``out [2, R]`` int32 (tokens, flags), and the next position into
    ``packed [7, R]``, the sampling parameters.
    """
    rows = row_ids.shape[0]
    _end_kernel[(1,)](
        row_ids,
        token_ids,
        finite,
        packed,
        last_tokens,
        out,
        rows,
        packed.stride(0),
        out.stride(0),
        POSITION_ROW=POSITION,
        BLOCK=next_power_of_2(rows),
        **launch_options(4),
    )


def end_step_reference(
    row_ids: torch.Tensor,
    token_ids: torch.Tensor,
    finite: torch.Tensor,
    packed: torch.Tensor,
    last_tokens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The plain form of :func:`end_step`."""
    live = row_ids >= 0
    last_tokens[row_ids[live].long()] = token_ids[live]
    out[0], out[1] = token_ids, finite
    packed[POSITION] += 1


@jit
def _end_kernel(
    row_ids,
    token_ids,
    finite,
    packed,
    last_tokens,
    out,
    rows,
    packed_stride,
    out_stride,
    POSITION_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = tl.arange(0, BLOCK)
    inside = row < rows
    row_id = tl.load(row_ids + row, inside, other=-1)
    live = inside & (row_id >= 0)
    token = tl.load(token_ids + row, inside, other=0)
    sound = tl.load(finite + row, inside, other=0)
    tl.store(last_tokens + row_id, token, live)
    tl.store(out + row, token.to(tl.int32), inside)
    tl.store(out + out_stride + row, sound.to(tl.int32), inside)
    at = packed + POSITION_ROW * packed_stride + row
    tl.store(at, tl.load(at, inside, other=0) + 1, inside)
