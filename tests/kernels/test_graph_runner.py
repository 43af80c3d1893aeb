"""The graph runner without a GPU: its kernels in Triton's interpreter, its graphs as calls, through the engine.

What graphs do to a step (fixed addresses, state that stays on the device between ticks, padding, the division of
a mixed tick) is all here; only capturing is not. tests/gpu has the same comparison on a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

pytest.importorskip("triton")

from helios.kernels.common import available
from helios.kernels.prefill_attention import PrefillConfig
from helios.runtime import graph_runner
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.graph_runner import GraphRunner
from helios.runtime.prefill_backend import CLASSES, PrefillBackend, triton_candidate
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.fused import TokenInputs
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.qwen3.weights import build_empty, load_weights
from helios.runtime.request import Job, SamplingParams
from helios.runtime.runner import ModelRunner
from tests.model.checkpoints import TINY, random_tensors, write
from tests.unit.harness import VOCABULARY, outputs_of

CPU = torch.device("cpu")
ROWS, PAGES, CHUNK, CONTEXT = 4, 24, 32, 512
TOKENS = (8, 16, 32)  # of mixed graphs: the interpreter computes padding too
GREEDY = SamplingParams(temperature=0)
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() or not available(CPU), reason="runs where the interpreter is"
    ),
    # Padding tokens' values are whatever the memory held; numpy speaks up where they overflow.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class Called:
    """In the place of a CUDA graph: calls the step again."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class InterpretedRunner(GraphRunner):
    replays: list[str]

    def _capture(self, step: Callable[[], None]) -> Any:
        return Called(step)

    def _replay_mixed(self, *arguments: Any) -> list[int]:
        self.replays.append("mixed")
        return super()._replay_mixed(*arguments)

    def _decode(self, *arguments: Any) -> list[int]:
        self.replays.append("decode")
        return super()._decode(*arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write(folder, random_tensors(TINY), TINY)
    model = build_empty(ModelConfig.from_folder(folder), CONTEXT, CPU, torch.float32)
    load_weights(model, folder)
    return model


@pytest.fixture
def engines(model: Qwen3) -> Iterator[tuple[Engine, Engine]]:
    """One over graphs, with lookahead, and one over the plain runner."""
    with pytest.MonkeyPatch.context() as patch:
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        patch.setattr(torch.cuda, "Event", lambda **options: event)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(graph_runner, "multiprocessors", lambda device: 4)
        small = triton_candidate(PrefillConfig(block_m=32, block_n=64, num_warps=4, num_stages=2))
        patch.setattr(graph_runner, "choose_prefill", lambda *a, **k: PrefillBackend([small] * len(CLASSES)))
        patch.setattr(graph_runner, "MIXED_TOKENS", TOKENS)
        yield engine_of(model, InterpretedRunner), engine_of(model, ModelRunner)


def engine_of(model: Qwen3, kind: type[ModelRunner]) -> Engine:
    cache = KVCache(model.config, PAGES, CPU, torch.float32)
    runner = kind(
        model, cache, max_tokens=CHUNK, max_rows=ROWS, max_model_len=CONTEXT, vocabulary_size=512,
        end_token_ids=frozenset({258}),
    )  # fmt: skip
    if isinstance(runner, InterpretedRunner):
        runner.replays = []
        runner.prepare(tune_seconds=0, max_tokens=CHUNK, pdl=False)
    cache.data[:, :, 1:] = torch.nan
    graphs = isinstance(runner, GraphRunner)
    return Engine(
        EngineConfig(ROWS, CHUNK, PAGES, CONTEXT, frozenset(), lookahead=graphs), runner, VOCABULARY
    )


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, lengths: list[int]
) -> list[list[int]]:
    jobs = [
        Job(f"j{n}", ids, params, max_tokens=length)
        for n, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return outputs_of(engine, jobs)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[(7 * n + 3 * at * at) % 250 for at in range(length)] for n, length in enumerate(lengths, 1)]


def runner_of(engine: Engine) -> InterpretedRunner:
    assert isinstance(engine._runner, InterpretedRunner)
    return engine._runner


