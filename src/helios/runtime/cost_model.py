"""How long a tick will take: fitted to the ticks that ran, used to cut prompt chunks.

    seconds = what decoding takes beyond its least + fixed + a * prompt tokens + b * query-key pairs

The least time of a decode tick is that of reading the weights, which prompts read anyway. The three numbers
are a least-squares fit over the last prompt ticks (warm-up supplies the first); prompt tokens are counted as
the runner computes them, padded to the next of its sizes. Nothing depends on the estimate but speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from typing import cast

import numpy as np
from numpy.typing import NDArray

SAMPLES = 128  # prompt ticks remembered
FEWEST_SAMPLES = 4  # below this nothing is predicted
SMALLEST_CHUNK = 128  # tokens; what a prompt gets however little time there is


def pairs(start: int, count: int) -> float:
    """Query-key pairs of a causal chunk, in millions."""
    return count * (start + count / 2) / 1e6


class CostModel:
    """``sizes`` are the prompt-token counts that ticks are padded to; empty: none are."""

    def __init__(self, sizes: Seq[int] = ()) -> None:
        self._sizes = list(sizes)
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=SAMPLES)
        self._decode_seconds = 0.0  # of the last tick without prompts
        self._least_decode_seconds = float("inf")
        self._weights: tuple[float, float, float] | None = None  # fixed, per token, per million pairs
        self._fresh = 0  # samples since the last fit

    @property
    def sizes(self) -> list[int]:
        """The padded sizes, ascending."""
        return self._sizes

    def padded(self, tokens: int) -> int:
        """Prompt tokens computed for ``tokens``."""
        index = bisect_left(self._sizes, tokens)
        return self._sizes[index] if index < len(self._sizes) else tokens

    def observe(self, decode_rows: int, tokens: int, million_pairs: float, seconds: float) -> None:
        """A tick of ``decode_rows`` and ``tokens`` prompt tokens took ``seconds``."""
        if seconds <= 0:
            return
        if not tokens:
            self._decode_seconds = seconds
            self._least_decode_seconds = min(seconds, self._least_decode_seconds)
            return
        base = self._beyond_least() if decode_rows else 0.0
        self._samples.append((self.padded(tokens), million_pairs, max(seconds - base, 0.0)))
        self._fresh += 1
        # Not in every tick: each time until there is a fit, then now and then.
        if len(self._samples) >= FEWEST_SAMPLES and (self._weights is None or self._fresh >= 8):
            self._fit()

    def _fit(self) -> None:
        self._fresh = 0
        samples = np.array(self._samples)
        # Weighted by 1 / seconds: relative errors count alike in short ticks and long ones.
        scale = 1 / np.maximum(samples[:, 2], 1e-4)
        inputs = np.column_stack((np.ones(len(samples)), samples[:, 0], samples[:, 1])) * scale[:, None]
        # A touch of ridge, in the units of each column, keeps numbers apart that samples do not tell apart.
        norm = np.maximum(np.linalg.norm(inputs, axis=0), 1e-12)
        scaled = inputs / norm
        target = samples[:, 2] * scale
        gram = scaled.T @ scaled + 1e-4 * np.eye(3)
        solved = cast("NDArray[np.float64]", np.linalg.solve(gram, scaled.T @ target)) / norm
        fixed, token, pair = cast(list[float], np.maximum(solved, 0.0).tolist())
        self._weights = (fixed, token, pair)

    def predict(self, decode_rows: int, tokens: int, million_pairs: float) -> float:
        """Seconds of a tick; 0 while nothing is known."""
        if not tokens:
            return self._decode_seconds
        if self._weights is None:
            return 0.0
        base = self._beyond_least() if decode_rows else 0.0
        fixed, token, pair = self._weights
        return base + fixed + token * self.padded(tokens) + pair * million_pairs

    def _beyond_least(self) -> float:
        return max(self._decode_seconds - self._least_decode_seconds, 0.0)

    def budget(self, target: float, decode_rows: int) -> TickBudget | None:
        """A budget of ``target`` seconds for a tick with ``decode_rows``; None while nothing is known."""
        return None if self._weights is None else TickBudget(self, target, decode_rows)


class TickBudget:
    """What is left of one tick's time; implements :class:`helios.runtime.policy.TimeBudget`."""

    def __init__(self, model: CostModel, target: float, decode_rows: int) -> None:
        self._model = model
        self._target = target
        self._decode_rows = decode_rows
        self._tokens = 0
        self._pairs = 0.0

    def cut(self, start: int, count: int) -> int:
        """The most of ``count`` tokens that fit; preferably up to one of the padded sizes."""
        if self._fits(start, count):
            return count
        sizes = self._model.sizes or [1 << power for power in range(4, 14)]
        for size in reversed(sizes):
            room = size - self._tokens
            if 0 < room < count and self._fits(start, room):
                return max(room, min(count, SMALLEST_CHUNK)) if not self._tokens else room
        return 0 if self._tokens else min(count, SMALLEST_CHUNK)

    def add(self, start: int, count: int) -> None:
        """``count`` tokens from position ``start`` are in the tick."""
        self._tokens += count
        self._pairs += pairs(start, count)

    def _fits(self, start: int, count: int) -> bool:
        seconds = self._model.predict(
            self._decode_rows, self._tokens + count, self._pairs + pairs(start, count)
        )
        return seconds <= self._target
