"""One more member of each kind of FAULTS.md, of our own making; the samples themselves are in test_f01 to test_f31."""

import pathlib

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv
from jkv.layout import HOST
from jkv.tiers.keys import page_digests, root_digest, tail_digest

HYBRID = "full window:8 recurrent"


def make_free(w, pool, pages):
    """Evicts until so many pages of a device pool are free."""
    w.manager._host.tree.make_free(w.manager._host.pools[pool], pages)
    w.flush()


# 1. State and attention disagree on the position.


@pytest.mark.parametrize("groups", ["full recurrent", HYBRID, "recurrent"])
def test_kind01_a_fork_leaves_the_state_of_its_own_length(groups):
    """Both end in the page in which they parted, at different lengths."""
    w = World(groups, page_size=8)
    t = tokens(16)
    a = w.start(t)
    a.step(t[:5])
    (b,) = a.fork(1)
    a.step(t[5:7], end=True)
    b.step(t[5:6], end=True)
    assert [w.hit(join(t[:n], fresh())) for n in range(4, 9)] == [0, 0, 6, 7, 7]
    w.close_all()
    assert [w.hit(join(t[:n], fresh())) for n in range(4, 9)] == [0, 0, 6, 7, 7]


def test_kind01_states_from_inside_a_chunk_are_where_they_were_asked_for():
    w = World(HYBRID, page_size=4)
    t = tokens(20)
    run = w.start(t)
    run.reserve(14)
    run.plan_snapshots([3, 6, 11])
    w.prepare(run)
    run.write(t[:14])
    run.commit(snapshot=False)
    hits = [w.hit(join(t[:n], fresh())) for n in range(2, 15)]
    assert hits == [max((p for p in (3, 6, 11) if p <= n and p <= 12), default=0) for n in range(2, 15)]


# 2. Reusable before, or without, being written.


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_kind02_an_import_that_never_came(groups):
    """Room was made for pages from elsewhere, and the sender died."""
    w = World(groups, page_size=4)
    run = w.open(tokens(12))
    assert run.resume() and run.seq.resize(12, 12)
    w.state, _ = w.manager.prepare(w.state, [run.seq])
    run.seq.close()
    w.runs.remove(run)
    w.check()
    assert w.probe(tokens(12)).raw_tokens == 0
    assert w.turn(tokens(12)).reused == 0


def test_kind02_the_part_of_a_step_that_was_not_reported():
    w = World("full window:8", page_size=4)
    run = w.start(tokens(12))
    run.dispatch(tokens(12))
    run.advance(5)  # the device was stopped after five of them
    run.commit()
    run.close()
    assert w.probe(tokens(12)).raw_tokens == 5
    assert w.hit(tokens(12)) == 5


# 3. Stale contents in a recycled slot.


@pytest.mark.parametrize("way", ["rollback", "accept", "epoch"])
def test_kind03_slots_of_marks_and_candidates_are_zero_for_the_next(way):
    w = World(HYBRID, pages={"full": 20, "window:8": 20, "recurrent": 4}, max_drafts=2)
    run = w.start()
    run.step(fresh(3))
    if way == "rollback":
        mark = run.checkpoint()
        run.dispatch(fresh(4))
        run.rollback(mark)
    elif way == "accept":
        run.draft(fresh(3))
        run.accept(1)  # its candidate is the live slot now, the old live one a candidate
    else:
        w.manager.new_epoch("other")
    run.close()
    others = [w.start(tokens(4, i)) for i in range(4)]
    for other in others:
        other.dispatch(tokens(1, other.seq.row))  # what it starts from is carried on, and would be found
        other.advance()
    w.flush()


# 4. Two owners or none.


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("groups", ["full", HYBRID, "window:5+3"])
def test_kind04_a_lent_tail_its_copies_and_its_drop(groups, order):
    w = World(groups, page_size=4, pages=24, max_length=40)
    a = w.start(tokens(10))
    a.step(tokens(10), end=True)
    b, c = a.fork(1)[0], w.start(join(tokens(10), fresh(3)))
    handle = a.seq.plan_drop()
    for run in (b, c, a):
        assert run.reserve(3)
    w.prepare(a, b, c)
    for run in (a, b, c):
        run.write(fresh(3))
        run.advance()
    runs = [a, b, c]
    runs[order[0]].close()
    handle.drop()
    w.check()
    for i in order[1:]:
        runs[i].close()
    w.manager.clear()
    assert all(pool.free == pool.total for pool in w.pools().values())


