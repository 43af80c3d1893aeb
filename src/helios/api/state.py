"""What the HTTP side knows of the process: which stage it is in, and the frontend once there is one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from helios.config import Settings
from helios.errors import EngineDeadError, NotReadyError
from helios.runtime.frontend import Frontend

# A worker that has not turned for this long is stuck: it turns at least once a second.
HEARTBEAT_LIMIT_SECONDS = 30.0
_RETRY_WHILE_STARTING_SECONDS = 5.0


@dataclass
class ServerState:
    """Filled in by the process entry; read by the routes. Owned by the event loop.

    ``stage`` is a short text for people ("loading weights"). ``info`` goes into ``/health`` as it is:
    warmed batch sizes, memory budget, start-up times.
    """

    settings: Settings
    stage: str = "starting"
    info: dict[str, object] = field(default_factory=dict[str, object])
    frontend: Frontend | None = None
    draining: bool = False
    dead_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)

    def problem(self) -> NotReadyError | EngineDeadError | None:
        """Why the server cannot take a request now, or None."""
        if self.dead_reason is not None:
            return EngineDeadError(f"The engine has stopped: {self.dead_reason}")
        if self.frontend is None:
            return NotReadyError(
                f"The server is starting: {self.stage}.", retry_after=_RETRY_WHILE_STARTING_SECONDS
            )
        if not self.frontend.scheduler.is_alive():
            return EngineDeadError("The engine has stopped; the server must be restarted.")
        if self.draining:
            return NotReadyError("The server is shutting down.", code="shutting_down")
        return None

    def ready_frontend(self) -> Frontend:
        """The frontend. Raises NotReadyError or EngineDeadError where it cannot serve."""
        problem = self.problem()
        if problem is not None:
            raise problem
        assert self.frontend is not None
        return self.frontend
