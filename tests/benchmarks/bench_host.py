"""Host cost of one whole request, against a SHA-256 chain over the same tokens.

    python -m tests.benchmarks.bench_host

A request is open, resume, reserve, the plan for prepare, commit, close: 2,048 tokens of which half are shared with all
others, in three groups (full attention, a window, recurrent), with the pools at half the working set, so that every
request evicts. It is compared with a chained hashlib.sha256 over the 16-token pages of the same tokens, in turn in the
same run. The same at 131,072 tokens, and at a node with 100 and with 100,000 siblings. Then decode steps of 64
sequences, one call per sequence against the batch verbs.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jkv import AttentionLayer, Buffer, CacheConfig, CacheManager, DeviceTier, RecurrentLayer, Sequence

PAGE = 16
WINDOW = 512
REQUESTS = 64  # distinct requests of the working set


def sha_chain(tokens: np.ndarray) -> bytes:
    """What a manager that finds pages by hash computes for a lookup alone."""
    digest = b""
    for at in range(0, len(tokens), PAGE):
        digest = hashlib.sha256(digest + tokens[at : at + PAGE].tobytes()).digest()
    return digest


def make_manager(length: int, pages: int, window_pages: int, slots: int) -> CacheManager:
    layers = {
        "full": AttentionLayer({"kv": Buffer((4, 8), jnp.float32)}),
        "window": AttentionLayer({"kv": Buffer((2, 8), jnp.float32)}, window=WINDOW),
        "state": RecurrentLayer({"h": Buffer((8,), jnp.float32)}),
    }
    tier = DeviceTier(pages={"full": pages, f"window:{WINDOW}": window_pages, "recurrent": slots})
    return CacheManager(CacheConfig(layers, 8, length, page_size=PAGE, tiers=(tier,)))


def plan_step(manager: CacheManager, sequences: list[Sequence]) -> None:
    """`CacheManager.prepare` without its device work."""
    batch = manager._batches.of("prepare", sequences)
    builder = manager._host.builder
    if not builder.empty:
        builder.build()
        builder.clear()
    manager._batches.put_in_flight(batch)


def run_request(manager: CacheManager, tokens: np.ndarray, split: int = 0) -> int:
    """One request without its device work; returns the tokens reused. `split`: end a chunk there, too."""
    seq = manager.open(tokens)
    if not seq.resume():
        raise RuntimeError("no room")
    reused = seq.length
    for stop in (split, len(tokens)):
        if stop <= seq.length:
            continue
        if not seq.reserve(stop - seq.length):
            raise RuntimeError("no room")
        plan_step(manager, [seq])
        seq.commit(tokens[seq.length : stop])
    seq.close()
    return reused


def alternate(*calls: Callable[[int], object], rounds: int) -> list[float]:
    """Median seconds of each call, run in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call(i)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def working_set(length: int, rng: np.random.Generator) -> tuple[list[np.ndarray], CacheManager]:
    shared = rng.integers(0, 50_000, length // 2, dtype=np.int32)
    prompts = [
        np.concatenate((shared, rng.integers(0, 50_000, length - length // 2, dtype=np.int32))) for _ in range(REQUESTS)
    ]
    half = length // 2 // PAGE
    pages = (half + REQUESTS * half) // 2
    window_pages = max(REQUESTS * (WINDOW // PAGE + 1) // 2, length // PAGE + 2 * (WINDOW // PAGE + 1))
    manager = make_manager(length, pages, window_pages, 8 + REQUESTS // 2)
    for prompt in prompts[:2]:
        run_request(manager, prompt, split=length // 2)  # leaves the state where the requests part
    for prompt in prompts:
        run_request(manager, prompt)
    return prompts, manager


def bench_length(length: int, rounds: int) -> tuple[float, float]:
    prompts, manager = working_set(length, np.random.default_rng(0))
    evicted = sum(manager.stats().evicted_pages.values())
    reused: list[int] = []
    request, chain = alternate(
        lambda i: reused.append(run_request(manager, prompts[i % REQUESTS])),
        lambda i: sha_chain(prompts[i % REQUESTS]),
        rounds=rounds,
    )
    manager.check()
    evicted = (sum(manager.stats().evicted_pages.values()) - evicted) / rounds
    print(
        f"{length:>8,} tokens  request {request * 1e6:8.1f} us   SHA-256 chain {chain * 1e6:8.1f} us   "
        f"ratio {request / chain:5.2f}   reused {statistics.median(reused):,.0f}   evicted {evicted:.0f} pages each"
    )
    return request, chain


def bench_siblings(few: int, many: int, rounds: int) -> None:
    """A request at a node with `many` children that differ inside their first page, against `few`."""
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 50_000, 1024, dtype=np.int32)

    def prompt() -> np.ndarray:
        return np.concatenate((shared, rng.integers(0, 50_000, 1024, dtype=np.int32)))

    managers = []
    for count in (few, many):
        room = rounds * (2048 // PAGE)  # nothing is evicted: what there is to evict would differ, too
        manager = make_manager(2048, count + room, count + room, count + rounds + 16)
        run_request(manager, prompt()[:1040], split=1024)
        for _ in range(count):
            run_request(manager, np.concatenate((shared, rng.integers(0, 50_000, PAGE, dtype=np.int32))))
        managers.append(manager)
    prompts = [prompt() for _ in range(rounds)]
    gc.collect()
    low, high = alternate(
        lambda i: run_request(managers[0], prompts[i]), lambda i: run_request(managers[1], prompts[i]), rounds=rounds
    )
    print(f"{few:,} siblings {low * 1e6:.1f} us, {many:,} siblings {high * 1e6:.1f} us: ratio {high / low:.2f}")


def bench_decode(sequences: int = 64, steps: int = 160) -> None:
    """Host time of one decode step: reserve, the plan for prepare, advance, and the commit of the last ids."""
    rng = np.random.default_rng(2)

    def start() -> tuple[CacheManager, list[Sequence]]:
        pages = sequences * (512 // PAGE)
        layers = make_manager(16, 8, 8, 8).config.layers
        tier = DeviceTier(pages={"full": pages, f"window:{WINDOW}": pages, "recurrent": 2 * sequences})
        manager = CacheManager(CacheConfig(layers, sequences, 512, page_size=PAGE, tiers=(tier,)))
        active = []
        for _ in range(sequences):
            seq = manager.open(rng.integers(0, 50_000, int(rng.integers(64, 128)), dtype=np.int32))
            if not seq.resume() or not seq.reserve(len(seq._prompt)):
                raise RuntimeError("no room")
            plan_step(manager, [seq])
            seq.commit(seq._prompt)
            active.append(seq)
        return manager, active

    def by_sequence(manager: CacheManager, active: list[Sequence], ids: np.ndarray) -> None:
        for seq in active:
            if not seq.reserve(1):
                raise RuntimeError("no room")
        plan_step(manager, active)
        for seq, token in zip(active, ids.reshape(-1, 1), strict=True):
            seq.advance(1)
            seq.commit(token)

    def by_batch(manager: CacheManager, active: list[Sequence], ids: np.ndarray) -> None:
        if manager.reserve(active, 1) < len(active):
            raise RuntimeError("no room")
        plan_step(manager, active)
        manager.advance(active, 1)
        manager.commit(active, ids, 1)

    def without_crossing(manager: CacheManager, active: list[Sequence]) -> Callable[[int], None]:
        """Reserve, prepare and advance where all sequences stay inside their pages, undone each time."""
        ledger = manager._host.ledger
        kept = (ledger.length, ledger.capacity, ledger.reserved)

        def step(_: int) -> None:
            copies = [array.copy() for array in kept]
            manager.reserve(active, 1)
            plan_step(manager, active)
            manager.advance(active, 1)
            for array, copy in zip(kept, copies, strict=True):
                array[:] = copy

        for seq in active:  # to the middle of a page
            n = PAGE // 2 + (-seq.length % PAGE)
            seq.reserve(n)
            plan_step(manager, [seq])
            seq.advance(n)
        return step

    ids = rng.integers(0, 50_000, (steps, sequences), dtype=np.int32)
    one, many, still = start(), start(), start()
    chain_tokens = rng.integers(0, 50_000, 2048, dtype=np.int32)
    alone, batch, inside, chain = alternate(
        lambda i: by_sequence(*one, ids[i]),
        lambda i: by_batch(*many, ids[i]),
        without_crossing(*still),
        lambda _: sha_chain(chain_tokens),
        rounds=steps,
    )
    for manager in (one[0], many[0]):
        manager.check()
    print(
        f"decode step of {sequences} sequences: one by one {alone * 1e6:.0f} us, batch verbs {batch * 1e6:.0f} us, "
        f"where nothing crosses a page {inside * 1e6:.0f} us; ratios to a SHA-256 chain over 2,048 tokens "
        f"{alone / chain:.2f}, {batch / chain:.2f}, {inside / chain:.2f}"
    )


def main() -> None:
    short, _ = bench_length(2_048, rounds=1_000)
    long, _ = bench_length(131_072, rounds=200)
    print(f"131,072 against 2,048 tokens: {long / short:.2f} times")
    bench_siblings(100, 100_000, rounds=300)
    bench_decode()


if __name__ == "__main__":
    main()