# 5. Holds, splits and pruning.


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_kind05_a_prefetch_holds_nothing(groups):
    w = World(groups, page_size=4, pages=8, host=24, max_length=32)
    w.turn(tokens(12), [8, 4], snapshot=True)
    for pool in range(len(w.manager._host.pools)):
        make_free(w, pool, 8)
    run = w.open(join(tokens(12), fresh(4)))
    assert run.prefetch("device")
    assert all(pool.evictable == pool.tree for _, _, pool in w.every_pool())
    w.turn(fresh(30))  # takes the room
    assert run.resume() and run.reused in (0, 12)
    run.close()


def test_kind05_a_commit_that_evicts_what_hangs_on_its_own_path():
    pages = {"full": 6, "recurrent": 3}
    w = World("full recurrent", page_size=4, pages=pages, max_length=24, max_sequences=1)
    t = tokens(8)
    w.turn(t, [4, 4], snapshot=True)
    for key in "abc":  # a branch at 8, which the next one's pages and states push out
        run = w.start(join(t, tokens(9, key)))
        run.prefill("stops", snapshot=True)
        assert run.seq.committed == 17
        run.close()


# 6. Writing what someone else reads.


def test_kind06_what_a_call_returned_is_the_callers():
    """Neither rows nor a Ragged, statistics nor matches are looked at again when the caller has written to them."""
    w = World("full", page_size=4, events=100)
    runs = [w.start(), w.start()]
    w.reserve(runs, 2)
    rows = w.prepare(*runs)
    rows[:] = 77
    for run in runs:
        run.write(fresh(2))
    w.commit(runs)
    w.reserve(runs, 2)
    assert w.prepare(*runs).tolist() == [run.seq.row for run in runs]
    w.advance(runs, [0, 0])
    batch = w.prepare_ragged(runs, [1, 2])
    batch.positions[:] = 5
    w.advance(runs, [0, 0])
    stats = w.manager.stats()
    stats.pools.clear()
    stats.tiers["device"].evicted.clear()
    match = w.manager.probe(runs[0].held)
    match.tier_tokens.clear()
    w.check()
    assert w.manager.stats().tiers["device"].evicted == {"full": 0}
    mine = np.array([9, 9, 9, 9], np.int32)
    run = w.start(mine)
    mine[:] = 1  # after open
    run.step([9, 9, 9, 9])
    assert w.hit([9, 9, 9, 9]) == 4


# 7. Check-then-use gaps.


@pytest.mark.parametrize("short", ["full", "window:8", "recurrent"])
def test_kind07_the_last_of_several_pools_has_no_room(short):
    """The others had room, and have it still."""
    pages = {"full": 40, "window:8": 40, "recurrent": 6}
    pages[short] = 5
    w = World(HYBRID, page_size=4, pages=pages, max_length=40)
    w.turn(tokens(6), snapshot=True)
    greedy = w.start()
    if short == "recurrent":
        while greedy.checkpoint() is not None:
            pass
    else:
        greedy.dispatch(fresh(20))
    run = w.open(join(tokens(6), fresh(4)))
    with w.unchanged():
        assert not run.seq.resume()
    greedy.close()
    assert run.resume()
    run.step(run.prompt[run.seq.length :])


# 8. Deadlock and livelock when full.


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_kind08_all_asleep_and_both_tiers_full(groups):
    """Whoever is resumed finishes, if need be once another was given up: never more than the others."""
    w = World(groups, page_size=4, pages=10, host=12, max_length=36, max_sequences=3)
    runs = []
    while not runs or runs[-1].seq.status == "suspended":
        run = w.open(max_reuse=0)
        if run.resume() and run.reserve(12):
            w.prepare(run)
            run.write(fresh(12))
            run.advance()
            run.suspend()
        runs.append(run)
    runs.pop().close()
    assert len(runs) > 2
    finished = 0
    while runs:
        run = runs.pop(0)
        while not run.resume():
            runs.pop().close()
        for _ in range(6):
            while not run.reserve(4):
                runs.pop().close()
            w.prepare(run)
            run.write(fresh(4))
            run.advance()
        run.close()
        finished += 1
    assert finished > 1


# 9. Hit rate that collapses silently on hybrids.


def test_kind09_a_conversation_among_one_shot_requests_keeps_its_deepest_state():
    w = World(HYBRID, page_size=4, pages={"full": 30, "window:8": 30, "recurrent": 5}, max_length=100)
    text, lost = tokens(90), []
    for turn in range(1, 11):
        run = w.turn(text[: 8 * turn], "stops", snapshot=None)
        lost.append(8 * (turn - 1) - run.reused)
        for _ in range(3):
            w.turn(fresh(5))
    assert max(lost) <= 4, lost


