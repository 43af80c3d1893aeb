"""The paged KV pool: one tensor of 256-token pages for all layers."""

from __future__ import annotations

import torch

from helios.config import PAGE_SIZE
from helios.runtime.qwen3.config import ModelConfig


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

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key pages and value pages of one layer, each ``[pages, PAGE_SIZE, kv_heads, head_dim]``."""
        return self.data[index, 0], self.data[index, 1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def page_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one page over all layers."""
    return PAGE_SIZE * config.kv_bytes_per_token(itemsize)
