"""Host memory and a store behind the device: what moves, what comes back, what survives (DESIGN, section 6)."""

import time

import numpy as np
import pytest

import jkv
from jkv.arrivals import Search
from tests.oracle import World, fresh, join, tokens

GROUPS = ["full", "full window:8", "full window:8 recurrent", "recurrent", "window:8 window:16+2"]


def resume(run, seconds=30):
    """Resumes, waiting for the store where it has to; returns how often it had to."""
    waits, end = 0, time.monotonic() + seconds
    while not run.resume():
        assert run.seq.status == "loading" and time.monotonic() < end, f"{run}: {run.world.manager.stats()}"
        waits += 1
        time.sleep(0.001)
    return waits


def fill(world, count, length=32, first=0):
    """Requests one after the other, each with a prompt of its own."""
    for i in range(first, first + count):
        world.turn(tokens(length, i), [length // 2, length - length // 2])


def settle(world):
    """Applies what is pending, until all of it has arrived everywhere."""
    world.prepare()
    world.manager._memory.wait()
    if world.manager._store is not None:
        world.manager._store.flush()


def reused(world, prompt):
    """(tokens reused, the match's tiers) of a lookup with the cap lifted, every byte of it verified."""
    run = world.open(prompt, max_reuse=len(prompt))
    resume(run)
    world.prepare(run)
    found = run.seq.match
    run.close()
    return found.tokens, dict(found.tier_tokens)


# --- host memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
def test_what_leaves_the_device_comes_back_from_host_memory(groups):
    world = World(groups, pages=20, host=80)
    fill(world, 8)
    for i in range(8):
        assert reused(world, tokens(32, i))[0] == 32
    device = world.manager.stats().tiers["device"]
    if "full" in groups:
        assert sum(device.offloaded.values()) > 0 and sum(device.onboarded.values()) > 0


def test_s48_host_data_is_used_though_the_device_is_full_of_evictable_pages():
    world = World("full", pages=16, host=16)
    fill(world, 3)
    stats = world.manager.stats()
    assert stats.pools["full"].free == 0 and stats.pools["full"].evictable == 16
    tiers = world.probe(tokens(32, 0)).tier_tokens
    assert tiers["host"] > 0 and sum(tiers.values()) == 32
    assert reused(world, tokens(32, 0)) == (32, tiers)


@pytest.mark.parametrize("groups", GROUPS)
def test_s44_a_suspended_sequence_leaves_the_device_and_comes_back(groups):
    """Committed pages, uncommitted tokens, the partial page and the live state, under any pressure."""
    world = World(groups, pages=12, host=40)
    run = world.start(tokens(18, "a"))
    run.prefill([7, 11])
    run.dispatch(fresh(3))
    run.advance()
    run.suspend()
    for round_ in range(3):
        other = world.start(tokens(40, f"b{round_}"))
        other.prefill([40])
        if "full" in groups:
            private = [table for g in world.manager.layout.attention_groups for table in [run.seq._table(g.ordinal)]]
            assert all((table[run.seq._tree_pages :] >= 1 << 30).all() for table in private[:1]), private
        other.close()
        assert run.resume()
        run.step(fresh(2))
        run.suspend()
    assert run.resume()
    world.prepare(run)
    run.close()


def test_f27_with_host_memory_everybody_finishes():
    """8 pages: A, B, C, D hold 2 each and each needs 1 more."""
    world = World("full", pages=8, host=8, page_size=4)
    runs = [world.start(tokens(8, i)).prefill([8]) for i in range(4)]
    waiting = runs[2:]
    for run in waiting:
        run.suspend()
    for run in runs[:2]:
        run.step(fresh(1))
        run.close()
    for run in waiting:
        assert run.resume()
        run.step(fresh(1))
        run.close()


def test_f02_states_are_never_beyond_the_hit():
    world = World("full recurrent", pages=(("full", 24), ("recurrent", 6)), host=64)
    world.turn(tokens(8), [4, 4])
    fill(world, 8, first=1)
    assert world.manager.stats().tiers["device"].offloaded["recurrent"] > 0
    run = world.start(tokens(8))  # at most 7
    assert run.seq.match.tokens == 4
    world.prepare(run)
    run.close()


def test_a_refused_resume_changes_nothing():
    world = World("full", pages=8, host=4)
    first = world.start(tokens(20, 1)).prefill([20])
    second = world.start(tokens(12, 2)).prefill([12])
    second.suspend()
    assert first.reserve(8) is True  # pages of the second one have moved
    before = world.picture() if hasattr(world, "picture") else None
    assert not second.resume() and not second.seq.prefetch("device")
    world.check()
    assert before is None or world.picture() == before
    first.close()
    assert second.resume()
    world.prepare(second)


def test_s47_prefetch_brings_pages_up():
    world = World("full window:8 recurrent", pages=24, host=80)
    fill(world, 8)
    run = world.open(tokens(32, 0))
    assert world.probe(tokens(32, 0)).tier_tokens["host"] > 0
    assert run.seq.prefetch("host") and run.seq.match.tier_tokens["host"] > 0
    assert run.seq.prefetch("device") and set(run.seq.match.tier_tokens) == {"device"}
    with pytest.raises(jkv.ConfigError, match="device, host"):
        run.seq.prefetch("store")
    assert run.resume()
    world.prepare(run)
    with pytest.raises(jkv.SequenceStateError):
        run.seq.prefetch("host")
    run.close()


# --- the store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
def test_a_restart_finds_what_the_store_has(groups, tmp_path):
    options = {"pages": 24, "host": 40, "store": jkv.StoreTier(tmp_path)}
    world = World(groups, **options)
    fill(world, 4, 30)
    world.manager.release(world.state)
    again = World(groups, **options)
    for i in range(4):
        match = again.probe(tokens(30, i))
        assert (match.tokens, match.tier_tokens) == (30, {"store": 30})
        assert reused(again, tokens(30, i))[0] == 30
    assert reused(again, tokens(30, "never seen"))[0] == 0
    assert not sum(again.manager.stats().tiers["store"].failures.values())


def test_f22_all_that_leaves_host_memory_reaches_the_store(tmp_path):
    world = World("full", pages=8, host=4, store=jkv.StoreTier(tmp_path))
    fill(world, 3)
    settle(world)
    assert world.manager.stats().tiers["store"].entries >= 12
    for i in range(3):
        assert world.probe(tokens(32, i)).tokens == 32


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_f23_a_damaged_entry_shortens_the_hit(damage, tmp_path):
    options = {"pages": 24, "host": 24, "store": jkv.StoreTier(tmp_path)}
    world = World("full", **options)
    world.turn(tokens(12), [12])
    world.manager.release(world.state)
    names = [path for path in tmp_path.rglob("*") if path.is_file() and "order" not in path.parts]
    again = World("full", **options)
    again.faulty = ("store",)
    search = Search(again.manager._host, again.manager._host.root(jkv.Scope()), tokens(12), [])
    (path,) = [path for path in names if path.name == search.digests[2].hex()]
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[-5] ^= 4
        path.write_bytes(data if damage == "flip" else data[:-9])
    assert reused(again, tokens(12)) == (4, {"store": 4})
    assert again.probe(tokens(12)).tokens == 4
    assert sum(again.manager.stats().tiers["store"].failures.values()) == 1
    assert reused(again, join(tokens(12), fresh(4)))[0] == 4


def test_another_scope_or_model_finds_nothing(tmp_path):
    options = {"pages": 24, "host": 24, "store": jkv.StoreTier(tmp_path)}
    world = World("full", **options)
    world.turn(tokens(16), [16], scope=jkv.Scope(salt=0))
    world.manager.release(world.state)
    again = World("full", **options)
    for scope in (jkv.Scope(), jkv.Scope(salt=""), jkv.Scope(salt=b""), jkv.Scope(adapter=0), jkv.Scope("x")):
        assert again.probe(tokens(16), scope=scope).tokens == 0
    assert again.probe(tokens(16), scope=jkv.Scope(salt=0)).tokens == 16
    assert World("full", **options, model="another").probe(tokens(16), scope=jkv.Scope(salt=0)).tokens == 0


def test_a_prompt_is_hashed_once(tmp_path, monkeypatch):
    """However often it is looked up before it is matched."""
    options = {"pages": 24, "host": 24, "store": jkv.StoreTier(tmp_path)}
    world = World("full", **options)
    world.turn(tokens(16), [16])
    world.manager.release(world.state)
    again, hashed = World("full", **options), []

    def counted(parent, ids, *args, page_digests=jkv.eviction.page_digests):
        hashed.append(len(ids))
        return page_digests(parent, ids, *args)

    monkeypatch.setattr(jkv.eviction, "page_digests", counted)
    run = again.open(tokens(40))
    assert run.seq.match.tokens == 16
    resume(run)
    assert run.seq.length == 16 and hashed == [4] * 5, "up to the first page that is nowhere"
    run.close()


def test_loading_is_a_state_that_ends(tmp_path):
    options = {"pages": 24, "host": 24, "store": jkv.StoreTier(tmp_path)}
    world = World("full window:8 recurrent", **options)
    world.turn(tokens(16), [16])
    world.manager.release(world.state)
    again = World("full window:8 recurrent", **options)
    one, two = (again.open(tokens(17)) for _ in range(2))
    assert not one.resume() and one.seq.status == "loading"
    assert not two.resume() and two.seq.status == "loading"  # waits for what the first one reads
    two.close()
    resume(one)
    again.prepare(one)
    one.close()
    three = again.open(tokens(17, 0))
    three.close()
    four = World("full window:8 recurrent", **options)
    run = four.open(tokens(17))
    assert not run.resume()
    run.close()  # nobody waits any more
    four.check()
    assert all(pool.private == 0 for pool in four.manager.stats().tiers["host"].pools.values())


# --- release, reset, resize --------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
def test_release_and_reset_keep_what_host_memory_took(groups):
    world = World(groups, pages=24, host=80)
    fill(world, 2)
    open_run = world.start(tokens(9, "open")).prefill([9])
    world.manager.release(world.state)
    assert open_run.seq.status == "closed"
    with pytest.raises(jkv.SequenceStateError, match="reset"):
        world.manager.open([1])
    world.runs.clear()
    world.state = world.manager.reset()
    world.check()
    world.fetch()
    for i in range(2):
        assert reused(world, tokens(32, i))[0] == 32


def test_a_reset_without_release_forgets_what_hangs_on_the_device():
    world = World("full", pages=24, host=80)
    fill(world, 8)
    before = [world.probe(tokens(32, i)).tier_tokens for i in range(8)]
    assert {"host": 32} in before and any("device" in tiers for tiers in before)
    world.prepare()
    world.runs.clear()
    world.state = world.manager.reset()
    world.check()
    world.fetch()
    for i in range(8):
        assert reused(world, tokens(32, i))[0] == (32 if before[i] == {"host": 32} else 0)


@pytest.mark.parametrize("groups", GROUPS)
def test_s46_resizing_keeps_what_fits(groups):
    world = World(groups, pages=32, host=64)
    fill(world, 4)
    run = world.start(tokens(9, "held")).prefill([9])
    run.suspend()
    for tier, size in (("device", 16), ("host", 40), ("device", 40), ("host", 12), ("host", 64), ("device", 9)):
        world.state = world.manager.resize_tier(world.state, tier, pages=size)
        world.totals |= {(tier, name): pool.total for name, pool in world.manager.stats().tiers[tier].pools.items()}
        world.check()
        world.fetch()
        world.prepare()
        assert all(pool.total >= size for pool in world.manager.stats().tiers[tier].pools.values())
    assert run.resume()
    run.step(fresh(2))
    run.close()
    for i in range(4):
        assert reused(world, tokens(32, i))[0] == world.probe(tokens(32, i)).tokens


def test_resizing_below_what_is_held_is_refused():
    world = World("full recurrent", pages=16, host=16)
    runs = [world.start(tokens(20, i)).prefill([20]) for i in range(2)]
    with pytest.raises(jkv.OutOfPagesError, match="10 pages"):
        world.manager.resize_tier(world.state, "device", pages=8)
    with pytest.raises(jkv.ConfigError, match="device, host"):
        world.manager.resize_tier(world.state, "store", bytes=100)
    with pytest.raises(jkv.ConfigError, match="max_sequences"):
        world.manager.resize_tier(world.state, "device", pages=2)
    world.prepare(*runs)
    assert world.manager.config.device_tier.pages == 16


# --- failure -----------------------------------------------------------------------------------------------------


def test_pages_lost_on_their_way_are_not_relied_on(monkeypatch):
    """A copy to host memory fails: counted, the tree forgets it, and who was suspended hears of it."""
    world = World("full", pages=12, host=40)
    memory = world.manager._memory
    run = world.start(tokens(18, "a")).prefill([18])
    run.suspend()
    world.prepare()
    memory.wait()

    def fails(*_):
        raise MemoryError("injected")

    monkeypatch.setattr(memory, "_land", fails)
    other = world.start(tokens(44, "b"))
    assert other.reserve(44)
    world.manager.prepare(world.state, [])
    memory.wait()
    assert sum(memory.failures.values()) > 0
    with pytest.raises(jkv.SequenceStateError, match="lost"):
        run.seq.resume()
    run.seq.close()
    other.seq.close()
    world.manager.check()
    again = world.manager.open(tokens(18, "a"), max_reuse=18)
    assert again.resume() and again.match.tokens <= 4  # a page may not have left the device
    world.manager.check()


def test_nothing_waits_for_a_copy_that_nobody_needs():
    """S56 with host memory: the worker stands still, and the loop goes on."""
    import threading

    world = World("full", pages=16, host=64)
    memory, gate = world.manager._memory, threading.Event()
    memory._worker.submit(gate.wait)
    state = world.state
    for i in range(4):
        seq = world.manager.open(tokens(32, i))
        assert seq.resume() and seq.reserve(32)
        state, _ = world.manager.prepare(state, [seq])
        seq.commit(tokens(32, i))
        seq.close()
    assert world.manager.probe(tokens(32, 0)).tier_tokens["host"] > 0
    seq = world.manager.open(tokens(32, 0))  # served from the gathered arrays
    assert seq.resume()
    state, _ = world.manager.prepare(state, [seq])
    assert np.asarray(jkv.gather(state, "full.0", np.array([seq.row]), 8)["k"]).shape[1] == 8
    gate.set()
    memory.wait()


@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
def test_what_comes_from_the_store_never_overwrites_what_is_on_its_way_there(groups, tmp_path):
    """Room for an arrival is made by evicting pages that the next plan is yet to write to the store."""
    store = jkv.StoreTier(tmp_path)
    world = World(groups, pages=24, host=24, store=store, max_length=100, shared=True)
    texts = [tokens(8, i) for i in range(6)]
    for turn in range(3):
        for i in range(6):
            texts[i] = join(texts[i], tokens(6 + i % 3, f"{turn}.{i}"))
            run = world.open(texts[i])
            resume(run)
            run.prefill()
            run.close()
    assert world.manager.stats().tiers["store"].reads > 0
