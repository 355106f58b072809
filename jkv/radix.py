"""The radix tree of token prefixes: runs of pages, split, and match.

A node is a *run* of whole pages, or a *tail* (one partial page, never extended, never a parent):

    tokens   [ t0 t1 t2 t3 | t4 t5 t6 t7 | ... ]     int32, `size` of them count
    pages    full      [ 7 | HOST+9 | ... ]          int32 places per attention group, -1: a hole
             window    [-1 | 4      | ... ]
    uses     window    [ 0 | u      | ... ]          int64: u = HELD x active sequences + KEPT x suspended ones
                                                     + NEEDED x endpoints whose window covers the page

Tiers are prefix-closed in full attention: along a path come first pages on the device, then pages in host memory.

Children are found by the exact bytes of their first page, so nothing can collide. Where siblings share only the
head of their first page, the longest common head is at a neighbour in the sorted keys.

An *endpoint* is a length that was left resumable. With recurrent layers it carries the state slot of its snapshot.
It hangs on the node that holds its last token.

What the tree holds, needs and gives up is `retention.py`'s business. NumPy only, like all of the host half.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from sortedcontainers import SortedList

from jkv.config import Scope
from jkv.expiry import NEVER
from jkv.layout import HOST, Group, Layout

_position = attrgetter("position")
NO_SLOT = 0
MAX_TIES = 8  # siblings looked at in each direction
NO_TOKENS = np.empty(0, np.int32)
HELD = 1
KEPT = 1 << 20
NEEDED = 1 << 40
HOLDS = KEPT - 1  # mask of the active sequences' holds in `uses`
STAYS = NEEDED - 1  # mask of all sequences' holds


class Root(NamedTuple):
    """What the tree knows a namespace of reuse by: prompts of different roots share nothing.

    Attributes:
      model: identity of the weights.
      scope: the caller's.
      epoch: which weights of this manager: those of one model that came back are not the ones it had.
    """

    model: str
    scope: Scope
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can reuse. All lengths in tokens.

    Attributes:
      tokens: the hit: valid in every group.
      attention_tokens: the hit if no recurrent state were needed.
      raw_tokens: the longest token match, no group and no cap applied.
      limited_by: the group that shortened the longest path most; None if only the caps did.
      tier_tokens: the hit's tokens by the tier they lie in.
      in_flight: tokens behind `raw_tokens` that another active sequence has in its prompt and is computing right now:
        to wait for it is to find them. Recurrent models find a state only where it ends a chunk.
      new_digest: gives `first_new_digest`.

    >>> Match(tokens=32, attention_tokens=48, raw_tokens=50, limited_by="recurrent").limited_by
    'recurrent'
    """

    tokens: int = 0
    attention_tokens: int = 0
    raw_tokens: int = 0
    limited_by: str | None = None
    tier_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    in_flight: int = 0
    new_digest: Callable[[], bytes | None] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def first_new_digest(self) -> bytes | None:
        """The key (see `CacheManager.block_digests`) of the first whole page that this request would commit.

        None: the prompt ends before that page does. Hashed when asked for.
        """
        return None if self.new_digest is None else self.new_digest()

    def __reduce__(self) -> tuple[Any, ...]:  # `new_digest` knows the tree
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return Match, (*values[:-1], functools.partial(_itself, self.first_new_digest))


def _itself(value: Any) -> Any:
    return value


class Endpoint:
    """A resumable length: `position` tokens, the last of them in `node`."""

    __slots__ = ("alive", "expires", "extensions", "node", "pinned", "position", "priority", "slot")

    def __init__(self, node: Node, position: int, slot: int, priority: int):
        self.node = node
        self.position = position
        self.slot = slot  # of its snapshot; NO_SLOT without recurrent layers
        self.priority = priority
        self.extensions: list[Endpoint] = []  # next endpoints of sequences that went on from here: two at most
        self.pinned = 0  # HELD, KEPT: its slot is still the live state of the active, suspended sequence that left it
        self.alive = True
        self.expires = NEVER


