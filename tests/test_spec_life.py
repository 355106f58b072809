"""SPEC S43, S49, S50, S56 to S62: suspend and resume, identity, a step in flight, many siblings."""

import dataclasses
import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

# ------------------------------------------------------------------------------------------------ suspend and resume


@pytest.mark.parametrize(("held", "expected"), [(20, True), (21, False), (40, False)])
def test_s43_resume_beside_an_active_sequence(held, expected):
    w = World("full", pages=10, max_length=40, max_utilization_for_resume=0.5)
    a = w.start(tokens(held)).prefill()
    b = w.open(tokens(4, "b"))
    before = w.manager.stats()
    assert b.resume() is expected
    if not expected:
        assert w.manager.stats() == before
        a.close()  # now its pages are only cached
        assert w.pool("full").tree == -(-held // 4)
        assert b.resume()
    b.prefill()


def test_s43_the_sequences_own_pages_do_not_count():
    w = World("full", pages=10, max_length=40, max_utilization_for_resume=0.5)
    b = w.start(tokens(24, "b")).prefill()
    b.suspend()
    c = w.open(tokens(4, "c"))
    a = w.start(tokens(4)).prefill()  # nobody is active: no limit
    assert not c.resume()  # 7 of 10 pages cannot be evicted
    assert b.resume()  # but b's own 6 do not count against it
    w.prepare(b)
    b.suspend()
    a.suspend()
    assert c.resume()  # alone
    c.prefill()


def test_s43_cached_pages_never_refuse():
    w = World("full", pages=10, max_length=40, max_utilization_for_resume=0.5)
    w.turn(tokens(40))
    a = w.start(tokens(4, "a")).prefill()
    assert w.pool("full").free == 0
    b = w.start(tokens(16, "b"))  # 1 of 10 pages is held
    b.prefill()
    a.step(tokens(4, "more"))


def test_s43_a_lone_suspended_sequence_comes_back():
    w = World("full recurrent", pages={"full": 10, "recurrent": 4}, max_length=40, max_utilization_for_resume=0.1)
    run = w.start(tokens(39)).prefill()
    assert run.reserve(1)
    run.suspend()
    w.check()
    assert run.resume()
    w.prepare(run)
    run.write(tokens(40)[39:])
    run.commit()


def test_s43_a_recurrent_pool_asks_for_no_headroom():
    w = World("recurrent", pages=4, max_utilization_for_resume=0.5)
    runs = [w.start(tokens(5, key)).prefill() for key in "abc"]
    runs.append(w.start(tokens(5, "d")).prefill())
    assert w.pool("recurrent").private == 4
    for run in runs:
        run.step(fresh(2))


# ------------------------------------------------------------------------------------------------ identity

SCOPES = [
    jkv.Scope(),
    *(jkv.Scope(salt=salt) for salt in (0, "", b"", "0", b"0", 1, "x", b"x")),
    *(jkv.Scope(adapter=adapter) for adapter in (0, "", "0", "x", "xx")),
    *(jkv.Scope(adapter="x", version=version) for version in (1, "1", "0", "")),
    jkv.Scope(adapter="x", salt="x"),
    jkv.Scope(adapter="x", version="x"),
    jkv.Scope(adapter="xx", salt="x"),
    jkv.Scope(adapter="x", salt="xx"),
]


@pytest.mark.parametrize("groups", ["full", "full window:8 recurrent"])
def test_s49_any_difference_in_scope_reuses_nothing(groups):
    w = World(groups, pages=2 * len(SCOPES) + 4)
    for at, scope in enumerate(SCOPES):
        assert w.probe(tokens(8), scope=scope).raw_tokens == 0, f"{scope} finds what another scope left"
        assert w.turn(tokens(8), scope=scope).reused == 0
        for other in SCOPES[: at + 1]:
            assert w.probe(tokens(8), scope=other).tokens == 8
    for scope in SCOPES:
        assert w.hit(tokens(8), scope=jkv.Scope(scope.adapter, scope.version, scope.salt)) == 8


def test_s49_three_salts():
    w = World("full")
    for salt in (None, 0, ""):
        assert w.turn(tokens(8), scope=jkv.Scope(salt=salt)).reused == 0
    assert w.turn(tokens(8), scope=jkv.Scope(salt="x")).reused == 0
    assert w.turn(tokens(8), scope=jkv.Scope(adapter="x")).reused == 0


BAD_IDS = [
    [-1],
    [3, 2**31],
    [2**40, 1],
    [-(2**31)],
    np.array([1, -5]),
    np.array([2**31], np.int64),
    np.array([2**32 + 5]),
]


@pytest.mark.parametrize("bad", BAD_IDS, ids=str)
def test_s50_ids_outside_int32_are_refused(bad):
    w = World("full")
    run = w.start(tokens(4))
    before = w.manager.stats()
    for call in (w.manager.open, w.manager.probe):
        with pytest.raises(ValueError, match=str(int(min(bad)) if min(bad) < 0 else int(max(bad)))):
            call(bad)
    w.check()
    assert w.manager.stats() == before
    run.dispatch(tokens(6))
    with pytest.raises(ValueError, match=str(int(min(bad)) if min(bad) < 0 else int(max(bad)))):
        run.seq.commit(bad)
    assert (run.seq.committed, run.seq.length) == (0, 0)
    run.commit()
    run.close()
    assert w.hit(tokens(6)) == 6


def test_s50_the_largest_id_is_fine():
    w = World("full")
    prompt = [0, 2**31 - 1, 5, 2**31 - 2]
    w.turn(prompt)
    assert w.hit(prompt) == 4
    assert w.manager.probe(np.array(prompt, np.int64), max_reuse=4).tokens == 4
    assert w.manager.probe(np.array(prompt, np.uint32), max_reuse=4).tokens == 4
    assert w.manager.probe(tuple(prompt), max_reuse=4).tokens == 4
    assert w.hit([0, 2**31 - 1, 5, 2**31 - 1]) == 3


# ------------------------------------------------------------------------------------------------ a step in flight


def decode(run, prompt, generated, overlapped):
    """Prefill that stops at the snapshot points, then one token at a time; commits late if `overlapped`."""
    points = [p for p in sorted(run.seq.snapshot_points) if run.seq.length < p < len(prompt)]
    stops = [run.seq.length, *points, *range(len(prompt), len(prompt) + len(generated) + 1)]
    whole = join(prompt, generated)
    late = 0
    for a, b in itertools.pairwise(stops):
        run.dispatch(whole[a:b])
        if not overlapped:
            run.commit()
            continue
        if late:
            run.commit(late)  # of the step before, while this one runs
        run.advance()
        late = b - a
    if late:
        run.commit(late)


@pytest.mark.parametrize("groups", ["full", "full window:8 recurrent", "recurrent", "window:4+2"])
def test_s56_late_commits_equal_the_synchronous_loop(groups):
    prompts = [tokens(n) for n in (13, 22, 8, 22, 31)]
    prompts += [join(tokens(n), tokens(m, "fork")) for n, m in ((10, 7), (16, 9), (16, 3))]
    worlds = [World(groups), World(groups)]
    for number, prompt in enumerate(prompts):
        for w, overlapped in zip(worlds, (False, True), strict=True):
            run = w.start(prompt)
            decode(run, prompt, tokens(6, f"generated {number % 3}"), overlapped)
            run.close()
        one, two = (w.manager.stats() for w in worlds)
        assert one.tiers["device"].evicted == two.tiers["device"].evicted
        peaks = {name: two.pools[name].peak for name in one.pools}  # late commits keep pages a step longer
        assert {name: dataclasses.replace(each, peak=peaks[name]) for name, each in one.pools.items()} == two.pools
        assert dataclasses.replace(one, pools={}, tiers={}) == dataclasses.replace(two, pools={}, tiers={})
        for prompt in prompts:
            for n in range(1, len(prompt) + 1):
                one, two = (w.manager.probe(prompt[:n], max_reuse=n) for w in worlds)
                assert one == two
    for prompt in prompts:
        assert worlds[0].hit(prompt) == worlds[1].hit(prompt)


def slow_step(state, rows, positions, values, weights, rounds):
    """A step whose output is late: as many products as it takes, then the state depends on them."""
    late = jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ weights), weights)
    late = (late[0, 0] > 2).astype(jnp.int32)  # 0, but XLA cannot know
    state = jkv.append(state, "full.0", rows, positions, {name: value + late for name, value in values.items()})
    old = jkv.read_state(state, "ssm0", rows)
    return jkv.write_state(state, "ssm0", rows, {name: value + late for name, value in old.items()}), late


