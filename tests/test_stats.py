"""SPEC S52 to S54: what the counters count; per request, since the last look, and in total."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv
from jkv.stats import GroupStats, Work, since


def pages(stats, group="full"):
    """(allocated, copied, reused whole, reused in part, missed)."""
    return dataclasses.astuple(stats.groups[group])[:5]


def test_s52_pages_allocated_missed_and_reused():
    w = World("full", page_size=4)
    run = w.start(tokens(8))
    run.step(run.prompt)
    assert pages(w.manager.stats()) == (2, 0, 0, 0, 2)
    run.step(fresh(4))
    assert pages(w.manager.stats()) == (3, 0, 0, 0, 2)
    assert pages(run.seq.stats) == (3, 0, 0, 0, 2)
    run.close()

    w = World("full", page_size=4)
    w.turn(tokens(12))
    before = w.manager.stats()
    run = w.start(tokens(9), max_reuse=9)
    assert pages(run.seq.stats) == (1, 1, 2, 1, 0)
    assert pages(since(w.manager.stats(), before)) == (1, 1, 2, 1, 0)
    run.close()
    assert pages(run.seq.stats) == (1, 1, 2, 1, 0)
    assert pages(since(w.manager.stats(), before)) == (1, 1, 2, 1, 0)


@pytest.mark.parametrize(
    ("seed", "length", "expected"),
    [(0, 48, (1, 0, 0, 48, 0, 0)), (32, 48, (1, 1, 32, 16, 1, 0)), (48, 64, (1, 1, 48, 16, 0, 1))],
)
def test_s53_lookup_counters(seed, length, expected):
    w = World("full recurrent", page_size=32)
    if seed:
        w.turn(tokens(seed))
    w.manager.take_stats()
    run = w.start(tokens(length), max_reuse=length)
    for stats in (run.seq.stats, w.manager.stats() if not seed else w.manager.take_stats()):
        counts = (stats.lookups, stats.hits, stats.reused_tokens, stats.unreused_tokens)
        assert (*counts, stats.aligned_snapshots, stats.unaligned_snapshots) == expected


def test_s54_what_is_done_again_is_apart():
    w = World("full recurrent", page_size=4)
    w.turn(tokens(16))
    before = w.manager.stats()
    w.turn(join(tokens(16), fresh(4)), retry=True)
    after = w.manager.stats()
    assert after.retried.lookups == after.retried.hits == 1
    assert (after.retried.reused_tokens, after.retried.unreused_tokens) == (16, 4)
    assert after.retried.groups["full"].reused_whole == 4
    assert after.retried.snapshots_taken > 0
    for field in dataclasses.fields(before.retried):
        assert getattr(after, field.name) == getattr(before, field.name)


def test_windows_reuse_their_live_pages_alone():
    w = World("full window:8", page_size=4)
    w.turn(tokens(32))
    stats = w.start(join(tokens(32), fresh())).seq.stats
    assert pages(stats, "full") == (0, 0, 8, 0, 1)
    assert pages(stats, "window:8") == (0, 0, 2, 0, 1)


def test_why_a_match_was_short():
    w = World("full recurrent", page_size=4)
    w.turn(tokens(16), snapshot=False, close=False)
    run = w.start(join(tokens(16), fresh()))
    assert run.seq.stats.limited_by == {"recurrent": 1}
    assert run.seq.stats.lost_tokens == {"recurrent": 16}
    w.start(join(tokens(16), fresh()))
    assert w.manager.stats().limited_by == {"recurrent": 2}


def test_tokens_reused_by_tier():
    w = World("full", page_size=4, pages=8, host=32)
    w.turn(tokens(16))
    w.turn(tokens(32, "other"))  # the first goes down
    run = w.start(join(tokens(16), fresh()))
    assert run.seq.stats.tier_tokens == {"host": 16}
    run.close()
    run = w.start(join(tokens(16), fresh()))
    assert run.seq.stats.tier_tokens == {"device": 16}
    assert w.manager.stats().tier_tokens == {"host": 16, "device": 16}


def test_forks_count_their_own_copies():
    w = World("full recurrent", page_size=4)
    run = w.start(tokens(6))
    run.step(run.prompt)
    forks = run.fork(2)
    for fork in forks:
        assert pages(fork.seq.stats) == (1, 1, 0, 0, 0)
        assert pages(fork.seq.stats, "recurrent") == (1, 1, 0, 0, 0)
        assert fork.seq.stats.lookups == 0
    assert w.manager.stats().groups["full"].allocated == 2 + 2
    assert w.manager.stats().lookups == 1


def test_take_stats_gives_what_is_new_once():
    w = World("full recurrent", page_size=4, host=16)
    w.turn(tokens(16))
    total = w.manager.stats()
    first = w.manager.take_stats()
    assert (first.lookups, first.groups) == (1, total.groups)
    second = w.manager.take_stats()
    assert (second.lookups, second.reused_tokens, second.snapshots_taken) == (0, 0, 0)
    assert set(pages(second)) == {0}
    assert second.pools["full"].tree == first.pools["full"].tree == 4  # of now
    assert second.groups["full"].page_bytes == w.manager.layout.pools[0].page_bytes
    w.turn(join(tokens(16), fresh(4)))
    third = w.manager.take_stats()
    assert (third.lookups, third.hits, third.reused_tokens) == (1, 1, 16)
    assert w.manager.stats().lookups == 2


def test_takes_add_up_to_the_totals():
    w = World("full window:8 recurrent", page_size=4, pages=20, host=8)
    taken = []
    for i in range(12):
        w.turn(join(tokens(8 + 4 * (i % 3)), fresh(6)), retry=i % 4 == 3)
        taken.append(w.manager.take_stats())
    total = w.manager.stats()
    for name in ("lookups", "hits", "looked_up_tokens", "reused_tokens", "snapshots_taken", "snapshots_evicted"):
        assert sum(getattr(each, name) for each in taken) == getattr(total, name)
    for group in total.groups:
        assert np.array_equal(np.sum([pages(each, group) for each in taken], axis=0), pages(total, group))
    for tier in ("device", "host"):
        for counts in ("evicted", "offloaded", "onboarded", "dropped"):
            parts = [getattr(each.tiers[tier], counts) for each in taken]
            whole = getattr(total.tiers[tier], counts)
            assert {pool: sum(part[pool] for part in parts) for pool in whole} == whole
    assert sum(total.tiers["device"].evicted.values()) > 0


def test_peak_pages():
    w = World("full", page_size=4, pages=16)
    w.turn(tokens(24))
    assert w.manager.stats().pools["full"].peak == 6
    w.turn(tokens(8, "other"))
    assert w.manager.take_stats().pools["full"].peak == 6
    w.turn(tokens(8, "third"))
    assert w.manager.take_stats().pools["full"].peak == 2
    assert w.manager.stats().pools["full"].peak == 0


def test_a_reset_keeps_the_totals():
    w = World("full recurrent", page_size=4)
    w.turn(tokens(8))
    w.start(tokens(8)).step(fresh(1))
    before = w.manager.stats()
    w.reset()
    after = w.manager.stats()
    assert (after.lookups, after.groups) == (before.lookups, before.groups)
    assert after.lookups == 2


def test_since_takes_differences_of_totals_alone():
    before = {"a": 1, "group": GroupStats(1, 2, 3, 4, 5, 100)}
    now = {"a": 5, "group": GroupStats(2, 4, 6, 8, 10, 100), "new": 7}
    assert since(now, before) == {"a": 4, "group": GroupStats(1, 2, 3, 4, 5, 100), "new": 7}


def test_work_adds_up():
    one, two = Work(2), Work(2)
    for i, work in enumerate((one, two)):
        work.totals = [(i + 1) * n for n in range(len(work.totals))]
        work.pages = [(i + 1) * n for n in range(len(work.pages))]
    one.add(two)
    assert one.totals == [3 * n for n in range(len(one.totals))]
    assert one.pages == [3 * n for n in range(len(one.pages))]
    assert two.pages == [2 * n for n in range(len(two.pages))]


def test_what_is_given_out_is_the_callers():
    w = World("full recurrent", page_size=4, host=8)
    run = w.start(tokens(8))
    stats, mine, taken = w.manager.stats(), run.seq.stats, w.manager.take_stats()
    run.step(run.prompt)
    assert stats.groups["full"].allocated == mine.groups["full"].allocated == taken.groups["full"].allocated == 0
    for given in (stats, mine, taken):
        for field in dataclasses.fields(given):
            if isinstance(value := getattr(given, field.name), dict):
                value.clear()
    assert w.manager.stats().groups["full"].allocated == run.seq.stats.groups["full"].allocated == 2
    assert w.manager.take_stats().groups["full"].allocated == 2


def test_stats_can_be_exported():
    w = World("full recurrent", page_size=4, host=8, store=jkv.StoreTier("memory://"))
    w.turn(tokens(8))
    for stats in (w.manager.stats(), w.manager.take_stats(), w.manager.open().stats):
        exported = json.loads(json.dumps(dataclasses.asdict(stats)))
        assert exported["groups"]["full"]["missed"] == stats.groups["full"].missed
        assert pickle.loads(pickle.dumps(stats)) == stats
