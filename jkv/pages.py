"""Free lists, ownership counters and the order of eviction of one pool.

Every page has exactly one owner: the free list, a tree node, or one sequence (its private pages):

    total == free + tree + private          evictable == tree - held
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np

from jkv.errors import IntegrityError
from jkv.layout import Pool


class EvictionOrder:
    """Which tree content leaves a pool first. The one place where the policy lives.

    Three classes, from first to last:

      unneeded     content that no endpoint needs (window pages outside every endpoint's window, KV below which
                   no usable snapshot is left), oldest first
      superseded   endpoints whose chain was extended past them and where nothing branches, oldest first
      ranked       the rest, by (priority, level at its last use + gain): gain is the tokens that losing it costs,
                   `level` the largest such sum evicted so far (GreedyDual, Young 1994: no clock; what is cheap to
                   lose ages fast, what is dear slowly)

    Items come and go eagerly, so what is ranked is still in the tree. What cannot give a page just now (its pages are
    held, its slot is lent) the tree passes over and puts back. All operations are O(log n) amortised; the heap drops
    stale entries lazily.
    """

    def __init__(self) -> None:
        self.unneeded: OrderedDict[tuple[Any, int], None] = OrderedDict()  # (node, group)
        self.superseded: OrderedDict[Any, None] = OrderedDict()
        self.level = 0
        self._heap: list[tuple[int, int, int, Any, int]] = []  # priority, score, serial, item, level at last use
        self._serials: dict[Any, int] = {}  # item -> serial of its valid heap entry
        self._next_serial = 0

    def put(self, item: Hashable, priority: int, gain: int, level: int | None = None) -> None:
        """Ranks `item`, replacing its earlier rank; `level`: the level at its last use, None: it is used now."""
        level = self.level if level is None else level
        self._next_serial = serial = self._next_serial + 1
        self._serials[item] = serial
        heapq.heappush(self._heap, (priority, level + gain, serial, item, level))
        if len(self._heap) > 2 * len(self._serials) + 64:
            self._heap = [entry for entry in self._heap if self._serials.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def discard(self, item: Hashable) -> None:
        """Forgets `item`'s rank."""
        self._serials.pop(item, None)

    def drop(self, item: Hashable) -> None:
        """Forgets the rank of `item`, and that it was superseded."""
        self._serials.pop(item, None)
        self.superseded.pop(item, None)

    def pop_ranked(self) -> tuple[int, int, int, Any, int]:
        """Takes the lowest entry out: (priority, score, serial, item, level at last use)."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._serials.get(entry[3]) == entry[2]:
                del self._serials[entry[3]]
                return entry
        raise IntegrityError("nothing left to evict although the counters promise evictable pages")

    def put_back(self, entry: tuple[int, int, int, Any, int]) -> None:
        """Undoes `pop_ranked`."""
        self._serials[entry[3]] = entry[2]
        heapq.heappush(self._heap, entry)

    def clear(self) -> None:
        """Forgets every item; the level stays."""
        self.unneeded.clear()
        self.superseded.clear()
        self._heap.clear()
        self._serials.clear()

    def items(self) -> list[Any]:
        """Everything that has a rank."""
        return list(self._serials)

    def ranked(self, item: Hashable) -> bool:
        """Whether `item` has a rank."""
        return item in self._serials


class PagePool:
    """The pages of one pool: a free stack, counters of who owns the rest, and the eviction order.

    >>> import numpy as np
    >>> from jkv.layout import Pool
    >>> pool = PagePool(Pool(0, ("full",), 4, 1024, (), False))
    >>> pool.allocate(3)
    array([1, 2, 3], dtype=int32)
    >>> pool.release(np.array([2], np.int32)); pool.free
    2
    """

    def __init__(self, pool: Pool):
        self.name = pool.name
        self.ordinal = pool.ordinal
        self.total = pool.num_pages
        self.tree = 0  # pages owned by tree nodes
        self.held = 0  # of these, pages that a sequence holds
        self.evicted = 0  # pages evicted so far
        self.order = EvictionOrder()
        self.free = self.total
        self._stack = np.arange(self.total, 0, -1, dtype=np.int32)  # [:free] is free; page 1 on top
        # one more entry than there are ids: 0 and -1 (which wraps to it) can never be freed
        self._is_free = np.ones(pool.num_rows + 1, bool)
        self._is_free[self.total + 1 : -1] = False  # slots beyond belong to the rows, which swap them for others

    @property
    def private(self) -> int:
        """Pages owned by sequences."""
        return self.total - self.free - self.tree

    @property
    def evictable(self) -> int:
        """Pages that eviction could free."""
        return self.tree - self.held

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free or evictable."""
        return self.free + self.tree - self.held

    def allocate(self, count: int) -> np.ndarray:
        """Takes `count` pages off the free stack: int32[count]. The caller has made sure that they are there."""
        if count > self.free:
            raise IntegrityError(f"pool {self.name!r}: {count} pages asked for, {self.free} free")
        self.free -= count
        pages = self._stack[self.free : self.free + count][::-1].copy()
        self._is_free.put(pages, False)
        return pages

    def allocate_one(self) -> int:
        """Takes one page off the free stack."""
        if not self.free:
            raise IntegrityError(f"pool {self.name!r}: a page asked for, none free")
        self.free -= 1
        page = int(self._stack[self.free])
        self._is_free[page] = False
        return page

    def release(self, pages: np.ndarray) -> None:
        """Puts `pages` (distinct, not free) back on the free stack."""
        count = len(pages)
        if count == 0:
            return
        if np.count_nonzero(self._is_free.take(pages)) or self.free + count > self.total:
            raise IntegrityError(f"pool {self.name!r}: pages {pages.tolist()} are not all in use: freed twice")
        self._stack[self.free : self.free + count] = pages[::-1]
        self.free += count
        self._is_free.put(pages, True)

    def release_one(self, page: int) -> None:
        """Puts one page back on the free stack."""
        if self._is_free[page]:
            raise IntegrityError(f"pool {self.name!r}: page {page} is not in use: freed twice")
        self._stack[self.free] = page
        self.free += 1
        self._is_free[page] = True

    def free_pages(self) -> np.ndarray:
        """The free page ids: int32[free]."""
        return self._stack[: self.free]