def test_kind09_every_lost_token_has_a_reason():
    w = World(HYBRID, page_size=4, pages={"full": 24, "window:8": 16, "recurrent": 4}, max_length=60)
    lost = {}
    for i in range(30):
        run = w.start(join(tokens(8, i % 3), tokens(4 + i % 5, i % 4)), max_reuse=100)
        match = run.seq.match
        if match.limited_by:
            lost[match.limited_by] = lost.get(match.limited_by, 0) + match.raw_tokens - match.tokens
        assert (match.raw_tokens == match.tokens) or match.limited_by
        run.prefill(snapshot=[None, True, False][i % 3])
        run.close()
    stats = w.manager.stats()
    assert dict(stats.lost_tokens) == lost and sum(stats.limited_by.values()) > 3


# 10. Window life cycle.


@pytest.mark.parametrize("window, sinks", [(2, 0), (3, 0), (5, 2)])
def test_kind10_a_hit_needs_its_window_and_no_more(window, sinks):
    """Window pages go one after the other; each time every prefix is looked up, against the rule as it is written."""
    group = f"window:{window}" + (f"+{sinks}" if sinks else "")
    w = World(f"full {group}", page_size=1, pages={"full": 40, group: 14}, max_length=40)
    t = tokens(13)
    w.turn(t)

    def rule(n):
        needed = [i for i in range(n) if i < sinks or i >= n + 1 - window]
        return all(node.pages[1][i] > 0 for i in needed)

    seen = set()
    for free in range(15):
        make_free(w, 1, free)
        (node,) = [node for node in w.manager._host.tree.nodes() if node.parent is not None] or [None]
        for n in range(1, 14):
            expected = max((m for m in range(n + 1) if m == 0 or (node and rule(m))), default=0)
            assert w.probe(t[:n]).tokens == expected
            seen.add((n, expected))
    assert {(13, 13), (13, 0)} <= seen and any(expected == 0 for n, expected in seen if n < 13)


def test_kind10_capacity_up_and_down_at_the_edge_of_a_window():
    w = World("full window:4", page_size=4, pages=20, max_length=60, window_scratch=jkv.WindowScratch(2))
    run = w.start()
    for length in range(0, 24, 3):
        private = [pool.private for pool in w.pools().values()]
        for more in (1, 9, 17, 4, 30):
            if run.reserve(more):
                assert run.seq.resize(run.seq.length)
        assert [pool.private for pool in w.pools().values()] == private
        run.step(fresh(3))
        assert run.seq.length == length + 3


# 11. Speculation.


@pytest.mark.parametrize("groups", ["full", "full window:8", HYBRID])
def test_kind11_rejected_drafts_beyond_a_page_boundary(groups):
    """The page that only rejected tokens reached is nobody's prefix, and what is computed there later is right."""
    w = World(groups, page_size=4, max_drafts=2)
    t = tokens(30)
    run = w.start(t)
    run.step(t[:3])
    wrong = join(t[:4], fresh(2))
    run.draft(wrong[3:])
    run.accept(0)
    run.commit()
    (copy,) = run.fork(1)
    for each, rest in ((run, t[4:10]), (copy, join(wrong[4:], fresh(4)))):
        each.step(rest, snapshot=True)
    run.close()
    assert w.probe(wrong).raw_tokens == 6, "the fork computed it itself"
    copy.close()
    assert w.hit(t[:10]) == 10 and w.hit(join(wrong, fresh())) in (0, 4, 6)


# 12. Lower tiers.


def test_kind12_nothing_lies_where_what_comes_before_it_is_gone(tmp_path):
    w = World(HYBRID, page_size=2, pages=14, host=9, max_length=28, store=jkv.StoreTier(tmp_path))
    for i in range(40):
        w.turn(join(tokens(4, i % 2), tokens(4, i % 5), tokens(6, i % 7)), "stops", snapshot=bool(i % 3))
        for node in w.manager._host.tree.nodes():
            if node.size:
                places = node.pages[0][: w.manager._host.tree.num_pages(node)]
                assert (places > 0).all(), "a hole in full attention"
                cold = (places >= HOST).nonzero()[0]
                assert not len(cold) or (cold[-1] - cold[0] + 1 == len(cold) and cold[-1] == len(places) - 1)
                assert not len(cold) or all(
                    (child.pages[0][: w.manager._host.tree.num_pages(child)] >= HOST).all()
                    for child in node.children.values()
                )
        w.flush()


