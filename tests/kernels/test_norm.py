"""Residual add and RMSNorm against the plain form: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import pytest
import torch

from helios.kernels.common import available
from helios.kernels.norm import add_rms_norm, add_rms_norm_reference
from helios.runtime.qwen3.layers import rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="needs Triton, on a CPU its interpreter")


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("hidden", [1000, 2560])
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
def test_equals_separate_add_and_norm(rows: int, hidden: int, first: bool) -> None:
    """Would catch padding of the row that enters the mean, or a stream that isn't updated in place."""
    generator = torch.Generator().manual_seed(rows * hidden)
    x, stream = (torch.randn(rows, hidden, generator=generator).to(DEVICE) * 3 for _ in range(2))
    weight = torch.randn(hidden, generator=generator).to(DEVICE)
    expected_stream = x.clone() if first else x + stream
    normed, residual = add_rms_norm(x, None if first else stream, weight, 1e-6)
    assert residual is (x if first else stream)
    assert torch.equal(residual, expected_stream)
    torch.testing.assert_close(normed, rms_norm(expected_stream, weight, 1e-6), rtol=1e-5, atol=1e-5)
    plain, _ = add_rms_norm_reference(expected_stream, None, weight, 1e-6)
    torch.testing.assert_close(normed, plain, rtol=1e-5, atol=1e-5)


def test_half_precision_is_normed_in_float32() -> None:
    """Large values overflow when squared in float16; small ones vanish without float32."""
    x = (torch.randn(3, 512, generator=torch.Generator().manual_seed(1)) * 2000).half().to(DEVICE)
    stream, weight = torch.ones_like(x), torch.ones(512, dtype=torch.float16, device=DEVICE)
    normed, residual = add_rms_norm(x, stream.clone(), weight, 1e-6)
    expected, expected_stream = add_rms_norm_reference(x, stream, weight, 1e-6)
    assert torch.equal(residual, expected_stream)
    torch.testing.assert_close(normed, expected, rtol=2e-3, atol=1e-4)
    assert normed.isfinite().all()


def test_a_broken_row_stays_alone() -> None:
    """One sequence's NaN must not reach its neighbours."""
    x = torch.randn(3, 256).to(DEVICE)
    x[1, 7] = torch.nan
    normed, _ = add_rms_norm(x, None, torch.ones(256, device=DEVICE), 1e-6)
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


def test_no_tokens_is_no_launch() -> None:
    """A mixed tick may have no rows of one kind."""
    empty = torch.empty(0, 64, device=DEVICE)
    assert add_rms_norm(empty, empty, torch.ones(64, device=DEVICE), 1e-6)[0].shape == (0, 64)
