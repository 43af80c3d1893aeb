"""Settings: where a value may come from, what wins, and what a wrong one says."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from helios.config import DeviceInfo, Settings, add_flags, environment_name, load, resolve
from helios.errors import StartupError

pytestmark = pytest.mark.usefixtures("clean_environment")

CPU = DeviceInfo("cpu", "a CPU", 64 << 30)


def card(gigabytes: float, multiprocessors: int = 132) -> DeviceInfo:
    return DeviceInfo("cuda", "a GPU", int(gigabytes * 1e9), (9, 0), multiprocessors)


def parsed(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(words))


def test_flag_beats_environment_beats_env_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, clean_environment: Path
) -> None:
    """Would catch two sources in the wrong order, or a source that is not read at all."""
    assert load().max_batch_size is None
    (clean_environment / ".env").write_text(
        "HELIOS_MAX_BATCH_SIZE=3\nHELIOS_PORT=81\nHELIOS_BATCH_WAIT_MS=5\n"
    )
    assert load().max_batch_size == 3
    monkeypatch.setenv("HELIOS_MAX_BATCH_SIZE", "4")
    monkeypatch.setenv("HELIOS_PORT", "82")
    assert load().max_batch_size == 4
    settings = load(parsed("--max-batch-size", "5"))
    assert (settings.max_batch_size, settings.port, settings.batch_wait_ms) == (5, 82, 5.0)


DOCUMENTED: list[tuple[str, str, object, str, object]] = [
    # variable, field, default, a value, what it becomes
    ("HELIOS_MODEL_ID", "model_id", None, "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ("HELIOS_MODEL_REVISION", "model_revision", None, "abc123", "abc123"),
    ("HELIOS_MAX_GPU_UTILIZATION", "max_gpu_utilization", 0.90, "0.5", 0.5),
    ("HELIOS_WEIGHT_HEADROOM_RATIO", "weight_headroom_ratio", 0.20, "0", 0.0),
    ("HELIOS_KV_CACHE_HEADROOM_RATIO", "kv_cache_headroom_ratio", 0.20, "0.4", 0.4),
    ("HELIOS_PREFIX_CACHE_TTL_SECONDS", "prefix_cache_ttl_seconds", 300.0, "60", 60.0),
    ("HELIOS_PREFILL_CHUNK_SIZE", "prefill_chunk_size", None, "512", 512),
    ("HELIOS_MAX_BATCH_SIZE", "max_batch_size", None, "1", 1),
    ("HELIOS_MAX_QUEUE_SIZE", "max_queue_size", None, "7", 7),
    ("HELIOS_BATCH_WAIT_MS", "batch_wait_ms", None, "0", 0.0),
    ("HELIOS_TORCH_COMPILE", "torch_compile", False, "1", True),
    ("HELIOS_COMPILE_DIAGNOSTICS", "compile_diagnostics", True, "false", False),
    ("HELIOS_HOST", "host", "127.0.0.1", "0.0.0.0", "0.0.0.0"),
    ("HELIOS_PORT", "port", 8000, "0", 0),
    ("HELIOS_DEVICE", "device", "auto", "cpu", "cpu"),
    ("HELIOS_DTYPE", "dtype", "auto", "float16", "float16"),
    ("HELIOS_MAX_MODEL_LEN", "max_model_len", None, "4096", 4096),
    ("HELIOS_NUM_PAGES", "num_pages", None, "8", 8),
    ("HELIOS_LOAD_FORMAT", "load_format", "auto", "dummy", "dummy"),
    ("HELIOS_DEFAULT_TEMPERATURE", "default_temperature", 0.2, "1", 1.0),
    ("HELIOS_DEFAULT_TOP_P", "default_top_p", 0.95, "1", 1.0),
    ("HELIOS_DEFAULT_MAX_TOKENS", "default_max_tokens", 256, "0", 0),
    ("HELIOS_MAX_MESSAGES", "max_messages", 2048, "128", 128),
    ("HELIOS_MAX_TOKENS_LIMIT", "max_tokens_limit", None, "2048", 2048),
    ("HELIOS_ENABLE_THINKING", "enable_thinking", False, "true", True),
    ("HELIOS_SERVED_MODEL_NAME", "served_model_name", (), "a, b", ("a", "b")),
]


@pytest.mark.parametrize(("variable", "field", "default", "text", "value"), DOCUMENTED)
def test_documented_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, field: str, default: object, text: str, value: object
) -> None:
    """Would catch a renamed variable, a changed default, or a flag that does not reach its field."""
    assert getattr(load(), field) == default
    monkeypatch.setenv(variable, text)
    assert getattr(load(), field) == value
    monkeypatch.delenv(variable)
    flag = "--" + variable.removeprefix("HELIOS_").lower().replace("_", "-")
    assert getattr(load(parsed(f"{flag}={text}")), field) == value
    assert environment_name(field) == variable


def test_compile_fullgraph_needs_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a strict capture audit that silently audits nothing."""
    monkeypatch.setenv("HELIOS_COMPILE_FULLGRAPH", "1")
    with pytest.raises(StartupError) as raised:
        load()
    assert str(raised.value) == "HELIOS_COMPILE_FULLGRAPH=1 needs HELIOS_TORCH_COMPILE=1"
    monkeypatch.setenv("HELIOS_TORCH_COMPILE", "1")
    assert load().compile_fullgraph


