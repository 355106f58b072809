"""Retention by the caller: plan_drop, priority and a time to live in steps."""

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

HYBRID = "full window:8 recurrent"


def steps(w, count):
    """Logical time passes."""
    for _ in range(count):
        w.flush()


def turn(w, prompt, **options):
    """A turn that ends, and its handle."""
    run = w.start(prompt, **options)
    run.step(prompt[run.seq.length :])
    run.close()
    return run.seq.plan_drop()


# --- plan_drop


@pytest.mark.parametrize("min_snapshot", [True, False])
@pytest.mark.parametrize("groups", [HYBRID, "recurrent", "window:8", "full window:8", "window:5+6"])
def test_a_dropped_turn_frees_its_snapshot_and_windows(groups, min_snapshot):
    w = World(groups, page_size=4, min_snapshot=min_snapshot)
    before = {name: pool.free for name, pool in w.manager.stats().pools.items()}
    handle = turn(w, tokens(16))
    assert w.hit(tokens(16)) == 16
    handle.drop()
    w.check()
    assert w.probe(tokens(16)).tokens < 16
    for name, pool in w.manager.stats().pools.items():
        if min_snapshot and not name.startswith("full") and "+" not in name:
            assert pool.free == before[name], name
        elif name.startswith("full"):
            assert pool.tree == 4
    with pytest.raises(jkv.SequenceStateError, match="before"):
        handle.drop()


@pytest.mark.parametrize("groups", [HYBRID, "full window:8"])
def test_the_newest_turn_of_a_conversation_stays(groups):
    w = World(groups, page_size=4)
    prompt, handles = tokens(6), []
    for i in range(4):
        handles.append(turn(w, prompt))
        for handle in handles[:-1]:
            handle.drop()
            w.check()
        handles = handles[-1:]
        assert w.hit(prompt) == len(prompt)
        prompt = join(prompt, tokens(5, i))
    assert w.manager.stats().pools["window:8"].tree <= 3
    if "recurrent" in groups:
        assert w.manager.stats().pools["recurrent"].tree <= 2  # the newest turn's, and its prompt's last page


def test_others_keep_what_they_need():
    w = World(HYBRID, page_size=4)
    first = turn(w, tokens(16))
    second = turn(w, tokens(18))  # needs most of the first one's window
    reader = w.start(join(tokens(16), fresh()))
    assert reader.reused == 16
    first.drop()
    w.check()
    w.flush()  # every byte is verified
    assert w.hit(tokens(18)) == 18
    reader.step(reader.prompt[16:])
    reader.close()
    second.drop()
    w.check()


def test_a_drop_while_the_sequence_goes_on():
    """Its live state was lent to the tree, and is its own again."""
    for suspend in (False, True):
        w = World(HYBRID, page_size=4, host=16)
        run = w.start(tokens(16))
        run.step(run.prompt)
        with pytest.raises(jkv.SequenceStateError, match="stop_committing"):
            run.seq.plan_drop()
        run.stop_committing()
        assert w.probe(tokens(16)).tokens == 16
        handle = run.seq.plan_drop()
        if suspend:
            run.suspend()
        handle.drop()
        w.check()
        assert w.probe(tokens(16)).tokens < 16
        if suspend:
            assert run.resume()
        run.dispatch(fresh(4))
        run.advance()
        w.flush()
        run.close()
        w.check()


def test_what_another_goes_on_from_stays():
    w = World(HYBRID, page_size=4)
    one = w.start(tokens(16))
    one.step(one.prompt, end=True)  # lends its state
    two = w.start(tokens(16), max_reuse=16)
    assert two.reused == 16
    two.close()
    two.seq.plan_drop().drop()
    w.check()
    assert w.probe(tokens(16)).tokens == 16
    one.close()


def test_drops_of_what_is_gone_do_nothing():
    w = World(HYBRID, page_size=4, pages={"full": 16, "window:8": 16, "recurrent": 5}, max_length=64)
    handle = turn(w, tokens(16))
    for i in range(6):
        w.turn(tokens(16, f"other {i}"))
    assert w.probe(tokens(16)).tokens == 0
    handle.drop()
    w.check()
    never = w.open(tokens(4))
    never.close()
    never.seq.plan_drop().drop()
    cleared, reset = turn(w, tokens(8)), turn(w, tokens(12))
    w.manager.clear()
    cleared.drop()
    w.reset()
    reset.drop()
    w.check()


def test_drops_in_host_memory():
    w = World(HYBRID, page_size=4, pages={"full": 8, "window:8": 8, "recurrent": 4}, host=40, max_length=32)
    handle = turn(w, tokens(16))
    w.turn(tokens(24, "other"))
    w.turn(tokens(24, "third"))
    w.flush()
    assert w.probe(tokens(16)).tier_tokens == {"host": 16}
    before = w.pool("recurrent").tree, w.pool("window:8", "host").tree
    handle.drop()
    w.check()
    assert (w.pool("recurrent").tree, w.pool("window:8", "host").tree) == (before[0] - 1, before[1] - 2)
    assert w.probe(tokens(16)).tokens < 16


# --- a time to live


def fill(w, name, n=16):
    w.turn(tokens(n, name))


