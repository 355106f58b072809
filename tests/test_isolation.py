"""Requests never meet where they should not: scopes, images, epochs in every tier; NaN, and what a page held before."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import World, fresh, image, join, tokens

import jkv

# What is easily taken for one another: None, nothing, zero; numbers, strings and bytes that print alike.
NAMES = [None, 0, 1, -1, "", "0", "1", "x", "x\0", "1x", "x1"]
SALTS = [*NAMES, b"", b"0", b"1", b"x", 256, 2**31, 2**64]
scopes = st.builds(
    jkv.Scope, adapter=st.sampled_from(NAMES), version=st.sampled_from(NAMES[1:]), salt=st.sampled_from(SALTS)
)


def scopes_differ(one, other):
    """Typed: 1 and "1" are two."""
    return repr(one) != repr(other)


def move_to(w, tier):
    """Everything that is reusable leaves the device for `tier`."""
    if tier != "device":
        for pool in w.manager._host.pools:
            w.manager._host.tree.make_free(pool, pool.total)
        w.flush()
    if tier == "store":
        w.restart()


@pytest.mark.parametrize("groups", ["full", "full window:6 recurrent"])
def test_scopes_never_meet_in_any_tier(groups, tmp_path):
    numbers = itertools.count()

    @settings(max_examples=30, derandomize=True, database=None, deadline=None)
    @given(scopes, scopes, st.sampled_from(["device", "host", "store"]))
    def check(mine, other, tier):
        assume(scopes_differ(mine, other))
        location = tmp_path / str(next(numbers))
        w = World(groups, page_size=4, pages=16, host=16, store=jkv.StoreTier(location), events=1000)
        w.turn(tokens(9), [4, 4, 1], scope=mine, snapshot=True)
        move_to(w, tier)
        assert w.probe(tokens(9), scope=other).raw_tokens == 0
        assert w.probe(tokens(9), scope=mine).tier_tokens == {tier: 9}
        theirs, ours = (set(w.manager.block_digests(tokens(9), scope)) for scope in (other, mine))
        assert not theirs & ours
        assert w.manager.probe_digests(w.manager.block_digests(tokens(9), other), other).tokens == 0
        assert {event.digest for event in w.manager.take_events()} & theirs == set()
        assert w.hit(tokens(9), scope=other) == 0
        assert w.hit(tokens(9), scope=mine) == 9

    check()


def test_f28_an_adapter_is_not_a_salt_and_each_version_is_its_own():
    for mine, other in (
        (jkv.Scope(adapter="x"), jkv.Scope(salt="x")),
        (jkv.Scope(adapter="a", version=1), jkv.Scope(adapter="a", version=2)),
        (jkv.Scope(adapter="a", version=1), jkv.Scope(adapter="a", version="1")),
    ):
        w = World("full recurrent", page_size=4)
        w.turn(tokens(8), scope=mine, snapshot=True)
        assert (w.hit(tokens(8), scope=other), w.hit(tokens(8), scope=mine)) == (0, 8)


def test_f29_two_images_behind_equal_placeholders():
    w = World("full", page_size=4)
    w.turn(join([image(1, 7)], tokens(7)))
    assert (w.hit(join([image(1, 8)], tokens(7))), w.hit(join([image(1, 7)], tokens(7)))) == (0, 8)


@pytest.mark.parametrize("tier", ["device", "host", "store"])
@settings(max_examples=15, derandomize=True, database=None, deadline=None)
@given(st.integers(0, 8), st.lists(st.integers(0, 2), min_size=2, max_size=2, unique=True), st.booleans())
def test_images_are_told_apart_where_they_are(tier, tmp_path_factory, at, kinds, same_text):
    w = World("full window:6", page_size=4, pages=16, host=16, store=jkv.StoreTier(tmp_path_factory.mktemp("store")))
    one, two = (join(tokens(at), [image(1, kind)], tokens(9 - at, "after")) for kind in kinds)
    w.turn(one)
    move_to(w, tier)
    assert w.hit(two if same_text else join(two[: at + 1], fresh(3))) <= at
    assert w.hit(join(one[:at], [1], one[at + 1 :])) <= at  # the placeholder itself
    assert w.hit(one) == 10


@settings(max_examples=20, derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.booleans())
def test_epochs_never_meet(tmp_path_factory, epochs, stored):
    """What a model has not computed itself, nobody is served under its name."""
    store = jkv.StoreTier(tmp_path_factory.mktemp("store")) if stored else None
    w = World("full recurrent", page_size=4, pages=16, host=16, store=store, model="0")
    computed, present = set(), 0
    for i, epoch in enumerate(epochs):
        w.turn(tokens(8, present), scope=jkv.Scope(salt=i % 2), snapshot=True)
        computed.add((present, i % 2))
        if epoch != present:
            w.manager.new_epoch(str(epoch))
            present = epoch
            computed = computed if stored else set()
        w.flush()
        w.settle()
        for other, salt in itertools.product(range(3), range(2)):
            found = w.hit(tokens(8, other), scope=jkv.Scope(salt=salt))
            assert found in ((0, 8) if (present, salt) in computed and other == present else (0,))


# --------------------------------------------------------------------------------------------------- NaN and infinity

LAYERS = {
    "full": jkv.AttentionLayer(jkv.kv_buffers(1, 4, jnp.float32)),
    "split": jkv.AttentionLayer(jkv.kv_buffers(1, 4, jnp.float32, fused=False)),
    "window": jkv.AttentionLayer(jkv.kv_buffers(1, 4, jnp.float32), window=6, sinks=2),
    "ssm": jkv.RecurrentLayer({"h": jkv.Buffer((3,), jnp.float32)}),
}
WIDTH = 7  # tokens of a step


class Poisoned:
    """A model of which one row writes `poison` wherever it can, while another's outputs are looked at."""

    def __init__(self, host=None, **config):
        tiers = (jkv.DeviceTier(pages={"full": 14, "window:6+2": 14, "recurrent": 5}),)
        tiers += () if host is None else (jkv.HostTier(pages=host),)
        self.manager = jkv.CacheManager(jkv.CacheConfig(LAYERS, 3, 32, page_size=4, tiers=tiers, **config))
        self.state = self.manager.init()

    @staticmethod
    @jax.jit
    def model(state, rows, positions, values):
        """values: what each row writes, [B]; for a Ragged [T]."""
        flat = isinstance(rows, jkv.Ragged)
        outs = []
        for layer in ("full", "split", "window"):
            kv = jnp.broadcast_to(values[..., None, None], (*positions.shape, 1, 4)).astype(jnp.float32)
            buffers = {"k": kv, "v": kv} if layer == "split" else {"kv": jnp.concatenate([kv, kv], axis=-2)}
            q = jnp.ones((*positions.shape, 1, 4))
            out, state = jkv.append_attend(state, layer, rows, positions, q, buffers)
            outs.append(out)
        old = jkv.read_state(state, "ssm", rows)["h"]
        firsts = values[rows.cu_q_lens[:-1]] if flat else values[:, 0]
        return jkv.write_state(state, "ssm", rows, {"h": old + firsts[:, None]}), jnp.stack(outs), old

    def step(self, seqs, values, n, ragged=False):
        """n tokens of each; the outputs [layers, len(seqs), n, ...] and the states before."""
        assert self.manager.reserve(seqs, n) == len(seqs)
        if ragged:
            self.state, rows = self.manager.prepare_ragged(self.state, seqs, n, pad_tokens=24, pad_sequences=3)
            given = np.zeros(24, np.float32)
            given[: n * len(seqs)] = np.repeat(values, n)
            self.state, out, old = self.model(self.state, rows, rows.positions, given)
            out = np.asarray(out)[:, : n * len(seqs)].reshape(3, len(seqs), n, -1)
            return out, np.asarray(old)[: len(seqs)]
        self.state, rows = self.manager.prepare(self.state, seqs)
        rows, given = np.append(rows, [-1] * (3 - len(seqs))).astype(np.int32), np.zeros((3, WIDTH), np.float32)
        positions = np.full((3, WIDTH), -1, np.int32)
        for i, seq in enumerate(seqs):
            positions[i, :n], given[i] = np.arange(seq.length, seq.length + n), values[i]
        self.state, out, old = self.model(self.state, rows, positions, given)
        return np.asarray(out)[:, : len(seqs), :n], np.asarray(old)[: len(seqs)]

    def opened(self, prompt=(), **options):
        seq = self.manager.open(prompt, **options)
        assert seq.resume()
        return seq


