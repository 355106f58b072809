"""SPEC S43 to S49 with host memory and a store below the device; every byte verified, in every tier."""

import time

import pytest
from oracle import World, fresh, join, tokens
from test_spec_life import SCOPES

import jkv
from jkv.layout import HOST

HYBRID = "full window:6+2 recurrent"
GROUPS = ["full", HYBRID, "recurrent", "window:8 window:5+3"]


def crowd_out(w):
    """Active sequences take the whole device: nothing that is not theirs stays there. Returns them."""
    runs = [w.start(fresh()) for _ in range(w.config.max_sequences - sum(r.seq.status == "active" for r in w.runs))]
    if w.attention:
        pages = min(pool.available for pool in w.manager._host.pools if pool.name != "recurrent")
        runs[0].dispatch(fresh(pages * w.page_size))
        runs[0].advance()
    w.flush()
    return runs


def push_out(w):
    """What is not an active sequence's leaves the device, and the device is free again."""
    for run in crowd_out(w):
        run.close()


def small(groups, pages=8, host=16, slots=0, **config):
    """A World with a device of `pages` pages in each attention group, and `slots` states beside the live ones.

    Tests that can do with it share what it compiles.
    """
    config = {"max_length": 4 * pages, "max_sequences": 2, **config}
    slots += config["max_sequences"]
    pages = {group: slots if group == "recurrent" else pages for group in groups.split()}
    return World(groups, pages=pages, host=host, **config)


def places_of(run):
    """Where the live pages and the state of a started sequence lie, its path's included."""
    seq, found = run.seq, []
    for group in seq._host.tree.groups:
        found += seq._table(group.ordinal)[seq._tree_pages :].tolist()
    slot = seq._slot if seq._lent is None else seq._lent.slot
    return [place for place in [*found, slot] if place]


def fill(w, numbers, length=16, **options):
    """One request after the other, each a prompt of its own."""
    for number in numbers:
        w.turn(tokens(length, number), **options)
    w.flush()
    w.settle()


def tiers_of(w, numbers, length=16):
    """{tier: the requests whose tokens lie there, all of them}; "": those of which something is gone."""
    found = {"device": [], "host": [], "store": [], "": []}
    for number in numbers:
        match = w.probe(tokens(length, number))
        (tier,) = match.tier_tokens if match.tokens == length and len(match.tier_tokens) == 1 else [""]
        found[tier].append(number)
    return found


def store_of(path):
    return jkv.StoreTier(str(path))


def value_size():
    """Bytes of one entry of the group "full"."""
    w = World("full", pages=4, host=1, max_length=16, store=jkv.StoreTier("memory://"))
    w.turn(tokens(4))
    w.turn(tokens(16, "other"))
    w.turn(tokens(16, "another"))
    w.flush()
    w.settle()
    stats = w.manager.stats().tiers["store"]
    return stats.bytes // stats.entries


# ---------------------------------------------------------------------------------------------- S43: who may resume


@pytest.mark.parametrize(("host", "expected"), [(None, False), (1, False), (2, True), (8, True)])
def test_s43_what_can_move_down_does_not_count(host, expected):
    w = World("full", pages=10, host=host, max_length=40, max_utilization_for_resume=0.6)
    b = w.start(tokens(16, "b")).prefill()
    b.suspend()
    a = w.start(tokens(16, "a")).prefill()
    c = w.open(tokens(4, "c"))
    before = w.picture()
    assert c.resume() is expected  # 4 pages are a's; of b's 4 what host memory does not take counts as well
    assert expected or w.picture() == before
    if expected:
        c.prefill()
    a.close()
    assert b.resume()
    b.step(fresh(3))


def test_s43_cached_pages_never_refuse():
    w = World("full", pages=10, host=3, max_length=40, max_utilization_for_resume=0.5)
    w.turn(tokens(40))
    a = w.start(tokens(4, "a")).prefill()
    b = w.start(tokens(16, "b")).prefill()
    a.step(fresh(4))
    b.step(fresh(4))


@pytest.mark.parametrize("host", [1, 10])
def test_s43_a_lone_suspended_sequence_comes_back(host):
    w = World("full", pages=10, host=host, max_length=40, max_utilization_for_resume=0.1)
    a = w.start(tokens(30)).prefill()
    assert a.reserve(10)
    a.suspend()
    if host == 10:
        push_out(w)
    w.turn(tokens(4 if host == 1 else 40, "cached"))
    assert a.resume()
    a.reserve(10)
    w.prepare(a)
    a.write(tokens(40)[30:])
    a.commit()