class Node:
    """A run of whole pages, or a tail. See the module's picture."""

    __slots__ = (
        "children", "cold_level", "device", "digests", "endpoints", "expires", "first_page", "heads", "holders",
        "is_head", "keepers", "key", "level", "marks", "order", "pages", "parent", "priority", "resident", "serial",
        "size", "stale_heads", "start", "stored", "tokens", "uses", "warm",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: Any, start: int, first_page: int, tokens: np.ndarray, serial: int):
        self.parent = parent
        self.key = key  # bytes of the first page; a root: its scope
        self.start = start  # in tokens
        self.first_page = first_page
        self.size = len(tokens)
        self.tokens = tokens
        self.serial = serial  # age
        self.pages: list[np.ndarray] = []
        self.uses: list[np.ndarray | None] = []
        self.resident = 0  # present pages over all groups
        self.endpoints: list[Endpoint] = []  # by position
        self.children: dict[bytes, Node] = {}
        self.order: SortedList | None = None  # keys of all children
        self.heads: SortedList | None = None  # keys of the children whose first page is there in every group
        self.stale_heads: dict[Node, None] = {}  # children for which that may have changed
        self.is_head = False
        self.marks: dict[bytes, list[Endpoint]] = {}  # endpoints inside a child's first page, by tokens up to there
        self.device = 0  # full-attention pages on the device: the first ones
        self.warm = 0  # children that have such pages
        self.digests: list[bytes] = []  # of its pages, from the first on, as far as a store has asked for them
        self.stored = 0  # up to here snapshots in the store need the pages
        # for eviction
        self.holders = 0  # active sequences whose path contains this node
        self.keepers = 0  # suspended ones
        self.priority = 0
        self.expires = NEVER  # the step after which it is the first to go
        self.level = 0  # of the full pool's eviction order at the last use
        self.cold_level = 0  # the same in host memory

    @property
    def end(self) -> int:
        return self.start + self.size

    def endpoints_upto(self, position: int) -> int:
        """How many of this node's endpoints are at `position` or above."""
        return bisect_right(self.endpoints, position, key=_position)

    def endpoint_at(self, position: int) -> Endpoint | None:
        """The endpoint of this node at `position`."""
        count = self.endpoints_upto(position)
        if count and self.endpoints[count - 1].position == position:
            return self.endpoints[count - 1]
        return None


@dataclasses.dataclass(slots=True)
class Hit:
    """A match and where it lies: what `Sequence.resume` needs to carry it out."""

    match: Match
    path: list[Node]  # root first; covers match.tokens
    endpoint: Endpoint | None  # the snapshot's, with recurrent layers


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common head of two keys."""
    if a[:4] != b[:4]:
        return 0
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if difference == 0:
        return size // 4
    return ((difference & -difference).bit_length() - 1) // 32


def shared_tokens(node: Node, tokens: np.ndarray, known: int) -> int:
    """Length of the common head of the node's run and `tokens`, of which the first `known` are known to agree."""
    span = min(node.size, len(tokens))
    if span > known:
        differs = node.tokens[known:span] != tokens[known:span]
        first = int(differs.argmax())
        if differs[first]:
            return known + first
    return span


def path_to(node: Node | None) -> Iterator[Node]:
    """`node` and its ancestors, deepest first."""
    while node is not None:
        yield node
        node = node.parent


def spans(node: Node, first: int, stop: int) -> list[tuple[Node, int, int]]:
    """Where pages [first, stop) of `node`'s path lie: (node, start, stop) with indices into the node, deepest first."""
    found = []
    while stop > first:
        at = node.first_page
        if first >= at:
            found.append((node, first - at, stop - at))
            break
        if stop > at:
            found.append((node, 0, stop - at))
            stop = at
        node = node.parent  # type: ignore[assignment]  # the first node of a path starts at page 0
    return found


def pages_on(node: Node, g: int, first: int, stop: int) -> np.ndarray:
    """Page ids of group `g` in [first, stop) along `node`'s path: int32[stop - first]."""
    parts = [current.pages[g][a:b] for current, a, b in reversed(spans(node, first, stop))]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_TOKENS


def node_of(node: Node, position: int) -> Node:
    """The node of `node`'s path that holds token position - 1."""
    while node.start >= position and node.parent is not None:
        node = node.parent
    return node


