"""What the user declares, and its validation."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.errors import CacheError, ConfigError

SUPPORTED_DTYPES = tuple(
    np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.int32)
)

SCALE_DTYPES = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
SCALE_SUFFIX = "_scale"  # buffer "kv" is scaled by buffer "kv_scale"

# What is stored quantised, and the largest number that each dtype holds.
LARGEST_QUANTIZED = {np.dtype(jnp.int8): 127, np.dtype(jnp.float8_e4m3fn): 448}


def shown(value: object) -> str:
    """`value` as a message shows it, whatever it is: Python refuses to print very long numbers, for one."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def require_int(field: str, value: object, least: int) -> int:
    """`value` as an int, or a ConfigError that names the field and the least value."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{field} must be an int, got {shown(value)}")
    if value < least:
        raise ConfigError(f"{field} must be at least {least}, got {shown(value)}")
    if value >= 2**63:
        raise ConfigError(f"{field} must be below 2**63, got {shown(value)}")
    return int(value)


def require_bool(field: str, value: object) -> bool:
    """`value` as a bool, or a ConfigError that names the field."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{field} must be a bool, got {shown(value)}")
    return bool(value)


def items_of(field: str, values: object, kind: str) -> list[Any]:
    """The items of an iterable; ConfigError for what is none, also for a str and for an array without dimensions."""
    try:
        if not isinstance(values, str | bytes):
            return list(values)  # type: ignore[call-overload]
    except CacheError:  # of a call in the caller's generator
        raise
    except Exception as error:  # whatever an iterable of the caller's raises
        raise ConfigError(f"{field} must be a sequence of {kind}, got {shown(values)}") from error
    raise ConfigError(f"{field} must be a sequence of {kind}, got {shown(values)}")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array of a layer.

    Args:
      shape: attention: shape per token; recurrent: shape of the whole state.
      dtype: float32, bfloat16, float16, float8_e4m3fn, int8 or int32.
      page_size: tokens of a page as `pool`, `with_pool` and `table_for` show them, for a kernel that wants smaller
        pages: a divisor of the cache's page_size; None: that itself. Attention only.
      spec: must be None: meshes are not supported.
      value_dim: of a latent, the leading elements that are its value (`latent_buffers`). Attention only.

    >>> Buffer((8, 64), jnp.float32).nbytes
    2048
    """

    shape: tuple[int, ...]
    dtype: Any = jnp.bfloat16
    page_size: int | None = None
    spec: Any = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int | np.integer) else self.shape
        if not isinstance(shape, Sequence):
            raise ConfigError(f"Buffer.shape must be a sequence of ints, got {shape!r}")
        shape = tuple(require_int("Buffer.shape", n, 1) for n in shape)
        object.__setattr__(self, "shape", shape)
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            raise ConfigError(f"Buffer.dtype: {self.dtype!r} is not a dtype") from error
        if dtype not in SUPPORTED_DTYPES:
            names = ", ".join(d.name for d in SUPPORTED_DTYPES)
            raise ConfigError(f"Buffer.dtype must be one of {names}; got {dtype.name}")
        object.__setattr__(self, "dtype", dtype)
        if self.page_size is not None:
            require_int("Buffer.page_size", self.page_size, 1)
        if self.spec is not None:
            raise ConfigError(f"Buffer.spec={self.spec!r}: meshes are not supported, pass None")
        if self.value_dim is not None:
            require_int("Buffer.value_dim", self.value_dim, 1)
            if len(shape) != 1 or self.value_dim > shape[0]:
                raise ConfigError(
                    f"Buffer.value_dim={self.value_dim} with shape={shape}: a latent has the shape (n,), and its "
                    f"value at most n elements"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of one token (attention) or of one state (recurrent)."""
        return math.prod(self.shape) * self.dtype.itemsize