def test_s43_the_slots_of_states_ask_for_no_headroom():
    w = World("recurrent", pages=4, host=2, max_utilization_for_resume=0.5)
    runs = [w.start(tokens(5, key)).prefill() for key in "abcd"]
    assert w.pool("recurrent").private == 4
    for run in runs:
        run.step(fresh(2))


# ----------------------------------------------------------------------------------- S44: suspended, off the device


@pytest.mark.parametrize("length", [13, 16])
@pytest.mark.parametrize("groups", GROUPS)
def test_s44_a_suspended_sequence_leaves_the_device_and_comes_back(groups, length):
    w = small(groups)
    a = w.start(tokens(length)).prefill([8, length - 8])
    a.dispatch(fresh(3))
    a.advance()  # tokens that nobody has committed
    a.suspend()
    before = w.stats()
    others = crowd_out(w)
    assert all(pool.private == pool.total for name, pool in w.pools().items())
    assert all(place >= HOST for place in places_of(a))
    assert w.stats().suspended == before.suspended == 1
    assert not a.resume()
    for run in others:
        run.close()
    assert a.resume()
    w.prepare(a)
    a.commit()
    a.step(fresh(5))
    a.close()
    assert w.hit(a.held) == len(a.held)


@pytest.mark.parametrize("groups", GROUPS)
def test_s44_again_and_again(groups):
    """Two sequences, and a device that holds one."""
    w = small(groups, host=8)
    w.waits = False
    a, b = runs = [w.start(tokens(10, key)).prefill() for key in "ab"]
    b.suspend()
    for turn in range(6):
        a.suspend()
        assert b.resume(), w.stats()
        b.step(fresh(1 + turn % 3), snapshot=turn % 2 == 0)
        a, b = b, a
        w.delay(0.002)
    for run in runs:
        if run.seq.status == "suspended":
            assert run.resume()
            w.prepare(run)
        run.close()


@pytest.mark.parametrize("groups", GROUPS)
def test_s44_in_host_memory_when_it_is_closed(groups):
    """Its partial page becomes a tail, its live state a snapshot, where they lie."""
    w = small(groups)
    a = w.start(tokens(14)).prefill([8, 6], snapshot=False)
    a.suspend()
    crowd_out(w)
    a.close()
    match = w.probe(tokens(14))
    assert match.tokens == 14
    if w.attention and "full" in groups:
        assert match.tier_tokens == {"host": 14}
    w.close_all()
    assert w.hit(tokens(14)) == 14
    run = w.start(join(tokens(14), tokens(4, "on")))
    assert run.reused == 14
    run.prefill()


# ------------------------------------------------------------------------------------------ S45: order of eviction


@pytest.fixture(scope="module")
def size():
    return value_size()


def test_s45_what_leaves_a_tier_arrives_in_the_next(size, tmp_path):
    """64 pages on the device, 128 in host memory, 128 in the store: 16, 32 and 32 requests of 4 pages."""
    w = World("full", pages=64, host=128, store=jkv.StoreTier(str(tmp_path), bytes=128 * size), max_length=64)
    fill(w, range(90))
    found = tiers_of(w, range(90))
    assert found == {
        "device": [*range(74, 90)],
        "host": [*range(42, 74)],
        "store": [*range(10, 42)],
        "": [*range(10)],
    }
    assert all(pool.free == 0 for _, _, pool in w.every_pool())
    assert w.manager.stats().tiers["store"].entries == 128
    for number in (80, 50, 20, 11):
        assert w.hit(tokens(16, number)) == 16
    assert w.hit(tokens(16, 5)) == 0


def test_s45_the_lowest_priority_leaves_first(size, tmp_path):
    w = World("full", pages=16, host=16, store=jkv.StoreTier(str(tmp_path), bytes=16 * size), max_length=64)
    fill(w, range(3), priority=1)
    fill(w, range(3, 15))
    found = tiers_of(w, range(15))
    assert found == {
        "device": [0, 1, 2, 14],
        "host": [10, 11, 12, 13],
        "store": [6, 7, 8, 9],
        "": [3, 4, 5],
    }


def test_s45_of_one_priority_the_oldest_leaves_first():
    w = World("full", pages=16, host=16, max_length=64)
    fill(w, [0], priority=5)
    fill(w, range(1, 30), priority=1)
    assert tiers_of(w, [0])["device"] == [0]
    fill(w, range(30, 60), priority=5)  # now it is the oldest of its kind
    assert tiers_of(w, [0])["device"] == []


