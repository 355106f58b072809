"""Attention over the pages: the reference implementation, in plain JAX.

    one step            work lists, one per tile size      one tile                      one block
    q [N, H, D], flat   [ decodes: tiles of 1 token ]
    sequences        -> [ drafts:  tiles of 8       ]  ->  a loop with a traced     ->   gather, mask,
    [begin, end)        [ prompts: tiles of 128     ]      count over the blocks         online softmax
                                                           that it can see

The cost follows the tokens that the batch can see: not max_length, not the pool, not rows x the longest row, not
padding. A row of 4,096 tokens among fifteen of 64 costs about a tenth of what a loop over 4,096 tokens for all rows
would. A padded batch [B, T] is the flat one whose sequence b has the tokens [b * T, (b + 1) * T), in tiles of one size.

What a tile can see, as pages of its sequence; sinks and window are read as one list without the gap:

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
from jkv.config import Buffer, scale_names
from jkv.errors import ConfigError
from jkv.layout import INT32_MAX, LayerPlace
from jkv.ragged import Ragged
from jkv.state import CacheState

QUERY_TILE = 128  # query tokens that share one pass over the keys
DRAFT_TILE = 8  # the same in a ragged batch, for sequences of up to
DRAFT_TOKENS = 48  # tokens: a tile of 128 costs about as much as six of 8
FEW_QUERIES = 16  # (token, head) queries per KV head: a product twice as wide beats slicing K from V
MASKED = -jnp.inf  # a masked score
LOWEST = -1e30  # where the running maximum starts: finite, so that exp(MASKED - maximum) is 0 and never NaN


def attend(
    state: CacheState,
    layer: str,
    rows: ops.Rows,
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

    Call it inside jit: outside it compiles its loops anew at each call.

    Args:
      state: the cache, after `append` of the step's own tokens (unless `chunk` is given).
      layer: name of an attention layer with the buffers of `kv_buffers` or `latent_buffers`: {"kv"} or {"k", "v"} in a
        float dtype, or in int8 or float8 with scales; or {"latent"}, one KV head whose key is all of the latent and
        whose value is its first `value_dim` elements. A layer that shares another's KV reads that one's pages.
      rows: int32[B], from `prepare`; -1: padding. Or a Ragged, from `prepare_ragged`.
      positions: int32[B, T]; consecutive in each row, padding (-1) aside. Of a Ragged int32[T].
      q: [B, T, H, D], any float dtype; H a multiple of the KV heads, consecutive query heads share one. D is the key's
        size, of a latent rank + rope_dim. Of a Ragged [T, H, D].
      scale: of the scores; None: 1 / sqrt(D). Models with absorbed latent attention pass their own.
      softcap: finite, above 0; scores become softcap * tanh(scores / softcap), after the scale.
      sink_logits: float[H], learned logits that take part in each softmax and have no value.
      chunk: the step's own K/V as given to `append` (for a layer that shares another's: to that one), buffer ->
        [B, T, *shape], of a Ragged [T, *shape]. Own tokens are then read from here, as they are stored, and only older
        ones from pages, so own tokens need no pages. Do the append before this all the same: an append after a read of
        the same pool makes XLA copy the pool.
      mask: bool[B, T, T], replaces causality among the step's own tokens: query t sees own token s where
        mask[b, t, s]. Of a Ragged bool[T, T], in which pairs of different sequences say nothing. The window still
        applies.
      implementation: None or "reference".

    Returns:
      [B, T, H, D of the value] in q's dtype, of a Ragged [T, H, D of the value]; accumulated in float32; zeros for
      padding and for queries that see nothing.

    A NaN or Inf among a sequence's own tokens may reach all of that sequence's outputs of the step, never another's.

    Raises:
      ConfigError: an unknown or recurrent layer, buffers or dtypes that this op does not read, a wrong shape.

    >>> import jkv, numpy as np, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> positions, values = np.array([[0, 1, 2]], np.int32), {"kv": jnp.ones((1, 3, 2, 8))}
    >>> state = jkv.append(state, "attn", rows, positions, values)
    >>> jkv.attend(state, "attn", rows, positions, jnp.ones((1, 3, 2, 8))).shape
    (1, 3, 2, 8)
    """
    place = ops.attention_place(state, layer, "attend")
    if implementation not in (None, "reference"):
        raise ConfigError(f'attend: implementation must be None or "reference", got {implementation!r}')
    kv = _kv(layer, place.buffers)
    checked, positions = ops.check_tokens(state, rows, positions)
    lead = positions.shape  # [B, T], of a Ragged [T]
    q = _checked_q(layer, kv, q, lead)
    heads = q.shape[-2]
    if chunk is not None:
        chunk = ops.token_values("attend", layer, "chunk", chunk, place, lead)
    if mask is not None:
        mask = ops.as_array("attend: mask", mask)
        if mask.dtype != jnp.bool_ or mask.shape != (*lead, lead[-1]):
            raise ConfigError(f"attend: mask must be bool{[*lead, lead[-1]]}, got {mask.dtype}{list(mask.shape)}")
    if sink_logits is not None:
        sink_logits = ops.as_array("attend: sink_logits", sink_logits)
        if sink_logits.shape != (heads,) or not jnp.issubdtype(sink_logits.dtype, jnp.floating):
            raise ConfigError(
                f"attend: sink_logits must be float[{heads}], got {sink_logits.dtype}{list(sink_logits.shape)}"
            )
    if q.size == 0 or checked.size == 0:
        return jnp.zeros((*lead, heads, kv.value_dim), q.dtype)

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[len(lead) :])

    if isinstance(rows, Ragged):
        sequences = _ragged_sequences(checked, ops.check_ragged(state, rows).cu_q_lens, positions)
    else:
        sequences = _padded_sequences(checked, positions)
    reference = _Reference(
        state,
        place,
        kv,
        sequences,
        flat(positions),
        flat(q),
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        chunk=None if chunk is None else {name: flat(array) for name, array in chunk.items()},
        mask=None if mask is None else flat(mask),
    )
    return reference().astype(q.dtype).reshape(*lead, heads, kv.value_dim)


