"""The radix tree of token prefixes: runs of pages, match, split, holds, endpoints and eviction.

A node is a *run* of whole pages, or a *tail* (one partial page, never extended, never a parent):

    tokens   [ t0 t1 t2 t3 | t4 t5 t6 t7 | ... ]     int32, `size` of them count
    pages    full      [ 7 | 9 | ... ]               int32 per attention group, -1: a hole
             window    [-1 | 4 | ... ]
    need     window    [ 0 | 1 | ... ]               endpoints whose window covers the page
    held     window    [ 0 | 2 | ... ]               sequences whose window covers the page

Children are found by the exact bytes of their first page, so nothing can collide. Where siblings share only the
head of their first page, the longest common head is at a neighbour in the sorted keys.

An *endpoint* is a length that was left resumable. With recurrent layers it carries the state slot of its snapshot.
It hangs on the node that holds its last token.

The host half of jkv: NumPy only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sortedcontainers import SortedList

from jkv.errors import IntegrityError
from jkv.layout import Group, Layout
from jkv.pages import PagePool

NO_SLOT = 0


@dataclasses.dataclass(frozen=True)
class Match:
    """What a prompt can reuse. All lengths in tokens.

    Attributes:
      tokens: the hit: valid in every group.
      attention_tokens: the hit if no recurrent state were needed.
      raw_tokens: the longest token match, no group and no cap applied.
      limited_by: the group that shortened the longest path most; None if only the caps did.
      tier_tokens: the hit's tokens by the tier they lie in.
    """

    tokens: int = 0
    attention_tokens: int = 0
    raw_tokens: int = 0
    limited_by: str | None = None
    tier_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Endpoint:
    """A resumable length: `position` tokens, the last of them in `node`."""

    __slots__ = ("alive", "extensions", "node", "pinned", "position", "priority", "slot")

    def __init__(self, node: Node, position: int, slot: int, priority: int):
        self.node = node
        self.position = position
        self.slot = slot  # of its snapshot; NO_SLOT without recurrent layers
        self.priority = priority
        self.extensions: list[Endpoint] = []  # the next endpoints of sequences that went on from here
        self.pinned = False  # its slot is still the live state of the sequence that left it
        self.alive = True


class Node:
    """A run of whole pages, or a tail. See the module's picture."""

    __slots__ = (
        "children", "endpoints", "heads", "held", "holders", "is_head", "key", "level", "marks", "need", "order",
        "pages", "parent", "priority", "resident", "serial", "size", "start", "tokens",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: Any, start: int, tokens: np.ndarray, serial: int, priority: int):
        self.parent = parent
        self.key = key  # bytes of the first page; a root: its scope
        self.start = start  # in tokens
        self.size = len(tokens)
        self.tokens = tokens
        self.serial = serial  # age
        self.priority = priority
        self.pages: list[np.ndarray] = []
        self.need: list[np.ndarray | None] = []
        self.held: list[np.ndarray | None] = []
        self.resident = 0  # present pages over all groups
        self.holders = 0  # sequences whose path contains this node
        self.level = 0  # of the full pool's eviction order at the last use
        self.endpoints: list[Endpoint] = []  # by position
        self.children: dict[bytes, Node] = {}
        self.order: SortedList | None = None  # keys of all children
        self.heads: SortedList | None = None  # keys of the children whose first page is there in every group
        self.is_head = False
        self.marks: dict[bytes, list[Endpoint]] = {}  # endpoints inside a child's first page, by tokens up to there

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclasses.dataclass
class Hit:
    """A match and where it lies: what `Sequence.resume` needs to carry it out."""

    match: Match
    path: list[Node]  # root first; covers match.tokens
    endpoint: Endpoint | None  # the snapshot's, with recurrent layers


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common head of two keys."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if difference == 0:
        return size // 4
    return ((difference & -difference).bit_length() - 1) // 32


