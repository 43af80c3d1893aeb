"""Where start-up says what it does, and how long each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


def _ignore(*_: object) -> None: ...


@dataclass(slots=True)
class StartupProgress:
    """``stage`` names the step, ``advance(done, total)`` moves within it, ``say`` prints a line.

    ``seconds`` collects the duration of each timed step.
    """

    stage: Callable[[str], object] = _ignore
    advance: Callable[[int, int], object] = _ignore
    say: Callable[[str], object] = _ignore
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def step(self, name: str, key: str) -> Generator[None]:
        """Announce a step and record its duration under ``key``."""
        self.stage(name)
        started = time.perf_counter()
        yield
        self.seconds[key] = round(time.perf_counter() - started, 3)