def test_s56_the_host_never_waits_for_a_long_step():
    w = World("full recurrent")
    step = jax.jit(slow_step, donate_argnames="state")
    weights = jnp.eye(512, dtype=jnp.float32) * 0.5
    positions = np.full((1, 1), -1, np.int32)
    values = {"k": np.zeros((1, 1, 2), np.int32), "v": np.zeros((1, 1, 1), np.int32)}

    def dispatch(rounds):
        rows = np.array([-1], np.int32)
        w.state, late = step(w.state, rows, positions, values, weights, jnp.int32(rounds))
        return late

    def prepare(*seqs):
        w.state, _ = w.manager.prepare(w.state, seqs)

    def traffic(rounds):
        """All calls of the loop while a step runs; the names of those after which it was finished."""
        finished = []
        a, b, c = (w.manager.open(tokens(n, n)) for n in (12, 30, 5))
        for seq in (a, b, c):
            assert seq.resume() and seq.reserve(4 + len(seq.snapshot_points))
        prepare(a, b, c)
        a.commit(tokens(4, 12), snapshot=True)
        b.commit(tokens(4, 30))
        c.commit(tokens(4, 5))
        assert a.reserve(1)
        prepare(a)
        late = dispatch(rounds)
        a.advance(1, snapshot=True)
        assert b.reserve(2) and a.reserve(1)
        prepare(a, b)
        finished += ["prepare"] * late.is_ready()
        a.commit([7])
        a.advance(1)
        a.commit([8])
        b.commit([1, 2], snapshot=True)
        finished += ["commit, advance"] * late.is_ready()
        b.close()
        c.close()
        finished += ["close"] * late.is_ready()
        d = w.manager.open(tokens(12, 12))
        assert d.resume()
        prepare(d)
        finished += ["open, resume, prepare"] * late.is_ready()
        assert late == 0
        a.close()
        d.close()
        w.check()
        w.manager.clear()
        return finished

    traffic(1)  # compiles everything
    started = time.perf_counter()
    dispatch(32).block_until_ready()
    rounds = int(32 * 0.5 / (time.perf_counter() - started))
    for _ in range(4):  # half a second is long beside what the host does, unless the machine is busy
        finished = traffic(rounds)
        if not finished:
            break
        rounds *= 2
    assert not finished


