"""Strict loading: what does not fit is named before any data is read, what fits lands where it belongs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helios.errors import StartupError
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.model import Qwen3
from helios.runtime.qwen3.weights import build_empty, fill_dummy, load_weights
from tests.model.checkpoints import TINY, random_tensors, write

CPU = torch.device("cpu")
UNTIED = TINY | {"tie_word_embeddings": False}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3:
    model = build_empty(ModelConfig.from_folder(folder), 64, CPU, dtype)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)  # so that what is not loaded shows
    load_weights(model, folder)
    return model


def refusal(folder: Path) -> str:
    """Why the folder is refused; the model must not have been touched."""
    model = build_empty(ModelConfig.from_folder(folder), 64, CPU, torch.float32)
    for parameter in model.parameters():
        parameter.fill_(7.0)
    with pytest.raises(StartupError) as raised:
        load_weights(model, folder)
    assert all((parameter == 7.0).all() for parameter in model.parameters()), "data was read before the check"
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "raw", [TINY, UNTIED, TINY | {"model_type": "qwen2"}], ids=["tied", "untied", "qwen2"]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_lands_in_its_place(tmp_path: Path, raw: dict[str, object], shards: int) -> None:
    """Would catch q, k, v or gate and up packed in the wrong order, a tensor left out, or a shard not read."""
    tensors = random_tensors(raw)
    write(tmp_path, tensors, raw, shards)
    model = load(tmp_path)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    layer, name = model.layers[1], "model.layers.1."
    qkv = [tensors[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(layer.attention.qkv_proj.weight, torch.cat(qkv))
    if raw["model_type"] == "qwen2":
        biases = [tensors[f"{name}self_attn.{part}_proj.bias"] for part in "qkv"]
        assert torch.equal(layer.attention.qkv_proj.bias, torch.cat(biases))
    else:
        q, k = (tensors[f"{name}self_attn.{part}_norm.weight"] for part in "qk")
        assert torch.equal(layer.attention.qk_norm, torch.stack([q] * 4 + [k] * 2))
    gate_up = [tensors[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(gate_up))
    assert torch.equal(layer.input_norm, tensors[name + "input_layernorm.weight"])
    assert torch.equal(layer.post_attention_norm, tensors[name + "post_attention_layernorm.weight"])
    if not raw["tie_word_embeddings"]:
        assert torch.equal(model.lm_head, tensors["lm_head.weight"])


def test_parameter_count_is_what_the_memory_plan_assumes(tmp_path: Path) -> None:
    """Would catch a plan made for another number of weights than the checkpoint holds."""
    for raw in (TINY, UNTIED, TINY | {"model_type": "qwen2"}):
        total = sum(tensor.numel() for tensor in random_tensors(raw).values())
        assert ModelConfig.from_dict(raw).num_parameters == total


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    """Would catch a model served with uninitialised weights."""
    tensors = random_tensors(TINY)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write(tmp_path, tensors, TINY)
    assert "1 missing tensors: model.layers.1.mlp.up_proj.weight" in refusal(tmp_path)


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    """Would catch a checkpoint that lacks its head and would answer noise."""
    tensors = random_tensors(UNTIED)
    del tensors["lm_head.weight"]
    write(tmp_path, tensors, UNTIED)
    assert "lm_head.weight" in refusal(tmp_path)


def test_extra_tensors_are_named(tmp_path: Path) -> None:
    """Would catch a checkpoint of another architecture served as if its extra weights did not matter."""
    tensors = random_tensors(TINY) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    write(tmp_path, tensors, TINY)
    assert "does not have: model.layers.0.self_attn.q_proj.bias" in refusal(tmp_path)


def test_wrong_shapes_are_named_with_both_shapes(tmp_path: Path) -> None:
    """Would catch a tensor that is broadcast into place: a [1, 32] row fills a whole matrix silently."""
    tensors = random_tensors(TINY)
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(1, 32)
    write(tmp_path, tensors, TINY, shards=2)
    assert "model.layers.0.mlp.gate_proj.weight [1, 32] instead of [64, 32]" in refusal(tmp_path)


def test_all_kinds_of_problems_come_in_one_message_of_bounded_length(tmp_path: Path) -> None:
    """Would catch an error of ten thousand names, or one that shows a single problem at a time."""
    tensors = {f"other.{index}": torch.zeros(1) for index in range(40)}
    write(tmp_path, tensors, TINY)
    message = refusal(tmp_path)
    assert "40 tensors that this model does not have" in message
    assert "missing tensors" in message
    assert len(message) < 1000


def test_tied_head_stored_twice_is_accepted(tmp_path: Path) -> None:
    """Would catch a refusal of the many checkpoints that store the tied head again."""
    tensors = random_tensors(TINY)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write(tmp_path, tensors, TINY)
    model = load(tmp_path)
    assert torch.equal(model.embed_tokens, tensors["model.embed_tokens.weight"])


def test_bfloat16_weights_are_cast_to_the_served_type(tmp_path: Path) -> None:
    """Would catch a float32 model that holds reinterpreted bits, or a checkpoint type that is refused."""
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(TINY).items()}
    write(tmp_path, tensors, TINY)
    model = load(tmp_path)
    assert model.embed_tokens.dtype == torch.float32
    assert torch.equal(model.embed_tokens, tensors["model.embed_tokens.weight"].float())
    assert load(tmp_path, torch.float16).embed_tokens.dtype == torch.float16


def test_rope_table_stays_float32_in_a_small_type(tmp_path: Path) -> None:
    """Would catch positions rounded to bfloat16, which repeats angles from position 256 on."""
    write(tmp_path, random_tensors(TINY), TINY)
    assert load(tmp_path, torch.bfloat16).rope.dtype == torch.float32


@pytest.mark.parametrize("shards", [1, 2])
def test_progress_reaches_its_total(tmp_path: Path, shards: int) -> None:
    """Would catch a progress bar that stops short of the end or runs backwards."""
    write(tmp_path, random_tensors(TINY), TINY, shards)
    model = build_empty(ModelConfig.from_folder(tmp_path), 64, CPU, torch.float32)
    steps: list[tuple[int, int]] = []
    load_weights(model, tmp_path, lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert len({total for _, total in steps}) == 1
    assert steps[-1][0] == steps[-1][1] > 0


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """Would catch an interrupted download that ends in a traceback."""
    write(tmp_path, random_tensors(TINY), TINY, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(tmp_path)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    """Would catch half a file whose rest is read as zeros, or a traceback."""
    write(tmp_path, random_tensors(TINY), TINY)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(tmp_path)
    assert str(path) in message
    assert "download it again" in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    """Would catch a traceback for a damaged index."""
    write(tmp_path, random_tensors(TINY), TINY, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_no_weights_at_all_is_said(tmp_path: Path) -> None:
    """Would catch a folder with only a config that ends in a traceback."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert "no model.safetensors" in refusal(tmp_path)


def test_dummy_weights_are_finite_random_and_repeatable() -> None:
    """Would catch a benchmark of NaNs or zeros, whose kernels may take other paths."""
    models = []
    for _ in range(2):
        model = build_empty(ModelConfig.from_dict(UNTIED), 64, CPU, torch.float32)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        fill_dummy(model)
        models.append(dict(model.named_parameters()))
    for name, parameter in models[0].items():
        assert parameter.isfinite().all(), name
        assert torch.equal(parameter, models[1][name])
        assert (parameter == 1).all() if "norm" in name else parameter.std() > 0.005
