"""What the kernels in Gluon share. Import it only where they run, on SM90."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def descriptor(matrix: torch.Tensor, lines: int, columns: int) -> TensorDescriptor:
    """Blocks of ``[lines, columns]`` of a contiguous matrix of 2-byte values, as the tensor cores read them."""
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor.from_tensor(matrix, [lines, columns], layout)


def page_blocks(pages: torch.Tensor, tokens: int) -> TensorDescriptor:
    """Blocks of ``tokens`` of one kv head of ``pages [pages, page size, kv_heads, head_dim]``, contiguous."""
    return descriptor(pages.flatten(0, 1).flatten(1, 2), tokens, pages.shape[3])
