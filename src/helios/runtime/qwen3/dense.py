"""A dense decoder: the whole sequence at once, no pages, no packing. The numerical reference of the tests.

It shares weights and projections with the served model and nothing else: attention is one masked softmax
over contiguous keys, computed in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from helios.runtime.qwen3.layers import DecoderLayer, Rotation, rms_norm
from helios.runtime.qwen3.model import Qwen3


def dense_logits(model: Qwen3, token_ids: list[int]) -> torch.Tensor:
    """Logits ``[tokens, vocab]`` of every position of one sequence."""
    config = model.config
    ids = torch.tensor(token_ids, device=model.embed_tokens.device)
    x = F.embedding(ids, model.embed_tokens)
    count = len(token_ids)
    rotation = Rotation.of(model.rope[:count])
    future = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        q, k, v = layer.attention.project(rms_norm(x, layer.input_norm, layer.eps), rotation)
        groups = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1).float(), v.repeat_interleave(groups, dim=1).float()
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * config.head_dim**-0.5
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).to(x.dtype)
        x = x + layer.attention.o_proj(mixed.flatten(1))
        x = x + layer.mlp(rms_norm(x, layer.post_attention_norm, layer.eps))
    return model.logits(x)


def dense_greedy(model: Qwen3, token_ids: list[int], max_tokens: int, end_ids: frozenset[int]) -> list[int]:
    """Greedy continuation of one sequence, recomputed from the start for every token."""
    tokens = list(token_ids)
    for _ in range(max_tokens):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
        if tokens[-1] in end_ids:
            break
    return tokens[len(token_ids) :]
