"""From a model folder to a warmed engine on the CPU, eager and compiled."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helios.config import load
from helios.errors import StartupError
from helios.runtime import build as build_room
from helios.runtime.assemble import assemble
from helios.runtime.build import Built, build
from helios.runtime.engine import Engine
from helios.runtime.progress import StartupProgress
from helios.runtime.request import Job, SamplingParams
from tests.model.checkpoints import TINY, write_model_folder
from tests.unit.harness import prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def build_from(folder: Path, progress: StartupProgress | None = None, **values: Any) -> Built:
    chosen = {"model_id": folder, "device": "cpu", "num_pages": 24, "max_batch_size": 4} | values
    return build(load({name: str(value) for name, value in chosen.items()}), progress)


def greedy(built: Built, prompt_ids: list[int], max_tokens: int = 12) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    job = Job("a", prompt_ids, params, max_tokens=max_tokens)
    built.engine.waiting.append(job)
    while built.engine.has_work:
        built.engine.step()
    assert job.error is None
    return job.sequences[0].token_ids[len(prompt_ids) :]


def test_build_reports_what_it_made(folder: Path) -> None:
    """Would catch a fact that /health must name and that is missing or wrong, a stage without a time, a
    progress bar that does not end, and end tokens read from the wrong file."""
    steps: list[tuple[int, int]] = []
    said: list[str] = []
    stages: list[str] = []
    progress = StartupProgress(stages.append, lambda done, total: steps.append((done, total)), said.append)
    built = build_from(folder, progress)
    report = built.report()
    assert (report["model"], report["model_revision"], report["dtype"]) == ("tiny", "local", "float32")
    assert report["warmup_batch_sizes"] == [1, 4]
    assert report["max_model_len"] == 2048
    memory = report["memory"]
    assert memory["num_pages"] == 24
    assert memory["kv_tokens"] == 24 * 256
    assert memory["kv_bytes"] == 24 * memory["page_bytes"] == 24 * 256 * 2 * 2 * 2 * 16 * 4
    assert memory["weights_bytes"] == built.snapshot.config.num_parameters * 4
    assert set(report["startup_seconds"]) == {"resolve", "tokenizer", "weights", "warmup"}
    assert stages == ["resolving the model", "loading the tokenizer", "loading the weights", "warming up"]
    assert any("queue 16" in line for line in said)
    assert any("KV pages" in line for line in said)
    assert steps[-1][0] == steps[-1][1]
    assert built.engine.config.eos_token_ids == {256, 258}
    assert built.engine.pool.num_free == 24
    assert len(greedy(built, prompt(300))) == 12


def test_the_worker_has_served_before_it_is_handed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a first client that pays for the worker thread's first tick, or finds it in the counts."""
    threads: list[str] = []
    step = Engine.step

    def watched(engine: Engine) -> Any:
        threads.append(threading.current_thread().name)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    chosen = {"model_id": folder, "device": "cpu", "num_pages": 24, "max_batch_size": 4}
    assembled = assemble(load({name: str(value) for name, value in chosen.items()}))
    try:
        assert threads.count("helios-engine") > 1
        assert assembled.built.engine.num_ticks == 0
        lines = assembled.frontend.metrics.render().decode().splitlines()
        counts = [line for line in lines if line.startswith("helios:iteration_tokens_total_count")]
        assert [line.rpartition(" ")[2] for line in counts] == ["0.0"]
    finally:
        assembled.frontend.close()


def test_small_context_can_be_built(folder: Path) -> None:
    """Would catch a warm-up that reaches beyond a small context, into rotary positions that do not exist."""
    for context in (16, 100):
        built = build_from(folder, max_model_len=context)
        assert built.engine.config.max_model_len == context
        assert len(greedy(built, prompt(context - 12))) == 12


def test_context_is_bounded_by_the_pool_and_the_model(folder: Path) -> None:
    """Would catch a context that no request could use, or one beyond what the model was made for."""
    assert build_from(folder, num_pages=4).engine.config.max_model_len == 1024
    with pytest.raises(StartupError, match="HELIOS_MAX_MODEL_LEN=4096: the model's context is 2048"):
        build_from(folder, max_model_len=4096)


