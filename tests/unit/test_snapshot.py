"""Finding the model: folder, bundled demo, hub; and what each failure tells the person to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from helios.config import Settings, load
from helios.errors import StartupError
from helios.runtime import snapshot as snapshots
from helios.runtime.snapshot import (
    default_model,
    end_token_ids,
    load_json,
    load_tokenizer,
    resolve_snapshot,
)
from tests.conftest import byte_tokenizer
from tests.model.checkpoints import TINY

pytestmark = pytest.mark.usefixtures("clean_environment")
RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))


class Hub:
    """Stands in for ``snapshot_download``: a folder with a config, and a list of what was asked."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder / "0123abcd"
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(config))
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id} | options)
        if self.error is not None:
            raise self.error
        return str(self.folder)

    @property
    def patterns(self) -> list[str]:
        return [pattern for call in self.calls for pattern in call["allow_patterns"]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], Hub]:
    def make(config: dict[str, Any] = TINY) -> Hub:
        made = Hub(tmp_path, config)
        monkeypatch.setattr("huggingface_hub.snapshot_download", made)
        return made

    return make


def settings(**values: str) -> Settings:
    return load(values)  # type: ignore[arg-type]


def test_local_folder(tmp_path: Path) -> None:
    """Would catch a folder that is looked for on the hub."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    found = resolve_snapshot(settings(model_id=str(folder)), "cpu")
    assert (found.name, found.folder, found.revision) == ("my-model", folder, "local")
    assert found.config.num_layers == 2
    # A relative path, from the working folder.
    assert resolve_snapshot(settings(model_id="my-model"), "cpu").revision == "local"


def test_demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Would catch a first try without a GPU that downloads gigabytes."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(snapshots, "DEMO_FOLDER", tmp_path)
    for chosen in (settings(), settings(model_id="demo")):
        found = resolve_snapshot(chosen, "cpu")
        assert (found.name, found.revision, found.folder) == ("helios-demo", "bundled", tmp_path)
    assert default_model("cuda") == "Qwen/Qwen3-4B"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_missing_folder_is_not_looked_for_on_the_hub(name: str, hub: Callable[..., Hub]) -> None:
    """Would catch a misspelt path that ends in a message about repositories, or in a download."""
    made = hub()
    with pytest.raises(StartupError, match="there is no such folder") as raised:
        resolve_snapshot(settings(model_id=name), "cpu")
    assert f"HELIOS_MODEL_ID={name!r}" in str(raised.value)
    assert made.calls == []


def test_folder_without_config(tmp_path: Path) -> None:
    """Would catch a traceback when the parent folder of a model is given."""
    with pytest.raises(StartupError, match=r"has no config\.json: it is not a model folder"):
        resolve_snapshot(settings(model_id=str(tmp_path)), "cpu")


def test_hub_snapshot_pins_the_revision_and_passes_the_token(hub: Callable[..., Hub]) -> None:
    """Would catch tokenizer and weights of two revisions, a pin that is ignored, or a private model that
    cannot be read although a token is set."""
    made = hub()
    found = resolve_snapshot(
        settings(model_id="Qwen/Qwen3-0.6B", model_revision="v2", hf_token="hf_x"), "cpu"
    )
    assert (found.name, found.revision) == ("Qwen/Qwen3-0.6B", "0123abcd")
    assert len(made.calls) == 2
    for call in made.calls:
        assert (call["repo_id"], call["revision"], call["token"]) == ("Qwen/Qwen3-0.6B", "v2", "hf_x")
    assert "*.safetensors" not in made.calls[0]["allow_patterns"]
    assert "*.safetensors" in made.calls[1]["allow_patterns"]


def test_unsupported_model_is_refused_before_its_weights_are_fetched(hub: Callable[..., Hub]) -> None:
    """Would catch 60 GB of a model that is then refused."""
    made = hub(TINY | {"model_type": "qwen3_moe"})
    with pytest.raises(StartupError, match="'qwen3_moe' is not supported"):
        resolve_snapshot(settings(model_id="Qwen/Qwen3-30B-A3B"), "cuda")
    assert made.patterns
    assert not any("safetensors" in pattern for pattern in made.patterns)


def test_dummy_weights_fetch_no_weights(hub: Callable[..., Hub]) -> None:
    """Would catch a benchmark of a shape that downloads its checkpoint all the same."""
    made = hub()
    resolve_snapshot(settings(model_id="Qwen/Qwen3-32B", load_format="dummy"), "cuda")
    assert not any("safetensors" in pattern for pattern in made.patterns)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            GatedRepoError("403", response=RESPONSE),
            "is gated: accept its terms on huggingface.co and set HF_TOKEN",
        ),
        (
            RepositoryNotFoundError("404", response=RESPONSE),
            "HELIOS_MODEL_ID='Qwen/Qwen9': no such repository",
        ),
        (
            RevisionNotFoundError("404", response=RESPONSE),
            "HELIOS_MODEL_REVISION='v2': Qwen/Qwen9 has no such revision",
        ),
        (
            LocalEntryNotFoundError("offline"),
            "could not be downloaded (LocalEntryNotFoundError). Check the network",
        ),
        (ConnectionError("no route"), "could not be downloaded (ConnectionError). Check the network"),
        (TimeoutError(), "pass the folder with --model FOLDER"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_failures_say_what_to_do(hub: Callable[..., Hub], error: Exception, advice: str) -> None:
    """Would catch a failure whose advice is that of another, or the hub client's traceback."""
    made = hub()
    made.error = error
    with pytest.raises(StartupError) as raised:
        resolve_snapshot(settings(model_id="Qwen/Qwen9", model_revision="v2", hf_token="hf_secret"), "cuda")
    assert advice in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "hf_secret" not in str(raised.value)


def test_end_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    """Would catch a chat that runs on past <|im_end|>: config.json often names only the other end token."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 151643}')
    assert end_token_ids(tmp_path) == {151643}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert end_token_ids(tmp_path) == {151645, 151643}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert end_token_ids(tmp_path) == {151643}
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="eos_token_id"):
        end_token_ids(tmp_path)


def test_tokenizer_and_json_failures_name_the_file(tmp_path: Path) -> None:
    """Would catch tracebacks for an incomplete or damaged folder, and prompts cut off or padded by what
    tokenizer.json was saved with."""
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("seven b").ids) == 7
    assert load_json(tmp_path / "absent.json") == {}
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(StartupError, match=r"bad\.json is not valid JSON"):
        load_json(tmp_path / "bad.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
