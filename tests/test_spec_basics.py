"""SPEC S1 to S11: what a sequence holds, what it reuses, what happens without room."""

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv


@pytest.mark.parametrize("groups", ["full", "full window:8 recurrent"])
def test_s01_a_new_sequence_is_suspended_and_holds_nothing(groups):
    w = World(groups)
    w.turn(tokens(12)).close()
    before = w.pools()

    run = w.open(join(tokens(12), fresh()))
    assert run.seq.status == jkv.Status.SUSPENDED == "suspended"
    assert run.seq.row is None
    assert (run.seq.committed, run.seq.length, run.seq.capacity) == (0, 0, 0)
    assert w.pools() == before
    assert (w.manager.stats().active, w.manager.stats().suspended) == (0, 1)
    assert run.seq.match.tokens == 12  # provisional: what a resume would find now

    assert run.resume()
    assert run.seq.committed == run.seq.length == run.seq.match.tokens == 12 <= run.seq.capacity
    assert run.seq.status == jkv.Status.ACTIVE == "active"
    assert (w.manager.stats().active, w.manager.stats().suspended) == (1, 0)
    w.prepare(run)


def test_s01_the_first_resume_matches_again():
    w = World("full")
    run = w.open(join(tokens(12), fresh()))
    assert run.seq.match.tokens == 0
    w.turn(tokens(12))
    assert run.resume()
    assert run.seq.length == run.seq.match.tokens == 12
    w.prepare(run)
    assert (w.manager.stats().lookups, w.manager.stats().hits) == (2, 1)  # counted at resume, not at open


@pytest.mark.parametrize(("partial", "expected"), [(False, 8), (True, 9)])
def test_s02_the_first_9_of_12(partial, expected):
    w = World("full", partial_reuse=partial)
    w.turn(tokens(12))
    assert w.hit(tokens(9)) == expected


@pytest.mark.parametrize(("partial", "expected"), [(False, 8), (True, 11)])
def test_s03_the_default_cap(partial, expected):
    w = World("full", partial_reuse=partial)
    w.turn(tokens(12))
    run = w.start(tokens(12))
    assert run.reused == expected
    run.prefill().close()
    assert w.hit(tokens(12)) == 12


def test_s04_full_and_a_window_with_a_sink():
    w = World("full window:128+1", page_size=32, max_length=768)
    run = w.start(tokens(256)).prefill()
    for at in range(256, 704, 64):
        run.step(tokens(704)[at : at + 64])
    run.close()
    assert w.hit(tokens(345)) == 345


@pytest.mark.parametrize("groups", ["full", "full recurrent", "full window:8 recurrent"])
def test_s05_the_first_resume_makes_private_copies_once(groups):
    w = World(groups, page_size=8)
    w.scribble()
    a = w.turn(tokens(16), [12, 4], close=False)
    w.flush()
    page = {group: int(w.table(a, group)[1]) for group in w.tables}

    b = w.start(join(tokens(12), tokens(20, "b")))
    assert b.reused == 12
    copied = w.flush()
    assert {group: len(pages) for group, pages in copied.items()} == dict.fromkeys(groups.split(), 1)
    for group in w.tables:
        assert w.table(a, group)[1] == page[group] != w.table(b, group)[1] == copied[group][0]

    b.suspend()
    assert b.resume()
    assert w.flush() == {}
    b.prefill([3, 5, 12])  # the oracle reads A's pages and state after each of these steps
    b.suspend()
    assert b.resume()
    assert w.flush() == {}
    a.step(tokens(20)[16:])
    w.close_all()
    assert w.hit(tokens(20)) == 20
    assert w.hit(join(tokens(12), tokens(20, "b"))) == 32


def test_s06_a_thousand_tokens_come_back_and_all_pages_are_evictable():
    w = World("full", page_size=16, max_length=1024, pages=64)
    w.turn(tokens(1000))
    assert w.hit(tokens(1000)) == 1000
    pool = w.pool("full")
    assert pool.private == 0
    assert pool.evictable == pool.tree == 63
    run = w.start(tokens(1023, "other"))  # all 64 pages
    run.prefill().close()
    assert w.hit(tokens(1023, "other")) == 1023


