"""seq.plan_snapshots: states that one chunk leaves on its way, written by the step itself, not copied.

chunk        5 ................ 24
positions          8    12   15         slots[i] gets the state after exactly positions[i] tokens
"""

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

HYBRIDS = ["recurrent", "full recurrent", "full window:6 recurrent"]


def planning(groups="full window:6 recurrent", **config):
    pages = {group: 12 if group == "recurrent" else 64 for group in groups.split()}
    return World(groups, **{"max_length": 64, "chunk": 32, "pages": pages, **config})


def dispatch(run, new, positions):
    """A step of `new` that leaves states at `positions`; returns their slots."""
    assert run.reserve(len(new))
    slots = run.plan_snapshots(positions)
    run.world.prepare(run)
    run.write(new)
    return slots


def found(w, text, *lengths):
    """What prefixes that end at `lengths` reuse; each is resumed and its bytes are checked."""
    return [w.hit(join(text[:n], fresh())) for n in lengths]


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("reported", ["commit", "advance, commit", "advance, two commits"])
def test_plan_several_positions_of_one_chunk(groups, reported):
    w = planning(groups)
    t = tokens(40)
    run = w.start(t)
    run.step(t[:5], snapshot=False)
    w.scribble()
    assert run.reserve(20)
    w.flush()
    slots = run.plan_snapshots([8, 11, 12, 17])
    assert slots.all()
    assert w.pool("recurrent").private == 1 + 4
    w.prepare(run)
    assert w.copied["recurrent"] == []  # nothing is copied
    run.write(t[5:25])
    if reported != "commit":
        run.advance(snapshot=False)
    if reported == "advance, two commits":
        run.commit(8)
        assert w.probe(join(t[:12], fresh())).tokens == 12
        assert w.pool("recurrent").private == 1 + 1
    run.commit(snapshot=False)
    assert w.flush() == {}
    assert w.pool("recurrent").private == 1
    run.dispatch(t[25:26])
    run.close()  # in flight: no state at 25
    assert found(w, t, 8, 11, 12, 17) == [8, 11, 12, 17]
    assert found(w, t, 7, 10, 14, 16, 20, 25) == [0, 8, 12, 12, 17, 17]
    stats = w.manager.stats()
    assert (stats.snapshots_skipped, stats.snapshots_taken) == (0, 4)


@pytest.mark.parametrize("groups", ["full recurrent", "full window:6 recurrent"])
def test_plan_inside_the_last_page(groups):
    """Published with the tail, or when its page fills."""
    w = planning(groups)
    t = tokens(40)
    run = w.start(t)
    dispatch(run, t[:15], [9, 13, 14])
    run.commit(snapshot=False)
    assert w.probe(join(t[:15], fresh())).tokens == 9
    assert w.pool("recurrent").private == 1 + 2
    run.close()
    assert found(w, t, 9, 13, 14) == [9, 13, 14]
    run = w.start(tokens(40, "b"))
    dispatch(run, tokens(40, "b")[:15], [13, 15])
    run.commit(snapshot=False)
    run.step(tokens(40, "b")[15:17], snapshot=False)
    assert w.pool("recurrent").private == 1
    run.dispatch(fresh())
    run.close()
    assert found(w, tokens(40, "b"), 13, 15, 17) == [13, 15, 15]


def test_plan_the_end_of_the_chunk():
    """The position that the step ends at: no copy beside it, whatever the commit asks for."""
    for snapshot in (None, True, False):
        w = planning()
        t = tokens(40)
        run = w.start(t)
        dispatch(run, t[:11], [4, 11])
        run.commit(snapshot=snapshot)
        assert w.flush() == {}
        assert w.pool("recurrent").private == 2  # live, and @11 until its page is published
        run.dispatch(fresh())
        run.close()
        assert found(w, t, 4, 11) == [4, 11]


