"""``GET /metrics``."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from helios.api.routes.common import PLAIN_ERRORS, server_state
from helios.errors import NotReadyError

router = APIRouter()


@router.get("/metrics", tags=["Operation"], summary="Prometheus metrics", responses=PLAIN_ERRORS)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus's text form."""
    state = server_state(request)
    if state.frontend is None:
        raise NotReadyError(f"The server is starting: {state.stage}.", retry_after=5.0)
    return Response(state.frontend.metrics.render(), media_type=CONTENT_TYPE_LATEST)
