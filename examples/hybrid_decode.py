"""A hybrid language model served through jkv: continuous batching, shared prefixes, one step always in flight.

    python examples/hybrid_decode.py                  # under a minute on two cores, nothing is downloaded
    python examples/hybrid_decode.py --requests 60 --seed 3 --quiet

The model has random weights, so what it writes is noise; the point is that it writes the same noise with a cache as
without one. Four sections, each meant to be copied:

  1. Model      full attention, sliding-window attention and a Mamba-2-like recurrence, in Flax NNX
  2. Steps      the jitted functions, their state donated
  3. Serving    a waiting queue, steps that mix prompts and decodes, requests closed and reopened when pages run out
  4. Report     every generated token against a plain recomputation, times, pages, compiled variants
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jkv

# ---- 1. Model --------------------------------------------------------------------------------------------------------
# A step's tokens lie flat, [T]: several of one sequence, then several of the next. What the layers need of the cache
# they get from a `Cached`, or for whole texts without a cache from an `Uncached`.

VOCAB = 256  # bytes
DIM = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WINDOW = 48
SSM_HEADS, SSM_HEAD_DIM, SSM_STATE, CONV = 4, 32, 16, 4
SSM_INNER = SSM_HEADS * SSM_HEAD_DIM
CONV_CHANNELS = SSM_INNER + 2 * SSM_STATE  # x, B and C go through the convolution
LAYERS = ("ssm", "window", "ssm", "full", "ssm", "window")
STATE = {  # what a recurrent layer keeps
    "conv": jkv.Buffer((CONV_CHANNELS, CONV - 1), jnp.float32),
    "ssm": jkv.Buffer((SSM_HEADS, SSM_HEAD_DIM, SSM_STATE), jnp.float32),
}


def layer_names(layers: Sequence[str] = LAYERS) -> list[str]:
    """The names by which the model and the cache know the layers, e.g. "3.full"."""
    return [f"{index}.{kind}" for index, kind in enumerate(layers)]


def cache_layers(layers: Sequence[str] = LAYERS) -> dict[str, jkv.AttentionLayer | jkv.RecurrentLayer]:
    """What each layer keeps, as jkv wants it declared."""
    kinds: dict[str, jkv.AttentionLayer | jkv.RecurrentLayer] = {
        "full": jkv.AttentionLayer(jkv.kv_buffers(KV_HEADS, HEAD_DIM, jnp.float32)),
        "window": jkv.AttentionLayer(jkv.kv_buffers(KV_HEADS, HEAD_DIM, jnp.float32), window=WINDOW),
        "ssm": jkv.RecurrentLayer(STATE),
    }
    return {name: kinds[kind] for name, kind in zip(layer_names(layers), layers, strict=True)}


def fused(k: jax.Array, v: jax.Array) -> jax.Array:
    """[T, K, D] each -> [T, 2K, D], K at 0::2 and V at 1::2: the layout of `jkv.kv_buffers`."""
    return jnp.stack([k, v], axis=2).reshape(len(k), 2 * KV_HEADS, HEAD_DIM)


class Cached:
    """The cache as one step's layers see it. It lives while the step is traced; take `state` from it at the end."""

    def __init__(self, state: jkv.CacheState, batch: jkv.Ragged) -> None:
        self.state, self.batch = state, batch
        self.sequences = batch.sequence_of_tokens()  # int32[T]

    def attend(self, layer: str, window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Keeps k and v [T, K, D] and returns q's [T, H, D] attention; jkv knows the window."""
        values = {"kv": fused(k, v)}
        out, self.state = jkv.append_attend(self.state, layer, self.batch, self.batch.positions, q, values)
        return out

    def load(self, layer: str) -> dict[str, jax.Array]:
        """Each sequence's state before the step, [R, *shape]; zeros where it begins."""
        return jkv.read_state(self.state, layer, self.batch)

    def store(self, layer: str, after: dict[str, jax.Array], after_each: dict[str, jax.Array]) -> None:
        """Keeps each sequence's state after the step, [R, *shape]. `after_each`: after each token, [T, *shape]."""
        self.state = jkv.write_state(self.state, layer, self.batch, after)


class Uncached:
    """One whole text without a cache: what jkv is compared with."""

    def __init__(self, length: int) -> None:
        self.sequences = jnp.zeros(length, jnp.int32)

    def attend(self, layer: str, window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        distance = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
        visible = (distance >= 0) & (distance < (window or len(q)))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1), v)

    def load(self, layer: str) -> dict[str, jax.Array]:
        return {name: jnp.zeros((1, *buffer.shape), buffer.dtype) for name, buffer in STATE.items()}

    def store(self, layer: str, after: dict[str, jax.Array], after_each: dict[str, jax.Array]) -> None:
        pass


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding. x: [T, H, D], positions: [T] -> [T, H, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention over all tokens, or over the last `window`."""

    def __init__(self, name: str, window: int | None, rngs: nnx.Rngs) -> None:
        self.name, self.window = name, window
        self.q = nnx.Linear(DIM, HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(DIM, KV_HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(DIM, KV_HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Cached | Uncached) -> jax.Array:
        q = rotary(self.q(x).reshape(-1, HEADS, HEAD_DIM), positions)
        k = rotary(self.k(x).reshape(-1, KV_HEADS, HEAD_DIM), positions)
        v = self.v(x).reshape(-1, KV_HEADS, HEAD_DIM)
        out = cache.attend(self.name, self.window, q, k, v)
        return self.out(out.reshape(-1, HEADS * HEAD_DIM))


class Recurrence(nnx.Module):
    """A Mamba-2-like layer: a short causal convolution, then a gated linear recurrence with scalar decay per head."""

    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        self.name = name
        self.input = nnx.Linear(DIM, SSM_INNER + CONV_CHANNELS + SSM_HEADS, use_bias=False, rngs=rngs)
        self.conv = nnx.Param(jax.random.normal(rngs.params(), (CONV_CHANNELS, CONV)) * CONV**-0.5)
        self.log_a = nnx.Param(jnp.log(jnp.arange(1.0, SSM_HEADS + 1)))
        self.dt_bias = nnx.Param(jnp.linspace(-6.0, 0.0, SSM_HEADS))
        self.skip = nnx.Param(jnp.ones(SSM_HEADS))
        self.norm = nnx.RMSNorm(SSM_INNER, rngs=rngs)
        self.out = nnx.Linear(SSM_INNER, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Cached | Uncached) -> jax.Array:
        gate, channels, dt = jnp.split(self.input(x), (SSM_INNER, SSM_INNER + CONV_CHANNELS), axis=-1)
        dt = jax.nn.softplus(dt + self.dt_bias[...])  # [T, heads]
        decay = jnp.exp(-dt * jnp.exp(self.log_a[...]))
        conv_weights, skip = self.conv[...], self.skip[...]

        def one_token(states: dict[str, jax.Array], token: Any) -> tuple[dict[str, jax.Array], Any]:
            sequence, channels, dt, decay = token
            before = {name: array[sequence] for name, array in states.items()}
            window = jnp.concatenate([before["conv"], channels[:, None]], axis=-1)  # [channels, CONV]
            mixed = jax.nn.silu(jnp.einsum("ck,ck->c", window, conv_weights))
            value, b, c = jnp.split(mixed, (SSM_INNER, SSM_INNER + SSM_STATE))
            value = value.reshape(SSM_HEADS, SSM_HEAD_DIM)
            hidden = before["ssm"] * decay[:, None, None] + jnp.einsum("hd,n->hdn", value * dt[:, None], b)
            y = jnp.einsum("hdn,n->hd", hidden, c) + value * skip[:, None]
            after = {"conv": window[:, 1:], "ssm": hidden}
            # Padding belongs to sequence R, which is none: it must leave no trace.
            states = {name: array.at[sequence].set(after[name], mode="drop") for name, array in states.items()}
            return states, (y, after)

        # One scan over the flat tokens, each of which goes on from where its own sequence is.
        tokens = (cache.sequences, channels, dt, decay)
        states, (y, after_each) = jax.lax.scan(one_token, cache.load(self.name), tokens)
        cache.store(self.name, states, after_each)
        return self.out(self.norm(y.reshape(-1, SSM_INNER) * jax.nn.silu(gate)))


class Block(nnx.Module):
    """Mixer and MLP, each behind an RMSNorm and around a residual."""

    def __init__(self, kind: str, name: str, rngs: nnx.Rngs) -> None:
        self.mixer_norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.mixer = (
            Recurrence(name, rngs) if kind == "ssm" else Attention(name, WINDOW if kind == "window" else None, rngs)
        )
        self.mlp_norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, 2 * DIM, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Cached | Uncached) -> jax.Array:
        x = x + self.mixer(self.mixer_norm(x), positions, cache)
        return x + self.down(jax.nn.silu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """The whole model."""

    def __init__(self, rngs: nnx.Rngs, layers: Sequence[str] = LAYERS) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.blocks = nnx.List([Block(*both, rngs) for both in zip(layers, layer_names(layers), strict=True)])
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, kernel_init=nnx.initializers.normal(0.3), rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Cached | Uncached) -> jax.Array:
        """Run the layers.

        Args:
          tokens: int32[T].
          positions: int32[T], of each token in its sequence; -1: padding.
          cache: what the layers read and write.

        Returns:
          [T, DIM], normed, ready for `head`.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, cache)
        return self.norm(x)


