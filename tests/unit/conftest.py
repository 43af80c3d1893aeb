"""Keeps the settings of whoever runs the tests out of them, and small models on one thread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Thousands of tiny operations: a second thread only waits for the first.
torch.set_num_threads(1)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working folder (so no ``.env``) and no Helios or Hugging Face variables."""
    for name in list(os.environ):
        if name.startswith(("HELIOS_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
