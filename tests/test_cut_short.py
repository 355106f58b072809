"""A call that is cut short in the middle, by the device, for lack of memory or with Ctrl-C: nothing is half done."""

import numpy as np
import pytest
from faults import Broken, interrupted, undispatched
from oracle import World, fresh, join, tokens

import jkv

HYBRID = "full window:6 recurrent"


def busy(groups, **config):
    """Three sequences: one in the middle of its prompt, one that was suspended, one that lends its tail and state."""
    w = World(groups, page_size=4, pages=30, max_length=48, **config)
    w.turn(tokens(14), [6, 8], snapshot=True)
    a, b, c = (w.start(join(tokens(10), tokens(20, key))) for key in "abc")
    a.step(a.prompt[a.seq.length :][:9], snapshot=True)
    b.step(b.prompt[b.seq.length :][:5])
    b.suspend()
    c.step(c.prompt[c.seq.length :][:6], end=True)
    return w, a, b, c


CALLS = {
    "open": lambda w, a, b, c: w.manager.open(tokens(14)),
    "resume": lambda w, a, b, c: b.seq.resume(),
    "reserve": lambda w, a, b, c: a.seq.reserve(9),
    "reserve of what is lent": lambda w, a, b, c: c.seq.reserve(9),
    "commit": lambda w, a, b, c: (a.dispatch(fresh(5)), a.seq.commit(a.flight, snapshot=True)),
    "suspend": lambda w, a, b, c: a.seq.suspend(),
    "fork": lambda w, a, b, c: a.seq.fork(1),
    "close": lambda w, a, b, c: a.seq.close(),
    "prepare": lambda w, a, b, c: w.manager.prepare(w.state, [a.seq]),
    "match": lambda w, a, b, c: w.manager.open(tokens(14)).match,
    "prefetch": lambda w, a, b, c: b.seq.prefetch("device"),
    "plan_snapshots": lambda w, a, b, c: (a.seq.reserve(5), a.seq.plan_snapshots([a.seq.length + 3])),
    "batch verbs": lambda w, a, b, c: (
        w.manager.reserve([a.seq], 5),
        setattr(w, "state", w.manager.prepare(w.state, [a.seq])[0]),
        w.manager.commit([a.seq], [1, 2], 2),
        w.manager.advance([a.seq], 0),
    ),
    "new_epoch": lambda w, a, b, c: w.manager.new_epoch("other"),
    "resize_tier device": lambda w, a, b, c: w.manager.resize_tier(w.state, "device", pages=40),
    "release": lambda w, a, b, c: w.manager.release(w.state),
    "resize_tier host": lambda w, a, b, c: w.manager.resize_tier(w.state, "host", pages=7),
    "reset": lambda w, a, b, c: w.manager.reset(),
}


@pytest.mark.parametrize("name", CALLS)
def test_wherever_ctrl_c_strikes(name):
    """The manager is whole or says that it is not; after a reset everything works, host memory included."""
    cut, k = 0, 1
    while True:
        w, a, b, c = busy(HYBRID, host=12)
        if name == "commit":
            a.dispatch(fresh(5))
            call = lambda: a.seq.commit(a.flight, snapshot=True)  # noqa: B023, E731
        else:
            call = lambda: CALLS[name](w, a, b, c)  # noqa: B023, E731
        if not interrupted(w, k, call):
            break
        cut += bool(w.manager._host.broken)
        w.reset()
        w.turn(tokens(14), [6, 8], snapshot=True)
        assert w.hit(join(tokens(14), fresh())) == 14
        memory = w.manager._memory
        assert [[len(arena) - 1 for arena in arenas] for arenas in memory._arenas] == [
            [pool.below.total] * len(arenas) for pool, arenas in zip(w.manager._host.pools, memory._arenas, strict=True)
        ]
        k += 1 + k // 5  # every line at the beginning, then here and there
    assert cut > 3


def test_what_host_memory_has_survives_a_dispatch_that_fails():
    w = World(HYBRID, page_size=4, pages=12, host=20, max_length=32)
    w.turn(tokens(12), [8, 4], snapshot=True)
    for pool in w.manager._host.pools:
        w.manager._host.tree.make_free(pool, pool.total)
    w.flush()
    run = w.start(tokens(20, "other"))
    assert run.reserve(9)
    assert undispatched(w, 1, lambda: w.manager.prepare(w.state, [run.seq]))
    w.reset()
    assert w.probe(tokens(12)).tier_tokens == {"host": 12}
    assert w.hit(tokens(12)) == 12


