"""What a person sees at start-up and while a batch runs: the plan, progress bars, the URL."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from helios.runtime.progress import StartupProgress

BAR_SECONDS = 0.1  # between two paintings of a batch's bar


class Banner:
    """Prints start-up to standard error. Use as a context manager around loading."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self._console,
            # Bars are for terminals; a log file gets one line a stage.
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether a person is looking."""
        return self._console.is_terminal

    def __enter__(self) -> Banner:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def progress(self, set_stage: Callable[[str], object]) -> StartupProgress:
        """Callbacks for the builder; ``set_stage`` also learns each stage (for /health)."""

        def stage(name: str) -> None:
            set_stage(name)
            self._finish_task()
            self._task = self._bars.add_task(name, total=None)
            if not self._console.is_terminal:
                self.say(name)

        def advance(done: int, total: int) -> None:
            if self._task is not None:
                self._bars.update(self._task, completed=done, total=total)

        return StartupProgress(stage, advance, self.say)

    def say(self, line: str) -> None:
        """Print one line above the bars."""
        self._console.print(line, markup=False)

    def fail(self, message: str) -> None:
        """Say why the server cannot start."""
        self._bars.stop()
        self._console.print(f"error: {message}", style="bold red", markup=False)

    def ready(self, url: str, model: str) -> None:
        """Say where the server answers."""
        self._finish_task()
        self._bars.stop()
        self._console.print(
            f"{model} is ready: {url}  (documentation: {url}/docs)", style="bold", markup=False
        )

    def _finish_task(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=1, total=1)
            self._task = None


class GenerationBar:
    """Prompts done and tokens per second of a batch, on standard error; nothing unless it is a terminal."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._shown = shown and self._console.is_terminal
        self._total = total
        self._tokens = 0
        self._next = 0.0
        self._bars: Progress | None = None

    def __enter__(self) -> GenerationBar:
        if self._shown:
            self._started = time.perf_counter()
            self._bars = Progress(
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} prompts  {task.description}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._task = self._bars.add_task("", total=self._total)
            self._bars.start()
        return self

    def update(self, done: int, tokens: int) -> None:
        """``done`` prompts have ended; ``tokens`` came since the last call."""
        if self._bars is None:
            return
        self._tokens += tokens
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + BAR_SECONDS
            rate = self._tokens / (now - self._started)
            self._bars.update(self._task, completed=done, description=f"{rate:,.0f} tokens/s", refresh=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
