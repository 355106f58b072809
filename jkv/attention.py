"""Attention over the pages: the reference implementation, in plain JAX.

    one step          rows x query tiles            one (row, tile)                 one block
    q [B, T, H, D] -> [B * tiles, ...] by lax.map -> a loop with a traced count  -> gather, mask, online softmax
                                                    over the blocks it can see

The cost follows the tokens that the batch can see: not max_length, not the pool, not rows x the longest row. A row
of 4,096 tokens among fifteen of 64 costs about a tenth of what a loop over 4,096 tokens for all rows would.

What a (row, tile) can see, as pages of its sequence; sinks and window are read as one list without the gap:

    0 .. sinks      ...stale, not there...      first page of the window .. last token
    [ sink pages ]                              [ window pages                      ]
    block 0 . . . . . . . . . . . . . . . . . . . block 1 . . . . . . . block 2
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jkv import ops
from jkv.config import Buffer
from jkv.errors import ConfigError
from jkv.layout import INT32_MAX, LayerPlace
from jkv.state import CacheState

QUERY_TILE = 256  # query tokens that share one pass over the keys
FEW_QUERIES = 16  # so few (token, head) queries per KV head that a product twice as wide beats slicing K from V
MASKED = -jnp.inf  # a masked score
LOWEST = -1e30  # where the running maximum starts: finite, so that exp(MASKED - maximum) is 0 and never NaN


def attend(
    state: CacheState,
    layer: str,
    rows: ArrayLike,
    positions: ArrayLike,
    q: ArrayLike,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: ArrayLike | None = None,
    chunk: Mapping[str, ArrayLike] | None = None,
    mask: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of the step's queries over what their sequences hold in this layer.

    A query at position p sees the keys at positions <= p; in a layer with a window W only those > p - W, and
    beside them its sinks, the positions below the layer's `sinks`. Keys without a page are not seen.

    Args:
      state: the cache, after `append` of the step's own tokens (unless `chunk` is given).
      layer: name of an attention layer with the buffers {"kv"} or {"k", "v"}, in a float dtype.
      rows: int32[B], from `prepare`; -1: padding.
      positions: int32[B, T]; consecutive in each row, padding (-1) aside.
      q: [B, T, H, D], any float dtype; H a multiple of the KV heads, consecutive query heads share one.
      scale: of the scores; None: 1 / sqrt(D).
      softcap: larger than 0; scores become softcap * tanh(scores / softcap), after the scale.
      sink_logits: float[H], learned logits that take part in each softmax and have no value.
      chunk: the step's own K/V as given to `append`, buffer -> [B, T, *shape]. Own tokens are then read from here
        and only older ones from pages, so own tokens need no pages. Do the append before this all the same: an
        append after a read of the same pool makes XLA copy the pool.
      mask: bool[B, T, T], replaces causality among the step's own tokens: query t sees own token s where
        mask[b, t, s]. The window still applies.
      implementation: None or "reference".

    Returns:
      [B, T, H, D] in q's dtype, accumulated in float32; zeros for padding and for queries that see nothing.

    A NaN or Inf among a sequence's own tokens may reach all of that sequence's outputs of the step, never another's.

    Raises:
      ConfigError: an unknown or recurrent layer, buffers or dtypes that this op does not read, a wrong shape.
    """
    place = ops.attention_place(state, layer, "attend")
    if implementation not in (None, "reference"):
        raise ConfigError(f'attend: implementation must be None or "reference", got {implementation!r}')
    kv_heads, k_dim, v_dim = _kv_dims(layer, place.buffers)
    rows, positions = ops.check_tokens(state, rows, positions)
    batch, tokens = positions.shape
    q = ops.as_array("attend: q", q)
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ConfigError(f"attend: q must have a float dtype, got {q.dtype}")
    if q.ndim != 4 or q.shape[:2] != (batch, tokens) or q.shape[3] != k_dim:
        raise ConfigError(f"attend: q must be [{batch}, {tokens}, H, {k_dim}] for layer {layer!r}, got {list(q.shape)}")
    heads = q.shape[2]
    if heads == 0 or heads % kv_heads:
        raise ConfigError(f"attend: q has {heads} heads, not a multiple of the {kv_heads} KV heads of layer {layer!r}")
    if chunk is not None:
        chunk = ops.check_values("attend", layer, "chunk", chunk, place.buffers, (batch, tokens))
    if mask is not None:
        mask = ops.as_array("attend: mask", mask)
        if mask.dtype != jnp.bool_ or mask.shape != (batch, tokens, tokens):
            raise ConfigError(
                f"attend: mask must be bool[{batch}, {tokens}, {tokens}], got {mask.dtype}{list(mask.shape)}"
            )
    if sink_logits is not None:
        sink_logits = ops.as_array("attend: sink_logits", sink_logits)
        if sink_logits.shape != (heads,) or not jnp.issubdtype(sink_logits.dtype, jnp.floating):
            raise ConfigError(
                f"attend: sink_logits must be float[{heads}], got {sink_logits.dtype}{list(sink_logits.shape)}"
            )
    if q.size == 0:
        return jnp.zeros((batch, tokens, heads, v_dim), q.dtype)
    reference = _Reference(
        state,
        place,
        rows,
        positions,
        q,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        chunk=chunk,
        mask=mask,
    )
    return reference().astype(q.dtype)