def test_the_error_says_what_happened_and_what_to_do():
    w, a, b, c = busy("full")
    assert a.reserve(3)
    assert undispatched(w, 1, lambda: w.manager.prepare(w.state, [a.seq]))
    said = r"cut short .*by Broken\('out of memory on the device'\); all sequences are closed, call reset first"
    with pytest.raises(jkv.SequenceStateError, match=said):
        w.manager.open([1])
    for run in (a, b, c):
        assert run.seq.status == "closed"
        run.seq.close()
        with pytest.raises(jkv.SequenceStateError, match="is closed"):
            run.seq.reserve(1)
    stats = w.manager.stats()
    assert (stats.active, stats.suspended) == (0, 0) and stats.lookups == 4
    w.reset()
    assert w.manager.stats().lookups == 4


def test_the_devices_own_error_comes_through():
    w = World("full", page_size=4)
    run = w.start()
    assert run.reserve(3)
    errors = []

    def prepare():
        try:
            w.manager.prepare(w.state, [run.seq])
        except Broken as error:
            errors.append(error)
            raise

    assert undispatched(w, 1, prepare) and len(errors) == 1
    w.reset()


def test_refusals_and_wrong_calls_cut_nothing_short():
    w, a, _, _ = busy(HYBRID, host=12)

    def stumbling():
        yield a.seq
        raise RuntimeError("the caller's own")

    with w.unchanged():
        for wrong in (lambda: w.manager.open(nothing=1), lambda: a.seq.commit(), lambda: a.seq.fork()):
            with pytest.raises(TypeError):
                wrong()
        for refused in (lambda: w.manager.prepare(w.state, stumbling()), lambda: w.manager.open(iter(stumbling()))):
            with pytest.raises(jkv.ConfigError):
                refused()
        with pytest.raises(jkv.SequenceStateError):
            a.seq.resume()
    a.step(fresh(3))
    w.close_all()


def test_an_exception_in_a_read_cuts_nothing_short():
    w, a, _, _ = busy(HYBRID, host=12)
    with w.unchanged():
        for k in range(1, 40):
            interrupted(w, k, lambda: w.manager.probe(tokens(14)))
            interrupted(w, k, lambda: w.manager.stats())
            interrupted(w, k, w.manager.check)
    assert not w.manager._host.broken
    a.step(fresh(3))


def test_host_memory_that_cannot_be_had_changes_nothing(monkeypatch):
    w, a, b, _ = busy(HYBRID, host=12)
    zeros = np.zeros

    def scarce(shape, *args, **options):
        if np.prod(shape) > 2**20:
            raise MemoryError
        return zeros(shape, *args, **options)

    monkeypatch.setattr(np, "zeros", scarce)
    with pytest.raises(jkv.OutOfPagesError, match="host memory"):
        w.manager.resize_tier(w.state, "host", pages=10**6)
    monkeypatch.undo()
    w.check()
    assert b.resume()
    w.flush()
    a.step(fresh(3))


def test_content_of_images_is_learned_anew():
    w = World("full", page_size=4, host=8)
    prompt = jkv.Tokens(tokens(9), {2: "a.png"})
    for _ in range(2):
        with w.manager.open(prompt) as seq:
            assert seq.resume() and seq.length == 0 and seq.reserve(9)
            w.state, _ = w.manager.prepare(w.state, [seq])
            seq.commit(prompt)
        assert w.manager.probe(prompt).tokens == 8
        for k in range(1, 60, 7):
            interrupted(w, k, lambda: w.manager.open(jkv.Tokens(tokens(9), {2: "b.png"})))
            w.reset()
        assert w.manager.probe(prompt).tokens == 0


def test_batch_verbs_refuse_the_same_sequences_after_a_dispatch_that_failed():
    w = World("full", page_size=4, max_sequences=4)
    runs = [w.start(join(tokens(9), tokens(5, key))) for key in "ab"]
    seqs = [run.seq for run in runs]
    assert w.manager.reserve(seqs, 5) == 2
    assert undispatched(w, 1, lambda: w.manager.prepare(w.state, seqs))  # which tries them all
    assert [repr(seq) for seq in seqs] == ["<Sequence closed row=None committed=0 length=0 capacity=0>"] * 2
    w.reset()


