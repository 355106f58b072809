"""Counters that say what the cache did."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from jkv.layout import Layout

NOW: Any = {"now": True}  # metadata of what is not a total: it is of now, in `take_stats` too


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Who owns the pages (recurrent: state slots) of one pool now: total == free + tree + private.

    Attributes:
      evictable: pages of the tree that no sequence holds.
      peak: the most pages at any `prepare` since the last `take_stats` that were neither free nor evictable.
      page_bytes: bytes of a page, or a state, in all layers; counts of pages times this are bytes.
    """

    total: int
    free: int
    tree: int
    private: int
    evictable: int
    peak: int
    page_bytes: int


@dataclasses.dataclass(frozen=True)
class TierStats:
    """One tier now, and what moved since the manager was made.

    Attributes:
      bytes: in use, null pages and headers included.
      limit: bytes at most; None: no limit.
      pools: {pool: PoolStats}; of the store {}.
      evicted: {pool: pages, or slots, that eviction freed here}.
      offloaded: {pool: of these, those that moved one tier down}.
      onboarded: {pool: pages, or states, that came here from one tier down}.
      entries: of the store: pages and states that it has.
      writes, reads: of the store: values that went out and came in.
      skipped: of the store: values not written, since too many were on their way.
      failures: {kind: how often}: what went wrong between here and the tier above. Nothing of it was fatal.
      off: the store cannot be written to at all, and is not tried for a while.
    """

    bytes: int = dataclasses.field(metadata=NOW)
    limit: int | None = dataclasses.field(metadata=NOW)
    pools: Mapping[str, PoolStats] = dataclasses.field(default_factory=dict, metadata=NOW)
    evicted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    offloaded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    onboarded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    entries: int = dataclasses.field(default=0, metadata=NOW)
    writes: int = 0
    reads: int = 0
    skipped: int = 0
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    off: bool = dataclasses.field(default=False, metadata=NOW)

    @property
    def dropped(self) -> Mapping[str, int]:
        """{pool: of those evicted, those that did not move down; the store may have them}."""
        return {pool: count - self.offloaded[pool] for pool, count in self.evicted.items()}


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """Pages of one group (recurrent: states) that requests took and found.

    Attributes:
      allocated: device pages that sequences took: for tokens to come, and for private copies.
      copied: private copies: of a page of which the head was reused, of a snapshot, of what is lent or forked.
      reused_whole: pages that lookups reused as they are; snapshots at a page boundary.
      reused_partial: pages of which lookups reused the head; snapshots inside a page.
      missed: pages of the prompts that had to be computed; lookups that found no snapshot.
      page_bytes: bytes of a page, or a state, in the group's layers; counts of pages times this are bytes.
    """

    allocated: int
    copied: int
    reused_whole: int
    reused_partial: int
    missed: int
    page_bytes: int = dataclasses.field(metadata=NOW)


@dataclasses.dataclass(frozen=True)
class WorkStats:
    """What requests looked up, found and took: of one sequence (`Sequence.stats`), or of many.

    Attributes:
      lookups: first resumes.
      hits: lookups that reused at least one token.
      looked_up_tokens, reused_tokens: tokens of these lookups' prompts, and those reused.
      tier_tokens: {tier: reused tokens by where they lay}.
      limited_by: {group: lookups that could have reused more but for that group}.
      lost_tokens: {group: tokens that matched but could not be reused because of that group}.
      groups: {group: GroupStats}.
      snapshots_taken: snapshots that were taken, by copy or by handing over a live state.
      snapshots_skipped: asked for, but no slot could be had or the state had moved on.
    """

    lookups: int
    hits: int
    looked_up_tokens: int
    reused_tokens: int
    tier_tokens: Mapping[str, int]
    limited_by: Mapping[str, int]
    lost_tokens: Mapping[str, int]
    groups: Mapping[str, GroupStats]
    snapshots_taken: int
    snapshots_skipped: int

    @property
    def unreused_tokens(self) -> int:
        """Tokens of the looked up prompts that had to be computed."""
        return self.looked_up_tokens - self.reused_tokens

    @property
    def aligned_snapshots(self) -> int:
        """Lookups that reused a snapshot at a page boundary."""
        return self.groups["recurrent"].reused_whole if "recurrent" in self.groups else 0

    @property
    def unaligned_snapshots(self) -> int:
        """Lookups that reused a snapshot inside a page."""
        return self.groups["recurrent"].reused_partial if "recurrent" in self.groups else 0


