"""Holdings: what one sequence has, in the tree and privately, and how it is published, lent and let go.

    page index      0 ........ published ........ ceil(capacity / page_size)
    owner           tree nodes (the path)  | this sequence's private pages
    tokens          committed in whole pages | `partial` committed | written, not committed | room

After `end` or `stop_committing` the partial page may be a tail of the tree, lent back until the next `reserve`.
The host half of jkv: NumPy only.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np

from jkv.config import Scope, WindowScratch, shown
from jkv.contents import Contents
from jkv.errors import CacheError, IntegrityError, SequenceStateError
from jkv.eviction import Eviction
from jkv.expiry import NEVER
from jkv.layout import HOST, Group, Layout
from jkv.ledger import Ledger
from jkv.pages import Claim, PagePool, on_device
from jkv.plan import ZERO, PlanBuilder
from jkv.radix import HELD, NO_SLOT, NO_TOKENS, Endpoint, Node, Root, node_of, pages_on, path_to, shared_tokens
from jkv.sizing import Usage
from jkv.stats import ALLOCATED, COPIED, PER_GROUP, SKIPPED, TAKEN, Work

NO_PAGE = 0  # a null page-table entry
STATE = -1  # the recurrent group, the layout's last


@dataclasses.dataclass
class Candidates:
    """State slots beside the pool's pages, for the states that verify steps leave (speculative decoding).

    Attributes:
      sets: int32[max_sequences, 2, max_drafts + 1], two sets per row. A candidate that becomes a live state swaps its
        slot for the old live one, so that the sets stay complete.
      shown: the same shape: for the device, the slots of the [previous, current] step.
    """

    sets: np.ndarray
    shown: np.ndarray

    @classmethod
    def of(cls, layout: Layout) -> Candidates | None:
        """Slots behind the pool's usable ones; None where the config asks for no drafts."""
        pool = layout.recurrent_pool
        if pool is None or not pool.scratch:
            return None
        slots = np.arange(pool.num_pages + 1, pool.num_rows, dtype=np.int32)
        sets = slots.reshape(layout.max_sequences, 2, -1)
        return cls(sets, np.zeros_like(sets))


@dataclasses.dataclass
class Host:
    """What all sequences of one manager share."""

    layout: Layout
    pools: list[PagePool]
    tree: Eviction
    model: str  # part of every key
    contents: Contents
    work: Work  # of closed sequences, those opened with retry=True apart
    retried: Work
    builder: PlanBuilder
    rows: list[Holdings | None]
    free_rows: list[int]
    tables: np.ndarray  # int32[attention groups, max_sequences, max_pages]: page ids per row, then zeros
    slots: np.ndarray  # int32[max_sequences]: live state slot per row
    candidates: Candidates | None  # with max_drafts and recurrent layers
    scrub: bool  # pages are zeros when a sequence gets them
    scratch: WindowScratch | None  # with window layers
    ledger: Ledger
    usage: Usage
    lock: threading.RLock  # held during each public call
    sequences: dict[Any, None]  # open Sequences, oldest first
    prompting: dict[Any, None]  # those that became active with a prompt to compute; done ones are dropped when met
    shelf: Any = None  # the store: jkv.tiers.store.Store
    memory: Any = None  # host memory: jkv.tiers.host.HostMemory
    arriving: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)  # (group, name) -> Arrival
    suspensions: int = 0  # so far
    over: bool = False  # the device's contents were lost; another Host takes this one's place
    broken: str = ""  # what cut a change short; only a reset is valid then
    unplanned: bool = False  # and it was not the dispatch of a plan: none of this can be relied on
    row_changes: int = 0  # how often a sequence got or gave up a row

    @property
    def active(self) -> int:
        """Sequences that have a row."""
        return len(self.rows) - len(self.free_rows)

    def give_up(self, error: BaseException, planned: bool = False) -> None:
        """`error` has come up in the middle of a change. If it is no refusal, all sequences are over.

        Args:
          planned: everything here is decided; what the device and host memory have done of the plan is unknown.
        """
        if self.broken or (isinstance(error, CacheError) and not isinstance(error, IntegrityError)):
            return
        self.broken = shown(error)  # from here on every call refuses, whatever may come up below
        self.unplanned = not planned
        self.over = True
        self.row_changes += 1
        for seq in list(self.sequences):
            seq._abandon()
        self.rows = [None] * len(self.rows)
        self.free_rows = list(range(len(self.rows)))

    def require_whole(self, operation: str) -> None:
        """Raises where a change was cut short, and nothing but `reset` is valid."""
        if self.broken:
            raise SequenceStateError(
                f"{operation}: an earlier call was cut short in the middle of its changes by {self.broken}; all "
                "sequences are closed, call reset first"
            )

    def allocate(self, pool: PagePool, count: int) -> np.ndarray:
        """`count` device pages of `pool` (int32), which there is room for, zeroed with `scrub`."""
        pages = self.tree.allocate(pool, count)
        for page in pages.tolist() if self.scrub else ():
            self.builder.write(pool.ordinal, page, ZERO)
        return pages

    def lost_pages(self) -> set[tuple[int, int]]:
        """(pool ordinal, id) of host pages that never arrived, and that nothing else is to be saved to."""
        if self.memory is None or not self.memory.lost:
            return set()
        return set(self.memory.lost) - set(self.builder.host_destinations())

    def root(self, scope: Scope) -> Root:
        """What the tree knows `scope` by."""
        return Root(self.model, scope, self.tree.epoch)


