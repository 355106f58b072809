"""SPEC S26 to S42: recurrent states beside attention, and alone."""

import numpy as np
import pytest
from oracle import World, fresh, join, tokens


def hybrid(**config):
    return World("full recurrent", **{"page_size": 32, "max_length": 512, **config})


def test_s26_no_snapshot_no_reuse():
    w = hybrid()
    assert w.config.min_snapshot is True
    w.turn(tokens(64), snapshot=False, close=False)
    match = w.probe(join(tokens(64), fresh()))
    assert (match.tokens, match.attention_tokens, match.raw_tokens) == (0, 64, 64)
    assert match.limited_by == "recurrent"
    assert w.hit(join(tokens(64), fresh())) == 0
    assert w.manager.stats().lost_tokens["recurrent"] == 64


def test_s27_one_snapshot_per_commit_that_asks():
    w = hybrid()
    run = w.start(tokens(110))
    for n, snapshot, slots in ((20, True, 1), (30, True, 2), (10, False, 2), (40, True, 3), (10, False, 3)):
        run.step(run.prompt[run.seq.length :][:n], snapshot=snapshot)
        w.flush()
        pool = w.pool("recurrent")
        assert pool.tree + pool.private == slots + 1  # and the live one
    assert w.probe(tokens(110)).tokens == 50  # 100 lies in a page that is not full yet
    run.step(tokens(128)[110:], snapshot=False)
    assert w.manager.stats().snapshots_taken == 3
    for n, expected in ((19, 0), (20, 20), (49, 20), (50, 50), (99, 50), (100, 100), (128, 100)):
        assert w.hit(tokens(n)) == expected


def test_s28_two_writers_leave_both_snapshots():
    w = hybrid()
    w.turn(tokens(96))
    assert w.hit(tokens(96)) == 96
    assert w.turn(tokens(128), max_reuse=0).reused == 0
    assert w.hit(tokens(128)) == 128
    assert w.hit(tokens(96)) == 96


def test_s29_32_and_32():
    w = hybrid()
    w.turn(tokens(64), [32, 32])
    assert [w.hit(tokens(n)) for n in (32, 48, 64)] == [32, 32, 64]
    assert w.hit(join(tokens(64), tokens(32, "other"))) == 64


@pytest.mark.parametrize(("partial", "expected"), [(True, 80), (False, 32)])
def test_s30_32_and_48(partial, expected):
    w = hybrid(partial_reuse=partial)
    w.turn(tokens(80), [32, 48])
    assert [w.hit(tokens(n)) for n in (31, 48, 64, 80)] == [0, 32, 32, 80]
    assert w.hit(join(tokens(80), tokens(16, "other"))) == expected


@pytest.mark.parametrize(("partial", "expected"), [(False, 32), (True, 48)])
def test_s31_32_and_16(partial, expected):
    w = hybrid(partial_reuse=partial)
    w.turn(tokens(48), [32, 16])
    assert w.hit(join(tokens(48), tokens(16, "other"))) == expected
    assert w.hit(tokens(48)) == 48


@pytest.mark.parametrize("own", [32, 40])
@pytest.mark.parametrize("snapshot", [None, True])
def test_s32_a_branch_point_gets_a_snapshot(own, snapshot):
    w = hybrid()
    w.turn(tokens(96))
    second = w.start(join(tokens(64), tokens(own, "second")))
    assert (second.seq.match.attention_tokens, second.reused) == (64, 0)
    assert 64 in second.seq.snapshot_points
    second.prefill([64, 32, own - 32], snapshot=snapshot).close()
    assert w.hit(join(tokens(64), tokens(32, "third"))) == 64


def test_s33_snapshots_per_position_not_per_page():
    w = hybrid()
    assert [w.turn(tokens(n)).reused for n in (10, 20, 25)] == [0, 10, 20]
    assert w.hit(tokens(25)) == 25
    assert w.hit(join(tokens(15), tokens(9, "fork"))) == 10
    assert w.hit(join(tokens(25), tokens(9, "fork"))) >= 20
    assert w.hit(tokens(10)) == 10
    assert w.hit(tokens(20)) == 20


def test_s34_a_turn_that_fills_the_page():
    w = hybrid(partial_reuse=True)
    w.turn(tokens(48))
    assert w.turn(tokens(96)).reused == 48
    assert w.hit(tokens(48)) == 48
    assert w.hit(tokens(96)) == 96


def test_s35_end_moves_tail_and_state_into_the_tree():
    w = hybrid()
    w.scribble()
    run = w.start(tokens(48))
    run.dispatch(tokens(48))
    pages, slot = w.table(run, "full").tolist(), w.slot(run)
    run.commit(48, end=True)
    assert (w.pool("full").tree, w.pool("full").private) == (2, 0)
    assert (w.pool("recurrent").tree, w.pool("recurrent").private) == (1, 0)
    assert w.flush() == {}
    assert (w.table(run, "full").tolist(), w.slot(run)) == (pages, slot)
    other = w.start(join(tokens(48), fresh()))
    copied = w.flush()
    assert {group: len(changed) for group, changed in copied.items()} == {"full": 1, "recurrent": 1}
    assert w.table(other, "full")[0] == pages[0]
    assert np.array_equal(w.bytes["full.0", "k"][pages[1]], w.bytes["full.0", "k"][w.table(other, "full")[1]])
    w.close_all()
    assert w.hit(tokens(48)) == 48


def test_s36_the_same_prompt_again():
    w = hybrid(page_size=4)
    first = w.start(tokens(8))
    assert list(first.seq.snapshot_points) == [4]
    first.prefill("stops").close()
    again = w.start(tokens(8))
    assert again.reused == 4
    again.prefill("stops").close()
    assert w.hit(tokens(8)) == 8


