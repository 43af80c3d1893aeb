"""The few-row linears against torch: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

pytest.importorskip("triton")

from helios.kernels import linear_table
from helios.kernels.common import available
from helios.kernels.linear import (
    TORCH,
    LinearWorkspace,
    Variant,
    gemv,
    linear_reference,
    small_linear,
    split,
    stream,
)
from helios.kernels.linear_table import ROW_BUCKETS, LinearTable, Measurement, candidates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="kernels were imported without the interpreter")


def tensors(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * n + k)
    x = torch.randn((rows, k), generator=generator)
    weight = torch.randn((n, k), generator=generator) / k**0.5
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a rounding or two of the dtype: the sums run in another order."""
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemv_computes_every_row(rows: int, dtype: torch.dtype) -> None:
    x, weight = tensors(rows, 40, 1024, dtype)
    check(small_linear(x, weight, variant=gemv(4, 2)), linear_reference(x, weight))


@pytest.mark.parametrize(("n", "k"), [(37, 1000), (8, 64), (9, 2048)])
@pytest.mark.parametrize("variant", [gemv(2, 1), gemv(8, 2), gemv(4, 4)], ids=str)
def test_gemv_masks_the_ends_of_both_axes(n: int, k: int, variant: Variant) -> None:
    """N or K that the blocks do not divide: nothing beyond the weight may be read or written."""
    x, weight = tensors(2, n, k, torch.float16)
    padded = torch.cat((weight.flatten(), torch.full((4096,), torch.nan, device=DEVICE, dtype=weight.dtype)))
    weight = padded[: n * k].view(n, k)
    check(small_linear(x, weight, variant=variant), linear_reference(x, weight))


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_split_adds_its_parts_up(rows: int, splits: int) -> None:
    """Split counts that do not divide the K tiles too."""
    x, weight = tensors(rows, 70, 512, torch.float16)
    check(small_linear(x, weight, variant=split(32, 64, splits, 4, 3)), linear_reference(x, weight))


@pytest.mark.parametrize(("rows", "pad"), [(17, 32), (50, 64), (65, 128), (128, 128), (3, 64)])
def test_split_with_more_rows(rows: int, pad: int) -> None:
    """Rows beyond 16 are padded to the variant's own number, in the parts' memory too."""
    x, weight = tensors(rows, 70, 256, torch.float16)
    for splits in (1, 2):
        variant = split(32, 64, splits, 4, 3, pad)
        residual = torch.ones((rows, 70), device=DEVICE, dtype=torch.float16)
        check(
            small_linear(x, weight, variant=variant, residual=residual),
            linear_reference(x, weight, residual=residual),
        )


@pytest.mark.parametrize(
    "variant", [gemv(4, 1), split(32, 64, 2, 4, 3), split(16, 64, 1, 4, 3), TORCH], ids=str
)
def test_bias_and_residual_are_added(variant: Variant) -> None:
    x, weight = tensors(3, 48, 256, torch.float16)
    bias = torch.linspace(-1, 1, 48, device=DEVICE, dtype=torch.float16)
    residual = torch.linspace(-3, 3, 3 * 48, device=DEVICE, dtype=torch.float16).view(3, 48)
    got = small_linear(x, weight, bias, variant=variant, residual=residual)
    check(got, residual + torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_gated_gemv_is_silu_of_gate_times_up(rows: int) -> None:
    """Gate and up rows are read by one program and must not be swapped."""
    x, weight = tensors(rows, 44, 256, torch.bfloat16)
    got = small_linear(x, weight, variant=gemv(4, 1), gated=True)
    check(got, linear_reference(x, weight, gated=True))
    assert got.shape == (rows, 22)


def test_split_workspace_is_clean_after_every_call() -> None:
    """A counter that is not put back to zero would give a half sum in the next call."""
    workspace = LinearWorkspace(DEVICE)
    variant = split(16, 64, 4, 4, 3)
    workspace.grow(64, variant)
    for rows, n in ((3, 64), (16, 48), (1, 64)):
        x, weight = tensors(rows, n, 512, torch.float16)
        check(small_linear(x, weight, variant=variant, workspace=workspace), linear_reference(x, weight))
        assert not workspace.counters.any()


@pytest.mark.gpu
@pytest.mark.skipif(not SM90, reason="written for SM90")
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (2560, 9728), (6144, 2560), (70, 128), (1000, 256)])
@pytest.mark.parametrize("variant", [stream(6), stream(10), stream(6, half=True), stream(6, 32)], ids=str)
def test_stream_divides_the_work_wherever_it_cuts(n: int, k: int, variant: Variant) -> None:
    """Tiles of one part and of many, fewer blocks than programs, N that tiles do not divide: right, the same bits
    again, and the counters at zero, whatever was in the parts before."""
    workspace = LinearWorkspace(DEVICE)
    workspace.grow(n, variant)
    for rows in (1, 5, variant.pad):
        x, weight = tensors(rows, n, k, torch.bfloat16)
        bias = torch.linspace(-1, 1, n, device=DEVICE, dtype=x.dtype)
        residual = torch.linspace(-3, 3, rows * n, device=DEVICE, dtype=x.dtype).view(rows, n)
        for extra in ({}, {"bias": bias, "residual": residual}):
            workspace.parts.fill_(torch.nan)
            outs = [small_linear(x, weight, variant=variant, workspace=workspace, **extra) for _ in range(20)]
            check(outs[0], linear_reference(x, weight, **extra))
            assert all(torch.equal(out, outs[0]) for out in outs)
            assert not workspace.counters.any()
        if n % 2 == 0:
            got = small_linear(x, weight, variant=variant, gated=True, workspace=workspace)
            check(got, linear_reference(x, weight, gated=True))