class Stubborn(Exception):
    def __str__(self):
        raise ValueError("no")

    __repr__ = __str__


def test_a_second_exception_leaves_nobody_at_work(monkeypatch):
    """While one that cannot even be printed is being dealt with."""
    w, a, b, c = busy(HYBRID)
    fails = {a.seq}

    def abandon(seq, real=jkv.Sequence._abandon):
        if seq in fails:
            raise MemoryError
        real(seq)

    def fail(*_):
        raise Stubborn

    with monkeypatch.context() as patch:
        patch.setattr(jkv.Sequence, "_abandon", abandon)
        patch.setattr(w.manager._host.tree, "can_allocate", fail)
        with pytest.raises(MemoryError):
            a.seq.reserve(9)
    assert "active" in [run.seq.status for run in (a, b, c)]
    for call in (lambda: a.seq.reserve(1), lambda: a.seq.commit([1]), a.seq.suspend, lambda: a.seq.fork(1)):
        with pytest.raises(jkv.SequenceStateError, match="cut short"):
            call()
    for run in (a, b, c):
        run.seq.close()
        assert run.seq.status == "closed"
    w.reset()


def test_a_match_is_refused_when_the_tree_cannot_be_relied_on():
    w, a, _, _ = busy("full")
    new = w.manager.open(tokens(14))
    assert a.reserve(3)
    assert undispatched(w, 1, lambda: w.manager.prepare(w.state, [a.seq]))
    with pytest.raises(jkv.SequenceStateError, match="cut short"):
        _ = new.match
    w.reset()


def test_a_reset_that_finds_no_room_can_be_repeated(monkeypatch):
    """Training has not given its memory back yet."""
    w = World("full", page_size=4, host=8)
    w.turn(tokens(12))
    w.manager.release(w.state)
    with monkeypatch.context() as patch:
        patch.setattr(jkv.manager, "init_state", lambda layout: (_ for _ in ()).throw(Broken("no room")))
        with pytest.raises(Broken):
            w.manager.reset()
        with pytest.raises(jkv.SequenceStateError, match=r"no room.*reset"):
            w.manager.open()
    w.reset()
    assert w.hit(join(tokens(12), fresh())) == 12


def test_totals_are_counted_once_whatever_cuts_a_reset_short():
    w = World("full", page_size=4, pages=6)
    for key in "abc":
        w.turn(tokens(20, key))
    evicted = w.manager.stats().evicted_pages["full"]
    assert evicted > 0
    for k in range(1, 200):
        interrupted(w, k, w.reset)
        assert w.manager.stats().evicted_pages["full"] == evicted
    w.reset()


def test_reads_cut_short_mix_nothing_up(tmp_path):
    """Not two images, not two prompts that begin alike, not what routers ask for."""
    a, b = tokens(21), join(tokens(8), tokens(13, "b"))
    w = World("full", page_size=4, pages=400, store=jkv.StoreTier(str(tmp_path)))
    w.turn(a)
    w.manager.release(w.state)  # the store has it, too
    w.reset()
    w.turn(a)
    manager, cut, k = w.manager, True, 0
    while cut:
        k += 1
        image, other = (jkv.Tokens(tokens(9), {2: f"{k} {name}.png"}) for name in "ab")
        waiting = manager.open(b)
        routed = join(tokens(8, "routed"), tokens(13, min(k, 60)))
        if k <= 60:
            w.turn(routed)  # a child that no router has asked for
        digests = manager.block_digests(routed)
        reads = [lambda: manager.probe(image), lambda: waiting.match, lambda: manager.probe_digests(digests)]  # noqa: B023
        struck = [interrupted(w, k, read) for read in reads]
        assert waiting.match.tokens == w.probe(b).tokens == 8
        assert manager.probe_digests(digests).tokens == 20
        symbols = [manager._contents.tokens(each)[2] for each in (image, other)]
        assert symbols[0] != symbols[1]
        waiting.close()
        cut = any(struck)
