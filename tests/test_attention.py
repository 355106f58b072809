"""attend and append_attend against an oracle in plain NumPy float64."""

from __future__ import annotations

import collections
import copy
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import FLOAT_DTYPES, bits, compilations, make_state, random_values, with_table

import jkv.attention
from jkv.attention import append_attend, attend
from jkv.config import AttentionLayer, Buffer, RecurrentLayer, kv_buffers, latent_buffers
from jkv.errors import ConfigError
from jkv.ops import append, gather, table_for
from jkv.ragged import Ragged, make_ragged


def oracle(
    q, positions, k, v, *, window=None, sinks=0, scale=None, softcap=None, sink_logits=None, mask=None, missing=()
):
    """Attention one query and one head at a time.

    Args:
      q: [B, T, H, D].
      positions: [B, T], -1: padding.
      k, v: [B, S, K, D], entry s is position s.
      mask: [B, T, T] or None.
      missing: pairs (row, position) without a page.
    """
    q, k, v = (np.asarray(a).astype(np.float64) for a in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    groups = q.shape[2] // k.shape[2]
    for b, t in np.argwhere(np.asarray(positions) >= 0):
        p, own = positions[b][t], {int(s): i for i, s in enumerate(positions[b]) if s >= 0}

        def sees(s, b=b, t=t, p=p, own=own):
            if mask is not None and s in own:
                if not mask[b][t][own[s]]:
                    return False
            elif s > p:
                return False
            return (window is None or s > p - window or s < sinks) and (b, s) not in missing

        seen = [s for s in range(k.shape[1]) if sees(s)]
        for h in range(q.shape[2]):
            scores = k[b, seen, h // groups] @ q[b, t, h] * (q.shape[3] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            all_scores = scores if sink_logits is None else np.append(scores, float(sink_logits[h]))
            if len(all_scores) == 0:
                continue
            weights = np.exp(scores - all_scores.max())
            out[b, t, h] = weights @ v[b, seen, h // groups] / np.exp(all_scores - all_scores.max()).sum()
    return out


# Most of a test's time is XLA's: compiled for these calls without optimisation (which changes no temporary).
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_append = _jit(append, static_argnames="layer")
_gather = _jit(gather, static_argnames=("layer", "length"))
_attend = _jit(attend, static_argnames=("layer", "scale", "softcap"))
_append_attend = _jit(append_attend, static_argnames=("layer", "scale", "softcap"))


@functools.partial(_jit, static_argnames=("scale", "softcap"))
def _both_ways(state, rows, positions, q, values, **options):
    """By append_attend, which reads the step's own tokens from `values`, and then from the pages."""
    out, state = append_attend(state, "a", rows, positions, q, values, **options)
    return out, attend(state, "a", rows, positions, q, **options), state


class Case:
    """One layer "a" whose rows hold tokens at 0..starts[b]-1, and a step of counts[b] tokens that follow.

    Row b's pages are those that a query at starts[b] can see, and those of the step; all else is NaN.
    """

    def __init__(
        self, starts, counts, *, heads=4, kv_heads=2, dim=8, dtype=jnp.float32, q_dtype=jnp.float32, kind="fused",
        scales=None, window=None, sinks=0, page_size=4, max_length=64, pages=96, align="left",
    ):  # fmt: skip
        rng = self.rng = np.random.default_rng(0)
        self.window, self.sinks, self.kind = window, sinks, kind
        if kind == "latent":
            kv_heads, buffers = 1, latent_buffers(dim - 3, 3, dtype)
        else:
            buffers = kv_buffers(kv_heads, dim, dtype, kind == "fused", scales)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self.state = make_state(
            {"a": AttentionLayer(buffers, window, sinks)},
            lengths, live_at=starts, max_length=max_length, page_size=page_size, pages=pages,
        )  # fmt: skip
        self.rows = np.arange(len(starts), dtype=np.int32)
        self.positions = np.full((len(starts), max(counts)), -1, np.int32)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            at = 0 if align == "left" else max(counts) - count
            self.positions[row, at : at + count] = np.arange(start, start + count)
        shape, given = (len(starts), max(lengths), kv_heads, dim), dtype if scales is None else jnp.float32
        self.k, self.v = random_values(rng, shape, given), random_values(rng, shape, given)
        if kind == "latent":
            self.v = self.k[..., : dim - 3]
        self.q = random_values(rng, (*self.positions.shape, heads, dim), q_dtype)
        everywhere = np.arange(max(lengths), dtype=np.int32)
        self.old = np.where(everywhere < np.array(starts)[:, None], everywhere, -1).astype(np.int32)
        self.state = _append(self.state, "a", self.rows, self.old, self.buffers(self.k, self.v))
        own = self.rows[:, None], np.maximum(self.positions, 0)
        self.values = self.buffers(np.asarray(self.k)[own], np.asarray(self.v)[own])

    def buffers(self, k, v):
        if self.kind == "split":
            return {"k": jnp.asarray(k), "v": jnp.asarray(v)}
        if self.kind == "latent":
            return {"latent": jnp.asarray(k)[:, :, 0]}
        kv = np.stack([np.asarray(k), np.asarray(v)], axis=3)
        return {"kv": jnp.asarray(kv.reshape(*k.shape[:2], -1, k.shape[-1]))}

    def appended(self):
        return _append(self.state, "a", self.rows, self.positions, self.values)

    def attend(self, state, **options):
        return _attend(state, "a", self.rows, self.positions, self.q, **options)

    def expected(self, **options):
        return oracle(self.q, self.positions, self.k, self.v, window=self.window, sinks=self.sinks, **options)

    def check(self, *outs, tolerance=2e-5, **options):
        expected = self.expected(**options)
        for out in outs:
            assert out.shape == expected.shape and out.dtype == self.q.dtype
            np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=tolerance, rtol=0)

    def check_both_ways(self, tolerance=2e-5, **options):
        from_values, from_pages, _ = _both_ways(self.state, self.rows, self.positions, self.q, self.values, **options)
        self.check(from_values, from_pages, tolerance=tolerance, **options)

    def check_append_attend(self, tolerance=2e-5, **options):
        """Old tokens from pages, own ones from `values`: half of what check_both_ways compiles."""
        out, _ = _append_attend(self.state, "a", self.rows, self.positions, self.q, self.values, **options)
        self.check(out, tolerance=tolerance, **options)

    def shortened(self, counts):
        """The same with only the first counts[b] tokens of row b in the step."""
        part = copy.copy(self)
        part.positions = np.where(np.arange(self.positions.shape[1]) < np.array(counts)[:, None], self.positions, -1)
        return part

    def ragged(self, pad_tokens=None, pad_sequences=None, order=None):
        return RaggedCase(self, pad_tokens, pad_sequences, order)


class RaggedCase:
    """The step of a Case as a Ragged, its sequences in `order`; garbage where there is padding."""

    def __init__(self, case, pad_tokens, pad_sequences, order):
        self.case = case
        order = np.arange(len(case.rows)) if order is None else np.array(order, np.int64)
        self.at = np.array([(row, t) for row in order for t in np.flatnonzero(case.positions[row] >= 0)], np.int64)
        self.at = self.at.reshape(-1, 2)
        counts = (case.positions[order] >= 0).sum(axis=1)
        starts = np.where(case.positions[order] >= 0, case.positions[order], 10**6).min(axis=1, initial=10**6)
        self.tokens = len(self.at) if pad_tokens is None else pad_tokens
        sequences = len(order) if pad_sequences is None else pad_sequences
        self.batch = make_ragged(case.rows[order], starts, counts, self.tokens, sequences)
        self.q = self.flat(case.q)
        self.values = {name: self.flat(array) for name, array in case.values.items()}

    def flat(self, array):
        """[B, T, ...] of the case -> [pad_tokens, ...]."""
        out = np.full((self.tokens, *array.shape[2:]), np.nan, array.dtype)
        out[: len(self.at)] = np.asarray(array)[tuple(self.at.T)]
        return jnp.asarray(out)

    def flat_mask(self, mask):
        """bool[B, T, T] of the case -> bool[pad_tokens, pad_tokens]; anything between different sequences."""
        out = self.case.rng.random((self.tokens, self.tokens)) < 0.5
        (rows, columns), n = self.at.T, len(self.at)
        own = mask[rows[:, None], columns[:, None], columns]
        out[:n, :n] = np.where(rows[:, None] == rows, own, out[:n, :n])
        return out

    def both_ways(self, **options):
        if "mask" in options:
            options["mask"] = self.flat_mask(options["mask"])
        return _both_ways(self.case.state, self.batch, self.batch.positions, self.q, self.values, **options)

    def check(self, *outs, expected=None, tolerance=2e-5, **options):
        expected = self.case.expected(**options) if expected is None else np.asarray(expected, np.float64)
        for out in outs:
            assert out.shape == (self.tokens, *expected.shape[2:]) and out.dtype == self.q.dtype
            own = np.asarray(out, np.float64)[: len(self.at)]
            np.testing.assert_allclose(own, expected[tuple(self.at.T)], atol=tolerance, rtol=0)
            assert not np.asarray(out)[len(self.at) :].any()

    def check_both_ways(self, tolerance=2e-5, **options):
        self.check(*self.both_ways(**options)[:2], tolerance=tolerance, **options)

    def check_append_attend(self, tolerance=2e-5, **options):
        state, batch = self.case.state, self.batch
        out, _ = _append_attend(state, "a", batch, batch.positions, self.q, self.values, **options)
        self.check(out, tolerance=tolerance, **options)


LAYERS = {"full": {}, "window": {"window": 6}, "window+sinks": {"window": 6, "sinks": 5}}
DECODE, CHUNK = ([20, 3, 0, 9], [1, 1, 1, 1]), ([20, 3, 0, 9], [5, 6, 3, 1])
KINDS = [*((layer, "fused") for layer in LAYERS), ("window", "split"), ("window+sinks", "latent")]
by_name = {"ids": lambda value: "+".join(value) if isinstance(value, dict) else np.dtype(value).name}


@pytest.mark.parametrize(("layer", "kind"), KINDS)
def test_decode_equals_the_oracle(layer, kind):
    Case(*DECODE, kind=kind, **LAYERS[layer]).check_both_ways()


def test_decode_of_a_single_row_equals_the_oracle():
    Case([20], [1]).check_both_ways()


@pytest.mark.parametrize(("layer", "kind"), KINDS)
def test_chunk_of_a_prompt_equals_the_oracle(layer, kind):
    Case(*CHUNK, kind=kind, **LAYERS[layer]).check_both_ways()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES[1:], **by_name)
def test_narrow_caches_lose_nothing_with_float32_queries(dtype):
    Case([20, 3], [2, 1], dtype=dtype).check_append_attend()


@pytest.mark.parametrize(
    ("dtype", "q_dtype", "tolerance"),
    [(jnp.bfloat16, jnp.bfloat16, 0.03), (jnp.float16, jnp.float16, 4e-3), (jnp.float8_e4m3fn, jnp.bfloat16, 0.03),
     (jnp.bfloat16, jnp.float16, 4e-3)],
    ids=["bfloat16", "float16", "float8 with bfloat16", "bfloat16 with float16"],
)  # fmt: skip
def test_narrow_queries_give_what_their_dtype_can_tell(dtype, q_dtype, tolerance):
    Case([20, 3], [2, 1], dtype=dtype, q_dtype=q_dtype).check_append_attend(tolerance)


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(1, 1, 1), (3, 3, 3), (8, 1, 3), (40, 2, 1)])
def test_grouped_query_heads(heads, kv_heads, tokens):
    Case([20, 3], [tokens] * 2, heads=heads, kv_heads=kv_heads).check_append_attend()


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.3}, {"sink_logits": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)}, {"softcap": 2.0, "scale": 2.0}],
    **by_name,
)
def test_scale_softcap_and_sink_logits(options):
    Case([20, 0, 9], [3, 2, 1], **LAYERS["window+sinks"]).check_append_attend(**options)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_any_page_size(page_size):
    Case([20, 3], [2, 1], page_size=page_size, **LAYERS["window+sinks"]).check_append_attend()


