"""Free lists, ownership counters and the order of eviction of one pool, on the device or in host memory.

Every page has exactly one owner: the free list, a tree node, or one sequence (its private pages):

    total == free + tree + private

    tree      evictable: it may be dropped | kept: by suspended sequences | held: by active ones
    private                                  idle: of suspended sequences | of active ones
                                             `- these may only move down -'
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
from sortedcontainers import SortedDict

from jkv.errors import IntegrityError
from jkv.layout import HOST, Pool


def on_device(places: np.ndarray) -> np.ndarray:
    """bool[n]: which of `places` are pages on the device; 0 and -1 are no pages."""
    return (places > 0) & (places < HOST)


EXPIRED = -(2**62)  # a priority below all others


class EvictionOrder:
    """Which tree content leaves a pool first. The one place where the policy lives.

    Three classes, from first to last:

      unneeded     content that no endpoint needs (window pages outside every endpoint's window, KV below which
                   no usable snapshot is left), oldest first
      superseded   endpoints whose chain was extended past them and where nothing branches, oldest first
      ranked       the rest, by (priority, level at its last use + gain): gain is the tokens that losing it costs,
                   `level` the largest such sum evicted so far (GreedyDual, Young 1994: no clock; what is cheap to
                   lose ages fast, what is dear slowly)

    What has outlived its time to live is ranked with priority EXPIRED, and goes before all of these. And what may only
    move down, once nothing else is left: pages of suspended sequences (`sleepers`, by priority, then age), then tree
    pages that they keep (`kept`, oldest first).

    Items come and go eagerly, so what is ranked is still in the tree. What cannot give a page just now (its pages are
    held or in another tier, its slot is lent) the tree passes over and puts back. All operations are O(log n)
    amortised; the heap drops stale entries lazily.
    """

    def __init__(self) -> None:
        self.unneeded: OrderedDict[tuple[Any, int], None] = OrderedDict()  # (node, group)
        self.superseded: OrderedDict[Any, None] = OrderedDict()
        self.kept: OrderedDict[tuple[Any, int], None] = OrderedDict()  # (node, group)
        self.sleepers: SortedDict = SortedDict()  # (priority, age) -> suspended sequence
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

    def begins_expired(self) -> bool:
        """Whether what is ranked lowest has outlived its time."""
        while self._heap and self._serials.get(self._heap[0][3]) != self._heap[0][2]:
            heapq.heappop(self._heap)
        return bool(self._heap) and self._heap[0][0] == EXPIRED

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
        self.kept.clear()
        self._heap.clear()
        self._serials.clear()

    def items(self) -> list[Any]:
        """Everything that has a rank."""
        return list(self._serials)

    def ranked(self, item: Hashable) -> bool:
        """Whether `item` has a rank."""
        return item in self._serials


@dataclasses.dataclass(slots=True)
class Claim:
    """What a sequence is about to take in one pool.

    Attributes:
      fresh: device pages that it needs beside those of the tree.
      held: device pages of the tree that could be evicted until now.
      kept: device pages, kept until now or the sequence's own, that could move down.
      cold: host pages that could be evicted until now.
      onboard: host pages, these included, that move up.
    """

    fresh: int = 0
    held: int = 0
    kept: int = 0
    cold: int = 0
    onboard: int = 0


class PagePool:
    """The pages of one pool in one tier: a free stack, counters of who owns the rest, and the eviction order.

    Args:
      pool: its geometry.
      below: where pages that leave go: the same pool one tier down; None: nowhere.
      num_pages: pages, if not as many as the device has.

    Ids count from 1 in each tier; the tree and the tables know pages by their place, `offset` + id.

    >>> import numpy as np
    >>> from jkv.layout import Pool
    >>> pool = PagePool(Pool(0, ("full",), 4, 1024, (), False))
    >>> pool.allocate(3)
    array([1, 2, 3], dtype=int32)
    >>> pool.release(np.array([2], np.int32)); pool.free
    2
    """

    def __init__(self, pool: Pool, below: PagePool | None = None, num_pages: int | None = None):
        self.name = pool.name
        self.ordinal = pool.ordinal
        self.below = below
        self.page_bytes = pool.page_bytes
        self.offset = 0 if num_pages is None else HOST
        self.total = pool.num_pages if num_pages is None else num_pages
        self.tree = 0  # pages owned by tree nodes
        self.held = 0  # of these, pages that must stay: an active sequence's; in host memory any sequence's
        self.kept = 0  # of these, pages that only suspended sequences hold
        self.idle = 0  # private pages of suspended sequences
        self.evicted = 0  # pages evicted so far
        self.offloaded = 0  # of these, pages that moved down
        self.onboarded = 0  # pages that came up
        self.peak = 0  # the most pages that were neither free nor evictable, as far as noted
        self.order = EvictionOrder()
        self.free = self.total
        self._stack = np.arange(self.total, 0, -1, dtype=np.int32)  # [:free] is free; page 1 on top
        # one more entry than there are ids: 0 and -1 (which wraps to it) can never be freed
        self._is_free = np.ones((self.total + 1 if self.offset else pool.num_rows) + 1, bool)
        self._is_free[self.total + 1 : -1] = False  # slots beyond belong to the rows, which swap them for others

    @property
    def num_ids(self) -> int:
        """Ids from 0 on, those of the null page and of slots beyond the pool's own included."""
        return len(self._is_free) - 1

    @property
    def private(self) -> int:
        """Pages owned by sequences."""
        return self.total - self.free - self.tree

    @property
    def evictable(self) -> int:
        """Pages that eviction could free."""
        return self.tree - self.held - self.kept

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free, evictable, or a suspended sequence's that has room one tier down."""
        count = self.free + self.tree - self.held - self.kept
        if self.below is not None and (self.kept or self.idle):
            count += min(self.kept + self.idle, self.below.available)
        return count

    def available_after(self, claim: Claim) -> int:
        """`available`, once `claim` is held and has left host memory."""
        count = self.free + self.tree - self.held - self.kept - claim.held
        if self.below is not None:
            room = self.below.available - claim.cold + claim.onboard
            count += min(self.kept + self.idle - claim.kept, room)
        return count

    def stuck(self, own: int) -> int:
        """Pages that an allocation cannot get, without `own` ones of a suspended sequence."""
        room = self.below.available if self.below is not None else 0
        return self.held + self.private - self.idle + max(0, self.kept + self.idle - own - room)

    def note_peak(self) -> None:
        """Called once a step."""
        used = self.total - self.free - self.tree + self.held + self.kept
        if used > self.peak:
            self.peak = used

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

    def adopt(self, ids: np.ndarray) -> None:
        """`ids`, which are free, are in use by the caller from now on."""
        self._is_free.put(ids, False)
        self._restack()

    def resize(self, total: int) -> np.ndarray:
        """Another number of pages; those in use with an id that will not exist get a free one.

        Returns:
          int32[2, n]: [0] ids until now, [1] ids from now on.
        """
        last = len(self._is_free) - 2 + total - self.total  # slots beyond the pool's own count as in use
        used = np.flatnonzero(~self._is_free[:-1])
        if len(used) > last:
            raise IntegrityError(f"pool {self.name!r}: {len(used)} pages in use, {total} asked for")
        stays, old = used[used <= last], used[used > last]
        new = np.setdiff1d(np.arange(1, last + 1), stays, assume_unique=True)[: len(old)]
        self.total = total
        self._is_free = np.ones(last + 2, bool)
        self._is_free[stays] = self._is_free[new] = False
        self._restack()
        return np.stack((old, new)).astype(np.int32)

    def _restack(self) -> None:
        free = np.flatnonzero(self._is_free[1:-1]) + 1
        self.free = len(free)
        self._stack = np.zeros(self.total, np.int32)
        self._stack[: self.free] = free[::-1]

    def here(self, places: np.ndarray) -> np.ndarray:
        """bool[n]: which of `places` lie in this tier; 0 and -1 are no pages."""
        return places >= HOST if self.offset else on_device(places)

    def own(self, places: np.ndarray) -> np.ndarray:
        """The ids of those of `places` that lie in this tier."""
        if self.offset:
            return places[places >= HOST] - HOST
        return places if self.below is None else places[places < HOST]

    def free_pages(self) -> np.ndarray:
        """The free page ids: int32[free]."""
        return self._stack[: self.free]
