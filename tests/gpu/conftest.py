"""GPU tests skip, with the reason, where they cannot run."""

from __future__ import annotations

import inspect

import pytest
import torch


def missing() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than SM80"
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"torch {torch.__version__} has no paged varlen_attn; 2.13 has"
    return None


@pytest.fixture(autouse=True, scope="session")
def gpu() -> torch.device:
    reason = missing()
    if reason:
        pytest.skip(reason)
    return torch.device("cuda")
