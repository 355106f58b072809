"""manager.reset: a step failed after it was given the donated state, and the device's contents are lost."""

import dataclasses

import jax
import numpy as np
import pytest
from device import compilations
from oracle import World, fresh, join, tokens

import jkv


class Unplugged(Exception):
    pass


def lose(w, how):
    """The state is given to a step that never returns it."""
    state = w.state
    if how == "deleted":
        for array in jax.tree.leaves(state):
            array.delete()
        return

    def failing(state, rows):
        def fail(_):
            raise Unplugged("the device is gone")

        first = state.pools[0][0]
        name, array = next(iter(first.items()))
        found = jax.pure_callback(fail, jax.ShapeDtypeStruct(array.shape, array.dtype), array)
        return dataclasses.replace(state, pools=(({**first, name: found}, *state.pools[0][1:]), *state.pools[1:]))

    with pytest.raises(Exception, match="gone"):
        jax.block_until_ready(jax.jit(failing, donate_argnums=0)(state, np.zeros(1, np.int32)))


def reset(w):
    """A fresh state, and the oracle forgets what the device held."""
    runs = list(w.runs)
    w.state = w.manager.reset()
    w.runs.clear()
    for run in runs:
        assert run.seq.status == "closed" and run.seq.row is None
    w.check()
    w.fetch()
    assert not any(array.any() for array in w.bytes.values())
    assert all((pool.free, pool.tree, pool.private) == (pool.total, 0, 0) for pool in w.pools().values())
    return runs


def traffic(w):
    """Every kind of step; three runs, one of them in flight at the end."""
    t = tokens(40)
    runs = [w.start(join(tokens(6), tokens(20, key))) for key in "abc"]
    runs[0].prefill("stops")
    runs[1].step(runs[1].prompt[:9], snapshot=True)
    runs[2].step(runs[2].prompt[:2])
    w.flush()
    assert w.reserve(runs, [3, 3, 3]) == 3
    batch = w.prepare_ragged(runs, [1, 2, 3])
    w.write_ragged(batch, runs, [fresh(1), fresh(2), fresh(3)])
    w.advance(runs)
    w.commit(runs)
    if w.config.max_drafts:
        runs[0].draft(fresh(3))
        runs[0].draft(fresh(3), accepted=1)
        runs[0].accept(1)
    runs[1].step(fresh(9))
    mark = runs[1].checkpoint()
    runs[1].suspend()
    runs[2].dispatch(t[:7])
    return mark


WORLDS = {
    "full": ("full", {}),
    "everything": (
        "full window:6 recurrent",
        {
            "max_drafts": 2,
            "window_scratch": jkv.WindowScratch(5),
            "pages": {"full": 40, "window:6": 30, "recurrent": 9},
        },
    ),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("how", ["deleted", "failed"])
def test_reset_after_a_step_that_failed(how, name):
    groups, config = WORLDS[name]
    w = World(groups, max_length=64, **config)
    mark = traffic(w)
    before = w.manager.stats()
    lost = w.state
    lose(w, how)
    with pytest.raises(jkv.SequenceStateError, match="donated"):
        w.manager.prepare(lost, [])
    runs = reset(w)
    for run in runs:
        for call in (
            run.seq.resume,
            lambda seq=run.seq: seq.reserve(1),
            lambda seq=run.seq: seq.advance(0),
            lambda seq=run.seq: seq.fork(1),
            lambda seq=run.seq: seq.commit([1]),
            lambda seq=run.seq: seq.rollback(mark.mark),
            lambda seq=run.seq: seq.accept(0),
        ):
            with w.unchanged(), pytest.raises(jkv.SequenceStateError):
                call()
        run.seq.close()  # closed already
    after = w.manager.stats()
    for field in ("lookups", "hits", "looked_up_tokens", "reused_tokens", "snapshots_taken", "snapshots_skipped"):
        assert getattr(after, field) == getattr(before, field)
    assert after.snapshots_evicted >= before.snapshots_evicted
    assert (after.active, after.suspended) == (0, 0)
    for prompt in (tokens(6), runs[0].held):
        match = w.probe(prompt)
        assert (match.raw_tokens, match.in_flight) == (0, 0)
    with compilations() as seen:
        traffic(w)  # the oracle reads everything
    assert not seen
    assert w.manager.stats().lookups == before.lookups + 3
    w.close_all()
    w.flush()
    assert w.hit(join(tokens(6), tokens(20, "a"))) > 0


def test_reset_again_and_again():
    groups, config = WORLDS["everything"]
    w = World(groups, max_length=64, **config)
    for turn in range(4):
        traffic(w)
        assert w.manager.stats().lookups == 3 * (turn + 1)
        reset(w)
    reset(w)


def test_reset_forgets_pending_work():
    """Copies, tables and candidates that were decided for the lost state are not applied to the fresh one."""
    w = World("full recurrent", max_length=64, max_drafts=2, pages={"full": 20, "recurrent": 6})
    w.turn(tokens(6))
    a = w.start(join(tokens(6), fresh()))
    a.draft(fresh(3))
    a.accept(1)
    b = w.start(join(tokens(6), fresh()))  # copies are pending
    assert b.reserve(5)
    assert not w.manager._host.builder.empty
    reset(w)
    assert w.flush() == {}
    assert not any(table.any() for table in w.tables.values()) and not w.slots.any() and not w.candidates.any()
    t = tokens(20)
    run = w.start(t)
    run.step(t[:5])
    run.draft(t[5:8])
    run.accept(2)
    run.commit(snapshot=True)
    run.close()
    assert w.hit(t) == 8


def test_reset_refuses_the_old_sequences():
    w = World("full", max_length=64)
    run = w.start(tokens(5)).prefill()
    reset(w)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        w.manager.prepare(w.state, [run.seq])
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        w.manager.advance([run.seq], [0])
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        w.manager.reserve([run.seq], [1])


def test_reset_keeps_totals():
    w = World("full recurrent", pages={"full": 8, "recurrent": 3}, max_sequences=2, max_length=32)
    for key in range(4):
        w.turn(tokens(14, key), [8, 6])
    before = w.manager.stats()
    assert before.snapshots_evicted > 0 and sum(before.evicted_pages.values()) > 0
    reset(w)
    after = w.manager.stats()
    assert after.snapshots_evicted == before.snapshots_evicted
    assert after.evicted_pages == before.evicted_pages
    for key in range(4):
        w.turn(tokens(14, key), [8, 6])
    assert w.manager.stats().snapshots_evicted == 2 * before.snapshots_evicted
    assert w.manager.stats().snapshots_taken == 2 * before.snapshots_taken
