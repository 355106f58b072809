"""Faults that reviews of jkv found, as they were replayed: each of these served wrong bytes, leaked, or raised."""

import numpy as np
import pytest
from oracle import World, fresh, image, join, tokens

import jkv


def test_after_end_writing_on_needs_a_reserve():
    """The lent state would be overwritten: capacity falls to length, and the next reserve makes the copies."""
    w = World("full recurrent", pages=64)
    t = tokens(12)
    a = w.start(t)
    assert a.reserve(12)
    w.prepare(a)
    a.write(t[:5])
    a.commit(end=True)
    assert a.seq.capacity == 5
    w.prepare(a)
    with pytest.raises(jkv.SequenceStateError, match="4 tokens at length 5"):
        a.seq.advance(4)
    a.dispatch(t[5:9])  # reserves
    a.advance()
    b = w.start(join(t[:5], [1]))
    assert b.reused == 5
    w.prepare(b)  # verifies the state that b got


def test_a_state_is_not_lent_to_a_page_of_another():
    """Another's cached page holds our partial page: eviction there must not take the live state."""
    w = World("full recurrent", pages={"full": 6, "recurrent": 4}, max_length=24, max_sequences=4)
    t = tokens(8)
    w.turn(t)
    c = w.start(t[:6], max_reuse=0)
    c.prefill([6], end=True)
    d = w.start(tokens(20, "d"), max_reuse=0)
    d.dispatch(tokens(16, "d"))
    assert not c.reserve(3)
    d.close()
    assert c.reserve(1)
    c.close()


def test_a_tail_that_its_window_has_left_can_be_taken_back():
    w = World("full window:2", pages={"full": 4, "window:2": 8}, max_length=32, shared=False)
    t = tokens(16)
    a = w.start(t)
    assert a.reserve(16)
    w.prepare(a)
    a.write(t[:12])
    a.advance()
    a.commit(6, end=True)  # the window is at 12: the tail's window page is nobody's
    a.reserve(1)
    w.check()


def test_shrinking_does_not_land_a_step_in_flight():
    w = World("full recurrent", pages=64)
    t = tokens(12)
    a = w.start(t)
    a.step(t[:4])
    a.dispatch(t[4:8])
    a.seq.resize(4)
    w.state, _ = w.manager.prepare(w.state, [a.seq])
    a.seq.close()  # the live state is at 8, not at 4
    w.runs.remove(a)
    w.fetch()
    assert w.start(join(t[:4], [1])).reused == 0


def test_a_stopped_sequence_takes_no_snapshots():
    w = World("full recurrent", pages={"full": 16, "recurrent": 6}, max_sequences=2)
    t = tokens(20)
    a = w.start(t)
    a.step(t[:4], end=True)
    for i in range(4, 10):
        a.dispatch(t[i : i + 1])
        a.advance(snapshot=True)
    assert w.pool("recurrent").private == 1


def test_pages_that_a_late_commit_would_free_are_no_reason_to_give_up():
    w = World("full window:4", pages={"full": 16, "window:4": 2}, max_length=40, shared=False)
    t = tokens(40)
    a = w.start(t[:4])
    a.step(t[:4])
    for i in range(4, 12):
        if not a.seq.reserve(1):  # False, not OutOfPagesError: commits come later here
            a.commit(a.seq.length - a.seq.committed)
        a.dispatch(t[i : i + 1])
        a.advance()


def test_a_window_of_one_with_sinks_needs_its_sinks():
    w = World("full window:1+6", pages={"full": 32, "window:1+6": 4}, max_length=64, shared=False)
    t = tokens(14)
    w.turn(t)
    x = w.start(fresh(14))
    x.dispatch(x.prompt)  # takes the sink pages of the first
    x.close()
    assert w.probe(join(t, [1])).tokens == 0
    w.start(t[:7], max_reuse=0).prefill().close()
    assert w.probe(t[:7]).tokens == 7


