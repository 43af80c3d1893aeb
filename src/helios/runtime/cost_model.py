"""How long a tick will take: fitted to the ticks that ran, used to cut prompt chunks.

    seconds = decode rows * c + fixed + a * prompt tokens + b * query-key pairs

A decode tick takes its least, the time of reading the weights, which prompts read anyway, and ``c`` for each
row, taken from the last tick without prompts. The other three numbers
are a least-squares fit over the last prompt ticks (warm-up supplies the first); prompt tokens are counted as
the runner computes them, with what pads the tick to the next of its sizes. Nothing depends on the estimate but
speed.
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
# A tick with prompts may take as long as this many without, whatever the target: where many rows decode, chunks
# that only filled the target would have their keys and values read again and again for little.
LEAST_DECODE_TICKS = 8


def pairs(start: int, count: int) -> float:
    """Query-key pairs of a causal chunk, in millions."""
    return count * (start + count / 2) / 1e6


class CostModel:
    """``sizes`` are the tokens that ticks with prompts are padded to, decoding rows' included; empty: none are."""

    def __init__(self, sizes: Seq[int] = ()) -> None:
        self._sizes = list(sizes)
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=SAMPLES)
        self._least_decode_seconds = float("inf")
        self._row_seconds = 0.0  # beyond the least, for each row of the last tick without prompts
        self._weights: tuple[float, float, float] | None = None  # fixed, per token, per million pairs
        self._fresh = 0  # samples since the last fit

    @property
    def sizes(self) -> list[int]:
        """The padded sizes, ascending."""
        return self._sizes

    def padded(self, decode_rows: int, tokens: int) -> int:
        """Tokens computed beside ``decode_rows`` for ``tokens`` of prompts."""
        index = bisect_left(self._sizes, decode_rows + tokens)
        return self._sizes[index] - decode_rows if index < len(self._sizes) else tokens

    def observe(self, decode_rows: int, tokens: int, million_pairs: float, seconds: float) -> None:
        """A tick of ``decode_rows`` and ``tokens`` prompt tokens took ``seconds``."""
        if seconds <= 0:
            return
        if not tokens:
            self._least_decode_seconds = min(seconds, self._least_decode_seconds)
            self._row_seconds = (seconds - self._least_decode_seconds) / max(decode_rows, 1)
            return
        base = self._row_seconds * decode_rows
        self._samples.append((self.padded(decode_rows, tokens), million_pairs, max(seconds - base, 0.0)))
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
        base = self._row_seconds * decode_rows
        if not tokens:
            return base + self._least_decode_seconds if decode_rows and self._seen_decode else 0.0
        if self._weights is None:
            return 0.0
        fixed, token, pair = self._weights
        return base + fixed + token * self.padded(decode_rows, tokens) + pair * million_pairs

    @property
    def _seen_decode(self) -> bool:
        return self._least_decode_seconds < float("inf")

    def budget(self, target: float, decode_rows: int) -> TickBudget | None:
        """A budget of ``target`` seconds, or of some ticks without prompts, for a tick with ``decode_rows``; None
        while nothing is known."""
        if self._weights is None:
            return None
        return TickBudget(
            self, max(target, LEAST_DECODE_TICKS * self.predict(decode_rows, 0, 0.0)), decode_rows
        )


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
        sizes = self._model.sizes or [(1 << power) + self._decode_rows for power in range(4, 14)]
        for size in reversed(sizes):
            room = size - self._decode_rows - self._tokens
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
