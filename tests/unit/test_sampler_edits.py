"""Edits of the logits: against transformers where the meanings agree, and row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from helios.runtime.logit_edits import LogitEdits, mask_table, mask_values
from helios.runtime.request import Grammar, Job, SamplingParams, Sequence

CPU = torch.device("cpu")
VOCABULARY = 70  # no multiple of 32
EOS = 5
PROMPT = [1, 2, 2, 9]


def make_sequence(output: tuple[int, ...] = (), **params: object) -> Sequence:
    sequence = Job("job", PROMPT, SamplingParams(**params), max_tokens=99).sequences[0]  # type: ignore[arg-type]
    sequence.token_ids += output
    return sequence


def make_edits(max_rows: int = 4) -> LogitEdits:
    return LogitEdits(max_rows, VOCABULARY, CPU, [EOS])


def make_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def edit_one(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    edits = make_edits()
    edits.admit(2, sequence)
    return edits.apply(logits, edits.plan([2]))


def processed(processor: LogitsProcessor, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([tokens]), logits.clone())  # type: ignore[arg-type, return-value]


def test_repetition_penalty_equals_transformers() -> None:
    """Prompt and output tokens, once each; negative logits are multiplied, positive ones divided."""
    logits = make_logits()
    sequence = make_sequence((7, 7, 30), repetition_penalty=1.3)
    expected = processed(RepetitionPenaltyLogitsProcessor(1.3), sequence.token_ids, logits)
    torch.testing.assert_close(edit_one(logits, sequence), expected)


def test_logit_bias_equals_transformers() -> None:
    """A bias of -100 and one of 100, as OpenAI's clients send them."""
    logits = make_logits()
    expected = processed(SequenceBiasLogitsProcessor([[[3], -100.0], [[8], 100.0]]), PROMPT, logits)
    torch.testing.assert_close(
        edit_one(logits, make_sequence(logit_bias=((3, -100.0), (8, 100.0)))), expected
    )


@pytest.mark.parametrize("output", [(), (7,), (7, 8), (7, 8, 9)])
def test_min_tokens_equals_transformers(output: tuple[int, ...]) -> None:
    """The end token is allowed from the token after the minimum, not one earlier or later."""
    logits = make_logits()
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, EOS)  # type: ignore[arg-type]
    expected = processed(processor, [*PROMPT, *output], logits)
    torch.testing.assert_close(edit_one(logits, make_sequence(output, min_tokens=2)), expected)


def test_frequency_and_presence_count_the_output_only() -> None:
    """OpenAI's formula: the prompt does not count, or a long prompt would silence its own words."""
    logits = make_logits()
    sequence = make_sequence((7, 7, 9), frequency_penalty=0.5, presence_penalty=0.25)
    expected = logits.clone()
    expected[0, 7] -= 2 * 0.5 + 0.25
    expected[0, 9] -= 0.5 + 0.25
    torch.testing.assert_close(edit_one(logits, sequence), expected)


def test_min_tokens_bans_stop_tokens_and_spares_the_end_with_ignore_eos() -> None:
    logits = make_logits()
    edited = edit_one(logits, make_sequence(min_tokens=1, stop_token_ids=(40, 41)))
    assert edited[0].isneginf().nonzero()[:, 0].tolist() == [EOS, 40, 41]
    edited = edit_one(logits, make_sequence(min_tokens=1, stop_token_ids=(40,), ignore_eos=True))
    assert edited[0].isneginf().nonzero()[:, 0].tolist() == [40]


ALL = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": ((4, 2.0),),
    "min_tokens": 3,
}


def test_appending_is_the_same_as_being_admitted_with_the_output() -> None:
    """A preempted sequence is admitted again, perhaps to another row; its edits must go on unchanged."""
    logits = make_logits()
    edits = make_edits()
    edits.admit(1, make_sequence(**ALL))
    output: tuple[int, ...] = ()
    for token_id in (7, 9, 7, 4):
        resumed = edit_one(logits, make_sequence(output, **ALL))
        torch.testing.assert_close(edits.apply(logits, edits.plan([1])), resumed, rtol=0, atol=0)
        edits.append(torch.tensor([1]), torch.tensor([token_id]))
        output += (token_id,)
    both = make_edits()
    both.admit(1, make_sequence(**ALL))
    both.append(torch.tensor([1, 1, 1, 1]), torch.tensor(output))  # several tokens of a row in one tick
    torch.testing.assert_close(both.apply(logits, both.plan([1])), edits.apply(logits, edits.plan([1])))


