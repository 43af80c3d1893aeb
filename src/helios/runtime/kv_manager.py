"""Which pages each sequence holds: reservation, prefix hits, publication, sharing between choices.

The one place that moves pages between the pool, the prefix cache and the sequences' page tables. Plain
integers; nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from helios.config import PAGE_SIZE
from helios.runtime.page_pool import PagePool
from helios.runtime.prefix_cache import PrefixCache, block_hash, root_hash
from helios.runtime.request import Job, Sequence


class KVManager:
    """Pages of all sequences over a pool of ``num_pages``. ``ttl`` is a cached block's lifetime, seconds;
    ``use_cache`` switches the prefix cache."""

    def __init__(
        self, num_pages: int, ttl: float, use_cache: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.pool = PagePool(num_pages)
        self.prefix_cache = PrefixCache(self.pool, ttl)
        self._use_cache = use_cache
        self._ttl = ttl
        self._clock = clock

    @staticmethod
    def pages_wanted(sequence: Sequence) -> int:
        """Pages reserved for one sequence. The very last token is never computed."""
        job = sequence.job
        positions = job.num_prompt_tokens + job.max_tokens - 1
        own = (positions + PAGE_SIZE - 1) // PAGE_SIZE
        return own if sequence.index == 0 else own - job.num_prompt_tokens // PAGE_SIZE

    def reserve(self, job: Job, now: float) -> bool:
        """Give ``job`` its pages, cached ones first. False, and nothing taken, if memory is short."""
        sequence = job.sequences[0]
        started = self._clock()
        cached = self._match(sequence)
        found = self._clock()
        job.timings.prefix_lookup_seconds += found - started
        # Pin what was found before evicting for the rest, or eviction might take it.
        for page in cached:
            self.pool.retain(page)
        private = [self.pages_wanted(item) for item in job.sequences]
        private[0] -= len(cached)
        short = sum(private) - self.pool.num_free
        if short > self.pool.num_cached_only or (short > 0 and self.prefix_cache.evict(short) < short):
            self.pool.release(cached)
            return False
        sequence.page_table = cached + self.pool.allocate(private[0])
        for other, count in zip(job.sequences[1:], private[1:], strict=True):
            other.page_table = self.pool.allocate(count)
        sequence.num_sealed_blocks = sequence.num_published_blocks = len(cached)
        # At least one token is computed: after a full hit, the last one again.
        hit = min(len(cached) * PAGE_SIZE, job.num_prompt_tokens - 1)
        sequence.num_computed_tokens = sequence.num_cached_tokens = hit
        self.prefix_cache.touch(sequence.block_hashes[: len(cached)], now, hit=True)
        if self._use_cache:
            self.prefix_cache.count(job.num_prompt_tokens, hit)
        job.timings.restore_seconds += self._clock() - found
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached pages of the sequence's leading full blocks."""
        if not self._use_cache or sequence.job.params.prompt_logprobs is not None:
            return []
        limit = sequence.num_prompt_tokens // PAGE_SIZE
        root = root_hash(sequence.job.cache_salt)
        return self.prefix_cache.extend_match(sequence.token_ids, sequence.block_hashes, root, 0, limit)

    def match_further(self, sequence: Sequence, now: float) -> bool:
        """At a page boundary, look again: another prompt may have computed the next blocks since.

        True if the page table has changed."""
        computed = sequence.num_computed_tokens
        done = computed // PAGE_SIZE
        limit = sequence.num_prompt_tokens // PAGE_SIZE
        if computed % PAGE_SIZE or done >= limit or not self._use_cache:
            return False
        if sequence.job.params.prompt_logprobs is not None:
            return False
        started = self._clock()
        root = root_hash(sequence.job.cache_salt)
        if done:
            self._hash_up_to(sequence, done - 1, root)  # blocks launched and not yet committed
        pages = self.prefix_cache.extend_match(sequence.token_ids, sequence.block_hashes, root, done, limit)
        if pages:
            for page in pages:
                self.pool.retain(page)
            self.pool.release(sequence.page_table[done : done + len(pages)])
            sequence.page_table[done : done + len(pages)] = pages
            sequence.num_sealed_blocks = done + len(pages)
            reached = min((done + len(pages)) * PAGE_SIZE, sequence.num_prompt_tokens - 1)
            sequence.num_cached_tokens += reached - computed
            sequence.num_computed_tokens = reached
            self.prefix_cache.touch(sequence.block_hashes[: done + len(pages)], now, hit=True)
            self.prefix_cache.count(0, reached - computed)
        sequence.job.timings.prefix_lookup_seconds += self._clock() - started
        return bool(pages)

    def publish(self, sequence: Sequence, full: int, now: float) -> None:
        """Offer the blocks before ``full`` that are newly computed to later prompts."""
        if self._use_cache:
            started = self._clock()
            root = root_hash(sequence.job.cache_salt)
            for index in range(sequence.num_published_blocks, full):
                self._hash_up_to(sequence, index, root)
                parent = sequence.block_hashes[index - 1] if index else None
                page = sequence.page_table[index]
                self.prefix_cache.publish(sequence.block_hashes[index], parent, page, now)
            sequence.job.timings.cache_store_seconds += self._clock() - started
        sequence.num_published_blocks = full
        sequence.num_sealed_blocks = max(sequence.num_sealed_blocks, full)

    def _hash_up_to(self, sequence: Sequence, index: int, root: bytes) -> None:
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            at = len(hashes) * PAGE_SIZE
            hashes.append(block_hash(hashes[-1] if hashes else root, sequence.token_ids[at : at + PAGE_SIZE]))

    def fork(self, first: Sequence, other: Sequence) -> tuple[int, int] | None:
        """Let ``other``, a further choice of a job whose prompt is computed, start on ``first``'s pages.

        Full pages are shared. Returns (source, target) of the partial page to copy, if there is one.
        """
        shared = first.num_prompt_tokens // PAGE_SIZE
        for page in first.page_table[:shared]:
            self.pool.retain(page)
        copy = None
        if first.num_prompt_tokens % PAGE_SIZE:
            copy = (first.page_table[shared], other.page_table[0])
        other.page_table = first.page_table[:shared] + other.page_table
        other.block_hashes = first.block_hashes[:shared]
        other.num_sealed_blocks = other.num_published_blocks = shared
        other.num_computed_tokens = first.num_prompt_tokens - 1
        return copy

    def release(self, sequence: Sequence, now: float) -> None:
        """``sequence`` has ended: its pages go back; its cached blocks live on from now."""
        if self._use_cache:
            self.prefix_cache.touch(sequence.block_hashes[: sequence.num_sealed_blocks], now)
        self.pool.release(sequence.page_table)
        sequence.page_table = []

    def snapshot(self) -> dict[str, object]:
        """The prefix cache's books: blocks with their hashes and hits, tokens, counters."""
        cache, pool = self.prefix_cache, self.pool
        blocks = cache.blocks()
        now = self._clock()
        return {
            "enabled": self._use_cache,
            "block_size_tokens": PAGE_SIZE,
            "num_blocks": len(blocks),
            "num_tokens": len(blocks) * PAGE_SIZE,
            "capacity_blocks": pool.num_pages,
            "capacity_tokens": pool.num_pages * PAGE_SIZE,
            "reclaimable_blocks": pool.num_cached_only,
            "ttl_seconds": self._ttl,
            "query_tokens": cache.query_tokens,
            "hit_tokens": cache.hit_tokens,
            "hit_rate": cache.hit_tokens / cache.query_tokens if cache.query_tokens else 0.0,
            "evictions": cache.evictions,
            "expirations": cache.expirations,
            "blocks": [
                {
                    "hash": block.hash.hex(),
                    "parent": block.parent.hex() or None,
                    "page": block.page,
                    "hits": block.hits,
                    "readers": pool.references(block.page),
                    "idle_seconds": round(now - block.last_used, 3),
                }
                for block in reversed(blocks)
            ],
        }
