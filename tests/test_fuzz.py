"""What comes from outside may be anything: values of the store, digests, tokens, every argument of every call.

A damaged value is a miss; a bad argument is an error of jkv that changes nothing.
"""

import contextlib
import functools
import pathlib
import struct
import tempfile
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, image, join, make_config, said, tokens

import jkv
from jkv.layout import make_layout
from jkv.tiers import index, values

pytest.importorskip("tensorstore")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra import numpy as hnp  # noqa: E402


def fuzz(examples):
    """The same examples every time, and nothing is left on disk."""
    checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=checks)


# ------------------------------------------------------------------------------------------------ the store

PROMPTS = (tokens(14), join(tokens(8), tokens(6, "b")), join(tokens(5, "c"), [image(1, 2)] * 2, tokens(2, "d")))
STORED = ("full", "full window:6", "window:5+3", "full recurrent")


def store_world(groups, path, limit=None):
    tier = jkv.StoreTier(path, limit)
    return World(groups, pages=12, host=12, page_size=4, max_length=24, max_sequences=2, events=1000, store=tier)


@functools.cache
def written(groups):
    """{path below the store: value} after a program that served PROMPTS."""
    with tempfile.TemporaryDirectory() as path:
        w = store_world(groups, path)
        for prompt in PROMPTS:
            w.turn(prompt, [len(prompt) // 2, len(prompt) - len(prompt) // 2], max_reuse=0)
        w.manager.release(w.state)
        found = [file for file in pathlib.Path(path).rglob("*") if file.is_file()]
        return {str(file.relative_to(path)): file.read_bytes() for file in sorted(found)}


def with_header(value, field, new):
    """`value` with another header field, and a checksum that is right."""
    fields = list(values.HEADER.unpack_from(value))
    payload = value[values.HEADER.size :]
    fields[field], fields[5] = new, zlib.crc32(payload)
    with contextlib.suppress(struct.error):
        return values.HEADER.pack(*fields) + payload
    return value


def order_of(pairs):
    """A valid order."""
    data = np.array([mark for mark, _ in pairs], "<u8").tobytes() + np.array([t for _, t in pairs], "<i8").tobytes()
    return index.ORDER.pack(index.ORDER_MAGIC, zlib.crc32(data)) + data


HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
PLAIN = st.characters(exclude_characters="/\0", exclude_categories=("Cs",))
NAMES = st.text(PLAIN, min_size=1, max_size=20).filter(lambda name: name not in (".", ".."))


@st.composite
def foreign_names(draw, files):
    """A path that no jkv wrote, some of them almost as if."""
    name = draw(st.sampled_from(sorted(files)))
    at = draw(st.integers(0, len(name) - 1))
    folder, _, last = name.rpartition("/")
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return "/".join(draw(st.lists(NAMES, min_size=1, max_size=3)))
    if kind == 1:
        return name[:at] + draw(PLAIN) + name[at + 1 :]
    if kind == 2:
        return f"{folder}/{draw(HEX)}"
    if kind == 3:
        return f"{folder}/{last[-64:]}.{draw(st.integers(0, 10**10))}.{draw(st.one_of(HEX, st.just(last[-64:])))}"
    if kind == 4:
        return f"{draw(HEX)[:32]}-{draw(st.integers(0, 10**16))}/{draw(NAMES)}/{draw(HEX)}"
    if kind == 5:
        return f"{draw(st.sampled_from(['order', 'probe']))}/{draw(st.one_of(HEX.map(lambda text: text[:32]), NAMES))}"
    if kind == 6:
        return f"{folder}/{last.upper()}"
    return f"{name}{draw(NAMES)}"


@st.composite
def damaged(draw, groups):
    """What `written` left, and what became of it."""
    files = dict(written(groups))
    other = list(written("window:6" if groups == "full" else "full").values())
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(files)))
        value, kind = files[name], draw(st.integers(0, 9))
        if kind == 0:
            files[name] = value[: draw(st.integers(0, len(value)))]
        elif kind == 1:
            flipped = bytearray(value)
            for at in draw(st.lists(st.integers(0, 8 * max(1, len(value)) - 1), min_size=1, max_size=4)):
                if flipped:
                    flipped[at // 8] ^= 1 << at % 8
            files[name] = bytes(flipped)
        elif kind == 2:
            files[name] = value + draw(st.binary(min_size=1, max_size=40))
        elif kind == 3:
            files[name] = draw(st.binary(max_size=200))
        elif kind == 4:
            with_it = draw(st.sampled_from(sorted(files)))
            files[name], files[with_it] = files[with_it], files[name]
        elif kind == 5 and len(value) >= values.HEADER.size and value.startswith(values.MAGIC):
            field = draw(st.integers(0, 4))
            new = draw(st.binary(max_size=40)) if field in (0, 2, 3) else draw(st.integers(0, 2**64 - 1))
            files[name] = with_header(value, field, new)
        elif kind == 6:
            files[name] = draw(st.sampled_from(other))
        elif kind == 7:
            del files[name]
            files = files or {name: value}
        elif kind == 8:
            mark = st.integers(0, 2**64 - 1) | st.sampled_from([index.mark_of(each) for each in sorted(files)])
            pairs = st.lists(st.tuples(mark, st.integers(-(2**63), 2**63 - 1)), max_size=8)
            files[f"order/{draw(HEX)[:32]}"] = order_of(draw(pairs))
        else:
            files[draw(foreign_names(files))] = draw(st.one_of(st.binary(max_size=200), st.just(value)))
    return files


def put(path, files):
    """Writes the files, but not those that a file or a folder is in the way of."""
    there = []
    for name, value in files.items():
        file = pathlib.Path(path, name)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(value)
            there.append(file)
    return there


def entries_on_disk(path):
    """{key: bytes}, as the store counts them."""
    files = [file for file in pathlib.Path(path).rglob("*") if file.is_file()]
    return index.sizes_of(str(file.relative_to(path)).encode() for file in files)


def all_served(w):
    """Every prompt is served twice, every byte compared; the second time nothing is lost any more."""
    for prompt in (*PROMPTS, *PROMPTS):
        run = w.open(prompt, max_reuse=len(prompt))
        promised = run.seq.match.tokens
        assert run.arrive()
        assert run.reused <= promised
        w.prepare(run)
        run.prefill().close()
        w.settle()
        w.manager.take_events()


@fuzz(60)
@given(st.data())
def test_what_the_store_says_is_right_or_a_miss(data):
    groups = data.draw(st.sampled_from(STORED))
    files = data.draw(damaged(groups))
    limit = data.draw(st.sampled_from([None, None, 1000, 4000]))
    with tempfile.TemporaryDirectory() as path:
        w = store_world(groups, path, limit)
        w.faulty = ("store",)
        there = put(path, files)
        w.start_over()
        removed = data.draw(st.lists(st.sampled_from(there), max_size=2)) if there else []
        for file in removed:
            file.unlink(missing_ok=True)  # by another process, behind our back
        all_served(w)
        stats = w.manager.stats().tiers["store"]
        assert set(stats.failures) <= {"damaged", "missing"} and not stats.off, stats
        bad = [name for name, value in files.items() if written(groups).get(name) != value]
        assert sum(stats.failures.values()) <= len(bad) + len(removed), stats
        w.restart()
        all_served(w)
        w.manager.release(w.state)
        stats, found = w.manager.stats().tiers["store"], entries_on_disk(path)
        assert (stats.entries, stats.bytes) == (len(found), sum(found.values()))


@fuzz(300)
@given(st.data())
def test_a_value_is_whole_or_damaged(data):
    """Arbitrary bytes, and those of real values, under every key."""
    files = {name: value for name, value in written("full recurrent").items() if not name.startswith("order/")}
    layout = make_layout(make_config("full recurrent"))
    key = data.draw(st.sampled_from(sorted(files)))
    form = next(form for form in values.formats(layout).values() if key.startswith(form.prefix))
    of = data.draw(st.sampled_from(sorted(files)))
    value = data.draw(st.binary(max_size=200) | st.just(files[of]))
    if value == files[key]:
        assert form.unpack(key, value) == value[values.HEADER.size :]
    else:
        with pytest.raises(values.Damaged):
            form.unpack(key, value)


@fuzz(300)
@given(st.binary(max_size=100), st.integers(0, 7), st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(-9, 9))))
def test_an_order_is_whole_or_damaged(noise, bit, pairs):
    with pytest.raises(values.Damaged):
        index.decode_order(noise)
    order = order_of(pairs)
    marks, times = index.decode_order(order)
    assert list(zip(marks.tolist(), times.tolist(), strict=True)) == pairs
    for at in range(len(order)):
        flipped = bytearray(order)
        flipped[at] ^= 1 << bit
        with pytest.raises(values.Damaged):
            index.decode_order(bytes(flipped))


