"""The store against TensorStore alone: 64 values of 512 KiB, written and read.

    python -m tests.benchmarks.bench_store [values] [--json FILE]

Both move the same bytes in the same run, in turns, each time to new keys; "alone" waits for the same writes and reads
without headers, checksums and an index. Files are not forced to disk (no fsync) in either. They lie in a temporary
directory, so where the environment's TMPDIR says.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jkv.config import AttentionLayer, CacheConfig, DeviceTier, StoreTier, kv_buffers
from jkv.layout import make_layout
from jkv.tiers.keys import page_name
from jkv.tiers.store import Store
from tests.benchmarks.report import Report, main

VALUES = 64
VALUE_BYTES = 512 * 2**10
LAYERS = 16  # of 32 KiB a page
ROUNDS = 25


def layout():
    """A page of 16 tokens: 16 layers of 8 heads of 128 elements, K and V in int8."""
    layers = {f"attn.{i}": AttentionLayer(kv_buffers(8, 128, jnp.int8)) for i in range(LAYERS)}
    return make_layout(CacheConfig(layers, 1, 64, page_size=16, tiers=(DeviceTier(pages=4),), model="m"))


def pages() -> list[list[np.ndarray]]:
    """The parts of each value: one array per layer."""
    generator = np.random.default_rng(0)
    shape = LAYERS, VALUE_BYTES // LAYERS
    return [list(generator.integers(0, 256, shape, np.uint8)) for _ in range(VALUES)]


def alone(directory: str, values: list[bytes]) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """(write, read) of one round's values by TensorStore itself."""
    spec = {"driver": "file", "path": f"{directory}/alone/", "file_io_sync": False}
    kvstore = ts.KvStore.open(spec).result()

    def write(round_: int) -> None:
        for future in [kvstore.write(f"{round_}/{at}", value) for at, value in enumerate(values)]:
            future.result()

    def read(round_: int) -> None:
        futures = [kvstore.read(f"{round_}/{at}") for at in range(len(values))]
        results = [future.result().value for future in futures]
        assert all(len(result) == VALUE_BYTES for result in results)

    return write, read


def with_store(directory: str, parts: list[list[np.ndarray]]) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """(write, read) of the same through Store."""
    store = Store(StoreTier(pathlib.Path(directory) / "store"), layout())

    def names(round_: int) -> list[str]:
        return [page_name((round_ * VALUES + at).to_bytes(32, "big")) for at in range(VALUES)]

    def write(round_: int) -> None:
        for name, each in zip(names(round_), parts, strict=True):
            store.write("full", name, each)
        store.flush()
        assert store.stats().writes == (round_ + 1) * VALUES

    def read(round_: int) -> None:
        results = store.read([("full", name) for name in names(round_)]).results()
        assert all(result is not None and len(result) == VALUE_BYTES for result in results)

    return write, read


def seconds(call: Callable[[int], None], round_: int) -> float:
    start = time.perf_counter()
    call(round_)
    return time.perf_counter() - start


def measure(directory: str) -> dict[str, dict[str, list[float]]]:
    """{"write" or "read": {"alone" or "store": seconds of each round}}."""
    parts = pages()
    ways = {
        "alone": alone(directory, [b"".join(part.tobytes() for part in each) for each in parts]),
        "store": with_store(directory, parts),
    }
    times: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in ways} for kind in ("write", "read")}
    for round_ in range(ROUNDS):
        order = list(ways) if round_ % 2 else list(ways)[::-1]
        for at, kind in enumerate(times):
            for way in order:
                times[kind][way].append(seconds(ways[way][at], round_))
    return times


def bench_values(report: Report) -> None:
    """Speed of TensorStore alone that writing and reading through Store reach: medians of the rounds' ratios."""
    with tempfile.TemporaryDirectory() as directory:
        times = measure(directory)
    gigabytes = VALUES * VALUE_BYTES / 1e9
    for kind, ways in times.items():
        ratio = statistics.median(a / b for a, b in zip(ways["alone"], ways["store"], strict=True))
        speed = {f"{way}_GB_per_s": gigabytes / statistics.median(each) for way, each in ways.items()}
        report.add(f"{kind} of {VALUES} values of {VALUE_BYTES // 2**10} KiB", ratio, at_least=0.7, **speed)


PARTS = {"values": bench_values}

if __name__ == "__main__":
    main(__doc__, PARTS)
