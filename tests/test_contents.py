"""SPEC S50 and FAULTS F29: images and other content behind placeholder ids, in every tier."""

import numpy as np
import pytest
from oracle import World, fresh, image, join, tokens

import jkv
from jkv.contents import FIRST_SWEEP, Contents
from jkv.tiers.keys import page_digests, tail_digest

PAD = 3
GROUPS = ["full", "full window:8 recurrent", "recurrent"]


def with_image(digest, before=4, width=4, after=4):
    return join(tokens(before), [image(PAD, digest)] * width, tokens(after, "after"))


@pytest.mark.parametrize("groups", GROUPS)
def test_s50_two_images_share_what_is_before_them(groups):
    w = World(groups, page_size=4)
    one, two = with_image(1), with_image(2)
    w.turn(one, [4, 4, 4], snapshot=True)
    assert w.hit(one) == 12
    assert w.probe(two).raw_tokens == 4
    assert w.hit(two) == 4
    w.turn(two, [4, 4], snapshot=True)
    assert (w.hit(one), w.hit(two)) == (12, 12)


@pytest.mark.parametrize("groups", GROUPS)
def test_s50_in_host_memory_and_in_the_store(groups, tmp_path):
    w = World(groups, page_size=4, host=64, store=jkv.StoreTier(tmp_path))
    one, two = with_image(1), with_image(2)
    w.turn(one, [4, 4, 4], snapshot=True)
    w.restart()
    assert w.hit(two) == 4  # the other way round the symbols are others
    assert w.hit(one) == 12
    w.turn(two, [4, 4], snapshot=True)
    w.restart()
    assert (w.hit(two), w.hit(one)) == (12, 12)


def test_plain_ids_are_not_an_image():
    w = World("full", page_size=4)
    plain = np.where(with_image(1) >= 2**30, PAD, with_image(1)).astype(np.int32)
    w.turn(with_image(1))
    assert w.hit(plain) == 4
    w.turn(plain)
    assert (w.hit(plain), w.hit(with_image(1))) == (12, 12)


@pytest.mark.parametrize("batched", [False, True])
def test_plain_ids_of_the_prompt_stand_for_its_content(batched):
    """A decode loop commits what the model reads: ids."""
    w = World("full", page_size=4)
    manager, state = w.manager, w.state
    prompt = jkv.Tokens([1, PAD, PAD, 2, 5], {1: "cat", 2: "cat"})
    seq = manager.open(prompt)
    assert seq.resume() and seq.reserve(7)
    state, _ = manager.prepare(state, [seq])
    ids = [1, PAD, PAD, 2, 5, PAD, 4]
    if batched:
        manager.advance([seq], 7)
        for part in (ids[:1], ids[1:3], ids[3:]):
            manager.commit([seq], part, len(part))
    else:
        seq.commit(ids[:2])
        seq.commit(ids[2:])
    seq.close()
    manager.check()
    assert manager.probe(prompt, max_reuse=5).tokens == 5
    assert manager.probe([1, PAD, PAD, 2, 5], max_reuse=5).tokens == 1
    longer = jkv.Tokens(ids, {1: "cat", 2: "cat"})
    assert manager.probe(longer, max_reuse=7).tokens == 7


def test_other_ids_at_those_places_are_what_they_are():
    w = World("full", page_size=4)
    seq = w.manager.open(jkv.Tokens([1, PAD, PAD, 2], {1: "cat", 2: "cat"}))
    assert seq.resume() and seq.reserve(4)
    w.state, _ = w.manager.prepare(w.state, [seq])
    seq.commit([1, PAD, 7, 2])
    seq.close()
    assert w.manager.probe(jkv.Tokens([1, PAD, 7, 2], {1: "cat"}), max_reuse=4).tokens == 4
    assert w.manager.probe(jkv.Tokens([1, PAD, PAD, 2], {1: "cat", 2: "cat"}), max_reuse=4).tokens == 2


def test_content_that_was_generated():
    w = World("full", page_size=4)
    run = w.start(tokens(4))
    run.step(run.prompt)
    run.step([image(1, 7)] * 4)
    run.close()
    assert w.hit(join(tokens(4), [image(1, 7)] * 4)) == 8
    assert w.hit(join(tokens(4), [image(1, 8)] * 4)) == 4


@pytest.mark.parametrize("a, b", [(1, "1"), ("1", b"1"), (1, b"1"), ("", b""), (0, ""), (-1, 1), ("a", "b")])
def test_digests_are_typed(a, b):
    w = World("full", page_size=4)
    one, two = (jkv.Tokens([PAD] * 4, {0: digest}) for digest in (a, b))
    seq = w.manager.open(one)
    assert seq.resume() and seq.reserve(4)
    w.state, _ = w.manager.prepare(w.state, [seq])
    seq.commit(one)
    seq.close()
    assert w.manager.probe(one, max_reuse=4).tokens == 4
    assert w.manager.probe(two, max_reuse=4).tokens == 0
    assert w.manager.block_digests(one) != w.manager.block_digests(two)


