"""Choosing the next tokens of a batch: greedy, temperature, top-k, top-p and min-p, per row, in one pass.

A token is drawn by the Gumbel-max method: the largest of ``logit / temperature + noise`` over the allowed
tokens is a sample of their softmax. The noise of a token is a function of the request's seed, the choice,
the position and the vocabulary id (:mod:`helios.runtime.philox`), so a row's token depends on nothing else
in the batch, and no softmax over the vocabulary is needed when nothing is filtered.

Filters act on the distribution after temperature, in the order top_k, top_p (on what top_k left,
renormalised), min_p. This is transformers' order; vLLM applies min_p first, which differs only when top_p
and min_p are both set. Each filter is a threshold on the value, so tokens that tie with the last allowed
one are allowed too, and the outcome does not hang on the order in which a sort leaves equal values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helios.runtime.philox import gumbel, random_words, random_words_at
from helios.runtime.request import SamplingParams, Sequence
from helios.runtime.transfer import to_device

# Below this a temperature means greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5
# Noise lies between -2.9 and 22.9 (see ``gumbel``), so a token this far below the best never wins.
NOISE_RANGE = 26.0
# Candidates looked at before the whole vocabulary on the CPU, where sorting 151,936 values takes 12 ms.
CANDIDATE_WIDTHS = (256, 4096)
_TOP_K_OFF = 2**31 - 1
_TOP_P_OFF = 2.0
_MIN_TOP_P = 1e-9  # top_p = 0 keeps the best token, not none

_INVERSE_TEMPERATURE, _TOP_P, _FLOOR, _TOP_K, _KEY_LOW, _KEY_HIGH, POSITION = range(7)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What ``sample`` chose, on the logits' device.

    Where ``finite`` is false the row had a NaN, a positive infinity or no allowed token at all: its token
    id is 0 and means nothing, and the engine ends that sequence. Its neighbours are not affected.
    """

    token_ids: Tensor  # [rows] int64
    finite: Tensor  # [rows] bool


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of a batch in one tensor, so that they cross to the device in one copy.

    The flags are known on the host, where they choose the path without a synchronisation.
    """

    packed: Tensor  # [7, rows] int32; the first three rows hold float32 bits
    all_greedy: bool
    any_filter: bool  # some row samples with top_k, top_p or min_p

    @staticmethod
    def build(sequences: Rows[Sequence], device: torch.device, positions: Rows[int]) -> SamplingTensors:
        """``positions`` are the places, counted from the prompt's first token, that the sampled tokens will
        take (``len(token_ids)`` of a sequence whose tokens are all computed)."""
        params = [sequence.job.params for sequence in sequences]
        all_greedy = all(p.temperature < MIN_TEMPERATURE for p in params)
        if all_greedy and device.type == "cpu":  # nothing but the largest logit is asked for
            return SamplingTensors(
                torch.zeros((7, len(params)), dtype=torch.int32), all_greedy, any_filter=False
            )
        packed = torch.from_numpy(SamplingTensors.pack(sequences, positions))
        return SamplingTensors(
            to_device(packed, device),
            all_greedy,
            any_filter=any(has_filter(p) for p in params),
        )

    @staticmethod
    def pack(sequences: Rows[Sequence], positions: Rows[int]) -> NDArray[np.int32]:
        """The packed parameters on the host, [7, rows]; arguments as for ``build``."""
        params = [sequence.job.params for sequence in sequences]
        packed = np.empty((7, len(params)), np.int32)
        floats = packed[:3].view(np.float32)
        temperature = np.array([p.temperature for p in params], np.float64)
        random = temperature >= MIN_TEMPERATURE
        floats[_INVERSE_TEMPERATURE] = np.where(random, 1 / np.maximum(temperature, MIN_TEMPERATURE), 0)
        floats[_TOP_P] = [max(p.top_p, _MIN_TOP_P) if p.top_p < 1 else _TOP_P_OFF for p in params]
        floats[_FLOOR] = [_floor(p) for p in params]
        packed[_TOP_K] = [min(p.top_k, _TOP_K_OFF) if p.top_k > 0 else _TOP_K_OFF for p in params]
        keys = np.array([sequence.sample_seed for sequence in sequences], np.uint64)
        packed[_KEY_LOW : _KEY_HIGH + 1] = keys.view(np.int32).reshape(-1, 2).T  # little-endian words
        packed[POSITION] = positions
        return packed

    def advance(self) -> None:
        """Move every row to its next position, on the device: the next tick of an unchanged batch."""
        self.packed[POSITION] += 1

    def select(self, rows: Tensor) -> SamplingTensors:
        """The parameters of some rows (int64 indices)."""
        return SamplingTensors(self.packed[:, rows], self.all_greedy, self.any_filter)

    @property
    def inverse_temperature(self) -> Tensor:
        """[rows] float32; 0 in greedy rows."""
        return self.packed[_INVERSE_TEMPERATURE].view(torch.float32)

    @property
    def top_p(self) -> Tensor:
        """[rows] float32; above 1 where it is off."""
        return self.packed[_TOP_P].view(torch.float32)

    @property
    def floor(self) -> Tensor:
        """[rows] float32: how far below the best a scaled logit may lie (log of min_p, at most 0)."""
        return self.packed[_FLOOR].view(torch.float32)

    @property
    def top_k(self) -> Tensor:
        """[rows] int64; beyond any vocabulary where it is off."""
        return self.packed[_TOP_K].long()

    @property
    def key(self) -> tuple[Tensor, Tensor]:
        """Low and high words of the Philox keys, [rows] int64 each."""
        return self.packed[_KEY_LOW].long() & 0xFFFFFFFF, self.packed[_KEY_HIGH].long() & 0xFFFFFFFF

    @property
    def positions(self) -> Tensor:
        """[rows] int64."""
        return self.packed[POSITION].long()


def has_filter(params: SamplingParams) -> bool:
    """Whether a request samples from less than the whole vocabulary."""
    random = params.temperature >= MIN_TEMPERATURE
    return random and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def _floor(params: SamplingParams) -> float:
    return max(math.log(params.min_p), -NOISE_RANGE) if params.min_p > 0 else -NOISE_RANGE


def sample(logits: Tensor, params: SamplingTensors, vocabulary_size: int | None = None) -> SampledTokens:
    """Choose one token for every row of ``logits`` [rows, vocab] (any float type; not changed).

    ``vocabulary_size`` is the tokenizer's: ids beyond it are padding of the model's embedding and are
    never chosen. A greedy row takes the first of equal maxima.
    """
    if vocabulary_size is not None and vocabulary_size < logits.shape[1]:
        logits = logits[:, :vocabulary_size]
    best, token_ids = logits.max(dim=-1)  # [rows]; NaN wins over every number
    finite = best.abs() < math.inf  # false for NaN, too; isfinite takes twice the operators
    if not params.all_greedy:
        # The plain form has no data-dependent control flow, which a CUDA graph could not hold.
        draw = _draw_with_candidates if logits.device.type == "cpu" else _draw
        random_ids = draw(logits, best.float(), params)
        token_ids = torch.where(params.inverse_temperature == 0, token_ids, random_ids)
    return SampledTokens(token_ids * finite, finite)


def _draw(logits: Tensor, best: Tensor, params: SamplingTensors) -> Tensor:
    """Sample every row over the whole vocabulary, [rows] int64."""
    scaled = _scale(logits, best, params)
    scores = scaled + gumbel(random_words(params.key, params.positions, logits.shape[1]))
    if params.any_filter:
        ordered = scaled.sort(dim=-1, descending=True).values
        threshold, _ = _threshold(ordered, ordered.double().exp().sum(-1), params)
        scores.masked_fill_(scaled < threshold[:, None], -math.inf)
    return scores.argmax(dim=-1)


def _scale(logits: Tensor, best: Tensor, params: SamplingTensors) -> Tensor:
    """Logits over temperature with the best at 0, float32: nothing overflows at a tiny temperature."""
    return (logits - best[:, None]).mul_(params.inverse_temperature[:, None])


def _threshold(ordered: Tensor, total: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """The smallest allowed scaled logit of each row, and whether it is certain.

    ``ordered`` [rows, width] holds each row's largest scaled logits in descending order, ``total`` [rows]
    (float64) the sum of ``exp`` over the whole row. It is certain when every allowed token is known to be
    among those given, without a doubt about ties at the end; with the whole vocabulary it always holds.
    """
    width = ordered.shape[1]
    last = ordered[:, -1]
    kth = ordered.gather(1, params.top_k.clamp(max=width)[:, None] - 1)  # [rows, 1]
    # Sums in float64 keep the cut from moving with the order of addition.
    mass = ordered.double().exp().masked_fill_(ordered < kth, 0)
    has_top_k = params.top_k < _TOP_K_OFF
    total = torch.where(has_top_k, mass.sum(-1), total)
    before = mass.cumsum(-1) - mass
    in_nucleus = before < (params.top_p * total)[:, None]
    pth = ordered.masked_fill(~in_nucleus, math.inf).amin(-1)
    threshold = torch.maximum(torch.maximum(kth[:, 0], pth), params.floor)
    total_known = ~has_top_k | (params.top_p > 1) | (kth[:, 0] > last)
    return threshold, (threshold > last) & total_known


def _draw_with_candidates(logits: Tensor, best: Tensor, params: SamplingTensors) -> Tensor:
    """The same tokens as ``_draw``, from each row's largest logits where these suffice.

    They do when the filters, or the reach of the noise at a low temperature, end within them; then neither
    a sort of the vocabulary nor its noise is needed. Rows for which no width suffices take the whole.
    """
    token_ids = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    rows = ((params.inverse_temperature > 0) & best.isfinite()).nonzero()[:, 0]
    for width in CANDIDATE_WIDTHS:
        if width >= logits.shape[1] or not len(rows):
            break
        chosen, certain = _draw_from_largest(logits[rows], best[rows], params.select(rows), width)
        token_ids[rows[certain]] = chosen[certain]
        rows = rows[~certain]
        if not params.any_filter:
            break  # without a sort to avoid, the whole vocabulary costs less than more candidates
    if len(rows):
        token_ids[rows] = _draw(logits[rows], best[rows], params.select(rows))
    return token_ids


def _draw_from_largest(
    logits: Tensor, best: Tensor, params: SamplingTensors, width: int
) -> tuple[Tensor, Tensor]:
    """Sample from the ``width`` largest logits: the tokens, and whether they are what ``_draw`` gives."""
    everything = _scale(logits, best, params)
    scaled, ids = everything.topk(width, dim=-1)  # [rows, width]
    total = torch.full_like(best, math.inf, dtype=torch.float64)  # no nucleus ends
    if params.any_filter:
        # Clamped because a CPU takes ten times as long where exp is denormal; e**-80 adds nothing.
        total = everything.clamp_(min=-80).exp_().sum(-1, dtype=torch.float64)
    threshold, certain = _threshold(scaled, total, params)
    scores = scaled + gumbel(random_words_at(params.key, params.positions, ids))
    winner = scores.masked_fill_(scaled < threshold[:, None], -math.inf).argmax(dim=-1, keepdim=True)
    return ids.gather(1, winner)[:, 0], certain
