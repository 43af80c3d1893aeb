"""Copies of KV pages in host memory. On a GPU they run on a stream of their own, from and to pinned memory."""

from __future__ import annotations

from collections import deque

import torch

from helios.runtime.qwen3.kv_cache import KVCache

STAGES = 8  # pages between the pool and the copy engine, each way


class HostPageStore:
    """``num_slots`` pages of ``cache`` in host memory. Implements the engine's ``PageStore``.

    A page is strided over the pool's layers, so it is gathered into a stage on the device first; that copy is
    in the order of the forwards, and the page may be written again right after it. The long copy over the bus
    then waits for nothing but the stage.
    """

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        self.num_slots = num_slots
        self._data = cache.data
        self._cuda = cache.data.device.type == "cuda"
        layers, kinds, _, *page = cache.data.shape
        shape = (layers, kinds, *page)
        self._host = torch.empty((num_slots, *shape), dtype=cache.data.dtype, pin_memory=self._cuda)
        self._done: deque[tuple[int, torch.cuda.Event | None]] = deque()
        if self._cuda:
            stage = torch.empty((2, STAGES, *shape), dtype=cache.data.dtype, device=cache.data.device)
            self._out, self._in = stage[0], stage[1]
            self._stream = torch.cuda.Stream(cache.data.device)
            self._free_again = [torch.cuda.Event() for _ in range(STAGES)]
            self._turn = 0

    @torch.inference_mode()
    def save(self, page: int, slot: int) -> None:
        """Copy a page to a slot, as it is before any later forward."""
        if not self._cuda:
            self._host[slot].copy_(self._data[:, :, page])
            return
        turn = self._turn = (self._turn + 1) % STAGES
        current = torch.cuda.current_stream()
        current.wait_event(self._free_again[turn])  # the copy that used this stage last
        self._out[turn].copy_(self._data[:, :, page])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._host[slot].copy_(self._out[turn], non_blocking=True)
            self._free_again[turn].record()

    @torch.inference_mode()
    def load(self, slot: int, page: int) -> None:
        """Start to copy a slot to a page, which nobody may use until :meth:`loaded` names it."""
        if not self._cuda:
            self._data[:, :, page].copy_(self._host[slot])
            self._done.append((page, None))
            return
        # The page's last reader or writer may still be running.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            stage = self._in[slot % STAGES]
            stage.copy_(self._host[slot], non_blocking=True)
            self._data[:, :, page].copy_(stage)
            event = torch.cuda.Event()
            event.record()
        self._done.append((page, event))

    def loaded(self, *, wait: bool = False) -> list[int]:
        """Pages whose loads have ended since the last call; ``wait`` waits for the oldest."""
        pages: list[int] = []
        while self._done:
            page, event = self._done[0]
            if event is not None and not event.query():
                if not wait or pages:
                    break
                event.synchronize()
            self._done.popleft()
            pages.append(page)
        return pages
