"""A sequence's output depends on its tokens, parameters and seed only: the real runner and sampler on the
CPU, over a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.page_store import HostPageStore
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.qwen3.weights import build_empty, load_weights
from helios.runtime.request import Job, SamplingParams
from helios.runtime.runner import ModelRunner
from tests.model.checkpoints import TINY, random_tensors, write
from tests.unit.harness import TOKENIZER, VOCABULARY, ids, prompt

CPU = torch.device("cpu")
END = 258
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 42}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write(folder, random_tensors(TINY), TINY)
    model = build_empty(ModelConfig.from_folder(folder), 2048, CPU, torch.float32)
    load_weights(model, folder)
    return model


def make_engine(
    model: Qwen3, chunk: int = 256, batch: int = 8, *, pages: int = 32, slots: int = 0, **config: Any
) -> Engine:
    cache = KVCache(model.config, pages, CPU, torch.float32)
    cache.data.fill_(torch.nan)
    runner = ModelRunner(
        model,
        cache,
        max_tokens=chunk,
        max_rows=batch,
        max_model_len=2048,
        vocabulary_size=512,
        end_token_ids=frozenset({END}),
    )
    engine_config = EngineConfig(
        max_batch_size=batch,
        prefill_chunk_size=chunk,
        num_pages=pages,
        max_model_len=2048,
        eos_token_ids=frozenset({END}),
        end_thinking_ids=tuple(ids("\n</think>\n\n")),
        **config,
    )
    store = HostPageStore(cache, slots) if slots else None
    return Engine(engine_config, runner, VOCABULARY, store=store)


def job(name: str, prompt_ids: list[int], max_tokens: int = 24, **params: Any) -> Job:
    return Job(name, prompt_ids, SamplingParams(max_tokens=max_tokens, **params), max_tokens=max_tokens)


def serve(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    """Run the jobs together; all output tokens of the first one's choices."""
    engine.waiting.extend(jobs)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert all(each.error is None for each in jobs)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in jobs[0].sequences]


def neighbours() -> list[Job]:
    return [
        job(f"other{number}", prompt(5 + 90 * number, number + 1), 30, temperature=1.0 if number % 2 else 0.0)
        for number in range(4)
    ]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, SAMPLED, SAMPLED | {"n": 3}], ids=["greedy", "seed", "n"]
)
def test_output_does_not_depend_on_neighbours_chunks_cache_or_lookahead(
    model: Qwen3, params: dict[str, Any]
) -> None:
    """Would catch a seeded answer that changes when unseeded requests run beside it, a position counted
    from the chunk, noise keyed by the batch row, or a lookahead tick that samples with a stale token."""
    prompt_ids = prompt(300)
    expected = serve(make_engine(model), [job("a", prompt_ids, **params)])
    assert len(expected) == params.get("n", 1)
    if params.get("n"):
        assert len({tuple(choice) for choice in expected}) == 3, "the choices share their noise"
    for chunk in (16, 100, 4096):
        assert serve(make_engine(model, chunk), [job("a", prompt_ids, **params)]) == expected
    for lookahead in (False, True):
        engine = make_engine(model, lookahead=lookahead)
        beside = [job("a", prompt_ids, **params), *neighbours()]
        assert serve(engine, beside) == expected
        behind = [*neighbours()[:3], job("a", prompt_ids, **params)]
        engine.waiting.extend(behind[:-1])
        engine.step()
        assert serve(engine, behind[-1:]) == expected
        assert behind[-1].num_cached_tokens == 256


def test_another_seed_gives_another_answer(model: Qwen3) -> None:
    """Would catch a seed that is ignored, and unseeded requests that all say the same."""
    outputs = [
        serve(make_engine(model), [job("a", prompt(50), **(SAMPLED | {"seed": seed}))])
        for seed in (1, 2, None, None)
    ]
    assert len({tuple(choices[0]) for choices in outputs}) == 4


@pytest.mark.parametrize("lookahead", [False, True])
def test_forced_tokens_and_minimum_length_reach_the_device(model: Qwen3, lookahead: bool) -> None:
    """Would catch a thinking budget that ends the block in the text only, so that the model goes on
    thinking, and an end token sampled before min_tokens."""
    end = TOKENIZER.token_to_id("</think>")
    engine = make_engine(model, lookahead=lookahead)
    thinking = job("a", ids("question<think>"), 20, temperature=0.0, thinking_budget=5)
    (output,) = serve(engine, [thinking, *neighbours()])
    assert output[5:9] == ids("\n</think>\n\n")
    assert output.count(end) >= 1
    # What follows is what the model says after a prompt that holds the same tokens.
    rest = job("b", [*thinking.prompt_ids, *output[:9]], 11, temperature=0.0)
    assert serve(make_engine(model), [rest]) == [output[9:]]
    likely = ((END, 100.0),)
    short = job("c", ids("x"), 20, temperature=0.0, logit_bias=likely)
    long = job("d", ids("x"), 20, temperature=0.0, logit_bias=likely, min_tokens=7)
    assert serve(engine, [short]) == [[END]]
    (output,) = serve(engine, [long])
    assert len(output) == 8
    assert output[-1] == END
    assert END not in output[:-1]


def test_lookahead_serves_many_jobs_with_the_same_answers(model: Qwen3) -> None:
    """Would catch a row computed in vain after an end that writes into a page already handed on."""
    outputs: list[list[list[int]]] = []
    for lookahead in (False, True):
        engine = make_engine(model, 64, batch=3, lookahead=lookahead)
        jobs = [
            job(f"job{number}", [*prompt(256), *prompt(40 * number, number)], 5 + 7 * number, temperature=0.0,
                stop=("e",) if number % 2 else ())
            for number in range(8)
        ]  # fmt: skip
        serve(engine, jobs)
        outputs.append([each.sequences[0].token_ids for each in jobs])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("victim", "slots", "lookahead"),
    [(0, 0, True), (1, 6, False), (2, 0, False), (3, 6, True), (4, 0, True), (5, 6, True)],
    ids=["greedy", "seed", "penalty", "n", "logprobs", "thinking"],
)
def test_preemption_and_offload_change_no_token(
    model: Qwen3, victim: int, slots: int, lookahead: bool
) -> None:
    """Would catch penalties, noise or forced tokens that start afresh when a sequence is put back, and pages
    that come back from the host in another order or layer."""

    def jobs() -> list[Job]:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            SAMPLED,
            {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 20},
            SAMPLED | {"n": 2},
            {"temperature": 0.0, "logprobs": 1},
            {"temperature": 0.0, "thinking_budget": 30},
        ]
        made: list[Job] = []
        for number in (5, 4, 3, 2, 1):  # the last one admitted is the victim
            params = kinds[(victim + number) % 6]
            made.append(job(f"job{number}", prompt(225 + 5 * number, number), 60, ignore_eos=True, **params))
        thinks = [*prompt(224, 9), TOKENIZER.token_to_id("<think>")]
        params = kinds[victim]
        made.append(job("victim", thinks, 60, ignore_eos=True, **params))
        return made

    small = make_engine(model, pages=8, slots=slots, on_demand=True, lookahead=lookahead)
    together = jobs()
    serve(small, together)
    assert together[-1].timings.preemptions >= 1
    for one, alone in zip(together, jobs(), strict=True):
        expected = serve(make_engine(model), [alone])
        assert [sequence.token_ids[one.num_prompt_tokens :] for sequence in one.sequences] == expected
