"""Host memory below the device pools: where its pages lie, and a Plan carried out on both.

    device pool --gather (jitted)--> fresh arrays --worker--> arenas       saves: 16 pages per dispatch
    device pool <--scatter (jitted)-- fresh arrays <--caller-- arenas       loads: 16 pages per dispatch
                                                     arenas <--worker--> arenas       moves
                                                     arenas --worker--> store

The caller never waits for a copy that it does not need: until a page has landed, what was gathered serves its loads.
One worker thread carries out what is to be done in host memory in the order of the plans, so each of its jobs finds
the arenas as all earlier ones left them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jkv.apply import apply
from jkv.errors import IntegrityError
from jkv.layout import HOST, INT32_MAX, Layout, Pool
from jkv.plan import ZERO, Pages, Plan
from jkv.state import CacheState
from jkv.tiers.failures import Failures

PAGES_PER_DISPATCH = 16
Arrays = list[jax.Array]  # one per layer and buffer of a pool; buffers by name
Key = tuple[int, int]  # (pool ordinal, host page)
Values = Sequence[np.ndarray] | Arrays  # [PAGES_PER_DISPATCH, ...] each
Item = TypeVar("Item")
Arenas = list[np.ndarray]  # of a pool: uint8[1 + pages, bytes of each], one per layer and buffer
Parts = Sequence[np.ndarray]  # a page's bytes, uint8[n] per layer and buffer


class Store(Protocol):
    """What host memory wants of a store."""

    def write(self, group: str, name: str, parts: Parts) -> None:
        """Takes a value, the concatenation of `parts`; whoever calls may change them afterwards."""


@dataclasses.dataclass(eq=False, slots=True)
class Landing:
    """What a host page will hold. Without `gathered` and `parts` only the arenas will tell, after `job`."""

    gathered: Arrays | None = None  # its page is number `row` of each
    row: int = 0
    parts: Parts | None = None
    job: Future | None = None


NO_LOADS = np.zeros((2, 0), np.int32)
NONE: Mapping[Key, Landing] = MappingProxyType({})


class Load(NamedTuple):
    """One dispatch: rows of `values` to these pages of a pool."""

    pool: int
    values: Values
    rows: Sequence[int]
    pages: Sequence[int]


@jax.jit
def _gather(arrays: Arrays, pages: jax.Array) -> Arrays:
    """[PAGES_PER_DISPATCH, ...] each: these pages of each array; the plan's builder has checked them."""
    return [array.at[pages].get(mode="promise_in_bounds") for array in arrays]


@functools.partial(jax.jit, donate_argnames=("arrays",))
def _scatter(arrays: Arrays, values: Values, places: jax.Array, count: jax.Array) -> Arrays:
    """The arrays with rows of the values at other pages.

    On the CPU, XLA's scatter reads a page before it writes it; one update after the other does not: 3.3 ms instead of
    4.0 for 32 MiB.

    Args:
      arrays: [pages + 1, ...] each.
      values: [PAGES_PER_DISPATCH, ...] each.
      places: int32[2, PAGES_PER_DISPATCH]: [0] rows of the values, [1] pages of the arrays; in range.
      count: int32[]: how many of them count.
    """
    return jax.lax.platform_dependent(arrays, values, places, count, cpu=_set_in_turn, default=_set_at_once)


def _set_in_turn(arrays: Arrays, values: Arrays, places: jax.Array, count: jax.Array) -> Arrays:
    def set_page(value: jax.Array, i: jax.Array, array: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(value, places[0, i], 1)
        return jax.lax.dynamic_update_slice_in_dim(array, row, places[1, i], 0)

    return [
        jax.lax.fori_loop(0, count, functools.partial(set_page, value), array)
        for array, value in zip(arrays, values, strict=True)
    ]


def _set_at_once(arrays: Arrays, values: Arrays, places: jax.Array, count: jax.Array) -> Arrays:
    pages = jnp.where(jnp.arange(PAGES_PER_DISPATCH) < count, places[1], INT32_MAX)
    return [
        array.at[pages].set(value.at[places[0]].get(mode="clip"), mode="drop")
        for array, value in zip(arrays, values, strict=True)
    ]


def _in_dispatches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for at in range(0, len(items), PAGES_PER_DISPATCH):
        yield items[at : at + PAGES_PER_DISPATCH]


def _filled_up(ids: Sequence[int]) -> np.ndarray:
    """int32[PAGES_PER_DISPATCH]."""
    return np.array([*ids, *[0] * (PAGES_PER_DISPATCH - len(ids))], np.int32)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """[n, ...] -> uint8[n, bytes of each]."""
    return array.reshape(len(array), -1).view(np.uint8)


def _aligned(size: int) -> np.ndarray:
    """uint8[size] that the CPU backend takes as it is; what begins elsewhere than at 64 bytes it copies."""
    block = np.empty(size + 63, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + size]


def _page_sizes(pool: Pool, page_size: int) -> list[int]:
    """Bytes of a page in each of the pool's arrays, in the order of `Arrays`."""
    tokens = 1 if pool.recurrent else page_size
    return [tokens * buffers[name].nbytes for buffers in pool.buffers for name in sorted(buffers)]


def _placed(values: Values, array: jax.Array) -> Values:
    """The values as they go into a call with `array`: always in the same way, or it would be compiled twice.

    One CPU device takes NumPy arrays as they are; `device_put` would be a quarter of the time (25 us per array).
    """
    (device, *_) = array.devices()
    if device.platform == "cpu" and not isinstance(array.sharding, NamedSharding):
        return [np.asarray(value) for value in values]
    return jax.device_put(values, array.sharding)


def _scatter_arguments(arrays: Arrays, load: Load) -> tuple[Arrays, Values, np.ndarray, np.ndarray]:
    places = np.stack([_filled_up(load.rows), _filled_up(load.pages)])
    return arrays, _placed(load.values, arrays[0]), places, np.array(len(load.pages), np.int32)


def _loaded(state: CacheState, load: Load) -> CacheState:
    """`state` with what is loaded; the pool's old arrays are donated."""
    arrays, structure = jax.tree.flatten(state.pools[load.pool])
    arrays = _scatter(*_scatter_arguments(arrays, load))
    pools = list(state.pools)
    pools[load.pool] = jax.tree.unflatten(structure, arrays)
    return dataclasses.replace(state, pools=tuple(pools))


def _overwrites(plan: Plan) -> bool:
    """Whether the plan writes to a host page that it loads: what is there now has to be read first."""
    loaded = {(pool, page) for pool, pages in plan.loads.items() for page in pages[0].tolist()}
    saved = (
        (pool, page) for kind in (plan.saves, plan.moves) for pool, pages in kind.items() for page in pages[1].tolist()
    )
    given = ((each.pool, each.place - HOST) for each in plan.given)
    return bool(loaded) and not loaded.isdisjoint((*saved, *given))


def _keep_freed_memory() -> None:
    """Lets glibc keep what is freed: gathered and fresh arrays come and go, and new pages cost as much as the copies.

    It maps a block of its own for what is large, and unmaps it when that is freed; the largest one freed so far, up to
    32 MiB, says what is large, and twice that what is kept. 32 MiB there and back: 9 ms instead of 15.
    """
    np.empty(31 * 2**20, np.uint8)


class HostMemory:
    """The arenas of host memory, and what carries plans out. All methods are for one thread.

    Nothing that goes wrong on the way to host memory is raised: it is counted in `failures`, and the pages that did
    not arrive are `lost` until something else is saved to them. What was planned before that is still served.

    Args:
      layout: the cache's geometry.
      pages: pages (snapshots) of host memory per pool.
      staging: bytes of gathered pages that may be on their way at once; whole arrays, padding included.
      store: where the plans' writes go; None: nowhere.

    Attributes:
      lost: (pool ordinal, host page) of pages that never arrived. A load from one gives zeros.

    >>> from jkv.config import AttentionLayer, CacheConfig, DeviceTier, kv_buffers
    >>> from jkv.layout import make_layout
    >>> config = CacheConfig({"a": AttentionLayer(kv_buffers(1, 4))}, 2, 64, tiers=(DeviceTier(pages=8),))
    >>> HostMemory(make_layout(config), pages=[100], staging=2**20, store=None).bytes  # page 0 is never used
    25856
    """

    def __init__(self, layout: Layout, pages: Sequence[int], staging: int, store: Store | None):
        self._staging = staging
        self._store = store
        self._sizes = [_page_sizes(pool, layout.page_size) for pool in layout.pools]
        self._arenas = [
            [np.zeros((1 + count, size), np.uint8) for size in sizes]
            for count, sizes in zip(pages, self._sizes, strict=True)
        ]
        self._zeros = [[np.zeros(size, np.uint8) for size in sizes] for sizes in self._sizes]
        _keep_freed_memory()
        self._failures = Failures("host memory")
        self._worker = ThreadPoolExecutor(1, "jkv-host")
        self._jobs: collections.deque[Future] = collections.deque()
        self._lock = threading.Lock()  # of what follows
        self._landings: dict[Key, Landing] = {}  # the last one for each page that has not arrived
        self._failed: list[tuple[Key, Landing]] = []  # landings that never will
        self._staged = 0
        self.lost: set[Key] = set()
        self._broken: set[Key] = set()  # `lost` as the worker's next job finds it

    @property
    def bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.nbytes for arenas in self._arenas for arena in arenas)

    @property
    def staged(self) -> int:
        """Bytes of gathered arrays that have not landed."""
        return self._staged

    @property
    def failures(self) -> Mapping[str, int]:
        """What went wrong so far, by kind."""
        return self._failures.counts

    def dispatch(self, state: CacheState, plan: Plan) -> CacheState:
        """Carries out a plan, as `apply` does, and what it says about host memory and the store.

        Args:
          state: the cache; the arrays that the plan changes are donated and must not be used again.
          plan: from `PlanBuilder.build`; its ids are in range, which the builder checks.

        Returns:
          The state after the plan.
        """
        if not (plan.saves or plan.loads or plan.moves or plan.writes or plan.given):
            return apply(state, plan)
        loads: Iterable[Load] = self._read(state, plan)  # lazily: what is read is still in the CPU's cache
        if _overwrites(plan):
            loads = list(loads)
        self._change(state, plan)
        state = apply(state, plan)
        for load in loads:
            state = _loaded(state, load)
        with self._lock:  # what failed to land served this plan; who makes the next one knows that it is lost
            for key, landing in self._failed:
                if self._landings.get(key) is landing:
                    del self._landings[key]
            self._failed.clear()
        return state

    def compile(self, state: CacheState) -> None:
        """Compiles all that `dispatch` ever calls beside `apply` for states like this one: two variants per pool.

        Runs nothing, changes nothing. Takes one fresh array per layer and buffer of a pool, as a load does.
        """
        for pool, layers in enumerate(state.pools):
            arrays = jax.tree.leaves(layers)
            _gather.lower(arrays, _filled_up([])).compile()
            load = Load(pool, self._fresh(arrays, pool, [(0, 0, None)]), [0], [0])
            _scatter.lower(*_scatter_arguments(arrays, load)).compile()

    def _views(self, pool: int, parts: Sequence[memoryview | np.ndarray]) -> Parts:
        views = [np.frombuffer(part, np.uint8) for part in parts]
        if [len(view) for view in views] != self._sizes[pool]:
            raise IntegrityError(f"pool {pool}: parts of {[len(v) for v in views]} bytes, not {self._sizes[pool]}")
        return views

    def split(self, pool: int, value: memoryview) -> list[memoryview]:
        """The parts, per layer and buffer, of a page's bytes."""
        parts, at = [], 0
        for size in self._sizes[pool]:
            parts.append(value[at : at + size])
            at += size
        return parts

    @property
    def idle(self) -> bool:
        """Whether all has landed, and all that the store is to get has been given to it."""
        return all(job.done() for job in self._jobs)

    def wait(self) -> None:
        """Until all has landed."""
        while self._jobs:
            self._jobs.popleft().result()

    def forget(self, pages: Sequence[int]) -> None:
        """Waits; after that nothing is where anybody knows of, in arenas of that many pages per pool."""
        self.wait()
        self._arenas = self.arenas_for(pages)  # a resize may have been cut short
        with self._lock:
            self._landings.clear()
            self._failed.clear()
            self.lost, self._broken, self._staged = set(), set(), 0

    def close(self) -> None:
        """Waits, and ends the worker."""
        self.wait()
        self._worker.shutdown()

    def arenas_for(self, pages: Sequence[int]) -> list[Arenas]:
        """Arenas of other sizes, for `resize`, in pages per pool; where nothing changes they are the present ones."""
        return [
            arenas
            if all(len(arena) == 1 + count for arena in arenas)
            else [np.zeros((1 + count, arena.shape[1]), np.uint8) for arena in arenas]
            for count, arenas in zip(pages, self._arenas, strict=True)
        ]

    def resize(self, arenas: list[Arenas], move: Callable[[], Mapping[int, np.ndarray]]) -> None:
        """Other arenas, with what is in the present ones.

        Args:
          arenas: from `arenas_for`.
          move: called once all has landed; gives {pool ordinal: int32[2, n]}: pages that are [1] from now on, and [0]
            till now; others keep their ids, those beyond the new size are dropped.
        """
        self.wait()
        moved = move()
        lost = {(pool, page) for pool, page in self.lost if page < len(arenas[pool][0])}
        for pool, (old, new) in enumerate(zip(self._arenas, arenas, strict=True)):
            sources, destinations = moved.get(pool, np.zeros((2, 0), np.int32))
            for i in range(len(new)):
                if new is not old:
                    kept = min(len(old[i]), len(new[i]))
                    new[i][:kept] = old[i][:kept]
                new[i][destinations] = old[i][sources]
                old[i] = new[i]  # frees the old one
            for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
                lost.discard((pool, destination))
                if (pool, source) in self.lost:
                    lost.add((pool, destination))
        self._arenas = arenas
        self._landings.clear()
        self._failed.clear()
        self.lost, self._broken = lost, set(lost)

    # ------------------------------------------------------------------------------------------------------- loads

    def _read(self, state: CacheState, plan: Plan) -> Iterator[Load]:
        """What a plan loads, a dispatch at a time. The state's arrays may be gone by then."""
        given = [
            (each.pool, each.place, self._views(each.pool, each.parts)) for each in plan.given if each.place < HOST
        ]
        for pool in sorted({*plan.loads, *(pool for pool, _, _ in given)}):
            pages = plan.loads.get(pool, NO_LOADS)
            # host page, device page, its bytes if not the arenas'
            copied: list[tuple[int, int, Parts | None]] = [(0, page, parts) for p, page, parts in given if p == pool]
            served: dict[int, tuple[Arrays, list[tuple[int, int]]]] = {}  # gathered arrays, (row, device page) each
            for source, destination in pages.T.tolist():
                landing = self._arriving((pool, source))
                if landing is None:
                    copied.append((source, destination, self._zeros[pool] if (pool, source) in self.lost else None))
                elif landing.gathered is None:
                    copied.append((source, destination, landing.parts))
                else:
                    _, pairs = served.setdefault(id(landing.gathered), (landing.gathered, []))
                    pairs.append((landing.row, destination))
            arrays = jax.tree.leaves(state.pools[pool])
            for part in _in_dispatches(copied):
                yield Load(pool, self._fresh(arrays, pool, part), range(len(part)), [page for _, page, _ in part])
            for gathered, pairs in served.values():
                for chosen in _in_dispatches(pairs):
                    yield Load(pool, gathered, [row for row, _ in chosen], [page for _, page in chosen])

    def _arriving(self, key: Key) -> Landing | None:
        """What is to land in a page. Where nothing but the arenas will tell, this waits."""
        landing = self._landings.get(key)
        if landing is None or landing.gathered is not None or landing.parts is not None:
            return landing
        if landing.job is not None:
            landing.job.result()
        return None

    def _fresh(
        self, arrays: Arrays, pool: int, sources: Sequence[tuple[int, int, Parts | None]]
    ) -> Sequence[np.ndarray]:
        """Host pages in new arrays, [PAGES_PER_DISPATCH, ...] each; what is left of them is garbage."""
        pages = [page for page, _, _ in sources]
        block = _aligned(PAGES_PER_DISPATCH * sum(self._sizes[pool]))
        fresh, at = [], 0
        for i, (arena, array) in enumerate(zip(self._arenas[pool], arrays, strict=True)):
            rows = block[at : at + PAGES_PER_DISPATCH * arena.shape[1]].reshape(PAGES_PER_DISPATCH, -1)
            at += rows.size
            np.take(arena, pages, axis=0, out=rows[: len(pages)], mode="clip")  # mode="raise" would buffer `out`
            for row, (_, _, parts) in enumerate(sources):
                if parts is not None:
                    rows[row] = parts[i]
            fresh.append(rows.view(array.dtype).reshape(PAGES_PER_DISPATCH, *array.shape[1:]))
        return fresh

    # ------------------------------------------------------- what changes host memory and the store: by the caller

    def _change(self, state: CacheState, plan: Plan) -> None:
        """Gathers what leaves the device, and gives the worker its jobs: read host pages, land, move."""
        landings, lost = self._moved(plan.moves)
        taken: dict[int, list[np.ndarray]] = {}
        broken: set[Key] = set()
        if plan.moves or any(write.place >= HOST for write in plan.writes):
            self._submit("read", functools.partial(self._take, plan, taken, broken))
        for pool in range(len(self._arenas)):
            leaving: dict[int, tuple[list[int], list[str]]] = {}  # device page: host pages, keys of the store
            for source, page in plan.saves[pool].T.tolist() if pool in plan.saves else ():
                leaving.setdefault(source, ([], []))[0].append(page)
            for write in plan.writes:
                if write.pool == pool and write.place < HOST:
                    leaving.setdefault(write.place, ([], []))[1].append(write.key)
            if ZERO in leaving:
                pages, keys = leaving.pop(ZERO)
                self._fill("save", pool, pages, self._zeros[pool], keys)
            # the pages that are saved come first in the gathered arrays
            for part in _in_dispatches(sorted(leaving.items(), key=lambda item: not item[1][0])):
                self._gather(state, pool, part)
        for each in plan.given:
            if each.place >= HOST:
                self._fill("put", each.pool, [each.place - HOST], self._views(each.pool, each.parts))
        if plan.moves:
            self._submit("move", functools.partial(self._place, plan.moves, taken, broken), landings)
            self.lost |= lost

    def _gather(self, state: CacheState, pool: int, leaving: Sequence[tuple[int, tuple[list[int], list[str]]]]) -> None:
        """One dispatch, and the job that lands it: (device page, (host pages, keys of the store)) each."""
        size = PAGES_PER_DISPATCH * sum(self._sizes[pool])
        while self._staged and self._staged + size > self._staging:
            self._jobs.popleft().result()
        arrays = jax.tree.leaves(state.pools[pool])
        saved = [(row, page) for row, (_, (pages, _)) in enumerate(leaving) for page in pages]
        try:
            gathered = _gather(arrays, _filled_up([page for page, _ in leaving]))
            for array in gathered:
                array.copy_to_host_async()
        except (jax.errors.JaxRuntimeError, MemoryError) as error:  # no memory on the device
            self._lose(pool, [page for _, page in saved], error)
            return
        written = [(row, key) for row, (_, (_, keys)) in enumerate(leaving) for key in keys]
        landings = {(pool, page): Landing(gathered, row) for row, page in saved}
        self._submit("save", functools.partial(self._land, pool, gathered, saved, written), landings, size)

    def _fill(self, kind: str, pool: int, pages: Sequence[int], parts: Parts, keys: Sequence[str] = ()) -> None:
        """These host pages, and the store's values, shall be `parts`."""
        landings = {(pool, page): Landing(parts=parts) for page in pages}
        self._submit(kind, functools.partial(self._set, pool, pages, parts, keys), landings)

    def _moved(self, moves: Pages) -> tuple[dict[Key, Landing], set[Key]]:
        """What will land where pages move to, and what of it is lost."""
        landings, lost = {}, set()
        for pool, pages in moves.items():
            for source, destination in pages.T.tolist():
                landing = self._landings.get((pool, source)) or Landing()
                landings[pool, destination] = dataclasses.replace(landing, job=None)
                if (pool, source) in self.lost:
                    lost.add((pool, destination))
        return landings, lost

    def _lose(self, pool: int, pages: Sequence[int], error: Exception) -> None:
        """What was to be saved in these pages never left the device."""
        self._failures.add("save", error)
        landings = {(pool, page): Landing(parts=self._zeros[pool]) for page in pages}
        self._submit("save", lambda: landings, landings)  # in the worker's order, too
        self.lost |= landings.keys()

    def _submit(
        self, kind: str, work: Callable[[], Collection[Key]], landings: Mapping[Key, Landing] = NONE, staged: int = 0
    ) -> None:
        """A job for the worker, after which `landings` have arrived, but for those that `work` returns."""
        with self._lock:
            self._landings.update(landings)
            self.lost.difference_update(landings)
            self._staged += staged
        try:
            job = self._worker.submit(self._run, kind, work, landings, staged)
        except BaseException:  # no thread can be had, for one
            with self._lock:
                self._staged -= staged
                self.lost.update(landings)
            raise
        for landing in landings.values():
            landing.job = job
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft()
        self._jobs.append(job)

    # --------------------------------------------------------------------------------------------------- the worker

    def _run(
        self, kind: str, work: Callable[[], Collection[Key]], landings: Mapping[Key, Landing], staged: int
    ) -> None:
        failed: Collection[Key]
        try:
            failed = work()
        except Exception as error:
            self._failures.add(kind, error)
            failed = landings
        self._broken.difference_update(landings)
        self._broken.update(failed)
        with self._lock:
            self._staged -= staged
            for key, landing in landings.items():
                if self._landings.get(key) is not landing:
                    continue  # something else is to land there since
                if key in failed:
                    self.lost.add(key)
                    self._failed.append((key, landing))
                else:
                    del self._landings[key]

    def _take(self, plan: Plan, taken: dict[int, list[np.ndarray]], broken: set[Key]) -> Collection[Key]:
        """Reads host pages before the plan changes them: for the store, and into `taken` what moves.

        `broken`: (pool, destination) of what moves and is nothing to rely on.
        """
        for write in plan.writes:
            if write.place >= HOST and (write.pool, write.place - HOST) not in self._broken:
                self._write(write.key, [arena[write.place - HOST] for arena in self._arenas[write.pool]])
        for pool, pages in plan.moves.items():
            broken.update((pool, page) for source, page in pages.T.tolist() if (pool, source) in self._broken)
            taken[pool] = [arena[pages[0]] for arena in self._arenas[pool]]
        return ()

    def _land(
        self, pool: int, gathered: Arrays, saved: Sequence[tuple[int, int]], written: Sequence[tuple[int, str]]
    ) -> Collection[Key]:
        """Gathered arrays into the arenas, (row, host page) each, and to the store, (row, key) each."""
        values = [_as_bytes(np.asarray(array)) for array in gathered]  # waits for the device
        rows, pages = np.array(saved, np.int64).reshape(-1, 2).T
        in_order = len(rows) == 0 or rows[-1] == len(rows) - 1  # no page twice: a slice, which is no copy
        for arena, value in zip(self._arenas[pool], values, strict=True):
            arena[pages] = value[: len(rows)] if in_order else value[rows]
        for row, key in written:
            self._write(key, [value[row] for value in values])
        return ()

    def _set(self, pool: int, pages: Sequence[int], parts: Parts, keys: Sequence[str]) -> Collection[Key]:
        for arena, part in zip(self._arenas[pool], parts, strict=True):
            for page in pages:
                arena[page] = part
        for key in keys:
            self._write(key, parts)
        return ()

    def _place(self, moves: Pages, taken: dict[int, list[np.ndarray]], broken: set[Key]) -> Collection[Key]:
        """Writes what was taken to where it moves."""
        for pool, pages in moves.items():
            for arena, values in zip(self._arenas[pool], taken.pop(pool), strict=True):
                arena[pages[1]] = values
        return broken

    def _write(self, key: str, parts: Parts) -> None:
        """A value for the store. Whatever goes wrong there is no reason to lose a page."""
        if self._store is None:
            return
        try:
            group, name = key.split("/", 1)
            self._store.write(group, name, parts)
        except Exception as error:
            self._failures.add("store", error)
