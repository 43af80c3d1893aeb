"""The demo model in this process, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from helios import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
TEXTS = [
    "The KV cache",
    "Paged attention is",
    "Continuous batching",
    "A prefix cache",
    "The scheduler",
    "Tokens",
]


def question(text: str = "What is paged attention?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HELIOS_", "HF_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def shared_llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_batch_size=4, max_model_len=1024) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Each test must leave nothing behind."""
    yield shared_llm
    assert not shared_llm.has_unfinished
    assert engine_of(shared_llm).num_free_rows == 4
    engine_of(shared_llm).check_integrity()


def engine_of(llm: LLM) -> Any:
    built = llm._built  # pyright: ignore[reportPrivateUsage]
    assert built is not None
    return built.engine
