"""A scheduler without an engine: it answers with scripted or echoed tokens from a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from helios.errors import EngineDeadError, QueueFullError, RequestError
from helios.runtime.detokenizer import Detokenizer, Vocabulary
from helios.runtime.interfaces import TickRecord
from helios.runtime.request import (
    Deliver,
    FinishReason,
    Job,
    Sequence,
    SequenceStatus,
    TokenEvent,
    TokenLogprob,
)

Script = Callable[[Job, int], list[int]]


class FakeScheduler:
    """Runs every job one token of every choice per tick.

    ``script(job, choice)`` gives the output's token ids, the end token included where the model would stop;
    without one the prompt is echoed. Flags make it slow, full, failing or dead.
    """

    def __init__(self, vocabulary: Vocabulary, eos: int, script: Script | None = None) -> None:
        self.deliver: Deliver = lambda events: None
        self.vocabulary = vocabulary
        self.eos = eos
        self.script = script
        self.tick_seconds = 0.0
        self.first_token_seconds = 0.0
        self.queue_size = 1000
        self.fail_after: int | None = None  # tokens after which a job fails
        self.error: RequestError | None = None
        self.dead = False
        self.age = 0.1
        self.jobs: list[Job] = []
        self.cleared = 0
        self.ticks: list[TickRecord] | None = None
        self._running: list[tuple[Job, list[list[int]]]] = []
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, *jobs: Job) -> None:
        if self.dead:
            raise EngineDeadError("The engine has died.")
        if len(self._running) + len(jobs) > self.queue_size:
            raise QueueFullError("The queue is full.", retry_after=2.5)
        for job in jobs:
            job.timings.queued = time.perf_counter()
            self.jobs.append(job)
            self._inbox.put(job)

    def cancel(self, job: Job) -> None:
        job.cancelled = True

    def snapshot(self) -> dict[str, Any]:
        return {"running": len(self._running), "waiting": 0, "pages_total": 8, "pages_referenced": 2}

    def cache_snapshot(self) -> dict[str, Any]:
        return {"blocks": 3, "tokens": 768, "bytes": 1, "capacity": 8, "hashes": [], "hits": 1}

    def tick_log(self) -> list[TickRecord] | None:
        return self.ticks

    def clear_prefix_cache(self) -> int:
        self.cleared += 1
        return 3

    def is_alive(self) -> bool:
        return not self.dead

    def heartbeat_age(self) -> float:
        return self.age

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(5)

    def _work(self) -> None:
        while True:
            try:
                job = self._inbox.get(block=not self._running, timeout=None)
                if job is None:
                    return
                self._admit(job)
                continue
            except queue.Empty:
                pass
            if self.tick_seconds:
                time.sleep(self.tick_seconds)
            events: list[TokenEvent] = []
            for entry in list(self._running):
                self._tick(entry, events)
            if events and not self.dead:
                self.deliver(events)

    def _admit(self, job: Job) -> None:
        if self.first_token_seconds:
            time.sleep(self.first_token_seconds)
        job.timings.admitted = time.perf_counter()
        params = job.params
        outputs: list[list[int]] = []
        for sequence in job.sequences:
            sequence.status = SequenceStatus.RUNNING
            sequence.detokenizer = Detokenizer(
                self.vocabulary,
                params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
            if self.script is None:
                outputs.append([*job.prompt_ids, self.eos])
            else:
                outputs.append(list(self.script(job, sequence.index)))
        if params.prompt_logprobs is not None:
            job.prompt_logprobs = [None] + [
                TokenLogprob(token, -1.5, ((token, -1.5), (0, -2.0))) for token in job.prompt_ids[1:]
            ]
        self._running.append((job, outputs))

    def _tick(self, entry: tuple[Job, list[list[int]]], events: list[TokenEvent]) -> None:
        job, outputs = entry
        if job.cancelled or (self.error is not None and job.num_output_tokens >= (self.fail_after or 0)):
            reason = FinishReason.ABORT if job.cancelled else FinishReason.ERROR
            job.error = None if job.cancelled else self.error
            for sequence in job.sequences:
                if not sequence.is_finished:
                    self._finish(sequence, reason)
                    events.append(TokenEvent(job, sequence.index, [], "", finish_reason=reason))
            self._running.remove(entry)
            return
        for sequence in job.sequences:
            if not sequence.is_finished:
                self._append(sequence, outputs[sequence.index].pop(0), events)
        if job.is_finished:
            job.timings.finished = time.perf_counter()
            self._running.remove(entry)

    def _append(self, sequence: Sequence, token: int, events: list[TokenEvent]) -> None:
        job, params = sequence.job, sequence.job.params
        detokenizer = sequence.detokenizer
        assert detokenizer is not None
        sequence.token_ids.append(token)
        now = time.perf_counter()
        job.timings.first_token = job.timings.first_token or now
        job.timings.last_token = now
        reason, text, match = None, "", None
        if token == self.eos and not params.ignore_eos:
            reason, text = FinishReason.STOP, detokenizer.flush()
        else:
            text, match = detokenizer.push(token)
            if match is not None:
                reason = FinishReason.STOP
            elif sequence.num_output_tokens >= job.max_tokens:
                reason = FinishReason.LENGTH
                text += detokenizer.flush()
        logprobs = None
        if params.logprobs is not None:
            logprobs = [TokenLogprob(token, -0.5, ((token, -0.5), (1, float("-inf"))))]
        if reason is not None:
            self._finish(sequence, reason)
        events.append(
            TokenEvent(
                job, sequence.index, [token], text, detokenizer.take_markers(), logprobs, reason, match
            )
        )

    @staticmethod
    def _finish(sequence: Sequence, reason: FinishReason) -> None:
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
