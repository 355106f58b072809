"""FAULTS F8 in all its forms: drafts that are rejected, by rewind, by accepted candidates, by a checkpoint.

A verify step of D drafts leaves the state after its input token and after each draft; `accept(j)` says that the input
token and j drafts count. `Run.draft` is that step; the oracle checks what it reads and writes.
"""

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

DRAFTS = 2  # at most, everywhere here: steps of three tokens
HYBRIDS = ["recurrent", "full recurrent", "full window:8 recurrent"]
PLAIN = ["full", "full window:8", "window:5+3"]


def drafting(groups="full window:8 recurrent", **config):
    pages = {group: 8 if group == "recurrent" else 64 for group in groups.split()}
    return World(groups, **{"max_drafts": DRAFTS, "max_length": 64, "max_sequences": 3, "pages": pages, **config})


def guesses(text, at, right, drafts=DRAFTS):
    """The input token text[at], `right` drafts that the model will accept and others that it will not."""
    return join(text[at : at + 1 + right], fresh(drafts - right))


def started(w, text, n=5, **options):
    """A run that has computed and committed the first n tokens of `text`."""
    run = w.start(text[:n], max_reuse=0)
    return run.prefill(snapshot=options.pop("snapshot", False), **options)


# ------------------------------------------------------------------------------------------------ one step at a time


@pytest.mark.parametrize("groups", HYBRIDS + PLAIN)
def test_f08_two_of_three_accepted(groups):
    w = drafting(groups)
    t = tokens(30)
    run = started(w, t, 12)
    rejected = fresh(2)
    run.draft(join(t[12:13], rejected))
    run.accept(0)
    assert (run.seq.committed, run.seq.length) == (12, 13)
    run.draft(guesses(t, 13, 1))
    run.accept(1)
    assert (run.seq.committed, run.seq.length) == (12, 15)
    run.draft(guesses(t, 15, 2))
    run.accept(2)
    assert (run.seq.committed, run.seq.length) == (12, 18)
    run.commit(snapshot=True)
    w.flush()
    run.close()
    assert w.hit(join(t[:18], fresh())) == 18
    assert w.probe(join(t[:13], rejected)).raw_tokens == 13


@pytest.mark.parametrize("groups", ["full recurrent", "recurrent"])
def test_f08_no_copy_is_planned(groups):
    w = drafting(groups)
    t = tokens(30)
    run = started(w, t)
    w.scribble()
    for at, right in ((5, 2), (8, 0), (9, 1)):
        run.draft(guesses(t, at, right))
        assert w.copied["recurrent"] == []
        run.accept(right)
    assert w.flush() == {}


@pytest.mark.parametrize("snapshot", [True, False, None])
def test_f08_a_snapshot_at_an_accepted_length(snapshot):
    w = drafting()
    t = tokens(30)
    run = started(w, t)
    run.draft(guesses(t, 5, 1))
    run.accept(1, snapshot=snapshot)
    run.draft(guesses(t, 7, 2))
    run.accept(2)
    run.commit(2)
    run.commit(snapshot=False)
    expected = 7 if snapshot else 0
    assert w.probe(join(t[:8], fresh())).tokens == expected
    run.dispatch(t[10:11])
    run.close()  # in flight: no state
    assert w.hit(join(t[:9], fresh())) == expected
    assert w.hit(t[:20]) == expected


def test_f08_a_snapshot_point_is_reached_by_accept():
    """The prompt's last page boundary before its final token, reached by a verify step."""
    w = drafting()
    t = tokens(13)
    run = w.start(t)
    assert run.seq.snapshot_points == (12,)
    run.step(t[:9])
    run.draft(t[9:12])
    run.accept(2)
    assert run.seq.snapshot_points == ()
    run.step(t[12:], snapshot=False)
    run.dispatch(fresh())
    run.close()
    assert w.hit(t) == 12


