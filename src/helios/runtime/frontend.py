"""Between the API and the scheduler: prompts become jobs, token events become answers.

Everything here runs on the event loop, except rendering and tokenization (a small thread pool) and
:meth:`Frontend._deliver`, which the worker thread calls once per tick. Nothing here imports FastAPI, and
nothing touches a tensor.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from tokenizers import Tokenizer

from helios.config import Settings
from helios.errors import EngineDeadError, NotReadyError, RequestError, UnsupportedParameterError
from helios.runtime.chat import ChatTemplate, Message, ToolSpec
from helios.runtime.detokenizer import Vocabulary
from helios.runtime.generation import Generation
from helios.runtime.interfaces import TickRecord
from helios.runtime.job_builder import ChatOptions, JobBuilder, JobOptions, ModelInfo, Prompt
from helios.runtime.metrics import Metrics
from helios.runtime.output_parser import OutputParser
from helios.runtime.prompt_encoder import PromptEncoder
from helios.runtime.request import Deliver, Grammar, Job, SamplingParams, Timings, TokenEvent

logger = logging.getLogger(__name__)

_TOKENIZER_THREADS = 2
_ALIVE_CHECK_SECONDS = 1.0
_SHORTEST_HOLD_SECONDS = 0.001  # what an event loop's timer can do


class Scheduler(Protocol):
    """What the frontend and the routes need of the scheduler; all of it callable from any thread."""

    deliver: Deliver

    def submit(self, *jobs: Job) -> None:
        """Queue jobs, all or none. Raises QueueFullError, ContextLengthError, NotReadyError or EngineDeadError."""
        ...

    def cancel(self, job: Job) -> None:
        """Stop a job within a tick; harmless when it has ended."""
        ...

    def snapshot(self) -> dict[str, Any]: ...

    def cache_snapshot(self) -> dict[str, Any]: ...

    def clear_prefix_cache(self) -> int: ...

    def tick_log(self) -> list[TickRecord] | None:
        """The last ticks, oldest first; None where none are kept."""
        ...

    def is_alive(self) -> bool: ...

    def heartbeat_age(self) -> float:
        """Seconds since the worker last turned; it turns at least once a second."""
        ...


class Grammars(Protocol):
    """Compiles constraints on the output; blocks, so it is called in a thread."""

    def compile(self, grammar: Grammar, param: str) -> object:
        """Raises InvalidRequestError naming ``param`` for what cannot be compiled."""
        ...


class Frontend:
    """Builds jobs from prompts and hands their events out. One per server."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        scheduler: Scheduler,
        model: ModelInfo,
        metrics: Metrics,
        *,
        vocabulary: Vocabulary | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.settings = settings
        self.template = template
        self.scheduler = scheduler
        self.model = model
        self.metrics = metrics
        self.encoder = PromptEncoder(tokenizer, model.max_model_len, vocabulary)
        self.builder = JobBuilder(settings, template, self.encoder, model)
        self._grammars = grammars
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="helios-tokenize")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: list[TokenEvent] = []  # not yet handed out
        self._handing_out = False
        self._held_lock = threading.Lock()
        self._active: set[Generation] = set()
        self._alive_check: asyncio.TimerHandle | None = None
        scheduler.deliver = self._deliver
        metrics.watch(scheduler.snapshot)

    # Prompts

    async def encode_chat(
        self, messages: list[Message], tools: list[ToolSpec] | None, options: ChatOptions
    ) -> Prompt:
        """Render and tokenize a dialogue. Raises InvalidRequestError and ContextLengthError."""
        timings = Timings()
        self.builder.require_template()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, self.builder.chat_prompt, messages, tools, options, timings
        )

    async def encode_prompts(self, prompts: Sequence[str | list[int]], param: str = "prompt") -> list[Prompt]:
        """Tokenize raw prompts; token ids are checked and taken as they are."""
        if not any(isinstance(prompt, str) for prompt in prompts):
            return self.builder.prompts(prompts, param)  # a check of ids takes less than a change of threads
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.builder.prompts, prompts, param)

    async def check_grammar(self, grammar: Grammar | None, param: str) -> None:
        """Compile a constraint before the request is queued, so that what cannot be done is a 400."""
        if grammar is None:
            return
        if self._grammars is None:
            raise UnsupportedParameterError("This server has no constrained output.", param=param)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._grammars.compile, grammar, param)

    # Jobs

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, options: JobOptions, request_id: str
    ) -> Generation:
        """Queue one job per prompt, all or none.

        Raises ContextLengthError, and what the scheduler raises (QueueFullError …).
        """
        self._bind_loop()
        try:
            generation = self._build(prompts, params, options, request_id)
            self.scheduler.submit(*generation.jobs)
        except RequestError as error:
            self.metrics.observe_rejection(error.code or "error")
            raise
        self._active.add(generation)
        return generation

    def _build(
        self, prompts: Sequence[Prompt], params: SamplingParams, options: JobOptions, request_id: str
    ) -> Generation:
        generation = Generation(self.scheduler, self.metrics, self._active.discard)
        for number, prompt in enumerate(prompts):
            job_id = request_id if len(prompts) == 1 else f"{request_id}-{number}"
            generation.add(self.builder.job(prompt, params, options, job_id))
        return generation

    def output_parser(self, *, tools: bool, starts_in_thinking: bool, incremental: bool) -> OutputParser:
        """A parser for one choice of a chat."""
        return OutputParser(
            self.encoder.structural,
            self.encoder.marker_lengths,
            tools=tools,
            starts_in_thinking=starts_in_thinking,
            incremental=incremental,
        )

    # Events

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._alive_check = loop.call_later(_ALIVE_CHECK_SECONDS, self._check_alive)

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Called by the worker thread with all events of a tick.

        While the event loop still writes those of the last tick, and as long again, new ones are held and then
        go out together. A few streams never notice. With hundreds, the loop and the worker fight for the
        interpreter, and it is the writes that can be fewer: several tokens in each.
        """
        loop = self._loop
        if loop is None:
            return
        with self._held_lock:
            self._held += events
            if self._handing_out:
                return
            self._handing_out = True
        try:
            loop.call_soon_threadsafe(self._dispatch)
        except RuntimeError:
            logger.debug("events dropped: the event loop is closed")

    def _dispatch(self) -> None:
        with self._held_lock:
            events, self._held = self._held, []
            if not events:
                self._handing_out = False
                return
        started, busy = time.perf_counter(), time.thread_time()
        try:
            for event in events:
                sink = event.job.sink
                if sink is not None:
                    sink.put(event)
        finally:
            # After the requests that were woken just now: the loop runs callbacks in order.
            asyncio.get_running_loop().call_soon(self._dispatch_again, started, busy)

    def _dispatch_again(self, started: float, busy: float) -> None:
        """Everything that :meth:`_dispatch` has begun is written: go on with what has come, but leave the
        worker at least as much time as the loop has worked."""
        wait = started + 2 * (time.thread_time() - busy) - time.perf_counter()
        if wait < _SHORTEST_HOLD_SECONDS:
            self._dispatch()
        else:
            asyncio.get_running_loop().call_later(wait, self._dispatch)

    def _check_alive(self) -> None:
        """A dead worker delivers nothing more, so its waiting requests are ended here."""
        if self._active and not self.scheduler.is_alive():
            self.fail_all(EngineDeadError("The engine has stopped; the server must be restarted."))
        if self._loop is not None:
            self._alive_check = self._loop.call_later(_ALIVE_CHECK_SECONDS, self._check_alive)

    # Ending

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    def fail_all(self, error: RequestError) -> None:
        """End every running request with an error: an event in a stream, a status otherwise."""
        for generation in list(self._active):
            generation.fail(error)

    async def drain(self, timeout: float) -> None:
        """Let running requests finish for ``timeout`` seconds, then end the rest with an error."""
        deadline = time.perf_counter() + timeout
        while self._active and time.perf_counter() < deadline:
            await asyncio.sleep(0.02)
        self.fail_all(NotReadyError("The server is shutting down.", code="shutting_down"))

    def close(self) -> None:
        """Release the tokenizer threads and the timer."""
        if self._alive_check is not None:
            self._alive_check.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)


def new_request_id() -> str:
    """A request id made here; ids that clients send are only ever labels."""
    return uuid.uuid4().hex