def test_plan_at_the_snapshot_points():
    """One chunk for the whole prompt, and still both points are left."""
    w = planning()
    w.turn(join(tokens(13), tokens(9, "a")), snapshot=False)
    prompt = join(tokens(13), tokens(12, "b"))
    run = w.start(prompt)
    points = run.seq.snapshot_points
    assert points == (12, 24)
    dispatch(run, prompt, points)
    run.commit()
    run.dispatch(fresh())
    run.close()
    assert w.hit(prompt) == 24
    assert w.hit(join(tokens(13), fresh())) == 12


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("verb", ["advance", "commit"])
def test_plan_a_shorter_step(groups, verb):
    w = planning(groups)
    t = tokens(40)
    run = w.start(t)
    assert run.reserve(20)
    run.plan_snapshots([4, 10, 13, 20])
    assert w.pool("recurrent").private == 5
    w.prepare(run)
    run.write(t[:11])
    if verb == "advance":
        run.advance(11, snapshot=False)
        assert w.pool("recurrent").private == 3
        run.commit(snapshot=False)
    else:
        run.commit(snapshot=False)
    run.step(t[11:24], snapshot=False)
    assert w.pool("recurrent").private == 1
    run.dispatch(fresh())
    run.close()
    assert found(w, t, 4, 10, 13, 20, 24) == [4, 10, 10, 10, 10]


@pytest.mark.parametrize("how", ["not prepared", "not run", "shrunk"])
def test_plan_a_step_that_did_not_run(how):
    w = planning()
    t = tokens(40)
    run = w.start(t)
    run.step(t[:4], snapshot=True)
    before = w.pool("recurrent").private
    assert run.reserve(16)
    run.plan_snapshots([8, 12])
    if how == "not run":
        w.prepare(run)
        run.advance(0)
    elif how == "shrunk":
        assert run.reserve(0)
    else:
        run.advance(0)
    run.kept = {}
    assert w.pool("recurrent").private == before
    run.step(t[4:16], snapshot=False)
    run.dispatch(fresh())
    run.close()
    assert found(w, t, 8, 12) == [4, 4]


@pytest.mark.parametrize("written", [False, True])
def test_plan_closed_in_flight(written):
    w = planning()
    t = tokens(40)
    run = w.start(t)
    run.step(t[:4], snapshot=True)
    assert run.reserve(16)
    run.plan_snapshots([8, 12, 20])
    w.prepare(run)
    if written:
        run.write(t[4:20])
    run.close()
    assert w.pool("recurrent").private == 0
    assert found(w, t, 8, 12, 20) == [4, 4, 4]


def test_plan_closed_before_the_commit():
    """Reported, never committed: nothing of it is anybody's."""
    w = planning()
    t = tokens(40)
    run = w.start(t)
    dispatch(run, t[:16], [8, 12])
    run.advance()
    run.commit(9)
    run.close()
    assert w.pool("recurrent").private == 0
    assert found(w, t, 8, 12) == [8, 8]


def test_plan_rolled_back():
    w = planning()
    t = tokens(40)
    run = w.start(t)
    run.step(t[:4], snapshot=True)
    for reported in (False, True):
        mark = run.checkpoint()
        dispatch(run, fresh(12), [8, 12, 15])
        if reported:
            run.advance()
        run.rollback(mark)
        w.flush()
        assert w.pool("recurrent").private == 1
    run.step(t[4:16], snapshot=False)
    run.dispatch(fresh())
    run.close()
    assert found(w, t, 8, 12) == [4, 4]


def test_plan_no_slot():
    w = planning("full recurrent", pages={"full": 32, "recurrent": 4}, max_sequences=2)
    t = tokens(40)
    other = w.start(tokens(6, "other")).prefill()
    run = w.start(t)
    assert run.reserve(16)
    slots = run.plan_snapshots([4, 8, 12])
    assert np.count_nonzero(slots) == 2
    assert w.manager.stats().snapshots_skipped == 1
    assert (run.plan_snapshots([13, 14]) == 0).all()
    assert w.manager.stats().snapshots_skipped == 3
    run.kept = {p: int(s) for p, s in zip((4, 8, 12), slots, strict=True) if s}
    w.prepare(run)
    run.write(t[:16])
    run.commit(snapshot=False)
    run.dispatch(fresh())
    run.close()
    had = [n for n, slot in zip((4, 8, 12), slots, strict=True) if slot]
    for n in (4, 8, 12):
        assert w.probe(join(t[:n], fresh())).tokens == max([h for h in had if h <= n], default=0)
    other.close()
    assert found(w, t, *had[-1:]) == had[-1:]


