"""The decode attention and few-row linear kernels on a GPU: real sizes, CUDA graphs, dependent launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from helios.kernels.common import multiprocessors, sm90_kernels, use_pdl
from helios.kernels.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    default_config,
    num_columns,
    paged_decode,
    paged_decode_reference,
)
from helios.kernels.linear import (
    LinearWorkspace,
    gemv,
    linear_reference,
    small_linear,
    split,
    stream,
)
from helios.kernels.linear_table import ROW_BUCKETS, LinearTable, candidates
from helios.kernels.norm import add_rms_norm, add_rms_norm_reference

pytestmark = pytest.mark.gpu
PAGE = 256
LONGEST = 40960


@pytest.fixture(params=[False, True], ids=["plain", "pdl"])
def pdl(request: pytest.FixtureRequest, gpu: torch.device) -> Iterator[bool]:
    if use_pdl(request.param) != request.param:
        pytest.skip("programmatic dependent launch needs SM90")
    yield request.param
    use_pdl(False)


class Pool:
    """Pages full of NaN of which rows own some, in shuffled order; fixed tensors, as a CUDA graph needs."""

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, pages: int, dtype: torch.dtype
    ) -> None:
        self.q = torch.zeros((rows, heads, head_dim), device="cuda", dtype=dtype)
        self.pages = torch.full(
            (2, pages + 1, PAGE, kv_heads, head_dim), torch.nan, device="cuda", dtype=dtype
        )
        self.table = torch.zeros((rows, LONGEST // PAGE), device="cuda", dtype=torch.int32)
        self.lengths = torch.ones(rows, device="cuda", dtype=torch.int32)
        self.num_pages = pages

    def fill(self, lengths: list[int], seed: int) -> None:
        """New sequences of these lengths; rows beyond them are padding on the dummy page 0."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.q.normal_(generator=generator)
        self.pages.fill_(torch.nan)
        self.pages[:, 0, 0] = 0
        order = (torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        table = torch.zeros_like(self.table, device="cpu")
        table.fill_(order.pop())  # beyond a sequence: somebody's page, with NaN
        table[len(lengths) :] = 0
        for row, length in enumerate(lengths):
            for index in range(-(-length // PAGE)):
                page = order.pop()
                table[row, index] = page
                used = min(PAGE, length - index * PAGE)
                self.pages[:, page, :used].normal_(generator=generator)
        self.table.copy_(table)
        self.lengths.copy_(torch.tensor(lengths + [1] * (self.q.shape[0] - len(lengths)), dtype=torch.int32))

    def decode(
        self, config: DecodeConfig | None = None, workspace: DecodeWorkspace | None = None
    ) -> torch.Tensor:
        k_pages, v_pages = self.pages
        return paged_decode(
            self.q, k_pages, v_pages, self.table, self.lengths, LONGEST, config=config, workspace=workspace
        )

    def reference(self) -> torch.Tensor:
        return paged_decode_reference(self.q, *self.pages, self.table, self.lengths)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 8, 128), (16, 8, 128), (28, 4, 128), (14, 2, 64), (8, 8, 64), (16, 1, 128)],
)
def test_matches_the_reference_at_every_group_size(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    pool = Pool(8, heads, kv_heads, head_dim, 60, dtype)
    pool.fill([1, 255, 256, 257, 700, 5000, 64], seed=heads)
    expected = pool.reference()
    config = default_config(gpu, head_dim)
    for form in (config, replace(config, sm90_rows=0), replace(config, sm90_rows=0, fused=False)):
        assert relative_error(pool.decode(form), expected) < 6e-3


@pytest.mark.parametrize("tile", [32, 64, 128])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("warps", [4, 8])
def test_every_tile_shape_is_right(tile: int, stages: int, warps: int, gpu: torch.device) -> None:
    from triton.runtime.errors import OutOfResources

    pool = Pool(5, 32, 8, 128, 60, torch.bfloat16)
    pool.fill([3000, 1, 511, 4096], seed=tile)
    config = DecodeConfig(tile=tile, num_stages=stages, num_warps=warps, programs_per_sm=1)
    try:
        out = pool.decode(config)
    except OutOfResources:
        pytest.skip("more shared memory than this card has")
    assert relative_error(out, pool.reference()) < 6e-3


def test_matches_varlen_attn_at_256_rows(gpu: torch.device) -> None:
    """The form in which the model calls FlashAttention-2 for decode rows."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = [1 + (index * 37) % 900 for index in range(256)]
    pool = Pool(256, 32, 8, 128, sum(-(-length // PAGE) for length in lengths) + 2, torch.bfloat16)
    pool.fill(lengths, seed=1)
    pool.pages.nan_to_num_(0.0)  # FlashAttention-2 reads, and masks, to the end of a tile
    cu_q = torch.arange(257, device="cuda", dtype=torch.int32)
    expected = varlen_attn(
        pool.q,
        *pool.pages,
        cu_q,
        cu_q,
        1,
        1024,
        window_size=(-1, -1),
        enable_gqa=True,
        seqused_k=pool.lengths,
        block_table=pool.table,
    )
    assert relative_error(pool.decode(), expected) < 6e-3


@pytest.mark.parametrize(
    "form",
    [{}, {"sm90_rows": 0}, {"sm90_rows": 0, "fused": False}],
    ids=["default", "fused", "unfused"],
)
def test_graph_follows_lengths_between_replays(form: dict[str, Any], pdl: bool, gpu: torch.device) -> None:
    """Everything that depends on lengths is read on the device, and the counters reset themselves."""
    rows = 24
    pool = Pool(rows, 16, 8, 128, 700, torch.bfloat16)
    config = replace(default_config(gpu, 128), **form)
    sms = multiprocessors(gpu)
    workspace = DecodeWorkspace(gpu, rows, num_columns(rows, LONGEST, 8, sms, config), 8, 2, 128)
    pool.fill([100] * rows, seed=0)
    pool.decode(config, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [pool.decode(config, workspace) for _ in range(3)]  # three layers, one workspace
    mixed = [1 + (index * 997) % 6000 for index in range(rows)]
    for seed, lengths in enumerate(([1024], [1] * rows, [LONGEST], mixed, [257] * 20, [256], mixed[::-1])):
        pool.fill(lengths, seed)
        expected = pool.reference()
        for _ in range(3):
            graph.replay()
            assert all(relative_error(out, expected) < 6e-3 for out in outs), lengths
        assert not workspace.counters.any()


def test_repeated_calls_agree_to_the_bit(gpu: torch.device) -> None:
    """Partial results are merged in column order, whoever arrives last."""
    pool = Pool(3, 32, 8, 128, 100, torch.bfloat16)
    pool.fill([9000, 300, 7000], seed=5)
    first = pool.decode()
    assert all(torch.equal(first, pool.decode()) for _ in range(50))


SHAPES = [(4096, 1024), (1024, 2048), (6144, 2560), (2560, 4096), (2560, 9728), (5000, 3072)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROW_BUCKETS)
def test_linear_variants_are_as_exact_as_torch(
    n: int, k: int, rows: int, pdl: bool, gpu: torch.device
) -> None:
    x = torch.randn((rows, k), device=gpu, dtype=torch.bfloat16)
    weight = torch.randn((n, k), device=gpu, dtype=torch.bfloat16) / k**0.5
    exact = F.linear(x.float(), weight.float())
    for variant in [*candidates(rows, sm90_kernels(gpu)), gemv(4, 1), split(64, 128, 4, 4, 4)]:
        if variant.fits(rows, n, k):
            for _ in range(3):
                assert relative_error(small_linear(x, weight, variant=variant), exact) < 5e-3, variant


def test_linear_epilogues(pdl: bool, gpu: torch.device) -> None:
    x = torch.randn((2, 2560), device=gpu, dtype=torch.bfloat16)
    weight = torch.randn((2 * 9728, 2560), device=gpu, dtype=torch.bfloat16) / 50
    got = small_linear(x, weight, variant=gemv(4, 4), gated=True)
    assert relative_error(got, linear_reference(x, weight, gated=True)) < 8e-3
    weight = weight[:2560]
    residual, bias = torch.randn_like(x), torch.randn(2560, device=gpu, dtype=torch.bfloat16)
    expected = linear_reference(x, weight, bias, residual=residual)
    for variant in (gemv(4, 4), split(32, 256, 4, 4, 3), split(32, 256, 1, 4, 3)):
        got = small_linear(x, weight, bias, variant=variant, residual=residual)
        assert relative_error(got, expected) < 5e-3


def test_chain_of_linears_in_a_graph(pdl: bool, gpu: torch.device) -> None:
    """Each kernel reads what the one before it wrote: a wait that is missing would show as a wrong sum."""
    weights = [torch.randn((2048, 2048), device=gpu, dtype=torch.bfloat16) / 45 for _ in range(12)]
    workspace = LinearWorkspace(gpu)
    variants = [split(32, 256, 4, 4, 3), gemv(4, 4)]
    if sm90_kernels(gpu):
        variants += [stream(6), stream(6, half=True)]
    for variant in variants:
        workspace.grow(2048, variant)
    x = torch.randn((2, 2048), device=gpu, dtype=torch.bfloat16)
    ones = torch.ones(2048, device=gpu, dtype=torch.bfloat16)

    def chain(own: bool) -> torch.Tensor:
        y = x
        for index, weight in enumerate(weights):
            variant = variants[index % len(variants)]
            y = small_linear(y, weight, variant=variant, workspace=workspace) if own else F.linear(y, weight)
            y = (add_rms_norm if own else add_rms_norm_reference)(y, None, ones, 1e-6)[0]
        return y

    chain(own=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(own=True)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert relative_error(got, chain(own=False)) < 3e-2


def test_table_tunes_within_its_budget_and_answers(gpu: torch.device) -> None:
    weights = {
        "o": [torch.randn((1024, 2048), device=gpu, dtype=torch.bfloat16) / 45 for _ in range(8)],
        "down": [torch.randn((1024, 3072), device=gpu, dtype=torch.bfloat16) / 55 for _ in range(8)],
    }
    table = LinearTable(gpu)
    table.tune(weights, rows=(1, 16), budget_s=20)
    assert len(table.measurements) == 4
    for rows in (1, 3, 16, 40):
        x = torch.randn((rows, 2048), device=gpu, dtype=torch.bfloat16)
        assert relative_error(table(x, weights["o"][0]), F.linear(x, weights["o"][0])) < 5e-3
