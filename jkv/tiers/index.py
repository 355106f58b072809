"""Index: which entries a store has, in the order of their last use, and how that order is kept over restarts.

The keys alone say everything else, so the index is rebuilt from a list of keys. Ages are not in that list: each writer
keeps them in one value of its own, 16 bytes an entry, rewritten now and then:

    order    [ magic | crc32 | n marks: uint64 (digests of keys) | n times of last use: int64 (microseconds) ]

Several writers' orders are merged by time. It only says who leaves first: clocks that differ, or an order that is lost,
cost a few hits and nothing else. A key that no order names is oldest.
"""

from __future__ import annotations

import hashlib
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from jkv.tiers.keys import parse_name
from jkv.tiers.values import KEY, Damaged

ORDER = struct.Struct("<8sI")
ORDER_MAGIC = b"jkv ord1"
MOST_CHANGED = 65_536
Order = tuple[np.ndarray, np.ndarray]  # marks, times of last use


def mark_of(key: str) -> int:
    """Eight bytes that stand for `key` in an order. Two keys with one mark would share an age."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


class Entry:
    """One entry: its bytes, its mark, its last use, and the number of the latest listing begun when it was known."""

    __slots__ = ("listing", "mark", "size", "used")

    def __init__(self, key: str, size: int, used: int, listing: int):
        self.size, self.mark, self.used, self.listing = size, mark_of(key), used, listing


class Index:
    """The entries of a store, oldest first. Not thread-safe, except `in`.

    Attributes:
      entries: {key: Entry}, oldest first. (Of a plain dict, finding the first after many removals is a scan.)
      bytes: of all entries.
      changes: since the order was last encoded.
      changed: keys that came or went since it was last emptied; None: nobody asks, or they have become too many.

    >>> index = Index()
    >>> for name in ("0" * 64, "1" * 64):
    ...     index.add(f"{'0' * 32}-100/full/{name}", 100)
    >>> index.touch(f"{'0' * 32}-100/full/{'0' * 64}")
    >>> index.bytes, [key[-4:] for key in index.oldest(50)]
    (200, ['1111'])
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.bytes = 0
        self.changes = 0
        self.changed: list[str] | None = None
        self._tails: dict[str, set[tuple[int, bytes]]] = {}
        self._latest = 0

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def _now(self) -> int:
        """Microseconds since 1970, later than all before: the clock may be set back, the order may not."""
        self._latest = max(self._latest + 1, time.time_ns() // 1000)
        return self._latest

    def add(self, key: str, size: int, listing: int = 0) -> None:
        """A new entry, used now."""
        self._insert(key, size, self._now(), listing)
        self.changes += 1

    def _insert(self, key: str, size: int, used: int, listing: int) -> None:
        self.entries[key] = Entry(key, size, used, listing)
        self.bytes += size
        if self.changed is not None:
            self.changed.append(key)
            if len(self.changed) > MOST_CHANGED:
                self.changed = None
        family, tail = tail_of(key)
        if tail is not None:
            self._tails.setdefault(family, set()).add(tail)

    def touch(self, key: str) -> None:
        """`key` is used now, if there is such an entry."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.used = self._now()
            self.entries.move_to_end(key)
            self.changes += 1

    def remove(self, key: str) -> None:
        """Forgets `key`, if there is such an entry."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        self.bytes -= entry.size
        self.changes += 1
        if self.changed is not None:
            self.changed.append(key)
            if len(self.changed) > MOST_CHANGED:
                self.changed = None
        family, tail = tail_of(key)
        if tail is not None:
            self._tails[family].discard(tail)
            if not self._tails[family]:
                del self._tails[family]

    def oldest(self, excess: int, keep: Collection[str] = ()) -> list[str]:
        """The oldest keys that together have at least `excess` bytes, those to `keep` apart; all if that is too few."""
        keys: list[str] = []
        if excess <= 0:
            return keys
        for key, entry in self.entries.items():
            if key not in keep:
                keys.append(key)
                excess -= entry.size
                if excess <= 0:
                    break
        return keys

    def tails(self, prefix: str, parent: bytes) -> list[tuple[int, bytes]]:
        """(count, digest) of the tails behind `parent` among the keys with this prefix, sorted."""
        return sorted(self._tails.get(prefix + parent.hex(), ()))

    # ---------------------------------------------------------------------------------------------- over restarts

    def load(self, found: Mapping[str, int], ages: Mapping[int, int], listing: int = 0) -> None:
        """Entries found at start, {key: size}: older than all that are known, ordered by `ages` (mark -> last use)."""
        known = list(self.entries)
        for used, key in sorted((ages.get(mark_of(key), 0), key) for key in found if key not in self.entries):
            self._insert(key, found[key], used, listing)
        for key in known:
            self.entries.move_to_end(key)

    def encode_order(self) -> bytes:
        """The order of now, as a value."""
        self.changes = 0
        count = len(self.entries)
        marks = np.fromiter((entry.mark for entry in self.entries.values()), "<u8", count)
        times = np.fromiter((entry.used for entry in self.entries.values()), "<i8", count)
        data = marks.tobytes() + times.tobytes()
        return ORDER.pack(ORDER_MAGIC, zlib.crc32(data)) + data


def decode_order(value: bytes) -> Order:
    """(marks, times of last use) of an order, or Damaged."""
    data = memoryview(value)[ORDER.size :]
    if len(data) % 16 or not value.startswith(ORDER.pack(ORDER_MAGIC, zlib.crc32(data))):
        raise Damaged(f"an order of {len(value)} bytes is damaged")
    half = len(data) // 2
    return np.frombuffer(data[:half], "<u8"), np.frombuffer(data[half:], "<i8")


def merge_orders(orders: Sequence[Order]) -> dict[int, int]:
    """{mark: last use}: the latest use that any of the orders knows of."""
    if not orders:
        return {}
    marks, times = (np.concatenate(column) for column in zip(*orders, strict=True))
    latest_last = np.argsort(times, kind="stable")
    return dict(zip(marks[latest_last].tolist(), times[latest_last].tolist(), strict=True))


def tail_of(key: str) -> tuple[str, tuple[int, bytes] | None]:
    """What a tail's key has in common with its siblings' ("PREFIX" + the parent), and (count, digest); None: a page."""
    at = key.rindex("/") + 1
    if "." not in key[at:]:
        return "", None
    digest, parent, count = parse_name(key[at:])
    return key[:at] + (parent or b"").hex(), (count, digest)


def sizes_of(keys: Iterable[bytes]) -> dict[str, int]:
    """{key: bytes} of those keys of a listing that are entries; nothing else there is any of our business."""
    sizes = {}
    for raw in keys:
        try:
            key = raw.decode("ascii")
            match = KEY.fullmatch(key)
            if match is not None:
                parse_name(match[2])
                sizes[key] = int(match[1])
        except ValueError:  # another's file
            continue
    return sizes