def test_rows_are_edited_each_on_its_own() -> None:
    """Would catch a mix-up of batch index and persistent row, in any order and beside untouched rows."""
    logits = make_logits(4)
    sequences = {
        0: make_sequence((7,), **ALL),
        1: make_sequence(),
        2: make_sequence((8, 8), frequency_penalty=1.0),
        3: make_sequence(logit_bias=((1, -5.0), (6, 3.0)), min_tokens=2),
    }
    edits = make_edits()
    for row, sequence in sequences.items():
        edits.admit(row, sequence)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3], [1, 0]):
        edited = edits.apply(logits[: len(order)], edits.plan(order))
        for index, row in enumerate(order):
            alone = edit_one(logits[index : index + 1], sequences[row])
            torch.testing.assert_close(edited[index : index + 1], alone, rtol=0, atol=0)
    assert edits.plan([1]) is None


def test_a_row_used_again_remembers_nothing() -> None:
    """The next request must not pay for the words of the one before."""
    logits = make_logits()
    edits = make_edits()
    edits.admit(0, make_sequence((7, 8), **ALL))
    edits.append(torch.tensor([0]), torch.tensor([11]))
    edits.release(0)
    assert edits.plan([0]) is None
    edits.admit(0, make_sequence())  # a plain request in between also appends
    edits.append(torch.tensor([0]), torch.tensor([12]))
    edits.release(0)
    edits.admit(0, make_sequence((9,), **ALL))
    expected = edit_one(logits, make_sequence((9,), **ALL))
    torch.testing.assert_close(edits.apply(logits, edits.plan([0])), expected, rtol=0, atol=0)


def test_a_plain_batch_is_not_touched_and_the_input_never_is() -> None:
    """Nothing is allocated or copied without need, and logprobs are read from the original logits."""
    edits = make_edits()
    logits = make_logits(2)
    before = logits.clone()
    edits.admit(0, make_sequence())
    assert edits.apply(logits, edits.plan([0, 1])) is logits
    edits.admit(1, make_sequence((3,), **ALL))
    edited = edits.apply(logits.bfloat16(), edits.plan([0, 1]))
    assert edited.dtype == torch.float32
    edits.apply(logits, edits.plan([0, 1]))
    assert torch.equal(logits, before)


def test_grammar_masks_reach_their_rows_and_win_over_min_tokens() -> None:
    """A finished grammar allows only the end token; a ban on it would leave nothing to sample."""
    edits = make_edits()
    logits = make_logits(3)
    constrained = make_sequence(min_tokens=9, grammar=Grammar("regex", "x"))
    edits.admit(0, constrained)
    edits.admit(3, constrained)
    for allowed in ({0: {EOS}, 2: {1, 31, 32, 69}}, {0: {2, 64}, 2: set()}):
        plan = edits.plan([3, 1, 0])
        filled = 0
        for index, words in edits.mask_rows(plan):
            bits = np.zeros(edits.mask_words * 32, np.uint8)
            bits[list(allowed[index])] = 1
            words[:] = np.packbits(bits, bitorder="little").view(np.int32)
            filled += 1
        assert filled == 2
        edited = edits.apply(logits, plan)
        assert torch.equal(edited[1], logits[1])
        for index in (0, 2):
            finite = edited[index].isfinite().nonzero()[:, 0].tolist()
            assert finite == sorted(allowed[index])
            assert torch.equal(edited[index][finite], logits[index][finite])


def test_masks_are_read_lowest_bit_first() -> None:
    words = torch.tensor([[1 << 31 | 2, 5]], dtype=torch.int64).to(torch.int32)
    values = mask_values(words, 40, mask_table(words.device))[0]
    assert values.isfinite().nonzero()[:, 0].tolist() == [1, 31, 32, 34]
    assert values[[0, 2, 39]].isneginf().all()


def test_everything_banned_is_minus_infinity_not_nan() -> None:
    """Infinite bans meet penalties and bias; -inf times a factor must stay -inf."""
    logits = torch.full((1, VOCABULARY), -math.inf)
    logits[0, 3] = 1.0
    edited = edit_one(logits, make_sequence((3, 7), **ALL))
    assert not edited.isnan().any()
    assert edited[0].isfinite().nonzero()[:, 0].tolist() == [3]
