"""The layers of a Qwen3 model as plain functions and small modules over packed tokens ``[T, ...]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from helios.runtime.batch import ForwardBatch
from helios.runtime.qwen3.attention import attend
from helios.runtime.qwen3.attention_cpu import attend_rows
from helios.runtime.qwen3.config import ModelConfig, RopeConfig
from helios.runtime.qwen3.kv_cache import LayerPages


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis, computed in float32 and returned in x's dtype.

    ``weight`` has the last axis, or the last two: then each head has a row of its own.
    """
    if weight.ndim == 1:
        return torch.rms_norm(x, weight.shape, weight, eps)
    normed = torch.rms_norm(x.float(), weight.shape[-1:], None, eps)
    return normed.mul_(weight).to(x.dtype)


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


@dataclass(frozen=True, slots=True)
class Rotation:
    """The tokens' rotary angles at full width, each ``[T, 1, head_dim]`` float32: made once for all layers.

    A dimension and the one half a head away are a pair ``(a, b)`` that becomes ``(a cos - b sin, b cos + a
    sin)``. With the sign in the sine, both halves are ``own * cos + partner * sin``.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @staticmethod
    def of(cos_sin: torch.Tensor) -> Rotation:
        """From rows of the rotary table, ``[T, 2, head_dim / 2]``."""
        cos, sin = cos_sin.unsqueeze(2).unbind(1)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def apply_rope(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate ``x [T, heads, head_dim]``; computed in float32, returned in x's dtype."""
    wide = x.float()
    partner = wide.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(wide * rotation.cos, partner, rotation.sin).to(x.dtype)


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

    def project(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[T, heads, head_dim]`` and keys (normed, rotated) and values ``[T, kv_heads, head_dim]``."""
        config = self.config
        num_qk = config.num_heads + config.num_kv_heads
        linear = self.qkv_proj
        qkv = F.linear(x, linear.weight, linear.bias).view(-1, num_qk + config.num_kv_heads, config.head_dim)
        qk, v = qkv.split_with_sizes((num_qk, config.num_kv_heads), dim=1)
        if config.qk_norm:
            qk = rms_norm(qk, self.qk_norm, config.rms_norm_eps)
        q, k = apply_rope(qk, rotation).split_with_sizes((config.num_heads, config.num_kv_heads), dim=1)
        return q, k, v

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: ForwardBatch, pages: LayerPages
    ) -> torch.Tensor:
        """Write the tokens' keys and values into their slots, then attend. ``[T, hidden]`` in and out."""
        q, k, v = self.project(x, rotation)
        pages.k_slots.index_copy_(0, batch.slots, k)
        pages.v_slots.index_copy_(0, batch.slots, v)
        plan = batch.attention
        # The rows are no part of a compiled graph: their numbers change with every batch.
        if torch.compiler.is_compiling() or plan.host_rows is None:
            mixed = attend(q, pages.k, pages.v, plan)
        else:
            mixed = attend_rows(q, pages.k_heads, pages.v_heads, plan.host_rows, plan.num_decode)
        return F.linear(mixed.flatten(1), self.o_proj.weight)


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` with gate and up in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up_proj.weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), self.down_proj.weight)


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
        self, x: torch.Tensor, rotation: Rotation, batch: ForwardBatch, pages: LayerPages
    ) -> torch.Tensor:
        """``x [T, hidden]`` is the residual stream; returns it after this block (and overwrites it)."""
        # The forwards are called by name: modules as functions look for hooks first, which on a CPU takes
        # as long as a small operator.
        x += self.attention.forward(rms_norm(x, self.input_norm, self.eps), rotation, batch, pages)
        x += self.mlp.forward(rms_norm(x, self.post_attention_norm, self.eps))
        return x
