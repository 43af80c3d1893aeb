"""The engine as a library: ``LLM`` generates, chats, streams and steps in the caller's thread."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, Unpack, cast

import torch
from tokenizers import Tokenizer

from helios.banner import Banner, GenerationBar
from helios.errors import EngineDeadError, InternalError, InvalidRequestError, NotReadyError, RequestError
from helios.library import (
    ChatFields,
    Prepared,
    Preparer,
    Prompts,
    Running,
    TextOrIds,
    as_prompts,
    at_index,
    library_settings,
    one_each,
)
from helios.outputs import Delta, RequestOutput
from helios.runtime.assemble import model_info
from helios.runtime.build import Built, build
from helios.runtime.chat import Message, load_chat_template
from helios.runtime.frontend import new_request_id
from helios.runtime.job_builder import JobBuilder
from helios.runtime.progress import StartupProgress
from helios.runtime.prompt_encoder import PromptEncoder, control_tokens
from helios.runtime.request import Job, SamplingParams

log = logging.getLogger("helios.llm")

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process.

    ``model`` is a folder, a hub repository or ``demo``; by default what the server would serve. Keyword
    arguments are the server's settings (``max_batch_size=64``); they win over ``HELIOS_…`` variables and
    ``.env``. ``progress`` shows loading and generation on a terminal. Raises StartupError.

    There is no thread and no event loop: :meth:`generate`, :meth:`chat`, :meth:`stream` and :meth:`step` run
    the engine where they are called. They may be mixed, and called from several threads; each then also
    moves the others' requests on.
    """

    def __init__(self, model: str | Path | None = None, *, progress: bool = True, **settings: Any) -> None:
        self.settings = library_settings(model, settings)
        self._threads = torch.get_num_threads()
        built = _load(self.settings, progress)
        template = load_chat_template(built.snapshot.folder, control_tokens(built.tokenizer))
        self.model = model_info(self.settings, built)
        encoder = PromptEncoder(built.tokenizer, self.model.max_model_len, built.vocabulary)
        self._prepare = Preparer(JobBuilder(self.settings, template, encoder, self.model), built.grammars)
        self._built: Built | None = built
        self._progress = progress
        self._lock = threading.Lock()  # one tick at a time
        self._backlog: deque[Job] = deque()  # accepted, not yet given to the engine
        self._open: dict[str, Running] = {}  # by request id
        self._updates: deque[Delta] = deque()  # what the next step() returns
        self._dead: str | None = None

    # -- whole answers ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        priorities: Sequence[int] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue one or many prompts (texts or token ids); results are in the order of the prompts.

        ``params`` is one for all or one each; without, the settings' defaults hold and the length is cut to
        what fits. ``priorities`` need ``scheduling_policy="priority"``; lower runs first. A prompt that cannot
        be served raises before anything runs and is named by its place in the list. A request that fails
        later has its ``error`` set, and the others their answers. Ctrl-C ends what is running, and the LLM
        can be used again.
        """
        listed = as_prompts(prompts)
        encoded = self._prepare.texts(listed)
        count = len(encoded)
        each = one_each("params", params, count, SamplingParams)
        order = [0] * count if priorities is None else one_each("priorities", priorities, count, int)
        prepared: list[Prepared] = []
        for index, prompt in enumerate(encoded):
            try:
                prepared.append(self._prepare.completion(prompt, each[index], order[index]))
            except RequestError as error:
                raise (at_index(error, "prompts", index) if count > 1 else error) from None
        return self._run(prepared, "prompts", progress)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: Params = None,
        *,
        priorities: Sequence[int] | None = None,
        progress: bool = True,
        **fields: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Answer one dialogue, or many; otherwise as :meth:`generate`.

        Further fields are those of the HTTP API, such as ``tools``, ``tool_choice``, ``enable_thinking`` and
        ``chat_template_kwargs``. Results have ``text`` (without thinking), ``reasoning``, ``tool_calls`` and
        ``message``.
        """
        single = not messages or not isinstance(messages[0], list)
        dialogues = cast("list[list[Message]]", [messages] if single else messages)
        each = one_each("params", params, len(dialogues), SamplingParams)
        order = [0] * len(each) if priorities is None else one_each("priorities", priorities, len(each), int)
        prepared: list[Prepared] = []
        for index, dialogue in enumerate(dialogues):
            try:
                prepared.append(self._prepare.chat(dialogue, each[index], order[index], fields))
            except RequestError as error:
                raise (at_index(error, "messages", index) if len(each) > 1 else error) from None
        return self._run(prepared, "messages", progress)

    def _run(self, prepared: list[Prepared], name: str, progress: bool) -> list[RequestOutput]:
        left = len(prepared)

        def ended(_: Running) -> None:
            nonlocal left
            left -= 1

        requests: list[Running] = []
        for index, one in enumerate(prepared):
            try:
                requests.append(self._make(one, new_request_id(), on_end=ended))
            except RequestError as error:
                raise (at_index(error, name, index) if len(prepared) > 1 else error) from None
        try:
            with GenerationBar(len(requests), shown=progress and self._progress and len(requests) > 1) as bar:
                self._submit(requests)
                while left:
                    bar.update(len(requests) - left, self._tick())
        except BaseException:
            self._cancel(requests)
            raise
        return [request.output for request in requests if request.output is not None]

    # -- pieces -----------------------------------------------------------------------------------

    def stream(
        self,
        prompt: TextOrIds | list[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **fields: Unpack[ChatFields],
    ) -> Iterator[Delta]:
        """The answer to a text, token ids or a dialogue, as it is generated.

        The request is checked here, and runs while the iterator is read; leaving it early ends the request.
        Raises the error of a request that fails.
        """
        deltas: deque[Delta] = deque()
        prepared = self._prepare.request(prompt, params, priority, fields)
        request = self._make(prepared, new_request_id(), emit=deltas.append)
        return self._deltas(request, deltas)

    def _deltas(self, request: Running, deltas: deque[Delta]) -> Iterator[Delta]:
        try:
            self._submit([request])
            while request.output is None or deltas:
                while deltas:
                    yield deltas.popleft()
                if request.output is None:
                    self._tick()
            if request.output.error is not None:
                raise request.output.error
        finally:
            # Perhaps called by the garbage collector within a tick: the next tick sees it.
            request.job.cancelled = True

    def add_request(
        self,
        prompt: TextOrIds | list[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        **fields: Unpack[ChatFields],
    ) -> str:
        """Queue a text, token ids or a dialogue for :meth:`step`; returns the request's id. Raises
        RequestError."""
        if request_id is not None and request_id in self._open:
            raise InvalidRequestError(f"Invalid 'request_id': {request_id!r} is running.", param="request_id")
        prepared = self._prepare.request(prompt, params, priority, fields)
        request = self._make(prepared, request_id or new_request_id(), emit=self._updates.append)
        self._submit([request])
        return request.job.job_id

    def step(self) -> list[Delta]:
        """Run one tick; returns what it added to the requests of :meth:`add_request`. The last delta of a
        request has the whole ``output``, whose ``error`` is set where it failed."""
        if not self._updates and self._open:
            self._tick()
        updates = list(self._updates)
        self._updates.clear()
        return updates

    def abort(self, request_id: str) -> None:
        """End a request; its last delta says ``abort``. Unknown ids, of requests that have ended, are fine."""
        request = self._open.get(request_id)
        if request is not None:
            self._mark_cancelled([request])

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has something to do or to return."""
        return bool(self._open or self._updates)

    # -- the model --------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._prepare.builder.encoder.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What holds where no parameters are given."""
        return self._prepare.default_params

    def encode(self, text: str) -> list[int]:
        """The token ids of a raw text, as :meth:`generate` encodes it."""
        return self._prepare.builder.encoder.encode_text(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._prepare.builder.encoder.vocabulary.decode(token_ids, skip_special_tokens)

    def report(self) -> dict[str, Any]:
        """Model, device, memory plan and start-up times, as ``/health`` gives them."""
        return self._require().report()

    # -- the engine -------------------------------------------------------------------------------

    def _require(self) -> Built:
        if self._built is None:
            raise NotReadyError("This LLM is closed.", code="closed")
        if self._dead is not None:
            raise EngineDeadError(f"The engine has died ({self._dead}); make a new LLM.")
        return self._built

    def _make(self, prepared: Prepared, request_id: str, **hooks: Any) -> Running:
        """A request that could run. Raises RequestError."""
        engine = self._require().engine
        job = self._prepare.builder.job(prepared.prompt, prepared.params, prepared.options, request_id)
        engine.check_fits(job)
        request = Running(job, prepared, **hooks)
        job.sink = request
        return request

    def _submit(self, requests: list[Running]) -> None:
        now = time.perf_counter()
        for request in requests:
            request.job.timings.queued = now
        with self._lock:
            self._open.update((request.job.job_id, request) for request in requests)
            self._backlog.extend(request.job for request in requests)

    def _feed(self, built: Built) -> None:
        """Keep the engine's queue short: it is looked through in every tick. A policy needs to see it all."""
        waiting, backlog = built.engine.waiting, self._backlog
        room = len(backlog)
        if self.settings.scheduling_policy == "fcfs":
            room = min(room, 2 * built.limits.max_batch_size - len(waiting))
        for _ in range(room):
            waiting.append(backlog.popleft())

    def _tick(self) -> int:
        """One step of the engine; hands its events out. Returns how many tokens came."""
        with self._lock, _InterruptsHeld():
            built = self._require()
            if self._backlog:
                self._feed(built)
            if self._open and not built.engine.has_work:
                raise InternalError("Requests are open, but the engine has none of them.")
            try:
                events = built.engine.step()
            except BaseException as error:
                raise self._die(error) from error
            for event in events:
                request: Any = event.job.sink
                # Most events of a batch are one more token, which the sequence has already.
                if (
                    event.finish_reason is not None
                    or request.wants_all
                    or event.logprobs is not None
                    or event.markers
                ):
                    request.put(event)
                    if request.output is not None:
                        self._open.pop(event.job.job_id, None)
            return len(events)

    def _die(self, error: BaseException) -> BaseException:
        """The engine deals with a failing tick itself; what arrives here has left it in the middle of one."""
        log.error("the engine died: %r", error)
        self._dead = f"{type(error).__name__}: {error}"
        self._open.clear()
        self._backlog.clear()
        if not isinstance(error, Exception):  # a second Ctrl-C
            return error
        return EngineDeadError(f"The engine has died ({self._dead}); make a new LLM.")

    def _mark_cancelled(self, requests: list[Running]) -> None:
        for request in requests:
            request.job.cancelled = True
        with self._lock:
            if self._built is not None and self._backlog:
                self._built.engine.waiting.extend(job for job in self._backlog if job.cancelled)
                self._backlog = deque(job for job in self._backlog if not job.cancelled)

    def _cancel(self, requests: list[Running]) -> None:
        """End what is still running of ``requests``; rows and pages go back at once."""
        running = [request for request in requests if request.job.job_id in self._open]
        if not running or self._built is None or self._dead is not None:
            return
        self._mark_cancelled(running)
        self._tick()

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model's memory; harmless when done twice. What is running ends without a result."""
        built, self._built = self._built, None
        if built is None:
            return
        built.grammars.close()
        on_gpu = built.device.kind == "cuda"
        if on_gpu:
            torch.cuda.synchronize()  # a tick may be on its way
        self._open.clear()
        self._backlog.clear()
        del built
        gc.collect()  # engine and runner refer to each other
        if on_gpu:
            torch.cuda.empty_cache()
        torch.set_num_threads(self._threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(settings: Any, progress: bool) -> Built:
    banner = Banner()
    if not (progress and banner.is_terminal):
        return build(settings, StartupProgress())
    with banner:
        return build(settings, banner.progress(lambda stage: None))


class _InterruptsHeld:
    """Holds Ctrl-C back until the tick has ended, because half a tick would leave the books wrong. A second
    Ctrl-C goes through at once."""

    __slots__ = ("_caught", "_previous")

    def __enter__(self) -> None:
        self._caught: FrameType | bool | None = False
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self._caught is not False:
            self._previous(number, frame)
        self._caught = frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self._caught is not False and error is None:
            self._previous(int(signal.SIGINT), self._caught)
