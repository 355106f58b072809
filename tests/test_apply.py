"""apply: a Plan carried out on a CacheState."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import DTYPES, bits, compilations, make_state

import jkv.apply
from jkv.apply import apply
from jkv.config import AttentionLayer, Buffer, RecurrentLayer, kv_buffers
from jkv.plan import CHUNK, ENTRIES, UNUSED, ZERO, Plan
from jkv.state import CacheState

NONE = np.array(0, np.int32)


def hybrid_state(dtype=jnp.float32, rows=4, pages=96, max_length=64, **fields) -> CacheState:
    layers = {
        "full.0": AttentionLayer(kv_buffers(1, 2, dtype)),
        "full.1": AttentionLayer(kv_buffers(1, 2, dtype, fused=False)),
        "local": AttentionLayer(kv_buffers(1, 2, dtype), window=8),
        "ssm": RecurrentLayer({"h": Buffer((3,), dtype)}),
    }
    return make_state(layers, [0] * rows, pages=pages, max_length=max_length, **fields)


def numbered(state: CacheState) -> CacheState:
    """Page i of every pool holds i, as stored."""

    def fill(a):
        ids = np.arange(a.shape[0]).reshape(-1, *[1] * (a.ndim - 1))
        return jax.device_put(np.broadcast_to(ids, a.shape).astype(a.dtype).copy(), a.sharding, may_alias=False)

    return CacheState(jax.tree.map(fill, state.pools), state.page_tables, state.state_slots, state.layout)


def entries(*columns: tuple[int, int, int], size: int = ENTRIES) -> dict:
    """Plan fields: (group, flat index, page id) each; the unused rest is garbage that would show."""
    array = np.full((3, size), 1, np.int32)
    array[2] = 77
    array[:, : len(columns)] = np.array(columns, np.int32).reshape(-1, 3).T
    return {"entries": (array,), "num_entries": (np.array(len(columns), np.int32),)}


def twice(fields: dict) -> dict:
    """The same plan fields in two arrays of entries."""
    return {name: arrays + tuple(array.copy() for array in arrays) for name, arrays in fields.items()}


def copies(state: CacheState, *pairs: list[tuple[int, int]], size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """(source, destination) pairs per pool."""
    array, counts = np.zeros((len(state.pools), 2, size), np.int32), np.zeros(len(state.pools), np.int32)
    array[:, 1] = UNUSED
    for pool, moves in enumerate(pairs):
        array[pool, :, : len(moves)] = np.array(moves, np.int32).reshape(-1, 2).T
        counts[pool] = len(moves)
    return array, counts


def plan(**fields) -> Plan:
    arrays = [fields.pop("moves")] if "moves" in fields else fields.pop("all_moves", [])
    defaults = {"entries": (), "num_entries": (), "tables": None, "slots": None, "candidates": None}
    return Plan(**{**defaults, **fields}, copies=tuple(a for a, _ in arrays), num_copies=tuple(n for _, n in arrays))


def contents(state: CacheState) -> list[list[int]]:
    """Per pool, what each page holds, having checked that all of it holds the same in every layer."""
    out = []
    for pool in state.pools:
        flat = [np.asarray(a).reshape(a.shape[0], -1) for a in jax.tree.leaves(pool)]
        together = np.concatenate(flat, axis=1)
        assert (together == together[:, :1]).all()
        out.append(together[:, 0].astype(int).tolist())
    return out


def carried_out(pages: list[int], pairs: list[tuple[int, int]]) -> list[int]:
    """What the contract says: chunk by chunk of 8, each gathered before it is scattered."""
    pages = list(pages)
    for at in range(0, len(pairs), CHUNK):
        chunk = pairs[at : at + CHUNK]
        for value, (_, destination) in zip([0 if s == ZERO else pages[s] for s, _ in chunk], chunk, strict=True):
            if destination != UNUSED:
                pages[destination] = value
    return pages


def test_an_empty_plan_returns_the_state_itself():
    state = hybrid_state()
    assert apply(state, plan()) is state


def test_entries_set_exactly_what_they_name_and_never_see_a_pool(monkeypatch):
    state = hybrid_state()
    monkeypatch.setattr(jkv.apply, "_copy_and_enter", None)  # the only function that takes pools
    pools, slots = state.pools, np.array(state.state_slots["recurrent"])
    after = apply(state, plan(**entries((0, 0, 5), (0, 17, 6), (1, 2, 7), (1, 63, 96))))
    full, local = (np.asarray(after.page_tables[g]) for g in ("full", "window:8"))
    expected_full, expected_local = np.zeros((4, 16), int), np.zeros((4, 16), int)
    expected_full[0, 0], expected_full[1, 1], expected_local[0, 2], expected_local[3, 15] = 5, 6, 7, 96
    np.testing.assert_array_equal(full, expected_full)
    np.testing.assert_array_equal(local, expected_local)
    assert after.pools is pools and after.layout is state.layout
    np.testing.assert_array_equal(after.state_slots["recurrent"], slots)
    assert all(t.is_deleted() for t in state.page_tables.values())


@pytest.mark.parametrize("count", [0, 1, 256, 257, 700, 768])
def test_as_many_entries_as_the_count_says(count):
    state = hybrid_state(rows=64)
    places = np.random.default_rng(count).permutation(2 * 64 * 16)[:count]
    columns = [(int(p) // 1024, int(p) % 1024, 1 + i % 96) for i, p in enumerate(places)]
    after = apply(state, plan(**entries(*columns, size=768)))
    expected = np.zeros((2, 1024), int)
    for group, index, page in columns:
        expected[group, index] = page
    for group, table in zip(("full", "window:8"), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(after.page_tables[group]).ravel(), table)


def test_copies_in_every_layer_of_their_pool():
    state = numbered(hybrid_state())
    pairs = [(7, 3), (9, 7), (ZERO, 5)], [(1, 2)], [(4, 6), (ZERO, 4)]
    before = contents(state)
    old = state.pools
    after = apply(state, plan(moves=copies(state, *pairs)))
    assert contents(after) == [carried_out(p, m) for p, m in zip(before, pairs, strict=True)]
    assert all(a.is_deleted() for a in jax.tree.leaves(old)) and after.layout is state.layout


@pytest.mark.parametrize("seed", range(4))
def test_random_copies_are_carried_out_chunk_by_chunk(seed):
    """Pages are read after earlier chunks wrote them; page 0 is a place like any other; counts end in mid-chunk."""
    rng = np.random.default_rng(seed)
    state = numbered(hybrid_state(pages=12))
    pairs = []
    for _ in state.pools:
        moves = []
        while len(moves) < int(rng.integers(0, 60)):
            chunk = rng.permutation(13)[: CHUNK - 1]
            moves += [(int(rng.integers(-1, 13)), int(d)) for d in chunk] + [(0, UNUSED)]
        pairs.append(moves[: int(rng.integers(0, 60))])
    before = contents(state)
    after = apply(state, plan(moves=copies(state, *pairs)))
    assert contents(after) == [carried_out(p, m) for p, m in zip(before, pairs, strict=True)]


def test_several_arrays_of_copies_are_carried_out_in_order_with_the_entries():
    state = numbered(hybrid_state())
    first = copies(state, [(i, i + 40) for i in range(1, 9)], size=8)
    second = copies(state, [(i + 40, i + 60) for i in range(1, 9)], size=8)
    after = apply(state, plan(all_moves=[first, second], **entries((0, 3, 9))))
    assert contents(after)[0][61:69] == list(range(1, 9))
    assert int(after.page_tables["full"][0, 3]) == 9


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_copies_are_bit_exact_and_zeros_do_not_come_from_the_null_page(dtype):
    state = hybrid_state(dtype, pages=12)  # NaN, or the largest integer, everywhere: page 0 too
    after = apply(state, plan(moves=copies(state, [(3, 1), (ZERO, 2)], [(ZERO, 1)], [(ZERO, 12)])))
    for pool, zeroed in zip(after.pools, (2, 1, 12), strict=True):
        for array in jax.tree.leaves(pool):
            array = np.asarray(array)
            assert not bits(array[zeroed]).any()
            np.testing.assert_array_equal(
                bits(np.delete(array, zeroed, 0)), bits(np.broadcast_to(array[0], (12, *array.shape[1:])))
            )


def test_whole_tables_and_slots_replace_what_was_there():
    state = hybrid_state()
    placed = {name: t.sharding for name, t in state.page_tables.items()}
    tables = {"full": np.arange(64, dtype=np.int32).reshape(4, 16), "window:8": np.ones((4, 16), np.int32)}
    slots = np.array([4, 3, 2, 1], np.int32)
    after = apply(state, plan(tables=tables, slots=slots))
    for name, table in tables.items():
        np.testing.assert_array_equal(after.page_tables[name], table)
        assert after.page_tables[name].sharding == placed[name] and after.page_tables[name].committed
    assert after.state_slots["recurrent"].tolist() == [4, 3, 2, 1]
    assert after.pools is state.pools


@pytest.mark.parametrize("fields", [("slots",), ("candidates",), ("slots", "candidates")], ids="+".join)
def test_slots_and_candidates_replace_each_its_own_table(fields):
    state = hybrid_state(max_drafts=1)
    before, tables = dict(state.state_slots), jax.tree.map(np.array, state.page_tables)
    values = jax.tree.map(np.array, before)
    placed = {name: array.sharding for name, array in before.items()}
    new = {"slots": np.array([4, 3, 2, 1], np.int32), "candidates": np.arange(97, 113, dtype=np.int32).reshape(4, 2, 2)}
    after = apply(state, plan(**{field: new[field] for field in fields}))
    for field, name in (("slots", "recurrent"), ("candidates", "candidates")):
        if field in fields:
            np.testing.assert_array_equal(after.state_slots[name], new[field])
        else:
            np.testing.assert_array_equal(after.state_slots[name], values[name])
        assert before[name].is_deleted() and after.state_slots[name].committed
        assert after.state_slots[name].sharding == placed[name]
    assert after.pools is state.pools
    for name, table in tables.items():
        np.testing.assert_array_equal(after.page_tables[name], table)


def test_copies_reach_candidate_slots():
    state = numbered(hybrid_state(pages=12, max_drafts=1))
    pairs = [], [], [(28, 3), (2, 27)]  # slots 13..28 are candidates
    before = contents(state)
    after = apply(state, plan(moves=copies(state, *pairs)))
    assert len(before[2]) == 29
    assert contents(after) == [carried_out(p, m) for p, m in zip(before, pairs, strict=True)]


def test_nothing_compiles_in_steady_state():
    """Every kind of plan, with the user's donated step in between: the second round compiles nothing."""
    state = numbered(hybrid_state(max_drafts=1))
    step = jax.jit(lambda state: jax.tree.map(lambda a: a + 0, state), donate_argnums=0)

    def kinds():
        moves, slots = copies(state, [(1, 2)]), np.array([1, 2, 3, 4], np.int32)
        table = np.ones((4, 16), np.int32)
        yield plan(**entries((0, 0, 5)))
        yield plan(**twice(entries((0, 0, 5))))
        yield plan(tables={"full": table, "window:8": table.copy()}, slots=slots)
        yield plan(moves=moves, slots=slots, candidates=np.ones((4, 2, 2), np.int32))
        yield plan(moves=moves, **entries((0, 0, 5)))
        yield plan(moves=moves, **twice(entries((0, 0, 5))))
        yield plan(all_moves=[moves, moves])

    with compilations() as compiled:
        for _ in range(2):
            warm = len(compiled)
            for each in kinds():
                state = step(apply(state, each))
        jax.block_until_ready(state)
        assert 0 < warm <= 3 and len(compiled) == warm, "two variants, and the step"


