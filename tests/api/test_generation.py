"""Events on their way from the worker to a request."""

from __future__ import annotations

import asyncio

import pytest

from helios.errors import InternalError, RequestError
from helios.runtime.generation import Generation
from helios.runtime.metrics import Metrics, token_buckets
from helios.runtime.request import FinishReason, Job, SamplingParams, SequenceStatus, TokenEvent


class Cancelled:
    """Records what was cancelled."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def cancel(self, job: Job) -> None:
        self.jobs.append(job)


def make(num_jobs: int = 1, n: int = 1) -> tuple[Generation, Cancelled, list[Generation], Metrics]:
    scheduler, ended = Cancelled(), []
    metrics = Metrics("m", 100)
    generation = Generation(scheduler, metrics, ended.append)
    for number in range(num_jobs):
        generation.add(Job(str(number), [1, 2], SamplingParams(n=n), max_tokens=5))
    return generation, scheduler, ended, metrics


def put(job: Job, index: int = 0, reason: FinishReason | None = None) -> None:
    if reason is not None:
        job.sequences[index].status = SequenceStatus.FINISHED
        job.sequences[index].finish_reason = reason
    assert job.sink is not None
    job.sink.put(TokenEvent(job, index, [7], "x", finish_reason=reason))


def test_waiting_events_come_in_one_batch() -> None:
    """A slow client must get what has gathered in one write, not a wake-up for each token."""
    generation, _, ended, _ = make()

    async def go() -> None:
        for _ in range(3):
            put(generation.job)
        assert len(await generation.next_events()) == 3
        waiting = asyncio.create_task(generation.next_events())
        await asyncio.sleep(0)
        put(generation.job, reason=FinishReason.STOP)
        assert [event.finish_reason for _, event in await waiting] == [FinishReason.STOP]
        assert generation.ended
        assert await generation.next_events() == []

    asyncio.run(go())
    assert ended == [generation]
    assert generation.completion_tokens == 4


def test_choices_are_numbered_over_all_jobs() -> None:
    generation, _, _, metrics = make(num_jobs=2, n=2)

    async def go() -> list[int]:
        for job in generation.jobs:
            for index in (1, 0):
                put(job, index, FinishReason.STOP)
        return [choice for choice, _ in await generation.next_events()]

    assert asyncio.run(go()) == [1, 0, 3, 2]
    assert metrics.finished["stop"] == 4
    assert metrics.request_prompt_tokens.count == 2


def test_an_error_comes_after_what_arrived_and_stops_the_rest() -> None:
    """One prompt of a batch fails: the request ends, and its other jobs must not run on."""
    generation, scheduler, ended, metrics = make(num_jobs=2)
    first, second = generation.jobs

    async def go() -> None:
        put(first)
        first.error = InternalError("broken")
        put(first, reason=FinishReason.ERROR)
        put(second)
        assert len(await generation.next_events()) == 1
        with pytest.raises(RequestError, match="broken"):
            await generation.next_events()

    asyncio.run(go())
    assert scheduler.jobs == [second]
    assert ended == [generation]
    assert metrics.finished["error"] == 1


def test_cancelling_wakes_the_reader() -> None:
    """Whoever waits for a cancelled request must not wait for ever."""
    generation, scheduler, _, metrics = make()

    async def go() -> None:
        waiting = asyncio.create_task(generation.next_events())
        await asyncio.sleep(0)
        generation.cancel()
        with pytest.raises(RequestError):
            await waiting

    asyncio.run(go())
    assert scheduler.jobs == [generation.job]
    put(generation.job, reason=FinishReason.ABORT)
    assert metrics.finished["abort"] == 1


def test_iterating_to_the_middle_cancels() -> None:
    generation, scheduler, _, _ = make()

    async def go() -> None:
        put(generation.job)
        iterator = aiter(generation)
        await anext(iterator)
        await iterator.aclose()

    asyncio.run(go())
    assert scheduler.jobs == [generation.job]


def test_token_buckets_reach_the_context() -> None:
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
