"""Sampling: exact distributions, reproducible rows, and rows that cannot hurt each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from helios.runtime import sampler as sampler_module
from helios.runtime.philox import philox4x32, random_words, random_words_at, row_seed
from helios.runtime.request import Job, SamplingParams, Sequence
from helios.runtime.sampler import SamplingTensors, sample

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: threads only get into each other's way on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_sequence(seed: int = 7, **params: object) -> Sequence:
    job = Job("job", [1, 2, 3], SamplingParams(**{"seed": seed, **params}), max_tokens=16)  # type: ignore[arg-type]
    sequence = job.sequences[0]
    sequence.sample_seed = row_seed(job.params.seed, sequence.index)
    return sequence


def draw(logits: torch.Tensor, count: int, first: int = 0, **params: object) -> np.ndarray:
    """``count`` tokens of one request at successive positions, all over the same logits [vocab]."""
    sequence = make_sequence(**params)
    tensors = SamplingTensors.build([sequence] * count, CPU, range(first, first + count))
    return sample(logits.expand(count, -1), tensors).token_ids.numpy()


def reference_probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution that one row must follow, written for clarity in float64."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    best = probabilities.max()
    if top_k:
        probabilities[probabilities < np.sort(probabilities)[-top_k]] = 0
    probabilities /= probabilities.sum()
    if top_p < 1:
        descending = np.sort(probabilities)[::-1]
        before = np.cumsum(descending) - descending
        probabilities[probabilities < descending[before < top_p].min()] = 0
    allowed = np.exp(scaled - scaled.max()) >= min_p * best
    probabilities = np.where(allowed, probabilities, 0)
    return probabilities / probabilities.sum()


def chi_square_z(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square as a standard normal deviate (Wilson and Hilferty 1931); rare tokens share one cell."""
    count = len(tokens)
    observed = np.bincount(tokens, minlength=len(probabilities)).astype(np.float64)
    assert observed[probabilities == 0].sum() == 0, "a token outside the allowed set was drawn"
    expected = probabilities * count
    common = expected >= 8
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    cells = expected > 0
    statistic = ((observed[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    freedom = max(int(cells.sum()) - 1, 1)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


FILTERS = {
    "none": {"top_p": 1.0},
    "top_k": {"top_p": 1.0, "top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"top_p": 1.0, "min_p": 0.1},
    "top_k and top_p": {"top_p": 0.7, "top_k": 9},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.15},
    "all": {"top_p": 0.85, "top_k": 12, "min_p": 0.05},
}


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("vocabulary", [40, 300])
def test_draws_follow_the_filtered_distribution(
    vocabulary: int, filters: dict[str, float], temperature: float
) -> None:
    """Would catch a filter applied before temperature, an off-by-one at the cut, or biased noise. 300
    tokens take the path that looks at the largest candidates first."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    tokens = draw(logits, 5000, temperature=temperature, **filters)
    expected = reference_probabilities(logits.numpy(), temperature, **filters)  # type: ignore[arg-type]
    assert chi_square_z(tokens, expected) < 4


@pytest.mark.parametrize("wrong", [{"temperature": 1.1}, {"temperature": 1.0, "top_p": 0.9}])
def test_the_chi_square_test_can_fail(wrong: dict[str, float]) -> None:
    """A test that accepts a temperature off by a tenth would prove nothing."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(40)) * 2
    tokens = draw(logits, 5000, temperature=1.0, top_p=0.8)
    assert chi_square_z(tokens, reference_probabilities(logits.numpy(), **{"top_p": 0.8, **wrong})) > 8


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """Would catch noise of too few bits: a token of probability 1e-4 needs the far end of the noise."""
    logits = torch.full((150,), math.log(1e-4))
    logits[17] = math.log(1 - 149e-4)
    tokens = draw(logits, 40_000, temperature=1.0, top_p=1.0)
    rare = int((tokens != 17).sum())
    mean = 40_000 * 149e-4
    assert abs(rare - mean) < 4 * math.sqrt(mean)


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_candidates_give_the_tokens_of_the_whole_vocabulary(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortcut over the largest logits must be exact, also among ties at its end."""
    generator = np.random.default_rng(3)
    sequences = [
        make_sequence(
            seed=row,
            temperature=float(generator.choice([0.0, 0.05, 0.2, 1.0, 1.5])),
            top_k=int(generator.choice([0, 1, 20, 256, 300, 5000])),
            top_p=float(generator.choice([0.1, 0.5, 0.95, 1.0])),
            min_p=float(generator.choice([0.0, 0.01, 0.3])),
        )
        for row in range(64)
    ]
    logits = torch.from_numpy(generator.normal(size=(64, 5000))).float() * scale
    logits[::2] = logits[::2].round()  # many ties
    tensors = SamplingTensors.build(sequences, CPU, range(64))
    quick = sample(logits, tensors).token_ids
    monkeypatch.setattr(sampler_module, "CANDIDATE_WIDTHS", ())
    assert torch.equal(quick, sample(logits, tensors).token_ids)


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    """Case: a seeded request gave another text beside unseeded neighbours."""
    logits = torch.randn(16, 3000, generator=torch.Generator().manual_seed(1)) * 3
    rows = [
        make_sequence(
            seed=row, temperature=0.3 * (row % 4), top_k=(0, 40)[row % 2], top_p=(1.0, 0.9)[row % 3 > 0]
        )
        for row in range(16)
    ]
    together = sample(logits, SamplingTensors.build(rows, CPU, range(100, 116))).token_ids.tolist()
    order = list(reversed(range(16)))
    shuffled = SamplingTensors.build([rows[i] for i in order], CPU, [100 + i for i in order])
    assert sample(logits[order], shuffled).token_ids.tolist() == [together[i] for i in order]
    for row, token in enumerate(together):
        alone = SamplingTensors.build([rows[row]], CPU, [100 + row])
        assert sample(logits[row : row + 1], alone).token_ids.tolist() == [token]


def test_seed_choice_and_position_each_change_the_draw() -> None:
    """Would catch choices of one request that all repeat the first, or a seed that only shifts positions."""
    logits = torch.zeros(1000)
    base = draw(logits, 64, temperature=1.0, top_p=1.0)
    assert np.array_equal(base, draw(logits, 64, temperature=1.0, top_p=1.0))
    assert len(set(base.tolist())) > 50
    other_seed = draw(logits, 64, seed=8, temperature=1.0, top_p=1.0)
    assert (base == other_seed).sum() < 4
    keys = {row_seed(seed, choice) for seed in range(-3, 40) for choice in range(20)}
    assert len(keys) == 43 * 20
    assert all(0 <= key < 2**64 for key in keys)
    assert row_seed(42, 0) == 6332618229526065668, "changing the derivation changes every seeded answer"
    assert row_seed(None, 0) != row_seed(None, 0)


def test_advance_is_the_next_position() -> None:
    """A steady batch moves on without being built again."""
    logits = torch.randn(3, 500)
    rows = [make_sequence(seed=row, temperature=1.0) for row in range(3)]
    tensors = SamplingTensors.build(rows, CPU, [5, 9, 70_000])
    tensors.advance()
    rebuilt = SamplingTensors.build(rows, CPU, [6, 10, 70_001])
    assert torch.equal(sample(logits, tensors).token_ids, sample(logits, rebuilt).token_ids)


def test_greedy_takes_the_first_of_equal_maxima_beside_random_rows() -> None:
    """Greedy must not depend on which path the neighbours need."""
    logits = torch.zeros(4, 2000)
    logits[:, [700, 30, 1999]] = 5.0
    greedy = [make_sequence(temperature=0.0, **options) for options in ({}, {"top_k": 3, "top_p": 0.5})]
    assert sample(logits[:2], SamplingTensors.build(greedy, CPU, [0, 0])).token_ids.tolist() == [30, 30]
    mixed = [*greedy, make_sequence(temperature=1.0, top_k=3), make_sequence(temperature=1.0, top_p=1.0)]
    tokens = sample(logits, SamplingTensors.build(mixed, CPU, range(4))).token_ids.tolist()
    assert tokens[:2] == [30, 30]
    assert tokens[2] in (30, 700, 1999)


@pytest.mark.parametrize(
    "options", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": 10**6, "top_p": 1e-9}]
)
@pytest.mark.parametrize("vocabulary", [50, 500])
def test_the_narrowest_filter_leaves_the_best_token(vocabulary: int, options: dict[str, float]) -> None:
    """An empty allowed set would give token 0."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(5))
    assert set(draw(logits, 50, temperature=1.5, **options).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    """Logits over temperature reach 1e7 here, and infinity without care."""
    logits = torch.randn(1, 1000) * 100
    tensors = SamplingTensors.build([make_sequence(temperature=temperature)], CPU, [0])
    assert sample(logits, tensors).token_ids.item() == logits.argmax().item()


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.8}]
)
def test_a_broken_row_is_flagged_and_leaves_its_neighbours_alone(options: dict[str, float]) -> None:
    """One NaN row used to fail the batch; here it costs only itself."""
    logits = torch.randn(5, 800, generator=torch.Generator().manual_seed(2))
    rows = [make_sequence(seed=row, **options) for row in range(5)]
    tensors = SamplingTensors.build(rows, CPU, range(5))
    clean = sample(logits, tensors)
    assert clean.finite.all()
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    logits[3, 9] = math.inf
    broken = sample(logits, tensors)
    assert broken.finite.tolist() == [True, False, False, False, True]
    assert broken.token_ids[[0, 4]].tolist() == clean.token_ids[[0, 4]].tolist()
    assert broken.token_ids[1:4].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.8}]
)
def test_padding_of_the_embedding_is_never_sampled(options: dict[str, float]) -> None:
    """Qwen3's logits have 267 columns beyond the tokenizer; their ids have no text."""
    logits = torch.zeros(60, 700)
    logits[:, 500:] = 9.0
    tensors = SamplingTensors.build([make_sequence(**options)] * 60, CPU, range(60))
    tokens = sample(logits, tensors, 500).token_ids
    assert int(tokens.max()) < 500
    assert torch.equal(tokens, sample(logits[:, :500], tensors).token_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_float32(dtype: torch.dtype) -> None:
    """Scaling in the model's type would merge neighbouring logits; the input stays untouched."""
    logits = (torch.randn(64, 900) * 3).to(dtype)
    before = logits.clone()
    rows = [make_sequence(seed=row, temperature=0.7, top_p=(1.0, 0.9)[row % 2]) for row in range(64)]
    tensors = SamplingTensors.build(rows, CPU, range(64))
    assert torch.equal(sample(logits, tensors).token_ids, sample(logits.float(), tensors).token_ids)
    assert torch.equal(logits, before)


PHILOX_VECTORS = [
    # Known answers published with Random123 (kat_vectors, philox4x32 10): counter, key, result.
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    """Signed 64-bit products must carry the right upper halves."""
    counter_words = [torch.tensor([int(word, 16)]) for word in counter.split()]
    key_words = [torch.tensor([int(word, 16)]) for word in key.split()]
    words = philox4x32((key_words[0], key_words[1]), tuple(counter_words))  # type: ignore[arg-type]
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_random_words_are_keyed_by_position_and_vocabulary_id() -> None:
    """Word ``id % 4`` of counter (id // 4, position): what a Triton kernel draws for the same token."""
    key = (torch.tensor([0xA4093822, 5]), torch.tensor([0x299F31D0, 6]))
    positions = torch.tensor([0x85A308D3, 3])
    words = random_words(key, positions, 203)
    assert words.shape == (2, 203)
    for row, token in ((0, 0), (0, 202), (1, 77)):
        zero = torch.zeros(1, dtype=torch.long)
        block = philox4x32(
            (key[0][row : row + 1], key[1][row : row + 1]),
            (torch.tensor([token // 4]), positions[row : row + 1], zero, zero),
        )
        assert words[row, token] == block[token % 4]
    ids = torch.tensor([[200, 3, 3, 101], [0, 1, 2, 202]])
    assert torch.equal(random_words_at(key, positions, ids), words.gather(1, ids))
