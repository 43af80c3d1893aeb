"""Operation: start-up, health, keys, limits, metrics, disconnects, keep-alive, drain."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from helios.api.app import create_app, rehearse
from helios.api.state import ServerState
from helios.config import Settings
from helios.errors import StartupError
from helios.runtime.interfaces import TickRecord
from tests.api.conftest import MODEL, Server, ServerFactory, parse_events

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}]}


def get(server: Server, path: str, **kwargs: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with server.client() as client:
            return await client.get(path, **kwargs)

    return asyncio.run(go())


def test_port_answers_while_starting(server: Server) -> None:
    """Load balancers need the stage and 503, not a refused connection."""
    server.state.frontend, server.state.stage = None, "loading weights"
    health = get(server, "/health")
    assert health.status_code == 503
    assert health.json()["status"] == "starting"
    assert health.json()["stage"] == "loading weights"
    assert get(server, "/ready").status_code == 503
    assert get(server, "/live").status_code == 200
    for response in (asyncio.run(server.chat()), get(server, "/v1/models"), get(server, "/metrics")):
        assert response.status_code == 503
        assert "loading weights" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "5"


def test_rehearsal_asks_the_routes_that_generate(caplog: pytest.LogCaptureFixture) -> None:
    """Keys do not stop it, and it leaves no log line: nobody asked."""
    app = create_app(ServerState(Settings(api_keys="secret")))
    with caplog.at_level(logging.INFO):
        statuses = asyncio.run(rehearse(app))
    assert statuses == dict.fromkeys(
        ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"), 503
    )
    assert not caplog.records


def test_health_reports_what_the_server_is(server: Server) -> None:
    server.state.info["warmup_batch_sizes"] = [1, 2, 4]
    report = get(server, "/health").json()
    assert report["status"] == "ok"
    assert report["model_revision"] == "abc123"
    assert report["warmup_batch_sizes"] == [1, 2, 4]
    assert report["scheduler"]["pages_total"] == 8


def test_health_follows_the_worker(server: Server) -> None:
    """A hung or dead engine behind a green health check is the classic outage."""
    server.scheduler.age = 120.0
    assert get(server, "/health").json()["status"] == "stalled"
    assert get(server, "/live").status_code == 503
    server.scheduler.age = 0.1
    assert get(server, "/health").status_code == 200
    server.state.draining = True
    assert get(server, "/health").json()["status"] == "draining"
    assert get(server, "/ready").status_code == 503
    assert get(server, "/live").status_code == 200
    assert asyncio.run(server.chat()).json()["error"]["code"] == "shutting_down"
    server.state.draining = False
    server.scheduler.dead = True
    assert get(server, "/health").json()["status"] == "dead"
    response = asyncio.run(server.chat())
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
    assert response.headers["x-should-retry"] == "false"


def test_waiting_requests_end_when_the_worker_dies(server: Server) -> None:
    """A dead worker sends no events; nobody may wait for ever."""
    server.scheduler.tick_seconds = 0.05

    async def go() -> httpx.Response:
        task = asyncio.create_task(server.chat(max_tokens=200, ignore_eos=True))
        await asyncio.sleep(0.2)
        server.scheduler.dead = True
        return await asyncio.wait_for(task, 5)

    server.scheduler.script = lambda job, choice: [5] * 300
    assert asyncio.run(go()).json()["error"]["code"] == "engine_dead"


def test_cache_is_shown_and_cleared(server: Server) -> None:
    assert get(server, "/internal/cache").json()["tokens"] == 768

    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            return [await client.delete("/internal/cache"), await client.post("/internal/cache/clear")]

    for response in asyncio.run(go()):
        assert response.json() == {"cleared_blocks": 3}
    assert server.scheduler.cleared == 2


def test_ticks_are_shown_or_said_to_be_off(server: Server) -> None:
    """Would catch rows whose columns nobody can tell apart, and a 404 that does not say what to set."""
    off = get(server, "/internal/ticks")
    assert (off.status_code, off.json()["error"]["code"]) == (404, "tick_log_off")
    assert "HELIOS_TICK_LOG" in off.json()["error"]["message"]
    server.scheduler.ticks = [TickRecord(1.0, 1.5, 3, 256, 4, 0)]
    found = get(server, "/internal/ticks").json()
    assert found["columns"] == [
        "started",
        "finished",
        "decode_tokens",
        "prefill_tokens",
        "running",
        "waiting",
    ]
    assert found["ticks"] == [[1.0, 1.5, 3, 256, 4, 0]]


def test_clearing_is_guarded(server: Server) -> None:
    """Without keys only a local caller may slow the others down."""

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=server.app, client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.delete("/internal/cache")

    assert asyncio.run(go()).status_code == 401
    assert server.scheduler.cleared == 0


def test_models_and_version(server: Server) -> None:
    listed = get(server, "/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == [MODEL, "alias"]
    assert get(server, f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert get(server, "/v1/models/org%2Fmodel").json()["id"] == MODEL
    assert get(server, "/v1/models/other").status_code == 404
    assert set(get(server, "/version").json()) == {"version"}
    assert get(server, "/docs").status_code == 200


def test_keys_guard_everything_but_probes(make_server: ServerFactory, tmp_path: Path) -> None:
    """vLLM's key guards only some prefixes; here it is all but the probes."""
    file = tmp_path / "keys"
    file.write_text("# comment\nfrom-file\n\n")
    server = make_server(api_keys="one,two", api_key_file=file)
    server.say("x")
    for path in ("/health", "/live", "/ready"):
        assert get(server, path).status_code == 200
    for path in (
        "/v1/models",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/version",
        "/internal/cache",
        "/internal/ticks",
        "/nowhere",
    ):
        response = get(server, path)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "missing_api_key"
        assert response.headers["x-request-id"]
    wrong = get(server, "/v1/models", headers={"authorization": "Bearer nope"})
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert "nope" not in wrong.text
    for headers in (
        {"authorization": "Bearer one"},
        {"authorization": "bearer two"},
        {"authorization": "Bearer from-file"},
        {"x-api-key": "one"},
    ):
        assert get(server, "/v1/models", headers=headers).status_code == 200