@pytest.mark.parametrize("how", ["close", "exception", "advance and close", "advance, commit elsewhere and close"])
@pytest.mark.parametrize("groups", ["full recurrent", "full window:8 recurrent"])
def test_s57_a_close_in_flight_never_publishes_the_live_state(how, groups):
    w = World(groups)
    run = w.start(tokens(8))
    run.step(tokens(8), snapshot=True)
    if how == "exception":
        with pytest.raises(RuntimeError, match="stop"), run.seq:
            run.dispatch(fresh())
            raise RuntimeError("stop")
    else:
        run.dispatch(fresh())
        if how != "close":
            run.advance()
        if "elsewhere" in how:
            assert run.reserve(1)
            w.prepare(run)
    run.close()
    match = w.probe(join(tokens(8), fresh()))
    assert (match.tokens, match.raw_tokens) == (8, 8)
    assert w.hit(join(tokens(8), fresh())) == 8  # with state@8, or the oracle says which
    assert w.pool("full").private == w.pool("recurrent").private == 0


def test_s57_in_flight_without_a_snapshot_publishes_no_state():
    w = World("full recurrent")
    run = w.start(tokens(8))
    run.step(tokens(8), snapshot=False)
    run.dispatch(fresh())
    run.close()
    match = w.probe(join(tokens(8), fresh()))
    assert (match.tokens, match.attention_tokens, match.limited_by) == (0, 8, "recurrent")