# ------------------------------------------------------------------------------------------------ anything

HUGE = 10**5000  # more digits than Python prints


class Odd:
    """Has what is looked at first, and nothing behind it."""

    row = 0

    def __len__(self):
        return 3


def scalars():
    ints = st.integers(-(2**70), 2**70) | st.integers(-3, 40) | st.sampled_from([2**31 - 1, 2**31, 2**63])
    floats = st.floats() | st.complex_numbers()
    kinds = st.sampled_from([np.int8, np.int64, np.uint8, np.uint64, np.float32, np.float64, np.bool_, np.str_])
    numpy = st.builds(lambda kind, n: kind(n), kinds, st.integers(0, 100))
    objects = st.sampled_from([None, True, False, ..., object(), Odd(), int, len, slice(2), range(3), "", b"", "abc"])
    return ints | floats | numpy | objects | st.text(max_size=5) | st.binary(max_size=5)


def arrays():
    dtypes = st.sampled_from(
        ["i1", "u1", "i4", ">i4", "i8", "u8", "f4", "f8", "?", "U3", "S3", "c8", "M8[s]", "m8[s]", "O"]
    )
    shapes = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=6)
    plain = st.tuples(dtypes, shapes).flatmap(lambda pair: np_arrays(*pair))
    return plain | plain.map(np.ma.masked_array) | plain.map(read_only) | views()


