"""SiLU times up against the plain form: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import pytest
import torch

from helios.kernels.activation import silu_mul, silu_mul_reference
from helios.kernels.common import available

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="needs Triton, on a CPU its interpreter")


@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize("width", [40, 1024, 1500])
def test_equals_the_plain_form(rows: int, width: int) -> None:
    """Would catch a last block that reads beyond its half, or gate and up exchanged."""
    gate_up = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(width)).to(DEVICE) * 4
    out = silu_mul(gate_up)
    assert out.shape == (rows, width)
    torch.testing.assert_close(out, silu_mul_reference(gate_up), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # from numpy, under the interpreter
def test_extreme_gates_do_not_overflow() -> None:
    """exp(-gate) is infinite for a gate of -100; its sigmoid is 0 all the same."""
    gate = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 1e4]], device=DEVICE)
    out = silu_mul(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    torch.testing.assert_close(out, silu_mul_reference(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The interpreter cuts bfloat16 off where a GPU rounds, hence the tolerance."""
    gate_up = torch.randn(3, 2 * 600, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), rtol=2**-6, atol=1e-4)