@pytest.mark.parametrize("groups", HYBRIDS)
def test_f08_the_end_after_an_accept(groups):
    """The accepted candidate becomes the tree's without a copy, and its writer goes on."""
    w = drafting(groups)
    t = tokens(40)
    run = started(w, t)
    w.scribble()
    run.draft(guesses(t, 5, 1))
    run.accept(1)
    run.commit(end=True)
    assert w.flush().get("recurrent", []) == []
    slot = w.slot(run)
    reader = w.start(join(t[:7], tokens(9, "reader")))
    assert reader.reused == 7
    run.draft(guesses(t, 7, 2))  # from a private copy
    assert w.slot(run) != slot
    run.accept(2)
    reader.prefill()
    run.draft(guesses(t, 10, 0))
    run.accept(0)
    reader.draft(guesses(t, 0, 1))
    reader.close()
    run.close()
    assert w.hit(t) == 7
    assert w.probe(join(t[:7], tokens(9, "reader"))).raw_tokens == (16 if "full" in groups else 7)


@pytest.mark.parametrize("groups", HYBRIDS)
def test_f08_suspended_between_steps(groups):
    w = drafting(groups)
    t = tokens(40)
    run = started(w, t)
    run.draft(guesses(t, 5, 1))
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.suspend()
    run.accept(1)
    run.suspend()
    others = [started(w, tokens(9, key), 6) for key in "ab"]  # in the rows that come first
    for other in others:
        other.draft(fresh(3))
    others[0].accept(0)
    others[0].close()
    assert run.resume()
    run.draft(guesses(t, 7, 0))
    run.accept(0)
    others[1].accept(2)
    run.suspend()
    w.flush()
    assert run.resume()
    run.step(t[8:9])
    run.commit(snapshot=True)
    run.close()
    assert w.hit(join(t[:9], fresh())) == 9


def test_f08_a_closed_writer_leaves_the_accepted_state():
    w = drafting()
    t = tokens(40)
    run = started(w, t)
    run.draft(guesses(t, 5, 2))
    run.accept(2)
    run.commit()
    run.close()
    for _ in range(2):  # the slot that the state lies in is the pool's now
        w.scribble()
        assert w.hit(join(t[:8], fresh())) == 8
    w.manager.clear()
    assert all(pool.free == pool.total for pool in w.pools().values())


def test_f08_a_mix_of_verify_and_plain_steps():
    w = drafting()
    t = tokens(60)
    run = started(w, t)
    for kind in "vpvvppvpv":
        at = run.seq.length
        if kind == "p":
            run.dispatch(t[at : at + 3])
            run.advance(snapshot=True)
        else:
            run.draft(guesses(t, at, at % 3))
            run.accept(at % 3, snapshot=True)
        w.flush()
    ends = run.seq.length
    run.commit()
    run.close()
    assert w.hit(t[:ends]) == ends


def test_f08_fewer_drafts_than_at_most():
    w = drafting()
    t = tokens(40)
    run = started(w, t)
    for n in (1, 2, 3, 1):
        at = run.seq.length
        run.draft(t[at : at + n])
        run.accept(n - 1)
    run.commit(snapshot=True)
    run.close()
    assert w.hit(join(t[:12], fresh())) == 12


# ------------------------------------------------------------------------------------------------ overlapped


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_f08_the_next_step_is_dispatched_before_the_accept(groups, seed):
    """Only the device knows what was accepted when the second step starts; commits come later still."""
    w = drafting(groups)
    t = tokens(64)
    run = started(w, t)
    rng = np.random.default_rng(seed)
    right, at = [], 5
    while at < 50:
        right.append(int(rng.integers(3)))
        run.draft(guesses(t, at, right[-1]), accepted=right[-2] if len(run.verifying) else None)
        at += right[-1] + 1
        if len(run.verifying) == 2:
            run.accept(right[-2])
            if rng.integers(2):
                run.commit()
        if rng.integers(4) == 0:  # drained, then again
            run.accept(right[-1])
            w.flush()
    while run.verifying:
        run.accept(right[-1])
    w.flush()
    run.commit(snapshot=True)
    run.close()
    assert w.hit(join(t[:at], fresh())) == at


