"""match.in_flight: tokens behind raw_tokens that another active sequence is computing for the same prompt.

Whoever schedules may let such a request wait until they are published.
"""

import pytest
from oracle import World, fresh, join, tokens

import jkv


def in_flight(w, prompt, **options):
    """in_flight of a probe, and of a sequence before its resume."""
    match = w.probe(prompt, **options)
    seq = w.manager.open(prompt, **options)
    assert seq.match.in_flight == match.in_flight
    seq.close()
    w.check()
    return match.in_flight


def world(groups="full", **config):
    return World(groups, **{"max_length": 64, **config})


@pytest.mark.parametrize("groups", ["full", "full window:6 recurrent", "recurrent"])
@pytest.mark.parametrize("shared", [0, 1, 4, 7, 12, 20])
def test_in_flight_is_the_common_prefix(groups, shared):
    w = world(groups)
    w.start(tokens(20))
    assert in_flight(w, tokens(30)[:shared]) == shared
    assert in_flight(w, join(tokens(20)[:shared], fresh(9))) == shared
    assert in_flight(w, join(tokens(20), fresh(9))) == 20
    assert w.probe(fresh(5)).in_flight == 0
    assert w.probe([]).in_flight == 0


def test_in_flight_only_of_active_sequences():
    w = world()
    run = w.open(tokens(20))
    assert in_flight(w, tokens(20)) == 0  # before its first resume
    assert run.resume()
    assert in_flight(w, tokens(20)) == 20
    run.suspend()
    assert in_flight(w, tokens(20)) == 0
    assert run.resume()
    assert in_flight(w, tokens(20)) == 20
    assert run.reserve(20)
    w.prepare(run)
    assert in_flight(w, tokens(20)) == 20
    run.close()
    assert in_flight(w, tokens(20)) == 0


@pytest.mark.parametrize("groups", ["full", "full recurrent"])
def test_in_flight_is_what_is_not_published_yet(groups):
    w = world(groups)
    t = tokens(22)
    run = w.start(t)
    for n, raw in ((3, 0), (5, 8), (4, 12), (9, 20)):
        run.step(t[run.seq.length :][:n], snapshot=True)
        match = w.probe(t)
        assert (match.raw_tokens, match.in_flight) == (raw, 22 - raw)
        assert in_flight(w, join(t[:10], fresh())) == max(0, 10 - raw)
    run.step(t[21:], snapshot=True)
    match = w.probe(join(t, fresh()))
    assert (match.raw_tokens, match.in_flight) in ((20, 2), (20, 0))  # committed, and in a page that is not full
    run.close()
    match = w.probe(join(t, fresh()))
    assert (match.raw_tokens, match.in_flight) == (22, 0)


def test_in_flight_while_tokens_are_written_and_not_committed():
    w = world()
    t = tokens(20)
    run = w.start(t)
    run.dispatch(t[:12])
    assert in_flight(w, t) == 20
    run.advance()
    assert in_flight(w, t) == 20
    run.commit(8)
    assert (w.probe(t).raw_tokens, in_flight(w, t)) == (8, 12)
    run.commit(4)
    assert (w.probe(t).raw_tokens, in_flight(w, t)) == (12, 8)


def test_in_flight_of_the_sequence_that_is_farthest():
    w = world()
    t = tokens(20)
    w.turn(t[:8])
    w.start(join(t[:12], tokens(8, "a")))
    assert in_flight(w, t) == 4
    w.start(join(t[:17], tokens(3, "b")))
    assert in_flight(w, t) == 9
    w.start(join(t[:3], tokens(5, "c")))
    assert in_flight(w, t) == 9
    assert w.probe(t[:6]).in_flight == 0  # published
    match = w.start(t).seq.match
    assert (match.tokens, match.raw_tokens, match.in_flight) == (8, 8, 9)


@pytest.mark.parametrize(
    "scope", [jkv.Scope(salt=0), jkv.Scope("x"), jkv.Scope("x", 1), jkv.Scope("x", "0"), jkv.Scope(salt="x")]
)
def test_in_flight_in_the_same_scope_only(scope):
    w = world()
    w.start(tokens(20), scope=scope)
    assert in_flight(w, tokens(20)) == 0
    assert in_flight(w, tokens(20), scope=scope) == 20
    for other in (jkv.Scope(salt=""), jkv.Scope("x", 2), jkv.Scope("x", salt="x")):
        assert in_flight(w, tokens(20), scope=other) == 0
    assert in_flight(w, tokens(20), scope=jkv.Scope(scope.adapter, scope.version, scope.salt)) == 20


