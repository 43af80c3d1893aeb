"""The client against hand-made bytes and against the dummy server."""

import asyncio
from typing import Any

import pytest
from benchmarks.client import Exchange, ProtocolError, ResponseParser, SseReader, clock
from benchmarks.health import health_of
from benchmarks.load import ClientLoad, Record, Run, Target, drive, encode, split
from benchmarks.metrics import summarise
from benchmarks.run import prepare
from benchmarks.workloads import Ask, Workload, build
from dummy_server import Behaviour, DummyServer, chunk, event

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = b'data: {"a":1}\n\n: keep-alive\n\ndata: {"b":\ndata: 2}\r\n\r\n'
EVENTS += b'event: x\ndata:{"c":3}\n\ndata: [DONE]\n\n'
FOUND = [b'{"a":1}', b'{"b":\n2}', b'{"c":3}', b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_events_survive_any_split_of_chunks_and_reads(size: int):
    """Reads end anywhere: inside a chunk's size, between \\r and \\n, in the middle of an event."""
    body = b"".join(chunk(EVENTS[i : i + 11]) for i in range(0, len(EVENTS), 11)) + b"0\r\n\r\n"
    data = HEAD + body
    parser, reader, found = ResponseParser(), SseReader(), []
    for start in range(0, len(data), size):
        assert not parser.done
        found += reader.feed(parser.feed(data[start : start + size]))
    assert found == FOUND
    assert parser.done


def test_a_body_ends_at_its_length_or_at_the_close():
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nab") == b"ab"
    assert (parser.feed(b"cde"), parser.done, parser.status) == (b"cde", True, 404)
    parser = ResponseParser()
    parser.feed(b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert not parser.done
    parser.end()
    assert parser.done
    for wrong in (b"SSH-2.0-x\r\n\r\n", HEAD + b"zz\r\n"):
        with pytest.raises(ProtocolError):
            ResponseParser().feed(wrong)


def timed(events: list[tuple[float, Any]]) -> Exchange:
    """An exchange that got each event at the given time."""
    exchange = Exchange(stream=True, keep_text=False)
    exchange.feed(HEAD, 0.0)
    for at, body in events:
        exchange.feed(chunk(b"data: [DONE]\n\n" if body == "done" else event(body)), at)
    exchange.feed(b"0\r\n\r\n", events[-1][0])
    return exchange


def completion(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": reason}], **more}


def chat(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": reason}]}


def test_what_counts_as_a_token():
    """A chat's role chunk is no first token; an empty chunk that gives the reason is no last one."""
    usage = {"prompt_tokens": 4, "completion_tokens": 3}
    tokens = [(1, chat(role="assistant", content="")), (2, chat(content="a")), (3, chat(content="b"))]
    stream = timed([*tokens, (4, chat("length")), (5, {"choices": [], "usage": usage}), (6, "done")])
    assert (stream.first, stream.last, list(stream.chunk_times)) == (2, 3, [2, 3])
    assert (stream.usage, stream.finish_reason, stream.error, stream.ended) == (usage, "length", None, 6)
    # In completions a chunk without text is half a character: a token. The last may bring text and reason.
    stream = timed([(1, completion("")), (2, completion("x")), (3, completion("y", "stop")), (3, "done")])
    assert (list(stream.chunk_times), stream.finish_reason) == ([1, 2, 3], "stop")
    assert list(timed([(1, completion("", "length")), (1, "done")]).chunk_times) == [1]


def test_text_that_looks_like_usage_is_text():
    """The cheap scan for keys must not take a generated '"usage":{' for the real thing."""
    stream = timed(
        [(1, completion("a")), (2, completion('"usage":{"x":1}')), (3, completion("", "stop")), (4, "done")]
    )
    assert (stream.usage, list(stream.chunk_times)) == ({}, [1, 2])


def test_errors_in_and_of_the_stream():
    stream = timed([(1, completion("a")), (2, {"error": {"message": "out of pages"}})])
    assert stream.error == "in the stream: out of pages"
    assert "without [DONE]" in (timed([(1, completion("a"))]).error or "")
    with pytest.raises(ProtocolError):
        Exchange(True, False).feed(HEAD + chunk(b"data: {oops\n\n"), 1.0)


def run(behaviour: Behaviour, workload: Workload, **target: Any) -> tuple[list[Record], Behaviour]:
    async def go() -> list[Record]:
        async with DummyServer(behaviour) as server:
            sessions = list(enumerate(workload.sessions))
            records, _ = await drive(Target(server.url, **target), sessions, workload.concurrency, clock())
            return records

    return asyncio.run(go()), behaviour


def test_streamed_run_counts_exactly():
    workload = build("batch1:count=3,output=5,prompt=20", 0)
    records, seen = run(Behaviour(keep_alive=True, cached_tokens=4), workload)
    assert [(r.prompt_tokens, r.completion_tokens, r.cached_tokens, len(r.chunk_times)) for r in records] == [
        (20, 5, 4, 5)
    ] * 3
    assert all(r.error is None and r.finish_reason == "length" for r in records)
    body = seen.bodies[0]
    assert body["model"] == "dummy"
    assert (body["ignore_eos"], body["top_p"], body["stream_options"]) == (True, 1.0, {"include_usage": True})


def test_several_tokens_a_chunk_leave_tpot_right():
    records, _ = run(Behaviour(tokens_per_chunk=4), build("batch1:count=1,output=16", 0))
    assert (records[0].completion_tokens, len(records[0].chunk_times)) == (16, 4)
    found = summarise(_run(records), 1)
    assert found["tokens_per_chunk"] == 4
    assert found["inter_token_seconds"]["count"] == 3


def _run(records: list[Record]) -> Run:
    return Run(records, 0.0, [ClientLoad(0.1, 0.001)])


def test_answers_that_are_not_streamed_use_the_servers_timings():
    records, _ = run(Behaviour(close=True), build("batch1:count=2,output=5", 0), stream=False)
    found = summarise(_run(records), 2)
    assert found["time_to_first_token_seconds"]["p50"] == 0.25
    assert found["decode_tokens_per_second"]["p50"] == 80.0
    assert found["output_tokens"] == 10


def test_without_usage_chunks_are_counted():
    records, _ = run(Behaviour(usage=False), build("batch1:count=1,output=5,prompt=9", 0))
    assert (records[0].counted_from, records[0].completion_tokens, records[0].prompt_tokens) == (
        "chunks",
        5,
        9,
    )


@pytest.mark.parametrize(
    ("behaviour", "word"),
    [
        (Behaviour(error_after=2), "the page pool is gone"),
        (Behaviour(drop_after=2), "connection lost"),
        (Behaviour(refuse=(503, "queue full")), "HTTP 503: queue full"),
        (Behaviour(first_token_seconds=5), "no complete answer within"),
    ],
)
def test_a_failed_request_is_a_record_with_its_reason(behaviour: Behaviour, word: str):
    records, _ = run(behaviour, build("batch1:count=2,output=5", 0), request_timeout_seconds=0.2)
    assert len(records) == 2
    assert all(word in (record.error or "") for record in records)
    assert summarise(_run(records), 2)["completion_ratio"] == 0


def test_chats_grow_by_the_servers_answers():
    _, seen = run(Behaviour(), build("multiturn:sessions=1,turns=3,output=2", 0))
    assert [len(body["messages"]) for body in seen.bodies] == [2, 4, 6]
    assert seen.bodies[1]["messages"][2] == {"role": "assistant", "content": " word word"}


def test_a_none_in_extra_removes_a_field():
    ask = build("structured:count=1", 0).asks[0]
    _, body = encode(ask, list(ask.messages or ()), Target("http://x"))
    assert b"ignore_eos" not in body
    assert b"json_schema" in body


def test_the_time_limit_stops_a_run_and_keeps_its_records():
    async def go() -> tuple[list[Record], Any]:
        async with DummyServer(Behaviour(interval_seconds=0.02)) as server:
            sessions = list(enumerate(build("batch1:count=50,output=5", 0).sessions))
            return await drive(Target(server.url), sessions, 1, clock(), limit_seconds=0.35)

    records, load = asyncio.run(go())
    assert 1 <= len(records) < 50
    assert records[-1].error == "stopped by the run's time limit"
    assert 0 <= load.cpu_share < 1


def test_health_falls_back_to_models_and_names_the_stage():
    async def go(behaviour: Behaviour) -> Any:
        async with DummyServer(behaviour) as server:
            return await health_of(server.url + "/v1")

    assert asyncio.run(go(Behaviour())) == (True, "ready")
    assert asyncio.run(go(Behaviour(health=False)))[0] is True
    assert asyncio.run(go(Behaviour(ready_after=1))) == (False, "loading weights")
    assert asyncio.run(health_of("http://127.0.0.1:9"))[0] is False
    with pytest.raises(ConnectionError, match="not ready"):
        asyncio.run(prepare(Target("http://127.0.0.1:9")))


def test_sessions_and_concurrency_are_dealt_out_whole():
    workload = build("batch1:count=7", 0)
    shares = split(workload, 3, 8)
    assert sorted(number for sessions, _ in shares for number, _ in sessions) == list(range(7))
    assert [share for _, share in shares] == [3, 3, 2]
    assert len(split(workload, 4, 2)) == 2  # a process without a slot would never send
    assert Ask("x", 1, "text").messages is None
