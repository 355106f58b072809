"""Disaggregated serving: one cache takes over from another, every byte verified."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv
from jkv.transfer import padded

GROUPS = ["full", "full window:8", "window:5+6", "full window:8 recurrent", "recurrent", "full window:1"]
export = jax.jit(jkv.export_pages)
imported = functools.partial(jax.jit, donate_argnames="state")(jkv.import_pages)


def take_over(sender, receiver, run, source):
    """`run`, just resumed in `receiver`, becomes a copy of `source` in `sender`; returns the sender's plan."""
    start, length = run.seq.length, source.seq.length
    sender.flush()
    plan = source.seq.transfer_plan(start)
    values = jax.tree.map(np.asarray, export(sender.state, plan))
    assert run.seq.resize(length, length)
    receiver.check()
    receiver.state, _ = receiver.manager.prepare(receiver.state, [run.seq])
    own = run.seq.transfer_plan(start)
    for (one, there), (two, here) in zip(plan.items(), own.items(), strict=True):
        assert one == two
        for buffer, transfer in there.items():
            assert np.array_equal(transfer.first_tokens, here[buffer].first_tokens)
            assert transfer.nbytes == here[buffer].nbytes
    receiver.state = imported(receiver.state, own, values)
    run.held = source.held
    receiver.fetch()
    receiver.verify()
    return plan


@pytest.mark.parametrize("length", [1, 7, 8, 21])
@pytest.mark.parametrize("groups", GROUPS)
def test_what_arrives_is_as_if_computed_here(groups, length):
    sender, receiver = World(groups, page_size=4), World(groups, page_size=4, pages=40)
    receiver.turn(fresh(9))  # other page ids than the sender's
    source = sender.start(tokens(length + 3))
    for i in range(0, length, 5):
        source.step(tokens(length)[i : i + 5])
    run = receiver.start(tokens(length + 3))
    take_over(sender, receiver, run, source)
    run.commit(snapshot=True)
    assert run.seq.committed == length
    for _ in range(3):
        new = fresh(2)
        run.step(new)
        source.step(new)
    run.close()
    assert receiver.hit(tokens(length)) == length
    source.close()


