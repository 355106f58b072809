"""What the device half costs: `python -m tests.benchmarks.bench_device [PART ...] [--json FILE]`.

    pool      each op at 16,384 pages against 256, per dtype, and XLA's temporaries
    decode    a paged decode step (`append_attend`) against `jax.nn.dot_product_attention` on contiguous caches that are
              exactly as long as the sequences, batch 16
    ragged    a decode step of one row of 4,096 tokens among fifteen of 64 against one of sixteen of 4,096
    length    a decode step of 256 tokens with max_length 32,768 and 131,072 against one with 1,024
    mixed     one Ragged step of 15 decodes and a chunk of 256 tokens against the same as two padded calls
    quantised decode steps with int8 and float8 KV and scales: error against float32, time against bfloat16

What is compared is first compared in what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.apply import apply
from jkv.attention import append_attend, attend
from jkv.config import AttentionLayer, Buffer, CacheConfig, DeviceTier, RecurrentLayer, kv_buffers
from jkv.layout import make_layout
from jkv.ops import append, read_state, write_state
from jkv.plan import UNUSED, Plan
from jkv.ragged import make_ragged
from jkv.state import CacheState, init_state
from tests.benchmarks.report import Report, main
from tests.benchmarks.timing import medians

ROUNDS = 15
BATCH = 16
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.int32)
FEW_PAGES, MANY_PAGES = 256, 16_384
PAGE_SIZE = 16


class Stepper:
    """A donated, jitted step and the state that goes through it."""

    def __init__(self, state: CacheState, step: Callable[..., tuple[Any, CacheState]], *args: Any):
        self.state, self.args = state, args
        self.step = jax.jit(step, donate_argnums=0).lower(state, *args).compile()

    def __call__(self) -> Any:
        out, self.state = self.step(self.state, *self.args)
        return out, self.state

    @property
    def temporary_bytes(self) -> int:
        return self.step.memory_analysis().temp_size_in_bytes


def tolerance(dtype: Any) -> float:
    """By which two ways to compute the same attention of values around 1 may differ."""
    return 1e-4 if dtype == jnp.float32 else 0.02


def random_values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values * (50 if jnp.issubdtype(dtype, jnp.integer) else 1)).astype(dtype)


def paged_state(layers: Mapping[str, Any], lengths: list[int], max_length: int, pages: int) -> CacheState:
    """A state in which row i has pages for lengths[i] tokens, scattered over the pool; one state slot per row."""
    config = CacheConfig(layers, len(lengths), max_length, PAGE_SIZE, DeviceTier(pages=pages))
    layout = make_layout(config)
    order = np.random.default_rng(0).permutation(pages) + 1
    table = np.zeros((len(lengths), layout.max_pages), np.int32)
    at = 0
    for row, length in enumerate(lengths):
        count = -(-length // PAGE_SIZE)
        table[row, :count] = order[at : at + count]
        at += count
    tables = {group.name: table.copy() for group in layout.attention_groups}
    slots = order[: len(lengths)].astype(np.int32) if layout.recurrent_pool else None
    return apply(init_state(layout), Plan((), (), tables, slots, None, (), ()))


def bench_pool(report: Report) -> None:
    """A step's cost does not depend on the pool's size."""
    batch, heads, kv_heads, dim = 4, 4, 2, 64
    rows = jnp.arange(batch, dtype=jnp.int32)
    positions = jnp.full((batch, 1), 255, jnp.int32)
    for dtype in DTYPES:
        is_float = jnp.issubdtype(dtype, jnp.floating)
        layers = {
            "attn": AttentionLayer(kv_buffers(kv_heads, dim, dtype)),
            "ssm": RecurrentLayer({"h": Buffer((PAGE_SIZE, 2 * kv_heads, dim), dtype)}),
        }
        values = {"kv": random_values((batch, 1, 2 * kv_heads, dim), dtype)}
        new_state = {"h": random_values((batch, PAGE_SIZE, 2 * kv_heads, dim), dtype)}
        q = random_values((batch, 1, heads, dim), jnp.float32)
        steps = {
            "append": (lambda s, v: (None, append(s, "attn", rows, positions, v)), values),
            "attend": (lambda s, q: (attend(s, "attn", rows, positions, q), s), q),
            "append_attend": (lambda s, q, v: append_attend(s, "attn", rows, positions, q, v), q, values),
            "read_state": (lambda s: (read_state(s, "ssm", rows), s),),
            "write_state": (lambda s, v: (None, write_state(s, "ssm", rows, v)), new_state),
        }
        for op, (step, *args) in steps.items():
            if "attend" in op and not is_float:
                continue
            run = {
                pages: Stepper(paged_state(layers, [256] * batch, 256, pages), step, *args)
                for pages in (FEW_PAGES, MANY_PAGES)
            }
            pool = sum(a.nbytes for a in jax.tree.leaves(run[MANY_PAGES].state.pools))
            memory = f"{run[MANY_PAGES].temporary_bytes / 1e6:.2f} of {pool / 1e6:.0f} MB"
            _report_pool(report, dtype, op, run, temporaries=memory)
        appliers = {pages: Applier(paged_state(layers, [256] * batch, 256, pages)) for pages in (FEW_PAGES, MANY_PAGES)}
        _report_pool(report, dtype, "apply (16 copies)", appliers)


def _report_pool(report: Report, dtype: Any, op: str, runs: dict[int, Callable[[], Any]], **details: str) -> None:
    ms = medians({str(pages): run for pages, run in runs.items()}, ROUNDS, calls=50)
    few, many = ms[str(FEW_PAGES)], ms[str(MANY_PAGES)]
    report.add(f"{op}, {np.dtype(dtype).name}", many / few, at_most=1.5, ms=many, **details)


class Applier:
    """`apply` of 16 page copies, again and again."""

    def __init__(self, state: CacheState):
        copies = np.full((len(state.layout.pools), 2, 64), UNUSED, np.int32)
        copies[:, 0, :16], copies[:, 1, :16] = np.arange(1, 17), np.arange(101, 117)
        copies[:, 0, 16:] = 0
        counts = np.full(len(state.layout.pools), 16, np.int32)
        self.state, self.plan = state, Plan((), (), None, None, None, (copies,), (counts,))

    def __call__(self) -> CacheState:
        self.state = apply(self.state, self.plan)
        return self.state


def _pool_line(dtype: Any, op: str, ms: dict[str, float], many: Stepper | None) -> tuple[str, ...]:
    few_ms, many_ms = ms[str(FEW_PAGES)], ms[str(MANY_PAGES)]
    memory = "-"
    if many is not None:
        pool = sum(a.nbytes for a in jax.tree.leaves(many.state.pools))
        memory = f"{many.temporary_bytes / 1e6:.2f} of {pool / 1e6:.0f}"
    return np.dtype(dtype).name, op, f"{few_ms:.3f}", f"{many_ms:.3f}", f"{many_ms / few_ms:.2f}", memory


def bench_decode(report: Report) -> None:
    """A paged decode step against one on contiguous caches, batch 16."""
    limits = {64: 1.9, 256: 1.25, 1024: 1.1, 4096: 1.1}
    for tokens, at_most in limits.items():
        layers = min(4, 4096 // tokens)
        for heads, kv_heads, dim in ((16, 8, 64), (9, 3, 64)):
            for queries in (1, 8):
                for dtype in (jnp.float32, jnp.bfloat16):
                    runs = decode_runs(tokens, queries, layers, heads, kv_heads, dim, dtype)
                    ms = medians(runs, ROUNDS if tokens < 1024 else 9, calls=max(1, 512 // tokens))
                    report.add(
                        f"{tokens:,} tokens, {queries} queries, {heads}/{kv_heads} x {dim}, {np.dtype(dtype).name}",
                        ms["paged"] / ms["contiguous"],
                        at_most=at_most,
                        ms=ms["paged"],
                        layers=layers,
                    )


def decode_runs(
    tokens: int, queries: int, layers: int, heads: int, kv_heads: int, dim: int, dtype: Any
) -> dict[str, Stepper]:
    """A step of all layers in one jit, whose last query is at the last of `tokens`; both ways, on the same values."""
    names = [f"layer{i}" for i in range(layers)]
    q = random_values((layers, BATCH, queries, heads, dim), dtype, seed=1)
    new = random_values((layers, BATCH, queries, 2 * kv_heads, dim), dtype, seed=2)
    rows = jnp.arange(BATCH, dtype=jnp.int32)
    positions = jnp.tile(jnp.arange(tokens - queries, tokens, dtype=jnp.int32), (BATCH, 1))

    def contiguous(caches: Any, positions: jax.Array, q: jax.Array, new: jax.Array) -> Any:
        outs, after = [], {}
        seen = jnp.arange(tokens) <= positions[:, None, :, None]
        for i, name in enumerate(names):
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(cache, new[i, :, :, j::2], positions[0, 0], axis=1)
                for j, cache in enumerate(caches[name])
            )
            outs.append(jax.nn.dot_product_attention(q[i], k, v, mask=seen))
            after[name] = k, v
        return outs, after

    def paged(state: CacheState, positions: jax.Array, q: jax.Array, new: jax.Array) -> Any:
        outs = []
        for i, name in enumerate(names):
            out, state = append_attend(state, name, rows, positions, q[i], {"kv": new[i]})
            outs.append(out)
        return outs, state

    kv = AttentionLayer(kv_buffers(kv_heads, dim, dtype))
    state = paged_state(dict.fromkeys(names, kv), [tokens] * BATCH, tokens, BATCH * tokens // PAGE_SIZE + 8)
    contents = {n: random_values((BATCH, tokens, 2 * kv_heads, dim), dtype, seed=i) for i, n in enumerate(names)}
    state = filled(state, contents)
    caches = {name: (both[:, :, 0::2], both[:, :, 1::2]) for name, both in contents.items()}
    runs = {
        "contiguous": Stepper(caches, contiguous, positions, q, new),
        "paged": Stepper(state, paged, positions, q, new),
    }
    expected, got = (np.asarray(run()[0], np.float32) for run in runs.values())
    np.testing.assert_allclose(got, expected, atol=tolerance(dtype))
    return runs


def decode_step(kv_heads: int, dim: int, dtype: Any, lengths: list[int], max_length: int, tokens: int) -> Stepper:
    """A step of one layer, with one query at the end of each row; the rows' first `tokens` tokens hold the same."""
    layers = {"attn": AttentionLayer(kv_buffers(kv_heads, dim, dtype))}
    state = paged_state(layers, lengths, max_length, sum(lengths) // PAGE_SIZE + 64)
    state = filled(state, {"attn": random_values((len(lengths), tokens, 2 * kv_heads, dim), dtype)})
    q = random_values((len(lengths), 1, 2 * kv_heads, dim), dtype, seed=1)
    new = {"kv": random_values((len(lengths), 1, 2 * kv_heads, dim), dtype, seed=2)}
    rows, positions = jnp.arange(len(lengths), dtype=jnp.int32), jnp.asarray([[n - 1] for n in lengths], jnp.int32)

    def step(state: CacheState, positions: jax.Array, q: jax.Array, new: dict[str, jax.Array]) -> Any:
        return append_attend(state, "attn", rows, positions, q, new)

    return Stepper(state, step, positions, q, new)


def bench_ragged(report: Report) -> None:
    """The cost follows what the batch can see, not rows x longest."""
    lengths = {"16 x 4,096": [4096] * 16, "4,096 + 15 x 64": [4096] + [64] * 15, "16 x 64": [64] * 16}
    for dtype in (jnp.float32, jnp.bfloat16):
        runs = {name: decode_step(8, 64, dtype, each, 4096, 4096) for name, each in lengths.items()}
        long, one_long, short = (np.asarray(run()[0], np.float32) for run in runs.values())
        np.testing.assert_allclose(one_long[0], long[0], atol=tolerance(dtype))
        np.testing.assert_allclose(one_long[1:], short[1:], atol=tolerance(dtype))
        ms = medians(runs, ROUNDS)
        for name, at_most in (("4,096 + 15 x 64", 0.25), ("16 x 64", None)):
            ratio = ms[name] / ms["16 x 4,096"]
            report.add(f"{name} to 16 x 4,096, {np.dtype(dtype).name}", ratio, at_most=at_most, ms=ms[name])


def bench_length(report: Report) -> None:
    """The cost does not follow max_length."""
    for dtype in (jnp.float32, jnp.bfloat16):
        runs = {f"{n:,}": decode_step(8, 64, dtype, [256] * BATCH, n, 256) for n in (1024, 32_768, 131_072)}
        expected, *others = (np.asarray(run()[0], np.float32) for run in runs.values())
        for other in others:
            np.testing.assert_allclose(other, expected, atol=tolerance(dtype))
        ms = medians(runs, 4 * ROUNDS, calls=4)
        for name, at_most in (("32,768", 1.05), ("131,072", None)):
            ratio = ms[name] / ms["1,024"]
            report.add(f"max_length {name} to 1,024, {np.dtype(dtype).name}", ratio, at_most=at_most, ms=ms[name])


def filled(state: CacheState, contents: Mapping[str, jax.Array]) -> CacheState:
    """`state` with contents[layer] [rows, tokens, *shape] in all rows, where they have pages."""
    rows = jnp.arange(state.layout.max_sequences, dtype=jnp.int32)
    fill = jax.jit(append, static_argnames="layer", donate_argnums=0)
    for layer, values in contents.items():
        positions = jnp.tile(jnp.arange(values.shape[1], dtype=jnp.int32), (len(rows), 1))
        state = fill(state, layer, rows, positions, {"kv": values})
    return state


class Calls:
    """Several donated, jitted steps, one after the other on one state."""

    def __init__(self, state: CacheState, *calls: tuple[Callable[..., tuple[Any, CacheState]], Any]):
        self.state = state
        self.calls = [(jax.jit(step, donate_argnums=0).lower(state, *args).compile(), args) for step, *args in calls]

    def __call__(self) -> Any:
        outs = []
        for call, args in self.calls:
            out, self.state = call(self.state, *args)
            outs.append(out)
        return outs


def bench_mixed(report: Report) -> None:
    """A ragged step costs what its decodes and its prompt chunk cost."""
    decodes, length, chunk, chunk_start, layers = 15, 1024, 256, 512, 4
    for heads, kv_heads, dim, dtype in ((16, 8, 64, jnp.float32), (16, 2, 64, jnp.float32), (32, 8, 128, jnp.bfloat16)):
        names = [f"layer{i}" for i in range(layers)]
        starts, counts = np.array([length - 1] * decodes + [chunk_start]), np.array([1] * decodes + [chunk])
        batch = make_ragged(np.arange(decodes + 1, dtype=np.int32), starts, counts, int(counts.sum()) + 1, decodes + 1)
        ragged = jax.tree.map(jnp.asarray, batch)
        tokens = len(ragged.positions)
        q = random_values((layers, tokens, heads, dim), dtype, seed=1)
        new = random_values((layers, tokens, 2 * kv_heads, dim), dtype, seed=2)

        def step(state: CacheState, rows: Any, positions: jax.Array, q: jax.Array, new: jax.Array, names=names) -> Any:
            outs = []
            for i, name in enumerate(names):
                out, state = append_attend(state, name, rows, positions, q[i], {"kv": new[i]})
                outs.append(out.reshape(-1, *out.shape[-2:]))
            return jnp.stack(outs), state

        def state(names=names, kv_heads=kv_heads, dim=dim, dtype=dtype) -> CacheState:
            kv = AttentionLayer(kv_buffers(kv_heads, dim, dtype))
            empty = paged_state(dict.fromkeys(names, kv), [length] * (decodes + 1), length, 17 * length // PAGE_SIZE)
            shape = (decodes + 1, length, 2 * kv_heads, dim)
            return filled(empty, {name: random_values(shape, dtype, seed=i) for i, name in enumerate(names)})

        def padded(first: int, rows: int, count: int, batch=ragged, q=q, new=new) -> tuple[Any, ...]:
            def rows_of(array: jax.Array, axis: int) -> jax.Array:
                part = jax.lax.slice_in_dim(array, first, first + rows * count, axis=axis)
                return part.reshape(*array.shape[:axis], rows, count, *array.shape[axis + 1 :])

            return batch.rows[first : first + rows], rows_of(batch.positions, 0), rows_of(q, 1), rows_of(new, 1)

        decode, prefill = padded(0, decodes, 1), padded(decodes, 1, chunk)
        runs = {
            "decodes": Calls(state(), (step, *decode)),
            "chunk": Calls(state(), (step, *prefill)),
            "two calls": Calls(state(), (step, *decode), (step, *prefill)),
            "ragged": Calls(state(), (step, ragged, ragged.positions, q, new)),
        }
        together, apart = np.asarray(runs["ragged"]()[0], np.float32), runs["two calls"]()
        apart = np.concatenate([np.asarray(out, np.float32) for out in apart], axis=1)
        np.testing.assert_allclose(together[:, : apart.shape[1]], apart, atol=0.02)
        ms = medians(runs, ROUNDS)
        report.add(
            f"{decodes} decodes at {length:,} tokens and {chunk} at {chunk_start}, {heads}/{kv_heads} x {dim}, "
            f"{np.dtype(dtype).name}",
            ms["ragged"] / ms["two calls"],
            at_most=1.1,
            **{f"{name}, ms": each for name, each in ms.items()},
        )


def bench_quantised(report: Report) -> None:
    """What int8 and float8 KV with scales cost in precision and time."""
    batch, tokens, layers, heads, kv_heads, dim = BATCH, 1024, 4, 16, 8, 64
    names = [f"layer{i}" for i in range(layers)]
    rows, positions = jnp.arange(batch, dtype=jnp.int32), jnp.full((batch, 1), tokens - 1, jnp.int32)
    kinds = {
        "float32": kv_buffers(kv_heads, dim, jnp.float32),
        "bfloat16": kv_buffers(kv_heads, dim, jnp.bfloat16),
        "int8, float32 scales": kv_buffers(kv_heads, dim, jnp.int8, scales=jnp.float32),
        "int8, bfloat16 scales": kv_buffers(kv_heads, dim, jnp.int8, scales=jnp.bfloat16),
        "float8, float32 scales": kv_buffers(kv_heads, dim, jnp.float8_e4m3fn, scales=jnp.float32),
    }

    def step(state: CacheState, q: jax.Array, new: jax.Array) -> Any:
        outs = []
        for i, name in enumerate(names):
            dtype = state.layout.places[name].buffers["kv"].dtype
            values = new[i] if dtype.itemsize == 1 else new[i].astype(dtype)
            out, state = append_attend(state, name, rows, positions, q[i], {"kv": values})
            outs.append(out)
        return jnp.stack(outs), state

    for q_dtype in (jnp.float32, jnp.bfloat16):
        q = random_values((layers, batch, 1, heads, dim), q_dtype, seed=1)
        new = random_values((layers, batch, 1, 2 * kv_heads, dim), jnp.float32, seed=2)
        runs = {}
        for kind, buffers in kinds.items():
            layer = dict.fromkeys(names, AttentionLayer(buffers))
            state = paged_state(layer, [tokens] * batch, tokens, batch * tokens // PAGE_SIZE + 8)
            dtype = jnp.float32 if buffers["kv"].dtype.itemsize == 1 else buffers["kv"].dtype
            shape = (batch, tokens, 2 * kv_heads, dim)
            state = filled(state, {name: random_values(shape, dtype, seed=i) for i, name in enumerate(names)})
            runs[kind] = Stepper(state, step, q, new)
        outs = {kind: np.asarray(run()[0], np.float32) for kind, run in runs.items()}
        ms = medians(runs, ROUNDS)
        exact = outs["float32"]
        for kind, out in outs.items():
            error = out - exact
            report.add(
                f"{kind}, q {np.dtype(q_dtype).name}: time to bfloat16 KV",
                ms[kind] / ms["bfloat16"],
                ms=ms[kind],
                bytes_per_token=sum(buffer.nbytes for buffer in kinds[kind].values()),
                error=f"{np.sqrt((error**2).mean() / (exact**2).mean()):.1e}",
                largest_error=f"{abs(error).max() / abs(exact).max():.1e}",
            )


PARTS = {
    "pool": bench_pool,
    "decode": bench_decode,
    "ragged": bench_ragged,
    "length": bench_length,
    "mixed": bench_mixed,
    "quantised": bench_quantised,
}

if __name__ == "__main__":
    main(__doc__, PARTS)