def test_value_heads_may_have_another_size():
    layer = AttentionLayer({"k": Buffer((2, 8), jnp.float32), "v": Buffer((2, 3), jnp.float32)})
    rng, positions = np.random.default_rng(0), np.arange(5, dtype=np.int32)[None]
    k, v, q = (random_values(rng, (1, 5, h, d), jnp.float32) for h, d in ((2, 8), (2, 3), (4, 8)))
    state = make_state({"a": layer}, [5])
    out, _ = _append_attend(state, "a", np.array([0], np.int32), positions, q, {"k": k, "v": v})
    assert out.shape == (1, 5, 4, 3)
    np.testing.assert_allclose(out, oracle(q, positions, k, v), atol=2e-5)


# ---- long rows: several blocks of keys, several tiles of queries --------------------------------------------


@pytest.mark.parametrize(
    ("layer", "align"),
    [({}, "left"), ({"window": 100, "sinks": 20}, "left"), ({"window": 9}, "right")],
    ids=["full", "window+sinks", "small window"],
)
def test_several_tiles_and_blocks(layer, align):
    long = {"heads": 2, "kv_heads": 1, "page_size": 16, "max_length": 1024, "pages": 200}
    Case([400, 0, 37], [1, 300, 520], align=align, **long, **layer).check_both_ways()


