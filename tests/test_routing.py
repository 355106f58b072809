"""Digests for routers: block_digests, probe_digests, first_new_digest."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from oracle import World, fresh, image, join, said, tokens

import jkv
from jkv import routing

GROUPS = ["full", "full window:8", "full recurrent", "recurrent", "window:8+2"]


def test_digests_are_those_of_whole_pages():
    manager = World("full", page_size=4, model="m").manager
    digests = manager.block_digests(tokens(11))
    assert len(digests) == 2 and all(len(digest) == 32 for digest in digests)
    assert manager.block_digests(tokens(8)) == digests
    assert manager.block_digests(tokens(3)) == ()
    assert manager.block_digests(join(tokens(4), fresh(4)))[0] == digests[0]
    for scope in (jkv.Scope("x"), jkv.Scope(salt="x"), jkv.Scope(salt=0), jkv.Scope(salt=""), jkv.Scope(version=1)):
        assert not set(manager.block_digests(tokens(8), scope)) & set(digests)


def test_another_process_comes_to_the_same_digests():
    code = (
        "import jkv, jax.numpy as jnp\n"
        "layers = {'a': jkv.AttentionLayer({'k': jkv.Buffer((5,), jnp.int8)}, window=8)}\n"  # layers do not matter
        "config = jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=9),), model='m')\n"
        "manager = jkv.CacheManager(config)\n"
        "prompt = jkv.Tokens([1, 2, 3, 4, 5, 6, 7, 8], {5: 'cat'})\n"
        "print([d.hex() for d in manager.block_digests(prompt, jkv.Scope('lora', 2, b'salt'))])"
    )  # fmt: skip
    manager = World("full", page_size=4, model="m").manager
    prompt = jkv.Tokens([1, 2, 3, 4, 5, 6, 7, 8], {5: "cat"})
    digests = manager.block_digests(prompt, jkv.Scope("lora", 2, b"salt"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([digest.hex() for digest in digests])


@pytest.mark.parametrize("groups", GROUPS)
def test_a_probe_by_digests_finds_what_a_probe_finds(groups):
    w = World(groups, page_size=4, pages=24, host=24)
    generator = np.random.default_rng(0)
    prompts = []
    for _ in range(30):
        old = prompts[generator.integers(len(prompts))] if prompts else tokens(0)
        new = join(old[: generator.integers(len(old) + 1)], generator.integers(0, 2, generator.integers(1, 12)))
        prompts.append(new[:60])
        w.turn(prompts[-1], snapshot=True)
        for prompt in prompts[-8:]:
            whole = prompt[: len(prompt) // 4 * 4]
            found = w.manager.probe_digests(w.manager.block_digests(prompt))
            expected = w.probe(whole)
            assert found.tokens // 4 == expected.tokens // 4
            assert found.tokens <= expected.tokens
            if expected.raw_tokens == len(whole):
                assert found == expected


def test_a_probe_by_digests_with_images_and_scopes():
    w = World("full", page_size=4)
    prompt, scope = join(tokens(4), [image(1, 2)] * 4, tokens(4)), jkv.Scope(salt=b"s")
    w.turn(prompt, scope=scope)
    digests = w.manager.block_digests(said(prompt), scope)
    assert w.manager.probe_digests(digests, scope).tokens == 12
    assert w.manager.probe_digests(digests).tokens == 0
    assert w.manager.probe_digests(w.manager.block_digests(said(prompt)), scope).tokens == 0
    other = join(tokens(4), [image(1, 3)] * 4, tokens(4))
    assert w.manager.probe_digests(w.manager.block_digests(said(other), scope), scope).tokens == 4


@pytest.mark.parametrize("groups", ["full", "full window:8 recurrent", "recurrent"])
def test_a_probe_by_digests_finds_what_the_store_has(groups, tmp_path):
    w = World(groups, page_size=4, store=jkv.StoreTier(tmp_path))
    w.turn(tokens(16), [8, 8], snapshot=True)
    w.restart()
    digests = w.manager.block_digests(join(tokens(16), fresh(4)))
    match = w.manager.probe_digests(digests)
    assert (match.tokens, match.tier_tokens) == (16, {"store": 16})
    assert match.first_new_digest == digests[4]
    w.turn(join(tokens(8), fresh(4)))  # brings half of it into the tree
    assert w.manager.probe_digests(digests).tokens == 16


def test_new_children_are_found_however_many_there_are(monkeypatch):
    monkeypatch.setattr(routing, "FIRST_LIMIT", 8)
    w = World("full", page_size=4, pages=40)
    rounds = [join(tokens(4), tokens(4, f"child {i}")) for i in range(60)]
    for i, prompt in enumerate(rounds):
        w.turn(prompt)
        for other in rounds[max(0, i - 12) : i + 1]:
            found = w.manager.probe_digests(w.manager.block_digests(other)).tokens
            assert found == w.probe(other).tokens // 4 * 4
    assert len(w.manager._routes._keys) <= max(8, 2 * 41) + 41


def test_splits_do_not_hide_children():
    w = World("full", page_size=4)
    w.turn(tokens(16))
    assert w.manager.probe_digests(w.manager.block_digests(tokens(16))).tokens == 16
    w.turn(join(tokens(8), fresh(4)))
    w.turn(join(tokens(4), fresh(4)))
    assert w.manager.probe_digests(w.manager.block_digests(tokens(16))).tokens == 16


def test_a_probe_by_digests_changes_nothing():
    w = World("full window:8 recurrent", page_size=4)
    w.turn(tokens(16), snapshot=True)
    digests = w.manager.block_digests(tokens(16))
    with w.unchanged():
        w.manager.probe_digests(digests)


@pytest.mark.parametrize("bad", [["x"], [b"short"], [b"x" * 32] * 65, [bytearray(32)], b"short"])
def test_something_else_than_digests_is_refused(bad):
    manager = World("full", page_size=4).manager
    with pytest.raises(jkv.ConfigError, match="digests"):
        manager.probe_digests(bad)


@pytest.mark.parametrize("store", [False, True])
def test_first_new_digest_is_the_first_page_that_is_committed(store, tmp_path):
    w = World("full", page_size=4, events=100, **({"store": jkv.StoreTier(tmp_path)} if store else {}))
    w.turn(tokens(10))
    w.manager.take_events()
    prompt = join(tokens(10), fresh(7))
    digests = w.manager.block_digests(prompt)
    assert w.manager.probe(prompt).first_new_digest == digests[2]
    run = w.open(prompt)
    assert run.seq.match.first_new_digest == digests[2]
    run.arrive()
    assert run.seq.match.first_new_digest == digests[2] and run.seq.match is run.seq.match
    run.step(prompt[run.seq.length :])
    event = next(e for e in w.manager.take_events() if e.kind == "stored")
    assert event.digest == digests[2]
    run.close()
    assert w.manager.probe(prompt).first_new_digest is None  # no whole page is left
    assert w.manager.probe(tokens(3)).first_new_digest is None
    assert jkv.Match().first_new_digest is None


def test_matches_can_be_sent():
    w = World("full", page_size=4)
    w.turn(tokens(8))
    match = w.manager.probe(join(tokens(8), fresh(4)))
    sent = pickle.loads(pickle.dumps(match))
    assert sent == match and sent.first_new_digest == match.first_new_digest
    assert copy.deepcopy(match).first_new_digest == match.first_new_digest
    assert pickle.loads(pickle.dumps(jkv.Match())) == jkv.Match()


def test_first_new_digest_outlives_its_images():
    w = World("full", page_size=4)
    prompt = jkv.Tokens([1, 2, 3, 4], {1: "cat"})
    match, digest = w.manager.probe(prompt), w.manager.block_digests(prompt)[0]
    w.manager._contents._sweep()
    assert match.first_new_digest == digest
