"""Counters that say what the cache did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Who owns the pages (recurrent: state slots) of one pool now: total == free + tree + private.

    Attributes:
      evictable: pages of the tree that no sequence holds.
    """

    total: int
    free: int
    tree: int
    private: int
    evictable: int


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

    bytes: int
    limit: int | None
    pools: Mapping[str, PoolStats] = dataclasses.field(default_factory=dict)
    evicted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    offloaded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    onboarded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    entries: int = 0
    writes: int = 0
    reads: int = 0
    skipped: int = 0
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    off: bool = False


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Totals since the manager was made, except `pools`, `active` and `suspended`, which are of now.

    Attributes:
      lookups: first resumes, work repeated after a preemption (`retry=True`) apart.
      hits: lookups that reused at least one token.
      looked_up_tokens, reused_tokens: tokens of these lookups' prompts, and those reused.
      lost_tokens: {group: tokens that matched but could not be reused because of that group}.
      snapshots_taken: snapshots that were taken, by copy or by handing over a live state.
      snapshots_skipped: asked for, but no slot could be had or the state had moved on.
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
    """

    lookups: int
    hits: int
    looked_up_tokens: int
    reused_tokens: int
    lost_tokens: Mapping[str, int]
    snapshots_taken: int
    snapshots_skipped: int
    snapshots_evicted: int
    evicted_pages: Mapping[str, int]
    pools: Mapping[str, PoolStats]
    tiers: Mapping[str, TierStats]
    active: int
    suspended: int


@dataclasses.dataclass
class Counters:
    """The running totals behind CacheStats."""

    lookups: int = 0
    hits: int = 0
    looked_up_tokens: int = 0
    reused_tokens: int = 0
    lost_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    snapshots_taken: int = 0
    snapshots_skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Moves:
    """Pages of one pool in one tier that left, and came, in earlier lives of the manager."""

    evicted: int = 0
    offloaded: int = 0
    onboarded: int = 0

    def with_those_of(self, pool: Any) -> Moves:
        """These, and what a PagePool has counted since."""
        return Moves(self.evicted + pool.evicted, self.offloaded + pool.offloaded, self.onboarded + pool.onboarded)
