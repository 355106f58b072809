"""Speculative decoding through jkv, three ways; each must write what plain greedy decoding writes.

    python examples/speculative_decode.py                    # under a minute on two cores, nothing is downloaded
    python examples/speculative_decode.py --mode checkpoint

A cheap draft model guesses the next tokens, one step of the target checks all guesses, and those that the target would
have chosen itself are accepted. The others have been written to the cache too and must be forgotten. For attention that
is easy: the next step writes over them. But a recurrent state that has seen a wrong token is lost.

    candidates   hybrid model: a step leaves a state after each token, and the next step goes on from the one after the
                 last accepted token. It is dispatched before the host has heard which that is.
    checkpoint   hybrid model: the state is copied before the step. If a draft was rejected, it is put back and the
                 accepted tokens are run again. For models that cannot leave a state after each token.
    tree         attention only: two guesses for the next token and what follows each, in one step behind a mask.

The target is the model of hybrid_decode.py with random weights; the draft model remembers which id followed which.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hybrid_decode
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jkv

DRAFTS = 3  # in a row
MAX_SEQUENCES = 4
MAX_LENGTH = 256
PAGE_SIZE = 16
PAGES = 2 * MAX_SEQUENCES * MAX_LENGTH // PAGE_SIZE  # twice: full attention and the window may share a pool
STEP_TOKENS = 64  # one shape for everything but the overlapped steps, so one compilation
PROMPTS = (
    "You are a patient tutor. Explain every step, give one example.",
    "Where is my parcel? It is a small blue one.",
    "The cat sat on the mat and the dog sat on the log and the cat",
    "abcabcabcabcabc",
)


@functools.cache
def make_target(layers: tuple[str, ...]) -> hybrid_decode.Model:
    """Random weights and quiet mixers: so its texts repeat themselves, as real ones do, and drafts can be right."""
    model = hybrid_decode.Model(nnx.Rngs(0), layers)
    for block in model.blocks:
        block.mixer.out.kernel[...] *= 0.25
    return model


class Bigrams:
    """The draft model: which id followed which, in all texts so far.

    >>> bigrams = Bigrams()
    >>> bigrams.learn([1, 2, 3, 1, 4])
    >>> bigrams.draft(1, 2), bigrams.draft(1, 3, choice=1)
    ([4, 0], [2, 3, 1])
    """

    def __init__(self) -> None:
        self.followers = np.zeros((hybrid_decode.VOCAB, 2), np.int32)  # the last one, and the last other one

    def learn(self, ids: Sequence[int]) -> None:
        for before, after in itertools.pairwise(ids):
            if after != self.followers[before, 0]:
                self.followers[before] = after, self.followers[before, 0]

    def draft(self, token: int, count: int, choice: int = 0) -> list[int]:
        """`count` ids to follow `token`; `choice` is about the first of them."""
        chain = [int(self.followers[token, choice])]
        while len(chain) < count:
            chain.append(int(self.followers[chain[-1], 0]))
        return chain


@dataclasses.dataclass(eq=False)
class Text:
    """A prompt and what was generated so far; the cache lacks the last id at least."""

    ids: list[int]
    end: int  # ids when it is finished
    seq: jkv.Sequence
    accepted: list[int] = dataclasses.field(default_factory=list)  # drafts, per verify step

    @property
    def finished(self) -> bool:
        return len(self.ids) >= self.end

    @property
    def missing(self) -> list[int]:
        """What the next step has to run before any drafts."""
        return self.ids[self.seq.length :]


# ---- plain decoding --------------------------------------------------------------------------------------------------


class Decoder:
    """Greedy decoding of several texts, a token at a time: what the other ways have to equal."""

    layers: tuple[str, ...] = ("ssm", "window", "full")
    max_drafts = 0

    def __init__(self) -> None:
        self.model = make_target(self.layers)
        self.graphdef, self.params = nnx.split(self.model)
        self.manager = jkv.CacheManager(
            jkv.CacheConfig(
                layers=hybrid_decode.cache_layers(self.layers),
                max_sequences=MAX_SEQUENCES,
                max_length=MAX_LENGTH,
                page_size=PAGE_SIZE,
                tiers=(jkv.DeviceTier(pages=PAGES),),
                max_drafts=self.max_drafts,
            )
        )
        self.state = self.manager.init()
        self.step = jax.jit(self._step, donate_argnames="state")
        self.recompute = hybrid_decode.make_steps(self.model).recompute

    def _step(
        self, params: Any, state: jkv.CacheState, batch: jkv.Ragged, tokens: jax.Array
    ) -> tuple[jax.Array, jkv.CacheState]:
        """The greedy id after each token, int32[T], and the state after the step."""
        return self._greedy(params, tokens, batch.positions, hybrid_decode.Cached(state, batch))

    def _greedy(
        self, params: Any, tokens: jax.Array, positions: jax.Array, cache: hybrid_decode.Cached
    ) -> tuple[jax.Array, jkv.CacheState]:
        model = nnx.merge(self.graphdef, params)
        logits = model.head(model(tokens, positions, cache))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache.state

    def decode(self, prompts: Sequence[str], new_tokens: int, turn: Callable[[list[Text]], None]) -> list[Text]:
        """Decode all prompts from an empty cache, turn by turn; `steps` counts the target's, those of prefill aside."""
        self.manager.clear()
        self.bigrams = Bigrams()
        self.steps = 0
        texts = [self.prefill(hybrid_decode.bytes_of(prompt), new_tokens) for prompt in prompts]
        self.steps = 0
        self.start(texts)
        while running := [text for text in texts if not text.finished]:
            turn(running)
        for text in texts:
            text.seq.close()
        return texts

    def prefill(self, ids: list[int], new_tokens: int) -> Text:
        """Run all but the last id; that is what the first turn begins with."""
        text = Text(ids, len(ids) + new_tokens, self.manager.open(ids))
        if not text.seq.resume():
            raise RuntimeError("no row for a prompt, although there is one for each")
        while chunk := text.missing[:-1][:STEP_TOKENS]:
            self.run([text], [chunk])
            text.seq.commit(chunk)
        self.bigrams.learn(ids)
        return text

    def start(self, texts: list[Text]) -> None:
        """Called before the first turn."""

    def turn(self, texts: list[Text]) -> None:
        """One more token each."""
        for text, chosen in zip(texts, self.run(texts, [text.missing for text in texts]), strict=True):
            self.extend(text, chosen)
        self.manager.advance([text.seq for text in texts], 1)
        self.commit(texts)

    def reserve(self, texts: Sequence[Text], counts: list[int] | int) -> list[jkv.Sequence]:
        """The sequences, with room for so many tokens each."""
        sequences = [text.seq for text in texts]
        if self.manager.reserve(sequences, counts) < len(sequences):
            raise RuntimeError("no pages, although there are enough for every text at its longest")
        return sequences

    def run(self, texts: Sequence[Text], tokens: Sequence[list[int]], *more: np.ndarray) -> list[list[int]]:
        """One step over tokens[i] of texts[i], and wait: the greedy id after each token. `more`: for `step`."""
        counts = [len(ids) for ids in tokens]
        self.state, batch = self.manager.prepare_ragged(
            self.state, self.reserve(texts, counts), counts, pad_tokens=STEP_TOKENS, pad_sequences=MAX_SEQUENCES
        )
        flat = np.zeros(STEP_TOKENS, np.int32)
        flat[: sum(counts)] = list(itertools.chain(*tokens))
        chosen, self.state = self.step(self.params, self.state, batch, flat, *more)
        self.steps += 1
        ids = iter(np.asarray(chosen).tolist())
        return [list(itertools.islice(ids, count)) for count in counts]

    def extend(self, text: Text, ids: list[int]) -> None:
        """What the target has chosen."""
        self.bigrams.learn([text.ids[-1], *ids])
        text.ids += ids

    def commit(self, texts: Sequence[Text]) -> None:
        """Publish all that the cache has."""
        known = [text.ids[text.seq.committed : text.seq.length] for text in texts]
        self.manager.commit([text.seq for text in texts], list(itertools.chain(*known)), [len(ids) for ids in known])


