"""What the user declares, and its validation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.errors import ConfigError

SUPPORTED_DTYPES = tuple(
    np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.int32)
)


def require_int(field: str, value: object, least: int) -> int:
    """`value` as an int, or a ConfigError that names the field and the least value."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{field} must be an int, got {value!r}")
    if value < least:
        raise ConfigError(f"{field} must be at least {least}, got {value}")
    return int(value)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array of a layer.

    Args:
      shape: attention: shape per token; recurrent: shape of the whole state.
      dtype: float32, bfloat16, float16, float8_e4m3fn, int8 or int32.
      page_size: None, or the cache's own page_size.
      spec: must be None: meshes are not supported.

    >>> Buffer((8, 64), jnp.float32).nbytes
    2048
    """

    shape: tuple[int, ...]
    dtype: Any = jnp.bfloat16
    page_size: int | None = None
    spec: Any = None

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

    @property
    def nbytes(self) -> int:
        """Bytes of one token (attention) or of one state (recurrent)."""
        return math.prod(self.shape) * self.dtype.itemsize


def kv_buffers(kv_heads: int, head_dim: int, dtype: Any = jnp.bfloat16, fused: bool = True) -> dict[str, Buffer]:
    """The buffers of an ordinary attention layer.

    Args:
      kv_heads: key/value heads; `attend` shares each among `query heads / kv_heads` query heads.
      head_dim: elements per head.
      fused: True: `{"kv": (2 * kv_heads, head_dim)}`, K at 0::2 and V at 1::2, the layout of ragged paged
        attention kernels. False: `{"k": (kv_heads, head_dim), "v": (kv_heads, head_dim)}`.
    """
    kv_heads = require_int("kv_heads", kv_heads, 1)
    head_dim = require_int("head_dim", head_dim, 1)
    if fused:
        return {"kv": Buffer((2 * kv_heads, head_dim), dtype)}
    return {"k": Buffer((kv_heads, head_dim), dtype), "v": Buffer((kv_heads, head_dim), dtype)}


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

    >>> AttentionLayer(kv_buffers(2, 16), window=128, sinks=4).group
    'window:128+4'
    """

    buffers: Mapping[str, Buffer]
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", _freeze_buffers("AttentionLayer", self.buffers))
        if self.window is not None:
            require_int("AttentionLayer.window", self.window, 1)
        require_int("AttentionLayer.sinks", self.sinks, 0)
        if self.sinks and self.window is None:
            raise ConfigError(f"AttentionLayer.sinks={self.sinks} needs a window: without one every token is kept")

    @property
    def group(self) -> str:
        """Name of the life cycle: "full", "window:W" or "window:W+S"."""
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

    @property
    def group(self) -> str:
        """Name of the life cycle: "recurrent"."""
        return "recurrent"


@dataclasses.dataclass(frozen=True)
class DeviceTier:
    """The device pools' size: exactly one of `bytes` and `pages`.

    Args:
      bytes: bytes of all pools together, null pages included; split so that each pool serves the same number
        of sequences of max_length.
      pages: usable pages (recurrent: state slots), the null page excluded: an int for every pool, or
        {group: int}. Groups that share a pool add up.

    >>> DeviceTier(pages={"full": 512, "recurrent": 64}).pages["full"]
    512
    """

    bytes: int | None = None
    pages: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.pages is None):
            raise ConfigError(f"DeviceTier takes exactly one of bytes and pages, got {self.bytes=}, {self.pages=}")
        if self.bytes is not None:
            require_int("DeviceTier.bytes", self.bytes, 1)
        elif isinstance(self.pages, Mapping):
            pages = {group: require_int(f"DeviceTier.pages[{group!r}]", n, 1) for group, n in self.pages.items()}
            object.__setattr__(self, "pages", MappingProxyType(pages))
        else:
            require_int("DeviceTier.pages", self.pages, 1)


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