def test_what_was_rewound_is_not_committed_without_a_step():
    w = World("full", pages=16)
    t = tokens(16)
    a = w.start(t)
    a.dispatch(t[:4])
    a.advance()
    a.rewind(4)
    with pytest.raises(jkv.SequenceStateError):
        a.seq.commit(t[8:12])


def test_removed_children_leave_nothing_behind():
    w = World("full window:8", pages=8, max_length=32, partial_reuse=False)
    keeper = w.start(fresh(5)).prefill()
    for _ in range(30):
        w.turn(fresh(4))
    (root,) = w.manager._host.tree.roots.values()
    assert len(root.stale_heads) <= len(root.children)
    keeper.close()


def test_a_low_priority_continuation_does_not_inherit():
    w = World("full", pages=16, max_length=64)
    a, b, c = tokens(4), join(tokens(4), tokens(28, "b")), tokens(28, "c")
    w.turn(a, priority=5)
    w.turn(b, priority=0)
    w.turn(c, priority=3)
    w.turn(tokens(16, "d"), priority=1)  # needs four pages, one is free
    assert w.probe(c).tokens == 28
    assert w.probe(b).tokens < 32


def test_evicted_pages_count_in_every_pool():
    w = World(
        "full window:40 recurrent", pages={"full": 8, "window:40": 64, "recurrent": 40}, max_length=64, shared=False
    )
    for _ in range(6):
        w.turn(fresh(16), [8, 8])
    stats = w.manager.stats()
    assert stats.snapshots_evicted == stats.evicted_pages["recurrent"] > 0
    assert stats.evicted_pages["window:40"] > 0


def test_another_managers_sequence_is_refused_whatever_its_row():
    config = jkv.CacheConfig({"a": jkv.AttentionLayer(jkv.kv_buffers(1, 4))}, 1, 16, tiers=(jkv.DeviceTier(pages=4),))
    ours = jkv.CacheManager(config)
    theirs = World("full", pages=16, max_sequences=4)
    runs = [theirs.start(tokens(4)) for _ in range(3)]
    state = ours.init()
    for run in runs:
        with pytest.raises(jkv.SequenceStateError, match="another manager"):
            ours.prepare(state, [run.seq])
    for wrong in (None, 5, runs[0].seq):
        with pytest.raises(jkv.ConfigError, match="sequence"):
            ours.prepare(state, wrong)


@pytest.mark.parametrize(
    "argument", [{"softcap": 0.0}, {"softcap": "x"}, {"scale": np.ones(3, np.float32)}, {"scale": "x"}]
)
def test_scale_and_softcap_are_numbers(argument):
    config = jkv.CacheConfig(
        {"a": jkv.AttentionLayer(jkv.kv_buffers(1, 4, np.float32))}, 1, 16, tiers=(jkv.DeviceTier(pages=4),)
    )
    state = jkv.CacheManager(config).init()
    with pytest.raises(jkv.ConfigError, match=next(iter(argument))):
        jkv.attend(state, "a", np.array([0]), np.array([[0]]), np.ones((1, 1, 1, 4), np.float32), **argument)


@pytest.mark.parametrize("report", ["advance", "advance 0", "commit", "reserve"])
def test_a_batch_verb_frees_planned_snapshots_that_the_step_does_not_reach(report):
    """The slot stayed pending, and the commit that reached its position published what no step had written."""
    w = World("full recurrent", max_length=64, pages=32)
    t = tokens(40)
    run = w.start(t[:5], max_reuse=0).prefill(snapshot=False)
    assert run.reserve(8)
    run.seq.plan_snapshots([9])
    if report == "reserve":
        assert w.manager.reserve([run.seq], 1) == 1
    else:
        w.prepare(run)
        if report == "advance 0":
            w.manager.advance([run.seq], 0)
        else:
            run.write(t[5:7])
            if report == "advance":
                w.advance([run], [2])
            else:
                w.commit([run], [2])
    run.step(t[len(run.held) : 14], snapshot=False)
    assert w.hit(join(t[:9], fresh(3))) == 0


