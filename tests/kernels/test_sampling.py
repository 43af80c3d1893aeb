"""Sampling kernels against :mod:`helios.runtime.sampler`: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from helios.kernels import sampling
from helios.kernels.common import available
from helios.kernels.sampling import sample, sample_reference
from helios.runtime.philox import random_words
from helios.runtime.request import Job, SamplingParams
from helios.runtime.sampler import SamplingTensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not available(DEVICE), reason="needs Triton, on a CPU its interpreter"),
    # numpy warns of inf - inf in broken rows, where a GPU would not.
    pytest.mark.filterwarnings("ignore:(invalid|overflow|divide):RuntimeWarning"),
]


def packed(rows: list[dict[str, Any]], first_position: int = 3) -> torch.Tensor:
    """The parameters of rows at successive positions; their keys differ in all 64 bits."""
    keys = np.random.default_rng(11).integers(0, 2**64, len(rows), np.uint64)
    sequences = []
    for options, key in zip(rows, keys.tolist(), strict=True):
        job = Job("job", [1], SamplingParams(**{"top_p": 1.0, **options}), max_tokens=4)
        job.sequences[0].sample_seed = key
        sequences.append(job.sequences[0])
    positions = range(first_position, first_position + len(rows))
    return SamplingTensors.build(sequences, DEVICE, positions).packed


def check(logits: torch.Tensor, rows: list[dict[str, Any]], vocabulary: int | None = None) -> list[int]:
    parameters = packed(rows)
    before = logits.clone()
    token_ids, finite = sample(logits, parameters, vocabulary)
    expected, expected_finite = sample_reference(logits, parameters, vocabulary)
    assert token_ids.dtype == torch.int64
    assert torch.equal(finite, expected_finite)
    assert token_ids.tolist() == expected.tolist()
    if not any(option in row for row in rows for option in ("top_k", "top_p", "min_p")):
        drawn, drawn_finite = sample(logits, parameters, vocabulary, filters=False)
        assert torch.equal(drawn, token_ids)
        assert torch.equal(drawn_finite, finite)
    assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7))
    return token_ids.tolist()


def normal(rows: int, vocabulary: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary + int(scale * 10))
    return (torch.randn(rows, vocabulary, generator=generator) * scale).to(DEVICE, dtype)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
    {"temperature": 0.6},
    {"temperature": 1.5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.3, "top_k": 900, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.2, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 500, "top_p": 0.9, "min_p": 0.2},
    {"temperature": 1e-5, "top_p": 0.9},
]


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_all_kinds_of_rows_in_one_batch(scale: float) -> None:
    """Flat and steep logits; the odd vocabulary leaves every row but the first unaligned."""
    check(normal(len(MIXED), 1003, scale), MIXED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_chunks(dtype: torch.dtype) -> None:
    """The winner may be in any chunk, and filters count over all of them."""
    check(normal(4, 9001, 2.0, dtype), [MIXED[2], MIXED[4], MIXED[9], MIXED[0]])


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 9003), (8, 4096), (10, 4101), (33, 8200)])
def test_draws_without_filters(rows: int, vocabulary: int) -> None:
    """Every row another key and position, programs of all sizes; the shorter way gives the same tokens."""
    kinds = [{"temperature": 0.3 + 0.02 * row if row % 5 else 0.0} for row in range(1, rows + 1)]
    logits = normal(rows, vocabulary, 1.0, torch.bfloat16)
    tokens, _ = sample(logits, packed(kinds), vocabulary - 2, filters=False)
    expected, _ = sample_reference(logits, packed(kinds), vocabulary - 2)
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) > rows // 2


def test_a_broken_row_without_filters_is_flagged() -> None:
    """NaN, an infinity or nothing allowed, in the first place of a chunk too, from which scores hang."""
    logits = normal(6, 5000, 2.0)
    logits[0, 0] = math.nan
    logits[1, 2048] = math.inf
    logits[2] = -math.inf
    logits[3, :4000] = -math.inf
    tokens = check(logits, [{"temperature": 1.0}] * 5 + [{"temperature": 0.0}])
    assert tokens[:3] == [0, 0, 0]
    assert tokens[3] >= 4000


def test_ties_at_the_threshold_are_all_allowed() -> None:
    """Rounded logits: hundreds of tokens share the last allowed value, and none may be dropped."""
    logits = normal(6, 1003, 2.0).round()
    check(logits, [{"temperature": 1.0, "top_k": 3}, *[{"temperature": 1.0, "top_p": 0.6}] * 2, *MIXED[6:9]])
    same = torch.zeros(6, 3000, device=DEVICE)
    tokens = check(same, [{"temperature": 1.0, "top_k": 2, "top_p": 0.01}] * 6)
    assert len(set(tokens)) == 6, "all tokens tie with the best"


def test_more_ties_than_the_list_holds() -> None:
    """The last program then reads the logits themselves."""
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[:, 4900:] = 2.0
    check(logits, [{"temperature": 1.0, "top_k": 150, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.5}])


def test_nearly_equal_probabilities_leave_few_in_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights give such logits, and top_p then keeps most of a large vocabulary (here a quarter of the usual,
    with a quarter of the list). Would catch counting that leaves more than the list holds: the last program, one for
    a row, would read all logits several times."""
    seen: list[Any] = []

    class Finish:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> Any:
                seen.extend((args[6].clone(), args[7].sum(-1)))  # keys, and number and mass of all parts
                return finish[grid](*args, **options)

            return launch

    finish = sampling._finish
    monkeypatch.setattr(sampling, "_finish", Finish())
    monkeypatch.setattr(sampling, "LIST_SIZE", 1024)
    monkeypatch.setattr(sampling, "PASSES", (*sampling.PASSES[:2], (16, 1024)))
    check(normal(1, 38_000, 1.0), [{"temperature": 0.6, "top_p": 0.95}])
    keys, (numbers, masses) = (of_all[..., 0, :] for of_all in seen)
    enough = masses >= 0.95 * masses[keys >= 0].max()
    assert 0 < numbers[(keys >= 0) & enough].min() - numbers[(keys >= 0) & ~enough].max() <= 1024


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    """Within four neighbours, within a chunk and across chunks."""
    logits = torch.zeros(3, 5000, device=DEVICE)
    for row, where in enumerate(([4001, 37, 38], [4002, 4999], [2047, 2048, 2050])):
        logits[row, where] = 3.0
    assert check(logits, [{"temperature": 0.0}] * 3) == [37, 4002, 2047]