@pytest.mark.parametrize("known", [4, 8, 10])
@pytest.mark.parametrize("groups", ["full", "full window:8", "full window:8 recurrent"])
def test_only_what_the_receiver_lacks_moves(groups, known):
    sender, receiver = World(groups, page_size=4), World(groups, page_size=4)
    prompt = join(tokens(20), fresh())
    receiver.turn(prompt[:known], snapshot=True)
    source = sender.start(prompt)
    source.step(prompt[:20])
    run = receiver.start(prompt)
    assert run.reused == known
    plan = take_over(sender, receiver, run, source)
    full = next(buffers for layer, buffers in plan.items() if layer.startswith("full"))
    assert {transfer.num_pages for transfer in full.values()} == {5 - known // 4}
    run.commit(snapshot=True)
    run.step(prompt[20:], end=True)
    run.close()
    assert receiver.hit(prompt) == 21


def test_windows_take_no_pages_for_what_is_out_of_them():
    w = World("full window:8 window:5+6", page_size=4)
    run = w.start(tokens(40))
    before = {name: pool.free for name, pool in w.manager.stats().pools.items()}
    assert run.seq.resize(36, 32)
    taken = {name: before[name] - pool.free for name, pool in w.manager.stats().pools.items()}
    assert taken == {"full": 9, "window:8": 3, "window:5+6": 2 + 2}
    w.check()
    run.seq.close()
    w.check()


def test_room_beyond_what_was_written_needs_a_prepare():
    w = World("full", page_size=4)
    run = w.start(tokens(12))
    assert run.seq.resize(12, 8)
    with pytest.raises(jkv.SequenceStateError):
        run.seq.advance(1)
    w.state, _ = w.manager.prepare(w.state, [run.seq])
    run.seq.advance(1)
    run.seq.close()
    w.check()


@pytest.mark.parametrize("groups", ["full", "full window:8", "full window:8 recurrent"])
def test_without_room_nothing_changes(groups):
    w = World(groups, page_size=4, pages=5, max_length=64)
    other = w.start(tokens(8, "other"))
    other.step(other.prompt)
    run = w.start(tokens(30))
    with w.unchanged():
        assert not run.seq.resize(16, 16)


def test_a_scratch_receiver():
    config = {"page_size": 4, "window_scratch": jkv.WindowScratch()}
    sender, receiver = World("full window:8", page_size=4), World("full window:8", **config)
    source = sender.start(tokens(24))
    source.step(tokens(21))
    run = receiver.start(tokens(24))
    assert run.seq.resize(21, 21)
    receiver.check()
    receiver.state, _ = receiver.manager.prepare(receiver.state, [run.seq])
    sender.flush()
    own = run.seq.transfer_plan()
    receiver.state = imported(receiver.state, own, export(sender.state, source.seq.transfer_plan()))
    run.held, run.least = source.held, 21
    receiver.fetch()
    receiver.verify()
    run.commit()
    run.close()
    assert receiver.hit(tokens(21)) == 21


def test_many_lengths_compile_little():
    w = World("full", page_size=4, pages=64)
    run = w.start(tokens(100))
    sizes = set()
    for n in range(4, 100, 4):
        run.step(tokens(100)[n - 4 : n])
        plan = run.seq.transfer_plan()
        sizes.add(len(plan["full.0"]["k"].pages))
        assert plan["full.0"]["k"].num_pages == n // 4
    assert sizes == {1, 2, 4, 8, 16, 32}


def test_offsets_are_those_of_the_arrays_that_pool_gives():
    w = World("full recurrent", page_size=4)
    w.turn(fresh(5))
    run = w.start(tokens(12))
    run.step(tokens(10))
    w.flush()
    plan, values = run.seq.transfer_plan(), jkv.export_pages(w.state, run.seq.transfer_plan())
    for layer, buffers in plan.items():
        for buffer, transfer in buffers.items():
            raw = np.asarray(jkv.pool(w.state, layer, buffer)).tobytes()
            found = [raw[at : at + transfer.page_bytes] for at in transfer.byte_offsets]
            assert b"".join(found) == np.asarray(values[layer][buffer])[: transfer.num_pages].tobytes()
            assert transfer.nbytes == len(b"".join(found))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
def test_narrow_dtypes_move_as_they_are(dtype):
    layers = {"a": jkv.AttentionLayer({"kv": jkv.Buffer((2, 4), dtype)})}
    config = jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),))
    managers = [jkv.CacheManager(config) for _ in range(2)]
    states, seqs = [m.init() for m in managers], [m.open(range(10)) for m in managers]
    for seq in seqs:
        assert seq.resume()
    assert seqs[0].reserve(9)
    states[0], rows = managers[0].prepare(states[0], [seqs[0]])
    values = jnp.asarray(np.random.default_rng(0).integers(-3, 3, (1, 9, 2, 4)), dtype)
    states[0] = jkv.append(states[0], "a", rows, np.arange(9, dtype=np.int32)[None], {"kv": values})
    seqs[0].commit(range(9))
    assert seqs[1].resize(9, 9)
    states[1], rows = managers[1].prepare(states[1], [seqs[1]])
    moved = export(states[0], seqs[0].transfer_plan())
    assert moved["a"]["kv"].dtype == dtype
    states[1] = imported(states[1], seqs[1].transfer_plan(), moved)
    found = jkv.gather(states[1], "a", rows, 9)["kv"]
    assert np.array_equal(np.asarray(found, np.float32), np.asarray(values, np.float32))


def test_layers_that_share_move_once():
    layers = {
        "a": jkv.AttentionLayer(jkv.kv_buffers(1, 4, jnp.float32)),
        "b": jkv.AttentionLayer(shares="a"),
    }
    manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
    state, seq = manager.init(), manager.open(range(8))
    assert seq.resume() and seq.resize(8, 8)
    state, _ = manager.prepare(state, [seq])
    assert list(seq.transfer_plan()) == ["a"]