# ---- 2. Steps --------------------------------------------------------------------------------------------------------

LAST = -1  # in the place of a token id: what this row sampled last, which the host may not have seen yet


@dataclasses.dataclass(frozen=True)
class Steps:
    """The jitted functions. Shapes alone decide which variant runs, so few shapes are few compilations."""

    step: Callable[..., tuple[tuple[jax.Array, jax.Array], jax.Array, jkv.CacheState]]
    recompute: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def make_steps(model: Model) -> Steps:
    """Split the module once, outside: `nnx.jit` would walk it at every call."""
    graphdef, params = nnx.split(model)

    @functools.partial(jax.jit, donate_argnames="state")
    def step(
        params: Any, state: jkv.CacheState, sampled: jax.Array, batch: jkv.Ragged, tokens: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jkv.CacheState]:
        """Prefill some sequences and decode others.

        Args:
          state: donated; written in place.
          sampled: int32[max_sequences], the id sampled last in each row. It stays on the device, so the next step can
            be dispatched before the host knows what this one sampled.
          batch: R sequences with T tokens in all, from `prepare_ragged`.
          tokens: int32[T], LAST: take it from `sampled`.

        Returns:
          (ids int32[R], logits [R]): the greedy choice after each sequence's last token; `sampled` and `state` after
          the step.
        """
        model, cache = nnx.merge(graphdef, params), Cached(state, batch)
        rows = batch.rows
        tokens = jnp.where(tokens == LAST, sampled[rows[cache.sequences]], tokens)  # padding is 0, so never LAST
        hidden = model(tokens, batch.positions, cache)
        logits = model.head(hidden[batch.cu_q_lens[1:] - 1])  # where each sequence ends
        ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        places = jnp.where(rows < 0, len(sampled), rows)  # a negative index would wrap around and write the last row
        return (ids, jnp.max(logits, axis=-1)), sampled.at[places].set(ids, mode="drop"), cache.state

    @jax.jit
    def recompute(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The reference: a text without a cache, int32[T] -> after each token the greedy id, its logit, its lead."""
        model = nnx.merge(graphdef, params)
        logits = model.head(model(tokens, jnp.arange(len(tokens)), Uncached(len(tokens))))
        best, _ = jax.lax.top_k(logits, 2)
        return jnp.argmax(logits, axis=-1), best[:, 0], best[:, 0] - best[:, 1]

    return Steps(functools.partial(step, params), functools.partial(recompute, params))


# ---- 3. Serving ------------------------------------------------------------------------------------------------------

MAX_SEQUENCES = 8
MAX_LENGTH = 640
PAGE_SIZE = 16
PAGES = {"full": 60, f"window:{WINDOW}": 96, "recurrent": 64}  # "full" is too small for eight long requests, on purpose
STEP_TOKENS = (MAX_SEQUENCES, 64)  # what steps are padded to: those that only decode, and all others
STOP = 64  # the id that ends an answer; random weights choose this one now and then
PAUSE = 6  # turns of the loop between an answer and the user's next message


def cache_config() -> jkv.CacheConfig:
    """The cache's budget. A real program gives `DeviceTier(bytes=...)` and lets jkv split it."""
    return jkv.CacheConfig(
        layers=cache_layers(),
        max_sequences=MAX_SEQUENCES,
        max_length=MAX_LENGTH,
        page_size=PAGE_SIZE,
        tiers=(jkv.DeviceTier(pages=PAGES),),
    )


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt and its answer; `later` holds what the user says next, after this answer."""

    name: str
    prompt: list[int]
    max_new: int
    later: list[list[int]]
    seq: Any = None  # its jkv.Sequence, while it runs
    generated: list[int] = dataclasses.field(default_factory=list)  # ids that have arrived
    logits: list[float] = dataclasses.field(default_factory=list)  # and what the model gave them
    asked: int = 0  # ids that were asked of the device, the ones on their way included
    prefill_to: int = 0  # tokens to run through the model before the next one can be sampled
    awaited: set[int] = dataclasses.field(default_factory=set)  # lengths that others wait for
    reused: list[int] = dataclasses.field(default_factory=list)  # tokens found in the cache: first time, reopened, ...
    admitted: float = 0.0
    first_token: float = 0.0  # seconds from the first admission to the first id on the host

    @property
    def text(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def prefilling(self) -> bool:
        return self.seq is not None and self.seq.length < self.prefill_to

    @property
    def decoding(self) -> bool:
        return self.seq is not None and self.seq.length >= self.prefill_to and self.asked < self.max_new

    @property
    def answered(self) -> bool:
        return len(self.generated) == self.max_new or self.generated[-1:] == [STOP]


class Server:
    """A small continuous-batching scheduler: the part that jkv leaves to its user.

    A turn of the loop admits what fits, dispatches one step, and only then looks at the ids that the step before
    sampled. So the device always has a step to work on while Python does its bookkeeping.
    """

    def __init__(self, steps: Steps, config: jkv.CacheConfig, overlap: bool = True) -> None:
        self.steps, self.config, self.overlap = steps, config, overlap
        self.manager = jkv.CacheManager(config)
        self.state = self.manager.init()
        # Per row of the cache; lives on the device. Committed there like the state: otherwise the first step would be
        # compiled once for this array and once more for those that steps return.
        self.sampled = jax.device_put(np.zeros(config.max_sequences, np.int32), jax.devices()[0])

    def serve(self, arrivals: list[tuple[int, Request]], reuse: bool = True) -> None:
        """Serve every (turn, request) and the follow-ups, from an empty cache. Results: `done`, `usage`, `seconds`."""
        self.manager.clear()
        self.max_reuse = None if reuse else 0
        self.arrivals = list(arrivals)
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in order of admission
        self.in_flight: list[tuple[int, list[Request | None], Any]] = []  # turn, who asked, (ids, logits) on their way
        self.done: list[Request] = []
        self.usage: list[tuple[int, int]] = []  # per turn: pages held by requests, pages kept for reuse
        self.crowded = False  # nobody is admitted
        self.turn = self.steps_run = 0
        start = time.perf_counter()
        while self.arrivals or self.waiting or self.running:
            self.waiting.extend(request for turn, request in self.arrivals if turn <= self.turn)
            self.arrivals = [(turn, request) for turn, request in self.arrivals if turn > self.turn]
            self.admit()
            self.step()
            self.receive(self.turn - 1 if self.overlap else self.turn)
            self.usage.append(pages_in_use(self.manager))
            self.turn += 1
        self.seconds = time.perf_counter() - start

    def admit(self) -> None:
        """Open waiting requests while there are rows and pages. One that was closed early comes back here as well."""
        for request in list(self.waiting):
            if self.crowded and self.running:
                return
            tokens = np.asarray(request.text, np.int32)
            if self.worth_waiting(tokens):
                continue
            seq = self.manager.open(tokens, max_reuse=self.max_reuse, retry=bool(request.reused))
            if not seq.resume():  # not now
                seq.close()
                if not self.running:
                    raise RuntimeError(f"request {request.name} finds no room although nothing else runs")
                return
            self.waiting.remove(request)
            self.running.append(request)
            request.seq, request.prefill_to = seq, len(request.text)
            request.reused.append(seq.length)
            request.admitted = request.admitted or time.perf_counter()

    def worth_waiting(self, tokens: np.ndarray) -> bool:
        """Whether a running request will soon leave more of these tokens than can be reused now."""
        match = self.manager.probe(tokens)
        end = match.raw_tokens + match.in_flight  # the prefix that the cache has, or that somebody is computing
        end -= end % PAGE_SIZE
        if self.max_reuse == 0 or end <= match.tokens:
            return False
        for other in self.running:
            if other.prefilling and other.seq.length < end and other.text[:end] == tokens[:end].tolist():
                other.awaited.add(end)  # a recurrent state is left where a chunk ends
                return True
        return False

    def step(self) -> None:
        """Run one step. Nobody waits for the ids that it starts from: they are on the device already."""
        batch, counts = self.plan()
        while self.manager.reserve([request.seq for request in batch], counts) < len(batch):
            self.make_room()
            batch, counts = self.plan()
        if not batch:
            return
        sequences = [request.seq for request in batch]
        tokens = [
            request.text[request.seq.length :][:count] if request.prefilling else [LAST]
            for request, count in zip(batch, counts, strict=True)
        ]
        self.state, ragged = self.manager.prepare_ragged(
            self.state, sequences, counts, pad_tokens=STEP_TOKENS, pad_sequences=MAX_SEQUENCES
        )
        padding = len(ragged.positions) - sum(counts)
        flat = np.array([*itertools.chain(*tokens), *[0] * padding], np.int32)
        chosen, self.sampled, self.state = self.steps.step(self.state, self.sampled, ragged, flat)
        self.manager.advance(sequences, counts)  # so many more tokens lie in the cache, whatever their ids are
        for array in chosen:
            array.copy_to_host_async()
        self.in_flight.append((self.turn, [None if request.prefilling else request for request in batch], chosen))
        self.steps_run += 1
        self.commit_known(batch)
        for request in batch:
            request.asked += not request.prefilling
            if request.seq.length in request.awaited:
                request.seq.commit([], snapshot=True)  # also where jkv would not leave one by itself

    def plan(self) -> tuple[list[Request], list[int]]:
        """Who takes part in the next step, with how many tokens: each answer with one, then prompts with what fits."""
        batch = [request for request in self.running if request.decoding]
        counts = [1] * len(batch)
        room = STEP_TOKENS[-1] - len(batch)
        for request in self.running:
            if request.prefilling and room:
                # Ending a chunk at a snapshot point leaves a recurrent state there, from which others can start.
                stops = (request.prefill_to, *request.awaited, *request.seq.snapshot_points)
                length = request.seq.length
                count = min(room, *(stop - length for stop in stops if stop > length))
                batch.append(request)
                counts.append(count)
                room -= count
        return batch, counts

    def receive(self, turn: int) -> None:
        """Take the ids sampled up to `turn`; waits for the device if they are not there yet."""
        while self.in_flight and self.in_flight[0][0] <= turn:
            _, batch, chosen = self.in_flight.pop(0)
            ids, logits = (np.asarray(a).tolist() for a in chosen)
            for request, token, logit in zip(batch, ids, logits, strict=False):  # the rest is padding
                if request is None or request.answered:
                    continue  # its prompt goes on; or this was the step in flight when its STOP arrived
                request.generated.append(token)
                request.logits.append(logit)
                request.first_token = request.first_token or time.perf_counter() - request.admitted
                if request.answered:
                    self.finish(request)
        self.commit_known(self.running)

    def finish(self, request: Request) -> None:
        """It has its answer; the user may go on."""
        self.commit_known([request])
        self.close(request)
        self.done.append(request)
        self.crowded = False
        if request.later:
            name, number = request.name.split(".")
            prompt = request.text + request.later[0]
            follow_up = Request(f"{name}.{int(number) + 1}", prompt, request.max_new, request.later[1:])
            self.arrivals.append((self.turn + PAUSE, follow_up))

    def commit_known(self, requests: list[Request]) -> None:
        """Publish what lies in the cache and whose ids are known."""
        known = [(request.seq, request.text[request.seq.committed : request.seq.length]) for request in requests]
        known = [(seq, tokens) for seq, tokens in known if tokens]  # mostly none while the ids are on their way
        if known:
            sequences, tokens = zip(*known, strict=True)
            self.manager.commit(sequences, list(itertools.chain(*tokens)), [len(each) for each in tokens])

    def make_room(self) -> None:
        """Close the youngest request; it is opened again later, with its prompt and what it has generated so far."""
        if self.in_flight:
            self.receive(self.turn)  # somebody may be done; and a close keeps only what is committed
            return
        victim = self.running[-1]
        self.close(victim)
        self.waiting.insert(0, victim)
        # Nobody is admitted again before a running request is done. If the victim came back at once, it would soon
        # need the pages of the one that it has just made room for, and the two would close each other in turn.
        self.crowded = True

    def close(self, request: Request) -> None:
        """Give its pages to whoever needs them; until then they can be reused."""
        request.seq.close()
        request.seq = None
        self.running.remove(request)


def pages_in_use(manager: jkv.CacheManager) -> tuple[int, int]:
    """Full-attention pages that requests hold, and those that are only kept for reuse."""
    pool = manager.stats().pools["full"]
    return pool.total - pool.free - pool.evictable, pool.evictable


# ---- 4. Report -------------------------------------------------------------------------------------------------------

NEAR_TIE = 1e-4  # two logits closer than this may swap places by float32 rounding alone
TOLERANCE = 1e-3  # a logit further off than this is no rounding

SYSTEM_PROMPTS = (
    "You are a patient tutor. Explain every step, give one example, and never assume that the reader knows jargon. ",
    "You are a terse assistant for a shipping company. Answer in one sentence. If a date is missing, ask for it. If "
    "the address is abroad, mention customs. Never promise a delivery time. ",
    "You are a terse assistant for a shipping company. Answer in one sentence. If a date is missing, ask for it. "
    "Always end with the number of the help desk, which is open from eight to six on working days. ",
)
WORDS = (
    "where is my parcel why does the moon have phases please check again what about tomorrow and how many pages can "
    "you show me an example thanks but I meant the other one explain it like a story in short words why not"
).split()


def bytes_of(text: str) -> list[int]:
    """Text as token ids: the vocabulary is bytes."""
    return list(text.encode())


def make_arrivals(count: int, seed: int) -> list[tuple[int, Request]]:
    """`count` requests in conversations of one to three turns, as (turn of the loop, first request)."""
    rng = np.random.default_rng(seed)
    arrivals: list[tuple[int, Request]] = []
    turn = 0
    while count:
        turns = min(count, int(rng.integers(1, 4)))
        system = bytes_of(SYSTEM_PROMPTS[rng.integers(len(SYSTEM_PROMPTS))])
        said = [bytes_of(" ".join(rng.choice(WORDS, rng.integers(3, 9))) + "? ") for _ in range(turns)]
        name, max_new = f"{len(arrivals) + 1}.1", int(rng.integers(16, 41))
        arrivals.append((turn, Request(name, system + said[0], max_new, said[1:])))
        count -= turns
        turn += int(rng.integers(0, 6))
    return arrivals


def warmup_arrivals() -> list[tuple[int, Request]]:
    """Short requests that bring about every step shape and kind of cache operation: what serving would compile."""
    first, second = bytes_of(SYSTEM_PROMPTS[0]), bytes_of("Where is my parcel? It is a small blue one.")
    # The second leaves a snapshot while the first decodes; the third finds what the first left.
    return [(0, Request("1.1", first, 12, [])), (6, Request("2.1", second, 2, [])), (30, Request("3.1", first, 2, []))]


class CompileCounter:
    """Counts XLA compilations of the whole process, jkv's and the model's. (Counting traces would miss some.)"""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self.heard)

    def heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Check:
    """Generated tokens against the recomputation."""

    tokens: int = 0
    mismatches: int = 0  # another token although the recomputation was sure, or a logit that is off
    near_ties: int = 0  # tokens where the recomputation was not sure, whether or not they differ
    largest_error: float = 0.0  # of a chosen token's logit
    first_mismatch: str = ""

    @property
    def ok(self) -> bool:
        return self.mismatches == 0


def check_tokens(steps: Steps, requests: Sequence[Request]) -> Check:
    """Recompute every text without a cache; compare each generated token and its logit with the greedy choice."""
    check = Check()
    for request in requests:
        text = np.zeros(MAX_LENGTH, np.int32)
        text[: len(request.text)] = request.text
        chosen = (np.asarray(a)[len(request.prompt) - 1 :] for a in steps.recompute(text))
        for index, (token, logit, best, best_logit, lead) in enumerate(
            zip(request.generated, request.logits, *chosen, strict=False)
        ):
            error = abs(logit - best_logit)
            check.tokens += 1
            check.near_ties += bool(lead < NEAR_TIE)
            check.largest_error = max(check.largest_error, error)
            if (token != best and lead >= NEAR_TIE) or not error < TOLERANCE:
                check.mismatches += 1
                check.first_mismatch = check.first_mismatch or (
                    f"request {request.name}, token {index} of its answer: with the cache {token} (logit {logit:.4f}), "
                    f"without {best} (logit {best_logit:.4f}, {lead:.4f} before the next)"
                )
    return check


@dataclasses.dataclass(frozen=True)
class Serving:
    """One pass over the workload."""

    requests: list[Request]
    usage: list[tuple[int, int]]
    seconds: float
    steps: int
    compiled: int
    check: Check

    @property
    def reused(self) -> int:
        return sum(request.reused[0] for request in self.requests)

    @property
    def reopened(self) -> int:
        return sum(len(request.reused) - 1 for request in self.requests)


@dataclasses.dataclass(frozen=True)
class Result:
    """What the program measured."""

    compiled_warmup: int
    with_reuse: Serving
    without_reuse: Serving

    @property
    def ok(self) -> bool:
        return self.with_reuse.check.ok and self.without_reuse.check.ok


def measure(server: Server, requests: int, seed: int) -> Result:
    """Warm up, then serve the workload twice, with reuse and without, and check every token of both."""
    compilations = CompileCounter()
    server.serve(warmup_arrivals())
    compiled_warmup = compilations.count

    def one_pass(reuse: bool) -> Serving:
        before = compilations.count
        server.serve(make_arrivals(requests, seed), reuse)
        compiled = compilations.count - before
        check = check_tokens(server.steps, server.done)
        return Serving(server.done, server.usage, server.seconds, server.steps_run, compiled, check)

    return Result(compiled_warmup, one_pass(reuse=True), one_pass(reuse=False))


def print_requests(with_reuse: Serving, without_reuse: Serving) -> None:
    """One line per request."""
    cold = {request.name: request for request in without_reuse.requests}
    print("                                            first token, ms       reused when")
    print("request  prompt  reused        generated  with reuse   without   reopened")
    for request in sorted(with_reuse.requests, key=lambda request: [int(part) for part in request.name.split(".")]):
        share = request.reused[0] / len(request.prompt)
        reopened = ", ".join(str(tokens) for tokens in request.reused[1:])
        print(
            f"{request.name:>7}  {len(request.prompt):6}  {request.reused[0]:6} {share:4.0%}"
            f"  {len(request.generated):10}  {request.first_token * 1e3:10.1f}"
            f"  {cold[request.name].first_token * 1e3:8.1f}   {reopened}".rstrip()
        )


def print_chart(usage: Sequence[tuple[int, int]], total: int, width: int = 96, height: int = 8) -> None:
    """Pages over the turns of the loop, as a chart of characters."""
    print(f"pages of full attention over time: █ held by requests, ░ kept for reuse; {total} in all")
    columns = [usage[len(usage) * i // width] for i in range(width)] if len(usage) > width else usage
    for line in reversed(range(height)):
        level = total * (line + 0.5) / height
        cells = ("█" if held > level else "░" if held + kept > level else " " for held, kept in columns)
        print(f"{round(total * (line + 1) / height):5} │{''.join(cells)}".rstrip())
    print(f"    0 └{'─' * len(columns)}  {len(usage)} turns")


def report(result: Result, quiet: bool) -> None:
    """What a person wants to see; `quiet` leaves the last line only."""
    warm, cold = result.with_reuse, result.without_reuse
    if not quiet:
        print()
        print_requests(warm, cold)
        print()
        print_chart(warm.usage, PAGES["full"])
        print()
        for name, serving in (("with reuse", warm), ("without reuse", cold)):
            first = statistics.median(request.first_token for request in serving.requests)
            prompts = sum(len(request.prompt) for request in serving.requests)
            print(
                f"{name + ':':15}{serving.reused} of {prompts} prompt tokens reused, median {first * 1e3:.1f} ms from "
                f"admission to first token, {serving.steps} steps and {serving.check.tokens} tokens in "
                f"{serving.seconds:.2f} s, {serving.reopened} closed and reopened"
            )
        print(f"compiled:      {result.compiled_warmup} variants in the warm-up, {warm.compiled + cold.compiled} later")
    tokens = warm.check.tokens + cold.check.tokens
    ties = warm.check.near_ties + cold.check.near_ties
    if result.ok:
        error = max(warm.check.largest_error, cold.check.largest_error)
        print(
            f"OK: all {tokens} generated tokens equal the recomputation without a cache "
            f"({ties} near ties, logits within {error:.1e})"
        )
    else:
        wrong = warm.check.mismatches + cold.check.mismatches
        print(f"FAILED: {wrong} of {tokens} generated tokens differ from the recomputation without a cache")
        print(f"first: {warm.check.first_mismatch or cold.check.first_mismatch}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 1 if any token is wrong."""
    parser = argparse.ArgumentParser(description="Serve a small hybrid model through jkv and check every token.")
    parser.add_argument("--requests", type=int, default=32, help="requests to serve (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="print the verdict only")
    parser.add_argument("--sync", action="store_true", help="wait for each step's ids before the next step")
    options = parser.parse_args(argv)
    if options.requests < 1:
        parser.error(f"--requests must be at least 1, got {options.requests}")
    if not options.quiet:
        print(f"serving {options.requests} requests twice; most of the time goes into compiling the model", flush=True)
    steps = make_steps(Model(nnx.Rngs(0)))  # random weights, always the same
    server = Server(steps, cache_config(), overlap=not options.sync)
    result = measure(server, options.requests, options.seed)
    report(result, options.quiet)
    return 0 if result.ok else 1


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the chart's characters still gets the rest
    sys.exit(main())
