"""Room: the pages that a capacity takes, all or nothing, and what a chunk with window scratch holds back.

A step that writes up to `capacity` leaves a window of W with the pages that this length needs, and those of max_rewind
tokens fewer. What lies before is read from the step's own values, or from pages that are there already:

    live at length | length .... held back: no page .... | live at capacity - max_rewind .. capacity

The host half of jkv: NumPy only.
"""

from __future__ import annotations

import numpy as np

from jkv.errors import OutOfPagesError
from jkv.holdings import NO_PAGE, STATE, Holdings
from jkv.layout import Group
from jkv.radix import NO_SLOT
from jkv.stats import SKIPPED


class Room(Holdings):
    """How one sequence gets and gives back the pages behind its length."""

    def _fit(self, capacity: int, length: int) -> bool:
        """Pages for `capacity` tokens, no more and no fewer; private copies of what is lent if there is room to write.

        With window scratch, windows of the lengths from `length` to `capacity`, and within max_rewind, have pages.

        Returns:
          False: not enough pages now, nothing changed.
        """
        old, new = self._num_pages(self._capacity), self._num_pages(capacity)
        lending = self._is_lending and capacity > self._length
        if self._host.scratch is not None:
            return self._fit_to_chunk(old, new, capacity, min(length, capacity), lending)
        if (new > old or lending) and not self._grow(old, max(old, new), lending):
            return False
        if new < old:
            self._shrink(old, new)
        return True

    def _grow(self, old: int, new: int, lending: bool) -> bool:
        """Pages [old, new) in every group."""
        fresh = [0] * len(self._host.pools)
        for group in self._host.tree.groups:
            fresh[group.pool] += new - old
        if not self._make_possible(fresh, lending):
            return False
        if new > old:
            for group in self._host.tree.groups:
                self._tables[group.ordinal][old:new] = self._take(group, new - old)
                self._mark(group.ordinal, old, new)
        return True

    def _fit_beyond(self, capacity: int, length: int) -> bool:
        """Pages for `capacity` tokens, of which something else writes those up to `length`.

        Windows get none for what has left them by then, and let go of what they had of it.
        """
        host, tree, page_size = self._host, self._host.tree, self._host.layout.page_size
        old, new = self._num_pages(self._capacity), self._num_pages(capacity)
        columns = []
        fresh = [0] * len(host.pools)
        for group in tree.groups:
            at = np.arange(old, new)
            sinks, live = group.first_live(length, page_size)
            columns.append(at[(at < sinks) | (at >= live)])
            fresh[group.pool] += len(columns[-1])
        if not self._make_possible(fresh, self._is_lending):
            return False
        self._slide(length)
        for group, at in zip(tree.groups, columns, strict=True):
            self._tables[group.ordinal][at] = self._take(group, len(at))
            self._mark(group.ordinal, old, new)
        return True

    def _make_possible(self, fresh: list[int], lending: bool) -> bool:
        """Whether there is room for `fresh` pages per pool; if so, what is lent has private copies, where `lending`."""
        tree = self._host.tree
        copies = self._lent_counts() if lending else [0] * len(fresh)
        if tree.can_allocate([a + b for a, b in zip(fresh, copies, strict=True)]):
            if lending:
                self._copy_lent()
        elif lending and self._is_sole_user_of_tail and tree.can_allocate(fresh):
            self._take_back_lent()
        else:
            self._require_possible(fresh)
            return False
        return True

    def _require_possible(self, fresh: list[int]) -> None:
        """Raises unless an empty cache could give this sequence `fresh` pages per pool beside those it has."""
        total, page_size = list(fresh), self._host.layout.page_size
        # commits would free the pages below, but not those of endpoints in a page that is not full yet
        full = self._length // page_size * page_size
        length = min((self._length, *(position for position in self._pending if position > full)))
        for group in self._host.tree.groups:
            live = group.first_live(length, page_size)[1]
            table = self._tables[group.ordinal]
            total[group.pool] += int(np.count_nonzero(table[live:])) + min(live, group.sink_pages(page_size))
        for pool, count in zip(self._host.pools, total, strict=True):
            if count > pool.total:
                raise OutOfPagesError(f"one sequence needs {count} pages of pool {pool.name!r}, which has {pool.total}")

    # --- window scratch ----------------------------------------------------------------------------------------------

    def _fit_to_chunk(self, old: int, new: int, capacity: int, length: int, lending: bool) -> bool:
        """`_fit` where windows may lack pages: with scratch they get those that the end of the chunk will need."""
        host, tree = self._host, self._host.tree
        first = self._first_fresh_page(capacity)
        wanted = [self._chunk_pages(group, first, max(old, new), capacity, length) for group in tree.groups]
        fresh = [0] * len(host.pools)
        for group, want in zip(tree.groups, wanted, strict=True):
            there = self._tables[group.ordinal][first : max(old, new)] > 0
            fresh[group.pool] += int(np.count_nonzero(want & ~there))
            if not lending:  # else the copies of what is lent come first, before the surplus is free
                fresh[group.pool] -= int(np.count_nonzero(there & ~want))
        if not self._make_possible(fresh, lending):
            return False
        for group, want in zip(tree.groups, wanted, strict=True):
            entries = self._tables[group.ordinal][first : max(old, new)]
            surplus = (entries > 0) & ~want
            if surplus.any():
                host.pools[group.pool].release(entries[surplus])
                entries[surplus] = NO_PAGE
        for group, want in zip(tree.groups, wanted, strict=True):
            entries = self._tables[group.ordinal][first : max(old, new)]
            missing = want & (entries == NO_PAGE)
            if missing.any():
                entries[missing] = self._take(group, int(np.count_nonzero(missing)))
            self._mark(group.ordinal, first, max(old, new))
        return True

    def _first_fresh_page(self, capacity: int) -> int:
        """The first page that no token that will count is written to, not even by a step in flight."""
        return self._num_pages(max(self._length, min(self._reserved, capacity)) if self._in_flight else self._length)

    def _chunk_pages(self, group: Group, first: int, stop: int, capacity: int, length: int) -> np.ndarray:
        """bool[stop - first]: which pages of [first, stop) a chunk to `capacity` takes, if it may end at `length`."""
        page_size = self._host.layout.page_size
        wanted = np.zeros(max(0, stop - first), bool)
        end = max(0, self._num_pages(capacity) - first)
        if group.window is None or self._scratch is None:
            wanted[:end] = True
            return wanted
        live = group.live_from(max(0, min(length, capacity - self._scratch.max_rewind)), page_size)
        wanted[max(0, live - first) : end] = True
        wanted[: min(end, max(0, group.sink_pages(page_size) - first))] = True
        for position in self._pending:
            _, needed, last = group.needed(position, page_size)
            wanted[max(0, needed - first) : min(end, max(0, last - first))] = True
        return wanted

    def _holds_back(self, first: int = 0) -> bool:
        """Whether a window lacks pages, from page `first` or its first live one on, up to the capacity."""
        stop = self._num_pages(self._capacity)
        return any(
            not self._tables[group.ordinal][max(first, self._live_from[group.ordinal]) : stop].all()
            for group in self._host.tree.windows
        )

    # --- snapshots on the way ----------------------------------------------------------------------------------------

    def _plan_snapshot(self, position: int) -> int:
        """An endpoint to come whose state the next step itself writes; returns its slot, NO_SLOT for none."""
        tree = self._host.tree
        if position in self._pending:
            return self._pending[position]
        if tree.state_pool is not None and not tree.state_pool.available:
            self._work.totals[SKIPPED] += 1
            return NO_SLOT
        slot = self._pending[position] = NO_SLOT if tree.state_pool is None else self._take_one(STATE)
        # A step that is prepared already runs before the next plan, which must not need what it overwrites.
        too_late = self._in_flight and slot != NO_SLOT and self._host.builder.touches(tree.state_pool.ordinal, slot)
        if too_late or (self._host.scratch is not None and not self._has_window_for(position)):
            self._work.totals[SKIPPED] += tree.state_pool is not None
            self._free_slot(self._pending.pop(position))
            return NO_SLOT
        return slot

    def _has_window_for(self, position: int) -> bool:
        """Whether the pages that resuming at the pending `position` reads are there, taking them if need be."""
        if self._lacks_window(position) and not self._in_flight:
            try:
                self._fit(self._capacity, self._capacity)
            except OutOfPagesError:
                return False
        return self._lacks_window(position) is None