@pytest.mark.parametrize(("snapshot", "expected"), [(None, 0), (False, 0), (True, 4)])
def test_s58_two_advances_and_then_the_first_commit(snapshot, expected):
    w = World("full recurrent")
    run = w.start()
    run.dispatch(tokens(4))
    run.advance(4, snapshot=snapshot)
    run.dispatch(tokens(8)[4:])
    run.advance(4)
    assert (run.seq.committed, run.seq.length) == (0, 8)
    run.commit(4)
    assert (run.seq.committed, run.seq.length) == (4, 8)
    match = w.probe(tokens(8))
    assert (match.tokens, match.attention_tokens) == (expected, 4)
    assert w.hit(join(tokens(4), fresh())) == expected
    run.commit(4)
    run.close()
    assert w.hit(tokens(8)) == 8
    assert w.hit(tokens(7)) == expected


def test_s58_a_late_wish_for_a_snapshot_is_counted():
    w = World("full recurrent")
    run = w.start()
    run.dispatch(tokens(4))
    run.advance(4)
    run.dispatch(tokens(8)[4:])
    run.advance(4)
    run.commit(4, snapshot=True)
    stats = w.manager.stats()
    assert (stats.snapshots_taken, stats.snapshots_skipped) == (0, 1)
    assert w.probe(tokens(8)).tokens == 0


def test_s58_in_flight_a_wish_for_an_older_snapshot_raises():
    w = World("full recurrent")
    run = w.start()
    run.dispatch(tokens(4))
    run.advance(4)
    assert run.reserve(4)
    w.prepare(run)
    before = w.manager.stats()
    with pytest.raises(jkv.SequenceStateError):
        run.seq.commit(tokens(4), snapshot=True)
    w.check()
    assert w.manager.stats() == before
    assert (run.seq.committed, run.seq.length) == (0, 4)
    run.write(tokens(8)[4:])
    run.commit(8)


# ------------------------------------------------------------------------------------------------ tiny pools, end=True


@pytest.mark.parametrize("groups", ["recurrent", "full recurrent", "full window:8 recurrent"])
@pytest.mark.parametrize("n", [8, 11])
@pytest.mark.parametrize("parts", [None, "stops"])
def test_s60_one_slot_beside_the_live_one(groups, n, parts):
    pages = {group: 2 if group == "recurrent" else 16 for group in groups.split()}
    w = World(groups, pages=pages, max_sequences=1, max_length=64)
    for turn in range(4):
        run = w.turn(tokens(n + turn), parts, snapshot=None)
        assert run.reused == (n + turn - 1 if turn else 0)
    assert w.hit(join(tokens(n + 3), fresh())) == n + 3


@pytest.mark.parametrize("groups", ["full", "window:16", "full recurrent"])
def test_s60_the_tail_page_is_copied_onto_itself(groups):
    pages = {group: 2 if group == "recurrent" else 4 for group in groups.split()}
    w = World(groups, pages=pages, max_sequences=1, max_length=16)
    w.turn(tokens(14))
    w.flush()
    assert w.pool(groups.split()[0]).free == 0
    run = w.start(tokens(15))
    assert run.reused == 14
    run.prefill().close()
    assert w.hit(tokens(15)) == 15


def test_s60_a_tail_that_somebody_else_needs_is_not_overwritten():
    w = World("full", pages=5, max_sequences=2, max_length=16, max_utilization_for_resume=1.0)
    w.turn(tokens(14))
    a = w.start(join(tokens(14), fresh()))  # the last free page
    b = w.open(join(tokens(14), fresh()))
    if b.resume():  # the tail's own page, if nobody needs it any more
        assert b.reused == 14
        a.prefill()
        b.prefill()
    else:
        a.prefill()
        a.close()
        assert b.resume()
        b.prefill()


