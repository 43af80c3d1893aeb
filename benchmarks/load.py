"""Drives a workload against one server: arrivals, concurrency, sessions, and several client processes."""

import asyncio
import json
import multiprocessing
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.client import Exchange, HttpClient, ProtocolError, clock
from benchmarks.health import first_model
from benchmarks.workloads import Ask, Message, Session, Workload

SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_p": 1.0, "ignore_eos": True}
_PROBE_SECONDS = 0.02
_START_SECONDS = 0.3  # for several processes to encode their bodies and begin together


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to speak to it. `sampling` goes into every body, before the request's own fields."""

    base_url: str
    model: str = ""  # empty: the first that /v1/models names
    api_key: str | None = None
    stream: bool = True
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(SAMPLING))
    request_timeout_seconds: float = 600.0


@dataclass(slots=True)
class Record:
    """What happened to one request. Times are clock seconds; token counts are the server's own (usage)."""

    session: int
    turn: int
    category: str
    max_tokens: int
    due: float  # when it should have left by the workload
    free: float  # when it could have: due, and below the concurrency limit
    sent: float
    ended: float
    first: float | None = None
    last: float | None = None
    chunk_times: array = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    counted_from: str = "usage"  # "chunks" where the server sent no usage
    finish_reason: str | None = None
    error: str | None = None
    timings: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How hard one client process worked: its CPU share and how late its event loop woke up (seconds)."""

    cpu_share: float
    loop_lag_p99_seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """All records of a run and the load of each client process; `started` is a clock reading."""

    records: list[Record]
    started: float
    clients: list[ClientLoad]


def encode(ask: Ask, history: list[Message], target: Target) -> tuple[str, bytes]:
    """Path and JSON body of a request; `history` already holds the messages of `ask`."""
    body: dict[str, Any] = {"model": target.model, "max_tokens": ask.max_tokens, **target.sampling}
    if ask.messages is not None:
        path, body["messages"] = "/v1/chat/completions", history
    else:
        path, body["prompt"] = "/v1/completions", ask.prompt
    if target.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= ask.extra
    return path, json.dumps({key: value for key, value in body.items() if value is not None}).encode()


def _record(exchange: Exchange, ask: Ask, session: int, turn: int, due: float, free: float) -> Record:
    ended = exchange.ended if exchange.ended is not None else clock()
    usage = exchange.usage
    record = Record(session, turn, ask.category, ask.max_tokens, due, free, exchange.sent or ended, ended)
    record.first, record.last, record.chunk_times = exchange.first, exchange.last, exchange.chunk_times
    record.finish_reason, record.error, record.timings = (
        exchange.finish_reason,
        exchange.error,
        exchange.timings,
    )
    record.text = "".join(exchange.text)
    if "completion_tokens" in usage:
        record.completion_tokens, record.prompt_tokens = (
            usage["completion_tokens"],
            usage.get("prompt_tokens", 0),
        )
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    else:
        record.counted_from = "chunks"
        record.completion_tokens = len(exchange.chunk_times)
        record.prompt_tokens = len(ask.prompt) if isinstance(ask.prompt, tuple) else 0
    if record.error is None and record.completion_tokens == 0:
        record.error = "the answer holds no token"
    return record


async def _session(
    client: HttpClient,
    target: Target,
    number: int,
    session: Session,
    ready: tuple[str, bytes],
    due: float,
    free: float,
) -> list[Record]:
    """Run a session's requests one after the other; a failed one ends the session."""
    history: list[Message] = []
    records: list[Record] = []
    for turn, ask in enumerate(session.asks):
        history.extend(ask.messages or ())
        path, body = ready if turn == 0 else encode(ask, history, target)
        keep_text = not isinstance(ask.prompt, tuple)
        exchange = Exchange(target.stream, keep_text)
        try:
            async with asyncio.timeout(target.request_timeout_seconds):
                await client.send(exchange, "POST", path, body)
        except TimeoutError:
            exchange.error = f"no complete answer within {target.request_timeout_seconds:g} s"
        except asyncio.CancelledError:
            exchange.error = "stopped by the run's time limit"
            records.append(_record(exchange, ask, number, turn, due, free))
            return records
        except (OSError, ProtocolError, ValueError) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        records.append(_record(exchange, ask, number, turn, due, free))
        if records[-1].error is not None:
            break
        if ask.messages is not None:
            history.append({"role": "assistant", "content": records[-1].text})
        due = free = clock()
    return records


async def _probe(lags: array) -> None:
    """Sleep again and again and note how late each waking was: what a busy loop adds to every stamp."""
    while True:
        before = clock()
        await asyncio.sleep(_PROBE_SECONDS)
        lags.append(max(0.0, clock() - before - _PROBE_SECONDS))


