"""The queue and its worker thread over the fake model. Waiting is on events; no test measures time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helios.config import PAGE_SIZE
from helios.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
)
from helios.runtime import scheduler as scheduler_room
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.policy import RowPlan
from helios.runtime.request import FinishReason, Job, SamplingParams, TokenEvent
from helios.runtime.scheduler import Scheduler
from tests.unit.fakes import END, FakePending, FakeRunner
from tests.unit.harness import VOCABULARY, prompt

PATIENCE = 20.0  # seconds; only a failing test waits this long


class GatedRunner(FakeRunner):
    """A forward waits until the gate is open; after ``close_in`` forwards the gate closes by itself."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.close_in = 0
        self.pace = 0.0  # seconds a forward takes at least

    def forward(self, rows: list[RowPlan], samplers: list[int]) -> FakePending:
        self.entered.set()
        time.sleep(self.pace)
        assert self.gate.wait(PATIENCE)
        if self.close_in:
            self.close_in -= 1
            if not self.close_in:
                self.gate.clear()
        return super().forward(rows, samplers)


class Service:
    """A started scheduler and everything it has delivered."""

    def __init__(self, *, batch: int = 4, pages: int = 16, **options: Any) -> None:
        self.runner = GatedRunner(pages)
        config = EngineConfig(
            max_batch_size=batch,
            prefill_chunk_size=4096,
            num_pages=pages,
            max_model_len=2048,
            eos_token_ids=frozenset({END}),
        )
        self.engine = Engine(config, self.runner, VOCABULARY)
        self.scheduler = Scheduler(self.engine, **({"max_queue_size": 100} | options))
        self.batches: list[list[TokenEvent]] = []
        self.news = threading.Condition()
        self.scheduler.deliver = self._deliver
        self.count = 0

    def _deliver(self, events: list[TokenEvent]) -> None:
        with self.news:
            self.batches.append(events)
            self.news.notify_all()

    def job(self, length: int = 10, max_tokens: int = 5) -> Job:
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return Job(f"job{self.count}", prompt(length, self.count), params, max_tokens=max_tokens)

    def submit(self, **options: int) -> Job:
        job = self.job(**options)
        self.scheduler.submit(job)
        return job

    def occupy(self) -> Job:
        """Submit a job and return while its first forward is held at the gate."""
        self.runner.entered.clear()
        self.runner.gate.clear()
        job = self.submit()
        assert self.runner.entered.wait(PATIENCE)
        return job

    def ends(self, job: Job) -> list[FinishReason]:
        with self.news:
            events = [event for batch in self.batches for event in batch if event.job is job]
        return [event.finish_reason for event in events if event.finish_reason is not None]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, "it never came about"
            time.sleep(0.002)

    def wait(self, *jobs: Job) -> None:
        self.wait_for(lambda: all(self.ends(job) for job in jobs))


Start = Callable[..., Service]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(scheduler_room, "IDLE_TURN_SECONDS", 0.01)
    services: list[Service] = []

    def make(**options: Any) -> Service:
        service = Service(**options)
        services.append(service)
        service.scheduler.start()
        return service

    yield make
    for service in services:
        service.runner.gate.set()
        service.scheduler.stop()