def test_greedy_tokens_equal_the_plain_path(engines: tuple[Engine, Engine]) -> None:
    """More sequences than rows, prompts of several chunks and of one token, rows that end at different times:
    would catch a wrong row, slot, position, page or logit row in a mixed graph, a prompt's token overwritten
    by a padding row's attention, stale state after the rows change, and a token lost or doubled by lookahead."""
    graphs, plain = engines
    prompts, lengths = prompts_of(40, 1, 20, 32, 5), [3, 6, 2, 4, 5]
    expected = run(plain, prompts, GREEDY, lengths)
    assert run(graphs, prompts, GREEDY, lengths) == expected
    assert {"mixed", "decode"} <= set(runner_of(graphs).replays)


def test_a_fully_cached_prompt_is_computed_beside_others(engines: tuple[Engine, Engine]) -> None:
    """Its last token is a decoding row of a mixed tick that may not write to the shared page."""
    graphs, plain = engines
    prompts = prompts_of(256, 20)
    expected = run(plain, prompts, GREEDY, [1, 2])
    # A whole page through the interpreter would take half a minute: the plain path fills it.
    runner = runner_of(graphs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "forward", partial(ModelRunner.forward, runner))
        patch.setattr(runner, "sample", partial(ModelRunner.sample, runner))
        patch.setattr(runner, "collect", partial(ModelRunner.collect, runner))
        run(graphs, prompts[:1], GREEDY, [1])
    assert not runner.replays
    (block,) = graphs.prefix_cache.blocks()
    shared = runner.cache.data[:, :, block.page]
    shared[..., -1, :, :] *= 1.001  # a mark that writing the last token again would remove
    before = shared.clone()
    assert run(graphs, prompts, GREEDY, [1, 2]) == expected
    assert torch.equal(shared, before)
    assert graphs.prefix_cache.hit_tokens == 255  # all but the last token, which is computed


def test_seeded_sampling_equals_the_plain_path(engines: tuple[Engine, Engine]) -> None:
    """Would catch random numbers that do not follow seed and position, and parameters of another row."""
    graphs, plain = engines
    prompts, lengths = prompts_of(12, 36, 3), [3, 2, 3]
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=6)
    assert run(graphs, prompts, params, lengths) == run(plain, prompts, params, lengths)


def test_rows_with_edits_leave_their_neighbours_alone(engines: tuple[Engine, Engine]) -> None:
    graphs, _ = engines
    prompts = prompts_of(12, 33, 9)
    alone = run(graphs, prompts, GREEDY, [3, 3, 3])
    biased = SamplingParams(temperature=0, logit_bias=((77, 100.0),))
    jobs = [
        Job(f"s{n}", ids, params, max_tokens=3)
        for n, (ids, params) in enumerate(zip(prompts, (GREEDY, biased, GREEDY), strict=True))
    ]
    assert outputs_of(graphs, jobs) == [alone[0], [77] * 3, alone[2]]


def test_a_tick_that_no_graph_holds_is_computed_without(engines: tuple[Engine, Engine]) -> None:
    """Log probabilities of a prompt need its tokens' logits, which graphs do not compute."""
    graphs, plain = engines
    asked = SamplingParams(temperature=0, prompt_logprobs=1)
    prompts = prompts_of(40, 12)
    assert run(graphs, prompts, asked, [4, 4]) == run(plain, prompts, asked, [4, 4])


def test_linears_are_timed_in_steps_that_use_them(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a step decide which bucket's choice it runs: would catch a bucket judged by a step that never asks it,
    as those above the batch size would be."""
    runner = runner_of(engines[0])
    asked: dict[int, int] = {}

    def refine(steps: dict[int, tuple[TokenInputs, object]], seconds: float) -> None:
        asked.update({bucket: len(inputs.input_ids) for bucket, (inputs, _) in steps.items()})

    monkeypatch.setattr(runner._fused, "refine", refine)
    for rows, expected in ((4, {1: 1, 2: 2, 4: 4}), (3, {1: 1, 2: 2, 4: 3}), (1, {1: 1})):
        monkeypatch.setattr(runner, "max_rows", rows)
        asked.clear()
        runner._choose_linears(1.0)
        assert asked == expected