def np_arrays(dtype, shape):
    if dtype == "O":
        return st.just(np.full(shape, None, object))
    return hnp.arrays(dtype, shape)


def small_arrays():
    """Ids as they should be."""
    return hnp.arrays(st.sampled_from(["i4", "i8", "u1", ">i4"]), st.integers(0, 8), elements=st.integers(0, 3))


def views():
    return st.builds(lambda view, array: view(array), st.sampled_from(VIEWS), small_arrays())


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


class Subclass(np.ndarray):
    """An array of another class."""


def spread(array):
    apart = np.zeros(2 * len(array) + 1, array.dtype)
    apart[1::2] = array
    return apart[1::2]


def packed(array):
    rows = np.zeros(len(array), [("pad", "u1"), ("ids", array.dtype)])
    rows["ids"] = array
    return rows["ids"]


VIEWS = (  # the same ids in other shapes of memory, and in other kinds of sequence
    np.copy, spread, packed, read_only, np.ndarray.tolist, tuple, list, bytes,
    lambda array: array[::-1],
    lambda array: np.ma.masked_array(array, np.arange(len(array)) % 2),
    lambda array: array.astype(object),
    lambda array: bytearray(array.astype("u1").tobytes()),
    lambda array: memoryview(array.astype("i4")),
    lambda array: jnp.asarray(array.astype("i4")),
    lambda array: list(jnp.asarray(array.astype("i4"))),
    lambda array: np.array(len(array)),
    lambda array: dict.fromkeys(array.tolist()),
    lambda array: np.broadcast_to(array[:1], (5 if len(array) else 0,)),
    lambda array: array[None],
    lambda array: [*array.tolist(), True],
    lambda array: [*array.tolist(), 1.0],
    lambda array: array.astype("i4").view(Subclass),
    lambda array: array.astype("i4").view(np.recarray),
)  # fmt: skip


