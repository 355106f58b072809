"""SPEC S23 and S24, FAULTS F13: window scratch. Tokens that leave the window within a chunk get no pages.

What is in the window at capacity - max_rewind has pages: P=4, W=8, a chunk of 24 tokens.

    pages           0   1   2   3   4   5
    max_rewind=0    .   .   .   .   x   x       (24 + 1 - 8) // 4 = 4
    max_rewind=8    .   .   x   x   x   x       (16 + 1 - 8) // 4 = 2
"""

import numpy as np
import pytest
from oracle import World, fresh, join, make_config, tokens

import jkv


def scratch(groups="full window:8", max_rewind=0, **config):
    return World(groups, window_scratch=jkv.WindowScratch(max_rewind), **{"max_length": 64, **config})


def large(max_rewind=0):
    """SPEC's windows over pages of 32 tokens, all of them in one world."""
    groups = "full window:32 window:64 window:256"
    return scratch(groups, max_rewind, page_size=32, max_length=384, pages=24, max_sequences=2)


def shown(w, run, group):
    """The pages that the run's table shows on the device."""
    return np.flatnonzero(w.table(run, group)).tolist()


def free(w):
    return {name: pool.free for name, pool in w.pools().items()}


# ------------------------------------------------------------------------------------------------ the numbers


def test_s23_a_prompt_in_one_chunk():
    w = large()
    run = w.start(tokens(127)).prefill()
    w.flush()
    assert shown(w, run, "window:64") == [2, 3]
    assert (w.pool("window:64").tree, w.pool("window:64").private) == (1, 1)  # page 3 is the partial one
    run.close()
    assert w.pool("window:64").tree == 2
    longer = join(tokens(127), fresh(73))
    assert w.probe(longer).tokens == 127
    assert w.hit(longer) == 127
    assert w.start(longer).prefill().reused == 127


@pytest.mark.parametrize(
    ("max_rewind", "expected"),
    [
        (0, {"window:32": [7], "window:64": [6, 7], "window:256": list(range(8))}),
        (64, {"window:32": [5, 6, 7], "window:64": [4, 5, 6, 7], "window:256": list(range(8))}),
    ],
)
def test_s24_a_chunk_of_256(max_rewind, expected):
    w = large(max_rewind)
    before = free(w)
    run = w.start(tokens(352))
    for _ in range(2):  # going back and again
        assert run.reserve(256)
        w.flush()
        for group, pages in expected.items():
            assert shown(w, run, group) == pages, group
            assert w.pool(group).private == len(pages)
        assert shown(w, run, "full") == list(range(8))
        assert run.reserve(0)
        assert free(w) == before
        w.flush()
        assert all(shown(w, run, group) == [] for group in expected)
    run.step(tokens(256))
    run.close()
    assert w.hit(join(tokens(256), fresh())) == 256


def test_s24_then_to_352_at_length_256():
    w = large()
    run = w.start(tokens(352))
    run.step(tokens(256))
    w.flush()
    before = free(w)
    for _ in range(2):
        assert run.reserve(96)
        w.flush()
        assert shown(w, run, "window:64") == [6, 7, 9, 10]  # none for page 8
        assert shown(w, run, "window:32") == [7, 10]
        assert shown(w, run, "window:256") == list(range(11))
        assert run.reserve(0)
        assert free(w) == before
    run.step(tokens(352)[256:])
    w.flush()
    assert shown(w, run, "window:64") == [9, 10]
    run.close()
    assert w.hit(join(tokens(352), fresh())) == 352


@pytest.mark.parametrize("how", ["reserved", "prepared", "written"])
@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
def test_f13_put_off(how, groups):
    w = scratch(groups)
    run = w.start(tokens(40))
    before = free(w)
    assert run.reserve(12)
    if how != "reserved":
        w.prepare(run)
    if how == "written":
        run.write(tokens(12))
    assert run.seq.resize(0)
    w.check()
    assert free(w) == before
    if how != "reserved":
        run.advance(0)
    if how != "written" or "recurrent" not in groups:  # a state that a step has written stays written
        w.flush()
        run.prefill([33, 7])
    run.close()