def test_padding_is_never_chosen() -> None:
    """Qwen3's logits have 267 columns beyond the tokenizer."""
    logits = torch.zeros(6, 2100, device=DEVICE)
    logits[:, 2001:] = 50.0
    logits[0, 2001:] = math.nan
    assert max(check(logits, [*MIXED[2:4], MIXED[0], MIXED[4], *MIXED[9:11]], 2001)) < 2001


def test_a_broken_row_is_flagged_and_leaves_its_neighbours_alone() -> None:
    """NaN, an infinity, or nothing allowed; also with masked tokens, which are no fault."""
    kinds = [MIXED[0], MIXED[2], MIXED[4]]
    logits = normal(15, 2100, 2.0)
    logits[0:3, 3] = math.nan
    logits[3:6, 2099] = math.inf
    logits[6:9] = -math.inf
    logits[9:12, 100:] = -math.inf
    tokens = check(logits, kinds * 5)
    assert tokens[:9] == [0] * 9
    assert max(tokens[9:12]) < 100


def test_parameters_may_be_columns_of_a_larger_buffer() -> None:
    """Graphs keep one buffer for the most rows and pass the first columns of it."""
    rows = [MIXED[2], MIXED[4]]
    buffer = torch.zeros(7, 9, dtype=torch.int32, device=DEVICE)
    buffer[:, :2] = packed(rows)
    wide = normal(2, 1200, 1.0)
    got = sample(wide[:, :1003], buffer[:, :2])[0]
    assert torch.equal(got, sample_reference(wide[:, :1003], packed(rows))[0])


def test_the_words_are_those_of_the_plain_form() -> None:
    """With equal logits the token with the least word wins: a wrong key, counter or order would show."""
    rows = [{"temperature": 1.0}] * 8
    parameters = packed(rows, first_position=2**30)
    tensors = SamplingTensors(parameters, False, False)
    words = random_words(tensors.key, tensors.positions, 777)
    tokens, _ = sample(torch.zeros(8, 777, device=DEVICE), parameters)
    assert torch.equal(tokens, words.argmin(1))


def test_draws_follow_the_softmax() -> None:
    """Chi-square with three degrees of freedom; 25 is beyond one in 50,000."""
    count = 120 if DEVICE.type == "cpu" else 20_000
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logits = probabilities.log().float().expand(count, -1).contiguous().to(DEVICE)
    tokens, _ = sample(logits, packed([{"temperature": 1.0}] * count), filters=False)
    observed = torch.bincount(tokens.cpu(), minlength=4)
    expected = probabilities * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 25