def anything():
    """Values, of which none is consumed by being looked at."""
    lists = st.lists(scalars(), max_size=4) | st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3)
    return (
        scalars() | arrays() | lists | lists.map(tuple) | st.dictionaries(st.integers(0, 9), st.integers(), max_size=3)
    )


def generated(value):
    """`value`, or a generator of its items."""
    return (each for each in value) if isinstance(value, list | tuple) else value


def int32_of(value):
    """The plain ids that `value` is accepted as."""
    return np.array(
        [int(each) for each in np.ma.getdata(value).tolist()]
        if isinstance(value, np.ndarray)
        else [int(each) for each in value],
        np.int32,
    )


REFUSED = (jkv.ConfigError, jkv.SequenceStateError, jkv.OutOfPagesError)


@contextlib.contextmanager
def refused_or_done(w):
    """What happens inside is done, or one of jkv's errors and nothing has changed. Says which."""
    before, outcome = w.picture(), []
    try:
        yield outcome
        outcome.append("done")
    except REFUSED:
        w.check()
        assert w.picture() == before
    w.check()


@functools.cache
def shared_world(groups, purpose=None):
    """One for all examples of a purpose, with something in it."""
    w = World(groups, pages=40, page_size=4, max_length=32, events=100)
    for prompt in PROMPTS:
        w.turn(prompt)
    return w


# ------------------------------------------------------------------------------------------------ tokens


@fuzz(400)
@given(anything(), st.booleans())
def test_tokens_are_ids_or_refused(value, lazy):
    w = shared_world("full")
    made = (lambda: generated(value)) if lazy else (lambda: value)
    for call in (w.manager.probe, w.manager.block_digests, jkv.Tokens, w.manager.open):
        with w.unchanged():
            try:
                result = call(made())
            except jkv.ConfigError:
                continue
            expected = int32_of(value)
            assert len(expected) == 0 or expected.min() >= 0
            if call is jkv.Tokens:
                assert result.ids.dtype == np.int32 and np.array_equal(result.ids, expected)
            elif call == w.manager.open:
                assert np.array_equal(result._prompt, expected) and result._prompt.dtype == np.int32
                assert type(result._prompt) is np.ndarray and not np.shares_memory(result._prompt, np.asarray(value))
                result.close()
            else:
                assert result == call(expected)


@fuzz(150)
@given(anything(), st.booleans(), st.sampled_from(["commit", "batch"]))
def test_committed_tokens_are_ids_or_refused(value, lazy, how):
    w = shared_world("full")
    run = w.start()
    try:
        assert run.reserve(8)
        w.prepare(run)
        try:
            ids = int32_of(value)
        except (TypeError, ValueError, OverflowError):
            ids = fresh(4)
        ids = ids if ids.ndim == 1 and len(ids) <= 8 and (ids >= 0).all() else fresh(4)
        run.write(ids)
        made = generated(value) if lazy else value
        call = run.seq.commit if how == "commit" else lambda x: w.manager.commit([run.seq], x, len(ids))
        with refused_or_done(w) as outcome:
            call(made)
        if not outcome:
            run.commit()
        else:
            run.held, run.flight = ids, ids[:0]
            if isinstance(value, np.ndarray) and value.flags.writeable:
                value[...] = np.zeros((), value.dtype)  # it is the caller's again
        w.flush()
        run.close()
        assert w.hit(ids) == len(ids)
    finally:
        w.close_all()


def test_what_lies_under_a_mask_is_an_id_too():
    w = shared_world("full")
    hidden = np.ma.masked_array(np.array([1, -5, 2]), [False, True, False])
    for call in (w.manager.open, w.manager.probe, w.manager.block_digests):
        with w.unchanged(), pytest.raises(jkv.ConfigError, match="-5"):
            call(hidden)