def test_s24_sinks_have_pages():
    w = scratch("full window:8+6")
    run = w.start(tokens(60))
    assert run.reserve(40)
    w.flush()
    assert shown(w, run, "window:8+6") == [0, 1, 8, 9]  # 40 + 1 - 8 = 33
    run.step(tokens(40))
    run.step(tokens(60)[40:])
    w.flush()
    assert shown(w, run, "window:8+6") == [0, 1, 13, 14]
    run.close()
    assert w.hit(tokens(60)) == 60


def test_s24_a_chunk_within_the_sinks():
    w = scratch("full window:8+6")
    run = w.start(tokens(24)).prefill([3, 2, 19])
    run.close()
    assert w.hit(tokens(24)) == 24


# ------------------------------------------------------------------------------------------------ to and fro


def test_s24_a_smaller_chunk_gets_the_pages_that_it_needs():
    """The oracle checks after each flush that what the end of the chunk sees has pages."""
    w = scratch("full window:8 window:3", max_length=128)
    rng = np.random.default_rng(0)
    run = w.start(tokens(128))
    before = free(w)
    for at in (0, 13, 40, 77):
        if at > run.seq.length:
            run.step(tokens(128)[run.seq.length : at])
            w.flush()
            before = free(w)
        for _ in range(12):
            capacity = int(rng.integers(at, 129))
            assert run.seq.resize(capacity)
            w.check()
            w.flush()
        assert run.seq.resize(at)
        w.check()
        assert free(w) == before
    for capacity in (128, 100, 81, 97):
        assert run.seq.resize(capacity)
    w.prepare(run)
    run.write(tokens(97)[77:])
    run.commit()
    run.close()
    assert w.hit(tokens(97)) == 97


def test_s24_without_room_for_the_smaller_chunk_nothing_changes():
    """40 tokens need the window pages [8, 10), 38 need [7, 10)."""
    w = scratch(pages={"full": 64, "window:8": 4}, max_sequences=2)
    other = w.start(tokens(8, "other")).prefill()  # two window pages
    run = w.start(tokens(60))
    assert run.reserve(40)
    w.flush()
    with w.unchanged():
        assert not run.seq.resize(38)
    assert run.seq.resize(36)  # [7, 9)
    w.flush()
    other.close()
    assert run.seq.resize(38)
    w.prepare(run)
    run.write(tokens(38))
    run.commit()


@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
def test_s24_growing_a_chunk_in_flight(groups):
    """The step in flight ends where it was reserved to: that window stays."""
    w = scratch(groups)
    run = w.start(tokens(60))
    assert run.reserve(22)
    w.prepare(run)
    run.write(tokens(22))
    assert run.seq.resize(60)
    w.check()
    run.advance(22)
    w.flush()
    w.prepare(run)
    run.write(tokens(60)[22:])
    run.commit()
    run.close()
    assert w.hit(tokens(60)) == 60


@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
@pytest.mark.parametrize("verb", ["advance", "commit"])
def test_s24_shrinking_in_flight_does_not_bring_back_what_was_held_back(groups, verb):
    w = scratch(groups)
    run = w.start(tokens(60))
    assert run.reserve(40)
    w.prepare(run)
    run.write(tokens(22))  # [15, 22) went nowhere
    with pytest.raises(jkv.SequenceStateError):
        run.seq.resize(22)
        w.check()
        if verb == "advance":
            run.seq.advance(22)
        else:
            run.seq.commit(tokens(22))
    w.check()
    assert (run.seq.committed, run.seq.length) == (0, 0)
    run.advance(0)
    run.close()


# ------------------------------------------------------------------------------------------------ max_rewind


