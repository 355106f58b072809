"""CacheState and init_state."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import DTYPES, bits, compilations

import jkv.state
from jkv.config import AttentionLayer, Buffer, CacheConfig, DeviceTier, RecurrentLayer, kv_buffers
from jkv.layout import make_layout
from jkv.state import init_state, storage_dtype


def hybrid_layout(dtype=jnp.bfloat16, **fields):
    layers = {
        "full.0": AttentionLayer(kv_buffers(2, 8, dtype)),
        "full.1": AttentionLayer(kv_buffers(2, 8, dtype, fused=False)),
        "local": AttentionLayer(kv_buffers(1, 8, dtype), window=8, sinks=1),
        "ssm": RecurrentLayer({"conv": Buffer((3, 4), dtype), "h": Buffer((4, 4), jnp.float32)}),
    }
    return make_layout(CacheConfig(layers, 3, 30, 4, DeviceTier(pages=5), **fields))


def test_shapes_are_pages_plus_the_null_page_and_tables_are_null():
    layout = hybrid_layout()
    state = init_state(layout)
    full, local, ssm = state.pools
    assert full[0]["kv"].shape == (6, 4, 4, 8)
    assert full[1]["k"].shape == full[1]["v"].shape == (6, 4, 2, 8)
    assert local[0]["kv"].shape == (6, 4, 2, 8)
    assert ssm[0]["conv"].shape == (6, 3, 4) and ssm[0]["h"].shape == (6, 4, 4)
    assert {name: t.shape for name, t in state.page_tables.items()} == {"full": (3, 8), "window:8+1": (3, 8)}
    assert state.state_slots["recurrent"].shape == (3,)
    assert all(a.dtype == jnp.int32 for a in [*state.page_tables.values(), *state.state_slots.values()])
    assert not any(bits(leaf).any() for leaf in jax.tree.leaves(state))


def test_with_max_drafts_there_are_candidate_slots_and_a_table_of_them():
    state = init_state(hybrid_layout(max_drafts=2))
    assert {name: t.shape for name, t in state.state_slots.items()} == {"recurrent": (3,), "candidates": (3, 2, 3)}
    assert state.state_slots["candidates"].dtype == jnp.int32 and not bits(state.state_slots["candidates"]).any()
    assert state.pools[2][0]["h"].shape == (6 + 18, 4, 4) and state.pools[0][0]["kv"].shape[0] == 6
    assert "recurrent: 5 slots" in repr(state)


def test_without_recurrent_layers_there_are_no_slots():
    layout = make_layout(
        CacheConfig({"a": AttentionLayer(kv_buffers(1, 4))}, 3, 30, 4, DeviceTier(pages=5), max_drafts=2)
    )
    assert init_state(layout).state_slots == {}


def test_a_layer_that_shares_adds_no_arrays():
    layers = {"a": AttentionLayer(kv_buffers(1, 4)), "b": AttentionLayer(shares="a")}
    state = init_state(make_layout(CacheConfig(layers, 3, 30, 4, DeviceTier(pages=5))))
    assert [[list(arrays) for arrays in pool] for pool in state.pools] == [[["kv"]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_floats_are_integers_on_the_cpu_and_native_elsewhere(dtype):
    dtype = np.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    assert storage_dtype(dtype, "cpu") == (np.dtype(f"uint{8 * dtype.itemsize}") if narrow else dtype)
    assert storage_dtype(dtype, "gpu") == storage_dtype(dtype, "tpu") == dtype


def test_state_is_committed_so_that_a_donated_step_compiles_once():
    state = init_state(hybrid_layout())
    assert all(leaf.committed for leaf in jax.tree.leaves(state))
    step = jax.jit(lambda state: jax.tree.map(lambda a: a + 1, state), donate_argnums=0)
    with compilations() as compiled:
        for _ in range(3):
            state = step(state)
    assert len(compiled) == 1


def test_layout_is_static_and_keeps_its_identity_through_jit():
    layout = hybrid_layout()
    state = init_state(layout)
    assert jax.jit(lambda state: state)(state).layout is layout
    assert jax.tree.structure(state) == jax.tree.structure(init_state(layout))
    assert jax.tree.structure(state) != jax.tree.structure(init_state(hybrid_layout()))


def test_mesh_places_the_state_on_the_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    state = init_state(hybrid_layout(), mesh)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))


def test_default_device_is_respected_and_repr_is_short():
    with jax.default_device(jax.devices()[0]):
        state = init_state(hybrid_layout())
    assert len(repr(state)) < 300 and "window:8+1" in repr(state)


def test_docstring_snippets_run():
    assert doctest.testmod(jkv.state).failed == 0