@pytest.mark.parametrize("name", ["HF_TOKEN", "HF_API_KEY"])
def test_hugging_face_token(monkeypatch: pytest.MonkeyPatch, clean_environment: Path, name: str) -> None:
    """Would catch a token that is not found under one of its two names, in the environment or in .env."""
    (clean_environment / ".env").write_text(f"{name}=from-file\n")
    token = load().hf_token
    assert token is not None
    assert token.get_secret_value() == "from-file"
    monkeypatch.setenv(name, "from-environment")
    token = load().hf_token
    assert token is not None
    assert token.get_secret_value() == "from-environment"
    token = load(parsed("--hf-token", "from-flag")).hf_token
    assert token is not None
    assert token.get_secret_value() == "from-flag"


def test_empty_variables_mean_the_default(clean_environment: Path) -> None:
    """Would catch a copied example file with empty values that keeps the server from starting."""
    names = [environment_name(name) for name in Settings.model_fields]
    (clean_environment / ".env").write_text("".join(f"{name}=\n" for name in names))
    assert load() == Settings.model_construct()
    assert load(parsed("--model", "")).model_id is None


WRONG = [
    ("HELIOS_DEVICE", "tpu", "'auto', 'cuda' or 'cpu'"),
    ("HELIOS_DTYPE", "int8", "'auto', 'bfloat16', 'float16' or 'float32'"),
    ("HELIOS_MAX_BATCH_SIZE", "0", "greater than or equal to 1"),
    ("HELIOS_MAX_BATCH_SIZE", "many", "integer"),
    ("HELIOS_MAX_BATCH_SIZE", "100000", "less than or equal to 1024"),
    ("HELIOS_MAX_GPU_UTILIZATION", "1.5", "less than or equal to 1"),
    ("HELIOS_MAX_GPU_UTILIZATION", "nan", "less than or equal to 1"),
    ("HELIOS_NUM_PAGES", "1", "greater than or equal to 2"),
    ("HELIOS_MAX_MODEL_LEN", "8", "greater than or equal to 16"),
    ("HELIOS_PORT", "70000", "less than or equal to 65535"),
    ("HELIOS_TORCH_COMPILE", "maybe", "boolean"),
    ("HELIOS_PREFIX_CACHE_TTL_SECONDS", "0", "greater than 0"),
    ("HELIOS_LOAD_FORMAT", "gguf", "'auto' or 'dummy'"),
]


@pytest.mark.parametrize(("variable", "value", "allowed"), WRONG)
def test_a_wrong_value_is_one_line(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, allowed: str
) -> None:
    """Would catch a traceback, or a message that leaves out the variable, the value or what is allowed."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError) as raised:
        load()
    message = str(raised.value)
    assert message.startswith(f"{variable}='{value}': ")
    assert allowed in message
    assert "\n" not in message


def test_several_wrong_values_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a start that fails once for every typo."""
    monkeypatch.setenv("HELIOS_DEVICE", "tpu")
    monkeypatch.setenv("HELIOS_PORT", "x")
    with pytest.raises(StartupError, match=r"HELIOS_DEVICE='tpu'.*; HELIOS_PORT='x'"):
        load()


def test_secrets_are_never_shown() -> None:
    """Would catch a token or key in an error message, a log of the settings or a traceback."""
    settings = load(parsed("--hf-token", "hf_secret", "--api-keys", "sk-one,sk-two"))
    assert [key.get_secret_value() for key in settings.api_keys] == ["sk-one", "sk-two"]
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        assert "hf_secret" not in text
        assert "sk-" not in text
    with pytest.raises(StartupError) as raised:
        load({}, hf_token=["hf_secret"], api_keys={"sk-one": 1})
    assert "secret" not in str(raised.value)
    assert "sk-one" not in str(raised.value)
    assert "HF_TOKEN: " in str(raised.value)
    assert "HELIOS_API_KEYS: " in str(raised.value)