@pytest.mark.parametrize("groups", ["full", "full recurrent", "full window:8 recurrent", "window:4+1"])
@pytest.mark.parametrize("order", ["writer first", "reader first", "together"])
def test_s61_writing_on_after_end(groups, order):
    w = World(groups)
    a = w.start(tokens(12))
    a.dispatch(tokens(6))
    a.commit(6, end=True)
    if order == "reader first":
        b = w.start(join(tokens(6), tokens(8, "b")))
        assert b.reused == 6
        b.prefill([1, 7])
    assert a.reserve(2)
    if order == "together":
        b = w.start(join(tokens(6), tokens(8, "b")))
        assert b.reused == 6
        assert b.reserve(8)
        w.prepare(a, b)
        a.write(tokens(8)[6:])
        b.write(tokens(8, "b"))
        a.advance()
        b.commit()
    else:
        w.prepare(a)
        a.write(tokens(8)[6:])
        a.advance()
    if order == "writer first":
        b = w.start(join(tokens(6), tokens(8, "b")))
        assert b.reused == 6
        b.prefill([1, 7])
    a.dispatch(tokens(12)[8:])
    a.advance()
    assert (a.seq.committed, a.seq.length) == (6, 12)
    w.close_all()
    assert w.hit(tokens(12)) == 6
    assert w.hit(join(tokens(6), tokens(8, "b"))) == 14


# ------------------------------------------------------------------------------------------------ many siblings

HEAD = [7, 7]


def sibling(i, last=1):
    return [*HEAD, i, last]


def family(children, rows=512):
    """A manager whose root's child [1, 2, 3, 4] has `children` children [7, 7, i, 1], i = 0, 10, 20, ..."""
    config = jkv.CacheConfig(
        layers={"full": jkv.AttentionLayer({"kv": jkv.Buffer((1,), jnp.int8)})},
        max_sequences=rows,
        max_length=64,
        page_size=4,
        tiers=(jkv.DeviceTier(pages=children + 2 * rows),),
    )
    manager = jkv.CacheManager(config)
    state = manager.init()
    for at in range(0, children, rows):
        batch = []
        for i in range(at, min(at + rows, children)):
            prompt = np.array([1, 2, 3, 4, *sibling(10 * i)], np.int32)
            seq = manager.open(prompt)
            assert seq.resume()
            assert seq.reserve(8 - seq.length)
            batch.append((seq, prompt))
        state, _ = manager.prepare(state, [seq for seq, _ in batch])
        for seq, prompt in batch:
            seq.commit(prompt[seq.length :])
            seq.close()
    manager.check()
    return manager, state


def counted(call):
    """How many Python and C functions `call` calls, and what it returns: a cost that no noise touches."""
    count = 0

    def count_calls(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return count, result


def request(manager, state, prompt):
    """Function calls of the host's part of one request; what prepare does on the device is left out."""

    def admit():
        seq = manager.open(prompt)
        assert seq.resume() and seq.reserve(len(prompt) - seq.length)
        return seq

    admitting, seq = counted(admit)
    reused = seq.length
    state, _ = manager.prepare(state, [seq])
    finishing, _ = counted(lambda: (seq.commit(prompt[reused:]), seq.close()))
    return admitting + finishing, reused, state


def many_children(children):
    managers = dict.fromkeys((100, children))
    for n in managers:
        managers[n] = family(n)
    big, state = managers[children]
    last = children - 1
    for i in (0, 1, children // 3, last):  # the best one: three of four tokens of its page
        assert big.probe([1, 2, 3, 4, *sibling(10 * i, last=9), 5], max_reuse=9).tokens == 7
        assert big.probe([1, 2, 3, 4, *sibling(10 * i), 5], max_reuse=9).tokens == 8
        assert big.probe([1, 2, 3, 4, *sibling(10 * i + 5), 5], max_reuse=9).tokens == 6
    assert big.probe([1, 2, 3, 4, 7, 8, 0, 1], max_reuse=8).tokens == 5
    assert big.probe([1, 2, 3, 4, 8, 7, 0, 1], max_reuse=8).tokens == 4

    calls = {n: [] for n in managers}
    for k in range(40):
        for n, (manager, state) in managers.items():
            prompt = np.array([1, 2, 3, 4, *sibling(10 * k, last=k + 2)], np.int32)
            count, reused, state = request(manager, state, prompt)
            managers[n] = manager, state
            assert reused == 7
            calls[n].append(count)
    for manager, _ in managers.values():
        manager.check()
    few, many = np.median(calls[100]), np.median(calls[children])
    assert many <= 1.3 * few, f"a request beside {children} siblings calls {many} functions, one beside 100 {few}"


def test_s62_many_siblings():
    many_children(20_000)


@pytest.mark.slow
def test_s62_a_hundred_thousand_siblings():
    many_children(100_000)
