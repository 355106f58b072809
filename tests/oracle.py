"""The oracle: bytes of the cache as a function of the token prefix, and a harness that verifies all of them.

    tokens        t0    t1    t2    t3
    attention          value at position i = kv_values(t[:i+1], layer, buffer)     a hash of the whole prefix
    recurrent     s0 -> s1 -> s2 -> s3 -> s4   s0 = 0, s' = a * s + b(t), exactly, in int32

A step writes attention values that the host computes from the tokens it knows, but a recurrent state only from the
state that it *reads* on the device, so that a stale or foreign state is carried on and found, never papered over.
All buffers are int32: comparison is exact.

`World` drives one manager and one state through jkv's public names only. After every device operation it fetches the
pools and compares every position that every live sequence may read, in every group; after every host operation it
calls `manager.check()` and checks the sums in `stats()` itself.

A verify step (`Run.draft`) goes on from what the device was told is accepted, and writes the state after each of its
tokens to a candidate of its own:

    previous   [s@5  s@6  s@7]     the step before; one draft accepted, the device knows: go on from s@6
    current    [s@7  s@8  s@9]     after the input token, after one draft, after two
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.layout import HOST
from jkv.stats import since

# ---------------------------------------------------------------------------------------------------- the functions

_HASH = np.uint64(0x9E3779B97F4A7C15)  # odd, so invertible modulo 2**64
_HASH_INVERSE = np.uint64(pow(int(_HASH), -1, 2**64))
_LANES = (0x2C1B3C6D, 0x297A2D39, 0x5851F42D, 0x4C957F2D, 0x14057B7F)  # odd multipliers of the recurrence
IMAGES = range(2**30, 2**30 + 4096)  # tokens that are images
_MAX_TOKENS = 4096  # the tables of powers are this long


def _powers(base: int, count: int) -> np.ndarray:
    """base**0 .. base**(count-1) modulo 2**64."""
    out = np.full(count, np.uint64(base))
    out[0] = 1
    with np.errstate(over="ignore"):
        return np.cumprod(out, dtype=np.uint64)


_UP, _DOWN = _powers(int(_HASH), _MAX_TOKENS + 1), _powers(int(_HASH_INVERSE), _MAX_TOKENS + 1)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    """uint64[n]: entry i is a function of tokens[:i+1].

    The recurrence h' = A * h + mix(token) in closed form: A**i * cumsum(mix(token) * A**-i).
    """
    tokens = np.asarray(tokens)
    n = len(tokens)
    with np.errstate(over="ignore"):
        terms = _mix(tokens.astype(np.uint64) + np.uint64(1)) * _DOWN[:n]
        return _mix(np.cumsum(terms, dtype=np.uint64) * _UP[:n])


@functools.cache
def _salt(layer: str, buffer: str, shape: tuple[int, ...]) -> np.ndarray:
    """uint64[*shape]: what tells layers, buffers and elements apart."""
    seed = np.uint64(zlib.crc32(f"{layer}/{buffer}".encode()))
    return _mix(_mix(seed) + np.arange(int(np.prod(shape)), dtype=np.uint64)).reshape(shape)


def kv_values(hashes: np.ndarray, layer: str, buffer: str, shape: tuple[int, ...]) -> np.ndarray:
    """int32[n, *shape]: what an attention buffer holds where the prefix hash is hashes[i]."""
    hashes = hashes.reshape(hashes.shape + (1,) * len(shape))
    return (_mix(hashes ^ _salt(layer, buffer, shape)) >> np.uint64(32)).astype(np.uint32).view(np.int32)


def state_multipliers(size: int) -> np.ndarray:
    """int32[size]: the `a` of s' = a * s + b(token), one per element."""
    lanes = np.array(_LANES, np.uint32)
    index = np.arange(size, dtype=np.uint32)
    return (lanes[index % len(lanes)] + np.uint32(8) * index).view(np.int32)


@functools.cache
def _state_powers(size: int) -> np.ndarray:
    """uint32[_MAX_TOKENS + 1, size]: the multipliers' powers."""
    table = np.repeat(state_multipliers(size).view(np.uint32)[None], _MAX_TOKENS + 1, axis=0)
    table[0] = 1
    with np.errstate(over="ignore"):
        return np.cumprod(table, axis=0, dtype=np.uint32)


