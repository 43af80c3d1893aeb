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

from helios.errors import EngineDeadError, NotReadyError, QueueFullError, RequestError
from helios.runtime.engine import Engine
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
        # Waiting jobs that have left the inbox: the worker's view, published for the door.
        self._num_waiting_in_engine = 0
        self._waiting_tokens = 0
        self._finish_times: deque[float] = deque(maxlen=64)

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Accept a job, or refuse it at once.

        Raises ContextLengthError or InvalidRequestError if it could never run, QueueFullError,
        NotReadyError once stopped, EngineDeadError.
        """
        self._engine.check_fits(job)
        with self._condition:
            self._check_open()
            waiting = len(self._inbox) + self._num_waiting_in_engine
            if waiting >= self._max_queue_size:
                raise QueueFullError(
                    f"The queue is full: {waiting} requests are waiting. Retry later, or raise "
                    f"HELIOS_MAX_QUEUE_SIZE ({self._max_queue_size}).",
                    retry_after=self._retry_after(waiting),
                )
            limit = self._max_queue_tokens
            if limit is not None and waiting and self._waiting_tokens + job.num_prompt_tokens > limit:
                raise QueueFullError(
                    f"The queue is full: {self._waiting_tokens} prompt tokens are waiting and this request "
                    f"brings {job.num_prompt_tokens}. Retry later, or raise HELIOS_MAX_QUEUE_TOKENS ({limit}).",
                    retry_after=self._retry_after(waiting),
                )
            job.timings.queued = time.perf_counter()
            self._inbox.append(job)
            self._waiting_tokens += job.num_prompt_tokens
            self._condition.notify()

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
        """End the worker thread after its current tick."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=CALL_TIMEOUT_SECONDS)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the worker between two ticks and return its result.

        Raises EngineDeadError if the worker is gone, TimeoutError after ten seconds.
        """
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(function())
            finally:
                done.set()

        with self._condition:
            if self._dead is not None or self._stopping:
                raise EngineDeadError("The engine has stopped.")
            self._calls.append(run)
            self._condition.notify()
        if not done.wait(CALL_TIMEOUT_SECONDS):
            raise TimeoutError("the engine did not answer")
        return result[0] if result else None

    def snapshot(self) -> dict[str, Any]:
        """Counts for /health and /metrics. Each number is read as it is: no tick is stopped for it."""
        engine = self._engine
        pool = engine.pool
        return {
            "running": engine.config.max_batch_size - engine.num_free_rows,
            "waiting": len(self._inbox) + self._num_waiting_in_engine,
            "waiting_tokens": self._waiting_tokens,
            "max_batch_size": engine.config.max_batch_size,
            "max_queue_size": self._max_queue_size,
            "prefill_chunk_size": engine.config.prefill_chunk_size,
            "pages_total": pool.num_pages,
            "pages_free": pool.num_free,
            "pages_referenced": pool.num_referenced,
            "pages_cached_only": pool.num_cached_only,
            "ticks": engine.num_ticks,
            "finished": engine.num_finished_jobs,
            "preemptions": 0,
            "heartbeat_age_seconds": round(self.heartbeat_age(), 3),
        }

    def cache_snapshot(self) -> dict[str, Any]:
        """The prefix cache's books for /internal/cache, read between two ticks."""
        return self.call(self._engine.cache_snapshot)

    def clear_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many there were."""
        return self.call(self._engine.prefix_cache.clear)

    # -- the worker -------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._turn()
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
            if idle and self._inbox and self._batch_wait:
                self._wait_for_company()
            engine.waiting.extend(self._inbox)
            self._num_waiting_in_engine = len(engine.waiting)
            self._inbox.clear()
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call()
        if not engine.has_work:
            if idle:
                engine.prefix_cache.expire(time.perf_counter())
            return
        events = engine.step()
        with self._condition:
            self._num_waiting_in_engine = len(engine.waiting)
            self._waiting_tokens = sum(job.num_prompt_tokens for job in (*engine.waiting, *self._inbox))
        self._hand_over(events)

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
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call()
        self._fail_everything(EngineDeadError(f"The engine has died ({reason}); restart the server."))

    # -- helpers ----------------------------------------------------------------------------------

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