def test_s45_a_more_important_user_raises_the_priority():
    w = World("full", pages=16, host=8, max_length=64)
    fill(w, ["x", "y"])
    w.turn(tokens(17, "x"), priority=3)
    fill(w, range(20), priority=1)
    assert tiers_of(w, ["x", "y"])["device"] == ["x"]
    assert w.hit(tokens(16, "x")) == 16


def test_s45_tails_go_first():
    w = small("full")
    w.turn(tokens(32))
    w.turn(tokens(12, "b"))
    assert w.probe(tokens(32)).tier_tokens == {"device": 20, "host": 12}
    w.turn(tokens(24, "c"))
    match = w.probe(tokens(32))
    assert match.tokens == 32 and match.tier_tokens["host"] > 12
    assert w.hit(tokens(32)) == 32


@pytest.mark.parametrize("groups", [HYBRID, "recurrent"])
def test_s45_snapshots_move_like_pages(groups):
    w = small(groups, host=60)
    for number in range(8):
        w.turn(tokens(16, number), [8, 8])
    w.flush()
    for number in range(8):
        assert w.hit(tokens(16, number)) == 16, number
    assert w.manager.stats().snapshots_evicted == 0


# --------------------------------------------------------------------------------------------------- S46: resizing


def test_s46_what_fits_is_still_right_and_growing_restores_room(size, tmp_path):
    w = World("full", pages=64, host=128, store=jkv.StoreTier(str(tmp_path), bytes=128 * size), max_length=64)
    fill(w, range(80))
    for tier, wanted in (("device", {"pages": 32}), ("host", {"pages": 16}), ("store", {"bytes": 32 * size})):
        w.resize_tier(tier, **wanted)
        w.settle()
    assert {tier: pool.total for tier, _, pool in w.every_pool()} == {"device": 32, "host": 16}
    found = tiers_of(w, range(80))
    assert found["device"] == [*range(72, 80)]
    assert found["host"] == [*range(68, 72)]
    assert found["store"] == [*range(60, 68)]
    for number in (79, 70, 61):
        assert w.hit(tokens(16, number)) == 16
    for tier, wanted in (("device", {"pages": 64}), ("host", {"pages": 128}), ("store", {"bytes": 128 * size})):
        w.resize_tier(tier, **wanted)
    fill(w, range(100, 180))
    found = tiers_of(w, range(100, 180))
    assert [len(found[tier]) for tier in ("device", "host", "store")] == [16, 32, 32]


@pytest.mark.parametrize("groups", GROUPS[1:])
def test_s46_sequences_go_on(groups):
    """Active, suspended and asleep in host memory, over tiers that shrink and grow."""
    w = World(groups, pages=16, host=24, max_length=64, max_sequences=4)
    fill(w, range(4), 12)
    a = w.start(tokens(9, "a")).prefill([5, 4])
    b = w.start(tokens(11, "b")).prefill()
    b.suspend()
    for run in crowd_out(w)[::-1]:
        run.close()
    for tier, pages in (("host", 12), ("device", 9), ("host", 30), ("device", 16), ("device", 9), ("host", 11)):
        w.resize_tier(tier, pages=pages)
        a.step(fresh(1))
        if b.seq.status == "suspended":
            assert b.resume()
        else:
            b.step(fresh(1))
            b.suspend()
    w.close_all()
    assert w.hit(a.held) == len(a.held)
    assert w.hit(b.held) == len(b.held)


@pytest.mark.parametrize(("tier", "pages"), [("device", 3), ("host", 2)])
def test_s46_what_is_in_use_does_not_fit(tier, pages):
    w = small("full", host=8)
    a = w.start(tokens(16)).prefill()
    a.suspend()
    b = w.start(tokens(32, "b")).prefill()
    assert w.pool("full", "host").tree == 4
    with w.unchanged(), pytest.raises(jkv.OutOfPagesError, match=str(pages)):
        w.manager.resize_tier(w.state, tier, pages=pages)
    b.close()
    assert a.resume()
    a.step(fresh(2))


# --------------------------------------------------------------------------------------------------- S47: prefetch


def loaded(run, tier):
    """prefetch, and again while it loads; what it said in the end."""
    until = time.monotonic() + 30
    while (done := run.prefetch(tier)) and run.seq.status == "loading":
        assert time.monotonic() < until
        time.sleep(0.001)
    return done


