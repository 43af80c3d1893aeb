"""Log probabilities: the model's own, finite, and equal over slices."""

from __future__ import annotations

import math

import pytest
import torch

from helios.runtime.logprobs import LOWEST, PROMPT_SLICE, prompt_logprobs, token_logprobs


def test_values_are_a_log_softmax_in_float32() -> None:
    """bf16 logits must not be normalised in bf16: the error would be a tenth of a nat."""
    logits = (torch.randn(5, 400, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    expected = torch.log_softmax(logits.double(), dim=-1)
    token_ids = torch.tensor([3, 399, 0, 77, 5])
    result = token_logprobs(logits, token_ids, 4)
    chosen, top = expected.gather(1, token_ids[:, None])[:, 0], expected.topk(4).values
    torch.testing.assert_close(result.logprobs, chosen.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(result.top_logprobs, top.float(), rtol=0, atol=1e-5)
    lists = result.to_lists([4, 0, 1, 2, 4])
    assert [len(entry.top) for entry in lists] == [4, 0, 1, 2, 4]
    assert [entry.token_id for entry in lists] == token_ids.tolist()
    best, value = lists[0].top[0]
    assert logits[0, best] == logits[0].max()
    assert value == pytest.approx(float(expected[0].max()), abs=1e-5)
    assert all(isinstance(value, float) for _, value in lists[0].top)


def test_no_alternatives_means_an_empty_list() -> None:
    """Case: logprobs without top_logprobs must give [], not fail."""
    entry = token_logprobs(torch.randn(1, 50), torch.tensor([7]), 0).to_lists([0])[0]
    assert entry.top == ()


def test_minus_infinity_is_reported_as_openai_does() -> None:
    """JSON has no infinity: a masked or broken logit used to break the answer's body."""
    logits = torch.full((2, 50), -math.inf)
    logits[0, 3] = 0.0
    logits[1] = math.nan
    result = token_logprobs(logits, torch.tensor([7, 7]), 3)
    assert result.logprobs.tolist() == [LOWEST, LOWEST]
    assert result.top_logprobs.tolist() == [[0.0, LOWEST, LOWEST], [LOWEST] * 3]


def test_padding_counts_in_the_sum_but_is_no_alternative() -> None:
    """transformers normalises over the padded width; a padded id has no text to report."""
    logits = torch.zeros(1, 40)
    logits[0, 35] = 5.0
    result = token_logprobs(logits, torch.tensor([0]), 20, vocabulary_size=30)
    assert int(result.top_ids.max()) < 30
    expected = torch.log_softmax(logits, dim=-1)[0, 0]
    torch.testing.assert_close(result.logprobs[0], expected)


def test_prompt_logprobs_do_not_depend_on_the_slices() -> None:
    logits = torch.randn(2 * PROMPT_SLICE + 3, 60)
    next_ids = torch.randint(0, 60, (len(logits),))
    whole, sliced = token_logprobs(logits, next_ids, 5), prompt_logprobs(logits, next_ids, 5)
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(whole, name), getattr(sliced, name))