def kv_buffers(
    kv_heads: int, head_dim: int, dtype: Any = jnp.bfloat16, fused: bool = True, scales: Any = None
) -> dict[str, Buffer]:
    """The buffers of an ordinary attention layer.

    Args:
      kv_heads: key/value heads; `attend` shares each among `query heads / kv_heads` query heads.
      head_dim: elements per head.
      dtype: of K and V.
      fused: True: `{"kv": (2 * kv_heads, head_dim)}`, K at 0::2 and V at 1::2, the layout of ragged paged
        attention kernels. False: `{"k": (kv_heads, head_dim), "v": (kv_heads, head_dim)}`.
      scales: float32 (or True), bfloat16 or float16, with dtype int8 or float8_e4m3fn: a buffer more for each of
        those, its shape without head_dim, "kv_scale" or "k_scale" and "v_scale". The element that K or V stand for
        is then stored element * scale. None (or False): none.

    Raises:
      ConfigError: a number that is none or too small, scales without a dtype to scale, or of another dtype.

    >>> {name: (b.shape, b.dtype.name) for name, b in kv_buffers(2, 64, jnp.int8, scales=jnp.bfloat16).items()}
    {'kv': ((4, 64), 'int8'), 'kv_scale': ((4,), 'bfloat16')}
    """
    kv_heads = require_int("kv_heads", kv_heads, 1)
    head_dim = require_int("head_dim", head_dim, 1)
    heads = {"kv": 2 * kv_heads} if fused else {"k": kv_heads, "v": kv_heads}
    buffers = {name: Buffer((n, head_dim), dtype) for name, n in heads.items()}
    if scales is None or scales is False:
        return buffers
    buffers |= {
        name + SCALE_SUFFIX: Buffer((n,), jnp.float32 if scales is True else scales) for name, n in heads.items()
    }
    if set(scale_names(buffers)) != set(heads):
        raise ConfigError(
            f"kv_buffers: scales={scales!r} with dtype={np.dtype(dtype).name}; scales are float32, bfloat16 or "
            f"float16, and go with {' or '.join(d.name for d in LARGEST_QUANTIZED)}"
        )
    return buffers


def latent_buffers(rank: int, rope_dim: int, dtype: Any = jnp.bfloat16) -> dict[str, Buffer]:
    """The buffer of a layer with latent attention (MLA): all heads share one compressed vector per token.

    Args:
      rank: elements of the compressed K/V: of each latent the first `rank` are its value.
      rope_dim: elements of the key with the rotary embedding, behind those. The key is all of the latent.
      dtype: of the latent.

    >>> latent_buffers(512, 64)["latent"].shape
    (576,)
    """
    rank, rope_dim = require_int("rank", rank, 1), require_int("rope_dim", rope_dim, 0)
    return {"latent": Buffer((rank + rope_dim,), dtype, value_dim=rank)}


def scale_names(buffers: Mapping[str, Buffer]) -> dict[str, str]:
    """The buffers that are stored quantised: name -> name of the buffer with their scales, one per token and head."""
    names = {}
    for name, buffer in buffers.items():
        scale = buffers.get(name + SCALE_SUFFIX)
        if scale is None or buffer.dtype not in LARGEST_QUANTIZED or not buffer.shape:
            continue
        if scale.dtype in SCALE_DTYPES and scale.shape == buffer.shape[:-1]:
            names[name] = name + SCALE_SUFFIX
    return names


