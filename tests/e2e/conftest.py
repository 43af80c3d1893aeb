"""Two served demo models for the SDK tests: an open one, and one with keys and tight limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server

KEYS = ("key-one", "key-two", "key-three")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of ``python -m helios --model demo``; half its context, so that full ones are cheap."""
    server = Server("demo", tmp_path_factory.mktemp("demo"), "--max-batch-size=8", "--max-model-len=2048")
    try:
        yield server.wait_until_ready()
        assert "Traceback" not in server.log
    finally:
        server.close()


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with three keys, one request a key, one row, a queue of one and bodies of 4 KB."""
    server = Server(
        "demo",
        tmp_path_factory.mktemp("guarded"),
        f"--api-keys={','.join(KEYS)}",
        "--max-requests-per-key=1",
        "--max-batch-size=1",
        "--max-queue-size=1",
        "--max-body-bytes=4096",
    )
    try:
        yield server.wait_until_ready()
        assert "Traceback" not in server.log
    finally:
        server.close()
