"""Which pages each sequence holds: reservation, prefix hits, publication, sharing between choices.

The one place that moves pages between the pool, the prefix cache and the sequences' page tables. Plain
integers; nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from helios.config import PAGE_SIZE
from helios.runtime.host_cache import HostCache
from helios.runtime.interfaces import PageStore
from helios.runtime.page_pool import PagePool, pages_for
from helios.runtime.prefix_cache import PrefixCache, block_hash, root_hash
from helios.runtime.request import Job, Sequence


class KVManager:
    """Pages of all sequences over a pool of ``num_pages``. ``ttl`` is a cached block's lifetime, seconds;
    ``use_cache`` switches the prefix cache. With ``on_demand`` a job gets pages for the tokens it has and more
    as it grows, otherwise for its longest possible answer. ``store`` takes the blocks that are evicted."""

    def __init__(
        self,
        num_pages: int,
        ttl: float,
        use_cache: bool,
        clock: Callable[[], float] = time.perf_counter,
        *,
        on_demand: bool = False,
        store: PageStore | None = None,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.prefix_cache = PrefixCache(self.pool, ttl)
        self.host: HostCache | None = None
        self._use_cache = use_cache
        self._ttl = ttl
        self._clock = clock
        self._on_demand = on_demand
        # Admission leaves these for those that grow, or each new job would soon put the newest one back.
        self._watermark = max(1, num_pages // 100) if on_demand else 0
        if store is not None and use_cache:
            host = self.host = HostCache(store, ttl)
            self.prefix_cache.on_evict = lambda hash_, page: host.save(hash_, page, self._clock())

    @staticmethod
    def pages_wanted(sequence: Sequence) -> int:
        """Pages of the longest possible answer, less those that a further choice shares with the first."""
        shared = 0 if sequence.index == 0 else sequence.num_prompt_tokens // PAGE_SIZE
        return _longest(sequence) - shared

    def reserve(self, job: Job, now: float, *, alone: bool = True) -> bool:
        """Give ``job``'s unfinished sequences their pages, cached ones first: the first all it needs, the
        others what they do not share with it. ``alone`` says that nothing else runs, so that no page need be
        left for others. False, and nothing taken, if memory is short."""
        sequence, *others = job.unfinished
        started = self._clock()
        cached = self._match(sequence)
        found = self._clock()
        job.timings.prefix_lookup_seconds += found - started
        # Pin what was found before evicting for the rest, or eviction might take it.
        for page in cached:
            self.pool.retain(page)
        shared = job.num_prompt_tokens // PAGE_SIZE
        private = [self._wanted(sequence) - len(cached)]
        private += [self._wanted(other) - shared for other in others]
        if not self._make_free(sum(private), 0 if alone else self._watermark):
            self.pool.release(cached)
            return False
        restored = self._from_host(sequence, len(cached))
        sequence.page_table = cached + self.pool.allocate(private[0])
        for other, count in zip(others, private[1:], strict=True):
            other.page_table = self.pool.allocate(count)
        self._load(sequence, len(cached), restored, now)
        known = len(cached) + restored
        sequence.num_sealed_blocks = sequence.num_published_blocks = known
        # At least one token is computed: after a full hit, the last one again.
        hit = sequence.num_computed_tokens = min(known * PAGE_SIZE, sequence.num_tokens - 1)
        self.prefix_cache.touch(sequence.block_hashes[:known], now, hit=True)
        if not job.timings.preemptions:
            sequence.num_cached_tokens = hit
            if self._use_cache:
                self.prefix_cache.count(job.num_prompt_tokens, hit)
        job.timings.restore_seconds += self._clock() - found
        return True

    def _wanted(self, sequence: Sequence) -> int:
        """Pages at admission, counted as if none were shared."""
        return pages_for(sequence.num_tokens) if self._on_demand else _longest(sequence)

    def _make_free(self, count: int, spare: int = 0) -> bool:
        """Evict until ``count`` pages are free. False, and nothing evicted, if there are not that many beside
        ``spare`` ones."""
        short = count - self.pool.num_free
        if short + spare > self.pool.num_cached_only:
            return False
        return short <= 0 or self.prefix_cache.evict(short) >= short

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Give ``sequence`` the pages it lacks for its first ``end`` positions. False if memory is short."""
        more = pages_for(end) - len(sequence.page_table)
        if not self._make_free(more):
            return False
        sequence.page_table += self.pool.allocate(more)
        return True

    def _may_skip(self, sequence: Sequence) -> bool:
        """Whether cached blocks spare it their computation: not if each prompt token's logits are wanted."""
        return self._use_cache and sequence.job.params.prompt_logprobs is None

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached pages of the sequence's leading full blocks."""
        if not self._may_skip(sequence):
            return []
        limit = sequence.num_tokens // PAGE_SIZE
        root = root_hash(sequence.job.cache_salt)
        return self.prefix_cache.extend_match(sequence.token_ids, sequence.block_hashes, root, 0, limit)

    def _from_host(self, sequence: Sequence, start: int) -> int:
        """How many blocks from ``start`` on are in host memory."""
        if self.host is None or not len(self.host) or not self._may_skip(sequence):
            return 0
        count = 0
        root = root_hash(sequence.job.cache_salt)
        for index in range(start, sequence.num_tokens // PAGE_SIZE):
            self._hash_up_to(sequence, index, root)
            if sequence.block_hashes[index] not in self.host:
                break
            count += 1
        return count

    def _load(self, sequence: Sequence, start: int, count: int, now: float) -> None:
        """Bring ``count`` blocks back from the host into the sequence's own pages, and share them."""
        for index in range(start, start + count):
            assert self.host is not None
            hash_, page = sequence.block_hashes[index], sequence.page_table[index]
            self.host.load(hash_, page, now)
            self.pool.retain(page)  # until the copy has ended, whatever becomes of the sequence
            self.prefix_cache.publish(hash_, sequence.block_hashes[index - 1] if index else None, page, now)

    def poll_host(self, *, wait: bool = False) -> None:
        """Let pages whose copies have ended be used."""
        if self.host is not None and self.any_loading:
            self.pool.release(self.host.poll(wait=wait))

    @property
    def any_loading(self) -> bool:
        """True while pages are on their way from the host."""
        return self.host is not None and bool(self.host.loading)

    def is_loading(self, sequence: Sequence) -> bool:
        """True while one of its pages is still on its way from the host."""
        return self.host is not None and not self.host.loading.isdisjoint(sequence.page_table)

    def match_further(self, sequence: Sequence, now: float) -> bool:
        """At a page boundary, look again: another prompt may have computed the next blocks since.

        True if the page table has changed."""
        computed = sequence.num_computed_tokens
        done = computed // PAGE_SIZE
        limit = sequence.num_tokens // PAGE_SIZE
        if computed % PAGE_SIZE or done >= limit or not self._may_skip(sequence):
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
            reached = min((done + len(pages)) * PAGE_SIZE, sequence.num_tokens - 1)
            sequence.num_computed_tokens = reached
            self.prefix_cache.touch(sequence.block_hashes[: done + len(pages)], now, hit=True)
            if not sequence.job.timings.preemptions:
                sequence.num_cached_tokens += reached - computed
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
        """``sequence`` has ended or is put back: its pages go back; its cached blocks live on from now."""
        if self._use_cache:
            self.prefix_cache.touch(sequence.block_hashes[: sequence.num_sealed_blocks], now)
        self.pool.release(sequence.page_table)
        sequence.page_table = []
        sequence.num_computed_tokens = sequence.num_sealed_blocks = sequence.num_published_blocks = 0

    def expire(self, now: float) -> None:
        """Drop cached blocks that nobody used for longer than the lifetime."""
        self.prefix_cache.expire(now)
        if self.host is not None:
            self.host.expire(now)

    def clear(self) -> int:
        """Forget every cached block, here and on the host; returns how many there were."""
        return self.prefix_cache.clear() + (self.host.clear() if self.host is not None else 0)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless pages and blocks add up, given every sequence that holds pages."""
        tables = [sequence.page_table for sequence in sequences]
        if self.host is not None:
            self.host.check_integrity()
            tables.append(list(self.host.loading))
        self.pool.check_integrity(tables)
        self.prefix_cache.check_integrity()
        total = self.pool.num_free + self.pool.num_referenced + self.pool.num_cached_only
        assert total == self.pool.num_pages, "pages are lost"

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
            "offload": None if self.host is None else self.host.snapshot(),
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


def _longest(sequence: Sequence) -> int:
    """Pages of a sequence with the longest possible answer, whose very last token is never computed."""
    return pages_for(sequence.num_prompt_tokens + sequence.job.max_tokens - 1)
