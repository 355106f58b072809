"""SPEC S51: new weights. Nothing older is matched, in any tier; nothing that old sequences do is found."""

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

GROUPS = ["full", "full window:8", "full window:8 recurrent", "recurrent"]


def pages(w, tier="device"):
    return {name: (pool.tree, pool.private) for name, pool in w.manager.stats().tiers[tier].pools.items()}


def is_empty(w):
    return all(counts == (0, 0) for tier in ("device", "host") for counts in pages(w, tier).values())


@pytest.mark.parametrize("min_snapshot", [True, False])
@pytest.mark.parametrize("groups", GROUPS)
def test_s51_nothing_older_is_matched_and_it_is_freed_at_once(groups, min_snapshot):
    w = World(groups, page_size=4, pages=10, host=24, min_snapshot=min_snapshot)
    for i in range(6):
        w.turn(tokens(16, i), [8, 8], snapshot=True)
    assert any(tree for tree, _ in pages(w, "host").values())
    w.manager.new_epoch("B")
    w.check()
    assert is_empty(w)
    for i in range(6):
        assert w.probe(tokens(16, i)) == jkv.Match()
    assert w.turn(tokens(16), [8, 8], snapshot=True).reused == 0
    assert w.hit(tokens(16)) == 16


@pytest.mark.parametrize("groups", GROUPS)
def test_s51_open_sequences_finish_and_leave_nothing(groups):
    w = World(groups, page_size=4, pages=48, host=48)
    w.turn(tokens(8), snapshot=True)
    runs = [w.start(join(tokens(8), tokens(8, i))) for i in range(2)]
    for run in runs:
        run.step(run.prompt[run.seq.length :][:4], snapshot=True)
    runs[1].suspend()
    w.manager.new_epoch("B")
    w.check()
    for run in runs:
        assert w.probe(run.prompt) == jkv.Match()
    runs[0].step(fresh(9), snapshot=True)
    runs[0].step(fresh(4), end=True)
    assert w.probe(runs[0].held).raw_tokens == 0
    runs[0].close()
    w.check()
    assert runs[1].resume()
    w.flush()  # every byte is verified
    runs[1].step(fresh(5), snapshot=True)
    assert w.turn(tokens(16), snapshot=True).reused == 0
    runs[1].close()
    w.check()
    assert w.hit(tokens(16)) == 16
    w.manager.new_epoch("C")
    assert is_empty(w)


@pytest.mark.parametrize("groups", GROUPS)
def test_s51_a_sequence_that_waits_is_of_the_new_epoch(groups):
    w = World(groups, page_size=4)
    w.turn(tokens(8), snapshot=True)
    run = w.open(join(tokens(8), fresh(4)))
    assert run.seq.match.tokens == 8
    w.manager.new_epoch("B")
    assert run.seq.match.tokens == 0
    assert run.arrive() and run.reused == 0
    run.step(run.prompt, snapshot=True)
    run.close()
    assert w.hit(run.prompt) == 12


@pytest.mark.parametrize("groups", GROUPS)
def test_s51_a_b_a_reuses_the_entries_of_a_in_the_store(groups, tmp_path):
    w = World(groups, page_size=4, host=48, store=jkv.StoreTier(tmp_path), model="A")
    w.turn(tokens(16), [8, 8], snapshot=True)
    w.manager.new_epoch("B")
    w.flush()
    w.settle()
    assert w.probe(tokens(16)).tokens == 0
    w.turn(tokens(8, "b"), snapshot=True)
    w.manager.new_epoch("A")
    w.flush()
    w.settle()
    assert w.probe(tokens(16)).tier_tokens == {"store": 16}
    assert w.hit(tokens(16)) == 16
    assert w.hit(tokens(8, "b")) == 0
    w.restart()  # under its first name
    assert w.hit(tokens(16)) == 16


def test_s51_a_restart_under_another_name_reuses_nothing(tmp_path):
    store = jkv.StoreTier(tmp_path)
    w = World("full", page_size=4, store=store, model="A")
    w.turn(tokens(16))
    w.manager.release(w.state)
    assert World("full", page_size=4, store=store, model="B").hit(tokens(16)) == 0
    assert World("full", page_size=4, store=store, model="A").hit(tokens(16)) == 16


@pytest.mark.parametrize("groups", GROUPS)
def test_s51_what_was_computed_with_other_weights_never_gets_into_the_store(groups, tmp_path):
    """A sequence of A that went on with the weights of B: not even an A that comes again may find that."""
    w = World(groups, page_size=4, pages=16, host=16, store=jkv.StoreTier(tmp_path), model="A", max_length=64)
    old = w.start(tokens(24))
    old.step(tokens(24)[:8], snapshot=True)
    w.manager.new_epoch("B")
    old.step(tokens(24)[8:16], snapshot=True)
    old.step(tokens(24)[16:], snapshot=True)
    for i in range(4):  # everything that can go to the store goes there
        w.turn(tokens(12, f"other {i}"), snapshot=True)
    old.close()
    w.manager.new_epoch("A")
    w.flush()
    w.settle()
    assert w.probe(tokens(24)).raw_tokens <= 8
    assert w.hit(tokens(24)) in (0, 8)


