"""Captured graphs of fused kernels against the plain operators, through the engine."""

from __future__ import annotations

import pytest
import torch

from helios.runtime.detokenizer import Vocabulary
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.graph_runner import GraphRunner
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.qwen3.weights import build_empty, load_weights
from helios.runtime.request import Job, SamplingParams
from helios.runtime.runner import ModelRunner
from helios.runtime.snapshot import DEMO_FOLDER, end_token_ids, load_tokenizer
from tests.unit.harness import outputs_of

pytestmark = pytest.mark.gpu
PAGES, ROWS, CONTEXT = 200, 24, 4096
QUESTIONS = [
    "What is a KV cache?",
    "Why does a KV cache speed up decoding?",
    "Count from 3 to 17.",
    "What is 47 + 38?",
    "Repeat exactly: naïve café 漢字 🚀",
    "Sort these numbers: 9, 3, 7, 1",
    "What is paged attention?",
    "What is continuous batching?",
]


@pytest.fixture(scope="module")
def model(gpu: torch.device) -> Qwen3:
    model = build_empty(ModelConfig.from_folder(DEMO_FOLDER), CONTEXT, gpu, torch.bfloat16)
    load_weights(model, DEMO_FOLDER)
    return model


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(load_tokenizer(DEMO_FOLDER))


def engine_of(model: Qwen3, vocabulary: Vocabulary, *, graphs: bool, chunk: int = 512) -> Engine:
    cache = KVCache(model.config, PAGES, torch.device("cuda"), torch.bfloat16)
    runner_class = GraphRunner if graphs else ModelRunner
    runner = runner_class(
        model, cache, max_tokens=chunk, max_rows=ROWS, max_model_len=CONTEXT, vocabulary_size=vocabulary.size,
        end_token_ids=end_token_ids(DEMO_FOLDER),
    )  # fmt: skip
    if isinstance(runner, GraphRunner):
        runner.prepare(tune_seconds=1.0, max_tokens=chunk, pdl=True)
        cache.data[:, :, 1:] = torch.nan
    config = EngineConfig(ROWS, chunk, PAGES, CONTEXT, end_token_ids(DEMO_FOLDER), lookahead=graphs)
    return Engine(config, runner, vocabulary)


@pytest.fixture(scope="module")
def engines(model: Qwen3, vocabulary: Vocabulary) -> tuple[Engine, Engine]:
    return engine_of(model, vocabulary, graphs=True), engine_of(model, vocabulary, graphs=False)


def prompt(vocabulary: Vocabulary, question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return load_tokenizer(DEMO_FOLDER).encode(text, add_special_tokens=False).ids


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, max_tokens: int = 60
) -> list[list[int]]:
    jobs = [Job(f"j{n}", ids, params, max_tokens=max_tokens) for n, ids in enumerate(prompts)]
    return outputs_of(engine, jobs)


def long_prompts(vocabulary: Vocabulary) -> list[list[int]]:
    filler = "The grass is green. The sky is blue. "
    return [
        prompt(
            vocabulary, filler * n + f"The code word is maple{n}. " + filler * n + "What is the code word?"
        )
        for n in (5, 20, 40, 60)
    ]


def test_greedy_tokens_equal_the_plain_path(engines: tuple[Engine, Engine], vocabulary: Vocabulary) -> None:
    """Would catch a wrong row, slot, position or page in a graph, stale state after the rows change, a
    token lost or doubled by lookahead. A trained model is peaked, so bf16 does not flip its tokens."""
    graphs, plain = engines
    prompts = [prompt(vocabulary, question) for question in QUESTIONS] * 3 + long_prompts(vocabulary)
    greedy = SamplingParams(temperature=0)
    got, expected = run(graphs, prompts, greedy), run(plain, prompts, greedy)
    differing = [n for n, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    assert len(differing) <= 1, [
        (vocabulary.decode(got[n]), vocabulary.decode(expected[n])) for n in differing
    ]
    warm = run(graphs, prompts, greedy)
    assert sum(a != b for a, b in zip(warm, expected, strict=True)) <= 1


def test_seeded_sampling_equals_the_plain_path(
    engines: tuple[Engine, Engine], vocabulary: Vocabulary
) -> None:
    """Would catch random numbers that do not follow seed and position inside the graph."""
    graphs, plain = engines
    prompts = [prompt(vocabulary, question) for question in QUESTIONS]
    for params in (
        SamplingParams(temperature=0.7, top_p=1.0, seed=5),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=6),
    ):
        got, expected = run(graphs, prompts, params, 24), run(plain, prompts, params, 24)
        same = sum(a == b for a, b in zip(got, expected, strict=True))
        assert same >= len(prompts) - 2  # near-ties in bf16 may flip


def test_special_rows_leave_their_neighbours_alone(
    engines: tuple[Engine, Engine], vocabulary: Vocabulary
) -> None:
    """Would catch edits applied to the wrong row, or a plain row that changes beside an edited one."""
    graphs, _ = engines
    prompts = [prompt(vocabulary, question) for question in QUESTIONS[:4]]
    alone = run(graphs, prompts, SamplingParams(temperature=0))
    forced_id = alone[0][3]
    plain = SamplingParams(temperature=0)
    biased = SamplingParams(temperature=0, logit_bias=((forced_id, 100.0),), max_tokens=5)
    scored = SamplingParams(temperature=0, logprobs=3)
    params = [plain, biased, scored, plain]
    lengths = [60, 5, 60, 60]
    jobs = [
        Job(f"s{n}", ids, p, max_tokens=m)
        for n, (ids, p, m) in enumerate(zip(prompts, params, lengths, strict=True))
    ]
    graphs.waiting.extend(jobs)
    logprobs = []
    while graphs.has_work:
        for event in graphs.step():
            if event.job is jobs[2]:
                logprobs.extend(event.logprobs or [])
    outputs = [job.sequences[0].token_ids[job.num_prompt_tokens :] for job in jobs]
    assert outputs[0] == alone[0]
    assert outputs[3] == alone[3]
    assert outputs[2] == alone[2]
    assert outputs[1] == [forced_id] * 5
    assert [entry.token_id for entry in logprobs] == outputs[2]
    assert all(entry.logprob <= 0 and len(entry.top) == 3 for entry in logprobs)


def test_cancelled_and_late_rows_do_not_disturb(
    engines: tuple[Engine, Engine], vocabulary: Vocabulary
) -> None:
    """Would catch a row launched ahead that writes into pages or a batch row handed on to another."""
    graphs, _ = engines
    prompts = [prompt(vocabulary, question) for question in QUESTIONS]
    alone = run(graphs, prompts, SamplingParams(temperature=0))
    jobs = [
        Job(f"c{n}", ids, SamplingParams(temperature=0), max_tokens=60) for n, ids in enumerate(prompts * 6)
    ]
    graphs.waiting.extend(jobs)
    ticks = 0
    while graphs.has_work:
        graphs.step()
        ticks += 1
        for n, job in enumerate(jobs):
            if n % 3 == 1 and ticks == 3 + n:
                job.cancelled = True
        graphs.check_integrity()
    for n, job in enumerate(jobs):
        output = job.sequences[0].token_ids[job.num_prompt_tokens :]
        expected = alone[n % len(prompts)]
        assert output == expected[: len(output)]
        assert job.cancelled or output == expected