POISONS = [np.nan, np.inf]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("poison", POISONS)
def test_f31_a_row_beside_one_of_nan(poison, ragged):
    """In one step, in every layer, padded and back to back."""
    p = Poisoned()
    x, y = p.opened(), p.opened()
    for n in (7, 1, 3):
        for seqs, values in (([x, y], (poison, 2.0)), ([y, x], (2.0, poison))):
            out, old = p.step(seqs, values, n, ragged)
            at = seqs.index(y)
            np.testing.assert_allclose(out[:, at], 2.0)
            assert np.isfinite(old[at]).all()
            p.manager.advance(seqs, n)
    p.manager.check()


@pytest.mark.parametrize("scrub", [False, True])
@pytest.mark.parametrize("host", [None, 20])
@pytest.mark.parametrize("poison", POISONS)
def test_f31_whoever_comes_next_gets_no_nan(poison, host, scrub):
    """X fills all that can be had, publishes some, is suspended, comes back and goes; then Y, again and again."""
    p = Poisoned(host, scrub=scrub)
    for _ in range(2):
        x = p.opened(tokens(20, "x"), max_reuse=0)
        for _ in range(3):
            p.step([x], (poison,), 6)
            x.commit(tokens(18, "x")[x.committed :][:6], snapshot=True)
        if host:
            x.suspend()
            assert x.resume()
        p.step([x], (poison,), 6)
        x.advance(6)
        x.close()
        for kind in range(3):
            y = p.opened(tokens(21, kind), max_reuse=0)
            for n in (1, 4, 7, 2):
                out, old = p.step([y], (2.0,), n)
                np.testing.assert_allclose(out, 2.0)
                assert np.isfinite(old).all()
                y.commit(tokens(21, kind)[y.length :][:n], snapshot=bool(n % 2))
            y.close()
            p.manager.check()