# ------------------------------------------------------------------------------------------------ digests


@fuzz(300)
@given(anything() | st.lists(st.binary(min_size=32, max_size=32), max_size=4))
def test_foreign_digests_match_nothing(value):
    for groups in ("full", "full window:6 recurrent"):
        w = shared_world(groups)
        with w.unchanged(), contextlib.suppress(jkv.ConfigError):
            assert w.manager.probe_digests(value).tokens == 0


@fuzz(200)
@given(st.data())
def test_digests_match_as_far_as_they_are_a_prefix(data):
    w = shared_world("full", "only read")
    real = [w.manager.block_digests(said(prompt)) for prompt in PROMPTS]
    others = st.sampled_from([digest for digests in real for digest in digests]) | st.binary(min_size=32, max_size=32)
    digests = data.draw(st.lists(others, max_size=5))
    common = [
        next((i for i, (a, b) in enumerate(zip(digests, each, strict=False)) if a != b), min(len(digests), len(each)))
        for each in real
    ]
    match = w.manager.probe_digests(data.draw(st.sampled_from([list, tuple, iter]))(digests))
    assert match.tokens == 4 * max(common)
    new = digests[max(common) :]
    assert match.first_new_digest == (new[0] if new else None)


def test_digests_of_a_store_that_is_all_there_is(tmp_path):
    """After a restart only the store's names are known; foreign digests are none of them."""
    w = store_world("full", tmp_path)
    w.turn(tokens(12))
    w.restart()
    digests = w.manager.block_digests(tokens(12))
    for foreign in (bytes(32), digests[0][::-1], bytes(31) + b"x"):
        assert w.manager.probe_digests([foreign, *digests]).tokens == 0
        assert w.manager.probe_digests([digests[0], foreign, *digests[1:]]).tokens == 4
    assert w.manager.probe_digests(digests).tokens == 12


@pytest.mark.parametrize("order", [[1], [0, 2], [0, 0, 0]])
def test_digests_that_are_no_chain_make_a_store_promise_but_not_serve(order, tmp_path):
    w = store_world("full", tmp_path)
    w.turn(tokens(12))
    w.restart()
    digests = w.manager.block_digests(tokens(12))
    assert w.manager.probe_digests([digests[at] for at in order]).tokens <= 4 * len(order)
    assert w.hit(join(*(tokens(12)[4 * at : 4 * at + 4] for at in order))) == (4 if order[0] == 0 else 0)