@pytest.mark.parametrize(
    "counts", [2**63 - 1, 10**30, [2**63 - 1] * 2, np.full(2, 2**64 - 1, np.uint64), [[1], [1, 2]]]
)
def test_counts_beyond_int32_are_refused(counts):
    """They wrapped around, down to lengths below 0 and a crash in NumPy."""
    w = World("full", max_length=64, pages=32)
    runs = [w.start(tokens(5, key), max_reuse=0).prefill() for key in "ab"]
    seqs = [run.seq for run in runs]
    with w.unchanged():
        for call in (w.manager.reserve, w.manager.advance, lambda s, n: w.manager.commit(s, [7], n)):
            with pytest.raises(jkv.ConfigError):
                call(seqs, counts)
        with pytest.raises(jkv.ConfigError):
            w.manager.prepare_ragged(w.state, seqs, counts, pad_tokens=8, pad_sequences=2)


def test_a_length_that_something_else_wrote_has_its_window_with_scratch():
    """Only the window of the capacity had pages."""
    w = World("full window:8", max_length=128, pages=64, window_scratch=jkv.WindowScratch(0))
    run = w.start()
    assert run.seq.resize(64, length=32)
    w.manager.check()
    assert run.seq.length == 32


def test_what_is_not_a_sequence_is_refused_after_a_batch_of_one():
    """Comparing it with the last batch raised NumPy's error."""
    w = World("full", pages=32)
    w.prepare(w.start(tokens(5)))
    with pytest.raises(jkv.ConfigError, match="ndarray"):
        w.manager.prepare(w.state, [np.zeros(2)])


def test_window_scratch_is_a_bool():
    w = World("full window:8", pages=64, window_scratch=jkv.WindowScratch(0))
    run = w.start()
    with pytest.raises(jkv.ConfigError, match="off"):
        run.seq.window_scratch = "off"
    run.close()
    with pytest.raises(jkv.SequenceStateError, match="closed"):
        run.seq.window_scratch = False


def test_a_tail_that_gets_copies_gets_only_what_its_endpoint_needs():
    """A window of one needs no history: its page had no use, and was neither freed nor queued."""
    w = World(
        "full window:1 window:8", max_length=64, min_snapshot=True, pages={"full": 64, "window:1": 40, "window:8": 6}
    )
    t = tokens(6)
    b, a = w.start(t, max_reuse=0), w.start(t, max_reuse=0)
    b.prefill(snapshot=True)
    a.prefill()
    a.commit(end=True)
    a.close()
    b.dispatch(fresh())
    b.advance()
    c = w.start(tokens(8, "c"))
    for n in (8, 12, 16):
        c.reserve(n)
    c.close()
    b.stop_committing()
    w.flush()


# --- tiers -------------------------------------------------------------------------------------------------------


def test_room_for_what_comes_from_the_store_is_not_what_goes_there(tmp_path):
    """b is read into the pages that a is evicted from, while a's way to the store is only planned."""
    w = World("full", pages=8, host=4, store=jkv.StoreTier(tmp_path), max_length=32, max_sequences=2)
    w.turn(tokens(16, "b"))
    w.restart()
    w.turn(tokens(16, "a"))
    x = w.start(fresh())
    x.dispatch(fresh(31))
    x.advance()
    w.flush()
    x.close()
    w.flush()
    w.settle()
    assert w.probe(tokens(16, "a")).tier_tokens == {"host": 16}
    b = w.open(join(tokens(16, "b"), [7]))
    assert b.arrive() and b.reused == 16
    w.flush()
    w.settle()
    b.close()
    w.restart(killed=True)
    a = w.open(join(tokens(16, "a"), [9]))
    assert a.arrive() and a.reused == 16
    w.prepare(a)  # verifies what the store gave


@pytest.fixture
def lost(monkeypatch):
    """A world whose prompt "a" is kept by the suspended sequence `a`, and was lost on its way to host memory."""
    from jkv.tiers import host

    w = World("full", pages=8, host=12, max_length=32, max_sequences=2)
    w.faulty, w.waits = ("host",), False
    a = w.start(tokens(17, "a"))
    a.dispatch(tokens(17, "a")[:16])
    a.commit()
    a.suspend()

    def fails(*_):
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(host, "_gather", fails)
        x = w.start(fresh())
        x.dispatch(fresh(31))
        x.advance()
        w.flush()
        w.manager._memory.wait()
    x.close()
    w.flush()
    assert w.manager._memory.lost
    return w, a


