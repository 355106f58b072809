"""Plan: what passes from the host half to the device half, and its builder.

The builder is told of the host's decisions one at a time ("copy page 7 to 3", "zero slot 2"), and turns them into
one simultaneous assignment. Each read is traced back to what its source held when the read was decided, and the
last write to a place wins:

    decided, in order      7 -> 3      9 -> 7      3 -> 5
    assignment             3 := [7]    7 := [9]    5 := [7]      ([x]: what x holds before the plan)
    carried out            7 -> 3      7 -> 5      9 -> 7        (readers of a place before its writer)

Places are on the device or in host memory (`HOST` + id). Since every read sees what its source held before the plan,
what crosses between the two needs no order: sources are read first, both here and there, then all is written.

    assignment             device := device, ZERO    device := host    host := device, ZERO    host := host
    in the plan            copies                    loads             saves                   moves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jkv.errors import IntegrityError
from jkv.layout import HOST, INT32_MAX, Layout

ZERO = -1  # as a source: zeros
UNUSED = INT32_MAX  # as a destination: dropped
CHUNK = 8  # copies that the device gathers together before it scatters them
ENTRIES = 1024  # of one dispatch
ENTRY_CHUNK = 256  # entries that the device sets together
NO_ENTRIES = np.zeros((3, ENTRIES), np.int32), np.zeros((), np.int32)  # never written
NO_CANDIDATES = np.zeros((0, 2, 0), np.int32)
Pages = Mapping[int, np.ndarray]  # {pool ordinal: int32[2, n]}: [0] sources, [1] destinations
NO_PAGES: Pages = MappingProxyType({})
NOTHING = ((), (), NO_PAGES, NO_PAGES, NO_PAGES, ())
GIVEN = 2 * HOST  # as a source: the bytes number source - GIVEN of those that the builder was given


class Write(NamedTuple):
    """A value for the store: what `place` of `pool` holds before the plan, under `key`.

    Attributes:
      pool: ordinal.
      place: a device page, HOST + a host page, or ZERO.
      key: "GROUP/NAME", see `jkv.tiers.store`.
    """

    pool: int
    place: int
    key: str


class Given(NamedTuple):
    """What `place` of `pool` shall hold: a page's bytes, per layer and buffer."""

    pool: int
    place: int
    parts: Sequence[memoryview]


class Plan(NamedTuple):
    """Device work of one `prepare`. NumPy arrays that are never written again.

    Attributes:
      entries: int32[3, ENTRIES] each: attention group ordinal, row * max_pages + column, page id.
      num_entries: int32[] each: how many of them count; what is behind them is garbage.
      tables: whole page tables instead, where the entries are too many: {group: int32[max_sequences, max_pages]}.
      slots: int32[max_sequences]: all of state_slots["recurrent"]; None: unchanged.
      candidates: int32[max_sequences, 2, max_drafts + 1]: all of state_slots["candidates"]; None: unchanged.
      copies: int32[num_pools, 2, K] each: [p, 0] sources, [p, 1] destinations, in chunks of 8; source -1: zeros.
      num_copies: int32[num_pools] each.
      saves: {pool ordinal: int32[2, n]}: [0] device pages, ZERO: zeros, to [1] host pages; no pool without any.
      loads: the same, [0] host pages to [1] device pages.
      moves: the same, [0] host pages to [1] host pages. Host pages are ids here, without HOST.
      writes: values for the store.
      given: pages and states that came from the store.
    """

    entries: tuple[np.ndarray, ...]
    num_entries: tuple[np.ndarray, ...]
    tables: dict[str, np.ndarray] | None
    slots: np.ndarray | None
    candidates: np.ndarray | None
    copies: tuple[np.ndarray, ...]
    num_copies: tuple[np.ndarray, ...]
    saves: Pages = NO_PAGES
    loads: Pages = NO_PAGES
    moves: Pages = NO_PAGES
    writes: tuple[Write, ...] = ()
    given: tuple[Given, ...] = ()