@fuzz(100)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.sampled_from(["full", "full window:6 recurrent"]),
    st.booleans(),
)
def test_digests_of_a_prompt_find_what_its_tokens_find(ids, groups, serves):
    w = shared_world(groups)
    if serves:
        w.turn(ids, snapshot=True)
    whole = ids[: len(ids) // 4 * 4]
    found, expected = w.manager.probe_digests(w.manager.block_digests(ids)), w.probe(whole)
    assert found.tokens // 4 == expected.tokens // 4
    if expected.raw_tokens == len(whole):
        assert found == expected


@fuzz(300)
@given(st.dictionaries(scalars(), scalars(), max_size=3) | anything())
def test_contents_are_digests_or_refused(content):
    w = shared_world("full")
    with w.unchanged():
        try:
            prompt = jkv.Tokens(tokens(9), content)
        except jkv.ConfigError:
            return
        assert set(prompt.content) == {int(position) for position in content}
        first = min(prompt.content, default=9)
        assert w.manager.probe(prompt).raw_tokens <= first
        digests, plain = w.manager.block_digests(prompt), w.manager.block_digests(tokens(9))
        assert [a == b for a, b in zip(digests, plain, strict=True)] == [first >= 4, first >= 8]
        w.manager.open(prompt).close()


# ------------------------------------------------------------------------------------------------ arguments

IDS = tokens(4, "next")

CALLS = {
    "open max_reuse": lambda w, run, x: w.manager.open(tokens(8), max_reuse=x).close(),
    "open scope": lambda w, run, x: w.manager.open(tokens(8), scope=x).close(),
    "open priority": lambda w, run, x: w.manager.open(tokens(8), priority=x).close(),
    "open retry": lambda w, run, x: w.manager.open(tokens(8), retry=x).close(),
    "open ttl": lambda w, run, x: w.manager.open(tokens(8), ttl=x).close(),
    "probe scope": lambda w, run, x: w.manager.probe(tokens(8), scope=x),
    "probe max_reuse": lambda w, run, x: w.manager.probe(tokens(8), max_reuse=x),
    "block_digests scope": lambda w, run, x: w.manager.block_digests(tokens(8), x),
    "probe_digests scope": lambda w, run, x: w.manager.probe_digests([], x),
    "can_ever_fit": lambda w, run, x: w.manager.can_ever_fit(x, 1),
    "can_ever_fit new": lambda w, run, x: w.manager.can_ever_fit(1, x),
    "max_length_for": lambda w, run, x: w.manager.max_length_for(x),
    "reserve": lambda w, run, x: run.seq.reserve(x),
    "resize": lambda w, run, x: run.seq.resize(x),
    "resize length": lambda w, run, x: run.seq.resize(30, x),
    "resize both": lambda w, run, x: run.seq.resize(x, x),
    "rewind": lambda w, run, x: run.seq.rewind(x),
    "advance": lambda w, run, x: run.seq.advance(x),
    "advance snapshot": lambda w, run, x: run.seq.advance(4, snapshot=x),
    "accept": lambda w, run, x: run.seq.accept(x),
    "accept snapshot": lambda w, run, x: run.seq.accept(0, snapshot=x),
    "commit": lambda w, run, x: run.seq.commit(x),
    "commit snapshot": lambda w, run, x: run.seq.commit(IDS, snapshot=x),
    "commit old snapshot": lambda w, run, x: run.seq.commit([], snapshot=x),
    "commit end": lambda w, run, x: run.seq.commit(IDS, end=x),
    "fork": lambda w, run, x: [fork.close() for fork in run.seq.fork(x)],
    "plan_snapshots": lambda w, run, x: run.seq.plan_snapshots(x),
    "plan_snapshots one": lambda w, run, x: run.seq.plan_snapshots([x]),
    "rollback": lambda w, run, x: run.seq.rollback(x),
    "prefetch": lambda w, run, x: run.seq.prefetch(x),
    "transfer_plan": lambda w, run, x: run.seq.transfer_plan(x),
    "window_scratch": lambda w, run, x: setattr(run.seq, "window_scratch", x),
    "batch reserve": lambda w, run, x: w.manager.reserve([run.seq], x),
    "batch reserve whom": lambda w, run, x: w.manager.reserve(x, 1),
    "batch reserve one": lambda w, run, x: w.manager.reserve([x], 1),
    "batch advance": lambda w, run, x: w.manager.advance([run.seq], x),
    "batch advance whom": lambda w, run, x: w.manager.advance(x, 4),
    "batch commit": lambda w, run, x: w.manager.commit([run.seq], x, 4),
    "batch commit lengths": lambda w, run, x: w.manager.commit([run.seq], IDS, x),
    "batch commit whom": lambda w, run, x: w.manager.commit(x, IDS, 4),
    "prepare": lambda w, run, x: w.manager.prepare(x, []),
    "prepare whom": lambda w, run, x: w.manager.prepare(w.state, [run.seq, x]),
    "prepare all": lambda w, run, x: w.manager.prepare(None, x),
    "ragged counts": lambda w, run, x: w.manager.prepare_ragged(None, [run.seq], x, pad_tokens=8, pad_sequences=2),
    "ragged pad_tokens": lambda w, run, x: w.manager.prepare_ragged(None, [run.seq], 1, pad_tokens=x, pad_sequences=2),
    "ragged pad_sequences": lambda w, run, x: w.manager.prepare_ragged(
        None, [run.seq], 1, pad_tokens=8, pad_sequences=x
    ),
    "resize_tier": lambda w, run, x: w.manager.resize_tier(w.state, x, pages=0),
    "new_epoch": lambda w, run, x: w.manager.new_epoch(x) if not isinstance(x, str) else None,
    "take_events": lambda w, run, x: w.manager.take_events(replay=x),
}


ARRAYS = (np.array(3), np.zeros(2), np.ones(2, np.int32), np.zeros(0), np.array([None]))


@pytest.mark.parametrize("name", CALLS)
def test_any_argument_is_good_or_refused(name):
    """In flight and not, stopped or not: done, or one of jkv's errors and nothing has changed."""

    def check(value, groups, condition):
        w = shared_world(groups, "arguments")
        run = w.start(tokens(8)).prefill()
        try:
            assert run.reserve(4)
            if condition != 0:
                w.prepare(run)
                run.write(IDS)
            if condition == 2:
                run.advance()
            if condition == 3:
                run.commit()
                run.stop_committing()
            with refused_or_done(w):
                CALLS[name](w, run, value)
        finally:
            run.seq.close()
            w.runs.remove(run)
        assert w.manager.stats().active == 0

    groups = ["full", "full window:6 recurrent"]
    for array in ARRAYS:
        check(array, groups[array.ndim], 1)
    fuzz(24)(given(anything(), st.sampled_from(groups), st.integers(0, 3))(check))()
    for each in groups:
        assert shared_world(each, "arguments").hit(tokens(8)) == 8


LONG = [HUGE, -HUGE, [HUGE], (HUGE, -HUGE), {0: HUGE}]  # more digits than Python prints


@pytest.mark.parametrize("name", CALLS)
def test_numbers_too_long_to_print_change_nothing(name):
    w = shared_world("full", "long")
    for value in LONG:
        run = w.start(tokens(8)).prefill()
        before = w.picture()
        try:
            CALLS[name](w, run, value)
        except REFUSED:
            assert w.picture() == before
        run.seq.close()
        w.runs.remove(run)
        w.check()


def test_long_numbers_are_salts_and_contents():
    w = World("full", events=100)
    for sign in (1, -1):
        scope, prompt = jkv.Scope(salt=sign * HUGE), jkv.Tokens(tokens(9), {5: sign * HUGE})
        for options, ids in (({"scope": scope}, tokens(9)), ({}, prompt)):
            with w.manager.open(ids, **options) as seq:
                assert seq.resume() and seq.reserve(9)
                w.state, _ = w.manager.prepare(w.state, [seq])
                seq.commit(ids[seq.length :])
            assert w.manager.probe(ids, **options, max_reuse=9).tokens == 9
            digests = w.manager.block_digests(ids, **options)
            assert w.manager.probe_digests(digests, **options).tokens == 8
    assert len(w.manager.take_events()) == 7
    w.check()


# ------------------------------------------------------------------------------------------------ events


def test_events_share_nothing_with_the_manager():
    """All of it is immutable, and of plain types."""
    w = World("full window:6 recurrent", pages=14, host=8, page_size=4, events=1000)
    seen = []
    for i in range(12):
        w.turn([*PROMPTS, fresh(14)][i % 4], snapshot=True, scope=jkv.Scope(salt=i % 2), max_reuse=i)
        seen += w.manager.take_events(replay=i % 5 == 0)
    assert {event.kind for event in seen} == {"stored", "moved", "removed", "cleared"}
    for event in seen:
        assert type(event.tokens) is tuple and {type(token) for token in event.tokens} <= {int}
        assert type(event.digest) is type(event.parent) is bytes and type(event.position) is type(event.id) is int
        assert type(event.kind) is type(event.group) is type(event.tier) is str
        assert type(event.scope) in (jkv.Scope, type(None))
        for field in ("id", "tokens", "tier"):
            with pytest.raises(AttributeError):
                setattr(event, field, None)
    assert type(w.manager.take_events()) is tuple