def test_s07_capacity_shrinks_page_by_page():
    w = World("full", pages=6)
    run = w.start(tokens(6)).prefill()
    assert run.seq.resize(22)
    w.flush()
    assert np.count_nonzero(w.tables["full"][run.seq.row]) == 6
    for capacity, pages in ((22, 6), (20, 5), (17, 5), (16, 4), (9, 3), (8, 2), (6, 2)):
        assert run.seq.resize(capacity)
        assert run.seq.capacity == capacity
        w.check()
        assert w.pool("full").free == 6 - pages
        w.flush()
        assert np.count_nonzero(w.tables["full"][run.seq.row]) == pages
    other = w.start(tokens(16, "other"))
    assert other.reserve(16)  # every page that was given back, at once
    assert w.pool("full").free == 0
    w.prepare(other)
    other.write(tokens(16, "other"))
    other.commit()
    assert run.reserve(2)
    w.prepare(run)
    run.write(tokens(8)[6:])
    run.commit()


def test_s07_shrinking_frees_what_was_reserved_in_every_group():
    w = World("full window:8 recurrent")
    run = w.start(tokens(6)).prefill()
    before = w.pools()
    assert run.reserve(30)
    assert run.seq.resize(6)
    w.check()
    assert w.pools() == before
    w.flush()


def test_s08_clear_with_open_sequences():
    w = World("full", page_size=16)
    w.turn(tokens(64))
    first, second = w.start(tokens(64)), w.start(tokens(10, "other")).prefill()
    before = w.manager.stats()
    with pytest.raises(jkv.SequenceStateError, match="2"):
        w.manager.clear()
    w.check()
    assert w.manager.stats() == before
    assert w.probe(tokens(64)).tokens == 64
    first.close()
    first.seq.close()
    first.close()
    with pytest.raises(jkv.SequenceStateError, match="1"):
        w.manager.clear()
    second.close()
    second.close()
    assert w.hit(tokens(64)) == 64
    w.manager.clear()
    w.check()
    assert w.probe(tokens(64)).tokens == 0
    assert w.pool("full").free == w.pool("full").total
    w.turn(tokens(64))
    assert w.hit(tokens(64)) == 64


@pytest.mark.parametrize(("capacity", "length"), [(20, 5), (20, 0), (5, None), (0, None), (10, 12), (6, 7)])
def test_s09_resize_to_an_impossible_length(capacity, length):
    w = World("full")
    run = w.start(tokens(6)).prefill()
    assert run.reserve(3)
    before = w.manager.stats()
    with pytest.raises(jkv.CacheError, match=str(capacity if length is None else length)):
        run.seq.resize(capacity, length)
    w.check()
    assert (run.seq.committed, run.seq.length, run.seq.capacity) == (6, 6, 9)
    assert w.manager.stats() == before
    run.dispatch(tokens(9)[6:])
    run.commit()


def test_s09_resize_may_grow_the_length():
    w = World("full")
    run = w.start(tokens(6)).prefill()
    run.dispatch(tokens(9)[6:])
    assert run.seq.resize(12, 9)
    run.held, run.flight = run.written, run.flight[:0]
    assert (run.seq.committed, run.seq.length, run.seq.capacity) == (6, 9, 12)
    w.prepare(run)
    run.write(tokens(12)[9:])
    run.commit()
    run.close()
    assert w.hit(tokens(12)) == 12


def unchanged(w, run, action):
    """`action` returns False, and nothing about the manager or `run` is different."""
    before = w.manager.stats(), run.seq.status, run.seq.row, run.seq.committed, run.seq.length, run.seq.capacity
    assert action() is False
    w.check()
    after = w.manager.stats(), run.seq.status, run.seq.row, run.seq.committed, run.seq.length, run.seq.capacity
    assert after == before


