"""Ticks, agreement with other clients, targets, and the report's sections from made-up results."""

import asyncio
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.agree import differences, from_vllm, vllm_command
from benchmarks.load import Target
from benchmarks.report import http_section, report, targets_of
from benchmarks.report_engine import attention_files, attention_section
from benchmarks.ticks import COLUMNS, fetch_ticks, trimmed
from dummy_server import Behaviour, DummyServer

from benchmarks import agree, results
from helios.runtime.interfaces import TickRecord


def test_the_columns_are_the_engines():
    """Would catch a log whose meaning has moved while old figures are still drawn from it."""
    assert TickRecord._fields == COLUMNS


def test_ticks_are_cut_to_the_run_and_to_where_prompts_mix():
    """Committed files stay small, and show the tick in question."""
    ticks = [[index / 1000, (index + 1) / 1000, 8, 0, 8, 0] for index in range(3000)]
    ticks[2000][3] = 512
    ticks[100][2:4] = [0, 4096]  # a larger prompt, with nobody decoding beside it
    found = trimmed(ticks, 0.05, 2.9)
    assert found is not None
    assert found["ticks"] == 2850
    assert found["prefill_tokens"][100] == 512
    assert len(found["started_ms"]) == 400
    assert found["mixed_seconds"]["count"] == 1
    assert trimmed(ticks, 9, 10) is None


def test_servers_without_a_log_are_measured_all_the_same():
    async def go() -> list[list[float]]:
        async with DummyServer() as server:
            return await fetch_ticks(server.url)

    assert asyncio.run(go()) == []


