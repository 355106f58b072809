"""Pure functions that read and write a CacheState through page tables and state slots.

Rules that all of them share:

- A padded batch entry has row -1, a padded token position -1: reads give zeros, writes go nowhere.
- So do tokens whose page-table entry is null (0), rows without a state slot, and rows and pages out of range.
- Nothing is ever read from page 0 or slot 0: what lies there is garbage.
- Padding becomes an index >= size, never a negative one: `.at[-1].set(mode="drop")` writes the last page.
- Wrong arguments raise ConfigError while tracing, never on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jkv.config import Buffer
from jkv.errors import ConfigError
from jkv.layout import INT32_MAX, LayerPlace
from jkv.state import CacheState

# ---- checks, at trace time ----------------------------------------------------------------------------------


def _place(state: CacheState, layer: str, op: str) -> LayerPlace:
    if not isinstance(state, CacheState):
        raise ConfigError(f"{op}: state must be a CacheState, got {type(state).__name__}")
    return state.layout.place(layer)


def attention_place(state: CacheState, layer: str, op: str) -> LayerPlace:
    """Where the attention layer `layer` lies; ConfigError for an unknown or a recurrent one."""
    place = _place(state, layer, op)
    if place.group.recurrent:
        raise ConfigError(f"{op}: layer {layer!r} is recurrent; use read_state and write_state")
    return place


def recurrent_place(state: CacheState, layer: str, op: str) -> LayerPlace:
    """Where the recurrent layer `layer` lies; ConfigError for an unknown or an attention layer."""
    place = _place(state, layer, op)
    if not place.group.recurrent:
        raise ConfigError(f"{op}: layer {layer!r} is an attention layer; use append, attend and gather")
    return place


def as_array(name: str, value: Any) -> jax.Array:
    """`value` as an array; ConfigError if it is none."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be an array, got {value!r}") from error


def _index_array(name: str, value: ArrayLike, rank: int, shape: str) -> jax.Array:
    """`value` as int32; ConfigError if it is not a signed integer array of that rank."""
    if isinstance(value, np.ndarray) and value.dtype == np.int64 and value.size and abs(value).max() > INT32_MAX:
        raise ConfigError(f"{name} must be int32{shape}, got values up to {abs(value).max()}")
    array = as_array(name, value)
    if array.ndim != rank or not jnp.issubdtype(array.dtype, jnp.signedinteger):
        raise ConfigError(f"{name} must be int32{shape}, got {array.dtype}{list(array.shape)}")
    return array.astype(jnp.int32)


def check_rows(state: CacheState, rows: ArrayLike) -> jax.Array:
    """`rows` as int32[B] in which everything that is not a row of the tables is INT32_MAX, an index out of range."""
    rows = _index_array("rows", rows, 1, "[B]")
    return jnp.where((rows >= 0) & (rows < state.layout.max_sequences), rows, INT32_MAX)