def test_plan_takes_what_can_be_evicted():
    w = planning("full recurrent", pages={"full": 32, "recurrent": 4}, max_sequences=1)
    w.turn(tokens(12, "old"), [4, 4, 4])
    assert w.pool("recurrent").free == 1
    t = tokens(40)
    run = w.start(t)
    slots = dispatch(run, t[:16], [4, 8, 12])
    assert slots.all()
    run.commit(snapshot=False)
    run.dispatch(fresh())
    run.close()
    assert found(w, t, 12) == [12]


@pytest.mark.parametrize("groups", ["full", "full window:6", "window:6+2"])
@pytest.mark.parametrize("min_snapshot", [False, True])
def test_plan_without_states_positions_become_endpoints(groups, min_snapshot):
    w = planning(groups, min_snapshot=min_snapshot)
    t = tokens(40)
    run = w.start(t)
    assert dispatch(run, t[:30], [9, 24]).tolist() == [0, 0]
    run.commit(snapshot=False)
    run.close()
    assert found(w, t, 9, 24, 30) == [9, 24, 30]
    if min_snapshot and "window" in groups:
        assert w.probe(join(t[:15], fresh())).tokens == 12  # [10, 15) is a window that nobody asked for
    assert w.manager.stats().snapshots_skipped == 0


@pytest.mark.parametrize("groups", ["full window:6 recurrent", "full window:6", "window:4+3 recurrent"])
@pytest.mark.parametrize("max_rewind", [0, 5])
def test_plan_with_window_scratch(groups, max_rewind):
    """An endpoint inside the chunk needs its window: those pages are not held back."""
    w = planning(groups, window_scratch=jkv.WindowScratch(max_rewind))
    t = tokens(60)
    run = w.start(t)
    dispatch(run, t[:31], [9, 20])
    w.verify(prepared=True)
    run.advance(snapshot=False)
    run.dispatch(t[31:50])
    run.commit(31)
    run.commit(snapshot=True)
    run.close()
    assert found(w, t, 9, 20, 50) == [9, 20, 50]
    assert found(w, t, 14, 24) == [9, 20] or not w.recurrent


def test_plan_with_window_scratch_and_no_page_for_it():
    """No window page, no endpoint: never a state whose window is missing."""
    w = planning(
        "full window:6 recurrent", window_scratch=jkv.WindowScratch(), pages={"full": 32, "window:6": 4, "recurrent": 9}
    )
    t = tokens(60)
    run = w.start(t)
    assert run.reserve(32)  # [27, 32): two of four pages
    slots = run.plan_snapshots([9, 15, 20])
    assert np.count_nonzero(slots) < 3
    w.prepare(run)
    run.write(t[:32])
    run.commit(snapshot=True)
    run.close()
    for n, slot in zip((9, 15, 20), slots, strict=True):
        assert w.probe(join(t[:n], fresh())).tokens in ((n,) if slot else (0, 9, 15))
        assert w.hit(join(t[:n], fresh())) <= n
    assert w.probe(join(t[:32], fresh())).tokens == 32


def test_plan_a_state_that_somebody_is_about_to_copy_is_not_overwritten():
    """Between prepare and the step: a snapshot whose copy is still pending is not for this step to write over."""
    w = planning("full recurrent", pages={"full": 32, "recurrent": 4}, max_sequences=2, max_utilization_for_resume=1.0)
    t = tokens(40)
    w.turn(tokens(6, "hit"))
    run = w.start(t)
    assert run.reserve(16)
    w.prepare(run)
    reader = w.start(join(tokens(6, "hit"), fresh()))  # its copy of the snapshot comes with the next plan
    assert reader.reused == 6
    try:
        run.plan_snapshots([4, 8])
    except jkv.SequenceStateError:
        w.check()
    run.write(t[:16])
    run.commit(snapshot=False)
    w.flush()  # the oracle reads the reader's state
    reader.step(fresh())
    run.close()


