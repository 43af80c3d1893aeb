"""``AsyncLLM``: the library beside a running event loop, on the server's worker thread."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from helios.errors import NotReadyError
from helios.library import ChatFields, Prepared, Preparer, Running, TextOrIds, library_settings
from helios.outputs import Delta, RequestOutput
from helios.runtime.assemble import Assembled, assemble
from helios.runtime.chat import Message
from helios.runtime.frontend import new_request_id
from helios.runtime.generation import Generation
from helios.runtime.request import SamplingParams

UNBOUNDED_QUEUE = 1 << 30


class AsyncLLM:
    """A model in this process, for many coroutines at once.

    Takes what :class:`~helios.LLM` takes. Loading blocks; ``await AsyncLLM.create(...)`` loads in a thread.
    Unless ``max_queue_size`` is set, any number of requests may wait. Serves one event loop at a time.
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        loaded = library_settings(model, settings)
        if loaded.max_queue_size is None:
            loaded = loaded.model_copy(update={"max_queue_size": UNBOUNDED_QUEUE})
        self.settings = loaded
        self._threads = torch.get_num_threads()
        assembled = assemble(loaded)
        self.model = assembled.frontend.model
        self._assembled: Assembled | None = assembled
        self._prepare = Preparer(assembled.frontend.builder, assembled.built.grammars)

    @classmethod
    async def create(cls, model: str | Path | None = None, **settings: Any) -> Self:
        """Load without blocking the event loop."""
        return await asyncio.to_thread(cls, model, **settings)

    @property
    def default_params(self) -> SamplingParams:
        """What holds where no parameters are given."""
        return self._prepare.default_params

    async def generate(
        self,
        prompt: TextOrIds | list[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> RequestOutput:
        """Continue a text or token ids, or answer a dialogue. Raises RequestError. Cancelling the task ends
        the request."""
        prepared = await self._prepared(prompt, params, priority, fields)
        generation, request = self._start(prepared, request_id, None)
        try:
            while not generation.ended:
                for _, event in await generation.next_events():
                    request.put(event)
        finally:
            generation.cancel()
        assert request.output is not None
        return request.output

    async def chat(
        self,
        messages: list[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> RequestOutput:
        """Answer one dialogue; the fields are those of :meth:`helios.LLM.chat`. Raises RequestError."""
        return await self.generate(messages, params, priority=priority, request_id=request_id, **fields)

    async def stream(
        self,
        prompt: TextOrIds | list[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncGenerator[Delta]:
        """The answer to a text, token ids or a dialogue, as it is generated. Leaving it early ends the
        request. Raises RequestError."""
        prepared = await self._prepared(prompt, params, priority, fields)
        deltas: list[Delta] = []
        generation, request = self._start(prepared, request_id, deltas)
        try:
            while not generation.ended:
                for _, event in await generation.next_events():
                    request.put(event)
                    yield deltas.pop()
        finally:
            generation.cancel()

    async def aclose(self) -> None:
        """Stop the worker and free the model's memory; running requests end with an error. Harmless when
        done twice."""
        assembled, self._assembled = self._assembled, None
        if assembled is None:
            return
        await assembled.frontend.drain(0.0)
        await asyncio.to_thread(assembled.scheduler.stop)
        assembled.frontend.close()
        assembled.built.grammars.close()
        on_gpu = assembled.built.device.kind == "cuda"
        del assembled
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        torch.set_num_threads(self._threads)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _require(self) -> Assembled:
        if self._assembled is None:
            raise NotReadyError("This AsyncLLM is closed.", code="closed")
        return self._assembled

    async def _prepared(
        self,
        prompt: TextOrIds | list[Message],
        params: SamplingParams | None,
        priority: int,
        fields: ChatFields,
    ) -> Prepared:
        self._require()
        return await asyncio.to_thread(self._prepare.request, prompt, params, priority, fields)

    def _start(
        self, prepared: Prepared, request_id: str | None, deltas: list[Delta] | None
    ) -> tuple[Generation, Running]:
        frontend = self._require().frontend
        generation = frontend.submit(
            [prepared.prompt], prepared.params, prepared.options, request_id or new_request_id()
        )
        emit = None if deltas is None else deltas.append
        return generation, Running(generation.job, prepared, emit)