def test_a_long_decode_row_beside_short_ones():
    Case([1000, 3, 130, 0], [1] * 4, page_size=16, max_length=1024, pages=200).check_both_ways()


# ---- masks --------------------------------------------------------------------------------------------------

TREE = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], bool)


@pytest.mark.parametrize(
    ("layer", "align"), [("full", "right"), ("window", "left"), ("window+sinks", "left"), ("window+sinks", "right")]
)
def test_mask_replaces_causality_among_own_tokens(layer, align):
    """A draft tree, a bidirectional block and anything at all, one per row; the same compiled step for all."""
    case = Case([20, 3, 0], [5, 4, 3], align=align, **LAYERS[layer])
    case.check_both_ways(mask=np.stack([TREE, np.ones((5, 5), bool), case.rng.random((5, 5)) < 0.5]))
    case.check_both_ways(mask=case.rng.random((3, 5, 5)) < 0.5)
    case.check_both_ways(mask=np.zeros((3, 5, 5), bool))


def test_mask_over_several_tiles():
    case = Case([40, 0], [300, 290], heads=1, kv_heads=1, page_size=16, max_length=512, window=150)
    case.check_both_ways(mask=case.rng.random((2, 300, 300)) < 0.5)


# ---- ragged batches -----------------------------------------------------------------------------------------

MIXED = [20, 3, 0, 9, 30], [1, 5, 3, 1, 60]  # decodes, drafts, a short prompt and a chunk: tiles of every size


@pytest.mark.parametrize("layer", ["full", "window+sinks"])
def test_s59_a_ragged_step_equals_the_oracle_and_the_padded_one(layer):
    case = Case(*MIXED, max_length=96, **LAYERS[layer])
    padded = _both_ways(case.state, case.rows, case.positions, case.q, case.values)[0]
    case.check(padded)
    for order in ([0, 1, 2, 3, 4], [4, 2, 1, 0, 3], [3, 4]):  # one compiled step for them all
        ragged = case.ragged(80, 7, order)
        outs = ragged.both_ways()[:2]
        ragged.check(*outs)
        ragged.check(*outs, expected=padded, tolerance=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [("split", jnp.float32), ("latent", jnp.bfloat16)])
def test_ragged_with_other_buffers(kind, dtype):
    Case(*MIXED, kind=kind, dtype=dtype, max_length=96, **LAYERS["window"]).ragged(80, 7).check_append_attend()


def test_ragged_batches_of_the_smallest_kinds():
    case = Case([20, 3, 0], [2, 1, 1], window=6, sinks=5)
    case.ragged().check_both_ways()  # no padding
    case.ragged(4, 3, order=[1, 2]).check_both_ways()  # decodes alone
    case.ragged(4, 3, order=[2]).check_both_ways()
    case.ragged(4, 3, order=[]).check_both_ways()  # none at all: num_seqs is 0
    case.ragged(order=[1]).check_both_ways()  # one token, one sequence
    out = attend(case.state, "a", make_ragged(*np.zeros((3, 0), np.int32), 0, 0), np.zeros(0, np.int32), case.q[0, :0])
    assert out.shape == (0, 4, 8)