def _freeze_buffers(layer: str, buffers: Mapping[str, Buffer]) -> Mapping[str, Buffer]:
    if not isinstance(buffers, Mapping) or not buffers:
        raise ConfigError(f"{layer}.buffers must be a non-empty mapping of name to Buffer, got {buffers!r}")
    for name, buffer in buffers.items():
        if not isinstance(name, str) or not isinstance(buffer, Buffer):
            raise ConfigError(f"{layer}.buffers must map str to Buffer, got {name!r}: {buffer!r}")
    return MappingProxyType(dict(buffers))


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """A layer that keeps KV per token: all tokens, or the last `window` of them and the first `sinks`.

    Args:
      buffers: name -> Buffer, shapes per token.
      window: tokens a query sees, itself included; None: all.
      sinks: tokens at the start that are seen beside the window.
      shares: name of the attention layer whose KV this one reads; it has none of its own then, and takes the other
        fields from that layer in its CacheConfig.

    >>> AttentionLayer(kv_buffers(2, 16), window=128, sinks=4).group
    'window:128+4'
    """

    buffers: Mapping[str, Buffer] = None  # type: ignore[assignment]  # only until a CacheConfig fills it in
    window: int | None = None
    sinks: int = 0
    shares: str | None = None

    def __post_init__(self) -> None:
        if self.shares is not None:
            self._check_shares()
            return
        object.__setattr__(self, "buffers", _freeze_buffers("AttentionLayer", self.buffers))
        if self.window is not None:
            require_int("AttentionLayer.window", self.window, 1)
        require_int("AttentionLayer.sinks", self.sinks, 0)
        if self.sinks and self.window is None:
            raise ConfigError(f"AttentionLayer.sinks={self.sinks} needs a window: without one every token is kept")

    def _check_shares(self) -> None:
        if not isinstance(self.shares, str):
            raise ConfigError(f"AttentionLayer.shares must be a layer's name, got {self.shares!r}")
        if self.buffers is not None or self.window is not None or self.sinks != 0:
            raise ConfigError(
                f"AttentionLayer.shares={self.shares!r} takes buffers, window and sinks from that layer, got "
                f"buffers={self.buffers!r}, window={self.window!r}, sinks={self.sinks!r}"
            )

    def _like(self, target: AttentionLayer) -> AttentionLayer:
        """This layer with the buffers, window and sinks of the one whose KV it reads."""
        layer = copy.copy(self)  # the checks of a new one would refuse buffers beside `shares`
        for field in ("buffers", "window", "sinks"):
            object.__setattr__(layer, field, getattr(target, field))
        return layer

    @property
    def group(self) -> str:
        """Name of the life cycle: "full", "window:W" or "window:W+S". Of a layer that shares: once in a CacheConfig."""
        if self.window is None:
            return "full"
        return f"window:{self.window}+{self.sinks}" if self.sinks else f"window:{self.window}"


@dataclasses.dataclass(frozen=True)
class RecurrentLayer:
    """A layer that keeps one state per sequence (Mamba, gated delta net, ...).

    Args:
      buffers: name -> Buffer, shapes of the whole state.

    >>> sorted(RecurrentLayer({"conv": Buffer((64, 3)), "ssm": Buffer((4, 16, 16), jnp.float32)}).buffers)
    ['conv', 'ssm']
    """

    buffers: Mapping[str, Buffer]

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", _freeze_buffers("RecurrentLayer", self.buffers))
        for name, buffer in self.buffers.items():
            for field in ("page_size", "value_dim"):
                value = getattr(buffer, field)
                if value is not None:
                    raise ConfigError(
                        f"RecurrentLayer.buffers[{name!r}].{field}={value}: only attention layers have it"
                    )

    @property
    def group(self) -> str:
        """Name of the life cycle: "recurrent"."""
        return "recurrent"


@dataclasses.dataclass(frozen=True)
class DeviceTier:
    """The device pools' size: exactly one of `bytes` and `pages`.

    Args:
      bytes: bytes of all pools together, null pages and candidate slots included; split so that each pool serves
        the same number of sequences of max_length, or as `CacheConfig` says otherwise.
      pages: usable pages (recurrent: state slots), the null page and candidate slots excluded: an int for every
        pool, or {group: int}. Groups that share a pool add up.

    >>> DeviceTier(pages={"full": 512, "recurrent": 64}).pages["full"]
    512
    """

    bytes: int | None = None
    pages: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", _checked_size("DeviceTier", self.bytes, self.pages))