@pytest.mark.parametrize("verb", ["advance", "commit"])
@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
def test_s24_a_chunk_that_ends_early(verb, groups):
    w = scratch(groups, max_rewind=8)
    t = tokens(60)
    run = w.start(t)
    assert run.reserve(40)
    w.prepare(run)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError, match="22"):
        run.seq.advance(22) if verb == "advance" else run.seq.commit(t[:22])
    run.write(t[:32])  # as early as can be
    run.advance(32) if verb == "advance" else run.commit()
    w.flush()
    run.dispatch(t[32:52])
    run.advance(20) if verb == "advance" else run.commit()
    run.commit()
    run.close()
    assert w.hit(t[:52]) == 52


def test_s24_a_chunk_that_ends_too_early_can_be_run_again():
    w = scratch("full window:8", max_rewind=8)
    run = w.start(tokens(60))
    run.dispatch(tokens(40))
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.advance(20)
    run.advance(0)
    run.dispatch(tokens(20))
    run.advance()
    run.commit()
    run.close()
    assert w.hit(tokens(20)) == 20


def test_s24_rewind_within_max_rewind():
    w = scratch("full window:8 window:3+2", max_rewind=6)
    t = tokens(60)
    run = w.start(t)
    run.dispatch(join(t[:34], fresh(6)))
    run.advance()
    run.rewind(6)
    w.flush()
    run.commit()  # 34
    run.step(t[34:51])
    run.close()
    assert w.hit(t[:51]) == 51


@pytest.mark.parametrize("lag", [False, True])
def test_s24_rewind_beyond_max_rewind(lag):
    w = scratch("full window:8", max_rewind=4)
    t = tokens(60)
    run = w.start(t)
    if not lag:
        run.step(t[:10])
    run.dispatch(t[run.seq.length : 48])
    run.advance()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError, match="16"):
        run.seq.rewind(16)  # all groups or none: "full" could
    run.rewind(4)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rewind(12)
    w.flush()
    run.step(t[44:])
    run.close()
    assert w.hit(t) == 60


def test_s24_what_was_held_back_stays_away_after_a_rewind():
    """A smaller chunk behind a rewind does not make older tokens readable."""
    w = scratch("full window:8", max_rewind=4)
    t = tokens(60)
    run = w.start(t)
    run.dispatch(t[:48])
    run.advance()
    run.rewind(4)
    run.dispatch(t[44:45])  # reserve(1): capacity falls from 48 to 45
    run.advance()
    run.rewind(1)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.rewind(8)  # [29, 36) were never written
    run.step(t[44:50])
    run.close()
    assert w.hit(t[:50]) == 50


def test_f08_again_and_again_with_scratch():
    w = scratch("full window:8 window:3", max_rewind=6, max_length=128)
    run = w.start(tokens(30)).prefill()
    rng = np.random.default_rng(0)
    while run.seq.length < 100:
        drafts = int(rng.integers(1, 7))
        accepted = int(rng.integers(0, drafts + 1))
        run.dispatch(join(tokens(128)[run.seq.length :][:accepted], fresh(drafts - accepted)))
        if rng.integers(2):
            run.advance()
            run.rewind(drafts - accepted)
        elif accepted:
            run.advance(accepted)
        else:
            run.advance(0)
        if rng.integers(2):
            run.commit()
    run.commit()
    run.close()
    assert w.hit(tokens(128)) == run.held.size


# ------------------------------------------------------------------------------------------------ on and off


def test_s24_off_and_on():
    w = scratch("full window:8")
    run = w.start(tokens(60))
    assert run.seq.window_scratch is True
    assert run.reserve(40)
    w.prepare(run)
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        run.seq.window_scratch = False
    assert run.seq.window_scratch is True
    run.write(tokens(40))
    run.commit()
    run.seq.window_scratch = False  # nothing beyond length
    w.check()
    assert run.seq.window_scratch is False
    assert run.reserve(20)
    w.flush()
    assert shown(w, run, "window:8") == list(range(8, 15))
    w.prepare(run)
    run.write(tokens(60)[40:57])
    run.advance(17)
    run.commit()
    assert run.reserve(0)
    run.seq.window_scratch = True
    w.check()
    run.step(tokens(60)[57:])
    run.close()
    assert w.hit(tokens(60)) == 60


