"""Nothing recompiles because traffic changed: compilations by the backend, counted, not only traces."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.bench_compilations import Traffic, compilations, count_compilations

import jkv

STEPS = 240


@pytest.fixture(scope="module")
def traffic_and_counts():
    return count_compilations(STEPS)


def test_random_traffic_compiles_nothing_in_the_second_half(traffic_and_counts):
    traffic, counts = traffic_and_counts
    assert sum(counts[: STEPS // 2]) >= 3, "the listener hears the three shapes of the step at least"
    assert sum(counts[STEPS // 2 :]) == 0, f"compilations in steps {[i for i, n in enumerate(counts) if n]}"
    stats = traffic.manager.stats()
    evicted = sum(stats.evicted_pages.values())
    assert stats.hits > 5 and stats.snapshots_taken > 5 and evicted > 20, "traffic of all kinds"
    traffic.manager.check()


def test_a_fresh_state_of_the_same_shapes_compiles_nothing(traffic_and_counts):
    traffic, _ = traffic_and_counts
    traffic.active.clear()
    traffic.suspended.clear()
    traffic.state = traffic.manager.reset()
    with compilations() as seen:
        for _ in range(40):
            traffic.step()
    assert not seen


# ------------------------------------------------------------------------------------------------------------ warmup


def arrays_and_bytes(state):
    return jax.tree.leaves(state), [np.array(array) for array in jax.tree.leaves(state)]


@pytest.mark.parametrize(("host", "variants"), [(False, 2), (True, 8)], ids=["device", "host"])
def test_after_warmup_traffic_compiles_nothing_of_jkvs_own(monkeypatch, host, variants):
    """Two variants, and with host memory two more for each of three pools."""
    loaded, load_one = set(), jkv.tiers.host._loaded
    monkeypatch.setattr(jkv.tiers.host, "_loaded", lambda state, load: loaded.add(load.pool) or load_one(state, load))
    jax.clear_caches()
    traffic = Traffic(seed=1, host=host)
    with compilations() as seen:
        traffic.manager.warmup(traffic.state)
    assert len(seen) == variants
    gc.collect()  # what was compiled belongs to the jitted functions
    for _ in range(300):
        traffic.step()
    assert traffic.own == 0
    device = traffic.manager.stats().tiers["device"]
    if host:
        assert min(device.offloaded.values()) > 0 and loaded == {0, 1, 2}, "all pools, both ways"
    else:
        assert min(device.evicted.values()) > 0
    traffic.manager.check()


def test_after_warmup_many_table_entries_compile_nothing():
    layers = {"a": jkv.AttentionLayer(jkv.kv_buffers(1, 2, jnp.float32))}
    config = jkv.CacheConfig(layers, 33, 5000, page_size=1, tiers=(jkv.DeviceTier(pages=5000),))
    manager = jkv.CacheManager(config)
    state = manager.init()
    manager.warmup(state)
    with compilations() as seen, manager.open() as seq:
        assert seq.resume()
        for capacity in (1, 1025, 4900):  # one array of entries, two, and whole tables
            seq.resize(capacity)
            state, _ = manager.prepare(state, [seq])
            seq.advance(0)
    assert not seen


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_warmup_leaves_the_state_alone_and_needs_no_second_one(host):
    traffic = Traffic(seed=2, host=host, model=False)
    for _ in range(20):
        traffic.step()
    jax.clear_caches()
    arrays, contents = arrays_and_bytes(traffic.state)
    live, before = len(jax.live_arrays()), traffic.manager._host.builder.snapshot()
    assert traffic.manager.warmup(traffic.state) is None
    assert len(jax.live_arrays()) == live and traffic.manager._host.builder.snapshot() == before
    for array, old, now, content in zip(arrays, *arrays_and_bytes(traffic.state), contents, strict=True):
        assert array is old and not array.is_deleted()
        np.testing.assert_array_equal(now, content)
    traffic.step()
    traffic.manager.check()


def test_warmup_takes_the_state_that_prepare_takes():
    traffic, other = Traffic(model=False), Traffic()
    manager, state = traffic.manager, traffic.state
    for wrong in (None, state.pools, other.state):
        with pytest.raises(jkv.SequenceStateError, match="warmup: this state was not made by this manager's init"):
            manager.warmup(wrong)
    traffic.step()
    with pytest.raises(jkv.SequenceStateError, match="warmup: this state was donated to an earlier call"):
        manager.warmup(state)
    while traffic.active:
        traffic.active.pop().seq.close()
    manager.release(traffic.state)
    with pytest.raises(jkv.SequenceStateError, match="warmup: the device's memory was released"):
        manager.warmup(traffic.state)


def test_pools_of_another_size_are_warmed_up_anew():
    traffic = Traffic(model=False)
    traffic.manager.warmup(traffic.state)
    pages = {"full": 90, "window:32+4": 60, "recurrent": 16}
    traffic.state = traffic.manager.resize_tier(traffic.state, "device", pages=pages)
    with compilations() as seen:
        traffic.manager.warmup(traffic.state)
    assert len(seen) == 1, "the tables have the shapes that they had"
    for _ in range(20):
        traffic.step()
    assert traffic.own == 0
