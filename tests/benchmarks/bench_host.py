"""What the host half costs, in H: the time of a chained SHA-256 over the 16-token pages of 2,048 tokens.

    python -m tests.benchmarks.bench_host [request] [size] [probe] [decode] [prepare] [evict]

Three groups: full attention, a window, recurrent. All is timed in turn with the SHA-256 chain, or with what it is
compared with, in the same run; garbage collection is on.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jkv import AttentionLayer, Buffer, CacheConfig, CacheManager, CacheState, DeviceTier, RecurrentLayer, Sequence
from tests.benchmarks.report import Report, main
from tests.benchmarks.timing import PAGE, against_h, alternate, sha_chain

WINDOW = 512
REQUESTS = 64  # distinct requests of the working set
VOCAB = 50_000


def make_manager(length: int, pages: int, window_pages: int, slots: int, rows: int = 8) -> CacheManager:
    layers = {
        "full": AttentionLayer({"kv": Buffer((4, 8), jnp.float32)}),
        "window": AttentionLayer({"kv": Buffer((2, 8), jnp.float32)}, window=WINDOW),
        "state": RecurrentLayer({"h": Buffer((8,), jnp.float32)}),
    }
    tier = DeviceTier(pages={"full": pages, f"window:{WINDOW}": window_pages, "recurrent": slots})
    return CacheManager(CacheConfig(layers, rows, length, page_size=PAGE, tiers=(tier,)))


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCAB, count, dtype=np.int32)


def plan_step(manager: CacheManager, sequences: list[Sequence]) -> None:
    """`CacheManager.prepare` without its device work."""
    batch = manager._batches.of("prepare", sequences)
    builder = manager._host.builder
    if not builder.empty:
        builder.build()
        builder.clear()
    manager._batches.put_in_flight(batch)


def run_request(manager: CacheManager, tokens: np.ndarray, split: int = 0, priority: int = 0) -> int:
    """One request without its device work; returns the tokens reused. `split`: end a chunk there, too."""
    seq = manager.open(tokens, priority=priority)
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


class WorkingSet:
    """REQUESTS prompts of `length` tokens, half of each shared by all, and pools for half of them.

    Args:
      nodes: other runs of one page that the tree holds besides, which are worth more than the requests.
      siblings: of these, how many hang where the requests part, and differ inside their first page.
    """

    def __init__(self, length: int, nodes: int = 0, siblings: int = 0):
        rng = np.random.default_rng(0)
        self.length, half = length, length // 2
        shared = random_ids(rng, half)
        self.prompts = [np.concatenate((shared, random_ids(rng, length - half))) for _ in range(REQUESTS)]
        pages = (half // PAGE) * (REQUESTS + 1) // 2
        window_pages = max(REQUESTS * (WINDOW // PAGE + 1) // 2, length // PAGE + 2 * (WINDOW // PAGE + 1))
        self.manager = make_manager(length, pages + nodes, window_pages + nodes, 8 + REQUESTS // 2 + nodes)
        for prompt in self.prompts[:2]:
            run_request(self.manager, prompt, split=half)  # leaves the state where the requests part
        width = int((nodes - siblings) ** 0.5)
        for i in range(nodes - siblings):  # `width` runs of one page, each with `width` children
            run_request(self.manager, np.repeat(np.array([i % width, i], np.int32), PAGE)[: 2 * PAGE], priority=1)
        for _ in range(siblings):
            run_request(self.manager, np.concatenate((shared, random_ids(rng, PAGE))), priority=1)
        for prompt in self.prompts:
            run_request(self.manager, prompt)
        gc.collect()

    def run(self, i: int) -> int:
        """The i-th request."""
        return run_request(self.manager, self.prompts[i % REQUESTS])

    def evicted(self) -> int:
        """Pages evicted so far."""
        return sum(self.manager.stats().evicted_pages.values())


def bench_request(report: Report) -> None:
    """A whole request, half of it shared by all, evicting: open, resume, reserve, the plan, commit, close."""
    short, long = WorkingSet(2_048), WorkingSet(131_072)
    evicted, reused = short.evicted(), []
    (cost,) = against_h(lambda i: reused.append(short.run(i)), rounds=1_000)
    evicted = (short.evicted() - evicted) / 1_000
    report.add(
        "a request of 2,048 tokens", cost, "H", at_most=0.6, reused=statistics.median(reused), evicted_pages=evicted
    )
    few, many = alternate(short.run, long.run, rounds=200)
    report.add("a request of 131,072 tokens, against that", many / few, at_most=3, milliseconds=1e3 * many)
    for each in (short, long):
        each.manager.check()


def bench_size(report: Report) -> None:
    """The same request in a tree with 100,000 other nodes, and at a node with 100,000 children, against 1,000."""
    for what, few, many in (
        ("nodes in the tree", WorkingSet(2_048, nodes=1_000), WorkingSet(2_048, nodes=100_000)),
        ("siblings", WorkingSet(2_048, 1_000, siblings=1_000), WorkingSet(2_048, 100_000, siblings=100_000)),
    ):
        low, high = alternate(few.run, many.run, rounds=1_000)
        report.add(f"a request with 100,000 {what}, against 1,000", high / low, at_most=1.3, us=1e6 * high)


def bench_probe(report: Report) -> None:
    """`probe`: what a router asks of every replica."""
    rng = np.random.default_rng(3)
    manager = make_manager(131_073, 2 * 131_072 // PAGE, 2 * 131_072 // PAGE, 64)
    long, short, other = random_ids(rng, 131_072), random_ids(rng, 2_048), random_ids(rng, 2_048)
    for prompt in (long, short):
        run_request(manager, prompt)
    asked = {n: np.concatenate((prompt, prompt[:1])) for n, prompt in ((2_048, short), (131_072, long))}
    assert [manager.probe(asked[n]).tokens for n in asked] == list(asked) and not manager.probe(other).tokens
    hit, miss, deep = against_h(
        lambda _: manager.probe(asked[2_048]),
        lambda _: manager.probe(other),
        lambda _: manager.probe(asked[131_072]),
        rounds=1_000,
    )
    report.add("probe of 2,048 tokens, all there", hit, "H", at_most=0.15)
    report.add("probe of 2,048 tokens, nothing there", miss, "H", at_most=0.05)
    report.add("probe of 131,072 tokens, all there", deep, "H", at_most=1)


class Decoding:
    """`count` sequences that decode beyond their window, the ids known up to a page late.

    Args:
      aligned: they began together, so that they need their pages in the same step; else their lengths are random.
      full: the pools are full of what others left, so that every new page is one that is evicted.
    """

    def __init__(self, count: int, steps: int, aligned: bool = False, full: bool = False):
        rng = np.random.default_rng(2)
        length = WINDOW + 256 + steps + 2 * PAGE
        pages = 2 * count * (length // PAGE)
        self.manager = make_manager(length, pages, pages, 3 * count, rows=count)
        self.state = self.manager.init()
        for _ in range(2 * pages // (256 // PAGE) if full else 0):
            run_request(self.manager, random_ids(rng, 256))
        self.active: list[Sequence] = []
        for _ in range(count):
            prompt = random_ids(rng, WINDOW + (128 if aligned else int(rng.integers(64, 256))))
            seq = self.manager.open(prompt)
            if not seq.resume() or not seq.reserve(len(prompt)):
                raise RuntimeError("no room")
            self.state, _ = self.manager.prepare(self.state, [seq])
            seq.commit(prompt)
            self.active.append(seq)
        self.rows = [seq.row for seq in self.active]
        self.ids = rng.integers(0, VOCAB, (steps, count), dtype=np.int32)
        self.known = 0  # steps whose ids are committed

    def dispatch(self) -> None:
        """The page tables of the next step; the model's own step is the device's business."""
        self.state, rows = self.manager.prepare(self.state, self.active)
        assert len(rows) == len(self.rows)

    def step(self, i: int) -> None:
        """Batch verbs; every 16 steps the ids so far are committed."""
        manager, active = self.manager, self.active
        if manager.reserve(active, 1) < len(active):
            raise RuntimeError("no room")
        self.dispatch()
        manager.advance(active, 1)
        if i % PAGE == PAGE - 1:
            manager.commit(active, self.ids[self.known : i + 1].T.reshape(-1), i + 1 - self.known)
            self.known = i + 1

    def step_one_by_one(self, i: int) -> None:
        """Calls of the sequences themselves, and a commit per token."""
        for seq in self.active:
            if not seq.reserve(1):
                raise RuntimeError("no room")
        self.dispatch()
        for seq, token in zip(self.active, self.ids[i].reshape(-1, 1), strict=True):
            seq.advance(1)
            seq.commit(token)


def bench_decode(report: Report) -> None:
    """A step of 64 decoding sequences: reserve, prepare without waiting for the device, advance, commit."""
    steps = 20 * PAGE
    together, apart, evicting, single = (
        Decoding(64, steps, aligned=True), Decoding(64, steps), Decoding(64, steps, full=True), Decoding(64, steps)
    )  # fmt: skip
    runs = [
        ("begun together", together, together.step, 0.5),
        ("of random lengths", apart, apart.step, 0.5),
        ("of random lengths, the pools full", evicting, evicting.step, None),
        ("of random lengths, a call for each, commits each token", single, single.step_one_by_one, 2),
    ]
    tokens = random_ids(np.random.default_rng(9), 2_048)
    times: dict[str, list[float]] = {name: [] for name in [*(name for name, *_ in runs), "H"]}

    def timed(name: str, call: Callable[[int], object], i: int) -> None:
        start = time.perf_counter()
        call(i)
        times[name].append(time.perf_counter() - start)

    for i in range(steps):
        for name, decoding, call, _ in runs:
            timed(name, call, i)
            jax.block_until_ready(decoding.state)
        timed("H", lambda _: sha_chain(tokens), i)
    h = statistics.median(times["H"])
    for name, decoding, _, aim in runs:  # the mean over a page's steps: each has one commit of whole pages
        cost = float(np.median(np.array(times[name]).reshape(-1, PAGE).mean(axis=1)))
        report.add(f"a decode step of 64, {name}", cost / h, "H", at_most=aim, us=1e6 * cost)
        decoding.manager.check()
    (inside,) = against_h(inside_pages(Decoding(64, PAGE, aligned=True)), rounds=300)
    report.add("a step in which nothing crosses a page boundary", inside, "H", at_most=0.2)


def inside_pages(decoding: Decoding) -> Callable[[int], None]:
    """Reserve, prepare and advance where all sequences stay inside their pages, undone each time."""
    manager, active = decoding.manager, decoding.active
    for seq in active:  # to the middle of a page
        n = PAGE // 2 + (-seq.length % PAGE)
        if not seq.reserve(n):
            raise RuntimeError("no room")
        decoding.state, _ = manager.prepare(decoding.state, [seq])
        seq.advance(n)
    ledger = manager._host.ledger
    kept = (ledger.length, ledger.capacity, ledger.reserved)
    before = [array.copy() for array in kept]

    def step(i: int) -> None:
        if i == 0:
            before[:] = [array.copy() for array in kept]
        if i % 4 == 0:  # four tokens on, then back
            for array, copy in zip(kept, before, strict=True):
                array[:] = copy
        manager.reserve(active, 1)
        decoding.dispatch()
        manager.advance(active, 1)

    manager.reserve(active, 1)
    decoding.dispatch()
    manager.advance(active, 1)
    return step


def bench_prepare(report: Report) -> None:
    """`prepare` of 64 sequences, not waiting for the device."""
    idle, busy = Decoding(64, PAGE), Decoding(64, PAGE)
    idle.dispatch()
    builder, groups = busy.manager._host.builder, range(2)

    def nothing(_: int) -> CacheState:
        idle.dispatch()
        return idle.state

    def entries(_: int) -> None:
        for row in busy.rows:
            for group in groups:
                builder.mark(row, group, 3, 4)
        start = time.perf_counter()
        busy.dispatch()
        taken.append(time.perf_counter() - start)
        jax.block_until_ready(busy.state)

    taken: list[float] = []
    pools = busy.state.pools
    (cost,) = against_h(nothing, rounds=300)
    report.add("prepare with nothing to do", cost, "H", at_most=0.1)
    tokens = random_ids(np.random.default_rng(9), 2_048)
    _, h = alternate(entries, lambda _: sha_chain(tokens), rounds=300)
    report.add("prepare with one table entry per row and group", statistics.median(taken) / h, "H", at_most=1.5)
    same = all(a is b for a, b in zip(jax.tree.leaves(pools), jax.tree.leaves(busy.state.pools), strict=True))
    report.add("arrays of pools that went through that dispatch", 0 if same else 1, at_most=0)


class Evicting:
    """A full tree of `nodes` leaves of one page each."""

    def __init__(self, nodes: int):
        self.rng = np.random.default_rng(4)
        self.manager = make_manager(2_048, nodes, nodes, nodes)
        self.pool = self.manager._host.pools[0]
        for _ in range(nodes):
            run_request(self.manager, random_ids(self.rng, PAGE))

    def seconds_per_page(self, k: int) -> float:
        """Takes k pages, which are evicted for it; then fills the tree again."""
        start = time.perf_counter()
        pages = self.manager._host.tree.allocate(self.pool, k)
        taken = time.perf_counter() - start
        self.pool.release(pages)
        while self.pool.free:
            run_request(self.manager, random_ids(self.rng, PAGE))
        return taken / k


def bench_evict(report: Report) -> None:
    """Making room for k pages: linear in k, whatever the tree."""
    small, large = Evicting(1_000), Evicting(32_000)
    times: dict[tuple[Evicting, int], list[float]] = {(tree, k): [] for tree in (small, large) for k in (16, 256)}
    for _ in range(25):
        for (tree, k), taken in times.items():
            taken.append(tree.seconds_per_page(k))
    cost = {key: statistics.median(taken) for key, taken in times.items()}
    base = cost[small, 16]
    report.add("evicting 256 pages, per page, against 16", cost[small, 256] / base, at_most=1.1, us=1e6 * base)
    report.add("256 in a tree of 32,000 leaves, against 1,000", cost[large, 256] / cost[small, 256], at_most=1.3)
    report.add("allocations that failed with enough pages free", failures_of_fragmentation(), at_most=0)


def failures_of_fragmentation() -> int:
    """Sequences of random sizes come and go; every request for no more pages than are free has to succeed."""
    rng = np.random.default_rng(5)
    manager = make_manager(2_048, 512, 512, 64, rows=32)
    open_ones: list[Sequence] = []
    failed = 0
    for _ in range(2_000):
        if open_ones and (len(open_ones) == 32 or rng.random() < 0.5):
            open_ones.pop(int(rng.integers(len(open_ones)))).close()
        seq, count = manager.open(), int(rng.integers(1, 60))
        free = min(pool.free for pool in manager._host.pools[:2])
        if seq.resume() and count <= free:
            failed += not seq.reserve(count * PAGE)
        open_ones.append(seq)
    return failed


PARTS = {
    "request": bench_request,
    "size": bench_size,
    "probe": bench_probe,
    "decode": bench_decode,
    "prepare": bench_prepare,
    "evict": bench_evict,
}

if __name__ == "__main__":
    main(__doc__, PARTS)