def test_s24_off_from_the_start():
    w = scratch("full window:8")
    run = w.start(tokens(60))
    run.seq.window_scratch = False
    run.dispatch(tokens(40))
    run.advance(20)  # any shorter step is fine
    run.rewind(9)
    w.flush()
    assert shown(w, run, "window:8") == list(range(10))
    run.step(tokens(40)[11:])
    w.flush()
    assert shown(w, run, "window:8") == [8, 9]
    assert w.start(tokens(60, "b")).seq.window_scratch is True  # each for itself


@pytest.mark.parametrize("off", [True, False])
def test_s24_a_rewind_into_what_was_held_back(off):
    """The committed window reaches to 11, so all groups can go back there; the chunk's holes get pages then."""
    w = scratch("full window:4")
    t = tokens(60)
    run = w.start(t)
    run.step(t[:10])
    run.dispatch(t[10:40])
    run.advance()
    if off:
        run.seq.window_scratch = False  # nothing is held back beyond length
    run.rewind(29)
    w.check()
    run.dispatch(t[11:20])
    run.advance()
    w.flush()
    run.commit()
    run.close()
    assert w.hit(t) == 20


def test_s24_without_scratch_it_is_off():
    assert World("full window:8", max_length=64).start().seq.window_scratch is False


# ------------------------------------------------------------------------------------------------ life


@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent", "window:8+3"])
def test_s24_suspend_and_close_with_pages_held_back(groups):
    w = scratch(groups)
    t = tokens(60)
    whole = free(w)
    run = w.start(t)
    assert run.reserve(30)
    run.suspend()
    assert run.resume()
    w.prepare(run)
    run.write(t[:30])
    run.commit(snapshot=True)
    assert run.reserve(30)
    run.suspend()
    other = w.start(tokens(20, "other")).prefill()
    assert run.resume()
    w.flush()
    run.close()
    other.close()
    assert all(pool.private == 0 for pool in w.pools().values())
    assert w.hit(join(t[:30], fresh())) == 30
    w.manager.clear()
    assert free(w) == whole


@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
@pytest.mark.parametrize("shared", [False, True])
def test_s24_commits_behind_advances(groups, shared):
    w = scratch(groups, shared=shared)
    t = tokens(63)
    run = w.start(t)
    late = 0
    for n in (21, 17, 1, 1, 20, 3):
        run.dispatch(t[run.seq.length :][:n])
        if late:
            run.commit(late)
        run.advance(snapshot=True)
        late = n
    run.commit()
    run.close()
    for n in (21, 38, 39, 40, 60, 63):
        assert w.hit(join(t[:n], fresh()) if n < 63 else t) == n  # each was an endpoint


def test_s24_two_steps_advanced_before_the_first_commit():
    w = scratch("full window:8")
    t = tokens(60)
    run = w.start(t)
    run.dispatch(t[:25])
    run.advance()
    run.dispatch(t[25:50])
    run.advance()
    w.flush()
    run.commit(25)
    run.commit(25)
    run.close()
    assert w.hit(t[:50]) == 50
    assert w.hit(t[:25]) == 25  # a chunk's end, while there is room
    assert w.hit(t[:40]) == 28  # the next chunk began in that page


# ------------------------------------------------------------------------------------------------ what others reuse


@pytest.mark.parametrize("min_snapshot", [False, True])
def test_s24_the_price(min_snapshot):
    """Held-back pages are not there for anyone; the end of a chunk is."""
    w = scratch("full window:8", min_snapshot=min_snapshot)
    w.turn(tokens(48))
    match = w.probe(join(tokens(24), fresh()))
    assert (match.tokens, match.raw_tokens, match.limited_by) == (0, 24, "window:8")
    assert w.hit(join(tokens(48), fresh())) == 48
    w = scratch("full window:8", min_snapshot=min_snapshot)
    w.turn(tokens(48), [24, 24])
    assert w.hit(join(tokens(24), fresh())) == 24
    assert w.hit(join(tokens(48), fresh())) == 48


