"""Small random checkpoints without transformers: files with the right names and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.weights import places
from tests.conftest import byte_tokenizer

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 258,  # <|im_end|> of the tests' byte tokenizer
}


def random_tensors(raw: dict[str, Any], scale: float = 0.15) -> dict[str, torch.Tensor]:
    """A value for every tensor that a checkpoint of this config has."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, place in places(ModelConfig.from_dict(raw)).items():
        values = torch.randn(place.shape, generator=generator) * scale
        tensors[name] = values + 1 if "norm" in name else values
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], raw: dict[str, Any], shards: int = 1) -> None:
    """Write config.json and the tensors, in one file or in ``shards`` with an index."""
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def write_model_folder(folder: Path, raw: dict[str, Any] | None = None) -> Path:
    """A folder that can be served: random weights, the tests' byte tokenizer and a short chat template."""
    raw = TINY if raw is None else raw
    folder.mkdir(exist_ok=True)
    write(folder, random_tensors(raw), raw)
    byte_tokenizer(raw["vocab_size"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    return folder
