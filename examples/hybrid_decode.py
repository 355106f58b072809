"""A hybrid language model served through jkv: continuous batching, shared prefixes, one step always in flight.

    python examples/hybrid_decode.py                  # under a minute on two cores, nothing is downloaded
    python examples/hybrid_decode.py --requests 60 --seed 3 --quiet

The model has random weights, so what it writes is noise; the point is that it writes the same noise with a cache as
without one. Four sections, each meant to be copied:

  1. Model      full attention, sliding-window attention and a Mamba-2-like recurrence, in Flax NNX
  2. Steps      the jitted functions, their state donated
  3. Serving    a waiting queue, chunked prefill, batched decode, requests closed and reopened when pages run out
  4. Report     every generated token against a plain recomputation, times, pages, compiled variants
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
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

VOCAB = 256  # bytes
DIM = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WINDOW = 48
SSM_HEADS, SSM_HEAD_DIM, SSM_STATE, CONV = 4, 32, 16, 4
SSM_INNER = SSM_HEADS * SSM_HEAD_DIM
CONV_CHANNELS = SSM_INNER + 2 * SSM_STATE  # x, B and C go through the convolution
LAYERS = ("ssm", "window", "ssm", "full", "ssm", "window")


def layer_name(index: int) -> str:
    """The name by which the model and the cache know a layer, e.g. "3.full"."""
    return f"{index}.{LAYERS[index]}"


def cache_layers() -> dict[str, jkv.AttentionLayer | jkv.RecurrentLayer]:
    """What each layer keeps, as jkv wants it declared."""
    kinds: dict[str, jkv.AttentionLayer | jkv.RecurrentLayer] = {
        "full": jkv.AttentionLayer(jkv.kv_buffers(KV_HEADS, HEAD_DIM, jnp.float32)),
        "window": jkv.AttentionLayer(jkv.kv_buffers(KV_HEADS, HEAD_DIM, jnp.float32), window=WINDOW),
        "ssm": jkv.RecurrentLayer(
            {
                "conv": jkv.Buffer((CONV_CHANNELS, CONV - 1), jnp.float32),
                "ssm": jkv.Buffer((SSM_HEADS, SSM_HEAD_DIM, SSM_STATE), jnp.float32),
            }
        ),
    }
    return {layer_name(i): kinds[kind] for i, kind in enumerate(LAYERS)}


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding. x: [B, T, H, D], positions: [B, T] -> [B, T, H, D]."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """Attention over whole texts without a cache: what jkv is compared with. q: [B, T, H, D], k, v: [B, T, K, D]."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    visible = (distance >= 0) & (distance < (window or q.shape[1]))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1), v)


