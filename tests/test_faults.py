"""FAULTS: real-world faults, replayed with small numbers. Groups are full + recurrent unless the row says otherwise."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, join, kv_values, make_config, prefix_hashes, tokens

import jkv
from jkv.errors import IntegrityError
from jkv.layout import make_layout
from jkv.plan import PlanBuilder


def hybrid(**config):
    return World("full recurrent", **config)


def test_f01_a_branch_point_leaves_a_state():
    w = hybrid()
    prompts = [join(tokens(12), tokens(6, key)) for key in "abc"]
    a = w.turn(prompts[0], "stops", snapshot=None)
    assert a.reused == 0
    b = w.start(prompts[1])
    assert (b.reused, b.seq.match.attention_tokens, b.seq.match.limited_by) == (0, 12, "recurrent")
    assert w.manager.stats().lost_tokens["recurrent"] == 12
    assert 12 in b.seq.snapshot_points
    b.prefill("stops").close()
    assert w.start(prompts[2]).reused == 12
    assert w.manager.stats().lost_tokens["recurrent"] == 12
    w.prepare()


@pytest.mark.parametrize("states", [(4, 8, 12), (4, 12), (12,)])
def test_f03_a_backoff_lands_on_a_state(states):
    w = hybrid(reuse_backoff=4)
    w.turn(tokens(12), np.diff([0, *states]).tolist())
    expected = max([n for n in states if n <= 8], default=0)
    assert w.hit(join(tokens(12), fresh())) == expected
    run = w.start(join(tokens(12), tokens(5, "b")))
    assert run.reused == expected
    run.prefill()


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("close", [True, False])
def test_f04_no_state_where_no_chunk_ended(partial, close):
    w = hybrid(page_size=8, partial_reuse=partial)
    w.turn(tokens(12), [6, 6], close=close)
    for tail in (tokens(8), tokens(9), join(tokens(8), fresh()), join(tokens(9), fresh())):
        assert w.hit(tail) == (6 if partial else 0)


def test_f05_attention_alone_is_no_hit():
    w = hybrid()
    w.scribble()
    w.turn(tokens(8), snapshot=False, close=False)
    b = w.start(join(tokens(8), tokens(3, "b")))
    assert (b.reused, b.seq.match.attention_tokens) == (0, 8)
    w.prepare(b)  # the oracle: the live state is zero
    assert all(not w.bytes["ssm0", name][w.slot(b)].any() for name in ("h", "c"))
    b.prefill()


def test_f06_a_recycled_state_slot_is_zero():
    w = hybrid(pages={"full": 16, "recurrent": 1}, max_sequences=1)
    a = w.start(tokens(8))
    a.dispatch(tokens(8))
    a.close()
    b = w.start(tokens(10, "b"))
    w.prepare(b)
    assert w.slot(b) == 1
    b.prefill()
    b.close()
    a = w.start(tokens(20))
    assert a.reused == 0
    a.dispatch(tokens(10))
    a.advance()
    a.close()  # dropped at 10
    a = w.start(tokens(20))
    assert a.reused == 0
    w.prepare(a)
    assert not w.bytes["ssm0", "h"][w.slot(a)].any()
    a.prefill([3, 17])


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("groups", ["full recurrent", "full", "full window:4"])
def test_f07_an_aborted_step_publishes_nothing(prepared, groups):
    w = World(groups)
    a = w.start(tokens(12))
    assert a.reserve(12)
    if prepared:
        w.prepare(a)
    a.close()
    match = w.probe(join(tokens(12), fresh()))
    assert (match.tokens, match.raw_tokens) == (0, 0)
    assert w.hit(join(tokens(12), fresh())) == 0
    assert all(pool.free == pool.total for pool in w.pools().values())


def test_f08_rewind_with_a_state_raises_and_changes_nothing():
    w = World("full window:8 recurrent")
    run = w.start(tokens(12)).prefill()
    run.dispatch(fresh(4))
    run.advance()
    before = w.manager.stats()
    with pytest.raises(jkv.SequenceStateError, match="2"):
        run.seq.rewind(2)
    w.check()
    assert w.manager.stats() == before
    assert (run.seq.committed, run.seq.length) == (12, 16)
    w.flush()  # the oracle: all groups are still at 16
    run.rewind(0)
    run.commit()
    run.step(fresh(2))


@pytest.mark.parametrize("groups", ["full window:8", "full window:4 window:8+2", "window:1", "full"])
def test_f08_rejected_drafts_are_forgotten_in_every_group(groups):
    w = World(groups)
    run = w.start(tokens(12)).prefill()
    accepted, rejected = tokens(14)[12:], fresh(2)
    run.dispatch(join(accepted, rejected))
    run.advance()
    run.rewind(2)
    assert (run.seq.committed, run.seq.length) == (12, 14)
    run.commit()
    w.flush()
    assert w.probe(join(tokens(14), rejected)).raw_tokens == 12  # 14 is not a whole page
    run.step(tokens(18)[14:])
    run.close()
    assert w.hit(tokens(18)) == 18
    assert w.hit(join(tokens(14), rejected)) == w.probe(join(tokens(14), fresh(2))).tokens
    assert w.probe(join(tokens(14), rejected)).raw_tokens == 14


def test_f08_rewind_takes_no_more_than_what_is_uncommitted():
    w = World("full window:8")
    run = w.start(tokens(12)).prefill()
    run.dispatch(fresh(4))
    run.advance()
    with pytest.raises(jkv.CacheError, match="5"):
        run.seq.rewind(5)
    w.check()
    assert (run.seq.committed, run.seq.length) == (12, 16)
    run.rewind(4)
    w.flush()
    run.step(tokens(20)[12:])


def test_f08_again_and_again():
    w = World("full window:8 window:3", max_length=128)
    run = w.start(tokens(5)).prefill()
    rng = np.random.default_rng(0)
    while run.seq.length < 100:
        drafts, accept = int(rng.integers(1, 7)), int(rng.integers(0, 7))
        accept = min(accept, drafts)
        run.dispatch(join(tokens(110)[run.seq.length :][:accept], fresh(drafts - accept)))
        run.advance()
        run.rewind(drafts - accept)
        if rng.integers(2):
            run.commit()
    run.commit()
    run.close()
    assert w.hit(tokens(110)) == run.held.size


def test_f09_the_last_token_is_never_fed_twice():
    w = hybrid()
    w.turn(tokens(4))
    assert w.probe(tokens(4)).tokens == 4
    run = w.start(tokens(4))
    assert run.reused == 0
    run.prefill()


def test_f10_one_shot_requests_do_not_push_out_a_long_chain():
    w = hybrid(page_size=8, pages={"full": 64, "recurrent": 5}, max_sequences=1)
    w.turn(tokens(32), [8, 8, 8, 8])
    assert [w.probe(tokens(n)).tokens for n in (8, 16, 24, 32)] == [8, 16, 24, 32]
    for key in range(8):
        w.turn(tokens(6, f"one-shot {key}"), snapshot=None)
    run = w.start(tokens(36))
    assert run.reused == 32
    run.prefill()


@pytest.mark.parametrize("min_snapshot", [True, False])
def test_f11_pages_that_left_the_window(min_snapshot):
    w = World("window:8", pages=6, max_length=24, max_sequences=2, min_snapshot=min_snapshot)
    a = w.start(tokens(20)).prefill([12, 8])
    a.close()
    pool = w.pool("window:8")
    assert (pool.free, pool.tree, pool.private) == ((4, 2, 0) if min_snapshot else (1, 5, 0))
    d = w.start(tokens(16, "d")).prefill()  # takes the ids of A's pages 0 to 2
    pool = w.pool("window:8")
    assert pool.free + pool.tree + pool.private == 6
    assert w.probe(join(tokens(12), fresh())).tokens == 0
    d.close()
    assert w.probe(join(tokens(20), fresh())).tokens == 20
    assert w.hit(join(tokens(12), fresh())) == 0
    run = w.start(tokens(21))
    assert run.reused == 20
    run.prefill().close()
    assert w.hit(tokens(21)) == 21


@pytest.mark.parametrize(("partial", "expected"), [(True, 3), (False, 0)])
@pytest.mark.parametrize("groups", ["full", "full window:8"])
def test_f14_a_short_lookup_changes_nothing(partial, expected, groups):
    w = World(groups, partial_reuse=partial)
    w.turn(tokens(8))
    before = w.manager.stats()
    for _ in range(3):
        assert w.probe(tokens(3)).tokens == expected
        assert w.manager.open(tokens(3), max_reuse=3).close() is None
    assert w.manager.stats() == before
    assert w.hit(tokens(3)) == expected
    assert w.pools() == before.pools
    assert w.hit(tokens(8)) == 8


def test_f15_closed_while_a_step_was_reserved():
    w = World("full", page_size=1, pages=8)
    run = w.start(tokens(3)).prefill()
    for at in (3, 4):
        run.step(tokens(5)[at : at + 1])
    assert run.reserve(1)
    w.prepare(run)
    run.close()
    pool = w.pool("full")
    assert (pool.free + pool.tree, pool.tree, pool.private) == (8, 5, 0)


@pytest.mark.parametrize("groups", ["full", "full recurrent", "full window:8 recurrent"])
def test_f16_a_split_run_is_released_exactly(groups):
    w = World(groups, pages=16, max_length=64)
    a = w.turn(tokens(16), [8, 8], close=False)
    b = w.start(join(tokens(8), tokens(8, "b")))
    assert b.reused == 8
    b.prefill(snapshot=True)
    a.close()
    b.close()
    assert (w.manager.stats().active, w.manager.stats().suspended) == (0, 0)
    for pool in w.pools().values():
        assert pool.private == 0
        assert pool.evictable == pool.tree
    w.turn(tokens(64, "everything")).close()
    assert w.hit(tokens(64, "everything")) == 64


@pytest.mark.parametrize("page_size", [4, 8, 16])
@pytest.mark.parametrize("clear", [False, True])
def test_f17_making_room_evicts_the_own_snapshot(page_size, clear):
    w = World("recurrent", page_size=page_size, pages=2, max_sequences=1)
    run = w.start(tokens(14))
    run.step(tokens(8), snapshot=True)
    if clear:
        with pytest.raises(jkv.SequenceStateError, match="1"):
            w.manager.clear()
        w.check()
    run.step(tokens(12)[8:], snapshot=True)
    w.flush()
    run.step(tokens(14)[12:], snapshot=False)
    run.close()
    assert w.hit(tokens(14)) == 14


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("groups", ["full", "full recurrent", "full window:8 recurrent"])
def test_f18_aborted_in_mid_prefill(in_flight, groups):
    w = World(groups)
    a = w.start(tokens(20))
    a.step(tokens(8), snapshot=True)
    if in_flight:
        a.dispatch(tokens(20)[8:16])
    a.close()
    b = w.start(join(tokens(8), fresh()))
    assert b.reused == 8
    b.prefill()
    c = w.start(tokens(20))
    assert c.reused == 8
    c.prefill()


@pytest.mark.parametrize("groups", ["full", "full window:8", "full recurrent"])
def test_f19_a_page_in_use_by_another_is_never_written(groups):
    w = World(groups)
    c = w.turn(tokens(8), [6, 2], close=False)
    w.flush()
    b = w.start(join(tokens(6), tokens(4, "b")))
    assert b.reused == 6
    w.flush()
    for group in w.tables:
        assert w.table(b, group)[1] != w.table(c, group)[1]
    b.prefill([2, 2])  # tokens 7 and 8 of its own; the oracle reads C after each step
    c.step(tokens(12)[8:])
    w.close_all()
    assert w.hit(tokens(12)) == 12
    assert w.hit(join(tokens(6), tokens(4, "b"))) == 10


def test_f25_a_dispatched_step_reads_the_table_of_its_time():
    w = World("full", pages=8, max_sequences=2, max_length=32)
    weights = jnp.eye(512, dtype=jnp.float32) * 0.5

    @jax.jit
    def late_gather(state, rows, rounds):
        late = jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ weights), weights)
        rows = rows + (late[0, 0] > 2).astype(jnp.int32)
        return jkv.gather(state, "full.0", rows, 8)

    def reads(out):
        wanted = kv_values(prefix_hashes(tokens(8)), "full.0", "k", (2,))
        return np.array_equal(np.asarray(out["k"])[0], wanted)

    for rounds in (1, 400):
        run = w.start(tokens(8)).prefill()
        w.flush()
        w.state, rows = w.manager.prepare(w.state, [run.seq])
        out = late_gather(w.state, rows, jnp.int32(rounds))
        rows[:] = 1 - rows  # what prepare returned is the caller's: nothing else may depend on it
        rows[:] = 1 - rows
        run.close()
        w.manager.clear()
        for key in range(4):  # other tables, other contents, the same pages and rows
            other = w.start(tokens(30, key)).prefill([9, 9, 12])
            other.close()
        assert reads(out)
        w.manager.clear()


@pytest.mark.parametrize("groups", ["full", "full recurrent"])
def test_f27_all_hold_and_all_want_more(groups):
    pages = dict.fromkeys(groups.split(), 8)
    w = World(groups, pages=pages, max_sequences=4, max_length=32, max_utilization_for_resume=1.0)
    runs = [w.start(tokens(8, key)).prefill() for key in "abcd"]
    want = [tokens(11, key)[8:] for key in "abcd"]
    for run in runs:
        before = w.manager.stats()
        assert not run.reserve(1)
        assert w.manager.stats() == before
    assert w.flush() == {}
    runs[3].close()  # dropped: A and B get its two pages
    runs[0].step(want[0])
    runs[1].step(want[1])
    assert not runs[2].reserve(1)
    again = w.open(join(tokens(8, "d"), want[3]))
    before = w.manager.stats()
    if again.seq.resume():  # nothing of it is left, so it holds nothing yet
        assert again.seq.length == 0
        again.started, again.held = True, again.held[:0]
        w.check()
        assert not again.reserve(11)
    else:
        w.check()
        assert w.manager.stats() == before
    runs[0].close()
    runs[2].step(want[2])
    runs[1].close()
    runs[2].close()
    if again.seq.row is None:
        assert again.resume()
    again.prefill().close()
    assert w.hit(join(tokens(8, "d"), want[3])) == 11


@pytest.mark.parametrize("groups", ["full", "full recurrent"])
def test_f27_suspending_frees_nothing_but_always_comes_back(groups):
    w = World(groups, pages=8, max_sequences=4, max_length=32)
    runs = [w.start(tokens(8, key)).prefill() for key in "abcd"]
    for run in runs:
        run.suspend()
    assert runs[2].resume()
    assert not runs[2].reserve(1)
    runs[0].close()
    runs[2].step(fresh(3))
    runs[2].suspend()
    for run in (runs[1], runs[3]):
        assert run.resume()
        w.prepare(run)
        run.suspend()


@pytest.mark.parametrize("groups", ["full", "full recurrent", "full window:8"])
def test_f29_equal_modulo_256(groups):
    w = World(groups)
    w.turn([65] * 12)
    assert w.hit([321] * 12) == 0
    assert w.hit([65] * 12) == 12
    assert w.hit([65] * 6 + [321] * 6) in ((6, 0) if "recurrent" in groups else (6,))


@pytest.mark.parametrize("bad", [2**31, -1])
def test_f29_ids_that_are_none(bad):
    w = hybrid()
    run = w.start(tokens(4)).prefill()
    run.dispatch(fresh())
    for call in (w.manager.open, w.manager.probe, run.seq.commit):
        with pytest.raises(ValueError, match=str(bad)):
            call([bad])
    w.check()
    run.commit()


def layers(groups="full"):
    found = {"full": jkv.AttentionLayer(jkv.kv_buffers(1, 4)), "recurrent": jkv.RecurrentLayer({"h": jkv.Buffer((8,))})}
    return {name: found[name] for name in groups.split()}


def make(groups="full", **config):
    tier = jkv.DeviceTier(**{name: config.pop(name) for name in ("bytes", "pages") if name in config})
    defaults = {"max_sequences": 4, "max_length": 64, "page_size": 8}
    return jkv.CacheManager(jkv.CacheConfig(layers(groups), tiers=(tier,), **{**defaults, **config}))


@pytest.mark.parametrize("groups", ["full", "full recurrent", "recurrent"])
def test_f30_too_few_bytes_names_the_least_number(groups):
    with pytest.raises(jkv.ConfigError, match=r"bytes=1 .*64.*at least") as error:
        make(groups, bytes=1)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    with pytest.raises(jkv.ConfigError, match=str(least)):
        make(groups, bytes=least - 1)
    manager = make(groups, bytes=least)
    seq = manager.open()
    assert seq.resume()
    assert seq.reserve(64)
    manager.check()


def test_f30_pages_of_zero():
    with pytest.raises(jkv.ConfigError, match=r"at least 1.*0"):
        make(pages=0)
    with pytest.raises(jkv.ConfigError, match=r"full.*at least 1.*0"):
        make(pages={"full": 0})
    make(pages=1).check()  # fewer than max_length needs is fine
    with pytest.raises(jkv.ConfigError, match="exactly one"):
        make()
    with pytest.raises(jkv.ConfigError, match="exactly one"):
        make(pages=4, bytes=4000)


def test_f30_fewer_state_slots_than_sequences():
    with pytest.raises(jkv.ConfigError, match=r"3.*4"):
        make("full recurrent", pages={"full": 8, "recurrent": 3})
    make("full recurrent", pages={"full": 8, "recurrent": 4}).check()


def test_f30_can_ever_fit():
    manager = make(pages=4)
    assert manager.can_ever_fit(30, 2)
    assert not manager.can_ever_fit(30, 3)
    manager = make(pages=100)
    assert manager.can_ever_fit(60, 4)
    assert not manager.can_ever_fit(60, 5)  # max_length


@pytest.mark.parametrize("publish", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_f31_nan_in_a_recycled_page(publish, window):
    config = jkv.CacheConfig(
        layers={
            "attn": jkv.AttentionLayer(jkv.kv_buffers(1, 4, jnp.float32), window=window),
            "ssm": jkv.RecurrentLayer({"h": jkv.Buffer((3,), jnp.float32)}),
        },
        max_sequences=2,
        max_length=32,
        page_size=4,
        tiers=(jkv.DeviceTier(pages={"window:8" if window else "full": 6, "recurrent": 2}),),
    )
    manager = jkv.CacheManager(config)
    state = manager.init()

    @jax.jit
    def model(state, rows, positions, value):
        state = jkv.append(state, "attn", rows, positions, {"kv": jnp.full((1, 7, 2, 4), value, jnp.float32)})
        out = jkv.attend(state, "attn", rows, positions, jnp.ones((1, 7, 1, 4), jnp.float32))
        old = jkv.read_state(state, "ssm", rows)["h"]
        return jkv.write_state(state, "ssm", rows, {"h": old + value}), out, old

    def step(state, seq, n, value):
        assert seq.reserve(n)
        state, rows = manager.prepare(state, [seq])
        positions = np.full((1, 7), -1, np.int32)
        positions[0, :n] = np.arange(seq.length, seq.length + n)
        state, out, old = model(state, rows, positions, np.float32(value))
        return state, np.asarray(out)[:, :n], np.asarray(old)

    x, ids = manager.open(tokens(21, "x")), tokens(21, "x")
    assert x.resume()
    for at in (0, 7, 14):
        state, out, _ = step(state, x, 7, np.nan)
        assert np.isnan(out).all()
        if publish:
            x.commit(ids[at : at + 7])
        else:
            x.advance(7)
    x.close()
    assert manager.stats().pools["recurrent"].free >= 1
    y, ids = manager.open(tokens(21, "y")), tokens(21, "y")
    assert y.resume()
    for n in (1, 4, 7, 2, 5):
        state, out, old = step(state, y, n, 2.0)
        np.testing.assert_allclose(out, 2.0)
        assert np.isfinite(old).all()
        y.commit(ids[y.length :][:n])
        manager.check()


@pytest.mark.parametrize("ids", [(7, 9), (9, 3), (-2, 3), (3, -1)])
def test_f26_an_id_beyond_the_pool_is_an_error_on_the_host(ids):
    layout = make_layout(make_config("full recurrent", pages=8))  # ids 0 to 8
    builder = PlanBuilder(layout, np.zeros((0, 0, 0), np.int32), np.zeros(4, np.int32))
    builder.copy(0, 3, 8)
    builder.build()
    builder.copy(0, *ids)
    with pytest.raises(IntegrityError, match=r"\[0, 9\)"):
        builder.build()


@pytest.mark.parametrize("page", [-1, 9])
def test_f26_a_table_entry_beyond_the_pool(page):
    layout = make_layout(make_config("full window:8", pages=8))
    tables = np.full((2, 4, layout.max_pages), 3, np.int32)
    builder = PlanBuilder(layout, tables, np.zeros(4, np.int32))
    builder.mark(0, 1, 0, 2)
    builder.build()
    tables[1, 0, 1] = page
    with pytest.raises(IntegrityError, match=r"window:8.*\[0, 9\)"):
        builder.build()
