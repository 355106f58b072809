"""How often the backend compiles during random traffic, and when it does so for the last time.

    python -m tests.benchmarks.bench_compilations

A small hybrid model (full attention, a window with sinks, a recurrent state), its jitted step with the state donated,
prefill chunks padded to two sizes and decode batches padded to the number of rows. Requests of random length come,
share prefixes, are suspended, resumed and closed while the pools are too small for all of them, so that every kind of
plan comes up: none, table entries, copies, both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv

EVENT = "/jax/core/compile/backend_compile_duration"
ROWS, MAX_LENGTH, PAGE, VOCAB, DIM, HEADS = 6, 256, 8, 64, 16, 2
CHUNKS = (16, 64)  # prefill chunks are padded to one of these
STEPS = 1_000


def make_manager() -> jkv.CacheManager:
    """Pools for about two and a half sequences of max_length, and six live states with ten snapshots."""
    layers = {
        "full": jkv.AttentionLayer(jkv.kv_buffers(HEADS, DIM // HEADS, jnp.float32)),
        "window": jkv.AttentionLayer(jkv.kv_buffers(1, DIM // HEADS, jnp.bfloat16), window=32, sinks=4),
        "state": jkv.RecurrentLayer({"h": jkv.Buffer((DIM,), jnp.float32)}),
    }
    tier = jkv.DeviceTier(pages={"full": 80, "window:32+4": 60, "recurrent": ROWS + 10})
    return jkv.CacheManager(jkv.CacheConfig(layers, ROWS, MAX_LENGTH, page_size=PAGE, tiers=(tier,)))


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
    """Random requests against one manager; `step` is one prepare and one call of the model."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.manager = make_manager()
        self.state = self.manager.init()
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
        self.state, rows = self.manager.prepare(self.state, [request.seq for request in requests])
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


def count_compilations(steps: int, seed: int = 0) -> tuple[Traffic, list[int]]:
    """Runs `steps` steps; the number of compilations during each."""
    with compilations() as seen:
        traffic, counts = Traffic(seed), []
        for _ in range(steps):
            before = len(seen)
            traffic.step()
            counts.append(len(seen) - before)
    return traffic, counts


def main() -> None:
    traffic, counts = count_compilations(STEPS)
    stats, last = traffic.manager.stats(), max(i for i, n in enumerate(counts) if n)
    print(f"JAX {jax.__version__}: {sum(counts)} compilations in {STEPS:,} steps, the last one in step {last}")
    print(f"in the second half: {sum(counts[STEPS // 2 :])}")
    print(
        f"traffic: {stats.lookups} requests, {stats.reused_tokens:,} of {stats.looked_up_tokens:,} prompt tokens "
        f"reused, {sum(stats.evicted_pages.values()):,} pages evicted, {stats.snapshots_taken} snapshots"
    )
    traffic.manager.check()


if __name__ == "__main__":
    main()
