"""What the tree owns, and for whom: pages and snapshots that come in, holds, window pages, endpoints, leaves.

An active sequence *holds* its path, from its deepest node to the root: a held node is never unlinked, and its
full-attention pages stay on the device. A suspended one *keeps* it: pages may move to host memory, but are not lost.
Window pages are held one by one, those that the sequence's window and sinks cover. An endpoint *needs* the window pages
that resuming there reads. Window pages that are neither held nor needed are freed at once with `min_snapshot`, and the
first to be evicted without.

Full-attention pages leave a tier from the ends of its runs, so everything there that is neither held nor kept can be
evicted, bit by bit: counting is enough to know beforehand whether a request for pages can be met.

    a path             root ──▶ node ──────────▶ node ──────────▶ node
    full attention     device   device | device  device | host    host
                                                 `- the device's leaf  `- host memory's leaf
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jkv.expiry import NEVER, Expiry
from jkv.layout import HOST, Group, Layout
from jkv.pages import EXPIRED, Claim, PagePool, on_device
from jkv.radix import HELD, HOLDS, KEPT, NEEDED, NO_SLOT, STAYS, Endpoint, Node, RadixTree, grown, path_to, spans


class Retention(RadixTree):
    """The radix tree as the owner of pages and snapshots.

    Args:
      layout: the cache's geometry.
      pools: the device's page pools in the layout's order, with host memory's below them; the tree owns pages there.
    """

    def __init__(self, layout: Layout, pools: Sequence[PagePool]):
        super().__init__(layout)
        self.pools = pools
        self.has_host = pools[0].below is not None
        self.group_pools = [pools[group.pool] for group in self.groups]
        recurrent = layout.recurrent_pool
        self.full_pool = None if self.full is None else self.group_pools[self.full]
        self.state_pool = pools[recurrent.ordinal] if recurrent else None
        self.min_snapshot = bool(layout.config.min_snapshot)
        # orders of the pools in which an endpoint by itself keeps something from others
        ranked = {group.pool for group in self.history_windows} | ({recurrent.ordinal} if recurrent else set())
        self.endpoint_orders = [pool.order for ordinal in sorted(ranked) for pool in self.tiers(pools[ordinal])]
        self.full_orders = [] if self.full is None else [pool.order for pool in self.tiers(self.full_pool)]
        self.snapshots_evicted = 0
        self.expiry = Expiry()
        self.kept_paths = 0  # suspended sequences, and arrivals
        self._one_hold = np.full(layout.max_pages, HELD, np.int64)

    @staticmethod
    def tiers(pool: PagePool) -> tuple[PagePool, ...]:
        """A device pool, and the one below it if there is one."""
        return (pool,) if pool.below is None else (pool, pool.below)

    def all_pools(self) -> Iterable[PagePool]:
        """The pools of every tier."""
        for pool in self.pools:
            yield from self.tiers(pool)

    # --- pages come in -----------------------------------------------------------------------------------------

    def attach(
        self,
        parent: Node,
        tokens: np.ndarray,
        pages: Sequence[np.ndarray],
        live_from: Sequence[int],
        priority: int,
        how: int = HELD,
    ) -> Node:
        """Hands private pages over to a new child of `parent`, held once.

        Args:
          tokens: int32[n]: whole pages, or fewer than one page (a tail). Copied.
          pages: per attention group places, int32[ceil(n / page_size)], -1: a hole. Copied.
          live_from: per attention group the page index from which on (beside sinks) a window's pages are held.
          how: HELD, or KEPT: the caller keeps it, as suspended sequences do.
        """
        asleep = how == KEPT
        node = self._add_child(parent, tokens)
        node.priority, node.expires = priority, self.expiry.first
        node.holders, node.keepers = int(not asleep), int(asleep)
        for group, pool, places in zip(self.groups, self.group_pools, pages, strict=True):
            node.pages.append(places.copy())
            uses = None
            if group.window is not None:
                uses = self._first_uses(group, node.first_page, places, live_from)
                if asleep:
                    uses *= KEPT
            node.uses.append(uses)
            self._count_in(node, group, pool, places, asleep)
        return node

    def extend(self, node: Node, tokens: np.ndarray, pages: Sequence[np.ndarray], live_from: Sequence[int]) -> None:
        """Hands whole private pages over to the end of `node`, which only the caller holds and nobody extends."""
        old = self.num_pages(node)
        node.tokens = grown(node.tokens, node.size, tokens)
        node.size += len(tokens)
        for group, pool, places in zip(self.groups, self.group_pools, pages, strict=True):
            g = group.ordinal
            node.pages[g] = grown(node.pages[g], old, places)
            if group.window is not None:
                uses = self._first_uses(group, node.first_page + old, places, live_from)
                node.uses[g] = grown(node.uses[g], old, uses)
            self._count_in(node, group, pool, places, False)

    def _first_uses(self, group: Group, first: int, places: np.ndarray, live_from: Sequence[int]) -> np.ndarray:
        """One hold for each live page. The others are holes: their owner freed them before it came here."""
        uses = self._one_hold[: len(places)].copy()
        stale = live_from[group.ordinal] - first
        if stale > 0:
            uses[max(0, group.sink_pages(self.page_size) - first) : stale] = 0
        return uses

    def _count_in(self, node: Node, group: Group, pool: PagePool, places: np.ndarray, asleep: bool) -> None:
        """Counts pages that the caller has handed over to `node`, and holds or, `asleep`, keeps."""
        present = warm = len(places) if group.window is None else int(np.count_nonzero(places >= 0))
        if pool.below is not None:
            warm -= int(np.count_nonzero(places >= HOST))
            pool.below.tree += present - warm
            pool.below.held += present - warm
        node.resident += present
        pool.tree += warm
        if asleep:
            pool.kept += warm
        else:
            pool.held += warm
        if group.window is None and warm:
            self._set_device(node, node.device + warm)

    def fill(self, node: Node, g: int, pages: np.ndarray) -> None:
        """Private `pages` (int32[k], 0: none) fill holes among the first k pages of `node`, and replace colder ones."""
        places = node.pages[g][: len(pages)]
        holes = (places < 0) & (pages > 0)
        take = holes
        if self.has_host:
            take = holes | ((places >= HOST) & on_device(pages))
        if not take.any():
            return
        pool, at = self.group_pools[g], take.nonzero()[0]
        self._weigh(node, g, at, -1)
        if self.has_host:
            pool.below.release(pool.below.own(places[at]))
        places[at] = pages[at]
        self._weigh(node, g, at, 1)
        node.resident += int(np.count_nonzero(holes))
        self._queue_kept(node, g)
        self.review_head(node)

    def warm_up(self, node: Node, pages: np.ndarray) -> None:
        """The caller's own device `pages` (int32[k]) take the place of full-attention pages from `device` on."""
        pool, first = self.full_pool, node.device
        below, count = pool.below, len(pages)
        below.release(node.pages[self.full][first : first + count] - HOST)
        below.tree -= count
        below.held -= count
        node.pages[self.full][first : first + count] = pages
        pool.tree += count
        pool.held += count
        self._set_device(node, first + count)

    def take_back(self, tail: Node) -> None:
        """Undoes the publication of a tail that only the caller holds: its pages are private again."""
        while tail.endpoints:
            self.remove_endpoint(tail.endpoints[-1], keep_slot=bool(tail.endpoints[-1].pinned))
        for group, pool in zip(self.groups, self.group_pools, strict=True):
            page = int(tail.pages[group.ordinal][0])
            if page >= 0:
                if group.window is None or tail.uses[group.ordinal][0] & HOLDS:
                    pool.tree -= 1
                    pool.held -= 1
                else:  # the caller's window has left it
                    self._lose(pool, tail.pages[group.ordinal][:1])
        self._set_device(tail, 0)
        tail.resident = tail.holders = 0
        self._unlink(tail)

    def release_pages(self, pool: PagePool, places: np.ndarray) -> None:
        """Frees a sequence's private pages, wherever they lie."""
        if pool.below is None:
            pool.release(places)
            return
        for tier in self.tiers(pool):
            tier.release(tier.own(places))

    def _lose(self, pool: PagePool, places: np.ndarray) -> None:
        """Frees pages of the tree that nobody holds or keeps, wherever they lie."""
        if pool.below is None:
            pool.release(places)
            pool.tree -= len(places)
            return
        for tier in self.tiers(pool):
            ids = tier.own(places)
            tier.release(ids)
            tier.tree -= len(ids)

    def _set_device(self, node: Node, count: int) -> None:
        """The first `count` full-attention pages of `node` are on the device."""
        before, node.device = node.device, count
        if (before > 0) != (count > 0) and node.parent is not None:
            node.parent.warm += 1 if count else -1
            if not count and not node.parent.holders:
                self._review(node.parent)

    # --- holds -------------------------------------------------------------------------------------------------

    def hold_child(self, node: Node) -> None:
        """A sequence whose path ends at `node`'s parent goes on to `node`."""
        if node.holders == 0 and self.full_pool is not None:
            self._unrank(node)
            self._count_held(node, 1)
        node.holders += 1

    def join(self, node: Node, how: int) -> None:
        """`hold_child` (HELD) or `keep_child` (KEPT)."""
        if how == HELD:
            self.hold_child(node)
        else:
            self.keep_child(node)

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
                self._count_held(node, -1)
                self._used_now(node)
            self.settle(node)

    def release(self, node: Node, priority: int) -> None:
        """Undoes one `hold`."""
        current: Node | None = node
        while current is not None:
            parent = current.parent
            self.release_child(current, priority)
            current = parent

    def _count_held(self, node: Node, sign: int) -> None:
        """Counts `node`'s full-attention pages as held (1), or not any more (-1)."""
        pool = self.full_pool
        pool.held += sign * node.device
        if node.keepers:
            pool.kept -= sign * node.device
        elif pool.below is not None:
            pool.below.held += sign * (self.num_pages(node) - node.device)

    def keep_child(self, node: Node) -> None:
        """A suspended sequence whose path ends at `node`'s parent goes on to `node`."""
        node.keepers += 1
        if node.keepers == 1 and not node.holders:
            self._count_kept(node, 1)
            self._review(node)

    def keep(self, node: Node) -> None:
        """One more suspended sequence's path ends at `node`."""
        self.kept_paths += 1
        for current in path_to(node):
            self.keep_child(current)

    def unkeep(self, node: Node, priority: int) -> None:
        """Undoes one `keep`. Window pages first, which are kept one by one."""
        self.kept_paths -= 1
        for current in path_to(node):
            self.unkeep_child(current, priority)

    def unkeep_child(self, node: Node, priority: int) -> None:
        """Undoes one `keep_child`."""
        node.keepers -= 1
        node.priority = max(node.priority, priority)
        if not node.keepers:
            if not node.holders:
                self._count_kept(node, -1)
                self._used_now(node)
            self.settle(node)

    def _count_kept(self, node: Node, sign: int) -> None:
        """Counts an unheld `node`'s full-attention pages as kept (1), or not any more (-1)."""
        pool = self.full_pool
        if pool is not None:
            pool.kept += sign * node.device
            if pool.below is not None:
                pool.below.held += sign * (self.num_pages(node) - node.device)

    def _used_now(self, node: Node) -> None:
        if self.full_pool is not None:
            node.level = self.full_pool.order.level
            if self.has_host:
                node.cold_level = self.full_pool.below.order.level

    def use(self, node: Node) -> None:
        """`node` is read now, though not held."""
        if self.full_pool is not None and node.holders == 0 and node.parent is not None:
            self._used_now(node)
            self._review(node)

    # --- what holding takes ------------------------------------------------------------------------------------

    def claim_path(self, node: Node, whole_pages: int, claim: Claim) -> None:
        """Adds what holding the first `whole_pages` full-attention pages of `node`'s path takes."""
        while not node.holders and node.parent is not None:  # once one is held, so are its ancestors
            pages = min(self.num_pages(node), whole_pages - node.first_page)
            warm = min(node.device, pages)
            claim.onboard += pages - warm
            if node.keepers:
                claim.kept += warm
            else:
                claim.held += warm
                claim.cold += pages - warm
            node = node.parent

    def claim_window(self, node: Node, g: int, first: int, stop: int, claim: Claim) -> None:
        """Adds what holding window pages [first, stop) of `node`'s path takes."""
        for current, a, b in spans(node, first, stop):
            places, uses = current.pages[g][a:b], current.uses[g][a:b]
            newly = (uses & HOLDS) == 0
            newly &= places >= 0
            if not self._has_more_than_held(g):
                claim.held += int(np.count_nonzero(newly))
                continue
            cold, kept = places >= HOST, (uses & STAYS) > 0
            claim.onboard += int(np.count_nonzero(cold))
            claim.cold += int(np.count_nonzero(cold & ~kept))
            newly &= ~cold
            claim.kept += int(np.count_nonzero(newly & kept))
            claim.held += int(np.count_nonzero(newly & ~kept))

    def solely_kept(self, node: Node) -> int:
        """Full-attention pages on the device that one suspended sequence alone keeps from eviction."""
        return sum(current.device for current in path_to(node) if current.keepers == 1 and not current.holders)

    def solely_kept_window(self, node: Node, g: int, first: int, stop: int) -> int:
        """Window pages on the device in [first, stop) that one suspended sequence alone keeps from eviction."""
        count = 0
        for current, a, b in spans(node, first, stop):
            places, uses = current.pages[g][a:b], current.uses[g][a:b]
            count += int(np.count_nonzero(((uses & STAYS) == KEPT) & on_device(places)))
        return count

    # --- windows -----------------------------------------------------------------------------------------------

    def change_window(self, node: Node, g: int, first: int, stop: int, amount: int) -> None:
        """Adds `amount` to the uses of window pages [first, stop) of `node`'s path: HELD, KEPT, or what undoes them.

        What nobody needs any more is freed or queued for eviction.
        """
        pool = self.group_pools[g]
        for current, a, b in spans(node, first, stop):
            uses = current.uses[g][a:b]
            if amount not in (HELD, -HELD) or self._has_more_than_held(g):
                at = np.arange(a, b)
                self._weigh(current, g, at, -1)
                uses += amount
                self._weigh(current, g, at, 1)
                self._queue_kept(current, g)
            elif amount == HELD:
                newly = (uses & HOLDS) == 0
                newly &= current.pages[g][a:b] >= 0
                pool.held += int(np.count_nonzero(newly))
                uses += HELD
                continue
            elif b - a == 1:
                self._release_one(current, g, a)
                continue
            else:
                uses -= HELD
                released = (uses & HOLDS) == 0
                released &= current.pages[g][a:b] >= 0
                pool.held -= int(np.count_nonzero(released))
            if amount < 0:
                idle = uses == 0
                idle &= current.pages[g][a:b] >= 0
                self._let_idle_go(current, g, a, idle)

    def _release_one(self, node: Node, g: int, at: int) -> None:
        """Undoes one hold of one window page, as of a decode step that slides; without arrays."""
        left = int(node.uses[g][at]) - HELD
        node.uses[g][at] = left
        if node.pages[g][at] < 0:
            return
        if not left & HOLDS:
            self.group_pools[g].held -= 1
        if not left and self.min_snapshot:
            self._drop_window(node, g, np.array([at]))
        elif not left:
            self._queue_unneeded(node, g)

    def _has_more_than_held(self, g: int) -> bool:
        """Whether a window page of the pool may be kept, or lie in host memory."""
        below = self.group_pools[g].below
        return self.kept_paths > 0 or (below is not None and below.tree > 0)

    def _weigh(self, node: Node, g: int, at: np.ndarray, sign: int) -> None:
        """Counts the window pages at indices `at` of `node` in (1) or out (-1) of their pools."""
        pool = self.group_pools[g]
        places, uses = node.pages[g][at], node.uses[g][at]
        held, stays = (uses & HOLDS) > 0, (uses & STAYS) > 0
        warm = on_device(places)
        pool.tree += sign * int(np.count_nonzero(warm))
        pool.held += sign * int(np.count_nonzero(warm & held))
        pool.kept += sign * int(np.count_nonzero(warm & stays & ~held))
        if pool.below is not None:
            cold = places >= HOST
            pool.below.tree += sign * int(np.count_nonzero(cold))
            pool.below.held += sign * int(np.count_nonzero(cold & stays))

    def _queue_kept(self, node: Node, g: int) -> None:
        """Window pages of `node` may be kept now, but not held."""
        if self.has_host and self.group_pools[g].kept:
            self.group_pools[g].order.kept[(node, g)] = None

    def _let_idle_go(self, node: Node, g: int, start: int, idle: np.ndarray) -> None:
        """Window pages start + i for which idle[i] have lost their last use: they are freed, or queue."""
        at = idle.nonzero()[0]
        if len(at):
            at += start
            if self.min_snapshot:
                self._drop_window(node, g, at)
            else:
                self._queue_unneeded(node, g)

    def _queue_unneeded(self, node: Node, g: int) -> None:
        for pool in self.tiers(self.group_pools[g]):
            pool.order.unneeded[(node, g)] = None

    def _drop_window(self, node: Node, g: int, at: np.ndarray) -> None:
        """Frees the unused window pages at indices `at` (ascending) of `node`."""
        self._lose(self.group_pools[g], node.pages[g][at])
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
        endpoint.expires = self.expiry.first
        node.endpoints.insert(node.endpoints_upto(position), endpoint)
        self._mark(endpoint)
        for group in self.windows:
            for current, a, b in self._needed_spans(endpoint, group):
                current.uses[group.ordinal][a:b] += NEEDED
        if slot != NO_SLOT:
            self.tier_of(self.state_pool, slot).tree += 1
        self.touch(endpoint, priority)
        return endpoint

    @staticmethod
    def tier_of(pool: PagePool, place: int) -> PagePool:
        """The tier in which `place` of the device pool `pool`, or of the one below it, lies."""
        return pool if place < HOST else pool.below

    def free_one(self, pool: PagePool, place: int) -> None:
        """Frees the page or slot at `place`, in whichever tier."""
        tier = self.tier_of(pool, place)
        tier.release_one(place - tier.offset)

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
            rank = endpoint.priority if endpoint.expires > self.expiry.step else EXPIRED
            for order in self.endpoint_orders:
                order.put(endpoint, rank, gain)

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

    def pin(self, endpoint: Endpoint, how: int = HELD) -> None:
        """The slot is still the live state of the sequence that left it, active or (KEPT) suspended: it is not lost."""
        self.unpin(endpoint)
        endpoint.pinned = how
        self._count_pinned(endpoint, 1)
        if how == KEPT:
            self.state_pool.order.kept[(endpoint, -1)] = None

    def unpin(self, endpoint: Endpoint) -> None:
        """Undoes `pin`."""
        self._count_pinned(endpoint, -1)
        endpoint.pinned = 0
        self.state_pool.order.kept.pop((endpoint, -1), None)

    def _count_pinned(self, endpoint: Endpoint, sign: int) -> None:
        if endpoint.pinned:
            tier = self.tier_of(self.state_pool, endpoint.slot)
            if endpoint.pinned == KEPT and tier is self.state_pool:
                tier.kept += sign
            else:
                tier.held += sign

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
            if endpoint.pinned:
                self.unpin(endpoint)
            self.tier_of(self.state_pool, endpoint.slot).tree -= 1
            if not keep_slot:
                self.free_one(self.state_pool, endpoint.slot)
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

    def drop_endpoint(self, endpoint: Endpoint) -> None:
        """`endpoint` is not resumable any more, and the window pages that it alone needed are free."""
        spans_of = [(group.ordinal, *each) for group in self.windows for each in self._needed_spans(endpoint, group)]
        self.remove_endpoint(endpoint)
        for g, node, a, b in spans_of:
            if node.parent is not None and node.parent.children.get(node.key) is node:
                idle = a + ((node.uses[g][a:b] == 0) & (node.pages[g][a:b] >= 0)).nonzero()[0]
                if len(idle):
                    self._drop_window(node, g, idle)

    # --- time to live ------------------------------------------------------------------------------------------

    def renew(self, item: Node | Endpoint, until: int) -> None:
        """`item` is used now, by one who wants it kept up to step `until`, or NEVER."""
        if until > item.expires:
            expired = item.expires <= self.expiry.step
            item.expires = until
            if until < NEVER:
                self.expiry.note(item, until)
            if expired:
                self._rank_anew(item)

    def expire(self) -> None:
        """Ranks what has outlived its time below everything else."""
        for item in self.expiry.due():
            if item.expires <= self.expiry.step:
                self._rank_anew(item)

    def _rank_anew(self, item: Node | Endpoint) -> None:
        if isinstance(item, Endpoint):
            if item.alive:
                self.touch(item, item.priority)
        elif item.parent is not None and item.parent.children.get(item.key) is item and not item.holders:
            self._review(item)

    # --- leaves ------------------------------------------------------------------------------------------------

    def settle(self, node: Node) -> None:
        """Unlinks `node` if it is bare, and ranks what is left as the end of a tier's run, if nobody holds it."""
        while not (node.holders or node.keepers or node.children):
            parent = node.parent
            if parent is None:
                if self.roots.get(node.key) is node:
                    del self.roots[node.key]
                return
            if node.resident or node.endpoints:
                break
            if parent.children.get(node.key) is not node:
                return  # unlinked already
            self._unlink(node)
            node = parent
        if not node.holders and (self.has_host or not node.children):
            self._review(node)

    def _unlink(self, node: Node) -> None:
        self._remove_child(node)
        self._unrank(node)
        for group in self.windows:
            for pool in self.tiers(self.group_pools[group.ordinal]):
                pool.order.unneeded.pop((node, group.ordinal), None)
                pool.order.kept.pop((node, group.ordinal), None)

    def split(self, node: Node, pages: int) -> Node:
        head = super().split(node, pages)
        for group in self.windows:
            key, new = (node, group.ordinal), (head, group.ordinal)
            for pool in self.tiers(self.group_pools[group.ordinal]):
                for queue in (pool.order.unneeded, pool.order.kept):
                    if key in queue:
                        queue[new] = None
        return head

    def _unrank(self, node: Node) -> None:
        """`node` is held, or gone: no eviction from its end."""
        if self.full_pool is not None:
            for order in self.full_orders:
                order.discard(node)
                if order.unneeded:
                    order.unneeded.pop((node, self.full), None)
                if order.kept:
                    order.kept.pop((node, self.full), None)

    def _review(self, node: Node) -> None:
        """Ranks `node` where it is the end of what can leave a tier, and nowhere else."""
        if self.full_pool is None or node.parent is None:
            return
        free = not (node.holders or node.keepers)
        device_leaf = node.device > 0 and not node.warm
        self._rank_leaf(node, self.full_pool, free and device_leaf, node.level)
        kept = self.full_pool.order.kept
        if device_leaf and node.keepers and not node.holders:
            kept[(node, self.full)] = None
        elif kept:
            kept.pop((node, self.full), None)
        if self.has_host:
            host_leaf = not node.children and node.device < self.num_pages(node)
            self._rank_leaf(node, self.full_pool.below, free and host_leaf, node.cold_level)

    def _rank_leaf(self, node: Node, pool: PagePool, is_leaf: bool, level: int) -> None:
        order = pool.order
        if not is_leaf:
            order.discard(node)
            if order.unneeded:
                order.unneeded.pop((node, self.full), None)
            return
        if self.dead_pages(node, pool):
            order.unneeded[(node, self.full)] = None
        rank = node.priority if node.expires > self.expiry.step else EXPIRED
        order.put(node, rank, self._leaf_gain(node, pool), level)

    def leaf_end(self, node: Node, pool: PagePool) -> int:
        """Where the pages that `node` has in the tier of `pool` end, in full-attention pages of the node."""
        return self.num_pages(node) if pool.offset or not self.has_host else node.device

    def _last_position(self, node: Node, pool: PagePool) -> int:
        """The deepest endpoint on `node` that ends in the tier of `pool`; where its pages there end, if none does."""
        end = node.end
        if self.has_host:
            end = min(end, node.start + self.leaf_end(node, pool) * self.page_size)
        count = node.endpoints_upto(end)
        return node.endpoints[count - 1].position if count else end

    def _leaf_gain(self, node: Node, pool: PagePool) -> int:
        return self._gain(node, self._last_position(node, pool))

    def dead_pages(self, node: Node, pool: PagePool) -> int:
        """Pages of the tier of `pool` at the end of an unheld leaf that no snapshot can reach: of hybrids only."""
        if self.state_pool is None or node.children:
            return 0
        reach = node.endpoints[-1].position - node.start if node.endpoints else 0
        reach = -(-reach // self.page_size)
        if pool.offset:
            reach = max(reach, node.device)
        return max(0, self.leaf_end(node, pool) - reach)
