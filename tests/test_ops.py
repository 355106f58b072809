"""append, gather, read_state, write_state and raw access."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import DTYPES, bits, compilations, make_state, random_values, with_table

from jkv.config import AttentionLayer, Buffer, RecurrentLayer, kv_buffers, latent_buffers
from jkv.errors import ConfigError
from jkv.ops import (
    append,
    candidate_slots,
    gather,
    pool,
    read_state,
    slots_for,
    table_for,
    token_values,
    with_pool,
    write_state,
)
from jkv.ragged import Ragged, make_ragged

P = 4
jit_append = jax.jit(append, static_argnames="layer")
jit_gather = jax.jit(gather, static_argnames=("layer", "length"))
jit_read_state = jax.jit(read_state, static_argnames="layer")
jit_write_state = jax.jit(write_state, static_argnames="layer")
jit_candidate_slots = jax.jit(candidate_slots, static_argnames="layer")


def attention_state(dtype=jnp.float32, lengths=(10, 7, 0), **options):
    buffers = {"kv": Buffer((4, 8), dtype), "latent": Buffer((5,), dtype), "flag": Buffer((), dtype)}
    return make_state({"a": AttentionLayer(buffers), "b": AttentionLayer(buffers)}, lengths, **options)


def recurrent_state(dtype=jnp.float32, rows=3, **fields):
    buffers = {"conv": Buffer((3, 4), dtype), "h": Buffer((2, 3, 2), jnp.float32)}
    return make_state({"ssm": RecurrentLayer(buffers)}, [0] * rows, pages=rows + 4, **fields)


def recurrent_values(rng, lead, dtype=jnp.float32):
    return {"conv": random_values(rng, (*lead, 3, 4), dtype), "h": random_values(rng, (*lead, 2, 3, 2), jnp.float32)}


def attention_values(rng, lead, dtype):
    return {
        "kv": random_values(rng, (*lead, 4, 8), dtype),
        "latent": random_values(rng, (*lead, 5), dtype),
        "flag": random_values(rng, lead, dtype),
    }


def padded(ids):
    return np.array(ids, np.int32)


@pytest.mark.parametrize(
    ("dtype", "jit"),
    [(jnp.bfloat16, False), *((dtype, True) for dtype in DTYPES)],
    ids=lambda v: ("jit" if v else "eager") if isinstance(v, bool) else np.dtype(v).name,
)
def test_gather_returns_what_append_wrote(dtype, jit):
    state = attention_state(dtype)
    rng = np.random.default_rng(0)
    values = attention_values(rng, (2, 7), dtype)
    write, read = (jit_append, jit_gather) if jit else (append, gather)
    rows, positions = padded([1, 0]), np.tile(np.arange(7, dtype=np.int32), (2, 1))
    after = read(write(state, "a", rows, positions, values), "a", rows, 7)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, values)
    for name in values:
        np.testing.assert_array_equal(bits(after[name]), bits(values[name]))


def test_append_leaves_other_layers_rows_and_positions_alone():
    state = attention_state()
    before = jax.tree.map(bits, state.pools)
    values = attention_values(np.random.default_rng(1), (1, 2), jnp.float32)
    state = jit_append(state, "b", padded([1]), np.array([[4, 5]], np.int32), values)
    chex.assert_trees_all_equal(jax.tree.map(bits, state.pools[0][0]), before[0][0])
    page = int(state.page_tables["full"][1, 1])
    for name, array in state.pools[0][1].items():
        now, was = np.asarray(array), before[0][1][name].view(np.float32).reshape(array.shape)
        np.testing.assert_array_equal(now[page, :2], np.asarray(values[name])[0])
        now = now.copy()
        now[page, :2] = was[page, :2]
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_padding_and_tokens_without_a_page_write_nowhere(dtype):
    state = attention_state(dtype, lengths=(10, 7, 0), max_length=12, pages=5)
    before = jax.tree.map(bits, state.pools)
    # row -1, a row beyond the table, row 2 without pages, position -1, a position beyond max_length, one that has
    # no page yet (row 1 has pages for 0..7)
    rows = padded([-1, 3, 2, 0, 0, 1, 2**31 - 1])
    positions = padded([[0], [0], [0], [-1], [12], [8], [0]])
    values = attention_values(np.random.default_rng(2), (7, 1), dtype)
    state = jit_append(state, "a", rows, positions, values)
    chex.assert_trees_all_equal(jax.tree.map(bits, state.pools), before)


def test_gather_gives_zeros_for_padding_and_missing_pages_whatever_the_null_page_holds():
    state = attention_state(lengths=(8, 8))
    table = np.asarray(state.page_tables["full"]).copy()
    table[0, 0] = 0
    state = with_table(state, "full", table)
    values = attention_values(np.random.default_rng(3), (2, 8), jnp.float32)
    rows = padded([0, 1])
    state = jit_append(state, "a", rows, np.tile(np.arange(8, dtype=np.int32), (2, 1)), values)
    after = jit_gather(state, "a", padded([0, -1, 1, 99]), 8)
    for name in values:
        expected = np.zeros_like(np.asarray(after[name]))
        expected[0, P:], expected[2] = values[name][0, P:], values[name][1]
        np.testing.assert_array_equal(after[name], expected)


@pytest.mark.parametrize("length", [0, 9, 64])
def test_gather_takes_any_length_up_to_the_tables(length):
    out = jit_gather(attention_state(), "a", padded([0, -1]), length)
    assert out["kv"].shape == (2, length, 4, 8) and out["flag"].shape == (2, length)


@pytest.mark.parametrize(
    ("dtype", "jit"),
    [(jnp.bfloat16, False), *((dtype, True) for dtype in DTYPES)],
    ids=lambda v: ("jit" if v else "eager") if isinstance(v, bool) else np.dtype(v).name,
)
def test_read_state_returns_what_write_state_wrote(dtype, jit):
    state = recurrent_state(dtype)
    rng = np.random.default_rng(4)
    values = {"conv": random_values(rng, (3, 3, 4), dtype), "h": random_values(rng, (3, 2, 3, 2), jnp.float32)}
    write, read = (jit_write_state, jit_read_state) if jit else (write_state, read_state)
    before = jax.tree.map(np.asarray, state.pools[0][0])
    state = write(state, "ssm", padded([2, -1, 0]), values)
    after = read(state, "ssm", padded([-1, 0, 2]))
    for name in values:
        given = np.asarray(values[name])  # in the order of rows [2, -1, 0]
        expected = np.stack([np.zeros_like(given[0]), given[2], given[0]])
        np.testing.assert_array_equal(bits(after[name]), bits(expected))
        touched = np.asarray(state.state_slots["recurrent"])[[0, 2]]
        others = np.delete(np.arange(len(before[name])), touched)
        np.testing.assert_array_equal(bits(state.pools[0][0][name][others]), bits(before[name][others]))


def test_rows_without_a_slot_read_zeros_and_write_nowhere():
    state = recurrent_state()
    slots = {"recurrent": jnp.array([2, 0, 1], jnp.int32)}
    state = type(state)(state.pools, state.page_tables, slots, state.layout)
    before = jax.tree.map(bits, state.pools)
    assert not any(np.asarray(a).any() for a in jit_read_state(state, "ssm", padded([1, -1, 3])).values())
    values = {"conv": jnp.ones((1, 3, 4)), "h": jnp.ones((1, 2, 3, 2))}
    chex.assert_trees_all_equal(jax.tree.map(bits, jit_write_state(state, "ssm", padded([1]), values).pools), before)


def test_tables_and_slots_of_rows():
    state = attention_state(lengths=(10, 7, 0))
    table = table_for(state, "b", padded([1, -1, 0]), "kv")
    np.testing.assert_array_equal(np.asarray(table)[[0, 2]], np.asarray(state.page_tables["full"])[[1, 0]])
    assert table.dtype == jnp.int32 and not table[1].any()
    state = recurrent_state()
    slots = slots_for(state, "ssm", padded([2, -1, 7]))
    assert slots.tolist() == [int(state.state_slots["recurrent"][2]), 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_pool_has_the_declared_dtype_and_with_pool_takes_it_back(dtype):
    state = attention_state(dtype)
    array = pool(state, "a", "kv")
    assert array.dtype == dtype and array.shape == (49, P, 4, 8)
    page = int(table_for(state, "a", padded([0]))[0, 0])
    token = random_values(np.random.default_rng(5), (4, 8), dtype)
    state = with_pool(state, "a", "kv", array.at[page, 2].set(token))
    np.testing.assert_array_equal(bits(jit_gather(state, "a", padded([0]), 3)["kv"][0, 2]), bits(token))


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_with_every_op_is_traced_and_compiled_once(donate):
    layers = {"a": AttentionLayer(kv_buffers(1, 4)), "ssm": RecurrentLayer({"h": Buffer((3,), jnp.float32)})}
    state = make_state(layers, [16, 16])
    chex.clear_trace_counter()

    @functools.partial(jax.jit, donate_argnums=0 if donate else ())
    @chex.assert_max_traces(1)
    def step(state, rows, positions):
        old = read_state(state, "ssm", rows)
        state = write_state(state, "ssm", rows, {"h": jnp.nan_to_num(old["h"]) + 1})
        ones = jnp.ones((2, 1, 2, 4), jnp.bfloat16) * positions[..., None, None].astype(jnp.bfloat16)
        state = append(state, "a", rows, positions, {"kv": ones})
        return gather(state, "a", rows, 16), state

    with compilations() as compiled:
        for position in range(5):
            out, state = step(state, padded([1, -1]), padded([[position], [-1]]))
        jax.block_until_ready(state)
        steps = len(compiled)
    assert steps == 1
    assert out["kv"][0, :5, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert read_state(state, "ssm", padded([1]))["h"].tolist() == [[5 + float(np.nan_to_num(np.nan))] * 3]


def test_append_and_write_state_inside_a_scan_over_steps():
    layers = {
        "a": AttentionLayer(kv_buffers(1, 4, jnp.bfloat16)),
        "ssm": RecurrentLayer({"h": Buffer((3,), jnp.float32)}),
    }
    state = make_state(layers, [16, 16])
    rows = padded([0, 1])

    def step(state, position):
        positions = jnp.stack([position, position + 2])[:, None]
        kv = jnp.broadcast_to(positions[..., None, None], (2, 1, 2, 4)).astype(jnp.bfloat16)
        state = append(state, "a", rows, positions, {"kv": kv})
        return write_state(state, "ssm", rows, {"h": jnp.full((2, 3), position, jnp.float32)}), None

    run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(8))[0], donate_argnums=0)
    state = run(state)
    kv = gather(state, "a", rows, 10)["kv"][..., 0, 0]
    assert kv[0, :8].tolist() == list(range(8)) and kv[1, 2:10].tolist() == list(range(2, 10))
    assert read_state(state, "ssm", rows)["h"].tolist() == [[7.0] * 3] * 2


# ---- a ragged batch ------------------------------------------------------------------------------------------

# Row 2 runs 5 tokens from 3 on, row 0 one token at 9, row 1 two from 0 on; padded by 3 tokens and 2 sequences.
COUNTS, STARTS, BATCH_ROWS = np.array([5, 1, 2]), np.array([3, 9, 0]), padded([2, 0, 1])


def ragged(pad_tokens=11, pad_sequences=5):
    return make_ragged(BATCH_ROWS, STARTS, COUNTS, pad_tokens, pad_sequences)


def as_padded(batch, flat):
    """Positions [B, T] of the same step, and `flat` values [T, ...] as [B, T, ...]."""
    positions = np.full((3, 5), -1, np.int32)
    values = {name: np.zeros((3, 5, *array.shape[1:]), array.dtype) for name, array in flat.items()}
    for i, count in enumerate(COUNTS):
        tokens = slice(batch.cu_q_lens[i], batch.cu_q_lens[i + 1])
        positions[i, :count] = batch.positions[tokens]
        for name, array in flat.items():
            values[name][i, :count] = array[tokens]
    return positions, values


RAGGED_LAYERS = {
    "full": AttentionLayer({"kv": Buffer((4, 8), jnp.float32), "flag": Buffer((), jnp.int8)}),
    "wide": AttentionLayer(kv_buffers(3, 4, jnp.float32)),
    "split": AttentionLayer(kv_buffers(1, 8, jnp.bfloat16, fused=False)),
    "window": AttentionLayer(kv_buffers(1, 4, jnp.float8_e4m3fn), window=4, sinks=1),
    "latent": AttentionLayer(latent_buffers(6, 2)),
    "scaled": AttentionLayer(kv_buffers(2, 8, jnp.int8, scales=True)),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("layer", RAGGED_LAYERS)
def test_a_ragged_step_equals_the_padded_one(layer, jit):
    """Token for token, bit for bit, in a group whose layers have different heads; the rest of the pool untouched."""
    state = make_state(RAGGED_LAYERS, [10, 2, 8], live_at=[9, 0, 3])
    rng, batch = np.random.default_rng(6), ragged()
    flat = {
        name: random_values(rng, (11, *buffer.shape), buffer.dtype)
        for name, buffer in RAGGED_LAYERS[layer].buffers.items()
    }
    positions, values = as_padded(batch, jax.tree.map(np.asarray, flat))
    write, read = (jit_append, jit_gather) if jit else (append, gather)
    expected = write(state, layer, BATCH_ROWS, positions, values)
    state = write(state, layer, batch, batch.positions, flat)
    chex.assert_trees_all_equal(jax.tree.map(bits, state.pools), jax.tree.map(bits, expected.pools))
    seen = read(state, layer, batch, 10)
    one_by_one = read(state, layer, padded([2, 0, 1, -1, -1]), 10)
    chex.assert_trees_all_equal(jax.tree.map(bits, seen), jax.tree.map(bits, one_by_one))
    for i, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        for name, array in seen.items():
            tokens = slice(batch.cu_q_lens[i], batch.cu_q_lens[i + 1])
            np.testing.assert_array_equal(bits(array[i, start : start + count]), bits(flat[name][tokens]))


def test_padding_of_a_ragged_step_writes_nowhere():
    state = attention_state(lengths=(10, 7, 12), max_length=12, pages=8)
    before = jax.tree.map(bits, state.pools)
    rng = np.random.default_rng(7)
    # nothing but padding; a padded token, or one beyond all sequences, with a position; a sequence without a row; a
    # position beyond max_length; no position; no sequence at all
    empty = make_ragged(padded([]), np.array([], int), np.array([], int), 4, 2)
    batches = [
        (empty, empty.positions),
        (empty, padded([0, 1, 2, 3])),
        (Ragged(padded([-1, 3]), padded([0, 1]), padded([0, 1, 2]), padded([1, 1]), padded([2])), padded([0, 1])),
        (Ragged(padded([0]), padded([12]), padded([0, 1]), padded([13]), padded([1])), padded([12])),
        (Ragged(padded([0]), padded([-1]), padded([0, 1]), padded([1]), padded([1])), padded([-1])),
        (Ragged(padded([]), padded([0, 1]), padded([0]), padded([]), padded([0])), padded([0, 1])),
    ]
    for batch, positions in batches:
        values = attention_values(rng, (len(positions),), jnp.float32)
        state = jit_append(state, "a", batch, positions, values)
        chex.assert_trees_all_equal(jax.tree.map(bits, state.pools), before)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_states_tables_and_slots_of_a_ragged_batch_are_those_of_its_rows(jit):
    layers = {"a": AttentionLayer(kv_buffers(1, 4)), "ssm": RecurrentLayer({"h": Buffer((3,), jnp.float32)})}
    state, batch, rows = make_state(layers, [10, 7, 8], max_drafts=1), ragged(), padded([2, 0, 1, -1, -1])
    values = {"h": random_values(np.random.default_rng(8), (5, 3), jnp.float32)}

    def step(state, rows):
        reads = table_for(state, "a", rows), slots_for(state, "ssm", rows), candidate_slots(state, "ssm", rows)
        state = write_state(state, "ssm", rows, values)
        return reads, read_state(state, "ssm", rows), state.pools

    step = jax.jit(step) if jit else step
    chex.assert_trees_all_equal(jax.tree.map(bits, step(state, batch)), jax.tree.map(bits, step(state, rows)))


def test_ragged_batches_of_one_padding_compile_once():
    state = make_state({"a": AttentionLayer(kv_buffers(1, 4))}, [16, 16, 16])
    step = jax.jit(
        lambda state, batch, kv: append(state, "a", batch, batch.positions, {"kv": kv}),
        donate_argnums=0,
    )
    kv = jnp.ones((8, 2, 4), jnp.bfloat16)
    with compilations() as compiled:
        for counts in ([1, 1, 1], [6, 1], [8]):
            rows = np.arange(len(counts), dtype=np.int32)
            state = step(state, make_ragged(rows, np.zeros(len(counts), int), np.array(counts), 8, 3), kv)
        jax.block_until_ready(state)
        assert len(compiled) == 1


# ---- scales --------------------------------------------------------------------------------------------------

QUANTISED = [(jnp.int8, 127), (jnp.float8_e4m3fn, 448)]
SCALE_DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
names = functools.partial(pytest.mark.parametrize, ids=lambda v: np.dtype(v).name if isinstance(v, type) else None)


def scaled_state(dtype, scales, fused=True):
    return make_state({"a": AttentionLayer(kv_buffers(2, 16, dtype, fused, scales))}, [8, 8])


def assert_quantised(stored, scale, array):
    """By the definition: scale = max |x| / largest, and x / scale, with the scale as it is stored."""
    array, dtype = np.asarray(array, np.float32), stored.dtype
    largest = dict(QUANTISED)[dtype.type]
    scale, epsilon = np.asarray(scale, np.float32), float(jnp.finfo(scale.dtype).eps)
    np.testing.assert_allclose(scale, np.abs(array).max(-1) / largest, rtol=epsilon, atol=1e-7 * (epsilon > 1e-6))
    steps = array / scale[..., None]
    expected = np.clip(np.rint(steps) if dtype == jnp.int8 else steps, -largest, largest).astype(dtype)
    np.testing.assert_array_equal(bits(stored), bits(expected))


@names("given", [jnp.float32, jnp.bfloat16, jnp.float16])
@names("scales", SCALE_DTYPES)
@names("dtype", [dtype for dtype, _ in QUANTISED])
def test_append_quantises_each_token_and_head(dtype, scales, given):
    state = scaled_state(dtype, scales)
    rng = np.random.default_rng(9)
    sizes = 10.0 ** rng.integers(-3, 4, (2, 3, 4, 1))  # a scale per head, not per token
    kv = jnp.asarray(rng.standard_normal((2, 3, 4, 16)) * sizes, jnp.float32).astype(given)
    rows, positions = padded([1, 0]), np.tile(np.arange(3, dtype=np.int32), (2, 1))
    stored = gather(jit_append(state, "a", rows, positions, {"kv": kv}), "a", rows, 3)
    assert_quantised(stored["kv"], stored["kv_scale"], kv)
    scale = np.asarray(stored["kv_scale"], np.float32)[..., None]
    error = np.abs(np.asarray(stored["kv"], np.float32) * scale - np.asarray(kv, np.float32))
    # Half a step: of an int8 that is half a scale, of a float8 half of its last of 3 bits.
    half = scale / 2 if dtype == jnp.int8 else np.maximum(np.abs(np.asarray(kv, np.float32)) / 16, scale * 2.0**-10)
    assert (error <= 1.01 * half).all()


@names("dtype", [dtype for dtype, _ in QUANTISED])
def test_k_and_v_apart_are_quantised_apart(dtype):
    state = scaled_state(dtype, jnp.float32, fused=False)
    rng = np.random.default_rng(10)
    values = {"k": random_values(rng, (1, 4, 2, 16), jnp.float32), "v": random_values(rng, (1, 4, 2, 16), jnp.bfloat16)}
    stored = gather(append(state, "a", padded([0]), padded([[0, 1, 2, 3]]), values), "a", padded([0]), 4)
    for name, array in values.items():
        assert_quantised(stored[name], stored[f"{name}_scale"], array)


@names("dtype", [dtype for dtype, _ in QUANTISED])
def test_what_comes_quantised_is_stored_as_it_is(dtype):
    state = scaled_state(dtype, jnp.bfloat16)
    rng = np.random.default_rng(11)
    values = {
        "kv": random_values(rng, (1, 4, 4, 16), dtype),
        "kv_scale": random_values(rng, (1, 4, 4), jnp.bfloat16),
    }
    stored = gather(jit_append(state, "a", padded([0]), padded([[0, 1, 2, 3]]), values), "a", padded([0]), 4)
    chex.assert_trees_all_equal(jax.tree.map(bits, stored), jax.tree.map(bits, values))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@names("scales", SCALE_DTYPES)
@names(("dtype", "largest"), QUANTISED)
def test_vectors_that_have_no_ordinary_scale(dtype, largest, scales, jit):
    """Zeros stay zeros, a NaN stays with its own head, and what is too large or small for the scale does not spread."""
    state = scaled_state(dtype, scales)
    kv = np.ones((1, 1, 4, 16), np.float32)
    kv[..., 0, :], kv[..., 1, 3], kv[..., 2, :] = 0, np.nan, 1e-44
    kv[..., 3, :8], kv[..., 3, 8:] = 3e38, -3e38
    quantise = functools.partial(token_values, "append", "a", "values", place=state.layout.place("a"), lead=(1, 1))
    out = (jax.jit(quantise) if jit else quantise)({"kv": kv})
    stored = {name: np.asarray(array, np.float32)[0, 0] for name, array in out.items()}
    restored = stored["kv"] * stored["kv_scale"][:, None]
    assert not restored[0].any() and not restored[2].any() and not stored["kv"][0].any()
    assert np.isnan(restored[1]).all()
    size = min(3e38, largest * float(jnp.finfo(scales).max))
    np.testing.assert_allclose(restored[3], [size] * 8 + [-size] * 8, rtol=0.01)


def test_a_buffer_beside_the_scaled_ones_is_given_as_declared():
    buffers = {**kv_buffers(1, 4, jnp.int8, scales=True), "flag": Buffer((), jnp.int32)}
    state = make_state({"a": AttentionLayer(buffers)}, [8])
    kv, flag = jnp.ones((1, 1, 2, 4)), jnp.full((1, 1), 7, jnp.int32)
    state = append(state, "a", padded([0]), padded([[2]]), {"kv": kv, "flag": flag})
    stored = gather(state, "a", padded([0]), 3)
    assert stored["flag"][0, 2] == 7 and (stored["kv"][0, 2] == 127).all()
    assert stored["kv_scale"][0, 2].tolist() == pytest.approx([1 / 127] * 2)


# ---- state slots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "jit"),
    [(jnp.bfloat16, False), *((dtype, True) for dtype in DTYPES)],
    ids=lambda v: ("jit" if v else "eager") if isinstance(v, bool) else np.dtype(v).name,
)
@pytest.mark.parametrize("shape", [(4,), (1,), (2, 2), (), (1, 2, 2)], ids=str)
def test_read_state_returns_what_write_state_wrote_by_slot(shape, dtype, jit):
    state = recurrent_state(dtype, max_drafts=1)
    before = jax.tree.map(np.asarray, state.pools[0][0])
    slots = np.array([9, 3, 19, 1][: int(np.prod(shape))], np.int32).reshape(shape)  # 7 usable ones, 12 candidates
    values = recurrent_values(np.random.default_rng(12), shape, dtype)
    write, read = (jit_write_state, jit_read_state) if jit else (write_state, read_state)
    state = write(state, "ssm", values=values, slots=slots)
    after = read(state, "ssm", slots=slots)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, values)
    for name in values:
        np.testing.assert_array_equal(bits(after[name]), bits(values[name]))
        others = np.delete(np.arange(20), slots.ravel())
        np.testing.assert_array_equal(bits(state.pools[0][0][name][others]), bits(before[name][others]))


def test_slots_that_are_none_read_zeros_and_write_nowhere_whatever_slot_0_holds():
    state = recurrent_state(max_drafts=1)
    before = jax.tree.map(bits, state.pools)
    slots = padded([[0, -1], [20, 2**31 - 1]])
    assert not any(np.asarray(a).any() for a in jit_read_state(state, "ssm", slots=slots).values())
    values = recurrent_values(np.random.default_rng(13), (2, 2))
    state = jit_write_state(state, "ssm", values=values, slots=slots)
    chex.assert_trees_all_equal(jax.tree.map(bits, state.pools), before)
    state = jit_write_state(state, "ssm", values=values, slots=padded([[0, 5], [-3, 0]]))
    after = jit_read_state(state, "ssm", slots=padded([0, 5]))
    for name in values:
        assert not np.asarray(after[name][0]).any()
        np.testing.assert_array_equal(after[name][1], values[name][0, 1])


def test_no_slots_and_no_rows_at_all():
    state = recurrent_state()
    values = recurrent_values(np.random.default_rng(14), (0,))
    assert read_state(write_state(state, "ssm", padded([]), values), "ssm", slots=padded([]))["h"].shape == (0, 2, 3, 2)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_candidate_slots_of_rows(jit):
    state = recurrent_state(max_drafts=2)
    table = np.asarray(state.state_slots["candidates"])
    previous, current = (jit_candidate_slots if jit else candidate_slots)(state, "ssm", padded([2, -1, 0, 3]))
    for slots, step in ((previous, 0), (current, 1)):
        assert slots.dtype == jnp.int32
        np.testing.assert_array_equal(slots, [table[2, step], [0] * 3, table[0, step], [0] * 3])


def test_a_verify_step_starts_from_the_accepted_candidate_and_leaves_its_own():
    state = recurrent_state(max_drafts=2)
    rows, accepted = padded([2, 0]), padded([1, 2])
    first = recurrent_values(np.random.default_rng(15), (2, 3))
    state = jit_write_state(state, "ssm", values=first, slots=candidate_slots(state, "ssm", rows)[0])

    @jax.jit
    def verify(state, accepted):
        previous, current = candidate_slots(state, "ssm", rows)
        old = read_state(state, "ssm", slots=jnp.take_along_axis(previous, accepted[:, None], axis=1)[:, 0])
        new = jax.tree.map(lambda a: jnp.stack([a + 1, a + 2, a + 3], axis=1), old)
        return write_state(state, "ssm", values=new, slots=current)

    state = verify(state, accepted)
    states = jit_read_state(state, "ssm", slots=candidate_slots(state, "ssm", rows)[1])
    for name, array in states.items():
        start = np.asarray(first[name])[[0, 1], accepted]
        np.testing.assert_array_equal(array, np.stack([start + 1, start + 2, start + 3], axis=1))


# ---- a page size of a buffer's own ---------------------------------------------------------------------------


def small_pages(page_size, dtype=jnp.float32, pages=48, **options):
    buffers = {"kv": Buffer((4, 8), dtype, page_size=page_size), "flag": Buffer((), dtype)}
    return make_state({"a": AttentionLayer(buffers)}, [30, 13], page_size=8, pages=pages, **options)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_pool_and_table_show_a_buffers_own_pages(page_size):
    state, parts = small_pages(page_size), 8 // page_size
    values = {
        "kv": random_values(np.random.default_rng(16), (1, 30, 4, 8), jnp.float32),
        "flag": jnp.zeros((1, 30)),
    }
    state = append(state, "a", padded([0]), np.arange(30, dtype=np.int32)[None], values)
    shown, table = pool(state, "a", "kv"), table_for(state, "a", padded([0, -1, 1]), "kv")
    assert shown.shape == (49 * parts, page_size, 4, 8) and table.shape == (3, 8 * parts)
    tokens = shown[table[0, : -(-30 // page_size)]].reshape(-1, 4, 8)[:30]
    np.testing.assert_array_equal(tokens, values["kv"][0])
    assert not table[1].any()
    used = np.asarray(table[2]).reshape(8, parts)
    assert not used[2:].any() and (used[:2] >= parts).all(), "pages 0 .. parts - 1 are null"
    for other in (None, "flag"):
        assert table_for(state, "a", padded([0]), other).shape == (1, 8)
    assert pool(state, "a", "flag").shape == (49, 8)


@pytest.mark.parametrize("page_size", [2, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_with_pool_takes_back_what_pool_showed(dtype, page_size):
    state = small_pages(page_size, dtype)
    table = np.asarray(table_for(state, "a", padded([1]), "kv"))[0]
    token = random_values(np.random.default_rng(17), (4, 8), dtype)
    position = 9
    size = page_size or 8
    array = pool(state, "a", "kv").at[table[position // size], position % size].set(token)
    state = with_pool(state, "a", "kv", array)
    np.testing.assert_array_equal(bits(gather(state, "a", padded([1]), 10)["kv"][0, position]), bits(token))


# ---- layers that share another's KV --------------------------------------------------------------------------


def test_a_layer_that_shares_reads_what_its_target_holds():
    layers = {
        "b": AttentionLayer(shares="a"), "a": AttentionLayer(kv_buffers(2, 8, jnp.float32)),
        "w": AttentionLayer(kv_buffers(1, 8), window=4), "v": AttentionLayer(shares="w"),
    }  # fmt: skip
    state = make_state(layers, [8, 8])
    values = {"kv": random_values(np.random.default_rng(18), (2, 8, 4, 8), jnp.float32)}
    rows = padded([1, 0])
    state = append(state, "a", rows, np.tile(np.arange(8, dtype=np.int32), (2, 1)), values)
    np.testing.assert_array_equal(gather(state, "b", rows, 8)["kv"], values["kv"])
    for layer, target in (("b", "a"), ("v", "w")):
        np.testing.assert_array_equal(table_for(state, layer, rows), table_for(state, target, rows))
        np.testing.assert_array_equal(bits(pool(state, layer, "kv")), bits(pool(state, target, "kv")))


# ---- cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])  # XLA treats one index in its own way
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_donated_writes_are_in_place_whatever_the_dtype(dtype, batch):
    """Pointers and is_deleted() look right while XLA copies; its own count of temporaries does not lie."""
    buffer = Buffer((16, 4, 64), dtype)
    layers = {"a": AttentionLayer(kv_buffers(2, 64, dtype)), "ssm": RecurrentLayer({"h": buffer, "conv": buffer})}
    state = make_state(layers, [16] * batch, page_size=16, pages=512)
    rows, positions = jnp.arange(batch, dtype=jnp.int32), jnp.full((batch, 1), 5, jnp.int32)

    def step(state, kv, conv):
        state = append(state, "a", rows, positions, {"kv": kv})
        old = read_state(state, "ssm", rows)
        # `h` follows from the old state; `conv`, after a chunk longer than the convolution, does not
        state = write_state(state, "ssm", rows, {"h": old["h"] + old["h"], "conv": conv})
        return old, gather(state, "a", rows, 16), state

    args = jnp.zeros((batch, 1, 4, 64), dtype), jnp.zeros((batch, 16, 4, 64), dtype)
    compiled = jax.jit(step, donate_argnums=0).lower(state, *args).compile()
    memory = compiled.memory_analysis()
    pool_bytes = state.pools[0][0]["kv"].nbytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
    assert memory.alias_size_in_bytes >= 3 * pool_bytes  # all pools come out where they went in
    assert "input_output_alias" in compiled.as_text()


SIZES = 256, 1024  # pages or slots


def assert_in_place(make, step, *args):
    """Donated, `step` needs as much memory beside a small pool as beside a large one, and every array is aliased."""
    temporary, stored = [], []
    for size in SIZES:
        state = make(size)
        memory = jax.jit(step, donate_argnums=0).lower(state, *args).compile().memory_analysis()
        stored.append(min(array.nbytes for array in jax.tree.leaves(state.pools)))
        temporary.append(memory.temp_size_in_bytes)
        assert memory.alias_size_in_bytes >= sum(array.nbytes for array in jax.tree.leaves(state.pools))
    assert temporary[1] - temporary[0] < (stored[1] - stored[0]) / 8, (temporary, stored)


@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8], ids=lambda d: np.dtype(d).name)
def test_a_ragged_append_is_in_place(dtype, tokens):
    """With scales and without: the scales are quantised into a pool of their own."""
    scales = True if dtype == jnp.int8 else None
    layers = {"a": AttentionLayer(kv_buffers(2, 64, dtype, scales=scales))}
    batch = make_ragged(padded([1]), np.array([3]), np.array([tokens]), tokens, 2)

    def step(state, batch, kv):
        state = append(state, "a", batch, batch.positions, {"kv": kv})
        return state, gather(state, "a", batch, 8)

    assert_in_place(
        lambda size: make_state(layers, [32, 32], page_size=16, pages=size),
        step,
        batch,
        jnp.zeros((tokens, 4, 64), jnp.bfloat16),
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_reading_one_slot_and_writing_another_is_in_place(dtype, batch):
    """A verify step: candidates of the new step follow from one of the old. The convolution's do not, once the step
    is longer than it; the output uses what was read of it all the same."""
    buffer = Buffer((16, 4, 64), dtype)
    rows = jnp.arange(batch, dtype=jnp.int32)

    def step(state, accepted, conv):
        previous, current = candidate_slots(state, "ssm", rows)
        old = read_state(state, "ssm", slots=jnp.take_along_axis(previous, accepted[:, None], axis=1)[:, 0])
        h = old["h"][:, None] + jnp.sum(old["conv"][:, None] * conv, axis=-1, keepdims=True).astype(dtype)
        state = write_state(state, "ssm", values={"h": h.astype(dtype), "conv": conv}, slots=current[:, :1])
        return state, h.sum()

    assert_in_place(
        lambda size: make_state(
            {"ssm": RecurrentLayer({"h": buffer, "conv": buffer})}, [16] * batch, pages=size, max_drafts=1
        ),
        step,
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((batch, 1, 16, 4, 64), dtype),
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_writing_the_live_state_and_snapshots_is_in_place(batch):
    buffer = Buffer((16, 4, 64), jnp.float32)
    rows = jnp.arange(batch, dtype=jnp.int32)

    def step(state, snapshots, conv):
        old = read_state(state, "ssm", rows)
        states = {"h": jnp.stack([old["h"] + 1, old["h"] + 2], axis=1), "conv": conv}
        state = write_state(state, "ssm", rows, jax.tree.map(lambda a: a[:, -1], states))
        return write_state(state, "ssm", values=states, slots=snapshots), old

    assert_in_place(
        lambda size: make_state({"ssm": RecurrentLayer({"h": buffer, "conv": buffer})}, [16] * batch, pages=size),
        step,
        jnp.zeros((batch, 2), jnp.int32),
        jnp.zeros((batch, 2, 16, 4, 64)),
    )


@pytest.mark.parametrize("page_size", [4, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.int8], ids=lambda d: np.dtype(d).name)
def test_s59_pool_and_with_pool_in_a_donated_jit_copy_nothing(dtype, page_size):
    buffers = {"kv": Buffer((4, 64), dtype, page_size=page_size)}

    def step(state, rows, token):
        shown, table = pool(state, "a", "kv"), table_for(state, "a", rows, "kv")
        return with_pool(state, "a", "kv", shown.at[table[:, 3], 1].set(token))

    args = jnp.array([1, 0], jnp.int32), jnp.zeros((2, 4, 64), dtype)
    make = functools.partial(make_state, {"a": AttentionLayer(buffers)}, [64, 64], page_size=16)
    assert_in_place(lambda size: make(pages=size), step, *args)
    text = jax.jit(step, donate_argnums=0).lower(make(pages=256), *args).compile().as_text()
    assert "input_output_alias" in text and "copy(" not in text


# ---- errors -------------------------------------------------------------------------------------------------

KV = (1, 2, 4, 8)


@functools.cache
def bad_calls():
    """Name, call, and what its message has to tell."""
    state = make_state(
        {"a": AttentionLayer(kv_buffers(2, 8)), "ssm": RecurrentLayer({"h": Buffer((3,), jnp.float32)})}, [8, 8]
    )
    rows, positions = padded([0]), padded([[0, 1]])
    kv = {"kv": jnp.zeros(KV, jnp.bfloat16)}
    h = {"h": jnp.zeros((1, 3))}
    batch = Ragged(rows, padded([0, 1]), padded([0, 2]), padded([2]), padded([1]))
    shared = make_state({"a": AttentionLayer(kv_buffers(2, 8)), "b": AttentionLayer(shares="a")}, [8, 8])
    small = make_state({"a": AttentionLayer({"kv": Buffer((4, 8), page_size=2)})}, [8, 8])
    scaled = make_state({"a": AttentionLayer(kv_buffers(2, 8, jnp.int8, scales=True))}, [8, 8])

    def with_field(**fields):
        return lambda: append(state, "a", dataclasses.replace(batch, **fields), batch.positions, kv)

    return {
        "unknown layer": (lambda: append(state, "b", rows, positions, kv), "unknown layer 'b'.*a, ssm"),
        "append, recurrent": (lambda: append(state, "ssm", rows, positions, kv), "append: layer 'ssm' is recurrent"),
        "gather, recurrent": (lambda: gather(state, "ssm", rows, 4), "gather: layer 'ssm' is recurrent"),
        "table, recurrent": (lambda: table_for(state, "ssm", rows), "table_for: layer 'ssm' is recurrent"),
        "read, attention": (lambda: read_state(state, "a", rows), "read_state: layer 'a' is an attention layer"),
        "write, attention": (lambda: write_state(state, "a", rows, h), "write_state: layer 'a' is an attention layer"),
        "slots, attention": (lambda: slots_for(state, "a", rows), "slots_for: layer 'a' is an attention layer"),
        "missing buffer": (lambda: append(state, "a", rows, positions, {}), r"values.*\['kv'\], got \[\]"),
        "extra buffer": (lambda: append(state, "a", rows, positions, {**kv, "x": 1}), r"values.*\['kv', 'x'\]"),
        "no mapping": (lambda: append(state, "a", rows, positions, kv["kv"]), "values.*must be a mapping"),
        "shape": (
            lambda: append(state, "a", rows, positions, {"kv": jnp.zeros((1, 2, 2, 8), jnp.bfloat16)}),
            r"values\['kv'\] must be bfloat16\[1, 2, 4, 8\], got bfloat16\[1, 2, 2, 8\]",
        ),
        "dtype": (
            lambda: append(state, "a", rows, positions, {"kv": jnp.zeros(KV)}),
            r"values\['kv'\] must be bfloat16\[1, 2, 4, 8\], got float32\[1, 2, 4, 8\]",
        ),
        "state shape": (
            lambda: write_state(state, "ssm", rows, {"h": jnp.zeros((1, 4))}),
            r"values\['h'\] must be float32\[1, 3\], got float32\[1, 4\]",
        ),
        "rank of rows": (lambda: append(state, "a", padded([[0]]), positions, kv), r"rows must be int32\[B\], got"),
        "dtype of rows": (
            lambda: gather(state, "a", np.zeros(1, np.float32), 4),
            r"rows must be int32\[B\], got float32",
        ),
        "rank of positions": (lambda: append(state, "a", rows, padded([0, 1]), kv), r"positions must be int32\[B, T\]"),
        "batch": (
            lambda: append(state, "a", padded([0, 1]), positions, kv),
            r"positions is \[1, 2\] for rows of \[2\]",
        ),
        "length": (lambda: gather(state, "a", rows, 65), "length must be 0..64, got 65"),
        "traced length": (
            lambda: jax.jit(gather, static_argnums=1)(state, "a", rows, 4),
            "length must be a Python int",
        ),
        "rank of ragged positions": (
            lambda: append(state, "a", batch, positions, kv),
            r"positions must be int32\[T\], got int32\[1, 2\]",
        ),
        "ragged positions": (
            lambda: append(state, "a", batch, padded([0, 1, 2]), kv),
            r"positions is \[3\] for a Ragged of 2 tokens",
        ),
        "ragged values": (
            lambda: append(state, "a", batch, batch.positions, kv),
            r"values\['kv'\] must be bfloat16\[2, 4, 8\], got bfloat16\[1, 2, 4, 8\]",
        ),
        "Ragged.rows": (with_field(rows=positions), r"Ragged.rows must be int32\[R\], got int32\[1, 2\]"),
        "Ragged.positions": (with_field(positions=np.zeros(2, bool)), r"Ragged.positions must be int32\[T\], got bool"),
        "Ragged.cu_q_lens": (
            with_field(cu_q_lens=padded([0, 1, 2])),
            r"Ragged.cu_q_lens is \[3\], must be \[2\] for rows of \[1\]",
        ),
        "Ragged.kv_lens": (
            with_field(kv_lens=padded([1, 2])),
            r"Ragged.kv_lens is \[2\], must be \[1\] for rows of \[1\]",
        ),
        "Ragged.num_seqs": (with_field(num_seqs=np.int32(1)), r"Ragged.num_seqs must be int32\[1\], got int32\[\]"),
        "append to a sharing layer": (
            lambda: append(shared, "b", rows, positions, kv),
            "append: layer 'b' reads the KV of 'a'; append to 'a'",
        ),
        "with_pool of a sharing layer": (
            lambda: with_pool(shared, "b", "kv", pool(shared, "b", "kv")),
            "with_pool: layer 'b' reads the KV of 'a'; with_pool to 'a'",
        ),
        "scaled, an integer": (
            lambda: append(scaled, "a", rows, positions, {"kv": jnp.zeros(KV, jnp.int8)}),
            r"values\['kv'\] must be any float\[1, 2, 4, 8\], got int8\[1, 2, 4, 8\]",
        ),
        "scaled, shape": (
            lambda: append(scaled, "a", rows, positions, {"kv": jnp.zeros((1, 2, 8, 4))}),
            r"values\['kv'\] must be any float\[1, 2, 4, 8\], got float32\[1, 2, 8, 4\]",
        ),
        "scaled, the scales alone": (
            lambda: append(scaled, "a", rows, positions, {"kv_scale": jnp.zeros((1, 2, 4))}),
            r"the buffers \['kv', 'kv_scale'\] or \['kv'\], got \['kv_scale'\]",
        ),
        "scaled, dtype of the scales": (
            lambda: append(
                scaled,
                "a",
                rows,
                positions,
                {"kv": jnp.zeros(KV, jnp.int8), "kv_scale": jnp.zeros((1, 2, 4), jnp.int8)},
            ),
            r"values\['kv_scale'\] must be float32\[1, 2, 4\], got int8\[1, 2, 4\]",
        ),
        "rows and slots": (
            lambda: read_state(state, "ssm", rows, slots=rows),
            "read_state: takes exactly one of rows and slots, got both",
        ),
        "neither rows nor slots": (
            lambda: write_state(state, "ssm", values=h),
            "write_state: takes exactly one of rows and slots, got neither",
        ),
        "no values": (lambda: write_state(state, "ssm", rows), r"values.*\['h'\], got NoneType"),
        "dtype of slots": (
            lambda: read_state(state, "ssm", slots=np.zeros((2, 3), np.float32)),
            r"read_state: slots must be int32\[...\], got float32\[2, 3\]",
        ),
        "shape for slots": (
            lambda: write_state(state, "ssm", values=h, slots=padded([[1, 2]])),
            r"values\['h'\] must be float32\[1, 2, 3\], got float32\[1, 3\]",
        ),
        "candidates, attention": (
            lambda: candidate_slots(state, "a", rows),
            "candidate_slots: layer 'a' is an attention layer",
        ),
        "candidates without max_drafts": (
            lambda: candidate_slots(state, "ssm", rows),
            "candidate_slots: the cache was made with max_drafts=0",
        ),
        "with_pool, the cache's page size": (
            lambda: with_pool(small, "a", "kv", jnp.zeros((49, 4, 4, 8), jnp.bfloat16)),
            r"must be bfloat16\[98, 2, 4, 8\], got bfloat16\[49, 4, 4, 8\]",
        ),
        "buffer of pool": (lambda: pool(state, "a", "k"), "layer 'a' has no buffer 'k', only kv"),
        "buffer of pool, a list": (lambda: pool(state, "a", ["k"]), r"layer 'a' has no buffer \['k'\], only kv"),
        "buffer of table": (lambda: table_for(state, "a", rows, "k"), "layer 'a' has no buffer 'k', only kv"),
        "with_pool shape": (
            lambda: with_pool(state, "ssm", "h", jnp.zeros((49, 4))),
            r"must be float32\[49, 3\], got float32\[49, 4\]",
        ),
        "with_pool, no array": (
            lambda: with_pool(state, "ssm", "h", object()),
            "with_pool: array for 'ssm', 'h' must be an array, got <object",
        ),
        "with_pool, a list": (
            lambda: with_pool(state, "ssm", "h", [1]),
            r"with_pool: array for 'ssm', 'h' must be float32\[49, 3\], got int32\[1\]",
        ),
        "with_pool dtype": (
            lambda: with_pool(state, "a", "kv", jnp.zeros((49, 4, 4, 8))),
            r"must be bfloat16\[49, 4, 4, 8\], got float32",
        ),
    }


@pytest.mark.parametrize("case", bad_calls().keys())
def test_wrong_arguments_raise_config_errors_that_name_them(case):
    call, message = bad_calls()[case]
    with pytest.raises(ConfigError, match=message):
        call()
