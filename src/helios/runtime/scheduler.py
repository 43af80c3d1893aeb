"""The bounded queue and the worker thread that owns the engine.

Any thread may :meth:`submit` and :meth:`cancel`; only the worker touches the engine. Each turn hands all
of its events to ``deliver`` in one call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from helios.errors import EngineDeadError, InvalidRequestError, NotReadyError, QueueFullError, RequestError
from helios.runtime.engine import Engine
from helios.runtime.interfaces import TickRecord
from helios.runtime.request import Deliver, Job, TokenEvent

log = logging.getLogger("helios.scheduler")

IDLE_TURN_SECONDS = 0.5  # the heartbeat of an idle worker
CALL_TIMEOUT_SECONDS = 10.0


class Scheduler:
    """A bounded first-in-first-out queue in front of one engine and its thread.

    ``max_queue_size`` bounds the waiting jobs, ``max_queue_tokens`` their prompt tokens, ``batch_wait`` is
    how long an idle engine waits after a first job for others to join, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue_size: int,
        max_queue_tokens: int | None = None,
        batch_wait: float = 0.0,
    ) -> None:
        self.deliver: Deliver = _discard
        self._engine = engine
        self._max_queue_size = max_queue_size
        self._max_queue_tokens = max_queue_tokens
        self._batch_wait = batch_wait
        self._condition = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._calls: deque[Callable[[], None]] = deque()  # run by the worker between ticks
        self._thread = threading.Thread(target=self._work, name="helios-engine", daemon=True)
        self._stopping = False
        self._dead: str | None = None
        self._beat = time.monotonic()
        self._finish_times: deque[float] = deque(maxlen=64)

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def submit(self, *jobs: Job) -> None:
        """Accept jobs (the prompts of one request), or refuse all of them at once.

        Raises ContextLengthError or InvalidRequestError if one could never run, QueueFullError,
        NotReadyError once stopped, EngineDeadError.
        """
        for job in jobs:
            self._engine.check_fits(job)
        if len(jobs) > self._max_queue_size:
            raise InvalidRequestError(
                f"The request holds {len(jobs)} prompts, but this server queues at most {self._max_queue_size}: "
                f"send fewer at once, or raise HELIOS_MAX_QUEUE_SIZE.",
                param="prompt",
            )
        tokens = sum(job.num_prompt_tokens for job in jobs)
        with self._condition:
            self._check_open()
            self._check_room(len(jobs), tokens)
            now = time.perf_counter()
            for job in jobs:
                job.timings.queued = now
            self._inbox.extend(jobs)
            self._condition.notify()

    def _check_room(self, count: int, tokens: int) -> None:
        waiting = len(self._inbox) + len(self._engine.waiting)
        if waiting + count > self._max_queue_size:
            raise QueueFullError(
                f"The queue is full: {waiting} requests are waiting. Retry later, or raise "
                f"HELIOS_MAX_QUEUE_SIZE ({self._max_queue_size}).",
                retry_after=self._retry_after(waiting),
            )
        limit = self._max_queue_tokens
        queued = self._waiting_tokens() if limit is not None else 0
        if limit is not None and waiting and queued + tokens > limit:
            raise QueueFullError(
                f"The queue is full: {queued} prompt tokens are waiting and this request "
                f"brings {tokens}. Retry later, or raise HELIOS_MAX_QUEUE_TOKENS ({limit}).",
                retry_after=self._retry_after(waiting),
            )

    def cancel(self, job: Job) -> None:
        """End a job at the next tick; its pages go back and its last event says ``abort``."""
        job.cancelled = True
        with self._condition:
            self._condition.notify()

    def is_alive(self) -> bool:
        """False once the worker has died or was stopped."""
        return self._dead is None and self._thread.is_alive()

    @property
    def death_reason(self) -> str | None:
        return self._dead

    def heartbeat_age(self) -> float:
        """Seconds since the worker last began a turn."""
        return time.monotonic() - self._beat

    def stop(self) -> None:
        """End the worker thread after its current tick; jobs that have not ended fail."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=CALL_TIMEOUT_SECONDS)

    def call(self, function: Callable[[], Any], timeout: float | None = CALL_TIMEOUT_SECONDS) -> Any:
        """Run ``function`` on the worker between two ticks and return its result.

        Raises what ``function`` raises, EngineDeadError if the worker is gone, TimeoutError after ``timeout`` seconds.
        """
        done = threading.Event()
        result: list[Any] = []
        failure: list[Exception] = []

        def run() -> None:
            try:
                result.append(function())
            except Exception as error:  # the caller's affair, not the engine's
                failure.append(error)
            finally:
                done.set()

        with self._condition:
            if self._dead is not None or self._stopping:
                raise EngineDeadError("The engine has stopped.")
            self._calls.append(run)
            self._condition.notify()
        if not done.wait(timeout):
            raise TimeoutError("the engine did not answer")
        if failure:
            raise failure[0]
        return result[0]

    def snapshot(self) -> dict[str, Any]:
        """Counts for /health and /metrics. Each number is read as it is: no tick is stopped for it."""
        engine = self._engine
        pool = engine.pool
        with self._condition:
            waiting, waiting_tokens = len(self._inbox) + len(engine.waiting), self._waiting_tokens()
        return {
            "running": engine.config.max_batch_size - engine.num_free_rows,
            "waiting": waiting,
            "waiting_tokens": waiting_tokens,
            "max_batch_size": engine.config.max_batch_size,
            "max_queue_size": self._max_queue_size,
            "prefill_chunk_size": engine.config.prefill_chunk_size,
            "pages_total": pool.num_pages,
            "pages_free": pool.num_free,
            "pages_referenced": pool.num_referenced,
            "pages_cached_only": pool.num_cached_only,
            "ticks": engine.num_ticks,
            "finished": engine.num_finished_jobs,
            "preemptions": engine.num_preemptions,
            "offloaded_blocks": 0 if engine.kv.host is None else engine.kv.host.saved,
            "restored_blocks": 0 if engine.kv.host is None else engine.kv.host.restored,
            "heartbeat_age_seconds": round(self.heartbeat_age(), 3),
        }

    def cache_snapshot(self) -> dict[str, Any]:
        """The prefix cache's books for /internal/cache, read between two ticks."""
        return self.call(self._engine.kv.snapshot)

    def tick_log(self) -> list[TickRecord] | None:
        """The last ticks, oldest first, read between two of them; None where none are kept."""
        if not self._engine.config.tick_log:
            return None
        return self.call(lambda: list(self._engine.tick_log))

    def clear_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""
        return self.call(self._engine.kv.clear)

    # -- the worker -------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._run_calls()
            self._fail_everything(NotReadyError("The server is shutting down.", code="shutting_down"))
        except Exception as error:
            # The engine handles a failing tick itself; what arrives here is a broken engine.
            log.exception("the engine thread died")
            self._die(f"{type(error).__name__}: {error}")

    def _turn(self) -> None:
        engine = self._engine
        with self._condition:
            idle = not engine.has_work
            if idle and not self._inbox and not self._calls and not self._stopping:
                self._condition.wait(IDLE_TURN_SECONDS)
            self._beat = time.monotonic()
            self._wait_until_due()
            if idle and self._inbox and self._batch_wait:
                self._wait_for_company()
            engine.waiting.extend(self._inbox)
            self._inbox.clear()
        self._run_calls()
        if not engine.has_work:
            if idle:
                engine.kv.expire(time.perf_counter())
            return
        self._hand_over(engine.step())

    def _run_calls(self) -> None:
        with self._condition:
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call()

    def _wait_until_due(self) -> None:
        """Leave the next tick open for arrivals while the device has enough to do."""
        while not (self._calls or self._stopping) and (left := self._engine.seconds_until_due()) > 0:
            self._condition.wait(left)

    def _wait_for_company(self) -> None:
        """The admission window: jobs that arrive within it start in the same tick."""
        until = time.monotonic() + self._batch_wait
        while (left := until - time.monotonic()) > 0 and len(
            self._inbox
        ) < self._engine.config.max_batch_size:
            self._condition.wait(left)

    def _hand_over(self, events: list[TokenEvent]) -> None:
        if not events:
            return
        for event in events:
            if event.finish_reason is not None and event.job.is_finished:
                self._finish_times.append(time.monotonic())
        self.deliver(events)

    def _fail_everything(self, error: RequestError) -> None:
        with self._condition:
            self._engine.waiting.extend(self._inbox)
            self._inbox.clear()
        self._hand_over(self._engine.fail_all(error))

    def _die(self, reason: str) -> None:
        with self._condition:
            self._dead = reason
        self._run_calls()
        self._fail_everything(EngineDeadError(f"The engine has died ({reason}); restart the server."))

    # -- helpers ----------------------------------------------------------------------------------

    def _waiting_tokens(self) -> int:
        """Prompt tokens of all waiting jobs. ``copy`` is one step, so the worker may change its queue."""
        return sum(job.num_prompt_tokens for job in (*self._inbox, *self._engine.waiting.copy()))

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"The engine has died ({self._dead}); restart the server.")
        if self._stopping:
            raise NotReadyError("The server is shutting down.", retry_after=5.0, code="shutting_down")

    def _retry_after(self, waiting: int) -> float:
        """Seconds until the queue has probably moved, from the rate of the last finished jobs."""
        times = self._finish_times
        if len(times) < 2 or times[-1] <= times[0]:
            return 1.0
        rate = (len(times) - 1) / (time.monotonic() - times[0])
        return min(max(waiting / rate / 4, 1.0), 60.0)


def _discard(events: list[TokenEvent]) -> None:
    """Before the frontend has set ``deliver``."""
