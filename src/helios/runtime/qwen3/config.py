"""The shape of a Qwen3 or Qwen2 dense model, read from a checkpoint's ``config.json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from helios.errors import StartupError

SUPPORTED = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: the base, and YaRN's stretching where ``factor`` is above 1.

    YaRN: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023).
    ``attention_factor`` scales cosine and sine.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of one model. All counts; ``head_dim`` is independent of ``hidden_size``."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str  # of the checkpoint

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied embeddings counted once."""
        bias = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size) + bias
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.num_layers * self.kv_size * itemsize

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``folder/config.json``. Raises StartupError for a missing file or an unsupported model."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise StartupError(f"{folder} has no config.json: it is not a model folder") from None
        except ValueError as error:
            raise StartupError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(raw, dict):
            raise StartupError(f"{path} is not a JSON object")
        return cls.from_dict(cast(dict[str, Any], raw))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read a config dictionary in either spelling of the rope fields (``rope_theta`` +
        ``rope_scaling``, or ``rope_parameters``). Raises StartupError naming what is not supported."""
        model_type = raw.get("model_type", "")
        if model_type not in SUPPORTED:
            names = " and ".join(f"{kind} ({name})" for kind, name in SUPPORTED.items())
            raise StartupError(
                f"model_type {model_type!r} is not supported: Helios serves {names} dense models"
            )
        if raw.get("use_sliding_window"):
            raise StartupError(
                "use_sliding_window=true is not supported: Helios computes full attention only"
            )
        if raw.get("quantization_config"):
            raise StartupError(
                "quantized checkpoints are not supported: take the bf16 checkpoint of this model"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise StartupError(f"hidden_act {raw['hidden_act']!r} is not supported: Helios computes SiLU")
        try:
            heads = int(raw["num_attention_heads"])
            hidden = int(raw["hidden_size"])
            max_position = int(raw["max_position_embeddings"])
            rope = _rope_config(raw, max_position)
            # Qwen's cards add YaRN to config.json and leave max_position_embeddings as it is.
            max_position = max(max_position, int(rope.original_max_position * rope.factor))
            config = cls(
                model_type=model_type,
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or heads),
                # Qwen3's own default is 128, whatever the hidden size.
                head_dim=int(raw.get("head_dim") or (128 if model_type == "qwen3" else hidden // heads)),
                max_position=max_position,
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                qkv_bias=model_type == "qwen2" or bool(raw.get("attention_bias", False)),
                qk_norm=model_type == "qwen3",
                rope=rope,
                dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
            )
        except KeyError as error:
            raise StartupError(f"config.json lacks {error.args[0]}") from None
        except (TypeError, ValueError) as error:
            raise StartupError(f"config.json holds a value of the wrong kind: {error}") from None
        if raw.get("attention_bias") and model_type == "qwen3":
            raise StartupError("attention_bias=true is not supported for qwen3")
        if config.num_heads % config.num_kv_heads:
            raise StartupError(f"{config.num_heads} heads do not divide into {config.num_kv_heads} KV heads")
        return config


def _rope_config(raw: dict[str, Any], max_position: int) -> RopeConfig:
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        section = raw.get(key)
        if isinstance(section, dict):
            merged |= cast(dict[str, Any], section)
    theta = float(merged.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "yarn":
        raise StartupError(f"rope type {kind!r} is not supported: Helios computes 'default' and 'yarn'")
    original = int(merged.get("original_max_position_embeddings") or max_position)
    factor = float(merged.get("factor") or max_position / original)
    attention = merged.get("attention_factor")
    if attention is None:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    truncate = merged.get("truncate")
    return RopeConfig(
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=float(merged.get("beta_fast") or 32),
        beta_slow=float(merged.get("beta_slow") or 1),
        attention_factor=float(attention),
        truncate=True if truncate is None else bool(truncate),
    )
