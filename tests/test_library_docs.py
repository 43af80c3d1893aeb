"""docs/library.md: every Python block runs, in order, with the demo model on the CPU."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import helios

DOCUMENT = Path(__file__).parent.parent / "docs" / "library.md"


def test_every_block_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch an example that was right once."""
    for name in [name for name in os.environ if name.startswith("HELIOS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HELIOS_DEVICE", "cpu")
    text = DOCUMENT.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) > 10
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        # Numbered as in the document, so that a traceback points into it.
        exec(compile("\n" * line + block[1], str(DOCUMENT), "exec"), names)
    out = capsys.readouterr().out
    assert "top_p - Invalid 'top_p'" in out
    assert "mine" in out


def test_every_public_name_is_in_the_document() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert {name for name in helios.__all__ if name not in text} == {"__version__"}
