"""The in-process benchmarks on the demo model: traces, arrivals, studies, and that every script runs."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.device_trace import Kernel, exclusive, kernel_class, label, on_device, outermost, top_kernels
from benchmarks.floor import Card, ModelShape
from benchmarks.idle import idle_share
from benchmarks.inprocess import Item, build_engine, play, poisson_items, summary, variant
from benchmarks.profile_step import against_limits
from benchmarks.report import report

from benchmarks import idle, profile_prompt, profile_step, results, special_rows, studies
from helios.runtime.build import Built


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    threads = torch.get_num_threads()
    made = build_engine(Namespace(model="demo", load_format="auto", set=["device=cpu", "num_pages=64"]))
    yield made
    torch.set_num_threads(threads)  # building the demo model has set one


def test_overlapping_kernels_share_their_time():
    """Dependent launch starts a kernel before the last one has ended: shares must not add up to more."""
    kernels = [Kernel("_gemv_kernel", 10, 30), Kernel("_decode_kernel", 25, 40), Kernel("x", 50, 90)]
    label(kernels)
    found = exclusive(kernels, 0, 80)
    assert (found["linears"], found["attention"], found["other"], found["gaps"]) == (20, 10, 30, 20)
    assert sum(found.values()) == 80


def test_the_head_is_told_from_other_linears():
    """By name it is a linear like any other, and it is the largest."""
    names = ["_begin_kernel", "_gemv_kernel", "_decode_kernel", "nvjet_tst_128", "_add_rms_norm_kernel",
             "_split_kernel", "_chunk", "_finish", "_end_kernel"]  # fmt: skip
    kernels = [Kernel(name, index, index + 1) for index, name in enumerate(names)]
    label(kernels)
    assert [kernel.kind for kernel in kernels] == [
        "begin/end", "linears", "attention", "linears", "norm, rope, kv write", "lm_head", "sampling", "sampling",
        "begin/end",
    ]  # fmt: skip
    assert kernel_class("void flash::flash_fwd_kernel") == "attention"
    assert top_kernels(kernels, 1)[0]["calls"] == 1


def test_only_what_ran_on_the_device_is_a_kernel():
    """A range that annotates a graph's replay lasts as long as all of it: counted, nothing would ever idle."""

    def event(kind: str, device: str) -> Any:
        return SimpleNamespace(activity_type=lambda: kind, device_type=lambda: f"DeviceType.{device}")

    wanted = [("kernel", "CUDA"), ("gpu_memcpy", "CUDA"), ("gpu_memset", "CUDA")]
    others = [
        ("gpu_user_annotation", "CUDA"),
        ("cuda_sync", "CUDA"),
        ("cuda_runtime", "CPU"),
        ("cpu_op", "CPU"),
    ]
    assert [on_device(event(*one)) for one in wanted + others] == [True] * 3 + [False] * 4


def test_operators_inside_others_are_left_out():
    kernels = [Kernel("aten::linear", 0, 10), Kernel("aten::mm", 2, 9), Kernel("aten::silu", 11, 12)]
    assert [kernel.name for kernel in outermost(kernels)] == ["aten::linear", "aten::silu"]


