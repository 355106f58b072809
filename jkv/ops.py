"""Pure functions that read and write a CacheState through page tables and state slots.

Rules that all of them share:

- `rows` are those of a padded batch, int32[B] with positions [B, T]; or a Ragged, with positions [T].
- A padded batch entry has row -1, a padded token position -1: reads give zeros, writes go nowhere.
- So do tokens whose page-table entry is null (0), rows without a state slot, and rows and pages out of range.
- Nothing is ever read from page 0 or slot 0: what lies there is garbage.
- Padding becomes an index >= size, never a negative one: `.at[-1].set(mode="drop")` writes the last page.
- Wrong arguments raise ConfigError while tracing, never on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jkv.config import LARGEST_QUANTIZED, Buffer, scale_names
from jkv.errors import ConfigError
from jkv.layout import INT32_MAX, LayerPlace
from jkv.ragged import Ragged
from jkv.state import CacheState
from jkv.transfer import Transfer

Rows = ArrayLike | Ragged  # what every op takes: rows of a padded batch, or a ragged one

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


def _own_place(op: str, layer: str, place: LayerPlace) -> LayerPlace:
    """`place`; ConfigError if it is another layer's, which alone may write there."""
    if place.shares is not None:
        raise ConfigError(f"{op}: layer {layer!r} reads the KV of {place.shares!r}; {op} to {place.shares!r}")
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


def _index_array(name: str, value: Any, rank: int | None, shape: str) -> jax.Array:
    """`value` as int32; ConfigError if it is not a signed integer array of that rank (None: any)."""
    if isinstance(value, np.ndarray) and value.dtype == np.int64 and value.size and abs(value).max() > INT32_MAX:
        raise ConfigError(f"{name} must be int32{shape}, got values up to {abs(value).max()}")
    array = as_array(name, value)
    if rank not in (None, array.ndim) or not jnp.issubdtype(array.dtype, jnp.signedinteger):
        raise ConfigError(f"{name} must be int32{shape}, got {array.dtype}{list(array.shape)}")
    return array.astype(jnp.int32)


def check_rows(state: CacheState, rows: Rows) -> jax.Array:
    """`rows` as int32[B] in which everything that is not a row of the tables is INT32_MAX, an index out of range."""
    if isinstance(rows, Ragged):
        return check_ragged(state, rows).rows
    rows = _index_array("rows", rows, 1, "[B]")
    return jnp.where((rows >= 0) & (rows < state.layout.max_sequences), rows, INT32_MAX)


def check_ragged(state: CacheState, batch: Ragged) -> Ragged:
    """`batch` with int32 arrays, its rows as `check_rows` gives them; ConfigError if the shapes do not fit."""
    arrays = {
        field.name: _index_array(f"Ragged.{field.name}", getattr(batch, field.name), 1, f"[{size}]")
        for field, size in zip(dataclasses.fields(batch), ("R", "T", "R + 1", "R", "1"), strict=True)
    }
    rows = arrays["rows"].shape[0]
    for name, size in (("cu_q_lens", rows + 1), ("kv_lens", rows), ("num_seqs", 1)):
        if arrays[name].shape[0] != size:
            raise ConfigError(f"Ragged.{name} is [{arrays[name].shape[0]}], must be [{size}] for rows of [{rows}]")
    return Ragged(**{**arrays, "rows": check_rows(state, arrays["rows"])})


