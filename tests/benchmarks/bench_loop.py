"""What the cache costs a decode loop, with the models of the examples.

    python -m tests.benchmarks.bench_loop [PART ...] [--json FILE]

    warm_hybrid    a turn of 256 tokens after 1,792 that are reused, against the same jitted step alone at that length
    warm_smollm2   the same with SmolLM2
    zero_reuse     serving prompts that share nothing, with commits against without

A warm turn is open, resume, reserve, prepare, the jitted step of 256 tokens, commit and close. Every turn says what
none said before, so after some turns each evicts what an earlier one left. The step alone runs on the same state, in
pages that it has already; both until the device is done.

In `zero_reuse` the server of examples/hybrid_decode.py serves requests of 256 + 48 tokens in 8 rows. Without commits it
advances all the same, so the states at snapshot points are copied in both and the device does the same; but nothing is
published, found or evicted. With commits the pools are too small to keep all.

Both sides of a ratio run in turn; it is the median of the pairs' ratios. First both give the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jkv
from examples import chat_smollm2, hybrid_decode
from tests.benchmarks.report import Report, main

REUSED, NEW = 1_792, 256
CHUNK = 256  # in which the reused tokens are computed
PAGE = 16
TURNS_KEPT = 6  # so many turns have room beside the one that runs


def ratio_of_pairs(one: Callable[[int], object], other: Callable[[int], object], pairs: int) -> tuple[float, float]:
    """The median of one(i) / other(i) in time, and the median seconds of `one`; who is first changes in turn."""
    ratios, seconds = [], []
    for i in range(pairs):
        taken = {}
        for call in (one, other) if i % 2 else (other, one):
            start = time.perf_counter()
            call(i)
            taken[call] = time.perf_counter() - start
        ratios.append(taken[one] / taken[other])
        seconds.append(taken[one])
    return statistics.median(ratios), statistics.median(seconds)


# ---- warm turns ------------------------------------------------------------------------------------------------------


class Prefill(Protocol):
    """A model's step for one sequence, and its cache."""

    manager: jkv.CacheManager
    state: jkv.CacheState
    vocab: int

    def prepare(self, seq: jkv.Sequence, count: int) -> Any:
        """The step's arguments for `count` tokens from the sequence's length on."""
        ...

    def step(self, batch: Any, tokens: np.ndarray) -> jax.Array:
        """Runs the jitted step on `state`; what it says about the token after the last."""
        ...


class HybridPrefill:
    """The model of examples/hybrid_decode.py."""

    vocab = hybrid_decode.VOCAB

    def __init__(self) -> None:
        self.steps = hybrid_decode.make_steps(hybrid_decode.Model(nnx.Rngs(0)))
        window = f"window:{hybrid_decode.WINDOW}"
        self.manager = warm_manager(hybrid_decode.cache_layers(), **{window: 64, "recurrent": 4 + TURNS_KEPT})
        self.state = self.manager.init()
        self.sampled = jax.device_put(np.zeros(2, np.int32), jax.devices()[0])

    def prepare(self, seq: jkv.Sequence, count: int) -> jkv.Ragged:
        self.state, batch = self.manager.prepare_ragged(self.state, [seq], count, pad_tokens=count, pad_sequences=1)
        return batch

    def step(self, batch: jkv.Ragged, tokens: np.ndarray) -> jax.Array:
        (_, logits), self.sampled, self.state = self.steps.step(self.state, self.sampled, batch, tokens)
        return logits


class SmolLM2Prefill:
    """The model of examples/chat_smollm2.py."""

    def __init__(self) -> None:
        reader = chat_smollm2.open_gguf()
        config = chat_smollm2.read_config(reader)
        graphdef, self.params = chat_smollm2.load_model(reader, config, quiet=True)
        self.vocab = config.vocab
        kv = jkv.kv_buffers(config.kv_heads, config.head_dim, jnp.float32)
        self.manager = warm_manager({f"blk.{i}": jkv.AttentionLayer(kv) for i in range(config.layers)})
        self.state = self.manager.init()

        def step(params: nnx.State, state: jkv.CacheState, *batch: jax.Array) -> tuple[jax.Array, jkv.CacheState]:
            tokens, positions, rows = batch
            return nnx.merge(graphdef, params)(tokens, positions, rows, state)

        self.jitted = jax.jit(step, donate_argnames="state")

    def prepare(self, seq: jkv.Sequence, count: int) -> tuple[np.ndarray, np.ndarray]:
        self.state, rows = self.manager.prepare(self.state, [seq])
        return np.arange(seq.length, seq.length + count, dtype=np.int32)[None], rows

    def step(self, batch: tuple[np.ndarray, np.ndarray], tokens: np.ndarray) -> jax.Array:
        logits, self.state = self.jitted(self.params, self.state, tokens[None], *batch)
        return logits


def warm_manager(layers: dict[str, Any], **pages: int) -> jkv.CacheManager:
    """With two rows, room for the reused tokens and for TURNS_KEPT turns beside two that run."""
    full = (REUSED + (2 + TURNS_KEPT) * NEW) // PAGE
    tier = jkv.DeviceTier(pages={"full": full, **pages})
    return jkv.CacheManager(jkv.CacheConfig(layers, 2, REUSED + NEW, page_size=PAGE, tiers=(tier,)))


def compute(prefill: Prefill, seq: jkv.Sequence, tokens: np.ndarray) -> jax.Array:
    """The next tokens of a sequence: one step of the decode loop."""
    if not seq.reserve(len(tokens)):
        raise RuntimeError(f"no pages for {len(tokens)} more tokens")
    out = prefill.step(prefill.prepare(seq, len(tokens)), tokens)
    seq.commit(tokens)
    return out


