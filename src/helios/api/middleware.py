"""The outer ring of every request: its id, who sends it, how many they may run, and what it ended as.

Plain ASGI, because FastAPI's decorator form would put a queue between a stream and its client and hide
the client's going.
"""

from __future__ import annotations

import logging
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helios.api.auth import OPEN_PATHS, ConcurrencyLimit, KeyRing
from helios.api.errors import error_response
from helios.api.state import ServerState
from helios.errors import InternalError, RequestError
from helios.runtime.frontend import new_request_id

logger = logging.getLogger("helios.http")

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Requests that occupy the engine, and so count against a key's limit.
LIMITED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


class RequestScope:
    """Gives a request its id, checks its key, answers unexpected failures and writes the log line."""

    def __init__(self, app: ASGIApp, state: ServerState, keys: KeyRing) -> None:
        self.app = app
        self.state = state
        self.keys = keys
        self.limit = ConcurrencyLimit(state.settings.max_requests_per_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http" or scope.get("rehearsal"):  # the server's own request, which has no sender
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _CLIENT_ID.fullmatch(given) else f"req_{new_request_id()}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        # For the middle of a stream, on which nothing below has anything to say.
        state["plain_send"] = send
        start = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._serve(scope, receive, send_with_id, headers)
        except RequestError as error:
            if not status:
                await error_response(error, scope["path"])(scope, receive, send_with_id)
        except Exception:
            logger.exception("request failed request_id=%s", request_id)
            if status:
                raise  # the response has begun; only closing the connection tells the client
            failure = InternalError("The server failed while handling this request.")
            await error_response(failure, scope["path"])(scope, receive, send_with_id)
        finally:
            self._report(scope, request_id, status, time.perf_counter() - start)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        path: str = scope["path"]
        if path in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        key = self.keys.identify(headers)
        if scope["method"] != "POST" or path not in LIMITED_PATHS:
            await self.app(scope, receive, send)
            return
        release = self.limit.acquire(key)

        async def send_and_release(message: Message) -> None:
            # Before the last byte leaves: a client may send its next request as soon as it has that.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                release()
            await send(message)

        try:
            await self.app(scope, receive, send_and_release)
        finally:
            release()

    def _report(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
        logger.log(
            level,
            "%s %s status=%d seconds=%.4f request_id=%s%s",
            scope["method"],
            route,
            status,
            seconds,
            request_id,
            scope["state"].get("log_suffix", ""),
        )
        if self.state.frontend is not None:
            self.state.frontend.metrics.observe_response(route, status)
