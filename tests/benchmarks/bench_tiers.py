"""Pages to host memory and back, against a NumPy copy of the same bytes; and what allocating there costs.

    python -m tests.benchmarks.bench_tiers [transfers] [allocation] [step] [--json FILE]

transfers: 64 pages of 512 KiB in 8 layers leave the device for host memory and come back: until they have landed, or
are on the device, in turn with a NumPy copy of the same bytes in the same run. Offload moves the bytes twice (gather,
landing), as onboard does (a fresh array, scatter), so 0.5 of a copy is the ceiling.

allocation: allocating and releasing 64 pages of a tier of 262,144 against one of 4,096.

step: a decode step while 64 pages go out and 64 come in, against one without.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.layout import HOST, Layout, make_layout
from jkv.pages import PagePool
from jkv.plan import PlanBuilder
from jkv.state import init_state
from jkv.tiers.host import HostMemory
from tests.benchmarks.report import Report, main
from tests.benchmarks.timing import alternate

PAGES, PAGE_BYTES, LAYERS, PAGE = 64, 512 * 2**10, 8, 16
ROUNDS = 30
CALLS = 100  # of the allocator, a round


def layers_of(dtype: np.dtype) -> dict[str, jkv.AttentionLayer]:
    """Layers whose pages have PAGE_BYTES together."""
    width = PAGE_BYTES // (LAYERS * PAGE * 8 * np.dtype(dtype).itemsize)
    return {str(i): jkv.AttentionLayer({"kv": jkv.Buffer((8, width), dtype)}) for i in range(LAYERS)}


class Bench:
    """A device and a host pool full of random bytes."""

    def __init__(self, dtype: np.dtype, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        config = jkv.CacheConfig(layers_of(dtype), 1, 64, page_size=PAGE, tiers=(jkv.DeviceTier(pages=4 * PAGES),))
        layout: Layout = make_layout(config)
        self.state = init_state(layout)
        self.memory = HostMemory(layout, [4 * PAGES], 64 * 2**20, None)
        self.builder = PlanBuilder(layout, np.zeros((0, 0, 0), np.int32), np.zeros(1, np.int32), host_pages=[4 * PAGES])
        size = layout.pools[0].page_bytes
        assert size == PAGE_BYTES
        self.bytes = PAGES * size
        for page in range(1, 4 * PAGES + 1):  # no page of the arenas is one that the kernel has yet to give
            value = memoryview(self.rng.integers(0, 256, size, np.uint8))
            self.builder.put(0, HOST + page, self.memory.split(0, value))
        self._carry_out([])
        self.memory.wait()
        for at in range(1, 4 * PAGES + 1, PAGES):
            self._carry_out([(HOST + page, page) for page in range(at, at + PAGES)])
        self.source = self.rng.integers(0, 256, self.bytes, np.uint8)
        self.target = np.ones_like(self.source)

    def _carry_out(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.builder.copy(0, source, destination)
        self.state = self.memory.dispatch(self.state, self.builder.build())
        self.builder.clear()

    def _pages(self) -> list[int]:
        return (self.rng.permutation(4 * PAGES)[:PAGES] + 1).tolist()

    def copy(self, _: int) -> None:
        np.copyto(self.target, self.source)

    def offload(self, _: int) -> None:
        self._carry_out([(page, HOST + other) for page, other in zip(self._pages(), self._pages(), strict=True)])
        self.memory.wait()

    def onboard(self, _: int) -> None:
        self._carry_out([(HOST + page, other) for page, other in zip(self._pages(), self._pages(), strict=True)])
        jax.block_until_ready(self.state.pools)


def bench_transfers(report: Report) -> None:
    """Speed of a NumPy copy of the same bytes that offload and onboard reach."""
    for dtype in (jnp.float32, jnp.bfloat16):
        bench = Bench(dtype)
        calls = bench.copy, bench.offload, bench.onboard
        alternate(*calls, rounds=3)
        copy, offload, onboard = alternate(*calls, rounds=ROUNDS)
        bench.memory.close()
        rate = bench.bytes / 1e9  # GB
        for name, seconds in (("offload", offload), ("onboard", onboard)):
            what = f"{name}, {np.dtype(dtype).name}, against a copy"
            report.add(what, copy / seconds, at_least=0.35, GB_per_s=rate / seconds, copy_GB_per_s=rate / copy)


def bench_allocation(report: Report) -> None:
    """64 pages taken and given back, of many against of few."""
    few, many = 4_096, 262_144
    geometry = make_layout(
        jkv.CacheConfig(layers_of(jnp.float32), 1, 64, page_size=PAGE, tiers=(jkv.DeviceTier(pages=64),))
    ).pools[0]
    pools = [PagePool(geometry, num_pages=count) for count in (few, many)]

    def call(pool: PagePool):
        def take_and_give(_: int) -> None:
            for _ in range(CALLS):
                pool.release(pool.allocate(PAGES))

        return take_and_give

    small, large = alternate(*map(call, pools), rounds=300)
    report.add(f"{PAGES} pages of {many:,}, against of {few:,}", large / small, at_most=1.5, us=1e6 * small / CALLS)


def bench_step(report: Report) -> None:
    """A step of a small model while 64 pages go out and 64 come in, against one without."""
    moving = PAGES
    layers = {f"layer{i}": jkv.AttentionLayer(jkv.kv_buffers(4, 64, jnp.float32)) for i in range(4)}
    pages, rows, length, width = 1024, 8, 512, 1024
    tiers = (jkv.DeviceTier(pages=pages), jkv.HostTier(pages=pages))
    config = jkv.CacheConfig(layers, rows, 4096, page_size=PAGE, tiers=tiers)
    manager = jkv.CacheManager(config)
    state, rng = manager.init(), np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(width, width)), jnp.float32) / width**0.5 for _ in range(16)]

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state, rows, positions):
        x = jnp.ones((len(rows), width))
        for i, name in enumerate(layers):
            for weight in weights[4 * i : 4 * i + 4]:
                x = jnp.tanh(x @ weight)
            q, kv = x.reshape(len(rows), 1, -1, 64), x[:, :512].reshape(len(rows), 1, 8, 64)
            out, state = jkv.append_attend(state, name, rows, positions, q, {"kv": kv})
            x = x + out.reshape(x.shape)
        return x, state

    seqs = [manager.open() for _ in range(rows)]
    for seq in seqs:
        assert seq.resume() and seq.reserve(length)
    state, where = manager.prepare(state, seqs)
    manager.advance(seqs, length)
    for seq in seqs:
        assert seq.reserve(1)
    state, where = manager.prepare(state, seqs)
    positions = np.full((rows, 1), length, np.int32)
    builder, pool, memory = manager._host.builder, manager._host.pools[0], manager._memory
    ids = pool.allocate(4 * moving).tolist()
    places = [HOST + page for page in pool.below.allocate(4 * moving).tolist()]

    def run(pairs: list[tuple[int, int]]) -> None:
        nonlocal state
        for source, destination in pairs:
            builder.copy(0, source, destination)
        state, _ = manager.prepare(state, ())
        x, state = step(state, where, positions)
        x.block_until_ready()

    def plain(_: int) -> None:
        run([])

    def moved(turn: int) -> None:
        out, back = (slice(moving * (turn % 2), moving * (turn % 2 + 1)), slice(2 * moving, 3 * moving))
        run([*zip(ids[out], places[out], strict=True), *zip(places[back], ids[back], strict=True)])

    alternate(plain, moved, rounds=3)
    without, with_moves = alternate(plain, moved, rounds=40)
    memory.wait()
    report.add(
        f"decode step while {moving} pages go out and {moving} come in",
        with_moves / without,
        at_most=1.5,
        ms=1e3 * with_moves,
        without_ms=1e3 * without,
        MiB_each_way=moving * manager.layout.pools[0].page_bytes / 2**20,
    )


PARTS = {"transfers": bench_transfers, "allocation": bench_allocation, "step": bench_step}

if __name__ == "__main__":
    main(__doc__, PARTS)