def test_s51_an_arrival_from_the_store_is_given_up(tmp_path):
    w = World("full window:8 recurrent", page_size=4, host=24, store=jkv.StoreTier(tmp_path), model="A")
    w.turn(tokens(16), snapshot=True)
    w.restart()
    run = w.open(join(tokens(16), fresh()))
    assert not run.resume() and run.seq.status == "loading"
    w.manager.new_epoch("B")
    assert run.seq.status == "suspended"
    w.check()
    assert is_empty(w)
    assert run.arrive() and run.reused == 0


def test_s51_an_adapter_of_another_version_reuses_nothing():
    w = World("full", page_size=4)
    w.turn(tokens(8), scope=jkv.Scope("lora", 1))
    assert w.hit(tokens(8), scope=jkv.Scope("lora", 2)) == 0
    assert w.hit(tokens(8), scope=jkv.Scope("lora", "1")) == 0
    assert w.hit(tokens(8), scope=jkv.Scope("lora", 1)) == 8


def test_epochs_outlive_a_reset():
    w = World("full", page_size=4, host=24)
    w.turn(tokens(8))
    w.manager.new_epoch("B")
    w.turn(tokens(8, "b"))
    w.manager._host.tree.make_free(w.manager._host.pools[0], w.manager._host.pools[0].total)
    w.flush()
    w.reset()
    assert w.manager.config.model == "B"
    assert w.hit(tokens(8, "b")) == 8
    assert w.hit(tokens(8)) == 0


def test_digests_follow_the_epoch():
    w = World("full", page_size=4, model="A")
    a = w.manager.block_digests(tokens(8))
    w.manager.new_epoch("B")
    b = w.manager.block_digests(tokens(8))
    assert a != b == World("full", page_size=4, model="B").manager.block_digests(tokens(8))
    w.manager.new_epoch("A")
    assert w.manager.block_digests(tokens(8)) == a


def test_events_tell_of_an_epoch_once():
    w = World("full window:8 recurrent", page_size=4, events=1000, model="A")
    w.turn(tokens(8), [4, 4], snapshot=True)
    run = w.start(join(tokens(8), fresh(4)))
    run.step(run.prompt[8:], snapshot=True)
    stored = w.manager.take_events()
    w.manager.new_epoch("B")
    removed = w.manager.take_events()
    alive = {(e.group, e.digest) for e in stored if e.kind == "stored"}
    alive -= {(e.group, e.digest) for e in stored if e.kind == "removed"}
    assert {e.kind for e in removed} == {"removed"}
    assert sorted((e.group, e.digest) for e in removed) == sorted(alive)
    run.step(fresh(4), snapshot=True)
    run.close()
    assert w.manager.take_events() == ()
    w.manager.new_epoch("A")
    w.turn(tokens(8), [4, 4], snapshot=True)
    assert {e.kind for e in w.manager.take_events()} == {"stored"}


def test_bad_models_are_refused(tmp_path):
    w = World("full")
    with pytest.raises(jkv.ConfigError, match="str"):
        w.manager.new_epoch(2)
    w.turn(tokens(8))
    w.manager.new_epoch("")  # without a store a name is not needed
    assert w.hit(tokens(8)) == 0
    w = World("full", store=jkv.StoreTier(tmp_path), model="A")
    for model in ("", "A"):
        with w.unchanged(), pytest.raises(jkv.ConfigError, match="store"):
            w.manager.new_epoch(model)
    w.manager.release(w.state)
    with pytest.raises(jkv.SequenceStateError, match="reset"):
        w.manager.new_epoch("B")


def test_random_traffic_through_many_epochs(tmp_path):
    """Every byte is verified, and what is found was computed in an epoch of this model."""
    w = World(
        "full window:5 recurrent",
        pages={"full": 14, "window:5": 14, "recurrent": 6},
        host=10,
        max_length=40,
        store=jkv.StoreTier(tmp_path),
        model="0",
    )
    generator = np.random.default_rng(5)
    for step in range(60):
        if step % 7 == 6:
            w.manager.new_epoch(str((step // 7 + 1) % 3))
            w.check()
        prompt = generator.integers(0, 2, generator.integers(2, 16)).astype(np.int32)
        run = w.open(prompt)
        if run.arrive():
            run.step(prompt[run.seq.length :], snapshot=True)
            if generator.random() < 0.3:
                run.suspend()
            elif generator.random() < 0.7:
                run.close()
        if len(w.runs) > 3:
            w.runs[0].close()
    w.close_all()
    w.flush()
    assert w.manager.stats().tiers["store"].reads > 0
