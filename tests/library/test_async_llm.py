"""AsyncLLM: many requests at once beside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from helios import LLM, AsyncLLM, InvalidRequestError
from helios.errors import NotReadyError, RequestError
from tests.library.conftest import GREEDY, TEXTS, question


@contextlib.asynccontextmanager
async def opened(**settings: object) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.create("demo", device="cpu", max_batch_size=4, max_model_len=1024, **settings)
    async with llm:
        yield llm
        assembled = llm._assembled
        if assembled is not None:
            assert assembled.frontend.num_active == 0
            assembled.scheduler.call(assembled.built.engine.check_integrity)


def test_many_at_once_equal_the_synchronous_answers(llm: LLM) -> None:
    """Would catch answers that change hands, or the server's bounded queue refusing the library's requests."""
    expected = [result.text for result in llm.generate(TEXTS, GREEDY)]
    chat = llm.chat(question(), GREEDY)[0].text

    async def main() -> None:
        async with opened() as other:
            results = await asyncio.gather(*(other.generate(text, GREEDY) for text in TEXTS * 10))
            assert [result.text for result in results] == expected * 10
            assert (await other.chat(question(), GREEDY)).text == chat
            ids = llm.encode(TEXTS[0])
            assert (await other.generate(ids, GREEDY, request_id="r")).request_id == "r"

    asyncio.run(main())


def test_streams_run_side_by_side_and_can_be_left(llm: LLM) -> None:
    """Would catch a stream that blocks the loop, or one that runs on after its reader has gone."""
    expected = [llm.generate(text, GREEDY)[0].text for text in TEXTS[:3]]

    async def main() -> None:
        async with opened() as other:

            async def joined(text: str) -> str:
                deltas = [delta async for delta in other.stream(text, GREEDY)]
                assert [delta.output is not None for delta in deltas[-2:]] == [False, True]
                return "".join(delta.text for delta in deltas)

            assert await asyncio.gather(*(joined(text) for text in TEXTS[:3])) == expected
            stream = other.stream("a", replace(GREEDY, max_tokens=900, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()
            task = asyncio.create_task(other.generate("a", replace(GREEDY, max_tokens=900, ignore_eos=True)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # Takes all four rows, so it waits until those that were left have gone.
            assert len((await other.generate("a", replace(GREEDY, n=4))).outputs) == 4

    asyncio.run(main())


def test_errors_are_raised_and_closing_ends_what_runs() -> None:
    """Would catch an await that never returns after the end, or memory that stays."""

    async def main() -> weakref.ref[object]:
        async with opened() as llm:
            with pytest.raises(InvalidRequestError, match="the prompt is empty"):
                await llm.generate("")
            with pytest.raises(InvalidRequestError, match="'priority'"):
                await llm.generate("a", priority=1)
            endless = replace(GREEDY, max_tokens=1000, ignore_eos=True)
            task = asyncio.create_task(llm.generate("a", endless))
            while not llm._assembled.frontend.num_active:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            engine: weakref.ref[object] = weakref.ref(llm._assembled.built.engine)  # type: ignore[union-attr]
            await llm.aclose()
            with pytest.raises(RequestError):
                await task
            await llm.aclose()
            with pytest.raises(NotReadyError, match="closed"):
                await llm.generate("a")
        return engine

    engine = asyncio.run(main())
    gc.collect()
    assert engine() is None