def test_a_ragged_without_sequences_reads_zeros_and_writes_nothing():
    """As make_ragged never makes it: no entry at all, and tokens."""
    case, none = Case(*DECODE), np.zeros(0, np.int32)
    batch = Ragged(none, np.array([4, 5], np.int32), np.zeros(1, np.int32), none, np.zeros(1, np.int32))
    q, values = case.q[:2, 0], jax.tree.map(lambda a: a[:2, 0], case.values)
    for options in ({}, {"chunk": values}):
        assert not np.asarray(attend(case.state, "a", batch, batch.positions, q, **options)).any()
    out, state = append_attend(case.state, "a", batch, batch.positions, q, values)
    assert out.shape == q.shape and not np.asarray(out).any()
    chex.assert_trees_all_equal(jax.tree.map(bits, state.pools), jax.tree.map(bits, case.state.pools))


@pytest.mark.parametrize(
    "layer", [{}, {"window": 100, "sinks": 20}, {"window": 9}], ids=["full", "window+sinks", "small window"]
)
def test_ragged_sequences_of_several_tiles_and_blocks(layer):
    """Lengths at the edges of the tile sizes: 1 | 2 .. 48 | 49 .."""
    long = {"heads": 2, "kv_heads": 1, "page_size": 16, "max_length": 1024, "pages": 200}
    counts = [1, 300, 2, 8, 48, 49, 128, 129]
    case = Case([400, 0, 500, 37, 200, 3, 0, 260], counts, **long, **layer)
    case.ragged(sum(counts) + 30, 10).check_both_ways()


@pytest.mark.parametrize(
    ("dtype", "q_dtype", "tolerance"),
    [(jnp.float8_e4m3fn, jnp.float32, 2e-5), (jnp.bfloat16, jnp.bfloat16, 0.03)],
    ids=["float8", "bfloat16 queries"],
)
def test_ragged_in_narrow_dtypes(dtype, q_dtype, tolerance):
    Case([20, 3, 0], [1, 3, 2], dtype=dtype, q_dtype=q_dtype).ragged(8, 4).check_append_attend(tolerance)


def test_ragged_with_scale_softcap_and_sink_logits():
    options = {"scale": 0.3, "softcap": 1.5, "sink_logits": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)}
    Case([20, 0, 9], [3, 2, 1], **LAYERS["window+sinks"]).ragged(8, 4).check_append_attend(**options)


def test_a_ragged_mask_replaces_causality_among_own_tokens():
    """A draft tree, a bidirectional block and anything at all, one per sequence; noise between sequences."""
    case = Case([20, 3, 0, 9], [5, 4, 3, 1], **LAYERS["window+sinks"])
    own = np.stack([TREE, np.ones((5, 5), bool), case.rng.random((5, 5)) < 0.5, np.eye(5, dtype=bool)])
    case.ragged(16, 5).check_both_ways(mask=own)
    case.ragged(16, 5, [3, 1, 0]).check_both_ways(mask=own)


def test_a_ragged_mask_over_several_tiles():
    case = Case([40, 20, 0], [150, 1, 140], heads=1, kv_heads=1, page_size=16, max_length=512, window=120)
    case.ragged(300, 4).check_both_ways(mask=case.rng.random((3, 150, 150)) < 0.5)


def test_ragged_counts_may_change_without_a_compilation():
    case = Case([20, 3, 0, 9], [7, 7, 7, 7])
    step = _jit(lambda state, batch, q, values: append_attend(state, "a", batch, batch.positions, q, values))
    with compilations() as compiled:
        for counts in ([1, 1, 0, 0], [1, 7, 1, 7], [0, 0, 0, 0], [0, 0, 7, 0]):
            part = case.shortened(counts)
            ragged = part.ragged(16, 4, order=np.flatnonzero(counts))
            q, values = jax.tree.map(np.asarray, (ragged.q, ragged.values))
            ragged.check(step(case.state, ragged.batch, q, values)[0])
    assert len(compiled) == 1


# ---- quantised K and V --------------------------------------------------------------------------------------


def stored(case):
    """The case with K and V as they are stored: what its integers stand for."""
    state, length = case.appended(), case.k.shape[1]
    values = _gather(state, "a", case.rows, length)
    wide = {name: np.asarray(array).astype(np.float64) for name, array in values.items()}
    plain = {name: array * wide[name + "_scale"][..., None] for name, array in wide.items() if name in ("kv", "k", "v")}
    exact = copy.copy(case)
    exact.k, exact.v = (plain["kv"][:, :, i::2] for i in (0, 1)) if "kv" in plain else (plain["k"], plain["v"])
    return exact


@pytest.mark.parametrize(
    ("dtype", "scales", "error", "kind"),
    [(jnp.int8, jnp.float32, 0.015, "split"), (jnp.int8, jnp.bfloat16, 0.015, "fused"),
     (jnp.float8_e4m3fn, jnp.float16, 0.06, "fused")],
    ids=["int8, float32", "int8, bfloat16", "float8, float16"],
)  # fmt: skip
def test_scaled_kv_is_read_as_stored_and_near_to_float32(dtype, scales, error, kind):
    case = Case([20, 3, 0, 9], [5, 2, 1, 1], dtype=dtype, scales=scales, kind=kind)
    from_values, from_pages, _ = _both_ways(case.state, case.rows, case.positions, case.q, case.values)
    stored(case).check(from_values, from_pages)
    case.check(from_values, tolerance=error)