@dataclasses.dataclass(frozen=True)
class CacheStats(WorkStats):
    """Totals since the manager was made, or since the last `take_stats`; `pools`, `active` and `suspended` are of now.

    What sequences opened with `retry=True` did is in `retried`, and in none of the other fields of WorkStats.

    Attributes:
      retried: work repeated after a preemption.
      snapshots_evicted: snapshots that made room.
      evicted_pages: {pool: pages, or slots, that eviction freed on the device}.
      pools: {pool: PoolStats} on the device; a pool's name is its groups', joined by ",".
      tiers: {"device", "host", "store", as far as there are: TierStats}.
      active, suspended: open sequences.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
    >>> manager.stats().pools["full"].free
    16
    >>> with manager.open([1, 2, 3, 4, 5]) as seq:
    ...     _ = seq.resume(), seq.reserve(5)
    >>> manager.stats().groups["full"].missed, manager.stats().unreused_tokens
    (2, 5)
    """

    retried: WorkStats
    snapshots_evicted: int
    evicted_pages: Mapping[str, int]
    pools: Mapping[str, PoolStats] = dataclasses.field(metadata=NOW)
    tiers: Mapping[str, TierStats]
    active: int = dataclasses.field(metadata=NOW)
    suspended: int = dataclasses.field(metadata=NOW)


def since(now: Any, before: Any) -> Any:
    """`now` less `before`: numbers, mappings of them, or dataclasses in which what is of NOW stays."""
    if isinstance(now, Mapping):
        return {key: since(value, before[key]) if key in before else value for key, value in now.items()}
    if isinstance(now, int):
        return now - before
    changes = {
        field.name: since(getattr(now, field.name), getattr(before, field.name))
        for field in dataclasses.fields(now)
        if "now" not in field.metadata
    }
    return dataclasses.replace(now, **changes)


# Work.totals
LOOKUPS, HITS, LOOKED_UP, REUSED, TAKEN, SKIPPED = range(6)
TIERS = {"device": 6, "host": 7, "store": 8}
# Work.pages, for each group
ALLOCATED, COPIED, WHOLE, PARTIAL, MISSED, LIMITED, LOST = range(7)
PER_GROUP = 7


class Work:
    """The running counts behind a WorkStats; flat, since each sequence has its own, which is added up when it closes.

    Attributes:
      totals: by LOOKUPS, HITS, .. and TIERS[tier].
      pages: at PER_GROUP * g + ALLOCATED, COPIED, ..; g: the group's ordinal, or -1 for the last one, the recurrent.
      retry: the sequence was opened with retry=True.
    """

    __slots__ = ("pages", "retry", "totals")

    def __init__(self, groups: int, retry: bool = False):
        self.totals = [0] * (SKIPPED + 1 + len(TIERS))
        self.pages = [0] * (PER_GROUP * groups)
        self.retry = retry

    def add(self, other: Work) -> None:
        """Adds what `other` has counted."""
        self.totals = list(map(operator.add, self.totals, other.totals))
        self.pages = list(map(operator.add, self.pages, other.pages))

    def fields(self, layout: Layout) -> dict[str, Any]:
        """The fields of a WorkStats."""
        groups, limited_by, lost = {}, {}, {}
        for at, group in enumerate(layout.groups):
            allocated, copied, whole, partial, missed, limited, tokens = self.pages[PER_GROUP * at :][:PER_GROUP]
            size = layout.pools[group.pool].page_bytes
            groups[group.name] = GroupStats(allocated, copied, whole, partial, missed, size)
            if limited:
                limited_by[group.name], lost[group.name] = limited, tokens
        return {
            "lookups": self.totals[LOOKUPS],
            "hits": self.totals[HITS],
            "looked_up_tokens": self.totals[LOOKED_UP],
            "reused_tokens": self.totals[REUSED],
            "tier_tokens": {tier: self.totals[at] for tier, at in TIERS.items() if self.totals[at]},
            "limited_by": limited_by,
            "lost_tokens": lost,
            "groups": groups,
            "snapshots_taken": self.totals[TAKEN],
            "snapshots_skipped": self.totals[SKIPPED],
        }


@dataclasses.dataclass(frozen=True)
class Moves:
    """Pages of one pool in one tier that left, and came, in earlier lives of the manager."""

    evicted: int = 0
    offloaded: int = 0
    onboarded: int = 0

    def with_those_of(self, pool: Any) -> Moves:
        """These, and what a PagePool has counted since."""
        return Moves(self.evicted + pool.evicted, self.offloaded + pool.offloaded, self.onboarded + pool.onboarded)
