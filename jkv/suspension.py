"""Suspension: what a suspended sequence keeps, how it leaves the device under pressure, and how it comes back.

    active      holds its path; its own pages and state are on the device
    suspended   keeps its path; everything of it may move to host memory, its own pages before its path
    resumed     all of it is on the device again, or nothing has changed

The host half of jkv: NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np

from jkv.layout import HOST, Group
from jkv.pages import Claim, PagePool, on_device
from jkv.radix import HELD, KEPT, NO_SLOT, pages_on
from jkv.speculation import Speculation


class Suspension(Speculation):
    """A started sequence without a row."""

    _age = 0  # which of all suspensions this is; 0: it is not suspended

    def _fall_asleep(self) -> None:
        """The row is given up: what was held is kept."""
        host, tree = self._host, self._host.tree
        self._renew()
        host.suspensions += 1
        self._age = host.suspensions
        tree.keep(self._node)
        tree.release(self._node, self._priority)
        self._change_windows(self._node, 0, self._tree_pages, KEPT - HELD)
        if self._lent is not None:
            tree.pin(self._lent, KEPT)
        self._count_idle(1)

    def _stir(self) -> None:
        """Undoes `_fall_asleep`, wherever everything lies now."""
        tree = self._host.tree
        self._count_idle(-1)
        tree.hold(self._node)
        self._change_windows(self._node, 0, self._tree_pages, HELD - KEPT)
        tree.unkeep(self._node, self._priority)
        if self._lent is not None:
            tree.pin(self._lent)
            self._slot = self._lent.slot
        self._age = 0
        self._renew()

    def _keep_to_itself(self) -> None:
        """Our live state is lent no more, and not reusable."""
        if self._age:
            self._count_idle(-1)
        self._take_back_state()
        if self._age:
            self._count_idle(1)

    def _wake_up(self) -> bool:
        """Everything is held again, and on the device.

        Returns:
          False: no room there now, nothing changed.
        """
        tree = self._host.tree
        if not tree.can_claim(self._claims_to_wake()):
            return False
        self._stir()
        if tree.has_host:
            self._onboard_path(self._node, self._tree_pages)
            for _, pool, private in self._private_tables():
                at = (private >= HOST).nonzero()[0]
                if len(at):
                    tree.onboard(pool, private, at)
            self._change_slots(lambda slot: tree.onboard_slot(slot) if slot >= HOST else slot)
            if self._lent is not None:
                tree.onboard_pinned(self._lent)
                self._slot = self._lent.slot
        return True

    def move_down(self, pool: PagePool, count: int) -> None:
        """Up to `count`, at least one, of our own pages or states on the device move to host memory."""
        tree, left = self._host.tree, count
        if pool is tree.state_pool:

            def moved(slot: int) -> int:
                nonlocal left
                if slot >= HOST or not left:
                    return slot
                left -= 1
                place = np.array([slot], np.int32)
                tree.move(pool, place, np.zeros(1, np.intp), HOST + tree.allocate(pool.below, 1))
                return int(place[0])

            self._change_slots(moved)
        for _, its_pool, private in self._private_tables():
            if its_pool is pool and left:
                at = on_device(private).nonzero()[0][-left:]
                tree.move(pool, private, at, HOST + tree.allocate(pool.below, len(at)))
                left -= len(at)
        pool.idle -= count - left
        if left or not self._idle_pages()[pool.ordinal]:
            del pool.order.sleepers[(self._priority, self._age)]

    def _has_any(self, pages: Collection[tuple[int, int]]) -> bool:
        """Whether anything that waking up needs lies in one of these host pages: (pool ordinal, id)."""
        tree = self._host.tree
        slots = self._movable_slots() + ([] if self._lent is None else [self._lent.slot])
        places = [(tree.state_pool.ordinal, slot) for slot in slots]
        for group in tree.groups:
            found = [self._table(group.ordinal)[self._tree_pages :]]
            for first, stop in self._live_ranges(group, 0, self._tree_pages):
                found.append(pages_on(self._node, group.ordinal, first, stop))
            places += [(group.pool, place) for place in np.concatenate(found).tolist()]
        return any(place >= HOST and (pool, place - HOST) in pages for pool, place in places)

    # --- what is ours ------------------------------------------------------------------------------------------------

    def _private_tables(self) -> Iterator[tuple[Group, PagePool, np.ndarray]]:
        """The private part of each table."""
        for group in self._host.tree.groups:
            yield group, self._host.pools[group.pool], self._table(group.ordinal)[self._tree_pages :]

    def _movable_slots(self) -> list[int]:
        """The state slots that `_change_slots` is for."""
        slots: list[int] = []

        def noted(slot: int) -> int:
            slots.append(slot)
            return slot

        self._change_slots(noted)
        return slots

    def _change_slots(self, change: Callable[[int], int]) -> None:
        """Every state slot of our own that may move becomes `change(slot)`.

        Those of planned snapshots stay where they are: the step that is to write them knows where.
        """
        if self._lent is None and self._slot != NO_SLOT:
            self._slot = change(self._slot)
        self._change_copies(change, self._length)

    def _change_copies(self, change: Callable[[int], int], limit: int) -> None:
        """Every slot that keeps a copy of a state, up to position `limit`, becomes `change(slot)`."""
        for position, slot in self._pending.items():
            if position <= limit and slot != NO_SLOT:
                self._pending[position] = change(slot)
        for mark in self._marks:
            if mark.slot != NO_SLOT:
                mark.slot = change(mark.slot)

    def change_every_slot(self, change: Callable[[int], int]) -> None:
        """Every state slot that we know becomes `change(slot)`: the pool has got another size."""
        if self._slot != NO_SLOT:
            self._slot = change(self._slot)
            if self.row is not None:
                self._set_slot(self._slot)
        self._change_copies(change, self._host.layout.max_length)

    def _idle_pages(self) -> list[int]:
        """Device pages and slots per pool that are ours and may move."""
        pages = [0] * len(self._host.pools)
        for group, _, private in self._private_tables():
            pages[group.pool] += int(np.count_nonzero(on_device(private)))
        state_pool = self._host.tree.state_pool
        if state_pool is not None:
            pages[state_pool.ordinal] += sum(slot < HOST for slot in self._movable_slots())
        return pages

    def _count_idle(self, sign: int) -> None:
        for pool, count in zip(self._host.pools, self._idle_pages(), strict=True):
            if count:
                pool.idle += sign * count
                if sign > 0:
                    pool.order.sleepers[(self._priority, self._age)] = self
                else:
                    del pool.order.sleepers[(self._priority, self._age)]

    def _claims_to_wake(self) -> list[Claim]:
        tree = self._host.tree
        claims = self._claims(self._node, self._tree_pages)
        for claim, idle in zip(claims, self._idle_pages(), strict=True):
            claim.kept += idle
        for group, _, private in self._private_tables():
            claims[group.pool].onboard += int(np.count_nonzero(private >= HOST))
        if tree.state_pool is not None:
            claim = claims[tree.state_pool.ordinal]
            claim.onboard += sum(slot >= HOST for slot in self._movable_slots())
            if self._lent is not None:
                claim.kept += self._lent.slot < HOST
                claim.onboard += self._lent.slot >= HOST
        return claims