def grown(array: np.ndarray, size: int, extra: np.ndarray) -> np.ndarray:
    """`array[:size]` with `extra` behind it, in place where there is room (a quarter of slack is left)."""
    needed = size + len(extra)
    if needed > len(array):
        larger = np.empty(needed + needed // 4, array.dtype)
        larger[:size] = array[:size]
        array = larger
    array[size:needed] = extra
    return array


class RadixTree:
    """The structure: nodes by scope, and the longest reusable head of a prompt.

    Args:
      layout: the cache's geometry.
    """

    def __init__(self, layout: Layout):
        config = layout.config
        self.page_size = config.page_size
        self.partial_reuse = config.partial_reuse
        self.reuse_backoff = config.reuse_backoff
        self.groups = layout.attention_groups
        self.full = next((g.ordinal for g in self.groups if g.window is None), None)
        self.windows = [g for g in self.groups if g.window is not None]
        self.history_windows = [g for g in self.windows if g.window != 1 or g.sinks]  # others read no older page
        self.recurrent = layout.recurrent_pool is not None
        self.roots: dict[Hashable, Node] = {}
        self._serial = 0

    # --- structure ---------------------------------------------------------------------------------------------

    def root(self, scope: Hashable) -> Node:
        """The root of `scope`, made where it is missing."""
        node = self.roots.get(scope)
        if node is None:
            node = self.roots[scope] = self._make(None, scope, 0, 0, NO_TOKENS)
        return node

    def nodes(self, root: Node | None = None) -> Iterator[Node]:
        """All nodes, or those of one root, parents first."""
        stack = list(self.roots.values()) if root is None else [root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def num_pages(self, node: Node) -> int:
        """Pages of the node's run; a tail has one."""
        return -(-node.size // self.page_size)

    def _make(self, parent: Node | None, key: Any, start: int, first_page: int, tokens: np.ndarray) -> Node:
        self._serial += 1
        return Node(parent, key, start, first_page, tokens, self._serial)

    def _add_child(self, parent: Node, tokens: np.ndarray) -> Node:
        """A new, empty-handed child with a copy of `tokens`: whole pages, or fewer than one page (a tail)."""
        key = tokens[: self.page_size].tobytes()
        node = self._make(parent, key, parent.end, parent.first_page + self.num_pages(parent), tokens.copy())
        if parent.order is None:
            parent.order = SortedList()
            parent.heads = SortedList() if self.history_windows else parent.order
        parent.children[key] = node
        parent.order.add(key)
        self.review_head(node)
        return node

    def _remove_child(self, node: Node) -> None:
        parent = node.parent
        del parent.children[node.key]
        if parent.children:
            parent.order.remove(node.key)
            if node.is_head:
                parent.heads.remove(node.key)
        else:
            parent.order = parent.heads = None
        parent.stale_heads.pop(node, None)
        node.is_head = False

    def split(self, node: Node, pages: int) -> Node:
        """Cuts a run after `pages` pages. Returns the head, a new node; `node` stays the lower half.

        The lower half may have nothing left that keeps it: the caller holds the head, then settles `node`.
        """
        parent, size, total = node.parent, pages * self.page_size, self.num_pages(node)
        head = self._make(parent, node.key, node.start, node.first_page, node.tokens[:size].copy())
        head.serial = node.serial
        head.holders, head.keepers, head.priority = node.holders, node.keepers, node.priority
        head.level, head.cold_level, head.expires = node.level, node.cold_level, node.expires
        head.device = min(node.device, pages)
        node.device -= head.device
        head.warm = int(node.device > 0)
        head.digests, node.digests = node.digests[:pages], node.digests[pages:]
        head.stored = min(node.stored, node.start + size)
        for g, ids in enumerate(node.pages):
            head.pages.append(ids[:pages].copy())
            node.pages[g] = ids[pages:total].copy()
            uses = node.uses[g]
            if uses is None:
                head.uses.append(None)
                head.resident += pages
            else:
                head.uses.append(uses[:pages].copy())
                node.uses[g] = uses[pages:total].copy()
                head.resident += int(np.count_nonzero(head.pages[g] >= 0))
        node.resident -= head.resident

        parent.children[node.key] = head
        head.is_head, node.is_head = node.is_head, False
        node.parent, node.start, node.first_page = head, node.start + size, node.first_page + pages
        node.tokens, node.size = node.tokens[size : node.size].copy(), node.size - size
        node.key = node.tokens[: self.page_size].tobytes()

        cut = node.endpoints_upto(head.end)
        head.endpoints, node.endpoints = node.endpoints[:cut], node.endpoints[cut:]
        for endpoint in head.endpoints:
            endpoint.node = head
        head.children[node.key] = node
        head.order = SortedList([node.key])
        head.heads = SortedList() if self.history_windows else head.order
        parent.stale_heads.pop(node, None)
        self.review_head(node)
        self.review_head(head)
        for endpoint in node.endpoints:
            self._mark(endpoint)
        return head

    # Endpoints inside the first page of a child, found by the tokens up to there

    def _mark_key(self, endpoint: Endpoint) -> bytes | None:
        offset = endpoint.position - endpoint.node.start
        return endpoint.node.key[: 4 * offset] if offset < self.page_size else None

    def _mark(self, endpoint: Endpoint) -> None:
        key = self._mark_key(endpoint)
        if key is not None:
            endpoint.node.parent.marks.setdefault(key, []).append(endpoint)

    def _unmark(self, endpoint: Endpoint) -> None:
        key = self._mark_key(endpoint)
        if key is not None:
            marks = endpoint.node.parent.marks
            marks[key].remove(endpoint)
            if not marks[key]:
                del marks[key]

    # Children whose first page is there in every group that reads history: brought up to date when looked at

    def review_head(self, node: Node) -> None:
        """The first page of `node` may have come or gone in some group."""
        if self.history_windows and node.parent is not None:
            node.parent.stale_heads[node] = None

    def has_head(self, node: Node) -> bool:
        """Whether the first page of `node` is there in every group that reads history."""
        return all(
            node.pages[group.ordinal][0] >= 0
            for group in self.history_windows
            if group.window != 1 or node.start < group.sinks
        )

    def heads(self, parent: Node) -> SortedList | None:
        """Sorted keys of the children whose first page is there in every group that reads history."""
        if parent.stale_heads:
            for node in parent.stale_heads:
                if node.is_head != self.has_head(node):
                    node.is_head = not node.is_head
                    if node.is_head:
                        parent.heads.add(node.key)
                    else:
                        parent.heads.remove(node.key)
            parent.stale_heads.clear()
        return parent.heads

    def tail_home(self, node: Node, key: bytes) -> Node | None:
        """The child of `node` that holds the partial page of tokens `key` already: that tail, or a page around it."""
        child = node.children.get(key)
        if child is None and node.children:
            heads = self.heads(node)
            at = heads.bisect_left(key)
            if at < len(heads) and heads[at].startswith(key):
                child = node.children[heads[at]]
        return child

    # --- match -------------------------------------------------------------------------------------------------

    def match(self, scope: Hashable, tokens: np.ndarray, max_reuse: int, known: int = 0) -> Hit:
        """The longest reusable head of `tokens` (int32[n]), at most `max_reuse`. Changes nothing.

        `known`: as many of the tokens a store has, which counts for `raw_tokens` and what they allow.

        The hit is the largest n for which one path agrees with the first n tokens and has, at n, what every group
        needs: a window the pages overlapping [n+1-W, n) and the sinks, recurrent layers a snapshot at exactly n.
        Ties go to the path that is walked anyway, then to the oldest sibling.
        """
        root = self.roots.get(scope)
        if root is None or not len(tokens):
            return Hit(Match(raw_tokens=known), [root] if root else [], None)
        path, covered = self.walk(root, tokens)
        longest = path  # the path of the longest token match
        raw = covered
        if covered == path[-1].end:
            child, shared = self._best_head(path[-1].order, path[-1], tokens)
            if child is not None:
                longest, raw = [*path, child], covered + shared
        raw = max(raw, known)
        cap = min(raw - self.reuse_backoff, max_reuse)
        if cap <= 0:
            return Hit(Match(raw_tokens=raw), [root], None)
        upper = cap if self.partial_reuse else cap - cap % self.page_size
        hit, hit_path, endpoint = self._best(path, covered, tokens, cap, self.recurrent)
        attention, limited_by = hit, None
        if hit < upper:
            if self.recurrent:
                attention = self._best(path, covered, tokens, cap, False)[0]
            limited_by = self._limit(longest, upper)
        match = Match(hit, attention, raw, limited_by, self._tier_tokens(hit_path, hit, endpoint))
        return Hit(match, hit_path if hit else [root], endpoint)

    def _tier_tokens(self, path: list[Node], hit: int, endpoint: Endpoint | None) -> dict[str, int]:
        """The tier of each of the first `hit` tokens, counted: that of its full-attention page.

        Without full attention the snapshot's for all, or that of the last page.
        """
        if self.full is not None:
            pages = sum(node.device for node in path if node.start < hit)
            warm = min(hit, pages * self.page_size)
        elif endpoint is not None:
            warm = hit if endpoint.slot < HOST else 0
        else:
            last = self._last_page(path, 0, 0, -(-hit // self.page_size), present=True)
            warm = hit if last < 0 or pages_on(path[-1], 0, last, last + 1)[0] < HOST else 0
        return {tier: n for tier, n in (("device", warm), ("host", hit - warm)) if n}

    def walk(self, root: Node, tokens: np.ndarray) -> tuple[list[Node], int]:
        """Nodes along `tokens`, and the tokens they share; the last node may be shared only in part."""
        page_size, total = self.page_size, len(tokens)
        node, covered, path = root, 0, [root]
        while node.children and total - covered >= page_size:
            child = node.children.get(tokens[covered : covered + page_size].tobytes())
            if child is None:
                break
            path.append(child)
            shared = shared_tokens(child, tokens[covered:], page_size)
            covered += shared
            if shared < child.size:
                break
            node = child
        return path, covered

    def _best_head(self, keys: SortedList | None, node: Node, tokens: np.ndarray) -> tuple[Node | None, int]:
        """The child in `keys` that shares most tokens, but not the whole page, with `tokens` at the node's end.

        Among children that share equally many it is the oldest, of those within MAX_TIES of the nearest.
        """
        query = tokens[node.end : node.end + self.page_size].tobytes()
        if not keys or not query:
            return None, 0
        at = keys.bisect_left(query)
        exact = at < len(keys) and keys[at] == query and len(query) == 4 * self.page_size
        best: Node | None = None
        most = 0
        for places in (range(at - 1, max(-1, at - 1 - MAX_TIES), -1), range(at + exact, min(len(keys), at + MAX_TIES))):
            for i in places:  # outwards: what is shared only shrinks
                key = keys[i]
                shared = common_tokens(key, query)
                if shared < max(most, 1):
                    break
                child = node.children[key]
                if shared > most or child.serial < best.serial:
                    best, most = child, shared
        return best, most

    def _best(
        self, path: list[Node], covered: int, tokens: np.ndarray, cap: int, with_state: bool
    ) -> tuple[int, list[Node], Endpoint | None]:
        """The largest usable length at most `cap` on `path`, or in a page that leaves it at a node's end."""
        page_size = self.page_size
        upper = cap if self.partial_reuse else cap - cap % page_size
        # Without partial_reuse, only the prompt's very end may lie inside a page: where an endpoint was left there.
        exact = cap if not self.partial_reuse and cap == len(tokens) and cap % page_size else 0
        if exact and exact <= covered:
            last = path[-1].endpoint_at(exact)
            if last is not None and self._fit(path, exact) == exact:
                return exact, path, last if with_state else None
        limit = min(covered, upper)
        if not self.partial_reuse:  # a store may know more than the path shares, which may end inside a page
            limit -= limit % page_size
        best, endpoint = self._fit_state(path, limit) if with_state else (self._fit(path, limit), None)
        best_path = path
        for depth in range(len(path) - 1, -1, -1):
            node = path[depth]
            if node.end > covered:
                continue
            if node.end + page_size <= best or best == (exact or upper):
                break
            found = None
            if exact or (with_state and self.partial_reuse):
                found = self._best_mark(path[: depth + 1], tokens, upper, exact, best)
            elif self.partial_reuse and node.end < upper:
                child, shared = self._best_head(self.heads(node), node, tokens)
                if child is not None:
                    side = [*path[: depth + 1], child]
                    found = (self._fit(side, min(node.end + shared, upper)), side, None)
            if found is not None and found[0] > best:
                best, best_path, endpoint = found
        return best, best_path, endpoint if with_state else None

    def _best_mark(
        self, path: list[Node], tokens: np.ndarray, upper: int, exact: int, least: int
    ) -> tuple[int, list[Node], Endpoint | None] | None:
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
                hole = self._last_page(path, group.ordinal, first, stop, present=False)
                if hole >= 0:  # the history ends with a page that is there: in one step past all holes
                    hole = self._last_page(path, group.ordinal, 0, hole, present=True) + 1
                elif sinks:
                    hole = self._last_page(path, group.ordinal, 0, sinks, present=False)
                if hole >= 0:
                    length, shortened = hole * self.page_size, True
        return length

    def _fit_state(self, path: list[Node], length: int) -> tuple[int, Endpoint | None]:
        """The deepest endpoint on `path` at most `length` whose window pages are all there."""
        for node in reversed(path):
            for endpoint in reversed(node.endpoints[: node.endpoints_upto(length)]):
                position = endpoint.position
                if position > length or (not self.partial_reuse and position % self.page_size):
                    continue
                length = self._fit(path, position)
                if length == position:
                    return position, endpoint
        return 0, None

    def _last_page(self, path: list[Node], g: int, first: int, stop: int, present: bool) -> int:
        """The last page in [first, stop) that is there (or, not `present`, missing) on `path`; -1: none."""
        for node in reversed(path):
            start = node.first_page
            if stop > start and node.size:
                ids = node.pages[g][max(first - start, 0) : stop - start]
                if present or (len(ids) and np.minimum.reduce(ids) < 0):
                    found = np.flatnonzero((ids >= 0) == present)
                    if len(found):
                        return start + max(first - start, 0) + int(found[-1])
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
        if self.recurrent:
            deepest = 0
            for node in reversed(path):
                if count := node.endpoints_upto(upper):
                    deepest = node.endpoints[count - 1].position
                    break
            if deepest < least:
                return "recurrent"
        return name