@pytest.mark.parametrize("snapshot", [True, None])
def test_f08_a_snapshot_of_the_first_while_the_second_runs(snapshot):
    """The second step only reads what the first one wrote, so that state can be kept."""
    w = drafting()
    t = tokens(40)
    run = started(w, t)
    run.draft(guesses(t, 5, 1))
    run.draft(guesses(t, 7, 2), accepted=1)
    run.accept(1, snapshot=snapshot)
    w.flush()
    run.commit()
    run.accept(2)
    run.draft(guesses(t, 10, 0))
    run.accept(0)
    run.commit(snapshot=False)
    run.dispatch(fresh())
    run.close()
    assert w.hit(t[:20]) == (7 if snapshot else 0)


@pytest.mark.parametrize("accepted", [0, 1])
def test_f08_closed_with_two_steps_in_flight(accepted):
    """What is committed and its snapshots stay; no state of a step in flight does."""
    w = drafting()
    t = tokens(40)
    run = started(w, t, snapshot=True)
    run.draft(guesses(t, 5, 1))
    run.draft(guesses(t, 7, 2), accepted=1)
    if accepted:
        run.accept(1)
        run.commit()
    run.close()
    assert w.hit(t[:20]) == 5
    assert w.probe(t[:20]).raw_tokens == (7 if accepted else 5)
    other = started(w, tokens(40, "other"))
    other.draft(guesses(tokens(40, "other"), 5, 2))
    other.accept(2)
    other.commit()
    other.close()
    assert w.hit(join(tokens(8, "other"), fresh())) == 8


def test_f08_an_exception_in_flight():
    w = drafting()
    t = tokens(40)
    run = started(w, t, snapshot=True)
    with pytest.raises(RuntimeError, match="stop"), run.seq:
        run.draft(guesses(t, 5, 1))
        raise RuntimeError("stop")
    run.close()
    assert w.hit(t[:20]) == 5


def test_f08_a_third_step_is_refused():
    w = drafting()
    t = tokens(40)
    run, other = started(w, t), started(w, tokens(9, "other"))
    run.draft(guesses(t, 5, 1))
    run.draft(guesses(t, 7, 0), accepted=1)
    assert run.reserve(9) and other.reserve(3)
    w.flush()
    for batch in ([run], [other, run], [run, other]):
        with w.unchanged(), pytest.raises(jkv.SequenceStateError, match=r"accept|in flight"):
            w.manager.prepare(w.state, [run.seq for run in batch])
    other.suspend()  # it was not put in flight
    run.accept(1)
    w.prepare(run)
    run.verify(guesses(t, 8, 2), accepted=0)
    run.accept(0)
    run.accept(2)
    run.commit(snapshot=True)
    run.close()
    assert w.hit(t[:20]) == 11


def test_f08_every_row_at_once_and_no_slot_to_spare():
    """Candidates are not capacity: with as many slots as rows all of them speculate, two steps deep."""
    w = drafting("recurrent", pages=3)
    assert w.pool("recurrent").total == 3
    texts = [tokens(64, key) for key in "abc"]
    runs = [started(w, text, 4) for text in texts]
    right = [0] * 3
    for at in range(12):
        for i, (run, text) in enumerate(zip(runs, texts, strict=True)):
            behind = right[i] + 1 if run.verifying else 0
            before, right[i] = right[i], (at + i) % 3
            run.draft(guesses(text, len(run.held) + behind, right[i]), accepted=before if behind else None)
            if len(run.verifying) == 2:
                run.accept(before)
            assert (w.pool("recurrent").total, w.pool("recurrent").private, w.pool("recurrent").free) == (3, 3, 0)
    assert w.manager.stats().snapshots_taken == 0
    for run, last in zip(runs, right, strict=True):
        run.accept(last)
        w.flush()
        run.commit()
        run.close()
    assert w.pool("recurrent").total == 3
    assert [w.probe(text).tokens for text in texts] == [len(run.held) for run in runs]
    assert w.hit(texts[1]) == len(runs[1].held)


