"""An engine over the fake model, with a clock that the test moves."""

from __future__ import annotations

from typing import Any

from helios.config import PAGE_SIZE
from helios.runtime.detokenizer import Vocabulary
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.request import FinishReason, Job, SamplingParams, Sequence, Timings, TokenEvent
from tests.conftest import byte_tokenizer
from tests.unit.fakes import END, FakeRunner, FakeStore

TOKENIZER = byte_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of its own for each seed, without the fake model's end token."""
    return [11 + (seed * 101 + position * 7 + position // 89) % 200 for position in range(length)]


def outputs_of(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    """Serve ``jobs`` to their end, check the books, and return each one's output tokens."""
    engine.waiting.extend(jobs)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    for job in jobs:
        assert job.error is None, job.error
    return [job.sequences[0].token_ids[job.num_prompt_tokens :] for job in jobs]


class Bench:
    """``add`` queues a job, ``tick`` runs one engine step and checks the books, ``run`` goes on to the end.

    Each tick takes 10 ms of the bench's clock.
    """

    def __init__(
        self,
        *,
        pages: int = 32,
        batch: int = 4,
        chunk: int = 4096,
        context: int = 4096,
        slots: int = 0,
        **config: Any,
    ) -> None:
        self.now = 1000.0
        self.runner = FakeRunner(pages)
        fields: dict[str, Any] = {"eos_token_ids": frozenset({END})} | config
        self.engine = Engine(
            EngineConfig(
                max_batch_size=batch,
                prefill_chunk_size=chunk,
                num_pages=pages,
                max_model_len=context,
                **fields,
            ),
            self.runner,
            VOCABULARY,
            clock=lambda: self.now,
            store=FakeStore(self.runner, slots) if slots else None,
        )
        self.events: list[TokenEvent] = []

    def add(
        self,
        name: str,
        prompt_ids: list[int],
        max_tokens: int = 4,
        *,
        script: list[int] | None = None,
        salt: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        **params: Any,
    ) -> Job:
        values: dict[str, Any] = {"temperature": 0.0, "ignore_eos": script is None} | params
        job = Job(
            name,
            list(prompt_ids),
            SamplingParams(max_tokens=max_tokens, **values),
            max_tokens=max_tokens,
            cache_salt=salt,
            deadline=deadline,
            priority=priority,
            timings=Timings(received=self.now),
        )
        if script is not None:
            self.runner.scripts[name] = script
        self.engine.check_fits(job)
        self.engine.waiting.append(job)
        return job

    def tick(self, times: int = 1) -> list[TokenEvent]:
        new: list[TokenEvent] = []
        for _ in range(times):
            self.now += 0.01
            new += self.engine.step()
            self.engine.check_integrity()
        self.events += new
        return new

    def run(self, limit: int = 5000) -> None:
        while self.engine.has_work:
            self.tick()
            limit -= 1
            assert limit > 0, "the engine does not come to an end"
        assert self.engine.pool.num_referenced == 0
        assert not self.runner.rows_in_use

    def text(self, job: Job, index: int = 0) -> str:
        return "".join(event.text for event in self.events if event.job is job and event.index == index)

    def ends(self, job: Job) -> list[FinishReason]:
        """Every finish reason that was told, in order."""
        return [
            event.finish_reason
            for event in self.events
            if event.job is job and event.finish_reason is not None
        ]

    def free(self) -> int:
        return self.engine.pool.num_free + self.engine.pool.num_cached_only


def output(job: Job, index: int = 0) -> list[int]:
    sequence: Sequence = job.sequences[index]
    return sequence.token_ids[sequence.num_prompt_tokens :]


__all__ = ["END", "PAGE_SIZE", "TOKENIZER", "VOCABULARY", "Bench", "ids", "output", "prompt"]