class Holdings:
    """The pages, states and endpoints of one sequence; `Sequence` says when what happens to them."""

    _hold = HELD  # how it holds its path
    _ttl: int | None = None  # steps for which what we leave is kept after its last use

    def __init__(self, host: Host, scope: Root, priority: int):
        self._host = host
        self._scope = scope
        self._priority = priority
        self._work = Work(len(host.layout.groups))
        self.row: int | None = None
        self._entered = False  # the lengths are in the ledger
        self._committed = 0
        self._length = 0
        self._capacity = 0
        # from the first resume on:
        self._node: Node | None = None  # the path's deepest node; a tail while one is lent
        self._published = 0  # whole pages on the path
        self._partial = NO_TOKENS  # committed tokens behind them
        self._tables = [NO_TOKENS] * len(host.layout.attention_groups)  # page ids per group; with a row: in Host.tables
        self._live_from = [0] * len(self._tables)  # per window group: pages from here on (and sinks) are live
        self._slot = NO_SLOT  # the live state
        self._lent: Endpoint | None = None  # the endpoint whose snapshot is our live state
        self._pending: dict[int, int] = {}  # endpoints to come: position -> snapshot slot (ours until then)
        self._last: Endpoint | None = None  # the endpoint that this path last left, or started from
        self._reserved = 0  # capacity at the last prepare
        self._in_flight = False
        self._stopped = False
        self._scratch = host.scratch

    def _table(self, group: int) -> np.ndarray:
        """This sequence's page ids in the attention group of that ordinal: int32[pages]."""
        return self._tables[group][: self._num_columns]

    @property
    def _num_columns(self) -> int:
        """Table columns that the capacity takes."""
        capacity = int(self._host.ledger.capacity[self.row]) if self._entered else self._capacity
        return self._num_pages(capacity)

    # --- where it starts ---------------------------------------------------------------------------------------------

    def _claims(self, node: Node | None, whole: int) -> list[Claim]:
        """What holding the path of `whole` pages to `node` takes, per pool."""
        tree = self._host.tree
        claims = [Claim() for _ in self._host.pools]
        for group in tree.groups if node is not None else ():
            if group.window is None:
                tree.claim_path(node, whole, claims[group.pool])
            else:
                for first, stop in self._live_ranges(group, 0, whole):
                    tree.claim_window(node, group.ordinal, first, stop, claims[group.pool])
        return claims

    def _has_room(self, node: Node | None, whole: int, partial: bool) -> bool:
        """Whether there is room for a live state and private copies, once the path to `node` is held."""
        tree, claims = self._host.tree, self._claims(node, whole)
        for group in tree.groups:
            claims[group.pool].fresh += partial
        if tree.state_pool is not None:
            claims[tree.state_pool.ordinal].fresh += 1
        return tree.can_claim(claims)

    def _hold_path(self, node: Node | None, whole: int) -> Node:
        """Holds the path of `whole` pages, which ends in `node` (None: at the root); returns its deepest node."""
        tree = self._host.tree
        lower = node = tree.root(self._scope) if node is None else node
        if node.first_page + tree.num_pages(node) > whole:
            node = tree.split(node, whole - node.first_page)
        tree.hold(node)
        tree.settle(lower)
        self._change_windows(node, 0, whole, HELD)
        return node

    def _fill_tables(self, node: Node, source: Node | None, whole: int) -> None:
        """Page tables of the matched path, and private copies of the partly matched page."""
        host, tree = self._host, self._host.tree
        copies = []
        for group in tree.groups:
            g = group.ordinal
            self._tables[g] = np.zeros(whole + (source is not None), np.int32)
            if source is not None:
                page = int(source.pages[g][whole - source.first_page])
                copies.append((g, group.pool, host.builder.read(group.pool, page) if page > 0 else None))
        # every source is read before anything is evicted: a source's own page may be what its copy gets
        self._onboard_path(node, whole)
        for g, pool, value in copies:
            page = self._tables[g][whole] = self._take_one(g, copied=value is not None)
            if value is not None:
                host.builder.write(pool, page, value)

    def _onboard_path(self, node: Node, whole: int) -> None:
        """What the held path of `whole` pages has in host memory moves to the device; our tables show all of it."""
        tree = self._host.tree
        tree.onboard_path(node)
        for group in tree.groups:
            g, table = group.ordinal, self._tables[group.ordinal]
            table[:whole] = NO_PAGE
            for first, stop in self._live_ranges(group, 0, whole):
                if group.window is not None:
                    tree.onboard_window(node, g, first, stop)
                pages = pages_on(node, g, first, stop)
                np.maximum(pages, NO_PAGE, out=table[first:stop])  # window scratch may have held some back

    def _copied_state(self, source: Endpoint | None) -> int:
        """A live slot of our own that starts as `source`'s snapshot, or as zeros."""
        pool, builder = self._host.tree.state_pool, self._host.builder
        value = builder.read(pool.ordinal, source.slot) if source is not None else ZERO
        slot = self._take_one(STATE, copied=source is not None)  # may be the snapshot's own, if nothing else can go
        builder.write(pool.ordinal, slot, value)
        return slot

    def _own_pages(self) -> list[int]:
        """Attention pages per pool that an allocation may not get because of this suspended sequence alone."""
        host = self._host
        own = [0] * len(host.pools)
        if self._node is None:
            return own
        for group in host.layout.attention_groups:
            g = group.ordinal
            private = self._table(g)[self._tree_pages :]
            own[group.pool] += int(np.count_nonzero(on_device(private)))
            if group.window is None:
                own[group.pool] += host.tree.solely_kept(self._node)
            else:
                own[group.pool] += sum(
                    host.tree.solely_kept_window(self._node, g, first, stop)
                    for first, stop in self._live_ranges(group, 0, self._tree_pages)
                )
        return own

    # --- taking pages ------------------------------------------------------------------------------------------------

    def _take(self, group: Group, count: int) -> np.ndarray:
        """`count` device pages of `group` (int32), which there is room for, become ours."""
        self._work.pages[PER_GROUP * group.ordinal + ALLOCATED] += count
        return self._host.allocate(self._host.pools[group.pool], count)

    def _take_one(self, g: int, copied: bool = False) -> int:
        """A device page of the group of that ordinal, or a state slot; `copied`: for a private copy."""
        tree = self._host.tree
        pages = self._work.pages
        pages[PER_GROUP * g + ALLOCATED] += 1
        pages[PER_GROUP * g + COPIED] += copied
        pool = tree.state_pool if g == STATE else tree.group_pools[g]
        page = tree.allocate_one(pool)
        if self._host.scrub and not copied and g != STATE:  # a state is copied, zeroed or written whole in any case
            self._host.builder.write(pool.ordinal, page, ZERO)
        return page

    # --- private pages -----------------------------------------------------------------------------------------------

    def _shrink(self, old: int, new: int) -> None:
        for group in self._host.layout.attention_groups:
            self._free_private(group, new, old)
            self._mark(group.ordinal, new, old)

    def _free_private(self, group: Group, start: int, stop: int) -> None:
        """Frees the private pages at table columns [start, stop); the entries become null."""
        if start < stop:
            entries = self._tables[group.ordinal][start:stop]
            places = entries[entries > 0] if group.window is not None else entries
            self._host.tree.release_pages(self._host.pools[group.pool], places)
            entries[:] = NO_PAGE

    # --- states ------------------------------------------------------------------------------------------------------

    def _keep_state(self, position: int, wanted: bool) -> None:
        """Makes `position` an endpoint to come; with recurrent layers plans a copy of the live state."""
        tree = self._host.tree
        if not wanted or self._stopped or position in self._pending or position == 0:
            return
        if self._host.scratch is not None and self._lacks_window(position):
            self._work.totals[SKIPPED] += tree.state_pool is not None
        elif tree.state_pool is None:
            self._pending[position] = NO_SLOT
        elif self._length != position or tree.state_pool.available == 0:
            self._work.totals[SKIPPED] += 1
        else:
            self._pending[position] = self._copied_live()

    def _copied_live(self) -> int:
        """A slot of our own that the next plan copies the live state to."""
        pool = self._host.tree.state_pool
        slot = self._take_one(STATE, copied=True)
        self._host.builder.copy(pool.ordinal, self._slot, slot)
        return slot

    def _can_hand_over(self, position: int) -> bool:
        """Whether the live state is the state at `position`."""
        return self._slot != NO_SLOT and not self._in_flight and self._length == position

    def _drop_pending(self, length: int) -> None:
        """Endpoints to come beyond `length` will not come."""
        if self._pending:
            for position in [p for p in self._pending if p > length]:
                self._free_slot(self._pending.pop(position))

    # --- publishing --------------------------------------------------------------------------------------------------

    def _publish(self, tokens: np.ndarray) -> None:
        """Hands the whole pages of `partial` + `tokens` to the tree, taking over pages that it already has."""
        tree, page_size = self._host.tree, self._host.layout.page_size
        joined = np.concatenate((self._partial, tokens)) if len(self._partial) else tokens
        whole = len(joined) // page_size
        self._partial = joined[whole * page_size :].copy()
        node, done = self._node, 0
        while done < whole:
            rest = joined[done * page_size : whole * page_size]
            child = node.children.get(rest[:page_size].tobytes())
            first = self._published + done
            if child is None:
                pages = [self._handed_over(group, first, first + whole - done) for group in tree.groups]
                if self._may_extend(node):
                    tree.extend(node, rest, pages, self._live_from)
                else:
                    node = tree.attach(node, rest, pages, self._live_from, self._priority, self._hold)
                break
            shared, lower = shared_tokens(child, rest, page_size) // page_size, child
            if shared < tree.num_pages(child):
                child = tree.split(child, shared)
            self._take_over(child, first, shared)
            tree.settle(lower)
            node, done = child, done + shared
        self._node, self._published = node, self._published + whole

    def _may_extend(self, node: Node) -> bool:
        """Whether nobody else has to do with the run of `node`, so that it may grow in place."""
        alone = node.holders == 1 and not node.keepers and self._hold == HELD
        return alone and node.size > 0 and not node.children and node.priority == self._priority

    def _handed_over(self, group: Group, first: int, stop: int) -> np.ndarray:
        """Our page ids as a node keeps them: -1 where there is none."""
        entries = self._tables[group.ordinal][first:stop]
        if group.window is None or np.minimum.reduce(entries) > 0:
            return entries
        return np.where(entries > 0, entries, np.int32(-1))

    def _take_over(self, node: Node, first: int, count: int) -> None:
        """The tree has pages [first, first + count) already, as all of `node`.

        Ours are freed, or fill its holes, or take the place of pages that lie colder.
        """
        host, tree = self._host, self._host.tree
        tree.join(node, self._hold)
        node.priority = max(node.priority, self._priority)
        for group in tree.groups:
            g, pool = group.ordinal, host.pools[group.pool]
            entries = self._tables[g][first : first + count]
            ours = entries.copy()
            if group.window is not None:
                tree.fill(node, g, ours)
                for start, stop in self._live_ranges(group, first, first + count):
                    tree.change_window(node, g, start, stop, self._hold)
            elif node.device < count and 0 < ours[node.device] < HOST:
                tree.warm_up(node, ours[node.device :])
            theirs = node.pages[g][:count]
            tree.release_pages(pool, ours[(ours != theirs) & (ours > 0)])
            if group.window is None:
                entries[:] = theirs
            else:
                shown = np.where(on_device(theirs), theirs, NO_PAGE)
                for start, stop in self._live_ranges(group, first, first + count):
                    entries[start - first : stop - first] = shown[start - first : stop - first]
            self._mark(g, first, first + count)

    def _publish_endpoints(self) -> None:
        """Endpoints whose page has become the tree's."""
        limit = self._published * self._host.layout.page_size
        for position in sorted(p for p in self._pending if p <= limit):
            self._leave_endpoint(node_of(self._node, position), position, self._pending.pop(position))

    def _leave_endpoint(self, node: Node, position: int, slot: int) -> Endpoint:
        """Hangs an endpoint on `node`, or frees `slot` if there is one at that position already."""
        tree = self._host.tree
        endpoint = node.endpoint_at(position)
        if endpoint is None:
            endpoint = tree.add_endpoint(node, position, slot, self._priority)
            self._work.totals[TAKEN] += slot != NO_SLOT
        else:
            tree.touch(endpoint, self._priority)
            self._free_slot(slot)
        if self._last is not None:
            tree.extended(self._last, endpoint)
        self._last = endpoint
        self._renew()
        return endpoint

    def _renew(self, source: Node | None = None) -> None:
        """What is on our path, the endpoint that we came from or left, and `source` are used now."""
        tree = self._host.tree
        if tree.expiry.on and self._node is not None:
            until = NEVER if self._ttl is None else tree.expiry.step + self._ttl
            for node in path_to(self._node):
                tree.renew(node, until)
            if source is not None:
                tree.renew(source, until)
            if self._last is not None and self._last.alive:
                tree.renew(self._last, until)

    # --- the last, partial page --------------------------------------------------------------------------------------

    def _stop(self, closing: bool = False) -> None:
        """Publishes the partial page, and the committed length as an endpoint.

        The live state becomes that endpoint's snapshot where it hangs on our own path: there it is held as long as we
        go on using its slot. Elsewhere (another sequence's tail, a page around it) it gets a copy.
        """
        tree, position = self._host.tree, self._committed
        self._drop_pending(position)
        complete = position > 0 and not (self._host.scratch is not None and self._lacks_window(position))
        hands_over = complete and position not in self._pending and self._can_hand_over(position)
        if complete and tree.state_pool is None:
            self._pending[position] = NO_SLOT
        if position > 0 and (tree.groups or hands_over or self._pending):
            if hands_over and not closing:
                home = self._foreign_home()  # looked up again below: making room for the copy may take it away
                self._keep_state(position, home is not None and home.endpoint_at(position) is None)
            home = self._publish_tail(closing) if len(self._partial) else self._node
            if home is not None:
                self._leave_last_endpoints(home, hands_over, closing)
            self._drop_pending(0)
        self._stopped = True

    def _leave_last_endpoints(self, home: Node, hands_over: bool, closing: bool) -> None:
        for position in sorted(self._pending):
            self._leave_endpoint(home, position, self._pending.pop(position))
        if home.endpoint_at(self._committed) is not None:
            self._leave_endpoint(home, self._committed, NO_SLOT)
        elif hands_over and (closing or home is self._node):
            self._hand_over_state(home, self._committed, closing)

    def _hand_over_state(self, home: Node, position: int, closing: bool) -> None:
        """The live state becomes the snapshot of a new endpoint at `position`."""
        endpoint = self._leave_endpoint(home, position, self._slot)
        if closing:
            self._slot = NO_SLOT
        else:
            self._lent = endpoint
            self._host.tree.pin(endpoint)
            # whoever writes on has to reserve first: that is where the private copies are made
            self._shrink(self._num_pages(self._capacity), self._num_pages(self._length))
            self._capacity = self._length

    def _foreign_home(self) -> Node | None:
        """What the tree has already of our partial page: another tail, or a page around it."""
        return self._host.tree.tail_home(self._node, self._partial.tobytes()) if len(self._partial) else None

    def _publish_tail(self, closing: bool) -> Node | None:
        """The node that holds our partial page from now on: a tail of our own, or what the tree has already.

        None: a tail that the tree has without window pages, and cannot get them.
        """
        tree = self._host.tree
        home = self._foreign_home()
        if home is None:
            pages = [self._handed_over(group, self._published, self._published + 1) for group in tree.groups]
            home = tree.attach(self._node, self._partial, pages, self._live_from, self._priority, self._hold)
            self._node = home
        elif not tree.has_head(home):  # a tail that has lost window pages: ours fill them
            if not closing and (self._in_flight or self._length > self._committed):
                return home if self._fill_with_copies(home) else None
            self._take_over(home, self._published, 1)
            self._node = home
        return home

    def _fill_with_copies(self, tail: Node) -> bool:
        """Copies of our window pages for `tail`, which lacks them: ours have more in them than was committed."""
        tree, builder = self._host.tree, self._host.builder
        if not self._pending:
            return False  # nobody could resume there
        lacking = [group for group in tree.history_windows if tail.pages[group.ordinal][0] < 0]
        counts = [0] * len(self._host.pools)
        for group in lacking:
            counts[group.pool] += 1
        tree.hold_child(tail)
        room = tree.can_allocate(counts)
        # all of them first: until the endpoint is there, nobody seems to need what has come into the tail
        pages = [self._take_one(group.ordinal, copied=True) for group in lacking] if room else []
        for group, page in zip(lacking, pages, strict=False):
            builder.copy(group.pool, int(self._tables[group.ordinal][self._published]), page)
            tree.fill(tail, group.ordinal, np.array([page], np.int32))
        tree.release_child(tail, self._priority)
        return room

    # --- what is lent to the tree ------------------------------------------------------------------------------------

    @property
    def _is_lending(self) -> bool:
        """Whether the tree owns our partial page or our live state."""
        return self._lends_tail or self._lent is not None

    @property
    def _lends_tail(self) -> bool:
        return self._node is not None and 0 < self._node.size < self._host.layout.page_size

    @property
    def _is_sole_user_of_tail(self) -> bool:
        return not self._lends_tail or self._node.holders == 1

    @property
    def _tree_pages(self) -> int:
        """Table columns below this belong to the tree."""
        return self._published + self._lends_tail

    def _lent_counts(self) -> list[int]:
        """Pages and slots per pool that private copies of what is lent take."""
        counts = [0] * len(self._host.pools)
        if self._lends_tail:
            for group in self._host.tree.groups:
                counts[group.pool] += self._tables[group.ordinal][self._published] > 0
        if self._lent is not None:
            counts[self._host.tree.state_pool.ordinal] += 1
        return counts

    def _copy_lent(self) -> None:
        """Private copies of the lent tail and live state; the originals stay the tree's."""
        host, tree, at = self._host, self._host.tree, self._published
        if self._lends_tail:
            for group in tree.groups:
                table = self._tables[group.ordinal]
                if table[at] > 0:
                    page = self._take_one(group.ordinal, copied=True)
                    host.builder.copy(group.pool, int(table[at]), page)
                    table[at] = page
                    self._mark(group.ordinal, at, at + 1)
            self._release_tail()
        if self._lent is not None:
            pool = tree.state_pool
            slot = self._take_one(STATE, copied=True)
            host.builder.copy(pool.ordinal, self._slot, slot)
            tree.unpin(self._lent)
            self._lent = None
            self._set_slot(slot)

    def _take_back_lent(self) -> None:
        """No room for copies: the lent tail and live state become private again and are not reusable."""
        tree = self._host.tree
        if self._lent is not None:
            self._take_back_state()
        if self._lends_tail:
            tail = self._node
            self._node = tail.parent
            tree.take_back(tail)

    def _take_back_state(self) -> None:
        """The lent live state becomes private again, and is not reusable."""
        lent, self._lent = self._lent, None
        self._host.tree.remove_endpoint(lent, keep_slot=True)

    def _release_tail(self) -> None:
        """The path ends at the tail's parent again."""
        tail, tree = self._node, self._host.tree
        self._change_windows(tail, self._published, self._published + 1, -HELD)
        self._node = tail.parent
        tree.release_child(tail, self._priority)

    # --- windows -----------------------------------------------------------------------------------------------------

    def _live_ranges(self, group: Group, first: int, stop: int) -> list[tuple[int, int]]:
        """The parts of pages [first, stop) that are live in a window group: sinks, and from `_live_from` on."""
        live = max(self._live_from[group.ordinal], first)
        ranges = [(live, stop)] if live < stop else []
        if group.sinks:
            sinks = min(group.sink_pages(self._host.layout.page_size), live, stop)
            if first < sinks:
                ranges.append((first, sinks))
        return ranges

    def _change_windows(self, node: Node, first: int, stop: int, amount: int) -> None:
        """Adds `amount` (HELD, KEPT, or what undoes them) to the uses of live window pages [first, stop) on a path."""
        tree = self._host.tree
        for group in tree.windows:
            for start, end in self._live_ranges(group, first, stop):
                tree.change_window(node, group.ordinal, start, end, amount)

    def _slide(self, length: int | None = None) -> None:
        """Pages that left a window by `length` leave the sequence.

        By default that is the committed length, so that a rewind finds its window.
        """
        tree = self._host.tree
        if not tree.windows:
            return
        if length is None:
            length = self._length if self._stopped else min((self._committed, *self._pending))
        for group in tree.windows:
            g = group.ordinal
            first = self._live_from[g]
            stop = group.live_from(length, self._host.layout.page_size)
            if stop <= first:
                continue
            owned = min(stop, self._tree_pages)
            if owned > first:
                tree.change_window(self._node, g, first, owned, -HELD)
                self._tables[g][first:owned] = NO_PAGE
            if stop > self._tree_pages:
                self._free_private(group, max(first, self._tree_pages), stop)
            self._live_from[g] = stop
            self._mark(g, first, stop)

    def _lacks_window(self, length: int) -> Group | None:
        """A window group in which a page is missing that a sequence of `length` tokens reads."""
        page_size, stop = self._host.layout.page_size, self._num_pages(length)
        for group in self._host.tree.windows:
            first, table = group.live_from(length, page_size), self._tables[group.ordinal]
            here = table[first:stop].all() and table[: min(stop, group.sink_pages(page_size))].all()
            if first < self._live_from[group.ordinal] or not here:
                return group
        return None

    # --- copies ------------------------------------------------------------------------------------------------------

    def _can_copy(self, n: int) -> bool:
        """Whether there is room for `n` private copies of the pages behind the tree's, and of the live state."""
        tree, stop = self._host.tree, self._num_pages(self._length)
        counts = [0] * len(self._host.pools)
        for group in tree.groups:
            entries = self._tables[group.ordinal][self._tree_pages : stop]
            counts[group.pool] += n * int(np.count_nonzero(entries))
        if tree.state_pool is not None:
            counts[tree.state_pool.ordinal] = n
        return tree.can_allocate(counts)

    def _become_copy_of(self, original: Holdings) -> None:
        """This shallow copy of `original` gets holds, pages and a state of its own."""
        host, tree = self._host, self._host.tree
        shared, stop = self._tree_pages, self._num_pages(self._length)
        self._capacity = self._length
        self._pending, self._lent = {}, None
        self._work = Work(len(host.layout.groups), original._work.retry)
        self._live_from = list(original._live_from)
        tree.hold(self._node)
        self._change_windows(self._node, 0, shared, HELD)
        self._tables = [table[:stop].copy() for table in original._tables]
        for group in tree.groups:
            entries = self._tables[group.ordinal][shared:]
            there = entries > 0
            pages = self._take(group, int(np.count_nonzero(there)))
            self._work.pages[PER_GROUP * group.ordinal + COPIED] += len(pages)
            for source, page in zip(entries[there].tolist(), pages.tolist(), strict=True):
                host.builder.copy(group.pool, source, page)
            entries[there] = pages
        if tree.state_pool is not None:
            self._slot = self._copied_live()

    # --- small helpers -----------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        tree = self._host.tree
        self._drop_pending(0)
        if self._lent is not None:
            tree.unpin(self._lent)
            self._lent = None
        else:
            self._free_slot(self._slot)
        self._slot = NO_SLOT
        for group in tree.groups:
            self._free_private(group, self._tree_pages, self._num_pages(self._capacity))
        self._change_windows(self._node, 0, self._tree_pages, -HELD)
        tree.release(self._node, self._priority)
        self._node = None

    def _num_pages(self, length: int) -> int:
        return -(-length // self._host.layout.page_size)

    def _mark(self, group: int, start: int, stop: int) -> None:
        """Our page-table columns [start, stop) have changed."""
        if self.row is not None:
            self._host.builder.mark(self.row, group, start, stop)

    def _mark_all(self) -> None:
        """All that our row shows has changed."""
        for group in self._host.layout.attention_groups:
            self._mark(group.ordinal, 0, self._num_columns)

    def _set_slot(self, slot: int) -> None:
        self._slot = slot
        if slot != NO_SLOT:
            self._host.slots[self.row] = slot
            self._host.builder.slots_changed = True

    def _free_slot(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._host.tree.free_one(self._host.tree.state_pool, slot)
