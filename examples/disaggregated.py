"""One process prefills, another decodes: pages and states move between their caches over a socket.

    python examples/disaggregated.py            # under a minute on two cores, nothing is downloaded

The decoding process opens each prompt in its own cache first. What it has of it, from earlier turns or from others with
the same beginning, does not move; the rest is computed by the prefilling process, whose own cache knows prefixes, too.
Windows move only what is left in them, recurrent layers one state:

    decode     open, resume ── prompt, start ──▶  prefill    open, resume, compute, commit
               resize, prepare                               prepare, transfer_plan(start), export_pages
               transfer_plan(start)  ◀── pages, first id ──
               import_pages, commit, decode

Here the socket is a pair on one machine; `multiprocessing.connection` has the same `send` and `recv` between machines.
A server would move the bytes at `Transfer.byte_offsets` from device to device instead. Every generated token is
compared with a recomputation without a cache. The model is that of hybrid_decode.py with random weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import hybrid_decode
import jax
import numpy as np
import offload

import jkv

DOCUMENT, MESSAGE, ANSWER = 320, 24, 12  # tokens of what all prompts begin with, of each message, of each answer
TURNS = 2
PAGES = 160  # of each pool


@dataclasses.dataclass
class Prefilled:
    """What the prefilling process answers."""

    token: int  # the first one
    logit: float
    reused: int  # tokens that it found in its own cache
    first_tokens: dict[str, dict[str, list[int]]]  # of the pages, to be compared with the receiver's plan
    values: dict[str, dict[str, np.ndarray]]
    seconds: float


@dataclasses.dataclass
class Turn:
    """One answer."""

    request: hybrid_decode.Request
    start: int  # tokens that the decoding process had
    prefilled: Prefilled
    nbytes: int  # that moved
    arriving: float  # seconds from the answer of the prefilling process until the pages are in place


def positions(plan: dict[str, dict[str, jkv.Transfer]]) -> dict[str, dict[str, list[int]]]:
    """Which pages a plan lists, whatever their ids."""
    return {
        layer: {name: transfer.first_tokens.tolist() for name, transfer in buffers.items()}
        for layer, buffers in plan.items()
    }


class Node(offload.Chat):
    """One process's model and cache."""

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__((jkv.DeviceTier(pages=PAGES),), layers)
        self.export = jax.jit(jkv.export_pages)
        self.insert = jax.jit(jkv.import_pages, donate_argnames="state")

    def resumed(self, prompt: list[int]) -> jkv.Sequence:
        """A sequence with what this cache has of the prompt."""
        seq = self.manager.open(prompt)
        if not seq.resume():
            raise RuntimeError("no room, although nobody else is here")
        return seq

    def prefill(self, prompt: list[int], start: int) -> Prefilled:
        """Computes the prompt; gives away its pages from token `start` on."""
        began = time.perf_counter()
        with self.resumed(prompt) as seq:
            reused = seq.length
            while seq.length < len(prompt):
                end = min(len(prompt), seq.length + offload.STEP_TOKENS[-1], *seq.snapshot_points)
                token, logit = self.run(seq, prompt[seq.length : end], commit=True)
            self.state, _ = self.manager.prepare(self.state, [])  # carries out what the commits have planned
            plan = seq.transfer_plan(start)
            values = jax.tree.map(np.asarray, self.export(self.state, plan))
        return Prefilled(token, logit, reused, positions(plan), values, time.perf_counter() - began)

    def answer_with(self, remote: Connection, request: hybrid_decode.Request) -> Turn:
        """The likeliest tokens after a prompt that the process behind `remote` computes."""
        prompt = request.prompt
        with self.resumed(prompt) as seq:
            start = seq.length
            remote.send((prompt, start))
            prefilled: Prefilled = remote.recv()
            began = time.perf_counter()
            if not seq.resize(len(prompt), len(prompt)):
                raise RuntimeError("no pages, although nobody else is here")
            self.state, _ = self.manager.prepare(self.state, [seq])
            plan = seq.transfer_plan(start)
            if positions(plan) != prefilled.first_tokens:
                raise RuntimeError("the two processes do not mean the same pages")
            self.state = self.insert(self.state, plan, prefilled.values)
            seq.commit(prompt[start:], snapshot=True)
            jax.block_until_ready(self.state.pools)
            nbytes = sum(each.nbytes for buffers in plan.values() for each in buffers.values())
            turn = Turn(request, start, prefilled, nbytes, time.perf_counter() - began)
            request.generated.append(prefilled.token)
            request.logits.append(prefilled.logit)
            while len(request.generated) < request.max_new:
                token, logit = self.run(seq, request.generated[-1:], commit=True)
                request.generated.append(token)
                request.logits.append(logit)
        return turn