def test_jobs_from_many_threads_all_end_once(start: Start) -> None:
    """Would catch a job lost or doubled between the threads."""
    service = start(batch=3)
    jobs: list[Job] = []
    threads = [
        threading.Thread(target=lambda: jobs.extend(service.submit() for _ in range(5))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.wait(*jobs)
    assert len(jobs) == 20
    for job in jobs:
        assert service.ends(job) == [FinishReason.LENGTH]
        assert job.timings.received <= job.timings.queued <= job.timings.admitted <= job.timings.first_token
    assert service.scheduler.snapshot()["finished"] == 20


def test_full_queue_refuses_with_retry_after(start: Start) -> None:
    """Would catch an unbounded queue, or a refusal that does not say when to come back."""
    service = start(batch=1, max_queue_size=2)
    running = service.occupy()
    waiting = [service.submit(), service.submit()]
    with pytest.raises(QueueFullError) as raised:
        service.submit()
    assert raised.value.status == 503
    assert raised.value.retry_after is not None
    assert raised.value.retry_after >= 1
    assert "HELIOS_MAX_QUEUE_SIZE (2)" in raised.value.message
    service.runner.gate.set()
    service.wait(running, *waiting)
    after = service.submit()
    service.wait(after)


def test_queue_counts_jobs_that_the_engine_holds_waiting(start: Start) -> None:
    """Would catch a bound on the inbox only: the engine takes jobs out of it and holds them while they do
    not fit, so the queue would have no bound at all."""
    service = start(batch=1, max_queue_size=3)
    first = service.occupy()
    jobs = [service.submit() for _ in range(3)]
    service.runner.close_in = 1
    service.runner.gate.set()
    service.wait_for(lambda: len(service.engine.waiting) == 3)
    assert service.scheduler.snapshot()["waiting"] == 3
    with pytest.raises(QueueFullError):
        service.submit()
    service.runner.gate.set()
    service.wait(first, *jobs)


def test_prompts_of_one_request_are_queued_all_or_none(start: Start) -> None:
    """Would catch half of a batch of prompts queued before the other half is refused."""
    service = start(batch=1, max_queue_size=3)
    running = service.occupy()
    first = service.submit()
    jobs = [service.job() for _ in range(3)]
    with pytest.raises(QueueFullError):
        service.scheduler.submit(*jobs)
    assert service.scheduler.snapshot()["waiting"] == 1
    with pytest.raises(ContextLengthError):
        service.scheduler.submit(jobs[0], service.job(length=4000))
    assert service.scheduler.snapshot()["waiting"] == 1
    service.scheduler.submit(*jobs[:2])
    assert service.scheduler.snapshot()["waiting"] == 3
    with pytest.raises(InvalidRequestError, match="4 prompts"):  # could never be queued: no use in retrying
        service.scheduler.submit(*[service.job() for _ in range(4)])
    service.runner.gate.set()
    service.wait(running, first, *jobs[:2])


def test_queued_prompt_tokens_are_bounded_but_one_job_always_gets_in(start: Start) -> None:
    """Would catch a limit that locks out a single long prompt for ever."""
    service = start(batch=1, max_queue_tokens=100)
    running = service.occupy()
    long = service.submit(length=500)
    with pytest.raises(
        QueueFullError, match=r"500 prompt tokens are waiting .* HELIOS_MAX_QUEUE_TOKENS \(100\)"
    ):
        service.submit(length=10)
    assert service.scheduler.snapshot()["waiting_tokens"] == 500
    service.runner.gate.set()
    service.wait(running, long)
    service.wait_for(lambda: service.scheduler.snapshot()["waiting_tokens"] == 0)
    service.wait(service.submit(length=90))


def test_what_never_fits_is_refused_at_the_door(start: Start) -> None:
    """Would catch a job that reaches the engine and blocks its queue."""
    service = start(pages=3)
    with pytest.raises(ContextLengthError):
        service.submit(length=1000)
    service.wait(service.submit())


def test_admission_window_starts_jobs_together(start: Start) -> None:
    """Would catch a first tick that leaves without those who arrive right after the first request."""
    service = start(batch=4, batch_wait=PATIENCE)
    jobs = [service.submit()]
    time.sleep(0.05)
    assert service.runner.plans == [], "the first job left alone"
    jobs += [service.submit() for _ in range(3)]  # the window ends early: the batch is full
    service.wait(*jobs)
    assert [name for name, _, _ in service.runner.plans[0]] == [job.job_id for job in jobs]


def test_admission_window_ends(start: Start) -> None:
    """Would catch a lone request that waits for company that does not come."""
    service = start(batch=4, batch_wait=0.02)
    service.wait(service.submit())


def test_busy_engine_does_not_wait_for_company(start: Start) -> None:
    """Would catch a window that holds up running requests each time somebody new arrives."""
    service = start(batch=4, batch_wait=0.0)
    first = service.occupy()
    service.scheduler._batch_wait = 100 * PATIENCE
    second = service.submit()
    service.runner.gate.set()
    service.wait(first, second)


def test_cancelled_jobs_end_within_a_tick(start: Start) -> None:
    """Would catch a cancel that waits for an idle engine, or leaves pages behind."""
    service = start(batch=1)
    service.runner.pace = 0.005
    running = service.submit(max_tokens=1500)
    waiting = service.submit()
    service.wait_for(lambda: running.num_output_tokens > 3)
    service.scheduler.cancel(waiting)
    service.wait(waiting)
    service.scheduler.cancel(running)
    service.wait(running)
    assert service.ends(waiting) == service.ends(running) == [FinishReason.ABORT]
    assert running.num_output_tokens < 1500
    service.wait_for(lambda: service.scheduler.snapshot()["pages_referenced"] == 0)


def test_heartbeat_beats_when_idle_and_stops_when_stuck(start: Start) -> None:
    """Would catch a health check that reports an idle server as stalled, or a stuck one as alive."""
    service = start()
    beats = set()
    for _ in range(3):
        before = service.scheduler._beat
        service.wait_for(lambda before=before: service.scheduler._beat != before)
        beats.add(service.scheduler._beat)
    assert len(beats) == 3
    job = service.occupy()
    stuck = service.scheduler._beat
    service.wait_for(lambda: service.scheduler.heartbeat_age() > 0.1)
    assert service.scheduler._beat == stuck
    assert service.scheduler.is_alive()
    assert service.scheduler.snapshot()["heartbeat_age_seconds"] >= 0.1
    service.runner.gate.set()
    service.wait(job)


def test_broken_tick_leaves_the_worker_alive(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Would catch one failing forward that takes the server down."""
    service = start()
    service.runner.break_next = True
    job = service.submit()
    service.wait(job)
    assert service.ends(job) == [FinishReason.ERROR]
    assert job.job_id in caplog.text
    assert service.scheduler.is_alive()
    again = service.submit()
    service.wait(again)
    assert service.ends(again) == [FinishReason.LENGTH]


def test_dead_worker_ends_every_job_and_refuses_new_ones(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch clients that hang for ever on an engine that is gone, and a server that calls itself
    healthy."""
    service = start(batch=1)
    running = service.occupy()
    waiting = [service.submit(), service.submit()]

    def broken() -> list[TokenEvent]:
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(service.engine, "step", broken)
    service.runner.gate.set()
    service.wait(running, *waiting)
    for job in (running, *waiting):
        assert service.ends(job) == [FinishReason.ERROR]
        assert isinstance(job.error, EngineDeadError)
    service.wait_for(lambda: not service.scheduler.is_alive())
    assert service.scheduler.death_reason == "RuntimeError: the books are wrong"
    with pytest.raises(EngineDeadError, match="the books are wrong"):
        service.submit()
    with pytest.raises(EngineDeadError):
        service.scheduler.cache_snapshot()


def test_calls_run_between_ticks(start: Start) -> None:
    """Would catch the engine's books read or changed in the middle of a tick by another thread."""
    service = start()
    names = [service.scheduler.call(lambda: threading.current_thread().name) for _ in range(2)]
    assert names == ["helios-engine"] * 2
    job = service.occupy()
    answers: list[int] = []
    caller = threading.Thread(
        target=lambda: answers.append(service.scheduler.call(lambda: service.engine.num_ticks))
    )
    caller.start()
    caller.join(0.05)
    assert answers == [], "a call ran while a forward was in progress"
    service.runner.gate.set()
    caller.join(PATIENCE)
    assert len(answers) == 1
    service.wait(job)


def test_failing_call_is_the_callers_affair(start: Start) -> None:
    """Would catch a diagnostic endpoint that kills the engine, or that answers null for a failure."""
    service = start()
    with pytest.raises(ZeroDivisionError):
        service.scheduler.call(lambda: 1 // 0)
    assert service.scheduler.is_alive()
    service.wait(service.submit())


def test_prefix_cache_is_read_and_cleared_between_ticks(start: Start) -> None:
    """Would catch a clear that does nothing, or that frees pages of running requests."""
    service = start()
    service.wait(service.submit(length=2 * PAGE_SIZE + 10))
    assert service.scheduler.cache_snapshot()["num_blocks"] == 2
    assert service.scheduler.snapshot()["pages_cached_only"] == 2
    assert service.scheduler.clear_prefix_cache() == 2
    assert service.scheduler.cache_snapshot()["num_blocks"] == 0
    assert service.scheduler.snapshot()["pages_free"] == 16


def test_idle_engine_forgets_expired_blocks(start: Start) -> None:
    """Would catch a cache that expires only when somebody asks for something."""
    service = start()
    service.wait(service.submit(length=300))
    service.engine.prefix_cache._ttl = 0.0
    service.wait_for(lambda: service.scheduler.snapshot()["pages_free"] == 16)


def test_snapshot_counts_add_up(start: Start) -> None:
    """Would catch wrong numbers in /health and /metrics."""
    service = start(batch=2, max_queue_size=7)
    idle = service.scheduler.snapshot()
    assert (idle["running"], idle["waiting"], idle["waiting_tokens"], idle["ticks"]) == (0, 0, 0, 0)
    assert (idle["max_batch_size"], idle["max_queue_size"], idle["prefill_chunk_size"]) == (2, 7, 4096)
    running = service.occupy()
    waiting = service.submit(length=20)
    now = service.scheduler.snapshot()
    assert (now["running"], now["waiting"], now["waiting_tokens"]) == (1, 1, 20)
    assert now["pages_total"] == 16 == now["pages_free"] + now["pages_referenced"] + now["pages_cached_only"]
    assert now["pages_referenced"] == 1
    service.runner.gate.set()
    service.wait(running, waiting)
    service.wait_for(lambda: service.scheduler.snapshot()["waiting_tokens"] == 0)
    done = service.scheduler.snapshot()
    assert (done["running"], done["waiting"], done["finished"]) == (0, 0, 2)
    assert done["ticks"] == service.engine.num_ticks > 0


def test_each_tick_is_delivered_in_one_call(start: Start) -> None:
    """Would catch a wake-up of the event loop for every sequence."""
    service = start(batch=4, batch_wait=PATIENCE)
    jobs = [service.submit(max_tokens=3) for _ in range(4)]
    service.wait(*jobs)
    assert [len(batch) for batch in service.batches] == [4, 4, 4]


def test_stop_ends_the_thread_and_what_is_left(start: Start) -> None:
    """Would catch jobs without an end, or callers that wait ten seconds, after a stop."""
    service = start(batch=1)
    service.runner.pace = 0.01
    running = service.submit(max_tokens=1500)
    waiting = service.submit()
    service.wait_for(lambda: running.num_output_tokens > 0)
    service.scheduler.stop()
    assert not service.scheduler.is_alive()
    assert not service.scheduler._thread.is_alive()
    for job in (running, waiting):
        assert service.ends(job) == [FinishReason.ERROR]
        assert isinstance(job.error, NotReadyError)
    with pytest.raises(NotReadyError) as raised:
        service.submit()
    assert raised.value.code == "shutting_down"
    with pytest.raises(EngineDeadError):
        service.scheduler.call(lambda: None)
    service.scheduler.stop()  # again: harmless


def test_what_arrives_before_the_next_tick_is_due_is_in_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a worker that takes the queue in before it waits, and one that an arrival does not wake."""
    service = start()
    busy, asked = threading.Event(), threading.Event()
    busy.set()

    def seconds_until_due() -> float:
        asked.set()
        return PATIENCE if busy.is_set() else 0.0

    monkeypatch.setattr(service.engine, "seconds_until_due", seconds_until_due)
    first = service.submit()
    assert asked.wait(PATIENCE)
    assert not service.runner.plans
    busy.clear()
    second = service.submit()
    service.wait(first, second)
    assert {name for name, _, _ in service.runner.plans[0]} == {first.job_id, second.job_id}


def test_calls_and_the_end_do_not_wait_for_a_tick_that_is_not_due(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    monkeypatch.setattr(service.engine, "seconds_until_due", lambda: PATIENCE)
    job = service.submit()
    assert service.scheduler.call(lambda: 7) == 7
    service.scheduler.stop()
    assert not service.scheduler.is_alive()
    assert service.ends(job)
