"""The exception tree.

Every error a client can meet knows its HTTP status and the ``type`` and ``code`` of OpenAI's error
body, so the API layer shapes all of them in one place and the library raises the same classes.

    HeliosError
    ├── StartupError                 the process cannot serve: one line that says what to change
    └── RequestError                 one request failed; the others go on
        ├── InvalidRequestError      400
        │   ├── UnsupportedParameterError
        │   └── ContextLengthError
        ├── AuthenticationError      401
        ├── NotFoundError            404
        ├── PayloadTooLargeError     413
        ├── RateLimitError           429
        ├── InternalError            500
        └── UnavailableError         503
            ├── QueueFullError       full queue, with Retry-After
            ├── NotReadyError        starting, or draining before exit
            ├── EngineDeadError      the worker thread has ended
            └── DeadlineError        the request's own time limit passed
"""

from __future__ import annotations


class HeliosError(Exception):
    """Root of every error that Helios raises on purpose."""


class StartupError(HeliosError):
    """The server cannot start. The message is one line for the person who started it."""


class RequestError(HeliosError):
    """One request failed. ``param`` names the field at fault where there is one."""

    status = 500
    type = "server_error"
    code: str | None = None
    # Retrying a deterministic failure wastes the client's time; the OpenAI SDK reads this header value.
    should_retry = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(RequestError):
    """A field has a value that cannot be served."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedParameterError(InvalidRequestError):
    """A field that Helios does not know, or whose effect it does not have."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit the model's context or the KV pool."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """No such model, route or response."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class PayloadTooLargeError(RequestError):
    """The request body is larger than the limit."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class RateLimitError(RequestError):
    """This API key already runs as many requests as it may."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    should_retry = True


class InternalError(RequestError):
    """Helios failed while serving this request."""

    status = 500
    code = "internal_error"


class UnavailableError(RequestError):
    """The server cannot take this request now; ``retry_after`` is in seconds."""

    status = 503
    code = "unavailable"
    should_retry = True

    def __init__(self, message: str, *, retry_after: float | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class QueueFullError(UnavailableError):
    """The waiting queue is full."""

    code = "queue_full"


class NotReadyError(UnavailableError):
    """The server is still starting, or is draining before it exits."""

    code = "not_ready"


class EngineDeadError(UnavailableError):
    """The worker thread has ended; the process must be restarted."""

    code = "engine_dead"
    should_retry = False


class DeadlineError(UnavailableError):
    """The request did not finish within its time limit."""

    code = "deadline_exceeded"
    should_retry = False
