"""Who holds which KV page. Plain integers; the memory itself is :class:`KVCache`'s.

A page is *free*, or *referenced* by one or more sequences, or *cached only*: kept by the prefix cache
with no sequence on it. The three always add up to the pool. The prefix cache's own hold is a flag, not
a reference, so a cached page with no references can be reclaimed.
"""

from __future__ import annotations

from collections.abc import Iterable

from helios.config import PAGE_SIZE

DUMMY_PAGE = 0  # never owned by a sequence: takes writes that must not land anywhere


def pages_for(tokens: int) -> int:
    """Pages that hold ``tokens``."""
    return -(-tokens // PAGE_SIZE)


class PagePool:
    """Reference counts of pages ``first .. first + num_pages - 1``."""

    def __init__(self, num_pages: int, first: int = 1) -> None:
        self.num_pages = num_pages
        self._first = first
        # A stack whose top is the lowest id: neighbours in a table tend to be neighbours in memory.
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        self._references = [0] * (first + num_pages)
        self._cached = bytearray(first + num_pages)
        self._num_cached_only = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached_only(self) -> int:
        """Pages that only the prefix cache holds; they can be reclaimed."""
        return self._num_cached_only

    @property
    def num_referenced(self) -> int:
        return self.num_pages - len(self._free) - self._num_cached_only

    def references(self, page: int) -> int:
        return self._references[page]

    def is_cached(self, page: int) -> bool:
        return bool(self._cached[page])

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages with one reference each. Raises MemoryError if there are fewer."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """Add a reference to a page that is referenced or cached."""
        if self._references[page] == 0:
            if not self._cached[page]:
                raise ValueError(f"page {page} is free")
            self._num_cached_only -= 1
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page; a page that nobody holds becomes free."""
        for page in reversed(list(pages)):  # the first one ends on top: they are handed out in order again
            left = self._references[page] - 1
            if left < 0:
                raise ValueError(f"page {page} has no reference to release")
            self._references[page] = left
            if left == 0:
                if self._cached[page]:
                    self._num_cached_only += 1
                else:
                    self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """The prefix cache starts to hold a page that a sequence references."""
        if self._references[page] == 0 or self._cached[page]:
            raise ValueError(f"page {page} is free or cached already")
        self._cached[page] = 1

    def unmark_cached(self, page: int) -> None:
        """The prefix cache lets go of a page; it becomes free if no sequence references it."""
        if not self._cached[page]:
            raise ValueError(f"page {page} is not cached")
        self._cached[page] = 0
        if self._references[page] == 0:
            self._num_cached_only -= 1
            self._free.append(page)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the books are right, given every live sequence's page table."""
        counted = [0] * len(self._references)
        for table in tables:
            for page in table:
                counted[page] += 1
        assert counted == self._references, "references differ from the sequences' page tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        cached_only = 0
        for page in range(self._first, self._first + self.num_pages):
            held = self._references[page] > 0 or bool(self._cached[page])
            assert held != (page in free), f"page {page} is both held and free, or neither"
            cached_only += self._references[page] == 0 and bool(self._cached[page])
        assert cached_only == self._num_cached_only, "cached-only count is off"
