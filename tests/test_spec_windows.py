"""SPEC S12 to S25: partial pages and several endpoints, windows and sinks (S23 and S24 need window_scratch)."""

import numpy as np
import pytest
from oracle import World, fresh, join, stale_pages, tokens

import jkv


def several_endpoints(**config):
    return World("full window:16", page_size=32, min_snapshot=True, **config)


def test_s12_a_base_and_then_more():
    w = several_endpoints()
    w.turn(tokens(80))
    assert w.turn(tokens(160)).reused == 80
    assert w.hit(join(tokens(80), fresh())) == 80
    assert w.hit(tokens(160)) == 160


def test_s13_the_other_order():
    w = several_endpoints()
    w.turn(tokens(160))
    w.turn(tokens(80))
    assert w.hit(join(tokens(80), fresh())) == 80
    assert w.hit(tokens(160)) == 160


@pytest.mark.parametrize("order", ["base first", "base last"])
@pytest.mark.parametrize("key", ["same", "other"])
def test_s14_then_a_turn_of_88(order, key):
    w = several_endpoints()
    for n in (80, 160) if order == "base first" else (160, 80):
        w.turn(tokens(n))
    prompt = tokens(88) if key == "same" else join(tokens(80), tokens(8, key))
    assert w.turn(prompt).reused == 80
    for _ in range(3):
        assert w.hit(tokens(80)) == 80
        assert w.hit(join(tokens(80), fresh())) == 80
        assert w.hit(prompt) == 88
        assert w.hit(join(prompt, fresh())) == 88
    assert w.hit(tokens(160)) == 160


def test_s15_a_window_of_one_needs_no_history():
    w = World("full window:1", page_size=32, min_snapshot=True)
    w.turn(tokens(80))
    w.turn(tokens(96))
    assert w.probe(tokens(96)).tokens == 96
    assert w.hit(tokens(96)) == 96


def test_s15_in_one_sequence():
    w = World("full window:1", page_size=32, min_snapshot=True)
    w.turn(tokens(96), [80, 16])
    assert w.hit(tokens(96)) == 96
    assert w.hit(tokens(80)) == 80


def test_s16_a_backoff_into_a_page_that_left_the_window():
    w = World("full window:33", page_size=32, min_snapshot=True, reuse_backoff=1)
    w.turn(tokens(48))
    w.turn(tokens(96))
    assert w.probe(tokens(96)).tokens == 48
    assert w.hit(tokens(96)) == 48


def test_s17_backoff():
    w = World("full", page_size=8, reuse_backoff=3)
    w.turn(tokens(32))
    assert w.hit(tokens(32)) == 29
    assert w.hit(tokens(2)) == 0
    assert w.hit(tokens(3)) == 0
    assert w.hit(tokens(4)) == 1
    run = w.open(tokens(32), max_reuse=32)
    assert run.seq.match == w.probe(tokens(32))
    assert run.resume()
    assert run.seq.length == 29
    w.prepare(run)
    assert w.start(tokens(32)).reused == 29


def test_s18_stale_pages_at_every_length():
    groups = "window:1 window:4 window:5+3 window:8+1 window:16+6"
    w = World(groups)
    run = w.start()
    for length in range(1, 41):
        run.step(tokens(40)[length - 1 : length])
        w.flush()
        for group in groups.split():
            window, _, sinks = group.removeprefix("window:").partition("+")
            stale = range(*stale_pages(length, int(window), int(sinks or 0), 4))
            null = np.flatnonzero(w.table(run, group) == 0).tolist()
            assert null == list(stale), f"{group} at {length}"


def test_s18_a_window_of_w_needs_one_token_less_of_history():
    w = World("full window:5", min_snapshot=True)
    w.turn(tokens(12))  # at 12 the history is [8, 12): page 2 alone
    assert w.pool("window:5").tree == 1
    assert w.hit(tokens(12)) == 12
    w = World("full window:6", min_snapshot=True)
    w.turn(tokens(12))
    assert w.pool("window:6").tree == 2
    assert w.hit(tokens(12)) == 12


def test_s19_min_snapshot_keeps_the_last_window_only():
    w = World("full window:64", page_size=32, min_snapshot=True)
    w.turn(tokens(128))
    assert w.pool("window:64").tree == 2
    assert w.pool("full").tree == 4
    assert w.hit(tokens(128)) == 128
    assert w.hit(tokens(96)) == 0
    assert w.probe(tokens(96)).limited_by == "window:64"


def test_s20_live_window_pages_have_a_bound():
    bounds = {"window:32": 2, "window:64": 3, "window:64+40": 3 + 2}
    w = World(" ".join(bounds), page_size=32, min_snapshot=True)
    run = w.start()
    most = dict.fromkeys(bounds, 0)
    at = 0
    while at < 250:
        n = 1 if 120 <= at < 170 else 1 + at % 7
        run.step(tokens(256)[at : at + n])
        at += n
        w.flush()
        for group in bounds:
            live = np.count_nonzero(w.table(run, group))
            assert w.pool(group).tree + w.pool(group).private == live  # nothing else is kept
            most[group] = max(most[group], live)
    assert most == bounds


def test_s21_sinks():
    w = World("window:128+1 window:128+48", page_size=32, max_length=768)
    run = w.start(tokens(704)).prefill([256, 256, 192])
    w.flush()
    assert np.flatnonzero(w.table(run, "window:128+1") == 0).tolist() == list(range(1, 18))
    run.close()
    other = w.start(tokens(512, "other")).prefill([512])
    w.flush()
    assert np.flatnonzero(w.table(other, "window:128+48") == 0).tolist() == list(range(2, 12))
    other.close()
    assert w.hit(tokens(704)) == 704
    assert w.hit(tokens(512, "other")) == 512


def test_s21_sinks_without_a_window():
    with pytest.raises(jkv.ConfigError, match="sinks=4"):
        jkv.AttentionLayer(jkv.kv_buffers(1, 8), sinks=4)


def test_s22_a_lost_window_page():
    w = World("full window:4", min_snapshot=True)
    w.turn(tokens(12), [4, 8])  # endpoints at 4 and 12 need window pages 0 and 2
    assert w.pool("window:4").tree == 2
    match = w.probe(join(tokens(8), tokens(5, "other")))
    assert (match.tokens, match.attention_tokens, match.raw_tokens) == (4, 4, 8)
    assert match.limited_by == "window:4"
    assert w.hit(join(tokens(8), tokens(5, "other"))) == 4
    assert w.hit(tokens(8)) == 4
    assert w.hit(tokens(12)) == 12
    assert w.manager.stats().lost_tokens["window:4"] >= 4


@pytest.mark.parametrize("groups", ["full window:4 window:16", "window:4 window:16"])
def test_s25_the_hit_is_the_minimum_over_windows(groups):
    w = World(groups, page_size=2, min_snapshot=True)
    w.turn(tokens(10))
    assert w.pool("window:4").tree == 2  # [7, 10) and no more
    match = w.probe(join(tokens(8), fresh()))
    assert (match.tokens, match.raw_tokens, match.limited_by) == (0, 8, "window:4")
    assert w.hit(join(tokens(8), fresh())) == 0
    assert w.hit(tokens(10)) == 10


@pytest.mark.parametrize("groups", ["full window:4 window:16", "window:4 window:16"])
def test_s25_with_room_the_small_window_loses_nothing(groups):
    w = World(groups, page_size=2, min_snapshot=False)
    w.turn(tokens(10))
    assert w.hit(join(tokens(8), fresh())) == 8
