"""Memory: the device pools exist once, and what the host keeps of each cached token.

    python -m tests.benchmarks.bench_memory [pools] [bookkeeping] [--json FILE]

pools: how much more of a process with 1 GiB of pools is ever resident (on the CPU pools are host memory) than of one
with tiny pools. Both run the same: warmup, prefill and decode steps, snapshots, copies on write.

bookkeeping: what the host half keeps for 1,000,000 cached tokens of 48 prompts, in full attention, a window and a
recurrent state, committed chunk by chunk, the last ones token by token: the tree with its tokens, page ids, use counts
and endpoints, and the orders of eviction. Traced by tracemalloc, which sees NumPy's arrays. Apart from that, what a
manager has from the beginning: the free lists of its pools, 5 bytes per page, and the ledger of its rows.
"""

from __future__ import annotations

import functools
import gc
import pathlib
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from tests.benchmarks.report import Report, main

PAGE = 16
# bookkeeping
WINDOW = 512
TOKENS, PROMPTS, CHUNK, DECODED = 1_000_000, 48, 2_048, 200
# pools
GIB = 2**30
TINY, LARGE = 64, 8_200  # pages of each pool
ROWS, PREFILL, STEPS = 4, 256, 40
PROGRAM = """
import resource
from tests.benchmarks.bench_memory import run_with_pools
size = run_with_pools({pages})
print(size, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def plan_step(manager: jkv.CacheManager, sequences: list[jkv.Sequence]) -> None:
    """`CacheManager.prepare` without its device work."""
    batch = manager._batches.of("prepare", sequences)
    manager._host.builder.build()
    manager._host.builder.clear()
    manager._batches.put_in_flight(batch)


def step(manager: jkv.CacheManager, seq: jkv.Sequence, tokens: np.ndarray) -> None:
    """Reserves, prepares and commits `tokens`."""
    if not seq.reserve(len(tokens)):
        raise RuntimeError("no room")
    plan_step(manager, [seq])
    seq.commit(tokens)


def fill_tree(manager: jkv.CacheManager, tokens: int, prompts: int, rng: np.random.Generator) -> None:
    """`prompts` sequences of `tokens` tokens together come, one after the other, and go."""
    cuts = tokens * np.arange(1, prompts) // prompts + rng.integers(-4_000, 4_000, prompts - 1)
    for length in np.diff(cuts, prepend=0, append=tokens).tolist():
        ids = rng.integers(0, 50_000, length, dtype=np.int32)
        prompt = length - DECODED
        with manager.open(ids[:prompt]) as seq:
            if not seq.resume():
                raise RuntimeError("no room")
            while seq.length < length:
                stops = [point for point in (*seq.snapshot_points, prompt) if point > seq.length]
                stop = min([seq.length + CHUNK, *stops]) if stops else seq.length + 1
                step(manager, seq, ids[seq.length : stop])


class Kept(NamedTuple):
    """Bytes of the host half.

    Attributes:
      fixed: of a manager that has cached nothing.
      cached: what came with the cached tokens.
      lines: the same by the line that allocated it.
      nodes: of the tree.
    """

    fixed: int
    cached: int
    lines: Counter[str]
    nodes: int


def measure_bookkeeping(tokens: int, prompts: int) -> Kept:
    """What a manager keeps for that many cached tokens."""
    layers = {
        "full": jkv.AttentionLayer({"kv": jkv.Buffer((1, 8), jnp.int8)}),
        "window": jkv.AttentionLayer({"kv": jkv.Buffer((1, 4), jnp.int8)}, window=WINDOW),
        "state": jkv.RecurrentLayer({"h": jkv.Buffer((8,), jnp.int8)}),
    }
    pages = tokens // PAGE + prompts
    tier = jkv.DeviceTier(pages={"full": pages, f"window:{WINDOW}": pages, "recurrent": 16 * prompts})
    config = jkv.CacheConfig(layers, 8, 32_768, page_size=PAGE, tiers=(tier,))
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        manager = jkv.CacheManager(config)
        fixed = tracemalloc.get_traced_memory()[0] - start
        before = tracemalloc.take_snapshot()
        fill_tree(manager, tokens, prompts, np.random.default_rng(0))
        gc.collect()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    manager.check()
    nodes = list(manager._host.tree.nodes())
    cached = sum(node.size for node in nodes)
    if cached != tokens:
        raise RuntimeError(f"{cached} tokens in the tree")
    lines: Counter[str] = Counter()
    for change in after.compare_to(before, "lineno"):
        frame = change.traceback[0]
        lines[f"{pathlib.Path(frame.filename).name}:{frame.lineno}"] += change.size_diff
    return Kept(fixed, sum(lines.values()), lines, len(nodes))


def bench_bookkeeping(report: Report) -> None:
    """Bytes that the host half keeps of each of 1,000,000 cached tokens."""
    kept = measure_bookkeeping(TOKENS, PROMPTS)
    largest = {line: size / TOKENS for line, size in kept.lines.most_common(4)}
    report.add("host bytes per cached token", kept.cached / TOKENS, "B", at_most=8, nodes=kept.nodes, **largest)
    report.add("what a manager has from the beginning, per token it has room for", kept.fixed / TOKENS, "B")


def model_of(manager: jkv.CacheManager) -> Callable[..., jkv.CacheState]:
    """A jitted step, donated: (state, rows [B], positions [B, T]) -> state."""

    @functools.partial(jax.jit, donate_argnames="state")
    def model(state: jkv.CacheState, rows: jax.Array, positions: jax.Array) -> jkv.CacheState:
        x = jnp.sin(positions[..., None, None] + jnp.arange(64.0))
        for layer, kind in manager.config.layers.items():
            if isinstance(kind, jkv.RecurrentLayer):
                state = jkv.write_state(state, layer, rows, {"h": jkv.read_state(state, layer, rows)["h"] + x.sum()})
                continue
            q = jnp.broadcast_to(x, (*positions.shape, 4, 64)).astype(jnp.bfloat16)
            out, state = jkv.append_attend(state, layer, rows, positions, q, {"kv": q})
            x = x + out[..., :1, :].astype(x.dtype)
        return state

    return model


def run_with_pools(pages: int) -> int:
    """Serves a few requests; the bytes of all pools."""
    layers: dict[str, jkv.AttentionLayer | jkv.RecurrentLayer] = {}
    for i in range(4):
        layers[f"full{i}"] = jkv.AttentionLayer(jkv.kv_buffers(2, 64))
        layers[f"window{i}"] = jkv.AttentionLayer(jkv.kv_buffers(2, 64), window=128)
        layers[f"state{i}"] = jkv.RecurrentLayer({"h": jkv.Buffer((64, 64), jnp.float32)})
    tier = jkv.DeviceTier(pages={"full": pages, "window:128": pages, "recurrent": pages})
    manager = jkv.CacheManager(jkv.CacheConfig(layers, ROWS, 2 * PREFILL, page_size=PAGE, tiers=(tier,)))
    state, model, rng = manager.init(), model_of(manager), np.random.default_rng(0)
    manager.warmup(state)

    def run(seqs: list[jkv.Sequence], tokens: int) -> None:
        nonlocal state
        if manager.reserve(seqs, tokens) < len(seqs):
            raise RuntimeError("no room")
        positions = np.array([seq.length for seq in seqs], np.int32)[:, None] + np.arange(tokens, dtype=np.int32)
        state, rows = manager.prepare(state, seqs)
        state = model(state, rows, positions)
        manager.commit(seqs, rng.integers(0, 50_000, len(seqs) * tokens, dtype=np.int32), tokens)

    for _ in range(4):
        with manager.open() as seq:
            if not seq.resume():
                raise RuntimeError("no room")
            run([seq], PREFILL)
            run([seq], 1)  # into a page that its copies will share
            copies = seq.fork(ROWS - 1)
            for _ in range(STEPS):
                run([seq, *copies], 1)
            for each in copies:
                each.close()
    jax.block_until_ready(state)
    manager.check()
    if not manager.stats().snapshots_taken:
        raise RuntimeError("no snapshot")
    return sum(array.nbytes for array in jax.tree.leaves(state.pools))


def bench_pools(report: Report) -> None:
    """Peak resident set with 1 GiB of pools, above that with tiny pools, against the pools' size."""
    tiny, large = (_resident(pages) for pages in (TINY, LARGE))
    size = large[0] - tiny[0]
    report.add(
        f"resident for {large[0] / GIB:.2f} GiB of pools, against their size",
        (large[1] - tiny[1]) / size,
        at_most=1.15,
        peak_MiB=large[1] // 2**20,
        with_tiny_pools_MiB=tiny[1] // 2**20,
        tiny_pools_MiB=tiny[0] / 2**20,
    )


def _resident(pages: int) -> tuple[int, int]:
    """(bytes of pools, largest resident set in bytes) of the program in a process of its own."""
    here = pathlib.Path(__file__).parents[2]
    program = [sys.executable, "-c", PROGRAM.format(pages=pages)]
    out = subprocess.run(program, cwd=here, check=True, capture_output=True, text=True).stdout
    size, peak = map(int, out.split())
    return size, peak


PARTS = {"pools": bench_pools, "bookkeeping": bench_bookkeeping}

if __name__ == "__main__":
    main(__doc__, PARTS)
