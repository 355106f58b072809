"""From a CacheConfig to groups, pools, page counts and shapes: static and hashable.

    layers                    groups                pools (page ids are valid in every layer of a pool)
    attn.0, attn.6      ->    "full"         ->     pool 0: one array per layer and buffer
    attn.1 .. attn.5    ->    "window:128"   ->     pool 1
    ssm.0 .. ssm.3      ->    "recurrent"    ->     pool 2 (state slots)

Groups whose layers have the same buffers, layer by layer, share one pool: their page counts add up and a page
goes to whoever needs it. A layer that shares another's KV has that layer's place, and nothing of its own.

    the arrays of a pool     [ null page | num_pages usable ones | scratch: candidate slots of verify steps ]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jkv.config import AttentionLayer, Buffer, CacheConfig, HostTier, RecurrentLayer
from jkv.errors import ConfigError
from jkv.groups import HOST, INT32_MAX, Group, Pool
from jkv.sizing import candidates_per_row, device_pages, host_pages_of


@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """Where a layer's bytes lie."""

    group: Group
    pool: int
    index: int  # which of the pool's layers
    buffers: Mapping[str, Buffer]
    shares: str | None = None  # the layer that this is the place of, if not of its own


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


def _shares(layer: AttentionLayer | RecurrentLayer) -> str | None:
    """The layer whose KV this one reads, if it has none of its own."""
    return None if isinstance(layer, RecurrentLayer) else layer.shares


def _make_groups(config: CacheConfig) -> tuple[list[Group], list[Pool]]:
    """The groups, and their pools, still without pages."""
    own = [name for name, layer in config.layers.items() if _shares(layer) is None]
    members: dict[str, list[str]] = {}
    for name in sorted(own, key=lambda name: _group_order(config.layers[name])):  # stable
        members.setdefault(config.layers[name].group, []).append(name)

    pools: dict[tuple, Pool] = {}
    groups: list[Group] = []
    for name, layers in members.items():
        first = config.layers[layers[0]]
        recurrent = isinstance(first, RecurrentLayer)
        window, sinks = (None, 0) if isinstance(first, RecurrentLayer) else (first.window, first.sinks)
        buffers = tuple(config.layers[layer].buffers for layer in layers)
        key = recurrent, tuple(_geometry(each, config.page_size) for each in buffers)
        pool = pools.get(key)
        if pool is None:
            unit = 1 if recurrent else config.page_size
            page_bytes = unit * sum(b.nbytes for each in buffers for b in each.values())
            scratch = config.max_sequences * candidates_per_row(config) if recurrent else 0
            pool = Pool(len(pools), (), 0, page_bytes, buffers, recurrent, scratch)
        pools[key] = dataclasses.replace(pool, groups=(*pool.groups, name))
        groups.append(Group(name, len(groups), tuple(layers), window, sinks, recurrent, pool.ordinal))
    return groups, list(pools.values())


def _geometry(buffers: Mapping[str, Buffer], page_size: int) -> tuple:
    """What two layers must have equal to use one array."""
    return tuple((k, b.shape, b.dtype, b.page_size or page_size, b.value_dim) for k, b in buffers.items())


def _places(config: CacheConfig, groups: list[Group]) -> dict[str, LayerPlace]:
    """Where each layer lies, those that share another's KV included."""
    places = {
        layer: LayerPlace(group, group.pool, index, config.layers[layer].buffers)
        for group in groups
        for index, layer in enumerate(group.layers)
    }
    for name, layer in config.layers.items():
        target = _shares(layer)
        if target is not None:
            places[name] = dataclasses.replace(places[target], shares=target)
    return places


def host_pages(layout: Layout, tier: HostTier | None) -> tuple[int, ...]:
    """Pages, or snapshots, of host memory per pool: as many as `tier` says; None: none. See `host_pages_of`."""
    if tier is None:
        return (0,) * len(layout.pools)
    return host_pages_of(layout.config, tier, layout.pools, layout.groups)


def make_layout(config: CacheConfig) -> Layout:
    """The geometry that `config` asks for; ConfigError with the least workable number where it cannot be met."""
    groups, pools = _make_groups(config)
    counts = device_pages(config, pools, groups)
    pools = [dataclasses.replace(pool, num_pages=count) for pool, count in zip(pools, counts, strict=True)]
    max_pages = -(-config.max_length // config.page_size)
    if config.max_sequences * max_pages > INT32_MAX:
        raise ConfigError(f"page tables of {config.max_sequences} x {max_pages} entries exceed int32 indices")
    return Layout(config, tuple(groups), tuple(pools), _places(config, groups), max_pages)


__all__ = ["HOST", "Group", "LayerPlace", "Layout", "Pool", "host_pages", "make_layout"]
