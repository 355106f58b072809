"""Small device states for the tests of the device half, with garbage wherever nobody may look."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config import AttentionLayer, CacheConfig, DeviceTier, RecurrentLayer
from jkv.layout import Layout, make_layout
from jkv.state import CacheState, init_state

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.int32)
FLOAT_DTYPES = DTYPES[:4]


def garbage(array: jax.Array, dtype: Any) -> jax.Array:
    """NaN everywhere, or the integers' largest value; as stored, and placed as `array` is."""
    value = np.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
    stored = np.full(array.shape, value, dtype).view(array.dtype)
    return jax.device_put(stored, array.sharding, may_alias=False)


_layouts: dict[str, Layout] = {}


def _layout(layers: Mapping[str, Any], rows: int, max_length: int, page_size: int, pages: int, **fields: Any) -> Layout:
    """Equal arguments, the same layout: a layout is compared by identity, and each compiles everything anew."""
    key = repr((layers, rows, max_length, page_size, pages, fields))
    if key not in _layouts:
        config = CacheConfig(layers, rows, max_length, page_size, DeviceTier(pages=pages), **fields)
        _layouts[key] = make_layout(config)
    return _layouts[key]


def make_state(
    layers: Mapping[str, AttentionLayer | RecurrentLayer],
    lengths: Sequence[int],
    *,
    live_at: Sequence[int] | None = None,
    max_length: int = 64,
    page_size: int = 4,
    pages: int = 48,
    seed: int = 0,
    **fields: Any,
) -> CacheState:
    """A state full of garbage in which row i has scattered pages for lengths[i] tokens, and a state slot.

    Pages that are stale for a window layer at length live_at[i] are missing (null), as the host half would have it;
    None: at the length before the row's last token. `fields` are other fields of CacheConfig; with max_drafts each
    row has scattered candidate slots.
    """
    layout = _layout(layers, len(lengths), max_length, page_size, pages, **fields)
    live_at = [max(0, length - 1) for length in lengths] if live_at is None else live_at
    state = init_state(layout)
    rng = np.random.default_rng(seed)
    free = {pool.ordinal: list(rng.permutation(pool.num_pages) + 1) for pool in layout.pools}
    tables, slots = {}, {}
    for group in layout.groups:
        if group.recurrent:
            slots["recurrent"] = np.array([free[group.pool].pop() for _ in lengths], np.int32)
            pool = layout.pools[group.pool]
            if pool.scratch:
                candidates = 1 + pool.num_pages + rng.permutation(pool.scratch)
                slots["candidates"] = candidates.reshape(state.state_slots["candidates"].shape).astype(np.int32)
            continue
        tables[group.name] = np.zeros((len(lengths), layout.max_pages), np.int32)
        for row, length in enumerate(lengths):
            stale = range(*group.first_live(live_at[row], page_size))
            for column in range(-(-length // page_size)):
                if column not in stale:
                    tables[group.name][row, column] = free[group.pool].pop()
    pools = tuple(
        tuple(
            {name: garbage(array, buffers[name].dtype) for name, array in arrays.items()}
            for arrays, buffers in zip(pool, layout.pools[p].buffers, strict=True)
        )
        for p, pool in enumerate(state.pools)
    )
    return dataclasses.replace(
        state,
        pools=pools,
        page_tables={name: jax.device_put(t, state.page_tables[name].sharding) for name, t in tables.items()},
        state_slots={name: jax.device_put(s, state.state_slots[name].sharding) for name, s in slots.items()},
    )


def with_table(state: CacheState, group: str, table: np.ndarray) -> CacheState:
    """`state` with one group's whole page table replaced."""
    placed = jax.device_put(np.asarray(table, np.int32), state.page_tables[group].sharding)
    return dataclasses.replace(state, page_tables={**state.page_tables, group: placed})


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Values that differ and that every dtype can hold; small enough for float8."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(-100, 100, shape), dtype)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)


def bits(array: Any) -> np.ndarray:
    """The array's bytes, so that NaN equals itself."""
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one entry per XLA compilation inside the `with`."""
    seen: list[str] = []
    active = True

    def listener(event: str, _duration: float, **_: Any) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        active = False  # there is no public way to unregister a listener