def test_s24_others_fill_the_holes():
    w = scratch("full window:8", min_snapshot=True)
    t = tokens(48)
    w.turn(t)
    w.turn(t[:30], max_reuse=0)
    assert w.hit(join(t[:30], fresh())) == 30
    assert w.hit(join(t, fresh())) == 48
    w = scratch("full window:8", min_snapshot=True)
    w.turn(t[:30])
    w.turn(t, max_reuse=0)
    assert w.hit(join(t[:30], fresh())) == 30
    assert w.hit(join(t, fresh())) == 48


@pytest.mark.parametrize("groups", ["full window:8", "full window:8 recurrent"])
def test_s24_two_at_the_same_time_with_other_chunks(groups):
    w = scratch(groups)
    t = tokens(48)
    a, b = w.start(t), w.start(t)
    a.step(t[:40])
    b.step(t[:22], snapshot=True)
    b.step(t[22:44], snapshot=True)
    a.step(t[40:], snapshot=True)
    b.step(t[44:], snapshot=True)
    w.flush()
    a.close()
    b.close()
    for n in (22, 44, 48):
        assert w.hit(join(t[:n], fresh())) == n


# ------------------------------------------------------------------------------------------------ counting


@pytest.mark.parametrize("max_rewind", [0, 9])
@pytest.mark.parametrize("groups", ["full window:8", "full window:8+6", "window:3 window:8"])
def test_s24_can_ever_fit_says_what_reserve_says(groups, max_rewind):
    """Only a prompt: the first reserve raises exactly where can_ever_fit is False."""
    answers = set()
    for pages in range(2, 12):
        config = make_config(groups, pages=pages, max_length=64, window_scratch=jkv.WindowScratch(max_rewind))
        manager = jkv.CacheManager(config)
        for prompt in range(1, 65, 3):
            seq = manager.open()
            assert seq.resume()
            fits = manager.can_ever_fit(prompt, 0)
            answers.add(fits)
            if fits:
                assert seq.reserve(prompt), (pages, prompt)
            else:
                with pytest.raises(jkv.OutOfPagesError):
                    seq.reserve(prompt)
            manager.check()
            seq.close()
    assert answers == {False, True}