class Attention(nnx.Module):
    """Grouped-query attention over all tokens, or over the last `window`."""

    def __init__(self, name: str, window: int | None, rngs: nnx.Rngs) -> None:
        self.name, self.window = name, window
        self.q = nnx.Linear(DIM, HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(DIM, KV_HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(DIM, KV_HEADS * HEAD_DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, rows: Any, state: Any) -> tuple[jax.Array, Any]:
        batch, steps, _ = x.shape
        q = rotary(self.q(x).reshape(batch, steps, HEADS, HEAD_DIM), positions)
        k = rotary(self.k(x).reshape(batch, steps, KV_HEADS, HEAD_DIM), positions)
        v = self.v(x).reshape(batch, steps, KV_HEADS, HEAD_DIM)
        if state is None:
            out = plain_attention(q, k, v, self.window)
        else:
            kv = jnp.stack([k, v], axis=3).reshape(batch, steps, 2 * KV_HEADS, HEAD_DIM)  # K at 0::2, V at 1::2
            out, state = jkv.append_attend(state, self.name, rows, positions, q, {"kv": kv})
        return self.out(out.reshape(batch, steps, HEADS * HEAD_DIM)), state


class Recurrence(nnx.Module):
    """A Mamba-2-like layer: a short causal convolution, then a gated linear recurrence with scalar decay per head.

    Decode (T=1) and prefill chunks (T>1) are one function, from the state before the chunk to the state after it.
    """

    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        self.name = name
        self.input = nnx.Linear(DIM, SSM_INNER + CONV_CHANNELS + SSM_HEADS, use_bias=False, rngs=rngs)
        self.conv = nnx.Param(jax.random.normal(rngs.params(), (CONV_CHANNELS, CONV)) * CONV**-0.5)
        self.log_a = nnx.Param(jnp.log(jnp.arange(1.0, SSM_HEADS + 1)))
        self.dt_bias = nnx.Param(jnp.linspace(-6.0, 0.0, SSM_HEADS))
        self.skip = nnx.Param(jnp.ones(SSM_HEADS))
        self.norm = nnx.RMSNorm(SSM_INNER, rngs=rngs)
        self.out = nnx.Linear(SSM_INNER, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, rows: Any, state: Any) -> tuple[jax.Array, Any]:
        batch, steps, _ = x.shape
        gate, channels, dt = jnp.split(self.input(x), (SSM_INNER, SSM_INNER + CONV_CHANNELS), axis=-1)
        dt = jax.nn.softplus(dt + self.dt_bias[...])  # [B, T, heads]
        decay = jnp.exp(-dt * jnp.exp(self.log_a[...]))
        conv_weights, skip = self.conv[...], self.skip[...]

        def one_token(carry: Any, token: Any) -> tuple[Any, jax.Array]:
            history, hidden = carry  # [B, channels, k-1], [B, heads, d_head, d_state]
            channels, dt, decay, valid = token
            window = jnp.concatenate([history, channels[..., None]], axis=-1)
            mixed = jax.nn.silu(jnp.einsum("bck,ck->bc", window, conv_weights))
            value, b, c = jnp.split(mixed, (SSM_INNER, SSM_INNER + SSM_STATE), axis=-1)
            value = value.reshape(batch, SSM_HEADS, SSM_HEAD_DIM)
            update = jnp.einsum("bhd,bn->bhdn", value * dt[..., None], b)
            after = hidden * decay[..., None, None] + update
            y = jnp.einsum("bhdn,bn->bhd", after, c) + value * skip[:, None]
            # Padding must leave no trace: the state after a padded chunk is the state after its last real token.
            keep = valid[:, None, None]
            return (jnp.where(keep, window[..., 1:], history), jnp.where(keep[..., None], after, hidden)), y

        if state is None:
            before = {
                "conv": jnp.zeros((batch, CONV_CHANNELS, CONV - 1)),
                "ssm": jnp.zeros((batch, SSM_HEADS, SSM_HEAD_DIM, SSM_STATE)),
            }
        else:
            before = jkv.read_state(state, self.name, rows)  # zeros for a sequence's first tokens
        tokens = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (channels, dt, decay, positions >= 0))  # time first
        (conv, ssm), y = jax.lax.scan(one_token, (before["conv"], before["ssm"]), tokens)
        if state is not None:
            state = jkv.write_state(state, self.name, rows, {"conv": conv, "ssm": ssm})
        y = jnp.swapaxes(y, 0, 1).reshape(batch, steps, SSM_INNER)
        return self.out(self.norm(y * jax.nn.silu(gate))), state


class Block(nnx.Module):
    """Mixer and MLP, each behind an RMSNorm and around a residual."""

    def __init__(self, index: int, rngs: nnx.Rngs) -> None:
        kind, name = LAYERS[index], layer_name(index)
        self.mixer_norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.mixer = (
            Recurrence(name, rngs) if kind == "ssm" else Attention(name, WINDOW if kind == "window" else None, rngs)
        )
        self.mlp_norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, 2 * DIM, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, rows: Any, state: Any) -> tuple[jax.Array, Any]:
        mixed, state = self.mixer(self.mixer_norm(x), positions, rows, state)
        x = x + mixed
        return x + self.down(jax.nn.silu(self.up(self.mlp_norm(x)))), state


