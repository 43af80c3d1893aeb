"""Small random checkpoints, written by transformers, for comparing against it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

BASE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10_000.0}

# name → (model type, heads, kv heads, head_dim, tied, extra)
SHAPES: dict[str, tuple[str, int, int, int, bool, dict[str, object]]] = {
    "gqa1-tied": ("qwen3", 4, 4, 32, True, {}),
    "gqa2-untied": ("qwen3", 4, 2, 32, False, {}),
    "gqa4-tied": ("qwen3", 8, 2, 16, True, {}),
    "gqa7-untied": ("qwen3", 7, 1, 64, False, {}),
    "yarn": ("qwen3", 4, 2, 32, True, {"rope_parameters": YARN}),
    "qwen2": ("qwen2", 4, 2, 16, False, {}),
}


def write_checkpoint(folder: Path, shape: str, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Write a random checkpoint of ``shape`` into ``folder``; returns transformers' model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

        model_type, heads, kv_heads, head_dim, tied, extra = SHAPES[shape]
        fields = BASE | {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "tie_word_embeddings": tied,
            **extra,
        }
        torch.manual_seed(sum(shape.encode()))
        if model_type == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**fields))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**fields))
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a mix-up
                parameter.data += 0.2 * torch.randn_like(parameter)
        model = model.to(dtype).eval()
        model.save_pretrained(folder)
    return model
