"""Where the model comes from: a Hugging Face snapshot, a local folder, or the bundled demo model.

One snapshot serves tokenizer and weights. ``config.json`` is read first, so that an unsupported model is
refused by name before its weights are downloaded.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from helios.config import DEFAULT_MODEL, DEMO_MODEL, Settings
from helios.errors import StartupError
from helios.runtime.qwen3.config import ModelConfig

log = logging.getLogger("helios.snapshot")

DEMO_FOLDER = Path(__file__).parent.parent / "demo_model"
TEXT_FILES = ["*.json", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model folder on disk. ``revision`` is the hub's commit, ``local`` or ``bundled``."""

    name: str
    folder: Path
    revision: str
    config: ModelConfig


def default_model(device_kind: str) -> str:
    """What is served when no model is named."""
    return DEFAULT_MODEL if device_kind == "cuda" else DEMO_MODEL


def resolve_snapshot(settings: Settings, device_kind: str) -> Snapshot:
    """Find or download the model. Raises StartupError that says what to do."""
    name = settings.model_id or default_model(device_kind)
    if name == DEMO_MODEL:
        return Snapshot("helios-demo", DEMO_FOLDER, "bundled", ModelConfig.from_folder(DEMO_FOLDER))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Snapshot(folder.resolve().name, folder, "local", ModelConfig.from_folder(folder))
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise StartupError(f"HELIOS_MODEL_ID={name!r}: there is no such folder")
    return _download(name, settings)


def _download(name: str, settings: Settings) -> Snapshot:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    token = settings.hf_token.get_secret_value() if settings.hf_token else None

    def fetch(patterns: list[str]) -> Path:
        try:
            found = snapshot_download(
                name, revision=settings.model_revision, token=token, allow_patterns=patterns
            )
        except Exception as error:  # the hub client raises some fifteen classes; _explain sorts them
            raise StartupError(_explain(error, name, settings)) from error
        return Path(found)

    log.info("resolving model=%s revision=%s", name, settings.model_revision or "latest")
    folder = fetch(TEXT_FILES)
    config = ModelConfig.from_folder(folder)
    if settings.load_format != "dummy":
        fetch([*TEXT_FILES, "*.safetensors"])
    return Snapshot(name, folder, folder.name, config)


def _explain(error: Exception, name: str, settings: Settings) -> str:
    from huggingface_hub import errors

    revision = settings.model_revision
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on huggingface.co and set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"HELIOS_MODEL_REVISION={revision!r}: {name} has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"HELIOS_MODEL_ID={name!r}: no such repository on the hub and no such folder here. "
            f"Check the spelling; for a private repository set HF_TOKEN"
        )
    return (
        f"{name} could not be downloaded ({type(error).__name__}). Check the network, or download it elsewhere "
        f"('hf download {name}') and pass the folder with --model FOLDER, or try the bundled model with --model demo"
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The model's fast tokenizer. Raises StartupError if the folder has none or it cannot be read."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise StartupError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no class of its own
        raise StartupError(f"{path} cannot be read ({error}): download it again") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; empty if the file is not there."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from None


def end_token_ids(folder: Path) -> frozenset[int]:
    """The tokens that end an answer: ``eos_token_id`` of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = load_json(folder / name).get("eos_token_id")
        if value is not None:
            return frozenset(cast(list[int], value) if isinstance(value, list) else [int(value)])
    raise StartupError(f"neither generation_config.json nor config.json in {folder} names an eos_token_id")
