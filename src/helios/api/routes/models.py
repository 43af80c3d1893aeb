"""``GET /v1/models``, ``GET /v1/models/{id}``, ``GET /version``."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from helios.api.routes.common import PLAIN_ERRORS, check_model, documented, json_response, server_state
from helios.runtime.job_builder import ModelInfo

router = APIRouter()


def _entry(name: str, info: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "helios",
        "root": info.name,
        "max_model_len": info.max_model_len,
        "revision": info.revision,
    }


@router.get("/v1/models", tags=["OpenAI"], summary="List the served names", responses=PLAIN_ERRORS)
async def list_models(request: Request) -> Response:
    """The model under its name and aliases."""
    info = server_state(request).ready_frontend().model
    return json_response({"object": "list", "data": [_entry(name, info) for name in info.names]})


@router.get(
    "/v1/models/{model_id:path}",
    tags=["OpenAI"],
    summary="One model",
    responses=documented(401, 404, 500, 503),
)
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One served name; the id may hold slashes."""
    info = server_state(request).ready_frontend().model
    check_model(model_id, info)
    return json_response(_entry(model_id, info))


@router.get("/version", tags=["Operation"], summary="Version", responses=PLAIN_ERRORS)
async def version() -> Response:
    """The version of Helios."""
    return json_response({"version": helios_version()})


def helios_version() -> str:
    """The installed version, or a placeholder when run from an uninstalled checkout."""
    try:
        return metadata.version("helios")
    except metadata.PackageNotFoundError:
        return "0+unknown"