def test_scaled_kv_in_ragged_windows():
    case = Case(*MIXED, max_length=96, dtype=jnp.int8, scales=jnp.float32, **LAYERS["window+sinks"])
    ragged = case.ragged(80, 7)
    ragged.check(*ragged.both_ways()[:2], expected=stored(case).expected())


def test_scaled_kv_with_narrow_queries():
    case = Case([20, 3], [3, 1], dtype=jnp.int8, scales=jnp.bfloat16, q_dtype=jnp.bfloat16)
    case.check_append_attend(tolerance=0.04)


def test_a_chunk_may_be_given_quantised():
    case = Case([20, 3], [3, 1], dtype=jnp.int8, scales=jnp.float32)
    quantised = {name: array[:, -3:] for name, array in _gather(case.appended(), "a", case.rows, 23).items()}
    case = case.shortened([3, 0])  # whose own tokens are those at 20, 21, 22
    np.testing.assert_array_equal(*(case.attend(case.state, chunk=chunk) for chunk in (quantised, case.values)))


@pytest.mark.parametrize("kind", ["fused", "split"])
def test_f31_nan_of_scales_never_leaks(kind):
    """make_state fills the scales of null and foreign pages with NaN, the integers with 127."""
    case = Case([20, 6, 9], [1, 1, 1], dtype=jnp.int8, scales=jnp.float32, kind=kind)
    expected = stored(case).expected()
    values = jax.tree.map(lambda a: a.at[1].set(jnp.nan), case.values)
    for out in _both_ways(case.state, case.rows, case.positions, case.q, values)[:2]:
        np.testing.assert_allclose(np.asarray(out)[[0, 2]], expected[[0, 2]], atol=2e-5)
        assert np.isnan(out[1]).all()  # and a NaN of one's own is not hidden


# ---- layers without ordinary arrays of their own ------------------------------------------------------------


def test_a_layer_that_shares_anothers_kv_reads_it():
    layers = {"a": AttentionLayer(kv_buffers(2, 8, jnp.float32), window=6), "b": AttentionLayer(shares="a")}
    case = Case([20, 3], [2, 1], window=6)
    state = make_state(layers, [22, 4], live_at=[20, 3])
    state = _append(state, "a", case.rows, case.old, case.buffers(case.k, case.v))
    case.check(_attend(state, "b", case.rows, case.positions, case.q, chunk=case.values))
    state = _append(state, "a", case.rows, case.positions, case.values)
    case.check(_attend(state, "b", case.rows, case.positions, case.q))
    with pytest.raises(ConfigError, match="'b' reads the KV of 'a'"):
        append_attend(state, "b", case.rows, case.positions, case.q, case.values)


def test_a_page_size_of_a_buffers_own_changes_nothing():
    case = Case([20, 3], [2, 1])
    layer = AttentionLayer({"kv": Buffer((4, 8), jnp.float32, page_size=2)})
    case.state = make_state({"a": layer}, [22, 4], live_at=[20, 3])
    case.state = _append(case.state, "a", case.rows, case.old, case.buffers(case.k, case.v))
    case.check_both_ways()


def test_a_latents_values_are_its_first_elements():
    case = Case([20, 3], [2, 1], kind="latent", heads=20, dtype=jnp.float8_e4m3fn)
    assert case.expected().shape == (2, 2, 20, 5)
    case.check_append_attend(scale=0.2)


# ---- what is not there --------------------------------------------------------------------------------------


def test_padding_gives_zeros_and_disturbs_nobody():
    case = Case([20, 3, 9], [2, 2, 2])
    state = case.appended()
    expected = np.asarray(case.attend(state))
    case.rows = np.array([0, -1, 2], np.int32)
    case.positions[2] = [9, -1]
    for options in ({}, {"chunk": case.values}):
        out = np.asarray(case.attend(state, **options))
        np.testing.assert_allclose(out[0], expected[0], atol=1e-6)
        np.testing.assert_allclose(out[2, 0], expected[2, 0], atol=1e-6)
        assert not out[1].any() and not out[2, 1].any()
    case.rows = np.array([-1, -1, 99], np.int32)
    assert not np.asarray(case.attend(state)).any()
    assert not np.asarray(case.attend(state, chunk=case.values)).any()


def test_padding_queries_of_nan_give_zeros():
    case = Case([20, 3], [2, 1])
    case.q = case.q.at[1, 1].set(jnp.nan)
    case.check(case.attend(case.appended()))


def test_keys_without_a_page_are_not_seen():
    case = Case([20, 3], [2, 1])
    state = case.appended()
    table = np.asarray(state.page_tables["full"]).copy()
    table[0, 1] = table[1, 0] = 0
    missing = {(0, s) for s in range(4, 8)} | {(1, s) for s in range(4)}
    case.check(case.attend(with_table(state, "full", table)), missing=missing)  # row 1 sees nothing: zeros
    logits = np.zeros(4, np.float32)
    case.check(case.attend(with_table(state, "full", table), sink_logits=logits), missing=missing, sink_logits=logits)


def test_append_attend_without_pages_for_own_tokens():
    case = Case([8, 4], [3, 3])
    table = np.asarray(case.state.page_tables["full"]).copy()
    table[0, 2:] = table[1, 1:] = 0
    state = with_table(case.state, "full", table)
    out, _, after = _both_ways(state, case.rows, case.positions, case.q, case.values)
    case.check(out)
    chex.assert_trees_all_equal(*(jax.tree.map(np.nan_to_num, jax.device_get(s.pools)) for s in (state, after)))


