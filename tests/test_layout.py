"""From layers to groups, pools and page counts; and what a budget in bytes comes to."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

import jkv
from jkv.layout import make_layout
from jkv.state import init_state


def attention(heads=1, dim=4, dtype=jnp.float32, window=None, sinks=0, **options):
    return jkv.AttentionLayer(jkv.kv_buffers(heads, dtype=dtype, head_dim=dim, **options), window=window, sinks=sinks)


def recurrent(size=8):
    return jkv.RecurrentLayer({"conv": jkv.Buffer((3,), jnp.float32), "ssm": jkv.Buffer((size,), jnp.float32)})


def config(layers, tier=8, **fields):
    fields = {"max_sequences": 3, "max_length": 30, "page_size": 4, **fields}
    tier = tier if isinstance(tier, jkv.DeviceTier) else jkv.DeviceTier(pages=tier)
    return jkv.CacheConfig(layers, tiers=(tier,), **fields)


def layout(layers, tier=8, **fields):
    return make_layout(config(layers, tier, **fields))


# ------------------------------------------------------------------------------------------------ groups


def test_layers_of_one_life_cycle_are_a_group():
    layers = {
        "ssm.0": recurrent(), "local.0": attention(window=8), "global.0": attention(), "ssm.1": recurrent(),
        "local.1": attention(window=8), "wide": attention(window=16), "sinks": attention(window=8, sinks=2),
        "global.1": attention(),
    }  # fmt: skip
    groups = layout(layers).groups
    assert [(group.name, group.layers) for group in groups] == [
        ("full", ("global.0", "global.1")),
        ("window:8", ("local.0", "local.1")),
        ("window:8+2", ("sinks",)),
        ("window:16", ("wide",)),
        ("recurrent", ("ssm.0", "ssm.1")),
    ]
    assert [group.ordinal for group in groups] == list(range(5))


def test_a_group_may_mix_shapes():
    made = layout({"a": attention(heads=1), "b": attention(heads=3), "c": attention(fused=False)})
    assert [group.layers for group in made.groups] == [("a", "b", "c")]
    assert [sorted(buffers) for buffers in made.pools[0].buffers] == [["kv"], ["kv"], ["k", "v"]]


def test_where_a_layer_lies():
    made = layout({"a": attention(), "s": recurrent(), "b": attention(dim=8), "w": attention(window=4, dim=2)})
    places = {name: (place.group.name, place.pool, place.index) for name, place in made.places.items()}
    assert places == {"a": ("full", 0, 0), "b": ("full", 0, 1), "w": ("window:4", 1, 0), "s": ("recurrent", 2, 0)}
    state = init_state(made)
    assert jkv.pool(state, "b", "kv").shape == (9, 4, 2, 8)


def test_a_layer_that_shares_lies_where_its_target_lies_and_takes_nothing():
    layers = {"b": jkv.AttentionLayer(shares="a"), "a": attention(window=8), "g": attention(dim=8)}
    made, alone = layout(layers), layout({"a": attention(window=8), "g": attention(dim=8)})
    assert made.places["b"] == dataclasses.replace(made.places["a"], shares="a") and made.places["a"].shares is None
    assert [group.layers for group in made.groups] == [("g",), ("a",)]
    assert made.pools == alone.pools
    assert jkv.pool(init_state(made), "b", "kv").shape == (9, 4, 2, 4)


def test_an_unknown_layer_is_named_beside_the_known_ones():
    with pytest.raises(jkv.ConfigError, match=r"'x'.*alpha, beta"):
        layout({"alpha": attention(), "beta": recurrent()}).place("x")


def test_a_layout_is_compared_by_identity_and_hashable():
    made = config({"a": attention()})
    a, b = make_layout(made), make_layout(made)
    assert a != b and len({a, b, a}) == 2


# ------------------------------------------------------------------------------------------------ pools


def test_groups_with_equal_layers_share_a_pool():
    layers = {"g": attention(), "l": attention(window=8), "m": attention(window=16, sinks=1)}
    (pool,) = layout(layers, {"full": 5, "window:8": 7, "window:16+1": 9}).pools
    assert pool.groups == ("full", "window:8", "window:16+1") and pool.num_pages == 21
    assert pool.name == "full,window:8,window:16+1"
    assert pool.page_bytes == 4 * (2 * 4 * 4)


def test_an_int_counts_for_each_pool_shared_or_not():
    layers = {"g": attention(), "l": attention(window=8), "other": attention(window=16, dim=8)}
    assert [(pool.name, pool.num_pages) for pool in layout(layers, 9).pools] == [("full,window:8", 9), ("window:16", 9)]


@pytest.mark.parametrize(
    "other",
    [
        {"l": attention(window=8, dim=8)},
        {"l": attention(window=8, dtype=jnp.int32)},
        {"l": attention(window=8, fused=False)},
        {"l.0": attention(window=8), "l.1": attention(window=8)},
        {"l": jkv.RecurrentLayer(jkv.kv_buffers(1, 4, jnp.float32))},
    ],
    ids=["shape", "dtype", "buffers", "number of layers", "recurrent"],
)
def test_what_keeps_pools_apart(other):
    made = layout({"g": attention(), **other})
    assert [len(pool.groups) for pool in made.pools] == [1, 1]


@pytest.mark.parametrize(("field", "value"), [("page_size", 2), ("value_dim", 4)])
def test_page_size_and_value_dim_keep_pools_apart(field, value):
    plain = {"kv": jkv.Buffer((8,))}
    other = {"kv": jkv.Buffer((8,), **{field: value})}
    groups = [
        [pool.groups for pool in layout({"g": jkv.AttentionLayer(a), "l": jkv.AttentionLayer(b, window=8)}).pools]
        for a, b in ((plain, other), (other, other))
    ]
    assert groups == [[("full",), ("window:8",)], [("full", "window:8")]]


def test_saying_the_caches_page_size_changes_nothing():
    said = jkv.AttentionLayer({"kv": jkv.Buffer((8,), page_size=4)}, window=8)
    assert len(layout({"g": jkv.AttentionLayer({"kv": jkv.Buffer((8,))}), "l": said}).pools) == 1


def test_shared_pools_compare_layer_by_layer():
    a, b = attention(dim=2), attention(dim=6)
    wa, wb = attention(dim=2, window=8), attention(dim=6, window=8)
    assert len(layout({"a": a, "b": b, "wa": wa, "wb": wb}).pools) == 1
    assert len(layout({"a": a, "b": b, "wb": wb, "wa": wa}).pools) == 2


def test_page_bytes_count_all_layers_of_the_pool():
    layers = {"a": attention(heads=2, dim=8, dtype=jnp.bfloat16), "b": attention(dim=4), "s": recurrent(8)}
    assert [pool.page_bytes for pool in layout(layers).pools] == [4 * (2 * 2 * 8 * 2 + 2 * 4 * 4), 4 * (3 + 8)]


@pytest.mark.parametrize("pages", [{"full": 4}, {"full": 4, "window:9": 4}, {"full": 4, "window:8": 4, "recurrent": 4}])
def test_pages_by_group_name_every_group_and_no_other(pages):
    with pytest.raises(jkv.ConfigError) as raised:
        layout({"g": attention(), "l": attention(window=8)}, pages)
    message = str(raised.value)
    assert "DeviceTier.pages" in message and "window:8" in message and all(group in message for group in pages)


def test_fewer_slots_than_sequences():
    with pytest.raises(jkv.ConfigError, match=r"2 .*max_sequences=3.*at least 3"):
        layout({"s": recurrent()}, 2)
    assert layout({"s": recurrent()}, 3).pools[0].num_pages == 3


@pytest.mark.parametrize("max_drafts", [0, 1, 4])
def test_candidate_slots_lie_behind_the_usable_ones(max_drafts):
    made = layout({"g": attention(), "s": recurrent()}, {"full": 8, "recurrent": 5}, max_drafts=max_drafts)
    full, slots = made.pools
    candidates = 3 * 2 * (max_drafts + 1) if max_drafts else 0  # 3 sequences, two steps
    assert (full.scratch, full.num_rows) == (0, 9)
    assert (slots.num_pages, slots.scratch, slots.num_rows) == (5, candidates, 6 + candidates)
    assert jkv.pool(init_state(made), "s", "ssm").shape == (6 + candidates, 8)


def test_candidate_slots_count_for_int32():
    with pytest.raises(jkv.ConfigError, match=r"2147483640 slots and 12 candidates"):
        layout({"s": recurrent()}, 2**31 - 8, max_drafts=1)


def test_without_recurrent_layers_max_drafts_takes_nothing():
    assert layout({"g": attention()}, max_drafts=3).pools == layout({"g": attention()}).pools


@pytest.mark.parametrize("tier", [{"full": 2**31 // 4}, {"full": 2**31 - 1}])
def test_more_tokens_than_int32_can_name(tier):
    with pytest.raises(jkv.ConfigError, match=str(tier["full"])):
        layout({"g": attention()}, tier)


# ------------------------------------------------------------------------------------------------ the stale range


@pytest.mark.parametrize("sinks", [0, 1, 4, 6])
@pytest.mark.parametrize("window", [1, 3, 4, 9])
def test_needed_pages_and_stale_pages_by_enumeration(window, sinks):
    """page_size 4. A token at position n reads [n+1-W, n] and the sinks; so resuming at n needs what is below n."""
    group = layout({"w": attention(window=window, sinks=sinks)}).groups[0]
    for n in range(40):
        read = {t // 4 for t in range(n) if t >= n + 1 - window or t < sinks}
        sink_pages, first, stop = group.needed(n, 4)
        assert {*range(sink_pages), *range(first, stop)} == read, n
        sink_pages, first = group.first_live(n, 4)
        later = {t // 4 for m in range(n, 60) for t in range(m + 1) if t >= m + 1 - window or t < sinks}
        assert set(range(sink_pages, first)) == set(range(-(-n // 4))) - later, n


def test_full_attention_is_never_stale_and_needs_all():
    group = layout({"g": attention()}).groups[0]
    assert group.first_live(33, 4) == (0, 0) and group.needed(33, 4) == (0, 0, 9)


# ------------------------------------------------------------------------------------------------ a budget in bytes

MODELS = {
    "full": {"g": attention()},
    "full, window": {"g": attention(), "l": attention(dim=8, window=8)},
    "shared": {"g": attention(), "l": attention(window=8)},
    "hybrid": {"g": attention(), "l": attention(dim=8, window=8, sinks=2), "s": recurrent()},
    "shared hybrid": {"g": attention(), "l": attention(window=8), "s": recurrent()},
    "recurrent": {"s": recurrent()},
    "narrow": {"g": attention(dtype=jnp.bfloat16, dim=2), "l": attention(dtype=jnp.int8, window=8)},
}


def least_bytes(layers, asked=1):
    with pytest.raises(jkv.ConfigError) as raised:
        layout(layers, jkv.DeviceTier(bytes=asked))
    message = str(raised.value)
    assert f"bytes={asked}" in message and "max_length=30" in message
    return int(re.search(r"at least (\d+)", message)[1])


def device_bytes(made):
    return sum(array.nbytes for layers in init_state(made).pools for layer in layers for array in layer.values())


def reserves_max_length_in_one_chunk(made):
    manager = jkv.CacheManager(made)
    seq = manager.open()
    done = seq.resume() and seq.reserve(made.max_length)
    manager.check()
    return done


@pytest.mark.parametrize("model", MODELS)
def test_the_least_workable_number_works_and_one_byte_less_does_not(model):
    layers = MODELS[model]
    least = least_bytes(layers)
    assert least_bytes(layers, least - 1) == least
    made = config(layers, jkv.DeviceTier(bytes=least))
    assert device_bytes(make_layout(made)) == least, "null pages included"
    assert reserves_max_length_in_one_chunk(made)


@pytest.mark.parametrize("model", [model for model in MODELS if model != "recurrent"])
def test_the_least_number_is_really_the_least(model):
    """One page less in any attention pool and max_length does not fit."""
    layers = MODELS[model]
    pools = layout(layers, jkv.DeviceTier(bytes=least_bytes(layers))).pools
    for short in (pool for pool in pools if not pool.recurrent):
        pages = {}
        for pool in pools:
            share = pool.num_pages - (pool is short) - (len(pool.groups) - 1)
            pages |= dict.fromkeys(pool.groups, 1) | {pool.groups[0]: share}
        with pytest.raises(jkv.OutOfPagesError, match=rf"{short.num_pages} pages.*{short.num_pages - 1}"):
            reserves_max_length_in_one_chunk(config(layers, pages))


def test_a_live_state_for_every_row_even_at_the_least_number():
    layers = MODELS["hybrid"]
    manager = jkv.CacheManager(config(layers, jkv.DeviceTier(bytes=least_bytes(layers))))
    for _ in range(3):
        assert manager.open().resume()
    assert manager.stats().pools["recurrent"].free == 2  # and the two snapshots of one sequence


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("factor", [1.0, 1.31, 2.0, 3.7, 10.0])
def test_every_pool_serves_the_same_number_of_sequences(model, factor):
    """max_length 30 in pages of 4: 8 pages of each group that a pool serves; two snapshots."""
    layers = MODELS[model]
    budget = int(least_bytes(layers) * factor)
    made = layout(layers, jkv.DeviceTier(bytes=budget))
    used = device_bytes(made)
    assert used <= budget
    served = []
    for pool in made.pools:
        spare, need = (pool.num_pages - 3, 2) if pool.recurrent else (pool.num_pages, 8 * len(pool.groups))
        served.append((spare / need, (spare + 1) / need))
    assert max(low for low, _ in served) < min(high for _, high in served), "a page more or less, no more"
    assert budget - used < sum(pool.page_bytes for pool in made.pools), "less than a page of each is left over"


@pytest.mark.parametrize("factor", [1.0, 2.3])
def test_candidate_slots_are_part_of_the_fixed_cost(factor):
    layers = MODELS["hybrid"]
    plain, drafts = config(layers), config(layers, max_drafts=2)
    candidates = 3 * 2 * 3 * make_layout(plain).recurrent_pool.page_bytes
    least = least_bytes(layers) + candidates
    with pytest.raises(jkv.ConfigError, match=f"a live state and 6 candidates for each.*at least {least} bytes"):
        make_layout(dataclasses.replace(drafts, tiers=(jkv.DeviceTier(bytes=least - 1),)))
    budget = int(least * factor)
    made = make_layout(dataclasses.replace(drafts, tiers=(jkv.DeviceTier(bytes=budget),)))
    without = make_layout(dataclasses.replace(plain, tiers=(jkv.DeviceTier(bytes=budget - candidates),)))
    assert [pool.num_pages for pool in made.pools] == [pool.num_pages for pool in without.pools]
    assert least_bytes(layers) <= device_bytes(made) <= budget


# P=4, max_length 30: 8 pages. Two windows' worth, and what a rewind may need: 2 * (ceil((W - 1 + rewind) / 4) + 1)
@pytest.mark.parametrize(
    ("window", "sinks", "max_rewind", "pages"),
    [(1, 0, 0, 2), (4, 0, 0, 4), (5, 0, 0, 4), (6, 0, 0, 6), (4, 0, 2, 6), (4, 3, 0, 5), (4, 5, 0, 6), (16, 0, 0, 8)],
)
def test_with_window_scratch_a_window_needs_pages_for_its_own_length(window, sinks, max_rewind, pages):
    layers = {"g": attention(), "l": attention(dim=8, window=window, sinks=sinks)}
    scratch = jkv.WindowScratch(max_rewind)
    with pytest.raises(jkv.ConfigError) as raised:
        layout(layers, jkv.DeviceTier(bytes=1), window_scratch=scratch)
    least = int(re.search(r"at least (\d+)", str(raised.value))[1])
    made = layout(layers, jkv.DeviceTier(bytes=least), window_scratch=scratch)
    assert [pool.num_pages for pool in made.pools] == [8, pages]
    assert least == sum((1 + need) * pool.page_bytes for need, pool in zip((8, pages), made.pools, strict=True))
    assert reserves_max_length_in_one_chunk(config(layers, jkv.DeviceTier(bytes=least), window_scratch=scratch))
    budget = sum((1 + 5 * need) * pool.page_bytes for need, pool in zip((8, pages), made.pools, strict=True))
    made = layout(layers, jkv.DeviceTier(bytes=budget), window_scratch=scratch)
    assert [pool.num_pages for pool in made.pools] == [5 * 8, 5 * pages]


def test_groups_that_share_a_pool_add_up_with_window_scratch():
    layers = {"g": attention(), "l": attention(window=4)}
    with pytest.raises(jkv.ConfigError) as raised:
        layout(layers, jkv.DeviceTier(bytes=1), window_scratch=jkv.WindowScratch())
    pool_bytes = (1 + 8 + 4) * layout(layers).pools[0].page_bytes
    assert f"at least {pool_bytes} bytes" in str(raised.value)


def test_more_bytes_never_give_fewer_pages():
    layers, before = MODELS["hybrid"], None
    least = least_bytes(layers)
    for budget in range(least, 3 * least, 97):
        pages = [pool.num_pages for pool in layout(layers, jkv.DeviceTier(bytes=budget)).pools]
        assert before is None or all(a <= b for a, b in zip(before, pages, strict=True))
        before = pages


def test_pages_are_exact_and_may_be_too_few_for_max_length():
    made = config({"g": attention(), "l": attention(dim=8, window=8)}, {"full": 2, "window:8": 5})
    assert [pool.num_pages for pool in make_layout(made).pools] == [2, 5]
    assert jkv.pool(init_state(make_layout(made)), "l", "kv").shape[0] == 6
