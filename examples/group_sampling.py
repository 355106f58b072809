"""Many samples of one prompt through jkv: one prefill and a fork, against as many separate runs.

    python examples/group_sampling.py                  # under a minute on two cores, nothing is downloaded

For best-of-n, self-consistency or reinforcement learning. Forks share the prompt's whole pages; each has a private copy
of the page behind them and of the recurrent state. Every sample has random keys of its own, so it must come out the
same in whichever of these ways it is computed:

    fork              the prompt is computed once
    max_reuse=0       computed for each sample; at the commits jkv finds that the pages are equal and keeps one of each
    scope of its own  computed and kept for each sample
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import hybrid_decode
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jkv

LAYERS = ("ssm", "full")
MAX_LENGTH = 512
PAGE_SIZE = 16
CHUNK = 64  # tokens of a prefill step
TEMPERATURE = 0.8
PROMPT = (
    "You are a careful solver. Think step by step, check each step, and give the answer in the last line. A train "
    "leaves at nine and goes 80 km/h; another leaves at ten and goes 120 km/h. When does the second catch up? "
)
WAYS = ("fork", "max_reuse=0", "scope of its own")


@dataclasses.dataclass(frozen=True)
class Result:
    """One way to get the samples."""

    texts: list[list[int]]  # without the prompt
    prefilled: int  # tokens
    pages: int  # of full attention, in use at most
    states: int  # recurrent, in use at most
    seconds: float


class Sampler:
    """Samples several continuations of one prompt from a small hybrid model with random weights."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        graphdef, self.params = nnx.split(hybrid_decode.Model(nnx.Rngs(0), LAYERS))
        self.samples = samples
        self.manager = jkv.CacheManager(
            jkv.CacheConfig(
                layers=hybrid_decode.cache_layers(LAYERS),
                max_sequences=samples,
                max_length=MAX_LENGTH,
                page_size=PAGE_SIZE,
                tiers=(jkv.DeviceTier(pages=samples * MAX_LENGTH // PAGE_SIZE),),
            )
        )
        self.state = self.manager.init()

        def step(
            params: Any, state: jkv.CacheState, batch: jkv.Ragged, tokens: jax.Array
        ) -> tuple[jax.Array, jkv.CacheState]:
            """What comes after each sequence's last token, int32[R]; sequence i is sample i."""
            model, cache = nnx.merge(graphdef, params), hybrid_decode.Cached(state, batch)
            hidden = model(tokens, batch.positions, cache)
            logits = model.head(hidden[batch.cu_q_lens[1:] - 1])

            def choose(sample: jax.Array, length: jax.Array, logits: jax.Array) -> jax.Array:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), length)
                return jax.random.categorical(key, logits / TEMPERATURE)

            ids = jax.vmap(choose)(jnp.arange(len(logits)), batch.kv_lens, logits)
            return ids.astype(jnp.int32), cache.state

        self.step = jax.jit(step, donate_argnames="state")

    def sample(self, prompt: list[int], new_tokens: int, way: str) -> Result:
        """All samples, from an empty cache."""
        self.manager.clear()
        self.prefilled = self.pages = self.states = 0
        start = time.perf_counter()
        if way == "fork":
            first = self.prefill(prompt, jkv.Scope())
            sequences = [first, *first.fork(self.samples - 1)]
            if len(sequences) < self.samples:
                raise RuntimeError("no room for the forks, although there is enough for all samples one by one")
        else:
            scopes = [jkv.Scope(salt=i if way == "scope of its own" else None) for i in range(self.samples)]
            sequences = [self.prefill(prompt, scope) for scope in scopes]
        ids = np.full(self.samples, prompt[-1], np.int32)
        texts = []
        for _ in range(new_tokens):
            ids = self.run(sequences, ids, 1)[: self.samples]
            texts.append(ids)
        for seq in sequences:
            seq.close()
        seconds = time.perf_counter() - start
        return Result(np.transpose(texts).tolist(), self.prefilled, self.pages, self.states, seconds)

    def prefill(self, prompt: list[int], scope: jkv.Scope) -> jkv.Sequence:
        """A sequence that has all of the prompt but its last token, with which sampling begins."""
        seq = self.manager.open(prompt, scope=scope, max_reuse=0)
        if not seq.resume():
            raise RuntimeError("no row for a sample, although there is one for each")
        while seq.length < len(prompt) - 1:
            chunk = np.array(prompt[seq.length : -1][:CHUNK], np.int32)
            self.run([seq], chunk, len(chunk))
            self.prefilled += len(chunk)
        return seq

    def run(self, sequences: list[jkv.Sequence], tokens: np.ndarray, count: int) -> np.ndarray:
        """One step over `count` tokens of each sequence, back to back in `tokens`; returns what comes next."""
        if self.manager.reserve(sequences, count) < len(sequences):
            raise RuntimeError("no pages, although there are enough for every sample at its longest")
        pages, states = (in_use(self.manager, pool) for pool in ("full", "recurrent"))
        self.pages, self.states = max(self.pages, pages), max(self.states, states)
        self.state, batch = self.manager.prepare_ragged(
            self.state, sequences, count, pad_tokens=(self.samples, CHUNK), pad_sequences=self.samples
        )
        padded = np.zeros(len(batch.positions), np.int32)
        padded[: len(tokens)] = tokens
        ids, self.state = self.step(self.params, self.state, batch, padded)
        self.manager.commit(sequences, tokens, count)
        return np.asarray(ids)


