"""A server of the demo model on loopback: the whole of Helios but its process entry."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import uvicorn

from helios.api.app import create_app
from helios.api.state import ServerState
from helios.config import Settings
from helios.runtime.assemble import assemble

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train_demo_model"))

Serve = Callable[..., str]


@contextmanager
def serving(**settings: object) -> Iterator[str]:
    """Serve the demo model on the CPU; gives the base URL."""
    config = Settings(_env_file=None, model_id="demo", device="cpu", **settings)  # type: ignore[call-arg,arg-type]
    state = ServerState(config)
    assembled = assemble(config)
    state.info.update(assembled.info)
    state.frontend, state.stage = assembled.frontend, "ready"
    server = uvicorn.Server(
        uvicorn.Config(create_app(state), host="127.0.0.1", port=0, log_level="error", http="httptools")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        assembled.scheduler.call(assembled.built.engine.check_integrity)
    finally:
        server.should_exit = True
        thread.join(10)
        assembled.scheduler.stop()
        assembled.frontend.close()


@pytest.fixture(scope="session")
def demo_server() -> Iterator[str]:
    """The demo model with the settings of ``uv run helios``."""
    with serving() as url:
        yield url


@pytest.fixture(scope="session")
def small_chunk_server() -> Iterator[str]:
    """The demo model with ticks of 48 tokens, so that a prompt of 2,048 tokens takes 43 chunks."""
    with serving(prefill_chunk_size=48) as url:
        yield url


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # So small products gain nothing from a second thread, and lose much where the machine is busy.
    torch.set_num_threads(1)
