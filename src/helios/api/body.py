"""Reading request bodies: size first, then JSON, then nothing more than a decoded object."""

from __future__ import annotations

import msgspec
from starlette.requests import ClientDisconnect, Request

from helios.errors import InvalidRequestError, PayloadTooLargeError
from helios.runtime.generation import RequestCancelledError


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be longer than ``limit`` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise RequestCancelledError("The client has disconnected.") from None
    return b"".join(chunks)


async def read_json(request: Request, limit: int) -> object:
    """The body decoded from JSON.

    Raises InvalidRequestError for another content type and for text that is not JSON (deep nesting, lone
    surrogates and numbers beyond a double included), PayloadTooLargeError for too many bytes.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequestError(
            "The content type must be 'application/json'.", code="unsupported_content_type"
        )
    body = await read_body(request, limit)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequestError(
            f"The request body is not valid JSON: {str(error)[:200]}", code="invalid_json"
        ) from None


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {limit} bytes.")
