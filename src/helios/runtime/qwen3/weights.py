"""Strict, streaming loading of safetensors checkpoints into the packed model.

Every tensor's name and shape is checked against the file headers before any data is read: missing,
extra and wrong-shaped tensors are errors that name them. Then tensors stream one at a time into their
place, so host memory holds one of them at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn

from helios.errors import StartupError
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.model import Qwen3

Progress = Callable[[int, int], object]  # (bytes done, bytes in all)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one checkpoint tensor goes: rows ``[start, stop)`` of a parameter, or all of it."""

    parameter: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None


def places(config: ModelConfig) -> dict[str, Place]:
    """The checkpoint's tensor names, in Hugging Face's spelling, and where each goes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv, heads = config.q_size, config.kv_size, config.num_heads
    table = {
        "model.embed_tokens.weight": Place("embed_tokens", (config.vocab_size, hidden)),
        "model.norm.weight": Place("norm", (hidden,)),
    }
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = Place("lm_head", (config.vocab_size, hidden))
    for index in range(config.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        qkv = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
        for name, rows in qkv.items():
            size = rows[1] - rows[0]
            target = ours + "attention.qkv_proj."
            table[f"{theirs}self_attn.{name}_proj.weight"] = Place(target + "weight", (size, hidden), rows)
            if config.qkv_bias:
                table[f"{theirs}self_attn.{name}_proj.bias"] = Place(target + "bias", (size,), rows)
        if config.qk_norm:
            norm_rows = {"q": (0, heads), "k": (heads, heads + config.num_kv_heads)}
            for name, rows in norm_rows.items():
                place = Place(ours + "attention.qk_norm", (config.head_dim,), rows)
                table[f"{theirs}self_attn.{name}_norm.weight"] = place
        table[theirs + "self_attn.o_proj.weight"] = Place(ours + "attention.o_proj.weight", (hidden, q))
        gate_up = ours + "mlp.gate_up_proj.weight"
        table[theirs + "mlp.gate_proj.weight"] = Place(gate_up, (inner, hidden), (0, inner))
        table[theirs + "mlp.up_proj.weight"] = Place(gate_up, (inner, hidden), (inner, 2 * inner))
        table[theirs + "mlp.down_proj.weight"] = Place(ours + "mlp.down_proj.weight", (hidden, inner))
        table[theirs + "input_layernorm.weight"] = Place(ours + "input_norm", (hidden,))
        table[theirs + "post_attention_layernorm.weight"] = Place(ours + "post_attention_norm", (hidden,))
    return table


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, from the shard index if there is one.

    Raises StartupError if there are none or the index names a file that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StartupError(f"{index} is not a shard index: download it again") from None
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise StartupError(
                f"{index} names {', '.join(missing)}, which {folder} does not hold: download again"
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    raise StartupError(f"{folder} holds no model.safetensors and no model.safetensors.index.json")


def build_empty(config: ModelConfig, max_position: int, device: torch.device, dtype: torch.dtype) -> Qwen3:
    """A model with uninitialised parameters on ``device``."""
    with torch.device("meta"):
        model = Qwen3(config, max_position)
    # Not to_empty(): what it does with a meta tensor imports torch's symbolic shapes, half a second or more.
    for module in model.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            weight = torch.empty(meta.shape, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    model.build_rope(device)
    return model.eval()


def arrange_for_cpu(model: Qwen3) -> None:
    """Store linear weights column by column: products of a few rows with small weights are faster so."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def load_weights(model: Qwen3, folder: Path, progress: Progress | None = None) -> None:
    """Fill ``model`` from the safetensors files in ``folder``.

    Raises StartupError naming missing, extra and wrong-shaped tensors before any data is read.
    """
    files = checkpoint_files(folder)
    expected = places(model.config)
    _check_headers(files, expected, model.config)
    parameters = dict(model.named_parameters())
    total = sum(_data_bytes(path) for path in files)
    done = 0
    for name, tensor in _tensors(files):
        place = expected.get(name)
        done += tensor.nbytes
        if place is not None:
            target = parameters[place.parameter]
            if place.rows is not None:
                target = target[place.rows[0] : place.rows[1]]
            target.copy_(tensor)  # casts; a norm's [head_dim] spreads over the heads' rows
        if progress is not None:
            progress(done, total)


def fill_dummy(model: Qwen3, seed: int = 0) -> None:
    """Random weights: normal(0, 0.02), norms one, biases zero. For benchmarks of a shape."""
    generator = torch.Generator(device=model.embed_tokens.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0, 0.02, generator=generator)


def _check_headers(files: list[Path], expected: dict[str, Place], config: ModelConfig) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                found[name] = tuple(file.get_slice(name).get_shape())
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        ignored.add("lm_head.weight")  # some checkpoints store the tied head a second time
    problems = [
        ("missing tensors", sorted(expected.keys() - found.keys())),
        ("tensors that this model does not have", sorted(found.keys() - expected.keys() - ignored)),
        (
            "wrong shapes",
            [
                f"{name} {list(found[name])} instead of {list(place.shape)}"
                for name, place in sorted(expected.items())
                if name in found and found[name] != place.shape
            ],
        ),
    ]
    said = [
        f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in problems
        if names
    ]
    if said:
        raise StartupError(f"the weights in {files[0].parent} do not fit config.json: {'; '.join(said)}")


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def _data_bytes(path: Path) -> int:
    """Bytes of a file's tensors: all but the JSON header and the 8 bytes of its length."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def _open(path: Path) -> Any:
    try:
        return cast(Any, safe_open)(str(path), framework="pt", device="cpu")
    except Exception as error:  # safetensors raises its own SafetensorError and OSError
        raise StartupError(f"{path} cannot be read as safetensors ({error}): download it again") from None
