"""The layers of a Qwen3 model as plain functions and small modules over packed tokens ``[T, ...]``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from helios.runtime.batch import ForwardBatch
from helios.runtime.qwen3.attention import attend
from helios.runtime.qwen3.config import ModelConfig, RopeConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis, computed in float32 and returned in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Rotation speed of each pair of dimensions, ``[head_dim / 2]`` float32, radians per position.

    With YaRN, fast dimensions keep their speed, slow ones are slowed down by ``factor``, and a linear
    ramp joins them between the dimensions that turn ``beta_fast`` and ``beta_slow`` times over the
    original context.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**powers)
    if rope.factor == 1.0:
        return frequencies

    def dimension_of(rotations: float) -> float:
        wavelength = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


def rope_table(config: ModelConfig, max_position: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position: ``[max_position, 2, head_dim / 2]`` float32."""
    # In float64: at position 100,000 a float32 product is off by 0.004 radians.
    frequencies = inverse_frequencies(config.rope, config.head_dim).double()
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * config.rope.attention_factor
    return table.float().to(device)


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [T, heads, head_dim]`` by ``cos_sin [T, 2, head_dim / 2]`` (halves, as Hugging Face).

    Computed in float32, returned in x's dtype.
    """
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]  # [T, 1, head_dim / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with one packed q, k, v projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.q_size + 2 * config.kv_size
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            # One row per head, queries then keys, so that one call norms both.
            self.qk_norm = nn.Parameter(torch.empty(config.num_heads + config.num_kv_heads, config.head_dim))

    def project(
        self, x: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[T, heads, head_dim]`` and keys (normed, rotated) and values ``[T, kv_heads, head_dim]``."""
        config = self.config
        qkv = self.qkv_proj(x).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        num_qk = config.num_heads + config.num_kv_heads
        qk, v = qkv[:, :num_qk], qkv[:, num_qk:]
        if config.qk_norm:
            qk = rms_norm(qk, self.qk_norm, config.rms_norm_eps)
        qk = apply_rope(qk, cos_sin)
        return qk[:, : config.num_heads], qk[:, config.num_heads :], v

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> torch.Tensor:
        """Write the tokens' keys and values into their slots, then attend. ``[T, hidden]`` in and out."""
        q, k, v = self.project(x, cos_sin)
        k_pages.flatten(0, 1).index_copy_(0, batch.slots, k)
        v_pages.flatten(0, 1).index_copy_(0, batch.slots, v)
        return self.o_proj(attend(q, k_pages, v_pages, batch.attention).flatten(1))


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` with gate and up in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One transformer block: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.attention = Attention(config)
        self.post_attention_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> torch.Tensor:
        """``x [T, hidden]`` is the residual stream; returns it after this block."""
        normed = rms_norm(x, self.input_norm, self.eps)
        x = x + self.attention(normed, cos_sin, batch, k_pages, v_pages)
        return x + self.mlp(rms_norm(x, self.post_attention_norm, self.eps))
