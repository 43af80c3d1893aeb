"""How a tick's events get from the worker to the requests, and when they wait."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from helios.runtime import frontend as module
from helios.runtime.frontend import Frontend
from helios.runtime.request import Job, SamplingParams, TokenEvent


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test; pytest sees its fixtures."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class Sink:
    """Remembers when each event came, in event-loop turns."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def put(self, event: TokenEvent) -> None:
        self.tokens.append(event.token_ids)


def tick(job: Job, token: int) -> list[TokenEvent]:
    return [TokenEvent(job, 0, [token], "x")]


@pytest.fixture
def delivery(make_server: Any) -> tuple[Frontend, Job, Sink]:
    frontend = make_server().frontend
    job, sink = Job("a", [1], SamplingParams(), max_tokens=9), Sink()
    job.sink = sink
    return frontend, job, sink


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_event_loop
async def test_every_event_comes_once_and_in_order(delivery: tuple[Frontend, Job, Sink]) -> None:
    """Would catch events that are held and never handed out, twice, or past each other."""
    frontend, job, sink = delivery
    frontend._bind_loop()

    def produce() -> None:
        for token in range(300):
            frontend._deliver(tick(job, token))
            if token % 40 == 0:
                time.sleep(0.002)

    await asyncio.to_thread(produce)
    await asyncio.sleep(0.05)
    assert sink.tokens == [[token] for token in range(300)]


@in_event_loop
async def test_a_tick_that_comes_while_the_last_is_written_waits_as_long_again(
    delivery: tuple[Frontend, Job, Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch an event loop that leaves the worker no time, and a quiet one that holds tokens back."""
    frontend, job, sink = delivery
    frontend._bind_loop()
    frontend._deliver(tick(job, 1))
    await settle()
    frontend._deliver(tick(job, 2))
    await settle()
    assert sink.tokens == [[1], [2]], "nothing was held while the loop had nothing to do"

    worked = iter([0.0, 0.02])  # writing the third tick takes the loop 20 ms of work
    monkeypatch.setattr(module.time, "thread_time", lambda: next(worked, 1.0))
    frontend._deliver(tick(job, 3))
    await settle()
    frontend._deliver(tick(job, 4))
    frontend._deliver(tick(job, 5))
    await settle()
    assert sink.tokens[2:] == [[3]], "the worker's turn"
    monkeypatch.undo()
    await asyncio.sleep(0.06)
    assert sink.tokens[2:] == [[3], [4], [5]]


@in_event_loop
async def test_a_failing_request_does_not_stop_the_others(delivery: tuple[Frontend, Job, Sink]) -> None:
    """Would catch a delivery that stays marked as under way after an error, and holds everything for ever."""
    frontend, job, sink = delivery
    frontend._bind_loop()
    broken = Job("b", [1], SamplingParams(), max_tokens=9)

    class Broken:
        def put(self, event: TokenEvent) -> None:
            raise RuntimeError("a sink that breaks")

    broken.sink = Broken()
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    frontend._deliver(tick(broken, 1))
    await settle()
    frontend._deliver(tick(job, 2))
    await settle()
    assert sink.tokens == [[2]]
    assert len(errors) == 1
