"""The same forward as :class:`Qwen3` in about half the kernels, for CUDA graphs.

Per layer: norm · qkv · {q/k norm, rotation, KV write} · attention · o (+ residual) · norm · gate and up
(SiLU, product) · down (+ residual). The plain model stays the reference; the tests compare the two.

Where only some tokens' results are wanted, as with prompts, whose last token alone is sampled from, the last
layer computes keys and values for all tokens and everything behind them for those: a whole layer's products less,
but for the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from helios.kernels.activation import silu_mul
from helios.kernels.linear_table import ENOUGH_BYTES, LinearTable
from helios.kernels.norm import add_rms_norm
from helios.kernels.qkv import qk_norm_rope_write
from helios.runtime.qwen3.kv_cache import KVCache
from helios.runtime.qwen3.layers import DecoderLayer
from helios.runtime.qwen3.model import Qwen3

LEAST_LAYERS = 4  # of a chain that is timed
# (q [T, heads, head_dim], k_pages, v_pages) -> like q
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What the layers read of each token: ``[T]`` int64 ids, int32 positions and slots."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tokens whose results are wanted: ``rows [R]`` of the packed tokens, each the newest of its sequence, and
    their attention, one query for each row."""

    rows: torch.Tensor
    attend: Attend


@dataclass(slots=True)
class Stream:
    """The residual stream ``[T, hidden]``, and a projection that has yet to be added to it."""

    value: torch.Tensor
    addend: torch.Tensor | None = None

    def norm(self, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add what is to be added, in place, and return the norm."""
        if self.addend is None:
            return add_rms_norm(self.value, None, weight, eps)[0]
        normed, _ = add_rms_norm(self.addend, self.value, weight, eps)
        self.addend = None
        return normed

    def settle(self) -> None:
        """Add what is to be added now."""
        if self.addend is not None:
            self.value.add_(self.addend)
            self.addend = None

    def select(self, rows: torch.Tensor) -> Stream:
        """The stream of some tokens."""
        return Stream(self.value[rows], None if self.addend is None else self.addend[rows])


class FusedForward:
    """Runs a model's layers with fused kernels. ``linears`` picks the linear for few rows."""

    def __init__(self, model: Qwen3, cache: KVCache, linears: LinearTable) -> None:
        self.model = model
        self._cache = cache
        self._linears = linears
        self._layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]

    def stream(
        self, inputs: TokenInputs, attend: Attend, wanted: Wanted | None = None, *, layers: int | None = None
    ) -> Stream:
        """The residual stream after the last layer: ``[T, hidden]``, or ``[R, hidden]`` of the tokens wanted.
        ``layers``: after that many, for measurements."""
        model, linear = self.model, self._linears
        eps = model.config.rms_norm_eps
        stream = Stream(F.embedding(inputs.input_ids, model.embed_tokens))
        for index, layer in enumerate(self._layers[:layers]):
            attention, mlp = layer.attention, layer.mlp
            k_pages, v_pages = self._cache.layer(index)
            qkv = linear(
                stream.norm(layer.input_norm, eps), attention.qkv_proj.weight, attention.qkv_proj.bias
            )
            norm = attention.qk_norm if model.config.qk_norm else None
            q = qk_norm_rope_write(
                qkv, norm, eps, model.rope, inputs.positions, inputs.slots, k_pages, v_pages
            )
            if wanted is not None and index == len(self._layers) - 1:
                stream, q, attend = stream.select(wanted.rows), q[wanted.rows], wanted.attend
            self._add(stream, attend(q, k_pages, v_pages).flatten(1), attention.o_proj.weight)
            inner = self._gated(stream.norm(layer.post_attention_norm, eps), mlp.gate_up_proj.weight)
            self._add(stream, inner, mlp.down_proj.weight)
        return stream

    def _add(self, stream: Stream, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Add a projection of ``x`` to the stream: in its own kernel, or later in the next norm's."""
        if self._linears.choose(weight.shape[0], weight.shape[1], x.shape[0]).kind == "torch":
            stream.addend = F.linear(x, weight)
        else:
            stream.value = self._linears(x, weight, residual=stream.value)

    def _gated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        variant = self._linears.choose(weight.shape[0], weight.shape[1], x.shape[0])
        if variant.kind in ("gemv", "stream"):
            return self._linears(x, weight, gated=True)
        return silu_mul(self._linears(x, weight))

    def logits(self, stream: Stream, rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocab]`` of some tokens."""
        model = self.model
        return self._linears(stream.select(rows).norm(model.norm, model.config.rms_norm_eps), self._head)

    def logits_into(self, out: torch.Tensor, stream: Stream) -> None:
        """Write the logits of the stream's tokens to ``out``, for a captured graph."""
        model, head = self.model, self._head
        normed = stream.norm(model.norm, model.config.rms_norm_eps)
        if self._linears.choose(head.shape[0], head.shape[1], normed.shape[0]).kind == "torch":
            torch.mm(normed, head.t(), out=out)
        else:
            out.copy_(self._linears(normed, head))

    @property
    def _head(self) -> torch.Tensor:
        model = self.model
        return model.embed_tokens if model.config.tie_word_embeddings else model.lm_head

    def _weights(self) -> dict[str, list[torch.Tensor]]:
        """Of the linears that every layer has, by name."""
        layers = self._layers
        return {
            "qkv": [layer.attention.qkv_proj.weight for layer in layers],
            "o": [layer.attention.o_proj.weight for layer in layers],
            "gate_up": [layer.mlp.gate_up_proj.weight for layer in layers],
            "down": [layer.mlp.down_proj.weight for layer in layers],
        }

    def tune(self, rows: Sequence[int], budget_seconds: float) -> None:
        """Choose the linears for few rows by measurement."""
        weights = self._weights() | {"head": [self._head]}
        self._linears.tune(weights, rows=rows, budget_s=budget_seconds)

    def refine(self, steps: Mapping[int, tuple[TokenInputs, Attend]], budget_seconds: float) -> None:
        """Choose those of the layers again by the time of some layers. ``steps``: rows -> inputs of a decode step
        of so many."""
        weights = self._weights()
        of_layer = sum(layers[0].nbytes for layers in weights.values())
        count = max(LEAST_LAYERS, -(-ENOUGH_BYTES // of_layer))
        chains = {
            rows: partial(self.stream, inputs, attend, layers=count)
            for rows, (inputs, attend) in steps.items()
        }
        self._linears.refine(weights, chains, budget_s=budget_seconds)
