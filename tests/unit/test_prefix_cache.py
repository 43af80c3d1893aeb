"""The prefix cache directly: hashes, order of eviction, lifetime, readers."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from helios.config import PAGE_SIZE
from helios.runtime.page_pool import PagePool
from helios.runtime.prefix_cache import PrefixCache, block_hash, root_hash

TTL = 100.0


class Books:
    """A pool, a cache, and chains of blocks named by the token that fills them."""

    def __init__(self, pages: int = 8) -> None:
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, TTL)

    def hashes(self, tokens: str, salt: str | None = None) -> list[bytes]:
        chain: list[bytes] = []
        for token in tokens:
            parent = chain[-1] if chain else root_hash(salt)
            chain.append(block_hash(parent, [ord(token)] * PAGE_SIZE))
        return chain

    def compute(self, tokens: str, now: float, *, start: int = 0, hold: bool = False) -> list[int]:
        """Publish the blocks from ``start`` on, as a sequence does; it ends unless ``hold``."""
        chain = self.hashes(tokens)
        pages = self.pool.allocate(len(tokens) - start)
        for index, page in enumerate(pages, start):
            assert self.cache.publish(chain[index], chain[index - 1] if index else None, page, now)
        self.cache.touch(chain, now)
        if not hold:
            self.pool.release(pages)
        self.cache.check_integrity()
        return pages

    def match(self, tokens: str, salt: str | None = None) -> list[int]:
        ids = [ord(token) for token in tokens for _ in range(PAGE_SIZE)]
        return self.cache.extend_match(ids, [], root_hash(salt), 0, len(tokens))

    def cached(self, tokens: str) -> bool:
        return self.cache.lookup(self.hashes(tokens)[-1]) is not None


def test_hash_chain_is_sha256_over_parent_and_tokens() -> None:
    """Would catch a weak or truncated hash: a collision would serve one client another's prefix."""
    tokens = list(range(PAGE_SIZE))
    root = hashlib.sha256(b"").digest()
    assert root_hash(None) == root
    assert block_hash(root, tokens) == hashlib.sha256(root + array("I", tokens).tobytes()).digest()
    assert len(block_hash(root, tokens)) == 32


def test_equal_blocks_after_different_ones_do_not_match() -> None:
    """Would catch a hash of the block alone: its keys depend on all tokens before it."""
    books = Books()
    books.compute("ab", 0.0)
    assert len(books.match("ab")) == 2
    assert books.match("b") == []
    assert books.match("cb") == []
    assert books.match("aab") == books.match("a")


def test_salt_isolates() -> None:
    """Would catch a tenant who learns from cached_tokens what another has asked."""
    books = Books()
    books.compute("ab", 0.0)
    assert books.match("ab", salt="tenant") == []
    assert root_hash("") != root_hash(None)
    assert root_hash("a") != root_hash("b")


def test_match_is_the_longest_run_and_counts_as_no_use() -> None:
    """Would catch a match over a hole, or a look-up that keeps blocks alive that nobody takes."""
    books = Books()
    first, second = books.compute("ab", 0.0)
    assert books.match("abc") == [first, second]
    assert books.match("axb") == [first]
    assert [block.hits for block in books.cache.blocks()] == [0, 0]
    assert [block.last_used for block in books.cache.blocks()] == [0.0, 0.0]


def test_hashes_grow_only_as_far_as_the_run() -> None:
    """Would catch hashing a whole long prompt at every look-up."""
    books = Books()
    books.compute("a", 0.0)
    hashes: list[bytes] = []
    ids = [ord(token) for token in "aXYZ" for _ in range(PAGE_SIZE)]
    books.cache.extend_match(ids, hashes, root_hash(None), 0, 4)
    assert len(hashes) == 2
    assert books.cache.extend_match(ids, hashes, root_hash(None), 1, 4) == []
    assert len(hashes) == 2


def test_second_publication_of_a_block_is_refused() -> None:
    """Would catch a cached page that is replaced under its readers, or a page that is cached for nothing."""
    books = Books()
    (page,) = books.compute("a", 0.0, hold=True)
    (other,) = books.pool.allocate(1)
    assert not books.cache.publish(books.hashes("a")[0], None, other, 1.0)
    assert not books.pool.is_cached(other)
    assert books.match("a") == [page]


def test_block_without_its_parent_is_refused() -> None:
    """Would catch a block that no look-up can reach and that holds its page for nothing."""
    books = Books()
    chain = books.hashes("ab")
    (page,) = books.pool.allocate(1)
    assert not books.cache.publish(chain[1], chain[0], page, 0.0)
    assert len(books.cache) == 0
    books.pool.release([page])
    assert books.pool.num_free == 8