def test_waiting_for_arrivals_is_no_idleness():
    """A server without requests is not a slow one."""
    from benchmarks.device_trace import Trace

    second = 1_000_000_000
    trace = Trace([Kernel("a", 0, second // 2, "other"), Kernel("b", 10 * second, 11 * second, "other")], [])
    found = idle_share(
        trace, [(0, second // 2, True), (second // 2 + 9, second, False), (10 * second, 11 * second, False)]
    )
    assert found["working_seconds"] == 2
    assert found["idle"] == pytest.approx(0.25)


def test_a_step_against_the_limits():
    shape = ModelShape(layers=2, hidden=8, inner=16, query_heads=2, kv_heads=1, head_dim=4, vocab=100)
    found = against_limits(shape, Card(1e9, 1e12), 4, 100, 1e-3)
    assert found["bytes_per_second"] == pytest.approx(found["bytes"] / 1e-3)
    assert 0 < found["of_limit"] < 1


def test_arrivals_are_played_and_answers_cut(built: Built):
    """An answer that ends before its limit is cancelled there, and a chat's next turn holds the last."""
    items = [
        Item(0.0, list(range(5, 25)), 6, asked=500),
        Item(0.0, list(range(30, 60)), 4, turns=([7, 8, 9], [10, 11])),
        Item(0.05, list(range(80, 90)), 3),
    ]
    engine = variant(built)
    played = play(engine, items)
    assert sorted(len(one.token_times) for one in played) == [3, 4, 4, 4, 6]
    turns = sorted((one.turn, one.prompt) for one in played if one.prompt not in (20, 10))
    assert turns == [(0, 30), (1, 37), (2, 43)]
    assert all(one.error is None for one in played)
    assert all(one.token_times == sorted(one.token_times) for one in played)
    assert max(played, key=lambda one: one.due).token_times[0] >= 0.05
    engine.check_integrity()
    assert summary(played)["output_tokens"] == 21


def test_concurrency_and_time_limit_are_kept(built: Built):
    engine = variant(built)
    most = 0

    def watch(began: float, ended: float) -> None:
        nonlocal most
        most = max(most, len(engine.running))

    items = [Item(0.0, [1 + index, 2, 3], 5) for index in range(4)]
    assert summary(play(engine, items, concurrency=2, after_step=watch))["failed"] == 0
    assert most <= 2
    late = play(variant(built), [Item(0.0, [1, 2, 3], 900)], limit_seconds=0.01)
    assert late[0].error is not None


def test_arrivals_are_the_same_for_every_configuration():
    first, again = poisson_items(8, 3, 1, 100, 600), poisson_items(8, 3, 1, 100, 600)
    assert [(item.arrival, item.prompt) for item in first] == [(item.arrival, item.prompt) for item in again]
    assert sum(item.kind == "long" for item in first) == 2
    assert max(len(item.prompt) for item in first) <= 600


SCRIPTS: tuple[tuple[Any, list[str]], ...] = (
    (profile_step, ["--shapes", "1x64,99x64", "--ladder", "1,2", "--ladder-context", "64", "--steps", "4",
                    "--bandwidth-tb-s", "0.02", "--tflops", "0.1"]),
    (profile_prompt, ["--prompts", "20", "--beside", "0,1", "--repeats", "1", "--bandwidth-tb-s", "0.02",
                      "--tflops", "0.1"]),
    (idle, ["--workloads", "batch1", "--scale", "0.1"]),
    (studies, ["--budgets", "64", "--rates", "20", "--seconds", "0.1", "--longest", "60", "--offline-count", "2",
               "--offline-length", "16", "--admission-count", "2", "--sessions", "2", "--offload-bytes", "60000000"]),
    (special_rows, ["--rows", "2", "--context", "16", "--steps", "3", "--rounds", "1"]),
)  # fmt: skip


@pytest.mark.parametrize(("module", "arguments"), SCRIPTS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_script_runs_on_the_demo_model(
    module: Any, arguments: list[str], built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Would catch a script that fails only where a card is waiting for it; its result has a section."""
    monkeypatch.setattr(module, "build_engine", lambda *_, **__: built)
    if module is idle:  # the demo model's whole workload takes seconds
        monkeypatch.setattr(idle, "items_of", lambda *_: ([Item(0.0, [5, 6, 7], 6)], None))
    if module is studies:
        monkeypatch.setattr(studies, "longest_answer", lambda *_: 128)
        monkeypatch.setattr(studies, "chats", lambda *_: [Item(0.0, [5] * 300, 4, turns=([6] * 300,))])
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["x.py", "--model", "demo", *arguments, "--out", str(out)])
    assert module.main() == 0
    kind = json.loads(out.read_text())["kind"]
    page = report(results.load_all(tmp_path), None)
    assert "### unlabelled" in page
    assert f"{kind} (" not in page  # no longer among what was not measured
