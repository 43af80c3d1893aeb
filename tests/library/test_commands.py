"""The commands beside `helios serve`, in this process; one in its own, for signals and pipes."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helios.cli import main
from tests.demo.conftest import serving
from tests.e2e.server import environment
from tests.library.conftest import question

DEMO = ("--model", "demo", "--device", "cpu", "--max-batch-size", "4", "--max-model-len", "1024")
QUESTION = "What is paged attention?"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(max_batch_size=4, max_model_len=1024, api_keys="sk-1") as url:
        yield url


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert isinstance(raised.value.code, int)
    return raised.value.code


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate_streams_one_prompt_and_lists_many(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch flags that do not reach the model, or output that a script cannot read."""
    type_in(monkeypatch, "The KV cache\n")
    assert run("generate", *DEMO, "--temperature=0", "--max-tokens=12") == 0
    streamed = capsys.readouterr().out
    words = ["--prompt=The KV cache", "--prompt=The", "--n=2", "--json", "--temperature=0", "--max-tokens=12"]
    assert run("generate", *DEMO, *words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], line["index"]) for line in lines] == [
        ("The KV cache", 0),
        ("The KV cache", 1),
        ("The", 0),
        ("The", 1),
    ]
    assert lines[0]["text"] + "\n" == streamed
    assert lines[0]["completion_tokens"] == 12


def test_chat_here_and_on_a_server_say_the_same(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a dialogue that is not kept, or not forgotten by /reset."""
    script = f"{QUESTION}\n/reset\n\n/help\n{QUESTION}\n/quit\nnever read\n"
    type_in(monkeypatch, script)
    assert run("chat", *DEMO, "--temperature=0", "--max-tokens=20") == 0
    here = capsys.readouterr()
    first, second = here.out.splitlines()
    assert first == second
    assert "/reset" in here.err
    type_in(monkeypatch, script)
    assert run("chat", "--url", server, "--api-key=sk-1", "--temperature=0", "--max-tokens=20") == 0
    assert capsys.readouterr().out == here.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-key=wrong",), "(HTTP 401)"),
        (("--api-key=sk-1", "--model=other"), "The model 'other' does not exist"),
        (("--api-key=sk-1", "--max-tokens=5000"), "maximum context length is 1024"),
    ],
)
def test_a_server_that_refuses_is_one_line(
    server: str,
    flags: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    type_in(monkeypatch, "hello\n")
    assert run("chat", "--url", server + "/v1", *flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("chat", "--url", "http://127.0.0.1:9"),
            "error: no answer from http://127.0.0.1:9/v1/chat/completions",
        ),
        (("generate", "--prompt=a", "--temperature=3"), "error: Invalid 'temperature': "),
        (("generate", "--prompt=a", "--max-batch-size=0"), "error: HELIOS_MAX_BATCH_SIZE='0': "),
        (("generate", *DEMO, "--prompt=a", "--max-tokens=5000"), "error: This model's maximum context"),
        (("generate",), "error: the prompt on standard input is empty"),
        (("bench", "--num-prompts=0"), "error: --num-prompts 0: at least 1"),
        (("info", "--model=./nowhere"), "error: HELIOS_MODEL_ID='./nowhere': "),
    ],
)
def test_what_goes_wrong_is_one_line(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Would catch a traceback, or a model that loads before a wrong flag is seen."""
    type_in(monkeypatch, "hello" if words[0] == "chat" else "")
    assert run(*words) == 1
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_bench_prints_rates_and_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", *DEMO, "--num-prompts=6", "--input-len=20", "--output-len=5") == 0
    out = capsys.readouterr().out
    for line in ("output tokens/s", "all tokens/s", "first token, ms", "between tokens, ms"):
        assert line in out


def test_info_shows_shape_and_memory_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", *DEMO) == 0
    out = capsys.readouterr().out
    assert "shape           6 layers of width 256" in out
    assert "KV pages " in out


def test_an_interrupt_and_a_closed_pipe_end_quietly(tmp_path: Path) -> None:
    """Would catch a traceback on Ctrl-C, and an exception when `head` has read enough."""
    process = subprocess.Popen(
        [sys.executable, "-m", "helios", "chat", *DEMO, "--max-tokens=10"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question()[0]["content"] + "\n")
    process.stdin.flush()
    assert process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)  # it waits for the next question
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    command = f"{sys.executable} -m helios generate {' '.join(DEMO)} --prompt=The --n=4 --seed=1 | head -c 3"
    piped = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert piped.stderr == ""