def test_s37_one_state_copy_and_ten_steps():
    w = hybrid()
    w.turn(tokens(32))
    w.scribble()
    first = w.start(fresh(3))
    w.prepare(first)  # the oracle: the live state is zero
    assert w.slot(first) > 0
    first.close()
    w.scribble()

    run = w.start(tokens(33))
    assert run.reused == 32
    assert w.flush() == {"recurrent": [w.slot(run)]}
    for at in range(32, 42):
        run.step(tokens(42)[at : at + 1])
    run.close()
    assert w.hit(tokens(42)) == 42
    assert w.hit(join(tokens(32), fresh())) == 32


def test_s38_a_suspended_live_slot_stays():
    w = hybrid()
    run = w.start(tokens(40)).prefill([10, 30], snapshot=False)
    w.flush()
    slot = w.slot(run)
    run.suspend()
    for key in range(5):
        w.turn(tokens(20, f"other {key}"))
    w.flush()
    assert run.resume()
    assert w.flush() == {}
    assert w.slot(run) == slot
    run.step(tokens(50)[40:])


def test_s38_one_live_slot_per_sequence():
    w = hybrid(max_sequences=2)
    runs = []
    for count in range(1, 6):
        runs.append(w.start())
        assert runs[-1].seq.capacity == 0
        assert w.pool("recurrent").private == count
        runs[-1].suspend()
        assert w.pool("recurrent").private == count
    for run in runs:
        assert run.resume()
        w.prepare(run)
        assert w.pool("recurrent").private == len(runs)
        run.suspend()
    w.close_all()
    assert w.pool("recurrent").private == 0


@pytest.mark.parametrize("groups", ["recurrent", "full recurrent"])
def test_s39_a_suspended_sequence_loses_its_snapshots_and_goes_on(groups):
    pages = {"recurrent": 4} if groups == "recurrent" else {"full": 64, "recurrent": 4}
    w = World(groups, page_size=32, pages=pages, max_sequences=2)
    a = w.start(tokens(96))
    for at in (0, 32):
        a.step(tokens(96)[at : at + 32], snapshot=True)
    assert w.probe(tokens(64)).tokens == 64
    a.suspend()
    for key in range(100):
        w.turn(tokens(8, f"other {key}"))
    match = w.probe(tokens(64))
    assert match.tokens < 64
    if groups != "recurrent":
        assert (match.attention_tokens, match.limited_by) == (64, "recurrent")
    assert a.resume()
    a.step(tokens(96)[64:], snapshot=True)
    assert w.probe(tokens(96)).tokens == 96
    a.close()
    assert w.hit(tokens(96)) == 96


@pytest.mark.parametrize("groups", ["recurrent", "full recurrent", "full window:8 recurrent"])
@pytest.mark.parametrize("parts", [(32, 32), (32, 16), (10, 10, 10), (5, 40, 7)])
def test_s40_a_commit_that_evicts_its_own_older_snapshot(groups, parts):
    pages = {group: 2 if group == "recurrent" else 16 for group in groups.split()}
    w = World(groups, page_size=32, pages=pages, max_sequences=1)
    run = w.start(tokens(100))
    at = 0
    for n in parts:
        run.step(tokens(100)[at : at + n], snapshot=True)
        at += n
    w.flush()
    run.step(tokens(100)[at:], snapshot=False)
    run.close()
    assert w.hit(tokens(100)) == 100


def test_s40_the_newest_snapshot_survives():
    w = hybrid(pages={"full": 16, "recurrent": 2}, max_sequences=1)
    run = w.start(tokens(64)).prefill([32, 32], snapshot=True)
    w.flush()
    assert [w.probe(tokens(n)).tokens for n in (32, 64)] == [0, 64]
    assert w.manager.stats().snapshots_evicted == 1
    assert w.manager.stats().snapshots_taken == 2
    run.close()
    assert w.hit(tokens(64)) == 64


def test_s41_no_slot_for_a_snapshot():
    w = hybrid(pages={"full": 16, "recurrent": 2}, max_sequences=2)
    a, b = w.start(tokens(64)), w.start(tokens(8, "b"))
    a.step(tokens(32), snapshot=True)
    stats = w.manager.stats()
    assert (stats.snapshots_taken, stats.snapshots_skipped) == (0, 1)
    match = w.probe(tokens(32))
    assert (match.tokens, match.attention_tokens, match.limited_by) == (0, 32, "recurrent")
    b.close()
    assert w.hit(tokens(32)) == 0
    a.step(tokens(64)[32:], snapshot=True)
    assert w.manager.stats().snapshots_taken == 1
    assert w.probe(tokens(64)).tokens == 64
    assert w.probe(tokens(63)).tokens == 0
    a.close()
    assert w.hit(tokens(64)) == 64


def test_s41_the_last_state_is_kept_without_a_slot():
    w = hybrid(pages={"full": 16, "recurrent": 1}, max_sequences=1)
    w.turn(tokens(40))  # the snapshot finds no slot, the live state goes to the tree
    assert w.manager.stats().snapshots_skipped == 1
    assert w.hit(tokens(40)) == 40
    assert w.turn(tokens(50)).reused == 40
    assert w.hit(tokens(50)) == 50


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("close", [True, False])
def test_s42_no_state_at_a_page_boundary_inside_a_chunk(partial, close):
    w = hybrid(page_size=8, partial_reuse=partial)
    w.turn(tokens(12), [6, 6], close=close)
    for n in range(1, 13):
        hit = w.hit(tokens(n))
        assert hit in (0, 6, 12)
        if close and partial:
            assert hit == 6 * (n // 6)
    expected = {(True, True): 12, (False, True): 0, (True, False): 6, (False, False): 0}[partial, close]
    assert w.hit(join(tokens(12), fresh())) == expected