@dataclasses.dataclass(frozen=True, eq=False)
class CacheConfig:
    """Everything the cache needs to know about the model and its budget.

    Args:
      layers: layer name -> AttentionLayer or RecurrentLayer.
      max_sequences: rows of the page tables: sequences that can be active at once.
      max_length: tokens of the longest sequence.
      page_size: tokens per page.
      tiers: a DeviceTier.
      partial_reuse: reuse the matching head of a page that differs later (copy on write).
      min_snapshot: True: a window page that leaves its writer's window, or whose writer closes, is freed unless
        an endpoint needs it. False: it stays until room is needed. None: True iff there are recurrent layers.
      reuse_backoff: tokens trimmed off every match.
      max_utilization_for_resume: share of an attention pool that may be unevictable when a sequence resumes
        beside active ones.
      model: identity of the weights, part of every key.

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
    tiers: tuple[DeviceTier, ...] = ()
    partial_reuse: bool = True
    min_snapshot: bool | None = None
    reuse_backoff: int = 0
    max_utilization_for_resume: float = 0.97
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise ConfigError(f"CacheConfig.layers must be a non-empty mapping of name to layer, got {self.layers!r}")
        for name, layer in self.layers.items():
            if not isinstance(name, str) or not isinstance(layer, AttentionLayer | RecurrentLayer):
                raise ConfigError(
                    f"CacheConfig.layers must map str to AttentionLayer or RecurrentLayer, got {name!r}: {layer!r}"
                )
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))
        for field in ("max_sequences", "max_length", "page_size"):
            object.__setattr__(self, field, require_int(f"CacheConfig.{field}", getattr(self, field), 1))
        require_int("CacheConfig.reuse_backoff", self.reuse_backoff, 0)
        tiers = (self.tiers,) if isinstance(self.tiers, DeviceTier) else self.tiers
        if not isinstance(tiers, Sequence) or len(tiers) != 1 or not isinstance(tiers[0], DeviceTier):
            raise ConfigError(f"CacheConfig.tiers must hold one DeviceTier, got {self.tiers!r}")
        object.__setattr__(self, "tiers", tuple(tiers))
        for name, layer in self.layers.items():
            for key, buffer in layer.buffers.items():
                if buffer.page_size not in (None, self.page_size):
                    raise ConfigError(
                        f"layers[{name!r}].buffers[{key!r}].page_size is {buffer.page_size}, the cache's is "
                        f"{self.page_size}: a page size of its own is not supported"
                    )
        share = self.max_utilization_for_resume
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"CacheConfig.max_utilization_for_resume must be in (0, 1], got {share!r}")
        if not isinstance(self.partial_reuse, bool):
            raise ConfigError(f"CacheConfig.partial_reuse must be a bool, got {self.partial_reuse!r}")
        if not (self.min_snapshot is None or isinstance(self.min_snapshot, bool)):
            raise ConfigError(f"CacheConfig.min_snapshot must be None or a bool, got {self.min_snapshot!r}")
        if not isinstance(self.model, str):
            raise ConfigError(f"CacheConfig.model must be a str, got {self.model!r}")
        if self.min_snapshot is None:
            recurrent = any(isinstance(layer, RecurrentLayer) for layer in self.layers.values())
            object.__setattr__(self, "min_snapshot", recurrent)


def _from_sequence(tokens: Any, field: str) -> np.ndarray:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise ConfigError(f"{field} must be a sequence of integers, got {tokens!r}")
    items = list(tokens)
    if any(isinstance(item, jax.Array) for item in items):
        raise ConfigError(f"{field} holds jax.Array scalars: pass host ids, e.g. int(id)")
    try:
        return np.array(items) if items else np.empty(0, np.int32)
    except ValueError as error:
        raise ConfigError(f"{field} must be a flat sequence of integers: {error}") from error


def as_tokens(tokens: Any, field: str = "tokens") -> np.ndarray:
    """Host token ids as an int32[n] array (the caller's own memory where it is one already).

    Raises:
      ConfigError: a jax.Array (its ids may not have arrived), a wrong dtype or rank, an id outside [0, 2**31).
    """
    if isinstance(tokens, np.ndarray):
        array = tokens
    elif isinstance(tokens, jax.Array):
        raise ConfigError(f"{field} is a jax.Array of shape {tokens.shape}: pass host ids, e.g. np.asarray(ids)")
    else:
        array = _from_sequence(tokens, field)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{field} must be a sequence of integers, got shape {array.shape} of {array.dtype}")
    if array.dtype != np.int32:
        if len(array) and not (0 <= array.min() and array.max() < 2**31):
            raise ConfigError(f"{field} must be in [0, 2**31), got {array.min()}..{array.max()}")
        return array.astype(np.int32)
    if len(array) and np.maximum.reduce(array.view(np.uint32)) >= 2**31:  # a negative id is a large unsigned one
        raise ConfigError(f"{field} must be in [0, 2**31), got {array.min()}")
    return array