def check_tokens(state: CacheState, rows: Rows, positions: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """`rows` as in `check_rows`, and `positions` as int32[B, T], of a Ragged int32[T], in which every padding is -1."""
    if isinstance(rows, Ragged):
        batch = check_ragged(state, rows)
        positions, tokens = _index_array("positions", positions, 1, "[T]"), batch.positions.shape[0]
        if positions.shape[0] != tokens:
            raise ConfigError(f"positions is [{positions.shape[0]}] for a Ragged of {tokens} tokens")
        checked = batch.rows
    else:
        checked = check_rows(state, rows)
        positions = _index_array("positions", positions, 2, "[B, T]")
        if positions.shape[0] != checked.shape[0]:
            raise ConfigError(f"positions is {list(positions.shape)} for rows of [{checked.shape[0]}]")
    live = (positions >= 0) & (rows_of_tokens(rows, checked) != INT32_MAX)
    return checked, jnp.where(live, positions, -1)


def rows_of_tokens(batch: Rows, rows: jax.Array) -> jax.Array:
    """Each token's row: int32[B, 1], of a Ragged int32[T]; INT32_MAX: none.

    Args:
      batch: what the op was given for rows.
      rows: the same, from `check_rows`.
    """
    if not isinstance(batch, Ragged):
        return rows[:, None]
    if rows.size == 0:
        return jnp.full(np.shape(batch.positions), INT32_MAX, jnp.int32)
    return rows.at[batch.sequence_of_tokens()].get(mode="fill", fill_value=INT32_MAX)


def _check_names(where: str, values: Any, *accepted: Iterable[str]) -> Mapping[str, Any]:
    """`values`; ConfigError unless it is a mapping with exactly the names of one of `accepted`."""
    sets = [set(names) for names in accepted]
    if not isinstance(values, Mapping) or set(values) not in sets:
        given = sorted(values) if isinstance(values, Mapping) else type(values).__name__
        names = " or ".join(dict.fromkeys(str(sorted(each)) for each in sets))
        raise ConfigError(f"{where} must be a mapping with the buffers {names}, got {given}")
    return values


def _check_value(where: str, value: Any, shape: tuple[int, ...], dtype: np.dtype | None) -> jax.Array:
    """`value` as an array; ConfigError if it has another shape or dtype (None: any float)."""
    array = value if hasattr(value, "dtype") else as_array(where, value)
    fits = jnp.issubdtype(array.dtype, jnp.floating) if dtype is None else array.dtype == dtype
    if array.shape != shape or not fits:
        wanted = f"{'any float' if dtype is None else dtype.name}{list(shape)}"
        raise ConfigError(f"{where} must be {wanted}, got {array.dtype}{list(array.shape)}")
    return jnp.asarray(array)


def check_values(
    op: str,
    layer: str,
    argument: str,
    values: Mapping[str, Any] | None,
    buffers: Mapping[str, Buffer],
    lead: tuple[int, ...],
) -> dict[str, jax.Array]:
    """`values` as arrays; ConfigError unless it has each of `buffers`, as [*lead, *shape] in the declared dtype."""
    where = f"{op}: {argument} of layer {layer!r}"
    given = _check_names(where, values, buffers)
    return {
        name: _check_value(f"{where}: {argument}[{name!r}]", given[name], (*lead, *buffer.shape), buffer.dtype)
        for name, buffer in buffers.items()
    }


def token_values(
    op: str, layer: str, argument: str, values: Mapping[str, Any], place: LayerPlace, lead: tuple[int, ...]
) -> dict[str, jax.Array]:
    """What the step's tokens store in the layer: `values`, quantised where the layer has scales and they are not given.

    Args:
      op, layer, argument: for messages.
      values: every buffer of the layer, as [*lead, *shape] in the declared dtype; or all but the scales, and those
        that they scale in any float dtype.
      place: where the layer lies.
      lead: the shape of the step's positions.

    Returns:
      Every buffer of the layer -> [*lead, *shape] in the declared dtype.

    Raises:
      ConfigError: other buffers, a wrong shape or dtype.
    """
    where, buffers = f"{op}: {argument} of layer {layer!r}", place.buffers
    scales = scale_names(buffers)
    unscaled = [name for name in buffers if name not in scales.values()]
    given = _check_names(where, values, buffers, unscaled)
    if len(given) == len(buffers):
        return check_values(op, layer, argument, given, buffers, lead)
    arrays = {}
    for name in unscaled:
        dtype = None if name in scales else buffers[name].dtype
        shape = (*lead, *buffers[name].shape)
        arrays[name] = _check_value(f"{where}: {argument}[{name!r}]", given[name], shape, dtype)
    for name, scale in scales.items():
        arrays[name], arrays[scale] = _quantized(arrays[name], buffers[name].dtype, buffers[scale].dtype)
    return arrays


def _quantized(array: jax.Array, dtype: np.dtype, scale_dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """`array` as (quantised elements, their scales without the last axis); the product is about `array` again.

    A vector with a NaN has it in its scale, and its elements are 0.
    """
    array = array.astype(jnp.float32)
    largest = LARGEST_QUANTIZED[dtype]
    # XLA compiles a division by a constant as a product, so with a division eager ops would differ from jitted ones.
    scale = jnp.abs(array).max(axis=-1) * (1 / largest)
    scale = jnp.minimum(scale, float(jnp.finfo(scale_dtype).max)).astype(scale_dtype)
    divisor = scale.astype(jnp.float32)[..., None]  # the rounded one: it is what a reader multiplies with
    steps = jnp.where(divisor > 0, array / jnp.where(divisor > 0, divisor, 1), 0)
    steps = jnp.clip(steps, -largest, largest)  # a scale rounded down; beyond its largest number float8 is NaN
    return (jnp.round(steps) if jnp.issubdtype(dtype, jnp.integer) else steps).astype(dtype), scale


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


def _scattered(
    array: jax.Array, ids: jax.Array, places: tuple[jax.Array, ...], values: jax.Array, after: Sequence[jax.Array] = ()
) -> jax.Array:
    """`array` with `values` at [ids, *places]; dropped where the page or slot id is 0.

    `after`: arrays that XLA has to compute before it writes.
    """
    beyond = array.shape[0]
    ids = jnp.where(ids > 0, ids, beyond)
    if ids.size == 1 or (after and ids.size):
        # XLA makes a dynamic-update-slice of a scatter of one index, fuses it into its readers and then copies the
        # whole pool (three times beside attend). One more index, dropped, keeps it a scatter, in place. Computed from
        # `after` it is out of range all the same, and XLA cannot know that it does not matter.
        more = jnp.full_like(ids[:1], beyond) + sum((a.reshape(-1)[0] > 0).astype(jnp.int32) for a in after)
        ids = jnp.concatenate([ids, more])
        places = tuple(jnp.concatenate([place, place[:1]]) for place in places)
        values = jnp.concatenate([values, values[:1]])
    return array.at[(ids, *places)].set(values, mode="drop")


# ---- attention layers ---------------------------------------------------------------------------------------


def append(
    state: CacheState, layer: str, rows: Rows, positions: ArrayLike, values: Mapping[str, ArrayLike]
) -> CacheState:
    """Writes the step's tokens into their pages.

    Call it before what else reads this layer in the step (`attend`, `gather`): where a read comes first and the write
    does not depend on its result, XLA keeps the old pool for the reader and copies it.

    Args:
      state: the cache; donate it to the jitted step and the write is in place.
      layer: name of an attention layer.
      rows: int32[B], from `prepare`; -1: padding. Or a Ragged.
      positions: int32[B, T], position of each token in its sequence; -1: padding. With a Ragged int32[T].
      values: buffer -> [B, T, *shape], in the declared dtype; with a Ragged [T, *shape]. A layer with scales takes
        its K/V also without them, in any float dtype, and quantises each token and head: the scale is
        max |x| / 127 (int8) or / 448 (float8_e4m3fn).

    Returns:
      The new state. Tokens whose page-table entry is null are skipped.

    Raises:
      ConfigError: an unknown or recurrent layer, or one that shares another's KV; a wrong rank, shape or dtype.

    >>> import jkv, numpy as np, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> positions, values = np.array([[0, 1, 2]], np.int32), {"kv": jnp.ones((1, 3, 2, 8))}
    >>> state = jkv.append(state, "attn", rows, positions, values)
    >>> float(jkv.gather(state, "attn", rows, 3)["kv"].sum())
    48.0
    """
    place = _own_place("append", layer, attention_place(state, layer, "append"))
    checked, positions = check_tokens(state, rows, positions)
    values = token_values("append", layer, "values", values, place, positions.shape)
    page_size = state.layout.page_size
    columns = jnp.where(positions < 0, INT32_MAX, positions // page_size)
    pages = table_entries(state.page_tables[place.group.name], rows_of_tokens(rows, checked), columns)
    written = {}
    for name, array in layer_arrays(state, place).items():
        tokens = as_dtype(values[name], array.dtype)
        written[name] = _scattered(array, pages, (positions % page_size,), tokens)
    return _with_layer_arrays(state, place, written)


def gather(state: CacheState, layer: str, rows: Rows, length: int) -> dict[str, jax.Array]:
    """Contiguous copies of the first `length` tokens of each row.

    Args:
      state: the cache.
      layer: name of an attention layer.
      rows: int32[B]; -1: padding. Or a Ragged of B sequences.
      length: tokens to read, a Python int of at most max_length, rounded up to whole pages.

    Returns:
      buffer -> [B, length, *shape] in the declared dtype; zeros for padding and where a row has no page. Tokens
      of a page that the sequence has not written yet are whatever the page holds.

    Raises:
      ConfigError: an unknown or recurrent layer, a `length` that is no int or does not fit.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> jkv.gather(state, "attn", rows, 3)["kv"].shape
    (1, 3, 2, 8)
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


def table_for(state: CacheState, layer: str, rows: Rows, buffer: str | None = None) -> jax.Array:
    """The page table of each row, for custom kernels.

    Args:
      state: the cache.
      layer: name of an attention layer.
      rows: int32[B]; -1: padding. Or a Ragged of B sequences.
      buffer: one of the layer's buffers, or None: the table of those without a page_size of their own.

    Returns:
      int32[B, max_pages], page ids in `pool(state, layer, buffer)`; 0: no page. For a buffer with a page_size that
      goes r times into the cache's: int32[B, max_pages * r].

    Raises:
      ConfigError: an unknown layer or buffer, a recurrent layer, a wrong rank or dtype.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> jkv.table_for(state, "attn", rows)[0, :2]
    Array([1, 0], dtype=int32)
    """
    place = attention_place(state, layer, "table_for")
    parts = 1 if buffer is None else _parts(state, _known_buffer("table_for", layer, place, buffer))
    rows = check_rows(state, rows)
    pages = state.page_tables[place.group.name].at[rows].get(mode="fill", fill_value=0)
    if parts == 1:
        return pages
    table = jnp.where(pages[..., None] > 0, pages[..., None] * parts + jnp.arange(parts), 0)
    return table.reshape(rows.shape[0], -1)


# ---- recurrent layers ---------------------------------------------------------------------------------------


def slots_for(state: CacheState, layer: str, rows: Rows) -> jax.Array:
    """The live state slot of each row.

    Args:
      state: the cache.
      layer: name of a recurrent layer.
      rows: int32[B]; -1: padding. Or a Ragged of B sequences.

    Returns:
      int32[B], slots in `pool(state, layer, ...)`; 0: none.

    Raises:
      ConfigError: an unknown or attention layer, a wrong rank or dtype.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"ssm": jkv.RecurrentLayer({"h": jkv.Buffer((4,), jnp.float32)})}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> jkv.slots_for(state, "ssm", rows)
    Array([1], dtype=int32)
    """
    recurrent_place(state, layer, "slots_for")
    return state.state_slots["recurrent"].at[check_rows(state, rows)].get(mode="fill", fill_value=0)


def candidate_slots(state: CacheState, layer: str, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The slots in which verify steps keep a state per token, for `read_state` and `write_state`.

    A verify step runs the input token and up to max_drafts drafts. It starts from one of the states that the step
    before it left, the one after that step's last accepted draft, and leaves its own, one after each token:

        a step accepted j:     read_state(slots=previous[:, j])
        this step's states:    write_state(slots=current[:, :drafts + 1])

    Args:
      state: the cache.
      layer: name of a recurrent layer.
      rows: int32[B]; -1: padding. Or a Ragged of B sequences.

    Returns:
      (previous, current), int32[B, max_drafts + 1] each: slots in `pool(state, layer, ...)`; 0: none. Where the host
      knows already what was accepted, `previous` is the live slot throughout.

    Raises:
      ConfigError: an unknown or attention layer, a cache without max_drafts, a wrong rank or dtype.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"ssm": jkv.RecurrentLayer({"h": jkv.Buffer((4,), jnp.float32)})}
    >>> config = jkv.CacheConfig(layers, 2, 64, page_size=4, max_drafts=2, tiers=jkv.DeviceTier(pages=16))
    >>> manager = jkv.CacheManager(config)
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> [slots.shape for slots in jkv.candidate_slots(state, "ssm", rows)]
    [(1, 3), (1, 3)]
    """
    recurrent_place(state, layer, "candidate_slots")
    if "candidates" not in state.state_slots:
        raise ConfigError("candidate_slots: the cache was made with max_drafts=0, so it has no candidate slots")
    slots = state.state_slots["candidates"].at[check_rows(state, rows)].get(mode="fill", fill_value=0)
    return slots[:, 0], slots[:, 1]


def _checked_slots(
    op: str, state: CacheState, layer: str, rows: Rows | None, slots: ArrayLike | None
) -> tuple[LayerPlace, jax.Array]:
    """Where `layer` lies, and `slots`, or the live ones of `rows`, with 0 for all that are none."""
    place = recurrent_place(state, layer, op)
    if rows is not None and slots is None:
        return place, slots_for(state, layer, rows)
    if rows is not None or slots is None:
        raise ConfigError(f"{op}: takes exactly one of rows and slots, got {'neither' if rows is None else 'both'}")
    slots = _index_array(f"{op}: slots", slots, None, "[...]")
    num_rows = state.layout.pools[place.pool].num_rows
    return place, jnp.where((slots > 0) & (slots < num_rows), slots, 0)


def read_state(
    state: CacheState, layer: str, rows: Rows | None = None, *, slots: ArrayLike | None = None
) -> dict[str, jax.Array]:
    """The recurrent state of each row, or of each slot.

    Args:
      state: the cache.
      layer: name of a recurrent layer.
      rows: int32[B]; -1: padding. Or a Ragged of B sequences.
      slots: instead of rows: int32[...] of any rank, from `candidate_slots` or `Sequence.plan_snapshots`; 0: none.

    Returns:
      buffer -> [B, *shape], or [*slots.shape, *shape], in the declared dtype; zeros for padding, for rows without a
      slot, and for slots that are 0 or out of range.

    Raises:
      ConfigError: an unknown or attention layer, both or neither of rows and slots, a wrong rank or dtype.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"ssm": jkv.RecurrentLayer({"h": jkv.Buffer((4,), jnp.float32)})}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> jkv.read_state(state, "ssm", rows)["h"].shape
    (1, 4)
    """
    place, slots = _checked_slots("read_state", state, layer, rows, slots)
    flat, out = slots.reshape(-1), {}
    for name, array in layer_arrays(state, place).items():
        states = _gathered(array, flat)
        states = jnp.where(_broadcast_over(flat > 0, states), states, 0).reshape(*slots.shape, *array.shape[1:])
        out[name] = as_dtype(states, place.buffers[name].dtype)
    return out


def write_state(
    state: CacheState,
    layer: str,
    rows: Rows | None = None,
    values: Mapping[str, ArrayLike] | None = None,
    *,
    slots: ArrayLike | None = None,
) -> CacheState:
    """Replaces the recurrent state of each row, or of each slot.

    Args:
      state: the cache; donate it to the jitted step and the write is in place. (Not where the step also read other
        slots of the layer and nothing of what is written follows from that: XLA then copies the pool.)
      layer: name of a recurrent layer.
      rows: int32[B], each row at most once; -1: padding. Or a Ragged of B sequences.
      values: buffer -> [B, *shape], or [*slots.shape, *shape], in the declared dtype.
      slots: instead of rows: int32[...] of any rank, from `candidate_slots` or `Sequence.plan_snapshots`, each at
        most once; 0: skip.

    Returns:
      The new state. Rows without a slot are skipped, and slots that are 0 or out of range.

    Raises:
      ConfigError: an unknown or attention layer, both or neither of rows and slots; a wrong rank, shape or dtype.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"ssm": jkv.RecurrentLayer({"h": jkv.Buffer((4,), jnp.float32)})}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> state = jkv.write_state(state, "ssm", rows, {"h": jnp.ones((1, 4))})
    >>> float(jkv.read_state(state, "ssm", rows)["h"].sum())
    4.0
    """
    place, slots = _checked_slots("write_state", state, layer, rows, slots)
    checked = check_values("write_state", layer, "values", values, place.buffers, slots.shape)
    flat, written = slots.reshape(-1), {}
    for name, array in layer_arrays(state, place).items():
        # A write that does not come after a read of the same pool makes XLA keep the old pool for the reader, a copy.
        # Some of a layer's new values follow from what the step read of its states, others need not: a convolution's,
        # once it has seen enough tokens. So each write waits for all of them. And keeping `old` where there is no
        # slot changes nothing, but makes the write depend on the very gather that `read_state` of these slots did.
        old = _gathered(array, flat)
        states = as_dtype(checked[name], array.dtype).reshape(old.shape)
        states = jnp.where(_broadcast_over(flat > 0, old), states, old)
        written[name] = _scattered(array, flat, (), states, [v for other, v in checked.items() if other != name])
    return _with_layer_arrays(state, place, written)


# ---- raw access ---------------------------------------------------------------------------------------------


def _known_buffer(op: str, layer: str, place: LayerPlace, buffer: str) -> Buffer:
    if not isinstance(buffer, str) or buffer not in place.buffers:
        raise ConfigError(f"{op}: layer {layer!r} has no buffer {buffer!r}, only {', '.join(place.buffers)}")
    return place.buffers[buffer]


def _parts(state: CacheState, buffer: Buffer) -> int:
    """How many of the buffer's own pages make one page of the cache."""
    return state.layout.page_size // (buffer.page_size or state.layout.page_size)


def _shown_shape(state: CacheState, stored: jax.Array, buffer: Buffer) -> tuple[int, ...]:
    """The shape in which `pool` shows a stored array: with pages of the buffer's own size."""
    parts = _parts(state, buffer)
    if parts == 1:
        return stored.shape
    return stored.shape[0] * parts, stored.shape[1] // parts, *stored.shape[2:]


def pool(state: CacheState, layer: str, buffer: str) -> jax.Array:
    """The whole array of one buffer, in its declared dtype, for custom kernels.

    Call it inside jit: outside, a conversion or a reshape copies the pool. Inside two things still do. On the CPU a
    float narrower than 32 bits is stored as an integer, and a write in the declared dtype copies. With JAX 0.10 so does
    a read inside a loop, of a buffer with Buffer.page_size=1.

    Args:
      state: the cache.
      layer: name of any layer.
      buffer: one of its buffers.

    Returns:
      attention: [pages + 1, page_size, *shape], index it with `table_for`; recurrent: [slots + 1, *shape], index
      it with `slots_for`, and behind those the candidate slots. A Buffer.page_size that goes r times into the
      cache's page_size: [(pages + 1) * r, page_size, *shape], of which the first r pages are null.

    Raises:
      ConfigError: an unknown layer or buffer.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> jkv.pool(state, "attn", "kv").shape
    (17, 4, 2, 8)
    """
    place = _place(state, layer, "pool")
    declared = _known_buffer("pool", layer, place, buffer)
    stored = layer_arrays(state, place)[buffer]
    return as_dtype(stored, declared.dtype).reshape(_shown_shape(state, stored, declared))


def with_pool(state: CacheState, layer: str, buffer: str, array: jax.Array) -> CacheState:
    """The state with one buffer's array replaced: the way back from `pool`.

    Args:
      state: the cache.
      layer: name of a layer that does not share another's KV.
      buffer: one of its buffers.
      array: what `pool` gave, updated: same shape, declared dtype.

    Raises:
      ConfigError: an unknown layer or buffer, a layer that shares; another shape or dtype than `pool` gives.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> state = jkv.with_pool(state, "attn", "kv", jkv.pool(state, "attn", "kv") + 1)
    """
    place = _own_place("with_pool", layer, _place(state, layer, "with_pool"))
    declared = _known_buffer("with_pool", layer, place, buffer)
    arrays = layer_arrays(state, place)
    stored = arrays[buffer]
    shape = _shown_shape(state, stored, declared)
    array = _check_value(f"with_pool: array for {layer!r}, {buffer!r}", array, shape, declared.dtype)
    array = as_dtype(array.reshape(stored.shape), stored.dtype)
    return _with_layer_arrays(state, place, {**arrays, buffer: array})


# ---- from one cache to another --------------------------------------------------------------------------------------

Values = dict[str, dict[str, jax.Array]]


def _transfers(
    op: str, state: CacheState, plan: Mapping[str, Mapping[str, Transfer]]
) -> list[tuple[str, str, Transfer, LayerPlace]]:
    """(layer, buffer, transfer, where the layer lies) of all that a plan lists."""
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{op}: plan must be what transfer_plan returns, got {type(plan).__name__}")
    found = []
    for layer, buffers in plan.items():
        place = _own_place(op, layer, _place(state, layer, op))
        for buffer, transfer in buffers.items():
            _known_buffer(op, layer, place, buffer)
            found.append((layer, buffer, transfer, place))
    return found


def _page_index(transfer: Transfer, rows: int) -> jax.Array:
    """The pages of a transfer; padding, and the null page, out of range."""
    pages = jnp.asarray(transfer.pages, jnp.int32)
    return jnp.where((pages > 0) & (pages < rows), pages, INT32_MAX)


def export_pages(state: CacheState, plan: Mapping[str, Mapping[str, Transfer]]) -> Values:
    """What lies in the pages, and the state, that a plan lists: copies, in declared dtypes.

    Under `jax.jit` it compiles once for each number of pages, rounded up to a power of two.

    Args:
      state: the sender's cache.
      plan: from the sender's `Sequence.transfer_plan`.

    Returns:
      {layer: {buffer: [m, page_size, *shape]}}, of a state [1, *shape]; rows that are padding are zeros.

    Raises:
      ConfigError: a layer or a buffer that is not there.

    >>> import jkv, jax, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> config = jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),))
    >>> prefill, decode = jkv.CacheManager(config), jkv.CacheManager(config)
    >>> one, two = prefill.init(), decode.init()
    >>> sender, receiver = prefill.open(range(10)), decode.open(range(10))
    >>> sender.resume(), sender.reserve(10), receiver.resume(), receiver.resize(10, 10)
    (True, True, True, True)
    >>> one, rows = prefill.prepare(one, [sender])  # and a step that writes 10 tokens
    >>> sender.commit(range(10))
    >>> two, rows = decode.prepare(two, [receiver])
    >>> values = jax.jit(jkv.export_pages)(one, sender.transfer_plan())
    >>> values["attn"]["kv"].shape
    (4, 4, 2, 8)
    >>> two = jax.jit(jkv.import_pages, donate_argnames="state")(two, receiver.transfer_plan(), values)
    >>> receiver.commit(range(10))
    """
    values: Values = {}
    for layer, buffer, transfer, place in _transfers("export_pages", state, plan):
        stored = layer_arrays(state, place)[buffer]
        pages = stored.at[_page_index(transfer, len(stored))].get(mode="fill", fill_value=0)
        values.setdefault(layer, {})[buffer] = as_dtype(pages, place.buffers[buffer].dtype)
    return values


def import_pages(state: CacheState, plan: Mapping[str, Mapping[str, Transfer]], values: Any) -> CacheState:
    """The state with what `export_pages` gave elsewhere in the pages, and the state slot, that a plan lists.

    Jit it with `donate_argnames="state"`, or it copies the pools.

    Args:
      state: the receiver's cache.
      plan: from the receiver's `Sequence.transfer_plan`.
      values: {layer: {buffer: [m, page_size, *shape]}}, declared dtypes; rows that the plan pads go nowhere.

    Raises:
      ConfigError: a layer or a buffer that is not there, or values of another shape or dtype.

    >>> import jkv, jax, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open(range(8))
    >>> seq.resume(), seq.resize(8, 8)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> values = {"attn": {"kv": jnp.ones((2, 4, 2, 8))}}  # as export_pages gave them elsewhere
    >>> state = jax.jit(jkv.import_pages, donate_argnames="state")(state, seq.transfer_plan(), values)
    >>> float(jkv.gather(state, "attn", rows, 8)["kv"].sum())
    128.0
    """
    for layer, buffer, transfer, place in _transfers("import_pages", state, plan):
        arrays = layer_arrays(state, place)
        stored, declared = arrays[buffer], place.buffers[buffer]
        try:
            value = values[layer][buffer]
        except (KeyError, TypeError):
            raise ConfigError(f"import_pages: no values for {layer!r}, {buffer!r}") from None
        shape = (len(transfer.pages), *stored.shape[1:])
        value = _check_value(f"import_pages: values of {layer!r}, {buffer!r}", value, shape, declared.dtype)
        index = _page_index(transfer, len(stored))
        written = stored.at[index].set(as_dtype(value, stored.dtype), mode="drop")
        state = _with_layer_arrays(state, place, {**arrays, buffer: written})
    return state
