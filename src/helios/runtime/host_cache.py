"""Cached blocks that have moved to host memory: which block is in which slot. Plain integers.

The prefix cache hands over what it evicts; a later prompt with the same prefix takes it back. The copies
themselves are a :class:`helios.runtime.interfaces.PageStore`'s.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from helios.runtime.interfaces import PageStore


@dataclass(slots=True)
class _Held:
    slot: int
    last_used: float


class HostCache:
    """Blocks by hash in the slots of ``store``, the least recently used dropped first.

    ``ttl`` is a block's sliding lifetime in seconds.
    """

    def __init__(self, store: PageStore, ttl: float) -> None:
        self._store = store
        self._ttl = ttl
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # least recently used first
        self._free = list(range(store.num_slots - 1, -1, -1))
        self._loading: set[int] = set()  # pages that are being written
        self.saved = self.restored = self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._held

    def save(self, hash_: bytes, page: int, now: float) -> None:
        """Keep a block that is about to leave ``page``."""
        held = self._held.get(hash_)
        if held is None:
            if not self._free:
                _, oldest = self._held.popitem(last=False)
                self._free.append(oldest.slot)
                self.dropped += 1
            held = self._held[hash_] = _Held(self._free.pop(), now)
            self._store.save(page, held.slot)
            self.saved += 1
        held.last_used = now
        self._held.move_to_end(hash_)

    def load(self, hash_: bytes, page: int, now: float) -> None:
        """Start to bring a block back into ``page``, and keep the copy. Raises KeyError without one."""
        held = self._held[hash_]
        held.last_used = now
        self._held.move_to_end(hash_)
        self._loading.add(page)
        self._store.load(held.slot, page)
        self.restored += 1

    @property
    def loading(self) -> set[int]:
        """Pages on their way, which no forward may read yet."""
        return self._loading

    def poll(self, *, wait: bool = False) -> list[int]:
        """Pages that have arrived since the last call; ``wait`` waits for one."""
        arrived = list(self._store.loaded(wait=wait))
        self._loading.difference_update(arrived)
        return arrived

    def expire(self, now: float) -> None:
        """Drop the blocks that nobody used for longer than the lifetime."""
        while self._held:
            hash_, held = next(iter(self._held.items()))
            if held.last_used >= now - self._ttl:
                return
            del self._held[hash_]
            self._free.append(held.slot)
            self.dropped += 1

    def clear(self) -> int:
        """Forget every block; returns how many there were."""
        count = len(self._held)
        self._free.extend(held.slot for held in self._held.values())
        self._held.clear()
        return count

    def snapshot(self) -> dict[str, int]:
        """Books for /internal/cache."""
        return {
            "capacity_blocks": self._store.num_slots,
            "num_blocks": len(self._held),
            "loading_blocks": len(self._loading),
            "saved_blocks": self.saved,
            "restored_blocks": self.restored,
            "dropped_blocks": self.dropped,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or holds one block."""
        slots = [held.slot for held in self._held.values()] + self._free
        assert sorted(slots) == list(range(self._store.num_slots)), "host slots are lost or held twice"
