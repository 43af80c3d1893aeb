"""The page pool's books, operation by operation."""

from __future__ import annotations

import pytest

from helios.runtime.page_pool import DUMMY_PAGE, PagePool


def counts(pool: PagePool) -> tuple[int, int, int]:
    assert pool.num_free + pool.num_referenced + pool.num_cached_only == pool.num_pages
    return pool.num_free, pool.num_referenced, pool.num_cached_only


def test_every_page_is_handed_out_once_and_the_dummy_never() -> None:
    """Would catch a page owned twice, or the dummy page given to a sequence that then reads garbage."""
    pool = PagePool(5)
    pages = pool.allocate(2) + pool.allocate(3)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert DUMMY_PAGE not in pages
    assert counts(pool) == (0, 5, 0)
    pool.check_integrity([pages])


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    """Would catch a half-done allocation that leaks what it took."""
    pool = PagePool(3)
    held = pool.allocate(1)
    with pytest.raises(MemoryError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    assert counts(pool) == (2, 1, 0)
    pool.check_integrity([held])


def test_pages_come_in_order_and_what_was_returned_last_comes_first() -> None:
    """Would catch an order that scatters a fresh sequence over the pool: the CPU attention reads
    neighbouring pages without a copy."""
    pool = PagePool(6)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.release([2])
    assert pool.allocate(2) == [2, 5]
    pool.release([1, 2, 3])
    assert pool.allocate(3) == [1, 2, 3]


def test_shared_page_lives_until_its_last_reader() -> None:
    """Would catch a shared page that is freed under a reader, or never."""
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.retain(page)
    assert pool.references(page) == 2
    pool.release([page])
    assert counts(pool) == (1, 1, 0)
    pool.release([page])
    assert counts(pool) == (2, 0, 0)


def test_double_free_is_refused() -> None:
    """Would catch a page that goes to the free list twice and then to two owners."""
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} has no reference"):
        pool.release([page])
    assert counts(pool) == (2, 0, 0)
    pool.check_integrity([])


def test_a_free_page_cannot_be_retained() -> None:
    """Would catch a stale cache entry that revives a page somebody else may get next."""
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 1 is free"):
        pool.retain(1)
    assert counts(pool) == (2, 0, 0)


def test_cached_page_without_reader_is_kept_apart() -> None:
    """Would catch a cached page that is handed out as free, or that reclaiming does not free."""
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.mark_cached(page)
    assert counts(pool) == (1, 1, 0)
    pool.release([page])
    assert counts(pool) == (1, 0, 1)
    assert pool.is_cached(page)
    pool.retain(page)
    assert counts(pool) == (1, 1, 0)
    pool.release([page])
    pool.unmark_cached(page)
    assert counts(pool) == (2, 0, 0)
    pool.check_integrity([])


def test_uncached_page_with_a_reader_stays_with_the_reader() -> None:
    """Would catch a cleared cache that takes pages from running requests."""
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.mark_cached(page)
    pool.unmark_cached(page)
    assert counts(pool) == (1, 1, 0)
    pool.check_integrity([[page]])
    pool.release([page])
    assert counts(pool) == (2, 0, 0)


def test_marking_is_refused_where_it_makes_no_sense() -> None:
    """Would catch a free page in the cache, a page cached twice, or one let go twice."""
    pool = PagePool(2)
    with pytest.raises(ValueError, match="free or cached already"):
        pool.mark_cached(1)
    (page,) = pool.allocate(1)
    pool.mark_cached(page)
    with pytest.raises(ValueError, match="free or cached already"):
        pool.mark_cached(page)
    pool.unmark_cached(page)
    with pytest.raises(ValueError, match="not cached"):
        pool.unmark_cached(page)


def test_integrity_check_sees_wrong_books() -> None:
    """Would catch a check that passes whatever the books say, which would blind every other test."""
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    pool.check_integrity([[pages[0]], [pages[1]]])
    for tables in ([], [[pages[0]]], [pages, [pages[0]]], [[*pages, 3]]):
        with pytest.raises(AssertionError, match="references differ"):
            pool.check_integrity(tables)