def test_a_plain_client_counts_what_ours_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Token counts must be equal and times near: the closing chunk is no token, the first gap is no gap."""
    folder = Path(__file__).resolve().parents[2] / "src" / "helios" / "demo_model"
    out = tmp_path / "agree.json"

    async def go() -> int:
        async with DummyServer(Behaviour(first_token_seconds=0.03, interval_seconds=0.004)) as server:
            arguments = [
                "x.py",
                "--base-url",
                server.url,
                "--model-folder",
                str(folder),
                "--clients",
                "plain",
            ]
            arguments += [
                "--count",
                "4",
                "--input",
                "16",
                "--output",
                "8",
                "--concurrency",
                "2",
                "--rounds",
                "1",
            ]
            monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(out)])
            return await asyncio.to_thread(agree.main)

    assert asyncio.run(go()) == 0
    (found,) = results.load_all(tmp_path)
    ours, plain = found["rounds"]["ours"][0], found["rounds"]["plain"][0]
    assert ours["output_tokens"] == plain["output_tokens"] == 32
    for one in (ours, plain):
        assert one["ttft_ms"] >= 30
        assert 3.9 <= one["tpot_ms"] < 30
    assert "Agreement with other clients" in report([found], None)


def test_vllms_client_is_called_and_read():
    """Flags and names of vLLM 0.32's result file."""
    options = Namespace(base_url="http://h:1", model_folder=Path("m"), input=512, output=128, count=4, concurrency=2,
                        vllm_python="py")  # fmt: skip
    command = vllm_command(options, Target("http://h:1", "name"), 7, "folder")
    assert command[:5] == ["py", "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    assert command[command.index("--random-input-len") + 1] == "512"
    assert command[command.index("--model") + 1] == "name"
    told = {"completed": 4, "num_prompts": 4, "median_ttft_ms": 10.0, "median_tpot_ms": 2.0, "median_itl_ms": 2.0,
            "output_throughput": 100.0, "total_input_tokens": 2048, "total_output_tokens": 512}  # fmt: skip
    read = from_vllm(told)
    found = differences({"ours": [read], "vllm": [{**read, "ttft_ms": 11.0}], "plain": []})
    assert found["vllm"]["difference"]["ttft_ms"] == pytest.approx(0.1)
    assert set(found) == {"ours", "vllm"}
    with pytest.raises(RuntimeError, match="3 of 4"):
        from_vllm(told | {"completed": 3})


def comparison() -> dict[str, Any]:
    """Two servers, one round, with ticks."""
    made = results.envelope(
        "compare", "h200-0.6b", servers=[{"name": name, "command": None} for name in ("helios", "vllm")],
        baseline="vllm", settings={"resident": "all at once"}, ready_seconds={"helios": 9.0, "vllm": 90.0},
    )  # fmt: skip
    spread = {"p50": 0.01, "p95": 0.02, "p99": 0.02, "max": 0.03}
    ticks = [[0.002 * i, 0.002 * i + 0.0015, 4, 100 * (i % 3), 4, 0] for i in range(20)]
    rounds: list[dict[str, Any]] = []
    for server, scale in (("helios", 1.0), ("vllm", 2.0)):
        for workload in ("poisson:rate=8", "offline256"):
            aggregates = {
                "completion_ratio": 1,
                "completed_requests": 3,
                "output_tokens_per_second": 100 / scale,
                "time_to_first_token_seconds": {key: scale * value for key, value in spread.items()},
                "inter_token_seconds": spread,
                "inter_token_histogram": [0] * 60 + [5] + [0] * 59,
                "timeline": {"slice_seconds": 0.1, "output_tokens": [1.0, 2.0], "prompt_tokens": [5, 0]},
            }
            rounds.append({"server": server, "workload": workload, "round": 1, "aggregates": aggregates,
                           "first_token_seconds": [0.01, 0.02], "warnings": [],
                           "ticks": trimmed(ticks, 0, 1) if server == "helios" else None})  # fmt: skip
    return made | {"rounds": rounds}


def test_targets_are_held_against_the_rounds():
    targets = [
        {"workload": "poisson", "metric": "time_to_first_token_seconds.p50", "over_baseline": True, "at_most": 0.6},
        {"workload": "offline256", "metric": "output_tokens_per_second", "at_least": 150},
        {"model": "4b", "workload": "poisson", "metric": "inter_token_seconds.p99", "at_most": 1},
    ]  # fmt: skip
    assert targets_of(comparison(), targets) == [
        ["poisson:rate=8", "TTFT p50, ms", "at most 0.6 x vllm", "0.5 x vllm", "met"],
        ["offline256", "output tokens/s", "at least 150", "100", "missed"],
    ]
    swapped = comparison() | {"baseline": "helios"}  # ratios to another server are held against nothing
    assert targets_of(swapped, targets) == [
        ["offline256", "output tokens/s", "at least 150", "50", "missed"],
    ]


def test_every_server_beside_the_baseline_is_held_against_the_targets():
    """Would catch a third server's numbers under the first one's name."""
    made = comparison()
    made["servers"].insert(1, {"name": "other", "command": None})
    for entry in [one for one in made["rounds"] if one["server"] == "helios"]:
        aggregates = entry["aggregates"] | {"output_tokens_per_second": 400}
        made["rounds"].append(entry | {"server": "other", "aggregates": aggregates, "ticks": None})
    target = {"workload": "offline256", "metric": "output_tokens_per_second", "at_least": 150}
    assert targets_of(made, [target]) == [
        ["offline256", "output tokens/s", "at least 150", "100", "missed", "400", "met"]
    ]


def test_offline_stands_beside_http():
    alone = {"label": "h200-0.6b", "workload": "offline256", "output_tokens_per_second": {"p50": 125.0}}
    lines = http_section([alone], [comparison()])
    assert lines[-2] == "| h200-0.6b | offline256 | 125 | 100 | 80.0% |"
    assert http_section([alone | {"label": "other"}], [comparison()]) == []


def test_offline_and_http_are_compared_on_the_same_requests():
    """Another seed has other lengths: its rate says nothing about what HTTP costs."""
    rounds = [{"seed": seed, "output_tokens_per_second": rate} for seed, rate in ((0, 900.0), (2, 110.0))]
    alone = {"label": "h200-0.6b", "workload": "offline256", "output_tokens_per_second": {"p50": 505.0}}
    over = comparison()
    for entry in over["rounds"]:
        entry["seed"] = 2
    lines = http_section([alone | {"rounds": rounds}], [over])
    assert lines[-2] == "| h200-0.6b | offline256 | 110 | 100 | 90.9% |"


def engine_results() -> list[dict[str, Any]]:
    """One of each kind, with numbers nobody measured."""
    latency = {"p50": 0.01, "p99": 0.02, "max": 0.05}
    row = {"failed": 0, "output_tokens_per_second": 10.0, "time_to_first_token_seconds": latency,
           "inter_token_seconds": latency, "cached_fraction": 0.5, "preemptions": 2}  # fmt: skip
    classes = {"linears": 50.0, "attention": 20.0, "norm, rope, kv write": 5.0, "activation": 5.0, "lm_head": 10.0,
               "sampling": 4.0, "begin/end": 1.0, "other": 1.0, "gaps": 4.0}  # fmt: skip
    profile = {"rows": 1, "context": 640, "step_microseconds": 98.0, "traced_step_microseconds": 100.0,
               "kernels_per_step": 200.0, "idle_share": 0.02, "microseconds": classes}  # fmt: skip
    step = {"rows": 1, "step_microseconds": 98.0, "floor_microseconds": 40.0, "of_limit": 0.4, "bytes": 1e9,
            "flops": 1e9, "bytes_per_second": 1e12, "flops_per_second": 1e12, "tokens_per_second": 1e4}  # fmt: skip
    line = {
        "microseconds": 50.0,
        "kernels": [["linears", 0, 20], ["attention", 22, 40]],
        "spans": [["plan", 1, 3]],
    }
    idle = {"workload": "offline256", "plain": row, "recorded": row, "idle": 0.03, "ticks": 9, "timeline": line,
            "host_microseconds_per_tick": {"plan": 5.0},
            "python": [{"function": "step", "where": "e.py:1", "calls": 1, "own_seconds": 0.1,
                        "total_seconds": 0.2}]}  # fmt: skip
    attention = {"decode_rows": 8, "context": 640, "prompt": 512, "two_calls_microseconds": 100.0,
                 "one_call_microseconds": 400.0}  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "step": {"profiles": [profile], "ladder": [step, step | {"rows": 8}],
                 "card": {"bandwidth": 4.3e12, "flops": 7.9e14}},
        "idle": {"workloads": [idle]},
        "studies": {"studies": {"budgets": [row | {"rate": 4.0, "budget": "512"}], "offline": [row | {"budget": "512"}],
                                "attention": [attention], "admission": [row | {"pages": 9, "admission": "reserve"}],
                                "offload": [row | {"host_memory": "0 MiB", "pages": 9}]}},
        "special-rows": {"rows": 64, "context": 640, "target": 1.1,
                         "kinds": {"plain": {"step_seconds": 0.003, "over_plain": 1.0},
                                   "json schema": {"step_seconds": 0.0031, "over_plain": 1.05}}},
        "kernels": {"rows": [{"kernel": "silu", "rows": 1, "us": 2.0, "pdl_us": None, "floor_us": 1.0,
                              "torch_us": 5.0}]},
    }  # fmt: skip
    return [results.envelope(kind, "made up", **content) for kind, content in contents.items()]


