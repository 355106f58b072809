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
from collections.abc import Mapping, Sequence

from jkv.config import AttentionLayer, Buffer, CacheConfig, DeviceTier, HostTier, RecurrentLayer
from jkv.errors import ConfigError

# The default split of a byte budget gives each sequence two snapshots: where the next one with this prompt
# starts, and where this conversation goes on.
SNAPSHOTS_PER_SEQUENCE = 2
INT32_MAX = 2**31 - 1

# A place is where a page, or a state, lies: its id on the device, or HOST + its id in host memory. Both count from 1.
HOST = 1 << 30


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers with one life cycle and arrays of their own. `window` None: full attention, or recurrent."""

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
    num_pages: int  # usable
    page_bytes: int  # of one page, or one state, in all layers
    buffers: tuple[Mapping[str, Buffer], ...]  # per layer of the pool
    recurrent: bool
    scratch: int = 0  # candidate slots, behind the usable ones

    @property
    def num_rows(self) -> int:
        """First dimension of its arrays: the null page, the usable ones and the scratch."""
        return 1 + self.num_pages + self.scratch

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


def _candidates_per_row(config: CacheConfig) -> int:
    """A candidate state per token of a verify step, for two steps: one may be in flight behind the other."""
    return 2 * (config.max_drafts + 1) if config.max_drafts else 0


def _pages_per_sequence(pool: Pool, groups: list[Group], config: CacheConfig) -> int:
    """Pages that one sequence of max_length takes, whole prompt in one chunk; recurrent: its snapshots."""
    if pool.recurrent:
        return SNAPSHOTS_PER_SEQUENCE
    return sum(_group_pages(group, config) for group in groups if group.pool == pool.ordinal)


def _group_pages(group: Group, config: CacheConfig) -> int:
    """Pages of one attention group for a sequence of max_length.

    With window scratch a chunk takes none for tokens that leave the window in it; but those of the window before the
    chunk and those of the window after it are held at once.
    """
    whole = -(-config.max_length // config.page_size)
    if group.window is None or config.window_scratch is None:
        return whole
    reach = group.window - 1 + config.window_scratch.max_rewind
    return min(whole, group.sink_pages(config.page_size) + 2 * (-(-reach // config.page_size) + 1))


def _split_bytes(budget: int, pools: list[Pool], groups: list[Group], config: CacheConfig) -> list[int]:
    """Pages per pool so that each serves the same number of sequences of max_length.

    Fixed cost: the null pages, one live state per row, and the candidate slots. The rest is shared by need: with n
    sequences' worth of bytes, pool p gets floor(n * need_p) pages, n as large as the budget allows (a real number,
    at least 1).
    """
    needs = [_pages_per_sequence(pool, groups, config) for pool in pools]
    live = [config.max_sequences if pool.recurrent else 0 for pool in pools]
    fixed_bytes = sum((1 + n + pool.scratch) * pool.page_bytes for n, pool in zip(live, pools, strict=True))
    sequence_bytes = sum(n * pool.page_bytes for n, pool in zip(needs, pools, strict=True))
    least = fixed_bytes + sequence_bytes
    if budget < least:
        drafts = f" and {_candidates_per_row(config)} candidates" if config.max_drafts else ""
        raise ConfigError(
            f"DeviceTier.bytes={budget} is too small: one sequence of max_length={config.max_length} "
            f"(and a live state{drafts} for each of max_sequences={config.max_sequences}) needs at least {least} bytes"
        )
    spare = budget - fixed_bytes
    return [spare * need // sequence_bytes + n for need, n in zip(needs, live, strict=True)]


def _given_pages(tier: DeviceTier | HostTier, pools: Sequence[Pool], groups: Sequence[Group]) -> list[int]:
    pages = tier.pages
    if not isinstance(pages, Mapping):
        return [pages or 0] * len(pools)
    names = [group.name for group in groups]
    if set(pages) != set(names):
        raise ConfigError(f"{type(tier).__name__}.pages names the groups {sorted(pages)}; the layers make {names}")
    return [sum(pages[group] for group in pool.groups) for pool in pools]


def host_pages(layout: Layout, tier: HostTier | None) -> tuple[int, ...]:
    """Pages, or snapshots, of host memory per pool: as many as `tier` says; None: none.

    Of bytes each pool gets what the same number of sequences of max_length need, as on the device, and at least one.

    Raises:
      ConfigError: too few bytes for a page of each pool, other groups than the layout's, or too many pages.
    """
    if tier is None:
        return (0,) * len(layout.pools)
    if tier.bytes is None:
        counts = _given_pages(tier, layout.pools, layout.groups)
    else:
        least = sum(pool.page_bytes for pool in layout.pools)
        if tier.bytes < least:
            raise ConfigError(f"HostTier.bytes={tier.bytes} is too small: a page of each pool takes {least} bytes")
        needs = [_pages_per_sequence(pool, list(layout.groups), layout.config) for pool in layout.pools]
        shared = sum(need * pool.page_bytes for need, pool in zip(needs, layout.pools, strict=True))
        counts = [1 + (tier.bytes - least) * need // shared for need in needs]
    for pool, count in zip(layout.pools, counts, strict=True):
        if count >= HOST:
            raise ConfigError(f"HostTier: {count} pages of pool {pool.name!r}; at most {HOST - 1}")
    return tuple(counts)


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
            scratch = config.max_sequences * _candidates_per_row(config) if recurrent else 0
            pool = Pool(len(pools), (), 0, page_bytes, buffers, recurrent, scratch)
        pools[key] = dataclasses.replace(pool, groups=(*pool.groups, name))
        groups.append(Group(name, len(groups), tuple(layers), window, sinks, recurrent, pool.ordinal))
    return groups, list(pools.values())


def _geometry(buffers: Mapping[str, Buffer], page_size: int) -> tuple:
    """What two layers must have equal to use one array."""
    return tuple((k, b.shape, b.dtype, b.page_size or page_size, b.value_dim) for k, b in buffers.items())


def _sized(config: CacheConfig, pools: list[Pool], groups: list[Group]) -> list[Pool]:
    """The pools with as many pages as the tier says; ConfigError where that is too few, or too many for int32."""
    tier = config.device_tier
    if tier.bytes is not None:
        counts = _split_bytes(tier.bytes, pools, groups, config)
    else:
        counts = _given_pages(tier, pools, groups)
    sized = [dataclasses.replace(pool, num_pages=count) for pool, count in zip(pools, counts, strict=True)]
    for pool in sized:
        if pool.recurrent and pool.num_pages < config.max_sequences:
            raise ConfigError(
                f"DeviceTier.pages: {pool.num_pages} state slots for max_sequences={config.max_sequences}; every row "
                f"needs a live state, so at least {config.max_sequences} (more, to keep snapshots)"
            )
        what = f"slots and {pool.scratch} candidates" if pool.recurrent else f"pages of {config.page_size} tokens"
        if pool.num_rows * (1 if pool.recurrent else config.page_size) > INT32_MAX or pool.num_rows > HOST:
            raise ConfigError(f"pool {pool.name!r}: {pool.num_pages} {what} exceed int32 indices")
    return sized


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


def make_layout(config: CacheConfig) -> Layout:
    """The geometry that `config` asks for; ConfigError with the least workable number where it cannot be met."""
    groups, pools = _make_groups(config)
    pools = _sized(config, pools, groups)
    max_pages = -(-config.max_length // config.page_size)
    if config.max_sequences * max_pages > INT32_MAX:
        raise ConfigError(f"page tables of {config.max_sequences} x {max_pages} entries exceed int32 indices")
    return Layout(config, tuple(groups), tuple(pools), _places(config, groups), max_pages)