@pytest.mark.parametrize("poison", POISONS)
def test_f31_the_rest_of_a_page_that_is_reused_in_part(poison):
    """X's page begins with what Y wrote, and goes on with NaN: Z reuses the beginning alone."""
    p = Poisoned()
    y = p.opened(tokens(6), max_reuse=0)
    p.step([y], (2.0,), 6)
    y.commit(tokens(6), snapshot=True)
    y.close()
    x = p.opened(join(tokens(6), fresh(2)))
    assert x.length == 6
    p.step([x], (poison,), 2)
    x.commit(fresh(2), snapshot=True)
    x.close()
    z = p.opened(join(tokens(6), fresh(4)))
    assert z.length == 6
    for n in (1, 3):
        out, old = p.step([z], (2.0,), n)
        np.testing.assert_allclose(out, 2.0)
        assert np.isfinite(old).all()
        z.commit(fresh(n))


# -------------------------------------------------------------------------------------------------------------- scrub


def fresh_bytes(w, run):
    """Whether anything lies at positions that the run has room for, and has not written."""
    found = []
    for layer, spec in w.attention.items():
        table = w.table(run, spec.group)
        at = np.arange(run.seq.length, run.seq.capacity // w.page_size * w.page_size)
        at = at[at // w.page_size >= -(-run.seq.length // w.page_size)]  # pages of its own, not what it shares
        found += [w.bytes[layer, buffer][table[at // w.page_size], at % w.page_size].any() for buffer in spec.buffers]
    return any(found)


@pytest.mark.parametrize("scrub", [False, True])
@pytest.mark.parametrize("host", [None, 12])
@pytest.mark.parametrize("groups", ["full", "full window:6", "window:5+3", "full window:6 recurrent"])
def test_scrubbed_pages_are_zeros(groups, host, scrub):
    """After one that published nothing, after evicted ones, after one that was suspended, in a fork and a new chunk."""
    w = World(groups, page_size=4, pages=14, host=host, max_length=48, scrub=scrub)
    dirty = []

    def look(run, n):
        assert run.reserve(n)
        w.prepare(run)
        dirty.append(fresh_bytes(w, run))
        run.advance(0)

    a = w.start()
    a.dispatch(fresh(30))
    a.advance()
    a.close()
    b = w.start(tokens(20))
    look(b, 20)
    b.step(tokens(20), snapshot=True)
    b.suspend()
    c = w.start()
    look(c, 16)
    c.dispatch(fresh(16))
    c.advance()
    c.close()
    assert b.resume()
    look(b, 12)
    (copy,) = b.fork(1)
    look(copy, 8)
    w.close_all()
    for i in range(3):
        d = w.start(tokens(24, i))
        look(d, 24)
        d.step(tokens(24, i), snapshot=True)
        d.close()
    assert any(dirty) != scrub


def test_scrub_takes_no_slot_and_no_copy_of_what_is_copied_anyway():
    w = World("full recurrent", page_size=4, pages=14, scrub=True)
    w.turn(tokens(6), snapshot=True)
    w.flush()
    run = w.start(join(tokens(6), fresh(4)))
    assert run.reused == 6 and w.manager._host.builder.num_copies == 2  # its part of a page, and the state
    assert run.reserve(4)
    assert w.manager._host.builder.num_copies == 3
    w.prepare(run)
    run.write(fresh(4))
    run.commit()


@pytest.mark.parametrize("bad", [1, "yes", None])
def test_scrub_is_a_bool(bad):
    with pytest.raises(jkv.ConfigError, match="scrub"):
        World("full", scrub=bad)
