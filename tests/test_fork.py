"""seq.fork: copies of a running sequence, each with its own future (kinds 4 to 7 of FAULTS).

original   | tree | tree | tree | partial |         what is committed in whole pages is shared
copy       |   "      "      "  | own     |         the rest, and the live state, is copied
"""

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

KINDS = ["full", "full window:6", "window:5+3", "recurrent", "full window:6 recurrent"]


def forking(groups, **config):
    pages = {group: 12 if group == "recurrent" else 64 for group in groups.split()}
    return World(groups, **{"max_length": 64, "max_sequences": 6, "pages": pages, **config})


def go_apart(runs, steps=(1, 3, 6), commit=True):
    """Each run goes its own way; the oracle reads all of them after every step."""
    for n in steps:
        for i, run in enumerate(runs):
            new = tokens(64, f"branch {i}")[run.seq.length :][:n]
            run.dispatch(new)
            if commit:
                run.commit(snapshot=n == 3)
            else:
                run.advance()


@pytest.mark.parametrize("groups", KINDS)
@pytest.mark.parametrize("length", [0, 3, 8, 14])
def test_fork_each_goes_its_own_way(groups, length):
    w = forking(groups)
    t = tokens(length)
    run = w.start(t)
    if length:
        run.prefill()
    runs = [run, *run.fork(3)]
    assert len(runs) == 4
    w.flush()
    go_apart(runs)
    ends = [run.held for run in runs]
    for i in (2, 0, 3, 1):
        runs[i].close()
        w.verify()
    for held in ends:
        assert w.hit(held) == len(held)


@pytest.mark.parametrize("groups", KINDS)
@pytest.mark.parametrize(("committed", "written"), [(0, 7), (8, 10), (6, 13), (4, 4)])
def test_fork_with_uncommitted_tokens(groups, committed, written):
    w = forking(groups)
    t = tokens(written)
    run = w.start(t)
    if committed:
        run.step(t[:committed])
    if written > committed:
        run.dispatch(t[committed:])
        run.advance(snapshot=True)
    runs = [run, *run.fork(2)]
    assert [r.seq.committed for r in runs] == [committed] * 3
    w.flush()
    assert not any(r.reserve(0) is False for r in runs)
    if "recurrent" not in groups:
        runs[1].rewind(written - committed)
    go_apart(runs, commit=False)
    runs[0].commit()
    runs[2].close()  # uncommitted: nothing of it stays
    runs[1].commit()
    w.flush()
    for run in runs[:2]:
        held = run.held
        run.close()
        assert w.hit(held) == len(held)


@pytest.mark.parametrize("groups", KINDS)
@pytest.mark.parametrize("order", ["original first", "copies first"])
def test_fork_of_forks_in_any_order(groups, order):
    w = forking(groups)
    run = w.start(tokens(10)).prefill([6, 4])
    runs = [run, *run.fork(1)]
    go_apart(runs, steps=(2,))
    runs += runs[1].fork(2)
    w.flush()
    go_apart(runs, steps=(3,))
    runs += runs[-1].fork(1) + runs[0].fork(1)
    go_apart(runs, steps=(1, 4))
    for run in runs if order == "original first" else runs[::-1]:
        run.close()
    assert all(pool.private == 0 for pool in w.pools().values())
    w.manager.clear()
    assert all(pool.free == pool.total for pool in w.pools().values())