def test_unreadable_key_file_stops_the_start(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "empty"):
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(StartupError, match="HELIOS_API_KEY_FILE"):
            create_app(ServerState(Settings(api_key_file=path)))


def test_concurrency_limit_is_per_key(make_server: ServerFactory) -> None:
    server = make_server(api_keys="one,two", max_requests_per_key=1)
    server.scheduler.tick_seconds = 0.05
    server.say("a b c d e f")

    async def go() -> tuple[int, int, httpx.Response, int]:
        async with server.client() as client:
            one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
            first = asyncio.create_task(client.post(CHAT, json={**BODY, "stream": True}, headers=one))
            await asyncio.sleep(0.1)
            second = await client.post(CHAT, json=BODY, headers=one)
            other = await client.post(CHAT, json=BODY, headers=two)
            done = await first
            again = await client.post(CHAT, json=BODY, headers=one)
            return done.status_code, other.status_code, second, again.status_code

    done, other, second, again = asyncio.run(go())
    assert (done, other, again) == (200, 200, 200)
    assert second.status_code == 429
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert second.headers["retry-after"] == "1"
    assert second.headers["x-should-retry"] == "true"


def test_cors_is_off_unless_set(server: Server, make_server: ServerFactory) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in get(server, "/v1/models", headers=headers).headers
    open_server = make_server(cors_origins="https://a.example", api_keys="k")

    async def preflight() -> httpx.Response:
        async with open_server.client() as client:
            return await client.options(CHAT, headers=headers)

    response = asyncio.run(preflight())
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    refused = get(open_server, "/v1/models", headers=headers)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_request_ids_are_labels_only(server: Server) -> None:
    """Two live requests with one client id must both succeed; a hostile id is replaced."""
    server.say("x")

    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            headers = {"x-request-id": "same-id"}
            calls = [client.post(CHAT, json=BODY, headers=headers) for _ in range(2)]
            bad = {"x-request-id": "a b\tc" * 50}
            return [*await asyncio.gather(*calls), await client.post(CHAT, json=BODY, headers=bad)]

    first, second, third = asyncio.run(go())
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same-id"
    assert first.json()["id"] != second.json()["id"]
    assert third.headers["x-request-id"].startswith("req_")


def test_metrics_have_vllms_stems(make_server: ServerFactory) -> None:
    server = make_server(metrics_alias="vllm")
    server.say("Hello there")
    asyncio.run(server.chat())
    asyncio.run(server.chat(model="nope"))
    text = get(server, "/metrics").text
    labels = '{engine="0",model_name="org/model"}'
    tokens = len(server.ids("Hello there")) + 1
    for prefix in ("helios:", "vllm:"):
        assert f"{prefix}generation_tokens_total{labels} {tokens}.0" in text
        assert (
            f'{prefix}request_success_total{{engine="0",finished_reason="stop",model_name="org/model"}} 1.0'
            in text
        )
        assert f"{prefix}time_to_first_token_seconds_count{labels} 1.0" in text
        assert f"{prefix}e2e_request_latency_seconds_count{labels} 1.0" in text
        assert f"{prefix}inter_token_latency_seconds_count{labels} {tokens - 1}.0" in text
        assert f"{prefix}num_requests_running{labels} 0.0" in text
        assert f"{prefix}kv_cache_usage_perc{labels} 0.25" in text
        assert f"{prefix}cache_config_info" in text
    assert 'le="0.001"' in text
    assert 'le="2560.0"' in text
    plain = make_server()
    plain.say("x")
    assert "vllm:" not in get(plain, "/metrics").text