def schedule(assignment: dict[int, int]) -> list[tuple[int, int]]:
    """Orders a simultaneous assignment {destination: source} so that it can be carried out chunk by chunk.

    A place is read by all its readers before it is written. What is left after that is cycles: one member's old
    contents wait in the null page, whose contents nobody relies on, and the cycle opens. The null page is written
    in an earlier chunk than it is read in, since a chunk reads before it writes.

    Returns:
      (source, destination) pairs; (0, UNUSED) pairs are padding up to a chunk's end.
    """
    if len(assignment) == 1:
        return [(source, destination) for destination, source in assignment.items()]
    readers: dict[int, int] = {}
    for source in assignment.values():
        readers[source] = readers.get(source, 0) + 1
    ready = [destination for destination in assignment if not readers.get(destination)]
    waiting = dict(assignment)
    moves: list[tuple[int, int]] = []

    def carry_out(destination: int) -> None:
        """Emits the write of `destination`, then of every place that thereby loses its last reader."""
        while destination in waiting:
            source = waiting.pop(destination)
            moves.append((source, destination))
            if source not in readers:
                return
            readers[source] -= 1
            if readers[source]:
                return
            destination = source

    for destination in ready:
        carry_out(destination)
    while waiting:
        parked, source = next(iter(waiting.items()))
        last = next(d for d, s in waiting.items() if s == parked)  # the one reader of `parked`
        moves.append((parked, 0))
        moves.extend([(0, UNUSED)] * (-len(moves) % CHUNK))
        waiting[last] = 0
        readers[parked] = 0
        carry_out(parked)
        moves.extend([(0, UNUSED)] * (-len(moves) % CHUNK))
    return moves


