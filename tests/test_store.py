"""The store on TensorStore: what is written is found again, whole or not at all, and nothing that fails is fatal."""

import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.config import AttentionLayer, Buffer, CacheConfig, DeviceTier, RecurrentLayer, StoreTier, kv_buffers
from jkv.errors import ConfigError, StoreError
from jkv.layout import make_layout
from jkv.tiers import failures, keys, store, values
from jkv.tiers.store import Store

ts = pytest.importorskip("tensorstore")

P = 4
LAYERS = {
    "attn.0": AttentionLayer(kv_buffers(1, 8, jnp.bfloat16)),
    "attn.1": AttentionLayer(kv_buffers(1, 8, jnp.float32, fused=False), window=8, sinks=1),
    "ssm": RecurrentLayer({"conv": Buffer((6,)), "state": Buffer((2, 5), jnp.float32)}),
}
PAYLOAD = {"full": P * 32, "window:8+1": P * 64, "recurrent": 52}
SIZE = values.HEADER.size + PAYLOAD["full"]  # of a value of the group "full"


def layout_of(layers=LAYERS, page_size=P):
    config = CacheConfig(layers, 2, 64, page_size=page_size, tiers=(DeviceTier(pages=16),), model="m")
    return make_layout(config)


LAYOUT = layout_of()


def name_of(number):
    return keys.page_name(number.to_bytes(32, "big"))


def payload_of(number, group="full"):
    return np.random.default_rng(number).bytes(PAYLOAD[group])


def open_store(location, size=None, layout=LAYOUT, **options):
    return Store(StoreTier(location, size), layout, **options)


def fill(subject, numbers, group="full"):
    for number in numbers:
        subject.write(group, name_of(number), [payload_of(number, group)])


def found(subject, numbers, group="full"):
    """Which of these can be read, each of them checked byte by byte."""
    wanted = [(group, name_of(number)) for number in numbers]
    results = subject.read(wanted).results()
    for number, result in zip(numbers, results, strict=True):
        assert result is None or result == payload_of(number, group)
    return [number for number, result in zip(numbers, results, strict=True) if result is not None]


def known(subject, numbers, group="full"):
    return [number for number in numbers if subject.has(group, name_of(number))]


def files_of(path):
    """The value files below a directory, by number."""
    return {int(file.name, 16): file for file in sorted(pathlib.Path(path).glob("*/full/*"))}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves: `clock.now += 60`."""

    class Clock:
        now = 1000.0

    for module in (store, failures):
        monkeypatch.setattr(module, "monotonic", lambda: Clock.now)
    return Clock


def listed_again(subject, clock):
    """After the next listing."""
    clock.now += 1000
    subject.refresh()
    while subject.refresh():
        time.sleep(0.001)


class Future:
    """What a KvStore returns, under the test's control."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error

    def result(self):
        if self.error is not None:
            raise self.error
        return self.value

    def add_done_callback(self, done):
        done(self)


class Held(Future):
    """I/O that does not begin before `release`."""

    def __init__(self, call):
        self.call, self.callbacks = call, []

    def add_done_callback(self, done):
        self.callbacks.append(done)

    def release(self):
        future = self.call()
        future.result()
        for done in self.callbacks:
            done(future)


class Shim:
    """A KvStore that notes the calls, and lets some of them fail or wait.

    Args:
      errors: {"read", "write", "remove" or "list": error}; `raising` raises it at the call, not in the future.
      held: None: writes run at once; else the list that they wait in.
    """

    def __init__(self, kvstore):
        self.kvstore = kvstore
        self.calls, self.errors, self.raising, self.held = [], {}, False, None

    def _call(self, kind, *args, **options):
        self.calls.append((kind, args[0] if args else None))
        if kind in self.errors:
            if self.raising:
                raise self.errors[kind]
            return Future(error=self.errors[kind])
        if kind == "write" and self.held is not None:
            self.held.append(Held(lambda: self.kvstore.write(*args, **options)))
            return self.held[-1]
        return getattr(self.kvstore, "write" if kind == "remove" else kind)(*args, **options)

    def read(self, key):
        return self._call("read", key)

    def list(self):
        return self._call("list")

    def write(self, key, value, **options):
        return self._call("remove" if value is None else "write", key, value, **options)

    def keys(self, kind):
        return [key for called, key in self.calls if called == kind]


def shimmed(location="memory://", size=None, **options):
    subject = open_store(location, size, **options)
    subject.kvstore = Shim(subject.kvstore)
    return subject


@pytest.fixture
def shims(monkeypatch):
    """All stores made have a Shim from the start; the list of them."""
    made = []

    def opened(tier, _open=store._open):
        kvstore, spec = _open(tier)
        made.append(Shim(kvstore))
        return made[-1], spec

    monkeypatch.setattr(store, "_open", opened)
    return made


# ------------------------------------------------------------------------------------------------------ round trips

