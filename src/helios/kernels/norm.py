"""Residual add and RMSNorm in one pass over the row."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch

from helios.kernels.common import cuda, jit, launch_options, next_power_of_2, tl


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain form of :func:`add_rms_norm`."""
    residual = x if residual is None else residual.add_(x)
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype), residual


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x [T, hidden]`` to the residual stream in place and return its norm and the stream.

    The sum is rounded to the model's dtype before it is normed (in float32), as separate operations would
    do. Without a ``residual``, before the first layer, ``x`` itself becomes the stream, uncopied.
    """
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    tokens, hidden = x.shape
    normed = torch.empty_like(x)
    if tokens:
        block = next_power_of_2(hidden)
        # 8 values a thread are one 16-byte load of bfloat16.
        warps = min(max(block // 256, 1), 16)
        _add_rms_norm_kernel[(tokens,)](
            x,
            x if residual is None else residual,
            weight,
            normed,
            eps,
            HAS_RESIDUAL=residual is not None,
            HIDDEN=hidden,
            BLOCK=block,
            **launch_options(warps),
        )
    return normed, x if residual is None else residual


@jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    scale = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, inside)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(normed + at, (value * scale).to(normed.dtype.element_ty), inside)
