"""The kernels in bfloat16 with the shapes of Qwen3-0.6B and 4B, launched plainly and from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

# Before the kernels are imported: elsewhere the interpreter's tests must be the first to define them.
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs a CUDA GPU of SM80 or later", allow_module_level=True)
pytest.importorskip("triton")

from helios.config import PAGE_SIZE
from helios.kernels.activation import silu_mul, silu_mul_reference
from helios.kernels.common import use_pdl
from helios.kernels.norm import add_rms_norm, add_rms_norm_reference
from helios.kernels.qkv import qk_norm_rope_write, qk_norm_rope_write_reference
from helios.kernels.sampling import sample, sample_reference
from helios.runtime.request import Job, SamplingParams
from helios.runtime.sampler import SamplingTensors

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
# hidden, heads, kv_heads, head_dim, intermediate
MODELS = {"0.6B": (1024, 16, 8, 128, 3072), "4B": (2560, 32, 8, 128, 9728)}
VOCABULARY, PADDED = 151_669, 151_936
ROWS = [1, 7, 64, 65, 256, 1500]


@pytest.fixture(params=[False, True], ids=["plain launch", "programmatic dependent launch"])
def pdl(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param and not use_pdl(True):
        pytest.skip("needs SM90")
    yield
    use_pdl(False)


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).bfloat16()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """To two units in bfloat16's last place, where both sum up in another order."""
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=1e-4, equal_nan=True)


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The graph of three steps in a row, compiled before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    return graph


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("pdl")
def test_norm(model: str, rows: int) -> None:
    """Rounding of the stream must equal a separate addition bit by bit, or long runs drift apart."""
    hidden = MODELS[model][0]
    x, stream, weight = randn(rows, hidden), randn(rows, hidden, seed=1, scale=20), randn(hidden, seed=2)
    expected, expected_stream = add_rms_norm_reference(x, stream.clone(), weight, 1e-6)
    normed, residual = add_rms_norm(x, stream, weight, 1e-6)
    assert torch.equal(residual, expected_stream)
    close(normed, expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("pdl")
def test_activation(model: str, rows: int) -> None:
    gate_up = randn(rows, 2 * MODELS[model][4], scale=3)
    close(silu_mul(gate_up), silu_mul_reference(gate_up))


def qkv_arguments(model: str, rows: int) -> tuple[torch.Tensor, ...]:
    _, heads, kv_heads, dim, _ = MODELS[model]
    positions = torch.randint(40_000, (rows,), device=DEVICE)
    angles = torch.arange(40_000, device=DEVICE)[:, None] * 1e6 ** (
        -torch.arange(dim // 2, device=DEVICE) * 2 / dim
    )
    rope = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    slots = torch.randperm(20 * PAGE_SIZE, device=DEVICE)[:rows]
    pages = torch.full((2, 20, PAGE_SIZE, kv_heads, dim), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    qkv = randn(rows, (heads + 2 * kv_heads) * dim)
    return qkv, 1 + randn(heads + kv_heads, dim, seed=3, scale=0.1), rope, positions, slots, pages


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("pdl")
def test_qkv(model: str, rows: int) -> None:
    """Poisoned pages: what isn't written stays NaN, in both forms."""
    qkv, weight, rope, positions, slots, pages = qkv_arguments(model, rows)
    expected_pages = pages.clone()
    q = qk_norm_rope_write(qkv, weight, 1e-6, rope, positions, slots, pages[0], pages[1])
    expected = qk_norm_rope_write_reference(
        qkv, weight, 1e-6, rope, positions, slots, expected_pages[0], expected_pages[1]
    )
    # Rotation subtracts products of rounded values: a unit in the last place of these, not of the result.
    torch.testing.assert_close(q, expected, rtol=2**-7, atol=2**-4)
    torch.testing.assert_close(pages[0], expected_pages[0], rtol=2**-7, atol=2**-4, equal_nan=True)
    assert torch.equal(pages[1].nan_to_num(7), expected_pages[1].nan_to_num(7))


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.usefixtures("pdl")
def test_layer_kernels_in_a_graph(rows: int) -> None:
    """A replay reads what lies in its inputs then, and a chain of kernels keeps its order."""
    hidden = MODELS["0.6B"][0]
    qkv, weight, rope, positions, slots, pages = qkv_arguments("0.6B", rows)
    x, stream, scale = randn(rows, hidden), randn(rows, hidden, seed=5), randn(hidden, seed=6)
    start = stream.clone()
    outputs: list[torch.Tensor] = []

    def step() -> None:
        normed, _ = add_rms_norm(x, stream, scale, 1e-6)
        half = silu_mul(normed)
        add_rms_norm(torch.cat((half, half), dim=1), stream, scale, 1e-6)
        q = qk_norm_rope_write(qkv, weight, 1e-6, rope, positions, slots, pages[0], pages[1])
        outputs[:] = [normed, half, q]

    graph = capture(step)
    x.copy_(randn(rows, hidden, seed=7))
    positions.add_(1)
    stream.copy_(start)
    pages.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()

    plain, plain_pages = start.clone(), torch.full_like(pages, torch.nan)
    for _ in range(3):
        normed, _ = add_rms_norm_reference(x, plain, scale, 1e-6)
        half = silu_mul_reference(normed)
        add_rms_norm_reference(torch.cat((half, half), dim=1), plain, scale, 1e-6)
    q = qk_norm_rope_write_reference(
        qkv, weight, 1e-6, rope, positions, slots, plain_pages[0], plain_pages[1]
    )
    for got, expected in zip([stream, *outputs, pages], [plain, normed, half, q, plain_pages], strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-4, equal_nan=True)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.6},
    "hot": {"temperature": 1.4},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "large top_k": {"temperature": 1.2, "top_k": 5000},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "Qwen's own": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "everything": {"temperature": 0.8, "top_k": 200, "top_p": 0.9, "min_p": 0.01},
}


def parameters(kinds: list[dict[str, Any]], seed: int = 0, first_position: int = 100) -> torch.Tensor:
    keys = np.random.default_rng(seed).integers(0, 2**64, len(kinds), np.uint64)
    sequences = []
    for options, key in zip(kinds, keys.tolist(), strict=True):
        job = Job("job", [1], SamplingParams(**{"top_p": 1.0, **options}), max_tokens=4)
        job.sequences[0].sample_seed = key
        sequences.append(job.sequences[0])
    positions = range(first_position, first_position + len(kinds))
    return SamplingTensors.build(sequences, DEVICE, positions).packed


def same_tokens(logits: torch.Tensor, packed: torch.Tensor, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Equal but for draws that are decided in the last bits of the noise: one row in 64 at most."""
    expected, finite = sample_reference(logits, packed, VOCABULARY)
    assert torch.equal(got[1], finite)
    assert int((got[0] != expected).sum()) <= len(expected) // 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_sampling(kind: str, scale: float) -> None:
    """Flat and steep logits with bfloat16's many ties."""
    logits = randn(64, PADDED, seed=int(scale), scale=scale)
    logits[:, VOCABULARY:] = 100
    packed = parameters([KINDS[kind]] * 64, seed=1)
    same_tokens(logits, packed, sample(logits, packed, VOCABULARY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sampling_other_dtypes(dtype: torch.dtype) -> None:
    logits = (randn(18, PADDED).float() * 3.001).to(dtype)
    packed = parameters(list(KINDS.values()) * 2)
    same_tokens(logits, packed, sample(logits, packed, VOCABULARY))


def test_long_list_of_ties() -> None:
    """Beyond 4,096 tokens in question the last program reads the logits."""
    logits = randn(4, PADDED).round()
    packed = parameters([KINDS["top_p"], KINDS["large top_k"]] * 2)
    same_tokens(logits, packed, sample(logits, packed, VOCABULARY))


@pytest.mark.parametrize("rows", [1, 3, 256])
@pytest.mark.usefixtures("pdl")
def test_sampling_in_a_graph(rows: int) -> None:
    """Greedy, random and filtered rows change places without a new capture; broken rows are flagged."""
    kinds = list(KINDS.values())
    logits = randn(rows, PADDED, scale=2)
    packed = parameters([kinds[0]] * rows)
    out: list[torch.Tensor] = []

    def step() -> None:
        out[:] = sample(logits, packed, VOCABULARY)

    graph = capture(step)
    for turn in range(len(kinds)):
        packed.copy_(parameters([kinds[(row + turn) % len(kinds)] for row in range(rows)], seed=turn))
        logits.copy_(randn(rows, PADDED, seed=turn, scale=1 + turn))
        if rows > 1:
            logits[1, 77] = torch.nan
        graph.replay()
        same_tokens(logits, packed, (out[0], out[1]))


def test_equal_inputs_give_equal_tokens() -> None:
    """No atomics, no order of arrival: the same bits every time and beside any neighbours."""
    logits = randn(32, PADDED, scale=2)
    kinds = (list(KINDS.values()) * 4)[:32]
    packed = parameters(kinds)
    tokens, _ = sample(logits, packed, VOCABULARY)
    for _ in range(5):
        assert torch.equal(sample(logits, packed, VOCABULARY)[0], tokens)
    alone = [
        sample(logits[row : row + 1], packed[:, row : row + 1].contiguous(), VOCABULARY)[0]
        for row in range(32)
    ]
    assert torch.equal(torch.cat(alone), tokens)


@pytest.mark.parametrize("kind", ["random", "top_p", "everything"])
def test_chi_square(kind: str) -> None:
    """Draws follow the filtered softmax: 20,000 of each kind over 40 tokens."""
    logits = randn(1, 40, seed=9, scale=2).float()
    options = KINDS[kind]
    packed = parameters([options] * 20_000)
    tokens, _ = sample(logits.expand(20_000, -1), packed)
    probabilities = (logits[0].double() / options["temperature"]).softmax(0)
    ordered, index = probabilities.sort(descending=True)
    keep = ordered.cumsum(0) - ordered < options.get("top_p", 1.0)
    keep &= ordered >= ordered[0] * options.get("min_p", 0.0)
    expected = torch.zeros_like(probabilities)
    expected[index[keep]] = ordered[keep] / ordered[keep].sum() * 20_000
    observed = torch.bincount(tokens, minlength=40).double()
    assert int(observed[expected == 0].sum()) == 0
    common = expected >= 8
    statistic = float(((observed - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 10
