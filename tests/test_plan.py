"""A plan means the host's decisions, carried out one at a time (DESIGN, section 1).

    Decisions    writes to NumPy memory at once, and tells the PlanBuilder the same        the meaning
    execute      a built plan on NumPy memory: chunks of 8, gather then scatter            what the device does
    apply        a built plan on a CacheState                                              the device itself

All three must leave the same memory. Each page holds one number, repeated over its elements. Places are on the device
or in host memory; what the store is given is compared as well.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.apply import apply
from jkv.errors import IntegrityError
from jkv.layout import HOST, make_layout
from jkv.plan import CHUNK, ENTRIES, UNUSED, ZERO, PlanBuilder, Write, schedule
from jkv.state import CacheState, init_state

ROWS, PAGE_SIZE, MAX_LENGTH = 3, 2, 64
MAX_PAGES = MAX_LENGTH // PAGE_SIZE
NUM_PAGES = {"full": 40, "window:4": 30, "recurrent": 20}
HOST_PAGES = (9, 7, 5)  # per pool
INT32 = np.dtype(np.int32)


@functools.cache
def small_layout():
    """Three pools of different sizes: full, window, recurrent."""
    layers = {
        "full": jkv.AttentionLayer({"k": jkv.Buffer((2,), jnp.int32), "v": jkv.Buffer((1,), jnp.int32)}),
        "window": jkv.AttentionLayer({"kv": jkv.Buffer((3,), jnp.int32)}, window=4),
        "state": jkv.RecurrentLayer({"h": jkv.Buffer((2, 2), jnp.int32)}),
    }
    tier = jkv.DeviceTier(pages=NUM_PAGES)
    return make_layout(jkv.CacheConfig(layers, ROWS, MAX_LENGTH, page_size=PAGE_SIZE, tiers=(tier,)))


class Decisions:
    """Memory in which every decision happens at once, and the builder that is told of it.

    Attributes:
      memory: per pool int64[pages + 1]: what each page holds.
      host: the same of host memory.
      stored: {key: value} of what the store is to be given: not what it gave in this plan.
      put_values: what the store gave so far: -1, -2, ...
      tables: int32[groups, rows, columns].
    """

    def __init__(self):
        self.layout = small_layout()
        self.memory = [1000 * (p.ordinal + 1) + np.arange(p.num_pages + 1) for p in self.layout.pools]
        self.host = [
            10_000 * (p.ordinal + 1) + np.arange(n + 1) for p, n in zip(self.layout.pools, HOST_PAGES, strict=True)
        ]
        self.stored, self.put_values = {}, 0
        self._begin()
        self.tables = np.zeros((2, ROWS, MAX_PAGES), np.int32)
        self.slots = np.zeros(ROWS, np.int32)
        self.builder = PlanBuilder(self.layout, self.tables, self.slots, host_pages=HOST_PAGES)

    def _begin(self):
        self.put_before = self.put_values
        self.before = [memory.copy() for memory in self.memory]
        self.host_before = [host.copy() for host in self.host]

    def held(self, pool, place):
        return self.memory[pool][place] if place < HOST else self.host[pool][place - HOST]

    def set(self, pool, place, value):
        (self.memory if place < HOST else self.host)[pool][place % HOST] = value

    def copy(self, pool, source, destination):
        self.set(pool, destination, self.held(pool, source))
        self.builder.copy(pool, source, destination)

    def zero(self, pool, destination):
        self.set(pool, destination, 0)
        self.builder.write(pool, destination, ZERO)

    def store(self, pool, place):
        key = f"{self.layout.pools[pool].name}/{len(self.stored)}"
        if self.held(pool, place) >= self.put_before:
            self.stored[key] = self.held(pool, place)
        self.builder.store(pool, place, key)

    def put(self, pool, place):
        self.put_values -= 1
        self.set(pool, place, self.put_values)
        self.builder.put(pool, place, [self.put_values])

    def carry_out(self):
        """Builds the plan of what was decided since the last one, and carries it out: all must agree."""
        plan = self.builder.build()
        self.builder.clear()
        host, loaded, stored = cross(plan, self.before, self.host_before)
        memory = execute(plan, self.before)
        for pool, page, value in loaded:
            memory[pool][page] = value
        assert_same(memory, self.memory)
        assert_same(host, self.host)
        assert stored == self.stored
        self.stored = {}
        self._begin()
        return plan

    def copy_together(self, pool, sources, destinations):
        """All sources are read before the first destination is written, as `resume` does."""
        held = [self.held(pool, source) for source in sources]
        for destination, value in zip(destinations, held, strict=True):
            self.set(pool, destination, value)
        values = [self.builder.read(pool, source) for source in sources]
        for destination, value in zip(destinations, values, strict=True):
            self.builder.write(pool, destination, value)

    def enter(self, group, row, start, pages):
        self.tables[group, row, start : start + len(pages)] = pages
        self.builder.mark(row, group, start, start + len(pages))


def execute(plan, memory):
    """The copies of `plan` on NumPy memory, as the device does them. Returns the new memory."""
    memory = [pages.copy() for pages in memory]
    for copies, counts in zip(plan.copies, plan.num_copies, strict=True):
        for pages, (sources, destinations), count in zip(memory, copies, counts, strict=True):
            for at in range(0, int(count), CHUNK):
                stop = min(at + CHUNK, int(count))
                source, destination = sources[at:stop], destinations[at:stop]
                gathered = np.where(source == ZERO, 0, pages[np.maximum(source, 0)])
                real = destination != UNUSED
                assert len(set(destination[real])) == real.sum(), "a scatter with one place twice has no order"
                pages[destination[real]] = gathered[real]
    return memory


def cross(plan, memory, host):
    """What `plan` carries between the tiers. Returns the new host memory, (pool, page, value) to load, {key: value}."""

    def held(pool, source):
        return 0 if source == ZERO else memory[pool][source]

    new, loaded = [pages.copy() for pages in host], []
    for pool, pages in plan.saves.items():
        for source, page in pages.T.tolist():
            new[pool][page] = held(pool, source)
    for pool, pages in plan.moves.items():
        for source, page in pages.T.tolist():
            new[pool][page] = host[pool][source]
    for pool, pages in plan.loads.items():
        loaded += [(pool, page, host[pool][source]) for source, page in pages.T.tolist()]
    for pool, place, (value,) in plan.given:
        if place >= HOST:
            new[pool][place - HOST] = value
        else:
            loaded.append((pool, place, value))
    stored = {key: host[pool][place - HOST] if place >= HOST else held(pool, place) for pool, place, key in plan.writes}
    return new, loaded, stored


def device_state(memory):
    """A CacheState of the small layout whose pages hold `memory`."""
    state = init_state(small_layout())
    pools = tuple(
        tuple({name: filled(array, pages) for name, array in layer.items()} for layer in layers)
        for layers, pages in zip(state.pools, memory, strict=True)
    )
    return CacheState(pools, state.page_tables, state.state_slots, state.layout)


def filled(array, pages):
    values = np.broadcast_to(pages.reshape(-1, *(1,) * (array.ndim - 1)), array.shape)
    return jax.device_put(jnp.array(values, array.dtype), array.sharding)


def memory_of(state):
    """Per pool what each page holds; all elements of all its arrays must agree."""
    memory = []
    for layers in state.pools:
        arrays = [np.array(array) for layer in layers for array in layer.values()]
        flat = np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
        assert (flat[1:] == flat[1:, :1]).all(), "a page was copied in part"
        memory.append(flat[:, 0])
    return memory


def assert_same(found, wanted):
    """Page 0 apart: nobody relies on its contents."""
    for pool, (a, b) in enumerate(zip(found, wanted, strict=True)):
        wrong = np.flatnonzero(a[1:] != b[1:]) + 1
        assert not len(wrong), f"pool {pool}, pages {wrong}: {a[wrong]} instead of {b[wrong]}"


def decide_at_random(decisions, rng):
    """Some dozens of decisions over few pages, so that sources and destinations are used again and again."""
    for _ in range(rng.integers(1, 60)):
        pool = int(rng.integers(len(NUM_PAGES)))
        size = len(decisions.memory[pool])
        used = int(rng.integers(4, size + 1))
        match rng.choice(["copy", "zero", "chain", "spread", "cycle", "fan", "together", "entries"]):
            case "copy":
                decisions.copy(pool, *map(int, rng.integers(1, used, 2)))
            case "zero":
                decisions.zero(pool, int(rng.integers(1, used)))
            case "chain":
                pages = (rng.permutation(size - 1)[: rng.integers(2, used)] + 1).tolist()
                for source, destination in zip(pages[1:], pages, strict=False):
                    decisions.copy(pool, source, destination)
            case "spread":
                pages = (rng.permutation(size - 1)[: rng.integers(2, used)] + 1).tolist()
                for source, destination in itertools.pairwise(pages):
                    decisions.copy(pool, source, destination)
            case "cycle":
                pages = (rng.permutation(size - 1)[: rng.integers(2, used)] + 1).tolist()
                decisions.copy_together(pool, pages, pages[1:] + pages[:1])
            case "fan":
                source, *pages = (rng.permutation(size - 1)[: rng.integers(2, used)] + 1).tolist()
                for destination in pages:
                    decisions.copy(pool, source, destination)
            case "together":
                count = int(rng.integers(1, used))
                sources = rng.integers(1, size, count).tolist()
                decisions.copy_together(pool, sources, (rng.permutation(size - 1)[:count] + 1).tolist())
            case "entries":
                group, start = int(rng.integers(2)), int(rng.integers(MAX_PAGES))
                count = int(rng.integers(1, MAX_PAGES - start + 1))
                pages = rng.integers(0, NUM_PAGES["window:4"] + 1, count)
                decisions.enter(group, int(rng.integers(ROWS)), start, pages)


# ------------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_the_decisions_one_at_a_time(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        decisions = Decisions()
        decide_at_random(decisions, rng)
        assert_same(execute(decisions.builder.build(), decisions.before), decisions.memory)


@pytest.mark.parametrize("seed", range(6))
def test_apply_is_the_decisions_one_at_a_time(seed):
    rng = np.random.default_rng(1000 + seed)
    decisions = Decisions()
    state = device_state(decisions.memory)
    for _ in range(8):  # one plan after the other on one state
        decide_at_random(decisions, rng)
        state = apply(state, decisions.builder.build())
        decisions.builder.clear()
        assert_same(memory_of(state), decisions.memory)
        for group, table in zip(("full", "window:4"), decisions.tables, strict=True):
            np.testing.assert_array_equal(np.array(state.page_tables[group]), table)


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 16, 17, 39])
def test_a_cycle(length):
    decisions = Decisions()
    pages = list(range(1, length + 1))
    decisions.copy_together(0, pages, pages[1:] + pages[:1])
    assert_same(execute(decisions.builder.build(), decisions.before), decisions.memory)
    assert_same(memory_of(apply(device_state(decisions.before), decisions.builder.build())), decisions.memory)


def test_cycles_of_several_pools_with_readers_beside_them():
    decisions = Decisions()
    for pool in range(3):
        for first in (1, 11):
            ring = list(range(first, first + 9))
            decisions.copy_together(pool, [*ring, first + 4], [*ring[1:], ring[0], first + 9])
    assert_same(execute(decisions.builder.build(), decisions.before), decisions.memory)
    assert_same(memory_of(apply(device_state(decisions.before), decisions.builder.build())), decisions.memory)


@pytest.mark.parametrize("upwards", [True, False])
def test_a_chain_longer_than_a_chunk(upwards):
    decisions = Decisions()
    pages = range(1, 40) if upwards else range(39, 0, -1)
    for page in pages:
        decisions.copy(0, page + 1 if upwards else page, page if upwards else page + 1)
    assert decisions.memory[0][20] == (1021 if upwards else 1019)
    assert_same(execute(decisions.builder.build(), decisions.before), decisions.memory)


def test_a_read_is_traced_to_what_its_source_held_when_it_was_decided():
    """The picture in plan.py: 7 -> 3, 9 -> 7, 3 -> 5."""
    decisions = Decisions()
    for source, destination in ((7, 3), (9, 7), (3, 5)):
        decisions.copy(0, source, destination)
    after = execute(decisions.builder.build(), decisions.before)[0]
    assert after[[3, 7, 5]].tolist() == [1007, 1009, 1007]


def test_the_last_write_wins():
    decisions = Decisions()
    decisions.copy(0, 7, 3)
    decisions.zero(0, 3)
    decisions.copy(0, 8, 3)
    assert decisions.builder.num_copies == 1
    assert execute(decisions.builder.build(), decisions.before)[0][3] == 1008


def test_a_copy_of_a_zeroed_page_is_zero():
    decisions = Decisions()
    decisions.zero(2, 7)
    decisions.copy(2, 7, 9)
    state = apply(device_state(decisions.before), decisions.builder.build())
    assert memory_of(state)[2][[7, 9]].tolist() == [0, 0]


def test_what_comes_back_to_itself_is_no_copy():
    decisions = Decisions()
    decisions.copy(0, 3, 4)
    decisions.copy(0, 4, 3)
    decisions.copy(0, 6, 6)
    assert decisions.builder.num_copies == 1
    decisions.zero(1, 5)
    decisions.copy(1, 5, 6)
    assert_same(execute(decisions.builder.build(), decisions.before), decisions.memory)


def test_a_read_before_a_write_may_be_used_after_it():
    decisions = Decisions()
    value = decisions.builder.read(0, 3)
    decisions.copy(0, 8, 3)
    decisions.builder.write(0, 9, value)
    assert execute(decisions.builder.build(), decisions.before)[0][[3, 9]].tolist() == [1008, 1003]


@pytest.mark.parametrize("seed", range(10))
def test_schedule_writes_nothing_that_a_later_chunk_reads(seed):
    rng = np.random.default_rng(seed)
    destinations = (rng.permutation(60)[: rng.integers(1, 60)] + 1).tolist()
    assignment = {
        d: int(s) for d, s in zip(destinations, rng.integers(1, 61, len(destinations)), strict=True) if d != s
    }
    moves = schedule(assignment)
    parked = 0  # the null page holds what was parked there last
    for at in range(0, len(moves), CHUNK):
        chunk = moves[at : at + CHUNK]
        written = {destination for before in range(0, at, CHUNK) for _, destination in moves[before : before + CHUNK]}
        for source, destination in chunk:
            if destination == UNUSED:
                continue
            assert source == 0 or source not in written
            if destination not in (0, UNUSED):
                assert assignment[destination] == (parked if source == 0 else source)
        parked = next((source for source, destination in chunk if destination == 0), parked)
    assert sorted(d for _, d in moves if d not in (0, UNUSED)) == sorted(assignment)


# ------------------------------------------------------------------------------------------------ tiers

KINDS = ("copies", "saves", "loads", "moves", "writes", "given")


def decide_across_tiers(decisions, rng):
    """Dozens of decisions over a handful of places of either kind, so that they meet again and again."""
    for _ in range(rng.integers(1, 40)):
        pool = int(rng.integers(len(NUM_PAGES)))
        pages = int(rng.integers(2, 12))
        places = [*range(1, 1 + pages), *range(HOST + 1, HOST + 1 + min(pages, HOST_PAGES[pool]))]
        some = rng.permutation(places)[: rng.integers(2, len(places))].tolist()
        match rng.choice(["copy", "chain", "cycle", "fan", "together", "zero", "store", "put", "forget"]):
            case "copy":
                decisions.copy(pool, *some[:2])
            case "chain":
                for source, destination in itertools.pairwise(some):
                    decisions.copy(pool, source, destination)
            case "cycle":
                decisions.copy_together(pool, some, some[1:] + some[:1])
            case "fan":
                for destination in some[1:]:
                    decisions.copy(pool, some[0], destination)
            case "together":
                decisions.copy_together(pool, rng.choice(places, len(some)).tolist(), some)
            case "zero":
                decisions.zero(pool, some[0])
            case "store":
                decisions.store(pool, some[0])
            case "put":
                decisions.put(pool, some[0])
            case "forget":  # it holds what it held before the plan; who reads it is not told of that
                page = int(rng.integers(1, 1 + HOST_PAGES[pool]))
                decisions.builder.forget(pool, HOST + page)
                decisions.host[pool][page] = decisions.host_before[pool][page]


@pytest.mark.parametrize("seed", range(20))
def test_plans_across_tiers_are_the_decisions_one_at_a_time(seed):
    rng, decisions = np.random.default_rng(2000 + seed), Decisions()
    kinds = set()
    for _ in range(60):
        decide_across_tiers(decisions, rng)
        plan = decisions.carry_out()
        kinds |= {kind for kind in KINDS if len(getattr(plan, kind))}
        for pool in range(len(NUM_PAGES)):
            written = [page for pages in (plan.saves, plan.moves) if pool in pages for page in pages[pool][1].tolist()]
            assert len(written) == len(set(written)), "one write of each host page"
    assert kinds == set(KINDS)


def test_f20_places_are_reused_as_soon_as_a_read_of_them_is_planned():
    decisions = Decisions()
    h1, h2 = HOST + 1, HOST + 2
    for plans in range(3):  # all of it in one plan, then over several
        for step in (
            lambda: decisions.copy(0, 3, h1),  # offload page 3
            lambda: decisions.copy(0, h1, 5),  # onboard it as page 5
            lambda: decisions.copy(0, 5, h2),  # and offload that
            lambda: decisions.zero(0, 3),
            lambda: decisions.store(0, h1),
            lambda: decisions.copy(0, 4, h1),  # h1 is another page's now
            lambda: decisions.store(0, h1),
            lambda: decisions.copy(0, h2, 4),
            lambda: decisions.copy(0, h1, h2),
            lambda: decisions.copy(0, 7, 3),
        ):
            step()
            if plans == 2:
                decisions.carry_out()
        if plans < 2:
            plan = decisions.carry_out()
            assert not plan.loads and not plan.moves, "what is read is still on the device"
            assert len(plan.writes) == 2 and set(plan.saves[0][1].tolist()) == {1, 2}


def test_a_page_written_in_a_plan_is_offloaded_as_it_was_when_that_was_decided():
    decisions = Decisions()
    decisions.copy(0, 3, HOST + 1)
    decisions.copy(0, 9, 3)
    decisions.copy(0, 3, HOST + 2)
    plan = decisions.carry_out()
    assert plan.saves[0].T.tolist() == [[3, 1], [9, 2]] and plan.saves[0].dtype == INT32
    assert decisions.host[0][[1, 2]].tolist() == [1003, 1009]


def test_a_host_page_onboarded_twice_and_reused():
    decisions = Decisions()
    for destination in (5, 6, HOST + 2):
        decisions.copy(1, HOST + 1, destination)
    decisions.copy(1, 8, HOST + 1)
    plan = decisions.carry_out()
    assert plan.loads[1].tolist() == [[1, 1], [5, 6]] and plan.loads.keys() == {1}
    assert plan.moves[1].tolist() == [[1], [2]] and plan.saves[1].tolist() == [[8], [1]]
    assert plan.copies == ()


def test_pages_that_trade_places_between_tiers():
    decisions = Decisions()
    decisions.copy_together(2, [3, HOST + 1, HOST + 2], [HOST + 1, HOST + 2, 3])
    plan = decisions.carry_out()
    assert [kind[2].T.tolist() for kind in (plan.saves, plan.moves, plan.loads)] == [[[3, 1]], [[1, 2]], [[2, 3]]]


def test_a_host_page_that_is_to_hold_what_it_holds_is_left_alone():
    decisions = Decisions()
    decisions.copy(0, HOST + 1, 4)
    decisions.copy(0, 4, HOST + 1)
    plan = decisions.carry_out()
    assert not plan.saves and not plan.moves and plan.loads[0].tolist() == [[1], [4]]


def test_the_last_write_to_a_host_page_wins():
    decisions = Decisions()
    decisions.zero(0, HOST + 1)
    decisions.copy(0, 4, HOST + 1)
    decisions.zero(0, HOST + 2)
    assert decisions.builder.num_copies == 2
    assert decisions.carry_out().saves[0].T.tolist() == [[4, 1], [ZERO, 2]]


def test_a_value_for_the_store_is_traced_to_what_the_place_held():
    decisions = Decisions()
    decisions.copy(0, HOST + 1, 5)
    decisions.store(0, 5)
    decisions.zero(0, 5)
    decisions.store(0, 5)
    plan = decisions.carry_out()
    assert plan.writes == (Write(0, HOST + 1, "full/0"), Write(0, ZERO, "full/1"))


def test_what_nobody_will_read_is_not_written():
    decisions = Decisions()
    decisions.copy(0, 3, HOST + 1)
    decisions.copy(0, HOST + 1, HOST + 2)
    decisions.builder.forget(0, HOST + 1)
    decisions.builder.forget(0, HOST + 3)
    assert decisions.builder.build().saves[0].tolist() == [[3], [2]]
    decisions.builder.forget(0, HOST + 2)
    assert decisions.builder.empty


@pytest.mark.parametrize("decide", ["save", "load", "move", "store"])
def test_work_for_the_tiers_is_pending_until_clear(decide):
    decisions = Decisions()
    builder = decisions.builder
    nothing = builder.snapshot()
    source = {"save": 3, "load": HOST + 3, "move": HOST + 3, "store": HOST + 3}[decide]
    if decide == "store":
        decisions.store(0, source)
    else:
        decisions.copy(0, source, 4 if decide == "load" else HOST + 4)
    assert not builder.empty and builder.snapshot() != nothing
    assert builder.touches(0, source) and not builder.touches(1, source) and not builder.touches(0, HOST + 5)
    for plan in (builder.build(), builder.build()):
        assert [len(part) for part in (plan.saves, plan.loads, plan.moves, plan.writes)].count(1) == 1
    builder.clear()
    assert builder.empty and builder.snapshot() == nothing and not builder.touches(0, source)
    plan = builder.build()
    assert not (plan.saves or plan.loads or plan.moves or plan.writes)


@pytest.mark.parametrize(
    ("source", "destination"),
    [(HOST + 10, 3), (3, HOST + 10), (HOST, 3), (3, HOST), (41, HOST + 1), (HOST + 1, 41), (HOST + 1, -1),
     (-2, HOST + 1), (HOST + 1, HOST + 10), (HOST + 10, HOST + 1), (2**31 - 1, 3), (3, 2**31 - 1)],
)  # fmt: skip
def test_f26_a_place_beyond_its_tier(source, destination):
    decisions = Decisions()
    decisions.builder.copy(0, source, destination)
    with pytest.raises(IntegrityError, match="pool 0"):
        decisions.builder.build()


@pytest.mark.parametrize("place", [HOST + 10, HOST, 41, -2])
def test_f26_a_value_for_the_store_beyond_its_tier(place):
    decisions = Decisions()
    decisions.builder.store(0, place, "full/x")
    with pytest.raises(IntegrityError, match="pool 0"):
        decisions.builder.build()


def test_f26_without_host_memory_there_is_no_such_place():
    builder = PlanBuilder(small_layout(), np.zeros((0, 0, 0), np.int32), np.zeros(ROWS, np.int32))
    builder.copy(1, 3, HOST + 1)
    with pytest.raises(IntegrityError, match="pool 1"):
        builder.build()


# ------------------------------------------------------------------------------------------------ table entries


COLUMNS = 25_000  # of each of two groups and three rows: whole tables from 2 * 3 * 25,000 / 64 entries on
MOST = 2_343


def final_tables(seed=0):
    return np.random.default_rng(seed).integers(0, NUM_PAGES["window:4"] + 1, (2, ROWS, COLUMNS), dtype=np.int32)


@functools.cache
def long_layout():
    """COLUMNS in each of two groups and three rows: some arrays of entries, or whole tables."""
    layers = {
        "full": jkv.AttentionLayer(jkv.kv_buffers(1, 2, jnp.float32)),
        "window": jkv.AttentionLayer(jkv.kv_buffers(1, 1, jnp.float32), window=4),
    }
    tier = jkv.DeviceTier(pages=40)
    return make_layout(jkv.CacheConfig(layers, ROWS, 2 * COLUMNS, page_size=2, tiers=(tier,)))


def entered(parts):
    """(tables on the device, arrays of entries per plan) after entering column ranges, one plan per list of parts."""
    layout, tables, final = long_layout(), np.zeros((2, ROWS, COLUMNS), np.int32), final_tables()
    builder = PlanBuilder(layout, tables, np.zeros(ROWS, np.int32))
    state, kinds = init_state(layout), []
    for plan_parts in parts:
        for group, row, start, stop in plan_parts:
            tables[group, row, start:stop] = final[group, row, start:stop]
            builder.mark(row, group, start, stop)
        plan = builder.build()
        kinds.append("whole" if plan.tables is not None else len(plan.entries))
        state = apply(state, plan)
        builder.clear()
    return np.stack([np.array(state.page_tables[name]) for name in ("full", "window:4")]), kinds


WHOLE_ROWS = [(group, row, 0, COLUMNS) for group in range(2) for row in range(ROWS)]


@pytest.mark.parametrize(("step", "kind"), [(1_000, 1), (2_500, "whole"), (COLUMNS, "whole")])
def test_entries_and_whole_tables_end_alike(step, kind):
    parts = [[(g, r, at, at + step)] for g, r, _, _ in WHOLE_ROWS for at in range(0, COLUMNS, step)]
    tables, kinds = entered(parts)
    assert set(kinds) == {kind}
    np.testing.assert_array_equal(tables, final_tables())


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1024, 1025, 2048, 2049, MOST, MOST + 1])
def test_every_number_of_entries(count):
    parts = []
    for group, row, _, _ in WHOLE_ROWS:
        n = min(count - sum(p[3] for p in parts), 500)
        if n:
            parts.append((group, row, 0, n))
    tables, kinds = entered([parts])
    wanted = np.zeros_like(tables)
    for group, row, start, stop in parts:
        wanted[group, row, start:stop] = final_tables()[group, row, start:stop]
    np.testing.assert_array_equal(tables, wanted)
    assert kinds == [-(-count // ENTRIES) if count <= MOST else "whole"]


def test_the_last_word_on_an_entry_wins():
    decisions = Decisions()
    decisions.enter(0, 1, 3, [5, 6])
    decisions.enter(0, 1, 2, [7, 8])
    decisions.enter(1, 1, 3, [9])
    state = apply(device_state(decisions.memory), decisions.builder.build())
    assert np.array(state.page_tables["full"])[1, :6].tolist() == [0, 0, 7, 8, 6, 0]
    assert np.array(state.page_tables["window:4"])[1, :6].tolist() == [0, 0, 0, 9, 0, 0]


def test_single_entries_of_many_rows():
    """`mark_each` is `mark` for one column of each; a place may be named twice, the last word wins."""
    layout, tables = small_layout(), np.zeros((2, ROWS, MAX_PAGES), np.int32)
    state = device_state([np.zeros(n + 1) for n in NUM_PAGES.values()])
    builder = PlanBuilder(layout, tables, np.zeros(ROWS, np.int32))
    rows, columns = np.array([2, 0]), np.array([1, 3])
    tables[:, rows, columns] = [[4, 5], [6, 7]]
    builder.mark(2, 0, 0, 2)
    builder.mark_each(0, rows, columns)
    builder.mark_each(1, rows, columns)
    tables[0, 2, :2] = 8, 9
    assert not builder.empty and builder.snapshot() == builder.snapshot()
    state = apply(state, builder.build())
    for name, table in zip(("full", "window:4"), tables, strict=True):
        np.testing.assert_array_equal(np.array(state.page_tables[name]), table)
    builder.clear()
    assert builder.empty


def test_slots_are_replaced_whole():
    decisions = Decisions()
    decisions.slots[:] = [4, 0, 9]
    decisions.builder.slots_changed = True
    state = apply(device_state(decisions.memory), decisions.builder.build())
    assert np.array(state.state_slots["recurrent"]).tolist() == [4, 0, 9]
    decisions.builder.clear()
    assert decisions.builder.build().slots is None


def test_a_plan_of_entries_only_never_touches_the_pools():
    decisions = Decisions()
    state = device_state(decisions.memory)
    before = jax.tree.leaves(state.pools)
    for entries in (1, MAX_PAGES):
        decisions.enter(0, 2, 0, np.full(entries, 3, np.int32))
        decisions.slots[2] = 1 + entries % 20
        decisions.builder.slots_changed = True
        plan = decisions.builder.build()
        assert plan.copies == () and plan.num_copies == ()
        state = apply(state, plan)
        after = jax.tree.leaves(state.pools)
        assert all(a is b for a, b in zip(after, before, strict=True))
        assert not any(leaf.is_deleted() for leaf in after)


def test_an_empty_plan_changes_nothing():
    decisions = Decisions()
    assert decisions.builder.empty
    state = device_state(decisions.memory)
    after = apply(state, decisions.builder.build())
    assert all(a is b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True))


# ------------------------------------------------------------------------------------------------ the arrays


def test_shapes_are_few_and_fixed():
    rng, shapes = np.random.default_rng(5), {"entries": set(), "copies": set(), "counts": set(), "slots": set()}
    for _ in range(200):
        decisions = Decisions()
        decide_at_random(decisions, rng)
        decisions.builder.slots_changed = bool(rng.integers(2))
        plan = decisions.builder.build()
        shapes["entries"] |= {array.shape for array in plan.entries}
        shapes["copies"] |= {array.shape for array in plan.copies}
        shapes["counts"] |= {array.shape for array in (*plan.num_copies, *plan.num_entries)}
        shapes["slots"].add(None if plan.slots is None else plan.slots.shape)
        assert {array.dtype for array in arrays_of(plan)} <= {INT32}
    assert shapes["entries"] == {(3, ENTRIES)}
    assert shapes["copies"] == {(3, 2, 64)}
    assert shapes["counts"] == {(3,), ()}
    assert shapes["slots"] == {None, (ROWS,)}


def test_more_copies_than_one_array_takes():
    layers = {"a": jkv.AttentionLayer(jkv.kv_buffers(1, 1, jnp.int32))}
    layout = make_layout(jkv.CacheConfig(layers, 1, 8, page_size=2, tiers=(jkv.DeviceTier(pages=400),)))
    builder = PlanBuilder(layout, np.zeros((0, 0, 0), np.int32), np.zeros(1, np.int32))
    order = np.random.default_rng(0).permutation(400) + 1
    values = [builder.read(0, int(page)) for page in order]
    for destination, value in enumerate(values, 1):
        builder.write(0, destination, value)
    plan = builder.build()
    assert len(plan.copies) > 6 and {array.shape for array in plan.copies} == {(1, 2, 64)}
    memory = [np.arange(401)]
    assert_same(execute(plan, memory), [np.concatenate(([0], order))])
    state = init_state(layout)
    pools = (({"kv": filled(state.pools[0][0]["kv"], memory[0])},),)
    state = apply(CacheState(pools, state.page_tables, state.state_slots, layout), plan)
    assert_same(memory_of(state), [np.concatenate(([0], order))])


def arrays_of(plan):
    found = [*plan.entries, *plan.num_entries, plan.slots, *plan.copies, *plan.num_copies]
    found += list((plan.tables or {}).values())
    return [array for array in found if array is not None]


@pytest.mark.parametrize("whole", [False, True])
def test_build_is_repeatable_until_clear_and_its_arrays_are_fresh(whole):
    layout = long_layout() if whole else small_layout()
    tables, slots = np.full((2, ROWS, layout.max_pages), 3, np.int32), np.array([1, 2, 3], np.int32)
    builder = PlanBuilder(layout, tables, slots)
    for row in range(ROWS):
        for group in range(2):
            builder.mark(row, group, 0, layout.max_pages)
    builder.copy(0, 3, 4)
    builder.copy(1, 3, 5)
    builder.slots_changed = True
    first, second = builder.build(), builder.build()
    assert (first.tables is not None) == whole
    for a, b in zip(arrays_of(first), arrays_of(second), strict=True):
        assert not np.shares_memory(a, b)
        assert not np.shares_memory(a, tables) and not np.shares_memory(a, slots)
        if not whole and a is first.entries[0]:
            a, b = a[:, : first.num_entries[0]], b[:, : first.num_entries[0]]
        np.testing.assert_array_equal(a, b)
    builder.clear()
    assert builder.empty and builder.num_copies == 0
    empty = builder.build()
    assert empty.entries == () and empty.tables is None and empty.slots is None and empty.copies == ()


def test_a_built_plan_does_not_follow_later_decisions():
    decisions = Decisions()
    decisions.enter(0, 0, 0, [5])
    decisions.copy(0, 3, 4)
    decisions.slots[0] = 1
    decisions.builder.slots_changed = True
    plan = decisions.builder.build()
    decisions.builder.clear()
    decisions.enter(0, 0, 0, [6, 7])
    decisions.copy(0, 7, 8)
    decisions.slots[0] = 2
    decisions.builder.build()
    assert int(plan.num_entries[0]) == 1 and plan.entries[0][:, 0].tolist() == [0, 0, 5]
    assert plan.num_copies[0].tolist() == [1, 0, 0] and plan.copies[0][0, :, 0].tolist() == [3, 4]
    assert plan.slots.tolist() == [1, 0, 0]


# ------------------------------------------------------------------------------------------------ F26


@pytest.mark.parametrize(
    ("pool", "source", "destination"),
    [(0, 41, 3), (0, 3, 41), (1, 31, 3), (1, 3, 31), (2, 21, 3), (2, 3, 21), (0, -2, 3), (0, 3, -1)],
)
def test_f26_a_copy_beyond_its_own_pool(pool, source, destination):
    decisions = Decisions()
    decisions.builder.copy(pool, source, destination)
    with pytest.raises(IntegrityError, match=f"pool {pool}"):
        decisions.builder.build()


@pytest.mark.parametrize("count", [1, 2, MAX_PAGES])
@pytest.mark.parametrize(("group", "page"), [(0, 41), (1, 31), (0, -1), (1, -1), (0, 2**31 - 1)])
def test_f26_an_entry_beyond_its_own_pool(group, page, count):
    decisions = Decisions()
    decisions.enter(0, 0, 0, [40, 35])  # beyond the window pool, good in its own
    decisions.builder.build()
    decisions.enter(group, 1, 0, [3] * (count - 1) + [page])
    with pytest.raises(IntegrityError, match=["full", "window:4"][group]):
        decisions.builder.build()


@pytest.mark.parametrize("page", [41, -1])
def test_f26_a_whole_table_with_an_id_beyond_the_pool(page):
    tables = np.full((2, ROWS, COLUMNS), 3, np.int32)
    builder = PlanBuilder(long_layout(), tables, np.zeros(ROWS, np.int32))
    for row in range(ROWS):
        builder.mark(row, 0, 0, 500)
        builder.mark(row, 1, 0, 500)
    assert builder.build().tables is not None
    tables[1, 2, 499] = page
    with pytest.raises(IntegrityError, match="window:4"):
        builder.build()


@pytest.mark.parametrize("slot", [21, -1])
def test_f26_a_live_slot_beyond_the_pool(slot):
    decisions = Decisions()
    decisions.slots[1] = slot
    decisions.builder.slots_changed = True
    with pytest.raises(IntegrityError):
        decisions.builder.build()


def test_f26_after_the_error_the_pending_work_is_still_there():
    decisions = Decisions()
    decisions.copy(0, 3, 4)
    decisions.enter(0, 0, 0, [41])
    before = decisions.builder.snapshot()
    with pytest.raises(IntegrityError):
        decisions.builder.build()
    assert decisions.builder.snapshot() == before
    decisions.enter(0, 0, 0, [40])
    assert_same(execute(decisions.builder.build(), decisions.before), decisions.memory)