@pytest.mark.parametrize("groups", ["full recurrent", "full window:8 recurrent"])
def test_s10_no_room_leaves_everything_as_it_was(groups):
    pages = {group: 5 if group == "recurrent" else 8 for group in groups.split()}
    w = World(groups, pages=pages, max_sequences=2, max_length=32, max_utilization_for_resume=1.0)
    w.scribble()
    w.turn(tokens(6))
    a = w.start(tokens(8, "a")).prefill()
    w.flush()
    prompt = join(tokens(6), tokens(3, "c"))
    c = w.start(prompt)  # its private copies are pending while the others are refused
    assert c.reused == 6

    unchanged(w, a, lambda: a.seq.reserve(20))
    unchanged(w, a, lambda: a.seq.resize(28, 8))
    unchanged(w, c, lambda: c.seq.reserve(26))
    b = w.open(join(tokens(6), tokens(3, "b")))
    unchanged(w, b, lambda: b.seq.resume())  # both rows are taken

    copied = w.flush()
    assert {group: len(pages) for group, pages in copied.items()} == dict.fromkeys(groups.split(), 1)
    c.prefill()
    a.close()
    assert b.resume()
    b.prefill()
    w.close_all()
    assert w.hit(prompt) == 9


def test_s10_a_resume_without_a_page_for_its_copy():
    w = World("full", pages=4, max_sequences=3, max_length=16, max_utilization_for_resume=1.0)
    a = w.start(tokens(8)).prefill()
    c = w.start(tokens(8, "c")).prefill()
    w.flush()
    tables = w.tables["full"].copy()
    b = w.open(join(tokens(6), tokens(2, "b")))
    unchanged(w, b, lambda: b.seq.resume())
    assert w.flush() == {}
    assert np.array_equal(w.tables["full"], tables)
    c.close()
    assert b.resume()
    assert b.reused == 6
    b.prefill()
    a.step(tokens(12)[8:])


def test_s10_what_could_never_fit_raises():
    w = World("full recurrent", pages={"full": 4, "recurrent": 4}, max_length=32)
    run = w.start(tokens(6)).prefill()
    before = w.manager.stats()
    with pytest.raises(jkv.OutOfPagesError, match=r"5.*4|4.*5"):
        run.seq.reserve(11)
    with pytest.raises(jkv.OutOfPagesError, match="32"):
        run.seq.reserve(27)  # beyond max_length
    w.check()
    assert w.manager.stats() == before
    assert run.reserve(10)


@pytest.mark.parametrize("groups", ["full", "full window:16 recurrent"])
def test_s11_the_second_commit_takes_over_the_first_ones_pages(groups):
    w = World(groups)
    a, b = w.start(tokens(8)), w.start(tokens(8))
    assert a.reserve(8) and b.reserve(8)
    w.prepare(a, b)
    for group in w.tables:
        assert not set(w.table(a, group)) & set(w.table(b, group))
    a.write(tokens(8))
    b.write(tokens(8))
    a.commit()
    assert (w.pool("full").tree, w.pool("full").private) == (2, 2)
    b.commit()
    for group in w.tables:
        assert (w.pool(group).tree, w.pool(group).private, w.pool(group).free) == (2, 0, 62)
    w.flush()
    for group in w.tables:
        assert w.table(a, group).tolist() == w.table(b, group).tolist()
    a.step(tokens(5, "a"))
    b.step(tokens(6, "b"))
    w.close_all()
    assert w.hit(join(tokens(8), tokens(5, "a"))) == 13
    assert w.hit(join(tokens(8), tokens(6, "b"))) == 14


def test_s11_in_a_prefix_of_a_longer_commit():
    w = World("full", page_size=4)
    a, b = w.start(tokens(14)), w.start(join(tokens(8), tokens(6, "b")))
    for run in (a, b):
        assert run.reserve(14)
    w.prepare(a, b)
    a.write(a.prompt)
    b.write(b.prompt)
    b.commit()
    a.commit()
    assert (w.pool("full").tree, w.pool("full").private) == (4, 2)  # 2 shared, 1 + 1 own; a partial page each
    w.flush()
    assert w.table(a, "full")[:2].tolist() == w.table(b, "full")[:2].tolist()
    w.close_all()
    assert w.hit(a.prompt) == 14
    assert w.hit(b.prompt) == 14
