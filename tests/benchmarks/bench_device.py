"""What the device half costs: `python -m tests.benchmarks.bench_device [pool] [decode] [ragged] [...]`.

    pool      each op at 256 and at 16,384 pages, per dtype: ratio of the medians (limit 1.5), and XLA's temporaries
    decode    one paged decode step (4 layers in one jit) against attention on contiguous caches (limit 1.15)
    ragged    one row of 4,096 tokens among fifteen of 64 against sixteen of 4,096 (about a tenth)
    length    one decode step with max_length 1,024 and 131,072 (the same)
    mixed     one Ragged step of 15 decodes and a chunk of 256 tokens against the same as two padded calls (about 1)
    quantised decode steps with int8 and float8 KV and scales: error against float32, time against bfloat16

Runs alternate between what is compared, so that both see the same machine; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
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

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.int32)
FEW_PAGES, MANY_PAGES = 256, 16_384
PAGE_SIZE = 16


def medians(runs: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1) -> dict[str, float]:
    """Median milliseconds of a call of each run, `calls` calls of each per round in turn."""
    for run in runs.values():
        for _ in range(2):
            jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                out = run()
            jax.block_until_ready(out)
            times[name].append(1e3 * (time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


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


def random_values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
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
    return apply(init_state(layout), Plan(None, np.array(0, np.int32), tables, slots, None, (), ()))


def table(title: str, header: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    print(f"\n{title}")
    for line in [header, *lines]:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def bench_pool(rounds: int) -> None:
    """A step's cost does not depend on the pool's size."""
    batch, heads, kv_heads, dim = 4, 4, 2, 64
    rows = jnp.arange(batch, dtype=jnp.int32)
    positions = jnp.full((batch, 1), 255, jnp.int32)
    lines = []
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
                str(pages): Stepper(paged_state(layers, [256] * batch, 256, pages), step, *args)
                for pages in (FEW_PAGES, MANY_PAGES)
            }
            lines.append(_pool_line(dtype, op, medians(run, rounds, calls=50), run[str(MANY_PAGES)]))
        appliers = {
            str(pages): Applier(paged_state(layers, [256] * batch, 256, pages)) for pages in (FEW_PAGES, MANY_PAGES)
        }
        lines.append(_pool_line(dtype, "apply (16 copies)", medians(appliers, rounds, calls=50), None))
    header = ("dtype", "op", f"{FEW_PAGES} pages, ms", f"{MANY_PAGES} pages, ms", "ratio", "temporaries, MB of pool")
    table("Pool size (ratio at most 1.5)", header, lines)


class Applier:
    """`apply` of 16 page copies, again and again."""

    def __init__(self, state: CacheState):
        copies = np.full((len(state.layout.pools), 2, 64), UNUSED, np.int32)
        copies[:, 0, :16], copies[:, 1, :16] = np.arange(1, 17), np.arange(101, 117)
        copies[:, 0, 16:] = 0
        counts = np.full(len(state.layout.pools), 16, np.int32)
        self.state, self.plan = state, Plan(None, np.array(0, np.int32), None, None, None, (copies,), (counts,))

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


def bench_decode(rounds: int) -> None:
    """One paged decode step against contiguous caches: batch 16, 1,024 tokens, 4 layers in one jit."""
    batch, tokens, layers = 16, 1024, 4
    lines = []
    for heads, kv_heads, dim in ((16, 8, 64), (16, 2, 64), (9, 3, 64), (8, 8, 64), (32, 8, 128)):
        for dtype in (jnp.float32, jnp.bfloat16):
            runs = decode_runs(batch, tokens, layers, heads, kv_heads, dim, dtype)
            ms = medians(runs, rounds)
            lines.append(
                (
                    f"{heads}/{kv_heads} x {dim}",
                    np.dtype(dtype).name,
                    *(f"{ms[name]:.2f}" for name in runs),
                    *(f"{ms[name] / ms['[B, S, K, D]']:.2f}" for name in list(runs)[1:]),
                )
            )
    header = ("heads x dim", "dtype", *(f"{name}, ms" for name in runs), *(f"{name}, ratio" for name in list(runs)[1:]))
    table("Decode step, batch 16, 1,024 tokens, 4 layers (paged ratio at most 1.15)", header, lines)


def decode_runs(
    batch: int, tokens: int, layers: int, heads: int, kv_heads: int, dim: int, dtype: Any
) -> dict[str, Callable[[], Any]]:
    """The same step three times: library attention on [B, S, K, D], head-major [B, K, S, D], and paged."""
    names = [f"layer{i}" for i in range(layers)]
    q = random_values((layers, batch, 1, heads, dim), dtype, seed=1)
    new = random_values((layers, batch, 1, 2 * kv_heads, dim), dtype, seed=2)
    last = jnp.full((batch,), tokens - 1, jnp.int32)
    rows = jnp.arange(batch, dtype=jnp.int32)
    shape = (batch, tokens, kv_heads, dim)
    contiguous = {
        n: (random_values(shape, dtype, 2 * i), random_values(shape, dtype, 2 * i + 1)) for i, n in enumerate(names)
    }

    def written(cache: jax.Array, token: jax.Array, axis: int) -> jax.Array:
        start = [last[0] if a == axis else 0 for a in range(4)]
        return jax.lax.dynamic_update_slice(cache, token, start)

    def library(caches: Any, q: jax.Array, new: jax.Array) -> Any:
        outs, after = [], {}
        for i, name in enumerate(names):
            k, v = (written(c, new[i, :, :, j::2], 1) for j, c in enumerate(caches[name]))
            outs.append(jax.nn.dot_product_attention(q[i], k, v, key_value_seq_lengths=last + 1))
            after[name] = k, v
        return outs, after

    def head_major(caches: Any, q: jax.Array, new: jax.Array) -> Any:
        outs, after = [], {}
        for i, name in enumerate(names):
            k, v = (written(c, new[i, :, :, j::2].transpose(0, 2, 1, 3), 2) for j, c in enumerate(caches[name]))
            grouped = q[i].reshape(batch, kv_heads, heads // kv_heads, dim)
            scores = jnp.einsum("bkgd,bknd->bkgn", grouped, k, preferred_element_type=jnp.float32) / np.sqrt(dim)
            live = jnp.arange(tokens) <= last[:, None, None, None]
            weights = jax.nn.softmax(jnp.where(live, scores, -jnp.inf), axis=-1).astype(dtype)
            outs.append(jnp.einsum("bkgn,bknd->bkgd", weights, v, preferred_element_type=jnp.float32).astype(dtype))
            after[name] = k, v
        return outs, after

    def paged(state: CacheState, q: jax.Array, new: jax.Array) -> Any:
        outs = []
        for i, name in enumerate(names):
            out, state = append_attend(state, name, rows, last[:, None], q[i], {"kv": new[i]})
            outs.append(out)
        return outs, state

    # prompts of the same contents, so that the outputs can be compared
    kv = AttentionLayer(kv_buffers(kv_heads, dim, dtype))
    state = paged_state(dict.fromkeys(names, kv), [tokens] * batch, tokens, batch * tokens // PAGE_SIZE + 8)
    fill = jax.jit(append, static_argnames="layer", donate_argnums=0)
    for name, (k, v) in contiguous.items():
        both = jnp.stack([k, v], axis=3).reshape(batch, tokens, 2 * kv_heads, dim)
        state = fill(state, name, rows, jnp.tile(jnp.arange(tokens, dtype=jnp.int32), (batch, 1)), {"kv": both})
    heads_first = {n: tuple(a.transpose(0, 2, 1, 3) for a in pair) for n, pair in contiguous.items()}
    runs = {
        "[B, S, K, D]": Stepper(contiguous, library, q, new),
        "[B, K, S, D]": Stepper(heads_first, head_major, q, new),
        "paged": Stepper(state, paged, q, new),
    }
    reference, *others = ([np.asarray(out, np.float32).ravel() for out in run()[0]] for run in runs.values())
    for other in others:
        np.testing.assert_allclose(np.stack(other), np.stack(reference), atol=0.02)
    return runs


def bench_ragged(rounds: int) -> None:
    """The cost follows what the batch can see, not rows x longest."""
    layer = {"attn": AttentionLayer(kv_buffers(8, 64, jnp.float32))}
    lengths = {"16 x 4,096": [4096] * 16, "4,096 + 15 x 64": [4096] + [64] * 15, "16 x 64": [64] * 16}
    q = random_values((16, 1, 16, 64), jnp.float32)
    rows = jnp.arange(16, dtype=jnp.int32)

    def step(state: CacheState, q: jax.Array, positions: jax.Array) -> Any:
        return attend(state, "attn", rows, positions, q), state

    runs = {
        name: Stepper(
            paged_state(layer, each, 4096, 4096 + 64), step, q, jnp.asarray([[n - 1] for n in each], jnp.int32)
        )
        for name, each in lengths.items()
    }
    ms = medians(runs, rounds)
    lines = [(name, f"{value:.2f}", f"{value / ms['16 x 4,096']:.3f}") for name, value in ms.items()]
    table("Lengths in the batch (the second about 0.1)", ("tokens", "ms", "ratio"), lines)


def bench_length(rounds: int) -> None:
    """The cost does not follow max_length."""
    layer = {"attn": AttentionLayer(kv_buffers(2, 64, jnp.float32))}
    q = random_values((16, 1, 4, 64), jnp.float32)
    new = {"kv": random_values((16, 1, 4, 64), jnp.float32)}
    rows, positions = jnp.arange(16, dtype=jnp.int32), jnp.full((16, 1), 255, jnp.int32)

    def step(state: CacheState, q: jax.Array, new: dict[str, jax.Array]) -> Any:
        return append_attend(state, "attn", rows, positions, q, new)

    runs = {f"{n:,}": Stepper(paged_state(layer, [256] * 16, n, 512), step, q, new) for n in (1024, 131_072)}
    ms = medians(runs, rounds, calls=20)
    lines = [(name, f"{value:.3f}", f"{value / ms['1,024']:.2f}") for name, value in ms.items()]
    table("max_length (ratio 1)", ("max_length", "ms", "ratio"), lines)


def filled(state: CacheState, names: list[str], tokens: int, shape: tuple[int, ...], dtype: Any) -> CacheState:
    """`state` with the same random K/V in the first `tokens` positions of all rows of the layers."""
    batch = state.layout.max_sequences
    rows = jnp.arange(batch, dtype=jnp.int32)
    positions = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), (batch, 1))
    fill = jax.jit(append, static_argnames="layer", donate_argnums=0)
    for i, name in enumerate(names):
        state = fill(state, name, rows, positions, {"kv": random_values((batch, tokens, *shape), dtype, seed=i)})
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


def bench_mixed(rounds: int) -> None:
    """A ragged step costs what its decodes and its prompt chunk cost."""
    decodes, length, chunk, chunk_start, layers = 15, 1024, 256, 512, 4
    lines = []
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
            return filled(empty, names, length, (2 * kv_heads, dim), dtype)

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
        ms = medians(runs, rounds)
        shape = f"{heads}/{kv_heads} x {dim}", np.dtype(dtype).name
        lines.append((*shape, *(f"{ms[name]:.2f}" for name in runs), f"{ms['ragged'] / ms['two calls']:.2f}"))
    header = ("heads x dim", "dtype", *(f"{name}, ms" for name in runs), "ragged / two calls")
    title = f"{decodes} decodes at {length:,} tokens and a chunk of {chunk} at {chunk_start}, {layers} layers (about 1)"
    table(title, header, lines)


def bench_quantised(rounds: int) -> None:
    """What int8 and float8 KV with scales cost in precision and time."""
    batch, tokens, layers, heads, kv_heads, dim = 16, 1024, 4, 16, 8, 64
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

    lines = []
    for q_dtype in (jnp.float32, jnp.bfloat16):
        q = random_values((layers, batch, 1, heads, dim), q_dtype, seed=1)
        new = random_values((layers, batch, 1, 2 * kv_heads, dim), jnp.float32, seed=2)
        runs = {}
        for kind, buffers in kinds.items():
            layer = dict.fromkeys(names, AttentionLayer(buffers))
            state = paged_state(layer, [tokens] * batch, tokens, batch * tokens // PAGE_SIZE + 8)
            dtype = jnp.float32 if buffers["kv"].dtype.itemsize == 1 else buffers["kv"].dtype
            runs[kind] = Stepper(filled(state, names, tokens, (2 * kv_heads, dim), dtype), step, q, new)
        outs = {kind: np.asarray(run()[0], np.float32) for kind, run in runs.items()}
        ms = medians(runs, rounds)
        exact = outs["float32"]
        for kind, out in outs.items():
            error = out - exact
            lines.append(
                (
                    np.dtype(q_dtype).name,
                    kind,
                    str(sum(buffer.nbytes for buffer in kinds[kind].values())),
                    f"{np.sqrt((error**2).mean() / (exact**2).mean()):.1e}",
                    f"{abs(error).max() / abs(exact).max():.1e}",
                    f"{ms[kind]:.2f}",
                    f"{ms[kind] / ms['bfloat16']:.2f}",
                )
            )
    header = ("q", "KV", "bytes per token", "error, rms", "error, largest", "ms", "ratio to bfloat16")
    table("KV dtypes in a decode step, batch 16, 1,024 tokens, 4 layers; errors of the output, relative", header, lines)


BENCHMARKS = {
    "pool": bench_pool,
    "decode": bench_decode,
    "ragged": bench_ragged,
    "length": bench_length,
    "mixed": bench_mixed,
    "quantised": bench_quantised,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=[[], *BENCHMARKS], help="all by default")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}, {options.rounds} rounds")
    for name in options.which or BENCHMARKS:
        BENCHMARKS[name](options.rounds)


if __name__ == "__main__":
    main()