async def drive(
    target: Target,
    sessions: list[tuple[int, Session]],
    concurrency: int | None,
    start_at: float,
    limit_seconds: float | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> tuple[list[Record], ClientLoad]:
    """Run numbered sessions from `start_at` on; after `limit_seconds` what is still under way is stopped."""
    async with HttpClient(target.base_url, target.api_key) as client:
        return await _drive(client, target, sessions, concurrency, start_at, limit_seconds, on_record)


async def _drive(
    client: HttpClient,
    target: Target,
    sessions: list[tuple[int, Session]],
    concurrency: int | None,
    start_at: float,
    limit_seconds: float | None,
    on_record: Callable[[Record], None] | None,
) -> tuple[list[Record], ClientLoad]:
    if not target.model:
        target = replace(target, model=await first_model(client))
    # Bodies of thousands of ids are encoded beforehand, so that encoding delays no arrival.
    bodies = [
        encode(session.asks[0], list(session.asks[0].messages or ()), target) for _, session in sessions
    ]
    gate = asyncio.Semaphore(concurrency or max(1, len(sessions)))
    records: list[Record] = []

    async def one(number: int, session: Session, ready: tuple[str, bytes], due: float, free: float) -> None:
        try:
            for record in await _session(client, target, number, session, ready, due, free):
                records.append(record)
                if on_record is not None:
                    on_record(record)
        finally:
            gate.release()

    lags = array("d")
    start_at = max(start_at, clock())
    await asyncio.sleep(start_at - clock())
    probe = asyncio.create_task(_probe(lags))
    cpu, began = time.process_time(), clock()
    tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(limit_seconds):
            for (number, session), ready in zip(sessions, bodies, strict=True):
                due = free = start_at + session.arrival_seconds
                if gate.locked():
                    await gate.acquire()
                    free = max(due, clock())
                else:
                    await gate.acquire()
                if due > clock():
                    await asyncio.sleep(due - clock())
                tasks.append(asyncio.create_task(one(number, session, ready, due, free)))
            await asyncio.gather(*tasks)
    except TimeoutError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    elapsed = max(1e-9, clock() - began)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    lag = sorted(lags)[int(0.99 * (len(lags) - 1))] if lags else 0.0
    return records, ClientLoad((time.process_time() - cpu) / elapsed, lag)


def run_loop(coroutine: Any) -> Any:
    """asyncio.run on uvloop where it is installed: it halves the client's time per read."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


def _child(pipe: Connection, target: Target, sessions: list[tuple[int, Session]], concurrency: int | None,
           limit_seconds: float | None) -> None:  # fmt: skip
    pipe.send("ready")
    start_at = pipe.recv()
    try:
        pipe.send(run_loop(drive(target, sessions, concurrency, start_at, limit_seconds)))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def split(workload: Workload, processes: int, concurrency: int | None) -> list[tuple[list[Any], int | None]]:
    """Deal the sessions out in turn, and the concurrency as evenly as it goes."""
    numbered = list(enumerate(workload.sessions))
    processes = max(1, min(processes, len(numbered), concurrency or processes))
    shares = []
    for i in range(processes):
        share = None if concurrency is None else concurrency // processes + (i < concurrency % processes)
        shares.append((numbered[i::processes], share))
    return shares


def run_workload(
    target: Target,
    workload: Workload,
    *,
    concurrency: int | None = None,
    processes: int = 1,
    limit_seconds: float | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> Run:
    """Run a workload once. With several processes `on_record` is called when all have finished."""
    concurrency = concurrency or workload.concurrency
    shares = split(workload, processes, concurrency)
    if len(shares) == 1:
        start_at = clock()
        records, load = run_loop(drive(target, shares[0][0], concurrency, start_at, limit_seconds, on_record))
        return Run(records, start_at, [load])
    context = multiprocessing.get_context("spawn")
    children = []
    for sessions, share in shares:
        ours, theirs = context.Pipe()
        arguments = (theirs, target, sessions, share, limit_seconds)
        child = context.Process(target=_child, args=arguments, daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    records, loads = [], []
    try:
        for _, pipe in children:
            pipe.recv()
        start_at = clock() + _START_SECONDS
        for _, pipe in children:
            pipe.send(start_at)
        for _, pipe in children:
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(f"a client process failed: {answer}")
            records.extend(answer[0])
            loads.append(answer[1])
    except EOFError:
        raise RuntimeError("a client process died") from None
    finally:
        for child, pipe in children:
            pipe.close()
            child.join(timeout=5)
            if child.is_alive():
                child.terminate()
                child.join()
    records.sort(key=lambda record: (record.session, record.turn))
    for record in records:
        if on_record is not None:
            on_record(record)
    return Run(records, start_at, loads)
