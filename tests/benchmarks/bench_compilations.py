"""How often the backend compiles during random traffic, when it does so for the last time, and what warmup takes.

    python -m tests.benchmarks.bench_compilations [traffic] [warmup] [--json FILE]

traffic: a small hybrid model (full attention, a window with sinks, a recurrent state), its jitted step with the state
donated, prefill chunks padded to two sizes and decode batches padded to the number of rows. Requests of random length
come, share prefixes, are suspended, resumed and closed while the pools are too small for all of them, so that every
kind of plan comes up: none, table entries, copies, both; with host memory also what leaves for it and comes back.
A day of it is 20,000 steps: jkv's own variants, and nothing of anybody's in the second half.

warmup: `CacheManager.warmup` of a model of 32 layers, each time for pools of other sizes, which compile anew.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from tests.benchmarks.report import Report, main

EVENT = "/jax/core/compile/backend_compile_duration"
ROWS, MAX_LENGTH, PAGE, VOCAB, DIM, HEADS = 6, 256, 8, 64, 16, 2
CHUNKS = (16, 64)  # prefill chunks are padded to one of these
STEPS = 20_000
ROUNDS = 3  # of warmup


def make_manager(host: bool = False) -> jkv.CacheManager:
    """Pools for about two and a half sequences of max_length, and six live states with ten snapshots.

    `host`: and host memory for as much again.
    """
    layers = {
        "full": jkv.AttentionLayer(jkv.kv_buffers(HEADS, DIM // HEADS, jnp.float32)),
        "window": jkv.AttentionLayer(jkv.kv_buffers(1, DIM // HEADS, jnp.bfloat16), window=32, sinks=4),
        "state": jkv.RecurrentLayer({"h": jkv.Buffer((DIM,), jnp.float32)}),
    }
    pages = {"full": 80, "window:32+4": 60, "recurrent": ROWS + 10}
    tiers = (jkv.DeviceTier(pages=pages), *([jkv.HostTier(pages=pages)] if host else []))
    return jkv.CacheManager(jkv.CacheConfig(layers, ROWS, MAX_LENGTH, page_size=PAGE, tiers=tiers))


@functools.partial(jax.jit, donate_argnames="state")
def model_step(
    params: jax.Array, state: jkv.CacheState, rows: jax.Array, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jkv.CacheState]:
    """params: [VOCAB, DIM], rows: [B], tokens and positions: [B, T] -> next ids: [B]."""
    valid = (positions >= 0)[..., None]
    x = jnp.where(valid, params[tokens], 0)
    for layer, kv_heads, dtype in (("full", HEADS, jnp.float32), ("window", 1, jnp.bfloat16)):
        q = x.reshape(*tokens.shape, HEADS, DIM // HEADS).astype(dtype)
        kv = jnp.repeat(q[:, :, :kv_heads], 2, axis=2)
        out, state = jkv.append_attend(state, layer, rows, positions, q, {"kv": kv})
        x = x + out.reshape(x.shape).astype(jnp.float32)
    after = 0.9 * jkv.read_state(state, "state", rows)["h"] + jnp.where(valid, x, 0).sum(axis=1)
    state = jkv.write_state(state, "state", rows, {"h": after})
    return jnp.argmax(after @ params.T, axis=-1).astype(jnp.int32), state


class Request:
    """A prompt on its way through the cache, then up to `new` generated tokens."""

    def __init__(self, seq: jkv.Sequence, prompt: np.ndarray, new: int):
        self.seq, self.prompt, self.stop = seq, prompt, len(prompt) + new

    @property
    def rest(self) -> np.ndarray:
        """What is still to be written of the prompt."""
        return self.prompt[self.seq.length :]


class Traffic:
    """Random requests against one manager; `step` is one prepare and one call of the model.

    Args:
      host: with host memory.
      model: False: only the prepare.

    Attributes:
      own: compilations during `prepare`.
    """

    def __init__(self, seed: int = 0, host: bool = False, model: bool = True):
        self.rng = np.random.default_rng(seed)
        self.manager = make_manager(host)
        self.state = self.manager.init()
        self.model = model
        self.own = 0
        self.params = jax.device_put(self.rng.normal(size=(VOCAB, DIM)).astype(np.float32), jax.devices()[0])
        self.system_prompts = [self.rng.integers(0, VOCAB, n, dtype=np.int32) for n in (24, 70, 100)]
        self.active: list[Request] = []
        self.suspended: list[Request] = []

    def step(self) -> None:
        """Lets requests come and go, then runs one prefill chunk or one decode step of all that can."""
        while True:
            self._come_and_go()
            prefilling = [request for request in self.active if len(request.rest)]
            decoding = [request for request in self.active if not len(request.rest)]
            if prefilling and (not decoding or self.rng.random() < 0.5):
                if self._prefill(prefilling[0]):
                    return
            elif decoding and self._decode(decoding):
                return

    def _come_and_go(self) -> None:
        rng = self.rng
        if self.suspended and rng.random() < 0.3 and self.suspended[0].seq.resume():
            self.active.append(self.suspended.pop(0))
        if len(self.active) + len(self.suspended) < ROWS and (not self.active or rng.random() < 0.4):
            own = rng.integers(0, VOCAB, rng.integers(1, 80), dtype=np.int32)
            prompt = np.concatenate((self.system_prompts[rng.integers(3)], own)) if rng.random() < 0.8 else own
            request = Request(self.manager.open(prompt), prompt, int(rng.integers(1, 60)))
            (self.active if request.seq.resume() else self.suspended).append(request)
        if len(self.active) > 1 and rng.random() < 0.05:
            self.active[0].seq.suspend()
            self.suspended.append(self.active.pop(0))
        if self.suspended and rng.random() < 0.05:
            self.suspended.pop().seq.close()

    def _make_room(self, request: Request, n: int) -> bool:
        """Reserves; where there is no room, the youngest request goes, so that the others can finish."""
        if request.seq.reserve(n):
            return True
        victim = (self.suspended or self.active).pop()
        victim.seq.close()
        return False

    def _prefill(self, request: Request) -> bool:
        stops = [point - request.seq.length for point in request.seq.snapshot_points]
        n = min([len(request.rest), CHUNKS[self.rng.integers(len(CHUNKS))], *stops])
        if not self._make_room(request, n):
            return False
        size = next(size for size in CHUNKS if n <= size)
        ids = request.rest[:n]
        self._run([request], size, [ids])
        request.seq.commit(ids)
        return True

    def _decode(self, requests: list[Request]) -> bool:
        for request in requests:
            if not self._make_room(request, 1):
                return False
        ids = [self.rng.integers(0, VOCAB, 1, dtype=np.int32) for _ in requests]
        self._run(requests, 1, ids)
        for request, token in zip(requests, ids, strict=True):
            request.seq.commit(token)
            if request.seq.length >= request.stop:
                request.seq.close()
                self.active.remove(request)
        return True

    def _run(self, requests: list[Request], size: int, ids: list[np.ndarray]) -> None:
        """One step: tokens padded to `size`, a decode batch padded to all rows."""
        with compilations() as seen:
            self.state, rows = self.manager.prepare(self.state, [request.seq for request in requests])
        self.own += len(seen)
        if not self.model:
            return
        batch = 1 if size > 1 else ROWS
        padded, tokens = np.full(batch, -1, np.int32), np.zeros((batch, size), np.int32)
        positions = np.full((batch, size), -1, np.int32)
        padded[: len(rows)] = rows
        for i, (request, new) in enumerate(zip(requests, ids, strict=True)):
            tokens[i, : len(new)] = new
            positions[i, : len(new)] = request.seq.length + np.arange(len(new))
        _, self.state = model_step(self.params, self.state, padded, tokens, positions)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one entry at each compilation by the backend."""
    seen: list[str] = []

    def listener(event: str, duration: float, **_: Any) -> None:
        if event == EVENT:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def count_compilations(steps: int, seed: int = 0, host: bool = False) -> tuple[Traffic, list[int]]:
    """Runs `steps` steps; the number of compilations during each."""
    with compilations() as seen:
        traffic, counts = Traffic(seed, host), []
        for _ in range(steps):
            before = len(seen)
            traffic.step()
            counts.append(len(seen) - before)
    return traffic, counts