def test_dummy_weights_need_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Would catch a benchmark of a shape that asks for its weights."""
    shutil.copytree(folder, tmp_path / "shape")
    (tmp_path / "shape" / "model.safetensors").unlink()
    built = build_from(tmp_path / "shape", load_format="dummy")
    assert len(greedy(built, prompt(20))) == 12
    with pytest.raises(StartupError, match=r"no model\.safetensors"):
        build_from(tmp_path / "shape")


def test_cuda_without_a_gpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a server that quietly falls back to the CPU although a GPU was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=r"HELIOS_DEVICE='cuda'.*--device cpu"):
        build_from(folder, device="cuda")


def test_old_gpus_are_refused_with_a_clear_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a GPU before Ampere that starts and then fails inside a kernel."""

    class Turing:
        name, major, minor, total_memory, multi_processor_count = "Tesla T4", 7, 5, 16 << 30, 40

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Turing)
    with pytest.raises(StartupError, match=r"Tesla T4 has compute capability 7\.5.*8\.0"):
        build_from(folder, device="cuda")


TORCHS_OWN = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # at the import of its modules


@TORCHS_OWN
def test_whole_model_is_one_graph_in_every_kind_of_tick(folder: Path) -> None:
    """Would catch a graph break (fullgraph raises at the first), and a model that is captured again for each
    batch because a plain number or a length is guarded. Dynamo alone: the graphs run as they are."""
    eager, captured = build_from(folder), build_from(folder)
    prompts = [prompt(length, length) for length in (1, 63, 64, 200, 300, 530)]
    expected = [greedy(eager, prompt_ids) for prompt_ids in prompts]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    captured.runner.model.compile(backend="eager", fullgraph=True)
    for prompt_ids, tokens in zip(prompts, expected, strict=True):
        assert greedy(captured, prompt_ids) == tokens
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] > 0, "nothing was captured"
    for rows in (2, 3, 4):  # together: mixed ticks, and decode ticks of several rows
        jobs = [
            Job(str(row), prompts[row], SamplingParams(temperature=0, ignore_eos=True), max_tokens=9 + row)
            for row in range(rows)
        ]
        captured.engine.waiting.extend(jobs)
        while captured.engine.has_work:
            captured.engine.step()
        for job, tokens in zip(jobs, expected, strict=False):
            assert job.sequences[0].token_ids[job.num_prompt_tokens :] == tokens[: job.max_tokens]
    graphs = stats["unique_graphs"]
    for length in (7, 91, 350):
        greedy(captured, prompt(length, length))
    assert stats["unique_graphs"] == graphs <= 12
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@TORCHS_OWN
@pytest.mark.timeout(300)  # a cold compiler cache on a busy machine
@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    reason="TorchInductor needs a C++ compiler",
)
def test_compiled_model_equals_eager(tmp_path: Path) -> None:
    """Would catch a compiled forward that computes something else: TorchInductor fuses norms and rope."""
    model = write_model_folder(tmp_path / "single", TINY | {"num_hidden_layers": 1})
    built = build_from(model)
    expected = greedy(built, prompt(200))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = {"torch_compile": "1", "compile_fullgraph": "1", "compile_diagnostics": "0"}
    build_room._compile(built.runner.model, load(settings))
    assert greedy(built, prompt(200)) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one for the prompt, one for decode
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_explicit_torch_logs_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch Helios's diagnostics over what a person asked torch for, or diagnostics that cannot be
    switched off."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch._logging, "set_logs", lambda **options: asked.append(options))
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    model: Any = SimpleNamespace(compile=lambda fullgraph: None)
    settings = load({"torch_compile": "1"})
    monkeypatch.setenv("TORCH_LOGS", "recompiles_verbose")
    build_room._compile(model, settings)
    monkeypatch.delenv("TORCH_LOGS")
    build_room._compile(model, settings.model_copy(update={"compile_diagnostics": False}))
    assert asked == []
    build_room._compile(model, settings)
    assert asked == [{"dynamo": logging.INFO, "graph_breaks": True, "recompiles": True}]