@pytest.mark.parametrize(("layer", "ragged"), [("window", False), ("window+sinks", True)])
def test_tokens_that_leave_the_window_within_a_chunk_need_no_pages(layer, ragged):
    """Window scratch: pages for the sinks, for the window before the chunk and for the one after it, none between."""
    case = Case([20, 0, 9], [30, 40, 1], **LAYERS[layer])
    group = case.state.layout.groups[0]
    table = np.asarray(case.state.page_tables[group.name]).copy()
    for row, (start, count) in enumerate(((20, 30), (0, 40), (9, 1))):
        table[row, max(-(-start // 4), group.sink_pages(4)) : max(0, start + count - 5) // 4] = 0
    assert (table == 0).sum() > (np.asarray(case.state.page_tables[group.name]) == 0).sum() + 10
    case.state = with_table(case.state, group.name, table)
    (case.ragged(80, 4) if ragged else case).check_append_attend()


@pytest.mark.parametrize(
    ("layer", "dtype"), [("full", jnp.bfloat16), ("full", jnp.float8_e4m3fn), ("window+sinks", jnp.float32)],
    ids=lambda v: v if isinstance(v, str) else np.dtype(v).name,
)  # fmt: skip
def test_f31_nan_anywhere_else_never_leaks(layer, dtype):
    """Null page, foreign pages, rest of a recycled page and another row's data: make_state fills all with NaN."""
    case = Case([20, 6, 9], [1, 1, 1], dtype=dtype, **LAYERS[layer])
    state = case.appended()
    expected = np.asarray(case.attend(state))
    assert np.isfinite(expected).all()
    other = np.asarray(table_for(state, "a", np.array([1], np.int32)))[0]
    own = np.asarray(table_for(state, "a", np.array([0, 2], np.int32)))
    assert not np.intersect1d(other[other > 0], own).size
    values = jax.tree.map(lambda a: a.at[1].set(jnp.nan), case.values)
    only_1 = np.where(case.rows == 1, case.rows, -1)
    state = _append(state, "a", only_1, case.positions, values)  # row 1 goes astray
    for options in ({}, {"chunk": values}):
        out = np.asarray(case.attend(state, **options))
        np.testing.assert_allclose(out[[0, 2]], expected[[0, 2]], atol=1e-6)
        assert np.isnan(out[1]).all()  # and a NaN of one's own is not hidden


def test_f31_nan_of_another_ragged_sequence_never_leaks():
    """Also where a tile reaches beyond its sequence, into queries and own keys that are NaN."""
    case = Case([20, 6, 9, 0], [3, 2, 60, 1], max_length=96)
    case.q = case.q.at[1].set(jnp.nan)
    case.values = jax.tree.map(lambda a: a.at[1].set(jnp.nan), case.values)
    expected = case.expected()
    ragged = case.ragged(80, 6)
    for out in ragged.both_ways()[:2]:
        out, others = np.asarray(out)[: len(ragged.at)], ragged.at[:, 0] != 1
        np.testing.assert_allclose(out[others], expected[tuple(ragged.at[others].T)], atol=2e-5)
        assert np.isnan(out[~others]).all()


# ---- inside a decode loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "how"),
    [("window", "donated"), ("window+sinks", "kept"), ("full", "scan"), ("window+sinks", "scan")],
)
def test_a_decode_loop_equals_the_oracle_and_compiles_once(layer, how):
    case = Case([0, 7], [12, 12], **LAYERS[layer])
    state, positions = case.state, jnp.asarray(case.positions)
    xs = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0)[:, :, None], (positions, case.q, case.values))  # one step each
    chex.clear_trace_counter()

    @chex.assert_max_traces(1)
    def step(state, x):
        positions, q, values = x
        out, state = append_attend(state, "a", case.rows, positions, q, values)
        return state, out[:, 0]

    if how == "scan":
        state, out = _jit(lambda state, xs: jax.lax.scan(step, state, xs), donate_argnums=0)(state, xs)
    else:
        run = _jit(step, donate_argnums=0 if how == "donated" else ())
        inputs = [jax.tree.map(lambda a, i=i: np.asarray(a[i]), xs) for i in range(12)]
        outs = []
        with compilations() as compiled:
            for x in inputs:
                state, out = run(state, x)
                outs.append(out)
            jax.block_until_ready(outs)
            assert len(compiled) == 1
        out = jnp.stack(outs)
    np.testing.assert_allclose(jnp.moveaxis(out, 0, 1), case.expected(), atol=2e-5)


def test_eager_equals_jit():
    case = Case([20, 3], [2, 1])
    state = case.appended()
    out = attend(state, "a", case.rows, case.positions, case.q)
    np.testing.assert_allclose(out, case.attend(state), atol=1e-6)
    assert attend(state, "a", case.rows, case.positions[:, :0], case.q[:, :0]).shape == (2, 0, 4, 8)


# ---- cost ---------------------------------------------------------------------------------------------------


def assert_in_place(step, state, *args, times=1):
    """Donated, `step` needs little memory beside the smallest array of the pool, `times` of it, and aliases all."""
    memory = _jit(step, donate_argnums=0).lower(state, *args).compile().memory_analysis()
    sizes = [array.nbytes for array in jax.tree.leaves(state.pools)]
    assert memory.temp_size_in_bytes < times * min(sizes)
    assert memory.alias_size_in_bytes >= sum(sizes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8], **by_name)