def _checked_size(tier: str, size: int | None, pages: Any) -> int | Mapping[str, int] | None:
    """`pages`, frozen; ConfigError unless exactly one of the two is given and says how large `tier` is."""
    if (size is None) == (pages is None):
        raise ConfigError(f"{tier} takes exactly one of bytes and pages, got bytes={size!r}, pages={pages!r}")
    if size is not None:
        require_int(f"{tier}.bytes", size, 1)
    elif isinstance(pages, Mapping):
        return MappingProxyType({group: require_int(f"{tier}.pages[{group!r}]", n, 1) for group, n in pages.items()})
    else:
        require_int(f"{tier}.pages", pages, 1)
    return pages


@dataclasses.dataclass(frozen=True)
class HostTier:
    """Host memory below the device pools: what is evicted there moves here. Exactly one of `bytes` and `pages`.

    Args:
      bytes: bytes of all arenas together; split as those of a DeviceTier, snapshots for live states.
      pages: pages (recurrent: snapshots): an int for every pool, or {group: int}. Groups that share a pool add up.
      staging: bytes that may be on their way to host memory at once, beside the arenas.

    >>> HostTier(bytes=2**30).staging
    67108864
    """

    bytes: int | None = None
    pages: int | Mapping[str, int] | None = None
    staging: int = 64 * 2**20

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", _checked_size("HostTier", self.bytes, self.pages))
        require_int("HostTier.staging", self.staging, 1)


@dataclasses.dataclass(frozen=True)
class StoreTier:
    """A TensorStore KvStore below host memory. Its entries survive a restart, and other processes find them.

    Args:
      location: a directory, a KvStore URL ("file:///cache/", "memory://", "file:///cache/|ocdbt:", "gs://bucket/kv/",
        "s3://bucket/kv/") or a KvStore spec as a mapping ({"driver": "file", "path": "/cache/"}).
      bytes: bytes that its entries may take, oldest removed first; None: no limit. Not on OCDBT, which never gives
        back the bytes of what is deleted.

    >>> StoreTier("/cache", bytes=10 * 2**30).location
    '/cache'
    """

    location: str | os.PathLike | Mapping[str, Any]
    bytes: int | None = None

    def __post_init__(self) -> None:
        location = self.location
        if isinstance(location, os.PathLike):
            location = os.fspath(location)
        if not isinstance(location, str | Mapping) or not location:
            raise ConfigError(f"StoreTier.location must be a path, a KvStore URL or a KvStore spec, got {location!r}")
        if isinstance(location, Mapping):
            location = MappingProxyType(dict(location))
        object.__setattr__(self, "location", location)
        if self.bytes is not None:
            require_int("StoreTier.bytes", self.bytes, 1)
            if self.is_ocdbt:
                raise ConfigError(
                    f"StoreTier.bytes={self.bytes} with OCDBT, which never gives back the bytes of what is deleted: "
                    f"pass None, or use the file driver"
                )

    @property
    def is_ocdbt(self) -> bool:
        """Whether `location` is an OCDBT database."""
        if isinstance(self.location, Mapping):
            return self.location.get("driver") == "ocdbt"
        return any(part.split(":")[0] == "ocdbt" for part in str(self.location).split("|"))


@dataclasses.dataclass(frozen=True)
class WindowScratch:
    """Window layers get no pages for tokens that leave their window within the step that writes them.

    Their attention reads a step's own K/V from `attend(..., chunk=values)`, as `append_attend` does. The pages are
    not there for anyone to reuse.

    Args:
      max_rewind: tokens that a step may end before what was reserved for it, and that `rewind` may take back.

    >>> WindowScratch(max_rewind=8)
    WindowScratch(max_rewind=8)
    """

    max_rewind: int = 0

    def __post_init__(self) -> None:
        require_int("WindowScratch.max_rewind", self.max_rewind, 0)