def serve(remote: Connection, layers: Sequence[str]) -> None:
    """The prefilling process: answers until the other end closes."""
    node = Node(layers)
    with remote:
        while True:
            try:
                prompt, start = remote.recv()
            except EOFError:
                return
            remote.send(node.prefill(prompt, start))


def talk(node: Node, remote: Connection, conversations: int, seed: int) -> list[Turn]:
    """Every user's turns; all prompts begin with the same document."""
    rng = np.random.default_rng(seed)
    draw = functools.partial(rng.integers, 0, hybrid_decode.VOCAB)
    texts = [draw(DOCUMENT).tolist()] * conversations
    turns = []
    for number in range(1, TURNS + 1):
        for i in range(conversations):
            prompt = texts[i] + draw(MESSAGE).tolist()
            request = hybrid_decode.Request(f"{i + 1}.{number}", prompt, ANSWER, [])
            turns.append(node.answer_with(remote, request))
            texts[i] = request.text
    return turns


def measure(conversations: int, seed: int, layers: Sequence[str] = offload.LAYERS) -> tuple[list[Turn], Any]:
    """All turns, with a process that prefills; and what a recomputation without a cache says of them."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, layers), daemon=True)
    process.start()
    there.close()  # so that the end of the process is the end of the connection
    with here:
        node = Node(layers)
        turns = talk(node, here, conversations, seed)
    process.join()
    return turns, hybrid_decode.check_tokens(node.steps, [turn.request for turn in turns])


def report(turns: Sequence[Turn], check: hybrid_decode.Check) -> bool:
    """The table and the verdict."""
    print("              had here   had there   computed      moved   prefilling   arriving")
    print("turn  prompt    tokens      tokens     tokens         kB           ms         ms")
    for turn in turns:
        prompt, reply = len(turn.request.prompt), turn.prefilled
        print(
            f"{turn.request.name:>4}  {prompt:6}  {turn.start:8}  {reply.reused:10}  {prompt - reply.reused:9}  "
            f"{turn.nbytes / 1e3:9.1f}  {reply.seconds * 1e3:11.1f}  {turn.arriving * 1e3:9.1f}"
        )
    moved, known = sum(turn.nbytes for turn in turns), sum(turn.start for turn in turns)
    total = sum(len(turn.request.prompt) for turn in turns)
    print(
        f"\n{moved / 1e6:.1f} MB moved; {known} of {total} prompt tokens were in the decoding process's cache already"
    )
    if check.ok:
        print(f"OK: all {check.tokens} generated tokens equal the recomputation without a cache")
    else:
        print(f"FAILED: {check.mismatches} of {check.tokens} generated tokens differ; first: {check.first_mismatch}")
    return check.ok


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 1 if any token is wrong."""
    parser = argparse.ArgumentParser(description="Prefill in one process, decode in another.")
    parser.add_argument("--conversations", type=int, default=3, help=f"users with {TURNS} turns each (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what users say (default: 0)")
    options = parser.parse_args(argv)
    if options.conversations < 1:
        parser.error(f"--conversations must be at least 1, got {options.conversations}")
    return 0 if report(*measure(options.conversations, options.seed)) else 1


if __name__ == "__main__":
    sys.exit(main())