def test_no_temporary_of_a_ragged_step_is_of_the_pools_size(dtype):
    buffers = kv_buffers(2, 64, dtype, scales=jnp.bfloat16 if dtype == jnp.int8 else None)
    state = make_state({"a": AttentionLayer(buffers)}, [64] * 4, page_size=16, pages=8192)
    batch = make_ragged(np.arange(3, dtype=np.int32), np.array([63, 0, 7]), np.array([1, 60, 3]), 64, 4)
    given = jnp.float32 if dtype == jnp.int8 else dtype
    q, values = jnp.zeros((64, 4, 64), given), {"kv": jnp.zeros((64, 4, 64), given)}
    assert_in_place(
        lambda state, batch, q, values: append_attend(state, "a", batch, batch.positions, q, values),
        state, batch, q, values,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "batch"),
    [*((dtype, 4) for dtype in FLOAT_DTYPES), (jnp.float32, 1), (jnp.bfloat16, 1)],
    ids=lambda v: str(v) if isinstance(v, int) else np.dtype(v).name,
)
def test_no_temporary_is_of_the_pools_size(dtype, batch):
    state = make_state({"a": AttentionLayer(kv_buffers(2, 64, dtype))}, [64] * batch, page_size=16, pages=4096)
    rows, positions = jnp.arange(batch, dtype=jnp.int32), jnp.full((batch, 1), 63, jnp.int32)
    q, values = jnp.zeros((batch, 1, 4, 64), dtype), {"kv": jnp.zeros((batch, 1, 4, 64), dtype)}

    def step(state, q, values):
        return append_attend(state, "a", rows, positions, q, values)

    def scanned(state, q, values):
        return jax.lax.scan(lambda state, _: step(state, q, values)[::-1], state, length=3)

    assert_in_place(step if batch == 1 else scanned, state, q, values, times=1 / 4)


@pytest.mark.parametrize("scales", [None, jnp.float32], ids=["float32", "int8"])
@pytest.mark.parametrize("kind", ["fused", "split", "latent"])
def test_no_temporary_is_of_the_size_of_a_pool_with_one_head(kind, scales):
    """A reshape of the pool that adds or drops a dimension of 1 is a copy of it for JAX 0.10, also of the scales."""
    dtype = jnp.float32 if scales is None else jnp.int8
    if kind == "latent":
        buffers = {"latent": Buffer((64,), dtype, value_dim=48)}
        buffers |= {} if scales is None else {"latent_scale": Buffer((), scales)}
    else:
        buffers = kv_buffers(1, 64, dtype, kind == "fused", scales)
    state = make_state({"a": AttentionLayer(buffers)}, [64] * 2, page_size=16, pages=4096)
    rows, positions = jnp.arange(2, dtype=jnp.int32), jnp.full((2, 1), 63, jnp.int32)
    values = {name: jnp.zeros((2, 1, *b.shape)) for name, b in buffers.items() if not name.endswith("_scale")}
    assert_in_place(
        lambda state, q, values: append_attend(state, "a", rows, positions, q, values),
        state, jnp.zeros((2, 1, 4, 64)), values, times=1 / 4,
    )  # fmt: skip


def count_blocks(state, rows, positions):
    """How many blocks of keys one call folds, by tile size; counted on the device by a callback."""
    folds = []
    original = jkv.attention._TileLoop._fold

    def counted(self, *args):
        jax.debug.callback(lambda tile=self.tile: folds.append(tile))
        return original(self, *args)

    q = jnp.zeros((*positions.shape, 2, 4))
    jkv.attention._TileLoop._fold = counted
    try:
        jax.block_until_ready(_jit(lambda state, *args: attend(state, "a", *args))(state, rows, positions, q))
        jax.effects_barrier()
    finally:
        jkv.attention._TileLoop._fold = original
    return collections.Counter(folds)


