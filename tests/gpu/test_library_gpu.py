"""LLM on a GPU: lookahead, interrupts and memory that comes back."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch

from helios import LLM
from tests.library.conftest import GREEDY, TEXTS, engine_of

pytestmark = pytest.mark.gpu


def test_closing_gives_the_memory_back_for_the_next_model() -> None:
    """Would catch captured graphs or pools that outlive their LLM: the second one would not fit."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    texts: list[list[str]] = []
    for _ in range(2):
        with LLM("demo", device="cuda", max_batch_size=8, num_pages=256) as llm:
            texts.append([result.text for result in llm.generate(TEXTS, GREEDY)])
        assert torch.cuda.memory_reserved() - before < 256 << 20
    assert texts[0] == texts[1]


def test_an_interrupt_with_a_tick_in_flight_leaves_the_books_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch Ctrl-C losing the tick that lookahead has on the device."""
    with LLM("demo", device="cuda", max_batch_size=8, num_pages=256) as llm:
        engine = engine_of(llm)
        step, calls = engine.step, []

        def interrupted() -> object:
            calls.append(1)
            if len(calls) == 4:
                signal.raise_signal(signal.SIGINT)
            return step()

        monkeypatch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS * 20, replace(GREEDY, ignore_eos=True))
        monkeypatch.undo()
        assert not llm.has_unfinished
        engine.check_integrity()
        assert len(llm.generate(TEXTS, GREEDY)) == len(TEXTS)
        stream = llm.stream(TEXTS[0], replace(GREEDY, ignore_eos=True))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.generate(TEXTS[0], GREEDY)[0].error is None
        engine.check_integrity()