@pytest.mark.parametrize(("max_rewind", "pages"), [(0, 3), (8, 4), (20, 7)])
def test_s24_the_window_pages_of_a_whole_request(max_rewind, pages):
    """P=4, W=8: [48 + 1 - 8 - max_rewind, 48) for the prompt; token by token 3 pages hold the window."""
    needed = max(3, 12 - (41 - max_rewind) // 4)
    assert needed == pages
    for n in (pages - 1, pages):
        w = scratch(max_rewind=max_rewind, pages={"full": 16, "window:8": n})
        assert w.manager.can_ever_fit(48, 12) is (n == pages)
    run = w.start(tokens(48)).prefill()
    for at in range(48, 60):
        run.step(tokens(60)[at : at + 1])
    run.close()
    assert w.hit(tokens(60)) == 60


def test_s24_out_of_pages_counts_the_scratch():
    pages = {"full": 16, "window:8": 4}
    run = scratch(pages=pages).start()
    assert run.reserve(60)
    plain = World("full window:8", max_length=64, pages=pages).start()
    with pytest.raises(jkv.OutOfPagesError, match=r"15.*4"):
        plain.seq.reserve(60)
    run = scratch(pages=pages, max_rewind=30).start()
    with pytest.raises(jkv.OutOfPagesError, match=r"10.*4"):  # (60 - 30 + 1 - 8) // 4 = 5: pages 5 to 14
        run.seq.reserve(60)
    run.seq.window_scratch = False
    with pytest.raises(jkv.OutOfPagesError, match=r"15.*4"):
        run.seq.reserve(60)


def test_s24_no_room_now():
    w = scratch(pages={"full": 40, "window:8": 6}, max_sequences=3)
    a = w.start(tokens(48, "a")).prefill()
    b = w.start(tokens(48, "b")).prefill()
    c = w.start(tokens(48, "c"))
    assert c.reserve(44)  # two pages are left
    with w.unchanged():
        assert not c.reserve(45)  # (45 + 1 - 8) // 4 = 9 and so three
    a.close()
    c.step(tokens(48, "c"))
    b.close()


def test_s24_bytes_buy_more_full_pages():
    layers = {
        "a": jkv.AttentionLayer(jkv.kv_buffers(1, 8)),
        "b": jkv.AttentionLayer(jkv.kv_buffers(1, 4), window=64, sinks=4),
    }

    def pools(**fields):
        config = jkv.CacheConfig(layers, 4, 4096, 32, (jkv.DeviceTier(bytes=4_000_000),), **fields)
        return {name: pool.total for name, pool in jkv.CacheManager(config).stats().pools.items()}

    plain, tight = pools(), pools(window_scratch=jkv.WindowScratch())
    rewinding = pools(window_scratch=jkv.WindowScratch(512))
    assert plain["full"] < rewinding["full"] < tight["full"]
    assert tight["full"] / 128 == pytest.approx(tight["window:64+4"] / (1 + 2 * 3), rel=0.05)
    assert rewinding["full"] / 128 == pytest.approx(rewinding["window:64+4"] / (1 + 2 * (18 + 1)), rel=0.05)


# ------------------------------------------------------------------------------------------------ traffic


@pytest.mark.parametrize(
    ("groups", "config"),
    [
        ("full window:7", {"pages": {"full": 40, "window:7": 9}, "max_rewind": 3}),
        ("full window:6 window:2+5", {"pages": 40, "shared": True, "max_rewind": 0}),
        ("full window:5 recurrent", {"pages": {"full": 30, "window:5": 10, "recurrent": 6}, "max_rewind": 4}),
    ],
)
def test_s24_random_chunks(groups, config):
    w = scratch(groups, max_length=60, max_sequences=3, **config)
    rng, held = np.random.default_rng(1), w.scratch.max_rewind
    texts = [tokens(60, key) for key in "ab"] + [join(tokens(25, "a"), tokens(35, "c"))]
    for _ in range(150):
        runs = [run for run in w.runs if run.seq.status == "active" and len(run.held) < 59]
        kind = rng.integers(10)
        if kind == 0 and len(w.runs) < 4:
            w.open(texts[rng.integers(3)]).resume()
        elif kind == 1 and w.runs:
            run = w.runs[rng.integers(len(w.runs))]
            if run.seq.status == "active":
                run.suspend()
            else:
                run.resume()
        elif kind == 2 and w.runs and rng.integers(2):
            w.runs[rng.integers(len(w.runs))].close()
        elif runs:
            run = runs[rng.integers(len(runs))]
            n = int(rng.integers(1, 60 - len(run.held)))
            try:
                if not run.reserve(n):
                    run.commit()
                    continue
            except jkv.OutOfPagesError:
                continue
            if kind == 3:  # to and fro
                w.flush()
                continue
            w.prepare(run)
            if kind == 4:
                run.advance(0)
                continue
            short = min(int(rng.integers(held + 1)), n - 1) if kind == 5 else 0
            run.write(run.prompt[len(run.held) :][: n - short])
            run.advance(snapshot=bool(rng.integers(2)))
            if kind == 6 and not w.recurrent:
                run.rewind(min(held, n, run.seq.length - run.seq.committed))
            if kind != 7:
                run.commit()
    w.close_all()
    w.flush()
    assert all(pool.private == 0 for pool in w.pools().values())