def test_f08_churn_moves_slots_between_rows_and_tree():
    """Candidates become snapshots, snapshots are evicted, live states are freed: nothing gets lost or shared."""
    w = drafting("full recurrent", pages={"full": 40, "recurrent": 5}, max_sequences=2)
    rng = np.random.default_rng(0)
    for turn in range(25):
        text = join(tokens(4 * int(rng.integers(1, 4)), "head"), tokens(40, turn % 5))
        runs = [w.start(text[: 14 + i]) for i in range(1 + int(rng.integers(2)))]
        for run in runs:
            run.prefill("stops", snapshot=None)
            for _ in range(int(rng.integers(1, 4))):
                at, right = run.seq.length, int(rng.integers(3))
                run.draft(guesses(text, at, right))
                run.accept(right, snapshot=[None, True][rng.integers(2)])
            if rng.integers(3):
                run.commit(end=bool(rng.integers(2)))
        for run in runs:
            if rng.integers(3) == 0:
                run.draft(fresh(3))
            run.close()
    w.manager.clear()
    assert all(pool.free == pool.total for pool in w.pools().values())


# ------------------------------------------------------------------------------------------------ with window scratch


@pytest.mark.parametrize("groups", ["full window:8 recurrent", "full window:8"])
def test_f08_with_window_scratch(groups):
    """A verify step ends up to D tokens early."""
    w = drafting(groups, window_scratch=jkv.WindowScratch(DRAFTS))
    t = tokens(64)
    run = started(w, t, 20)
    for right in (0, 2, 1, 0, 0, 2):
        run.draft(guesses(t, run.seq.length, right))
        run.accept(right)
        w.flush()
    run.commit(snapshot=True)
    end = run.seq.length
    run.close()
    assert w.hit(join(t[:end], fresh())) == end


def test_f08_overlapped_with_window_scratch():
    """Two steps end up to 2 * D + 1 tokens before what is reserved."""
    w = drafting(window_scratch=jkv.WindowScratch(2 * DRAFTS + 1))
    t = tokens(64)
    run = started(w, t, 20)
    at, before = 20, None
    for right in (0, 2, 1, 0, 0, 2, 0):
        run.draft(guesses(t, at, right), accepted=before)
        if before is not None:
            run.accept(before)
            w.flush()
        at, before = at + right + 1, right
    run.accept(before)
    w.flush()
    run.commit(snapshot=True)
    run.close()
    assert w.hit(join(t[:at], fresh())) == at


# ------------------------------------------------------------------------------------------------ wrong keys and calls


@pytest.mark.parametrize("groups", HYBRIDS + PLAIN)
def test_f08_only_accepted_tokens_are_ever_found(groups):
    w = drafting(groups)
    t = tokens(60)
    run = started(w, t, 5)
    rejected = []
    while run.seq.length < 48:
        at = run.seq.length
        right = at % 3
        new = guesses(t, at, right)
        rejected.append((at + right + 1, join(t[: at + right + 1], new[right + 1 :])))
        run.draft(new)
        run.accept(right, snapshot=True)
        run.commit()
    run.close()
    for n, wrong in rejected:
        match = w.probe(wrong)
        assert match.tokens <= match.raw_tokens <= n
        assert w.hit(wrong) == match.tokens
    assert w.hit(t) == run.held.size


@pytest.mark.parametrize("bad", [-1, DRAFTS + 1, "1", 1.0, True, None])
def test_f08_what_cannot_be_accepted(bad):
    w = drafting()
    run = started(w, tokens(20))
    run.draft(guesses(tokens(20), 5, 2))
    with w.unchanged(), pytest.raises(jkv.ConfigError):
        run.seq.accept(bad)
    run.accept(2)
    w.flush()


def test_f08_accept_without_a_step():
    w = drafting()
    t = tokens(20)
    run = w.open(t)

    def refused(j=0):
        with w.unchanged(), pytest.raises(jkv.SequenceStateError):
            run.seq.accept(j)

    refused()  # not active
    assert run.resume()
    refused()
    assert run.reserve(3)
    refused()
    w.prepare(run)
    run.verify(t[:3])
    run.accept(2)
    refused()
    assert run.reserve(2)
    w.prepare(run)
    run.verify(t[3:5])
    refused(2)  # two tokens were reserved
    run.accept(1)
    run.suspend()
    refused()
    run.close()
    refused()