def count_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many drafts the target would have chosen itself; `chosen` begins with the choice before the first draft."""
    equal = (draft == choice for draft, choice in zip(drafts, chosen, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, equal))


# ---- candidates ------------------------------------------------------------------------------------------------------


class CandidateStates(hybrid_decode.Cached):
    """The cache of a step that goes on from an accepted candidate and leaves a candidate after each of its tokens."""

    def __init__(self, state: jkv.CacheState, batch: jkv.Ragged, accepted: jax.Array) -> None:
        super().__init__(state, batch)
        self.accepted = accepted  # int32[R], of the step before

    def load(self, layer: str) -> dict[str, jax.Array]:
        previous, self.current = jkv.candidate_slots(self.state, layer, self.batch)
        slots = jnp.take_along_axis(previous, self.accepted[:, None], axis=1)[:, 0]
        return jkv.read_state(self.state, layer, slots=slots)

    def store(self, layer: str, after: dict[str, jax.Array], after_each: dict[str, jax.Array]) -> None:
        self.state = jkv.write_state(self.state, layer, slots=self.current.reshape(-1), values=after_each)


class Candidates(Decoder):
    """What was accepted stays on the device; the host hears of it while the next step runs.

    device    step 1 ──▶ step 2 ──▶ step 3       each begins where the one before it stopped being right
    host         dispatch 2, hear 1, accept(j) ──▶ dispatch 3, hear 2, accept(j) ──▶ ...
    """

    max_drafts = DRAFTS

    def __init__(self) -> None:
        super().__init__()
        self.verify = jax.jit(self._verify, donate_argnames="state")

    def start(self, texts: list[Text]) -> None:
        known = {
            "token": np.zeros(MAX_SEQUENCES, np.int32),  # per row: what the next step begins with
            "accepted": np.full(MAX_SEQUENCES, -1, np.int32),  # per row: drafts of the step before; -1: there was none
            "followers": self.bigrams.followers[:, 0].copy(),
        }
        for text in texts:
            known["token"][text.seq.row] = text.ids[-1]
        self.known = jax.device_put(known, jax.devices()[0])
        self.in_flight: collections.deque[tuple[list[Text], Any]] = collections.deque()

    def _verify(
        self, params: Any, state: jkv.CacheState, known: dict[str, jax.Array], batch: jkv.Ragged
    ) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array], jkv.CacheState]:
        """Draft, run the input token and the drafts, and count what was right.

        Args:
          known: see `start`.
          batch: DRAFTS + 1 tokens of each sequence, from the length that the host knows of.

        Returns:
          (accepted int32[R], greedy ids int32[R, DRAFTS + 1]), of which accepted + 1 count; then `known` and `state`.
        """
        rows, padding = jnp.maximum(batch.rows, 0), batch.rows < 0
        chain = [known["token"][rows]]
        for _ in range(DRAFTS):
            chain.append(known["followers"][chain[-1]])
        tokens = jnp.stack(chain, axis=1)  # [R, DRAFTS + 1]

        before = known["accepted"][rows]
        unheard = jnp.where(padding, 0, before + 1)  # tokens of the step before, of which the host does not know yet
        moved = jnp.repeat(unheard, DRAFTS + 1)
        positions = jnp.where(batch.positions < 0, -1, batch.positions + moved)
        batch = dataclasses.replace(batch, positions=positions, kv_lens=batch.kv_lens + unheard)
        cache = CandidateStates(state, batch, jnp.maximum(before, 0))  # without a step before, any index will do
        ids, state = self._greedy(params, tokens.reshape(-1), positions, cache)

        ids = ids.reshape(tokens.shape)
        accepted = jnp.cumprod(ids[:, :-1] == tokens[:, 1:], axis=1).sum(axis=1)
        token = jnp.take_along_axis(ids, accepted[:, None], axis=1)[:, 0]
        counts = (jnp.arange(DRAFTS + 1) <= accepted[:, None]) & ~padding[:, None]
        places = jnp.where(padding, MAX_SEQUENCES, rows)
        known = {
            "token": known["token"].at[places].set(token, mode="drop"),
            "accepted": known["accepted"].at[places].set(accepted, mode="drop"),
            "followers": known["followers"].at[jnp.where(counts, tokens, hybrid_decode.VOCAB)].set(ids, mode="drop"),
        }
        return (accepted, ids), known, state

    def turn(self, texts: list[Text]) -> None:
        """Dispatch a step, then hear of the one before it."""
        # Room for the step in flight, of which all drafts may be accepted, and for this one behind it.
        sequences = self.reserve(texts, 2 * (DRAFTS + 1))
        self.state, batch = self.manager.prepare_ragged(
            self.state,
            sequences,
            DRAFTS + 1,
            pad_tokens=MAX_SEQUENCES * (DRAFTS + 1),
            pad_sequences=MAX_SEQUENCES,
        )
        result, self.known, self.state = self.verify(self.params, self.state, self.known, batch)
        self.steps += 1
        for array in result:
            array.copy_to_host_async()
        self.in_flight.append((texts, result))
        if len(self.in_flight) > 1:
            self.hear(*self.in_flight.popleft())

    def hear(self, texts: list[Text], result: tuple[jax.Array, jax.Array]) -> None:
        """What a step accepted reaches the host."""
        accepted, ids = (np.asarray(array).tolist() for array in result)
        going_on = []
        for text, j, chosen in zip(texts, accepted, ids, strict=False):  # the rest is padding
            if not text.finished:  # else: dispatched before the host heard of the end
                text.seq.accept(j)
                text.accepted.append(j)
                self.extend(text, chosen[: j + 1])
                going_on.append(text)
        self.commit(going_on)


# ---- checkpoint ------------------------------------------------------------------------------------------------------


class Checkpoint(Decoder):
    """Where a draft is rejected, back to the state before the step, and the accepted tokens once more."""

    def turn(self, texts: list[Text]) -> None:
        marks = [text.seq.checkpoint() for text in texts]
        tokens = [[*text.missing, *self.bigrams.draft(text.ids[-1], DRAFTS)] for text in texts]
        again: list[Text] = []
        for text, mark, given, chosen in zip(texts, marks, tokens, self.run(texts, tokens), strict=True):
            j = count_accepted(given[1:], chosen)
            text.accepted.append(j)
            self.extend(text, chosen[: j + 1])
            if j == DRAFTS:
                text.seq.advance(j + 1)  # the state is as it should be
            elif mark is None:
                raise RuntimeError("no slot for a copy of the state, although there are enough for every text")
            else:
                text.seq.rollback(mark)
                again.append(text)
        if again:
            tokens = [text.missing[:-1] for text in again]
            self.run(again, tokens)
            self.manager.advance([text.seq for text in again], [len(ids) for ids in tokens])
        self.commit(texts)  # also ends the marks that were not needed


# ---- tree ------------------------------------------------------------------------------------------------------------


class MaskedStep(hybrid_decode.Cached):
    """The cache of a step whose tokens see some of the step's other tokens only."""

    def __init__(self, state: jkv.CacheState, batch: jkv.Ragged, mask: jax.Array) -> None:
        super().__init__(state, batch)
        self.mask = mask  # bool[T, T]

    def attend(self, layer: str, window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        values = {"kv": hybrid_decode.fused(k, v)}
        out, self.state = jkv.append_attend(
            self.state, layer, self.batch, self.batch.positions, q, values, mask=self.mask
        )
        return out


class Tree(Decoder):
    """Two guesses for the next token, each with what might follow.

                 ┌─ a1 ── a2 ── a3      places in the cache:      input a1 a2 a3 b1 b2 b3
        input ───┤                      positions for the model:    n   +1 +2 +3 +1 +2 +3
                 └─ b1 ── b2 ── b3

    Where b is right its KV lies in the wrong place, so the next step runs those tokens again before its own drafts.
    All layers have full attention: a window is counted in places, which here are not the model's positions.
    """

    layers = ("full", "full")

    def __init__(self) -> None:
        super().__init__()
        self.step = jax.jit(self._masked_step, donate_argnames="state")

    def _masked_step(
        self,
        params: Any,
        state: jkv.CacheState,
        batch: jkv.Ragged,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
    ) -> tuple[jax.Array, jkv.CacheState]:
        return self._greedy(params, tokens, positions, MaskedStep(state, batch, mask))

    def run(self, texts: Sequence[Text], tokens: Sequence[list[int]], *_: np.ndarray) -> list[list[int]]:
        """A tree that is a chain."""
        return self.run_trees(texts, tokens, [list(range(-1, len(ids) - 1)) for ids in tokens])

    def run_trees(
        self, texts: Sequence[Text], tokens: Sequence[list[int]], parents: Sequence[list[int]]
    ) -> list[list[int]]:
        """As `run`; tokens[i][k] follows tokens[i][parents[i][k]], and what the cache has if that is -1."""
        positions = np.full(STEP_TOKENS, -1, np.int32)
        mask = np.zeros((STEP_TOKENS, STEP_TOKENS), np.bool_)
        begin = 0
        for text, parents_in_text in zip(texts, parents, strict=True):
            for place, parent in enumerate(parents_in_text, begin):
                positions[place] = text.seq.length if parent < 0 else positions[begin + parent] + 1
                if parent >= 0:
                    mask[place] = mask[begin + parent]
                mask[place, place] = True
            begin += len(parents_in_text)
        return super().run(texts, tokens, positions, mask)

    def turn(self, texts: list[Text]) -> None:
        branches = [[self.bigrams.draft(text.ids[-1], DRAFTS, choice) for choice in (0, 1)] for text in texts]
        tokens = [[*text.missing, *a, *b] for text, (a, b) in zip(texts, branches, strict=True)]
        parents = []
        for text in texts:
            root = len(text.missing) - 1
            a1, b1 = root + 1, root + 1 + DRAFTS
            parents.append([*range(-1, root), root, *range(a1, b1 - 1), root, *range(b1, b1 + DRAFTS - 1)])
        for text, (a, b), chosen in zip(texts, branches, self.run_trees(texts, tokens, parents), strict=True):
            root = len(text.missing) - 1
            along_a, along_b = chosen[root : root + 1 + DRAFTS], [chosen[root], *chosen[root + 1 + DRAFTS :]]
            in_a, in_b = count_accepted(a, along_a), count_accepted(b, along_b)
            text.accepted.append(max(in_a, in_b))
            text.seq.advance(len(chosen))  # the step has written all of them
            text.seq.rewind(len(chosen) - (root + 1 + (in_a if in_a >= in_b else 0)))  # these lie where they should
            self.extend(text, along_a[: in_a + 1] if in_a >= in_b else along_b[: in_b + 1])
        self.commit(texts)


# ---- report ----------------------------------------------------------------------------------------------------------

WAYS: dict[str, type[Decoder]] = {way.__name__.lower(): way for way in (Candidates, Checkpoint, Tree)}


@dataclasses.dataclass(frozen=True)
class Result:
    """One way of speculative decoding beside plain decoding of the same prompts with the same model."""

    way: str
    plain_steps: int
    steps: int
    accepted: list[int]  # drafts, of every verify step of every text
    tokens: int
    mismatches: list[str]  # the first of each text


def measure(decoder: Decoder, new_tokens: int) -> Result:
    """Decode plainly, then in the decoder's way, and compare every token."""
    way = type(decoder).__name__.lower()
    plain = decoder.decode(PROMPTS, new_tokens, functools.partial(Decoder.turn, decoder))
    plain_steps = decoder.steps
    texts = decoder.decode(PROMPTS, new_tokens, decoder.turn)
    mismatches = []
    for number, (expected, text) in enumerate(zip(plain, texts, strict=True), 1):
        place = next((i for i, (a, b) in enumerate(zip(expected.ids, text.ids, strict=False)) if a != b), None)
        if place is not None and not is_near_tie(decoder, expected.ids[:place]):
            mismatches.append(f"{way}, text {number}, id {place}: {text.ids[place]}, not {expected.ids[place]}")
    accepted = [j for text in texts for j in text.accepted]
    return Result(way, plain_steps, decoder.steps, accepted, new_tokens * len(texts), mismatches)


def is_near_tie(decoder: Decoder, ids: list[int]) -> bool:
    """Whether rounding may decide what follows: a step over one token and one over several do not round alike."""
    padded = np.zeros(MAX_LENGTH, np.int32)
    padded[: len(ids)] = ids
    _, _, lead = decoder.recompute(padded)
    return bool(lead[len(ids) - 1] < hybrid_decode.NEAR_TIE)


def report(results: Sequence[Result]) -> bool:
    """A table and the verdict."""
    print(f"{results[0].tokens} tokens in {len(PROMPTS)} texts at the same time, {DRAFTS} drafts in a row")
    print("               steps of the target    drafts accepted    how often so many of them")
    print("way            plain  speculative       per step" + "".join(f"{j:8}" for j in range(DRAFTS + 1)))
    for result in results:
        counts = collections.Counter(result.accepted)
        print(
            f"{result.way:10}  {result.plain_steps:8}  {result.steps:11}  {np.mean(result.accepted):13.2f}"
            + "".join(f"{counts[j]:8}" for j in range(DRAFTS + 1))
        )
    mismatches = [line for result in results for line in result.mismatches]
    tokens = sum(result.tokens for result in results)
    if mismatches:
        print(f"FAILED: {len(mismatches)} texts differ from plain greedy decoding; first: {mismatches[0]}")
    else:
        print(f"OK: all {tokens} tokens equal plain greedy decoding ({', '.join(result.way for result in results)})")
    return not mismatches


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 1 if any token is wrong."""
    parser = argparse.ArgumentParser(description="Speculative decoding through jkv, compared with plain decoding.")
    parser.add_argument("--mode", choices=["all", *WAYS], default="all", help="the way (default: all of them)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate per prompt (default: 96)")
    options = parser.parse_args(argv)
    longest = MAX_LENGTH - max(map(len, PROMPTS)) - 3 * (DRAFTS + 1)
    if not 1 <= options.tokens <= longest:
        parser.error(f"--tokens must be in 1..{longest}, got {options.tokens}")
    ways = list(WAYS) if options.mode == "all" else [options.mode]
    return 0 if report([measure(WAYS[way](), options.tokens) for way in ways]) else 1


if __name__ == "__main__":
    sys.exit(main())
