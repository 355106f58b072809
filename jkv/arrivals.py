"""Arrivals: what a store adds to a match, and how it comes into the tree.

    the prompt's pages     0   1   2   3   4 |5      names by the digests of its tokens
    in the tree            x   x   x                 held in place while the others are read
    in the store               x   x   x   x  x      pages, the partial page behind them (a tail), states

What is read lands in host memory, goes into the tree as if a sequence had committed it there, and is matched like
everything else. What cannot be read, or is not what it should be, shortens the next match. The host half of jkv: NumPy
only; the store and host memory are asked through `Host`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jkv.holdings import STATE, Holdings, Host
from jkv.layout import HOST, Group
from jkv.radix import KEPT, NO_SLOT, Hit, Match, Node, Root, node_of, pages_on
from jkv.tiers.keys import page_name, tail_name


class Wanted(NamedTuple):
    """One value to be read: page `page` of attention group `group`, or a STATE, under `name`."""

    group: int
    page: int
    name: str


def key_of(host: Host, want: Wanted) -> tuple[str, str]:
    """(group, name), as the store knows it."""
    return "recurrent" if want.group == STATE else host.tree.groups[want.group].name, want.name


class Find(NamedTuple):
    """A longer hit than the tree's, if `wanted` is read from the store.

    Attributes:
      tokens: the hit.
      end: tokens to be published: the hit, or the end of its last page where that page is read whole.
      attention_tokens, raw_tokens: as in Match.
      covered: whole pages that the tree has.
      wanted: from the first page to the last.
    """

    tokens: int
    end: int
    attention_tokens: int
    raw_tokens: int
    covered: int
    wanted: list[Wanted]


class Search:
    """What the tree and the store have of one prompt together.

    Args:
      host: with a store.
      scope: the tree's name for it.
      tokens: int32[n].
      digests: of the scope and of the prompt's first pages, as far as an earlier search needed them; extended.
    """

    def __init__(self, host: Host, scope: Root, tokens: np.ndarray, digests: list[bytes]):
        self.tree, self.shelf = host.tree, host.shelf
        self.tokens, self.page_size = tokens, host.layout.page_size
        self.scope = scope
        root = self.tree.roots.get(scope)
        self.path, shared = self.tree.walk(root, tokens) if root is not None else ([], 0)
        self.covered = shared // self.page_size
        self.present = [
            pages_on(self.path[-1], g.ordinal, 0, self.covered) >= 0 if self.path else np.zeros(0, bool)
            for g in self.tree.groups
        ]
        self.digests = self._known_digests(digests)
        self.tail_group = "recurrent" if self.tree.recurrent else self.tree.groups[0].name

    def _known_digests(self, digests: list[bytes]) -> list[bytes]:
        """The digest of the scope, then of each page that is known: in full attention, or, without it, of all."""
        tree, size = self.tree, self.page_size
        full = None if tree.full is None else tree.groups[tree.full].name
        if not digests:
            known = [tree.scope_digest(self.scope)]
            for node in self.path[1:]:
                tree.digests(node)
                known += node.digests
            digests[:] = known[: 1 + self.covered]
        for page in range(len(self.tokens) // size):
            if page + 1 == len(digests):
                digests += tree.page_digests(digests[page], self.tokens[page * size : (page + 1) * size])
            if page >= self.covered and full is not None and not self.shelf.has(full, page_name(digests[page + 1])):
                return digests[: page + 1]
        return digests[:]

    def known(self) -> int:
        """How many tokens the store, or the tree's whole pages and the store together, know of this prompt."""
        pages = len(self.digests) - 1
        if self.tree.full is None:  # the digests say nothing then: the last page, state or tail that there is
            groups = [*(group.name for group in self.tree.groups), *["recurrent"] * self.tree.recurrent]
            while pages > 0 and not self._tails(pages):
                if any(self.shelf.has(group, page_name(self.digests[pages])) for group in groups):
                    break
                pages -= 1
        return max([pages * self.page_size, *(position for position, _ in self._tails(pages))])

    def find(self, hit: Hit, limit: int) -> Find | None:
        """The longest hit of at most `limit` tokens that is longer than the tree's, if there is one."""
        raw = max(hit.match.raw_tokens, self.known())
        cap = min(raw - self.tree.reuse_backoff, limit)
        attention = hit.match.attention_tokens
        for position, tail in self._positions(cap, hit.match.tokens):
            wanted = self._wanted(position, tail)
            if wanted is None:
                continue
            attention = max(attention, position)
            state = self._state(position, tail)
            if state is not None and (wanted or state):
                end = position if tail or not position % self.page_size else position + -position % self.page_size
                return Find(position, end, attention, raw, self.covered, wanted + state)
        return None

    def _tails(self, pages: int) -> list[tuple[int, str]]:
        """The tails behind the first `pages` pages that this prompt shares: (position, name), longest first."""
        parent, at = self.digests[pages], pages * self.page_size
        found = []
        for count, digest in self.shelf.tails(self.tail_group, parent):
            tokens = self.tokens[at : at + count]
            if len(tokens) == count and self.tree.tail_digest(parent, tokens) == digest:
                found.append((at + count, tail_name(parent, count, digest)))
        return sorted(found, reverse=True)

    def _positions(self, cap: int, least: int) -> Iterator[tuple[int, str | None]]:
        """Lengths in (least, cap] that may be hits, longest first, with the name of the tail that ends there."""
        size, known = self.page_size, len(self.digests) - 1
        partial = self.tree.partial_reuse
        if partial and not self.tree.recurrent and least < cap < known * size and cap % size:
            yield cap, None
        for pages in range(min(known, max(cap, 0) // size), -1, -1):
            if (pages + 1) * size <= least:
                return
            for position, name in self._tails(pages):
                if least < position <= cap and (partial or position == len(self.tokens)):
                    yield position, name
            if least < pages * size <= cap:
                yield pages * size, None

    def _wanted(self, position: int, tail: str | None) -> list[Wanted] | None:
        """The pages to be read for a hit of `position` tokens; None: some are nowhere."""
        wanted = []
        whole = position // self.page_size
        needed = [(group, *group.needed(position, self.page_size)) for group in self.tree.groups]
        # A tail's pages all come from one place: in the store they are no good for the whole page around it.
        around = all(
            self._has(group, whole)
            for group, sinks, first, stop in needed
            if tail and (first <= whole < stop or whole < sinks)
        )
        for group, sinks, first, stop in needed:
            for page in (*range(min(sinks, first)), *range(first, stop)):
                is_tail = tail is not None and page == whole
                if around if is_tail else self._has(group, page):
                    continue
                name = tail if is_tail else page_name(self.digests[page + 1])
                if not self.shelf.has(group.name, name):
                    return None
                wanted.append(Wanted(group.ordinal, page, name))
        return wanted

    def _has(self, group: Group, page: int) -> bool:
        """Whether the tree has a whole page."""
        return page < self.covered and bool(self.present[group.ordinal][page])

    def _state(self, position: int, tail: str | None) -> list[Wanted] | None:
        """The state to be read; []: none; None: it is nowhere."""
        if not self.tree.recurrent:
            return []
        whole = position // self.page_size
        if not tail and self.path and whole <= self.covered:
            node = node_of(self.path[-1], position)
            if node.endpoint_at(position) is not None:
                return []
        name = tail or page_name(self.digests[whole])
        return [Wanted(STATE, whole, name)] if self.shelf.has("recurrent", name) else None


class Arrival(Holdings):
    """Values on their way from the store into host memory, and the path that they belong to.

    Made by `begin`. It keeps its path and its pages until `land`, or `give_up`.
    """

    _hold = KEPT

    def __init__(self, host: Host, user: Holdings, scope: Root, priority: int, search: Search, find: Find):
        super().__init__(host, scope, priority)
        tree, size = host.tree, host.layout.page_size
        self._ttl = user._ttl
        self.find = find
        self.owner = user
        self.users = {user}  # who waits for it
        self.keys: list[tuple[str, str]] = []  # (group, name) of what is read
        self._places: list[int] = []  # where it will lie
        self.tokens = search.tokens[: find.end].copy()
        for group in tree.windows:
            self._live_from[group.ordinal] = group.live_from(find.tokens, size)
        # what the tree has of it stays where it is
        self._kept = min(find.covered, self._num_pages(find.end))
        self._first = min([self._kept, *(want.page for want in find.wanted if want.group != STATE)])
        self._anchor = self._cut_at(search.path[-1] if search.path else tree.root(scope), self._kept)
        tree.keep(self._anchor)
        self._change_windows(self._anchor, 0, self._kept, KEPT)

    def _cut_at(self, node: Node, pages: int) -> Node:
        """The node of `node`'s path that ends after `pages` pages, after a split if need be."""
        tree = self._host.tree
        while node.first_page >= pages and node.parent is not None:
            node = node.parent
        if node.first_page + tree.num_pages(node) > pages:
            lower, node = node, tree.split(node, pages - node.first_page)
            tree.hold_child(node)
            tree.settle(lower)
            tree.release_child(node, self._priority)
        return node

    # --- room --------------------------------------------------------------------------------------------------------

    def _counts(self) -> list[int]:
        counts = [0] * len(self._host.pools)
        for want in self.find.wanted:
            counts[self._pool_of(want)] += 1
        return counts

    def _pool_of(self, want: Wanted) -> int:
        tree = self._host.tree
        return tree.state_pool.ordinal if want.group == STATE else tree.groups[want.group].pool

    def start(self) -> bool:
        """Takes room in host memory and starts to read; False: no room there now."""
        host, counts = self._host, self._counts()
        if any(count > pool.below.available for count, pool in zip(counts, host.pools, strict=True)):
            return False
        ids = [host.tree.allocate(pool.below, count).tolist() for count, pool in zip(counts, host.pools, strict=True)]
        self._places = [HOST + ids[self._pool_of(want)].pop() for want in self.find.wanted]
        self.keys = [key_of(host, want) for want in self.find.wanted]
        self._reading = host.shelf.read(self.keys)
        return True

    @property
    def done(self) -> bool:
        """Whether `land` does not wait."""
        return self._reading.done()

    # --- the end -----------------------------------------------------------------------------------------------------

    def land(self) -> None:
        """What was read goes into the tree; the first full-attention page that is missing ends it."""
        host, tree, size = self._host, self._host.tree, self._host.layout.page_size
        payloads = self._reading.results()
        good = [payload is not None for payload in payloads]
        end = len(self.tokens)
        for want, is_good in zip(self.find.wanted, good, strict=True):
            if want.group == tree.full and not is_good:
                end = min(end, want.page * size)
        complete = all(good)
        if not complete:
            end -= end % size  # without its partial page, and without an endpoint
        self._node = self._cut_at(self._anchor, min(self._first, end // size))
        self._published = self._node.first_page + tree.num_pages(self._node)
        tree.keep(self._node)
        self._change_windows(self._node, 0, self._published, KEPT)
        self._tables = [np.zeros(-(-len(self.tokens) // size), np.int32) for _ in tree.groups]
        self._capacity = len(self.tokens)
        slot = NO_SLOT
        for want, place, payload in zip(self.find.wanted, self._places, payloads, strict=True):
            pool = self._pool_of(want)
            if payload is None:
                host.tree.release_pages(host.pools[pool], np.array([place], np.int32))
                continue
            host.builder.put(pool, place, host.memory.split(pool, payload))
            if want.group == STATE:
                slot = place
            else:
                self._tables[want.group][want.page] = place
        self._publish(self.tokens[self._published * size : end])
        if complete and (tree.windows or tree.recurrent or len(self._partial)):
            self._leave(slot)
        else:
            self._free_slot(slot)
        self._let_go()

    def _leave(self, slot: int) -> None:
        """The hit becomes an endpoint, so that what it needs stays."""
        position, tree = self.find.tokens, self._host.tree
        if len(self._partial):
            home = self._publish_tail(closing=True)
        else:
            home = node_of(self._node, position)
        if home is not None and slot == NO_SLOT and tree.recurrent:
            return  # the tree had the state
        if home is not None:
            self._leave_endpoint(home, position, slot)
        else:
            self._free_slot(slot)

    def _let_go(self) -> None:
        tree, pages = self._host.tree, self._num_pages(self._capacity)
        for group in tree.groups:
            entries = self._tables[group.ordinal][self._tree_pages : pages]
            tree.release_pages(self._host.pools[group.pool], entries[entries > 0])
        self._change_windows(self._node, 0, self._tree_pages, -KEPT)
        tree.unkeep(self._node, self._priority)
        self._node = None
        self._unpin()

    def _unpin(self) -> None:
        self._change_windows(self._anchor, 0, self._kept, -KEPT)
        self._host.tree.unkeep(self._anchor, self._priority)

    def give_up(self) -> None:
        """Nobody waits for it any more, or there is no room for it."""
        for want, place in zip(self.find.wanted, self._places, strict=False):
            self._host.tree.release_pages(self._host.pools[self._pool_of(want)], np.array([place], np.int32))
        self._unpin()


def look_up(host: Host, search: Search | None, limit: int, hit: Hit) -> Match:
    """The match of a prompt in all tiers; `hit`: in the tree."""
    if search is None:
        return hit.match
    find = search.find(hit, limit)
    if find is None:
        return hit.match
    size, full = host.layout.page_size, host.tree.full
    covered = min(find.tokens, find.covered * size) if full is not None else 0
    warm = min(covered, sum(node.device for node in search.path) * size)
    tiers = {"device": warm, "host": covered - warm, "store": find.tokens - covered}
    upper = min(find.raw_tokens - host.tree.reuse_backoff, limit)
    limited_by = None
    if find.tokens < upper:
        limited_by = "recurrent" if find.attention_tokens > find.tokens else hit.match.limited_by
    return Match(
        find.tokens,
        find.attention_tokens,
        find.raw_tokens,
        limited_by,
        {tier: count for tier, count in tiers.items() if count},
        max(0, hit.match.raw_tokens + hit.match.in_flight - find.raw_tokens),
    )


def begin(host: Host, user: Holdings, priority: int, search: Search, limit: int, hit: Hit) -> Arrival | None:
    """Starts to read for `user` what makes its hit longer than the tree's, or lets it wait for who reads part of it.

    Returns:
      None: there is nothing, or no room in host memory for it.
    """
    while (find := search.find(hit, limit)) is not None:
        for want in find.wanted:
            if (key := key_of(host, want)) in host.arriving:
                host.arriving[key].users.add(user)
                return host.arriving[key]
        arrival = Arrival(host, user, search.scope, priority, search, find)
        if arrival.start():
            host.arriving.update(dict.fromkeys(arrival.keys, arrival))
            return arrival
        arrival.give_up()
        limit = find.tokens // 2  # as much as there is room for, roughly
        search = Search(host, search.scope, search.tokens, search.digests)  # the tree's runs may have been split
    return None


def leave(host: Host, arrival: Arrival, user: Holdings) -> None:
    """`user` does not wait for `arrival` any more."""
    arrival.users.discard(user)
    if not arrival.users and host.arriving.get(arrival.keys[0]) is arrival:
        end(host, arrival)
        arrival.give_up()


def end(host: Host, arrival: Arrival) -> None:
    """`arrival` is over, one way or the other."""
    for key in arrival.keys:
        host.arriving.pop(key, None)
