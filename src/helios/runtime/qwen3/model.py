"""The Qwen3 decoder over packed tokens and a paged KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from helios.runtime.batch import ForwardBatch
from helios.runtime.qwen3.config import ModelConfig
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.layers import DecoderLayer, Rotation, rms_norm, rope_table


class Qwen3(nn.Module):
    """Embedding, decoder layers, final norm and output head.

    Build it on the meta device and let :mod:`helios.runtime.qwen3.weights` fill it.
    """

    rope: torch.Tensor

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.config = config
        self.max_position = max_position
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def build_rope(self, device: torch.device) -> None:
        """Fill the rotary table; float32 whatever the model's dtype, so it is no parameter."""
        self.rope = rope_table(self.config, self.max_position, device)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Run all tokens of ``batch``. Returns the residual stream ``[T, hidden]`` before the last norm."""
        x = F.embedding(batch.input_ids, self.embed_tokens)
        rotation = Rotation.of(self.rope[batch.positions])
        for layer, pages in zip(self.layers, cache.layers, strict=True):
            x = layer.forward(x, rotation, batch, pages)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocab]`` of residual-stream rows ``[rows, hidden]``."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(rms_norm(hidden, self.norm, self.config.rms_norm_eps), head)
