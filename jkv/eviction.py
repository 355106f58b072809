"""Eviction: how the tree makes room in one tier, and where what leaves it goes.

    device ──▶ host memory ──▶ store            a page, or a snapshot, moves down where there is room below,
       `────────────┴────────────▶ lost         or where room can be made; what no endpoint needs is dropped

A store takes copies: what leaves host memory leaves the tree, and is known to the store alone, by its content's
digest. What suspended sequences keep only ever moves to host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from jkv.errors import IntegrityError
from jkv.layout import HOST, Layout
from jkv.pages import Claim, PagePool, on_device
from jkv.plan import PlanBuilder
from jkv.radix import HOLDS, NO_SLOT, STAYS, Endpoint, Hit, Node, Root, path_to, spans
from jkv.retention import Retention
from jkv.tiers.keys import Contents, page_digests, page_name, root_digest, tail_digest, tail_name


class Shelf(Protocol):
    """What the tree asks of a store: `jkv.tiers.store.Store`."""

    def has(self, group: str, name: str) -> bool: ...
    def touch(self, group: str, name: str) -> None: ...
    def tails(self, group: str, parent: bytes) -> list[tuple[int, bytes]]: ...
    def watch(self) -> list[tuple[str, str]]: ...
    def take_changes(self) -> list[tuple[str, str]] | None: ...


class Eviction(Retention):
    """The tree as the source of pages: it evicts what is worth least, and moves down what can be kept.

    Args:
      layout, pools: as for Retention.
      builder: is told what moves.
      shelf: the store, if there is one.
      contents: of the tokens that are none, for digests.

    Attributes:
      epoch: roots of others are retired: nothing new finds them, and nothing of them goes to the store.
    """

    def __init__(
        self,
        layout: Layout,
        pools: Sequence[PagePool],
        builder: PlanBuilder | None = None,
        shelf: Shelf | None = None,
        contents: Contents = MappingProxyType({}),
    ):
        super().__init__(layout, pools)
        self.contents = contents
        self.epoch = 0
        self.builder = builder
        self.shelf = shelf
        self._moving: Endpoint | None = None  # not to be evicted from host memory, nor its node, while pages move there
        self._rooms_in_the_making = 0

    # --- room --------------------------------------------------------------------------------------------------

    def can_allocate(self, counts: Sequence[int]) -> bool:
        """Whether every pool has counts[p] device pages, free or to be had."""
        for count, pool in zip(counts, self.pools, strict=True):
            if count and count > pool.free and count > pool.available:
                return False
        return True

    def can_claim(self, claims: Sequence[Claim]) -> bool:
        """Whether every pool has the device pages that claims[p] needs, once what it holds is held."""
        for claim, pool in zip(claims, self.pools, strict=True):
            count = claim.fresh + claim.onboard
            if count and count > pool.available_after(claim):
                return False
        return True

    def allocate(self, pool: PagePool, count: int) -> np.ndarray:
        """`count` page ids (int32) that become the caller's, evicting as needed. Check `can_allocate` first."""
        if pool.free < count:
            self._make_room(pool, count)
        return pool.allocate(count)

    def allocate_one(self, pool: PagePool) -> int:
        """One page id, or slot, that becomes the caller's."""
        if not pool.free:
            self._make_room(pool, 1)
        return pool.allocate_one()

    def make_free(self, pool: PagePool, count: int) -> None:
        """Evicts until `count` pages of `pool` are free; they stay so. Check first that they are available."""
        if pool.free < count:
            self._make_room(pool, count)

    def forget_lost(self, lost: Collection[tuple[int, int]]) -> None:
        """Drops what lies in host pages, (pool ordinal, id), that never arrived there, unless a sequence keeps it."""
        gone = {pool.ordinal: HOST + np.array(sorted(i for p, i in lost if p == pool.ordinal)) for pool in self.pools}
        for node in reversed(list(self.nodes())):  # what is below goes before what it hangs on
            if node.parent is None or node.keepers or node.holders:
                continue
            for group in self.windows:
                places = node.pages[group.ordinal][: self.num_pages(node)]
                at = np.isin(places, gone[group.pool]).nonzero()[0]
                if len(at):
                    self._lose_window(node, group.ordinal, at)
            for endpoint in list(node.endpoints):
                if not endpoint.pinned and self.state_pool and endpoint.slot in gone[self._state_ordinal]:
                    self.remove_endpoint(endpoint)
        if self.full is not None:
            for node in list(self.nodes()):
                if node.parent is not None and not (node.keepers or node.holders):
                    places = node.pages[self.full][: self.num_pages(node)]
                    at = np.isin(places, gone[self.full_pool.ordinal]).nonzero()[0]
                    if len(at):
                        self._cut_branch(node, int(at[0]))

    def _lose_window(self, node: Node, g: int, at: np.ndarray) -> None:
        """Window pages at indices `at` of `node` are no good."""
        places = node.pages[g]
        self._weigh(node, g, at, -1)
        self.release_pages(self.group_pools[g], places[at])
        places[at] = -1
        node.resident -= len(at)
        self.review_head(node)

    def go_on_from(self, lost: Eviction) -> None:
        """This empty tree takes the place of one whose device is lost."""
        self.epoch, self.expiry.step = lost.epoch, lost.expiry.step
        if lost.expiry.on:
            self.expiry.start()

    def retire(self) -> None:
        """The weights are others from now on: nothing that is there now is found any more, and what nobody holds goes.

        The store gets a copy of what it takes.
        """
        for root in list(self.roots.values()):
            self.drop_unheld(root)
        self.epoch += 1

    def is_retired(self, node: Node) -> bool:
        """Whether `node` is of an earlier epoch."""
        *_, root = path_to(node)
        return root.key.epoch != self.epoch

    def drop_unheld(self, root: Node) -> None:
        """Frees what no sequence holds or keeps below `root`."""
        for node in reversed(list(self.nodes(root))):  # what hangs on a node goes before it
            if node.parent is None or node.parent.children.get(node.key) is not node:
                continue
            if not (node.holders or node.keepers):
                self._cut(node, 0)
                continue
            if self.shelf is not None:
                self.persist_run(node, 0)
            for endpoint in [endpoint for endpoint in node.endpoints if not endpoint.pinned]:
                if self.shelf is not None:
                    self.persist(endpoint)
                self.remove_endpoint(endpoint)
            for group in self.windows:
                g, size = group.ordinal, self.num_pages(node)
                idle = ((node.uses[g][:size] == 0) & (node.pages[g][:size] >= 0)).nonzero()[0]
                if len(idle):
                    self._drop_window(node, g, idle)

    def relies_on(self, hit: Hit, pages: Collection[tuple[int, int]]) -> bool:
        """Whether anything on the path of `hit` lies in these host pages: (pool ordinal, id)."""
        slots = [] if hit.endpoint is None else [(self._state_ordinal, hit.endpoint.slot)]
        places = [
            (group.pool, place)
            for node in hit.path
            for group in self.groups
            if node.pages
            for place in node.pages[group.ordinal][: self.num_pages(node)].tolist()
        ]
        return any(place >= HOST and (pool, place - HOST) in pages for pool, place in (*slots, *places))

    def _cut_branch(self, node: Node, keep: int) -> None:
        """An unheld node keeps its first `keep` pages and loses all that hangs on it."""
        for child in list(node.children.values()):
            self._cut_branch(child, 0)
        if node.parent.children.get(node.key) is node:  # not unlinked with its last child
            self._cut(node, keep)

    def _make_room(self, pool: PagePool, count: int) -> None:
        """Evicts until `count` pages are free: as many as are needed and no more."""
        order, spared, passed_over = pool.order, [], []
        if self.expiry.on:
            self.expire()
        self._rooms_in_the_making += 1
        while pool.free < count:
            if pool.evictable <= 0:
                self._move_down_kept(pool, count - pool.free)
                continue
            expired = self.expiry.on and order.begins_expired()
            if order.unneeded and not expired:
                (node, g), _ = order.unneeded.popitem(last=False)
                self._drop_unneeded(node, g, pool, count - pool.free)
                continue
            if order.superseded and not expired:
                endpoint, _ = order.superseded.popitem(last=False)
                if self._is_superseded(endpoint) and self._yields(endpoint, pool):
                    self._let_down(endpoint, pool)
                continue
            entry = order.pop_ranked()
            priority, score, _, item, level = entry
            is_leaf = isinstance(item, Node)
            if is_leaf and self._moving is not None and item is self._moving.node:
                passed_over.append(entry)
                continue
            gain = self._leaf_gain(item, pool) if is_leaf else self._gain(item.node, item.position)
            if level + gain > score:  # what was above it has gone meanwhile: it is dearer now
                order.put(item, priority, gain, level)
            elif is_leaf:
                order.level = max(order.level, score)
                self._cut_leaf(item, pool, count - pool.free)
            elif self._yields(item, pool):
                order.level = max(order.level, score)
                self._let_down(item, pool)
                spared.append(entry)  # it may be alive, one tier down
            else:
                spared.append(entry)
        self._rooms_in_the_making -= 1
        for entry in passed_over:
            order.put_back(entry)
        for priority, _, _, item, _ in spared:  # in use, or in the other tier: they had better not be met again soon
            if item.alive:
                order.put(item, priority, self._gain(item.node, item.position))

    def _lose(self, pool: PagePool, places: np.ndarray) -> None:
        super()._lose(pool, places)
        if self._rooms_in_the_making:
            if pool.below is None:
                pool.evicted += len(places)
            else:
                for tier in self.tiers(pool):
                    tier.evicted += len(tier.own(places))

    # --- endpoints ---------------------------------------------------------------------------------------------

    def _yields(self, endpoint: Endpoint, pool: PagePool) -> bool:
        """Whether losing `endpoint` brings `pool` closer to a free page."""
        if endpoint.pinned or endpoint is self._moving:
            return False
        if pool.ordinal == self._state_ordinal:
            return self.tier_of(self.state_pool, endpoint.slot) is pool
        return any(len(at) for _, _, at in self._window_pages(endpoint, pool))

    @property
    def _state_ordinal(self) -> int:
        return -1 if self.state_pool is None else self.state_pool.ordinal

    def _window_pages(self, endpoint: Endpoint, pool: PagePool) -> list[tuple[Node, int, np.ndarray]]:
        """The window pages that `endpoint` needs and that may leave `pool`: (node, group, indices)."""
        found = []
        for group in self.windows:
            g = group.ordinal
            if group.pool == pool.ordinal:
                for node, a, b in self._needed_spans(endpoint, group):
                    places, uses = node.pages[g][a:b], node.uses[g][a:b]
                    here = pool.here(places) & ((uses & STAYS) == 0)
                    found.append((node, g, a + here.nonzero()[0]))
        return found

    def _let_down(self, endpoint: Endpoint, pool: PagePool) -> None:
        """What `endpoint` has in `pool` moves down; without room there, the endpoint is lost."""
        if pool.below is None or not self._move_endpoint(endpoint, pool):
            self._evict_endpoint(endpoint)

    def _move_endpoint(self, endpoint: Endpoint, pool: PagePool) -> bool:
        below = pool.below
        if pool is self.state_pool:
            if below.available:
                self._move_slot(endpoint)
                return True
            return False
        pages = self._window_pages(endpoint, pool)
        cold = sum(len(at) for _, _, at in self._window_pages(endpoint, below))
        if self.full_pool is pool:  # the path that it hangs on has to stay as well
            cold += sum(self.num_pages(node) - node.device for node in path_to(endpoint.node) if not node.keepers)
        if sum(len(at) for _, _, at in pages) > below.available - cold:
            return False
        self._moving = endpoint
        for node, g, at in pages:
            self._move_window(node, g, at)
        self._moving = None
        return True

    def _move_slot(self, endpoint: Endpoint) -> None:
        """The snapshot of `endpoint` moves to host memory."""
        pool, below = self.state_pool, self.state_pool.below
        place = HOST + self.allocate_one(below)
        self._count_pinned(endpoint, -1)
        self.builder.copy(pool.ordinal, endpoint.slot, place)
        pool.release_one(endpoint.slot)
        pool.tree -= 1
        below.tree += 1
        self._count_moved(pool, 1)
        endpoint.slot = place
        self._count_pinned(endpoint, 1)

    def _evict_endpoint(self, endpoint: Endpoint, keep_pages: int | None = None) -> None:
        self.snapshots_evicted += endpoint.slot != NO_SLOT
        if endpoint.slot != NO_SLOT:
            self.tier_of(self.state_pool, endpoint.slot).evicted += 1
        if self.shelf is not None:
            self.persist(endpoint)
        self.remove_endpoint(endpoint, keep_pages=keep_pages)

    # --- moving down -------------------------------------------------------------------------------------------

    def _move_window(self, node: Node, g: int, at: np.ndarray) -> None:
        """Window pages on the device, at indices `at` of `node`, move to host memory, which has room for them."""
        if len(at):
            places = HOST + self.allocate(self.group_pools[g].below, len(at))
            self._weigh(node, g, at, -1)
            self.move(self.group_pools[g], node.pages[g], at, places)
            self._weigh(node, g, at, 1)

    def _move_full(self, node: Node, count: int) -> None:
        """The last `count` full-attention pages that `node` has on the device move to host memory."""
        pool, below = self.full_pool, self.full_pool.below
        places = HOST + self.allocate(below, count)
        end = node.device
        if end == self.num_pages(node):
            node.cold_level = below.order.level
        self.move(pool, node.pages[self.full], np.arange(end - count, end), places)
        pool.tree -= count
        below.tree += count
        if node.keepers:
            pool.kept -= count
            below.held += count
        self._set_device(node, end - count)
        self._review(node)

    def move(self, pool: PagePool, pages: np.ndarray, at: np.ndarray, places: np.ndarray) -> None:
        """Pages at indices `at` of `pages` are from now on at `places`; their device pages are free."""
        ids = pages[at]
        for source, place in zip(ids.tolist(), places.tolist(), strict=True):
            self.builder.copy(pool.ordinal, source, place)
        pool.release(ids)
        pages[at] = places
        self._count_moved(pool, len(at))

    def _count_moved(self, pool: PagePool, count: int) -> None:
        pool.evicted += count
        pool.offloaded += count

    def _move_down_kept(self, pool: PagePool, short: int) -> None:
        """Up to `short` pages, at least one, of what suspended sequences have or keep in `pool` move down.

        Their own pages first: a page of theirs is never warmer than their path.
        """
        if pool.below is None or pool.below.available <= 0:
            raise IntegrityError(f"pool {pool.name!r}: nothing left to evict although pages were promised")
        if pool.idle:
            pool.order.sleepers.peekitem(0)[1].move_down(pool, min(short, pool.below.available))
            return
        if not pool.order.kept:
            raise IntegrityError(f"pool {pool.name!r}: {pool.kept} kept pages, and none is queued to move down")
        (item, g), _ = pool.order.kept.popitem(last=False)
        if g < 0:
            self._move_slot(item)
        elif g == self.full:
            self._move_full(item, min(short, item.device, pool.below.available))
        else:
            self._move_kept_window(item, g, short)

    def _move_kept_window(self, node: Node, g: int, short: int) -> None:
        pool, size = self.group_pools[g], self.num_pages(node)
        places, uses = node.pages[g][:size], node.uses[g][:size]
        at = (on_device(places) & ((uses & STAYS) > 0) & ((uses & HOLDS) == 0)).nonzero()[0]
        count = min(len(at), short, pool.below.available)
        if count < len(at):
            pool.order.kept[(node, g)] = None
            pool.order.kept.move_to_end((node, g), last=False)
        self._move_window(node, g, at[:count])

    # --- moving up ---------------------------------------------------------------------------------------------

    def onboard_path(self, node: Node) -> None:
        """The full-attention pages of `node`'s path, which the caller holds, move to the device. Room was claimed."""
        if self.has_host and self.full_pool is not None:
            for current in reversed(list(path_to(node))):
                size = self.num_pages(current)
                count = size - current.device
                if count:
                    self._count_cold(self.full_pool, -count)
                    self.onboard(self.full_pool, current.pages[self.full], np.arange(current.device, size))
                    self.full_pool.tree += count
                    self.full_pool.held += count
                    self._set_device(current, size)

    def _count_cold(self, pool: PagePool, count: int) -> None:
        pool.below.tree += count
        pool.below.held += count

    def onboard_window(self, node: Node, g: int, first: int, stop: int) -> None:
        """Window pages [first, stop) of `node`'s path, which the caller holds, move to the device."""
        if not self.has_host:
            return
        for current, a, b in spans(node, first, stop):
            at = a + (current.pages[g][a:b] >= HOST).nonzero()[0]
            if len(at):
                self._weigh(current, g, at, -1)
                self.onboard(self.group_pools[g], current.pages[g], at)
                self._weigh(current, g, at, 1)

    def onboard(self, pool: PagePool, places: np.ndarray, at: np.ndarray) -> None:
        """The host pages at indices `at` of `places` move to the device.

        They are free before room is made for them, so that what has to leave the device may take their place.
        """
        below, builder = pool.below, self.builder
        moving = places[at]
        values = [builder.read(pool.ordinal, place) for place in moving.tolist()]
        for place in moving.tolist():
            builder.forget(pool.ordinal, place)
        below.release(moving - HOST)
        places[at] = -1
        ids = self.allocate(pool, len(at))
        for page, value in zip(ids.tolist(), values, strict=True):
            builder.write(pool.ordinal, page, value)
        places[at] = ids
        pool.onboarded += len(at)

    def onboard_slot(self, place: int) -> int:
        """The state at `place`, in host memory, moves to the device; returns its slot."""
        places = np.array([place], np.int32)
        self.onboard(self.state_pool, places, np.zeros(1, np.intp))
        return int(places[0])

    def onboard_pinned(self, endpoint: Endpoint) -> None:
        """The snapshot of `endpoint`, the live state of a sequence that wakes up, is on the device from now on."""
        self.unpin(endpoint)
        if endpoint.slot >= HOST:
            self.state_pool.below.tree -= 1
            endpoint.slot = self.onboard_slot(endpoint.slot)
            self.state_pool.tree += 1
        self.pin(endpoint)

    # --- runs --------------------------------------------------------------------------------------------------

    def _drop_unneeded(self, node: Node, g: int, pool: PagePool, short: int) -> None:
        if g == self.full:
            drop = min(self.dead_pages(node, pool), short)
            if drop:
                self._cut(node, self.leaf_end(node, pool) - drop)
            return
        size = self.num_pages(node)
        places, uses = node.pages[g][:size], node.uses[g][:size]
        idle = ((uses == 0) & pool.here(places)).nonzero()[0]
        if len(idle) > short:
            pool.order.unneeded[(node, g)] = None
            pool.order.unneeded.move_to_end((node, g), last=False)
        idle = idle[:short]
        spare = 0 if pool.below is None else min(len(idle), pool.below.free)  # not worth evicting anything for
        if spare:
            self._move_window(node, g, idle[:spare])
            pool.below.order.unneeded[(node, g)] = None
        if spare < len(idle):
            self._drop_window(node, g, idle[spare:])

    def _cut_leaf(self, node: Node, pool: PagePool, short: int) -> None:
        """Takes up to `short` pages from the end of an unheld leaf, not past the endpoint above its last one."""
        end = self.leaf_end(node, pool)
        keep = max(0 if pool is self.full_pool else node.device, end - short)
        last = self._last_position(node, pool)
        above = last - self._gain(node, last) - node.start
        if above > 0:
            keep = min(max(keep, -(-above // self.page_size)), end - 1)
        if pool.below is not None and pool.below.available > 0:
            self._move_full(node, min(end - keep, pool.below.available))
        else:  # then nothing below it is in host memory either
            self._cut(node, keep)

    def _cut(self, node: Node, keep: int) -> None:
        """An unheld leaf keeps its first `keep` pages; endpoints that need the others go."""
        size, end = self.num_pages(node), node.start + keep * self.page_size
        node.holders = 1  # so that nothing below settles the node before all of it is consistent again
        while node.endpoints and node.endpoints[-1].position > end:
            self._evict_endpoint(node.endpoints[-1], keep)
        if self.shelf is not None:
            self.persist_run(node, keep)
        if node.device > keep:
            self._set_device(node, keep)
        if node.digests:
            del node.digests[keep:]
        for group, pool in zip(self.groups, self.group_pools, strict=True):
            places = node.pages[group.ordinal][keep:size]
            if group.window is not None:
                places = places[places >= 0]
            if len(places):
                self._lose(pool, places)
                node.resident -= len(places)
            if 0 < 2 * keep < len(node.pages[group.ordinal]):  # not for every page: a long run goes one page at a time
                node.pages[group.ordinal] = node.pages[group.ordinal][:keep].copy()
                if group.window is not None:
                    node.uses[group.ordinal] = node.uses[group.ordinal][:keep].copy()
        node.size = min(node.size, keep * self.page_size)
        if 0 < 2 * node.size < len(node.tokens):
            node.tokens = node.tokens[: node.size].copy()
        node.holders = 0
        self.settle(node)

    # --- to the store ------------------------------------------------------------------------------------------

    def digests(self, node: Node) -> bytes:
        """Completes the digests of the whole pages on `node`'s path; returns that of `node`'s last one."""
        lacking = []
        for current in path_to(node):
            whole = current.size // self.page_size
            if current.parent is not None and whole and len(current.digests) == whole:
                break
            lacking.append(current)
        for current in reversed(lacking):
            whole = current.size // self.page_size
            known = len(current.digests)
            if known < whole:
                last = current.digests[-1] if known else self._digest_above(current)
                tokens = current.tokens[known * self.page_size : whole * self.page_size]
                current.digests += self.page_digests(last, tokens)
        return node.digests[-1] if node.digests else self._digest_above(node)

    def _digest_above(self, node: Node) -> bytes:
        """The digest of the last page above `node`; of its scope, if there is none."""
        current: Any = node
        while current.parent is not None:
            current = current.parent
            if current.digests:
                return current.digests[-1]
        return self.scope_digest(current.key)

    @staticmethod
    def scope_digest(root: Root) -> bytes:
        """The digest above the first page of a root."""
        return root_digest(root.model, root.scope.adapter, root.scope.version, root.scope.salt)

    def page_digests(self, parent: bytes, tokens: np.ndarray) -> list[bytes]:
        """The digests of whole pages that follow `parent`."""
        return page_digests(parent, tokens, self.page_size, self.contents)

    def tail_digest(self, parent: bytes, tokens: np.ndarray) -> bytes:
        """The digest of a partial page that follows `parent`."""
        return tail_digest(parent, tokens, self.contents)

    def persist(self, endpoint: Endpoint) -> None:
        """Copies to the store what resuming at `endpoint` reads and what nothing else keeps: its snapshot, its windows,
        its partial page. The whole full-attention pages follow when they leave memory."""
        node, size = endpoint.node, self.page_size
        if self.is_retired(node):
            return
        self.digests(node)
        whole, count = divmod(endpoint.position, size)
        at = whole - node.first_page  # where in the node the whole pages end
        parent = node.digests[at - 1] if at > 0 else self._digest_above(node)
        name = page_name(parent)
        if count:
            tokens = node.tokens[at * size : at * size + count]
            name = tail_name(parent, count, self.tail_digest(parent, tokens))
        if endpoint.slot != NO_SLOT:
            self._persist_place(self._state_ordinal, endpoint.slot, "recurrent", name)
        for group in self.groups:
            sinks, first, stop = group.needed(endpoint.position, size)
            if count and (first <= whole < stop or whole < sinks):
                self._persist_place(group.pool, int(node.pages[group.ordinal][at]), group.name, name)
            if group.window is not None:
                self._persist_pages(node, group.ordinal, first, whole)
                self._persist_pages(node, group.ordinal, 0, min(sinks, first, whole))
        for current in path_to(node):
            current.stored = max(current.stored, min(current.end, endpoint.position))

    def persist_run(self, node: Node, keep: int) -> None:
        """Copies the node's whole full-attention pages from `keep` on to the store, the last ones first.

        With recurrent layers those alone that a snapshot in the store goes with.
        """
        if self.full is not None and not self.is_retired(node):
            self.digests(node)
            end = node.end if self.state_pool is None else node.stored
            self._persist_pages(node, self.full, node.first_page + keep, -(-end // self.page_size))

    def _persist_pages(self, node: Node, g: int, first: int, stop: int) -> None:
        """Copies whole pages [first, stop) of `node`'s path to the store, the last ones first."""
        group = self.groups[g]
        for current, a, b in spans(node, first, stop):
            for i in range(min(b, len(current.digests)) - 1, a - 1, -1):
                place = int(current.pages[g][i])
                self._persist_place(group.pool, place, group.name, page_name(current.digests[i]))

    def persist_all(self) -> None:
        """Copies to the store everything that is reusable."""
        for node in reversed(list(self.nodes())):
            for endpoint in node.endpoints:
                self.persist(endpoint)
        for node in reversed(list(self.nodes())):
            if node.parent is not None:
                self.persist_run(node, 0)

    def _persist_place(self, pool: int, place: int, group: str, name: str) -> None:
        """Copies a page to the store, if there is one; what the store has already is young again."""
        if self.shelf.has(group, name):
            self.shelf.touch(group, name)
        elif place > 0:
            self.builder.store(pool, place, f"{group}/{name}")

    # --- all at once -------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Frees everything in memory. Nothing may be held."""
        for node in self.nodes():
            for g, pool in enumerate(self.group_pools):
                if node.size:
                    places = node.pages[g][: self.num_pages(node)]
                    self._lose(pool, places[places >= 0])
            for endpoint in node.endpoints:
                endpoint.alive = False
                if endpoint.slot != NO_SLOT:
                    self.tier_of(self.state_pool, endpoint.slot).tree -= 1
                    self.free_one(self.state_pool, endpoint.slot)
        self.roots.clear()
        self.expiry.clear()
        for pool in self.all_pools():
            pool.order.clear()
