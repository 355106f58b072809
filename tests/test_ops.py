"""append, gather, read_state, write_state and raw access."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import DTYPES, bits, compilations, make_state, random_values, with_table

from jkv.config import AttentionLayer, Buffer, RecurrentLayer, kv_buffers
from jkv.errors import ConfigError
from jkv.ops import append, gather, pool, read_state, slots_for, table_for, with_pool, write_state

P = 4
jit_append = jax.jit(append, static_argnames="layer")
jit_gather = jax.jit(gather, static_argnames=("layer", "length"))
jit_read_state = jax.jit(read_state, static_argnames="layer")
jit_write_state = jax.jit(write_state, static_argnames="layer")


def attention_state(dtype=jnp.float32, lengths=(10, 7, 0), **options):
    buffers = {"kv": Buffer((4, 8), dtype), "latent": Buffer((5,), dtype), "flag": Buffer((), dtype)}
    return make_state({"a": AttentionLayer(buffers), "b": AttentionLayer(buffers)}, lengths, **options)


def recurrent_state(dtype=jnp.float32, rows=3):
    buffers = {"conv": Buffer((3, 4), dtype), "h": Buffer((2, 3, 2), jnp.float32)}
    return make_state({"ssm": RecurrentLayer(buffers)}, [0] * rows, pages=rows + 4)


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
        "buffer of pool": (lambda: pool(state, "a", "k"), "layer 'a' has no buffer 'k', only kv"),
        "buffer of table": (lambda: table_for(state, "a", rows, "k"), "layer 'a' has no buffer 'k', only kv"),
        "with_pool shape": (
            lambda: with_pool(state, "ssm", "h", jnp.zeros((49, 4))),
            r"must be float32\[49, 3\], got float32\[49, 4\]",
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
