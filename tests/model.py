"""A model of the manager: plain dictionaries of token strings, without pages, tables or tiers.

    published    every string of tokens that somebody published
    endpoints    every prefix of them at which somebody left a state, or windows, to go on from

What the manager reuses is never more than the model allows; while nothing was evicted, dropped or lost it is exactly
that, or at least that where the manager may know more.

`Listener` is the other model: a router that knows nothing but the events.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from oracle import World, said

import jkv
from jkv.tiers.keys import tail_digest

Space = Hashable  # what separates strings that never meet: scope, weights


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that a and b begin with alike."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class Model:
    """What was ever published.

    Args:
      world: gives the rules: page size, partial reuse, backoff, which layers there are.

    Attributes:
      whole: nothing was dropped or lost so far; if nothing was evicted either, everything published is there.
    """

    def __init__(self, world: World):
        self.world, config = world, world.config
        self.page_size, self.partial, self.backoff = config.page_size, config.partial_reuse, config.reuse_backoff
        self.recurrent, self.attention = bool(world.recurrent), bool(world.attention)
        self.windows_go = config.min_snapshot and any(layer.window for layer in world.attention.values())
        self.forget()

    def forget(self) -> None:
        """Nothing is there any more, nor will any of it come back."""
        self.published: dict[Space, dict[bytes, np.ndarray]] = {}
        self.endpoints: dict[Space, set[bytes]] = {}
        self.whole = self.world.scratch is None  # which holds pages back

    def _evicted(self) -> int:
        stats = self.world.manager.stats()
        return sum(stats.evicted_pages.values()) + stats.snapshots_evicted

    def publish(self, space: Space, tokens: np.ndarray, endpoints: Iterable[int]) -> None:
        """`tokens` can be reused from now on, and gone on from after so many of them."""
        if len(tokens):
            self.published.setdefault(space, {})[tokens.tobytes()] = tokens
            self.endpoints.setdefault(space, set()).update(tokens[:n].tobytes() for n in endpoints)

    def check(self, match: jkv.Match, space: Space, prompt: np.ndarray, max_reuse: int) -> None:
        """What the manager says it reuses of a prompt is possible; with everything there, no less than it should."""
        strings, endpoints = self.published.get(space, {}), self.endpoints.get(space, set())
        raw = max((common_prefix(prompt, string) for string in strings.values()), default=0)
        most = max(0, min(raw - self.backoff, max_reuse))
        assert match.tokens <= match.attention_tokens <= match.raw_tokens <= raw, f"{match}, {raw} tokens at most"
        assert match.tokens <= max(0, min(match.raw_tokens - self.backoff, max_reuse)), f"{match}, {max_reuse=}"
        assert self.partial or match.tokens % self.page_size == 0 or match.tokens == len(prompt), f"{match}: in a page"
        if match.tokens and self.recurrent:
            assert prompt[: match.tokens].tobytes() in endpoints, f"{match}: nobody left this state"
        if not self.whole or self._evicted():
            return
        if self.attention:  # else tokens without a snapshot are forgotten
            assert match.raw_tokens == raw, f"{match}: {raw} tokens expected"
        ends = [n for n in range(most + 1) if self._may_end(n, prompt, strings)]
        resumable = [n for n in ends if n == 0 or prompt[:n].tobytes() in endpoints]
        if not self.partial and len(prompt) % self.page_size and len(prompt) in (match.tokens, ends[-1]):
            return  # inside a page, at the end of the prompt: which tails are still tails is the tree's to know
        if self.windows_go:
            assert match.tokens >= resumable[-1], f"{match}: {resumable[-1]} at least for {prompt.tolist()}"
        else:
            expected = resumable[-1] if self.recurrent else ends[-1]
            assert match.tokens == expected, f"{match}: {expected} expected for {prompt.tolist()}"
            if self.attention:
                assert match.attention_tokens == ends[-1], f"{match}: attention {ends[-1]} expected"

    def _may_end(self, n: int, prompt: np.ndarray, strings: dict[bytes, np.ndarray]) -> bool:
        if self.partial or n % self.page_size == 0:
            return True
        return n == len(prompt) and prompt.tobytes() in strings


class Listener:
    """What a router knows that hears every event, and the match rule without partial pages.

    Args:
      world: whose manager says something.
      images: there may be content behind ids, so that these alone are not all that is in a digest.
    """

    def __init__(self, world: World, images: bool = False):
        self.manager, self.layout = world.manager, world.manager.layout
        self.known: dict[tuple[str, bytes], jkv.Event] = {}  # by group and digest
        self.next_id = 0
        self.astray = False  # it has missed some, and waits until all is told anew
        self.images = images

    def hear(self, events: Iterable[jkv.Event]) -> None:
        """Takes events in; each has to fit what is known."""
        for event in events:
            # a call that was cut short may have counted one that it did not come to tell: all is told anew then
            skipped = event.kind in ("lost", "cleared") and event.id > self.next_id
            assert event.id == self.next_id or skipped, f"{event}, id {self.next_id} expected"
            assert not self.astray or event.kind == "cleared"
            self.next_id, self.astray = event.id + 1, event.kind == "lost"
            key = event.group, event.digest
            if event.kind == "stored":
                assert key not in self.known
                if event.group == "full" and event.parent and event.position > self.layout.page_size:
                    assert ("full", event.parent) in self.known, f"{event} comes before its parent"
                self._check_digest(event)
                self.known[key] = event
            elif event.kind == "moved":
                assert self.known[key].tier != event.tier
                self._check_digest(event)
                self.known[key] = event
            elif event.kind == "removed":
                assert self.known.pop(key).tier == event.tier
            elif event.kind == "cleared":
                self.known.clear()

    def _check_digest(self, event: jkv.Event) -> None:
        if event.parent and not self.images:  # else it is known by its digest alone
            ids = np.array(event.tokens, np.int32)
            assert tail_digest(event.parent, ids) == event.digest
            assert (event.position - len(ids)) % self.layout.page_size == 0

    def match(self, scope: jkv.Scope, prompt: np.ndarray) -> int:
        """The largest whole number of pages, in tokens, that everything needed is known of."""
        size, digests = self.layout.page_size, self.manager.block_digests(said(prompt), scope)
        for pages in range(len(digests), 0, -1):
            if all(self._has(group, digests, pages) for group in self.layout.groups):
                return pages * size
        return 0

    def _has(self, group: Any, digests: tuple[bytes, ...], pages: int) -> bool:
        if group.recurrent:
            return (group.name, digests[pages - 1]) in self.known
        sinks, first, stop = group.needed(pages * self.layout.page_size, self.layout.page_size)
        return all((group.name, digests[i]) in self.known for i in (*range(sinks), *range(first, stop)))


def listen(world: World, prompts: Iterable[tuple[jkv.Scope, np.ndarray]] = (), images: bool = False) -> Listener:
    """Hears what is new; then knows of the whole pages of `prompts` what `probe` finds of them, as far as it can."""
    if getattr(world, "listener", None) is None or world.listener.manager is not world.manager:
        world.listener = Listener(world, images)
    world.listener.hear(world.manager.take_events())
    for scope, prompt in prompts if world.config.reuse_backoff == 0 else ():
        prompt = prompt[: len(prompt) // world.page_size * world.page_size]
        found = world.manager.probe(said(prompt), scope=scope, max_reuse=len(prompt)).tokens
        known = world.listener.match(scope, prompt)
        assert known == found or (known < found and world.config.partial_reuse), f"{known} known of, {found} found"
    return world.listener
