"""Sizing: how many pages each pool of a tier gets, from a budget of bytes and what is said about the traffic.

    fixed      null pages, a live state per row, candidate slots
    floors     a sequence of max_length, and each batch of must_fit
    the rest   in proportion to: pool_ratio, else what `typical` takes, else what `must_fit` takes, else what sequences
               of max_length take

Recurrent layers take SNAPSHOTS_PER_SEQUENCE snapshots for each sequence, beside the live states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from jkv.config import BatchShape, CacheConfig, DeviceTier, HostTier, SequenceShape
from jkv.errors import ConfigError
from jkv.groups import HOST, INT32_MAX, Group, Pool

# Where the next sequence with this prompt starts, and where this conversation goes on.
SNAPSHOTS_PER_SEQUENCE = 2


def candidates_per_row(config: CacheConfig) -> int:
    """A candidate state per token of a verify step, for two steps: one may be in flight behind the other."""
    return 2 * (config.max_drafts + 1) if config.max_drafts else 0


# --- what is needed --------------------------------------------------------------------------------------------------


def _longest(config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]) -> list[int]:
    """Pages per pool that one sequence of max_length takes, whole prompt in one chunk; recurrent: its snapshots."""
    counts = [SNAPSHOTS_PER_SEQUENCE if pool.recurrent else 0 for pool in pools]
    for group in groups:
        if not group.recurrent:
            counts[group.pool] += _longest_in(group, config)
    return counts


def _longest_in(group: Group, config: CacheConfig) -> int:
    """Pages of one attention group for a sequence of max_length.

    With window scratch a chunk takes none for tokens that leave the window in it; but those of the window before the
    chunk and those of the window after it are held at once.
    """
    whole = -(-config.max_length // config.page_size)
    if group.window is None or config.window_scratch is None:
        return whole
    reach = group.window - 1 + config.window_scratch.max_rewind
    return min(whole, group.sink_pages(config.page_size) + 2 * (-(-reach // config.page_size) + 1))


def live_pages(group: Group, shape: SequenceShape, config: CacheConfig) -> np.ndarray:
    """bool[ceil(capacity / page_size)]: which pages of a group a sequence has once it has room up to its capacity."""
    size = config.page_size
    pages = np.ones(-(-shape.capacity // size), bool)
    if group.window is None:
        return pages
    sinks, first = group.first_live(shape.length, size)
    pages[sinks:first] = False
    if config.window_scratch is not None:  # no pages for what leaves the window within the chunk from length on
        written = max(0, shape.capacity - config.window_scratch.max_rewind)
        _, first = group.first_live(max(shape.length, written), size)
        pages[max(group.sink_pages(size), -(-shape.length // size)) : first] = False
    return pages


def batch_pages(batch: BatchShape, config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]) -> list[int]:
    """Pages per pool that the batch's sequences take, open at once; recurrent: their snapshots."""
    counts = [SNAPSHOTS_PER_SEQUENCE * len(batch.sequences) if pool.recurrent else 0 for pool in pools]
    shared = batch.shared_prefix // config.page_size
    for group in groups:
        if group.recurrent:
            continue
        prefix = np.zeros(shared, bool)
        for shape in batch.sequences:
            pages = live_pages(group, shape, config)
            prefix |= pages[:shared]
            counts[group.pool] += int(np.count_nonzero(pages[shared:]))
        counts[group.pool] += int(np.count_nonzero(prefix))
    return counts


def max_length(count: int, config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]) -> int:
    """The longest length up to which `count` sequences that share nothing can be decoded beside each other.

    What decoding takes repeats with the page, a page of full attention larger each time: of the lengths of a page the
    worst counts.
    """
    if count > config.max_sequences:
        return 0

    def has_room(length: int) -> bool:
        for at in range(max(0, length - config.page_size), length):
            batch = BatchShape([SequenceShape(at + 1, at)])
            counts = batch_pages(batch, config, pools, groups)
            if any(not p.recurrent and count * n > p.num_pages for n, p in zip(counts, pools, strict=True)):
                return False
        return True

    low, high = 0, config.max_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle - 1)
    return low


# --- shares ----------------------------------------------------------------------------------------------------------


