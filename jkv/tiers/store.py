"""Store: content-addressed values behind host memory, on a TensorStore KvStore.

    manager   has, tails, touch, read, refresh   ->  index  (what there is, as far as is known)
    worker    write                              ->  KvStore: FINGERPRINT-BYTES/GROUP/NAME, order/WRITER

The index is filled from one listing at start, and again by `refresh`: other processes write to the same place, and
remove from it. So an entry of the index is a promise that may be broken: a read of what is gone, or is not what it
should be, is a miss. The worst that any fault does here is a miss.

Nothing waits for I/O but the constructor, a patient `write`, `Reading.results`, `flush` and `close`. The lock is never
held during I/O; what has ended is noted on TensorStore's threads.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic, time
from typing import Any

from jkv.config import StoreTier
from jkv.errors import ConfigError, StoreError
from jkv.layout import Layout
from jkv.tiers.failures import Failures
from jkv.tiers.index import Entry, Index, Order, decode_order, merge_orders, sizes_of
from jkv.tiers.values import Damaged, Format, Part, formats

BACKLOG = 64 * 2**20  # bytes of values on their way
PAUSE = 60.0  # seconds without a write after one that failed
PATIENCE = 60.0  # seconds that anything waits for I/O that may never end, as when a network is gone
ORDER_EVERY = 1024  # changes between two writes of the order, and a sixteenth of the entries if that is more
ABANDONED = 3600.0  # seconds after which a file that was being written has no writer any more
LOCAL_DRIVERS = ("file", "memory")
ORDER_KEY = re.compile(rb"order/[0-9a-f]{32}")
PROBE_KEY = re.compile(rb"probe/[0-9a-f]{32}")  # of one that was killed while it tried the location
Done = Callable[[Any, BaseException | None], None]


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """The store as this process knows it, and what this process did to it.

    Attributes:
      entries, bytes: of now, other processes' and other models' included; bytes of the values, headers included.
      limit: of the bytes; None: none.
      writes, reads: values written, and values read and found right.
      skipped: writes that were not tried: too many on their way, no room, or off.
      failures: {kind: count}; "write", "read", "list", "remove", "order": an I/O error; "missing": an entry was gone;
        "damaged": a value was not the one that was written.
      off: a write failed (a full disk, a directory that is read-only now): none is tried for a minute.
    """

    entries: int
    bytes: int
    limit: int | None
    writes: int
    reads: int
    skipped: int
    failures: Mapping[str, int]
    off: bool


class Reading:
    """Reads on their way. What has not arrived after a minute is a miss."""

    def __init__(self, count: int, failures: Failures):
        self._results: list[memoryview | None] = [None] * count
        self._left = count
        self._failures = failures
        self._deadline = monotonic() + PATIENCE
        self._lock = threading.Lock()
        self._all = threading.Event()
        if not count:
            self._all.set()

    def done(self) -> bool:
        """Whether `results` returns at once."""
        return self._all.is_set() or monotonic() >= self._deadline

    def results(self) -> list[memoryview | None]:
        """The payloads in the order in which they were wanted; None: missing, or not what it should be."""
        if not self._all.wait(max(0.0, self._deadline - monotonic())):
            self._failures.add("read", f"{self._left} values have not arrived after {PATIENCE:.0f} s")
        return list(self._results)

    def _put(self, at: int, payload: memoryview | None) -> None:
        self._results[at] = payload
        with self._lock:
            self._left -= 1
            if not self._left:
                self._all.set()


class Store:
    """The store tier of one manager. All methods may be called from any thread.

    A local store (the file and memory drivers, and OCDBT on them) is listed and tried by the constructor. One behind a
    network is listed in the background: it starts empty, nothing here waits for the network, and what fails is in
    `stats`. memory:// is this object's own, and gone with it.

    Args:
      tier: where, and how many bytes.
      layout: the cache's geometry.
      backlog: bytes of values that may be on their way.

    Attributes:
      patient: while True, `write` waits for room in the backlog instead of skipping the value.

    Raises:
      ConfigError: TensorStore does not know such a location, or is not installed.
      StoreError: a local one that cannot be listed, or that values cannot be written to and removed from.

    >>> import jkv, jax.numpy as jnp
    >>> from jkv.layout import make_layout
    >>> from jkv.tiers import keys
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> config = jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),), model="m")
    >>> store = Store(StoreTier("memory://"), make_layout(config))
    >>> name = keys.page_name(keys.root_digest("m"))
    >>> store.write("full", name, [bytes(256)])
    >>> store.has("full", name), store.read([("full", name)]).results() == [bytes(256)]
    (True, True)
    """

    def __init__(self, tier: StoreTier, layout: Layout, backlog: int = BACKLOG):
        self.tier = tier
        self.backlog = backlog
        self.patient = False
        self.kvstore, spec = _open(tier)
        self._failures = Failures(f"store {_shown(tier)}")
        self._formats = formats(layout)
        self._writer = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # I/O has ended
        self._index = Index()
        self._pending: dict[str, memoryview] = {}  # payloads on their way
        self._pending_bytes = 0
        self._removing: set[str] = set()
        self._removed: set[str] = set()  # since the running listing began: it may still show them
        self._running = 0  # writes, removals and orders on their way
        self._ordering = False
        self._listing = True
        self._listings = 1  # begun so far
        self._listed_at, self._listing_took = monotonic(), 0.0
        self._off_until = -PAUSE
        self._closed = False
        self._writes = self._reads = self._skipped = 0
        driver = _innermost(spec)
        if driver["driver"] not in LOCAL_DRIVERS:
            # Callbacks, not a thread that waits: one that wakes up while Python ends takes the process down.
            _start(self._found, self.kvstore.list)
            return
        try:
            self._probe()
            self._found(self.kvstore.list().result(), None)
        except Exception as error:
            raise StoreError(f"StoreTier.location={_shown(tier)} cannot be used: {error}") from error
        with self._lock:
            self._changed.wait_for(lambda: not self._listing)
        if driver["driver"] == "file":
            _remove_abandoned(pathlib.Path(driver["path"]))

    # --------------------------------------------------------------------------------------------------- at start

    def _probe(self) -> None:
        """Opening an impossible directory succeeds, and so does listing one that is read-only."""
        probe = f"probe/{self._writer}"
        self.kvstore.write(probe, b"jkv").result()
        self.kvstore.write(probe, None).result()

    def _found(self, keys: list[bytes], error: BaseException | None) -> None:
        """The first listing has ended. Next the writers' orders are read, one after the other: there are few."""
        if error is not None:
            self._failures.add("list", error)
            with self._lock:
                self._end_listing()
            return
        self._read_orders(keys, [key for key in keys if ORDER_KEY.fullmatch(key)], [])

    def _read_orders(self, keys: list[bytes], unread: list[bytes], orders: list[Order]) -> None:
        if unread:
            done = functools.partial(self._order_read, keys, unread[1:], orders)
            _start(done, self.kvstore.read, unread[0])
        else:
            self._load(keys, orders)

    def _order_read(
        self, keys: list[bytes], unread: list[bytes], orders: list[Order], result: Any, error: BaseException | None
    ) -> None:
        try:
            if error is not None:
                self._failures.add("order", error)
            elif result.state == "value":
                orders.append(decode_order(result.value))
        except Damaged as reason:
            self._failures.add("damaged", reason)
        self._read_orders(keys, unread, orders)

    def _load(self, keys: list[bytes], orders: list[Order]) -> None:
        """Fills the index. One order takes the place of all."""
        with self._lock:
            self._index.load(sizes_of(keys), merge_orders(orders))
            self._end_listing()
            victims = self._forget(self._excess())
        self._remove(victims)
        replaced = [key.decode() for key in keys if ORDER_KEY.fullmatch(key) or PROBE_KEY.fullmatch(key)]
        if replaced:
            self._write_order(replaced)

    # ------------------------------------------------------------------------------------------------ what there is

    def _key(self, group: str, name: str) -> str:
        return self._formats[group].prefix + name

    def has(self, group: str, name: str) -> bool:
        """Whether there is such an entry, written or on its way, as far as is known."""
        return self._key(group, name) in self._index

    def touch(self, group: str, name: str) -> None:
        """The entry, if there is one, is used now."""
        with self._lock:
            self._index.touch(self._key(group, name))

    def tails(self, group: str, parent: bytes) -> list[tuple[int, bytes]]:
        """(tokens, digest) of the tails behind the page or root `parent`, sorted."""
        with self._lock:
            return self._index.tails(self._formats[group].prefix, parent)

    def watch(self) -> list[tuple[str, str]]:
        """(group, name) of all entries of this cache's model geometry; from now on `take_changes` says what changes."""
        with self._lock:
            self._index.changed = []
            return self._named(self._index.entries)

    def take_changes(self) -> list[tuple[str, str]] | None:
        """(group, name) of entries that came or went since the last call, or since `watch`; None: too many to tell."""
        with self._lock:
            keys, self._index.changed = self._index.changed, []
        return None if keys is None else self._named(keys)

    def _named(self, keys: Iterable[str]) -> list[tuple[str, str]]:
        groups = {form.prefix: group for group, form in self._formats.items()}
        split = [(key[: key.rindex("/") + 1], key) for key in keys]
        return [(groups[prefix], key[len(prefix) :]) for prefix, key in split if prefix in groups]

    def refresh(self) -> bool:
        """Starts a listing in the background, if the last one began more than 1 s, and 10 times what it took, ago.

        Returns:
          Whether a listing is running that may still end soon. Once none is, what other processes had written when it
          began is known.
        """
        with self._lock:
            now = monotonic()
            if self._listing:
                return now - self._listed_at < PATIENCE
            if self._closed or now - self._listed_at <= max(1.0, 10 * self._listing_took):
                return False
            self._listing, self._listed_at = True, now
            self._listings += 1
            self._removed = set(self._removing)
        _start(self._listed, self.kvstore.list)
        return self._listing

    def _listed(self, keys: list[bytes] | None, error: BaseException | None) -> None:
        if keys is None:
            self._failures.add("list", error)
            with self._lock:
                self._end_listing()
            return
        found = sizes_of(keys)
        with self._lock:
            entries = list(self._index.entries.items())
        # Of an entry that was written since the listing began, the listing says nothing.
        gone = [(key, entry) for key, entry in entries if key not in found and entry.listing < self._listings]
        new = [key for key in found if key not in self._index]
        with self._lock:
            for key in new:
                if key not in self._index and key not in self._removed:
                    self._index.add(key, found[key], self._listings)
            for key, entry in gone:
                if self._index.entries.get(key) is entry and key not in self._pending:
                    self._index.remove(key)
            self._end_listing()
            victims = self._forget(self._excess())
        self._remove(victims)

    def _end_listing(self) -> None:
        self._listing = False
        self._removed.clear()
        self._changed.notify_all()
        self._listing_took = monotonic() - self._listed_at

    def stats(self) -> StoreStats:
        """Counts of now."""
        with self._lock:
            index, limit, off = self._index, self.tier.bytes, self._off()
            counts = self._writes, self._reads, self._skipped
            return StoreStats(len(index), index.bytes, limit, *counts, self._failures.counts, off)

    # ------------------------------------------------------------------------------------------------------ writing

    def write(self, group: str, name: str, parts: Sequence[Part]) -> None:
        """Starts to write an entry; of one that is there already, only the age changes.

        Args:
          group: the group's name.
          name: from `jkv.tiers.keys`.
          parts: buffers (C-contiguous) that make up the payload, in order; copied before this returns.
        """
        form = self._formats[group]
        key = form.prefix + name
        with self._lock:
            if not self._worth_packing(key):
                return
        value = form.pack(key, parts)
        with self._lock:
            victims = self._admit(key, form, value)
        if victims is not None:
            self._remove(victims)
            _start(functools.partial(self._written, key), self.kvstore.write, key, value)
            self._write_order_if_due()

    def _worth_packing(self, key: str) -> bool:
        if key in self._index:
            self._index.touch(key)
            return False
        if self._off() or self._closed:
            self._skipped += 1
            return False
        return True

    def _admit(self, key: str, form: Format, value: bytes) -> list[str] | None:
        """Makes an entry for a value that is about to be written; the keys to remove for it. None: do not write it."""
        deadline = monotonic() + PATIENCE
        while (victims := self._room_for(key, form.size)) is None:
            hopeless = self._off() or self._closed or not self._running
            if hopeless or not self.patient or not self._changed.wait(deadline - monotonic()):
                self._skipped += 1
                return None
        self._index.add(key, form.size, self._listings)
        self._pending[key] = form.payload(value)
        self._pending_bytes += form.size
        self._running += 1
        return self._forget(victims)

    def _room_for(self, key: str, size: int) -> list[str] | None:
        """The keys whose removal makes room for a value; None: it cannot be written now.

        Not while its key is being removed: of the two, the removal might come last.
        """
        if key in self._removing or (self._pending and self._pending_bytes + size > self.backlog):
            return None
        victims = self._excess(size)
        entries, limit = self._index.entries, self.tier.bytes
        if limit is not None and self._index.bytes - sum(entries[k].size for k in victims) + size > limit:
            return None
        return victims

    def _excess(self, size: int = 0) -> list[str]:
        """The oldest entries, as many as must go so that `size` more bytes fit; those on their way cannot go."""
        if self.tier.bytes is None:
            return []
        return self._index.oldest(self._index.bytes + size - self.tier.bytes, keep=self._pending)

    def _written(self, key: str, _: Any, error: BaseException | None) -> None:
        if error is not None:
            self._failures.add("write", error)
        with self._lock:
            self._pending_bytes -= self._index.entries[key].size
            del self._pending[key]
            if error is None:
                self._writes += 1
                self._index.entries[key].listing = self._listings
            else:
                self._index.remove(key)
            self._end_io(error)

    def _end_io(self, write_error: BaseException | None = None) -> None:
        if write_error is not None:
            self._off_until = monotonic() + PAUSE
        self._running -= 1
        self._changed.notify_all()

    def _off(self) -> bool:
        return monotonic() < self._off_until

    # ----------------------------------------------------------------------------------------------------- removing

    def _forget(self, keys: list[str]) -> list[str]:
        """Takes entries that are about to be removed out of the index."""
        for key in keys:
            self._index.remove(key)
        self._removing.update(keys)
        if self._listing:
            self._removed.update(keys)
        self._running += len(keys)
        return keys

    def _remove(self, keys: list[str], **condition: Any) -> None:
        """Starts to remove what `_forget` was told of."""
        for key in keys:
            _start(functools.partial(self._gone, key), self.kvstore.write, key, None, **condition)

    def _gone(self, key: str, _: Any, error: BaseException | None) -> None:
        if error is not None:
            self._failures.add("remove", error)
        with self._lock:
            self._removing.discard(key)
            self._end_io()

    def resize(self, limit: int | None) -> None:
        """Another limit of the bytes: what no longer fits is removed, oldest first.

        Raises:
          ConfigError: a limit on OCDBT, or less than 1.
        """
        tier = dataclasses.replace(self.tier, bytes=limit)
        with self._lock:
            self.tier = tier
            victims = self._forget(self._excess())
        self._remove(victims)

    # ------------------------------------------------------------------------------------------------------ reading

    def read(self, wanted: Sequence[tuple[str, str]]) -> Reading:
        """Starts to read the values of these (group, name), all at once."""
        reading = Reading(len(wanted), self._failures)
        for at, (group, name) in enumerate(wanted):
            form = self._formats[group]
            key = form.prefix + name
            with self._lock:
                payload = self._pending.get(key)
                entry = self._index.entries.get(key)
            if payload is not None:
                reading._put(at, payload)
                continue
            done = functools.partial(self._received, form, key, entry, functools.partial(reading._put, at))
            _start(done, self.kvstore.read, key)
        return reading

    def _received(
        self,
        form: Format,
        key: str,
        entry: Entry | None,
        put: Callable[[memoryview | None], None],
        result: Any,
        error: BaseException | None,
    ) -> None:
        """Passes on what was read, if it is good. On TensorStore's threads: checksums cost the caller nothing.

        What is not good loses its `entry`, of when the read began; of a value written since, the read says nothing.
        """
        payload = None
        try:
            if error is not None:
                self._failures.add("read", error)
            elif result.state != "value":
                self._failures.add("missing", f"{key} is gone")
            else:
                payload = form.unpack(key, result.value)
            with self._lock:
                self._reads += payload is not None
                if payload is None and self._index.entries.get(key) is entry:
                    self._index.remove(key)
        except Damaged as reason:
            self._failures.add("damaged", reason)
            with self._lock:
                victims = self._forget([key] if self._index.entries.get(key) is entry else [])
            # Only this very value: another process may have put a good one there by now.
            self._remove(victims, if_equal=result.stamp.generation)
        finally:
            put(payload)

    # -------------------------------------------------------------------------------------------------------- order

    def _write_order_if_due(self) -> None:
        if self._index.changes >= max(ORDER_EVERY, len(self._index) // 16):
            self._write_order()

    def _write_order(self, replaces: Sequence[str] = ()) -> None:
        """Starts to write this writer's order; then the keys that it replaces are removed."""
        with self._lock:
            if self._ordering or self._off():
                return
            self._ordering = True
            self._running += 1
            value = self._index.encode_order()
        _start(functools.partial(self._ordered, replaces), self.kvstore.write, f"order/{self._writer}", value)

    def _ordered(self, replaces: Sequence[str], _: Any, error: BaseException | None) -> None:
        if error is not None:
            self._failures.add("order", error)
        with self._lock:
            self._ordering = False
            victims = self._forget(list(replaces) if error is None else [])
            self._index.changes += error is not None
            self._end_io(error)
        self._remove(victims)

    # ------------------------------------------------------------------------------------------------------- ending

    def flush(self) -> None:
        """Waits until everything on its way has been written or removed, and writes the order."""
        if self._wait() and self._index.changes:
            self._write_order()
            self._wait()

    def _wait(self) -> bool:
        with self._lock:
            ended = self._changed.wait_for(lambda: not self._running, PATIENCE)
        if not ended:
            self._failures.add("write", f"still on its way after {PATIENCE:.0f} s")
        return ended

    def close(self) -> None:
        """`flush`; nothing is written from then on."""
        if not self._closed:
            self.flush()
            self._closed = True


def _outcome(future: Any) -> tuple[Any, BaseException | None]:
    try:
        return future.result(), None
    except BaseException as error:  # CancelledError is no Exception
        return None, error


def _start(done: Done, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Starts I/O; `done(result, None)` or `done(None, error)` runs on whichever thread it ends on. Hold no lock."""
    try:
        future = call(*args, **options)
    except Exception as error:
        done(None, error)
    else:
        future.add_done_callback(lambda future: done(*_outcome(future)))


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _shown(tier: StoreTier) -> str:
    return repr(_plain(tier.location))


def _spec_of(location: Any) -> Any:
    """A KvStore spec or URL. A bare path may have anything in it, so it does not become part of a URL as it is."""
    if isinstance(location, Mapping):
        return _plain(location)
    path, pipe, rest = location.partition("|")
    if "://" in path:
        return location
    path = os.path.abspath(path) + "/"
    return f"file://{urllib.parse.quote(path)}{pipe}{rest}" if pipe else {"driver": "file", "path": path}


def _open(tier: StoreTier) -> tuple[Any, dict[str, Any]]:
    """The KvStore of a tier, and its spec."""
    try:
        import tensorstore as ts
    except ImportError as error:
        raise ConfigError("a StoreTier needs tensorstore: pip install tensorstore") from error
    try:
        spec = ts.KvStore.Spec(_spec_of(tier.location)).to_json()
    except ValueError as error:
        raise ConfigError(f"StoreTier.location={_shown(tier)}: {error}") from error
    if spec.get("path") and not spec["path"].endswith("/"):
        spec["path"] += "/"
    # A value that a power failure left half on disk is found out by its checksum, so nothing waits for fsync: 3 times
    # faster. OCDBT's own files have no such protection.
    context = ts.Context({} if tier.is_ocdbt else {"file_io_sync": False})
    try:
        return ts.KvStore.open(spec, context=context).result(), spec
    except Exception as error:
        raise StoreError(f"StoreTier.location={_shown(tier)} cannot be opened: {error}") from error


def _innermost(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec of the driver that does the I/O."""
    while "base" in spec:
        spec = spec["base"]
    return spec


def _remove_abandoned(root: pathlib.Path) -> None:
    """Removes what writers that were killed left half written: the file driver neither lists nor removes it."""
    for path in (*root.glob("*/*.__lock"), *root.glob("*/*/*.__lock")):
        try:
            if path.stat().st_mtime < time() - ABANDONED:
                path.unlink()
        except OSError:  # its writer was faster
            continue
