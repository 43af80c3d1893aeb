"""How long a tick will take: fitted to the ticks that ran, used to cut prompt chunks.

    seconds = f(tokens) + a * query-key pairs + b * decoding rows

Ticks without prompts tell ``b``: the median of what they take above the least of them, for each row.
``f`` is a line and, where ticks of that size were seen, what they took more or less than it: products of matrices
of a few rows take as long as of one, and those of many are not equally fast. It and ``a`` are least-squares fits
over the last prompt ticks and warm-up's, which are kept, so that hours of short prompts do not make the model
forget long ones. Tokens are counted as the runner computes them, padded to the next of its sizes, decoding rows'
included. Nothing depends on the estimates but speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from statistics import median
from typing import cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SAMPLES = 128  # prompt ticks remembered, beside those of warm-up
FEWEST_SAMPLES = 4  # below this nothing is predicted
FIT_EVERY = 8  # ticks, once there is a fit
KNOTS = np.array([1 << power for power in range(4, 14)], dtype=np.float64)  # tokens; f bends there
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
        self._kept: list[tuple[float, ...]] = []
        # (tokens, million pairs, seconds but for those of decoding rows)
        self._samples: deque[tuple[float, ...]] = deque(maxlen=SAMPLES)
        self._fresh = self._fresh_decode = 0  # samples since the last fit
        self._line: tuple[float, float, float] | None = None  # fixed, per token, per million pairs
        self._bends: Floats = np.zeros(len(KNOTS))  # seconds above the line, at each knot
        self._of_tokens: dict[int, float] = {}  # f, for the sizes that were asked for since the last fit
        # (rows, seconds) of ticks without prompts, and what they say: the least, and more for each row.
        self._decode_ticks: deque[tuple[int, float]] = deque(maxlen=64)
        self._decode_line = (0.0, 0.0)

    @property
    def sizes(self) -> list[int]:
        """The padded sizes, ascending."""
        return self._sizes

    def padded(self, tokens: int) -> int:
        """Tokens computed for ``tokens``."""
        index = bisect_left(self._sizes, tokens)
        return self._sizes[index] if index < len(self._sizes) else tokens

    def observe(self, decode_rows: int, tokens: int, million_pairs: float, seconds: float) -> None:
        """A tick of ``decode_rows`` and ``tokens`` prompt tokens took ``seconds``."""
        if seconds <= 0:
            return
        if not tokens:
            self._decode_ticks.append((decode_rows, seconds))
            self._fresh_decode += 1
            if len(self._decode_ticks) <= FIT_EVERY or self._fresh_decode >= FIT_EVERY:
                self._fit_decode()
            return
        # What decoding is believed to take is never most of it: such a sample would weigh more than all others.
        prompts = max(seconds - self._decode_line[1] * decode_rows, seconds / 2)
        self._samples.append((self.padded(decode_rows + tokens), million_pairs, prompts))
        self._fresh += 1
        if len(self._samples) >= FEWEST_SAMPLES and (self._line is None or self._fresh >= FIT_EVERY):
            self._fit()

    def keep_samples(self) -> None:
        """What was observed so far is warm-up's: it is kept."""
        self._kept = list(self._samples)

    def _fit_decode(self) -> None:
        """A median, since a tick that had to wait for the host tells nothing."""
        self._fresh_decode = 0
        least = min(seconds for _, seconds in self._decode_ticks)
        if self._decode_line[0]:
            least = min(least, self._decode_line[0])
        each = median((seconds - least) / max(rows, 1) for rows, seconds in self._decode_ticks)
        self._decode_line = (least, each)

    def _fit(self) -> None:
        self._fresh = 0
        samples: Floats = np.array([*self._kept, *self._samples])
        tokens, million_pairs, seconds = samples[:, 0], samples[:, 1], samples[:, 2]
        # Weighted by 1 / seconds: relative errors count alike in short ticks and long ones.
        scale = 1 / np.maximum(seconds, 1e-4)
        inputs = np.column_stack((np.ones(len(samples)), tokens, million_pairs))
        line = _least_squares(inputs * scale[:, None], seconds * scale, 1e-4, positive=True)
        hats = np.column_stack([np.interp(tokens, KNOTS, unit) for unit in np.eye(len(KNOTS))])
        bends = _least_squares(hats * scale[:, None], (seconds - inputs @ line) * scale, 1e-2)
        fixed, token, pair = cast(list[float], line.tolist())
        self._line, self._bends, self._of_tokens = (fixed, token, pair), bends, {}

    def predict(self, decode_rows: int, tokens: int, million_pairs: float) -> float:
        """Seconds of a tick; 0 while nothing is known."""
        least, each = self._decode_line
        if not tokens:
            return least + each * decode_rows
        if self._line is None:
            return 0.0
        fixed, token, pair = self._line
        padded = self.padded(decode_rows + tokens)
        seconds = self._of_tokens.get(padded)
        if seconds is None:
            bend = float(np.interp(padded, KNOTS, self._bends))
            seconds = self._of_tokens[padded] = max(fixed + token * padded + bend, 0.0)
        return seconds + pair * million_pairs + each * decode_rows

    def budget(self, target: float, decode_rows: int) -> TickBudget | None:
        """A budget of ``target`` seconds, or of some ticks without prompts, for a tick with ``decode_rows``; None
        while nothing is known."""
        if self._line is None:
            return None
        most = max(target, LEAST_DECODE_TICKS * self.predict(decode_rows, 0, 0.0))
        return TickBudget(self, most, decode_rows)


def _least_squares(inputs: Floats, target: Floats, ridge: float, *, positive: bool = False) -> Floats:
    """A fit with a touch of ridge, in the units of each column: it keeps numbers apart that samples do not tell
    apart, and leaves at zero what no sample speaks of. ``positive``: columns whose number would be negative are
    left out, one after the other."""
    norm = cast("Floats", np.linalg.norm(inputs, axis=0))
    norm[norm == 0] = 1.0
    scaled = inputs / norm
    gram = scaled.T @ scaled + ridge * np.eye(inputs.shape[1])
    moment = scaled.T @ target
    used = list(range(inputs.shape[1]))
    solved = cast("Floats", np.zeros(inputs.shape[1]))
    while used:
        found = cast("Floats", np.linalg.solve(gram[np.ix_(used, used)], moment[used]))
        if not positive or found.min() >= 0:
            solved[used] = found
            break
        del used[int(found.argmin())]
    return solved / norm


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