def test_kind12_another_process_takes_away_what_was_promised(tmp_path):
    w = World("full", page_size=4, pages=8, max_length=32, store=jkv.StoreTier(tmp_path))
    w.turn(tokens(16))
    w.restart()
    other = World("full", page_size=4, pages=8, max_length=32, store=jkv.StoreTier(tmp_path))
    run = w.open(tokens(16))
    assert w.probe(tokens(16)).tokens == 16
    files = sorted(path for path in pathlib.Path(tmp_path).rglob("full/*") if path.is_file())
    assert len(files) == 4
    other.manager._store.resize(1)  # removes all
    other.settle()
    w.faulty = ("store",)
    assert run.arrive() and run.reused == 0
    run.prefill()
    run.close()
    assert w.hit(tokens(16)) == 16


# 13. Identity.


def test_kind13_digests_are_of_all_that_came_before():
    root, t = root_digest("m"), tokens(12)
    pages = page_digests(root, t, 4)
    assert page_digests(pages[0], t[4:], 4) == pages[1:]
    assert len({*pages, *page_digests(root, t[4:], 4), *page_digests(root_digest("m", None, 0, 0), t, 4)}) == 8
    assert tail_digest(pages[0], t[4:7]) != tail_digest(root, t[4:7])
    assert page_digests(root, join(t[:4], t[:4]), 4)[0] != page_digests(root, join(t[:4], t[:4]), 4)[1]


def test_kind13_equal_pages_in_other_places_are_never_taken_for_one_another(tmp_path):
    w = World("full", page_size=4, pages=12, host=8, max_length=40, store=jkv.StoreTier(tmp_path))
    page = tokens(4)
    w.turn(join(page, page, page, page))
    w.restart()
    assert w.hit(join(page, fresh())) == 4
    assert w.hit(join(fresh(4), page)) == 0
    assert w.hit(join(page, page, fresh(4), page)) == 8


# 14. Geometry and quotas.


def test_kind14_a_store_too_small_for_one_value(tmp_path):
    w = World("full recurrent", page_size=4, pages=8, host=4, max_length=32, store=jkv.StoreTier(tmp_path, bytes=60))
    for i in range(6):
        w.turn(tokens(12, i), snapshot=True)
        w.flush()
        w.settle()
    stats = w.manager.stats().tiers["store"]
    assert stats.skipped > 0 and stats.bytes <= 60 and not stats.failures


def test_kind14_slots_of_drafts_are_not_for_snapshots():
    w = World("full recurrent", pages={"full": 40, "recurrent": 5}, max_drafts=3, max_sequences=4)
    assert w.pool("recurrent").total == 5
    for i in range(8):
        w.turn(tokens(8, i), [4, 4], snapshot=True)
    pool = w.pool("recurrent")
    assert pool.tree <= 5 and pool.free + pool.tree == 5


# 15. Stats and events that lie.


def test_kind15_what_is_taken_adds_up_over_resets_and_epochs():
    w = World(HYBRID, page_size=4, pages=12, host=8, max_length=32)
    taken = []
    for i in range(12):
        w.turn(tokens(10, i % 4), [8, 2], snapshot=True)
        if i % 5 == 2:
            w.reset()
        if i % 5 == 4:
            w.manager.new_epoch(str(i))
        taken.append(w.manager.take_stats())
    stats = w.manager.stats()
    for name in ("lookups", "hits", "reused_tokens", "looked_up_tokens", "snapshots_taken", "snapshots_evicted"):
        assert sum(getattr(each, name) for each in taken) == getattr(stats, name), name
    for name, count in stats.evicted_pages.items():
        assert sum(each.evicted_pages[name] for each in taken) == count


def test_kind15_events_of_two_lives_are_one_story(tmp_path):
    w = World(HYBRID, page_size=4, pages=12, host=8, max_length=32, store=jkv.StoreTier(tmp_path), events=1000)
    known, last = {}, -1
    for i in range(10):
        w.turn(tokens(10, i % 4), [8, 2], snapshot=True)
        if i % 4 == 1:
            w.reset()
        w.flush()
        w.settle()
        for event in w.manager.take_events():
            assert event.id == last + 1
            last = event.id
            if event.kind == "cleared":
                known.clear()
            elif event.kind == "removed":
                del known[event.group, event.digest]
            else:
                known[event.group, event.digest] = event.tier
    cleared, *now = w.manager.take_events(replay=True)
    assert cleared.kind == "cleared"
    assert {(event.group, event.digest): event.tier for event in now} == known
