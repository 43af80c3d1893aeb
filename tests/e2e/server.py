"""A real ``python -m helios`` process over a tiny random model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

PATIENCE = 60.0  # seconds; only a failing test waits this long


def environment() -> dict[str, str]:
    """This process's, without what a person may have set for Helios, the hub or these tests."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HELIOS_", "HF_", "TRITON_", "COV_"))
    }
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Starts at construction. ``errors`` collects the lines of standard error."""

    def __init__(self, folder: Path | str, cwd: Path, *flags: str, port: int = 0) -> None:
        words = [
            sys.executable,
            "-m",
            "helios",
            "--model",
            str(folder),
            "--device",
            "cpu",
            "--port",
            str(port),
        ]
        self.process = subprocess.Popen(
            [*words, *flags], cwd=cwd, env=environment(), stderr=subprocess.PIPE, text=True
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.errors)

    def wait_until_ready(self) -> str:
        """The URL that the server prints once it serves."""
        found: list[str] = []

        def printed() -> bool:
            match = re.search(r"is ready: (http://\S+)", self.log)
            if match:
                found.append(match.group(1))
            assert match or self.process.poll() is None, self.log
            return bool(match)

        wait_for(printed)
        return found[0]

    def wait(self) -> int:
        """The exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the process whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came about"
        time.sleep(0.01)


def scheduler(client: httpx.Client) -> dict[str, int]:
    return client.get("/health").json()["scheduler"]
