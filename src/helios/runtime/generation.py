"""The running answer to one request, on the event-loop side.

The worker thread hands a tick's events over in one call; each event goes to the lane of its job, and from
there to the request that waits for it. A request waits for *all* events that have arrived, so a slow
client gets several in one write instead of a growing line of wake-ups.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from helios.errors import InternalError, RequestError
from helios.runtime.metrics import Metrics
from helios.runtime.request import FinishReason, Job, TokenEvent


class Canceller(Protocol):
    """The part of the scheduler that a running answer needs."""

    def cancel(self, job: Job) -> None:
        """Stop a job within a tick; harmless when it has ended."""
        ...


class RequestCancelledError(RequestError):
    """The client has gone; nobody reads this."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class _Lane:
    """The sink of one job inside a Generation: knows which choices are its own."""

    __slots__ = ("_first_choice", "_generation", "_last_time", "open_choices")

    def __init__(self, generation: Generation, first_choice: int, choices: int) -> None:
        self._generation = generation
        self._first_choice = first_choice
        self._last_time = [0.0] * choices
        self.open_choices = choices

    def put(self, event: TokenEvent) -> None:
        """Take one event; called on the event loop."""
        now = time.perf_counter()
        last = self._last_time[event.index]
        self._last_time[event.index] = now
        metrics = self._generation.metrics
        metrics.generation_tokens += len(event.token_ids)
        if last and event.token_ids:
            metrics.inter_token_latency.observe((now - last) / len(event.token_ids))
        if event.finish_reason is not None and self.open_choices:
            self.open_choices = 0 if event.finish_reason is FinishReason.ERROR else self.open_choices - 1
            if not self.open_choices:
                metrics.observe_finished(event.job)
        self._generation.accept(self._first_choice + event.index, event)


class Generation:
    """One request's jobs (one per prompt) and their events in order.

    Choices are numbered as OpenAI does: prompt 0's ``n`` choices first. Use :meth:`next_events` until
    :attr:`ended`, or iterate. Whoever stops early must call :meth:`cancel`. ``on_end`` is called once
    nothing more will run.
    """

    def __init__(self, scheduler: Canceller, metrics: Metrics, on_end: Callable[[Generation], None]) -> None:
        self.metrics = metrics
        self.jobs: list[Job] = []
        self.num_choices = 0
        self.completion_tokens = 0
        self._scheduler = scheduler
        self._on_end = on_end
        self._open_choices = 0
        self._events: list[tuple[int, TokenEvent]] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    @property
    def job(self) -> Job:
        """The first job."""
        return self.jobs[0]

    @property
    def ended(self) -> bool:
        """True when every choice has finished and every event was taken."""
        return not self._open_choices and not self._events and self._error is None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once however many choices it has."""
        return sum(job.num_prompt_tokens for job in self.jobs)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held."""
        return sum(job.num_cached_tokens for job in self.jobs)

    def add(self, job: Job) -> None:
        """Make a job part of this answer and its events come here."""
        job.sink = _Lane(self, self.num_choices, job.params.n)
        self.jobs.append(job)
        self.num_choices += job.params.n
        self._open_choices += job.params.n

    def accept(self, choice: int, event: TokenEvent) -> None:
        """Take one event from a lane."""
        if self._error is not None:
            return
        reason = event.finish_reason
        if reason is not None:
            if reason in (FinishReason.ERROR, FinishReason.ABORT):
                self.fail(event.job.error or InternalError("The request was aborted."))
                return
            self._open_choices -= 1
            if not self._open_choices:
                self._on_end(self)
        self.completion_tokens += len(event.token_ids)
        self._events.append((choice, event))
        self._wake()

    def interrupt(self) -> None:
        """Let a waiting :meth:`next_events` return without events."""
        self._woken = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: RequestError) -> None:
        """Stop all jobs within a tick; the reader gets the error after what has already arrived."""
        if self._error is None and self._open_choices:
            self._error = error
            self._on_end(self)
            for job in self.jobs:
                if not job.is_finished and not job.cancelled:
                    job.cancelled = True
                    self._scheduler.cancel(job)
        self._wake()

    def cancel(self) -> None:
        """Stop all jobs within a tick, for a client that has gone."""
        self.fail(RequestCancelledError("The client has disconnected."))

    async def next_events(self) -> list[tuple[int, TokenEvent]]:
        """All waiting (choice, event) pairs, or the next ones to come.

        Empty when interrupted or when everything has ended. Raises the RequestError that ended a job.
        """
        while True:
            if self._events:
                events, self._events = self._events, []
                return events
            if self._error is not None:
                raise self._error
            if self._woken or not self._open_choices:
                self._woken = False
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        try:
            while not self.ended:
                for pair in await self.next_events():
                    yield pair
        finally:
            self.cancel()