def _scope_part(field: str, value: object, types: tuple[type, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, types):
        raise ConfigError(f"Scope.{field} must be {' or '.join(t.__name__ for t in types)}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Scope:
    """The namespace of reuse: only sequences of equal scope share anything.

    Args:
      adapter: name or number of the adapter (LoRA) that the KV was computed with; None: the plain model.
      version: version of the adapter's weights.
      salt: a secret or tenant; None, 0 and "" are three different salts.

    >>> Scope(salt=0) == Scope(salt=""), Scope("x") == Scope(salt="x")
    (False, False)
    """

    adapter: int | str | None = None
    version: int | str = 0
    salt: int | str | bytes | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:
            _scope_part("adapter", self.adapter, (int, str))
        _scope_part("version", self.version, (int, str))
        if self.salt is not None:
            _scope_part("salt", self.salt, (int, str, bytes))


@dataclasses.dataclass(frozen=True)
class SequenceShape:
    """How much of one sequence there is at a moment.

    Args:
      capacity: token positions that it has pages for.
      length: tokens that it holds; what their windows have left needs no pages. At most `capacity`.

    >>> SequenceShape(capacity=4096, length=4000)
    SequenceShape(capacity=4096, length=4000)
    """

    capacity: int
    length: int

    def __post_init__(self) -> None:
        require_int("SequenceShape.capacity", self.capacity, 1)
        if require_int("SequenceShape.length", self.length, 0) > self.capacity:
            raise ConfigError(f"SequenceShape.length={self.length} is more than capacity={self.capacity}")


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Sequences that are open at once.

    Args:
      sequences: SequenceShapes, at least one.
      shared_prefix: the first tokens of all of them that are the same: their pages are there once.

    >>> BatchShape([SequenceShape(4096, 4000)] * 8, shared_prefix=1024).shared_prefix
    1024
    """

    sequences: Sequence[SequenceShape]
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        sequences = tuple(self.sequences) if isinstance(self.sequences, Iterable) else ()
        if not sequences or not all(isinstance(shape, SequenceShape) for shape in sequences):
            raise ConfigError(f"BatchShape.sequences must be SequenceShapes, at least one, got {self.sequences!r}")
        object.__setattr__(self, "sequences", sequences)
        shortest = min(shape.capacity for shape in sequences)
        if require_int("BatchShape.shared_prefix", self.shared_prefix, 0) > shortest:
            raise ConfigError(f"BatchShape.shared_prefix={self.shared_prefix}; the shortest capacity is {shortest}")


@dataclasses.dataclass(frozen=True, eq=False)
class CacheConfig:
    """Everything the cache needs to know about the model and its budget.

    Args:
      layers: layer name -> AttentionLayer or RecurrentLayer.
      max_sequences: rows of the page tables: sequences that can be active at once.
      max_length: tokens of the longest sequence.
      page_size: tokens per page.
      tiers: a DeviceTier; colder ones behind it: a HostTier, a StoreTier (which needs a `model`), or both.
      partial_reuse: reuse the matching head of a page that differs later (copy on write).
      min_snapshot: True: a window page that leaves its writer's window, or whose writer closes, is freed unless
        an endpoint needs it. False: it stays until room is needed. None: True iff there are recurrent layers.
      reuse_backoff: tokens trimmed off every match.
      max_utilization_for_resume: share of an attention pool that may be unevictable when a sequence resumes
        beside active ones.
      window_scratch: a WindowScratch; None: every token gets pages in window layers too.
      max_drafts: draft tokens that a verify step takes at most. With recurrent layers, each row then has
        2 * (max_drafts + 1) candidate slots beside the usable ones of the DeviceTier.
      model: identity of the weights, part of every key.
      scrub: True: what earlier owners left in a page is zeroed before a sequence gets it, at the cost of a page's
        write; without, it is never read, but lies there until it is written over. Where the head of a page is
        reused, its private copy comes with the rest of the page.
      events: how many events wait for `take_events`, at most; 0: none are made.
      typical: a BatchShape: bytes are shared out among the pools as such a batch would need them.
      must_fit: BatchShapes that there is room for, each alone, in the device's pools, whatever else is said.
      pool_ratio: {group: share of the bytes}, before `typical`. Of tiers whose size is in pages only `must_fit` counts.

    >>> config = CacheConfig(
    ...     layers={"attn": AttentionLayer(kv_buffers(2, 16)), "ssm": RecurrentLayer({"h": Buffer((4, 8))})},
    ...     max_sequences=4, max_length=256, tiers=(DeviceTier(pages=64),))
    >>> config.min_snapshot
    True
    """

    layers: Mapping[str, AttentionLayer | RecurrentLayer]
    max_sequences: int
    max_length: int
    page_size: int = 16
    tiers: tuple[DeviceTier | HostTier | StoreTier, ...] = ()
    partial_reuse: bool = True
    min_snapshot: bool | None = None
    reuse_backoff: int = 0
    max_utilization_for_resume: float = 0.97
    window_scratch: WindowScratch | None = None
    max_drafts: int = 0
    model: str = ""
    events: int = 0
    scrub: bool = False
    typical: BatchShape | None = None
    must_fit: Iterable[BatchShape] = ()
    pool_ratio: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for field in ("max_sequences", "max_length", "page_size"):
            object.__setattr__(self, field, require_int(f"CacheConfig.{field}", getattr(self, field), 1))
        for field in ("reuse_backoff", "max_drafts", "events"):
            require_int(f"CacheConfig.{field}", getattr(self, field), 0)
        object.__setattr__(self, "layers", MappingProxyType(self._checked_layers()))
        object.__setattr__(self, "tiers", self._checked_tiers())
        share = self.max_utilization_for_resume
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"CacheConfig.max_utilization_for_resume must be in (0, 1], got {share!r}")
        for field in ("partial_reuse", "scrub"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"CacheConfig.{field} must be a bool, got {getattr(self, field)!r}")
        if not (self.min_snapshot is None or isinstance(self.min_snapshot, bool)):
            raise ConfigError(f"CacheConfig.min_snapshot must be None or a bool, got {self.min_snapshot!r}")
        if not (self.window_scratch is None or isinstance(self.window_scratch, WindowScratch)):
            raise ConfigError(
                f"CacheConfig.window_scratch must be None or a WindowScratch, got {self.window_scratch!r}"
            )
        self._check_shapes()
        if not isinstance(self.model, str):
            raise ConfigError(f"CacheConfig.model must be a str, got {self.model!r}")
        if self.min_snapshot is None:
            recurrent = any(isinstance(layer, RecurrentLayer) for layer in self.layers.values())
            object.__setattr__(self, "min_snapshot", recurrent)

    def _check_shapes(self) -> None:
        single = isinstance(self.must_fit, BatchShape)
        must_fit: tuple[Any, ...] = (self.must_fit,) if single else tuple(self.must_fit)
        object.__setattr__(self, "must_fit", must_fit)
        for batch in (*must_fit, *([] if self.typical is None else [self.typical])):
            if not isinstance(batch, BatchShape):
                raise ConfigError(f"CacheConfig.typical and must_fit take BatchShapes, got {batch!r}")
            longest = max(shape.capacity for shape in batch.sequences)
            if longest > self.max_length:
                raise ConfigError(f"a SequenceShape of capacity {longest}, max_length is {self.max_length}")
        if self.pool_ratio is not None:
            if not isinstance(self.pool_ratio, Mapping):
                raise ConfigError(f"CacheConfig.pool_ratio must map groups to shares, got {self.pool_ratio!r}")
            for group, share in self.pool_ratio.items():
                number = isinstance(share, int | float) and not isinstance(share, bool)
                if not (number and 0 < share < math.inf):
                    raise ConfigError(f"CacheConfig.pool_ratio[{group!r}] must be a positive number, got {share!r}")
            object.__setattr__(self, "pool_ratio", MappingProxyType(dict(self.pool_ratio)))

    def _checked_tiers(self) -> tuple[DeviceTier | HostTier | StoreTier, ...]:
        """`tiers` as a tuple, from hot to cold."""
        single = isinstance(self.tiers, DeviceTier | HostTier | StoreTier)
        tiers: Any = (self.tiers,) if single else self.tiers
        order = (DeviceTier, HostTier, StoreTier)
        kinds = [type(tier) for tier in tiers] if isinstance(tiers, Sequence) else []
        if kinds[:1] != [DeviceTier] or kinds != [kind for kind in order if kind in kinds]:
            raise ConfigError(
                f"CacheConfig.tiers must be a DeviceTier, then at most one HostTier and one StoreTier, got {tiers!r}"
            )
        if StoreTier in kinds and not self.model:
            raise ConfigError("CacheConfig.model must not be empty with a StoreTier: it says whose entries these are")
        return tuple(tiers)

    def _tier(self, kind: type) -> Any:
        return next((tier for tier in self.tiers if isinstance(tier, kind)), None)

    @property
    def device_tier(self) -> DeviceTier:
        """The hot end of `tiers`."""
        return self._tier(DeviceTier)

    @property
    def host_tier(self) -> HostTier | None:
        """The HostTier; behind a StoreTier alone a small one, since what it reads and writes passes through there."""
        if self._tier(HostTier) is None and self.store_tier is not None:
            return HostTier(bytes=HostTier.staging)
        return self._tier(HostTier)

    @property
    def store_tier(self) -> StoreTier | None:
        """The StoreTier."""
        return self._tier(StoreTier)

    def _checked_layers(self) -> dict[str, AttentionLayer | RecurrentLayer]:
        """`layers`, with those that share another's KV filled in."""
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise ConfigError(f"CacheConfig.layers must be a non-empty mapping of name to layer, got {self.layers!r}")
        for name, layer in self.layers.items():
            if not isinstance(name, str) or not isinstance(layer, AttentionLayer | RecurrentLayer):
                raise ConfigError(
                    f"CacheConfig.layers must map str to AttentionLayer or RecurrentLayer, got {name!r}: {layer!r}"
                )
        layers = {}
        for name, layer in self.layers.items():
            if isinstance(layer, AttentionLayer) and layer.shares is not None:
                layer = layer._like(self._sharing_target(name, layer.shares))
            self._check_page_sizes(name, layer.buffers)
            layers[name] = layer
        return layers

    def _sharing_target(self, name: str, target: str) -> AttentionLayer:
        """The layer whose KV layer `name` reads."""
        where = f"layers[{name!r}].shares={target!r}"
        if target not in self.layers:
            raise ConfigError(f"{where}: there is no such layer, only {', '.join(self.layers)}")
        layer = self.layers[target]
        if not isinstance(layer, AttentionLayer):
            raise ConfigError(f"{where}: that is a recurrent layer; only attention layers are shared")
        if layer.shares is not None:
            raise ConfigError(f"{where}: that layer has no KV of its own, it shares {layer.shares!r}")
        return layer

    def _check_page_sizes(self, layer: str, buffers: Mapping[str, Buffer]) -> None:
        for name, buffer in buffers.items():
            if buffer.page_size is not None and self.page_size % buffer.page_size:
                raise ConfigError(
                    f"layers[{layer!r}].buffers[{name!r}].page_size is {buffer.page_size}: it must divide the "
                    f"cache's page_size, {self.page_size}"
                )


def _from_sequence(tokens: Any, field: str) -> np.ndarray:
    items = items_of(field, tokens, "integers")
    if any(isinstance(item, jax.Array) for item in items):
        raise ConfigError(f"{field} holds jax.Array scalars: pass host ids, e.g. int(id)")
    try:
        return np.array(items) if items else np.empty(0, np.int32)
    except Exception as error:  # an item may be anything
        raise ConfigError(f"{field} must be a flat sequence of integers: {error}") from error


def _host_integers(values: Any, field: str) -> np.ndarray:
    """`values` as a flat array of integers; ConfigError for anything else, also for a jax.Array."""
    if isinstance(values, np.ndarray):
        array = values if type(values) is np.ndarray else np.array(values)  # of a masked array what lies under the mask
    elif isinstance(values, jax.Array):
        raise ConfigError(f"{field} is a jax.Array of shape {values.shape}: pass host integers, e.g. np.asarray(ids)")
    else:
        array = _from_sequence(values, field)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{field} must be a sequence of integers, got shape {array.shape} of {array.dtype}")
    return array


def as_tokens(tokens: Any, field: str = "tokens") -> np.ndarray:
    """Host token ids as an int32[n] array (the caller's own memory where it is one already).

    Raises:
      ConfigError: a jax.Array (its ids may not have arrived), a wrong dtype or rank, an id outside [0, 2**31).
    """
    array = _host_integers(tokens, field)
    if array.dtype != np.int32:
        if len(array) and not (0 <= array.min() and array.max() < 2**31):
            raise ConfigError(f"{field} must be in [0, 2**31), got {array.min()}..{array.max()}")
        return array.astype(np.int32)
    if len(array) and np.maximum.reduce(array.view(np.uint32)) >= 2**31:  # a negative id is a large unsigned one
        raise ConfigError(f"{field} must be in [0, 2**31), got {array.min()}")
    return array


class Tokens:
    """Token ids, with content that the ids do not show: images, audio. Accepted wherever tokens are.

    A page is reused only where its ids and its contents are equal. `len` and slices work as of the ids.

    Args:
      ids: host ids, int[n].
      content: {position: digest}: what lies at that position of `ids`; an int, str or bytes that is equal for equal
        content, such as a hash of the pixels. 1, "1" and b"1" are three different ones. Content that spans several
        tokens needs a digest at the first of them at least: what follows is reached through it.

    Raises:
      ConfigError: bad ids, a position that is not one of theirs, or a digest of another type.

    >>> image = Tokens([5, 9, 9, 6], {1: "sha256:12ab", 2: "sha256:12ab"})
    >>> len(image), image[2:].content
    (4, {0: 'sha256:12ab'})
    """

    __slots__ = ("content", "ids")

    def __init__(self, ids: Any, content: Mapping[int, int | str | bytes] = MappingProxyType({})):
        self.ids = as_tokens(ids, "Tokens.ids").copy()
        if not isinstance(content, Mapping):
            raise ConfigError(f"Tokens.content must be a mapping of position to digest, got {content!r}")
        self.content: dict[int, int | str | bytes] = {}
        for position, digest in content.items():
            if require_int("Tokens.content: position", position, 0) >= len(self.ids):
                raise ConfigError(f"Tokens.content: position {position} of {len(self.ids)} ids")
            if isinstance(digest, bool) or not isinstance(digest, int | str | bytes):
                raise ConfigError(f"Tokens.content[{position}] must be an int, a str or bytes, got {digest!r}")
            self.content[int(position)] = digest

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Tokens:
        if not isinstance(part, slice):
            raise ConfigError(f"Tokens are cut by slices, got {part!r}")
        places = range(len(self.ids))[part]
        content = {at: self.content[place] for at, place in enumerate(places) if place in self.content}
        return Tokens(self.ids[part], content)

    def __repr__(self) -> str:
        return f"Tokens({self.ids.tolist()}, {self.content})"


def as_counts(operation: str, name: str, counts: Any, n: int, least: int = 0) -> np.ndarray:
    """Host integers as int64[n], each in [least, 2**31); one int counts for all.

    Raises:
      ConfigError: another number of them, a jax.Array, a wrong dtype or range.
    """
    field = f"{operation}: {name}"
    if isinstance(counts, int | np.integer):
        count = require_int(field, counts, least)
        if count >= 2**31:
            raise ConfigError(f"{field} must be below 2**31, got {count}")
        return np.full(n, count, np.int64)
    array = _host_integers(counts, field)
    if array.shape != (n,):
        raise ConfigError(f"{field} must be one int, or {n}, one per sequence; got {list(array.shape)}")
    if n and not least <= array.min() <= array.max() < 2**31:
        raise ConfigError(f"{field} must be in [{least}, 2**31), got {array.min()}..{array.max()}")
    return array.astype(np.int64)