def test_work_follows_what_the_batch_can_see():
    """One row of 4,096 among fifteen of 64: its own blocks and one for each other row, not 16 times the longest."""
    layer = {"a": AttentionLayer(kv_buffers(2, 4, jnp.float32))}
    lengths = [4096] + [64] * 15
    state = make_state(layer, lengths, max_length=8192, page_size=64, pages=128)
    rows, positions = np.arange(16, dtype=np.int32), np.array(lengths, np.int32)[:, None] - 1
    assert count_blocks(state, rows, positions) == {1: 4096 // 256 + 15}
    assert count_blocks(state, rows, np.full((16, 1), -1, np.int32)) == {}
    window = {"a": AttentionLayer(kv_buffers(2, 4, jnp.float32), window=128, sinks=4)}
    state = make_state(window, [4096], max_length=8192, page_size=64)
    assert count_blocks(state, rows[:1], np.array([[4095]], np.int32)) == {1: 1}


@pytest.mark.parametrize(("max_length", "pad_tokens", "pad_sequences"), [(1024, 272, 16), (65_536, 600, 40)])
def test_a_decode_does_not_pay_for_a_prompts_tiles(max_length, pad_tokens, pad_sequences):
    """Nor any sequence for padding and max_length: 14 decodes, five drafts and a chunk of 250 in one step."""
    layer = {"a": AttentionLayer(kv_buffers(2, 4, jnp.float32))}
    starts, counts = np.array([600] * 14 + [5, 512]), np.array([1] * 14 + [5, 250])
    state = make_state(layer, starts + counts, max_length=max_length, page_size=64, pages=200)
    batch = make_ragged(np.arange(16, dtype=np.int32), starts, counts, pad_tokens, pad_sequences)
    # keys in blocks of 256: 3 for each decode, 1 for the drafts; 512 + 128 and 512 + 250 take 3 each
    assert count_blocks(state, batch, batch.positions) == {1: 14 * 3, 8: 1, 128: 2 * 3}


# ---- errors -------------------------------------------------------------------------------------------------


@functools.cache
def bad_calls():
    state = make_state(
        {
            "a": AttentionLayer(kv_buffers(2, 8, jnp.float32)),
            "int8": AttentionLayer(kv_buffers(2, 8, jnp.int8)),
            "latent": AttentionLayer({"latent": Buffer((24,), jnp.float32)}),
            "scales": AttentionLayer({**kv_buffers(2, 8, jnp.int8), "kv_scale": Buffer((2,), jnp.float32)}),
            "ssm": RecurrentLayer({"h": Buffer((3,), jnp.float32)}),
        },
        [8, 8],
    )
    rows, positions, q = np.array([0], np.int32), np.array([[3, 4]], np.int32), jnp.zeros((1, 2, 4, 8))

    def call(layer="a", positions=positions, q=q, **options):
        return lambda: attend(state, layer, rows, positions, q, **options)

    batch = make_ragged(np.array([1, 0]), np.array([4, 5]), np.array([2, 1]), 3, 2)

    def ragged(positions=batch.positions, q=None, **options):
        return lambda: attend(state, "a", batch, positions, jnp.zeros((3, 4, 8)) if q is None else q, **options)

    return {
        "unknown layer": (call("b"), "unknown layer 'b'"),
        "recurrent": (call("ssm"), "attend: layer 'ssm' is recurrent"),
        "int8": (call("int8"), r"'int8' has kv: int8\[4, 8\].*pool\(\.\.\.\) and table_for\(\.\.\.\)"),
        "latent": (call("latent"), r"'latent' has latent: float32\[24\].*pool\(\.\.\.\) and table_for"),
        "scales of another shape": (call("scales"), r"'scales' has kv: int8.* kv_scale: float32\[2\].*table_for"),
        "q of a Ragged": (ragged(q=q), r"q must be \[3, H, 8\] for layer 'a', got \[1, 2, 4, 8\]"),
        "positions of a Ragged": (ragged(positions=positions), r"positions must be int32\[T\]"),
        "mask of a Ragged": (ragged(mask=jnp.ones((2, 3, 3), bool)), r"mask must be bool\[3, 3\], got bool\[2, 3, 3\]"),
        "chunk of a Ragged": (ragged(chunk={"kv": q}), r"chunk\['kv'\] must be float32\[3, 4, 8\]"),
        "heads": (call(q=jnp.zeros((1, 2, 3, 8))), "q has 3 heads, not a multiple of the 2 KV heads of layer 'a'"),
        "head dim": (call(q=jnp.zeros((1, 2, 4, 16))), r"q must be \[1, 2, H, 8\] for layer 'a', got \[1, 2, 4, 16\]"),
        "rank of q": (call(q=jnp.zeros((2, 4, 8))), r"q must be \[1, 2, H, 8\]"),
        "tokens of q": (call(q=jnp.zeros((1, 1, 4, 8))), r"q must be \[1, 2, H, 8\] .*got \[1, 1, 4, 8\]"),
        "dtype of q": (call(q=jnp.zeros((1, 2, 4, 8), jnp.int32)), "q must have a float dtype, got int32"),
        "positions": (call(positions=np.zeros(2, np.int32)), r"positions must be int32\[B, T\]"),
        "mask shape": (call(mask=jnp.ones((2, 2), bool)), r"mask must be bool\[1, 2, 2\], got bool\[2, 2\]"),
        "mask dtype": (call(mask=jnp.ones((1, 2, 2))), r"mask must be bool\[1, 2, 2\], got float32"),
        "sink logits": (call(sink_logits=jnp.zeros(2)), r"sink_logits must be float\[4\], got float32\[2\]"),
        "chunk": (call(chunk={"kv": jnp.zeros((1, 2, 2, 8))}), r"chunk\['kv'\] must be float32\[1, 2, 4, 8\]"),
        "scale": (call(scale=object()), "scale must be a number, got <object"),
        "scale, a string": (call(scale="0.3"), "scale must be a number, got '0.3'"),
        "scale, an array": (call(scale=np.ones(1)), r"scale must be a number, got array\(\[1.\]\)"),
        "softcap, a bool": (call(softcap=True), "softcap must be a number, got True"),
        **{
            f"softcap {value!r}": (call(softcap=value), f"softcap must be finite and larger than 0, .*got {value}")
            for value in (0, -1.0, float("nan"), float("inf"), 1e-60, np.float32(0), np.array(-2))
        },
        "softcap, an array of JAX": (call(softcap=jnp.float32(0)), "larger than 0, or None for none; got 0.0"),
        "implementation": (call(implementation="fast"), "implementation must be None or \"reference\", got 'fast'"),
        "values": (
            lambda: append_attend(state, "a", rows, positions, q, {"kv": jnp.zeros((1, 2, 4, 8), jnp.bfloat16)}),
            r"values\['kv'\] must be float32\[1, 2, 4, 8\], got bfloat16",
        ),
    }


@pytest.mark.parametrize("case", bad_calls().keys())
def test_wrong_arguments_raise_config_errors_that_name_them(case):
    call, message = bad_calls()[case]
    with pytest.raises(ConfigError, match=message):
        call()
