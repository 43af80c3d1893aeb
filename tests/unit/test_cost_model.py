"""The estimate of a tick's time, and chunks cut by it."""

from __future__ import annotations

import pytest

from helios.runtime.cost_model import LEAST_DECODE_TICKS, SMALLEST_CHUNK, CostModel, pairs
from helios.runtime.policy import Rules, plan
from tests.unit.test_policy import sequence

SIZES = [64, 128, 256, 512, 1024, 2048, 4096]


def truth(tokens: int, million_pairs: float) -> float:
    """A card that takes 1 ms, 10 microseconds a token and 1 ms for a million pairs."""
    return 1e-3 + 10e-6 * tokens + 1e-3 * million_pairs


def trained(sizes: list[int] | None = None) -> CostModel:
    model = CostModel(SIZES if sizes is None else sizes)
    model.observe(1, 0, 0.0, 0.5e-3)  # reads the weights, as every prompt does
    for _ in range(5):
        model.observe(4, 0, 0.0, 1.5e-3)
    model.observe(4, 0, 0.0, 0.5)  # waited for the host
    for start, count in [(0, size) for size in SIZES] + [(4096, 1024), (4096, 4096), (2048, 512)]:
        model.observe(0, count, pairs(start, count), truth(count, pairs(start, count)))
    return model


@pytest.mark.parametrize(("start", "count"), [(0, 1000), (3000, 256), (7000, 2048)])
def test_predictions_follow_the_card(start: int, count: int) -> None:
    """Would catch a fit that mixes up tokens and attention, or forgets the padding and the decoders."""
    model = trained()
    for rows, beside in ((0, 0.0), (4, 1e-3), (8, 2e-3)):
        expected = truth(model.padded(rows + count), pairs(start, count)) + beside
        assert model.predict(rows, count, pairs(start, count)) == pytest.approx(expected, rel=0.1)
    assert model.predict(4, 0, 0.0) == pytest.approx(1.5e-3)
    assert model.predict(8, 0, 0.0) == pytest.approx(2.5e-3)


def test_nothing_is_predicted_before_anything_was_seen() -> None:
    """Would catch chunks cut by an estimate made of nothing."""
    model = CostModel(SIZES)
    assert model.predict(1, 512, pairs(0, 512)) == 0.0
    assert model.budget(0.01, 1) is None


def test_chunks_are_cut_to_padded_sizes_within_the_time() -> None:
    """Would catch a chunk of 513 tokens that is paid like 1,024, and one that takes too long."""
    budget = trained().budget(0.015, 4)
    assert budget is not None
    count = budget.cut(0, 4000)
    assert count + 4 in SIZES
    assert 1e-3 + truth(count, pairs(0, count)) <= 0.0165
    assert 1e-3 + truth(2 * count, pairs(0, 2 * count)) > 0.015
    budget.add(0, count)
    assert budget.cut(0, 4000) == 0
    late = trained().budget(0.015, 4)
    assert late is not None
    assert late.cut(30_000, 4000) < count, "a late chunk attends to more keys"


def test_decoding_rows_take_part_of_the_padded_size() -> None:
    """Would catch a tick of 512 prompt tokens and 3 decoders that is taken for one of 512 tokens."""
    model = CostModel(SIZES)
    assert [model.padded(tokens) for tokens in (1, 512, 515, 5000)] == [64, 512, 1024, 5000]
    budget = trained().budget(1.0, 3)
    assert budget is not None
    assert budget.cut(0, 5000) in (4096 - 3, 5000)
    assert trained().predict(3, 512, 0.0) > 1.5 * trained().predict(0, 512, 0.0)


def test_short_prompts_and_slow_ticks_do_not_make_it_forget_long_ones() -> None:
    """Found on a GPU: one decode tick that had waited for the host made a mixed tick seem to take no time. It
    weighed more than all others, and long chunks were then cut by their pairs alone."""
    model = trained()
    model.keep_samples()
    for number in range(400):
        model.observe(2, 0, 0.0, 1e-3)
        if number % 40 == 0:
            model.observe(1, 0, 0.0, 4e-3)
        count = 130 + 3 * (number % 100)
        model.observe(8, count, pairs(0, count), truth(model.padded(count + 8), pairs(0, count)) + 2e-3)
    for start, count in ((0, 3000), (6000, 1000), (0, 500)):
        expected = truth(model.padded(count + 8), pairs(start, count)) + 2e-3
        assert model.predict(8, count, pairs(start, count)) == pytest.approx(expected, rel=0.15)


def test_a_size_that_is_faster_than_the_line_is_predicted_so() -> None:
    """Few tokens take as long as one, and large products are more efficient: a line alone is off by a third."""
    model = CostModel([16, *SIZES])

    def card(tokens: int) -> float:
        return max(2.5e-3, 8e-6 * tokens + (2e-3 if tokens == 2048 else 0.0))

    for size in [16, *SIZES]:
        for start in (0, 4096):
            model.observe(0, size, pairs(start, size), card(size) + 1e-3 * pairs(start, size))
    model._fit()
    for size in (64, 256, 1024, 2048, 4096):
        assert model.predict(0, size, 0.0) == pytest.approx(card(size), rel=0.12)


def test_a_tick_may_take_as_long_as_some_without_prompts() -> None:
    """Would catch many decoders whose keys are read anew for each small chunk of a long queue of prompts."""
    few, many = trained().budget(0.015, 4), trained().budget(0.015, 40)
    assert few is not None
    assert many is not None
    assert trained().predict(40, 0, 0.0) * LEAST_DECODE_TICKS > 0.04
    assert many.cut(0, 4000) > 2 * few.cut(0, 4000)


def test_a_prompt_always_makes_progress() -> None:
    """Would catch a long prompt that never runs because even its smallest chunk is over the target."""
    budget = trained().budget(0.0001, 4)
    assert budget is not None
    late = 10_000_000
    assert budget.cut(late, 4000) == SMALLEST_CHUNK
    assert budget.cut(late, 30) == 30


def test_the_plan_keeps_to_the_time_only_while_someone_decodes() -> None:
    """Would catch a time budget that the policy ignores, or that slows prompts nobody waits beside."""
    decoder, long, short = sequence("d", 10, 9), sequence("long", 6000, 0), sequence("short", 100, 0)
    rows = plan([decoder, long, short], Rules(4096), 0.0, lambda rows: trained().budget(0.015, rows))
    counts = {row.sequence.job.job_id: row.count for row in rows}
    assert counts["d"] == 1
    assert counts["short"] == 100
    assert 0 < counts["long"] < 1024
    alone = plan([long], Rules(4096), 0.0, None)
    assert alone[0].count == 4096