def check_tokens(state: CacheState, rows: ArrayLike, positions: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """`rows` as in `check_rows`, and `positions` as int32[B, T] in which every padding is -1."""
    rows = check_rows(state, rows)
    positions = _index_array("positions", positions, 2, "[B, T]")
    if positions.shape[0] != rows.shape[0]:
        raise ConfigError(f"positions is [{positions.shape[0]}, {positions.shape[1]}] for rows of [{rows.shape[0]}]")
    live = (positions >= 0) & (rows != INT32_MAX)[:, None]
    return rows, jnp.where(live, positions, -1)


def check_values(
    op: str, layer: str, argument: str, values: Mapping[str, Any], buffers: Mapping[str, Buffer], lead: tuple[int, ...]
) -> dict[str, jax.Array]:
    """`values` as arrays; ConfigError unless it has each of `buffers`, as [*lead, *shape] in the declared dtype."""
    where = f"{op}: {argument} of layer {layer!r}"
    if not isinstance(values, Mapping) or set(values) != set(buffers):
        given = sorted(values) if isinstance(values, Mapping) else type(values).__name__
        raise ConfigError(f"{where} must be a mapping with the buffers {sorted(buffers)}, got {given}")
    arrays = {}
    for name, buffer in buffers.items():
        array = values[name] if hasattr(values[name], "dtype") else as_array(f"{argument}[{name!r}]", values[name])
        shape = (*lead, *buffer.shape)
        if array.shape != shape or array.dtype != buffer.dtype:
            raise ConfigError(
                f"{where}: {argument}[{name!r}] must be {buffer.dtype.name}{list(shape)}, "
                f"got {array.dtype}{list(array.shape)}"
            )
        arrays[name] = jnp.asarray(array)
    return arrays


# ---- storage ------------------------------------------------------------------------------------------------


def as_dtype(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """The same bits as another dtype of the same width: storage to declared, or back (jkv.state.storage_dtype)."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def layer_arrays(state: CacheState, place: LayerPlace) -> dict[str, jax.Array]:
    """A layer's arrays as they are stored."""
    return state.pools[place.pool][place.index]


def _with_layer_arrays(state: CacheState, place: LayerPlace, arrays: dict[str, jax.Array]) -> CacheState:
    pool = list(state.pools[place.pool])
    pool[place.index] = arrays
    pools = list(state.pools)
    pools[place.pool] = tuple(pool)
    return dataclasses.replace(state, pools=tuple(pools))


def table_entries(table: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Page ids at [rows, columns], 0 where either is out of range; both must be >= 0."""
    return table.at[rows, columns].get(mode="fill", fill_value=0)


def _broadcast_over(mask: jax.Array, array: jax.Array) -> jax.Array:
    """`mask` with ones appended to its shape, until it broadcasts against `array` from the left."""
    return mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))


def _gathered(array: jax.Array, ids: jax.Array) -> jax.Array:
    """`array` at ids [B]; garbage where the id is 0."""
    if ids.size == 1:  # see _scattered: of one index XLA makes a dynamic-slice, with the same consequence
        return array.at[jnp.concatenate([ids, jnp.zeros_like(ids)])].get(mode="clip")[:1]
    return array.at[ids].get(mode="clip")


def _scattered(array: jax.Array, ids: jax.Array, places: tuple[jax.Array, ...], values: jax.Array) -> jax.Array:
    """`array` with `values` at [ids, *places]; dropped where the page or slot id is 0."""
    ids = jnp.where(ids > 0, ids, array.shape[0])
    if ids.size == 1:
        # XLA makes a dynamic-update-slice of a scatter of one index, fuses it into its readers and then copies the
        # whole pool (three times beside attend). A second index, dropped, keeps it a scatter, in place.
        ids = jnp.concatenate([ids, jnp.full_like(ids, array.shape[0])])
        places = tuple(jnp.concatenate([place, place]) for place in places)
        values = jnp.concatenate([values, values])
    return array.at[(ids, *places)].set(values, mode="drop")


# ---- attention layers ---------------------------------------------------------------------------------------


def append(
    state: CacheState, layer: str, rows: ArrayLike, positions: ArrayLike, values: Mapping[str, ArrayLike]
) -> CacheState:
    """Writes the step's tokens into their pages.

    Call it before what else reads this layer in the step (`attend`, `gather`): where a read comes first and the write
    does not depend on its result, XLA keeps the old pool for the reader and copies it.

    Args:
      state: the cache; donate it to the jitted step and the write is in place.
      layer: name of an attention layer.
      rows: int32[B], from `prepare`; -1: padding.
      positions: int32[B, T], position of each token in its sequence; -1: padding.
      values: buffer -> [B, T, *shape], in the declared dtype.

    Returns:
      The new state. Tokens whose page-table entry is null are skipped.

    Raises:
      ConfigError: an unknown or recurrent layer; a wrong rank, shape or dtype.
    """
    place = attention_place(state, layer, "append")
    rows, positions = check_tokens(state, rows, positions)
    values = check_values("append", layer, "values", values, place.buffers, positions.shape)
    page_size = state.layout.page_size
    columns = jnp.where(positions < 0, INT32_MAX, positions // page_size)
    pages = table_entries(state.page_tables[place.group.name], rows[:, None], columns)
    written = {}
    for name, array in layer_arrays(state, place).items():
        tokens = as_dtype(values[name], array.dtype)
        written[name] = _scattered(array, pages, (positions % page_size,), tokens)
    return _with_layer_arrays(state, place, written)


def gather(state: CacheState, layer: str, rows: ArrayLike, length: int) -> dict[str, jax.Array]:
    """Contiguous copies of the first `length` tokens of each row.

    Args:
      state: the cache.
      layer: name of an attention layer.
      rows: int32[B]; -1: padding.
      length: tokens to read, a Python int of at most max_length, rounded up to whole pages.

    Returns:
      buffer -> [B, length, *shape] in the declared dtype; zeros for padding and where a row has no page. Tokens
      of a page that the sequence has not written yet are whatever the page holds.

    Raises:
      ConfigError: an unknown or recurrent layer, a `length` that is no int or does not fit.
    """
    place = attention_place(state, layer, "gather")
    layout = state.layout
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise ConfigError(f"gather: length must be a Python int (it is a shape), got {type(length).__name__}")
    if not 0 <= length <= layout.max_pages * layout.page_size:
        raise ConfigError(f"gather: length must be 0..{layout.max_pages * layout.page_size}, got {length}")
    rows = check_rows(state, rows)
    num_pages = -(-length // layout.page_size)
    pages = table_entries(state.page_tables[place.group.name], rows[:, None], jnp.arange(num_pages))
    out = {}
    for name, array in layer_arrays(state, place).items():
        blocks = array.at[pages].get(mode="clip")  # [B, num_pages, page_size, *shape]
        blocks = jnp.where(_broadcast_over(pages > 0, blocks), blocks, 0)
        tokens = blocks.reshape(rows.shape[0], num_pages * layout.page_size, *array.shape[2:])[:, :length]
        out[name] = as_dtype(tokens, place.buffers[name].dtype)
    return out


def table_for(state: CacheState, layer: str, rows: ArrayLike, buffer: str | None = None) -> jax.Array:
    """The page table of each row, for custom kernels.

    Args:
      state: the cache.
      layer: name of an attention layer.
      rows: int32[B]; -1: padding.
      buffer: one of the layer's buffers, or None: all of them share one table.

    Returns:
      int32[B, max_pages], page ids in `pool(state, layer, ...)`; 0: no page.

    Raises:
      ConfigError: an unknown layer or buffer, a recurrent layer, a wrong rank or dtype.
    """
    place = attention_place(state, layer, "table_for")
    if buffer is not None:
        _known_buffer("table_for", layer, place, buffer)
    rows = check_rows(state, rows)
    return state.page_tables[place.group.name].at[rows].get(mode="fill", fill_value=0)


# ---- recurrent layers ---------------------------------------------------------------------------------------


def slots_for(state: CacheState, layer: str, rows: ArrayLike) -> jax.Array:
    """The live state slot of each row.

    Args:
      state: the cache.
      layer: name of a recurrent layer.
      rows: int32[B]; -1: padding.

    Returns:
      int32[B], slots in `pool(state, layer, ...)`; 0: none.

    Raises:
      ConfigError: an unknown or attention layer, a wrong rank or dtype.
    """
    place = recurrent_place(state, layer, "slots_for")
    rows = check_rows(state, rows)
    return state.state_slots[place.group.name].at[rows].get(mode="fill", fill_value=0)


def read_state(state: CacheState, layer: str, rows: ArrayLike) -> dict[str, jax.Array]:
    """The recurrent state of each row.

    Args:
      state: the cache.
      layer: name of a recurrent layer.
      rows: int32[B]; -1: padding.

    Returns:
      buffer -> [B, *shape] in the declared dtype; zeros for padding and rows without a slot.

    Raises:
      ConfigError: an unknown or attention layer, a wrong rank or dtype.
    """
    place = recurrent_place(state, layer, "read_state")
    slots = slots_for(state, layer, rows)
    out = {}
    for name, array in layer_arrays(state, place).items():
        states = _gathered(array, slots)
        out[name] = as_dtype(jnp.where(_broadcast_over(slots > 0, states), states, 0), place.buffers[name].dtype)
    return out


def write_state(state: CacheState, layer: str, rows: ArrayLike, values: Mapping[str, ArrayLike]) -> CacheState:
    """Replaces the recurrent state of each row.

    Args:
      state: the cache; donate it to the jitted step and the write is in place.
      layer: name of a recurrent layer.
      rows: int32[B], each row at most once; -1: padding.
      values: buffer -> [B, *shape], in the declared dtype.

    Returns:
      The new state. Rows without a slot are skipped.

    Raises:
      ConfigError: an unknown or attention layer; a wrong rank, shape or dtype.
    """
    place = recurrent_place(state, layer, "write_state")
    slots = slots_for(state, layer, rows)
    values = check_values("write_state", layer, "values", values, place.buffers, slots.shape)
    written = {}
    for name, array in layer_arrays(state, place).items():
        # Keeping `old` where there is no slot changes nothing, but makes this write depend on the very gather that
        # `read_state` did: without that, XLA copies the whole pool where the new state does not follow from the old.
        old = _gathered(array, slots)
        states = jnp.where(_broadcast_over(slots > 0, old), as_dtype(values[name], array.dtype), old)
        written[name] = _scattered(array, slots, (), states)
    return _with_layer_arrays(state, place, written)


# ---- raw access ---------------------------------------------------------------------------------------------


def _known_buffer(op: str, layer: str, place: LayerPlace, buffer: str) -> Buffer:
    if buffer not in place.buffers:
        raise ConfigError(f"{op}: layer {layer!r} has no buffer {buffer!r}, only {', '.join(place.buffers)}")
    return place.buffers[buffer]


def pool(state: CacheState, layer: str, buffer: str) -> jax.Array:
    """The whole array of one buffer, in its declared dtype, for custom kernels.

    On the CPU a float narrower than 32 bits is stored as an integer: outside jit this copies the pool, and inside a
    write to it in the declared dtype does.

    Args:
      state: the cache.
      layer: name of any layer.
      buffer: one of its buffers.

    Returns:
      attention: [pages + 1, page_size, *shape], index it with `table_for`; recurrent: [slots + 1, *shape], index
      it with `slots_for`.

    Raises:
      ConfigError: an unknown layer or buffer.
    """
    place = _place(state, layer, "pool")
    dtype = _known_buffer("pool", layer, place, buffer).dtype
    return as_dtype(layer_arrays(state, place)[buffer], dtype)


def with_pool(state: CacheState, layer: str, buffer: str, array: jax.Array) -> CacheState:
    """The state with one buffer's array replaced: the way back from `pool`.

    Args:
      state: the cache.
      layer: name of any layer.
      buffer: one of its buffers.
      array: what `pool` gave, updated: same shape, declared dtype.

    Raises:
      ConfigError: an unknown layer or buffer; another shape or dtype than `pool` gives.
    """
    place = _place(state, layer, "with_pool")
    dtype = _known_buffer("with_pool", layer, place, buffer).dtype
    arrays = layer_arrays(state, place)
    stored = arrays[buffer]
    if array.shape != stored.shape or array.dtype != dtype:
        raise ConfigError(
            f"with_pool: array for {layer!r}, {buffer!r} must be {dtype.name}{list(stored.shape)}, "
            f"got {array.dtype}{list(array.shape)}"
        )
    return _with_layer_arrays(state, place, {**arrays, buffer: as_dtype(array, stored.dtype)})