def test_logs_hold_no_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts and answers are private."""
    server.say("SECRETANSWER")
    with caplog.at_level(logging.DEBUG):
        asyncio.run(server.chat(messages=[{"role": "user", "content": "SECRETPROMPT"}]))
    assert "status=200" in caplog.text
    assert "completion_tokens=" in caplog.text
    assert "SECRET" not in caplog.text


def run_asgi(server: Server, body: bytes, leave_after: float) -> tuple[list[dict[str, Any]], float]:
    """Call the app with a client that goes away after some seconds; messages, and how long it took."""

    async def go() -> tuple[list[dict[str, Any]], float]:
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.sleep(leave_after)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1),
            "server": ("test", 80), "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        start = time.perf_counter()
        await server.app(scope, receive, send)
        return sent, time.perf_counter() - start

    return asyncio.run(asyncio.wait_for(go(), 20))


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_disconnect_cancels_the_job(server: Server, stream: bytes) -> None:
    """``curl -m 1`` on a long answer must not keep the engine busy, streaming or not."""
    server.scheduler.tick_seconds = 0.01
    server.scheduler.script = lambda job, choice: [5] * 2000
    body = (
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1900,"ignore_eos":true,"stream":'
        + stream
        + b"}"
    )
    _, seconds = run_asgi(server, body, leave_after=0.2)
    assert seconds < 5
    assert server.scheduler.jobs[-1].cancelled
    deadline = time.perf_counter() + 5
    while server.scheduler.snapshot()["running"] and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert server.scheduler.snapshot()["running"] == 0
    assert server.frontend.num_active == 0


def test_silence_is_broken_by_comments(make_server: ServerFactory) -> None:
    """Proxies close connections that are silent during a long prefill."""
    server = make_server(sse_keepalive_seconds=0.1)
    server.say("x")
    server.scheduler.first_token_seconds = 0.45
    response = asyncio.run(server.chat(stream=True))
    assert 2 <= response.text.count(": keep-alive\n\n") <= 5
    assert response.text.startswith(": keep-alive")
    assert parse_events(response.text)[-1] == "[DONE]"


def test_steady_stream_has_no_comments(make_server: ServerFactory) -> None:
    """Only silence is broken."""
    server = make_server(sse_keepalive_seconds=0.2)
    server.scheduler.tick_seconds = 0.02
    server.scheduler.script = lambda job, choice: [5] * 30
    response = asyncio.run(server.chat(stream=True, max_tokens=30, ignore_eos=True))
    assert "keep-alive" not in response.text


def test_drain_finishes_what_it_can_and_tells_the_rest(server: Server) -> None:
    """Nothing may be cut silently."""
    server.scheduler.tick_seconds = 0.02
    server.scheduler.script = lambda job, choice: [5] * (5 if job.max_tokens == 5 else 500)

    async def go() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        short = asyncio.create_task(server.chat(max_tokens=5, ignore_eos=True))
        long = asyncio.create_task(server.chat(max_tokens=400, ignore_eos=True, stream=True))
        body = asyncio.create_task(server.chat(max_tokens=401, ignore_eos=True))
        await asyncio.sleep(0.05)
        server.state.draining = True
        await server.frontend.drain(0.5)
        return await short, await long, await body

    short, long, body = asyncio.run(go())
    assert short.json()["choices"][0]["finish_reason"] == "length"
    events = parse_events(long.text)
    assert events[-2]["error"]["code"] == "shutting_down"
    assert events[-1] == "[DONE]"
    assert body.status_code == 503
    assert all(job.cancelled or job.is_finished for job in server.scheduler.jobs)


def test_tokenize_and_back(server: Server) -> None:
    async def go() -> tuple[Any, Any, Any, Any]:
        async with server.client() as client:
            text = await client.post("/tokenize", json={"prompt": "Grüße", "return_token_strs": True})
            chat = await client.post("/tokenize", json=BODY)
            back = await client.post("/detokenize", json={"tokens": text.json()["tokens"]})
            bad = await client.post("/detokenize", json={"tokens": [10**9]})
            return text.json(), chat.json(), back.json(), bad

    text, chat, back, bad = asyncio.run(go())
    assert text["tokens"] == server.ids("Grüße")
    assert text["count"] == len(text["tokens"]) == len(text["token_strs"])
    assert back == {"prompt": "Grüße"}
    assert bad.status_code == 400
    server.say("x")
    asyncio.run(server.chat())
    assert chat["tokens"] == server.scheduler.jobs[-1].prompt_ids
