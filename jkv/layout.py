"""From a CacheConfig to groups, pools, page counts and shapes: static and hashable.

    layers                    groups                pools (page ids are valid in every layer of a pool)
    attn.0, attn.6      ->    "full"         ->     pool 0: one array per layer and buffer
    attn.1 .. attn.5    ->    "window:128"   ->     pool 1
    ssm.0 .. ssm.3      ->    "recurrent"    ->     pool 2 (state slots)

Groups whose layers have the same buffers, layer by layer, share one pool: their page counts add up and a page
goes to whoever needs it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jkv.config import AttentionLayer, Buffer, CacheConfig, RecurrentLayer
from jkv.errors import ConfigError

# The default split of a byte budget gives each sequence two snapshots: where the next one with this prompt
# starts, and where this conversation goes on.
SNAPSHOTS_PER_SEQUENCE = 2
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers with one life cycle. `window` None: full attention, or recurrent."""

    name: str
    ordinal: int  # position in Layout.groups; among attention groups also the row of a node's page arrays
    layers: tuple[str, ...]
    window: int | None
    sinks: int
    recurrent: bool
    pool: int

    def sink_pages(self, page_size: int) -> int:
        """Pages that hold sinks, once a sequence is long enough."""
        return -(-self.sinks // page_size)

    def live_from(self, length: int, page_size: int) -> int:
        """The page from which on, beside the sink pages, a sequence of `length` tokens keeps its pages."""
        return max(self.first_live(length, page_size)[1], self.sink_pages(page_size))

    def first_live(self, length: int, page_size: int) -> tuple[int, int]:
        """The stale page range [sink_pages, first_live) of a sequence of `length` tokens (SPEC S18).

        A window of W needs W-1 tokens of history beside the token in flight.
        """
        if self.window is None:
            return 0, 0
        sink_pages = min(-(-length // page_size), self.sink_pages(page_size))
        return sink_pages, max(sink_pages, (length + 1 - self.window) // page_size)

    def needed(self, length: int, page_size: int) -> tuple[int, int, int]:
        """Pages that resuming at `length` reads: [0, sinks) and [first, stop), as (sinks, first, stop)."""
        stop = -(-length // page_size)
        if self.window is None:
            return 0, 0, stop
        sink_pages = -(-min(length, self.sinks) // page_size)
        first_token = max(0, length + 1 - self.window)
        if first_token >= length:  # a window of one token has no history
            return sink_pages, stop, stop
        return sink_pages, max(sink_pages, first_token // page_size), stop


@dataclasses.dataclass(frozen=True)
class Pool:
    """The device arrays behind one group, or behind several with equal buffers."""

    ordinal: int
    groups: tuple[str, ...]
    num_pages: int  # usable; the arrays have one more, the null page 0
    page_bytes: int  # of one page, or one state, in all layers
    buffers: tuple[Mapping[str, Buffer], ...]  # per layer of the pool
    recurrent: bool

    @property
    def name(self) -> str:
        """The groups it serves, e.g. "full" or "full,window:128"."""
        return ",".join(self.groups)


@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """Where a layer's bytes lie."""

    group: Group
    pool: int
    index: int  # which of the pool's layers
    buffers: Mapping[str, Buffer]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Static geometry of one cache. Compared by identity: it is hashed at every dispatch."""

    config: CacheConfig
    groups: tuple[Group, ...]
    pools: tuple[Pool, ...]
    places: Mapping[str, LayerPlace]
    max_pages: int  # entries of one page-table row

    @functools.cached_property
    def page_size(self) -> int:
        return self.config.page_size

    @functools.cached_property
    def max_sequences(self) -> int:
        return self.config.max_sequences

    @functools.cached_property
    def max_length(self) -> int:
        return self.config.max_length

    @functools.cached_property
    def attention_groups(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if not g.recurrent)

    @functools.cached_property
    def recurrent_pool(self) -> Pool | None:
        return next((p for p in self.pools if p.recurrent), None)

    def place(self, layer: str) -> LayerPlace:
        """Where `layer` lies; ConfigError naming the known layers if there is none of that name."""
        try:
            return self.places[layer]
        except (KeyError, TypeError):
            raise ConfigError(f"unknown layer {layer!r}; the config has {', '.join(self.places)}") from None


def _group_order(layer: AttentionLayer | RecurrentLayer) -> tuple[int, int, int]:
    """Full attention first, then windows from small to large, recurrent last."""
    if isinstance(layer, RecurrentLayer):
        return 2, 0, 0
    return (0, 0, 0) if layer.window is None else (1, layer.window, layer.sinks)


def _pages_per_sequence(pool: Pool, config: CacheConfig) -> int:
    """Pages that one sequence of max_length takes, whole prompt in one chunk; recurrent: its snapshots."""
    if pool.recurrent:
        return SNAPSHOTS_PER_SEQUENCE
    return len(pool.groups) * -(-config.max_length // config.page_size)


def _split_bytes(budget: int, pools: list[Pool], config: CacheConfig) -> list[int]:
    """Pages per pool so that each serves the same number of sequences of max_length.

    Fixed cost: the null pages and one live state per row. The rest is shared by need: with n sequences' worth of
    bytes, pool p gets floor(n * need_p) pages, n as large as the budget allows (a real number, at least 1).
    """
    needs = [_pages_per_sequence(pool, config) for pool in pools]
    fixed = [1 + (config.max_sequences if pool.recurrent else 0) for pool in pools]
    fixed_bytes = sum(n * pool.page_bytes for n, pool in zip(fixed, pools, strict=True))
    sequence_bytes = sum(n * pool.page_bytes for n, pool in zip(needs, pools, strict=True))
    least = fixed_bytes + sequence_bytes
    if budget < least:
        raise ConfigError(
            f"DeviceTier.bytes={budget} is too small: one sequence of max_length={config.max_length} "
            f"(and a live state for each of max_sequences={config.max_sequences}) needs at least {least} bytes"
        )
    spare = budget - fixed_bytes
    return [spare * need // sequence_bytes + n - 1 for need, n in zip(needs, fixed, strict=True)]


def _given_pages(pages: int | Mapping[str, int] | None, pools: list[Pool], groups: list[str]) -> list[int]:
    if not isinstance(pages, Mapping):
        return [pages or 0] * len(pools)
    if set(pages) != set(groups):
        raise ConfigError(f"DeviceTier.pages names the groups {sorted(pages)}; the layers make {groups}")
    return [sum(pages[group] for group in pool.groups) for pool in pools]


def make_layout(config: CacheConfig) -> Layout:
    """The geometry that `config` asks for; ConfigError with the least workable number where it cannot be met."""
    members: dict[str, list[str]] = {}
    for name in sorted(config.layers, key=lambda name: _group_order(config.layers[name])):  # stable
        members.setdefault(config.layers[name].group, []).append(name)

    pool_of: dict[tuple, list[str]] = {}
    for group, names in members.items():
        shapes = tuple(tuple((k, b.shape, b.dtype) for k, b in config.layers[n].buffers.items()) for n in names)
        pool_of.setdefault((group == "recurrent", shapes), []).append(group)

    pools = []
    for ordinal, ((recurrent, _), group_names) in enumerate(pool_of.items()):
        buffers = tuple(config.layers[name].buffers for name in members[group_names[0]])
        unit = 1 if recurrent else config.page_size
        page_bytes = unit * sum(b.nbytes for layer in buffers for b in layer.values())
        pools.append(Pool(ordinal, tuple(group_names), 0, page_bytes, buffers, recurrent))

    tier = config.tiers[0]
    if tier.bytes is not None:
        counts = _split_bytes(tier.bytes, pools, config)
    else:
        counts = _given_pages(tier.pages, pools, list(members))
    for pool, count in zip(pools, counts, strict=True):
        if pool.recurrent and count < config.max_sequences:
            raise ConfigError(
                f"DeviceTier.pages: {count} state slots for max_sequences={config.max_sequences}; every row needs "
                f"a live state, so at least {config.max_sequences} (more, to keep snapshots)"
            )
        if (count + 1) * (1 if pool.recurrent else config.page_size) > INT32_MAX:
            raise ConfigError(f"pool {pool.name!r}: {count} pages of {config.page_size} tokens exceed int32 indices")
    pools = [dataclasses.replace(pool, num_pages=count) for pool, count in zip(pools, counts, strict=True)]
    max_pages = -(-config.max_length // config.page_size)
    if config.max_sequences * max_pages > INT32_MAX:
        raise ConfigError(f"page tables of {config.max_sequences} x {max_pages} entries exceed int32 indices")

    pool_by_group = {group: pool for pool in pools for group in pool.groups}
    groups, places = [], {}
    for ordinal, (name, layers) in enumerate(members.items()):
        first = config.layers[layers[0]]
        window = first.window if isinstance(first, AttentionLayer) else None
        sinks = first.sinks if isinstance(first, AttentionLayer) else 0
        owner = pool_by_group[name]
        member = Group(name, ordinal, tuple(layers), window, sinks, owner.recurrent, owner.ordinal)
        groups.append(member)
        for index, layer in enumerate(layers):
            places[layer] = LayerPlace(member, owner.ordinal, index, config.layers[layer].buffers)
    return Layout(config, tuple(groups), tuple(pools), places, max_pages)
