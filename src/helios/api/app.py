"""The FastAPI application.

``create_app(state)`` may be served before the model is there: every route but the probes answers 503 with
the stage until ``state.frontend`` is set.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from helios.api.auth import KeyRing
from helios.api.errors import MethodNotAllowedError, UnknownRouteError, error_response
from helios.api.middleware import LIMITED_PATHS, RequestScope
from helios.api.routes import chat, completions, health, messages, metrics, models, responses, tokenize
from helios.api.routes.models import helios_version
from helios.api.schemas.chat import ChatRequest
from helios.api.schemas.completions import CompletionRequest
from helios.api.schemas.messages import CountTokensRequest, MessagesRequest
from helios.api.schemas.responses import ResponsesRequest
from helios.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from helios.api.state import ServerState
from helios.errors import InvalidRequestError, RequestError

_BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_REF_TEMPLATE = "#/components/schemas/{model}"


def create_app(state: ServerState) -> FastAPI:
    """Build the application. Raises StartupError for an unreadable key file."""
    app = FastAPI(
        title="Helios", version=helios_version(), redoc_url=None, separate_input_output_schemas=False
    )
    app.state.helios = state
    for module in (chat, completions, responses, messages, models, tokenize, health, metrics):
        app.include_router(module.router)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_middleware(RequestScope, state=state, keys=KeyRing(state.settings))
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.openapi = lambda: _openapi(app)
    return app


async def rehearse(app: ASGIApp) -> dict[str, int]:
    """Ask every route that generates once, while there is no model. Returns the status by path: 503 each.

    FastAPI reads the source of a route's function when that is first called, which takes milliseconds: as long as
    the first token of a small model.
    """

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses[path] = message["status"]

    statuses: dict[str, int] = {}
    for path in sorted(LIMITED_PATHS):
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "rehearsal": True,
        }  # fmt: skip
        await app(scope, receive, send)
    return statuses


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    shown = f"{request.method} {path[:200]}"
    if error.status_code == 405:
        response = error_response(MethodNotAllowedError(f"Method not allowed: {shown}."), path)
        response.headers.update(error.headers or {})
        return response
    if error.status_code == 404:
        return error_response(UnknownRouteError(f"Unknown URL: {shown}."), path)
    return error_response(InvalidRequestError("The request cannot be read."), path)


async def _validation_error(request: Request, error: Exception) -> Response:
    return error_response(InvalidRequestError("A path or query parameter is not valid."), request.url.path)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document; the routes read their bodies themselves, so their schemas are added here."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own; never sent
        schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
        for body in _BODIES:
            schema = body.model_json_schema(ref_template=_REF_TEMPLATE)
            schemas.update(schema.pop("$defs", {}))
            schemas[body.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema
