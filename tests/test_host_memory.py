"""HostMemory: plans carried out on the device and in host memory, bit-exact whenever the worker gets to its jobs.

World       decides, one thing at a time, on NumPy bytes, and tells a PlanBuilder: what must be there afterwards
HostMemory  carries the plans out; a store that takes its time, or waits for a gate, holds up the worker
"""

import dataclasses
import functools
import logging
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import DTYPES, bits, compilations

import jkv.tiers.host
from jkv.config import AttentionLayer, Buffer, CacheConfig, DeviceTier, RecurrentLayer
from jkv.errors import IntegrityError
from jkv.layout import HOST, make_layout
from jkv.plan import GIVEN, ZERO, PlanBuilder
from jkv.state import init_state
from jkv.tiers.host import PAGES_PER_DISPATCH, HostMemory

DEVICE_PAGES, HOST_PAGES = (70, 40, 12), (90, 30, 8)
POOLS = range(3)


@functools.cache
def tier_layout(dtype=jnp.float32):
    """Three pools: full attention with two layers, one of them with two buffers; a window; a recurrent state."""
    layers = {
        "full.0": AttentionLayer({"v": Buffer((1, 3), dtype), "k": Buffer((2, 2), dtype)}),
        "full.1": AttentionLayer({"v": Buffer((1, 3), dtype), "k": Buffer((2, 2), dtype)}),
        "local": AttentionLayer({"kv": Buffer((2, 8), dtype)}, window=8),
        "ssm": RecurrentLayer({"h": Buffer((3, 5), dtype), "conv": Buffer((7,), jnp.float32)}),
    }
    pages = dict(zip(("full", "window:8", "recurrent"), DEVICE_PAGES, strict=True))
    return make_layout(CacheConfig(layers, 2, 64, page_size=4, tiers=(DeviceTier(pages=pages),)))


class SlowStore:
    """Takes what it is given, after a while; or once `gate` is open."""

    def __init__(self, seed=None):
        self.values, self.gate, self.entered = {}, threading.Event(), threading.Event()
        self.gate.set()
        self._rng = None if seed is None else np.random.default_rng(seed)

    def write(self, group, name, parts):
        self.entered.set()
        assert self.gate.wait(30), "the gate was never opened"
        if self._rng is not None:
            time.sleep(self._rng.choice([0, 0, 0.001, 0.01]))
        self.values[f"{group}/{name}"] = b"".join(part.tobytes() for part in parts)


class World:
    """A cache of random bytes, and NumPy memory in which every decision happens at once.

    Attributes:
      device, host: per pool uint8[pages + 1, page bytes]: what each page holds.
      stored: {key: bytes} that the store must have in the end.
    """

    def __init__(self, dtype=jnp.float32, staging=2**20, seed=0, mesh=None, slow=False):
        self.layout = tier_layout(dtype)
        self.rng = np.random.default_rng(seed)
        self.state = init_state(self.layout, mesh)
        self.store = SlowStore(seed if slow else None)
        self.memory = HostMemory(self.layout, HOST_PAGES, staging, self.store)
        self.builder = PlanBuilder(
            self.layout, np.zeros((0, 0, 0), np.int32), np.zeros(2, np.int32), host_pages=HOST_PAGES
        )
        self.device = [self.rng.integers(0, 256, (p.num_rows, p.page_bytes), np.uint8) for p in self.layout.pools]
        self.host = [
            np.zeros((n + 1, p.page_bytes), np.uint8) for n, p in zip(HOST_PAGES, self.layout.pools, strict=True)
        ]
        self.stored = {}
        pools = tuple(self._as_arrays(pool, self.state.pools[pool.ordinal]) for pool in self.layout.pools)
        self.state = dataclasses.replace(self.state, pools=pools)

    def _as_arrays(self, pool, layers):
        """The pool's arrays, holding `device`: in each page one array's bytes after the other's."""
        leaves, structure = jax.tree.flatten(layers)
        sizes = [array[0].nbytes for array in leaves]
        parts = np.split(self.device[pool.ordinal], np.cumsum(sizes)[:-1], axis=1)
        filled = [
            jax.device_put(part.copy().view(a.dtype).reshape(a.shape), a.sharding)  # `device` will change
            for part, a in zip(parts, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, filled)

    def held(self, pool, place):
        return self.device[pool][place] if place < HOST else self.host[pool][place - HOST]

    def _set(self, pool, place, value):
        (self.device if place < HOST else self.host)[pool][place % HOST] = value

    def copy(self, pool, source, destination):
        self._set(pool, destination, self.held(pool, source))
        self.builder.copy(pool, source, destination)

    def zero(self, pool, destination):
        self._set(pool, destination, 0)
        self.builder.write(pool, destination, ZERO)

    def write(self, pool, place):
        """Gives the store what a place holds. Returns the key."""
        key = f"{self.layout.pools[pool].name}/{len(self.stored)}"
        if self.builder.read(pool, place) < GIVEN:  # or the store has it
            self.stored[key] = self.held(pool, place).tobytes()
        self.builder.store(pool, place, key)
        return key

    def put(self, pool, place):
        """New bytes for a place, as from a store."""
        value = self.rng.integers(0, 256, self.layout.pools[pool].page_bytes, np.uint8)
        self._set(pool, place, value)
        self.put_value(pool, place, value.tobytes())

    def put_value(self, pool, place, value):
        self.builder.put(pool, place, self.memory.split(pool, memoryview(value)))

    def dispatch(self):
        self.state = self.memory.dispatch(self.state, self.builder.build())
        self.builder.clear()

    def hold_up(self):
        """The worker does nothing from now on until `store.gate` is opened."""
        self.store.gate.clear()
        self.store.entered.clear()
        self.write(0, 1)
        self.dispatch()
        assert self.store.entered.wait(30)

    def open_later(self):
        threading.Timer(0.2, self.store.gate.set).start()

    def pages(self, pool):
        """uint8[pages, bytes]: what lies on the device."""
        return np.concatenate([bits(a).reshape(len(a), -1) for a in jax.tree.leaves(self.state.pools[pool])], axis=1)

    def check(self):
        for pool in POOLS:
            wrong = np.flatnonzero((self.pages(pool)[1:] != self.device[pool][1:]).any(axis=1)) + 1
            assert not len(wrong), f"pool {pool}: pages {wrong} on the device"

    def check_host(self):
        """Onboards all of host memory, a part at a time."""
        for pool in POOLS:
            for at in range(1, HOST_PAGES[pool] + 1, 12):
                pages = range(at, min(at + 12, HOST_PAGES[pool] + 1))
                for i, page in enumerate(pages):
                    self.copy(pool, HOST + page, 1 + i)
                self.dispatch()
                self.check()

    def finish(self):
        self.memory.wait()
        self.check()
        self.check_host()
        assert self.store.values == self.stored
        assert self.memory.staged == 0 and not self.memory.failures and not self.memory.lost
        self.memory.close()


@pytest.fixture
def world():
    world = World()
    yield world
    world.store.gate.set()
    world.memory.close()


def decide_at_random(world, few):
    """A step's decisions, over a handful of places or all of them."""
    rng = world.rng
    for _ in range(rng.integers(0, 12)):
        pool = int(rng.integers(3))
        device, host = (min(6, n[pool]) if few else n[pool] for n in (DEVICE_PAGES, HOST_PAGES))
        on_device = (rng.permutation(device) + 1).tolist()
        in_host = (HOST + 1 + rng.permutation(host)).tolist()
        count = int(rng.integers(1, 1 + min(device, host)))
        match rng.choice(["offload", "onboard", "move", "copy", "zero", "fan", "trade", "write", "put"]):
            case "offload":
                pairs = zip(on_device[:count], in_host[:count], strict=True)
            case "onboard":
                pairs = zip(in_host[:count], on_device[:count], strict=True)
            case "move":
                pairs = zip(in_host[: count // 2], in_host[count // 2 :], strict=False)
            case "copy":
                pairs = [on_device[:2]]
            case "fan":
                pairs = [(in_host[0], place) for place in (*on_device[:3], *in_host[1:3])]
            case "trade":
                pairs = [(on_device[0], in_host[0]), (in_host[1], on_device[0]), (in_host[0], in_host[1])]
            case "zero":
                pairs = []
                world.zero(pool, int(rng.choice([on_device[0], in_host[0]])))
            case "put":
                pairs = [(in_host[0], in_host[1]), (in_host[0], on_device[0])]
                for place in (in_host[0], on_device[1], on_device[0]):
                    world.put(pool, place)
            case "write":
                pairs = []
                for place in (*on_device[: count // 8], on_device[0], in_host[0]):
                    world.write(pool, place)
        for source, destination in pairs:
            world.copy(pool, source, destination)


# ------------------------------------------------------------------------------------------------ bit-exact


@pytest.mark.parametrize(
    ("dtype", "staging"),
    [*((dtype, 1) for dtype in DTYPES), (jnp.float32, 2**20), (jnp.bfloat16, 2**20)],
    ids=lambda value: str(value) if isinstance(value, int) else jnp.dtype(value).name,
)
def test_f20_round_trips_are_bit_exact_under_any_delay(dtype, staging):
    world = World(dtype, staging, seed=staging, slow=True)
    for step in range(60):
        decide_at_random(world, few=step % 3 > 0)
        world.dispatch()
        if step % 10 == 9:
            world.check()
    world.finish()


def test_f20_a_page_is_served_before_it_has_landed(world):
    world.hold_up()
    world.copy(0, 3, HOST + 1)
    world.copy(0, 4, 3)  # its page is another's at once
    world.dispatch()
    world.copy(0, HOST + 1, 5)
    world.copy(0, HOST + 1, 6)
    world.copy(0, 7, HOST + 1)  # and the host page, too
    world.dispatch()
    world.copy(0, HOST + 1, 8)
    world.dispatch()
    world.check()
    assert not world.store.values, "the worker was held up all the time"
    world.store.gate.set()
    world.finish()


def test_pages_of_several_gathers_are_served_together(world):
    world.hold_up()
    for page in range(1, 41):
        world.copy(0, page, HOST + page)
    world.dispatch()
    for page in range(1, 41):
        world.copy(0, HOST + 41 - page, page)
        world.copy(1, HOST + page % 30 + 1, page)
    world.dispatch()
    world.check()
    world.store.gate.set()
    world.finish()


def test_zeros_and_what_the_store_gave_are_served_before_they_have_landed(world):
    world.copy(0, 1, HOST + 1)
    world.copy(2, 1, HOST + 1)
    world.dispatch()
    world.hold_up()
    world.zero(0, HOST + 1)
    world.dispatch()
    world.put(1, HOST + 1)
    world.put(2, HOST + 1)
    for pool in POOLS:
        world.copy(pool, HOST + 1, 9)
    world.dispatch()
    world.check()
    world.store.gate.set()
    world.finish()


def test_a_page_that_moves_on_before_it_has_landed_is_served(world):
    world.hold_up()
    world.copy(0, 3, HOST + 1)
    world.put(1, HOST + 1)
    world.dispatch()
    for pool in (0, 1):
        world.copy(pool, HOST + 1, HOST + 2)
        world.copy(pool, 4, HOST + 1)
    world.dispatch()
    for pool in (0, 1):
        world.copy(pool, HOST + 2, 5)
        world.copy(pool, HOST + 1, 6)
    world.dispatch()
    world.check()
    world.store.gate.set()
    world.finish()


def test_what_only_the_arenas_know_is_waited_for(world):
    world.copy(0, 3, HOST + 1)
    world.dispatch()
    world.memory.wait()
    world.hold_up()
    world.copy(0, HOST + 1, HOST + 2)
    world.copy(0, 4, HOST + 1)
    world.dispatch()
    world.open_later()
    world.copy(0, HOST + 2, 5)
    world.dispatch()
    world.check()
    world.finish()


def test_the_store_gets_what_was_there_when_that_was_decided(world):
    world.hold_up()
    world.copy(0, 3, HOST + 1)
    world.write(0, HOST + 1)
    world.dispatch()
    world.write(0, HOST + 1)
    world.copy(0, 4, HOST + 1)
    world.write(0, 4)
    world.zero(0, 4)
    world.write(0, 4)
    world.copy(0, HOST + 1, 4)
    world.dispatch()
    world.store.gate.set()
    world.finish()


def test_without_a_store_its_values_go_nowhere():
    world = World()
    world.memory = HostMemory(world.layout, HOST_PAGES, 2**20, None)
    for place in (3, HOST + 1):
        world.write(0, place)
    world.zero(0, 4)
    world.write(0, 4)
    world.dispatch()
    world.memory.wait()
    assert not world.memory.failures
    world.memory.close()


# ------------------------------------------------------------------------------------------------ staging


def gather_bytes(world, pool):
    return PAGES_PER_DISPATCH * world.layout.pools[pool].page_bytes


def test_what_is_on_its_way_stays_below_the_staging_bytes(world, monkeypatch):
    seen, gather = [], jkv.tiers.host._gather
    world.memory = HostMemory(world.layout, HOST_PAGES, 3 * gather_bytes(world, 0), world.store)
    monkeypatch.setattr(jkv.tiers.host, "_gather", lambda *args: seen.append(world.memory.staged) or gather(*args))
    world.hold_up()
    world.open_later()
    for page in range(1, 1 + 70):
        world.copy(0, page, HOST + page)
    world.dispatch()
    unit = gather_bytes(world, 0)
    assert seen[:3] == [0, unit, 2 * unit] and max(seen) <= 2 * unit, "of three, one for the next"
    assert world.store.values, "it waited for the worker"
    world.finish()


def test_a_gather_larger_than_staging_goes_alone():
    world = World(staging=1)
    for page in range(1, 40):
        world.copy(0, page, HOST + page)
        world.copy(1, page, HOST + 1 + page % 30)
    world.dispatch()
    world.finish()


def test_gathered_arrays_are_dropped_once_they_have_landed(world, monkeypatch):
    gathered, gather = [], jkv.tiers.host._gather

    def remembered(*args):
        arrays = gather(*args)
        gathered.extend(map(weakref.ref, arrays))
        return arrays

    monkeypatch.setattr(jkv.tiers.host, "_gather", remembered)
    for page in range(1, 20):
        world.copy(0, page, HOST + page)
    world.dispatch()
    world.memory.wait()
    assert len(gathered) == 8
    deadline = time.monotonic() + 30
    while any(array() is not None for array in gathered):  # the worker is about to forget its job
        assert time.monotonic() < deadline
        time.sleep(0.001)
    world.finish()


# ------------------------------------------------------------------------------------------------ failures


def fail_to_gather(monkeypatch, times=1):
    left, gather = [None] * times, jkv.tiers.host._gather

    def failing(*args):
        if left:
            left.pop()
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return gather(*args)

    monkeypatch.setattr(jkv.tiers.host, "_gather", failing)


def test_a_gather_that_fails_loses_its_pages_until_they_are_saved_again(world, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "jkv")
    fail_to_gather(monkeypatch, times=2)
    for _ in range(2):
        for page in range(1, 4):
            world.copy(0, page, HOST + page)
        world.dispatch()
        assert world.memory.lost == {(0, 1), (0, 2), (0, 3)}, "known at once"
        world.memory.wait()
    assert world.memory.failures == {"save": 2} and len(caplog.records) == 1, "one line per kind and minute"
    assert world.memory.lost == {(0, 1), (0, 2), (0, 3)} and world.memory.staged == 0
    world.copy(0, HOST + 1, 9)
    world.dispatch()
    world.device[0][9] = 0
    world.check()
    world.copy(0, 5, HOST + 2)
    world.dispatch()
    assert world.memory.lost == {(0, 1), (0, 3)}
    world.copy(0, HOST + 2, 10)
    world.copy(0, HOST + 2, HOST + 4)
    key = world.write(0, HOST + 2)
    world.dispatch()
    world.check()
    world.memory.wait()
    assert world.memory.lost == {(0, 1), (0, 3)} and world.store.values == {key: world.stored[key]}


def test_a_landing_that_fails_loses_its_pages_but_not_what_was_planned_by_then(world):
    world.hold_up()
    world.copy(0, 3, HOST + 1)
    world.dispatch()
    world.copy(0, HOST + 1, 5)  # planned while nobody knows that it will fail
    arena = world.memory._arenas[0][2]
    arena.flags.writeable = False
    world.store.gate.set()
    world.memory.wait()
    arena.flags.writeable = True
    assert world.memory.failures == {"save": 1} and world.memory.lost == {(0, 1)} and world.memory.staged == 0
    world.dispatch()
    world.check()
    world.copy(0, HOST + 1, 6)
    world.dispatch()
    world.device[0][6] = 0
    world.check()


def test_only_the_last_save_to_a_page_says_whether_it_is_lost(world, monkeypatch):
    world.hold_up()
    world.copy(0, 3, HOST + 1)  # will land, and be worth nothing
    world.copy(0, 3, HOST + 2)
    world.dispatch()
    fail_to_gather(monkeypatch)
    world.copy(0, 4, HOST + 1)
    world.dispatch()
    world.store.gate.set()
    world.memory.wait()
    assert world.memory.lost == {(0, 1)}

    world.hold_up()
    fail_to_gather(monkeypatch)
    world.copy(0, 5, HOST + 2)
    world.dispatch()
    world.copy(0, 6, HOST + 2)
    world.dispatch()
    assert world.memory.lost == {(0, 1)}
    world.store.gate.set()
    world.memory.wait()
    assert world.memory.lost == {(0, 1)}


def test_what_is_lost_stays_lost_where_it_moves_and_never_reaches_the_store(world, monkeypatch):
    fail_to_gather(monkeypatch)
    world.copy(0, 3, HOST + 1)
    world.dispatch()
    world.copy(0, HOST + 1, HOST + 2)
    key = world.write(0, HOST + 1)
    world.dispatch()
    assert world.memory.lost == {(0, 1), (0, 2)}
    world.memory.wait()
    assert world.memory.lost == {(0, 1), (0, 2)} and key not in world.store.values
    world.copy(0, 4, HOST + 1)
    world.copy(0, HOST + 2, HOST + 3)
    world.dispatch()
    world.memory.wait()
    assert world.memory.lost == {(0, 2), (0, 3)}
    assert world.memory.failures == {"save": 1}


def fail_to_land(world):
    """What is dispatched before this is undone never lands."""
    world.memory._land = lambda *args: 1 / 0


def test_a_page_that_was_to_move_on_fails_to_land(world):
    world.hold_up()
    fail_to_land(world)
    world.copy(0, 3, HOST + 1)
    world.dispatch()
    world.copy(0, HOST + 1, HOST + 2)
    world.dispatch()
    assert not world.memory.lost
    world.store.gate.set()
    world.memory.wait()
    assert world.memory.lost == {(0, 1), (0, 2)}


def test_what_failed_to_land_is_forgotten_when_host_memory_is_resized(world):
    fail_to_land(world)
    world.copy(0, 3, HOST + 1)
    world.dispatch()
    world.memory.resize(world.memory.arenas_for(HOST_PAGES), lambda: {0: np.array([[1, 2], [2, 1]], np.int32)})
    assert world.memory.lost == {(0, 2)}
    world.copy(0, HOST + 1, 5)
    world.dispatch()
    world.device[0][5] = 0
    world.check()


def test_a_store_that_raises_loses_no_page(world):
    world.store.write = lambda *args: 1 / 0
    world.copy(0, 3, HOST + 1)
    world.write(0, 3)
    world.write(0, HOST + 1)
    world.dispatch()
    world.write(0, HOST + 1)
    world.dispatch()
    world.memory.wait()
    assert world.memory.failures == {"store": 3} and not world.memory.lost
    world.check_host()


def test_a_deleted_state_is_the_callers_error(world):
    world.copy(0, 3, HOST + 1)
    for leaf in jax.tree.leaves(world.state.pools):
        leaf.delete()
    with pytest.raises((RuntimeError, ValueError)):
        world.dispatch()
    world.memory.wait()


# ------------------------------------------------------------------------------------------------ cost


@pytest.mark.parametrize("mesh", [False, True])
def test_one_compilation_per_pool_and_direction(mesh):
    mesh = jax.make_mesh((1,), ("x",)) if mesh else None
    tier_layout.cache_clear()
    jax.clear_caches()
    world = World(mesh=mesh)
    world.check()
    counts = []
    for pool in POOLS:
        with compilations() as seen:
            world.copy(pool, 3, HOST + 1)
            world.dispatch()
        counts.append(len(seen))
        with compilations() as seen:  # what was gathered, or what the arenas hold: one variant
            world.copy(pool, HOST + 1, 4)
            world.dispatch()
            world.memory.wait()
            world.copy(pool, HOST + 1, 5)
            world.dispatch()
        counts.append(len(seen))
    assert counts == [1] * 6
    world.copy(0, 1, 2)
    world.dispatch()  # and apply's own
    with compilations() as seen:
        for _ in range(20):
            decide_at_random(world, few=False)
            world.dispatch()
            world.put(1, HOST + 3)
        world.dispatch()
        world.finish()
    assert not seen


@pytest.mark.parametrize("count", [0, 1, 5, PAGES_PER_DISPATCH])
def test_pages_are_set_alike_on_every_platform(count):
    rng = np.random.default_rng(count)
    arrays = [jnp.asarray(rng.random((20, 3))), jnp.asarray(rng.integers(0, 9, (20, 2, 2)))]
    values = [jnp.asarray(rng.permutation(a)[:PAGES_PER_DISPATCH]) for a in arrays]
    places = np.zeros((2, PAGES_PER_DISPATCH), np.int32)
    places[:, :count] = rng.integers(0, PAGES_PER_DISPATCH, count), rng.permutation(20)[:count]
    wanted = [np.array(a) for a in arrays]
    for array, value in zip(wanted, values, strict=True):
        array[places[1, :count]] = value[places[0, :count]]
    for function in (jkv.tiers.host._set_in_turn, jkv.tiers.host._set_at_once):
        for found, array in zip(jax.jit(function)(arrays, values, places, np.int32(count)), wanted, strict=True):
            np.testing.assert_array_equal(found, array)


def test_loading_needs_no_memory_beside_the_pool():
    arrays = [jnp.zeros((200, 16, 64), dtype) for dtype in (jnp.float32, jnp.uint16, jnp.uint8)]
    values = [array[:PAGES_PER_DISPATCH] for array in arrays]
    lowered = jkv.tiers.host._scatter.lower(
        arrays, values, np.zeros((2, PAGES_PER_DISPATCH), np.int32), np.array(1, np.int32)
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 10_000


def test_a_plan_without_work_for_host_memory_is_applied_and_no_more(world):
    world.copy(0, 3, 4)
    plan = world.builder.build()
    world.memory._lock = world.memory._worker = world.memory._jobs = None
    world.state = HostMemory.dispatch(world.memory, world.state, plan)
    world.check()
    world.memory = HostMemory(world.layout, HOST_PAGES, 1, None)


def test_arenas_take_what_was_asked_for(world):
    wanted = [(1 + n) * p.page_bytes for n, p in zip(HOST_PAGES, world.layout.pools, strict=True)]
    assert world.memory.bytes == sum(wanted)


# ------------------------------------------------------------------------------------------------ put, resize


def test_a_value_of_another_size_is_no_page(world):
    with pytest.raises(IntegrityError, match="pool 1"):
        world.builder.put(1, HOST + 3, world.memory.split(0, memoryview(bytes(world.layout.pools[0].page_bytes))))
        world.dispatch()


def test_a_stored_value_comes_back_as_it_was(world):
    key = world.write(2, 3)
    world.dispatch()
    world.memory.wait()
    world.put_value(2, HOST + 4, world.store.values[key])
    world.host[2][4] = world.device[2][3]
    world.copy(2, HOST + 4, 5)
    world.dispatch()
    world.check()


def test_resizing_keeps_what_stays_and_moves_what_is_told(world):
    for pool in POOLS:
        for page in range(1, 9):
            world.copy(pool, page, HOST + page)
    world.dispatch()
    before, sizes = world.memory.bytes, (5, 4, 6)
    world.memory.lost = {(0, 7), (0, 2), (1, 4), (1, 6)}
    world.memory.resize(
        world.memory.arenas_for(sizes),
        lambda: {0: np.array([[7, 8], [2, 3]], np.int32), 1: np.array([[5], [4]], np.int32)},
    )
    assert world.memory.bytes == sum((1 + n) * p.page_bytes for n, p in zip(sizes, world.layout.pools, strict=True))
    assert world.memory.lost == {(0, 2)}
    world.memory.lost.clear()
    for pool, pages in enumerate(([1, 7, 8, 4, 5], [1, 2, 3, 5], [1, 2, 3, 4, 5, 6])):
        world.host[pool][1 : 1 + len(pages)] = world.host[pool][pages]
        for page in range(1, 1 + len(pages)):
            world.copy(pool, HOST + page, 5 + page)
    world.dispatch()
    world.check()
    world.memory.resize(world.memory.arenas_for(HOST_PAGES), dict)
    assert world.memory.bytes == before
    for pool, size in enumerate(sizes):
        world.host[pool][1 + size :] = 0
    world.finish()
