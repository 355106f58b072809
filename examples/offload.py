"""More conversations than the device holds: where their prefixes wait between turns, and what that saves.

    python examples/offload.py                  # under a minute on two cores, nothing is downloaded
    python examples/offload.py --store DIR      # keeps the store: run it twice, and no conversation is new any more

Users take turns, round-robin, there and back: whoever spoke last in one round is the first in the next, and finds the
conversation on the device; whoever spoke first has been away for long. The device pools hold few conversations, host
memory some more, the store all of them. The table compares the time to the first token with that of computing the
whole prompt. Every generated token is compared with a recomputation without a cache.

The model is that of hybrid_decode.py with random weights. So small a model computes a token in less
than a tenth of a millisecond; the longer a real one takes, the more it saves.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import hybrid_decode
import jax
import numpy as np
from flax import nnx

import jkv

LAYERS = ("ssm", "window", "ssm", "full", "ssm", "full")
MAX_LENGTH = hybrid_decode.MAX_LENGTH
PAGE_SIZE = 16
STEP_TOKENS = (1, 32, 64)  # what steps are padded to
DOCUMENT, MESSAGE, ANSWER = 400, 24, 8  # tokens of what a conversation begins with, of each message, of each answer
MAX_TURNS = (MAX_LENGTH - DOCUMENT) // (MESSAGE + ANSWER)
PER_CONVERSATION = {"full": MAX_LENGTH // PAGE_SIZE, f"window:{hybrid_decode.WINDOW}": 20, "recurrent": 8}
TIERS = ("device", "host", "store")


@dataclasses.dataclass
class Turn:
    """One answer."""

    request: hybrid_decode.Request  # the prompt, and what was generated
    tiers: dict[str, int]  # tokens of the prompt that were reused, by where they lay
    seconds: float  # until the first token
    recomputing: float = 0.0  # seconds until it when the whole prompt is computed

    @property
    def tier(self) -> str:
        """Where most of what was reused lay."""
        return max(self.tiers, key=lambda tier: self.tiers[tier], default="nowhere")


class Chat:
    """Answers one prompt at a time with a small hybrid model with random weights."""

    def __init__(
        self,
        tiers: Sequence[jkv.DeviceTier | jkv.HostTier | jkv.StoreTier],
        layers: Sequence[str] | None = None,  # default: LAYERS
    ) -> None:
        layers = LAYERS if layers is None else layers
        self.steps = hybrid_decode.make_steps(hybrid_decode.Model(nnx.Rngs(0), layers))
        self.manager = jkv.CacheManager(
            jkv.CacheConfig(
                layers=hybrid_decode.cache_layers(layers),
                max_sequences=1,
                max_length=MAX_LENGTH,
                page_size=PAGE_SIZE,
                tiers=tuple(tiers),
                model="offload.py, random weights of seed 0",  # part of every key in the store
            )
        )
        self.state = self.manager.init()
        self.sampled = jax.device_put(np.zeros(1, np.int32), jax.devices()[0])

    def warm_up(self) -> None:
        """Compiles everything: a prompt is computed, leaves the device, and comes back from host memory."""
        prompt = list(range(100))
        self.answer("0.1", prompt, reuse=False)  # as a whole, even if the store has it from an earlier start
        for _ in range(2):
            self.answer("0.1", prompt)
            self.leave_the_device()
        self.manager.clear()

    def leave_the_device(self) -> None:
        """Brings everything to host memory and to the store, waits until it is there, and begins with empty pools."""
        self.manager.release(self.state)
        self.state = self.manager.reset()

    def answer(self, name: str, prompt: list[int], reuse: bool = True) -> Turn:
        """The likeliest ANSWER tokens after `prompt`. Without `reuse` nothing is found, and nothing is left."""
        request = hybrid_decode.Request(name, prompt, ANSWER, [])
        start = time.perf_counter()
        with self.manager.open(prompt, max_reuse=None if reuse else 0) as seq:
            while not seq.resume():
                if seq.status != jkv.Status.LOADING:
                    raise RuntimeError("no room, although nobody else is here")
                time.sleep(1e-4)  # it is being read from the store; a server would answer others meanwhile
            if not reuse:
                seq.stop_committing()
            turn = Turn(request, dict(seq.match.tier_tokens), 0.0)
            while len(request.generated) < ANSWER:
                # A chunk that ends at a snapshot point leaves a recurrent state there, from which others can start.
                points = seq.snapshot_points if reuse else ()
                end = min(len(request.text), seq.length + STEP_TOKENS[-1], *points)
                token, logit = self.run(seq, request.text[seq.length : end], commit=reuse)
                if end == len(request.text):
                    request.generated.append(token)
                    request.logits.append(logit)
                    turn.seconds = turn.seconds or time.perf_counter() - start
        return turn

    def run(self, seq: jkv.Sequence, tokens: list[int], commit: bool) -> tuple[int, float]:
        """One step over `tokens`: the greedy choice after the last one, and its logit."""
        if not seq.reserve(len(tokens)):
            raise RuntimeError("no pages, although nobody else is here")
        self.state, batch = self.manager.prepare_ragged(
            self.state, [seq], len(tokens), pad_tokens=STEP_TOKENS, pad_sequences=1
        )
        padded = np.zeros(len(batch.positions), np.int32)
        padded[: len(tokens)] = tokens
        (ids, logits), self.sampled, self.state = self.steps.step(self.state, self.sampled, batch, padded)
        if commit:
            seq.commit(tokens)
        else:
            seq.advance(len(tokens))  # not published: it will be gone with the sequence
        return int(ids[0]), float(logits[0])


@dataclasses.dataclass(frozen=True)
class Result:
    """What the program measured."""

    turns: list[Turn]
    stats: jkv.CacheStats
    check: hybrid_decode.Check


def talk(chat: Chat, conversations: int, turns: int, seed: int) -> list[Turn]:
    """Everybody's turns: a round forwards, a round backwards, and so on."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, hybrid_decode.VOCAB, DOCUMENT).tolist() for _ in range(conversations)]
    done = []
    for number in range(1, turns + 1):
        for i in range(conversations) if number % 2 else reversed(range(conversations)):
            message = rng.integers(0, hybrid_decode.VOCAB, MESSAGE).tolist()
            done.append(chat.answer(f"{i + 1}.{number}", texts[i] + message))
            texts[i] = done[-1].request.text
    return done


