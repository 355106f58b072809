"""Announcing: the tree that tells a journal what comes, moves and goes. Used in place of Eviction if somebody listens.

Tails are not announced: they are reused by partial matches, which events say nothing of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jkv.config import Scope
from jkv.events import Event, Journal
from jkv.eviction import Eviction, Shelf
from jkv.layout import HOST, Layout
from jkv.pages import PagePool
from jkv.plan import PlanBuilder
from jkv.radix import NO_SLOT, Endpoint, Node, path_to, spans
from jkv.tiers.keys import Contents, page_name, parse_name, plain_ids, tail_name

RECURRENT = "recurrent"


def tier_name(place: int) -> str:
    """The tier in which a page lies."""
    return "host" if place >= HOST else "device"


class Announcing(Eviction):
    """See the module.

    Args:
      journal: is told.
    """

    def __init__(
        self,
        layout: Layout,
        pools: Sequence[PagePool],
        builder: PlanBuilder,
        shelf: Shelf | None,
        contents: Contents,
        journal: Journal,
    ):
        super().__init__(layout, pools, builder, shelf, contents)
        self.journal = journal
        self._unseen = [] if shelf is None else shelf.watch()  # (group, name) of the store that may be new
        self._leaving: dict[tuple[str, str], bytes] = {}  # to the store, where they are not yet: digests
        self._copies: dict[bytes, dict[Endpoint, None]] = {}  # digest -> the endpoints with such a snapshot

    # --- pages -------------------------------------------------------------------------------------------------

    def _is_tail(self, node: Node) -> bool:
        return node.size < self.page_size

    def _announce(self, node: Node, at: Iterable[int]) -> None:
        """The pages at indices `at` of `node` are where they are now, as far as they are anywhere."""
        if self._is_tail(node) or not self.groups or self.is_retired(node):
            return
        self.digests(node)
        size = self.page_size
        for i in at:
            parent = node.digests[i - 1] if i else self._digest_above(node)
            for group in self.groups:
                place = int(node.pages[group.ordinal][i])
                if place >= 0:
                    scope, ids = self._scope_of(node), self._ids(node.tokens[i * size : (i + 1) * size])
                    position = node.start + (i + 1) * size
                    event = Event(
                        0, "stored", group.name, tier_name(place), scope, node.digests[i], parent, ids, position
                    )
                    self.journal.there(event)

    def _ids(self, tokens: np.ndarray) -> tuple[int, ...]:
        return tuple(plain_ids(tokens, self.contents).tolist())

    def _scope_of(self, node: Node) -> Scope:
        *_, root = path_to(node)
        return root.key.scope

    def _there(self, node: Node, g: int, at: Iterable[int]) -> list[tuple[str, bytes]]:
        """(group, digest) of those pages at indices `at` of `node` that are anywhere, and announced."""
        if self._is_tail(node) or self.is_retired(node):
            return []
        self.digests(node)
        return [(self.groups[g].name, node.digests[i]) for i in at if node.pages[g][i] >= 0]

    def _leaves(self, group: str, digest: bytes, name: str) -> None:
        """It has left memory."""
        if self.shelf is not None and (self.shelf.has(group, name) or (group, name) in self._leaving):
            self.journal.moved(group, digest, "store")
        else:
            self.journal.gone(group, digest)

    def _leave(self, pages: Iterable[tuple[str, bytes]]) -> None:
        for group, digest in pages:
            self._leaves(group, digest, page_name(digest))

    def _persist_place(self, pool: int, place: int, group: str, name: str) -> None:
        super()._persist_place(pool, place, group, name)
        if self.shelf is not None and place > 0 and not self.shelf.has(group, name):
            self._leaving[group, name] = parse_name(name)[0]

    def attach(self, *args: Any, **options: Any) -> Node:
        node = super().attach(*args, **options)
        self._announce(node, range(self.num_pages(node)))
        return node

    def extend(self, node: Node, tokens: np.ndarray, pages: Sequence[np.ndarray], live_from: Sequence[int]) -> None:
        old = self.num_pages(node)
        super().extend(node, tokens, pages, live_from)
        self._announce(node, range(old, self.num_pages(node)))

    def fill(self, node: Node, g: int, pages: np.ndarray) -> None:
        super().fill(node, g, pages)
        self._announce(node, (pages > 0).nonzero()[0].tolist())

    def warm_up(self, node: Node, pages: np.ndarray) -> None:
        first = node.device
        super().warm_up(node, pages)
        self._announce(node, range(first, first + len(pages)))

    def onboard_path(self, node: Node) -> None:
        cold = [(current, range(current.device, self.num_pages(current))) for current in path_to(node)]
        super().onboard_path(node)
        for current, at in reversed(cold):
            self._announce(current, at)

    def onboard_window(self, node: Node, g: int, first: int, stop: int) -> None:
        super().onboard_window(node, g, first, stop)
        for current, a, b in reversed(spans(node, first, stop)):
            self._announce(current, range(a, b))

    def _move_window(self, node: Node, g: int, at: np.ndarray) -> None:
        super()._move_window(node, g, at)
        self._announce(node, at.tolist())

    def _move_full(self, node: Node, count: int) -> None:
        end = node.device
        super()._move_full(node, count)
        self._announce(node, range(end - 1, end - count - 1, -1))

    def _drop_window(self, node: Node, g: int, at: np.ndarray) -> None:
        pages = self._there(node, g, at.tolist())
        super()._drop_window(node, g, at)
        self._leave(pages)

    def _lose_window(self, node: Node, g: int, at: np.ndarray) -> None:
        pages = self._there(node, g, at.tolist())
        super()._lose_window(node, g, at)
        self._leave(pages)

    def _cut(self, node: Node, keep: int) -> None:
        pages = []
        for group in self.groups:
            pages += self._there(node, group.ordinal, range(self.num_pages(node) - 1, keep - 1, -1))
        super()._cut(node, keep)
        self._leave(pages)

    # --- snapshots ---------------------------------------------------------------------------------------------

    def _announce_snapshot(self, endpoint: Endpoint) -> None:
        if endpoint.slot != NO_SLOT and not self.is_retired(endpoint.node):
            parent, digest, _, ids = self._names(endpoint)
            self._copies.setdefault(digest, {})[endpoint] = None
            tier = self._hottest(digest)
            scope = self._scope_of(endpoint.node)
            self.journal.there(Event(0, "stored", RECURRENT, tier, scope, digest, parent, ids, endpoint.position))

    def _hottest(self, digest: bytes) -> str:
        """The tier of a snapshot. Pages that begin alike may each have one of the same prefix: the best of them."""
        return tier_name(min(copy.slot for copy in self._copies[digest]))

    def _names(self, endpoint: Endpoint) -> tuple[bytes, bytes, str, tuple[int, ...]]:
        """(digest of the page before, digest, name, tokens in between) of a snapshot."""
        node, size = endpoint.node, self.page_size
        self.digests(node)
        start = (endpoint.position - 1) // size * size
        at = start // size - node.first_page
        parent = node.digests[at - 1] if at > 0 else self._digest_above(node)
        tokens = node.tokens[start - node.start : endpoint.position - node.start]
        ids = self._ids(tokens)
        if len(tokens) == size:
            return parent, node.digests[at], page_name(node.digests[at]), ids
        digest = self.tail_digest(parent, tokens)
        return parent, digest, tail_name(parent, len(tokens), digest), ids

    def add_endpoint(self, node: Node, position: int, slot: int, priority: int) -> Endpoint:
        endpoint = super().add_endpoint(node, position, slot, priority)
        self._announce_snapshot(endpoint)
        return endpoint

    def remove_endpoint(self, endpoint: Endpoint, keep_slot: bool = False, keep_pages: int | None = None) -> None:
        if endpoint.slot != NO_SLOT and not self.is_retired(endpoint.node):
            _, digest, name, _ = self._names(endpoint)
            del self._copies[digest][endpoint]
            if self._copies[digest]:
                self.journal.moved(RECURRENT, digest, self._hottest(digest))
            else:
                del self._copies[digest]
                self._leaves(RECURRENT, digest, name)
        super().remove_endpoint(endpoint, keep_slot, keep_pages)

    def _move_slot(self, endpoint: Endpoint) -> None:
        super()._move_slot(endpoint)
        self._announce_snapshot(endpoint)

    def onboard_pinned(self, endpoint: Endpoint) -> None:
        super().onboard_pinned(endpoint)
        self._announce_snapshot(endpoint)

    # --- all at once -------------------------------------------------------------------------------------------

    def clear(self) -> None:
        super().clear()
        self.forget()

    def retire(self) -> None:
        super().retire()
        for event in self.journal.in_memory():  # still held, but no longer to be found
            name = page_name(event.digest)
            if len(event.tokens) < self.page_size:
                name = tail_name(event.parent, len(event.tokens), event.digest)
            self._leaves(event.group, event.digest, name)
        self._copies.clear()

    def forget(self) -> None:
        """Nothing in memory is there any more; what the store has is announced again."""
        self.journal.clear()
        self._leaving.clear()
        self._copies.clear()
        if self.shelf is not None:
            self._unseen = self.shelf.watch()

    def _announce_anew(self) -> None:
        """Everything is gone, and here again."""
        self.forget()
        for node in self.nodes():
            self._announce(node, range(self.num_pages(node)))
            for endpoint in node.endpoints:
                self._announce_snapshot(endpoint)

    def look_into_store(self, settled: bool) -> None:
        """Announces what came into the store, or left it, since the last time.

        `settled`: everything that is to be written there is on its way.
        """
        if self.shelf is None:
            return
        changes = self.shelf.take_changes()
        if changes is None:
            self._announce_anew()
        self._unseen += changes or ()  # kept until all is announced: to say it twice changes nothing
        for group, name in (*self._unseen, *(self._leaving if settled else ())):
            digest, parent, _ = parse_name(name)
            is_tail = parent is not None and group != RECURRENT
            if is_tail:
                continue
            tier = self.journal.tier(group, digest)
            if self.shelf.has(group, name):
                if tier is None:
                    self.journal.there(Event(0, "stored", group, "store", digest=digest))
            elif tier == "store" and (settled or (group, name) not in self._leaving):
                self.journal.gone(group, digest)
        self._unseen = []
        if settled:
            self._leaving.clear()
