"""Log probabilities of chosen tokens and of their alternatives.

They are those of the model itself: log-softmax in float32 of the logits before penalties, bias, masks and
temperature (vLLM's default, "raw logprobs"), over the whole width of the logits as transformers computes
it. Alternatives are taken from the tokenizer's ids only. OpenAI's -9999.0 stands for minus infinity, which
JSON cannot carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from helios.runtime.request import TokenLogprob

LOWEST = -9999.0
# Rows of a prompt's logits that are turned into float32 at a time: 128 of Qwen3's take 78 MB.
PROMPT_SLICE = 128


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Results on the logits' device; ``k`` is the most alternatives that any row asked for."""

    token_ids: Tensor  # [rows] int64
    logprobs: Tensor  # [rows] float32
    top_ids: Tensor  # [rows, k] int64, most likely first
    top_logprobs: Tensor  # [rows, k] float32

    def to_host(self) -> LogprobTensors:
        """Start to copy everything to the host; wait for an event recorded after this before reading it."""
        if self.token_ids.device.type != "cuda":
            return self

        def copy(tensor: Tensor) -> Tensor:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        return LogprobTensors(
            copy(self.token_ids), copy(self.logprobs), copy(self.top_ids), copy(self.top_logprobs)
        )

    def to_lists(self, num_top: Sequence[int]) -> list[TokenLogprob]:
        """Host form, with ``num_top[row]`` alternatives each. Waits for the device if the tensors are there."""
        token_ids = cast("list[int]", self.token_ids.tolist())
        logprobs = cast("list[float]", self.logprobs.tolist())
        top_ids = cast("list[list[int]]", self.top_ids.tolist())
        top_logprobs = cast("list[list[float]]", self.top_logprobs.tolist())
        return [
            TokenLogprob(token_id, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
            for token_id, logprob, ids, values, count in zip(
                token_ids, logprobs, top_ids, top_logprobs, num_top, strict=True
            )
        ]


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, vocabulary_size: int | None = None
) -> LogprobTensors:
    """Log probabilities of ``token_ids`` [rows] under ``logits`` [rows, vocab] (any float type), beside the
    ``num_top`` most likely tokens below ``vocabulary_size``."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)  # [rows, 1]
    chosen = logits.gather(1, token_ids[:, None]) - total
    candidates = logits[:, :vocabulary_size]
    top, top_ids = candidates.topk(min(num_top, candidates.shape[1]), dim=-1)
    return LogprobTensors(token_ids, _reportable(chosen)[:, 0], top_ids, _reportable(top - total))


def _reportable(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num_(nan=LOWEST).clamp_(min=LOWEST)


def prompt_logprobs(
    logits: Tensor, next_ids: Tensor, num_top: int, vocabulary_size: int | None = None
) -> LogprobTensors:
    """The same for consecutive prompt positions: ``logits`` [tokens, vocab] at each position and the prompt's
    next token ``next_ids`` [tokens]. Float32 copies are made of a slice at a time."""
    parts = [
        token_logprobs(some, ids, num_top, vocabulary_size)
        for some, ids in zip(_slices(logits), _slices(next_ids), strict=True)
    ]
    return LogprobTensors(
        next_ids,
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )


def _slices(tensor: Tensor) -> list[Tensor]:
    return [tensor[start : start + PROMPT_SLICE] for start in range(0, len(tensor), PROMPT_SLICE)]
