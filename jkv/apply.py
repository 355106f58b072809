"""A Plan carried out on a CacheState.

    plan.entries, plan.copies, plan.slots, plan.candidates  ->  one jitted call: what they change is donated to it
    plan.tables                                             ->  device_put, seldom

The host never waits here: everything is dispatched, and program order on the device does the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jkv.layout import INT32_MAX
from jkv.plan import CHUNK, ENTRY_CHUNK, NO_ENTRIES, ZERO, Plan
from jkv.state import CacheState, Pools

Tables = tuple[jax.Array, ...]
Layers = tuple[dict[str, jax.Array], ...]
Slots = dict[str, jax.Array]
NewSlots = dict[str, tuple[np.ndarray, np.ndarray]]  # int32 as the old ones, bool[]: whether they count

NO, YES = np.array(False), np.array(True)


def apply(state: CacheState, plan: Plan) -> CacheState:
    """Carries out a plan: copies and zeroes pages and states, sets page-table entries and state slots.

    A plan without copies never passes a pool through a jitted call (that alone costs 50 us for a large model).

    Args:
      state: the cache; the arrays that the plan changes are donated and must not be used again.
      plan: from `PlanBuilder.build`; its ids are in range, which the builder checks.

    Returns:
      The state after the plan, with the same layout. Without copies its pools are the same objects.
    """
    if plan.tables is not None:
        state = dataclasses.replace(state, page_tables=_replaced(state.page_tables, plan.tables))
    slots, entries = _new_slots(state, plan), [*zip(plan.entries, plan.num_entries, strict=True)]
    if not (entries or plan.copies) and (plan.slots is not None or plan.candidates is not None):
        entries = [NO_ENTRIES]
    # The last array of entries shares its dispatch with the first one of copies; more are rare (a long prompt found, a
    # whole batch resumed). Without entries the dispatch gets an array of none: it is no variant of its own.
    shared = entries.pop() if entries and plan.copies else NO_ENTRIES
    for each in entries:
        state = _with(state, state.pools, *_enter(_tables(state), state.state_slots, slots, *each))
    for copies in zip(plan.copies, plan.num_copies, strict=True):
        state = _with(state, *_copy_and_enter(state.pools, _tables(state), state.state_slots, slots, *copies, *shared))
        shared = NO_ENTRIES
    return state


def compile_apply(state: CacheState, blank: Plan) -> None:
    """Compiles all that `apply` ever calls for states like this one: two variants. Runs nothing, changes nothing.

    A later call with arguments of the same shapes finds what is compiled here. `blank`: from `PlanBuilder.blank`.
    """
    small = _tables(state), state.state_slots, _new_slots(state, blank)
    entries, copies = (blank.entries[0], blank.num_entries[0]), (blank.copies[0], blank.num_copies[0])
    _enter.lower(*small, *entries).compile()
    _copy_and_enter.lower(state.pools, *small, *copies, *entries).compile()


def _tables(state: CacheState) -> Tables:
    """The page tables in the order of the groups' ordinals (a dict comes out of jit sorted by its keys)."""
    return tuple(state.page_tables[group.name] for group in state.layout.attention_groups)


def _with(state: CacheState, pools: Pools, tables: Tables, slots: Slots) -> CacheState:
    names = (group.name for group in state.layout.attention_groups)
    return CacheState(pools, dict(zip(names, tables, strict=True)), slots, state.layout)


def _new_slots(state: CacheState, plan: Plan) -> NewSlots:
    planned = {"recurrent": plan.slots, "candidates": plan.candidates}
    new = {}
    for name, old in state.state_slots.items():
        slots = planned[name]
        new[name] = (np.zeros(old.shape, np.int32), NO) if slots is None else (slots, YES)
    return new


