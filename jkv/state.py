"""CacheState: the bytes of the cache on the device, and how they start.

    pools[pool][layer of the pool][buffer]   attention  [pages + 1, page_size, *shape]
                                             recurrent  [slots + 1 + candidates, *shape]
    page_tables[group]                       int32 [max_sequences, max_pages], 0: no page
    state_slots["recurrent"]                 int32 [max_sequences], the live slots; 0: no slot
    state_slots["candidates"]                int32 [max_sequences, 2, max_drafts + 1], with max_drafts: the slots of
                                             the previous verify step and of the current one; 0: no slot

Page 0 and slot 0 of every pool are null: never allocated, and what lies in them is never relied on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.layout import Layout

Pools = tuple[tuple[dict[str, jax.Array], ...], ...]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("pools", "page_tables", "state_slots"), meta_fields=("layout",)
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CacheState:
    """Everything that the cache holds on the device: an immutable pytree of arrays with a static layout.

    It goes through the user's jitted step, donated, and comes back; `jkv.ops` and `jkv.attention` read and write it.

    Args:
      pools: per pool, per layer of the pool, buffer name -> array, in storage dtype (`storage_dtype`).
      page_tables: attention group -> int32[max_sequences, max_pages].
      state_slots: {"recurrent": int32[max_sequences]}, with max_drafts beside it {"candidates": int32[max_sequences,
        2, max_drafts + 1]}; {} without recurrent layers.
      layout: the static geometry; part of the pytree's structure, compared by identity.

    >>> import jax.numpy as jnp
    >>> from jkv.config import AttentionLayer, CacheConfig, DeviceTier, kv_buffers
    >>> from jkv.layout import make_layout
    >>> config = CacheConfig(
    ...     layers={"attn": AttentionLayer(kv_buffers(2, 16, jnp.float32))}, max_sequences=4, max_length=64,
    ...     tiers=(DeviceTier(pages=8),))
    >>> init_state(make_layout(config))
    CacheState(pools=[full: 8 pages in 1 layers, 0.0 MB], max_sequences=4)
    """

    pools: Pools
    page_tables: dict[str, jax.Array]
    state_slots: dict[str, jax.Array]
    layout: Layout

    def __repr__(self) -> str:  # the arrays themselves would print megabytes
        pools = ", ".join(
            f"{p.name}: {p.num_pages} {'slots' if p.recurrent else 'pages'} in {len(p.buffers)} layers, "
            f"{p.num_rows * p.page_bytes / 1e6:.1f} MB"
            for p in self.layout.pools
        )
        return f"CacheState(pools=[{pools}], max_sequences={self.layout.max_sequences})"


def storage_dtype(dtype: np.dtype, platform: str) -> np.dtype:
    """The dtype in which a pool of `dtype` lies on `platform`.

    On the CPU floats narrower than 32 bits lie as unsigned integers of the same width: XLA's CPU backend has no
    scatter of its own for them and converts the whole pool to float32 and back at every write (0.4 s instead of
    0.03 ms for 268 MB). Ops bitcast the values and blocks they touch, never a pool: that would copy it.
    """
    dtype = np.dtype(dtype)
    if platform == "cpu" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(f"uint{8 * dtype.itemsize}")
    return dtype


def _placement(mesh: Mesh | None) -> tuple[NamedSharding | jax.Device, str]:
    """Where the state lives (replicated on `mesh`, or JAX's default device), and the platform's name."""
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec()), mesh.devices.flat[0].platform
    (device,) = jnp.zeros(()).devices()
    return device, device.platform


def init_state(layout: Layout, mesh: Mesh | None = None) -> CacheState:
    """A state of zeros, committed to its device, so that the first step's compilation is also the last.

    Args:
      layout: the geometry, from `jkv.layout.make_layout`.
      mesh: None: JAX's default device. A mesh: every device of it holds the whole state.

    Returns:
      A CacheState in which no row has a page or a slot.
    """
    place, platform = _placement(mesh)

    def zeros(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jax.device_put(jnp.zeros(shape, dtype, device=place), place)

    def layer_arrays(pool: int, layer: int) -> dict[str, jax.Array]:
        geometry = layout.pools[pool]
        tokens = () if geometry.recurrent else (layout.page_size,)
        return {
            name: zeros((geometry.num_rows, *tokens, *buffer.shape), storage_dtype(buffer.dtype, platform))
            for name, buffer in geometry.buffers[layer].items()
        }

    int32 = np.dtype(np.int32)
    rows = layout.max_sequences
    slot_shapes: dict[str, tuple[int, ...]] = {"recurrent": (rows,)} if layout.recurrent_pool else {}
    if layout.recurrent_pool and layout.config.max_drafts:
        slot_shapes["candidates"] = (rows, 2, layout.config.max_drafts + 1)
    return CacheState(
        pools=tuple(tuple(layer_arrays(p.ordinal, i) for i in range(len(p.buffers))) for p in layout.pools),
        page_tables={g.name: zeros((rows, layout.max_pages), int32) for g in layout.attention_groups},
        state_slots={name: zeros(shape, int32) for name, shape in slot_shapes.items()},
        layout=layout,
    )


def resized_state(state: CacheState, layout: Layout, moved: Mapping[int, np.ndarray]) -> CacheState:
    """The state with pools of other sizes, and the same contents.

    Args:
      state: its pools that change are deleted, one array after the other.
      layout: the same geometry with other page counts.
      moved: {pool ordinal: int32[2, n]}: pages that are [1] in the new pools, and [0] in the old ones; others keep
        their ids, what lies beyond the new size is dropped.
    """

    def resized(array: jax.Array, rows: int, pairs: np.ndarray) -> jax.Array:
        index = np.minimum(np.arange(rows, dtype=np.int32), len(array) - 1)
        index[pairs[1]] = pairs[0]
        sharding = array.sharding
        result = jax.device_put(array.at[jnp.asarray(index)].get(mode="clip"), sharding)
        array.delete()
        return result

    pools = list(state.pools)
    for old, new in zip(state.layout.pools, layout.pools, strict=True):
        if old.num_rows != new.num_rows:
            pairs = moved.get(new.ordinal, np.zeros((2, 0), np.int32))
            pools[new.ordinal] = tuple(
                {name: resized(array, new.num_rows, pairs) for name, array in arrays.items()}
                for arrays in state.pools[new.ordinal]
            )
    return dataclasses.replace(state, pools=tuple(pools), layout=layout)
