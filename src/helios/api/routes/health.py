"""Health, liveness, readiness, and the inside of the prefix cache and of the engine's ticks."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.errors import error_headers
from helios.api.routes.common import PLAIN_ERRORS, documented, json_response, server_state
from helios.api.state import HEARTBEAT_LIMIT_SECONDS, ServerState
from helios.errors import AuthenticationError, EngineDeadError, NotFoundError
from helios.runtime.interfaces import TickRecord

router = APIRouter()
_LOOPBACK = frozenset({"127.0.0.1", "::1"})


def health_report(state: ServerState) -> tuple[dict[str, Any], EngineDeadError | None]:
    """The body of ``/health``, and the error where the server cannot serve."""
    report: dict[str, Any] = {
        "status": "ok",
        "stage": state.stage,
        "uptime_seconds": round(time.perf_counter() - state.started, 3),
        **state.info,
    }
    frontend = state.frontend
    problem: Any = state.problem()
    if frontend is not None:
        report["model"] = frontend.model.name
        report["model_revision"] = frontend.model.revision
        report["max_model_len"] = frontend.model.max_model_len
        age = frontend.scheduler.heartbeat_age()
        report["heartbeat_age_seconds"] = round(age, 3)
        report["scheduler"] = frontend.scheduler.snapshot()
        if problem is None and age > HEARTBEAT_LIMIT_SECONDS:
            problem = EngineDeadError(
                f"The engine has not turned for {age:.0f} seconds.", code="engine_stalled"
            )
    if problem is not None:
        report["status"] = {
            "engine_dead": "dead",
            "engine_stalled": "stalled",
            "shutting_down": "draining",
        }.get(str(problem.code), "starting")
        report.update(problem.body())
    return report, problem


def _respond(report: dict[str, Any], problem: Any) -> Response:
    response = json_response(report, 503 if problem is not None else 200)
    if problem is not None:
        response.headers.update(error_headers(problem))
    return response


@router.get(
    "/health", tags=["Operation"], summary="Whether and how the server serves", responses=documented(500, 503)
)
async def health(request: Request) -> Response:
    """200 when ready; 503 with the stage while starting, draining, stalled or dead."""
    return _respond(*health_report(server_state(request)))


@router.get("/ready", tags=["Operation"], summary="Readiness probe", responses=documented(500, 503))
async def ready(request: Request) -> Response:
    """200 when a request sent now would be taken."""
    report, problem = health_report(server_state(request))
    return _respond({"status": report["status"]}, problem)


@router.get("/live", tags=["Operation"], summary="Liveness probe", responses=documented(500, 503))
async def live(request: Request) -> Response:
    """200 while the process is worth keeping; starting and draining count as alive."""
    report, problem = health_report(server_state(request))
    dead = problem if report["status"] in ("dead", "stalled") else None
    return _respond({"status": report["status"]}, dead)


@router.get("/internal/cache", tags=["Operation"], summary="The prefix cache", responses=PLAIN_ERRORS)
async def cache(request: Request) -> Response:
    """Blocks, tokens, bytes, capacity, hashes and hits of this process's prefix cache."""
    return json_response(server_state(request).ready_frontend().scheduler.cache_snapshot())


@router.get(
    "/internal/ticks",
    tags=["Operation"],
    summary="The engine's last ticks",
    responses=documented(401, 404, 500, 503),
)
async def ticks(request: Request) -> Response:
    """One row for each of the last HELIOS_TICK_LOG ticks; 404 where no log is kept. Times are seconds of
    this host's monotonic clock."""
    log = server_state(request).ready_frontend().scheduler.tick_log()
    if log is None:
        raise NotFoundError(
            "This server keeps no log of its ticks: start it with HELIOS_TICK_LOG=10000 to keep the last "
            "10000 of them.",
            code="tick_log_off",
        )
    return json_response({"columns": TickRecord._fields, "ticks": log})


@router.delete(
    "/internal/cache", tags=["Operation"], summary="Clear the prefix cache", responses=PLAIN_ERRORS
)
async def clear_cache(request: Request) -> Response:
    """Drop every cached block that no running request uses; returns how many."""
    return _clear(request)


@router.post(
    "/internal/cache/clear", tags=["Operation"], summary="Clear the prefix cache", responses=PLAIN_ERRORS
)
async def clear_cache_by_post(request: Request) -> Response:
    """The same as DELETE, for tools that only post."""
    return _clear(request)


def _clear(request: Request) -> Response:
    state = server_state(request)
    has_keys = bool(state.settings.api_keys or state.settings.api_key_file)
    local = request.client is not None and request.client.host in _LOOPBACK
    if not has_keys and not local:
        raise AuthenticationError(
            "Clearing the cache needs an API key; without configured keys only local callers may.",
            code="missing_api_key",
        )
    return json_response({"cleared_blocks": state.ready_frontend().scheduler.clear_prefix_cache()})
