"""Norm, rotation and cache write against the plain form: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import pytest
import torch

from helios.config import PAGE_SIZE
from helios.kernels.common import available
from helios.kernels.qkv import qk_norm_rope_write, qk_norm_rope_write_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="needs Triton, on a CPU its interpreter")

PAGES = 4
POSITIONS = 700


def pages(kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Poisoned: whatever is not written stays NaN."""
    return torch.full((PAGES, PAGE_SIZE, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)


def rope(dim: int) -> torch.Tensor:
    angles = torch.arange(POSITIONS)[:, None] * 10_000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float().to(DEVICE)


def check(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    norm: bool = True,
    slots: torch.Tensor | None = None,
    index: torch.dtype = torch.int64,
) -> None:
    generator = torch.Generator().manual_seed(tokens + heads * dim)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(DEVICE)
    weight = torch.randn(heads + kv_heads, dim, generator=generator).to(DEVICE) if norm else None
    positions = torch.randint(POSITIONS, (tokens,), generator=generator).to(DEVICE, index)
    if slots is None:
        slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:tokens]
    slots = slots.to(DEVICE, index)
    keys, values = pages(kv_heads, dim), pages(kv_heads, dim)
    expected_keys, expected_values = keys.clone(), values.clone()
    arguments = (qkv, weight, 1e-6, rope(dim), positions, slots)
    before = qkv.clone()
    q = qk_norm_rope_write(*arguments, keys, values)
    expected = qk_norm_rope_write_reference(*arguments, expected_keys, expected_values)
    assert torch.equal(qkv, before)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys[1:], expected_keys[1:], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(values[1:].nan_to_num(7), expected_values[1:].nan_to_num(7)), "values are only moved"
    written = slots[slots >= PAGE_SIZE].unique().numel()
    touched = ~keys[1:].isnan().flatten(0, 1).flatten(1).any(1)
    assert int(touched.sum()) == written


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (7, 1), (14, 2)])
def test_equals_the_plain_form(tokens: int, heads: int, kv_heads: int) -> None:
    """Ratios 1, 2, 4 and 7, whose groups of heads mix queries, keys and values in one program."""
    check(tokens, heads, kv_heads, 64)


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_head_dims_with_and_without_norm(dim: int, norm: bool) -> None:
    """Llama-like models have no q/k norm."""
    check(3, 4, 2, dim, norm=norm)


@pytest.mark.parametrize("heads", [6, 18])
def test_many_tokens_take_larger_programs(heads: int) -> None:
    """Above 64 tokens a program takes 16 heads, more than there are or not a divisor of them."""
    check(65, heads, 2, 16)


def test_int32_positions_and_slots() -> None:
    """The packer's own integers are int32."""
    check(5, 4, 2, 64, index=torch.int32)


def test_tied_slots_on_the_dummy_page_touch_nothing_else() -> None:
    """Padding rows and rows behind a full prefix hit all write to slot 0."""
    check(6, 4, 2, 64, slots=torch.tensor([0, 0, 300, 0, 1023, 0]))


def test_slots_beyond_32_bits() -> None:
    """A pool of an H200 holds more than 2**31 values; a 32-bit product would write elsewhere or crash."""
    kv_heads, dim = 8, 128
    slot = 2**31 // (kv_heads * dim) + 300
    if DEVICE.type == "cpu":
        pytest.skip("needs 8 GiB for one tensor")
    count = slot // PAGE_SIZE + 1
    keys = torch.empty(count, PAGE_SIZE, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    values = torch.empty_like(keys)
    qkv = torch.randn(1, 32 * dim, device=DEVICE).bfloat16()
    index = torch.tensor([slot], device=DEVICE)
    qk_norm_rope_write(qkv, None, 1e-6, rope(dim), index * 0, index, keys, values)
    assert torch.equal(values.flatten(0, 1)[slot].flatten(), qkv[0, -kv_heads * dim :])


def test_half_precision() -> None:
    """The interpreter cuts bfloat16 off where a GPU rounds, hence float16 here."""
    dim = 64
    qkv = torch.randn(3, 8 * dim, generator=torch.Generator().manual_seed(2)).half().to(DEVICE)
    weight = torch.ones(6, dim, dtype=torch.float16, device=DEVICE)
    index = torch.tensor([5, 300, 699], device=DEVICE)
    keys, values = pages(2, dim, torch.float16), pages(2, dim, torch.float16)
    expected_keys, expected_values = keys.clone(), values.clone()
    arguments = (qkv, weight, 1e-6, rope(dim), index, index)
    q = qk_norm_rope_write(*arguments, keys, values)
    expected = qk_norm_rope_write_reference(*arguments, expected_keys, expected_values)
    torch.testing.assert_close(q, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(keys, expected_keys, rtol=2e-3, atol=2e-3, equal_nan=True)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
