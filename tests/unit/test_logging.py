"""Log lines are written by a thread of their own."""

from __future__ import annotations

import subprocess
import sys
import threading

SCRIPT = """
import logging
from helios.main import configure_logging

configure_logging("info")
log = logging.getLogger("helios.test")
log.debug("below the level")
for number in range(3000):
    log.info("line %d of several thousand, which together are more than a pipe holds", number)
try:
    raise ValueError("with its traceback")
except ValueError:
    log.exception("failed")
print("went on", flush=True)
"""


def test_nobody_waits_for_whoever_reads_the_log() -> None:
    """Would catch a tick that stands still because standard error is full, and lines that are lost at the end."""
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    impatient = threading.Timer(20, run.kill)
    impatient.start()
    assert run.stdout.readline() == "went on\n"  # while nobody reads the other pipe
    written = run.communicate()[1]
    impatient.cancel()
    assert run.returncode == 0
    assert written.count("INFO helios.test line") == 3000
    assert "below the level" not in written
    assert "ERROR helios.test failed\nTraceback" in written
    assert written.rstrip().endswith("ValueError: with its traceback")