def serves(w, prompt, reused):
    """A lookup reuses that much, every byte of it right."""
    run = w.start(prompt)
    assert run.reused == reused
    w.flush()
    run.close()


def test_nobody_else_gets_what_was_lost_while_a_sequence_keeps_it(lost):
    w, a = lost
    serves(w, join(tokens(16, "a"), [5]), 0)
    for operation in (a.seq.resume, lambda: a.seq.prefetch("device")):
        with pytest.raises(jkv.SequenceStateError, match="was lost on its way"):
            operation()
    w.start(fresh(3)).close()
    a.close()
    serves(w, join(tokens(16, "a"), [5]), 0)


def test_what_was_lost_can_be_computed_again(lost):
    w, a = lost
    b = w.start(tokens(16, "a"), max_reuse=0)
    b.prefill()
    w.flush()
    b.close()
    a.close()
    serves(w, join(tokens(16, "a"), [5]), 16)


def test_prefetch_does_not_rank_an_endpoint_that_its_own_room_cost():
    pages = {"window:8": 3, "recurrent": 2}
    host = (("window:8", 3), ("recurrent", 4))
    w = World("window:8 recurrent", pages=pages, host=host, max_length=12, max_sequences=1)
    w.turn(tokens(10, "a"), snapshot=False)
    w.flush()
    w.turn(tokens(10, "b"), max_reuse=0, snapshot=False)
    w.flush()
    run = w.open(join(tokens(10, "a"), [1]))
    run.seq.prefetch("device")
    w.check()
    run.close()
    for i in range(8):
        w.turn(tokens(12, 100 + i), max_reuse=0)


def test_s43_counts_a_suspended_sequences_own_pages_once():
    w = World("full", pages=200, host=100, max_length=1000, max_sequences=2)
    b = w.start(tokens(9, "b")).prefill()
    b.suspend()
    a = w.start(fresh())
    a.dispatch(fresh(195 * 4))
    a.advance()
    w.flush()
    assert not b.resume()  # 195 of 200 pages are stuck without b's own: more than 0.97


def test_whole_pages_alone_where_the_store_knows_more_than_the_tree(tmp_path):
    """The tree's branch left the prompt inside a page, beyond which the store had the prompt's own."""
    w = World("full", page_size=4, pages=5, host=4, max_length=16, partial_reuse=False, store=jkv.StoreTier(tmp_path))
    prompt = tokens(12)
    w.turn(prompt)
    for i in range(5):
        w.turn(tokens(16, i))
    w.flush()
    w.settle()
    assert w.probe(prompt).tier_tokens == {"store": 12}
    w.turn(join(prompt[:6], fresh(6)), max_reuse=0)
    host = w.manager._host
    hit = host.tree.match(host.root(jkv.Scope()), prompt, 12, known=12)  # without what is read from the store
    assert (hit.match.tokens, hit.match.raw_tokens) == (4, 12)
    run = w.open(prompt, max_reuse=12)
    run.arrive()
    assert run.reused == 12


def test_found_two_private_copies_of_one_page_and_no_room():
    """The counters promised a page that eviction could not find."""
    w = World("window:1+6 window:6", pages=10, max_length=30, page_size=3, min_snapshot=True)
    a = w.start([1, 2, 0, 0, 0, 2, 0, 0, 0, 2, 2, 1])
    a.step([1, 2, 0, 0, 0, 2])
    a.close()
    b = w.start([1, 2, 1, 1, 0, 2, 2])
    c = w.start([1, 2, 1, 2, 2, 0, 2, 2, 1, 1])
    assert (b.reused, c.reused) == (2, 2)
    b.reserve(5)
    c.reserve(19)
    w.prepare(b, c)
    w.close_all()
    w.turn([0] * 30)