def append_attend(
    state: CacheState,
    layer: str,
    rows: ArrayLike,
    positions: ArrayLike,
    q: ArrayLike,
    values: Mapping[str, ArrayLike],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, CacheState]:
    """`append` and `attend` in one: what a model's attention layer calls.

    Right also when own tokens have no pages: they are read from `values`.

    Layers of groups that share a pool share its arrays: their calls stay in place where one's inputs depend on the
    other's output, as in a stack of layers; side by side, XLA copies the pool.

    Args:
      state: the cache; donate it to the jitted step and the write is in place.
      layer: name of an attention layer with the buffers {"kv"} or {"k", "v"}, in a float dtype.
      rows: int32[B], from `prepare`; -1: padding.
      positions: int32[B, T]; consecutive in each row, padding (-1) aside.
      q: [B, T, H, D].
      values: the step's own K/V, buffer -> [B, T, *shape], in the declared dtype.
      scale, softcap, sink_logits, mask, implementation: as for `attend`.

    Returns:
      (out, state): [B, T, H, D] in q's dtype, and the new state.

    Raises:
      ConfigError: as `append` and `attend` do.
    """
    # Append first: the reads below then depend on the write, and XLA need not copy the pool to keep an old one.
    state = ops.append(state, layer, rows, positions, values)
    out = attend(
        state,
        layer,
        rows,
        positions,
        q,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        chunk=values,
        mask=mask,
        implementation=implementation,
    )
    return out, state


def _kv_dims(layer: str, buffers: Mapping[str, Buffer]) -> tuple[int, int, int]:
    """(KV heads, K's head dim, V's); ConfigError if the buffers are not ordinary K and V."""
    own = f"attend: layer {layer!r} has {', '.join(f'{n}: {b.dtype.name}{list(b.shape)}' for n, b in buffers.items())}"
    way_out = "for anything else write your own attention over pool(...) and table_for(...)"
    if not all(jnp.issubdtype(buffer.dtype, jnp.floating) for buffer in buffers.values()):
        raise ConfigError(f"{own}; it reads float dtypes, and integers need scales: {way_out}")
    shapes = {name: buffer.shape for name, buffer in buffers.items()}
    match shapes:
        case {"kv": (both_heads, dim), **rest} if not rest and both_heads % 2 == 0:
            return both_heads // 2, dim, dim
        case {"k": (k_heads, k_dim), "v": (v_heads, v_dim), **rest} if not rest and k_heads == v_heads:
            return k_heads, k_dim, v_dim
    raise ConfigError(f"{own}; it reads kv: [2 * kv_heads, D], or k and v: [kv_heads, D]; {way_out}")