def test_what_a_variant_cannot_do_goes_to_torch() -> None:
    """Five rows through a gemv, or K that the tiles do not divide, must still be right."""
    x, weight = tensors(5, 40, 96, torch.float16)
    for variant in (gemv(4, 2), split(16, 64, 1, 4, 3)):
        assert torch.equal(small_linear(x, weight, variant=variant), torch.nn.functional.linear(x, weight))


def test_table_answers_by_shape_and_row_bucket() -> None:
    """Three rows take what was measured at four; an unknown shape and more rows take torch."""
    table = LinearTable(DEVICE)
    found = Measurement("o", 40, 256, 4, {TORCH: 2e-6, gemv(4, 1): 1e-6}, gemv(4, 1))
    table.measurements[40, 256, 4] = found
    assert table.choose(40, 256, 3) == gemv(4, 1)
    assert table.choose(40, 256, 4) == gemv(4, 1)
    assert table.choose(40, 256, 5) == TORCH
    assert table.choose(40, 256, 17) == TORCH
    assert table.choose(41, 256, 4) == TORCH
    x, weight = tensors(4, 40, 256, torch.float16)
    check(table(x, weight), linear_reference(x, weight))
    assert "gemv n4 w1" in str(table)
    assert "x2.00" in str(table)


def test_candidates_fit_their_rows() -> None:
    """Every bucket has something to try on a weight of any Qwen3 model."""
    for sm90 in (False, True):
        for rows in ROW_BUCKETS:
            assert candidates(rows, sm90)
            assert all(variant.fits(rows, 4096, 2048) for variant in candidates(rows, sm90))


def test_linears_are_chosen_by_the_time_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds that gain beside their own kind, one more than the other, and a linear where each has a better
    variant. Would catch a choice that is left at the last one tried, one that never leaves where it began, and a
    row count that others' steps decide."""
    table = LinearTable(DEVICE)
    first, better, other = split(32, 64, 1, 4, 3), split(32, 64, 2, 4, 3), gemv(4, 2)
    for rows in (2, 16):
        for place, name in enumerate(("qkv", "o", "down")):
            seconds = {TORCH: 10.0, first: 10.5, better: 10.6, other: 10.2}
            table.measurements[40 + place, 256, rows] = Measurement(name, 40 + place, 256, rows, seconds)
    head = Measurement("head", 99, 256, 2, {TORCH: 10.0, other: 11.0})
    table.measurements[99, 256, 2] = head

    def time_of_step(step: Callable[[], int], device: torch.device, replays: int) -> float:
        found = [one for one in table.measurements.values() if one.rows == step() and one is not head]
        seconds = sum(one.seconds[one.choice] for one in found)
        if step() == 2:
            for one, following in pairwise(found):
                if one.choice.kind == following.choice.kind:
                    seconds -= {"split": 2.0, "gemv": 0.5}.get(one.choice.kind, 0.0)
            seconds -= found[1].choice == better
        return seconds

    monkeypatch.setattr(linear_table, "time_in_graph", time_of_step)
    table.refine(("qkv", "o", "down"), {2: lambda: 2, 16: lambda: 16})
    chosen = {(one.name, one.rows): one.choice for one in table.measurements.values()}
    assert chosen == {
        ("qkv", 2): first, ("o", 2): better, ("down", 2): first, ("head", 2): TORCH,
        ("qkv", 16): TORCH, ("o", 16): TORCH, ("down", 16): TORCH,
    }  # fmt: skip
    table.measurements[41, 256, 2].choice = first
    table.refine(("o",), {2: lambda: 2}, budget_s=0.0)
    assert table.measurements[41, 256, 2].choice == first
