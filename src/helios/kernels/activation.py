"""SwiGLU's elementwise half: ``silu(gate) * up``."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportInvalidTypeForm=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch
import torch.nn.functional as F

from helios.kernels.common import cuda, jit, launch_options, tl

_BLOCK = 1024


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The plain form of :func:`silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2 * width]``, ``[T, width]``.

    The sigmoid is computed in float32 and rounded to the model's dtype before the product, as two separate
    operations would do.
    """
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        blocks = (width + _BLOCK - 1) // _BLOCK
        # Tokens first: the second dimension of a grid ends at 65,535.
        _silu_mul_kernel[(tokens, blocks)](gate_up, out, WIDTH=width, BLOCK=_BLOCK, **launch_options(4))
    return out


@jit
def _silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    at = gate_up + token * (2 * WIDTH) + column
    gate = tl.load(at, inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * WIDTH + column, (silu * up).to(out.dtype.element_ty), inside)
