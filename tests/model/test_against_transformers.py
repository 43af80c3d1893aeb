"""The served model against transformers on the same random weights, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helios.config import PAGE_SIZE
from helios.runtime.detokenizer import Vocabulary
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.dense import dense_greedy, dense_logits
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.qwen3.weights import build_empty, load_weights
from helios.runtime.request import Job, SamplingParams
from helios.runtime.runner import ModelRunner
from tests.model.shapes import SHAPES, write_checkpoint

CPU = torch.device("cpu")
LENGTHS = (1, 5, 255, 256, 257, 700)
every_shape = pytest.mark.parametrize("pair", sorted(SHAPES), indirect=True)


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, Qwen3]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = write_checkpoint(folder, request.param)
    model = build_empty(ModelConfig.from_folder(folder), 4096, CPU, torch.float32)
    load_weights(model, folder)
    return reference, model


def prompts(vocab: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


@every_shape
@torch.inference_mode()
def test_dense_logits_equal_transformers(pair: tuple[torch.nn.Module, Qwen3]) -> None:
    """Would catch a wrong norm, rope, YaRN ramp, head grouping, bias or packing of the weights."""
    reference, model = pair
    for ids in prompts():
        expected = reference(torch.tensor([ids])).logits[0]
        assert (dense_logits(model, ids) - expected).abs().max() < 1e-4


def make_engine(model: Qwen3, vocabulary: Vocabulary, chunk: int, pages: int = 64, batch: int = 8) -> Engine:
    cache = KVCache(model.config, pages, CPU, torch.float32)
    cache.data.fill_(torch.nan)  # a stray read of a page shows as NaN
    runner = ModelRunner(
        model,
        cache,
        max_tokens=chunk,
        max_rows=batch,
        max_model_len=4096,
        vocabulary_size=model.config.vocab_size,
    )
    config = EngineConfig(
        max_batch_size=batch,
        prefill_chunk_size=chunk,
        num_pages=pages,
        max_model_len=4096,
        eos_token_ids=frozenset({2}),
    )
    return Engine(config, runner, vocabulary)


def serve(
    engine: Engine, batches: list[list[int]], max_tokens: int = 12, **params: object
) -> list[list[int]]:
    """Run all prompts together, greedy; returns their output tokens."""
    jobs = [
        Job(
            f"job{i}",
            ids,
            SamplingParams(temperature=0, max_tokens=max_tokens, **params),
            max_tokens=max_tokens,
        )  # type: ignore[arg-type]
        for i, ids in enumerate(batches)
    ]
    engine.waiting.extend(jobs)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    for job in jobs:
        assert job.error is None
    return [sequence.token_ids[sequence.num_prompt_tokens :] for job in jobs for sequence in job.sequences]


def assert_greedy(
    reference: torch.nn.Module, prompt: list[int], got: list[int], max_tokens: int = 12
) -> None:
    """``got`` is transformers' greedy continuation, up to a step whose two best logits lie within 1e-3.

    One pass over prompt and answer: as long as the tokens agree, the pass sees what generation would.
    """
    logits = reference(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 :]
    for position, token in enumerate(got):
        top = logits[position].topk(2)
        if top.values[0] - top.values[1] < 1e-3:
            return
        assert token == int(top.indices[0]), f"token {position} after a prompt of {len(prompt)}"
    assert len(got) == max_tokens or got[-1] == 2


@every_shape
@pytest.mark.parametrize("chunk", [16, 256, 4096])
@torch.inference_mode()
def test_packed_greedy_equals_dense_at_any_chunk_size(
    pair: tuple[torch.nn.Module, Qwen3], vocabulary: Vocabulary, chunk: int
) -> None:
    """Would catch mixed rows reading each other's pages, wrong positions after a chunk border, or a
    dependence on the chunk size; cold and then warm, so also a wrong page from the prefix cache."""
    check_packed(*pair, vocabulary, chunk)


@pytest.mark.parametrize("pair", ["yarn"], indirect=True)
@torch.inference_mode()
def test_packed_greedy_equals_dense_in_chunks_of_one_token(
    pair: tuple[torch.nn.Module, Qwen3], vocabulary: Vocabulary
) -> None:
    """Would catch a prompt token that is taken for a decode step, and sampled after, because it comes alone.
    Of one shape: 1,400 ticks take their time."""
    check_packed(*pair, vocabulary, 1)


def check_packed(reference: torch.nn.Module, model: Qwen3, vocabulary: Vocabulary, chunk: int) -> None:
    engine = make_engine(model, vocabulary, chunk)
    cold = serve(engine, prompts())
    warm = serve(engine, prompts())
    assert engine.prefix_cache.hit_tokens >= 2 * PAGE_SIZE
    for ids, first, second in zip(prompts(), cold, warm, strict=True):
        assert_greedy(reference, ids, first)
        assert_greedy(reference, ids, second)


@every_shape
@torch.inference_mode()
def test_choices_of_one_prompt_share_pages_and_equal_a_run_alone(
    pair: tuple[torch.nn.Module, Qwen3], vocabulary: Vocabulary
) -> None:
    """Would catch a fork that reads a partial page before it is copied, or writes into a shared one."""
    reference, model = pair
    for length in (255, 256, 257, 600):
        ids = prompts()[5][:length]
        engine = make_engine(model, vocabulary, 256)
        choices = serve(engine, [ids], n=3)
        assert len(choices) == 3
        for choice in choices:
            assert_greedy(reference, ids, choice)


@every_shape
@torch.inference_mode()
def test_dense_greedy_stops_at_the_end_token(pair: tuple[torch.nn.Module, Qwen3]) -> None:
    """Would catch a reference that runs past its end token and so hides that the engine does."""
    _, model = pair
    ids = prompts()[1]
    first = dense_greedy(model, ids, 1, frozenset())
    assert dense_greedy(model, ids, 5, frozenset(first)) == first