def test_what_is_refused():
    w = World("full recurrent", page_size=4)
    run = w.start(tokens(12))
    with pytest.raises(jkv.SequenceStateError, match="pending"):
        run.seq.transfer_plan()
    assert run.reserve(8)
    w.prepare(run)
    with pytest.raises(jkv.SequenceStateError, match="in flight"):
        run.seq.transfer_plan()
    run.write(tokens(8))
    run.commit()
    w.flush()
    with pytest.raises(jkv.ConfigError, match="start=9"):
        run.seq.transfer_plan(9)
    plan = run.seq.transfer_plan()
    values = jkv.export_pages(w.state, plan)
    with pytest.raises(jkv.ConfigError, match="unknown layer"):
        jkv.export_pages(w.state, {"nowhere": plan["full.0"]})
    with pytest.raises(jkv.ConfigError, match="no buffer"):
        jkv.export_pages(w.state, {"full.0": {"x": plan["full.0"]["k"]}})
    with pytest.raises(jkv.ConfigError, match="plan must be"):
        jkv.import_pages(w.state, [1], values)
    with pytest.raises(jkv.ConfigError, match="no values"):
        jkv.import_pages(w.state, plan, {})
    bad = {**values, "full.0": {**values["full.0"], "k": values["full.0"]["k"][:1]}}
    with pytest.raises(jkv.ConfigError, match=r"values of 'full.0', 'k'"):
        jkv.import_pages(w.state, plan, bad)
    run.suspend()
    with pytest.raises(jkv.SequenceStateError, match="suspended"):
        run.seq.transfer_plan()


def test_padding_goes_nowhere():
    w = World("full", page_size=4)
    run = w.start(tokens(12))
    run.step(tokens(12))
    plan = run.seq.transfer_plan()
    before = np.array(jkv.pool(w.state, "full.0", "k"))
    ones = jax.tree.map(jnp.ones_like, jkv.export_pages(w.state, plan))
    after = np.asarray(jkv.pool(jkv.import_pages(w.state, plan, ones), "full.0", "k"))
    changed = np.flatnonzero((before != after).reshape(len(before), -1).any(axis=1)).tolist()
    assert set(changed) <= set(plan["full.0"]["k"].pages[:3].tolist()) and len(plan["full.0"]["k"].pages) == 4


@pytest.mark.parametrize("n, size", [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16)])
def test_lists_are_padded_to_powers_of_two(n, size):
    values = padded(np.arange(1, n + 1))
    assert len(values) == size and values.dtype == np.int32
    assert values[:n].tolist() == list(range(1, n + 1)) and set(values[n:].tolist()) <= {-1}


def arrive(w, run, new):
    """`new` is written by something else, as an import does; False: no room."""
    length = len(run.held) + len(new)
    if not run.seq.resize(length, length):
        return False
    w.check()
    w.state, _ = w.manager.prepare(w.state, [run.seq])
    w.fetch()
    w.verify = lambda *args: None  # between the write and what the oracle knows of it
    run.write(new)
    del w.verify
    run.held, run.flight, run.least = run.written, run.flight[:0], length
    w.fetch()
    w.verify()
    return True


@pytest.mark.parametrize("host", [None, 20])
@pytest.mark.parametrize("groups", ["full window:6", "full window:5+3 recurrent"])
def test_random_traffic_with_arrivals(groups, host):
    w = World(groups, pages=30, max_length=60, host=host)
    generator, arrived = np.random.default_rng(3), 0
    for _ in range(60):
        active = [run for run in w.runs if run.seq.status == "active"]
        choice, run = generator.integers(6), active[generator.integers(len(active))] if active else None
        if run is None or (choice == 0 and len(w.runs) < 4):
            w.open(generator.integers(0, 2, generator.integers(1, 25)).astype(np.int32)).resume()
        elif choice in (1, 2) and run.seq.length == run.seq.capacity and len(run.held) < 45:
            arrived += arrive(w, run, generator.integers(0, 2, generator.integers(1, 14)))
            if generator.random() < 0.7:
                run.commit(snapshot=bool(generator.integers(2)))
        elif choice == 3 and len(run.held) < 50 and run.reserve(3):
            w.prepare(run)
            run.write(generator.integers(0, 2, 3))
            run.commit()
        elif choice == 4:
            run.suspend()
            w.flush()
            run.resume()
        elif choice == 5:
            run.close()
    w.close_all()
    w.flush()
    assert arrived > 8