def _weights(config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]) -> list[Fraction]:
    """Pages per pool, in proportion to which bytes are shared out."""
    if config.pool_ratio is not None:
        shares = _by_pool("CacheConfig.pool_ratio", config.pool_ratio, pools, groups)
        return [Fraction(share) / pool.page_bytes for share, pool in zip(shares, pools, strict=True)]
    if config.typical is not None:
        counts = batch_pages(config.typical, config, pools, groups)
    elif config.must_fit:
        batches = [batch_pages(batch, config, pools, groups) for batch in config.must_fit]
        counts = np.max(batches, axis=0).tolist()
    else:
        counts = _longest(config, pools, groups)
    return [Fraction(count) for count in counts]


def _by_pool(field: str, values: Mapping[str, float], pools: Sequence[Pool], groups: Sequence[Group]) -> list:
    """{group: value} as the sum for each pool; ConfigError unless it names the groups that there are."""
    names = [group.name for group in groups]
    if set(values) != set(names):
        raise ConfigError(f"{field} names the groups {sorted(values)}; the layers make {names}")
    return [sum(values[group] for group in pool.groups) for pool in pools]


def _shared_out(spare: int, weights: Sequence[Fraction], floors: Sequence[int], pools: Sequence[Pool]) -> list[int]:
    """Pages per pool: in proportion to `weights` as far as `spare` bytes go, but no fewer than `floors`."""
    counts, open_pools = list(floors), list(range(len(pools)))
    while open_pools:
        size = sum(weights[p] * pools[p].page_bytes for p in open_pools)
        shares = {p: int(spare * weights[p] // size) if size else 0 for p in open_pools}
        low = [p for p in open_pools if shares[p] < floors[p]]
        if not low:
            for p, share in shares.items():
                counts[p] = share
            break
        spare -= sum(floors[p] * pools[p].page_bytes for p in low)
        open_pools = [p for p in open_pools if p not in low]
    return counts


# --- tiers -----------------------------------------------------------------------------------------------------------


def device_pages(config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]) -> list[int]:
    """Usable pages of each pool; ConfigError where that is too few, or too many for int32."""
    tier = config.device_tier
    floors = _must_fit(config, pools, groups)
    if tier.bytes is not None:
        counts = _split_bytes(tier.bytes, floors, config, pools, groups)
    else:
        counts = _given_pages(tier, pools, groups)
    for pool, count, floor in zip(pools, counts, floors, strict=True):
        if pool.recurrent and count < config.max_sequences:
            raise ConfigError(
                f"DeviceTier.pages: {count} state slots for max_sequences={config.max_sequences}; every row "
                f"needs a live state, so at least {config.max_sequences} (more, to keep snapshots)"
            )
        if not pool.recurrent and count < floor:
            raise ConfigError(f"CacheConfig.must_fit needs {floor} pages of pool {pool.name!r}, which has {count}")
        rows = 1 + count + pool.scratch
        what = f"slots and {pool.scratch} candidates" if pool.recurrent else f"pages of {config.page_size} tokens"
        if rows * (1 if pool.recurrent else config.page_size) > INT32_MAX or rows > HOST:
            raise ConfigError(f"pool {pool.name!r}: {count} {what} exceed int32 indices")
    return counts


def _must_fit(config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]) -> list[int]:
    """Pages per pool that every batch of must_fit finds room in; recurrent: 0, live states are there anyway."""
    floors = [0] * len(pools)
    for batch in config.must_fit:
        if len(batch.sequences) > config.max_sequences:
            raise ConfigError(
                f"CacheConfig.must_fit: a batch of {len(batch.sequences)} sequences, max_sequences is "
                f"{config.max_sequences}"
            )
        counts = batch_pages(batch, config, pools, groups)
        alone = [batch_pages(BatchShape([shape]), config, pools, groups) for shape in batch.sequences]
        for p, pool in enumerate(pools):
            if not pool.recurrent:  # the last one to resume must not find the pool too full (SPEC S43)
                others = counts[p] - min(each[p] for each in alone)
                admission = math.ceil(others / config.max_utilization_for_resume)
                floors[p] = max(floors[p], counts[p], admission)
    return floors