def bench_warm(report: Report, prefill: Prefill, name: str, pairs: int) -> None:
    """A warm turn against its step alone."""
    rng = np.random.default_rng(0)
    reused, *turns = (rng.integers(0, prefill.vocab, count, np.int32) for count in (REUSED, *[NEW] * (pairs + 3)))
    prompts = []
    for i, turn in enumerate(turns):
        turn[0] = i  # no turn shares a token with another
        prompts.append(np.concatenate([reused, turn]))

    def warm(i: int) -> jax.Array:
        with prefill.manager.open(prompts[i]) as seq:
            if not seq.resume() or seq.length != REUSED:
                raise RuntimeError(f"turn {i} reuses {seq.length} of {REUSED} tokens: {seq.match}")
            out = compute(prefill, seq, turns[i])
        return jax.block_until_ready((out, prefill.state))[0]

    with prefill.manager.open(reused) as first:  # it leaves a recurrent state at its end
        first.resume()
        for at in range(0, REUSED, CHUNK):
            compute(prefill, first, reused[at : at + CHUNK])
    with prefill.manager.open(prompts[-1]) as alone:
        if not (alone.resume() and alone.length == REUSED and alone.reserve(NEW)):
            raise RuntimeError(f"{alone} has not what the first left")
        batch = prefill.prepare(alone, NEW)

        def step(i: int) -> jax.Array:
            return jax.block_until_ready((prefill.step(batch, turns[i]), prefill.state))[0]

        expected = np.asarray(step(-1))  # of a hybrid, only now from the right state
        np.testing.assert_allclose(np.asarray(warm(-1)), expected, rtol=1e-4, atol=1e-4)
        ratio_of_pairs(lambda i: warm(pairs + i), lambda i: step(pairs + i), 2)
        ratio, seconds = ratio_of_pairs(warm, step, pairs)
    report.add(f"{name}: {NEW} tokens after {REUSED:,} reused", ratio, at_most=1.1, ms=1e3 * seconds, pairs=pairs)


def bench_warm_hybrid(report: Report) -> None:
    """A turn after 1,792 reused tokens against its step alone; full attention, windows and recurrent states."""
    bench_warm(report, HybridPrefill(), "hybrid model", pairs=101)


def bench_warm_smollm2(report: Report) -> None:
    """A turn after 1,792 reused tokens against its step alone; SmolLM2-135M."""
    if missing := chat_smollm2.missing_packages():
        print(f"skipped. {missing}")
        return
    bench_warm(report, SmolLM2Prefill(), "SmolLM2-135M", pairs=11)


# ---- nothing to reuse ------------------------------------------------------------------------------------------------

REQUESTS, PROMPT, ANSWER = 16, 256, 48
PAIRS = 25


class NoCommits(hybrid_decode.Server):
    """Serves the same and publishes nothing."""

    def commit_known(self, requests: list[hybrid_decode.Request]) -> None:
        pass


def different_prompts() -> list[tuple[int, hybrid_decode.Request]]:
    """Requests that are all there at once and differ from the first token on."""
    prompts = np.random.default_rng(0).integers(0, hybrid_decode.VOCAB, (REQUESTS, PROMPT), np.int32)
    prompts[:, 0] = np.arange(REQUESTS)
    return [(0, hybrid_decode.Request(f"{i}.1", prompt, ANSWER, [])) for i, prompt in enumerate(prompts.tolist())]


def bench_zero_reuse(report: Report) -> None:
    """Serving prompts that share nothing, with commits against without."""
    steps = hybrid_decode.make_steps(hybrid_decode.Model(nnx.Rngs(0)))
    per_request = -(-(PROMPT + ANSWER) // hybrid_decode.PAGE_SIZE)
    room = REQUESTS * 5 // 8 * per_request  # for all that run at a time, and little beside
    pages = {"full": room, f"window:{hybrid_decode.WINDOW}": room, "recurrent": REQUESTS}
    config = jkv.CacheConfig(
        hybrid_decode.cache_layers(),
        hybrid_decode.MAX_SEQUENCES,
        PROMPT + ANSWER,
        page_size=hybrid_decode.PAGE_SIZE,
        tiers=(jkv.DeviceTier(pages=pages),),
    )
    for overlap, name in ((True, "a step always in flight"), (False, "each step's ids awaited")):
        servers = hybrid_decode.Server(steps, config, overlap), NoCommits(steps, config, overlap)
        commits, none = (lambda _, server=server: server.serve(different_prompts()) for server in servers)
        ratio_of_pairs(commits, none, 2)
        answers = [{request.name: request.generated for request in server.done} for server in servers]
        reused = {tokens for server in servers for request in server.done for tokens in request.reused}
        if answers[0] != answers[1] or servers[0].steps_run != servers[1].steps_run or reused != {0}:
            raise RuntimeError("with commits and without them the servers did not do the same")
        ratio, seconds = ratio_of_pairs(commits, none, PAIRS)
        tokens = sum(len(request.text) for request in servers[0].done)
        report.add(
            f"{REQUESTS} prompts of {PROMPT} tokens, {name}",
            ratio,
            at_most=1.05,
            ms_per_step=1e3 * seconds / servers[0].steps_run,
            tokens=tokens,
            pairs=PAIRS,
        )


PARTS = {
    "warm_hybrid": bench_warm_hybrid,
    "warm_smollm2": bench_warm_smollm2,
    "zero_reuse": bench_zero_reuse,
}

if __name__ == "__main__":
    main(__doc__, PARTS)
