"""The paged KV pool: one tensor of 256-token pages for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from helios.config import PAGE_SIZE
from helios.runtime.qwen3.attention_cpu import slots_by_head
from helios.runtime.qwen3.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's part of the pool in the three forms that it is used in; all are views of one memory."""

    k: torch.Tensor  # [pages, PAGE_SIZE, kv_heads, head_dim]
    v: torch.Tensor
    k_slots: torch.Tensor  # [slots, kv_heads, head_dim], where tokens are written
    v_slots: torch.Tensor
    k_heads: torch.Tensor  # [1, kv_heads, slots, head_dim], as the CPU's attention reads it
    v_heads: torch.Tensor

    @staticmethod
    def of(k: torch.Tensor, v: torch.Tensor) -> LayerPages:
        """From the pages of keys and values."""
        return LayerPages(k, v, k.flatten(0, 1), v.flatten(0, 1), slots_by_head(k), slots_by_head(v))


class KVCache:
    """Keys and values of every layer in pages.

    ``num_pages`` counts usable pages; one more, page 0, is a dummy that takes writes which must not
    land anywhere. Pages are handed out by :class:`helios.runtime.page_pool.PagePool`.
    """

    def __init__(self, config: ModelConfig, num_pages: int, device: torch.device, dtype: torch.dtype) -> None:
        self.num_pages = num_pages
        shape = (config.num_layers, 2, num_pages + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: the unused tail of a page may be loaded (and masked) by a kernel, and
        # 0 * NaN is NaN.
        self.data = torch.zeros(shape, device=device, dtype=dtype)
        # Made once: on a CPU a view takes as long as a small operator.
        self.layers = [LayerPages.of(*layer.unbind(0)) for layer in self.data.unbind(0)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key pages and value pages of one layer, each ``[pages, PAGE_SIZE, kv_heads, head_dim]``."""
        pages = self.layers[index]
        return pages.k, pages.v

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def page_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one page over all layers."""
    return PAGE_SIZE * config.kv_bytes_per_token(itemsize)