def test_found_attention_tokens_are_no_fewer_than_tokens():
    """The hit lay on a shorter branch than the one that attention_tokens was counted on."""
    w = World("full window:5 recurrent", page_size=3, pages=40)
    a = [2, 1, 0, 2, 2, 0, 2, 1, 0, 1, 2, 1]
    w.turn(a, [7, 5], close=False)
    b = [2, 1, 0, 2, 2, 0, 2, 0, 2, 2, 0, 0, 1]
    assert w.turn(b, snapshot=None, close=False).reused == 7
    match = w.probe([*b[:12], 2, 0])
    assert (match.raw_tokens, match.limited_by) == (12, "window:5")
    assert match.tokens == 7
    assert match.attention_tokens >= 7


def test_found_a_lent_state_whose_page_is_evicted():
    """b's lent state hung on a page that only a, closed, had: evicting the page gave the slot away under b."""
    w = World("full recurrent", pages={"full": 12, "recurrent": 5}, max_length=40)
    text = [2, 1, 2, 0, 1, 2, 2, 0, 1, 0, 1, 1, 0, 2, 0, 2]
    a = w.start(text)
    a.step(text[:12], snapshot=True)
    a.close()
    b = w.start(text[:6], max_reuse=3)
    b.step(text[:4])
    b.dispatch(text[4:6])
    b.commit(end=True)
    x = w.start([0, 0], max_reuse=0)
    x.dispatch([0] * 14)
    x.advance()
    assert x.reserve(23) in (True, False)
    w.flush()  # b's state is still b's
    b.close()
    x.close()
    w.turn([0] * 40)


def test_found_an_end_that_hands_over_a_state_in_a_full_pool():
    """The state went to the tree, and the node that it went to was gone."""
    w = World("recurrent", page_size=5, pages=4, max_length=40, max_sequences=3)
    a = w.start([0] * 30, max_reuse=0)
    a.step([0, 0], snapshot=True)
    a.close()
    b = w.start([0, 0, 1, 2, 1, 1, 2, 1, 1, 1, 2])
    b.step([1, 2, 1, 1, 2, 1, 1, 1], snapshot=True)
    b.close()
    c = w.start([0, 0])
    w.start([0, 0, 2, 1, 2, 1], max_reuse=0)
    w.start([0, 2, 1, 1], max_reuse=0)
    c.dispatch([0, 0])
    c.commit(end=True)
    w.flush()
    w.close_all()
    assert w.hit([0, 0, 3]) in (0, 2)


def test_found_candidates_of_a_step_that_is_over_in_a_smaller_pool():
    """The next plan showed a slot that the pool has no more: nothing in use had moved, so nothing was renamed."""
    pages = {"full": 16, "window:6": 16, "recurrent": 6}
    w = World("full window:6 recurrent", pages=pages, max_length=40, max_drafts=2)
    w.resize_tier("device", pages={group: n + 3 for group, n in pages.items()})
    first, *_ = [w.start() for _ in range(3)]
    for _ in range(3):
        assert first.checkpoint() is not None
    run = w.start(tokens(9))
    assert run.seq._slot > pages["recurrent"]  # one of those that are to go
    run.dispatch(tokens(9))
    run.close()
    w.resize_tier("device", pages=pages)
    first.draft(fresh(3))
    first.accept(1)
    w.flush()


def test_found_a_batch_commit_of_content_to_a_page_that_fills():
    """Sequences that do more than arithmetic took the symbols of their images for ids, after others had committed."""
    w = World("full", pages=20)
    runs = [w.start(), w.start()]
    assert w.reserve(runs, 6) == 2
    w.prepare(*runs)
    for i, run in enumerate(runs):
        run.write(join(tokens(2, i), [image(1, i)], tokens(3, i)))
    w.commit(runs)
    assert [run.seq.committed for run in runs] == [6, 6]
    w.close_all()
    assert w.hit(join(tokens(2, 0), [image(1, 0)], tokens(3, 0))) == 6
    assert w.hit(join(tokens(2, 0), [image(1, 1)], tokens(3, 0))) == 2