def test_tokens_are_cut_like_their_ids():
    whole = jkv.Tokens(range(10), {2: "a", 5: "b"})
    assert len(whole) == 10
    part = whole[2:6]
    assert part.ids.tolist() == [2, 3, 4, 5] and part.content == {0: "a", 3: "b"}
    assert whole[-5:].content == {0: "b"} and whole[::5].content == {1: "b"}
    assert repr(jkv.Tokens([1], {0: "x"})) == "Tokens([1], {0: 'x'})"


@pytest.mark.parametrize(
    "ids, content, message",
    [
        ([-1], {}, "ids"), ([2**31], {}, "ids"), ([[1]], {}, "ids"), ([1.5], {}, "ids"),
        ([1], {1: "x"}, "position 1"), ([1], {-1: "x"}, "position"), ([1], {0: None}, "content"),
        ([1], {0: True}, "content"), ([1], {0: 1.0}, "content"), ([1], ["x"], "mapping"), ([1], {"0": "x"}, "position"),
    ],
)  # fmt: skip
def test_f29_bad_tokens_are_refused(ids, content, message):
    with pytest.raises(jkv.ConfigError, match=message):
        jkv.Tokens(ids, content)
    assert issubclass(jkv.ConfigError, ValueError)


def test_one_index_is_refused():
    with pytest.raises(jkv.ConfigError, match="slices"):
        jkv.Tokens([1, 2])[0]


def test_tokens_keep_what_they_were_given():
    ids = np.arange(4, dtype=np.int32)
    kept = jkv.Tokens(ids, {0: "a"})
    ids[:] = 9
    assert kept.ids.tolist() == [0, 1, 2, 3]


def test_symbols_that_nobody_uses_are_forgotten():
    w = World("full", page_size=4, pages=64)
    w.turn(with_image(1))
    held = w.start(with_image(2))
    contents = w.manager._contents
    for i in range(2 * FIRST_SWEEP):
        w.manager.probe(jkv.Tokens([PAD], {0: f"image {i}"}))
    assert len(contents.pairs) <= FIRST_SWEEP + 2
    assert contents.pairs.keys() == set(contents._symbols.values())
    assert w.probe(with_image(1)).tokens == 12
    held.step(held.prompt[held.seq.length :])
    held.close()
    assert (w.hit(with_image(1)), w.hit(with_image(2))) == (12, 12)


def test_symbols_in_use_are_never_given_twice():
    kept = []
    contents = Contents(lambda: kept)
    symbols = {}
    for i in range(3 * FIRST_SWEEP):
        row = contents.tokens(jkv.Tokens([5], {0: i}))
        if i % 3 == 0:
            kept.append(row)
            symbols[i] = int(row[0])
    assert len(set(symbols.values())) == len(symbols)
    assert all(contents.tokens(jkv.Tokens([5], {0: i}))[0] == symbol for i, symbol in symbols.items())


def test_digests_say_nothing_of_symbols():
    """Other processes number their contents in another order."""
    one, two = Contents(lambda: []), Contents(lambda: [])
    two.tokens(jkv.Tokens([1, 1], {0: "other", 1: "another"}))
    prompt = jkv.Tokens([1, 2, 3, 4, 5, 6], {1: "cat", 4: b"dog"})
    rows = [contents.tokens(prompt) for contents in (one, two)]
    assert rows[0].tolist() != rows[1].tolist()
    digests = [page_digests(b"p", row, 3, each.pairs) for row, each in zip(rows, (one, two), strict=True)]
    assert digests[0] == digests[1]
    tails = [tail_digest(b"p", row[:2], each.pairs) for row, each in zip(rows, (one, two), strict=True)]
    assert tails[0] == tails[1]


def test_digests_of_plain_pages_are_those_they_were():
    contents = Contents(lambda: [])
    contents.tokens(jkv.Tokens([1], {0: "cat"}))
    plain = np.arange(8, dtype=np.int32)
    assert page_digests(b"p", plain, 4, contents.pairs) == page_digests(b"p", plain, 4)


@pytest.mark.parametrize(
    "other",
    [
        ([1, 2, 3], {1: "cat"}), ([1, 2, 3], {2: "cat"}), ([1, 2, 3], {0: "cat", 1: "cat"}), ([1, 2, 3], {}),
        ([1, 4, 3], {0: "cat"}), ([1, 2, 3], {0: "ca", 1: "t"}), ([1, 2, 3], {0: b"cat"}),
    ],
)  # fmt: skip
def test_digests_depend_on_everything(other):
    contents = Contents(lambda: [])
    one, two = (contents.tokens(jkv.Tokens(*each)) for each in (([1, 2, 3], {0: "cat"}), other))
    assert page_digests(b"p", one, 3, contents.pairs) != page_digests(b"p", two, 3, contents.pairs)
    assert tail_digest(b"p", one, contents.pairs) != tail_digest(b"p", two, contents.pairs)


def test_retries_see_the_same_images_after_others():
    w = World("full window:8 recurrent", page_size=4, pages=40, host=40)
    for i in range(6):
        w.turn(join(with_image(i % 3), fresh(3)))
    for i in range(3):
        assert w.probe(with_image(i)).raw_tokens == 12