def in_use(manager: jkv.CacheManager, pool: str) -> int:
    """Pages, or state slots, that open sequences need."""
    stats = manager.stats().pools[pool]
    return stats.total - stats.free - stats.evictable


def measure(samples: int, prompt: str, new_tokens: int, seed: int = 0) -> dict[str, Result]:
    """Every way, twice: the first time everything is compiled."""
    sampler, ids = Sampler(samples, seed), hybrid_decode.bytes_of(prompt)
    for way in WAYS:
        sampler.sample(ids, new_tokens, way)
    return {way: sampler.sample(ids, new_tokens, way) for way in WAYS}


def report(results: dict[str, Result]) -> bool:
    """A table and the verdict."""
    forked = results["fork"]
    print(f"{len(forked.texts)} samples of {len(forked.texts[0])} tokens")
    print("                    tokens       pages at      states at")
    print("way               prefilled   the peak, full    the peak      ms")
    for way, result in results.items():
        print(f"{way:16}  {result.prefilled:9}   {result.pages:14}   {result.states:9}   {result.seconds * 1e3:5.0f}")
    tokens = sum(map(len, forked.texts))
    for way, result in results.items():
        different = [i for i, both in enumerate(zip(forked.texts, result.texts, strict=True)) if both[0] != both[1]]
        if different:
            print(f"FAILED: {way}: samples {different} differ from those of the fork")
            return False
    print(f"OK: all {tokens} tokens of {len(forked.texts)} samples are the same in each of {len(results)} ways")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 1 if a sample differs."""
    parser = argparse.ArgumentParser(
        description="Sample a prompt many times through jkv, by forks and by separate runs."
    )
    parser.add_argument("--samples", type=int, default=16, help="samples of the prompt (default: 16)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    options = parser.parse_args(argv)
    if not 2 <= options.samples <= CHUNK:
        parser.error(f"--samples must be in 2..{CHUNK}, got {options.samples}")
    longest = MAX_LENGTH - len(hybrid_decode.bytes_of(PROMPT))
    if not 1 <= options.tokens <= longest:
        parser.error(f"--tokens must be in 1..{longest}, got {options.tokens}")
    return 0 if report(measure(options.samples, PROMPT, options.tokens, options.seed)) else 1


if __name__ == "__main__":
    sys.exit(main())
