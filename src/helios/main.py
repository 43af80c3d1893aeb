"""The process: open the port, load the model in the background, serve, drain, exit.

The port answers from the first moment: until the model is ready ``/health`` is 503 with the stage.
SIGTERM or Ctrl-C starts a drain: new requests get 503, running ones finish within
``shutdown_timeout_seconds`` or get an error, and then the process ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import signal
import socket
import sys
import threading
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from helios.api.app import create_app, rehearse
from helios.api.state import ServerState
from helios.banner import Banner
from helios.config import Settings
from helios.errors import StartupError

log = logging.getLogger("helios.main")

# After the drain everything has been delivered; this is for sockets that a client does not read.
CLOSE_TIMEOUT_SECONDS = 5


def serve(settings: Settings) -> int:
    """Serve until a signal. Returns the exit status; raises StartupError if the port is taken."""
    configure_logging(settings.log_level)
    listener = _bind(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    state = ServerState(settings)
    app = create_app(state)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_SECONDS,
        server_header=False,
    )
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Server(config, state, url)
    server.run(sockets=[listener])
    return server.exit_status


class _Server(uvicorn.Server):
    """uvicorn, plus loading beside it at the start and draining at the end."""

    def __init__(self, config: uvicorn.Config, state: ServerState, url: str) -> None:
        super().__init__(config)
        self.exit_status = 0
        self._state = state
        self._url = url
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await rehearse(cast(ASGIApp, self.config.loaded_app))
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(self._loop,), name="helios-load", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._state.frontend is not None:
            self._state.frontend.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: leave at once."""
        self._signals += 1
        if self._signals > 1 or self._state.frontend is None:
            self.should_exit = True
            self.force_exit = self._signals > 1
            return
        print(f"{signal.Signals(sig).name}: finishing running requests, then leaving", file=sys.stderr)
        self._state.draining = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain_task = asyncio.create_task(self._drain())

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Build the engine and hand the frontend to the event loop."""
        # torch takes seconds to import, and the port should answer before.
        from helios.runtime.assemble import assemble

        state = self._state
        with Banner() as banner:
            try:
                assembled = assemble(
                    state.settings, banner.progress(lambda stage: setattr(state, "stage", stage))
                )
            except StartupError as error:
                state.stage = "failed"
                state.dead_reason = str(error)
                banner.fail(str(error))
                self._leave(1)
                return
            except Exception as error:
                log.exception("start-up failed")
                state.dead_reason = f"{type(error).__name__}: {error}"
                banner.fail(state.dead_reason)
                self._leave(1)
                return

            def ready() -> None:
                state.info.update(assembled.info)
                state.frontend = assembled.frontend
                state.stage = "ready"

            _settle()
            loop.call_soon_threadsafe(ready)
            banner.ready(self._url, assembled.frontend.model.name)

    async def _drain(self) -> None:
        frontend = self._state.frontend
        assert frontend is not None
        await frontend.drain(self._state.settings.shutdown_timeout_seconds)
        self._leave(0)

    def _leave(self, status: int) -> None:
        self.exit_status = status
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartupError with what to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except socket.gaierror:
        raise StartupError(f"HELIOS_HOST={host!r} is not an address of this machine") from None
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another port with --port, or 0 for a free one"
        ) from None
    listener.set_inheritable(True)
    return listener


def _settle() -> None:
    """Everything loaded stays: keep it out of garbage collections, which would walk all of it.

    And let the threads take turns ten times as often: while requests come in, the engine's thread would wait
    5 ms for each of its steps.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    sys.setswitchinterval(0.0005)


def configure_logging(level: str) -> None:
    """Log lines to standard error. Requests are logged by id and event, never by text.

    A thread writes them: the engine's ticks and the event loop do not wait for a file or a slow reader. What is
    queued when the process ends is written then.
    """
    logging.getLogger("helios").setLevel(level.upper())
    root = logging.getLogger()
    if root.handlers:  # somebody else's, whose program this is
        return
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%H:%M:%S"))
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    writer = QueueListener(records, lines)
    writer.start()
    atexit.register(writer.stop)
    root.addHandler(QueueHandler(records))
    root.setLevel(logging.WARNING)
