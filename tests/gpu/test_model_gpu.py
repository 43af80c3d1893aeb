"""The whole model in bf16 on the GPU against float32 and against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helios.runtime.detokenizer import Vocabulary
from helios.runtime.engine import Engine, EngineConfig
from helios.runtime.graph_runner import GraphPending, GraphRunner
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.dense import dense_logits
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.weights import build_empty, load_weights
from helios.runtime.request import Job, SamplingParams
from helios.runtime.runner import ModelRunner, Pending
from tests.model.shapes import BASE, SHAPES, write_checkpoint

pytestmark = pytest.mark.gpu
LENGTHS = (1, 40, 256, 700, 1500)
GPU_SHAPES = {
    "gpu-gqa2": (
        "qwen3",
        16,
        8,
        128,
        True,
        {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
    ),
    "gpu-gqa4": (
        "qwen3",
        32,
        8,
        128,
        False,
        {"hidden_size": 640, "intermediate_size": 1536, "num_hidden_layers": 6},
    ),
    "gpu-gqa1": ("qwen3", 4, 4, 64, True, {"hidden_size": 256, "num_hidden_layers": 4}),
    "gpu-qwen2-gqa7": ("qwen2", 14, 2, 64, False, {"hidden_size": 896, "num_hidden_layers": 4}),
}


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in GPU_SHAPES.items():
        monkeypatch.setitem(SHAPES, name, shape)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, BASE["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS
    ]


@pytest.mark.parametrize("graphs", [False, True], ids=["operators", "graphs"])
@pytest.mark.parametrize("shape", sorted(GPU_SHAPES))
@torch.inference_mode()
def test_bf16_error_is_at_most_that_of_transformers(
    gpu: torch.device, shape: str, graphs: bool, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """First-token log probabilities of packed, chunked, paged serving in bf16, and of transformers in bf16,
    against float32. Would catch a wrong kernel call or a rounding that transformers does not do."""
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path, shape, dtype=torch.bfloat16)
    # Loaded, not cast: casting would round transformers' rotary frequencies to bf16 as well.
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(gpu).eval()
    config = ModelConfig.from_folder(tmp_path)
    exact = build_empty(config, 4096, torch.device("cpu"), torch.float32)
    load_weights(exact, tmp_path)
    model = build_empty(config, 4096, gpu, torch.bfloat16)
    load_weights(model, tmp_path)
    cache = KVCache(config, 64, gpu, torch.bfloat16)
    runner_class = GraphRunner if graphs else ModelRunner
    runner = runner_class(model, cache, max_tokens=512, max_rows=8, max_model_len=4096, vocabulary_size=512)
    if isinstance(runner, GraphRunner):
        runner.prepare(tune_seconds=1.0, max_tokens=512, pdl=True)
    cache.data[:, :, 1:] = torch.nan  # all but the dummy page
    seen: dict[str, torch.Tensor] = {}
    _keep_first_logits(runner, seen)
    engine = Engine(EngineConfig(8, 500, 64, 4096, frozenset({2}), lookahead=graphs), runner, vocabulary)
    jobs = [Job(str(n), ids, SamplingParams(temperature=0), max_tokens=3) for n, ids in enumerate(prompts())]
    engine.waiting.extend(jobs)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    ours: list[float] = []
    theirs: list[float] = []
    for n, ids in enumerate(prompts()):
        expected = dense_logits(exact, ids)[-1]
        hf = reference(torch.tensor([ids], device=gpu)).logits[0, -1].float().cpu()
        ours.append(((seen[str(n)] - expected).norm() / expected.norm()).item())
        theirs.append(((hf - expected).norm() / expected.norm()).item())
    print(
        f"{shape}, {'graphs' if graphs else 'operators'}: relative error ours {ours}, transformers {theirs}"
    )
    assert sum(ours) <= 1.5 * sum(theirs)


def _keep_first_logits(runner: ModelRunner, seen: dict[str, torch.Tensor]) -> None:
    """Keep the logits of each prompt's last token on their way to the sampler."""
    sample = runner.sample

    def spy(pending: object) -> None:
        assert isinstance(pending, Pending)
        if isinstance(runner, GraphRunner):
            assert isinstance(pending, GraphPending)
            rows = [runner._logits[place] for place in pending.places]
        else:
            rows = list(pending.logits) if pending.logits is not None else []
        for sequence, row in zip(pending.sequences, rows, strict=True):
            seen.setdefault(sequence.job.job_id, row.float().cpu())
        sample(pending)

    runner.sample = spy  # type: ignore[method-assign]
