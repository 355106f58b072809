"""Counters that say what the cache did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


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
      evicted_pages: {pool: pages, or slots, that eviction freed}.
      pools: {pool: PoolStats}; a pool's name is its groups', joined by ",".
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