def state_steps(tokens: np.ndarray, layer: str, buffer: str, size: int) -> np.ndarray:
    """uint32[n, size]: b(token) for each token."""
    salt = _salt(layer, buffer, (size,))
    mixed = _mix(_mix(np.asarray(tokens).astype(np.uint64) + np.uint64(7))[:, None] ^ salt)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def fold(tokens: np.ndarray, layer: str, buffer: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(scale, shift), int32[size] each: folding `tokens` into a state s gives scale * s + shift."""
    n, powers = len(tokens), _state_powers(size)
    with np.errstate(over="ignore"):
        shift = (powers[:n][::-1] * state_steps(tokens, layer, buffer, size)).sum(axis=0, dtype=np.uint32)
    return powers[n].view(np.int32), shift.view(np.int32)


def state_after(tokens: np.ndarray, layer: str, buffer: str, shape: tuple[int, ...]) -> np.ndarray:
    """int32[*shape]: the recurrent state after exactly these tokens; zero after none."""
    size = int(np.prod(shape))
    return fold(tokens, layer, buffer, size)[1].reshape(shape)


# ---------------------------------------------------------------------------------------------------- tokens


@functools.cache
def _stream(key: int | str) -> np.ndarray:
    seed = zlib.crc32(str(key).encode())
    return np.random.default_rng(seed).integers(0, 1_000_000_000, size=_MAX_TOKENS, dtype=np.int32)


def tokens(n: int, key: int | str = 0) -> np.ndarray:
    """int32[n]: a stream of token ids that belongs to `key`; longer ones extend shorter ones."""
    return _stream(key)[:n].copy()


def fresh(n: int = 1) -> np.ndarray:
    """int32[n]: tokens that differ from everything seen."""
    global _next_fresh
    _next_fresh += n
    return np.arange(_next_fresh - n, _next_fresh, dtype=np.int32)


_next_fresh = 2_000_000_000


def join(*parts: Iterable[int] | np.ndarray) -> np.ndarray:
    """int32[n]: token arrays one after the other."""
    return np.concatenate([np.asarray(part, np.int32) for part in parts]) if parts else np.zeros(0, np.int32)


# ---------------------------------------------------------------------------------------------------- the harness

KEPT = 8  # states that a step may leave inside its chunk
_SHAPES = ({"k": (2,), "v": (1,)}, {"kv": (3,)}, {"kv": (2, 2)}, {"kv": (5,)}, {"kv": (6,)}, {"kv": (7,)})


def image(token: int, digest: int) -> int:
    """What the oracle takes for content behind the placeholder id `token`, 0 to 3: a token like any other."""
    return IMAGES[4 * digest + token]


def said(tokens: np.ndarray) -> Any:
    """`tokens` as a caller says them: where there are images, Tokens."""
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1:
        return tokens
    shown = (tokens >= IMAGES.start) & (tokens < IMAGES.stop)
    if not shown.any():
        return tokens
    content = {at: int(tokens[at] - IMAGES.start) // 4 for at in shown.nonzero()[0].tolist()}
    return jkv.Tokens(np.where(shown, tokens % 4, tokens), content)


def _parse_group(text: str) -> tuple[int | None, int]:
    if text == "full":
        return None, 0
    window, _, sinks = text.removeprefix("window:").partition("+")
    return int(window), int(sinks or 0)


@functools.cache
def make_config(
    groups: str,
    shared: bool = False,
    layers: int = 1,
    dtype: Any = jnp.int32,
    pages: Any = 64,
    host: Any = None,
    store: jkv.StoreTier | None = None,
    **fields: Any,
) -> jkv.CacheConfig:
    """A CacheConfig from "full window:16 window:8+2 recurrent".

    Args:
      groups: names of groups, separated by blanks.
      shared: give all attention groups equal buffers, so that they share one pool; else each has its own.
      layers: layers in each group.
      pages: as DeviceTier takes it, or pairs (group, count).
      host: the same of a HostTier; None: none.
      store: the StoreTier; None: none.
      **fields: of CacheConfig.
    """
    made = {}
    for ordinal, text in enumerate(groups.split()):
        for i in range(layers):
            if text == "recurrent":
                made[f"ssm{i}"] = jkv.RecurrentLayer({"h": jkv.Buffer((2,), dtype), "c": jkv.Buffer((1, 3), dtype)})
            else:
                window, sinks = _parse_group(text)
                shapes = _SHAPES[0 if shared else ordinal]
                buffers = {name: jkv.Buffer(shape, dtype) for name, shape in shapes.items()}
                made[f"{text}.{i}"] = jkv.AttentionLayer(buffers, window=window, sinks=sinks)
    fields.setdefault("max_sequences", 4)
    fields.setdefault("max_length", 256)
    fields.setdefault("page_size", 4)
    pages, host = (dict(each) if isinstance(each, tuple) else each for each in (pages, host))
    tiers = [jkv.DeviceTier(pages=pages)]
    if host is not None:
        tiers.append(jkv.HostTier(pages=host))
    if store is not None:
        tiers.append(store)
        fields.setdefault("model", "oracle")
    return jkv.CacheConfig(layers=made, tiers=tuple(tiers), **fields)


@functools.partial(jax.jit, donate_argnames="state")
def device_step(state, rows, positions, values, scales, shifts):
    """What a model does: append K/V, read the state, fold the tokens in, write it. `rows` may be a Ragged."""
    for layer, buffers in values.items():
        state = jkv.append(state, layer, rows, positions, buffers)
    for layer, buffers in scales.items():
        old = jkv.read_state(state, layer, rows)
        new = {name: scale * old[name] + shifts[layer][name] for name, scale in buffers.items()}
        state = jkv.write_state(state, layer, rows, new)
    return state


@functools.partial(jax.jit, donate_argnames="state")
def keeping_step(state, rows, positions, values, scales, shifts, slots, kept_scales, kept_shifts):
    """device_step that also leaves states from inside the chunk, [K, *shape], in `slots`, int32[K]."""
    old = {layer: jkv.read_state(state, layer, rows) for layer in scales}
    state = device_step(state, rows, positions, values, scales, shifts)
    for layer, buffers in kept_scales.items():
        kept = {name: scale * old[layer][name] + kept_shifts[layer][name] for name, scale in buffers.items()}
        state = jkv.write_state(state, layer, values=kept, slots=slots)
    return state


@functools.partial(jax.jit, donate_argnames="state")
def verify_step(state, rows, length, accepted, offsets, values, scales, shifts):
    """A step over an input token and drafts, behind another whose outcome only the device knows.

    Args:
      length: int32[1], as the host knows it.
      accepted: int32[1], drafts accepted of the step in flight; -1: none is in flight.
      offsets: int32[1, T], 0, 1, .. for this step's tokens; -1: padding.
      values: {layer: {buffer: [1, T, *shape]}}.
      scales, shifts: {layer: {buffer: [1, T, *shape]}}, which fold in the first token, the first two, ...
    """
    first = (length + accepted + 1)[:, None]
    positions = jnp.where(offsets < 0, -1, first + offsets)
    for layer, buffers in values.items():
        state = jkv.append(state, layer, rows, positions, buffers)
    for layer, buffers in scales.items():
        previous, current = jkv.candidate_slots(state, layer, rows)
        start = jnp.take_along_axis(previous, jnp.maximum(accepted, 0)[:, None], axis=1)[:, 0]
        old = jkv.read_state(state, layer, slots=start)
        new = {name: scale * old[name][:, None] + shifts[layer][name] for name, scale in buffers.items()}
        state = jkv.write_state(state, layer, values=new, slots=jnp.where(offsets < 0, 0, current))
    return state


_layouts: dict[str, Any] = {}


def shared_step(state: jkv.CacheState, *args: Any, step: Any = device_step) -> jkv.CacheState:
    """`step`, compiled once per geometry: a layout is compared by identity, and each manager has its own."""
    layout, config = state.layout, state.layout.config
    sizes = config.page_size, config.max_sequences, config.max_drafts, layout.max_pages
    layout = _layouts.setdefault(repr((layout.groups, layout.pools, config.layers, sizes)), layout)
    done = step(dataclasses.replace(state, layout=layout), *args)
    return dataclasses.replace(done, layout=state.layout)


@dataclasses.dataclass
class Verify:
    """A verify step that was dispatched and not accepted yet.

    Attributes:
      tokens: the input token and the drafts.
      slots: the candidates, one per token; empty without recurrent layers.
      accepted: how many drafts the step dispatched behind it took as accepted; None: there is none.
    """

    tokens: np.ndarray
    slots: np.ndarray
    accepted: int | None = None


@dataclasses.dataclass(frozen=True)
class Mark:
    """What `checkpoint` returned, and the length that it stands for."""

    mark: Any
    length: int


class Run:
    """One sequence and the tokens that the oracle says it holds.

    Attributes:
      held: the tokens at positions [0, length).
      flight: tokens that a dispatched step wrote and that neither commit nor advance reported yet.
      verifying: verify steps that were dispatched and not accepted yet, oldest first.
      live: the slot with the state after `held` that the device's table is yet to show, else None.
      kept: {position: slot}, `plan_snapshots` for the next step.
      least: the shortest length whose windows are all there; window scratch holds back the pages of shorter ones.
      next_least: `least` once the step in flight is reported.
    """

    def __init__(self, world: World, prompt: np.ndarray, **options: Any):
        self.world, self.prompt = world, np.asarray(prompt, np.int32)
        self.held = self.flight = np.zeros(0, np.int32)
        self.verifying: list[Verify] = []
        self.live: int | None = None
        self.kept: dict[int, int] = {}
        self.least = self.next_least = 0
        self.started = self.synced = self.ended = False
        self.seq = world.manager.open(said(prompt), **options)
        self.scope = options.get("scope", jkv.Scope())
        world.runs.append(self)
        world.check()

    def __repr__(self) -> str:
        return f"Run({len(self.prompt)} prompt, {len(self.held)} held, {len(self.flight)} in flight, {self.seq.status})"

    @property
    def written(self) -> np.ndarray:
        """Tokens that the device holds, reported or not."""
        return join(self.held, self.flight)

    @property
    def reused(self) -> int:
        return self.seq.match.tokens

    @property
    def closed(self) -> bool:
        return self.seq.status == "closed"

    def resume(self) -> bool:
        first = not self.started
        done = self.seq.resume()
        self.world.check()
        if done:
            assert self.seq.status == "active" and self.seq.row is not None
            if first:
                assert self.seq.committed == self.seq.length == self.seq.match.tokens <= self.seq.capacity
                self.held = self.prompt[: self.seq.length]
                self.started = True
            assert self.seq.length == len(self.held)
            self.synced = False
        else:
            assert self.seq.row is None
            assert self.seq.status == "suspended" or (self.seq.status == "loading" and first)
        return done

    def arrive(self) -> bool:
        """`resume`, again and again while what it reuses is being read from the store."""
        until = time.monotonic() + 60
        while not (done := self.resume()) and self.seq.status == "loading":
            assert time.monotonic() < until, f"{self} is loading for a minute: {self.world.manager.stats().tiers}"
            time.sleep(0.0005)
        return done

    def prefetch(self, tier: str) -> bool:
        """Changes nothing but where things lie, and nothing at all where it is refused."""
        seq = self.seq
        before = (self.started, seq.row, seq.committed, seq.length, seq.capacity)
        done = seq.prefetch(tier)
        self.world.check()
        assert (self.started, seq.row, seq.committed, seq.length, seq.capacity) == before
        assert seq.status == "suspended" or (seq.status == "loading" and done and not self.started)
        return done

    def reserve(self, n: int) -> bool:
        before = self.seq.capacity
        done = self.seq.reserve(n)
        self.world.check()
        assert self.seq.capacity == (self.seq.length + n if done else before)
        return done

    def advance(self, n: int | None = None, **options: Any) -> None:
        n = len(self.flight) if n is None else n
        length = self.seq.length
        self.seq.advance(n, **options)
        assert self.seq.length == length + n
        self._reported(n)

    def commit(self, n: int | None = None, **options: Any) -> None:
        """Commits the next n tokens (default: all) of what was written."""
        committed, length = self.seq.committed, self.seq.length
        n = len(self.written) - committed if n is None else n
        self.seq.commit(said(self.written[committed : committed + n]), **options)
        assert self.seq.committed == committed + n and self.seq.length == max(length, committed + n)
        self.ended |= options.get("end", False)
        if self.seq.length > length:
            self._reported(self.seq.length - length)
        self.world.check()

    def _reported(self, n: int) -> None:
        """n of the tokens in flight count, the others never happened."""
        self.held, self.flight, self.kept = join(self.held, self.flight[:n]), self.flight[:0], {}
        if n:
            self.least = max(self.least, self.next_least)
        assert self.seq.length == len(self.held)
        self.world.check()

    def accept(self, j: int, **options: Any) -> None:
        """j drafts of the oldest verify step count, and its input token."""
        step = self.verifying[0]
        assert step.accepted in (None, j), f"a step went on from {step.accepted} accepted drafts, not from {j}"
        length = self.seq.length
        self.seq.accept(j, **options)
        assert self.seq.length == length + j + 1
        self.verifying.pop(0)
        self.flight = step.tokens
        self._reported(j + 1)
        if self.world.recurrent:
            self.live = int(step.slots[j])

    def checkpoint(self) -> Mark | None:
        mark = self.seq.checkpoint()
        self.world.check()
        return None if mark is None else Mark(mark, self.seq.length)

    def rollback(self, mark: Mark) -> None:
        self.seq.rollback(mark.mark)
        assert self.seq.length == mark.length
        self.held, self.flight, self.kept = self.held[: mark.length], self.flight[:0], {}
        self.verifying, self.live, self.synced = [], None, False
        self.world.check()

    def fork(self, n: int) -> list[Run]:
        """n copies; an empty list: no room, nothing changed."""
        before = self.world.picture()
        copies = self.seq.fork(n)
        self.world.check()
        assert isinstance(copies, tuple) and len(copies) in (0, n)
        if not copies:
            assert self.world.picture() == before
        runs = []
        for seq in copies:
            assert seq.status == "active" and seq.row is not None
            assert (seq.committed, seq.length, seq.capacity) == (self.seq.committed, self.seq.length, self.seq.length)
            run = copy.copy(self)
            run.seq, run.synced, run.live, run.kept, run.verifying = seq, False, None, {}, []
            runs.append(run)
        assert len({run.seq for run in [self, *runs]}) == 1 + len(runs)
        self.world.runs += runs
        self.world.check()
        return runs

    def plan_snapshots(self, positions: Sequence[int]) -> np.ndarray:
        slots = self.seq.plan_snapshots(positions)
        self.world.check()
        assert isinstance(slots, np.ndarray) and slots.dtype == np.int32 and slots.shape == (len(positions),)
        had = slots[slots > 0]
        assert (slots >= 0).all() and len(set(had.tolist())) == len(had)
        if not self.world.recurrent:
            assert not len(had)
        self.kept = {int(p): int(slot) for p, slot in zip(positions, slots, strict=True) if slot}
        return slots

    def rewind(self, n: int) -> None:
        self.seq.rewind(n)
        self.held = self.held[: len(self.held) - n]
        assert self.seq.length == len(self.held)
        self.world.check()

    def stop_committing(self) -> None:
        self.seq.stop_committing()
        self.ended = True
        self.world.check()

    def suspend(self) -> None:
        self.seq.suspend()
        assert self.seq.status == "suspended" and self.seq.row is None
        self.synced = False
        self.world.check()

    def close(self) -> None:
        self.seq.close()
        assert self.seq.status == "closed" and self.seq.row is None
        if self in self.world.runs:
            self.world.runs.remove(self)
        self.world.check()

    def fail(self) -> None:
        """An exception inside `with seq`, which closes it."""
        with suppress(ZeroDivisionError), self.seq:
            raise ZeroDivisionError
        self.close()

    # -- whole steps

    def step(self, new: Iterable[int] | np.ndarray, **options: Any) -> None:
        """reserve, prepare, the device step, commit."""
        self.dispatch(new)
        self.commit(**options)

    def dispatch(self, new: Iterable[int] | np.ndarray) -> None:
        """reserve, prepare, the device step; nothing is reported."""
        assert self.reserve(len(join(new))), f"no room for {len(join(new))} tokens: {self.world.manager.stats()}"
        self.world.prepare(self)
        self.write(new)

    def write(self, new: Iterable[int] | np.ndarray) -> None:
        """The device step alone, at positions length..; needs `prepare` before."""
        self.flight = join(self.flight, new)
        self.world.write(self, len(self.flight) - len(join(new)))

    def draft(self, new: Iterable[int] | np.ndarray, accepted: int | None = None) -> None:
        """reserve, prepare and a verify step; `new` is its input token and the drafts. Nothing is reported.

        accepted: beside a verify step in flight, how many of its drafts this one takes as accepted.
        """
        behind = sum(len(step.tokens) for step in self.verifying)
        assert self.reserve(behind + len(join(new))), f"no room: {self.world.manager.stats()}"
        self.world.prepare(self)
        self.verify(new, accepted)

    def verify(self, new: Iterable[int] | np.ndarray, accepted: int | None = None) -> None:
        """The verify step alone; needs `prepare` before, once per step."""
        new, slots = join(new), np.zeros(0, np.int32)
        assert (accepted is None) == (not self.verifying)
        if self.world.recurrent:
            previous, slots = self.world.candidates[self.seq.row]
            if accepted is None:
                assert (previous == self.world.slot(self)).all(), f"{previous} previous, {self.world.slot(self)} live"
            else:
                assert previous.tolist() == self.verifying[0].slots.tolist()
            others = [previous, self.world.slots] + [step.slots for run in self.world.runs for step in run.verifying]
            assert slots.all() and len(set(slots)) == len(slots) and not set(slots) & set(np.concatenate(others))
        if accepted is not None:
            self.verifying[0].accepted = accepted
        behind = [step.tokens[: step.accepted + 1] for step in self.verifying]
        self.verifying.append(Verify(new, slots.copy()))
        self.world.write_verify(self, join(self.held, *behind), new, -1 if accepted is None else accepted)

    def prefill(self, parts: Sequence[int] | str | None = None, **options: Any) -> Run:
        """Steps through the rest of the prompt, all at once, in parts, or stopping at seq.snapshot_points ("stops")."""
        rest = self.prompt[self.seq.length :]
        if parts == "stops":
            points = [p for p in sorted(self.seq.snapshot_points) if self.seq.length < p < len(self.prompt)]
            parts = np.diff([self.seq.length, *points, len(self.prompt)]).tolist()
        parts = [len(rest)] if parts is None else list(parts)
        assert sum(parts) == len(rest), f"parts {parts} of {len(rest)} tokens: {self.seq.length} were reused"
        for n in parts:
            if n:
                self.step(self.prompt[self.seq.length : self.seq.length + n], **options)
        return self


class World:
    """A manager, its state, and everything that the oracle knows about both."""

    def __init__(self, groups: str = "full", *, chunk: int | None = None, **config: Any):
        for tier in ("pages", "host"):
            if isinstance(config.get(tier), dict):
                config[tier] = tuple(config[tier].items())
        self.config = make_config(groups, **config)
        self.groups = groups.split()
        self.page_size = self.config.page_size
        self.chunk = chunk or (8 if self.config.max_length <= 64 else 32)
        self.attention = {n: x for n, x in self.config.layers.items() if isinstance(x, jkv.AttentionLayer)}
        self.recurrent = {n: x for n, x in self.config.layers.items() if isinstance(x, jkv.RecurrentLayer)}
        self.scratch = self.config.window_scratch
        self.drafts = (self.config.max_drafts or 3) + 1  # tokens of a verify step
        self.faulty: tuple[str, ...] = ()  # tiers with which something may go wrong
        self.waits = True  # after each prepare for what is on its way to host memory, to verify it there
        self.start_over()

    def start_over(self) -> None:
        """A program starts: a new manager, on the same store if there is one."""
        self.manager = jkv.CacheManager(self.config)
        self.state = self.manager.init()
        self.last_stats: jkv.CacheStats | None = None
        self._began()

    def _began(self) -> None:
        self.runs: list[Run] = []
        self.copied: dict[str, list[int]] = {}
        self._resized()

    def _resized(self) -> None:
        self.totals = {(tier, name): pool.total for tier, name, pool in self.every_pool()}
        self.fetch()
        self.check()

    def restart(self, *, killed: bool = False) -> None:
        """The program ends and starts again; `killed`: with what it had written to the store until then."""
        if killed:
            self.settle()
        else:
            self.manager.release(self.state)
        self.start_over()

    def reset(self) -> None:
        """The device state was lost."""
        self.state = self.manager.reset()
        for run in self.runs:
            assert run.closed and run.seq.row is None
        lookups = self.last_stats.lookups
        self._began()
        assert self.last_stats.lookups == lookups

    def resize_tier(self, tier: str, **size: Any) -> None:
        """manager.resize_tier; verifies every byte of what is left."""
        self.state = self.manager.resize_tier(self.state, tier, **size)
        self._resized()
        self.flush()

    def rebalance(self) -> None:
        """manager.rebalance; verifies every byte of what is left."""
        self.state = self.manager.rebalance(self.state)
        self._resized()
        self.flush()

    def delay(self, seconds: float) -> None:
        """What is on its way to host memory from now on takes that much longer."""
        self.manager._memory._worker.submit(time.sleep, seconds)

    def settle(self) -> None:
        """Waits until everything on its way to host memory and to the store has arrived."""
        if self.manager._memory is not None:
            self.manager._memory.wait()
        if self.manager._store is not None:
            self.manager._store.flush()

    # -- looking

    def fetch(self) -> None:
        """Copies of everything on the device (a live view would cancel donation: DESIGN, trap 2)."""
        self.bytes = {
            (layer, buffer): np.array(jkv.pool(self.state, layer, buffer), copy=True)
            for layer, spec in self.config.layers.items()
            for buffer in spec.buffers
        }
        self.tables = {group: np.array(table, copy=True) for group, table in self.state.page_tables.items()}
        self.slots = np.array(self.state.state_slots["recurrent"], copy=True) if self.recurrent else None
        if "candidates" in self.state.state_slots:
            self.candidates = np.array(self.state.state_slots["candidates"], copy=True)

    def table(self, run: Run, group: str) -> np.ndarray:
        """int32[pages up to capacity]: the run's row of the table on the device, as last prepared."""
        return self.tables[group][run.seq.row][: -(-run.seq.capacity // self.page_size)]

    def slot(self, run: Run) -> int:
        """The slot of the state after run.held: the device's table, or what `accept` chose since."""
        return int(self.slots[run.seq.row]) if run.live is None else run.live

    def pools(self) -> dict[str, Any]:
        return self.manager.stats().pools

    def pool(self, group: str, tier: str = "device"):
        """PoolStats of the pool that serves `group`."""
        pools = self.manager.stats().tiers[tier].pools
        return next(stats for name, stats in pools.items() if group in name.split(","))

    def every_pool(self) -> list[tuple[str, str, Any]]:
        """(tier, pool, PoolStats) of all."""
        tiers = self.manager.stats().tiers
        return [(tier, name, pool) for tier, stats in tiers.items() for name, pool in stats.pools.items()]

    def stats(self) -> jkv.CacheStats:
        """What only calls of the manager change: the store's counts, which change by themselves, left out."""
        stats = self.manager.stats()
        tiers = {tier: each for tier, each in stats.tiers.items() if tier != "store"}
        return dataclasses.replace(stats, tiers=tiers)

    def picture(self) -> tuple:
        """Everything that a refused call must leave as it was; comparable."""
        lengths = [(r.seq.status, r.seq.row, r.seq.committed, r.seq.length, r.seq.capacity) for r in self.runs]
        return self.stats(), lengths, self.manager._host.builder.snapshot()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """What happens inside leaves the host half as it was."""
        before = self.picture()
        yield
        self.check()
        assert self.picture() == before

    def check(self) -> None:
        """The manager's own integrity check, and the sums that a caller can see."""
        self.manager.check()
        stats = self.manager.stats()
        assert stats.pools == stats.tiers["device"].pools
        for tier, name, pool in self.every_pool():
            total = self.totals[tier, name]
            assert pool.free + pool.tree + pool.private == pool.total == total, f"pool {name}, {tier}: {pool}"
            assert 0 <= pool.evictable <= pool.tree, f"pool {name}, {tier}: {pool}"
        for tier, each in stats.tiers.items():
            assert all(0 <= n <= each.evicted[name] for name, n in each.offloaded.items()), f"{tier}: {each}"
            assert tier in self.faulty or not (each.failures or each.off), f"{tier}: {each}"
            assert each.limit is None or each.bytes <= each.limit, f"{tier}: {each}"
        self._check_work(stats)
        rows = [run.seq.row for run in self.runs if run.seq.row is not None]
        assert len(set(rows)) == len(rows)
        for run in self.runs:
            assert 0 <= run.seq.committed <= run.seq.length <= run.seq.capacity <= self.config.max_length

    def _check_work(self, stats: jkv.CacheStats) -> None:
        """Totals never go down, and what they say fits together (SPEC S54)."""
        for work in (stats, stats.retried, *(run.seq.stats for run in self.runs)):
            assert work.hits <= work.lookups and work.reused_tokens <= work.looked_up_tokens
            assert sum(work.tier_tokens.values()) == work.reused_tokens, work
            assert sum(work.limited_by.values()) <= work.lookups, work
            for name, pages in work.groups.items():
                assert pages.copied <= pages.allocated, f"{name}: {work}"
        if self.last_stats is not None:
            assert min(_numbers(since(stats, self.last_stats))) >= 0, f"{self.last_stats} -> {stats}"
        self.last_stats = stats

    def verify(self, prepared: bool = False) -> None:
        """Compares every byte that a live sequence may read. `prepared`: the tables are those of this moment."""
        for run in self.runs:
            if run.seq.status == "active" and run.synced:
                self._verify_attention(run, prepared)
                self._verify_state(run)

    def verify_rest(self) -> None:
        """Compares what nobody is reading: the tree's pages and states, and what suspended sequences have.

        On the device and in host memory. Looks inside the manager: a wrong byte is found where it was made.
        """
        host, memory = self.manager._host, self.manager._memory
        if not host.builder.empty:
            return  # what is planned is not there yet
        if memory is not None:
            memory.wait()
        for run in self.runs:
            if run.started and run.seq.status == "suspended":
                self._verify_asleep(run)
        stack = [(root, np.zeros(0, np.int32)) for root in host.tree.roots.values()]
        while stack:
            node, above = stack.pop()
            path = join(above, self._meant(node.tokens[: node.size]))
            stack += [(child, path) for child in node.children.values()]
            hashes = prefix_hashes(path)[node.start :]
            for group in host.tree.groups if node.size else ():
                places = node.pages[group.ordinal]
                places = places[: host.tree.num_pages(node)]
                self._verify_pages(group, places, hashes, np.arange(node.size), f"node at {node.start}")
            for endpoint in node.endpoints:
                if endpoint.slot:
                    self._verify_copy(endpoint.slot, path[: endpoint.position], f"snapshot at {endpoint.position}")

    def _meant(self, tokens: np.ndarray) -> np.ndarray:
        """The oracle's tokens for those of the manager."""
        pairs = self.manager._contents.pairs
        if not len(tokens) or tokens.min() >= 0:
            return tokens
        return join([t if t >= 0 else image(pairs[t][0], int(pairs[t][1][9:])) for t in tokens.tolist()])

    def _verify_asleep(self, run: Run) -> None:
        """The private pages, the live state and its kept copies of a suspended sequence."""
        seq, length, hashes = run.seq, run.seq.length, prefix_hashes(run.held)
        for group in self.manager._host.tree.groups:
            places = seq._table(group.ordinal).copy()
            places[: seq._tree_pages] = 0
            reach = 0 if group.window is None else max(0, length + 1 - group.window)
            positions = np.arange(length)
            positions = positions[(positions < group.sinks) | (positions >= reach)]
            private = positions[positions // self.page_size >= seq._tree_pages]
            assert (places[private // self.page_size] > 0).all(), f"{run}: {group.name} lacks pages: {places}"
            self._verify_pages(group, places, hashes, positions, f"{run}")
        if self.recurrent:
            copies = {**seq._pending, **{mark.position: mark.slot for mark in seq._marks}}
            copies[length] = seq._slot if seq._lent is None else seq._lent.slot
            for position, slot in copies.items():
                if slot and position <= length:
                    self._verify_copy(slot, run.held[:position], f"{run}: its state at {position}")

    def _verify_pages(
        self, group: Any, places: np.ndarray, hashes: np.ndarray, positions: np.ndarray, where: str
    ) -> None:
        """What lies at `positions` of pages `places` of a group is that of hashes[positions]; 0 and -1 are no pages."""
        lost = [HOST + page for pool, page in self._lost() if pool == group.pool]
        there = (places > 0) & ~np.isin(places, lost)
        positions = positions[there[positions // self.page_size]]
        for layer in group.layers:
            for buffer, declared in self.config.layers[layer].buffers.items():
                pages = places[positions // self.page_size]
                found = self._at(group, layer, buffer, pages, (self.page_size, *declared.shape))
                found = found[np.arange(len(positions)), positions % self.page_size]
                wrong = (found != kv_values(hashes[positions], layer, buffer, declared.shape)).any(
                    axis=tuple(range(1, found.ndim))
                )
                assert not wrong.any(), f"{where}: {layer}.{buffer} is wrong at +{positions[wrong]}, places {places}"

    def _verify_copy(self, place: int, tokens: np.ndarray, where: str) -> None:
        """The state at `place`, on the device or in host memory, is the one after `tokens`."""
        if place >= HOST and (self.manager.layout.recurrent_pool.ordinal, place - HOST) in self._lost():
            return
        for layer, spec in self.recurrent.items():
            for buffer, declared in spec.buffers.items():
                group = next(group for group in self.manager.layout.groups if group.recurrent)
                (found,) = self._at(group, layer, buffer, np.array([place]), declared.shape)
                assert np.array_equal(found, state_after(tokens, layer, buffer, declared.shape)), (
                    f"{where}: {layer}.{buffer} at {place} is {self.name_state(layer, buffer, found, tokens)}"
                )

    def _lost(self) -> set[tuple[int, int]]:
        """(pool ordinal, host page) of what never arrived, which the manager knows."""
        return set() if self.manager._memory is None else self.manager._memory.lost

    def _at(self, group: Any, layer: str, buffer: str, places: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """[n, *shape]: what lies at places of a group's pool, in one layer and buffer."""
        found = np.zeros((len(places), *shape), np.int32)
        cold = places >= HOST
        found[~cold] = self.bytes[layer, buffer][places[~cold]]
        if cold.any():
            pool, index = self.manager.layout.pools[group.pool], group.layers.index(layer)
            at = sum(map(len, pool.buffers[:index])) + sorted(pool.buffers[index]).index(buffer)
            arena = self.manager._memory._arenas[group.pool][at]
            found[cold] = arena[places[cold] - HOST].view(np.int32).reshape(-1, *shape)
        return found

    def _verify_attention(self, run: Run, prepared: bool) -> None:
        length, committed, size = run.seq.length, run.seq.committed, self.page_size
        if not self.attention:
            return
        hashes = prefix_hashes(run.held)
        for layer, spec in self.attention.items():
            row = self.tables[spec.group][run.seq.row]
            positions = np.arange(length)
            base = length if run.ended else committed
            if spec.window is not None:
                shortest = max(base, min(run.least, length))
                positions = positions[(positions < spec.sinks) | (positions >= shortest + 1 - spec.window)]
            pages = row[positions // size]
            assert (pages > 0).all(), (
                f"{run}: {layer} has no page for positions {positions[pages <= 0]} (committed {committed}): {row}"
            )
            if prepared:
                beyond = row[-(-run.seq.capacity // size) :]
                assert not beyond.any(), f"{run}: {layer} has pages beyond capacity {run.seq.capacity}: {row}"
                if spec.window is not None:
                    # an endpoint inside the partial page keeps its window until the page is published
                    kept = base if run.ended else committed // size * size
                    stale = row[slice(*stale_pages(kept, spec.window, spec.sinks, size))]
                    assert not stale.any(), f"{run}: {layer} still shows stale pages at {base}: {row}"
                self._verify_room(run, layer, spec, row)
            for buffer, declared in spec.buffers.items():
                found = self.bytes[layer, buffer][pages, positions % size]
                wanted = kv_values(hashes[positions], layer, buffer, declared.shape)
                wrong = (found != wanted).any(axis=tuple(range(1, found.ndim)))
                assert not wrong.any(), f"{run}: {layer}.{buffer} is wrong at {positions[wrong]}, table {row}"

    def _verify_room(self, run: Run, layer: str, spec: jkv.AttentionLayer, row: np.ndarray) -> None:
        """Positions up to capacity have pages; with window scratch those that the end of the chunk sees."""
        room = np.arange(run.seq.length, run.seq.capacity)
        if spec.window is not None and self.scratch is not None and run.seq.window_scratch:
            shortest = max(run.seq.length, run.seq.capacity - self.scratch.max_rewind)
            room = room[(room < spec.sinks) | (room >= shortest + 1 - spec.window)]
        missing = room[row[room // self.page_size] <= 0]
        assert not len(missing), f"{run}: {layer} has no page for {missing} of capacity {run.seq.capacity}: {row}"

    def _verify_state(self, run: Run) -> None:
        if not self.recurrent:
            return
        slot = self.slot(run)
        assert slot > 0, f"{run} has no live slot"
        written = run.written
        for layer, spec in self.recurrent.items():
            for buffer, declared in spec.buffers.items():
                found = self.bytes[layer, buffer][slot]
                wanted = state_after(written, layer, buffer, declared.shape)
                if not np.array_equal(found, wanted):
                    raise AssertionError(
                        f"{run}: {layer}.{buffer} is not the state after {len(written)} tokens but "
                        f"{self.name_state(layer, buffer, found, written)}"
                    )

    def name_state(self, layer: str, buffer: str, found: np.ndarray, written: np.ndarray) -> str:
        """What a wrong state is, if it is one of this run's."""
        for n in range(len(written) + 1):
            if np.array_equal(found, state_after(written[:n], layer, buffer, found.shape)):
                return f"the state after {n}"
        return "foreign"

    # -- doing

    def open(self, prompt: Iterable[int] | np.ndarray = (), **options: Any) -> Run:
        return Run(self, join(prompt), **options)

    def start(self, prompt: Iterable[int] | np.ndarray = (), **options: Any) -> Run:
        """open and a resume that must succeed, once what comes from the store is there."""
        run = self.open(prompt, **options)
        assert run.arrive(), f"resume refused: {self.manager.stats()}"
        return run

    def turn(
        self,
        prompt: Iterable[int] | np.ndarray,
        parts: Sequence[int] | str | None = None,
        *,
        snapshot: bool | None = True,
        end: bool = False,
        close: bool = True,
        **options: Any,
    ) -> Run:
        """A whole request: open, resume, prefill the rest in `parts`, close."""
        run = self.start(prompt, **options).prefill(parts, snapshot=snapshot, **({"end": True} if end else {}))
        if close:
            run.close()
        return run

    def prepare(self, *runs: Run) -> np.ndarray:
        """Applies everything pending; `self.copied` then says which pages (slots) this changed, per group."""
        before = self.bytes
        self.state, rows = self.manager.prepare(self.state, [run.seq for run in runs])
        assert isinstance(rows, np.ndarray) and rows.dtype == np.int32
        assert rows.tolist() == [run.seq.row for run in runs]
        self._prepared(runs, before)
        return rows

    def prepare_ragged(
        self, runs: Sequence[Run], counts: Sequence[int], *, pad_tokens: Any = 16, pad_sequences: Any = 4
    ) -> jkv.Ragged:
        """`prepare` for a flat step of counts[i] tokens of runs[i]; checks every entry of the batch."""
        before, seqs = self.bytes, [run.seq for run in runs]
        self.state, batch = self.manager.prepare_ragged(
            self.state, seqs, counts, pad_tokens=pad_tokens, pad_sequences=pad_sequences
        )
        for array in (batch.rows, batch.positions, batch.cu_q_lens, batch.kv_lens, batch.num_seqs):
            assert isinstance(array, np.ndarray) and array.dtype == np.int32
        n, total, (width,), (length,) = len(runs), sum(counts), batch.rows.shape, batch.positions.shape
        assert batch.num_seqs.tolist() == [n]
        assert batch.rows.tolist() == [run.seq.row for run in runs] + [-1] * (width - n)
        positions = [p for run, k in zip(runs, counts, strict=True) for p in range(run.seq.length, run.seq.length + k)]
        assert batch.positions.tolist() == positions + [-1] * (length - total)
        assert batch.cu_q_lens.tolist() == [0, *np.cumsum(counts).tolist()][: n + 1] + [total] * (width - n)
        ends = [run.seq.length + k for run, k in zip(runs, counts, strict=True)]
        assert batch.kv_lens.tolist() == ends + [0] * (width - n)
        self._prepared(runs, before)
        return batch

    def _prepared(self, runs: Iterable[Run], before: dict[tuple[str, str], np.ndarray]) -> None:
        self.check()
        self.fetch()
        for run in runs:
            scratch = self.scratch is not None and run.seq.window_scratch
            run.next_least = run.seq.capacity - self.scratch.max_rewind if scratch else 0
        self.copied = {}
        for (layer, buffer), old in before.items():
            changed = np.flatnonzero((old != self.bytes[layer, buffer]).any(axis=tuple(range(1, old.ndim))))
            group = self.config.layers[layer].group
            self.copied[group] = sorted({*self.copied.get(group, []), *changed.tolist()} - {0})
        for run in self.runs:
            if run.seq.status == "active":
                run.synced = True
                shown = self.slots[run.seq.row] if run.live is not None else None
                assert run.ended or shown == run.live, f"{run}: slot {shown} is live, the accepted one is {run.live}"
                run.live = None
        self.verify(prepared=True)
        if self.manager._memory is not None and self.waits:
            self.verify_rest()

    def flush(self) -> dict[str, list[int]]:
        """Applies what is pending and puts nothing in flight; returns what that changed."""
        self.prepare()
        return {group: pages for group, pages in self.copied.items() if pages}

    def write(self, run: Run, skip: int = 0) -> None:
        """The device step of run.flight[skip:], in chunks of one static shape, padded with position -1."""
        hashes = prefix_hashes(run.written)[len(run.held) + skip :]
        new, rows = run.flight[skip:], np.array([run.seq.row], np.int32)
        for at in range(0, len(new), self.chunk):
            part, n = new[at : at + self.chunk], len(new[at : at + self.chunk])
            first = len(run.held) + skip + at
            positions = np.full((1, self.chunk), -1, np.int32)
            positions[0, :n] = first + np.arange(n)
            values = self.values((1, self.chunk), (0, slice(n)), hashes[at : at + n])
            args = (rows, positions, values, *self.folds((1,), [part]))
            if run.kept:
                inside = {p: slot for p, slot in run.kept.items() if first < p <= first + n}
                slots = np.zeros(KEPT, np.int32)
                slots[: len(inside)] = list(inside.values())
                kept = self.folds((KEPT,), [part[: p - first] for p in inside])
                self.state = shared_step(self.state, *args, slots, *kept, step=keeping_step)
            else:
                self.state = shared_step(self.state, *args)
        self.fetch()
        self.verify()

    def write_ragged(self, batch: jkv.Ragged, runs: Sequence[Run], news: Sequence[np.ndarray]) -> None:
        """One device step of all runs' new tokens, back to back."""
        parts = [join(new) for new in news]
        for run, new in zip(runs, parts, strict=True):
            run.flight = new
        hashes = [prefix_hashes(run.written)[len(run.held) :] for run in runs]
        total = sum(map(len, parts))
        values = self.values(batch.positions.shape, (slice(total),), np.concatenate(hashes))
        args = (batch, batch.positions, values, *self.folds(batch.rows.shape, parts))
        self.state = shared_step(self.state, *args)
        self.fetch()
        self.verify()

    def write_verify(self, run: Run, before: np.ndarray, new: np.ndarray, accepted: int) -> None:
        """The verify step of `new` behind the tokens `before`; `accepted` is known to the device alone."""
        width, n = self.drafts, len(new)
        offsets = np.full((1, width), -1, np.int32)
        offsets[0, :n] = np.arange(n)
        values = self.values((1, width), (0, slice(n)), prefix_hashes(join(before, new))[len(before) :])
        scales, shifts = self.folds((1, width), [new[: i + 1] for i in range(n)])
        rows, length = np.array([run.seq.row], np.int32), np.array([run.seq.length], np.int32)
        accepted = jnp.array([accepted], jnp.int32)
        self.state = shared_step(self.state, rows, length, accepted, offsets, values, scales, shifts, step=verify_step)
        self.fetch()
        self.verify()

    def values(self, lead: tuple[int, ...], places: tuple, hashes: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        """What attention layers hold where the prefix hashes are `hashes`, at `places` of arrays [*lead, *shape]."""
        values: dict[str, dict[str, np.ndarray]] = {}
        for layer, spec in self.attention.items():
            values[layer] = {}
            for buffer, declared in spec.buffers.items():
                padded = np.full((*lead, *declared.shape), -7, np.int32)
                padded[places] = kv_values(hashes, layer, buffer, declared.shape)
                values[layer][buffer] = padded
        return values

    def folds(self, lead: tuple[int, ...], parts: Sequence[np.ndarray]) -> tuple[dict, dict]:
        """(scales, shifts) that fold parts[i] into a state, at flat place i of arrays [*lead, *shape]."""
        scales: dict[str, dict[str, np.ndarray]] = {}
        shifts: dict[str, dict[str, np.ndarray]] = {}
        for layer, spec in self.recurrent.items():
            scales[layer], shifts[layer] = {}, {}
            for buffer, declared in spec.buffers.items():
                size = int(np.prod(declared.shape))
                both = np.full((2, int(np.prod(lead)), size), -7, np.int32)
                for i, part in enumerate(parts):
                    both[:, i] = fold(part, layer, buffer, size)
                scales[layer][buffer], shifts[layer][buffer] = both.reshape(2, *lead, *declared.shape)
        return scales, shifts

    # -- batches

    def reserve(self, runs: Sequence[Run], counts: Any) -> int:
        """manager.reserve: the number of leading runs that got room."""
        each = np.broadcast_to(counts, len(runs)).tolist()
        before = [(run.seq.length, run.seq.capacity) for run in runs]
        done = self.manager.reserve([run.seq for run in runs], counts)
        self.check()
        assert 0 <= done <= len(runs)
        for i, (run, n, (length, capacity)) in enumerate(zip(runs, each, before, strict=True)):
            assert (run.seq.length, run.seq.capacity) == (length, length + n if i < done else capacity)
        return done

    def advance(self, runs: Sequence[Run], counts: Any = None) -> None:
        """manager.advance; by default of all that is in flight."""
        counts = [len(run.flight) for run in runs] if counts is None else counts
        lengths = [run.seq.length for run in runs]
        self.manager.advance([run.seq for run in runs], counts)
        for run, n, length in zip(runs, np.broadcast_to(counts, len(runs)).tolist(), lengths, strict=True):
            assert run.seq.length == length + n
            run._reported(n)

    def commit(self, runs: Sequence[Run], lengths: Any = None) -> None:
        """manager.commit; by default of all that was written."""
        lengths = [len(run.written) - run.seq.committed for run in runs] if lengths is None else lengths
        each = np.broadcast_to(lengths, len(runs)).tolist()
        before = [(run.seq.committed, run.seq.length) for run in runs]
        ids = [run.written[c : c + n] for run, n, (c, _) in zip(runs, each, before, strict=True)]
        self.manager.commit([run.seq for run in runs], said(join(*ids)), lengths)
        for run, n, (committed, length) in zip(runs, each, before, strict=True):
            assert (run.seq.committed, run.seq.length) == (committed + n, max(length, committed + n))
            if run.seq.length > length:
                run._reported(run.seq.length - length)
        self.check()

    def probe(self, prompt: Iterable[int] | np.ndarray, **options: Any):
        """manager.probe with the cap lifted; checks that it changes nothing."""
        before = self.stats()
        match = self.manager.probe(said(join(prompt)), **{"max_reuse": len(join(prompt)), **options})
        assert self.stats() == before
        assert 0 <= match.tokens <= match.attention_tokens <= match.raw_tokens <= len(join(prompt)), match
        assert 0 <= match.in_flight <= len(join(prompt)) - match.raw_tokens, match
        assert sum(match.tier_tokens.values()) == match.tokens and all(match.tier_tokens.values()), match
        return match

    def hit(self, prompt: Iterable[int] | np.ndarray, **options: Any) -> int:
        """Tokens reused by a lookup, cap lifted: a probe, then a sequence that resumes, verifies and closes."""
        self.settle()
        match = self.probe(prompt, **options)
        run = self.start(prompt, **{"max_reuse": len(join(prompt)), **options})
        assert run.seq.match == match, f"{run.seq.match}, but the probe said {match}"
        self.prepare(run)
        run.close()
        return match.tokens

    def close_all(self) -> None:
        for run in list(self.runs):
            run.close()

    def scribble(self) -> None:
        """Leaves foreign bytes in every free page and slot, so that a copy or a zeroing shows as a change.

        One sequence per free slot, all of them beside each other; the last one takes the free pages, too.
        """
        runs = []
        for _ in range(self.pool("recurrent").free if self.recurrent else 1):
            run = self.start()
            run.dispatch(fresh())
            run.advance()
            run.suspend()
            runs.append(run)
        rooms = [pool.free // len(name.split(",")) for name, pool in self.pools().items() if name != "recurrent"]
        if self.attention and min(rooms):
            assert runs[-1].resume()
            runs[-1].dispatch(fresh(min(min(rooms) * self.page_size, self.config.max_length - 1)))
            runs[-1].advance()
        for run in runs:
            run.close()
        self.flush()


def _numbers(stats: Any) -> Iterator[int]:
    """Every number in what `stats` returned."""
    if dataclasses.is_dataclass(stats):
        stats = vars(stats)
    if isinstance(stats, Mapping):
        for each in stats.values():
            yield from _numbers(each)
    elif stats is not None:
        yield stats


def stale_pages(length: int, window: int, sinks: int, page_size: int) -> tuple[int, int]:
    """SPEC S18, as the text has it."""
    first = min(-(-length // page_size), -(-sinks // page_size))
    return first, max(first, (length + 1 - window) // page_size)