@pytest.mark.parametrize("groups", ["full", "full window:6 recurrent"])
@pytest.mark.parametrize("n", [8, 11])
def test_fork_takes_fewer_pages_than_runs_of_their_own(groups, n):
    w = forking(groups)
    run = w.start(tokens(40)[: 32 + n % 8]).prefill()
    length = run.seq.length
    before = w.pools()
    copies = run.fork(4)
    assert len(copies) == 4
    for name, pool in w.pools().items():
        own = 1 if name == "recurrent" else int(length % 4 > 0)
        assert before[name].free - pool.free == 4 * own, name
        assert pool.private - before[name].private == 4 * own
    for copy in copies:
        copy.close()
    assert all(pool.private == before[name].private for name, pool in w.pools().items())
    w.flush()
    free = w.pool("full").free
    separate = w.start(tokens(40)[:length], max_reuse=0)
    assert separate.reserve(length)
    assert free - w.pool("full").free == -(-length // 4)


@pytest.mark.parametrize("groups", ["full window:6 recurrent", "recurrent", "full"])
def test_fork_right_after_resume(groups):
    """The copies of the hit's partial page and state are pending still: the forks copy what they will hold."""
    w = forking(groups)
    w.turn(tokens(10))
    w.scribble()
    run = w.start(join(tokens(10), fresh()))
    assert run.reused == 10
    runs = [run, *run.fork(2)]
    runs[0].close()
    other = w.start(fresh(9))  # may get the pages that run gave back
    assert other.reserve(9)
    w.flush()
    go_apart(runs[1:])
    other.prefill()


def test_fork_right_after_resume_in_a_full_cache():
    """The hit's own slot is what its copy gets; the forks still read what it held."""
    w = forking("full recurrent", pages={"full": 9, "recurrent": 3}, max_sequences=3, max_utilization_for_resume=1.0)
    w.turn(tokens(6))
    w.flush()
    run = w.start(join(tokens(6), fresh()))
    assert run.reused == 6
    runs = [run, *run.fork(2)]
    assert len(runs) == 3
    w.flush()
    go_apart(runs, steps=(1, 2), commit=False)


@pytest.mark.parametrize("groups", ["full", "full window:6 recurrent", "recurrent"])
def test_fork_after_the_end(groups):
    """The tail and the state are lent to the tree; copies are private all the same."""
    w = forking(groups)
    run = w.start(tokens(10)).prefill([6, 4], end=False)
    run.stop_committing()
    runs = [run, *run.fork(2)]
    assert len(runs) == 3
    w.flush()
    for i, each in enumerate(runs):
        each.dispatch(tokens(5, f"branch {i}"))
        each.advance()
    w.flush()
    assert w.hit(join(tokens(10), fresh())) == 10
    for each in runs[1:]:
        each.dispatch(fresh(2))
        each.advance()
    runs[1].close()
    runs[0].close()
    w.flush()
    assert w.hit(join(tokens(10), fresh())) == 10


@pytest.mark.parametrize("groups", ["full recurrent", "window:5+3"])
def test_fork_between_advance_and_late_commit(groups):
    w = forking(groups)
    t = tokens(30)
    run = w.start(t)
    run.dispatch(t[:9])
    run.advance(snapshot=True)
    run.dispatch(t[9:13])
    run.advance()
    (copy,) = run.fork(1)
    run.dispatch(t[13:17])
    run.commit(9)
    copy.dispatch(tokens(17, "copy")[13:])
    copy.commit(9)
    run.commit()
    copy.commit(snapshot=True)
    w.flush()
    assert w.hit(join(t[:9], fresh())) in ((9,) if w.recurrent else (8, 9))
    run.close()
    copy.close()
    assert w.hit(join(t[:17], fresh())) == 17
    assert w.hit(join(t[:13], tokens(17, "copy")[13:])) == 17


def test_fork_carries_the_options():
    w = forking("full")
    scope = jkv.Scope("adapter")
    run = w.start(tokens(9), scope=scope, priority=3).prefill()
    (copy,) = run.fork(1)
    copy.step(tokens(4, "copy"))
    copy.close()
    assert w.probe(join(tokens(9), tokens(4, "copy"))).tokens == 0
    assert w.probe(join(tokens(9), tokens(4, "copy")), scope=scope).tokens == 13


def test_fork_is_not_a_lookup():
    w = forking("full recurrent")
    run = w.start(tokens(9)).prefill()
    before = w.manager.stats()
    run.fork(2)
    after = w.manager.stats()
    assert (after.lookups, after.hits, after.looked_up_tokens) == (1, before.hits, before.looked_up_tokens)
    assert (after.active, after.suspended) == (3, 0)


# ------------------------------------------------------------------------------------------------ what it works beside


def test_fork_beside_drafts():
    """Each row has candidates of its own; a copy starts from the accepted state."""
    w = forking("full window:6 recurrent", max_drafts=2, pages={"full": 40, "window:6": 40, "recurrent": 8})
    t = tokens(40)
    run = w.start(t[:6]).prefill()
    run.draft(join(t[6:8], fresh()))
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.fork(1)
    run.accept(1)
    runs = [run, *run.fork(2)]
    for i, each in enumerate(runs):
        each.draft(tokens(3, f"branch {i}"))
    for i, each in enumerate(runs):
        each.accept(i)
    for i, each in enumerate(runs):
        each.draft(tokens(20, f"next {i}")[:3])
        each.draft(tokens(20, f"next {i}")[2:5], accepted=1)
        each.accept(1)
    w.flush()
    for each in runs:
        each.accept(2)
        each.commit(snapshot=True)
        each.close()
    for each in runs:
        assert w.probe(join(each.held, fresh())).tokens == len(each.held)


def test_fork_beside_window_scratch():
    w = forking("full window:6", window_scratch=jkv.WindowScratch(2))
    t = tokens(60)
    run = w.start(t)
    run.step(t[:21])
    run.dispatch(t[21:44])
    run.advance()
    assert run.reserve(20)
    runs = [run, *run.fork(2)]
    w.flush()
    runs[1].rewind(2)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        runs[2].seq.rewind(14)  # held back from the original, so from its copies
    assert run.reserve(0)
    go_apart(runs, steps=(9, 1, 3), commit=False)
    for each in runs:
        each.commit()
        each.close()
        assert w.hit(join(each.held, fresh())) == len(each.held)


def test_fork_of_a_sequence_with_marks_and_planned_states():
    """They stay the original's."""
    w = forking("full recurrent")
    t = tokens(40)
    run = w.start(t[:6]).prefill()
    mark = run.checkpoint()
    (copy,) = run.fork(1)
    with w.unchanged(), pytest.raises(jkv.CacheError):
        copy.seq.rollback(mark.mark)
    run.dispatch(fresh(3))
    run.rollback(mark)
    go_apart([run, copy])
    assert w.pool("recurrent").private == 2


# ------------------------------------------------------------------------------------------------ no room, bad calls


def test_fork_without_rows():
    w = forking("full recurrent", max_sequences=4)
    run = w.start(tokens(6)).prefill()
    others = [w.start(tokens(3, key)).prefill() for key in "ab"]
    assert run.fork(2) == []  # picture unchanged: Run.fork
    assert len(run.fork(1)) == 1
    assert run.fork(1) == []
    others[0].suspend()
    runs = [run, *run.fork(1)]
    w.flush()
    go_apart(runs)


@pytest.mark.parametrize("groups", ["full", "full window:6", "full window:6 recurrent"])
def test_fork_without_pages(groups):
    pages = {group: 12 if group == "recurrent" else 6 for group in groups.split()}
    w = forking(groups, pages=pages)
    run = w.start(tokens(10)).prefill()  # three pages, one of them private
    other = w.start(tokens(5, "other"))
    assert other.reserve(5)
    assert w.pool("full").free == 1
    assert run.fork(2) == []
    w.flush()
    (copy,) = run.fork(1)
    assert w.pool("full").free == 0
    other.close()
    go_apart([run, copy], steps=(1, 2))


def test_fork_takes_what_can_be_evicted():
    w = forking("full", pages=6)
    w.turn(tokens(12, "old"))
    run = w.start(tokens(10)).prefill()
    assert w.pool("full").free == 0
    copies = run.fork(3)
    assert len(copies) == 3
    w.flush()
    assert w.probe(tokens(12, "old")).tokens == 0


def test_fork_without_state_slots():
    w = forking("full recurrent", pages={"full": 40, "recurrent": 3}, max_sequences=3)
    run = w.start(tokens(6)).prefill(snapshot=True)
    assert w.pool("recurrent").free == 1
    runs = [run, *run.fork(1)]  # the pending snapshot is the original's
    assert w.pool("recurrent").free == 0
    assert run.fork(1) == []
    w.flush()
    go_apart(runs, steps=(1,))


def test_fork_leaves_a_pending_plan_as_it_was():
    w = forking("full recurrent", pages={"full": 8, "recurrent": 6}, max_utilization_for_resume=1.0)
    w.turn(tokens(6))
    run = w.start(join(tokens(6), fresh()))  # two copies are pending
    other = w.start(tokens(20, "other"))
    assert other.reserve(20)
    assert run.reserve(1)
    assert not w.manager._host.builder.empty
    assert run.fork(2) == []
    go_apart([run], steps=(1,))


@pytest.mark.parametrize("groups", ["full", "full recurrent"])
def test_fork_in_flight_or_not_active(groups):
    w = forking(groups)
    run = w.open(tokens(6))

    def refused():
        with w.unchanged(), pytest.raises(jkv.SequenceStateError):
            run.seq.fork(1)

    refused()
    assert run.resume()
    run.dispatch(tokens(6))
    refused()
    run.commit()
    run.suspend()
    refused()
    assert run.resume()
    run.close()
    refused()


@pytest.mark.parametrize("bad", [0, -1, "2", 1.5, None, True])
def test_fork_bad_counts(bad):
    w = forking("full")
    run = w.start(tokens(6)).prefill()
    with w.unchanged(), pytest.raises(jkv.ConfigError):
        run.seq.fork(bad)


@pytest.mark.parametrize(
    ("groups", "config"),
    [
        ("full window:5 recurrent", {"pages": {"full": 30, "window:5": 20, "recurrent": 9}}),
        ("full window:6", {"pages": 26, "shared": True, "window_scratch": jkv.WindowScratch(3)}),
    ],
)
def test_fork_random_traffic(groups, config):
    w = forking(groups, **config)
    rng = np.random.default_rng(3)
    for _ in range(200):
        runs = [run for run in w.runs if run.seq.status == "active"]
        run = runs[rng.integers(len(runs))] if runs else None
        kind = rng.integers(10)
        if run is None or (kind == 0 and len(w.runs) < 6):
            suspended = [run for run in w.runs if run.seq.status == "suspended"]
            if suspended:
                suspended[0].resume()
                if len(runs) == 0 and suspended[0].seq.status == "suspended":
                    suspended[0].close()
            else:
                w.open(tokens(int(rng.integers(1, 20)), int(rng.integers(2)))).resume()
        elif kind in (1, 2):
            run.fork(int(rng.integers(1, 4)))
        elif kind == 3 and len(runs) > 2:
            run.close()
        elif kind == 4:
            run.suspend()
        elif kind == 5 and not run.ended:
            run.commit()
        elif kind == 6 and rng.integers(4) == 0 and not run.ended:
            run.stop_committing()
        elif len(run.held) < 56:
            n = int(rng.integers(1, 8))
            if not run.reserve(n):
                w.runs[rng.integers(len(w.runs))].close()
                continue
            w.prepare(run)
            run.write(tokens(64, int(rng.integers(3)))[len(run.held) :][:n])
            if run.ended or rng.integers(2):
                run.advance(snapshot=bool(rng.integers(2)))
            else:
                run.commit(snapshot=bool(rng.integers(2)))
        else:
            run.close()
    w.close_all()
    w.flush()
    assert all(pool.private == 0 and pool.evictable == pool.tree for pool in w.pools().values())
