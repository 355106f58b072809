"""What the user declares: groups, defaults, and errors that name the field and the numbers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.config import as_tokens, scale_names

KV = jkv.kv_buffers(1, 4)
ATTENTION = jkv.AttentionLayer(KV)
STATE = jkv.RecurrentLayer({"h": jkv.Buffer((4,))})


def config(**fields):
    defaults = {"layers": {"a": ATTENTION}, "max_sequences": 2, "max_length": 32, "tiers": (jkv.DeviceTier(pages=8),)}
    return jkv.CacheConfig(**{**defaults, **fields})


# ------------------------------------------------------------------------------------------------ buffers and layers


def test_kv_buffers_fused_and_split():
    fused, split = jkv.kv_buffers(2, 16), jkv.kv_buffers(2, 16, jnp.float32, fused=False)
    assert {name: buffer.shape for name, buffer in fused.items()} == {"kv": (4, 16)}
    assert {name: buffer.shape for name, buffer in split.items()} == {"k": (2, 16), "v": (2, 16)}
    assert fused["kv"].dtype == jnp.bfloat16 and split["v"].dtype == jnp.float32


@pytest.mark.parametrize("scales", [True, jnp.float32, jnp.bfloat16, "float16"])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_scales_are_one_number_per_token_and_head(dtype, scales):
    fused, split = (jkv.kv_buffers(2, 16, dtype, fused=fused, scales=scales) for fused in (True, False))
    assert {name: buffer.shape for name, buffer in fused.items()} == {"kv": (4, 16), "kv_scale": (4,)}
    assert {name: buffer.shape for name, buffer in split.items()} == {
        "k": (2, 16), "v": (2, 16), "k_scale": (2,), "v_scale": (2,),
    }  # fmt: skip
    assert split["v_scale"].dtype == (jnp.float32 if scales is True else scales) and split["v"].dtype == dtype
    assert scale_names(fused) == {"kv": "kv_scale"} and scale_names(split) == {"k": "k_scale", "v": "v_scale"}


def test_no_scales_unless_they_fit_what_they_scale():
    assert jkv.kv_buffers(2, 16, jnp.int8, scales=False) == jkv.kv_buffers(2, 16, jnp.int8)
    kv, scale = jkv.Buffer((4, 16), jnp.int8), jkv.Buffer((4,), jnp.float32)
    assert scale_names({"kv": kv, "kv_scale": scale, "flag": jkv.Buffer((), jnp.int8)}) == {"kv": "kv_scale"}
    for other in (
        {"kv": kv},
        {"kv": kv, "kv_scale": jkv.Buffer((2,), jnp.float32)},
        {"kv": kv, "kv_scale": jkv.Buffer((4,), jnp.int32)},
        {"kv": jkv.Buffer((4, 16)), "kv_scale": scale},
        {"flag": jkv.Buffer((), jnp.int8), "flag_scale": jkv.Buffer((), jnp.float32)},
    ):
        assert scale_names(other) == {}


def test_latent_buffers_say_how_much_of_the_latent_is_its_value():
    (latent,) = jkv.latent_buffers(512, 64).values()
    assert (latent.shape, latent.dtype, latent.value_dim, latent.nbytes) == ((576,), jnp.bfloat16, 512, 2 * 576)
    assert jkv.latent_buffers(8, 0, jnp.float32)["latent"] == jkv.Buffer((8,), jnp.float32, value_dim=8)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (jnp.float32, 4), ("float32", 4), (np.dtype("int32"), 4), (jnp.bfloat16, 2), (jnp.float16, 2),
        (jnp.float8_e4m3fn, 1), (jnp.int8, 1),
    ],
)  # fmt: skip
def test_bytes_of_a_buffer(dtype, size):
    assert jkv.Buffer((3, 5), dtype).nbytes == 15 * size


def test_a_buffers_defaults_and_a_shape_of_one_number():
    assert jkv.Buffer((2, 3)).dtype == jnp.bfloat16
    assert jkv.Buffer(7).shape == jkv.Buffer([7]).shape == (7,)
    assert jkv.Buffer((np.int64(2),)).shape == (2,)


@pytest.mark.parametrize(
    ("fields", "group"),
    [
        ({}, "full"),
        ({"window": 128}, "window:128"),
        ({"window": 128, "sinks": 4}, "window:128+4"),
        ({"window": 1}, "window:1"),
    ],
)
def test_a_layers_group(fields, group):
    assert jkv.AttentionLayer(KV, **fields).group == group
    assert STATE.group == "recurrent"


def test_declarations_do_not_follow_what_the_caller_does_to_his_dicts():
    buffers, layers, pages = dict(KV), {"a": ATTENTION}, {"full": 4}
    layer, tier = jkv.AttentionLayer(buffers), jkv.DeviceTier(pages=pages)
    made = config(layers=layers, tiers=(tier,))
    buffers.clear(), layers.clear(), pages.clear()
    assert set(layer.buffers) == {"kv"} and set(made.layers) == {"a"} and dict(tier.pages) == {"full": 4}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.page_size = 8
    with pytest.raises(TypeError):
        made.layers["b"] = ATTENTION


# ------------------------------------------------------------------------------------------------ CacheConfig


def test_the_defaults():
    made = config()
    assert (made.page_size, made.partial_reuse, made.reuse_backoff, made.model) == (16, True, 0, "")
    assert made.max_utilization_for_resume == 0.97
    assert made.window_scratch is None and made.max_drafts == 0 and jkv.WindowScratch().max_rewind == 0


@pytest.mark.parametrize(("layers", "expected"), [({"a": ATTENTION}, False), ({"a": ATTENTION, "s": STATE}, True)])
def test_min_snapshot_is_on_with_recurrent_layers_unless_said(layers, expected):
    assert config(layers=layers).min_snapshot is expected
    for said in (True, False):
        assert config(layers=layers, min_snapshot=said).min_snapshot is said


def test_one_tier_needs_no_tuple():
    tier = jkv.DeviceTier(pages=8)
    assert config(tiers=tier).tiers == config(tiers=[tier]).tiers == (tier,)


@pytest.mark.parametrize("page_size", [None, 1, 2, 4, 8])
def test_a_buffers_page_size_divides_the_caches(page_size):
    layer = jkv.AttentionLayer({"kv": jkv.Buffer((2,), page_size=page_size)})
    assert config(layers={"a": layer}, page_size=8).page_size == 8


def test_a_layer_that_shares_is_filled_in_with_what_it_reads():
    window = jkv.AttentionLayer(KV, window=8, sinks=2)
    made = config(layers={"b": jkv.AttentionLayer(shares="a"), "a": window, "c": jkv.AttentionLayer(shares="a")})
    for name in "bc":
        layer = made.layers[name]
        assert (layer.buffers, layer.window, layer.sinks, layer.shares) == (window.buffers, 8, 2, "a")
        assert layer.group == "window:8+2"
    assert list(made.layers) == ["b", "a", "c"] and made.layers["a"] is window
    again = dataclasses.replace(made, page_size=8)
    assert again.layers["b"] == made.layers["b"]


# ------------------------------------------------------------------------------------------------ errors

WRONG = {
    "shape 0": (lambda: jkv.Buffer((4, 0)), "Buffer.shape", 0),
    "shape -1": (lambda: jkv.Buffer((-1,)), "Buffer.shape", -1),
    "shape 2.5": (lambda: jkv.Buffer((2.5,)), "Buffer.shape", 2.5),
    "shape True": (lambda: jkv.Buffer((True,)), "Buffer.shape", True),
    "shape None": (lambda: jkv.Buffer(None), "Buffer.shape", None),
    "dtype float64": (lambda: jkv.Buffer((4,), np.float64), "Buffer.dtype", "float64"),
    "dtype bool": (lambda: jkv.Buffer((4,), bool), "Buffer.dtype", "bool"),
    "dtype nonsense": (lambda: jkv.Buffer((4,), "nonsense"), "Buffer.dtype", "nonsense"),
    "page_size of a buffer": (lambda: jkv.Buffer((4,), page_size=0), "Buffer.page_size", 0),
    "kv_heads": (lambda: jkv.kv_buffers(0, 4), "kv_heads", 0),
    "head_dim": (lambda: jkv.kv_buffers(1, -4), "head_dim", -4),
    "no buffers": (lambda: jkv.AttentionLayer({}), "AttentionLayer.buffers", "{}"),
    "a list of buffers": (lambda: jkv.RecurrentLayer([jkv.Buffer((4,))]), "RecurrentLayer.buffers", "Buffer"),
    "a shape for a buffer": (lambda: jkv.RecurrentLayer({"h": (4,)}), "RecurrentLayer.buffers", "(4,)"),
    "window 0": (lambda: jkv.AttentionLayer(KV, window=0), "AttentionLayer.window", 0),
    "window 1.5": (lambda: jkv.AttentionLayer(KV, window=1.5), "AttentionLayer.window", 1.5),
    "sinks -1": (lambda: jkv.AttentionLayer(KV, window=4, sinks=-1), "AttentionLayer.sinks", -1),
    "sinks without a window": (lambda: jkv.AttentionLayer(KV, sinks=3), "AttentionLayer.sinks", 3),
    "bytes and pages": (lambda: jkv.DeviceTier(bytes=10, pages=20), "bytes", "pages=20"),
    "neither": (lambda: jkv.DeviceTier(), "bytes", "pages"),
    "bytes 0": (lambda: jkv.DeviceTier(bytes=0), "DeviceTier.bytes", 0),
    "bytes 1e9": (lambda: jkv.DeviceTier(bytes=1e9), "DeviceTier.bytes", 1e9),
    "pages 0": (lambda: jkv.DeviceTier(pages=0), "DeviceTier.pages", 0),
    "pages of a group": (lambda: jkv.DeviceTier(pages={"full": -3}), "DeviceTier.pages['full']", -3),
    "no layers": (lambda: config(layers={}), "CacheConfig.layers", "{}"),
    "buffers for a layer": (lambda: config(layers={"a": KV}), "CacheConfig.layers", "'a'"),
    "a layer's name": (lambda: config(layers={3: ATTENTION}), "CacheConfig.layers", 3),
    "max_sequences": (lambda: config(max_sequences=0), "CacheConfig.max_sequences", 0),
    "max_length": (lambda: config(max_length=-1), "CacheConfig.max_length", -1),
    "page_size": (lambda: config(page_size=0), "CacheConfig.page_size", 0),
    "page_size 4.0": (lambda: config(page_size=4.0), "CacheConfig.page_size", 4.0),
    "no tier": (lambda: config(tiers=()), "CacheConfig.tiers", "()"),
    "tiers None": (lambda: config(tiers=None), "CacheConfig.tiers", None),
    "two tiers": (lambda: config(tiers=(jkv.DeviceTier(pages=3),) * 2), "CacheConfig.tiers", "pages=3"),
    "reuse_backoff": (lambda: config(reuse_backoff=-2), "CacheConfig.reuse_backoff", -2),
    "utilization 0": (lambda: config(max_utilization_for_resume=0.0), "max_utilization_for_resume", 0.0),
    "utilization 1.5": (lambda: config(max_utilization_for_resume=1.5), "max_utilization_for_resume", 1.5),
    "utilization None": (lambda: config(max_utilization_for_resume=None), "max_utilization_for_resume", None),
    "partial_reuse": (lambda: config(partial_reuse="no"), "CacheConfig.partial_reuse", "no"),
    "min_snapshot": (lambda: config(min_snapshot=2), "CacheConfig.min_snapshot", 2),
    "model": (lambda: config(model=3), "CacheConfig.model", 3),
    "another page size": (
        lambda: config(layers={"a": jkv.AttentionLayer({"kv": jkv.Buffer((2,), page_size=6)})}),
        "layers['a'].buffers['kv'].page_size is 6",
        "page_size, 16",
    ),
    "a larger page size": (
        lambda: config(layers={"a": jkv.AttentionLayer({"kv": jkv.Buffer((2,), page_size=32)})}),
        "layers['a'].buffers['kv'].page_size is 32",
        "page_size, 16",
    ),
    "page_size of a state": (
        lambda: jkv.RecurrentLayer({"h": jkv.Buffer((4,), page_size=8)}),
        "RecurrentLayer.buffers['h'].page_size",
        8,
    ),
    "value_dim of a state": (
        lambda: jkv.RecurrentLayer({"h": jkv.Buffer((4,), value_dim=2)}),
        "RecurrentLayer.buffers['h'].value_dim",
        2,
    ),
    "value_dim 0": (lambda: jkv.Buffer((4,), value_dim=0), "Buffer.value_dim", 0),
    "value_dim 5 of 4": (lambda: jkv.Buffer((4,), value_dim=5), "Buffer.value_dim=5", "(4,)"),
    "value_dim of heads": (lambda: jkv.Buffer((2, 4), value_dim=2), "Buffer.value_dim=2", "(2, 4)"),
    "rank": (lambda: jkv.latent_buffers(0, 4), "rank", 0),
    "rope_dim": (lambda: jkv.latent_buffers(4, -1), "rope_dim", -1),
    "scales of bfloat16": (lambda: jkv.kv_buffers(1, 4, scales=True), "scales=True", "bfloat16"),
    "scales in int8": (lambda: jkv.kv_buffers(1, 4, jnp.int8, scales=np.int8), "scales=", "int8"),
    "scales in float64": (lambda: jkv.kv_buffers(1, 4, jnp.int8, scales=np.float64), "dtype", "float64"),
    "neither buffers nor shares": (lambda: jkv.AttentionLayer(), "AttentionLayer.buffers", None),
    "shares 3": (lambda: jkv.AttentionLayer(shares=3), "AttentionLayer.shares", 3),
    "shares and buffers": (lambda: jkv.AttentionLayer(KV, shares="a"), "AttentionLayer.shares='a'", "buffers"),
    "shares and window": (lambda: jkv.AttentionLayer(shares="a", window=8), "AttentionLayer.shares='a'", "window=8"),
    "shares and sinks": (lambda: jkv.AttentionLayer(shares="a", sinks=3), "AttentionLayer.shares='a'", "sinks=3"),
    "shares an unknown layer": (
        lambda: config(layers={"a": ATTENTION, "b": jkv.AttentionLayer(shares="x")}),
        "layers['b'].shares='x'",
        "a, b",
    ),
    "shares a recurrent layer": (
        lambda: config(layers={"s": STATE, "b": jkv.AttentionLayer(shares="s")}),
        "layers['b'].shares='s'",
        "recurrent",
    ),
    "shares one that shares": (
        lambda: config(
            layers={"a": ATTENTION, "b": jkv.AttentionLayer(shares="a"), "c": jkv.AttentionLayer(shares="b")}
        ),
        "layers['c'].shares='b'",
        "'a'",
    ),
    "shares itself": (lambda: config(layers={"b": jkv.AttentionLayer(shares="b")}), "layers['b'].shares='b'", "no KV"),
    "window_scratch True": (lambda: config(window_scratch=True), "CacheConfig.window_scratch", True),
    "max_rewind -1": (lambda: jkv.WindowScratch(-1), "WindowScratch.max_rewind", -1),
    "max_rewind 1.5": (lambda: jkv.WindowScratch(1.5), "WindowScratch.max_rewind", 1.5),
    "max_drafts -1": (lambda: config(max_drafts=-1), "CacheConfig.max_drafts", -1),
    "max_drafts True": (lambda: config(max_drafts=True), "CacheConfig.max_drafts", True),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_field_and_the_numbers(name):
    make, field, value = WRONG[name]
    with pytest.raises(jkv.ConfigError) as raised:
        make()
    assert isinstance(raised.value, ValueError)
    message = str(raised.value)
    assert field in message and str(value) in message, message


# ------------------------------------------------------------------------------------------------ Scope

DIFFERENT = [
    jkv.Scope(),
    jkv.Scope(salt=0),
    jkv.Scope(salt=""),
    jkv.Scope(salt=b""),
    jkv.Scope(salt=1),
    jkv.Scope(salt="1"),
    jkv.Scope(salt=b"1"),
    jkv.Scope(adapter=1),
    jkv.Scope(adapter="1"),
    jkv.Scope(adapter=""),
    jkv.Scope(adapter=0),
    jkv.Scope(adapter=1, version=1),
    jkv.Scope(adapter=1, version="0"),
    jkv.Scope(version="0"),
    jkv.Scope(adapter=1, salt=1),
]


def test_scopes_are_typed():
    assert jkv.Scope(adapter="a", version=2, salt=b"s") == jkv.Scope("a", 2, b"s")
    assert jkv.Scope() == jkv.Scope(None, 0, None)
    for i, a in enumerate(DIFFERENT):
        assert [a == b for b in DIFFERENT] == [i == j for j in range(len(DIFFERENT))]


def test_nothing_is_shared_between_scopes():
    """Each of them finds what it left, and nothing of the 14 others."""
    manager = jkv.CacheManager(config(tiers=(jkv.DeviceTier(pages=64),), page_size=2))
    state = manager.init()
    for n, scope in enumerate(DIFFERENT, 1):
        assert manager.probe(range(30), scope=scope).raw_tokens == 0
        with manager.open(range(n), scope=scope) as seq:
            assert seq.resume() and seq.reserve(n)
            state, _ = manager.prepare(state, [seq])
            seq.commit(range(n))
    assert [manager.probe(range(30), scope=scope).tokens for scope in DIFFERENT] == list(range(1, 16))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("adapter", True), ("adapter", 1.0), ("adapter", b"x"), ("adapter", (1,)),
        ("version", None), ("version", False), ("version", 1.5), ("version", b"1"),
        ("salt", True), ("salt", 2.5), ("salt", ["s"]), ("salt", bytearray(b"s")),
    ],
)  # fmt: skip
def test_what_a_scope_does_not_take(field, value):
    with pytest.raises(jkv.ConfigError) as raised:
        jkv.Scope(**{field: value})
    assert f"Scope.{field}" in str(raised.value) and repr(value) in str(raised.value)


# ------------------------------------------------------------------------------------------------ token ids


@pytest.mark.parametrize(
    "tokens", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8), np.array([1, 2], np.int64), iter([1, 2])]
)
def test_ids_in_any_container(tokens):
    ids = as_tokens(tokens)
    assert ids.dtype == np.int32 and ids.tolist() == [1, 2]


def test_ids_at_the_ends_of_the_range():
    assert as_tokens([0, 2**31 - 1]).tolist() == [0, 2**31 - 1]
    assert as_tokens([]).shape == (0,)
    for bad in (-1, 2**31):
        for dtype in (np.int64, object):
            with pytest.raises(jkv.ConfigError, match=f"{bad}|integers"):
                as_tokens(np.array([5, bad], dtype))
    with pytest.raises(jkv.ConfigError, match="-7"):
        as_tokens(np.array([5, -7], np.int32))
