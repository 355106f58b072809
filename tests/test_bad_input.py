"""Every misuse raises a jkv error that names the numbers, and changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

GROUPS = "full window:8 recurrent"


def picture(w, *runs):
    """All that a caller can see of the manager and of these sequences."""
    seqs = [run.seq for run in runs]
    return w.manager.stats(), [(s.status, s.row, s.committed, s.length, s.capacity, s.match) for s in seqs]


def refused(w, error, call, *runs, match=None):
    """`call` raises `error`; the manager is as it was."""
    before = picture(w, *runs)
    with pytest.raises(error, match=match) as raised:
        call()
    assert isinstance(raised.value, jkv.CacheError)
    assert len(str(raised.value)) > 10
    w.check()
    assert picture(w, *runs) == before


def goes_on(w):
    """The next calls work, bytes included."""
    w.flush()
    run = w.start(join(tokens(8), fresh(2))).prefill()
    run.close()
    assert w.hit(run.prompt) == 10
    for run in list(w.runs):
        if run.seq.status == "suspended":
            assert run.resume()
        if not run.ended:
            run.step(fresh(2))
        run.close()
    assert all(pool.private == 0 for pool in w.pools().values())


def test_the_errors():
    for error in (jkv.ConfigError, jkv.OutOfPagesError, jkv.SequenceStateError, jkv.IntegrityError, jkv.StoreError):
        assert issubclass(error, jkv.CacheError)
    assert issubclass(jkv.ConfigError, ValueError)


# ------------------------------------------------------------------------------------------------ ids

BAD_TOKENS = {
    "jax": lambda: jnp.arange(3, dtype=jnp.int32),
    "jax in a list": lambda: [jnp.int32(1), jnp.int32(2)],
    "float": lambda: np.array([1.0, 2.0]),
    "floats in a list": lambda: [1.5, 2.0],
    "bool": lambda: np.array([True, False]),
    "str": lambda: "abc",
    "strings": lambda: ["a", "b"],
    "bytes": lambda: b"abc",
    "two dimensions": lambda: np.zeros((2, 3), np.int32),
    "scalar": lambda: 5,
    "None": lambda: None,
    "None inside": lambda: [1, None],
    "object": lambda: np.array([1, {}], object),
    "negative": lambda: [1, -1],
    "2**31": lambda: [2**31],
    "2**70": lambda: [2**70],
    "uint64": lambda: np.array([2**63 + 5], np.uint64),
    "ragged": lambda: [[1, 2], [3]],
}


@pytest.mark.parametrize("kind", BAD_TOKENS)
def test_bad_tokens(kind):
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    bad = BAD_TOKENS[kind]()
    refused(w, jkv.ConfigError, lambda: w.manager.open(bad), run)
    refused(w, jkv.ConfigError, lambda: w.manager.probe(bad), run)
    run.dispatch(fresh(4))
    refused(w, jkv.ConfigError, lambda: run.seq.commit(bad), run)
    run.commit()
    goes_on(w)


def test_a_jax_array_is_named():
    w = World("full")
    with pytest.raises(jkv.ConfigError, match=r"(?i)jax"):
        w.manager.open(jnp.arange(3, dtype=jnp.int32))


def test_a_prompt_beyond_max_length():
    w = World(GROUPS, max_length=16)
    run = w.start(tokens(8)).prefill()
    for call in (w.manager.open, w.manager.probe):
        refused(w, jkv.ConfigError, lambda call=call: call(tokens(17)), run, match=r"17.*16|16.*17")
    goes_on(w)


def test_lengths_beyond_max_length():
    w = World(GROUPS, max_length=16)
    run = w.start(tokens(8)).prefill()
    for call in (lambda: run.seq.reserve(9), lambda: run.seq.resize(17), lambda: run.seq.resize(100, 8)):
        refused(w, jkv.OutOfPagesError, call, run, match="16")
    goes_on(w)


@pytest.mark.parametrize("bad", [-1, 1.5, "2", None, True, np.float32(2)])
def test_bad_counts(bad):
    w = World("full window:8")
    run = w.start(tokens(8)).prefill()
    run.dispatch(fresh(4))
    for call in (run.seq.reserve, run.seq.advance, run.seq.rewind, run.seq.resize):
        refused(w, jkv.ConfigError, lambda call=call: call(bad), run)
    run.commit()
    if bad is not None:
        refused(w, jkv.ConfigError, lambda: run.seq.resize(20, bad), run)
        refused(w, jkv.ConfigError, lambda: w.manager.open(tokens(8), max_reuse=bad), run)
        refused(w, jkv.ConfigError, lambda: w.manager.probe(tokens(8), max_reuse=bad), run)
    goes_on(w)


@pytest.mark.parametrize("bad", ["x", None, 3, {"salt": 1}])
def test_a_scope_that_is_none(bad):
    w = World("full")
    refused(w, jkv.ConfigError, lambda: w.manager.open(tokens(8), scope=bad))
    refused(w, jkv.ConfigError, lambda: w.manager.probe(tokens(8), scope=bad))
    goes_on(w)


@pytest.mark.parametrize(
    "fields", [{"salt": 1.5}, {"salt": True}, {"adapter": b"x"}, {"adapter": ("x",)}, {"version": None}, {"salt": [1]}]
)
def test_scopes_are_typed(fields):
    with pytest.raises(jkv.ConfigError, match=next(iter(fields))):
        jkv.Scope(**fields)


# ------------------------------------------------------------------------------------------------ the order of calls


@pytest.mark.parametrize("groups", ["full", GROUPS, "recurrent"])
def test_commit_and_advance_beyond_what_was_reserved(groups):
    w = World(groups)
    run = w.start(tokens(8)).prefill()
    refused(w, jkv.SequenceStateError, lambda: run.seq.commit([1]), run)  # nothing reserved
    refused(w, jkv.SequenceStateError, lambda: run.seq.advance(1), run)
    assert run.reserve(3)
    refused(w, jkv.SequenceStateError, lambda: run.seq.commit([1, 2, 3]), run)  # reserved, but not prepared
    refused(w, jkv.SequenceStateError, lambda: run.seq.advance(3), run)
    w.prepare(run)
    assert run.seq.reserve(8)  # more than at the last prepare
    w.check()
    refused(w, jkv.SequenceStateError, lambda: run.seq.commit([1, 2, 3, 4]), run, match=r"4.*11")
    refused(w, jkv.SequenceStateError, lambda: run.seq.advance(4), run, match=r"4.*11")
    run.write(fresh(3))
    run.commit()
    refused(w, jkv.SequenceStateError, lambda: run.seq.advance(1), run)
    goes_on(w)


def test_with_a_state_the_length_moves_once_per_prepare():
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    run.dispatch(tokens(12)[8:])
    run.advance(4)
    assert run.reserve(4)
    refused(w, jkv.SequenceStateError, lambda: run.seq.advance(1), run)
    refused(w, jkv.SequenceStateError, lambda: run.seq.commit(join(tokens(12)[8:], [1])), run)
    run.commit(4)
    goes_on(w)


def test_without_a_state_it_may_move_more_often():
    w = World("full window:8")
    run = w.start(tokens(8)).prefill()
    assert run.reserve(4)
    w.prepare(run)
    run.write(tokens(12)[8:])
    run.seq.advance(1)
    run.seq.advance(2)
    run.seq.commit(tokens(12)[8:])
    run.held, run.flight = tokens(12), tokens(0)
    assert (run.seq.committed, run.seq.length) == (12, 12)
    goes_on(w)


CALLS = {
    "reserve": lambda seq: seq.reserve(1),
    "resize": lambda seq: seq.resize(20),
    "advance": lambda seq: seq.advance(1),
    "advance 0": lambda seq: seq.advance(0),
    "commit": lambda seq: seq.commit([1]),
    "commit nothing": lambda seq: seq.commit([]),
    "commit end": lambda seq: seq.commit([], end=True),
    "rewind": lambda seq: seq.rewind(1),
    "stop_committing": lambda seq: seq.stop_committing(),
    "suspend": lambda seq: seq.suspend(),
}


@pytest.mark.parametrize("name", [*CALLS, "resume"])
@pytest.mark.parametrize("groups", ["full window:8", GROUPS])
def test_a_closed_sequence(name, groups):
    w = World(groups)
    run = w.start(tokens(8)).prefill()
    run.close()
    call = CALLS.get(name, lambda seq: seq.resume())
    refused(w, jkv.SequenceStateError, lambda: call(run.seq), run, match="closed")
    with pytest.raises(jkv.SequenceStateError, match="closed"):
        w.state, _ = w.manager.prepare(w.state, [run.seq])
    w.check()
    goes_on(w)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "stop_committing"])
@pytest.mark.parametrize("started", [True, False])
def test_a_suspended_sequence(name, started):
    w = World("full window:8")
    run = w.open(tokens(8))
    if started:
        assert run.resume()
        run.prefill()
        run.suspend()
    refused(w, jkv.SequenceStateError, lambda: CALLS[name](run.seq), run, match="suspended")
    with pytest.raises(jkv.SequenceStateError, match="suspended"):
        w.state, _ = w.manager.prepare(w.state, [run.seq])
    w.check()
    goes_on(w)


def test_an_active_sequence_does_not_resume():
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    refused(w, jkv.SequenceStateError, run.seq.resume, run, match="active")
    goes_on(w)


def test_in_flight():
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    run.dispatch(fresh(4))
    refused(w, jkv.SequenceStateError, run.seq.suspend, run)
    run.commit()
    run.suspend()
    goes_on(w)


def test_after_stop_committing():
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    run.stop_committing()
    run.dispatch(fresh(2))
    refused(w, jkv.SequenceStateError, lambda: run.seq.commit(run.flight), run)
    run.advance()
    goes_on(w)


def test_a_sequence_of_another_manager():
    w, other = World(GROUPS), World(GROUPS)
    run, theirs = w.start(tokens(8)).prefill(), other.start(tokens(8)).prefill()
    assert theirs.reserve(1)
    refused(w, jkv.SequenceStateError, lambda: w.manager.prepare(w.state, [theirs.seq]), run)
    refused(w, jkv.SequenceStateError, lambda: w.manager.prepare(w.state, [run.seq, theirs.seq]), run)
    other.check()
    goes_on(w)
    goes_on(other)


@pytest.mark.parametrize("bad", ["x", None, 3, object()])
def test_prepare_of_what_is_no_sequence(bad):
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    refused(w, jkv.CacheError, lambda: w.manager.prepare(w.state, [bad]), run)
    goes_on(w)


def test_a_sequence_listed_twice():
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    assert run.reserve(1)
    refused(w, jkv.SequenceStateError, lambda: w.manager.prepare(w.state, [run.seq, run.seq]), run)
    w.prepare(run)
    run.write(fresh())
    run.commit()
    goes_on(w)


@pytest.mark.parametrize("copies", [True, False])
def test_prepare_on_a_donated_state(copies):
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill(snapshot=copies)
    old = w.state
    assert run.reserve(4)
    w.prepare(run)
    run.write(fresh(4))
    run.commit(snapshot=copies)
    assert run.reserve(1)
    refused(w, jkv.SequenceStateError, lambda: w.manager.prepare(old, [run.seq]), run, match="donated")
    w.prepare(run)  # nothing that was pending is lost
    run.write(fresh())
    run.commit()
    goes_on(w)


def test_prepare_on_a_state_that_the_users_step_donated():
    w = World("full recurrent")
    run = w.start(tokens(8)).prefill(snapshot=True)
    assert run.reserve(1)
    old = w.state
    w.state = jax.jit(lambda s: jax.tree.map(lambda x: x + 0, s), donate_argnums=0)(old)
    if not any(leaf.is_deleted() for leaf in jax.tree.leaves(old)):
        pytest.skip("nothing was donated")
    refused(w, jkv.SequenceStateError, lambda: w.manager.prepare(old, [run.seq]), run)
    w.prepare(run)
    run.write(fresh())
    run.commit()
    goes_on(w)


@pytest.mark.parametrize("bad", [None, 3, {}, "state"])
def test_prepare_on_what_is_no_state(bad):
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    refused(w, jkv.CacheError, lambda: w.manager.prepare(bad, [run.seq]), run)
    goes_on(w)


def test_a_state_of_another_manager():
    w, other = World(GROUPS), World(GROUPS, pages=32)
    run = w.start(tokens(8)).prefill()
    refused(w, jkv.CacheError, lambda: w.manager.prepare(other.state, [run.seq]), run)
    other.turn(tokens(8))
    goes_on(w)


def test_an_exception_between_prepare_and_commit():
    w = World(GROUPS)
    with pytest.raises(ZeroDivisionError), w.manager.open(tokens(8)) as seq:
        assert seq.resume()
        assert seq.reserve(8)
        w.state, _ = w.manager.prepare(w.state, [seq])
        raise ZeroDivisionError
    assert seq.status == "closed"
    w.check()
    assert all(pool.free == pool.total for pool in w.pools().values())
    goes_on(w)


# ------------------------------------------------------------------------------------------------ the device half


def good_step(w, run):
    rows = np.array([run.seq.row], np.int32)
    positions = np.array([[run.seq.length]], np.int32)
    return rows, positions, {"kv": np.zeros((1, 1, 3), np.int32)}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("layer", "values"),
    [
        ("nope", {"kv": np.zeros((1, 1, 3), np.int32)}),
        (None, {"kv": np.zeros((1, 1, 3), np.int32)}),
        ("ssm0", {"h": np.zeros((1, 1, 2), np.int32)}),
        ("window:8.0", {"k": np.zeros((1, 1, 3), np.int32)}),
        ("window:8.0", {}),
        ("window:8.0", {"kv": np.zeros((1, 1, 3), np.int32), "v": np.zeros((1, 1, 3), np.int32)}),
        ("window:8.0", {"kv": np.zeros((1, 1, 4), np.int32)}),
        ("window:8.0", {"kv": np.zeros((1, 2, 3), np.int32)}),
        ("window:8.0", {"kv": np.zeros((2, 1, 3), np.int32)}),
        ("window:8.0", {"kv": np.zeros((1, 3), np.int32)}),
        ("window:8.0", {"kv": np.zeros((1, 1, 3), np.float32)}),
        ("window:8.0", {"kv": np.zeros((1, 1, 3), np.int8)}),
    ],
    ids=[
        "unknown layer", "no layer", "recurrent layer", "unknown buffer", "no buffer", "one buffer too many", "width",
        "T", "B", "rank", "float32", "int8",
    ],
)  # fmt: skip
def test_append_of_what_does_not_fit(jit, layer, values):
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    rows, positions, _ = good_step(w, run)

    def step(state, rows, positions, values):
        return jkv.append(state, layer, rows, positions, values)

    step = jax.jit(step) if jit else step
    refused(w, jkv.ConfigError, lambda: step(w.state, rows, positions, values), run)
    goes_on(w)


@pytest.mark.parametrize(
    ("rows", "positions"),
    [
        (np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32)),
        (np.zeros(1, np.float32), np.zeros((1, 1), np.int32)),
        (np.zeros(2, np.int32), np.zeros((1, 1), np.int32)),
        (np.zeros(1, np.int32), np.zeros(1, np.int32)),
        (np.zeros(1, np.int32), np.zeros((1, 1), np.float32)),
    ],
    ids=["rows rank", "rows dtype", "rows B", "positions rank", "positions dtype"],
)
def test_bad_rows_and_positions(rows, positions):
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    values = {"kv": np.zeros((1, 1, 3), np.int32)}
    refused(w, jkv.ConfigError, lambda: jkv.append(w.state, "window:8.0", rows, positions, values), run)
    goes_on(w)


@pytest.mark.parametrize(
    "call",
    [
        lambda state, rows: jkv.gather(state, "nope", rows, 4),
        lambda state, rows: jkv.gather(state, "ssm0", rows, 4),
        lambda state, rows: jkv.read_state(state, "nope", rows),
        lambda state, rows: jkv.read_state(state, "full.0", rows),
        lambda state, rows: jkv.write_state(state, "full.0", rows, {"k": np.zeros((1, 2), np.int32)}),
        lambda state, rows: jkv.write_state(state, "ssm0", rows, {"h": np.zeros((1, 2), np.int32)}),
        lambda state, rows: jkv.write_state(
            state, "ssm0", rows, {"h": np.zeros((1, 3), np.int32), "c": np.zeros((1, 1, 3), np.int32)}
        ),
        lambda state, rows: jkv.write_state(
            state, "ssm0", rows, {"h": np.zeros((1, 2), np.float32), "c": np.zeros((1, 1, 3), np.int32)}
        ),
        lambda state, rows: jkv.pool(state, "nope", "kv"),
        lambda state, rows: jkv.pool(state, "full.0", "nope"),
        lambda state, rows: jkv.with_pool(state, "full.0", "nope", jnp.zeros((65, 4, 2), jnp.int32)),
        lambda state, rows: jkv.with_pool(state, "full.0", "k", jnp.zeros((64, 4, 2), jnp.int32)),
        lambda state, rows: jkv.with_pool(state, "full.0", "k", jnp.zeros((65, 4, 2), jnp.float32)),
        lambda state, rows: jkv.table_for(state, "nope", rows),
        lambda state, rows: jkv.table_for(state, "ssm0", rows),
        lambda state, rows: jkv.table_for(state, "full.0", rows, "nope"),
        lambda state, rows: jkv.slots_for(state, "full.0", rows),
        lambda state, rows: jkv.slots_for(state, "nope", rows),
    ],
    ids=[
        "gather unknown", "gather recurrent", "read_state unknown", "read_state attention", "write_state attention",
        "write_state missing", "write_state shape", "write_state dtype", "pool layer", "pool buffer",
        "with_pool buffer", "with_pool shape", "with_pool dtype", "table_for unknown", "table_for recurrent",
        "table_for buffer", "slots_for attention", "slots_for unknown",
    ],
)  # fmt: skip
def test_device_functions_name_what_is_wrong(call):
    w = World(GROUPS)
    run = w.start(tokens(8)).prefill()
    rows = np.array([run.seq.row], np.int32)
    refused(w, jkv.ConfigError, lambda: call(w.state, rows), run)
    goes_on(w)


# ------------------------------------------------------------------------------------------------ the configuration

KV = jkv.kv_buffers(1, 4)


@pytest.mark.parametrize(
    ("match", "make"),
    [
        ("shape", lambda: jkv.Buffer((0,))),
        ("shape", lambda: jkv.Buffer((2, -1))),
        ("shape", lambda: jkv.Buffer((2.5,))),
        ("dtype", lambda: jkv.Buffer((2,), np.float64)),
        ("dtype", lambda: jkv.Buffer((2,), "nonsense")),
        ("page_size", lambda: jkv.Buffer((2,), page_size=0)),
        ("kv_heads", lambda: jkv.kv_buffers(0, 4)),
        ("head_dim", lambda: jkv.kv_buffers(1, -4)),
        ("window", lambda: jkv.AttentionLayer(KV, window=0)),
        ("sinks", lambda: jkv.AttentionLayer(KV, window=4, sinks=-1)),
        ("buffers", lambda: jkv.AttentionLayer({})),
        ("buffers", lambda: jkv.RecurrentLayer({"h": (2,)})),
        ("bytes", lambda: jkv.DeviceTier(bytes=0)),
        ("layers", lambda: config(layers={})),
        ("layers", lambda: config(layers={"a": KV})),
        ("max_sequences", lambda: config(max_sequences=0)),
        ("max_length", lambda: config(max_length=0)),
        ("page_size", lambda: config(page_size=-4)),
        ("page_size", lambda: config(page_size=4.0)),
        ("reuse_backoff", lambda: config(reuse_backoff=-1)),
        ("max_utilization_for_resume", lambda: config(max_utilization_for_resume=0.0)),
        ("max_utilization_for_resume", lambda: config(max_utilization_for_resume=1.5)),
        ("tiers", lambda: config(tiers=())),
        ("model", lambda: config(model=3)),
        ("window:9", lambda: jkv.CacheManager(config(tiers=(jkv.DeviceTier(pages={"full": 4, "window:9": 4}),)))),
        ("full", lambda: jkv.CacheManager(config(tiers=(jkv.DeviceTier(pages={}),)))),
    ],
)
def test_declarations(match, make):
    with pytest.raises(jkv.ConfigError, match=match):
        make()


def config(**fields):
    defaults = {"layers": {"a": jkv.AttentionLayer(KV)}, "max_sequences": 2, "max_length": 32}
    return jkv.CacheConfig(**{**defaults, "tiers": (jkv.DeviceTier(pages=8),), **fields})
