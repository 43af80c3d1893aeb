"""What the generating routes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from helios.api.body import read_json
from helios.api.state import ServerState
from helios.errors import InvalidRequestError, NotFoundError
from helios.runtime.frontend import Frontend
from helios.runtime.generation import Generation
from helios.runtime.job_builder import ModelInfo

# Every status that a route with a body can send, for the OpenAPI document.
_ERRORS = {
    400: "A field cannot be served; 'param' names it.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    413: "The body is too large.",
    429: "This API key already runs as many requests as it may.",
    500: "Helios failed.",
    503: "Starting, draining, full, too late, or the engine has stopped.",
}
_ERROR_SCHEMA = {
    "type": "object",
    "properties": {"error": {"type": "object"}},
    "required": ["error"],
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route, for OpenAPI."""
    content = {"application/json": {"schema": _ERROR_SCHEMA}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


BODY_ERRORS = documented(400, 401, 404, 413, 429, 500, 503)
PLAIN_ERRORS = documented(401, 500, 503)


def body_schema(name: str) -> dict[str, Any]:
    """The request body of a route, for OpenAPI; the schemas are added in one place by the app."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def server_state(request: Request) -> ServerState:
    """The state that the app was made with."""
    state: ServerState = request.app.state.helios
    return state


async def read_request(request: Request, messages_field: str = "messages") -> tuple[Frontend, object]:
    """The frontend, once it can serve, and the decoded body, whose number of messages is in bounds."""
    state = server_state(request)
    frontend = state.ready_frontend()
    body = await read_json(request, state.settings.max_body_bytes)
    messages: object = cast("dict[str, object]", body).get(messages_field) if isinstance(body, dict) else None
    most = state.settings.max_messages
    if isinstance(messages, list) and len(cast("list[object]", messages)) > most:
        raise InvalidRequestError(
            f"Invalid '{messages_field}': at most {most} messages are allowed, "
            f"but got {len(cast('list[object]', messages))}.",
            param=messages_field,
            code="array_above_max_length",
        )
    return frontend, cast("object", body)


def check_model(asked: str | None, info: ModelInfo) -> None:
    """Raises NotFoundError for a model that is not served here."""
    if asked is not None and asked not in info.names:
        raise NotFoundError(
            f"The model '{asked[:200]}' does not exist. Served here: {', '.join(info.names)}.",
            param="model",
            code="model_not_found",
        )


def json_response(content: object, status: int = 200) -> Response:
    """A JSON body."""
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def usage_note(request: Request, job_id: str, generation: Generation) -> Callable[[], None]:
    """A function that adds the token counts so far to the request's log line."""

    def note() -> None:
        request.scope["state"]["log_suffix"] = (
            f" id={job_id} prompt_tokens={generation.prompt_tokens}"
            f" cached_tokens={generation.cached_tokens} completion_tokens={generation.completion_tokens}"
        )

    return note