def _grown(array: np.ndarray, size: int, extra: np.ndarray) -> np.ndarray:
    """`array[:size]` with `extra` behind it, in place where there is room (a quarter of slack is left)."""
    needed = size + len(extra)
    if needed > len(array):
        larger = np.empty(needed + needed // 4, array.dtype)
        larger[:size] = array[:size]
        array = larger
    array[size:needed] = extra
    return array


class RadixTree:
    """All reusable prefixes, by scope.

    Args:
      layout: the cache's geometry.
      pools: the page pools in the layout's order; the tree owns pages in them and evicts from them.
    """

    def __init__(self, layout: Layout, pools: Sequence[PagePool]):
        config = layout.config
        self.page_size = config.page_size
        self.groups = layout.attention_groups
        self.pools = pools
        self.group_pools = [pools[group.pool] for group in self.groups]
        self.full = next((g.ordinal for g in self.groups if g.window is None), None)
        self.windows = [g for g in self.groups if g.window is not None]
        self._history_windows = [g for g in self.windows if g.window != 1]  # a window of 1 reads no older page
        recurrent = layout.recurrent_pool
        self.state_pool = pools[recurrent.ordinal] if recurrent else None
        self.recurrent_name = recurrent.name if recurrent else None
        self.min_snapshot = bool(config.min_snapshot)
        self.partial_reuse = config.partial_reuse
        self.reuse_backoff = config.reuse_backoff
        # pools in which an endpoint by itself keeps something from others
        ranked = {group.pool for group in self.windows} | ({recurrent.ordinal} if recurrent else set())
        self._endpoint_orders = [pools[ordinal].order for ordinal in sorted(ranked)]
        self.roots: dict[Hashable, Node] = {}
        self.snapshots_evicted = 0
        self._serial = 0

    # --- structure ---------------------------------------------------------------------------------------------

    def root(self, scope: Hashable) -> Node:
        """The root of `scope`, made where it is missing."""
        node = self.roots.get(scope)
        if node is None:
            node = self.roots[scope] = self._make(None, scope, 0, np.empty(0, np.int32), 0)
        return node

    def _make(self, parent: Node | None, key: Any, start: int, tokens: np.ndarray, priority: int) -> Node:
        self._serial += 1
        return Node(parent, key, start, tokens, self._serial, priority)

    def num_pages(self, node: Node) -> int:
        """Pages of the node's run; a tail has one."""
        return -(-node.size // self.page_size)

    def attach(self, parent: Node, tokens: np.ndarray, pages: Sequence[np.ndarray], priority: int) -> Node:
        """Hands private pages over to a new child of `parent`, held once, with its window pages held once.

        Args:
          tokens: int32[n]: whole pages, or fewer than one page (a tail). Copied.
          pages: per attention group int32[ceil(n / page_size)], -1: a hole. Copied.
        """
        node = self._make(parent, tokens[: self.page_size].tobytes(), parent.end, tokens.copy(), priority)
        node.holders = 1
        for group, pool in zip(self.groups, self.group_pools, strict=True):
            ids = pages[group.ordinal].copy()
            present = len(ids) - int(np.count_nonzero(ids < 0)) if group.window is not None else len(ids)
            node.pages.append(ids)
            node.need.append(None if group.window is None else np.zeros(len(ids), np.int32))
            node.held.append(None if group.window is None else np.ones(len(ids), np.int32))
            node.resident += present
            pool.tree += present
            pool.held += present
        self._link(node)
        return node

    def extend(self, node: Node, tokens: np.ndarray, pages: Sequence[np.ndarray]) -> None:
        """Hands whole private pages over to the end of `node`, which only the caller holds and nobody extends."""
        old = self.num_pages(node)
        node.tokens = _grown(node.tokens, node.size, tokens)
        node.size += len(tokens)
        for group, pool in zip(self.groups, self.group_pools, strict=True):
            g, ids = group.ordinal, pages[group.ordinal]
            present = len(ids)
            node.pages[g] = _grown(node.pages[g], old, ids)
            if group.window is not None:
                present -= int(np.count_nonzero(ids < 0))
                node.need[g] = _grown(node.need[g], old, np.zeros(len(ids), np.int32))
                node.held[g] = _grown(node.held[g], old, np.ones(len(ids), np.int32))
            node.resident += present
            pool.tree += present
            pool.held += present

    def _link(self, node: Node) -> None:
        parent = node.parent
        if not parent.children:
            parent.order = SortedList()
            parent.heads = SortedList() if self._history_windows else parent.order
            self._unrank(parent)
        parent.children[node.key] = node
        parent.order.add(node.key)
        self.refresh_head(node)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        del parent.children[node.key]
        parent.order.remove(node.key)
        if node.is_head:
            node.is_head = False
            parent.heads.remove(node.key)
        self._unrank(node)
        for group in self.windows:
            self.group_pools[group.ordinal].order.unneeded.pop((node, group.ordinal), None)

    def refresh_head(self, node: Node) -> None:
        """Keeps `parent.heads`: the children whose first page is there in every group that reads history."""
        if not self._history_windows or node.parent is None:
            return
        complete = all(node.pages[g.ordinal][0] >= 0 for g in self._history_windows)
        if complete != node.is_head:
            node.is_head = complete
            if complete:
                node.parent.heads.add(node.key)
            else:
                node.parent.heads.remove(node.key)

    def split(self, node: Node, pages: int) -> Node:
        """Cuts a run after `pages` pages. Returns the head, a new node; `node` stays the lower half."""
        parent, size = node.parent, pages * self.page_size
        total = self.num_pages(node)
        head = self._make(parent, node.key, node.start, node.tokens[:size].copy(), node.priority)
        head.serial = node.serial
        head.holders, head.level = node.holders, node.level
        for g, ids in enumerate(node.pages):
            head.pages.append(ids[:pages].copy())
            node.pages[g] = ids[pages:total].copy()
            if self.groups[g].window is None:
                head.need.append(None)
                head.held.append(None)
                head.resident += pages
            else:
                head.need.append(node.need[g][:pages].copy())
                head.held.append(node.held[g][:pages].copy())
                head.resident += int(np.count_nonzero(head.pages[g] >= 0))
                node.need[g] = node.need[g][pages:total].copy()
                node.held[g] = node.held[g][pages:total].copy()
                unneeded = self.group_pools[g].order.unneeded
                if (node, g) in unneeded:
                    unneeded[(head, g)] = None
        node.resident -= head.resident

        parent.children[node.key] = head
        head.is_head = node.is_head
        node.is_head = False
        node.parent, node.start = head, node.start + size
        node.tokens, node.size = node.tokens[size : node.size].copy(), node.size - size
        node.key = node.tokens[: self.page_size].tobytes()

        cut = next((i for i, e in enumerate(node.endpoints) if e.position > head.end), len(node.endpoints))
        head.endpoints, node.endpoints = node.endpoints[:cut], node.endpoints[cut:]
        for endpoint in head.endpoints:
            endpoint.node = head
        head.children[node.key] = node
        head.order = SortedList([node.key])
        head.heads = SortedList() if self._history_windows else head.order
        self.refresh_head(node)
        for endpoint in node.endpoints:
            self._mark(endpoint)
        return head

    def _mark_key(self, endpoint: Endpoint) -> bytes | None:
        """The key of an endpoint that lies inside its node's first page; None elsewhere."""
        offset = endpoint.position - endpoint.node.start
        return endpoint.node.key[: 4 * offset] if offset < self.page_size else None

    def _mark(self, endpoint: Endpoint) -> None:
        key = self._mark_key(endpoint)
        if key is not None:
            endpoint.node.parent.marks.setdefault(key, []).append(endpoint)

    # --- match -------------------------------------------------------------------------------------------------

    def match(self, scope: Hashable, tokens: np.ndarray, max_reuse: int) -> Hit:
        """The longest reusable head of `tokens` (int32[n]), at most `max_reuse`. Changes nothing.

        The hit is the largest n for which one path agrees with the first n tokens and has, at n, what every group
        needs: a window the pages overlapping [n+1-W, n) and the sinks, recurrent layers a snapshot at exactly n.
        Ties go to the path that is walked anyway, then to the older of the two nearest siblings.
        """
        root = self.roots.get(scope)
        if root is None or not len(tokens):
            return Hit(Match(), [root] if root else [], None)
        path, covered = self._walk(root, tokens)
        longest = path  # the path of the longest token match
        raw = covered
        if covered == path[-1].end:
            child, shared = self._best_head(path[-1].order, path[-1], tokens)
            if child is not None:
                longest, raw = [*path, child], covered + shared
        cap = min(raw - self.reuse_backoff, max_reuse)
        if cap <= 0:
            return Hit(Match(raw_tokens=raw), [root], None)
        upper = cap if self.partial_reuse else cap - cap % self.page_size
        hit, hit_path, endpoint = self._best(path, covered, tokens, cap, self.state_pool is not None)
        attention, limited_by = hit, None
        if hit < upper:
            if self.state_pool is not None:
                attention = self._best(path, covered, tokens, cap, False)[0]
            limited_by = self._limit(longest, upper)
        match = Match(hit, attention, raw, limited_by, {"device": hit} if hit else {})
        return Hit(match, hit_path if hit else [root], endpoint)

    def _walk(self, root: Node, tokens: np.ndarray) -> tuple[list[Node], int]:
        """Nodes along `tokens`, and the tokens they share; the last node may be shared only in part."""
        page_size, total = self.page_size, len(tokens)
        node, covered, path = root, 0, [root]
        while node.children and total - covered >= page_size:
            child = node.children.get(tokens[covered : covered + page_size].tobytes())
            if child is None:
                break
            path.append(child)
            span = min(child.size, total - covered)
            shared = span
            if child.size > page_size:
                differs = child.tokens[page_size:span] != tokens[covered + page_size : covered + span]
                if len(differs):
                    first = int(differs.argmax())
                    if differs[first]:
                        shared = page_size + first
            covered += shared
            if shared < child.size:
                break
            node = child
        return path, covered

    def _best_head(self, keys: SortedList | None, node: Node, tokens: np.ndarray) -> tuple[Node | None, int]:
        """The child in `keys` that shares most tokens, but not the whole page, with `tokens` at the node's end."""
        query = tokens[node.end : node.end + self.page_size].tobytes()
        if not keys or not query:
            return None, 0
        at = keys.bisect_left(query)
        after = at + 1 if at < len(keys) and keys[at] == query and len(query) == 4 * self.page_size else at
        best, most = None, 0
        for i in (at - 1, after):
            if 0 <= i < len(keys):
                shared = common_tokens(keys[i], query)
                child = node.children[keys[i]]
                if shared > most or (best is not None and shared == most and child.serial < best.serial):
                    best, most = child, shared
        return best, most

    def _best(
        self, path: list[Node], covered: int, tokens: np.ndarray, cap: int, with_state: bool
    ) -> tuple[int, list[Node], Endpoint | None]:
        """The largest usable length at most `cap` on `path` or in a page that leaves it at a node's end."""
        page_size = self.page_size
        upper = cap if self.partial_reuse else cap - cap % page_size
        limit = min(covered, upper)
        best, endpoint = self._fit_state(path, limit) if with_state else (self._fit(path, limit), None)
        best_path = path
        exact = len(tokens) if not self.partial_reuse and cap == len(tokens) and cap % page_size else 0
        if exact and exact <= covered:  # inside a run, where an endpoint was left at the prompt's very end
            last = _endpoint_at(path[-1], exact)
            if last is not None and self._fit(path, exact) == exact:
                return exact, path, last if with_state else None
        for depth in range(len(path) - 1, -1, -1):
            node = path[depth]
            if node.end > covered:
                continue
            if node.end + page_size <= best:
                break
            found = None
            if exact or (with_state and self.partial_reuse):
                found = self._best_mark(path[: depth + 1], tokens, upper, exact, best)
            elif self.partial_reuse and node.end < upper:
                child, shared = self._best_head(node.heads, node, tokens)
                if child is not None:
                    side = [*path[: depth + 1], child]
                    found = (self._fit(side, min(node.end + shared, upper)), side, None)
            if found is not None and found[0] > best:
                best, best_path, endpoint = found
                if not with_state:
                    endpoint = None
        return best, best_path, endpoint

    def _best_mark(
        self, path: list[Node], tokens: np.ndarray, upper: int, exact: int, least: int
    ) -> tuple[int, list[Node], Endpoint] | None:
        """The deepest endpoint beyond `least` inside the first page of a child of the path's end."""
        node = path[-1]
        if not node.marks:
            return None
        end = node.end
        most = min(end + self.page_size - 1, len(tokens), exact or upper)
        query = tokens[end:most].tobytes()
        for position in range(most, max(end, least), -1):
            if exact and position != exact:
                return None
            for endpoint in node.marks.get(query[: 4 * (position - end)], ()):
                side = [*path, endpoint.node]
                if self._fit(side, position) == position:
                    return position, side, endpoint
        return None

    def _fit(self, path: list[Node], length: int, groups: Sequence[Group] | None = None) -> int:
        """The largest length at most `length` whose window pages are all on `path`."""
        groups = self.windows if groups is None else groups
        shortened = bool(groups)
        while shortened and length > 0:
            shortened = False
            for group in groups:
                sinks, first, stop = group.needed(length, self.page_size)
                hole = self._last_hole(path, group.ordinal, first, stop)
                if hole < 0 and sinks:
                    hole = self._last_hole(path, group.ordinal, 0, sinks)
                if hole >= 0:
                    length, shortened = hole * self.page_size, True
        return length

    def _fit_state(self, path: list[Node], length: int) -> tuple[int, Endpoint | None]:
        """The deepest endpoint on `path` at most `length` whose window pages are all there."""
        for node in reversed(path):
            for endpoint in reversed(node.endpoints):
                position = endpoint.position
                if position > length or (not self.partial_reuse and position % self.page_size):
                    continue
                length = self._fit(path, position)
                if length == position:
                    return position, endpoint
        return 0, None

    def _last_hole(self, path: list[Node], g: int, first: int, stop: int) -> int:
        """The last page in [first, stop) that is missing on `path`; -1: none."""
        for node in reversed(path):
            start = node.start // self.page_size
            if stop > start and node.size:
                ids = node.pages[g][max(first - start, 0) : stop - start]
                if len(ids) and ids.min() < 0:
                    return start + max(first - start, 0) + int(np.flatnonzero(ids < 0)[-1])
                stop = start
            if first >= start:
                break
        return -1

    def _limit(self, path: list[Node], upper: int) -> str | None:
        """The group that shortens `path` most; None if none does."""
        name, least = None, upper
        for group in self.windows:
            length = self._fit(path, upper, (group,))
            if length < least:
                name, least = group.name, length
        if self.state_pool is not None:
            deepest = max((e.position for node in path for e in node.endpoints if e.position <= upper), default=0)
            if deepest < least:
                name = self.recurrent_name
        return name

    # --- holds -------------------------------------------------------------------------------------------------

    def path_to(self, node: Node) -> Iterator[Node]:
        """`node` and its ancestors, deepest first."""
        current: Node | None = node
        while current is not None:
            yield current
            current = current.parent

    def hold_child(self, node: Node) -> None:
        """A sequence whose path ends at `node`'s parent goes on to `node`."""
        if node.holders == 0:
            self._unrank(node)
            if self.full is not None:
                self.group_pools[self.full].held += self.num_pages(node)
        node.holders += 1

    def hold(self, node: Node) -> None:
        """One more sequence's path ends at `node`: nothing on it is unlinked or loses full-attention pages."""
        for current in self.path_to(node):
            self.hold_child(current)

    def release_child(self, node: Node, priority: int = 0) -> None:
        """Undoes one `hold_child`; `node` was in use until now."""
        node.holders -= 1
        if node.holders == 0:
            node.priority = max(node.priority, priority)
            if self.full is not None:
                pool = self.group_pools[self.full]
                pool.held -= self.num_pages(node)
                node.level = pool.order.level
            self.settle(node)

    def release(self, node: Node, priority: int = 0) -> None:
        """Undoes one `hold`."""
        for current in list(self.path_to(node)):
            self.release_child(current, priority)

    def use(self, node: Node) -> None:
        """`node` is read now, though not held."""
        if self.full is not None and node.holders == 0 and not node.children and node.parent is not None:
            node.level = self.group_pools[self.full].order.level
            self._rank_leaf(node)

    def newly_held(self, node: Node, whole_pages: int) -> int:
        """Full-attention pages below `whole_pages` that holding `node`'s path would take from eviction."""
        if self.full is None:
            return 0
        return sum(
            min(self.num_pages(n), whole_pages - n.start // self.page_size)
            for n in self.path_to(node)
            if n.holders == 0
        )

    def _spans(self, node: Node, first: int, stop: int) -> Iterator[tuple[Node, int, int]]:
        """(node, start, stop) per node of `node`'s path that has pages in [first, stop), indices into the node."""
        current: Node | None = node
        while current is not None and stop > first:
            start = current.start // self.page_size
            if stop > start and current.size:
                yield current, max(first - start, 0), min(stop - start, self.num_pages(current))
                stop = start
            current = current.parent

    def pages_on(self, node: Node, g: int, first: int, stop: int) -> np.ndarray:
        """Page ids of group `g` in [first, stop) along `node`'s path: int32[stop - first]."""
        out = np.empty(stop - first, np.int32)
        for current, a, b in self._spans(node, first, stop):
            at = current.start // self.page_size - first
            out[at + a : at + b] = current.pages[g][a:b]
        return out

    def newly_held_window(self, node: Node, g: int, first: int, stop: int) -> int:
        """Window pages in [first, stop) that `hold_window` would take from eviction."""
        return sum(
            int(np.count_nonzero((current.held[g][a:b] == 0) & (current.pages[g][a:b] >= 0)))
            for current, a, b in self._spans(node, first, stop)
        )

    def solely_held_window(self, node: Node, g: int, first: int, stop: int) -> int:
        """Window pages in [first, stop) that one sequence alone keeps from eviction."""
        return sum(
            int(np.count_nonzero((current.held[g][a:b] == 1) & (current.pages[g][a:b] >= 0)))
            for current, a, b in self._spans(node, first, stop)
        )

    def hold_window(self, node: Node, g: int, first: int, stop: int) -> None:
        """One more sequence's window covers pages [first, stop) of `node`'s path."""
        pool = self.group_pools[g]
        for current, a, b in self._spans(node, first, stop):
            held = current.held[g][a:b]
            pool.held += int(np.count_nonzero((held == 0) & (current.pages[g][a:b] >= 0)))
            held += 1

    def release_window(self, node: Node, g: int, first: int, stop: int) -> None:
        """Undoes `hold_window`; what nobody needs any more is freed or queued for eviction."""
        pool = self.group_pools[g]
        for current, a, b in list(self._spans(node, first, stop)):
            held = current.held[g][a:b]
            held -= 1
            pool.held -= int(np.count_nonzero((held == 0) & (current.pages[g][a:b] >= 0)))
            self._review_window(current, g, a, b)

    def tail_home(self, node: Node, key: bytes) -> Node | None:
        """The child of `node` that holds the partial page of tokens `key` already: that tail, or a page around it."""
        child = node.children.get(key)
        if child is None and node.heads:
            at = node.heads.bisect_left(key)
            if at < len(node.heads) and node.heads[at].startswith(key):
                child = node.children[node.heads[at]]
        return child

    def complete_head(self, node: Node) -> bool:
        """Whether the first page of `node` is there in every group that reads history."""
        return node.is_head or not self._history_windows

    def take_back(self, tail: Node) -> None:
        """Undoes the publication of a tail that only the caller holds: its pages are private again."""
        while tail.endpoints:
            self.remove_endpoint(tail.endpoints[-1], keep_slot=tail.endpoints[-1].pinned)
        for g, pool in enumerate(self.group_pools):
            if tail.pages[g][0] >= 0:
                held = self.groups[g].window is None or tail.held[g][0] > 0
                pool.tree -= 1
                pool.held -= held
                tail.pages[g][0] = -1
        tail.resident = tail.holders = 0
        self._unlink(tail)

    def fill(self, node: Node, g: int, at: int, pages: np.ndarray) -> None:
        """Private `pages` (int32[k]) fill holes of `node` from index `at` on, where it has holes and they exist."""
        ids = node.pages[g][at : at + len(pages)]
        take = (ids < 0) & (pages > 0)
        count = int(np.count_nonzero(take))
        if count:
            ids[take] = pages[take]
            pool = self.group_pools[g]
            pool.tree += count
            pool.held += int(np.count_nonzero(take & (node.held[g][at : at + len(pages)] > 0)))
            node.resident += count
            if at == 0:
                self.refresh_head(node)

    def _review_window(self, node: Node, g: int, a: int, b: int) -> None:
        """Pages [a, b) of `node` may have lost their last user: with min_snapshot they go, else they queue."""
        ids = node.pages[g][a:b]
        idle = (ids >= 0) & (node.held[g][a:b] == 0) & (node.need[g][a:b] == 0)
        if not idle.any():
            return
        if self.min_snapshot:
            self._drop_window(node, g, a + np.flatnonzero(idle))
        else:
            self.group_pools[g].order.unneeded[(node, g)] = None

    def _drop_window(self, node: Node, g: int, at: np.ndarray) -> None:
        """Frees the unheld window pages at indices `at` (ascending) of `node`."""
        pool = self.group_pools[g]
        pool.release(node.pages[g][at])
        pool.tree -= len(at)
        node.pages[g][at] = -1
        node.resident -= len(at)
        if len(at) and at[0] == 0:
            self.refresh_head(node)
        if node.resident == 0:
            self.settle(node)

    # --- endpoints ---------------------------------------------------------------------------------------------

    def endpoint_at(self, node: Node, position: int) -> Endpoint | None:
        """The endpoint at `position` on the path that ends at `node`, if there is one."""
        return _endpoint_at(self.node_of(node, position), position)

    def node_of(self, node: Node, position: int) -> Node:
        """The node of `node`'s path that holds token position - 1."""
        while node.start >= position:
            node = node.parent
        return node

    def add_endpoint(self, node: Node, position: int, slot: int, priority: int) -> Endpoint:
        """Leaves `position` resumable; `slot` (or NO_SLOT) becomes the tree's."""
        endpoint = Endpoint(node, position, slot, priority)
        at = next((i for i, e in enumerate(node.endpoints) if e.position > position), len(node.endpoints))
        node.endpoints.insert(at, endpoint)
        self._mark(endpoint)
        for group in self.windows:
            for current, a, b in self._needed_spans(endpoint, group):
                current.need[group.ordinal][a:b] += 1
        if slot != NO_SLOT:
            self.state_pool.tree += 1
        self.touch(endpoint)
        return endpoint

    def _needed_spans(self, endpoint: Endpoint, group: Group) -> Iterator[tuple[Node, int, int]]:
        sinks, first, stop = group.needed(endpoint.position, self.page_size)
        yield from self._spans(endpoint.node, first, stop)
        if sinks:
            yield from self._spans(endpoint.node, 0, min(sinks, first))

    def touch(self, endpoint: Endpoint, priority: int | None = None) -> None:
        """`endpoint` is used now."""
        if priority is not None and priority > endpoint.priority:
            endpoint.priority = priority
        gain = self._gain(endpoint.node, endpoint.position)
        for order in self._endpoint_orders:
            order.put(endpoint, endpoint.priority, gain)

    def extended(self, endpoint: Endpoint, by: Endpoint) -> None:
        """A sequence that went on from `endpoint` left the next one: `endpoint` may be superseded now."""
        if endpoint is by or not endpoint.alive or by in endpoint.extensions:
            return
        endpoint.extensions.append(by)
        for order in self._endpoint_orders:
            order.superseded[endpoint] = None

    def _superseded(self, endpoint: Endpoint) -> bool:
        """Whether the chain was extended past `endpoint`, its extension can still be had, and nothing branches."""
        node = endpoint.node
        if len(endpoint.extensions) != 1 or (endpoint.position == node.end and len(node.children) > 1):
            return False
        extension = endpoint.extensions[0]
        while not extension.alive and extension.extensions:
            extension = extension.extensions[0]
        endpoint.extensions[0] = extension  # shortens the chain for the next look
        return extension.alive

    def pin(self, endpoint: Endpoint) -> None:
        """The slot is still the live state of the sequence that left it: it is not for eviction."""
        endpoint.pinned = True
        self.state_pool.held += 1

    def unpin(self, endpoint: Endpoint) -> None:
        """Undoes `pin`."""
        endpoint.pinned = False
        self.state_pool.held -= 1

    def remove_endpoint(self, endpoint: Endpoint, keep_slot: bool = False) -> None:
        """`endpoint` is not resumable any more; its slot is freed, or becomes the caller's with `keep_slot`."""
        node = endpoint.node
        endpoint.alive = False
        node.endpoints.remove(endpoint)
        key = self._mark_key(endpoint)
        if key is not None:
            marks = node.parent.marks[key]
            marks.remove(endpoint)
            if not marks:
                del node.parent.marks[key]
        for order in self._endpoint_orders:
            order.drop(endpoint)
        if endpoint.slot != NO_SLOT:
            self.state_pool.tree -= 1
            if not keep_slot:
                self.state_pool.release(np.array([endpoint.slot], np.int32))
        for group in self.windows:
            for current, a, b in list(self._needed_spans(endpoint, group)):
                current.need[group.ordinal][a:b] -= 1
                self._review_window(current, group.ordinal, a, b)
        self.settle(node)

    def _previous(self, node: Node, position: int) -> int:
        """The length of the next endpoint above `position` on the path; 0: none."""
        for current in self.path_to(node):
            for endpoint in reversed(current.endpoints):
                if endpoint.position < position:
                    return endpoint.position
        return 0

    def _gain(self, node: Node, position: int) -> int:
        """Tokens that losing `position` costs."""
        return position - self._previous(node, position)

    # --- eviction ----------------------------------------------------------------------------------------------

    def _unrank(self, node: Node) -> None:
        """`node` is held, has a child, or is gone: no eviction from its tail."""
        if self.full is not None:
            order = self.group_pools[self.full].order
            order.discard(node)
            order.unneeded.pop((node, self.full), None)

    def settle(self, node: Node) -> None:
        """Unlinks `node` if it is bare, and ranks what is left as the tail of a leaf run, if nobody holds it."""
        while node.holders == 0 and not node.children:
            if node.parent is None:
                if self.roots.get(node.key) is node:
                    del self.roots[node.key]
                return
            if node.resident or node.endpoints:
                if self.full is not None:
                    self._rank_leaf(node)
                return
            if node.parent.children.get(node.key) is not node:
                return  # unlinked already
            self._unlink(node)
            node = node.parent

    def _rank_leaf(self, node: Node) -> None:
        order = self.group_pools[self.full].order
        if self._dead_pages(node):
            order.unneeded[(node, self.full)] = None
        order.put(node, node.priority, self._leaf_gain(node), node.level)

    def _dead_pages(self, node: Node) -> int:
        """Pages at the end of an unheld leaf that no snapshot can reach: of hybrids only."""
        if self.state_pool is None:
            return 0
        reach = node.endpoints[-1].position - node.start if node.endpoints else 0
        return self.num_pages(node) - -(-reach // self.page_size)

    def _leaf_gain(self, node: Node) -> int:
        return self._gain(node, node.endpoints[-1].position if node.endpoints else node.end)

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

    def _make_room(self, pool: PagePool, count: int) -> None:
        """Evicts until `count` pages are free: as many as are needed and no more."""
        order, before, spared = pool.order, pool.free, []
        while pool.free < count:
            if order.unneeded:
                (node, g), _ = order.unneeded.popitem(last=False)
                self._drop_unneeded(node, g, count - pool.free)
                continue
            if order.superseded:
                endpoint, _ = order.superseded.popitem(last=False)
                if self._superseded(endpoint) and self._yields(endpoint, pool):
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
        pool.evicted += pool.free - before
        for entry in spared:
            if entry[3].alive:
                order.put_back(entry)

    def _evict_endpoint(self, endpoint: Endpoint) -> None:
        self.snapshots_evicted += endpoint.slot != NO_SLOT
        self.remove_endpoint(endpoint)

    def _yields(self, endpoint: Endpoint, pool: PagePool) -> bool:
        """Whether losing `endpoint` brings `pool` closer to a free page."""
        if pool is self.state_pool:
            return not endpoint.pinned
        if endpoint.pinned:
            return False
        for group in self.windows:
            g = group.ordinal
            if self.group_pools[g] is pool:
                for node, a, b in self._needed_spans(endpoint, group):
                    if ((node.pages[g][a:b] >= 0) & (node.held[g][a:b] == 0)).any():
                        return True
        return False

    def _drop_unneeded(self, node: Node, g: int, short: int) -> None:
        if g == self.full:
            dead = self._dead_pages(node)
            drop = min(dead, short)
            if drop:
                self._cut(node, self.num_pages(node) - drop)
            return
        size = self.num_pages(node)
        ids = node.pages[g][:size]
        idle = np.flatnonzero((ids >= 0) & (node.held[g][:size] == 0) & (node.need[g][:size] == 0))
        if len(idle) > short:
            unneeded = self.group_pools[g].order.unneeded
            unneeded[(node, g)] = None
            unneeded.move_to_end((node, g), last=False)
        if len(idle):
            self._drop_window(node, g, idle[:short])

    def _cut_leaf(self, node: Node, short: int) -> None:
        """Takes up to `short` pages from the end of an unheld leaf, not past the endpoint above its last one."""
        keep = max(0, self.num_pages(node) - short)
        if node.endpoints:
            last = node.endpoints[-1].position
            above = self._previous(node, last) - node.start
            keep = max(keep, -(-max(above, 0) // self.page_size))
            keep = min(keep, self.num_pages(node) - 1)
        self._cut(node, keep)

    def _cut(self, node: Node, keep: int) -> None:
        """An unheld leaf keeps its first `keep` pages; endpoints that need the others go."""
        size, end = self.num_pages(node), node.start + keep * self.page_size
        node.holders += 1  # nothing below settles the node before all of it is consistent again
        while node.endpoints and node.endpoints[-1].position > end:
            self._evict_endpoint(node.endpoints[-1])
        for group, pool in zip(self.groups, self.group_pools, strict=True):
            ids = node.pages[group.ordinal][keep:size]
            if group.window is not None:
                ids = ids[ids >= 0]
            pool.release(ids)
            pool.tree -= len(ids)
            node.resident -= len(ids)
            node.pages[group.ordinal] = node.pages[group.ordinal][:keep].copy()
        node.size = min(node.size, keep * self.page_size)
        node.tokens = node.tokens[: node.size].copy()
        node.holders -= 1
        if keep == 0:
            node.resident = 0
        self.settle(node)

    def clear(self) -> None:
        """Frees everything. Nothing may be held."""
        for root in list(self.roots.values()):
            for node in list(self._nodes(root)):
                for g, pool in enumerate(self.group_pools):
                    ids = node.pages[g][: self.num_pages(node)] if node.size else np.empty(0, np.int32)
                    pool.release(ids[ids >= 0])
                    pool.tree -= int(np.count_nonzero(ids >= 0))
                for endpoint in node.endpoints:
                    endpoint.alive = False
                    if endpoint.slot != NO_SLOT:
                        self.state_pool.release(np.array([endpoint.slot], np.int32))
                        self.state_pool.tree -= 1
        self.roots.clear()
        for pool in self.pools:
            pool.order.clear()

    def _nodes(self, root: Node) -> Iterator[Node]:
        stack = [root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # --- integrity ---------------------------------------------------------------------------------------------

    def check(self, paths: Sequence[tuple[Node, Sequence[tuple[int, int, int]]]]) -> list[list[np.ndarray]]:
        """Verifies structure, keys, counters and queues against a recount.

        Args:
          paths: per sequence that holds something its deepest node (a tail it lent included) and the window page
            ranges it holds: (group ordinal, first, stop).

        Returns:
          Per pool the page ids that the tree owns.
        """
        holders: dict[Node, int] = {}
        held: dict[tuple[Node, int], np.ndarray] = {}
        for node, ranges in paths:
            for current in self.path_to(node):
                holders[current] = holders.get(current, 0) + 1
            for g, first, stop in ranges:
                for current, a, b in self._spans(node, first, stop):
                    counts = held.setdefault((current, g), np.zeros(self.num_pages(current), np.int32))
                    counts[a:b] += 1
        owned: list[list[np.ndarray]] = [[] for _ in self.pools]
        held_pages = [0] * len(self.pools)
        nodes = [node for root in self.roots.values() for node in self._nodes(root)]
        for node in nodes:
            self._check_node(node, holders.get(node, 0))
            need = self._recount_need(node)
            for g, pool in enumerate(self.group_pools):
                if not node.size:
                    continue
                size = self.num_pages(node)
                ids = node.pages[g][:size]
                owned[pool.ordinal].append(ids[ids >= 0])
                if self.groups[g].window is None:
                    _demand(len(ids) == size and (ids > 0).all(), f"node at {node.start}: holes in full attention")
                    held_pages[pool.ordinal] += size if node.holders else 0
                    continue
                counts = held.get((node, g), np.zeros(size, np.int32))
                _demand(np.array_equal(node.held[g][:size], counts), f"node at {node.start}: window holds differ")
                _demand(np.array_equal(node.need[g][:size], need[g]), f"node at {node.start}: window needs differ")
                held_pages[pool.ordinal] += int(np.count_nonzero((counts > 0) & (ids >= 0)))
                idle = (ids >= 0) & (counts == 0) & (need[g] == 0)
                _demand(
                    not idle.any() or (not self.min_snapshot and (node, g) in pool.order.unneeded),
                    f"node at {node.start}: window pages that nobody needs are neither freed nor queued",
                )
            for endpoint in node.endpoints:
                if self.state_pool is not None:
                    owned[self.state_pool.ordinal].append(np.array([endpoint.slot], np.int32))
                    held_pages[self.state_pool.ordinal] += endpoint.pinned
        for pool in self.pools:
            count = sum(map(len, owned[pool.ordinal]))
            _demand(count == pool.tree, f"pool {pool.name!r}: {count} pages in the tree, the counter says {pool.tree}")
            _demand(
                held_pages[pool.ordinal] == pool.held,
                f"pool {pool.name!r}: {held_pages[pool.ordinal]} held pages, the counter says {pool.held}",
            )
        _demand(all(node in set(nodes) for node in holders), "a sequence's path is not in the tree")
        return owned

    def _check_node(self, node: Node, holders: int) -> None:
        where = f"node at {node.start}"
        _demand(node.holders == holders, f"{where}: {holders} holders, the counter says {node.holders}")
        if node.parent is None:
            _demand(self.roots.get(node.key) is node, f"{where}: not the root of its scope")
            _demand(bool(node.children or node.holders), f"{where}: a bare root stays in the tree")
        else:
            parent = node.parent
            tail = node.size < self.page_size
            _demand(parent.children.get(node.key) is node, f"{where}: not its parent's child")
            _demand(node.key == node.tokens[: min(node.size, self.page_size)].tobytes(), f"{where}: wrong key")
            _demand(node.start == parent.end, f"{where}: its parent ends at {parent.end}")
            _demand(tail or node.size % self.page_size == 0, f"{where}: {node.size} tokens are not whole pages")
            _demand(not tail or not node.children, f"{where}: a tail with children")
            present = sum(int(np.count_nonzero(ids[: self.num_pages(node)] >= 0)) for ids in node.pages)
            _demand(present == node.resident, f"{where}: {present} pages, the counter says {node.resident}")
            bare = not (present or node.endpoints or node.children or node.holders)
            _demand(not bare, f"{where}: a bare node stays in the tree")
            if self._history_windows:
                complete = all(node.pages[g.ordinal][0] >= 0 for g in self._history_windows)
                _demand(complete == node.is_head == (node.key in parent.heads), f"{where}: heads differ")
            if self.full is not None:
                order = self.group_pools[self.full].order
                leaf = not node.holders and not node.children
                _demand(leaf == order.ranked(node), f"{where}: evictable {leaf}, ranked {order.ranked(node)}")
                if leaf and self._dead_pages(node):
                    _demand((node, self.full) in order.unneeded, f"{where}: dead pages are not queued")
        _demand(sorted(node.children) == list(node.order or ()), f"{where}: sorted keys differ from the children")
        positions = [endpoint.position for endpoint in node.endpoints]
        _demand(positions == sorted(set(positions)), f"{where}: endpoints at {positions}")
        for endpoint in node.endpoints:
            _demand(endpoint.alive and endpoint.node is node, f"{where}: endpoint {endpoint.position} is misplaced")
            _demand(node.start < endpoint.position <= node.end, f"{where}: endpoint {endpoint.position} outside it")
            key = self._mark_key(endpoint)
            _demand(key is None or endpoint in node.parent.marks.get(key, ()), f"{where}: endpoint without a mark")
            _demand((endpoint.slot != NO_SLOT) == (self.state_pool is not None), f"{where}: endpoint without a slot")
            ranked = all(order.ranked(endpoint) for order in self._endpoint_orders)
            _demand(ranked, f"{where}: endpoint {endpoint.position} is not ranked for eviction")
        for key, marks in node.marks.items():
            for endpoint in marks:
                _demand(endpoint.alive and endpoint.node.parent is node, f"{where}: a mark of a lost endpoint")
                _demand(self._mark_key(endpoint) == key, f"{where}: a mark under a wrong key")

    def _recount_need(self, node: Node) -> list[np.ndarray | None]:
        """Endpoints per window page of `node`, from the endpoints of its subtree."""
        size = self.num_pages(node)
        need = [None if g.window is None else np.zeros(size, np.int32) for g in self.groups]
        if not self.windows or node.parent is None:
            return need
        for lower in self._nodes(node):
            for endpoint in lower.endpoints:
                for group in self.windows:
                    for current, a, b in self._needed_spans(endpoint, group):
                        if current is node:
                            need[group.ordinal][a:b] += 1
        return need


def _endpoint_at(node: Node, position: int) -> Endpoint | None:
    return next((e for e in node.endpoints if e.position == position), None)


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