@pytest.mark.parametrize("groups", ["full", HYBRID, "recurrent"])
def test_what_has_expired_goes_first(groups):
    w = World(groups, page_size=4, pages=10, max_length=32)
    w.turn(tokens(8, "kept"))
    w.turn(tokens(8, "short"), ttl=3)
    w.turn(tokens(8, "long"), ttl=1000)
    steps(w, 5)
    while w.probe(tokens(8, "short")).tokens:
        assert w.probe(tokens(8, "kept")).tokens == w.probe(tokens(8, "long")).tokens == 8
        w.turn(fresh(4), ttl=1000)
    assert w.probe(tokens(8, "kept")).tokens == w.probe(tokens(8, "long")).tokens == 8


def test_it_is_soft():
    w = World("full", page_size=4)
    w.turn(tokens(8), ttl=1)
    steps(w, 50)
    assert w.hit(tokens(8)) == 8


def test_until_then_it_is_like_all_else():
    """What is oldest goes first."""
    w = World("full", page_size=4, pages=8, max_length=32)
    w.turn(tokens(8, "old"))
    w.turn(tokens(8, "young"), ttl=100)
    w.turn(tokens(8, "more"))
    w.turn(tokens(16, "and more"))
    assert w.probe(tokens(8, "young")).tokens >= w.probe(tokens(8, "old")).tokens == 0


@pytest.mark.parametrize("by, survives", [(None, True), (1000, True), (2, False)])
def test_a_use_renews_it_and_the_longer_time_counts(by, survives):
    w = World("full", page_size=4, pages=8, max_length=32)
    w.turn(tokens(12, "older"))
    w.turn(tokens(12, "a"), ttl=4)
    w.start(tokens(12, "a"), max_reuse=12, ttl=by).close()
    steps(w, 10)
    w.turn(tokens(16, "more"))
    found = w.probe(tokens(12, "a")).tokens, w.probe(tokens(12, "older")).tokens
    assert found == ((12, 4) if survives else (4, 12))


def test_older_content_stays_without_a_limit():
    """It was there before anybody used a time to live."""
    w = World("full", page_size=4, pages=8, max_length=32)
    w.turn(tokens(8, "old"), priority=1)
    w.turn(join(tokens(8, "old"), tokens(8, "new")), ttl=2)
    steps(w, 5)
    for i in range(4):
        w.turn(tokens(16, i))
        assert w.probe(join(tokens(8, "old"), tokens(8, "new"))).tokens == (8 if i else 16)


def test_expired_content_of_low_use_goes_before_low_priority():
    w = World("full", page_size=4, pages=6, max_length=24)
    w.turn(tokens(8, "important"), priority=5, ttl=2)
    w.turn(tokens(8, "not"), priority=-5)
    steps(w, 5)
    w.turn(tokens(16, "more"))
    assert w.probe(tokens(8, "important")).tokens == 0
    assert w.probe(tokens(8, "not")).tokens == 8


def test_host_memory_too():
    w = World("full", page_size=4, pages=4, host=6, max_length=16)
    w.turn(tokens(8, "a"), ttl=2)
    w.turn(tokens(8, "b"))
    steps(w, 5)
    for i in range(4):
        w.turn(tokens(8, i))
    assert w.probe(tokens(8, "a")).tokens == 0
    assert w.probe(tokens(8, "b")).tokens == 8


def test_it_survives_a_reset():
    w = World("full", page_size=4, pages=4, host=4, max_length=16)
    w.turn(tokens(8, "a"), ttl=2)
    w.turn(tokens(8, "b"))
    w.manager._host.tree.make_free(w.manager._host.pools[0], 4)
    w.flush()
    w.reset()
    steps(w, 5)
    w.turn(tokens(8, "c"))
    w.turn(tokens(16, "d"))
    assert w.probe(tokens(8, "a")).tokens == 0
    assert w.probe(tokens(8, "b")).tokens == 8


def test_what_was_cleared_does_not_expire():
    w = World("full", page_size=4, pages=6, max_length=24)
    w.turn(tokens(8), ttl=2)
    w.manager.clear()
    steps(w, 5)
    for i in range(3):
        w.turn(tokens(16, i))


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "1"])
def test_bad_times(bad):
    w = World("full")
    with w.unchanged(), pytest.raises(jkv.ConfigError, match="ttl"):
        w.manager.open([1], ttl=bad)


def test_random_traffic_with_times_and_drops():
    w = World(HYBRID, pages={"full": 14, "window:8": 14, "recurrent": 6}, host=8, max_length=40)
    generator, handles = np.random.default_rng(1), []
    for _ in range(80):
        prompt = generator.integers(0, 2, generator.integers(2, 20)).astype(np.int32)
        ttl = [None, 2, 10, 50][generator.integers(4)]
        run = w.open(prompt, ttl=ttl, priority=int(generator.integers(2)))
        if run.resume():
            run.step(prompt[run.seq.length :], snapshot=bool(generator.integers(2)))
            if generator.random() < 0.2:
                run.suspend()
            else:
                run.close()
                handles.append(run.seq.plan_drop())
        if len(w.runs) > 2:
            w.runs[0].close()
        if handles and generator.random() < 0.3:
            handles.pop(generator.integers(len(handles))).drop()
            w.check()
        if generator.random() < 0.2:
            w.flush()
    w.close_all()
    w.flush()