def test_plan_the_slots_of_a_closed_run_are_free_for_others():
    w = planning("full recurrent", pages={"full": 32, "recurrent": 4}, max_sequences=2)
    t = tokens(40)
    for _ in range(4):
        run = w.start(t, max_reuse=0)
        dispatch(run, t[:16], [4, 8])
        run.close()
        other = w.start(fresh(9)).prefill(snapshot=True)
        other.close()
    assert w.pool("recurrent").private == 0
    assert found(w, t, 4, 8) == [0, 0]


@pytest.mark.parametrize("groups", ["full recurrent", "full"])
def test_plan_wrong_positions(groups):
    w = planning(groups)
    t = tokens(40)
    run = w.start(t)
    run.step(t[:4])
    assert run.reserve(8)
    for wrong in ([4], [0], [13], [-1], [8, 13], [8, 4], ["8"], [8.0], [True], 8, None):
        with w.unchanged(), pytest.raises(jkv.ConfigError):
            run.seq.plan_snapshots(wrong)
    with w.unchanged(), pytest.raises(jkv.ConfigError):
        run.seq.plan_snapshots(jnp.array([8.5]))
    assert run.plan_snapshots([]).shape == (0,)
    run.plan_snapshots(np.array([12, 5]))  # any order
    w.prepare(run)
    run.write(t[4:12])
    run.commit(snapshot=False)
    run.close()
    assert w.hit(join(t[:5], fresh())) == 5


def test_plan_the_same_position_twice():
    w = planning("full recurrent")
    t = tokens(40)
    run = w.start(t)
    assert run.reserve(12)
    first = run.plan_snapshots([8])
    try:
        again = run.plan_snapshots([8])
    except jkv.ConfigError:
        w.check()
        run.kept = {8: int(first[0])}
    else:
        assert again.tolist() in (first.tolist(), [0])
        run.kept = {8: int(first[0])}
    assert w.pool("recurrent").private == 2
    w.prepare(run)
    run.write(t[:12])
    run.commit(snapshot=False)
    run.dispatch(fresh())
    run.close()
    assert found(w, t, 8, 12) == [8, 8]


def test_plan_when_it_cannot_be():
    w = planning("full recurrent")
    run = w.open(tokens(9))

    def refused():
        with w.unchanged(), pytest.raises(jkv.CacheError):
            run.seq.plan_snapshots([1])

    refused()
    assert run.resume()
    run.prefill(end=True)
    assert run.reserve(3)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.plan_snapshots([10])  # it publishes nothing more
    run.suspend()
    refused()
    run.close()
    refused()


def test_plan_suspended_and_resumed():
    w = planning()
    t = tokens(40)
    run = w.start(t)
    assert run.reserve(12)
    run.plan_snapshots([4, 7])
    run.suspend()
    other = w.start(fresh(20)).prefill(snapshot=True)
    assert run.resume()
    w.prepare(run)
    run.write(t[:12])
    run.commit(snapshot=False)
    other.close()
    run.dispatch(fresh())
    run.close()
    assert found(w, t, 4, 7) == [4, 7]


def test_plan_verify_steps_drop_what_they_did_not_reach():
    w = planning("full recurrent", max_drafts=2)
    t = tokens(40)
    run = w.start(t)
    run.step(t[:4])
    assert run.reserve(3)
    run.seq.plan_snapshots([5, 7])
    w.check()
    w.prepare(run)
    run.verify(join(t[4:6], fresh()))
    run.accept(1)
    assert w.pool("recurrent").private <= 2  # live, @5; nothing at 7
    w.flush()


def test_after_another_size_the_slots_are_asked_for_again():
    w = World("full recurrent", page_size=4, pages=24)
    for i in range(6):
        w.turn(tokens(4, f"taken {i}"))
    run = w.start(tokens(12))
    assert run.reserve(12)
    (slot,) = run.seq.plan_snapshots([8]).tolist()
    assert slot > 5
    w.state = w.manager.resize_tier(w.state, "device", pages={"full": 24, "recurrent": 5})
    (again,) = run.seq.plan_snapshots([8]).tolist()
    assert 0 < again <= 5 and run.seq._pending == {8: again}
    w.manager.check()