def test_f08_a_step_that_did_not_run():
    w = drafting()
    t = tokens(30)
    run = started(w, t)
    assert run.reserve(3)
    w.prepare(run)
    run.advance(0)
    run.draft(guesses(t, 5, 1))
    run.accept(1)
    w.flush()
    for _ in range(4):
        assert run.reserve(3)
        w.prepare(run)
        run.advance(0)
    run.draft(guesses(t, 7, 2))
    run.accept(2)
    run.commit(snapshot=True)
    run.close()
    assert w.hit(t) == 10


@pytest.mark.parametrize("groups", PLAIN)
def test_f08_without_a_state_accept_is_advance(groups):
    one, two = World(groups, max_length=64, max_sequences=3), World(groups, max_length=64, max_sequences=3)
    t = tokens(40)
    for w in (one, two):
        run = started(w, t)
        for right in (2, 0, 3, 1):
            at = run.seq.length
            if w is one:
                run.draft(guesses(t, at, right, drafts=3))
                run.accept(right, snapshot=right == 3)
            else:
                run.dispatch(guesses(t, at, right, drafts=3))
                run.advance(right + 1, snapshot=right == 3)
        run.commit()
        run.close()
    assert one.manager.stats() == two.manager.stats()
    for n in range(1, 20):
        assert one.probe(t[:n]) == two.probe(t[:n])
    assert one.hit(t) == two.hit(t) == 15


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("groups", HYBRIDS + PLAIN)
def test_f08_back_to_a_checkpoint(groups):
    """For models that cannot leave states per token: run all drafts, go back, run the accepted ones."""
    w = drafting(groups)
    t = tokens(40)
    run = started(w, t, 12)
    rejected = fresh(2)
    private = {name: pool.private for name, pool in w.pools().items()}
    mark = run.checkpoint()
    assert mark is not None and mark.length == 12
    if w.recurrent:
        assert w.pool("recurrent").private == private["recurrent"] + 1
    run.dispatch(join(t[12:14], rejected))
    run.advance()
    run.rollback(mark)
    w.flush()
    if w.recurrent:
        assert w.pool("recurrent").private == private["recurrent"]
    run.step(t[12:14], snapshot=True)
    run.close()
    assert w.probe(join(t[:14], rejected)).raw_tokens == 14
    assert w.hit(join(t[:14], fresh())) == 14


@pytest.mark.parametrize("groups", HYBRIDS + PLAIN)
@pytest.mark.parametrize("written", [False, True])
def test_f08_back_while_the_step_is_in_flight(groups, written):
    w = drafting(groups)
    t = tokens(40)
    run = started(w, t, 6)
    mark = run.checkpoint()
    if written:
        run.dispatch(fresh(4))
    else:
        assert run.reserve(4)
        w.prepare(run)
    run.rollback(mark)
    assert run.seq.length == 6
    for n in (1, 4):  # that step is forgotten
        if w.recurrent:
            with w.unchanged(), pytest.raises(jkv.SequenceStateError):
                run.seq.advance(n)
            with w.unchanged(), pytest.raises(jkv.SequenceStateError):
                run.seq.commit(fresh(n))
    run.suspend()
    assert run.resume()
    w.flush()
    run.step(t[6:11], snapshot=True)
    run.close()
    assert w.hit(join(t[:11], fresh())) == 11


@pytest.mark.parametrize("groups", ["full window:8 recurrent", "full window:8"])
def test_f08_two_marks(groups):
    w = drafting(groups)
    t = tokens(40)
    run = started(w, t, 6)
    first = run.checkpoint()
    run.dispatch(t[6:9])
    run.advance()
    second = run.checkpoint()
    run.dispatch(fresh(5))
    run.advance()
    run.rollback(second)
    w.flush()
    run.dispatch(fresh(2))
    run.advance()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rollback(second.mark)  # used up
    run.rollback(first)
    w.flush()
    run.dispatch(t[6:9])
    run.advance()
    first, second = run.checkpoint(), run.checkpoint()  # at the same length
    run.dispatch(fresh(1))
    run.advance()
    run.rollback(first)
    w.flush()
    run.dispatch(t[9:12])
    run.advance()
    third = run.checkpoint()
    run.commit()
    for mark in (first, second):
        with w.unchanged(), pytest.raises(jkv.SequenceStateError):
            run.seq.rollback(mark.mark)
    run.dispatch(fresh(2))
    run.advance()
    run.rollback(third)  # at the committed length
    run.close()
    assert all(pool.private == 0 for pool in w.pools().values())
    assert w.hit(t) == 12


