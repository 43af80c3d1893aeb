"""Errors as clients see them: OpenAI's body (Anthropic's under /v1/messages), never FastAPI's ``detail``.

A validation problem names the field, says what was expected, and repeats at most 200 characters of what
was sent; at most ten problems are listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from helios.errors import InvalidRequestError, NotFoundError, RateLimitError, RequestError, UnavailableError
from helios.runtime.sampling_rules import MAX_ECHO, bound_problem, echo, kind_of

Model = TypeVar("Model", bound=BaseModel)

MAX_PROBLEMS = 10

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MethodNotAllowedError(RequestError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class UnknownRouteError(NotFoundError):
    """No such URL."""

    code = "unknown_url"


def error_body(error: RequestError, path: str = "") -> dict[str, object]:
    """The JSON body for an error on this path."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return dict(error.body())


def error_headers(error: RequestError) -> dict[str, str]:
    """``x-should-retry`` tells SDKs whether another attempt can help; ``Retry-After`` when."""
    headers = {"x-should-retry": "true" if error.should_retry else "false"}
    if isinstance(error, UnavailableError) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, RateLimitError):
        headers["retry-after"] = "1"
    return headers


def error_response(error: RequestError, path: str = "") -> Response:
    """The whole response for an error."""
    return Response(
        msgspec.json.encode(error_body(error, path)),
        status_code=error.status,
        headers=error_headers(error),
        media_type="application/json",
    )


def validate(schema: type[Model], body: object) -> Model:
    """Check a decoded body against a schema. Raises InvalidRequestError."""
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise _translate(error) from None


def _translate(error: ValidationError) -> InvalidRequestError:
    by_path: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False, include_context=True)[: 8 * MAX_PROBLEMS]:
        by_path.setdefault(field_path(details["loc"]), []).append(details)
    # A union reports each of its forms; the one that got furthest into the value is what was meant.
    paths = [
        path
        for path in by_path
        if not any(other != path and other.startswith((path + ".", path + "[")) for other in by_path)
    ]
    problems = [_describe(path, by_path[path]) for path in paths[:MAX_PROBLEMS]]
    first_message, first_code = problems[0]
    message = first_message
    if len(paths) > 1:
        message = f"{len(paths)} problems: " + " ".join(text for text, _ in problems)
    return InvalidRequestError(message, param=paths[0] or None, code=first_code)


def field_path(location: Sequence[int | str]) -> str:
    """``("messages", 0, "content", "list[ContentPart]", 1)`` → ``messages[0].content[1]``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _is_union_branch(part):
            continue
        else:
            path += ("." if path else "") + part[:100]
    return path[:MAX_ECHO]


def _is_union_branch(part: str) -> bool:
    return part in ("str", "int", "float", "bool", "dict", "list") or "[" in part or part[:1].isupper()


_TYPE_NAMES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
_BOUNDS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}


def _describe(path: str, problems: Sequence[ErrorDetails]) -> tuple[str, str]:
    # Among the forms of a union, the one that only objects to the value's size or range is what was meant.
    details = next((each for each in problems if each["type"] not in _TYPE_NAMES), problems[0])
    kind = details["type"]
    value: Any = details["input"]
    context: Mapping[str, Any] = details.get("ctx") or {}
    expected = [_TYPE_NAMES[each["type"]] for each in problems if each["type"] in _TYPE_NAMES]
    if len(expected) == len(problems):
        wanted = " or ".join(dict.fromkeys(expected))
        return (
            f"Invalid type for '{path}': expected {wanted}, but got {kind_of(value)} instead.",
            "invalid_type",
        )
    if kind == "missing":
        return f"Missing required parameter: '{path}'.", "missing_required_parameter"
    if kind in _BOUNDS:
        key = _BOUNDS[kind]
        return bound_problem(path, value, key, context[key])
    if kind in ("literal_error", "enum"):
        return (
            f"Invalid value for '{path}': {echo(value)}. Supported values are: {context['expected']}.",
            "invalid_value",
        )
    if kind == "too_long":
        most = context["max_length"]
        return f"Invalid '{path}': at most {most} entries are allowed.", "array_above_max_length"
    if kind == "too_short":
        return f"Invalid '{path}': at least {context['min_length']} is needed.", "array_below_min_length"
    if kind == "value_error":
        return f"Invalid '{path}': {str(context.get('error', ''))[:MAX_ECHO]}", "invalid_value"
    return f"Invalid '{path}': {details['msg'][:MAX_ECHO]}.", "invalid_value"
