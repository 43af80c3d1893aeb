"""Servers from TOML, their processes, the table of ratios, several client processes, and the report."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.compare import complete_rounds, table, verdict
from benchmarks.load import Target, run_loop, run_workload
from benchmarks.report import merged, report
from benchmarks.servers import ConfigError, RunningServer, ServerError, load_config
from benchmarks.workloads import build

from benchmarks import compare, cpu, offline, results, run, startup

DUMMY = Path(__file__).with_name("dummy_server.py")


def entry(
    server: str, number: int, rate: float, first: float, workload: str = "batch1", ratio: float = 1.0
) -> Any:
    aggregates = {
        "completion_ratio": ratio,
        "output_tokens_per_second": rate,
        "time_to_first_token_seconds": {"p50": first, "p99": first},
    }
    return {"server": server, "workload": workload, "round": number, "aggregates": aggregates, "warnings": []}


def test_ratios_are_formed_within_rounds():
    """A card that slows down between rounds must not blur the ratio of what ran side by side."""
    rounds = [
        entry("h", 1, 200, 0.01),
        entry("v", 1, 100, 0.02),
        entry("h", 2, 100, 0.03),
        entry("v", 2, 50, 0.02),
    ]
    lines = table(rounds, ["h", "v"], "v").splitlines()
    assert lines[2] == "| batch1 | output tokens/s | 150 (100-200) | 75 (50-100) | 2 (2-2) ahead |"
    assert lines[3] == "| batch1 | TTFT p50, ms | 20 (10-30) | 20 (20-20) | 1 (0.5-1.5) level |"


def test_rounds_that_lack_a_server_or_a_request_do_not_count():
    rounds = [entry("h", 1, 200, 0.01), entry("h", 2, 1, 0.01), entry("v", 2, 1, 0.01, ratio=0.9)]
    assert complete_rounds(rounds, ["h", "v"]) == {"batch1": []}
    assert "no complete round" in table(rounds, ["h", "v"], "v")


def test_verdicts():
    assert verdict([1.1, 1.2], True) == "ahead"
    assert verdict([1.1, 1.2], False) == "behind"
    assert verdict([0.99, 1.3], True) == "level"
    assert verdict([1.01, 1.01], True) == "level"


def config(tmp_path: Path, *servers: str, head: str = "") -> Path:
    path = tmp_path / "servers.toml"
    path.write_text(head + "\n".join(servers))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def dummy(name: str, port: int, more: str = "") -> str:
    command = f"'{sys.executable}' '{DUMMY}' --port {port} --interval-ms 1 {more}"
    return f'[[servers]]\nname = "{name}"\nbase_url = "http://127.0.0.1:{port}"\ncommand = "{command}"\n'


def test_variables_and_mistakes_of_a_config(tmp_path: Path):
    one = '[[servers]]\nname = "a"\nbase_url = "http://${HOST}:1"\n'
    one += 'command = "serve ${MODEL} -x"\nenv = {K = "${MODEL}"}\n'
    spec = load_config(config(tmp_path, one), {"HOST": "h", "MODEL": "my model"}).servers[0]
    assert (spec.base_url, spec.arguments) == ("http://h:1", ("serve", "my model", "-x"))
    assert (spec.command, spec.env) == ("serve ${MODEL} -x", {"K": "my model"})
    for text, word in (
        (one, "no value for 'MODEL'"),
        (one + "port = 3\n", "unknown key 'port'"),
        (one.replace('"a"', "3"), "wrong type"),
        ((one + one).replace("${MODEL}", "m"), "different names"),
        ("", "servers"),
        ('warm_up = ["nothing"]\n' + one.replace("${MODEL}", "m"), "unknown workload"),
        ("x = = 1", "servers.toml"),
    ):
        with pytest.raises(ValueError, match=word):
            load_config(config(tmp_path, text), {"HOST": "h"})
    with pytest.raises(ConfigError):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize("name", ["h200-0.6b.toml", "h200-4b.toml"])
def test_committed_configs_load(name: str, tmp_path: Path):
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    variables = {"PYTHON": "python", "MODEL": str(tmp_path), "HELIOS_AT": "8100", "VLLM_AT": "8101"}
    loaded = load_config(results.ROOT / "configs" / name, variables)
    assert [server.name for server in loaded.servers] == ["helios", "vllm"]
    assert loaded.shape is not None


def test_a_server_that_dies_says_why_and_a_running_one_is_stopped(tmp_path: Path):
    port = free_port()
    specs = load_config(config(tmp_path, dummy("ok", port), dummy("bad", free_port(), "--fail"))).servers
    with RunningServer(specs[0], tmp_path / "ok.log") as server:
        assert run_loop(server.wait_ready(0.02)) > 0
        assert server.process is not None
        pid = server.process.pid
        with pytest.raises(ServerError, match="already answers"), RunningServer(specs[0], tmp_path / "2.log"):
            pass
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
    with (
        pytest.raises(ServerError, match="cannot start: no such model"),
        RunningServer(specs[1], tmp_path / "bad.log") as server,
    ):
        run_loop(server.wait_ready(0.02))


def call(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__.rpartition('.')[2]}.py", *map(str, arguments)])
    monkeypatch.setattr(
        "benchmarks.servers.signal.signal", lambda *_: None
    )  # leave pytest's own handlers alone
    return module.main()


def test_two_servers_are_compared_reported_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The whole way: start, warm, alternate, write, table, report (with figures where matplotlib is)."""
    path = config(
        tmp_path,
        dummy("a", free_port()),
        dummy("b", free_port()),
        head='warm_up = ["batch1:count=1,output=2"]\n',
    )
    out = tmp_path / "results" / "c.json"
    what = ("--workloads", "batch1:count=2,output=3", "--rounds", 2, "--label", "pair")
    code = call(monkeypatch, compare, path, *what, "--logs", tmp_path, "--out", out)
    printed = capsys.readouterr()
    assert code == 0, printed
    assert "| batch1:count=2,output=3 | output tokens/s |" in printed.out
    data = json.loads(out.read_text())
    order = [(one["round"], one["server"]) for one in data["rounds"]]
    assert order == [(1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert len({one["seed"] for one in data["rounds"]}) == 2
    assert str(tmp_path) not in json.dumps(data["command"])
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        figures = None
    else:
        figures = out.parent / "figures"
    text = report(results.load_all(out.parent), figures)
    assert "a / b" in text
    assert figures is None or len(list(figures.glob("*.svg"))) == 2
    assert len(merged([data, data])[0]["rounds"]) == 8


def test_startup_names_stages_and_first_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "s.json"
    path = config(tmp_path, dummy("a", free_port()))
    assert call(monkeypatch, startup, path, "--logs", tmp_path, "--out", out) == 0
    start = json.loads(out.read_text())["starts"]["a"][0]
    assert start["stages"][-1]["stage"] == "ready"
    assert start["healthy_seconds"] < start["first_token_seconds"]
    assert "healthy_seconds" in report(results.load_all(tmp_path), None)


def test_several_client_processes_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    spec = load_config(config(tmp_path, dummy("a", port))).servers[0]
    with RunningServer(spec, tmp_path / "a.log") as server:
        run_loop(server.wait_ready(0.02))
        merged_run = run_workload(
            Target(spec.base_url), build("batch1:count=5,output=3", 0), concurrency=4, processes=2
        )
        out = tmp_path / "r.json"
        arguments = (
            "--workload",
            "batch1:count=30,output=3",
            "--base-url",
            spec.base_url,
            "--out",
            out,
            "--quiet",
            "--label",
            "x",
        )
        assert call(monkeypatch, run, *arguments) == 0
    assert [record.session for record in merged_run.records] == list(range(5))
    assert all(record.error is None for record in merged_run.records)
    assert len(merged_run.clients) == 2
    data = json.loads(out.read_text())
    assert len(data["requests"]) == 30
    assert data["aggregates"]["completion_ratio"] == 1
    assert "batch1:count=30" in report(results.load_all(tmp_path), None)


def test_run_fails_clearly_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert call(monkeypatch, run, "--workload", "batch1", "--base-url", "http://127.0.0.1:9") == 2
    assert "is not ready" in capsys.readouterr().err


def test_scripts_run_from_anywhere(tmp_path: Path):
    """Each puts the repository on the path by itself: no installation, no working folder."""
    command = [sys.executable, str(results.ROOT / "run.py"), "--dataset", "absent.json"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (answer.returncode, "absent.json" in answer.stderr) == (2, True)


def test_offline_takes_only_token_prompts_that_come_at_once():
    prompts, outputs = offline.token_prompts(build("offline256:count=3", 0))
    assert (len(prompts), len(outputs)) == (3, 3)
    for spec in ("multiturn", "poisson:rate=8"):
        with pytest.raises(ValueError, match="offline runs"):
            offline.token_prompts(build(spec, 0))


def test_matrix_products_and_their_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    out = tmp_path / "cpu.json"
    assert (
        call(monkeypatch, cpu, "--model-config", tmp_path, "--rows", 1, 2, "--repeats", 2, "--out", out) == 0
    )
    assert [step["rows"] for step in json.loads(out.read_text())["steps"]] == [1, 2]
    assert cpu.step_ratio([0.3, 0.2, 0.1], [0.1, 0.1]) == pytest.approx(2)
    with pytest.raises(ValueError, match="at least one"):
        cpu.step_ratio([], [0.1])


@pytest.mark.parametrize("together", [(), ("--together",)])
def test_servers_start_in_turn_or_together(
    together: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In turn, the second loads while the first is warmed; both ways both are measured and timed."""
    order: list[str] = []
    warm, enter = compare.Comparison.warm, RunningServer.__enter__

    def warmed(self: compare.Comparison, server: RunningServer) -> Target:
        order.append(f"warm {server.spec.name}")
        return warm(self, server)

    def entered(self: RunningServer) -> RunningServer:
        order.append(f"start {self.spec.name}")
        return enter(self)

    monkeypatch.setattr(compare.Comparison, "warm", warmed)
    monkeypatch.setattr(RunningServer, "__enter__", entered)
    path = config(tmp_path, dummy("a", free_port()), dummy("b", free_port()))
    out = tmp_path / "c.json"
    what = ("--workloads", "batch1:count=1,output=2", "--rounds", 1, *together)
    assert call(monkeypatch, compare, path, *what, "--logs", tmp_path, "--out", out) == 0
    assert order == ["start a", "start b", "warm a", "warm b"]
    data = json.loads(out.read_text())
    assert set(data["ready_seconds"]) == {"a", "b"}
    assert all(entry["ticks"] is None for entry in data["rounds"])
