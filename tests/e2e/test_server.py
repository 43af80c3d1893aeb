"""The whole way: a served process, its answers, and how it ends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import PATIENCE, Server, free_port, scheduler, wait_for
from tests.model.checkpoints import TINY, write_model_folder

LONG = {"ignore_eos": True, "temperature": 0, "stream": True}
SECRET = "the launch code is zero"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(
        tmp_path_factory.mktemp("models") / "tiny", TINY | {"max_position_embeddings": 8192}
    )


@dataclass
class Started:
    """A ready server and what its health said until then."""

    server: Server
    client: httpx.Client
    before: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture(scope="module")
def started(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    port = free_port()
    cwd = tmp_path_factory.mktemp("cwd")
    server = Server(
        folder,
        cwd,
        "--num-pages=64",
        "--max-batch-size=2",
        "--max-queue-size=2",
        "--max-model-len=8000",
        port=port,
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
        made = Started(server, client)

        def ready() -> bool:
            assert server.process.poll() is None, server.log
            try:
                response = client.get("/health")
            except httpx.ConnectError:
                return False
            made.before.append((response.status_code, response.json()))
            return response.status_code == 200

        try:
            wait_for(ready)
            yield made
        finally:
            server.close()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def test_health_tells_the_stage_and_then_the_facts(started: Started) -> None:
    """Would catch a port that is closed, or a server that calls itself healthy, before it can serve; and a
    fact that monitoring needs and that is missing."""
    statuses = [status for status, _ in started.before]
    assert statuses[0] == 503
    assert statuses[-1] == 200
    first, last = started.before[0][1], started.before[-1][1]
    assert first["status"] == "starting"
    assert first["stage"]
    assert first["error"]["code"] == "not_ready"
    assert last["status"] == "ok"
    assert (last["model"], last["model_revision"]) == ("tiny", "local")
    assert last["warmup_batch_sizes"] == [1, 2]
    assert last["memory"]["num_pages"] == 64
    assert last["memory"]["budget_bytes"] > last["memory"]["kv_bytes"] > 0
    assert (last["scheduler"]["pages_total"], last["scheduler"]["pages_free"]) == (64, 64)
    assert last["scheduler"]["max_queue_size"] == 2


def test_chat_whole_and_streamed(started: Started) -> None:
    """Would catch a chat that does not come through the real tokenizer, template, engine and model, a
    stream that differs from the whole answer, or an answer without usage and timings."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = started.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    whole = response.json()
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    usage = whole["usage"]
    assert usage["completion_tokens"] == 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    assert usage["prompt_tokens"] > len(SECRET)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    for name in (
        "tokenization_seconds", "queue_seconds", "prefix_lookup_seconds", "restore_seconds", "prefill_seconds",
        "decode_seconds", "decode_compute_seconds", "cache_store_seconds", "time_to_first_token_seconds",
        "decode_tokens_per_second", "prefix_cache_hit_rate",
    ):  # fmt: skip
        assert whole["timings"][name] >= 0
    assert whole["timings"]["time_to_first_token_seconds"] > 0

    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with started.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        chunks = events(stream)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == (choice["message"]["content"] or "")
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]


