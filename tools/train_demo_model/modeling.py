"""Qwen3 in plain torch for training on packed dialogues: one flat row of tokens, attention within each.

Grouped-query attention, RMSNorm on each query and key head before RoPE (Hugging Face's half-rotation),
SwiGLU, tied embeddings, no biases. Parameter names are those of Hugging Face's Qwen3ForCausalLM.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def to_hf(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """The fields of a Hugging Face config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": pad_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_window_layers": self.num_hidden_layers,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            **asdict(self),
        }


@dataclass(frozen=True)
class Compute:
    """Where and how to run: the device, packed flash or padded attention, and the type of activations."""

    device: torch.device
    flash: bool = False
    dtype: torch.dtype = torch.float32


class Packing:
    """Where the dialogues of a flat row lie, in the form that the attention in use wants."""

    def __init__(self, starts: np.ndarray, compute: Compute) -> None:
        device, flash = compute.device, compute.flash
        self.dtype = compute.dtype
        lengths = np.diff(starts)
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths)
        self.positions = torch.from_numpy(positions).to(device, non_blocking=True)  # [tokens]
        self.starts = torch.from_numpy(starts).to(device, non_blocking=True) if flash else None
        self.longest = 256
        while self.longest < lengths.max():
            self.longest *= 2
        self.groups: list[
            Tensor
        ] = []  # padded attention: [dialogues, length] indices into the row, -1 is padding
        if not flash:
            sizes = np.maximum(64, 2 ** np.ceil(np.log2(lengths)).astype(int))
            for size in np.unique(sizes):
                of_size = np.flatnonzero(sizes == size)
                offsets = np.arange(size)[None]
                index = np.where(offsets < lengths[of_size, None], starts[of_size, None] + offsets, -1)
                self.groups.append(torch.from_numpy(index).to(device))


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Causal attention within each dialogue. q, k, v: [tokens, heads or kv heads, head_dim]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if packing.starts is not None:
        starts, longest = packing.starts, packing.longest
        return torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False
        )[0]
    out = torch.zeros_like(q)
    for index in packing.groups:
        rows = (x[index.clamp(min=0)].transpose(1, 2) for x in (q, k, v))
        result = F.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
        kept = index >= 0
        out = out.index_put((index[kept],), result[kept])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight * y).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE. x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, head_dim / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def before_attention(
    x: Tensor,
    norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream [tokens, hidden] to rotated queries and keys and to values."""
    h = rms_norm(x, norm, eps)
    heads = (len(x), -1, q_norm.shape[0])
    queries, keys, values = (F.linear(h, w.to(h.dtype)).view(heads) for w in (q, k, v))
    return (
        rotate(rms_norm(queries, q_norm, eps), cos, sin),
        rotate(rms_norm(keys, k_norm, eps), cos, sin),
        values,
    )


def after_attention(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Add the attention's output projection and the SwiGLU layer to the residual stream."""
    x = x + F.linear(attended.reshape(len(x), -1), o.to(x.dtype))
    h = rms_norm(x, norm, eps)
    return x + F.linear(F.silu(F.linear(h, gate.to(h.dtype))) * F.linear(h, up.to(h.dtype)), down.to(h.dtype))


def _linear(features_in: int, features_out: int) -> nn.Linear:
    layer = nn.Linear(features_in, features_out, bias=False)
    nn.init.normal_(layer.weight, std=0.5 * features_in**-0.5)
    return layer


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.q_proj = _linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = _linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = _linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = _linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm = nn.RMSNorm(c.head_dim)
        self.k_norm = nn.RMSNorm(c.head_dim)
        nn.init.zeros_(self.o_proj.weight)


class Mlp(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(c.hidden_size, c.intermediate_size)
        self.up_proj = _linear(c.hidden_size, c.intermediate_size)
        self.down_proj = _linear(c.intermediate_size, c.hidden_size)
        nn.init.zeros_(self.down_proj.weight)


class Layer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size)
        self.mlp = Mlp(c)


class Backbone(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size)


class Qwen3(nn.Module):
    """The language model. `compiled` runs the parts around the attention through torch.compile."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings).double(), frequencies)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
        self._after: Callable[..., Tensor] = after_attention

    def compile_parts(self) -> None:
        self._before = torch.compile(before_attention, dynamic=False)
        self._after = torch.compile(after_attention, dynamic=False)

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """tokens: [tokens] of packed dialogues. Returns the final hidden states [tokens, hidden]."""
        eps = self.config.rms_norm_eps
        positions = packing.positions.long()
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        before, after = (self._before, self._after) if self.training else (before_attention, after_attention)
        x = self.model.embed_tokens(tokens).to(packing.dtype)
        for layer in self.model.layers:
            a, m = layer.self_attn, layer.mlp
            q, k, v = before(
                x,
                layer.input_layernorm.weight,
                a.q_proj.weight,
                a.k_proj.weight,
                a.v_proj.weight,
                a.q_norm.weight,
                a.k_norm.weight,
                cos,
                sin,
                eps,
            )
            x = after(
                x,
                attend(q, k, v, packing),
                a.o_proj.weight,
                layer.post_attention_layernorm.weight,
                m.gate_proj.weight,
                m.up_proj.weight,
                m.down_proj.weight,
                eps,
            )
        return rms_norm(x, self.model.norm.weight, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores [rows, vocabulary] of hidden states, in float32."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()