def measure(conversations: int, turns: int, on_device: int, in_host: int, store: str, seed: int) -> Result:
    """All turns through three tiers; then each prompt again, computed as a whole in empty pools."""
    device, host = ({group: n * held for group, n in PER_CONVERSATION.items()} for held in (on_device, in_host))
    chat = Chat((jkv.DeviceTier(pages=device), jkv.HostTier(pages=host), jkv.StoreTier(store)))
    chat.warm_up()
    done = talk(chat, conversations, turns, seed)
    chat.leave_the_device()  # everything is in the store now, for the next start
    stats = chat.manager.stats()
    for turn in done:
        turn.recomputing = chat.answer(turn.request.name, turn.request.prompt, reuse=False).seconds
    return Result(done, stats, hybrid_decode.check_tokens(chat.steps, [turn.request for turn in done]))


def print_turns(turns: Sequence[Turn]) -> None:
    """One line per turn."""
    print("                      reused from                    first token,   all computed,")
    print("turn   prompt   device   host  store   computed              ms               ms")
    for turn in turns:
        prompt, counts = len(turn.request.prompt), [turn.tiers.get(tier, 0) for tier in TIERS]
        columns = "  ".join(f"{count:5}" for count in counts)
        times = f"{turn.seconds * 1e3:14.1f}   {turn.recomputing * 1e3:14.1f}"
        print(f"{turn.request.name:>5}  {prompt:6}    {columns}   {prompt - sum(counts):8}  {times}")


def print_tiers(turns: Sequence[Turn]) -> None:
    """One line per tier."""
    print("            tokens   turns with most   first token,   all computed,")
    print("tier        reused   tokens from it      median ms       median ms   saved")
    for tier in (*TIERS, "nowhere"):
        reused = sum(turn.tiers.get(tier, 0) for turn in turns)
        of_tier = [turn for turn in turns if turn.tier == tier]
        line = f"{tier:8}  {reused:8}   {len(of_tier):15}"
        if of_tier:
            ours = statistics.median(turn.seconds for turn in of_tier)
            theirs = statistics.median(turn.recomputing for turn in of_tier)
            line += f"   {ours * 1e3:12.1f}   {theirs * 1e3:13.1f}   {1 - ours / theirs:5.0%}"
        print(line)


def report(result: Result, conversations: int) -> bool:
    """The tables and the verdict."""
    tiers, check = result.stats.tiers, result.check
    print_turns(result.turns)
    print()
    print_tiers(result.turns)
    print(
        f"\n{conversations} conversations; pages and states: {sum(tiers['device'].offloaded.values())} went from the "
        f"device to host memory, {sum(tiers['device'].onboarded.values())} came back; {tiers['store'].writes} were "
        f"written to the store, {tiers['store'].reads} read; it has {tiers['store'].entries} "
        f"in {tiers['store'].bytes / 1e6:.1f} MB now"
    )
    if check.ok:
        print(
            f"OK: all {check.tokens} generated tokens equal the recomputation without a cache "
            f"({check.near_ties} near ties, logits within {check.largest_error:.1e})"
        )
    else:
        print(f"FAILED: {check.mismatches} of {check.tokens} generated tokens differ; first: {check.first_mismatch}")
    return check.ok


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 1 if any token is wrong."""
    parser = argparse.ArgumentParser(description="Serve more conversations than the device holds, through three tiers.")
    parser.add_argument("--conversations", type=int, default=12, help="users who take turns (default: 12)")
    parser.add_argument("--turns", type=int, default=4, help=f"of each user, at most {MAX_TURNS} (default: 4)")
    parser.add_argument("--device", type=int, default=3, help="conversations that the device has room for (default: 3)")
    parser.add_argument("--host", type=int, default=4, help="conversations that host memory has room for (default: 4)")
    parser.add_argument("--store", metavar="DIR", help="directory of the store, kept (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what users say (default: 0)")
    options = parser.parse_args(argv)
    if not 1 <= options.turns <= MAX_TURNS:
        parser.error(f"--turns must be in 1..{MAX_TURNS}, got {options.turns}")
    for name in ("conversations", "device", "host"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    with tempfile.TemporaryDirectory() as directory:
        store = options.store or directory
        sizes = options.conversations, options.turns, options.device, options.host
        return 0 if report(measure(*sizes, store, options.seed), options.conversations) else 1


if __name__ == "__main__":
    sys.exit(main())