LOCATIONS = {
    "path": str,
    "Path": pathlib.Path,
    "file": lambda path: f"file://{path}/kv",
    "memory": lambda path: "memory://",
    "ocdbt": lambda path: f"file://{path}/kv/|ocdbt:",
    "ocdbt-path": lambda path: f"{path}/kv|ocdbt:sub",
    "spec": lambda path: {"driver": "file", "path": f"{path}/kv"},
    "ocdbt-spec": lambda path: {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/kv/"}},
    "odd": lambda path: path / "50% of #1? ü",
}


@pytest.mark.parametrize("kind", LOCATIONS)
def test_what_is_written_is_read(tmp_path, kind):
    subject = open_store(LOCATIONS[kind](tmp_path))
    for group in PAYLOAD:
        fill(subject, range(3), group)
        assert known(subject, range(4), group) == found(subject, range(4), group) == [0, 1, 2]
    subject.flush()
    for group in PAYLOAD:
        assert found(subject, range(3), group) == [0, 1, 2]
    stats = subject.stats()
    assert (stats.entries, stats.writes, stats.skipped, stats.off) == (9, 9, 0, False)
    assert stats.bytes == 3 * sum(values.HEADER.size + size for size in PAYLOAD.values())
    assert stats.failures == {"missing": 3}


@pytest.mark.parametrize("kind", sorted(set(LOCATIONS) - {"memory"}))
def test_entries_survive_a_restart(tmp_path, kind):
    first = open_store(LOCATIONS[kind](tmp_path))
    for group in PAYLOAD:
        fill(first, range(3), group)
    first.close()
    second = open_store(LOCATIONS[kind](tmp_path))
    for group in PAYLOAD:
        assert known(second, range(4), group) == found(second, range(3), group) == [0, 1, 2]
    assert second.stats().bytes == first.stats().bytes and not second.stats().failures


def test_parts_of_any_dtype_and_shape_are_put_together_in_order():
    arrays = [
        np.arange(32, dtype=jnp.bfloat16).reshape(2, 16),
        np.full((), 7.0, np.float32),
        np.arange(60, dtype=np.uint8),
    ]
    subject = open_store("memory://")
    subject.write("full", name_of(0), arrays)
    assert subject.read([("full", name_of(0))]).results() == [b"".join(a.tobytes() for a in arrays)]


def test_parts_may_change_once_they_are_written():
    subject, part = shimmed(), np.frombuffer(payload_of(0), np.uint8).copy()
    subject.kvstore.held = []
    subject.write("full", name_of(0), [part])
    part[:] = 0
    assert found(subject, [0]) == [0]
    subject.kvstore.held[0].release()
    assert found(subject, [0]) == [0]


def test_parts_of_a_wrong_size_are_refused():
    subject = open_store("memory://")
    with pytest.raises(ValueError, match=f"{PAYLOAD['full']}"):
        subject.write("full", name_of(0), [bytes(PAYLOAD["full"] - 1)])
    assert not subject.has("full", name_of(0))
    subject.flush()


def test_a_value_is_served_from_memory_until_it_is_written():
    subject = shimmed()
    subject.kvstore.held = []
    fill(subject, [0])
    reading = subject.read([("full", name_of(0))])
    assert reading.done() and reading.results() == [payload_of(0)]
    assert not subject.kvstore.keys("read")


def test_what_is_there_is_not_written_again():
    subject = shimmed()
    fill(subject, [0, 1, 0, 0])
    subject.flush()
    assert len([key for key in subject.kvstore.keys("write") if "full" in key]) == 2
    assert subject.stats().writes == 2 and subject.stats().skipped == 0


def test_nothing_wanted_is_done_at_once():
    reading = open_store("memory://").read([])
    assert reading.done() and reading.results() == []


def test_two_stores_in_memory_have_nothing_in_common():
    fill(open_store("memory://"), [0])
    assert not known(open_store("memory://"), [0])


# ------------------------------------------------------------------------------------------------ tails, identities


def test_tails_are_found_by_their_parent_over_a_restart(tmp_path):
    root = keys.root_digest("m")
    tails = {count: keys.tail_digest(root, np.arange(count, dtype=np.int32)) for count in (3, 1, 2)}
    subject = open_store(tmp_path)
    for count, digest in tails.items():
        subject.write("full", keys.tail_name(root, count, digest), [payload_of(count)])
    fill(subject, [0])
    subject.close()
    for each in (subject, open_store(tmp_path)):
        assert each.tails("full", root) == sorted(tails.items())
        assert each.tails("recurrent", root) == each.tails("full", bytes(32)) == []


def test_a_removed_tail_is_no_longer_found(tmp_path):
    parent, tail = bytes(32), bytes([1] * 32)
    subject = open_store(tmp_path, 2 * SIZE)
    subject.write("full", keys.tail_name(parent, 2, tail), [payload_of(0)])
    subject.flush()
    fill(subject, [1, 2])
    assert subject.tails("full", parent) == []


OTHERS = {
    "dtype": layout_of({**LAYERS, "attn.0": AttentionLayer(kv_buffers(1, 8, jnp.float16))}),
    "shape": layout_of({**LAYERS, "attn.0": AttentionLayer(kv_buffers(2, 4, jnp.bfloat16))}),
    "layer": layout_of({"attn.9": LAYERS["attn.0"], "attn.1": LAYERS["attn.1"], "ssm": LAYERS["ssm"]}),
    "buffer": layout_of({**LAYERS, "attn.0": AttentionLayer({"x": Buffer((2, 8))})}),
    "page size": layout_of({**LAYERS, "attn.0": AttentionLayer(kv_buffers(1, 4, jnp.bfloat16))}, 8),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_geometry_of_as_many_bytes_has_other_keys(tmp_path, what):
    first = open_store(tmp_path)
    fill(first, [0])
    first.close()
    second = open_store(tmp_path, layout=OTHERS[what])
    assert not known(second, [0]) and second.stats().entries == 1
    second.write("full", name_of(0), [payload_of(0)])
    second.close()
    assert open_store(tmp_path).stats().entries == 2


def test_groups_of_equal_geometry_have_their_own_entries(tmp_path):
    buffers = kv_buffers(1, 8, jnp.bfloat16)
    layout = layout_of({"a": AttentionLayer(buffers), "b": AttentionLayer(buffers, window=8)})
    assert len(layout.pools) == 1
    subject = open_store(tmp_path, layout=layout)
    fill(subject, [0])
    assert not subject.has("window:8", name_of(0))


# ------------------------------------------------------------------------------------------------- damage (FAULTS F23)


def damaged_store(tmp_path, damage, numbers=(0, 1, 2)):
    """A restarted store of three entries after `damage(files)`."""
    first = open_store(tmp_path)
    fill(first, numbers)
    first.close()
    damage(files_of(tmp_path))
    return open_store(tmp_path)


def flip(file, at, bit=0):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


DAMAGE = {
    "truncated": lambda files: os.truncate(files[1], SIZE - 1),
    "empty": lambda files: os.truncate(files[1], 0),
    "longer": lambda files: files[1].write_bytes(files[1].read_bytes() + b"\0"),
    "flipped": lambda files: flip(files[1], SIZE - 1),
    "of another key": lambda files: files[1].write_bytes(files[2].read_bytes()),
    "zeros": lambda files: files[1].write_bytes(bytes(SIZE)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_value_is_a_miss_and_dropped_F23(tmp_path, damage):
    subject = damaged_store(tmp_path, DAMAGE[damage])
    assert known(subject, range(3)) == [0, 1, 2]
    assert found(subject, range(3)) == [0, 2]
    assert subject.stats().failures == {"damaged": 1} and subject.stats().reads == 2
    assert known(subject, range(3)) == [0, 2]
    subject.flush()
    assert sorted(files_of(tmp_path)) == [0, 2]
    fill(subject, [1])
    subject.flush()
    assert found(subject, range(3)) == [0, 1, 2] == found(open_store(tmp_path), range(3))


def test_a_value_that_was_removed_by_hand_is_a_miss_and_forgotten_F23(tmp_path):
    subject = damaged_store(tmp_path, lambda files: None)
    files_of(tmp_path)[1].unlink()
    assert found(subject, range(3)) == [0, 2] == known(subject, range(3))
    assert subject.stats().failures == {"missing": 1}


def test_every_single_flipped_bit_is_noticed():
    form = values.formats(LAYOUT)["full"]
    key = form.prefix + name_of(1)
    good = form.pack(key, [payload_of(1)])
    assert form.unpack(key, good) == payload_of(1)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(values.Damaged):
            form.unpack(key, bytes(bad))


@pytest.mark.parametrize("what", ["layer", "dtype"])
def test_a_value_of_another_geometry_under_this_key_is_a_miss(tmp_path, what):
    other = open_store(tmp_path / "other", layout=OTHERS[what])
    fill(other, [1])
    other.close()
    (foreign,) = files_of(tmp_path / "other").values()
    subject = damaged_store(tmp_path / "own", lambda files: files[1].write_bytes(foreign.read_bytes()))
    assert found(subject, range(3)) == [0, 2] and subject.stats().failures == {"damaged": 1}


def test_the_log_says_what_is_wrong_with_a_value():
    form = values.formats(LAYOUT)["full"]
    key = form.prefix + name_of(1)
    good = form.pack(key, [payload_of(1)])
    for at, what in (
        (0, "magic number"),
        (8, "version"),
        (12, "fingerprint"),
        (44, "key"),
        (76, "length"),
        (84, "checksum"),
    ):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(values.Damaged, match=f"another {what}"):
            form.unpack(key, bytes(bad))
    with pytest.raises(values.Damaged, match=f"{SIZE - 1} bytes instead of {SIZE}"):
        form.unpack(key, good[:-1])


def test_a_good_value_that_took_a_damaged_ones_place_is_not_removed(tmp_path):
    subject = damaged_store(tmp_path, DAMAGE["flipped"])
    subject.kvstore = Shim(subject.kvstore)
    read = subject.kvstore.kvstore.read(subject._key("full", name_of(1)))
    read.result()
    files_of(tmp_path)[1].unlink()
    other = open_store(tmp_path)
    fill(other, [1])
    other.flush()
    subject.kvstore.read = lambda key: read  # as it was before the other one wrote
    assert found(subject, [1]) == []
    subject.flush()
    assert found(other, [1]) == [1]


# -------------------------------------------------------------------------------------------------------- the index


def test_the_index_is_rebuilt_without_reading_values(tmp_path, shims):
    first = open_store(tmp_path)
    fill(first, range(20))
    first.close()
    second = open_store(tmp_path)
    assert known(second, range(20)) == list(range(20))
    assert shims[1].keys("list") == [None]
    assert [key.split(b"/")[0] for key in shims[1].keys("read")] == [b"order"]


def test_other_files_there_are_left_alone(tmp_path):
    first = open_store(tmp_path)
    fill(first, [0])
    first.close()
    directory = files_of(tmp_path)[0].parent
    foreign = [tmp_path / "note.txt", directory / "README", directory / "ÿ", tmp_path / "order" / "list.txt"]
    for path in foreign:
        path.write_text("mine")
    subject = open_store(tmp_path, SIZE)
    assert subject.stats().entries == 1
    fill(subject, [1])
    subject.close()
    assert [path.read_text() for path in foreign] == ["mine"] * 4 and not subject.stats().failures
    assert found(subject, range(2)) == [1]


def test_what_killed_writers_left_half_written_is_removed_once_it_is_old(tmp_path):
    first = open_store(tmp_path)
    fill(first, [0])
    first.close()
    old, new = (files_of(tmp_path)[0].parent / f"{name_of(n)}.__lock" for n in (1, 2))
    for path in (old, new):
        path.write_bytes(bytes(100))
    os.utime(old, (time.time() - 7200,) * 2)
    subject = open_store(tmp_path)
    assert new.exists() and not old.exists()
    assert known(subject, range(3)) == [0]


# -------------------------------------------------------------------------------------------------- the bytes limit


def test_the_oldest_leave_first_and_the_limit_holds_F24(tmp_path):
    subject = open_store(tmp_path, 4 * SIZE)
    for number in range(10):
        fill(subject, [number])
        subject.flush()
        assert subject.stats().bytes <= 4 * SIZE
        assert sorted(files_of(tmp_path)) == list(range(max(0, number - 3), number + 1))
    assert found(subject, range(10)) == [6, 7, 8, 9]


def test_what_was_used_last_stays():
    subject = open_store("memory://", 4 * SIZE)
    fill(subject, range(4))
    subject.flush()
    subject.touch("full", name_of(0))
    fill(subject, [1])  # is there already: a use
    subject.touch("full", name_of(77))
    fill(subject, [4, 5])
    assert known(subject, range(6)) == [0, 1, 4, 5]


def test_bytes_count_those_of_all_groups_and_geometries(tmp_path):
    first = open_store(tmp_path, layout=OTHERS["dtype"])
    fill(first, range(2))
    first.close()
    subject = open_store(tmp_path, 4 * SIZE)
    fill(subject, range(3))
    subject.flush()
    assert subject.stats().entries == 4 and known(subject, range(3)) == [0, 1, 2]
    assert len(list(tmp_path.glob("*/full/*"))) == 4


def test_ages_are_known_after_a_restart(tmp_path):
    first = open_store(tmp_path)
    fill(first, range(6))
    first.flush()
    for number in (3, 1, 0):
        first.touch("full", name_of(number))
    first.close()
    second = open_store(tmp_path, 4 * SIZE)  # 2, 4, 5, 3, 1, 0
    second.flush()
    assert known(second, range(6)) == [0, 1, 3, 5] == sorted(files_of(tmp_path))
    fill(second, [7])
    assert known(second, range(8)) == [0, 1, 3, 7]


def test_entries_that_no_order_names_are_oldest(tmp_path):
    first = open_store(tmp_path)
    fill(first, [5, 6])
    first.close()
    killed = open_store(tmp_path)  # writes its order when it is too late
    fill(killed, [1, 2])
    killed._wait()
    third = open_store(tmp_path, 2 * SIZE)
    assert known(third, range(7)) == [5, 6]


def test_the_orders_of_several_writers_are_merged_and_replaced_by_one(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    fill(first, range(3))
    first.flush()
    fill(second, range(3, 6))
    second.flush()
    first.touch("full", name_of(0))
    first.flush()
    assert len(list(tmp_path.glob("order/*"))) == 2
    third = open_store(tmp_path)  # 1, 2, 3, 4, 5, 0
    third.flush()
    assert [path.name for path in tmp_path.glob("order/*")] == [third._writer]
    third.resize(3 * SIZE)
    assert known(third, range(6)) == [0, 4, 5]
    assert not third.stats().failures


def test_the_order_is_written_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ORDER_EVERY", 8)
    killed = open_store(tmp_path)
    fill(killed, range(8))
    killed._wait()
    for number in (1, 0):
        killed.touch("full", name_of(number))
    assert known(open_store(tmp_path, 2 * SIZE), range(8)) == [6, 7]


def test_a_damaged_order_costs_the_ages_only(tmp_path):
    first = open_store(tmp_path)
    fill(first, range(3))
    first.close()
    (order,) = tmp_path.glob("order/*")
    flip(order, 20)
    second = open_store(tmp_path)
    assert found(second, range(3)) == [0, 1, 2]
    assert second.stats().failures == {"damaged": 1}


def test_a_clock_that_was_set_back_does_not_change_the_order(tmp_path, monkeypatch):
    first = open_store(tmp_path)
    fill(first, [0])
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    fill(first, [1])
    first.close()
    assert known(open_store(tmp_path, SIZE), range(2)) == [1]


def test_resize_removes_the_oldest_and_gives_room_again_S46(tmp_path):
    subject = open_store(tmp_path, 6 * SIZE)
    fill(subject, range(6))
    subject.flush()
    subject.resize(2 * SIZE)
    subject.flush()
    assert known(subject, range(6)) == [4, 5] == sorted(files_of(tmp_path))
    assert (subject.stats().bytes, subject.stats().limit) == (2 * SIZE, 2 * SIZE)
    subject.resize(None)
    fill(subject, range(3))
    assert found(subject, range(6)) == [0, 1, 2, 4, 5]


def test_a_limit_on_ocdbt_is_a_config_error(tmp_path):
    subject = open_store(f"{tmp_path}/kv|ocdbt:")
    with pytest.raises(ConfigError, match="OCDBT"):
        subject.resize(SIZE)


def test_a_value_larger_than_the_limit_is_skipped_and_removes_nothing():
    subject = open_store("memory://", SIZE)
    fill(subject, [0])
    subject.flush()
    fill(subject, [1], "window:8+1")
    assert known(subject, [0]) == [0] and subject.stats().skipped == 1


def test_a_value_on_its_way_is_not_removed_for_another():
    subject = shimmed("memory://", 2 * SIZE)
    subject.kvstore.held = []
    fill(subject, range(3))
    assert known(subject, range(3)) == [0, 1] and subject.stats().skipped == 1
    for held in subject.kvstore.held:
        held.release()
    fill(subject, [2])
    assert known(subject, range(3)) == [1, 2]


# ------------------------------------------------------------------------------------------------------- the backlog


def test_writes_beyond_the_backlog_are_skipped():
    subject = shimmed(backlog=2 * SIZE)
    subject.kvstore.held = []
    fill(subject, range(4))
    assert known(subject, range(4)) == [0, 1] and subject.stats().skipped == 2
    subject.kvstore.held[0].release()
    fill(subject, range(4))
    assert known(subject, range(4)) == [0, 1, 2] and subject.stats().skipped == 3


def test_a_value_larger_than_the_backlog_goes_alone():
    subject = shimmed(backlog=1)
    fill(subject, [0])
    subject.flush()
    fill(subject, [1])
    subject.flush()
    assert found(subject, range(2)) == [0, 1]


def test_a_patient_write_waits():
    subject = open_store("memory://", backlog=2 * SIZE)
    subject.patient = True
    fill(subject, range(50))
    assert known(subject, range(50)) == list(range(50)) and subject.stats().skipped == 0


def test_a_patient_write_does_not_wait_for_what_never_comes():
    subject = shimmed(size=SIZE)
    subject.patient = True
    fill(subject, [0], "window:8+1")  # larger than the limit
    subject.kvstore.errors["write"] = OSError("disk full")
    fill(subject, [0, 1])
    assert subject.stats().skipped == 2 and not subject.stats().entries


# -------------------------------------------------------------------------------------------------------- two at once


def test_refresh_finds_what_another_wrote_and_forgets_what_it_removed(tmp_path, clock):
    first, second = open_store(tmp_path), open_store(tmp_path)
    fill(first, range(3))
    first.flush()
    assert not known(second, range(3))
    assert found(second, [0]) == [0]  # a read needs no index
    listed_again(second, clock)
    assert known(second, range(3)) == [0, 1, 2] == found(second, range(3))
    first.resize(SIZE)
    first.flush()
    listed_again(second, clock)
    assert known(second, range(3)) == [2]
    assert second.stats().bytes == SIZE and not second.stats().failures


def test_what_another_removed_under_ones_feet_is_a_miss(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    fill(first, range(4))
    first.flush()
    third = open_store(tmp_path)
    second.resize(1)
    first.resize(SIZE)
    first.flush()
    assert known(third, range(4)) == [0, 1, 2, 3]
    assert found(third, range(4)) == [3] == known(third, range(4))
    assert third.stats().failures == {"missing": 3}


def test_both_writing_the_same_entry_is_fine(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    for number in range(20):
        fill(first, [number])
        fill(second, [number])
    for each in (first, second):
        each.flush()
        assert found(each, range(20)) == list(range(20))


def test_entries_of_another_count_against_the_limit_after_a_refresh(tmp_path, clock):
    first, second = open_store(tmp_path), open_store(tmp_path, 3 * SIZE)
    fill(second, [0])
    second.flush()
    fill(first, range(1, 4))
    first.flush()
    listed_again(second, clock)
    second.flush()
    assert known(second, range(4)) == [1, 2, 3]
    assert sorted(files_of(tmp_path)) == [1, 2, 3]


def test_refresh_lists_at_most_once_a_second(clock):
    subject = shimmed()
    for now, lists in ((0, 0), (0.9, 0), (1.1, 1), (2.0, 1), (2.3, 2)):
        clock.now = 1000.0 + now
        subject.refresh()
        while subject.refresh():
            time.sleep(0.001)
        assert len(subject.kvstore.keys("list")) == lists


def test_a_listing_that_takes_long_is_made_less_often(clock):
    subject = shimmed()
    clock.now += 2
    listings = []
    subject.kvstore.list = lambda: listings.append(Held(subject.kvstore.kvstore.list)) or listings[-1]
    assert subject.refresh() and subject.refresh()
    clock.now += 3
    listings[0].release()
    assert not subject.refresh()
    clock.now += 26
    assert not subject.refresh()
    clock.now += 2
    assert subject.refresh() and len(listings) == 2
    clock.now += store.PATIENCE
    assert not subject.refresh()  # nobody should wait for this one


def test_a_listing_does_not_undo_what_happened_since_it_began(clock):
    """It was made when 0 was there and 1, 2 were not; it arrives when 0 has been removed and 1 and 2 were written."""
    subject = shimmed(size=2 * SIZE)
    fill(subject, [0])
    subject.flush()
    clock.now += 10
    stale = subject.kvstore.kvstore.list().result()
    listing = Held(lambda: Future(stale))
    subject.kvstore.list = lambda: listing
    assert subject.refresh()
    fill(subject, [1])
    subject.flush()
    subject.kvstore.held = []
    fill(subject, [2])  # still on its way
    assert known(subject, range(3)) == [1, 2]
    listing.release()
    assert known(subject, range(3)) == [1, 2]


# ----------------------------------------------------------------------------------------- failure at construction


def blocked(tmp_path, kind):
    file = tmp_path / "file"
    file.write_text("in the way")
    return {"a file": file, "below a file": file / "cache", "on ocdbt": f"file://{file}/|ocdbt:", "proc": "/proc/jkv"}[
        kind
    ]


@pytest.mark.parametrize("kind", ["a file", "below a file", "on ocdbt", "proc"])
def test_a_location_that_cannot_be_used_is_named_F24(tmp_path, kind):
    location = blocked(tmp_path, kind)
    with pytest.raises(StoreError, match=r"StoreTier\.location") as caught:
        open_store(location)
    assert str(location) in str(caught.value)
    if kind != "proc":
        assert (tmp_path / "file").read_text() == "in the way"


@contextlib.contextmanager
def without_privileges():
    """Root may write anywhere."""
    privileged = os.geteuid() == 0
    if privileged:
        os.seteuid(65534)
    try:
        yield
    finally:
        if privileged:
            os.seteuid(0)


def test_a_read_only_directory_is_named_F24():
    with tempfile.TemporaryDirectory() as directory:  # tmp_path is closed to others than root
        for name, mode in (("cache", 0o555), ("closed", 0o000)):
            path = pathlib.Path(directory) / name
            path.mkdir(mode)
            path.chmod(mode)
            os.chmod(directory, 0o755)
            with without_privileges(), pytest.raises(StoreError, match=f"{path}.*Permission denied"):
                open_store(path)


@pytest.mark.parametrize("kind", ["write", "remove", "list"])
def test_a_location_that_refuses_to_be_tried_is_named(tmp_path, shims, monkeypatch, kind):
    """As the directory that is read-only does, also for root."""
    error = ValueError("PERMISSION_DENIED: Read-only file system")
    monkeypatch.setattr(Shim, kind if kind != "remove" else "write", lambda *_, **__: Future(error=error))
    with pytest.raises(StoreError, match=f"{tmp_path}.*Read-only"):
        open_store(tmp_path)


@pytest.mark.parametrize("location", ["nowhere://x/", {"driver": "none"}, {"path": "/x/"}, "gs://b"])
def test_a_location_that_tensorstore_does_not_know_is_a_config_error(location):
    with pytest.raises(ConfigError, match=r"StoreTier\.location"):
        open_store(location)


def test_the_probe_leaves_nothing(tmp_path):
    open_store(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_buckets_are_opened_without_the_network():
    """In a process of its own, which must also end while their I/O does not: there is no network."""
    code = """
import sys; sys.path.insert(0, "tests")
from test_store import *
for location in ("gs://jkv-no-such-bucket/kv", "s3://jkv-no-such-bucket/kv", "s3://jkv-no-such-bucket/kv/|ocdbt:"):
    subject = open_store(location)
    fill(subject, [0])
    assert subject.kvstore.path in ("kv/", "") and known(subject, [1]) == [] and found(subject, [0]) == [0]
print("ended")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=pathlib.Path(__file__).parents[1]
    )
    assert run.stdout == "ended\n" and run.returncode == 0, run.stderr


def test_a_bucket_that_cannot_be_listed_is_visible(shims, monkeypatch):
    monkeypatch.setattr(store, "LOCAL_DRIVERS", ())  # memory:// stands for a bucket
    monkeypatch.setattr(Shim, "list", lambda _: Future(error=ValueError("UNAUTHENTICATED")))
    subject = open_store("memory://")
    while subject.refresh():
        time.sleep(0.001)
    assert subject.stats().failures == {"list": 1}
    fill(subject, [0])
    assert found(subject, [0]) == [0]


def test_a_bucket_is_known_once_it_is_listed(tmp_path, shims, monkeypatch):
    first = open_store(tmp_path)
    fill(first, range(4))
    first.close()
    monkeypatch.setattr(store, "LOCAL_DRIVERS", ())
    listing = Held(lambda: shims[1].kvstore.list())
    monkeypatch.setattr(Shim, "list", lambda _: listing)
    second = open_store(tmp_path, 4 * SIZE)
    fill(second, [9])
    assert known(second, range(10)) == [9] and second.refresh()
    listing.release()
    while second.refresh():
        time.sleep(0.001)
    assert known(second, range(10)) == [1, 2, 3, 9]


# --------------------------------------------------------------------------------------------- failure while running


@pytest.mark.parametrize("raising", [False, True])
def test_a_full_disk_turns_writing_off_for_a_minute_F24(clock, raising):
    subject = shimmed()
    fill(subject, range(2))
    subject.flush()
    subject.kvstore.errors["write"] = OSError(28, "No space left on device")
    subject.kvstore.raising = raising
    fill(subject, range(2, 5))
    stats = subject.stats()
    assert stats.off and (stats.entries, stats.writes, stats.skipped) == (2, 2, 2)
    assert stats.failures == {"write": 1} and stats.bytes == 2 * SIZE
    assert known(subject, range(5)) == found(subject, range(5)) == [0, 1]
    subject.flush()
    subject.kvstore.errors.clear()
    clock.now += 59
    fill(subject, [2])
    assert known(subject, range(5)) == [0, 1]
    clock.now += 2
    fill(subject, [2])
    assert found(subject, range(5)) == [0, 1, 2] and not subject.stats().off


def test_a_write_that_the_system_refuses_leaves_no_entry(tmp_path):
    """A real I/O error: files of the process that writes may have 150 bytes."""
    code = """
import resource, sys; sys.path.insert(0, "tests")
from test_store import *
subject = open_store(sys.argv[1])
fill(subject, [0]), subject.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
fill(subject, [1]), fill(subject, [2], "recurrent"), subject.flush()
stats = subject.stats()
assert stats.failures == {"write": 1} and stats.off and known(subject, range(2)) == [0] == found(subject, [0])
"""
    subprocess.run(
        [sys.executable, "-c", code, tmp_path], check=True, cwd=pathlib.Path(__file__).parents[1], timeout=60
    )
    assert found(open_store(tmp_path), range(2)) == [0]


def test_a_failing_read_is_a_miss_that_removes_nothing():
    subject = shimmed()
    fill(subject, range(2))
    subject.flush()
    subject.kvstore.errors["read"] = OSError(5, "Input/output error")
    assert found(subject, range(2)) == [] == known(subject, range(2))
    assert subject.stats().failures == {"read": 2} and not subject.kvstore.keys("remove")
    subject.kvstore.errors.clear()
    assert found(subject, range(2)) == [0, 1]


def test_a_read_that_never_ends_is_a_miss_after_a_minute(clock):
    subject = shimmed()
    fill(subject, [0])
    subject.flush()
    subject.kvstore.read = lambda key: Held(None)
    reading = subject.read([("full", name_of(0))])
    assert not reading.done()
    clock.now += store.PATIENCE
    assert reading.done() and reading.results() == [None]
    assert subject.stats().failures == {"read": 1}


@pytest.mark.parametrize("before", [None, b"damaged"])
def test_a_late_answer_says_nothing_of_a_value_written_since(tmp_path, before):
    """A value that the index forgot although it is there would not count towards the limit."""
    subject = shimmed(tmp_path)
    key = subject._key("full", name_of(0))
    if before is not None:
        subject.kvstore.kvstore.write(key, before).result()
    answer = subject.kvstore.kvstore.read(key).result()
    late = Held(lambda: Future(answer))
    subject.kvstore.read = lambda key: late
    reading = subject.read([("full", name_of(0))])
    fill(subject, [0])
    subject.flush()
    late.release()
    del subject.kvstore.read
    assert reading.results() == [None]
    subject.flush()
    assert known(subject, [0]) == found(subject, [0]) == list(files_of(tmp_path)) == [0]


def test_a_failing_removal_is_counted_and_found_again(tmp_path, clock):
    subject = shimmed(tmp_path, 2 * SIZE)
    fill(subject, range(2))
    subject.flush()
    subject.kvstore.errors["remove"] = OSError(30, "Read-only file system")
    fill(subject, [2])
    subject.flush()
    assert subject.stats().failures == {"remove": 1} and known(subject, range(3)) == [1, 2]
    subject.kvstore.errors.clear()
    listed_again(subject, clock)
    subject.flush()
    assert subject.stats().bytes == 2 * SIZE and len(files_of(tmp_path)) == 2


def test_a_failing_listing_changes_nothing(clock):
    subject = shimmed()
    fill(subject, [0])
    subject.flush()
    subject.kvstore.errors["list"] = OSError(5, "Input/output error")
    listed_again(subject, clock)
    assert subject.stats().failures == {"list": 1} and known(subject, [0]) == [0]


def test_a_failing_order_is_counted(clock):
    subject = shimmed()
    fill(subject, [0])
    subject._wait()
    subject.kvstore.errors["write"] = OSError(28, "No space left on device")
    subject.close()
    assert subject.stats().failures == {"order": 1} and subject.stats().off


def remove_directory(path):
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


def test_a_directory_removed_while_running(tmp_path, clock):
    subject = open_store(tmp_path / "cache")
    fill(subject, range(3))
    subject.flush()
    remove_directory(tmp_path / "cache")
    assert found(subject, [0]) == [] and known(subject, range(3)) == [1, 2]
    listed_again(subject, clock)
    assert not known(subject, range(3)) and subject.stats().bytes == 0
    fill(subject, range(2))  # TensorStore makes the directory anew
    subject.flush()
    assert found(open_store(tmp_path / "cache"), range(3)) == [0, 1]


def test_a_file_in_the_removed_directorys_place(tmp_path, clock):
    subject = open_store(tmp_path / "cache")
    fill(subject, range(3))
    subject.flush()
    remove_directory(tmp_path / "cache")
    (tmp_path / "cache").write_text("in the way")
    fill(subject, [3])
    subject.flush()
    assert found(subject, range(4)) == []
    listed_again(subject, clock)
    subject.close()
    stats = subject.stats()
    assert stats.off and stats.entries == 0 and set(stats.failures) <= {"write", "order", "read", "list", "missing"}


def test_one_log_line_per_kind_and_minute(clock, caplog):
    subject = shimmed()
    fill(subject, range(3))
    subject.flush()
    subject.kvstore.errors["read"] = OSError(5, "Input/output error")
    with caplog.at_level(logging.WARNING, "jkv"):
        found(subject, [0, 1])
        found(subject, [2])
        assert [(record.levelname, record.name) for record in caplog.records] == [("WARNING", "jkv")]
        assert all(text in caplog.text for text in ("memory://", "read", "Input/output error"))
        subject.kvstore.errors["write"] = OSError(28, "No space left on device")
        fill(subject, [7])
        assert len(caplog.records) == 2
        clock.now += 61
        found(subject, [0, 1])
        assert len(caplog.records) == 3 and "4 so far" in caplog.records[-1].getMessage()
    assert subject.stats().failures == {"read": 5, "write": 1}
    assert not logging.getLogger("jkv").handlers


def test_after_close_nothing_is_written(tmp_path):
    subject = open_store(tmp_path)
    fill(subject, [0])
    subject.close()
    subject.close()
    fill(subject, [1])
    assert known(subject, range(2)) == [0] and subject.stats().skipped == 1
    assert not subject.refresh()


def test_one_store_in_two_threads(tmp_path, monkeypatch):
    """The worker writes while the manager looks things up: in the end the index and the files agree."""
    monkeypatch.setattr(store, "ORDER_EVERY", 16)
    subject = open_store(tmp_path, 30 * SIZE)
    subject.patient = True
    worker = threading.Thread(target=fill, args=(subject, [*range(100), *range(90)]))
    worker.start()
    while worker.is_alive():
        for number in range(0, 100, 7):
            subject.touch("full", name_of(number))
        found(subject, range(0, 100, 9))
        subject.tails("full", bytes(32))
        subject._listed_at = -1000.0
        subject.refresh()
        assert subject.stats().bytes <= 30 * SIZE
    subject.flush()
    while subject.refresh():
        time.sleep(0.001)
    there = known(subject, range(100))
    assert there == sorted(files_of(tmp_path)) == found(subject, there) and subject.stats().bytes == len(there) * SIZE
    assert set(subject.stats().failures) <= {"missing"}


# ------------------------------------------------------------------------------------------------- real processes

WRITERS = """
import os, random, signal, sys, time
sys.path.insert(0, "tests")
from test_store import *

def writer(seed):
    chance = random.Random(seed)
    subject = open_store(sys.argv[1], 40 * BIG_SIZE, BIG)
    while True:
        number = chance.randrange(200)
        subject.write("full", name_of(number), [big_payload_of(number)])
        (value,) = subject.read([("full", name_of(chance.randrange(200)))]).results()
        subject.refresh()

def start(seed):
    child = os.fork()
    if child:
        return child
    try:
        writer(seed)
    finally:
        os._exit(1)

chance = random.Random(0)
children = [start(1), start(2)]
for kill in range(20):
    time.sleep(chance.uniform(0.03, 0.15))
    victim = children.pop(chance.randrange(2))
    os.kill(victim, signal.SIGKILL)
    assert os.waitpid(victim, 0)[1] == signal.SIGKILL, "a writer ended by itself"
    children.append(start(3 + kill))
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
BIG = layout_of({"attn": AttentionLayer(kv_buffers(8, 64, jnp.float32))}, page_size=32)
BIG_SIZE = values.HEADER.size + 2**17


def big_payload_of(number):
    return payload_of(number) * (2**17 // PAYLOAD["full"])


def test_two_writers_of_which_one_is_killed_twenty_times(tmp_path):
    root = pathlib.Path(__file__).parents[1]
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITERS, tmp_path], check=True, cwd=root, timeout=120)
    subject = open_store(tmp_path, 40 * BIG_SIZE, BIG)
    there = known(subject, range(200))
    assert there and subject.stats().bytes <= 40 * BIG_SIZE
    results = subject.read([("full", name_of(number)) for number in there]).results()
    assert [result == big_payload_of(number) for number, result in zip(there, results, strict=True)] == [True] * len(
        there
    )
    assert not subject.stats().failures