def test_f08_a_rollback_to_an_earlier_mark_ends_the_later_one():
    w = drafting("full recurrent")
    run = started(w, tokens(20), 6)
    first = run.checkpoint()
    run.dispatch(fresh(3))
    run.advance()
    second = run.checkpoint()
    assert w.pool("recurrent").private == 3
    run.rollback(first)
    assert w.pool("recurrent").private == 1
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rollback(second.mark)
    w.flush()


@pytest.mark.parametrize("groups", ["full recurrent", "full"])
def test_f08_commits_end_a_mark(groups):
    w = drafting(groups)
    t = tokens(20)
    run = started(w, t, 6)
    mark = run.checkpoint()
    private = w.pools()["recurrent"].private if w.recurrent else 0
    run.dispatch(t[6:10])
    run.advance()
    later = run.checkpoint()
    run.commit(3)  # up to 9
    if w.recurrent:
        assert w.pool("recurrent").private == private
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rollback(mark.mark)
    run.dispatch(t[10:12])  # in flight, too: commits of older tokens end nothing later
    run.commit(1)
    run.rollback(later)
    w.flush()
    assert not w.recurrent or w.pool("recurrent").private == 1
    run.step(t[10:13], snapshot=True)
    run.close()
    assert w.hit(t) == 13


def test_f08_rolled_back_tokens_leave_no_snapshots():
    w = drafting()
    t = tokens(30)
    run = started(w, t, 6)
    mark = run.checkpoint()
    wrong = fresh(4)
    run.dispatch(wrong[:3])
    run.advance(snapshot=True)
    run.dispatch(wrong[3:])
    run.rollback(mark)
    assert w.pool("recurrent").private == 1
    run.step(t[6:9], snapshot=False)
    run.dispatch(t[9:10])
    run.close()
    assert w.hit(t) == 0  # the state after 9 of other tokens would be wrong
    assert w.hit(join(t[:6], wrong)) == 0


def test_f08_no_slot_for_a_mark():
    w = drafting("full recurrent", pages={"full": 16, "recurrent": 2}, max_sequences=2, max_drafts=0)
    a, b = started(w, tokens(20), 6), started(w, tokens(20, "b"), 6)
    with w.unchanged():
        assert a.checkpoint() is None
    b.close()  # leaves a snapshot, which may go
    mark = a.checkpoint()
    assert mark is not None
    assert w.probe(join(tokens(6, "b"), fresh())).tokens == 0
    a.dispatch(fresh(3))
    a.rollback(mark)
    w.flush()


@pytest.mark.parametrize("groups", ["full window:8 recurrent", "full"])
def test_f08_a_mark_survives_a_suspension(groups):
    w = drafting(groups)
    t = tokens(30)
    run = started(w, t, 6)
    mark = run.checkpoint()
    run.dispatch(fresh(3))
    run.advance()
    run.suspend()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rollback(mark.mark)
    others = [started(w, tokens(9, key), 7) for key in "ab"]
    others[0].close()
    assert run.resume()
    run.rollback(mark)
    w.flush()
    run.step(t[6:9], snapshot=True)
    mark = run.checkpoint()
    run.close()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rollback(mark.mark)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.checkpoint()
    assert w.hit(join(t[:9], fresh())) == 9
    others[1].close()
    assert all(pool.private == 0 for pool in w.pools().values())


def test_f08_marks_are_of_one_sequence():
    w = drafting("full recurrent")
    a, b = started(w, tokens(20), 6), started(w, tokens(20, "b"), 6)
    mark = a.checkpoint()
    for wrong in (mark.mark, None, 6):
        with w.unchanged(), pytest.raises(jkv.CacheError):
            b.seq.rollback(wrong)
    a.rollback(mark)
    w.flush()