def _split_bytes(
    budget: int, must_fit: Sequence[int], config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]
) -> list[int]:
    longest = _longest(config, pools, groups)
    live = [config.max_sequences if pool.recurrent else 0 for pool in pools]
    fixed = sum((1 + n + pool.scratch) * pool.page_bytes for n, pool in zip(live, pools, strict=True))

    def needed(counts: Sequence[int]) -> int:
        return fixed + sum(count * pool.page_bytes for count, pool in zip(counts, pools, strict=True))

    if budget < needed(longest):
        drafts = f" and {candidates_per_row(config)} candidates" if config.max_drafts else ""
        raise ConfigError(
            f"DeviceTier.bytes={budget} is too small: one sequence of max_length={config.max_length} (and a live "
            f"state{drafts} for each of max_sequences={config.max_sequences}) needs at least {needed(longest)} bytes"
        )
    floors = [max(each) for each in zip(longest, must_fit, strict=True)]
    if budget < needed(floors):
        raise ConfigError(
            f"DeviceTier.bytes={budget} is too small for CacheConfig.must_fit, which needs at least {needed(floors)}"
        )
    counts = _shared_out(budget - fixed, _weights(config, pools, groups), floors, pools)
    return [count + n for count, n in zip(counts, live, strict=True)]


def _given_pages(tier: DeviceTier | HostTier, pools: Sequence[Pool], groups: Sequence[Group]) -> list[int]:
    if isinstance(tier.pages, Mapping):
        return _by_pool(f"{type(tier).__name__}.pages", tier.pages, pools, groups)
    return [tier.pages or 0] * len(pools)


def host_pages_of(
    config: CacheConfig, tier: HostTier, pools: Sequence[Pool], groups: Sequence[Group]
) -> tuple[int, ...]:
    """Pages, or snapshots, of host memory per pool. Bytes are shared as on the device, after one page for each pool.

    Raises:
      ConfigError: too few bytes for a page of each pool, other groups than the layout's, or too many pages.
    """
    if tier.bytes is None:
        counts = _given_pages(tier, pools, groups)
    else:
        least = sum(pool.page_bytes for pool in pools)
        if tier.bytes < least:
            raise ConfigError(f"HostTier.bytes={tier.bytes} is too small: a page of each pool takes {least} bytes")
        shared = _shared_out(tier.bytes - least, _weights(config, pools, groups), [0] * len(pools), pools)
        counts = [1 + count for count in shared]
    for pool, count in zip(pools, counts, strict=True):
        if count >= HOST:
            raise ConfigError(f"HostTier: {count} pages of pool {pool.name!r}; at most {HOST - 1}")
    return tuple(counts)


# --- what sequences really took --------------------------------------------------------------------------------------

MEMORY = 1000  # sequences that a mean goes back, roughly
ENOUGH = 2000  # sequences from which on a mean says something
OFF = Fraction(5, 4)


class Usage:
    """Exponential means of what sequences had when they closed.

    Attributes:
      count: sequences so far.

    >>> usage = Usage()
    >>> for length in (90, 110):
    ...     usage.note(length + 4, length)
    >>> usage.typical().sequences
    (SequenceShape(capacity=104, length=100),)
    """

    __slots__ = ("_capacity", "_length", "count")

    def __init__(self) -> None:
        self.count = 0
        self._capacity = self._length = 0.0

    def note(self, capacity: int, length: int) -> None:
        """A sequence closes."""
        self.count += 1
        weight = 1 / min(self.count, MEMORY)
        self._capacity += (capacity - self._capacity) * weight
        self._length += (length - self._length) * weight

    def restart(self) -> None:
        """Forgets them: they have been acted on."""
        self.count = 0

    def typical(self) -> BatchShape:
        """The sequence of these means."""
        capacity = max(1, round(self._capacity))
        return BatchShape([SequenceShape(capacity, min(capacity, round(self._length)))])


def advice(
    usage: Usage, budget: int, config: CacheConfig, pools: Sequence[Pool], groups: Sequence[Group]
) -> dict[str, float] | None:
    """The pool_ratio that fits what closed sequences used; None: too few of them, no pool is far off, or none fits.

    Args:
      budget: bytes of the device's pools.
      pools: as they are.
    """
    if usage.count < ENOUGH:
        return None
    typical = dataclasses.replace(config, typical=usage.typical(), pool_ratio=None)
    try:
        counts = _split_bytes(budget, _must_fit(typical, pools, groups), typical, pools, groups)
    except ConfigError:
        return None
    live = [config.max_sequences if pool.recurrent else 0 for pool in pools]
    pairs = [(max(1, n - least), max(1, p.num_pages - least)) for n, p, least in zip(counts, pools, live, strict=True)]
    if all(max(a, b) <= OFF * min(a, b) for a, b in pairs):
        return None
    sizes = [new * pool.page_bytes for (new, _), pool in zip(pairs, pools, strict=True)]
    return {group.name: sizes[group.pool] / len(pools[group.pool].groups) / sum(sizes) for group in groups}
