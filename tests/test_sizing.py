"""Pool planning: typical, must_fit, pool_ratio, max_length_for, rebalance."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, join, make_config, tokens

import jkv
from jkv.layout import make_layout
from jkv.sizing import Usage, batch_pages, live_pages

LAYERS = {
    "a": jkv.AttentionLayer({"kv": jkv.Buffer((4,), jnp.float32)}),
    "w": jkv.AttentionLayer({"kv": jkv.Buffer((2,), jnp.float32)}, window=8),
    "s": jkv.RecurrentLayer({"h": jkv.Buffer((64,), jnp.float32)}),
}
NAMES = ("full", "window:8", "recurrent")


def shape(capacity, length=None):
    return jkv.SequenceShape(capacity, capacity if length is None else length)


def config(size=400_000, layers=LAYERS, pages=None, **fields):
    tier = jkv.DeviceTier(bytes=size) if pages is None else jkv.DeviceTier(pages=pages)
    return jkv.CacheConfig(layers, **{"max_sequences": 8, "max_length": 256, "page_size": 4, "tiers": tier, **fields})


def counts(made):
    return [pool.num_pages for pool in make_layout(made).pools]


def used_bytes(made):
    return sum(pool.num_rows * pool.page_bytes for pool in make_layout(made).pools)


def needs(batch, made):
    layout = make_layout(made)
    return batch_pages(batch, made, layout.pools, layout.groups)


# --- shapes


@pytest.mark.parametrize("bad", [(0, 0), (4, 5), (4, -1), (4.0, 1), (True, 0)])
def test_bad_sequence_shapes(bad):
    with pytest.raises(jkv.ConfigError, match="SequenceShape"):
        jkv.SequenceShape(*bad)


@pytest.mark.parametrize("sequences, shared", [([], 0), ([(4, 4)], 0), (3, 0), ([shape(4)], 5), ([shape(4)], -1)])
def test_bad_batch_shapes(sequences, shared):
    with pytest.raises(jkv.ConfigError, match="BatchShape"):
        jkv.BatchShape(sequences, shared)


@pytest.mark.parametrize(
    "fields",
    [
        {"typical": shape(4)}, {"must_fit": [shape(4)]}, {"pool_ratio": [1]}, {"pool_ratio": dict.fromkeys(NAMES, 0)},
        {"pool_ratio": {"full": 1}}, {"pool_ratio": dict.fromkeys(NAMES, True)},
        {"pool_ratio": dict.fromkeys(NAMES, float("inf"))}, {"typical": jkv.BatchShape([shape(257)])},
        {"must_fit": [jkv.BatchShape([shape(4)] * 9)]},
    ],
)  # fmt: skip
def test_bad_plans(fields):
    with pytest.raises(jkv.ConfigError):
        make_layout(config(**fields))


# --- what a batch takes


@pytest.mark.parametrize("capacity", range(1, 40, 3))
@pytest.mark.parametrize("groups", ["full", "window:8", "window:5+6", "window:1"])
def test_live_pages_are_those_that_a_sequence_has(groups, capacity):
    """The pages of a real one that has committed `length` tokens and reserved up to `capacity`."""
    for length in {0, capacity // 2, capacity - 1, capacity} - {-1}:
        w = World(groups, page_size=4, pages=64)
        run = w.start(tokens(capacity + 1))
        if length:
            run.step(run.prompt[:length])
        assert run.seq.resize(capacity)
        group = w.manager.layout.groups[0]
        pages = live_pages(group, shape(capacity, length), w.config)
        assert np.array_equal(run.seq._table(0) > 0, pages)


def test_a_shared_prefix_is_there_once():
    made = config()
    one = needs(jkv.BatchShape([shape(64)]), made)
    assert one[:2] == [16, 2]
    assert needs(jkv.BatchShape([shape(64)] * 3), made)[:2] == [48, 6]
    assert needs(jkv.BatchShape([shape(64)] * 3, shared_prefix=42), made)[:2] == [10 + 3 * 6, 6]
    assert needs(jkv.BatchShape([shape(64)] * 3, shared_prefix=64), made)[:2] == [16, 2]


# --- the split


def test_the_precedence():
    full = jkv.BatchShape([shape(4, 0)] * 4)  # windows as large as full attention
    late = jkv.BatchShape([shape(256)])  # and small ones
    ratio = dict.fromkeys(NAMES, 1)
    default, by_ratio = counts(config()), counts(config(pool_ratio=ratio))
    by_typical, by_must_fit = counts(config(typical=late)), counts(config(must_fit=late))
    assert len({tuple(each) for each in (default, by_ratio, by_typical, by_must_fit)}) == 3
    assert by_typical == by_must_fit
    assert counts(config(typical=late, must_fit=[full])) == by_typical
    assert counts(config(pool_ratio=ratio, typical=late, must_fit=[full])) == by_ratio
    assert by_typical[1] < default[1]


@pytest.mark.parametrize("size", [60_000, 123_457, 400_000])
def test_a_ratio_is_that_of_the_bytes(size):
    made = config(size, pool_ratio={"full": 5, "window:8": 2.5, "recurrent": 2.5})
    pools = make_layout(made).pools
    share = [n * pool.page_bytes for n, pool in zip(counts(made), pools, strict=True)]
    share[2] -= made.max_sequences * pools[2].page_bytes  # live states are there anyway
    assert abs(share[0] - 2 * share[1]) <= 2 * pools[0].page_bytes
    assert abs(share[1] - share[2]) <= pools[2].page_bytes
    assert size - sum(pool.page_bytes for pool in pools) < used_bytes(made) <= size


def test_a_pool_never_gets_less_than_a_sequence_of_max_length():
    made = config(60_000, pool_ratio={"full": 1, "window:8": 1e-6, "recurrent": 1e-6})
    assert counts(made)[1:] == [64, 8 + 2]
    assert used_bytes(made) <= 60_000


def test_must_fit_is_a_floor():
    batch = jkv.BatchShape([shape(200, 0)] * 8)
    ratio = {"full": 1, "window:8": 1, "recurrent": 30}
    without, made = config(100_000, pool_ratio=ratio), config(100_000, pool_ratio=ratio, must_fit=batch)
    assert counts(without)[1] < 8 * 50 <= counts(made)[1]
    assert used_bytes(made) <= 100_000


def test_what_cannot_fit_is_said_with_numbers():
    batch = jkv.BatchShape([shape(256)] * 8)
    with pytest.raises(jkv.ConfigError, match=r"bytes=30000 .*must_fit, which needs at least (\d+)") as error:
        make_layout(config(30_000, must_fit=batch))
    least = int(str(error.value).split()[-1])
    assert used_bytes(config(least, must_fit=batch)) == least
    with pytest.raises(jkv.ConfigError, match="must_fit"):
        make_layout(config(least - 1, must_fit=batch))
    with pytest.raises(jkv.ConfigError, match=r"must_fit needs 512 pages of pool 'full', which has 511"):
        make_layout(config(pages={"full": 511, "window:8": 600, "recurrent": 8}, must_fit=batch))
    make_layout(config(pages={"full": 512, "window:8": 600, "recurrent": 8}, must_fit=batch))


def test_host_memory_is_split_alike():
    made = config(tiers=(jkv.DeviceTier(bytes=400_000), jkv.HostTier(bytes=400_000)))
    late = dataclasses.replace(made, typical=jkv.BatchShape([shape(256)]))
    pages = [jkv.CacheManager(each).stats().tiers["host"].pools["window:8"].total for each in (made, late)]
    assert pages[1] < pages[0] / 10


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_of_must_fit_does_fit(seed):
    """With the fewest bytes that the config takes: open all, reserve all, one after the other."""
    generator = np.random.default_rng(seed)
    window = ["window:8", "window:5+6"][seed % 2]
    layers = make_config(f"full {window} recurrent").layers
    count, prefix = int(generator.integers(1, 6)), 4 * int(generator.integers(0, 4))
    shapes = []
    for _ in range(count):
        length = prefix + int(generator.integers(1, 60))
        shapes.append(shape(length + int(generator.integers(0, 40)), length))
    batch = jkv.BatchShape(shapes, prefix)

    def made(size):
        return config(size, layers, must_fit=[batch], pool_ratio={"full": 1, window: 1, "recurrent": 1e-9})

    low, high = 0, 10**6
    while low < high:
        middle = (low + high) // 2
        try:
            make_layout(made(middle))
            high = middle
        except jkv.ConfigError:
            low = middle + 1
    manager = jkv.CacheManager(made(low))
    state, shared, open_ = manager.init(), tokens(prefix, "shared"), []
    for i, each in enumerate(shapes):
        prompt = join(shared, tokens(each.length - prefix, i), fresh())
        seq = manager.open(prompt, max_reuse=prefix)
        assert seq.resume(), f"{i} of {batch}: {manager.stats().pools}"
        while seq.length < each.length:  # page by page, so that it never has more than it needs
            n = min(4, each.length - seq.length)
            assert seq.reserve(n)
            state, _ = manager.prepare(state, [seq])
            seq.commit(prompt[seq.length : seq.length + n], snapshot=i == 0 and seq.length + n == prefix)
        open_.append((seq, each))
    for seq, each in open_:
        assert seq.resize(each.capacity)
    manager.check()


# --- max_length_for


@pytest.mark.parametrize("groups", ["full", "full window:8 recurrent", "window:5+6", "recurrent"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_max_length_for_is_what_can_be_decoded(groups, batch):
    w = World(groups, page_size=4, pages=12, max_length=64, max_utilization_for_resume=1.0)
    longest = w.manager.max_length_for(batch)
    assert 0 < longest <= 64
    runs = [w.start(fresh(1)) for _ in range(batch)]
    for run in runs:
        run.step(run.prompt)
    for _ in range(1, longest):
        for run in runs:
            assert run.reserve(1)
            run.step(fresh())
    if longest < 64:
        try:
            assert not all(run.reserve(1) for run in runs)
        except jkv.OutOfPagesError:
            assert batch == 1


def test_max_length_for_more_than_there_are_rows_or_pages():
    manager = World("full", page_size=4, pages=3).manager
    assert manager.max_length_for(3) == 4
    assert manager.max_length_for(4) == manager.max_length_for(5) == 0
    with pytest.raises(jkv.ConfigError, match="batch_size"):
        manager.max_length_for(0)


# --- rebalance


def used(manager, count, capacity, length):
    for _ in range(count):
        manager._usage.note(capacity, length)


def test_advice_needs_enough_sequences_and_a_reason():
    made = config(400_000)
    manager = jkv.CacheManager(made)
    used(manager, 1999, 200, 200)
    assert manager.rebalance_advice() is None
    used(manager, 1, 200, 200)
    advice = manager.rebalance_advice()
    assert set(advice) == set(NAMES) and abs(sum(advice.values()) - 1) < 1e-9
    better = jkv.CacheManager(dataclasses.replace(made, pool_ratio=advice))
    assert better.layout.pools[1].num_pages < manager.layout.pools[1].num_pages / 4
    used(better, 3000, 200, 200)
    assert better.rebalance_advice() is None
    used(better, 8000, 200, 0)
    assert better.rebalance_advice()["window:8"] > 4 * advice["window:8"]


def test_sequences_are_noted_when_they_close():
    w = World("full window:8", page_size=4, pages=64)
    run = w.start(tokens(10))
    run.step(run.prompt)
    assert run.reserve(6)
    run.close()
    w.open(tokens(5)).close()  # never had anything
    assert w.manager._usage.count == 1
    assert w.manager._usage.typical().sequences == (shape(16, 10),)


def test_means_forget_slowly():
    usage = Usage()
    for _ in range(3000):
        usage.note(100, 100)
    usage.note(1100, 100)
    assert usage.typical().sequences[0].capacity == 101
    for _ in range(10_000):
        usage.note(50, 20)
    assert usage.typical().sequences == (shape(50, 20),)


@pytest.mark.parametrize("host", [None, 30])
def test_rebalance_carries_everything_over(host):
    w = World("full window:8 recurrent", pages=48, max_length=64, **({} if host is None else {"host": host}))
    kept = [w.start(tokens(20, i)) for i in range(2)]
    for run in kept:
        run.step(run.prompt[:12])
    kept[1].suspend()
    w.turn(tokens(16, "closed"), snapshot=True)
    assert w.manager.rebalance_advice() is None
    state = w.state
    assert w.manager.rebalance(state) is state
    used(w.manager, 2500, 64, 64)
    before = w.manager.stats()
    size = w.manager._device_bytes()
    w.rebalance()  # verifies every byte
    after = w.manager.stats()
    assert after.pools["window:8"].total < before.pools["window:8"].total
    assert after.pools["full"].total > before.pools["full"].total
    assert w.manager._device_bytes() <= size
    if host is not None:
        assert after.tiers["host"].pools["full"].total > before.tiers["host"].pools["full"].total
    assert w.manager.rebalance_advice() is None
    used(w.manager, 2500, 64, 64)
    assert w.manager.rebalance_advice() is None
    assert kept[1].resume()
    for run in kept:
        run.step(run.prompt[12:], snapshot=True)
        run.close()
    assert w.hit(tokens(16, "closed")) == 16
    assert [w.hit(tokens(20, i)) for i in range(2)] == [20, 20]


def test_rebalance_keeps_what_must_fit():
    batch = jkv.BatchShape([shape(64, 0)] * 3)
    w = World("full window:8 recurrent", pages=80, max_length=64, must_fit=(batch,))
    used(w.manager, 2500, 64, 64)
    w.rebalance()
    assert w.manager.stats().pools["window:8"].total >= 48


def test_rebalance_without_room_changes_nothing():
    w = World("full window:8 recurrent", pages=20, max_length=64)
    for i in range(2):
        assert w.start(tokens(36, i)).reserve(36)
    used(w.manager, 5000, 64, 64)
    advice = w.manager.rebalance_advice()
    assert advice is not None
    with w.unchanged(), pytest.raises(jkv.OutOfPagesError, match="in use"):
        w.rebalance()
    assert w.manager.rebalance_advice() == advice


def test_no_advice_where_the_longest_sequence_would_not_fit():
    """Pages may be fewer than that; a split of bytes may not."""
    w = World("full window:8", pages=6, max_length=64)
    used(w.manager, 3000, 64, 64)
    assert w.manager.rebalance_advice() is None
    state = w.state
    assert w.manager.rebalance(state) is state