class PlanBuilder:
    """Collects decisions until `build` turns them into a Plan.

    Args:
      layout: the cache's geometry.
      tables: int32[groups, max_sequences, max_pages], page ids; read at `build`, so the last word on an entry wins.
      slots: int32[max_sequences], the live slots per row; read at `build`.
      candidates: int32[max_sequences, 2, max_drafts + 1], the candidate slots to show; read at `build`.
      host_pages: pages of host memory per pool, for the range check; (): no host memory. May be set anew.

    >>> from jkv.config import AttentionLayer, CacheConfig, DeviceTier, kv_buffers
    >>> from jkv.layout import make_layout
    >>> config = CacheConfig({"a": AttentionLayer(kv_buffers(1, 4))}, 2, 64, tiers=(DeviceTier(pages=8),))
    >>> tables = np.zeros((1, 2, 4), np.int32)
    >>> builder = PlanBuilder(make_layout(config), tables, np.zeros(2, np.int32))
    >>> tables[0, 1, 0] = 5
    >>> builder.mark(row=1, group=0, start=0, stop=1)
    >>> builder.build().entries[0][:, 0].tolist()
    [0, 4, 5]
    """

    def __init__(
        self,
        layout: Layout,
        tables: np.ndarray,
        slots: np.ndarray,
        candidates: np.ndarray = NO_CANDIDATES,
        host_pages: Sequence[int] = (),
    ):
        self._layout = layout
        self._tables = tables
        self._slots = slots
        self._candidates = candidates
        self._groups = tuple(group.name for group in layout.attention_groups)
        self._sizes = [pool.num_rows for pool in layout.pools]
        self._smallest_pool = min((self._sizes[group.pool] for group in layout.attention_groups), default=0)
        width = -(-max(64, 2 * layout.max_sequences) // CHUNK) * CHUNK
        self._no_copies = np.zeros((len(layout.pools), 2, width), np.int32)
        self._no_copies[:, 1] = UNUSED
        # putting whole tables costs as much as one dispatch for every 64 * ENTRIES that they have
        self._most_entries = max(ENTRIES, len(self._groups) * layout.max_sequences * layout.max_pages // 64)
        self.host_pages = tuple(host_pages)
        self._assignments: list[dict[int, int]] = [{} for _ in layout.pools]
        self._writes: list[Write] = []
        self._parts: list[Sequence[memoryview]] = []
        self._columns = np.arange(layout.max_pages)
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}  # (row, group) -> table columns [start, stop)
        self._singles: list[tuple[int, np.ndarray, np.ndarray]] = []  # (group, rows, a table column of each)
        self.slots_changed = False
        self.candidates_changed = False

    @property
    def empty(self) -> bool:
        """Whether `build` would have nothing to say."""
        return not (
            self._spans
            or self._singles
            or self.slots_changed
            or self.candidates_changed
            or any(self._assignments)
            or self._writes
        )

    @property
    def num_copies(self) -> int:
        """Pages and states that the plan will copy, move between tiers or zero."""
        return sum(len(assignment) for assignment in self._assignments)

    def read(self, pool: int, source: int) -> int:
        """What `source` holds at this point of the decisions, for a later `write`."""
        return self._assignments[pool].get(source, source)

    def write(self, pool: int, destination: int, value: int) -> None:
        """`destination` shall hold `value`: what `read` returned, or ZERO."""
        if value == destination:
            self._assignments[pool].pop(destination, None)
        else:
            self._assignments[pool][destination] = value

    def copy(self, pool: int, source: int, destination: int) -> None:
        """`destination` shall hold what `source` holds now."""
        self.write(pool, destination, self.read(pool, source))

    def store(self, pool: int, place: int, key: str) -> None:
        """What `place` holds now shall go to the store under `key`, "GROUP/NAME"; not what comes from there."""
        value = self.read(pool, place)
        if value < GIVEN:
            self._writes.append(Write(pool, value, key))

    def put(self, pool: int, place: int, parts: Sequence[memoryview]) -> None:
        """`place` shall hold these bytes, which come from the store."""
        self._parts.append(parts)
        self.write(pool, place, GIVEN + len(self._parts) - 1)

    def forget(self, pool: int, place: int) -> None:
        """Nobody will read `place` any more: what it was to hold need not be written."""
        self._assignments[pool].pop(place, None)

    def host_destinations(self) -> list[tuple[int, int]]:
        """The host pages that the next plan writes: (pool, id)."""
        return [(pool, p - HOST) for pool, pending in enumerate(self._assignments) for p in pending if p >= HOST]

    def touches(self, pool: int, place: int) -> bool:
        """Whether the next plan reads or writes `place`."""
        assignment = self._assignments[pool]
        if place in assignment or place in assignment.values():
            return True
        return any(write.pool == pool and write.place == place for write in self._writes)

    def mark(self, row: int, group: int, start: int, stop: int) -> None:
        """Table columns [start, stop) of `row` in the attention group of that ordinal have changed."""
        if start >= stop:
            return
        key = (row, group)
        span = self._spans.get(key)
        if span is not None:
            start, stop = min(start, span[0]), max(stop, span[1])
        self._spans[key] = (start, stop)

    def mark_each(self, group: int, rows: np.ndarray, columns: np.ndarray) -> None:
        """Table column columns[i] of rows[i] in the attention group of that ordinal has changed: int[n] each."""
        self._singles.append((group, rows, columns))

    def blank(self) -> Plan:
        """A plan with one of each array that goes into a jitted call, where nothing counts: for their shapes."""
        entries, num_entries = NO_ENTRIES
        num_copies = np.zeros(len(self._no_copies), np.int32)
        return Plan((entries,), (num_entries,), None, None, None, (self._no_copies.copy(),), (num_copies,))

    def snapshot(self) -> tuple:
        """A comparable picture of what is pending (tests: a refused call leaves it as it was)."""
        return (
            tuple(tuple(assignment.items()) for assignment in self._assignments),
            tuple(self._writes),
            tuple(self._spans.items()),
            tuple((group, *rows.tolist(), *columns.tolist()) for group, rows, columns in self._singles),
            self.slots_changed,
            self.candidates_changed,
        )

    def build(self) -> Plan:
        """The plan of everything pending. Nothing is forgotten until `clear`, so a failed dispatch loses nothing."""
        entries, num_entries, tables = self._build_entries()
        copies, num_copies, saves, loads, moves, given = self._build_pages() if any(self._assignments) else NOTHING
        slots = self._checked_slots(self._slots) if self.slots_changed else None
        candidates = self._checked_slots(self._candidates) if self.candidates_changed else None
        writes = self._checked_writes() if self._writes else ()
        return Plan(
            entries, num_entries, tables, slots, candidates, copies, num_copies, saves, loads, moves, writes, given
        )

    def clear(self) -> None:
        """The built plan was dispatched."""
        for assignment in self._assignments:
            assignment.clear()
        self._writes.clear()
        self._parts.clear()
        self._spans.clear()
        self._singles.clear()
        self.slots_changed = self.candidates_changed = False

    def _build_entries(self) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], dict[str, np.ndarray] | None]:
        """The plan's entries, num_entries and tables."""
        count = sum(stop - start for start, stop in self._spans.values())
        count += sum(len(rows) for _, rows, _ in self._singles)
        if count == 0:
            return (), (), None
        if count > self._most_entries:
            return (), (), self._whole_tables()
        max_pages = self._layout.max_pages
        entries = np.empty((3, max(count, ENTRIES)), np.int32)
        single: list[tuple[int, int, int]] = []
        wide: list[tuple[int, int, int, int]] = []
        for (row, group), (start, stop) in self._spans.items():
            if stop - start == 1:
                single.append((group, row, start))
            else:
                wide.append((group, row, start, stop))
        at = len(single)
        if single:  # decode steps change one entry per row: one array for all of them
            groups, rows, columns = np.array(single).T
            entries[0, :at] = groups
            np.add(rows * max_pages, columns, out=entries[1, :at], casting="same_kind")
            entries[2, :at] = self._tables[groups, rows, columns]
        for group, row, start, stop in wide:
            to = at + stop - start
            entries[0, at:to] = group
            np.add(self._columns[start:stop], row * max_pages, out=entries[1, at:to], casting="same_kind")
            entries[2, at:to] = self._tables[group, row, start:stop]
            at = to
        for group, rows, columns in self._singles:
            to = at + len(rows)
            entries[0, at:to] = group
            np.add(rows * max_pages, columns, out=entries[1, at:to], casting="same_kind")
            entries[2, at:to] = self._tables[group, rows, columns]
            at = to
        self._check_entries(entries[:, :count])
        if count <= ENTRIES:
            return (entries,), (np.array(count, np.int32),), None
        arrays, counts = [], []
        for at in range(0, count, ENTRIES):
            part = entries[:, at : at + ENTRIES]
            counts.append(np.array(part.shape[1], np.int32))
            arrays.append(np.zeros((3, ENTRIES), np.int32))
            arrays[-1][:, : part.shape[1]] = part
        return tuple(arrays), tuple(counts), None

    def _check_entries(self, entries: np.ndarray) -> None:
        """Gather clamps and scatter drops on the device: a wrong index would be silent there."""
        if np.maximum.reduce(entries[2].view(np.uint32)) < self._smallest_pool:
            return
        for group in self._layout.attention_groups:
            size = self._sizes[group.pool]
            pages = entries[2][entries[0] == group.ordinal]
            if len(pages) and not 0 <= pages.min() <= pages.max() < size:
                raise IntegrityError(f"group {group.name!r}: page ids {pages.min()}..{pages.max()} outside [0, {size})")

    def _checked_slots(self, slots: np.ndarray) -> np.ndarray:
        recurrent = self._layout.recurrent_pool
        size = INT32_MAX if recurrent is None else self._sizes[recurrent.ordinal]
        if np.maximum.reduce(slots.ravel().view(np.uint32)) >= size:
            raise IntegrityError(f"state slots {slots.tolist()} outside [0, {size})")
        return slots.copy()

    def _whole_tables(self) -> dict[str, np.ndarray]:
        tables = {}
        for group, table in zip(self._layout.attention_groups, self._tables, strict=True):
            if not 0 <= table.min() <= table.max() < self._sizes[group.pool]:
                raise IntegrityError(f"group {group.name!r}: page ids outside [0, {self._sizes[group.pool]})")
            tables[group.name] = table.copy()
        return tables

    def _build_pages(
        self,
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], Pages, Pages, Pages, tuple[Given, ...]]:
        """The plan's copies, num_copies, saves, loads, moves, and what it was given."""
        on_device, saves, loads, moves, given = self._by_tier()
        copies, num_copies = self._build_copies(on_device) if any(on_device) else ((), ())
        return copies, num_copies, saves, loads, moves, given

    def _by_tier(self) -> tuple[list[dict[int, int]], Pages, Pages, Pages, tuple[Given, ...]]:
        """The assignments that stay on the device, per pool, then saves, loads, moves, and what was given."""
        if not any(max(d) >= HOST or max(d.values()) >= HOST for d in self._assignments if d):
            return self._assignments, NO_PAGES, NO_PAGES, NO_PAGES, ()
        on_device: list[dict[int, int]] = [{} for _ in self._assignments]
        crossing: dict[tuple[bool, bool], dict[int, list[tuple[int, int]]]] = {}  # (source, destination) in host memory
        given: list[Given] = []
        for pool, assignment in enumerate(self._assignments):
            for destination, source in assignment.items():
                if source >= GIVEN:
                    self._check_places(pool, np.array([destination], np.int64), 0)
                    given.append(Given(pool, destination, self._parts[source - GIVEN]))
                elif source < HOST and destination < HOST:
                    on_device[pool][destination] = source
                else:
                    kind = crossing.setdefault((source >= HOST, destination >= HOST), {})
                    kind.setdefault(pool, []).append((source, destination))
        saves, loads, moves = (
            {pool: self._page_ids(pool, pairs) for pool, pairs in crossing.get(kind, {}).items()}
            for kind in ((False, True), (True, False), (True, True))
        )
        return on_device, saves, loads, moves, tuple(given)

    def _page_ids(self, pool: int, pairs: list[tuple[int, int]]) -> np.ndarray:
        """int32[2, n]: (source, destination) places as ids in their tiers."""
        places = np.array(pairs, np.int64).T
        self._check_places(pool, places[0], ZERO)
        self._check_places(pool, places[1], 0)
        return np.where(places >= HOST, places - HOST, places).astype(np.int32)

    def _checked_writes(self) -> tuple[Write, ...]:
        for write in self._writes:
            self._check_places(write.pool, np.array([write.place], np.int64), ZERO)
        return tuple(self._writes)

    def _check_places(self, pool: int, places: np.ndarray, least: int) -> None:
        size, host_pages = self._sizes[pool], self.host_pages[pool] if self.host_pages else 0
        on_device = (least <= places) & (places < size)
        wrong = places[~on_device & ~((places > HOST) & (places <= HOST + host_pages))]
        if len(wrong):
            raise IntegrityError(
                f"pool {pool}: places {wrong.tolist()} neither in [{least}, {size}) on the device nor in host memory, "
                f"HOST + [1, {host_pages}]"
            )

    def _build_copies(self, assignments: list[dict[int, int]]) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        moves = [schedule(assignment) if assignment else [] for assignment in assignments]
        for pool, (pairs, size) in enumerate(zip(moves, self._sizes, strict=True)):
            for source, destination in pairs:
                if not (-1 <= source < size and (0 <= destination < size or destination == UNUSED)):
                    raise IntegrityError(f"pool {pool}: copy {source} -> {destination} outside [0, {size})")
        width = self._no_copies.shape[2]
        arrays, counts = [], []
        for at in range(0, max(map(len, moves)), width):
            parts = [pairs[at : at + width] for pairs in moves]
            array = self._no_copies.copy()
            for pool, part in enumerate(parts):
                if part:
                    array[pool, :, : len(part)] = np.array(part, np.int32).T
            arrays.append(array)
            counts.append(np.array([len(part) for part in parts], np.int32))
        return tuple(arrays), tuple(counts)