# ---- the reference implementation ---------------------------------------------------------------------------
#
# Letters in shapes: B rows, T tokens, H query heads, K KV heads, G = H // K, D head dim; t tokens of a tile,
# r = t * G query vectors per KV head, n keys of a block, W elements per KV head. Fused K/V is seen as [..., K, 2 * D]:
# head 2k is K and head 2k + 1 is V, so they are neighbours.


class _Softmax(NamedTuple):
    """A running softmax over blocks of keys: for each query its maximum, its sum and its weighted values."""

    maximum: jax.Array  # float32[K, r]
    total: jax.Array  # float32[K, r]
    values: jax.Array  # float32[K, r, W]


class _Reads(NamedTuple):
    """Which pages a (row, tile) reads: the table columns [0, sinks) and [start, stop), as one list."""

    sinks: jax.Array
    start: jax.Array
    stop: jax.Array

    @property
    def num_pages(self) -> jax.Array:
        return self.sinks + self.stop - self.start

    def column(self, i: jax.Array) -> jax.Array:
        """Table column of the i-th page of the list."""
        return jnp.where(i < self.sinks, i, i - self.sinks + self.start)


class _Reference:
    """One call of `attend`: what its tiles share. `rows` and `positions` as `ops.check_tokens` returns them."""

    def __init__(
        self,
        state: CacheState,
        place: LayerPlace,
        rows: jax.Array,
        positions: jax.Array,
        q: jax.Array,
        *,
        scale: float | None,
        softcap: float | None,
        sink_logits: jax.Array | None,
        chunk: dict[str, jax.Array] | None,
        mask: jax.Array | None,
    ):
        self.page_size, self.max_pages = state.layout.page_size, state.layout.max_pages
        self.window, self.sinks = place.group.window, place.group.sinks
        self.table, self.rows = state.page_tables[place.group.name], rows
        self.pools = _paired(ops.layer_arrays(state, place))
        self.dtypes = {name: buffer.dtype for name, buffer in place.buffers.items()}
        self.compute = _compute_dtype(q.dtype, *self.dtypes.values())

        self.q = q
        self.batch, self.tokens, self.heads, self.dim = q.shape
        self.scale = 1 / math.sqrt(self.dim) if scale is None else _scalar("scale", scale)
        if isinstance(softcap, int | float) and softcap <= 0:
            raise ConfigError(f"softcap must be larger than 0, or None for none; got {softcap}")
        self.softcap = None if softcap is None else _scalar("softcap", softcap)
        self.sink_logits = sink_logits
        self.kv_heads = next(iter(self.pools.values())).shape[-2]
        self.groups = self.heads // self.kv_heads
        self.tiles = -(-self.tokens // QUERY_TILE)
        self.tile = -(-self.tokens // self.tiles)
        self.padding = self.tiles * self.tile - self.tokens
        # One query vector per KV head is padded to two: JAX 0.12 multiplies a matrix by a vector 2 to 3 times slower.
        self.lanes = max(self.groups, 2 if self.tile == 1 else 1)
        self.together = "kv" in self.pools and self.tile * self.lanes <= FEW_QUERIES
        self.block_pages = self._choose_block_pages()

        self.positions = self._tiled(positions, fill=-1)  # [B, tiles, t]
        self.first, self.stop = _span(positions)  # [B]
        self.tile_first, self.tile_stop = _span(self.positions)  # [B, tiles]
        self.chunk = None if chunk is None else {name: self._tiled(a) for name, a in _paired(chunk).items()}
        self.mask = None
        if mask is not None:
            # Own tokens lie in pages by position, in a chunk as they were given.
            mask = mask if chunk is not None else _columns_by_position(mask, positions)
            mask = jnp.pad(mask, ((0, 0), (0, self.padding), (0, self.padding)))
            self.mask = mask.reshape(self.batch, self.tiles, self.tile, self.tiles * self.tile)
        self.read_stop = self._read_stop()  # [B, tiles]
        self.reads = self._reads()

    # what to read

    def _choose_block_pages(self) -> int:
        """Pages per block: few enough not to read much beyond a short row, enough to outweigh a block's own cost."""
        elements = sum(math.prod(array.shape[-2:]) for array in self.pools.values())  # per token
        tokens = 256 if self.tile > 1 or elements <= 512 else 128
        return min(max(1, tokens // self.page_size), self.max_pages)

    def _tiled(self, array: jax.Array, fill: int = 0) -> jax.Array:
        """[B, T, ...] -> [B, tiles, t, ...]."""
        widths = [(0, 0), (0, self.padding)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, widths, constant_values=fill)
        return array.reshape(self.batch, self.tiles, self.tile, *array.shape[2:])

    def _read_stop(self) -> jax.Array:
        """int32[B, tiles]: the position up to which each tile reads from pages."""
        stop = self.tile_stop
        if self.mask is not None:
            stop = jnp.where(self.tile_stop > 0, self.stop[:, None], 0)  # a mask may show later own tokens
        if self.chunk is not None:
            stop = jnp.minimum(stop, self.first[:, None])
        return stop

    def _reads(self) -> _Reads:
        """int32[B, tiles] each: the pages that each tile reads."""
        stop = jnp.minimum(-(-self.read_stop // self.page_size), self.max_pages)
        if self.window is None:
            zero = jnp.zeros_like(stop)
            return _Reads(zero, zero, stop)
        start = jnp.clip((self.tile_first + 1 - self.window) // self.page_size, 0, stop)
        return _Reads(jnp.minimum(-(-self.sinks // self.page_size), start), start, stop)

    # what is seen

    def _seen(self, query: jax.Array, key: jax.Array, own: jax.Array | None) -> jax.Array:
        """bool[t, n]: which keys, at positions [n], the queries at positions [t] see; `own` replaces causality."""
        query, key = query[:, None], key[None, :]
        seen = key <= query if own is None else own
        if self.window is not None:
            seen &= (key > query - self.window) | (key < self.sinks)
        return seen & (key >= 0) & (query >= 0)

    def _own_tiles(self, row: jax.Array, at: jax.Array) -> tuple[jax.Array | int, jax.Array | int]:
        """Which tiles of the row's own tokens, [first, stop), tile `at` sees some of."""
        if self.tiles == 1:
            return 0, 1
        stop = at + 1 if self.mask is None else self.tiles
        stop = jnp.where(self.tile_stop[row, at] > 0, stop, 0)
        if self.window is None:
            return 0, stop
        newest = jax.lax.cummax(self.positions[row].max(axis=-1))
        first = (newest <= self.tile_first[row, at] - self.window).sum(dtype=jnp.int32)
        return jnp.where(self.first[row] < self.sinks, 0, first), stop

    # what is computed

    def __call__(self) -> jax.Array:
        """float32[B, T, H, D of V]."""
        queries = self._tiled(self.q.astype(self.compute))
        queries = queries.reshape(self.batch, self.tiles, self.tile, self.kv_heads, self.groups, self.dim)
        # Zeros where a product with K and V together meets V.
        widths = ((0, 0),) * 4 + ((0, self.lanes - self.groups), (0, self.dim if self.together else 0))
        queries = jnp.pad(queries, widths).transpose(0, 1, 3, 2, 4, 5)
        queries = queries.reshape(self.batch * self.tiles, self.kv_heads, self.tile * self.lanes, -1)
        out = jax.lax.map(lambda item: self._attend_tile(*item), (jnp.arange(len(queries), dtype=jnp.int32), queries))
        out = out.reshape(self.batch, self.tiles, self.kv_heads, self.tile, self.lanes, -1)[..., : self.groups, :]
        out = out.transpose(0, 1, 3, 2, 4, 5)
        return out.reshape(self.batch, self.tiles * self.tile, self.heads, -1)[:, : self.tokens]

    def _attend_tile(self, index: jax.Array, queries: jax.Array) -> jax.Array:
        """[K, r, W] -> float32[K, r, D of V]: one tile of one row against all that it sees."""
        row, at = index // self.tiles, index % self.tiles
        row_mask = None if self.mask is None else self.mask[row, at]
        positions = self.positions[row, at]
        reads = jax.tree.map(lambda a: a[row, at], self.reads)

        def fold_pages(i: jax.Array, softmax: _Softmax) -> _Softmax:
            listed = i * self.block_pages + jnp.arange(self.block_pages, dtype=jnp.int32)
            columns = reads.column(listed)
            pages = ops.table_entries(self.table, self.rows[row], columns)
            keys = (columns[:, None] * self.page_size + jnp.arange(self.page_size, dtype=jnp.int32)).reshape(-1)
            own = None
            if row_mask is not None and self.chunk is None:
                is_own = (keys >= self.first[row]) & (keys < self.stop[row])
                shown = row_mask[:, jnp.where(is_own, keys - self.first[row], 0)]
                own = jnp.where(is_own, shown, keys <= positions[:, None])
            seen = self._seen(positions, keys, own) & (keys < self.read_stop[row, at])
            seen &= jnp.repeat((pages > 0) & (listed < reads.num_pages), self.page_size)
            blocks = {name: array.at[pages].get(mode="clip") for name, array in self.pools.items()}
            return self._fold(softmax, queries, blocks, seen)

        softmax = self._start(queries)
        if self.chunk is not None:
            chunk = self.chunk

            def fold_own(i: jax.Array, softmax: _Softmax) -> _Softmax:
                blocks = {name: array[row, i] for name, array in chunk.items()}
                own = None
                if row_mask is not None:
                    own = jax.lax.dynamic_slice_in_dim(row_mask, i * self.tile, self.tile, axis=1)
                return self._fold(softmax, queries, blocks, self._seen(positions, self.positions[row, i], own))

            softmax = jax.lax.fori_loop(*self._own_tiles(row, at), fold_own, softmax)
        softmax = jax.lax.fori_loop(0, -(-reads.num_pages // self.block_pages), fold_pages, softmax)
        return self._finish(softmax)

    def _start(self, queries: jax.Array) -> _Softmax:
        """The softmax over no keys."""
        r, width = queries.shape[1], self.pools["v" if "v" in self.pools else "kv"].shape[-1]
        if "kv" in self.pools and not self.together:
            width = self.dim
        lowest = jnp.full((self.kv_heads, r), LOWEST, jnp.float32)
        return _Softmax(lowest, jnp.zeros_like(lowest), jnp.zeros((self.kv_heads, r, width), jnp.float32))

    def _fold(self, softmax: _Softmax, queries: jax.Array, blocks: dict[str, jax.Array], seen: jax.Array) -> _Softmax:
        """`softmax` and one more block of keys.

        Args:
          softmax: so far.
          queries: [K, r, W].
          blocks: buffer -> [..., K, W], n keys, in storage dtype.
          seen: bool[t, n].
        """
        keys, values = self._keys_and_values(blocks, seen.any(axis=0))
        scores = self.scale * jnp.einsum("krw,knw->krn", queries, keys, preferred_element_type=jnp.float32)
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        by_token = scores.reshape(self.kv_heads, self.tile, self.lanes, -1)
        scores = jnp.where(seen[:, None, :], by_token, MASKED).reshape(scores.shape)
        maximum = jnp.maximum(softmax.maximum, scores.max(axis=-1))
        decay = jnp.exp(softmax.maximum - maximum)
        weights = jnp.exp(scores - maximum[..., None])
        weighted = jnp.einsum("krn,knw->krw", weights.astype(self.compute), values, preferred_element_type=jnp.float32)
        total = softmax.total * decay + weights.sum(axis=-1)
        return _Softmax(maximum, total, softmax.values * decay[..., None] + weighted)

    def _keys_and_values(self, blocks: dict[str, jax.Array], keep: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[K, n, W] each, zero where not `keep` [n]: 0 * NaN is NaN, so a masked score alone protects from nothing."""
        first = {name: self._heads_first(block, keep, self.dtypes[name]) for name, block in blocks.items()}
        if "kv" not in first:
            return first["k"], first["v"]
        if self.together:
            return first["kv"], first["kv"]
        return first["kv"][..., : self.dim], first["kv"][..., self.dim :]

    def _heads_first(self, block: jax.Array, keep: jax.Array, dtype: np.dtype) -> jax.Array:
        """[..., K, W] as stored -> [K, n, W] to compute with. One pass: gather, mask, convert and transpose fuse."""
        block = jnp.where(keep.reshape(*block.shape[:-2], 1, 1), block, jnp.zeros((), block.dtype))
        block = ops.as_dtype(block, dtype).astype(self.compute)
        return jnp.moveaxis(block, -2, 0).reshape(self.kv_heads, -1, block.shape[-1])

    def _finish(self, softmax: _Softmax) -> jax.Array:
        """The weighted mean of the values, float32[K, r, D of V]; zeros for queries that saw nothing."""
        maximum, total, values = softmax
        if self.sink_logits is not None:
            sinks = self.sink_logits.astype(jnp.float32).reshape(self.kv_heads, 1, self.groups)
            sinks = jnp.pad(sinks, ((0, 0), (0, 0), (0, self.lanes - self.groups)))
            sinks = jnp.broadcast_to(sinks, (self.kv_heads, self.tile, self.lanes)).reshape(maximum.shape)
            highest = jnp.maximum(maximum, sinks)
            decay = jnp.exp(maximum - highest)
            total = total * decay + jnp.exp(sinks - highest)
            values = values * decay[..., None]
        if self.together:
            values = values[..., self.dim :]
        nothing = total[..., None] == 0
        return jnp.where(nothing, 0.0, values / jnp.where(nothing, 1.0, total[..., None]))


def _paired(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays with fused K/V as [..., K, 2 * D].

    Before the gather, where it costs nothing: reshaped after it, XLA computes each element's index by division, and
    the block takes up to 3 times as long.
    """
    return {
        name: array.reshape(*array.shape[:-2], array.shape[-2] // 2, 2 * array.shape[-1]) if name == "kv" else array
        for name, array in arrays.items()
    }


def _compute_dtype(*dtypes: np.dtype) -> np.dtype:
    """The dtype of the products' inputs: all given values fit exactly. Sums are float32 whatever it is."""
    wide = [np.dtype(jnp.bfloat16) if np.dtype(dtype).itemsize == 1 else dtype for dtype in dtypes]
    return np.dtype(jnp.result_type(*wide))


def _span(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., T] -> the positions [first, stop) that occur; (0, 0) where all is padding."""
    stop = positions.max(axis=-1) + 1
    first = jnp.where(positions < 0, INT32_MAX, positions).min(axis=-1)
    return jnp.where(stop > 0, first, 0), stop


def _columns_by_position(mask: jax.Array, positions: jax.Array) -> jax.Array:
    """bool[B, T, T] with column j the own token at the row's first position + j, wherever padding lies."""
    order = jnp.argsort(jnp.where(positions < 0, INT32_MAX, positions), axis=1)
    return jnp.take_along_axis(mask, order[:, None, :], axis=2)


def _scalar(name: str, value: Any) -> jax.Array:
    """`value` as float32[]; ConfigError if it is not a number."""
    if isinstance(value, str | bytes) or jnp.ndim(value) != 0:
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return jnp.asarray(value, jnp.float32)