def bench_traffic(report: Report) -> None:
    """20,000 steps of random traffic, without and with host memory."""
    for host, where in ((False, "device alone"), (True, "with host memory")):
        jax.clear_caches()
        traffic, counts = count_compilations(STEPS, host=host)
        stats, last = traffic.manager.stats(), max(i for i, n in enumerate(counts) if n)
        moved = sum(stats.tiers["device"].offloaded.values()) if host else 0
        report.add(
            f"{where}: variants of jkv's own",
            traffic.own,
            at_most=8,
            compilations=sum(counts),
            last_in_step=last,
            requests=stats.lookups,
            reused_tokens=stats.reused_tokens,
            evicted_pages=sum(stats.evicted_pages.values()),
            offloaded_pages=moved,
            snapshots=stats.snapshots_taken,
        )
        report.add(f"{where}: compilations in the second half", sum(counts[STEPS // 2 :]), at_most=0)
        traffic.manager.check()


def layers_of(count: int) -> dict[str, jkv.AttentionLayer | jkv.RecurrentLayer]:
    """Of 8 layers 3 with full attention, 3 with a window, 2 with a recurrent state of two buffers."""
    kinds = (
        *[jkv.AttentionLayer(jkv.kv_buffers(2, 16))] * 3,
        *[jkv.AttentionLayer(jkv.kv_buffers(1, 16), window=128)] * 3,
        *[jkv.RecurrentLayer({"conv": jkv.Buffer((16, 3)), "ssm": jkv.Buffer((4, 4), jnp.float32)})] * 2,
    )
    return {f"layer{i}": kinds[i % len(kinds)] for i in range(count)}


def bench_warmup(report: Report) -> None:
    """Seconds of `warmup`, 32 layers in three groups."""
    for host, where in ((False, "device alone"), (True, "with host memory")):
        taken, variants = [], 0
        for turn in range(ROUNDS):
            other = turn + ROUNDS * host
            pages = {"full": 1024 + other, "window:128": 512 + other, "recurrent": 64 + other}
            tiers = (jkv.DeviceTier(pages=pages), *([jkv.HostTier(pages=pages)] if host else []))
            manager = jkv.CacheManager(jkv.CacheConfig(layers_of(32), 32 + other, 4096, tiers=tiers))
            state = manager.init()
            with compilations() as seen:
                start = time.perf_counter()
                manager.warmup(state)
                taken.append(time.perf_counter() - start)
            variants = len(seen)
        report.add(
            f"{where}: warmup, 32 layers", statistics.median(taken), "s", at_most=5, first=taken[0], variants=variants
        )
        report.add(f"{where}: variants", variants, at_most=8)


PARTS = {"traffic": bench_traffic, "warmup": bench_warmup}

if __name__ == "__main__":
    main(__doc__, PARTS)
