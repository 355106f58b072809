"""What the tree owns, for whom, and what it gives up: holds, window pages, endpoints, eviction.

A sequence *holds* its path, from its deepest node to the root: a held node is never unlinked and never loses
full-attention pages. Window pages are held one by one, those that the sequence's window and sinks cover. An endpoint
*needs* the window pages that resuming there reads. Window pages that are neither held nor needed are freed at once with
`min_snapshot`, and the first to be evicted without.

Full-attention pages leave from the end of leaf runs, so everything on an unheld leaf's path can be evicted, bit by bit:
counting is enough to know beforehand whether a request for pages can be met.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jkv.layout import Group, Layout
from jkv.pages import PagePool
from jkv.radix import HELD, HOLDS, NEEDED, NO_SLOT, Endpoint, Node, RadixTree, grown, spans


class Retention(RadixTree):
    """The radix tree as the owner of pages and snapshots.

    Args:
      layout: the cache's geometry.
      pools: the page pools in the layout's order; the tree owns pages in them and evicts from them.
    """

    def __init__(self, layout: Layout, pools: Sequence[PagePool]):
        super().__init__(layout)
        self.pools = pools
        self.group_pools = [pools[group.pool] for group in self.groups]
        recurrent = layout.recurrent_pool
        self.full_pool = None if self.full is None else self.group_pools[self.full]
        self.state_pool = pools[recurrent.ordinal] if recurrent else None
        self.min_snapshot = bool(layout.config.min_snapshot)
        # orders of the pools in which an endpoint by itself keeps something from others
        ranked = {group.pool for group in self.history_windows} | ({recurrent.ordinal} if recurrent else set())
        self.endpoint_orders = [pools[ordinal].order for ordinal in sorted(ranked)]
        self.snapshots_evicted = 0
        self._one_hold = np.full(layout.max_pages, HELD, np.int64)

    # --- pages come in -----------------------------------------------------------------------------------------

    def attach(
        self, parent: Node, tokens: np.ndarray, pages: Sequence[np.ndarray], live_from: Sequence[int], priority: int
    ) -> Node:
        """Hands private pages over to a new child of `parent`, held once.

        Args:
          tokens: int32[n]: whole pages, or fewer than one page (a tail). Copied.
          pages: per attention group int32[ceil(n / page_size)], -1: a hole. Copied.
          live_from: per attention group the page index from which on (beside sinks) a window's pages are held.
        """
        if not parent.children:
            self._unrank(parent)
        node = self._add_child(parent, tokens)
        node.priority = priority
        node.holders = 1
        for group, pool, ids in zip(self.groups, self.group_pools, pages, strict=True):
            node.pages.append(ids.copy())
            node.uses.append(None if group.window is None else self._first_uses(group, node.first_page, ids, live_from))
            self._count_in(node, group, pool, ids)
        return node

    def extend(self, node: Node, tokens: np.ndarray, pages: Sequence[np.ndarray], live_from: Sequence[int]) -> None:
        """Hands whole private pages over to the end of `node`, which only the caller holds and nobody extends."""
        old = self.num_pages(node)
        node.tokens = grown(node.tokens, node.size, tokens)
        node.size += len(tokens)
        for group, pool, ids in zip(self.groups, self.group_pools, pages, strict=True):
            g = group.ordinal
            node.pages[g] = grown(node.pages[g], old, ids)
            if group.window is not None:
                uses = self._first_uses(group, node.first_page + old, ids, live_from)
                node.uses[g] = grown(node.uses[g], old, uses)
            self._count_in(node, group, pool, ids)

    def _first_uses(self, group: Group, first: int, ids: np.ndarray, live_from: Sequence[int]) -> np.ndarray:
        """One hold for each live page. The others are holes: their owner freed them before it came here."""
        uses = self._one_hold[: len(ids)].copy()
        stale = live_from[group.ordinal] - first
        if stale > 0:
            uses[max(0, group.sink_pages(self.page_size) - first) : stale] = 0
        return uses

    def _count_in(self, node: Node, group: Group, pool: PagePool, ids: np.ndarray) -> None:
        present = len(ids) if group.window is None else int(np.count_nonzero(ids >= 0))
        node.resident += present
        pool.tree += present
        pool.held += present

    def fill(self, node: Node, g: int, pages: np.ndarray) -> None:
        """Private `pages` (int32[k], 0: none) fill holes among the first k pages of `node`."""
        ids = node.pages[g][: len(pages)]
        take = (ids < 0) & (pages > 0)
        count = int(np.count_nonzero(take))
        if count:
            ids[take] = pages[take]
            pool = self.group_pools[g]
            pool.tree += count
            pool.held += int(np.count_nonzero(take & ((node.uses[g][: len(pages)] & HOLDS) > 0)))
            node.resident += count
            self.review_head(node)

    def take_back(self, tail: Node) -> None:
        """Undoes the publication of a tail that only the caller holds: its pages are private again."""
        while tail.endpoints:
            self.remove_endpoint(tail.endpoints[-1], keep_slot=tail.endpoints[-1].pinned)
        for group, pool in zip(self.groups, self.group_pools, strict=True):
            page = int(tail.pages[group.ordinal][0])
            if page >= 0:
                pool.tree -= 1
                if group.window is None or tail.uses[group.ordinal][0] & HOLDS:
                    pool.held -= 1
                else:  # the caller's window has left it
                    pool.release_one(page)
        tail.resident = tail.holders = 0
        self._unlink(tail)

    # --- holds -------------------------------------------------------------------------------------------------

    def hold_child(self, node: Node) -> None:
        """A sequence whose path ends at `node`'s parent goes on to `node`."""
        if node.holders == 0 and self.full_pool is not None:
            self._unrank(node)
            self.full_pool.held += self.num_pages(node)
        node.holders += 1

    def hold(self, node: Node) -> None:
        """One more sequence's path ends at `node`."""
        current: Node | None = node
        while current is not None:
            self.hold_child(current)
            current = current.parent

    def release_child(self, node: Node, priority: int) -> None:
        """Undoes one `hold_child`; `node` was in use until now."""
        node.holders -= 1
        node.priority = max(node.priority, priority)
        if node.holders == 0:
            if self.full_pool is not None:
                self.full_pool.held -= self.num_pages(node)
                node.level = self.full_pool.order.level
            self.settle(node)

    def release(self, node: Node, priority: int) -> None:
        """Undoes one `hold`."""
        current: Node | None = node
        while current is not None:
            parent = current.parent
            self.release_child(current, priority)
            current = parent

    def use(self, node: Node) -> None:
        """`node` is read now, though not held."""
        if self.full_pool is not None and node.holders == 0 and not node.children and node.parent is not None:
            node.level = self.full_pool.order.level
            self._rank_leaf(node)

    def newly_held(self, node: Node, whole_pages: int) -> int:
        """Full-attention pages below `whole_pages` that holding `node`'s path would take from eviction."""
        count = 0
        while not node.holders and node.parent is not None:  # once one is held, so are its ancestors
            count += min(self.num_pages(node), whole_pages - node.first_page)
            node = node.parent
        return count

    def newly_held_window(self, node: Node, g: int, first: int, stop: int) -> int:
        """Window pages in [first, stop) that `hold_window` would take from eviction."""
        count = 0
        for current, a, b in spans(node, first, stop):
            count += int(np.count_nonzero(((current.uses[g][a:b] & HOLDS) == 0) & (current.pages[g][a:b] >= 0)))
        return count

    def solely_held_window(self, node: Node, g: int, first: int, stop: int) -> int:
        """Window pages in [first, stop) that one sequence alone keeps from eviction."""
        return sum(
            int(np.count_nonzero(((current.uses[g][a:b] & HOLDS) == HELD) & (current.pages[g][a:b] >= 0)))
            for current, a, b in spans(node, first, stop)
        )

    def hold_window(self, node: Node, g: int, first: int, stop: int) -> None:
        """One more sequence's window covers pages [first, stop) of `node`'s path."""
        for current, a, b in spans(node, first, stop):
            uses = current.uses[g][a:b]
            newly = (uses & HOLDS) == 0
            newly &= current.pages[g][a:b] >= 0
            self.group_pools[g].held += int(np.count_nonzero(newly))
            uses += HELD

    def release_window(self, node: Node, g: int, first: int, stop: int) -> None:
        """Undoes `hold_window`; what nobody needs any more is freed or queued for eviction."""
        for current, a, b in spans(node, first, stop):
            uses = current.uses[g][a:b]
            uses -= HELD
            released = (uses & HOLDS) == 0
            released &= current.pages[g][a:b] >= 0
            self.group_pools[g].held -= int(np.count_nonzero(released))
            released &= uses == 0
            self._let_idle_go(current, g, a, released)

    def _let_idle_go(self, node: Node, g: int, start: int, idle: np.ndarray) -> None:
        """Window pages start + i for which idle[i] have lost their last use: they are freed, or queue."""
        at = idle.nonzero()[0]
        if len(at):
            if self.min_snapshot:
                at += start
                self._drop_window(node, g, at)
            else:
                self.group_pools[g].order.unneeded[(node, g)] = None

    def _drop_window(self, node: Node, g: int, at: np.ndarray) -> None:
        """Frees the unheld window pages at indices `at` (ascending) of `node`."""
        pool = self.group_pools[g]
        pool.release(node.pages[g][at])
        pool.tree -= len(at)
        node.pages[g][at] = -1
        node.resident -= len(at)
        if at[0] == 0:
            self.review_head(node)
        if node.resident == 0:
            self.settle(node)

    # --- endpoints ---------------------------------------------------------------------------------------------

    def add_endpoint(self, node: Node, position: int, slot: int, priority: int) -> Endpoint:
        """Leaves `position` resumable; `slot` (or NO_SLOT) becomes the tree's."""
        endpoint = Endpoint(node, position, slot, priority)
        node.endpoints.insert(node.endpoints_upto(position), endpoint)
        self._mark(endpoint)
        for group in self.windows:
            for current, a, b in self._needed_spans(endpoint, group):
                current.uses[group.ordinal][a:b] += NEEDED
        if slot != NO_SLOT:
            self.state_pool.tree += 1
        self.touch(endpoint, priority)
        return endpoint

    def _needed_spans(self, endpoint: Endpoint, group: Group) -> list[tuple[Node, int, int]]:
        sinks, first, stop = group.needed(endpoint.position, self.page_size)
        found = spans(endpoint.node, first, stop)
        if sinks:
            found += spans(endpoint.node, 0, min(sinks, first))
        return found

    def touch(self, endpoint: Endpoint, priority: int) -> None:
        """`endpoint` is used now."""
        endpoint.priority = max(endpoint.priority, priority)
        if self.endpoint_orders:
            gain = self._gain(endpoint.node, endpoint.position)
            for order in self.endpoint_orders:
                order.put(endpoint, endpoint.priority, gain)

    def extended(self, endpoint: Endpoint, by: Endpoint) -> None:
        """A sequence that went on from `endpoint` left the next one: `endpoint` may be superseded now."""
        if by.position <= endpoint.position or not endpoint.alive:
            return
        known = self._live_extensions(endpoint)
        if by not in known and len(known) < 2:
            known.append(by)  # a second one says that something branches here
            for order in self.endpoint_orders:
                order.superseded[endpoint] = None

    def _live_extensions(self, endpoint: Endpoint) -> list[Endpoint]:
        """The endpoints by which chains went on from `endpoint` and that can still be had."""
        live = []
        for extension in endpoint.extensions:
            while not extension.alive and extension.extensions:
                extension = extension.extensions[0]
            if extension.alive and extension not in live:
                live.append(extension)
        endpoint.extensions = live
        return live

    def _is_superseded(self, endpoint: Endpoint) -> bool:
        """Whether the chain was extended past `endpoint`, its extension can still be had, and nothing branches."""
        branches = endpoint.position == endpoint.node.end and len(endpoint.node.children) > 1
        return not branches and len(self._live_extensions(endpoint)) == 1

    def pin(self, endpoint: Endpoint) -> None:
        """The slot is still the live state of the sequence that left it: it is not for eviction."""
        endpoint.pinned = True
        self.state_pool.held += 1

    def unpin(self, endpoint: Endpoint) -> None:
        """Undoes `pin`."""
        endpoint.pinned = False
        self.state_pool.held -= 1

    def remove_endpoint(self, endpoint: Endpoint, keep_slot: bool = False, keep_pages: int | None = None) -> None:
        """`endpoint` is not resumable any more; its slot is freed, or becomes the caller's with `keep_slot`.

        `keep_pages`: its node is about to lose the pages from there on, so what happens to them does not matter.
        """
        node = endpoint.node
        endpoint.alive = False
        node.endpoints.remove(endpoint)
        self._unmark(endpoint)
        for order in self.endpoint_orders:
            order.drop(endpoint)
        if endpoint.slot != NO_SLOT:
            self.state_pool.tree -= 1
            if endpoint.pinned:
                self.unpin(endpoint)
            if not keep_slot:
                self.state_pool.release_one(endpoint.slot)
        for group in self.windows:
            for current, a, b in self._needed_spans(endpoint, group):
                if keep_pages is not None and current is node:
                    b = min(b, keep_pages)
                    if a >= b:
                        continue
                uses = current.uses[group.ordinal][a:b]
                uses -= NEEDED
                idle = uses == 0
                idle &= current.pages[group.ordinal][a:b] >= 0
                self._let_idle_go(current, group.ordinal, a, idle)
        endpoint.node = None  # chains of lost endpoints keep no nodes
        self.settle(node)

    def _gain(self, node: Node, position: int) -> int:
        """Tokens that losing `position` costs: down to the next endpoint above it on the path."""
        current: Node | None = node
        while current is not None:
            if count := current.endpoints_upto(position - 1):
                return position - current.endpoints[count - 1].position
            current = current.parent
        return position

    # --- leaves ------------------------------------------------------------------------------------------------

    def settle(self, node: Node) -> None:
        """Unlinks `node` if it is bare, and ranks what is left as the end of a leaf run, if nobody holds it."""
        while node.holders == 0 and not node.children:
            parent = node.parent
            if parent is None:
                if self.roots.get(node.key) is node:
                    del self.roots[node.key]
                return
            if node.resident or node.endpoints:
                if self.full_pool is not None:
                    self._rank_leaf(node)
                return
            if parent.children.get(node.key) is not node:
                return  # unlinked already
            self._unlink(node)
            node = parent

    def _unlink(self, node: Node) -> None:
        self._remove_child(node)
        self._unrank(node)
        for group in self.windows:
            self.group_pools[group.ordinal].order.unneeded.pop((node, group.ordinal), None)

    def split(self, node: Node, pages: int) -> Node:
        head = super().split(node, pages)
        for group in self.windows:
            unneeded = self.group_pools[group.ordinal].order.unneeded
            if (node, group.ordinal) in unneeded:
                unneeded[(head, group.ordinal)] = None
        return head

    def _unrank(self, node: Node) -> None:
        """`node` is held, has a child, or is gone: no eviction from its end."""
        if self.full_pool is not None:
            order = self.full_pool.order
            order.discard(node)
            order.unneeded.pop((node, self.full), None)

    def _rank_leaf(self, node: Node) -> None:
        order = self.full_pool.order
        if self.dead_pages(node):
            order.unneeded[(node, self.full)] = None
        order.put(node, node.priority, self._leaf_gain(node), node.level)

    def _leaf_gain(self, node: Node) -> int:
        return self._gain(node, node.endpoints[-1].position if node.endpoints else node.end)

    def dead_pages(self, node: Node) -> int:
        """Pages at the end of an unheld leaf that no snapshot can reach: of hybrids only."""
        if self.state_pool is None:
            return 0
        reach = node.endpoints[-1].position - node.start if node.endpoints else 0
        return self.num_pages(node) - -(-reach // self.page_size)

    # --- eviction ----------------------------------------------------------------------------------------------

    def can_allocate(self, counts: Sequence[int], newly_held: Sequence[int] | None = None) -> bool:
        """Whether every pool has counts[p] pages, free or evictable, after `newly_held` more are held."""
        for ordinal, count in enumerate(counts):
            if count and count + (newly_held[ordinal] if newly_held else 0) > self.pools[ordinal].available:
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

    def _make_room(self, pool: PagePool, count: int) -> None:
        """Evicts until `count` pages are free: as many as are needed and no more."""
        order, spared = pool.order, []
        before = [other.free for other in self.pools]
        while pool.free < count:
            if order.unneeded:
                (node, g), _ = order.unneeded.popitem(last=False)
                self._drop_unneeded(node, g, count - pool.free)
                continue
            if order.superseded:
                endpoint, _ = order.superseded.popitem(last=False)
                if self._is_superseded(endpoint) and self._yields(endpoint, pool):
                    self._evict_endpoint(endpoint)
                continue
            entry = order.pop_ranked()
            priority, score, _, item, level = entry
            gain = self._leaf_gain(item) if isinstance(item, Node) else self._gain(item.node, item.position)
            if level + gain > score:  # what was above it has gone meanwhile: it is dearer now
                order.put(item, priority, gain, level)
            elif isinstance(item, Node):
                order.level = max(order.level, score)
                self._cut_leaf(item, count - pool.free)
            elif self._yields(item, pool):
                order.level = max(order.level, score)
                self._evict_endpoint(item)
            else:
                spared.append(entry)
        for other, free in zip(self.pools, before, strict=True):
            other.evicted += other.free - free
        for entry in spared:
            if entry[3].alive:
                order.put_back(entry)

    def _evict_endpoint(self, endpoint: Endpoint, keep_pages: int | None = None) -> None:
        self.snapshots_evicted += endpoint.slot != NO_SLOT
        self.remove_endpoint(endpoint, keep_pages=keep_pages)

    def _yields(self, endpoint: Endpoint, pool: PagePool) -> bool:
        """Whether losing `endpoint` brings `pool` closer to a free page."""
        if endpoint.pinned:
            return False
        if pool is self.state_pool:
            return True
        for group in self.windows:
            g = group.ordinal
            if self.group_pools[g] is pool:
                for node, a, b in self._needed_spans(endpoint, group):
                    if ((node.pages[g][a:b] >= 0) & ((node.uses[g][a:b] & HOLDS) == 0)).any():
                        return True
        return False

    def _drop_unneeded(self, node: Node, g: int, short: int) -> None:
        if g == self.full:
            drop = min(self.dead_pages(node), short)
            if drop:
                self._cut(node, self.num_pages(node) - drop)
            return
        size = self.num_pages(node)
        idle = ((node.uses[g][:size] == 0) & (node.pages[g][:size] >= 0)).nonzero()[0]
        if len(idle) > short:
            unneeded = self.group_pools[g].order.unneeded
            unneeded[(node, g)] = None
            unneeded.move_to_end((node, g), last=False)
        if len(idle):
            self._drop_window(node, g, idle[:short])

    def _cut_leaf(self, node: Node, short: int) -> None:
        """Takes up to `short` pages from the end of an unheld leaf, not past the endpoint above its last one."""
        size = self.num_pages(node)
        keep = max(0, size - short)
        if node.endpoints:
            last = node.endpoints[-1].position
            above = last - self._gain(node, last) - node.start
            keep = min(max(keep, -(-above // self.page_size)), size - 1)
        self._cut(node, keep)

    def _cut(self, node: Node, keep: int) -> None:
        """An unheld leaf keeps its first `keep` pages; endpoints that need the others go."""
        size, end = self.num_pages(node), node.start + keep * self.page_size
        node.holders = 1  # so that nothing below settles the node before all of it is consistent again
        while node.endpoints and node.endpoints[-1].position > end:
            self._evict_endpoint(node.endpoints[-1], keep)
        for group, pool in zip(self.groups, self.group_pools, strict=True):
            ids = node.pages[group.ordinal][keep:size]
            if group.window is not None:
                ids = ids[ids >= 0]
            if len(ids):
                pool.release(ids)
                pool.tree -= len(ids)
                node.resident -= len(ids)
            if 0 < 2 * keep < len(node.pages[group.ordinal]):  # not for every page: a long run goes one page at a time
                node.pages[group.ordinal] = node.pages[group.ordinal][:keep].copy()
                if group.window is not None:
                    node.uses[group.ordinal] = node.uses[group.ordinal][:keep].copy()
        node.size = min(node.size, keep * self.page_size)
        if 0 < 2 * node.size < len(node.tokens):
            node.tokens = node.tokens[: node.size].copy()
        node.holders = 0
        self.settle(node)

    def clear(self) -> None:
        """Frees everything. Nothing may be held."""
        for node in self.nodes():
            for g, pool in enumerate(self.group_pools):
                if node.size:
                    ids = node.pages[g][: self.num_pages(node)]
                    ids = ids[ids >= 0]
                    pool.release(ids)
                    pool.tree -= len(ids)
            for endpoint in node.endpoints:
                endpoint.alive = False
                if endpoint.slot != NO_SLOT:
                    self.state_pool.release_one(endpoint.slot)
                    self.state_pool.tree -= 1
        self.roots.clear()
        for pool in self.pools:
            pool.order.clear()
