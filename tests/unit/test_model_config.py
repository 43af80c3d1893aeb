"""config.json: what is served, what is refused by name, and both spellings of the rope fields."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helios.errors import StartupError
from helios.runtime.qwen3.config import ModelConfig

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(QWEN3_4B | changes)


def test_a_released_config() -> None:
    """Would catch a head size taken from the hidden size, or a parameter count that is off: the memory
    plan is made from it before any weight is there."""
    config = read()
    assert (config.head_dim, config.q_size, config.kv_size) == (128, 4096, 1024)
    assert config.num_parameters == 4_022_468_096  # the published number
    assert config.kv_bytes_per_token(2) == 147_456
    assert config.qk_norm
    assert not config.qkv_bias
    assert config.rope.theta == 1e6
    assert config.rope.factor == 1.0
    assert config.rope.attention_factor == 1.0


def test_qwen2_has_biases_and_no_norms() -> None:
    """Would catch a Qwen2.5 checkpoint read as if it were Qwen3."""
    config = read(model_type="qwen2", head_dim=None)
    assert config.qkv_bias
    assert not config.qk_norm
    assert config.head_dim == 2560 // 32
    untied = read(tie_word_embeddings=False)
    assert untied.num_parameters - read().num_parameters == 151936 * 2560


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'"),
        ({"model_type": "qwen2_vl"}, "'qwen2_vl'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"num_key_value_heads": 5}, "32 heads"),
        ({"hidden_size": "wide"}, "wide"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """Would catch an unsupported model that is served wrongly, or refused without saying why."""
    with pytest.raises(StartupError) as raised:
        read(**changes)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_field_is_named() -> None:
    """Would catch a bare KeyError for a config that lacks a size."""
    raw = {key: value for key, value in QWEN3_4B.items() if key != "vocab_size"}
    with pytest.raises(StartupError, match="lacks vocab_size"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("text", ["{", "[]", '"qwen3"'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    """Would catch a traceback for a damaged download."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_both_spellings_of_the_rope_fields_mean_the_same() -> None:
    """Would catch a checkpoint of newer transformers served with the default base of 10,000."""
    old = read(rope_theta=5e6)
    raw = {key: value for key, value in QWEN3_4B.items() if key not in ("rope_theta", "rope_scaling")}
    new = ModelConfig.from_dict(raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}})
    assert old == new
    scaled = ModelConfig.from_dict(raw | {"rope_parameters": YARN | {"rope_theta": 5e6}})
    assert scaled == read(rope_theta=5e6, rope_scaling=YARN)
    assert scaled == read(rope_theta=5e6, rope_scaling={"type": "yarn"} | YARN)


def test_yarn_defaults() -> None:
    """Would catch a YaRN parameter whose default is not the paper's, which bends every long prompt."""
    rope = read(rope_scaling=YARN).rope
    assert (rope.factor, rope.original_max_position) == (4.0, 32768)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    given = YARN | {"attention_factor": 1.5, "beta_fast": 24, "beta_slow": 2, "truncate": False}
    rope = read(rope_scaling=given).rope
    assert (rope.attention_factor, rope.beta_fast, rope.beta_slow, rope.truncate) == (1.5, 24, 2, False)


def test_yarn_extends_the_context() -> None:
    """Would catch YaRN switched on as Qwen's cards describe, with max_position_embeddings left as it was,
    and the long prompts it is for still refused."""
    assert read().max_position == 40960
    assert read(rope_scaling=YARN).max_position == 131072
    assert read(rope_scaling=YARN, max_position_embeddings=262144).max_position == 262144


def test_the_config_as_transformers_writes_it(tmp_path: Path) -> None:
    """Would catch a field that transformers moved: the same values must come back from its own writer."""
    from transformers import Qwen3Config

    theirs = Qwen3Config(**{key: value for key, value in QWEN3_4B.items() if key != "architectures"})
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    ours = ModelConfig.from_folder(tmp_path)
    assert ours == read()