def test_copies_are_in_place():
    state = make_state(
        {"a": AttentionLayer(kv_buffers(2, 32, jnp.bfloat16)), "ssm": RecurrentLayer({"h": Buffer((16, 64))})},
        [0] * 4,
        page_size=16,
        pages=512,
    )
    tables = tuple(state.page_tables.values())
    (moves, counts), table = copies(state, [], []), entries()
    slots = {"recurrent": (np.zeros(4, np.int32), np.array(True))}
    small = tables, state.state_slots, slots
    lowered = jkv.apply._copy_and_enter.lower(state.pools, *small, moves, counts, *table["entries"], NONE)
    memory = lowered.compile().memory_analysis()
    pool_bytes = sum(a.nbytes for a in jax.tree.leaves(state.pools))
    assert memory.temp_size_in_bytes < pool_bytes / 8 and memory.alias_size_in_bytes >= pool_bytes


def test_s56_apply_returns_while_a_step_still_runs():
    state = numbered(hybrid_state())
    every = [
        plan(**entries((0, 0, 5))),
        plan(moves=copies(state, [(1, 2)]), **entries((0, 1, 6)), slots=np.array([1, 2, 3, 4], np.int32)),
        plan(tables={g: np.ones((4, 16), np.int32) for g in state.page_tables}, slots=np.array([1, 2, 3, 4], np.int32)),
    ]

    @jax.jit
    def slow(x, state):
        y = jax.lax.fori_loop(0, 2000, lambda i, x: jnp.sin(x @ x), x)
        return y, jax.tree.map(lambda a: a + (y[0, 0] * 0).astype(a.dtype), state)

    x = jnp.eye(128)
    for each in every:  # compile
        state = apply(jax.block_until_ready(slow(x, state))[1], each)
    for each in every:
        y, state = slow(x, state)
        start = time.perf_counter()
        state = apply(state, each)
        waited = time.perf_counter() - start
        assert not y.is_ready(), f"apply took {waited:.3f} s"
        jax.block_until_ready(state)


def test_f25_a_dispatched_step_reads_the_table_of_its_time():
    state = apply(hybrid_state(), plan(**entries((0, 0, 3), (0, 1, 5))))

    @jax.jit
    def step(x, table):  # does not donate: apply's own donation must wait for it
        y = jax.lax.fori_loop(0, 300, lambda i, x: jnp.sin(x @ x), x)
        return table[0, :2] + (y[0, 0] * 0).astype(jnp.int32)

    seen = step(jnp.eye(128), state.page_tables["full"])
    state = apply(state, plan(**entries((0, 0, 7), (0, 1, 9))))
    assert seen.tolist() == [3, 5] and state.page_tables["full"][0, :2].tolist() == [7, 9]