def test_completions_whole_and_streamed_and_from_the_cache(started: Started) -> None:
    """Would catch text and token-id prompts that give different answers, and a prefix hit over HTTP that is
    missing or wrong."""
    prompt = "once upon a time " * 20
    body: dict[str, Any] = {
        "model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    whole = started.client.post("/v1/completions", json=body).json()
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    again = started.client.post("/v1/completions", json=body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    assert again["choices"][0]["text"] == whole["choices"][0]["text"]
    with started.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in events(stream))
    assert text == whole["choices"][0]["text"]
    cache = started.client.get("/internal/cache").json()
    assert cache["num_blocks"] >= 1
    assert cache["hit_tokens"] >= 512


def test_disconnect_frees_pages_within_a_second(started: Started) -> None:
    """Would catch a client that has gone and whose answer is computed to its end, streamed or not."""
    body: dict[str, Any] = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 7000, **LONG}
    with started.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: dropping the iterator closes the connection
        next(lines)
        assert scheduler(started.client)["pages_referenced"] > 0
    wait_for(lambda: scheduler(started.client)["pages_referenced"] == 0, seconds=1)

    finished = scheduler(started.client)["finished"]
    raw = json.dumps(body | {"stream": False}).encode()
    host, port = started.client.base_url.host, started.client.base_url.port
    with socket.create_connection((host, port or 0)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
        wait_for(lambda: scheduler(started.client)["running"] == 1)
    wait_for(lambda: scheduler(started.client)["pages_referenced"] == 0, seconds=1)
    assert scheduler(started.client)["finished"] == finished + 1


def test_full_queue_is_503_with_retry_after(started: Started) -> None:
    """Would catch a queue without a bound, a refusal that clients do not retry, or a server that does not
    take requests again afterwards."""
    body: dict[str, Any] = {"model": "tiny", "prompt": "x" * 10, "max_tokens": 7000, **LONG}
    with ExitStack() as first, ExitStack() as second:

        def stream(stack: ExitStack) -> None:
            response = stack.enter_context(started.client.stream("POST", "/v1/completions", json=body))
            assert response.status_code == 200

        for number in (1, 2):
            stream(first)
            wait_for(lambda number=number: scheduler(started.client)["running"] == number)
        waiting = [threading.Thread(target=stream, args=(second,)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_for(lambda: scheduler(started.client)["waiting"] == 2)
        refused = started.client.post("/v1/completions", json=body | {"stream": False})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert started.client.get("/health").status_code == 200
        first.close()  # the running ones go, so those that wait come in
        for thread in waiting:
            thread.join(PATIENCE)
        wait_for(lambda: scheduler(started.client)["running"] == 2)
    wait_for(lambda: scheduler(started.client)["pages_referenced"] == 0)
    accepted = started.client.post("/v1/completions", json=body | {"stream": False, "max_tokens": 2})
    assert accepted.status_code == 200


def test_too_long_a_request_is_400_at_once(started: Started) -> None:
    """Would catch a request that can never fit and waits for ever."""
    body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 9000}
    response = started.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_log_has_requests_and_no_text(started: Started) -> None:
    """Would catch prompts in the log, or requests that leave no trace."""
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": 2}
    response = started.client.post("/v1/completions", json=body, headers={"x-request-id": "trace-me"})
    assert response.headers["x-request-id"] == "trace-me"
    wait_for(lambda: "trace-me" in started.server.log)
    assert "admitted request=" in started.server.log
    assert "launch code" not in started.server.log


def test_taken_port_is_one_line(started: Started, folder: Path, tmp_path: Path) -> None:
    """Would catch a traceback, minutes of loading before the port is tried, or a success status."""
    port = started.client.base_url.port
    server = Server(folder, tmp_path, port=port or 0)
    assert server.wait() == 1
    assert len(server.errors) == 1
    assert server.errors[0].startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert "--port" in server.errors[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"num_hidden_layers": 3}, "missing tensors"),
    ],
)
def test_wrong_model_is_one_line(folder: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Would catch a process that stays up without a model, or one that dies with a traceback."""
    model = write_model_folder(tmp_path / "wrong")
    (model / "config.json").write_text(json.dumps(TINY | change))
    server = Server(model, tmp_path)
    assert server.wait() == 1
    assert "Traceback" not in server.log
    errors = [line for line in server.errors if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert said in errors[0]


def test_sigterm_finishes_running_streams_and_refuses_new_requests(folder: Path, tmp_path: Path) -> None:
    """Would catch answers cut off by a rolling restart, requests taken that cannot be finished, or a process
    that does not end."""
    server = Server(folder, tmp_path, "--num-pages=16", "--max-batch-size=2", "--max-model-len=2048")
    try:
        url = server.wait_until_ready()
        body: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 1900, **LONG}
        with (
            httpx.Client(base_url=url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            first = next(lines)
            server.terminate()
            wait_for(lambda: client.get("/health").json()["status"] == "draining")
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            data = [line.removeprefix("data: ") for line in [first, *lines] if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        chunks = [json.loads(text) for text in data[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]
        assert server.wait() == 0
        assert "Traceback" not in server.log
    finally:
        if server.process.poll() is None:
            server.close()


def test_sigterm_while_loading_ends_the_process(folder: Path, tmp_path: Path) -> None:
    """Would catch a start that cannot be interrupted."""
    port = free_port()
    server = Server(folder, tmp_path, port=port)
    try:

        def listening() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(listening)
        server.terminate()
        assert server.process.wait(PATIENCE) == 0
    finally:
        server.close()