def test_in_flight_not_of_tokens_that_are_not_the_prompts():
    w = world()
    t = tokens(20)
    run = w.start(t)
    run.step(t[:8])
    assert in_flight(w, t) == 12
    run.step(fresh(4))  # something else than the prompt
    assert in_flight(w, t) == 0
    run.step(t[12:16])
    assert in_flight(w, t) == 0
    other = w.start(join(t[:4], tokens(16, "b")))
    other.step(t[4:8])
    assert in_flight(w, join(t[:4], tokens(16, "b"))) == 0


def test_in_flight_not_of_one_that_goes_beyond_its_prompt():
    w = world()
    t = tokens(30)
    run = w.start(t[:8]).prefill()
    run.dispatch(t[8:12])
    assert in_flight(w, t) == 0
    run.advance()
    assert in_flight(w, t) == 0
    run.commit()
    assert (w.probe(t).raw_tokens, in_flight(w, t)) == (12, 0)


@pytest.mark.parametrize("committed", [0, 8])
def test_in_flight_not_of_one_that_has_stopped_committing(committed):
    w = world()
    t = tokens(20)
    run = w.start(t)
    if committed:
        run.step(t[:committed])
    run.stop_committing()
    assert in_flight(w, t) == 0
    run.dispatch(t[committed:])
    run.advance()
    assert in_flight(w, t) == 0


def test_in_flight_whatever_may_be_reused():
    """raw_tokens knows no caps; neither does this."""
    w = world("full recurrent", reuse_backoff=2)
    t = tokens(20)
    w.turn(t[:9], snapshot=False)
    w.start(t)
    for options in ({"max_reuse": 0}, {"max_reuse": 5}, {}):
        match = w.manager.probe(t, **options)
        assert (match.raw_tokens, match.in_flight) == (9, 11)


def test_in_flight_of_forks_and_copies():
    w = world("full recurrent")
    t = tokens(20)
    run = w.start(t)
    run.step(t[:6])
    (copy,) = run.fork(1)
    run.close()
    match = w.probe(t)
    assert match.raw_tokens + match.in_flight == 20
    copy.step(fresh(3))
    assert in_flight(w, t) == 0


def test_in_flight_after_eviction_and_reset():
    w = world(pages=8)
    t = tokens(20)
    w.start(t)
    w.state = w.manager.reset()
    w.runs.clear()
    assert in_flight(w, t) == 0
    run = w.start(t)
    run.step(t[:8])
    assert in_flight(w, t) == 12
    run.close()
    w.turn(fresh(32))
    assert (w.probe(t).raw_tokens, in_flight(w, t)) == (0, 0)


def test_in_flight_beside_batches():
    """Lengths that moved in batches count, too."""
    w = world()
    a, b = w.start(tokens(20, "a")), w.start(tokens(20, "b"))
    for n in range(1, 7):
        assert w.reserve([a, b], 1) == 2
        w.prepare(a, b)
        a.write(tokens(n, "a")[n - 1 :])
        b.write(tokens(n, "b")[n - 1 :] if n < 4 else fresh())
        w.commit([a, b])
        raw = n // 4 * 4
        assert in_flight(w, tokens(20, "a")) == 20 - raw
        assert (w.probe(tokens(20, "b")).raw_tokens, n < 4) in ((0, True), (3, False))
        if n < 4:
            assert in_flight(w, tokens(20, "b")) == 20
        else:
            assert in_flight(w, tokens(20, "b")) == 0


def test_in_flight_helps_to_wait():
    """Two requests with one system prompt: the second waits for the first and reuses all of it."""
    w = world("full recurrent")
    system = tokens(16)
    a = w.start(join(system, tokens(5, "a")))
    b = w.open(join(system, tokens(5, "b")))
    assert b.seq.match.in_flight == 16
    a.step(system, snapshot=True)
    assert (b.seq.match.tokens, b.seq.match.in_flight) == (16, 0)
    a.prefill()
    assert b.resume()
    assert b.reused == 16
    b.prefill()