def test_settings_are_frozen() -> None:
    """Would catch a knob that is turned behind the back of whoever read it at start."""
    settings = load()
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


def test_booleans_are_flags() -> None:
    """Would catch a switch that needs a value, or that cannot be switched off."""
    assert load(parsed("--torch-compile")).torch_compile is True
    assert load(parsed("--torch-compile=false")).torch_compile is False
    assert load(parsed("--prefix-cache", "off")).prefix_cache is False
    assert load(parsed()).prefix_cache is True


# -- limits chosen from the device ---------------------------------------------------------------------


def test_small_devices_keep_the_small_defaults() -> None:
    """Would catch a CPU or a 16 GB card that is given the batch of a data-centre GPU."""
    for device in (CPU, card(16, 60)):
        limits = resolve(load(), device)
        assert (limits.max_batch_size, limits.prefill_chunk_size, limits.max_queue_size) == (8, 256, 32)
        assert limits.batch_wait_ms == 2.0


def test_limits_grow_with_the_device() -> None:
    """Would catch a large GPU that idles at eight sequences."""
    sizes = [resolve(load(), card(gigabytes)) for gigabytes in (16, 24, 80, 141)]
    for smaller, larger in itertools.pairwise(sizes):
        assert larger.max_batch_size > smaller.max_batch_size
        assert larger.prefill_chunk_size > smaller.prefill_chunk_size
    for limits in sizes:
        assert limits.max_queue_size == 4 * limits.max_batch_size
    weak = resolve(load(), card(48, multiprocessors=58))
    assert weak.prefill_chunk_size < resolve(load(), card(48)).prefill_chunk_size


def test_explicit_limits_win_and_the_queue_follows_the_batch() -> None:
    """Would catch a chosen value that overrides one set by hand, or a queue of the chosen batch's size."""
    limits = resolve(load(parsed("--max-batch-size", "3")), card(141))
    assert (limits.max_batch_size, limits.max_queue_size, limits.prefill_chunk_size) == (3, 12, 4096)
    assert limits.batch_wait_ms == 0.0
    assert resolve(load(parsed("--batch-wait-ms", "5")), card(141)).batch_wait_ms == 5.0
    assert resolve(load(parsed("--batch-wait-ms", "0")), CPU).batch_wait_ms == 0.0
    settings = load(parsed("--max-batch-size=3", "--max-queue-size=1", "--prefill-chunk-size=17"))
    limits = resolve(settings, card(141))
    assert (limits.max_batch_size, limits.max_queue_size, limits.prefill_chunk_size) == (3, 1, 17)


# -- the command line ----------------------------------------------------------------------------------


def run_cli(*words: str) -> int:
    from helios.cli import main

    with pytest.raises(SystemExit) as raised:
        main(words)
    assert isinstance(raised.value.code, int)
    return raised.value.code


def test_an_unknown_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a misspelt flag that is ignored."""
    assert run_cli("--max-bach-size", "4") == 2
    assert "unrecognized arguments: --max-bach-size" in capsys.readouterr().err


def test_a_wrong_value_ends_the_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a traceback instead of an error, or an exit status that says success."""
    assert run_cli("serve", "--device", "tpu") == 1
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("error: HELIOS_DEVICE='tpu': ")
    assert out.err.count("\n") == 1


def test_info_shows_every_setting_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a secret on the terminal, or a chosen limit that is not shown."""
    monkeypatch.setenv("HF_API_KEY", "hf_secret")
    monkeypatch.setenv("HELIOS_API_KEYS", "sk-one,sk-two")
    assert run_cli("info", "--device=cpu", "--max-batch-size=5") == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    assert "sk-" not in out
    assert "HELIOS_MAX_BATCH_SIZE=5\n" in out
    assert "HELIOS_MAX_QUEUE_SIZE=20  (chosen from the device)" in out
    for name in Settings.model_fields:
        assert f"\n{environment_name(name)}=" in out


def test_help_names_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a setting without help, or help text that breaks argparse's formatting."""
    assert run_cli("serve", "--help") == 0
    out = capsys.readouterr().out
    for name, info in Settings.model_fields.items():
        assert info.description
        assert "--" + name.replace("_", "-") in out
