"""Names of what the store holds."""

import hashlib
import itertools

import numpy as np
import pytest

from jkv.tiers import keys


def tokens(*ids):
    return np.array(ids, np.int32)


ROOT = keys.root_digest("model")

# ------------------------------------------------------------------------------------------------------ the root


def test_none_0_the_empty_string_and_no_bytes_are_four_salts_S49():
    parts = [None, 0, "", b"", "0", b"0", "None", -1, 1]
    roots = {keys.root_digest("m", None, 0, part) for part in parts}
    assert len(roots) == len(parts) and all(len(root) == keys.DIGEST_BYTES for root in roots)


def test_a_part_says_where_it_ends_F28():
    scopes = [("x", None), (None, "x"), ("x",), ("x", ""), ("", "x"), ("ab", "c"), ("a", "bc"), ("abc",), ()]
    assert len({keys.root_digest("m", *scope) for scope in scopes}) == len(scopes)


def test_a_part_with_the_bytes_of_several_is_still_one():
    inner = b"b" + (1).to_bytes(8, "little") + b"y"
    assert keys.root_digest("m", b"x" + inner) != keys.root_digest("m", b"x", b"y")


def test_an_adapter_of_another_version_has_another_root_and_so_has_a_version_of_another_type():
    assert len({keys.root_digest("m", "lora", version, None) for version in (0, 1, "1", b"1")}) == 4


def test_the_model_is_part_of_the_root():
    assert keys.root_digest("A") != keys.root_digest("B")
    assert keys.root_digest("A", "B") != keys.root_digest("B", "A")


def test_numbers_of_any_size_and_any_str_have_a_digest():
    keys.root_digest("m", 10**40, -(2**63), "\ud800", "ä")


@pytest.mark.parametrize("part", [True, 1.0, ("x",), np.int32(1)])
def test_what_has_no_one_spelling_is_refused(part):
    with pytest.raises(TypeError):
        keys.root_digest("m", part)


# ------------------------------------------------------------------------------------------------- pages and tails


def test_a_pages_digest_is_that_of_its_parent_and_its_tokens():
    first, second = keys.page_digests(ROOT, tokens(1, 2, 3, 4, 5, 6, 7, 8), 4)
    assert first == hashlib.sha256(ROOT + np.array([1, 2, 3, 4], "<i4").tobytes()).digest()
    assert second == hashlib.sha256(first + np.array([5, 6, 7, 8], "<i4").tobytes()).digest()


def test_a_chain_may_be_digested_in_any_pieces():
    ids = np.arange(40, dtype=np.int32)
    whole = keys.page_digests(ROOT, ids, 4)
    for cut in (4, 20, 36):
        head = keys.page_digests(ROOT, ids[:cut], 4)
        assert head + keys.page_digests(head[-1], ids[cut:], 4) == whole
    assert keys.page_digests(ROOT, ids[:0], 4) == []


def test_a_digest_depends_on_every_token_before():
    ids = np.arange(12, dtype=np.int32)
    for position in range(12):
        other = ids.copy()
        other[position] += 1
        same = [a == b for a, b in zip(*(keys.page_digests(ROOT, t, 4) for t in (ids, other)), strict=True)]
        assert same == [page < position // 4 for page in range(3)]


def test_how_the_tokens_lie_in_memory_does_not_matter():
    ids = np.arange(16, dtype=np.int32)
    assert keys.page_digests(ROOT, np.repeat(ids, 2)[::2], 4) == keys.page_digests(ROOT, ids, 4)
    assert keys.page_digests(ROOT, ids.astype(">i4"), 4) == keys.page_digests(ROOT, ids, 4)


def test_part_of_a_page_is_not_a_page():
    with pytest.raises(ValueError, match="5 tokens"):
        keys.page_digests(ROOT, tokens(1, 2, 3, 4, 5), 4)


def test_tails_of_different_lengths_and_parents_have_different_digests():
    first, second = keys.page_digests(ROOT, np.arange(8, dtype=np.int32), 4)
    tails = itertools.product((ROOT, first, second), (tokens(0), tokens(0, 0), tokens(0, 0, 0)))
    assert len({keys.tail_digest(*tail) for tail in tails} | {first, second}) == 11


# ----------------------------------------------------------------------------------------------------------- names


def test_a_name_says_what_it_stands_for():
    (page,) = keys.page_digests(ROOT, tokens(1, 2, 3, 4), 4)
    tail = keys.tail_digest(page, tokens(5, 6))
    assert keys.parse_name(keys.page_name(page)) == (page, None, 0)
    assert keys.parse_name(keys.tail_name(page, 2, tail)) == (tail, page, 2)
    assert keys.tail_name(page, 2, tail) == f"{page.hex()}.2.{tail.hex()}"


P, D = "0a" * 32, "1b" * 32


WRONG_PAGES = ["", "x", P[:-1], P + "00", P.upper(), P + "\n", "./" + P]
WRONG_TAILS = [
    *(f"{P}.{count}.{D}" for count in ("", "0", "-1", "01", " 1", "x", "1.1")),
    *(f"{P}.{D}", f"{P[:-2]}.1.{D}", f".1.{D}", f"{P}.1.", f"{P}.1.{D.upper()}"),
]


@pytest.mark.parametrize("name", WRONG_PAGES + WRONG_TAILS)
def test_nothing_else_is_a_name(name):
    with pytest.raises(ValueError, match="no name"):
        keys.parse_name(name)