def test_f08_no_checkpoint_of_a_state_that_a_step_is_changing():
    w = drafting("full recurrent")
    run = started(w, tokens(20), 6)
    run.dispatch(tokens(9)[6:])
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.checkpoint()
    run.commit()


def test_f08_back_after_the_end():
    """The live state is the tree's; the mark's copy takes over, and the tree's stays what it was."""
    w = drafting("full recurrent")
    t = tokens(30)
    run = started(w, t, 6)
    mark = run.checkpoint()
    run.stop_committing()
    assert w.probe(join(t[:6], fresh())).tokens == 6
    run.dispatch(fresh(3))
    run.advance()
    run.rollback(mark)
    w.flush()
    assert w.hit(join(t[:6], fresh())) == 6
    again = run.checkpoint()
    run.rollback(again)  # nothing happened since
    w.flush()
    run.dispatch(t[6:9])
    run.advance()
    w.flush()
    run.close()
    assert w.hit(t) == 6


def test_f08_back_to_where_the_live_state_is_lent():
    w = drafting("full recurrent")
    t = tokens(30)
    run = started(w, t, 6)
    run.stop_committing()
    mark = run.checkpoint()
    run.rollback(mark)
    w.flush()
    assert w.hit(join(t[:6], fresh())) == 6
    mark = run.checkpoint()
    run.dispatch(fresh(2))
    run.rollback(mark)
    run.dispatch(t[6:8])
    run.advance()
    w.flush()
    assert w.hit(join(t[:6], fresh())) == 6


@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
def test_f08_a_rollback_that_lacks_its_window(groups):
    """All groups or none. Without commits to come, window pages leave as length grows."""
    w = drafting(groups)
    t = tokens(60)
    run = started(w, t, 6)
    run.stop_committing()
    mark = run.checkpoint()
    run.dispatch(t[6:8])
    run.advance()
    run.rollback(mark)  # [0, 6) is still there
    mark = run.checkpoint()
    run.dispatch(t[6:30])
    run.advance()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rollback(mark.mark)
    w.flush()
    run.close()
    assert w.hit(t) == 6


def test_f08_a_long_chunk_does_not_take_a_marks_window():
    w = drafting(window_scratch=jkv.WindowScratch(), max_drafts=0)
    t = tokens(60)
    run = started(w, t, 6)
    for n in (9, 20):
        mark = run.checkpoint()
        run.dispatch(fresh(30))
        run.advance()
        run.rollback(mark)
        w.flush()
        run.dispatch(t[run.seq.length :][:n])
        run.advance()
    w.flush()
    run.commit(snapshot=True)
    run.close()
    assert w.hit(t) == 35


def test_f08_marks_beside_verify_steps():
    w = drafting()
    t = tokens(60)
    run = started(w, t)
    mark = run.checkpoint()
    run.draft(guesses(t, 5, 1))
    run.accept(1)
    run.draft(fresh(3))
    run.rollback(mark)  # that step is forgotten
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.accept(0)
    w.flush()
    mark = run.checkpoint()
    run.draft(fresh(3))
    run.draft(fresh(3), accepted=2)
    run.rollback(mark)
    for right in (2, 0, 1):
        run.draft(guesses(t, run.seq.length, right))
        run.accept(right)
    mark = run.checkpoint()  # of an accepted candidate, before the next plan
    run.draft(fresh(3))
    run.accept(2)
    run.rollback(mark)
    w.flush()
    run.commit(snapshot=True)
    run.close()
    assert w.hit(t) == 11


# ------------------------------------------------------------------------------------------------ rewind


def test_f08_a_state_cannot_be_rewound():
    w = drafting()
    t = tokens(30)
    run = started(w, t, 12)
    run.draft(guesses(t, 12, 2))
    run.accept(2)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rewind(1)
    w.flush()


@pytest.mark.parametrize("groups", PLAIN)
def test_f08_rewound_drafts(groups):
    w = drafting(groups)
    t = tokens(40)
    run = started(w, t, 12)
    rejected = fresh(2)
    run.dispatch(join(t[12:14], rejected))
    run.advance(snapshot=True)
    run.rewind(2)
    w.flush()
    run.step(t[14:15], snapshot=True)
    run.close()
    assert w.probe(join(t[:14], rejected)).raw_tokens == 14
    assert w.hit(t) == 15