def _replaced(old: dict[str, jax.Array], new: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """`old` with the arrays of `new` for those of their names.

    They are placed as the old ones are: another sharding, or none committed to, would recompile the user's step. The
    old ones are deleted as if donated, so that going on with the old state is an error, not stale tables.
    """
    placed = {name: jax.device_put(array, old[name].sharding) for name, array in new.items()}
    for name in placed:
        old[name].delete()
    return {**old, **placed}


def _set_entries(tables: Tables, entries: jax.Array, count: jax.Array) -> Tables:
    """`tables` with the first `count` columns of `entries` set; the rest of `entries` is garbage.

    Args:
      tables: int32[max_sequences, max_pages] per attention group.
      entries: int32[3, E]: group ordinal, row * max_pages + column, page id; the same place always with the same id.
      count: int32[].
    """
    offsets = jnp.arange(ENTRY_CHUNK, dtype=jnp.int32)

    def set_chunk(i: jax.Array, flat: Tables) -> Tables:
        start = i * ENTRY_CHUNK
        chunk = jax.lax.dynamic_slice_in_dim(entries, start, ENTRY_CHUNK, axis=1)
        group = jnp.where(start + offsets < count, chunk[0], -1)
        return tuple(
            table.at[jnp.where(group == ordinal, chunk[1], INT32_MAX)].set(chunk[2], mode="drop")
            for ordinal, table in enumerate(flat)
        )

    flat = tuple(table.reshape(-1) for table in tables)
    flat = jax.lax.fori_loop(0, _chunks(count, ENTRY_CHUNK), set_chunk, flat)
    return tuple(new.reshape(old.shape) for new, old in zip(flat, tables, strict=True))


def _copy_pages(layers: Layers, copies: jax.Array, count: jax.Array) -> Layers:
    """One pool with the first `count` copies carried out in order, CHUNK at a time: gather, then scatter.

    Args:
      layers: the pool's arrays, [pages + 1, ...] each.
      copies: int32[2, K]: sources (ZERO: zeros) and destinations (out of range: dropped).
      count: int32[].
    """
    offsets = jnp.arange(CHUNK, dtype=jnp.int32)

    def copy_chunk(i: jax.Array, layers: Layers) -> Layers:
        start = i * CHUNK
        source, destination = jax.lax.dynamic_slice_in_dim(copies, start, CHUNK, axis=1)
        destination = jnp.where(start + offsets < count, destination, INT32_MAX)

        def copied(array: jax.Array) -> jax.Array:
            pages = array.at[jnp.maximum(source, 0)].get(mode="clip")
            zero = (source == ZERO).reshape(CHUNK, *(1,) * (array.ndim - 1))  # page 0 is not to be relied on
            return array.at[destination].set(jnp.where(zero, 0, pages), mode="drop")

        return jax.tree.map(copied, layers)

    return jax.lax.fori_loop(0, _chunks(count, CHUNK), copy_chunk, layers)


def _chunks(count: jax.Array, size: int) -> jax.Array:
    return (count + (size - 1)) // size


def _set_slots(slots: Slots, new: NewSlots) -> Slots:
    return {name: jnp.where(new[name][1], new[name][0], old) for name, old in slots.items()}


@functools.partial(jax.jit, donate_argnames=("tables", "slots"))
def _enter(
    tables: Tables, slots: Slots, new_slots: NewSlots, entries: jax.Array, num_entries: jax.Array
) -> tuple[Tables, Slots]:
    return _set_entries(tables, entries, num_entries), _set_slots(slots, new_slots)


@functools.partial(jax.jit, donate_argnames=("pools", "tables", "slots"))
def _copy_and_enter(
    pools: Pools,
    tables: Tables,
    slots: Slots,
    new_slots: NewSlots,
    copies: jax.Array,
    num_copies: jax.Array,
    entries: jax.Array,
    num_entries: jax.Array,
) -> tuple[Pools, Tables, Slots]:
    pools = tuple(_copy_pages(layers, copies[p], num_copies[p]) for p, layers in enumerate(pools))
    return pools, _set_entries(tables, entries, num_entries), _set_slots(slots, new_slots)