def test_lifetime_slides_with_use() -> None:
    """Would catch a prefix that expires although every request uses it, or one that never does."""
    books = Books()
    books.compute("ab", 0.0)
    books.compute("z", 0.0)
    books.cache.touch(books.hashes("ab"), 90.0, hit=True)
    assert books.cache.expire(TTL) == 0  # exactly the lifetime is not longer than it
    assert books.cache.expire(TTL + 0.01) == 1
    assert books.match("z") == []
    assert len(books.match("ab")) == 2
    assert books.cache.expire(190.01) == 2
    assert books.pool.num_free == 8
    assert books.cache.expirations == 3


def test_eviction_takes_leaves_before_parents() -> None:
    """Would catch a parent that goes before its children, which nobody could find any more."""
    books = Books()
    books.compute("abc", 0.0)
    assert books.cache.evict(1) == 1
    assert (books.cached("ab"), books.cached("abc")) == (True, False)
    assert books.cache.evict(2) == 2
    assert len(books.cache) == 0


def test_parent_older_than_its_child_is_spared() -> None:
    """Would catch an eviction that trusts the order alone: a child may be published by a sequence that holds
    a page of its own for the parent's block, so it does not renew the parent."""
    books = Books()
    chain = books.hashes("ab")
    pages = books.pool.allocate(2)
    assert books.cache.publish(chain[0], None, pages[0], 0.0)
    assert books.cache.publish(chain[1], chain[0], pages[1], 1.0)
    books.pool.release(pages)
    assert books.cache.expire(TTL + 0.5) == 0
    assert books.cache.evict(1) == 1
    assert (books.cached("a"), books.cached("ab")) == (True, False)


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    """Would catch eviction of the hot prefix while a cold one stays."""
    books = Books()
    books.compute("ab", 0.0)
    books.compute("xy", 1.0)
    books.cache.touch(books.hashes("ab"), 2.0)
    assert books.cache.evict(1) == 1
    assert not books.cached("xy")
    assert books.cache.evict(1) == 1
    assert not books.cached("x")
    assert books.cached("ab")
    assert books.cache.evictions == 2


def test_eviction_spares_a_branch_point_with_a_living_child() -> None:
    """Would catch a shared system prompt evicted below one of two chats."""
    books = Books()
    pages = books.compute("ab", 0.0)
    branch = books.pool.allocate(1)
    chain = books.hashes("ac")
    books.pool.retain(pages[0])
    assert books.cache.publish(chain[1], chain[0], branch[0], 1.0)
    books.cache.check_integrity()
    # The reader of a and c is running: only b can go, however much is asked for.
    assert books.cache.evict(8) == 1
    assert books.cached("ac")
    assert not books.cached("ab")
    books.pool.release([pages[0], branch[0]])
    books.cache.touch(chain, 2.0)
    assert books.cache.evict(8) == 2


def test_referenced_block_is_never_evicted_nor_expired() -> None:
    """Would catch a page that is handed to another request while one still reads it."""
    books = Books()
    pages = books.compute("ab", 0.0, hold=True)
    assert books.cache.evict(8) == 0
    assert books.cache.expire(10 * TTL) == 0
    assert books.match("ab") == pages
    books.pool.release(pages)
    assert books.cache.expire(10 * TTL) == 2


def test_evicting_more_than_there_is_frees_all() -> None:
    """Would catch an eviction that stops, or loops, at the end."""
    books = Books()
    books.compute("ab", 0.0)
    books.compute("x", 1.0)
    assert books.cache.evict(100) == 3
    assert books.cache.evict(1) == 0
    assert books.pool.num_free == 8


def test_clear_leaves_pages_to_their_readers() -> None:
    """Would catch a cleared cache that frees pages in use, or whose pages are never freed after."""
    books = Books()
    held = books.compute("ab", 0.0, hold=True)
    books.compute("x", 0.0)
    assert books.cache.clear() == 3
    books.cache.check_integrity()
    assert books.match("ab") == []
    assert (books.pool.num_free, books.pool.num_referenced) == (6, 2)
    books.pool.check_integrity([held])
    books.pool.release(held)
    assert books.pool.num_free == 8
    # The same blocks can be cached again.
    books.compute("ab", 1.0)
    assert len(books.match("ab")) == 2


def test_hits_and_tokens_are_counted() -> None:
    """Would catch figures of /internal/cache that do not move."""
    books = Books()
    books.compute("ab", 0.0)
    books.cache.touch(books.hashes("ab")[:1], 1.0, hit=True)
    books.cache.count(600, 256)
    assert {block.page: block.hits for block in books.cache.blocks()} == {
        books.match("a")[0]: 1,
        books.match("ab")[1]: 0,
    }
    assert (books.cache.query_tokens, books.cache.hit_tokens) == (600, 256)


def test_integrity_check_sees_a_lost_parent() -> None:
    """Would catch a check that passes whatever the books say."""
    books = Books()
    books.compute("ab", 0.0)
    books.cache.blocks()[1].children = 0
    with pytest.raises(AssertionError, match="children count"):
        books.cache.check_integrity()