class Model(nnx.Module):
    """The whole model. `state` None: a plain forward over whole texts; otherwise a step through the cache."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.blocks = nnx.List([Block(index, rngs) for index in range(len(LAYERS))])
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, kernel_init=nnx.initializers.normal(0.3), rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, rows: Any = None, state: Any = None
    ) -> tuple[jax.Array, Any]:
        """Run the layers.

        Args:
          tokens: int32[B, T].
          positions: int32[B, T], consecutive in a row; -1: padding, after the real tokens.
          rows: int32[B], the cache's rows; -1: padding. None without a cache.
          state: the CacheState, or None.

        Returns:
          hidden: [B, T, DIM], normed, ready for `head`; and the new state.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x, state = block(x, positions, rows, state)
        return self.norm(x), state


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
        params: Any,
        state: jkv.CacheState,
        sampled: jax.Array,
        rows: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jkv.CacheState]:
        """Prefill or decode.

        Args:
          state: donated; written in place.
          sampled: int32[max_sequences], the id sampled last in each row. It stays on the device, so the next step can
            be dispatched before the host knows what this one sampled.
          rows: int32[B], -1: padding.
          tokens: int32[B, T], LAST: take it from `sampled`.
          positions: int32[B, T], -1: padding.

        Returns:
          (ids int32[B], logits [B]): the greedy choice after each row's last token; `sampled` and `state` after the
          step.
        """
        model = nnx.merge(graphdef, params)
        tokens = jnp.where(tokens == LAST, sampled[jnp.maximum(rows, 0)][:, None], tokens)
        hidden, state = model(tokens, positions, rows, state)
        last = jnp.argmax(positions, axis=1)  # padding comes after the real tokens
        logits = model.head(hidden[jnp.arange(len(rows)), last])
        ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        places = jnp.where(rows < 0, len(sampled), rows)  # a negative index would wrap around and write the last row
        return (ids, jnp.max(logits, axis=-1)), sampled.at[places].set(ids, mode="drop"), state

    @jax.jit
    def recompute(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The reference: a text without a cache, int32[T] -> after each token the greedy id, its logit, its lead."""
        model = nnx.merge(graphdef, params)
        hidden, _ = model(tokens[None], jnp.arange(len(tokens))[None])
        logits = model.head(hidden[0])
        best, _ = jax.lax.top_k(logits, 2)
        return jnp.argmax(logits, axis=-1), best[:, 0], best[:, 0] - best[:, 1]

    return Steps(functools.partial(step, params), functools.partial(recompute, params))


# ---- 3. Serving ------------------------------------------------------------------------------------------------------

MAX_SEQUENCES = 8
MAX_LENGTH = 640
PAGE_SIZE = 16
PAGES = {"full": 60, f"window:{WINDOW}": 96, "recurrent": 64}  # "full" is too small for eight long requests, on purpose
CHUNKS = (16, 64)  # prefill runs in chunks, padded to one of these lengths
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

    A turn of the loop admits what fits, dispatches one prefill chunk and one decode step, and only then looks at the
    ids that the turn before sampled. So the device always has a step to work on while Python does its bookkeeping.
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
        self.in_flight: list[tuple[int, list[Request], Any]] = []  # turn, whose, (ids, logits) on their way
        self.done: list[Request] = []
        self.usage: list[tuple[int, int]] = []  # per turn: pages held by requests, pages kept for reuse
        self.crowded = False  # nobody is admitted
        self.turn = self.steps_run = 0
        start = time.perf_counter()
        while self.arrivals or self.waiting or self.running:
            self.waiting.extend(request for turn, request in self.arrivals if turn <= self.turn)
            self.arrivals = [(turn, request) for turn, request in self.arrivals if turn > self.turn]
            self.admit()
            self.prefill()
            self.decode()
            self.receive(self.turn - 1 if self.overlap else self.turn)
            self.usage.append(pages_in_use(self.manager))
            self.turn += 1
        self.seconds = time.perf_counter() - start

    def admit(self) -> None:
        """Open waiting requests while there are rows and pages. One that was closed early comes back here as well."""
        while self.waiting and not (self.crowded and self.running):
            request = self.waiting[0]
            tokens = np.asarray(request.text, np.int32)
            seq = self.manager.open(tokens, max_reuse=self.max_reuse, retry=bool(request.reused))
            if not seq.resume():  # not now
                seq.close()
                if not self.running:
                    raise RuntimeError(f"request {request.name} finds no room although nothing else runs")
                return
            self.running.append(self.waiting.pop(0))
            request.seq, request.prefill_to = seq, len(request.text)
            request.reused.append(seq.length)
            request.admitted = request.admitted or time.perf_counter()

    def prefill(self) -> None:
        """One chunk for the oldest request that still has text to run through the model."""
        request = next((request for request in self.running if request.prefilling), None)
        if request is None:
            return
        seq, start = request.seq, request.seq.length
        # Ending a chunk at a snapshot point leaves a recurrent state there, from which others can start.
        end = min(start + CHUNKS[-1], request.prefill_to, *seq.snapshot_points)
        if not self.reserve(request, end - start):
            return
        chunk = request.text[start:end]
        width = next(width for width in CHUNKS if width >= len(chunk))
        padding = [-1] * (width - len(chunk))
        self.dispatch([request], [chunk + padding], [list(range(start, end)) + padding], last=end == request.prefill_to)
        seq.commit(chunk)

    def decode(self) -> None:
        """One token for every request past its prompt. Nobody waits for the ids: they are on the device already."""
        batch = [request for request in list(self.running) if request.decoding and self.reserve(request, 1)]
        batch = [request for request in batch if request.seq is not None]  # a reserve can close others to make room
        if not batch:
            return
        padding = [[-1]] * (self.config.max_sequences - len(batch))
        tokens = [[LAST] for _ in batch] + padding
        self.dispatch(batch, tokens, [[request.seq.length] for request in batch] + padding, last=True)
        for request in batch:
            request.seq.advance(1)  # one more token lies in the cache, whatever its id is
            self.commit_known(request)

    def dispatch(self, batch: list[Request], tokens: list[list[int]], positions: list[list[int]], last: bool) -> None:
        """Run one step for `batch`; rows of `tokens` and `positions` beyond it are padding. `last`: its ids count."""
        self.state, rows = self.manager.prepare(self.state, [request.seq for request in batch])
        # New arrays at every step: the device may still be reading those of the last one.
        padded = np.concatenate([rows, np.full(len(tokens) - len(rows), -1, np.int32)])
        arrays = (padded, np.asarray(tokens, np.int32), np.asarray(positions, np.int32))
        chosen, self.sampled, self.state = self.steps.step(self.state, self.sampled, *arrays)
        self.steps_run += 1
        if last:
            for array in chosen:
                array.copy_to_host_async()
            self.in_flight.append((self.turn, batch, chosen))
            for request in batch:
                request.asked += 1

    def receive(self, turn: int) -> None:
        """Take the ids sampled up to `turn`; waits for the device if they are not there yet."""
        while self.in_flight and self.in_flight[0][0] <= turn:
            _, batch, chosen = self.in_flight.pop(0)
            ids, logits = (np.asarray(a).tolist() for a in chosen)
            for request, token, logit in zip(batch, ids, logits, strict=False):  # the rest is padding
                if request.answered:
                    continue  # the step that was in flight when the STOP arrived
                request.generated.append(token)
                request.logits.append(logit)
                request.first_token = request.first_token or time.perf_counter() - request.admitted
                self.commit_known(request)
                if request.answered:
                    self.close(request)
                    self.done.append(request)
                    self.crowded = False
                    if request.later:
                        name, number = request.name.split(".")
                        prompt = request.text + request.later[0]
                        follow_up = Request(f"{name}.{int(number) + 1}", prompt, request.max_new, request.later[1:])
                        self.arrivals.append((self.turn + PAUSE, follow_up))

    def commit_known(self, request: Request) -> None:
        """Publish what lies in the cache and whose ids are known."""
        tokens = request.text[request.seq.committed : request.seq.length]
        if tokens:
            request.seq.commit(tokens)

    def reserve(self, request: Request, count: int) -> bool:
        """Get pages for `count` more tokens, closing the youngest requests if need be. False: it was one of those."""
        while request.seq is not None and not request.seq.reserve(count):
            if self.in_flight:
                self.receive(self.turn)  # somebody may be done; and a close keeps only what is committed
                continue
            victim = self.running[-1]
            self.close(victim)
            self.waiting.insert(0, victim)  # opened again later, with its prompt and what it has generated so far
            # Nobody is admitted again before a running request is done. If the victim came back at once, it would soon
            # need the pages of the one that it has just made room for, and the two would close each other in turn.
            self.crowded = True
        return request.seq is not None

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