@pytest.mark.parametrize("groups", GROUPS)
def test_s47_prefetch_to_host_memory(groups, tmp_path):
    w = small(groups, host=24, store=store_of(tmp_path))
    w.turn(tokens(14), [8, 6])
    w.restart()
    assert w.probe(tokens(14)).tier_tokens == {"store": 14}
    run = w.open(join(tokens(14), fresh()))
    before = w.pools()
    assert run.prefetch("store") and run.seq.status == "suspended"
    assert loaded(run, "host")
    assert w.pools() == before  # the device's
    match = w.probe(join(tokens(14), fresh()))
    assert match.tokens == 14 and "store" not in match.tier_tokens
    assert loaded(run, "device")
    if "full" in groups:  # the tail is copied, not moved
        match = w.probe(tokens(12))
        assert match.tier_tokens == {"device": match.tokens}
    assert run.resume() and run.reused == 14
    run.prefill()


def test_s47_without_room_it_is_false(tmp_path):
    w = small("full", host=4, store=store_of(tmp_path))
    w.turn(tokens(16))
    w.restart()
    a = w.start(tokens(16, "a")).prefill()
    a.suspend()
    crowd_out(w)  # a is in host memory, and fills it
    b = w.open(tokens(16))
    with w.unchanged():
        assert not b.prefetch("host")
        assert not b.prefetch("device")
    assert b.seq.status == "suspended"
    w.close_all()
    b = w.open(tokens(16))
    assert loaded(b, "host")
    assert w.probe(tokens(16)).tier_tokens == {"host": 16}
    assert b.resume()
    b.prefill()


@pytest.mark.parametrize("groups", GROUPS)
def test_s47_a_sequence_that_sleeps_in_host_memory(groups):
    w = small(groups)
    a = w.start(tokens(14)).prefill()
    a.suspend()
    others = crowd_out(w)
    with w.unchanged():
        assert a.prefetch("host")
        assert not a.prefetch("device")
    for run in others:
        run.close()
    assert a.prefetch("device")
    assert all(place < HOST for place in places_of(a))
    w.flush()
    assert a.resume()
    a.step(fresh(3))


def test_s47_unknown_tiers_and_active_sequences():
    w = small("full", host=8)
    run = w.open(tokens(4))
    for tier in ("store", "disk", None):
        with pytest.raises(jkv.ConfigError, match="tiers are device, host"):
            run.seq.prefetch(tier)
    run.resume()
    with pytest.raises(jkv.SequenceStateError):
        run.seq.prefetch("device")
    w.check()


# ------------------------------------------------------------------------------------------- S48: host data is used


@pytest.mark.parametrize("groups", GROUPS)
def test_s48_though_the_device_is_full_of_evictable_pages(groups):
    w = small(groups, host=24)
    w.turn(tokens(16), [8, 8])
    fill(w, range(3), 24)
    match = w.probe(tokens(16))
    assert match.tokens == 16
    assert w.hit(tokens(16)) == 16
    run = w.start(join(tokens(16), tokens(5, "on")))
    assert run.reused == 16
    run.prefill()


# ------------------------------------------------------------------------------------- S49: identity in every tier


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_s49_in_host_memory(groups):
    w = small(groups, host=4 * len(SCOPES))
    for at, scope in enumerate(SCOPES):
        assert w.probe(tokens(8), scope=scope).raw_tokens == 0, f"{scope} finds what another scope left"
        assert w.turn(tokens(8), scope=scope).reused == 0
        for other in SCOPES[: at + 1]:
            assert w.probe(tokens(8), scope=other).tokens == 8
    assert w.manager.stats().tiers["device"].offloaded["full"] > 0


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_s49_in_the_store(groups, tmp_path):
    w = small(groups, host=2 * len(SCOPES), store=store_of(tmp_path))
    stored, others = SCOPES[::2], SCOPES[1::2]
    for scope in stored:
        assert w.turn(tokens(8), scope=scope).reused == 0
    w.restart()
    for scope in others:
        assert w.probe(tokens(8), scope=scope).raw_tokens == 0, f"{scope} finds what another scope left"
        assert w.turn(tokens(8), scope=scope).reused == 0
    for scope in stored:
        assert w.hit(tokens(8), scope=jkv.Scope(scope.adapter, scope.version, scope.salt)) == 8


@pytest.mark.parametrize("fields", [{"model": "another"}, {"model": "oracle "}, {"page_size": 8}, {"layers": 2}])
def test_s49_another_model_or_layout_finds_nothing(fields, tmp_path):
    w = small(HYBRID, host=8, store=store_of(tmp_path))
    w.turn(tokens(8))
    w.restart()
    assert w.probe(tokens(8)).tokens == 8
    other = small(HYBRID, host=8, store=store_of(tmp_path), **fields)
    assert other.probe(tokens(8)).raw_tokens == 0
    assert other.hit(tokens(8)) == 0
    other.turn(tokens(8))
    other.restart()
    assert other.hit(tokens(8)) == 8
    w.restart()
    assert w.hit(tokens(8)) == 8