@pytest.mark.parametrize("reported", [False, True])
def test_f08_stopping_with_drafts_in_the_last_page(reported):
    """The tree has this tail, without its window page: taking it over must not lose the tokens behind it."""
    w = drafting("full window:8", pages={"full": 16, "window:8": 4})
    t = tokens(8)
    w.turn(t[:1])
    w.start(tokens(16, "other")).dispatch(tokens(16, "other"))  # takes the tail's window page
    w.close_all()
    assert (w.pool("full").tree, w.pool("window:8").tree) == (1, 0)
    run = w.start(t[:1], max_reuse=0).prefill()
    run.dispatch(t[1:3])
    if reported:
        run.advance()
    run.stop_committing()
    if not reported:
        run.advance()
    w.flush()
    run.dispatch(t[3:8])
    run.advance()
    w.flush()
    run.close()
    assert w.hit(t) == 1


# ------------------------------------------------------------------------------------------------ everything at once


@pytest.mark.parametrize(
    ("groups", "config"),
    [
        ("full window:5 recurrent", {"pages": {"full": 40, "window:5": 24, "recurrent": 8}}),
        ("recurrent", {"pages": 5, "page_size": 5}),
        ("full window:6 recurrent", {"pages": 40, "window_scratch": jkv.WindowScratch(8)}),
    ],
)
def test_f08_random_traffic(groups, config):
    w = drafting(groups, max_sequences=4, **config)
    rng = np.random.default_rng(2)
    for _ in range(170):
        runs = [run for run in w.runs if run.seq.status == "active"]
        run = runs[rng.integers(len(runs))] if runs else None
        kind = rng.integers(12)
        if (kind < 2 or run is None) and len(w.runs) < 5:
            text = join(tokens(int(rng.integers(1, 30)), rng.integers(2)), tokens(64, rng.integers(4)))[:60]
            new = w.open(text)
            new.text, new.marks, new.last = text, [], 0
            new.resume()
        elif run is None:
            w.runs[rng.integers(len(w.runs))].close()
        elif kind == 2 and not run.verifying:
            run.suspend()
        elif kind == 3:
            idle = [run for run in w.runs if run.seq.status == "suspended"]
            if idle:
                idle[rng.integers(len(idle))].resume()
        elif kind == 4 and rng.integers(2):
            run.close()
        elif kind == 5 and not run.verifying:
            mark = run.checkpoint()
            if mark is not None:
                run.marks.append(mark)
        elif kind == 6 and run.marks:
            at = int(rng.integers(len(run.marks)))
            mark, run.marks = run.marks[at], run.marks[:at]
            if mark.length >= run.seq.committed:
                try:
                    run.rollback(mark)
                except jkv.SequenceStateError:
                    assert w.scratch is not None  # its window was held back
                    w.check()
        elif kind == 7 and not run.verifying and len(run.held) < 56:
            if run.reserve(4):
                w.prepare(run)
                run.write(run.text[len(run.held) :][:4])
                run.advance(snapshot=bool(rng.integers(2)))
        elif kind == 8:
            run.commit()
        else:
            while len(run.verifying) == 2 or (run.verifying and rng.integers(2)):
                run.accept(run.last if len(run.verifying) == 1 else run.before, snapshot=[None, True][rng.integers(2)])
            behind = run.last + 1 if run.verifying else 0
            at = len(run.held) + behind
            room = sum(len(step.tokens) for step in run.verifying) + 3
            if run.seq.length + room < 60 and run.reserve(room):
                w.prepare(run)
                right = int(rng.integers(3))
                run.verify(guesses(run.text, at, right), accepted=run.last if behind else None)
                run.before, run.last = run.last, right
    w.close_all()
    w.flush()
    assert all(pool.private == 0 for pool in w.pools().values())
    w.manager.clear()
    assert all(pool.free == pool.total for pool in w.pools().values())