def test_every_section_is_written_and_what_is_missing_is_named(tmp_path: Path):
    """Would catch a section that needs a figure which no script writes."""
    for number, result in enumerate([comparison(), *engine_results()]):
        results.write(tmp_path / "r" / f"{number}.json", result)
    found = results.load_all(tmp_path / "r")
    page = report(found, None)
    for heading in ("Side by side", "One decode step and the card's limits", "Idle device", "Scheduling studies",
                    "One unusual row among many", "Kernels"):  # fmt: skip
        assert f"## {heading}" in page
    assert "| 1 x 640 | 98 | 100 | 200 | 2.0% | 50 |" in page
    assert "| json schema | 3.100 | 105.0% | met |" in page
    assert "at most 1 x vllm" in page
    last = page.strip().splitlines()[-1]
    assert last.startswith("Not measured: ")
    assert "agree.py" in last
    assert "idle.py" not in last


def test_attention_is_read_from_its_own_files(tmp_path: Path):
    """Its records have no envelope; a case that failed has no time."""
    records = [{"part": "prefill", "new": 512, "label": "fa2", "us": 20.0, "tflop_s": 100.0},
               {"part": "prefill", "new": 512, "label": "triton a", "us": 10.0, "tflop_s": 200.0},
               {"part": "chain", "case": "4B", "label": "x", "error": "no"}]  # fmt: skip
    file = tmp_path / "attention-4b.json"
    file.write_text(json.dumps({"gpu": "H200", "torch": "2.13", "results": records}))
    (tmp_path / "attention-other.json").write_text("[]")
    ((name, data),) = attention_files(tmp_path)
    lines = attention_section(name, data)
    assert lines[-2] == "| prefill: new 512 | 20.0 | 10.0 | triton a | 2.00 | 200 TFLOP/s |"


def test_every_figure_is_drawn_and_small(tmp_path: Path):
    pytest.importorskip("matplotlib")
    page = report([comparison(), *engine_results()], tmp_path / "r" / "figures")
    drawn = list((tmp_path / "r" / "figures").glob("*.svg"))
    assert len(drawn) == 12
    assert all(path.stat().st_size < 150_000 and path.name in page for path in drawn)
