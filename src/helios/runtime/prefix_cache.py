"""Prefix cache: computed 256-token blocks, found again by a chain of hashes.

A block's hash covers its own tokens and the hash of the block before it, so equal hashes mean equal
whole prefixes; the chain starts from a root that can hold a salt, which keeps tenants apart. One ordered
dictionary is both the index and the eviction order: a chain is always touched from its last block to its
first, so a parent is never older than its children and the oldest block without a reader is a leaf.

The cache knows tokens, hashes and page numbers only; readers are counted by the :class:`PagePool`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from helios.config import PAGE_SIZE
from helios.runtime.page_pool import PagePool


@dataclass(slots=True)
class Block:
    """One cached block. Times are ``time.perf_counter`` seconds."""

    hash: bytes
    parent: bytes
    page: int
    last_used: float
    hits: int = 0
    children: int = 0


def root_hash(salt: str | None) -> bytes:
    """Where a chain starts; requests share blocks only under the same salt."""
    return hashlib.sha256(b"" if salt is None else b"salt:" + salt.encode()).digest()


def block_hash(parent: bytes, token_ids: Seq[int]) -> bytes:
    """Hash of one full block of token ids that follows ``parent``."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


class PrefixCache:
    """Blocks by hash, over the pages of ``pool``. ``ttl`` is the sliding lifetime in seconds."""

    def __init__(self, pool: PagePool, ttl: float) -> None:
        self._pool = pool
        self._ttl = ttl
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        # Called with (hash, page) of each block that is evicted for room, while its page still holds it.
        self.on_evict: Callable[[bytes, int], None] | None = None
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0
        self.expirations = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, hash_: bytes) -> int | None:
        """The page of a block, or None. Does not count as a use."""
        block = self._blocks.get(hash_)
        return None if block is None else block.page

    def extend_match(
        self, token_ids: Seq[int], hashes: list[bytes], root: bytes, start: int, limit: int
    ) -> list[int]:
        """Pages of the longest cached run of blocks ``start .. limit - 1`` of a token sequence.

        ``hashes`` holds the hashes known so far and grows only as far as the run matches.
        """
        pages: list[int] = []
        for index in range(start, limit):
            if index == len(hashes):
                parent = hashes[-1] if hashes else root
                hashes.append(block_hash(parent, token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]))
            page = self.lookup(hashes[index])
            if page is None:
                break
            pages.append(page)
        return pages

    def count(self, queried: int, hit: int) -> None:
        """Count ``queried`` prompt tokens of which ``hit`` were found."""
        self.query_tokens += queried
        self.hit_tokens += hit

    def publish(self, hash_: bytes, parent: bytes | None, page: int, now: float) -> bool:
        """Offer a computed block to later prompts. ``parent`` is None for a first block.

        Returns False, and keeps nothing, if an equal block is cached already or the parent is not.
        """
        if hash_ in self._blocks:
            return False
        if parent is not None:
            before = self._blocks.get(parent)
            if before is None:
                return False
            before.children += 1
        self._pool.mark_cached(page)
        self._blocks[hash_] = Block(hash_, parent or b"", page, now)
        return True

    def touch(self, hashes: Seq[bytes], now: float, *, hit: bool = False) -> None:
        """Renew the lifetime of a chain (its hashes, first block first); ``hit`` counts a reuse."""
        for hash_ in reversed(hashes):
            block = self._blocks.get(hash_)
            if block is not None:
                block.last_used = now
                block.hits += hit
                self._blocks.move_to_end(hash_)

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages, least recently used leaves without a reader first."""
        freed = self._drop_leaves(count, older_than=None, tell=self.on_evict)
        self.evictions += freed
        return freed

    def expire(self, now: float) -> int:
        """Drop the blocks that nobody used for longer than the lifetime and nobody reads."""
        dropped = self._drop_leaves(len(self._blocks), older_than=now - self._ttl)
        self.expirations += dropped
        return dropped

    def _drop_leaves(
        self, count: int, older_than: float | None, tell: Callable[[bytes, int], None] | None = None
    ) -> int:
        """One pass over the blocks, oldest first; a parent follows its children in the same pass."""
        doomed: list[Block] = []
        doomed_children: dict[bytes, int] = {}
        for block in self._blocks.values():
            if len(doomed) == count or (older_than is not None and block.last_used >= older_than):
                break
            leaf = block.children == doomed_children.get(block.hash, 0)
            if leaf and self._pool.references(block.page) == 0:
                doomed.append(block)
                doomed_children[block.parent] = doomed_children.get(block.parent, 0) + 1
        for block in doomed:
            if tell is not None:
                tell(block.hash, block.page)
            del self._blocks[block.hash]
            self._pool.unmark_cached(block.page)
            parent = self._blocks.get(block.parent)
            if parent is not None:
                parent.children -= 1
        return len(doomed)

    def clear(self) -> int:
        """Forget every block. Pages with readers stay theirs and become private."""
        count = len(self._blocks)
        for block in list(self._blocks.values()):
            self._pool.unmark_cached(block.page)
        self._blocks.clear()
        return count

    def blocks(self) -> list[Block]:
        """All blocks, least recently used first."""
        return list(self._blocks.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless children counts and page flags are right."""
        children: dict[bytes, int] = {}
        for block in self._blocks.values():
            assert self._pool.is_cached(block.page), f"page {block.page} is not flagged as cached"
            children[block.parent] = children.get(block.parent, 0) + 1
            if block.parent:
                assert block.parent in self._blocks, "a block outlived its parent"
        for block in self._blocks.values():
            assert block.children == children.get(block.hash, 0), "children count is off"
        pages = [block.page for block in self._blocks.values()]
        assert len(set(pages)) == len(pages), "two blocks on one page"