def append_attend(
    state: CacheState,
    layer: str,
    rows: ops.Rows,
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
      layer: as for `attend`, but with KV of its own.
      rows, positions, q: as for `attend`.
      values: the step's own K/V, as for `append`: buffer -> [B, T, *shape], of a Ragged [T, *shape].
      scale, softcap, sink_logits, mask, implementation: as for `attend`.

    Returns:
      (out, state): what `attend` gives, and the new state.

    Raises:
      ConfigError: as `append` and `attend` do.

    >>> import jkv, numpy as np, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
    >>> state, seq = manager.init(), manager.open()
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> positions, values = np.array([[0, 1, 2]], np.int32), {"kv": jnp.ones((1, 3, 2, 8))}
    >>> out, state = jkv.append_attend(state, "attn", rows, positions, jnp.ones((1, 3, 2, 8)), values)
    >>> out.shape
    (1, 3, 2, 8)
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


class _KV(NamedTuple):
    """Where a layer's buffers hold keys and values, seen as [..., kv_heads, W] each."""

    heads: int
    key: str  # the buffer of whose W elements the first key_dim are the key
    key_dim: int
    value: str  # the buffer of whose W elements value_dim are the value, from value_at on
    value_dim: int
    value_at: int
    scales: Mapping[str, str]  # buffer -> the buffer with its scales


def _kv(layer: str, buffers: Mapping[str, Buffer]) -> _KV:
    """The keys and values in `buffers`; ConfigError if they hold something else."""
    scales = scale_names(buffers)
    own = f"attend: layer {layer!r} has {', '.join(f'{n}: {b.dtype.name}{list(b.shape)}' for n, b in buffers.items())}"
    way_out = "for anything else write your own attention over pool(...) and table_for(...)"
    plain = {name: buffer for name, buffer in buffers.items() if name not in scales.values()}
    if not all(jnp.issubdtype(buffer.dtype, jnp.floating) or name in scales for name, buffer in plain.items()):
        raise ConfigError(f"{own}; it reads float dtypes, and int8 with scales: {way_out}")
    match {name: buffer.shape for name, buffer in plain.items()}:
        case {"kv": (both_heads, dim), **rest} if not rest and both_heads % 2 == 0:
            return _KV(both_heads // 2, "kv", dim, "kv", dim, dim, scales)
        case {"k": (k_heads, k_dim), "v": (v_heads, v_dim), **rest} if not rest and k_heads == v_heads:
            return _KV(k_heads, "k", k_dim, "v", v_dim, 0, scales)
        case {"latent": (dim,), **rest} if not rest and plain["latent"].value_dim is not None:
            return _KV(1, "latent", dim, "latent", plain["latent"].value_dim, 0, scales)
    raise ConfigError(
        f"{own}; it reads kv: [2 * kv_heads, D], or k and v: [kv_heads, D], or latent: [n] with a value_dim; {way_out}"
    )


def _checked_q(layer: str, kv: _KV, q: ArrayLike, lead: tuple[int, ...]) -> jax.Array:
    q = ops.as_array("attend: q", q)
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ConfigError(f"attend: q must have a float dtype, got {q.dtype}")
    if q.ndim != len(lead) + 2 or q.shape[:-2] != lead or q.shape[-1] != kv.key_dim:
        shape = ", ".join([*map(str, lead), "H", str(kv.key_dim)])
        raise ConfigError(f"attend: q must be [{shape}] for layer {layer!r}, got {list(q.shape)}")
    heads = q.shape[-2]
    if heads == 0 or heads % kv.heads:
        raise ConfigError(f"attend: q has {heads} heads, not a multiple of the {kv.heads} KV heads of layer {layer!r}")
    return q


# ---- the step's tokens, flat --------------------------------------------------------------------------------
#
# Letters in shapes, here and below: N tokens of the step, R sequences, H query heads, K KV heads, G = H // K, D head
# dim; t tokens of a tile, r = t * lanes query vectors per KV head, n keys of a block, W elements of a buffer per token
# and KV head. Fused K/V is seen as [..., K, 2 * D]: head 2k is K and head 2k + 1 is V, so they are neighbours.


class _TileSize(NamedTuple):
    """Sequences of `least` to `most` tokens are cut into tiles of `size`."""

    size: int
    least: int
    most: int

    @property
    def overrun(self) -> int:
        """Tokens by which a sequence's last tile may reach beyond it."""
        return -self.most % self.size if self.least == self.most else self.size - 1


class _Sequences(NamedTuple):
    """Whose the step's tokens are: sequence i has the tokens [begin[i], end[i]). Arrays are int32[R]."""

    sizes: tuple[_TileSize, ...]
    rows: jax.Array  # as `ops.check_rows` returns them
    begin: jax.Array
    end: jax.Array
    column: jax.Array  # of the mask: where the sequence's first token lies
    first: jax.Array  # positions of its tokens: [first, stop), padding aside; (0, 0) where all is padding
    stop: jax.Array


def _padded_sequences(rows: jax.Array, positions: jax.Array) -> _Sequences:
    """Those of a [B, T] batch: T tokens each, in tiles as equal as can be."""
    batch, tokens = positions.shape
    tiles = -(-tokens // QUERY_TILE)
    sizes = (_TileSize(-(-tokens // tiles), tokens, tokens),)
    begin = jnp.arange(batch, dtype=jnp.int32) * tokens
    return _Sequences(sizes, rows, begin, begin + tokens, jnp.zeros_like(begin), *_span(positions))


def _ragged_sequences(rows: jax.Array, cu_q_lens: jax.Array, positions: jax.Array) -> _Sequences:
    """Those of a Ragged: of any length, so in tiles of several sizes: a decode must not pay for a prompt's."""
    tokens = positions.shape[0]
    by_length = ((1, 1, 1), (DRAFT_TILE, 2, DRAFT_TOKENS), (QUERY_TILE, DRAFT_TOKENS + 1, tokens))
    sizes = tuple(
        _TileSize(min(size, tokens), least, min(most, tokens)) for size, least, most in by_length if least <= tokens
    )
    begin, end = cu_q_lens[:-1], cu_q_lens[1:]
    index = jnp.arange(tokens, dtype=jnp.int32)
    own = (begin[:, None] <= index) & (index < end[:, None])
    return _Sequences(sizes, rows, begin, end, begin, *_span(jnp.where(own, positions, -1)))


def _span(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., T] -> the positions [first, stop) that occur; (0, 0) where all is padding."""
    stop = positions.max(axis=-1) + 1
    first = jnp.where(positions < 0, INT32_MAX, positions).min(axis=-1)
    return jnp.where(stop > 0, first, 0), stop


def _by_position(sequences: _Sequences, positions: jax.Array) -> jax.Array:
    """int32[N]: the tokens, those of a sequence in the order of their positions, padding last."""
    sequence = jnp.searchsorted(sequences.end, jnp.arange(len(positions), dtype=jnp.int32), side="right")
    return jnp.lexsort((jnp.where(positions < 0, INT32_MAX, positions), sequence)).astype(jnp.int32)


# ---- the reference implementation ---------------------------------------------------------------------------


class _Reference:
    """One call of `attend`: what its tiles share. All that is per token is flat, [N, ...]."""

    def __init__(
        self,
        state: CacheState,
        place: LayerPlace,
        kv: _KV,
        sequences: _Sequences,
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
        self.table = state.page_tables[place.group.name]
        self.kv, self.sequences = kv, sequences
        self.pools = {name: self._view(array) for name, array in ops.layer_arrays(state, place).items()}
        self.dtypes = {name: buffer.dtype for name, buffer in place.buffers.items()}
        self.compute = _compute_dtype(q.dtype, self.dtypes[kv.key], self.dtypes[kv.value])

        self.tokens, self.heads, _ = q.shape
        self.groups = self.heads // kv.heads
        self.scale = 1 / math.sqrt(kv.key_dim) if scale is None else _scalar("scale", scale)
        self.softcap = None if softcap is None else _scalar("softcap", softcap)
        if self.softcap is not None and not isinstance(softcap, jax.core.Tracer):
            if not 0 < np.float32(softcap) < np.inf:  # as float32: what is smaller than that is 0
                raise ConfigError(f"softcap must be finite and larger than 0, or None for none; got {softcap}")
        self.sink_logits = sink_logits

        self.overrun = max(size.overrun for size in sequences.sizes)
        self.positions, self.q = positions, self._extended(q)
        self.chunk = None
        if chunk is not None:
            self.chunk = {name: self._extended(self.by_head(array, lead=1)) for name, array in chunk.items()}
        self.mask = None
        if mask is not None:
            self.mask = jnp.pad(self._extended(mask), ((0, 0), (0, self.overrun)))
            self.by_position = _by_position(sequences, positions)

    def by_head(self, array: jax.Array, lead: int) -> jax.Array:
        """[*lead, *shape of the buffer], or what is left of it in a view -> [*lead, K, W]."""
        return array.reshape(*array.shape[:lead], self.kv.heads, -1)

    def _view(self, pool: jax.Array) -> jax.Array:
        """The pool as [pages + 1, page_size, K, W] without those of K and W that are 1: `by_head` takes its blocks.

        Split into heads only after the gather, a call of 8 tokens takes 5 to 20% longer on a CPU: XLA computes each
        element's index by division. A dimension of 1 more would make JAX 0.10 copy the whole pool at each call.
        """
        heads, size = self.kv.heads, math.prod(pool.shape[2:])
        return pool.reshape(*pool.shape[:2], *(dim for dim in (heads, size // heads) if dim > 1))

    def _extended(self, array: jax.Array) -> jax.Array:
        """[N, ...] -> [N + overrun, ...]: a slice that reaches beyond the end would be moved back, in silence."""
        return jnp.pad(array, ((0, self.overrun), *((0, 0),) * (array.ndim - 1)))

    def __call__(self) -> jax.Array:
        """float32[N, H, D of V]."""
        out = jnp.zeros((self.tokens + self.overrun, self.heads, self.kv.value_dim), jnp.float32)
        for size in self.sequences.sizes:
            out = _TileLoop(self, size)(out)
        return out[: self.tokens]


class _Tiles(NamedTuple):
    """The work list of one tile size: `number` tiles, and unused entries behind them."""

    number: jax.Array  # int32[]
    sequence: jax.Array  # int32[tiles]
    begin: jax.Array  # int32[tiles]: its first token
    positions: jax.Array  # int32[tiles, t], -1: padding, and tokens beyond the sequence
    first: jax.Array  # int32[tiles], of these as in _Sequences
    stop: jax.Array


class _Reads(NamedTuple):
    """Which pages a tile reads: the table columns [0, sinks) and [start, stop), as one list."""

    sinks: jax.Array
    start: jax.Array
    stop: jax.Array

    @property
    def num_pages(self) -> jax.Array:
        return self.sinks + self.stop - self.start

    def column(self, i: jax.Array) -> jax.Array:
        """Table column of the i-th page of the list."""
        return jnp.where(i < self.sinks, i, i - self.sinks + self.start)


class _Softmax(NamedTuple):
    """A running softmax over blocks of keys: for each query its maximum, its sum and its weighted values."""

    maximum: jax.Array  # float32[K, r]
    total: jax.Array  # float32[K, r]
    values: jax.Array  # float32[K, r, W]


class _TileLoop:
    """The tiles of one size, one after the other."""

    def __init__(self, call: _Reference, size: _TileSize):
        self.call, self.kv, self.sequences, self.tile = call, call.kv, call.sequences, size.size
        # One query vector per KV head is padded to two: JAX 0.12 multiplies a matrix by a vector 2 to 3 times slower.
        self.lanes = max(call.groups, 2 if self.tile == 1 else 1)
        # Do the products take the one buffer as a whole, for the key and for the value? Where it is the key (a latent),
        # and where queries are few: then the product wastes less than slices of the block.
        self.width = self._elements(self.kv.value) // self.kv.heads
        few = self.tile * self.lanes <= FEW_QUERIES
        self.together = self.kv.key == self.kv.value and (few or self.width == self.kv.key_dim)
        self.block_pages = self._choose_block_pages()
        self.tiles = self._work_list(size)
        self.read_stop = self._read_stop()
        self.reads = self._reads()

    # what to do

    def _work_list(self, size: _TileSize) -> _Tiles:
        """The tiles of the sequences of this size, in the order of their tokens."""
        begin, end = self.sequences.begin, self.sequences.end
        mine = (self.sequences.stop > 0) & (size.least <= end - begin) & (end - begin <= size.most)
        until = jnp.cumsum(jnp.where(mine, -((begin - end) // self.tile), 0), dtype=jnp.int32)  # tiles, with each
        # The lists are as long as any lengths could make them.
        sequences = min(len(until), self.call.tokens // size.least)
        most = min(sequences * -(-size.most // self.tile), sequences + self.call.tokens // self.tile)
        index = jnp.arange(most, dtype=jnp.int32)
        sequence = jnp.minimum((until <= index[:, None]).sum(axis=1, dtype=jnp.int32), len(until) - 1)
        before = jnp.where(sequence > 0, until[sequence - 1], 0)
        tile_begin = begin[sequence] + (index - before) * self.tile
        positions = self._positions(tile_begin[:, None], end[sequence][:, None])
        return _Tiles(until[-1], sequence, tile_begin, positions, *_span(positions))

    def _positions(self, begin: jax.Array, end: jax.Array) -> jax.Array:
        """Positions of the t tokens from `begin` on, -1 from `end` on."""
        tokens = begin + jnp.arange(self.tile, dtype=jnp.int32)
        return jnp.where(tokens < end, self.call.positions.at[tokens].get(mode="clip"), -1)

    # what to read

    def _elements(self, buffer: str) -> int:
        """Of a token in the buffer: K * W."""
        return math.prod(self.call.pools[buffer].shape[2:])

    def _choose_block_pages(self) -> int:
        """Pages per block: few enough not to read much beyond a short row, enough to outweigh a block's own cost."""
        elements = sum(self._elements(name) for name in {self.kv.key, self.kv.value})
        tokens = 256 if self.tile > 1 or elements <= 512 else 128
        return min(max(1, tokens // self.call.page_size), self.call.max_pages)

    def _read_stop(self) -> jax.Array:
        """int32[tiles]: the position up to which each tile reads from pages."""
        stop = self.tiles.stop
        if self.call.mask is not None:
            stop = jnp.where(stop > 0, self.sequences.stop[self.tiles.sequence], 0)  # it may show later own tokens
        if self.call.chunk is not None:
            stop = jnp.minimum(stop, self.sequences.first[self.tiles.sequence])
        return stop

    def _reads(self) -> _Reads:
        """int32[tiles] each: the pages that each tile reads."""
        page_size, window = self.call.page_size, self.call.window
        stop = jnp.minimum(-(-self.read_stop // page_size), self.call.max_pages)
        if window is None:
            zero = jnp.zeros_like(stop)
            return _Reads(zero, zero, stop)
        start = jnp.clip((self.tiles.first + 1 - window) // page_size, 0, stop)
        return _Reads(jnp.minimum(-(-self.call.sinks // page_size), start), start, stop)

    def _own_blocks(self, i: jax.Array) -> tuple[jax.Array | int, jax.Array]:
        """Which blocks of t own tokens of its sequence, [first, stop), tile `i` sees some of."""
        sequence = self.tiles.sequence[i]
        begin = self.sequences.begin[sequence]
        end = self.sequences.end[sequence] if self.call.mask is not None else self.tiles.begin[i] + self.tile
        stop = jnp.where(self.tiles.stop[i] > 0, -((begin - end) // self.tile), 0)
        if self.call.window is None:
            return 0, stop
        # Padding in front of the tokens makes this a block too early at worst.
        first_position = self.sequences.first[sequence]
        first = jnp.maximum(self.tiles.first[i] + 1 - self.call.window - first_position, 0) // self.tile
        return jnp.where(first_position < self.call.sinks, 0, first), stop

    # what is seen

    def _seen(self, query: jax.Array, key: jax.Array, shown: jax.Array | None) -> jax.Array:
        """bool[t, n]: which keys, at positions [n], the queries at positions [t] see; `shown` replaces causality."""
        query, key = query[:, None], key[None, :]
        seen = key <= query if shown is None else shown
        if self.call.window is not None:
            seen &= (key > query - self.call.window) | (key < self.call.sinks)
        return seen & (key >= 0) & (query >= 0)

    def _shown(self, sequence: jax.Array, mask: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        """bool[t, n]: causality, and `mask` [t, columns] where the keys, read from pages, are own tokens."""
        begin, first = self.sequences.begin[sequence], self.sequences.first[sequence]
        own = (first <= key) & (key < self.sequences.stop[sequence])
        token = self.call.by_position[jnp.where(own, begin + key - first, 0)]
        column = jnp.where(own, self.sequences.column[sequence] + token - begin, 0)
        return jnp.where(own, mask[:, column], key <= query[:, None])

    # what is computed

    def __call__(self, out: jax.Array) -> jax.Array:
        """`out`, float32[N + overrun, H, D of V], with the results of these tiles."""
        return jax.lax.fori_loop(0, self.tiles.number, self._put_tile, out)

    def _put_tile(self, i: jax.Array, out: jax.Array) -> jax.Array:
        begin, end = self.tiles.begin[i], self.sequences.end[self.tiles.sequence[i]]
        result = self._attend_tile(i, self._queries(begin)).reshape(self.kv.heads, self.tile, self.lanes, -1)
        result = result[:, :, : self.call.groups].transpose(1, 0, 2, 3).reshape(self.tile, self.call.heads, -1)
        if self.call.overrun:  # what lies beyond the sequence is another's
            own = begin + jnp.arange(self.tile, dtype=jnp.int32) < end
            result = jnp.where(own[:, None, None], result, self._slice(out, begin))
        return jax.lax.dynamic_update_slice_in_dim(out, result, begin, axis=0)

    def _slice(self, array: jax.Array, begin: jax.Array, axis: int = 0) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, begin, self.tile, axis)

    def _queries(self, begin: jax.Array) -> jax.Array:
        """[K, r, W] of the t tokens from `begin` on, with zeros where a product with K and V together meets V."""
        queries = self._slice(self.call.q, begin).astype(self.call.compute)
        queries = queries.reshape(self.tile, self.kv.heads, self.call.groups, self.kv.key_dim)
        zeros = self.width - self.kv.key_dim if self.together else 0
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, self.lanes - self.call.groups), (0, zeros)))
        return queries.transpose(1, 0, 2, 3).reshape(self.kv.heads, self.tile * self.lanes, -1)

    def _attend_tile(self, i: jax.Array, queries: jax.Array) -> jax.Array:
        """[K, r, W] -> float32[K, r, D of V]: tile `i` against all that it sees."""
        call = self.call
        positions, reads = self.tiles.positions[i], jax.tree.map(lambda a: a[i], self.reads)
        mask = None if call.mask is None else self._slice(call.mask, self.tiles.begin[i])
        sequence = self.tiles.sequence[i]
        row, begin = self.sequences.rows[sequence], self.sequences.begin[sequence]
        end, column = self.sequences.end[sequence], self.sequences.column[sequence]

        def fold_pages(j: jax.Array, softmax: _Softmax) -> _Softmax:
            listed = j * self.block_pages + jnp.arange(self.block_pages, dtype=jnp.int32)
            columns = reads.column(listed)
            pages = ops.table_entries(call.table, row, columns)
            keys = (columns[:, None] * call.page_size + jnp.arange(call.page_size, dtype=jnp.int32)).reshape(-1)
            shown = None if mask is None or call.chunk is not None else self._shown(sequence, mask, positions, keys)
            seen = self._seen(positions, keys, shown) & (keys < self.read_stop[i])
            seen &= jnp.repeat((pages > 0) & (listed < reads.num_pages), call.page_size)
            blocks = {n: call.by_head(array.at[pages].get(mode="clip"), lead=2) for n, array in call.pools.items()}
            return self._fold(softmax, queries, blocks, seen)

        softmax = self._start(queries)
        if call.chunk is not None:
            chunk = call.chunk

            def fold_own(j: jax.Array, softmax: _Softmax) -> _Softmax:
                token = begin + j * self.tile
                shown = None if mask is None else self._slice(mask, column + j * self.tile, axis=1)
                seen = self._seen(positions, self._positions(token, end), shown)
                blocks = {name: self._slice(array, token) for name, array in chunk.items()}
                return self._fold(softmax, queries, blocks, seen)

            softmax = jax.lax.fori_loop(*self._own_blocks(i), fold_own, softmax)
        softmax = jax.lax.fori_loop(0, -(-reads.num_pages // self.block_pages), fold_pages, softmax)
        return self._finish(softmax)

    def _start(self, queries: jax.Array) -> _Softmax:
        """The softmax over no keys."""
        lowest = jnp.full(queries.shape[:2], LOWEST, jnp.float32)
        width = self.width if self.together else self.kv.value_dim
        return _Softmax(lowest, jnp.zeros_like(lowest), jnp.zeros((*lowest.shape, width), jnp.float32))

    def _fold(self, softmax: _Softmax, queries: jax.Array, blocks: dict[str, jax.Array], seen: jax.Array) -> _Softmax:
        """`softmax` and one more block of keys.

        Args:
          softmax: so far.
          queries: [K, r, W].
          blocks: buffer -> [..., K, W], n keys, in storage dtype.
          seen: bool[t, n].
        """
        keep = seen.any(axis=0)
        keys, values = self._keys_and_values(blocks, keep)
        key_scales = self._scales(self.kv.key, 0, blocks, keep)
        value_scales = self._scales(self.kv.value, -1, blocks, keep)
        scores = self.call.scale * jnp.einsum("krw,knw->krn", queries, keys, preferred_element_type=jnp.float32)
        if key_scales is not None:
            scores *= key_scales
        if self.call.softcap is not None:
            scores = self.call.softcap * jnp.tanh(scores / self.call.softcap)
        by_token = scores.reshape(self.kv.heads, self.tile, self.lanes, -1)
        scores = jnp.where(seen[:, None, :], by_token, MASKED).reshape(scores.shape)
        maximum = jnp.maximum(softmax.maximum, scores.max(axis=-1))
        decay = jnp.exp(softmax.maximum - maximum)
        weights = jnp.exp(scores - maximum[..., None])
        total = softmax.total * decay + weights.sum(axis=-1)
        if value_scales is not None:
            weights *= value_scales
        weighted = jnp.einsum(
            "krn,knw->krw", weights.astype(self.call.compute), values, preferred_element_type=jnp.float32
        )
        return _Softmax(maximum, total, softmax.values * decay[..., None] + weighted)

    def _keys_and_values(self, blocks: dict[str, jax.Array], keep: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[K, n, W] each, zero where not `keep` [n]: 0 * NaN is NaN, so a masked score alone protects from nothing."""
        kv, compute = self.kv, self.call.compute
        first = {
            name: self._heads_first(name, blocks[name], keep, compute) for name in dict.fromkeys((kv.key, kv.value))
        }
        if self.together:
            return first[kv.key], first[kv.value]
        return first[kv.key][..., : kv.key_dim], first[kv.value][..., kv.value_at : kv.value_at + kv.value_dim]

    def _scales(self, buffer: str, at: int, blocks: dict[str, jax.Array], keep: jax.Array) -> jax.Array | None:
        """float32[K, 1, n], one scale of the keys or values in `buffer`, the `at`-th of each head; None without scales.

        They multiply scores and weights: far fewer numbers than the keys and values have.
        """
        if buffer not in self.kv.scales:
            return None
        name = self.kv.scales[buffer]
        return self._heads_first(name, blocks[name], keep, np.dtype(np.float32))[:, None, :, at]

    def _heads_first(self, name: str, block: jax.Array, keep: jax.Array, dtype: np.dtype) -> jax.Array:
        """[..., K, W] as stored -> [K, n, W] to compute with. One pass: gather, mask, convert and transpose fuse."""
        block = jnp.where(keep.reshape(*block.shape[:-2], 1, 1), block, jnp.zeros((), block.dtype))
        block = ops.as_dtype(block, self.call.dtypes[name]).astype(dtype)
        return jnp.moveaxis(block, -2, 0).reshape(self.kv.heads, -1, block.shape[-1])

    def _finish(self, softmax: _Softmax) -> jax.Array:
        """The weighted mean of the values, float32[K, r, D of V]; zeros for queries that saw nothing."""
        maximum, total, values = softmax
        if self.call.sink_logits is not None:
            sinks = self.call.sink_logits.astype(jnp.float32).reshape(self.kv.heads, 1, self.call.groups)
            sinks = jnp.pad(sinks, ((0, 0), (0, 0), (0, self.lanes - self.call.groups)))
            sinks = jnp.broadcast_to(sinks, (self.kv.heads, self.tile, self.lanes)).reshape(maximum.shape)
            highest = jnp.maximum(maximum, sinks)
            decay = jnp.exp(maximum - highest)
            total = total * decay + jnp.exp(sinks - highest)
            values = values * decay[..., None]
        if self.together:
            values = values[..., self.kv.value_at : self.kv.value_at + self.kv.value_dim]
        nothing = total[..., None] == 0
        return jnp.where(nothing, 0.0, values / jnp.where(nothing, 1.0, total[..., None]))


def _compute_dtype(*dtypes: np.dtype) -> np.dtype:
    """The dtype of the products' inputs: all given values fit exactly. Sums are float32 whatever it is."""
    wide = [np.dtype(jnp.bfloat16) if np.dtype(dtype).itemsize == 1 else dtype for dtype in dtypes]
    return np.dtype(jnp.result_type(*wide))


def _scalar(name: str, value: Any) -> jax.Array:
    """`value` as float32[]; ConfigError if it is not a number."""
    known = isinstance(value, int | float | np.generic | np.ndarray | jax.Array)
    dtype = getattr(value, "dtype", np.dtype(type(value)))
    if not known or np.ndim(value) or not any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return jnp.asarray(value, jnp.float32)
