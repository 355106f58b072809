"""Sequence: the life of one request, from match to close.

    suspended ──resume──▶ active ──(reserve, prepare, step, commit or advance)*──▶ close
     │  ▲  ▲                 │
     ▼  │  └──────suspend────┘
    loading

One request's state is built up in layers, each a file that knows only those before it:

    Holdings       what it has in the tree and privately: publishing, lending, windows, copies
    Room           the pages that a capacity takes, window scratch, slots for planned snapshots
    Speculation    steps in flight, candidate states, marks
    Suspension     what is kept without a row, and where it may go
    Sequence       the public calls, their conditions and their order; its row of the ledger

NumPy only.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jkv.arrivals import Arrival, Find, Search, begin, end, leave, look_up
from jkv.config import Scope, items_of, require_bool, require_int, shown
from jkv.errors import ConfigError, OutOfPagesError, SequenceStateError
from jkv.expiry import NEVER
from jkv.holdings import NO_PAGE, Host
from jkv.ledger import Entry
from jkv.radix import HELD, NO_SLOT, Endpoint, Hit, Match, Node, Root, node_of, path_to
from jkv.routing import new_digest
from jkv.serial import changing, serialised
from jkv.speculation import Mark
from jkv.stats import COPIED, LIMITED, LOST, MISSED, PARTIAL, PER_GROUP, REUSED, TIERS, WHOLE, WorkStats
from jkv.suspension import Suspension
from jkv.transfer import Transfer, padded


class Status(enum.StrEnum):
    """What a sequence is doing; also a str.

    >>> Status.ACTIVE == "active"
    True
    """

    ACTIVE = "active"
    SUSPENDED = "suspended"
    LOADING = "loading"  # suspended, and what it can reuse is being read from the store
    CLOSED = "closed"


WAITING = (Status.SUSPENDED, Status.LOADING)


class Drop:
    """What a sequence left at its end, for as long as it is there; from `Sequence.plan_drop`."""

    def __init__(self, host: Host, owner: Sequence, endpoint: Endpoint | None):
        self._host = host
        self._owner = owner
        self._endpoint = endpoint
        self._dropped = False

    @changing
    def drop(self) -> None:
        """Frees the snapshot at that length, and the window pages that only resuming there needs, in memory.

        What other endpoints need or sequences hold stays, as does the KV of full attention, a beginning of later turns.
        Entries of the store stay. If the endpoint has been evicted already, nothing happens.

        Raises:
          SequenceStateError: dropped before.
        """
        if self._dropped:
            raise SequenceStateError("drop: this was dropped before")
        self._dropped = True
        endpoint = self._endpoint
        if endpoint is None or not endpoint.alive or self._host.over:
            return
        if self._owner._lent is endpoint:  # it goes on from this very state
            self._owner._keep_to_itself()
        elif not endpoint.pinned:
            self._host.tree.drop_endpoint(endpoint)


class Sequence(Suspension):
    """One request's view of the cache; made by `CacheManager.open`. Lengths count tokens.

    >>> import jkv, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
    >>> state = manager.init()
    >>> with manager.open([1, 2, 3, 4, 5]) as seq:
    ...     _ = seq.resume(), seq.reserve(5)
    ...     state, rows = manager.prepare(state, [seq])
    ...     seq.commit([1, 2, 3, 4, 5])
    >>> manager.probe([1, 2, 3, 4, 5, 6]).tokens
    5

    Attributes:
      row: row of the page tables while active, else None. Steps take rows from `prepare` only.
      status: Status.
    """

    # Here and not in __init__, as in Speculation.
    _arrival: Arrival | None = None  # what is being read from the store for us
    _landed: Find | None = None  # what was read
    _promise: Match | None = None  # the match that this was for
    _digests: list[bytes] | None = None  # of the prompt's first pages, until it is matched; with a store
    _ids: np.ndarray | None = None  # the prompt's, where it has content

    def __init__(self, host: Host, tokens: np.ndarray, scope: Scope, priority: int, max_reuse: int | None, retry: bool):
        super().__init__(host, host.root(scope), priority)
        self._prompt = tokens
        self._max_reuse = max(0, len(tokens) - 1) if max_reuse is None else min(max_reuse, len(tokens))
        self._work.retry = retry
        self.status = Status.SUSPENDED
        if len(tokens) and host.contents.pairs and tokens.min() < 0:
            self._ids = host.contents.ids(tokens)
        # from the first resume on:
        self._match: Match | None = None
        self._points: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.status.value} row={self.row} committed={self.committed} length={self.length} "
            f"capacity={self.capacity}>"
        )

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def committed(self) -> int:
        """Tokens published for reuse."""
        return int(self._host.ledger.committed[self.row]) if self._entered else self._committed

    @property
    def length(self) -> int:
        """Tokens whose KV and state the cache holds."""
        return int(self._host.ledger.length[self.row]) if self._entered else self._length

    @property
    def capacity(self) -> int:
        """Token positions that have pages. committed <= length <= capacity."""
        return int(self._host.ledger.capacity[self.row]) if self._entered else self._capacity

    @property
    @serialised
    def match(self) -> Match:
        """What was reused; before the first successful resume, what would be reused now."""
        match = self._match
        if match is None:
            self._host.require_whole("match")
            host, search, limit = self._host, self._search(), self._max_reuse
            match = look_up(host, search, limit, find(host, self._scope, self._prompt, limit, search))
        return match if match.new_digest else with_digest(self._host, self._scope, self._prompt, match)

    def _tokens_in_use(self) -> Iterator[np.ndarray]:
        yield self._prompt
        yield self._partial
        if self._arrival is not None:
            yield self._arrival.tokens

    @property
    def snapshot_points(self) -> tuple[int, ...]:
        """Lengths beyond `length`, ascending, where ending a chunk leaves a snapshot that others can use."""
        length = self.length
        return tuple(point for point in self._points if point > length)

    @property
    def window_scratch(self) -> bool:
        """Whether windows get no pages for what leaves them within a chunk, as `CacheConfig.window_scratch` says.

        Settable while nothing is held back. A step that reads its own tokens from pages, as a `lax.scan` of decode
        steps after one `reserve` does, needs it off.

        Raises:
          ConfigError: on, though the config has no window_scratch.
          SequenceStateError: pages are held back; resize the capacity to `length` first.
        """
        return self._scratch is not None

    @window_scratch.setter
    @changing
    def window_scratch(self, on: bool) -> None:
        if not isinstance(on, bool):
            raise ConfigError(f"window_scratch must be a bool, got {shown(on)}")
        if self.status is Status.CLOSED:
            raise SequenceStateError(f"window_scratch: {self!r} is closed")
        if on and self._host.scratch is None:
            raise ConfigError("window_scratch: the config has no window_scratch, or no window layers")
        self._take_back()
        if on != self.window_scratch and self._holds_back(self._num_pages(self._length)):
            raise SequenceStateError(
                f"window_scratch: {self!r} holds back window pages up to its capacity; resize to its length first"
            )
        self._scratch = self._host.layout.config.window_scratch if on else None

    # --- admission ---------------------------------------------------------------------------------------------------

    @changing
    def resume(self) -> bool:
        """Gets a row; the first time also matches, holds what is reused and plans private copies: one step.

        What is reused comes to the device with the next plan. What lies in the store has to be read first: this call
        starts that, with status LOADING, and a later one succeeds.

        Returns:
          False: not now, nothing changed. Let others finish or suspend first.

        Raises:
          SequenceStateError: the sequence is closed or active; or part of it was lost on its way to host memory
            (`stats().tiers["host"].failures`): close it, and open its tokens again.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.row
        (True, 0)
        """
        host = self._host
        if self.status not in WAITING:
            raise SequenceStateError(f"resume: {self!r} is {self.status.value}, not suspended")
        host.require_whole("resume")
        self._face_losses("resume")
        landed = self._arrival is not None
        if landed and not self._has_arrived():
            return False
        if not host.free_rows or self._too_full():
            return False
        if self._match is None:
            if host.shelf is not None and not landed and not self._has_arrived():
                return False
            if not self._start():
                return False
        elif not self._wake_up():
            return False
        self._take_row()
        return True

    def _face_losses(self, operation: str) -> None:
        """The tree forgets what never arrived in host memory; whoever has some of it is told."""
        lost = self._host.lost_pages()
        if lost:
            self._host.tree.forget_lost(lost)
            if self._match is not None and self._has_any(lost):
                raise SequenceStateError(
                    f"{operation}: part of {self!r} was lost on its way to host memory; close it, and open its tokens "
                    "again"
                )

    def _search(self) -> Search | None:
        """For the prompt in the tree and the store; None: there is no store."""
        if self._host.shelf is None:
            return None
        self._digests = self._digests or []
        return Search(self._host, self._scope, self._prompt, self._digests)

    def _find(self, search: Search | None) -> Hit:
        """What the tree has of the prompt, without what somebody keeps of pages that were lost."""
        host = self._host
        hit = find(host, self._scope, self._prompt, self._max_reuse, search)
        lost = host.lost_pages()
        if lost and host.tree.relies_on(hit, lost):
            hit = find(host, self._scope, self._prompt, 0, search)
        return hit

    @changing
    def prefetch(self, tier: str) -> bool:
        """Brings what a suspended sequence has, or would reuse now, up to `tier`, ahead of its `resume`.

        Of a sequence that was never resumed nothing is held: what was brought up is young, but may be evicted again.

        Args:
          tier: "device"; "host": nothing is left in the store alone; or "store", where everything is already.

        Returns:
          True: it is there, or on its way from the store (status LOADING) with its room taken; what `resume` copies
          anyway, a snapshot and a partly matched page, stays where it is. False: no room now, nothing changed.

        Raises:
          ConfigError: no such tier in the config.
          SequenceStateError: the sequence is closed or active.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.prefetch("device")  # there is nothing yet
        True
        """
        host = self._host
        tiers = ["device", *["host"] * (host.memory is not None), *["store"] * (host.shelf is not None)]
        if not isinstance(tier, str) or tier not in tiers:
            raise ConfigError(f"prefetch({shown(tier)}): the tiers are {', '.join(tiers)}")
        if self.status not in WAITING:
            raise SequenceStateError(f"prefetch: {self!r} is {self.status.value}, not suspended")
        host.require_whole("prefetch")
        self._face_losses("prefetch")
        if self._match is not None:
            if tier == "device":
                if not self._wake_up():
                    return False
                self._fall_asleep()
            return True
        if host.shelf is not None and tier != "store" and not self._has_arrived():
            return True
        search = self._search()
        hit = self._find(search)
        if tier != "store" and look_up(host, search, self._max_reuse, hit).tokens > hit.match.tokens:
            return False  # no room in host memory for what is in the store
        return tier != "device" or self._warm_up(hit)

    def _warm_up(self, hit: Hit) -> bool:
        """Onboards what `hit` reuses; False: no room."""
        tree = self._host.tree
        node, _, whole = self._parts_of(hit)
        if not whole or not tree.has_host:
            return True
        if not tree.can_claim(self._claims(node, whole)):
            return False
        self._node, self._published = self._hold_path(node, whole), whole
        self._tables = [np.zeros(whole, np.int32) for _ in tree.groups]
        if hit.endpoint is not None:
            tree.touch(hit.endpoint, self._priority)
        self._onboard_path(self._node, whole)
        self._change_windows(self._node, 0, whole, -HELD)
        tree.release(self._node, self._priority)
        self._node, self._published = None, 0
        return True

    def _has_arrived(self) -> bool:
        """Whether everything that could make our hit longer has been read; if not, status is LOADING."""
        host, landed = self._host, False
        if self._arrival is not None:
            if not self._arrival.done:
                return False
            if host.arriving.get(self._arrival.keys[0]) is self._arrival:  # nobody else has landed it
                end(host, self._arrival)
                self._arrival.land()
            landed = self._arrival.owner is self
            self._landed, self._arrival = self._arrival.find, None
        self.status = Status.SUSPENDED
        if landed:
            return True  # what is there now is what there is: no circle of reading and evicting
        search = self._search()
        hit = self._find(search)
        if hit.match.tokens < self._max_reuse and not host.lost_pages():
            self._promise = look_up(host, search, self._max_reuse, hit)
            self._arrival = begin(host, self, self._priority, search, self._max_reuse, hit)
            if self._arrival is not None:
                self.status = Status.LOADING
            else:
                host.shelf.refresh()  # for those who come next: other processes may have stored it meanwhile
        return self.status is Status.SUSPENDED

    def _take_row(self) -> None:
        host = self._host
        self.row = host.free_rows.pop()
        host.rows[self.row] = self
        pages = self._num_pages(self._capacity)
        for g, tables in enumerate(host.tables):
            own, self._tables[g] = self._tables[g], tables[self.row]
            self._tables[g][:pages] = own[:pages]
        host.row_changes += 1
        self._mark_all()
        self._reserved = self._length
        self._set_slot(self._slot)
        self.status = Status.ACTIVE
        if self._committed < len(self._prompt):
            host.prompting[self] = None

    def _too_full(self) -> bool:
        """Whether active sequences and what is held leave too little room in some growing pool (SPEC S43)."""
        host = self._host
        if not host.active:
            return False
        share = host.layout.config.max_utilization_for_resume
        own = self._own_pages()
        return any(
            pool.stuck(own[pool.ordinal]) > share * pool.total
            for pool in host.pools
            if pool is not host.tree.state_pool
        )

    def _start(self) -> bool:
        """The first resume, all or nothing: match, check room, then hold, allocate and plan the copies."""
        tree, page_size = self._host.tree, self._host.layout.page_size
        hit = self._find(self._search())
        length = hit.match.tokens
        node, source, whole = self._parts_of(hit)
        if not self._has_room(node, whole, source is not None):
            return False

        node = self._hold_path(node, whole)
        if length:
            self._last = hit.endpoint or (source or node_of(node, length)).endpoint_at(length)
        if self._last is not None:
            tree.touch(self._last, self._priority)
        if source is not None:
            tree.use(source)
        self._fill_tables(node, source, whole)
        if tree.state_pool is not None:
            self._slot = self._copied_state(hit.endpoint)
        self._node, self._published = node, whole
        self._renew(source)
        self._partial = self._prompt[whole * page_size : length].copy()
        self._committed = self._length = self._capacity = length
        self._match = self._with_store(hit.match)
        if self._digests is not None:
            self._digests = None
        self._points = self._choose_points(hit.match.raw_tokens)
        self._count_lookup(self._match, hit.endpoint is not None)
        return True

    def _with_store(self, match: Match) -> Match:
        """`match`, in which what was read from the store for us counts as the store's."""
        if self._landed is None:
            return match
        if self._promise is not None and self._promise.tokens == match.tokens:
            return dataclasses.replace(self._promise, in_flight=match.in_flight)
        first = self._landed.covered * self._host.layout.page_size if self._host.tree.full is not None else 0
        count = min(max(0, min(match.tokens, self._landed.end) - first), match.tier_tokens.get("host", 0))
        if not count:
            return match
        tiers = {**match.tier_tokens, "host": match.tier_tokens["host"] - count, "store": count}
        return dataclasses.replace(match, tier_tokens={tier: n for tier, n in tiers.items() if n})

    def _parts_of(self, hit: Hit) -> tuple[Node | None, Node | None, int]:
        """Where the whole pages of `hit` end, where its partly matched page lies, and how many whole pages it has."""
        node = source = None
        page_size, length = self._host.layout.page_size, hit.match.tokens
        whole = length // page_size
        for candidate in hit.path:
            if candidate.start < whole * page_size:
                node = candidate
            if candidate.start <= whole * page_size < length:
                source = candidate
        for group in self._host.tree.windows:
            self._live_from[group.ordinal] = group.live_from(length, page_size)
        return node, source, whole

    @property
    def _is_prompting(self) -> bool:
        """Whether there is more of the prompt to commit."""
        return self.status is Status.ACTIVE and not self._stopped and self.committed < len(self._prompt)

    def _ahead_with(self, scope: Root, tokens: np.ndarray, least: int) -> int:
        """Up to where the prompt that this sequence is computing agrees with `tokens`; 0: not beyond `least`."""
        prompt, shared = self._prompt, min(len(self._prompt), len(tokens))
        if shared <= least or prompt[least] != tokens[least] or prompt[0] != tokens[0] or self._scope != scope:
            return 0
        differs = prompt[:shared] != tokens[:shared]
        shared = int(differs.argmax()) if differs.any() else shared
        return shared if shared > max(least, self.committed) and self._follows_prompt() else 0

    def _follows_prompt(self) -> bool:
        """Whether what was committed is the prompt's beginning."""
        parts = [(node.start, node.tokens[: node.size]) for node in path_to(self._node)]
        end = self._published * self._host.layout.page_size
        partial = self._host.ledger.partial[self.row, : self.committed - end] if self._entered else self._partial
        parts.append((end, partial))
        return all(np.array_equal(tokens, self._prompt[start : start + len(tokens)]) for start, tokens in parts)

    def _choose_points(self, raw_tokens: int) -> tuple[int, ...]:
        """Where the tree leaves this prompt, and where this prompt comes again; each cut to a page boundary."""
        backoff, page_size = self._host.layout.config.reuse_backoff, self._host.layout.page_size
        lengths = (raw_tokens - backoff, len(self._prompt) - max(1, backoff))
        return tuple(sorted({n - n % page_size for n in lengths if n > 0}))

    def _count_lookup(self, match: Match, with_state: bool) -> None:
        """Counts the first resume, which has just made its private copies."""
        work, length, whole = self._work, match.tokens, self._published
        page_size, pages = self._host.layout.page_size, self._work.pages
        work.totals[: REUSED + 1] = 1, 1 if length else 0, len(self._prompt), length
        for tier, count in match.tier_tokens.items():
            work.totals[TIERS[tier]] = count
        missed = self._num_pages(len(self._prompt)) - self._num_pages(length)
        for group in self._host.tree.groups:
            at, found = PER_GROUP * group.ordinal, whole
            if group.window is not None:
                live = min(self._live_from[group.ordinal], whole)
                found += min(group.sink_pages(page_size), live) - live
            pages[at + WHOLE] = found
            pages[at + PARTIAL] = pages[at + COPIED]
            pages[at + MISSED] = missed
        if self._host.tree.recurrent:
            pages[-PER_GROUP + (MISSED if not with_state else PARTIAL if length % page_size else WHOLE)] = 1
        if match.limited_by is not None:
            ordinal = next(g.ordinal for g in self._host.layout.groups if g.name == match.limited_by)
            upper = min(match.raw_tokens - self._host.layout.config.reuse_backoff, self._max_reuse)
            pages[PER_GROUP * ordinal + LIMITED] = 1
            pages[PER_GROUP * ordinal + LOST] = upper - length

    @property
    def stats(self) -> WorkStats:
        """What this sequence looked up, found and took so far."""
        return WorkStats(**self._work.fields(self._host.layout))

    # --- room --------------------------------------------------------------------------------------------------------

    def reserve(self, n: int) -> bool:
        """Room for `n` more tokens: capacity = length + n. See `resize`.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5), seq.capacity
        (True, True, 5)
        """
        return self.resize(self.length + require_int("n", n, 0))

    def resize(self, capacity: int, length: int | None = None) -> bool:
        """Sets the capacity, and optionally a larger length.

        A larger length reports a step in flight, as `advance` does. With no step in flight it says that something else
        has written, or will write before the next step, the KV up to there, and the state of recurrent layers: from a
        length that is the capacity as well, windows get no pages for what has left them by then (`transfer_plan`).

        Returns:
          False: not enough pages now, nothing changed.

        Raises:
          ConfigError: `length` below the present one, or above `capacity`.
          OutOfPagesError: not even an empty cache could give that.
          SequenceStateError: not active, or a length beyond what the last `prepare` had reserved for the step.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.resize(8), seq.resize(5), seq.capacity
        (True, True, True, 5)
        """
        with self._host.lock:  # here, in advance and in commit: what `changing` does, without its two calls per token
            try:
                self._require_active("resize")
                capacity = require_int("capacity", capacity, 0)
                length = self._length if length is None else require_int("length", length, 0)
                if not self._length <= length <= capacity:
                    raise ConfigError(
                        f"resize(capacity={capacity}, length={length}): length may only grow, from {self._length} to "
                        "capacity"
                    )
                beyond = length > self._length == self._capacity and not self._in_flight and self._host.scratch is None
                if length > self._length and not beyond and (self._in_flight or self._slot != NO_SLOT):
                    self._require_prepared("resize", length - self._length)
                layout = self._host.layout
                if capacity > layout.max_length:
                    raise OutOfPagesError(
                        f"a capacity of {capacity} tokens was asked for, max_length is {layout.max_length}"
                    )
                if beyond:
                    if not self._fit_beyond(capacity, length):
                        return False
                    self._capacity, self._reserved = capacity, length
                    self._move_to(length)
                    return True
                if not self._fit(capacity, length if length > self._length else capacity):
                    return False
                self._capacity = capacity
                self._drop_pending(capacity)
                if length > self._length:
                    self._advance_to(length, None)
                return True
            except BaseException as error:
                self._host.give_up(error)
                raise

    # --- steps -------------------------------------------------------------------------------------------------------

    def advance(self, n: int, *, snapshot: bool | None = None) -> None:
        """A dispatched step wrote `n` more tokens whose ids the host may not know yet: length += n.

        Args:
          n: tokens; 0: the step did not run.
          snapshot: True: keep the state at the new length; False: do not; None: at a snapshot point.

        Raises:
          SequenceStateError: not active, or more than the last `prepare` had reserved.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.advance(5)
        >>> seq.length, seq.committed
        (5, 0)
        """
        with self._host.lock:
            try:
                self._require_active("advance")
                n = require_int("n", n, 0)
                snapshot = _flag("advance: snapshot", snapshot)
                self._require_prepared("advance", n)
                if n == 0:
                    self._forget_step()
                else:
                    self._advance_to(self._length + n, snapshot)
            except BaseException as error:
                self._host.give_up(error)
                raise

    def commit(self, tokens: Any, *, snapshot: bool | None = None, end: bool = False) -> None:
        """Publishes the ids of the tokens at `committed`..; advances first if they go past `length`.

        Args:
          tokens: host ids, int[n], or Tokens. Where the prompt has content, its plain id stands for it.
          snapshot: True: leave the new length resumable (recurrent: keep its state); False: do not; None: if it is a
            snapshot point that this call reaches.
          end: also `stop_committing`.

        Raises:
          ConfigError: ids of a wrong dtype or range, or a jax.Array.
          SequenceStateError: not active, stopped, more than the last `prepare` had reserved, or snapshot=True of
            tokens that a step in flight goes on from.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.commit([3, 1, 4, 1, 5])
        >>> seq.length, seq.committed
        (5, 5)
        """
        with self._host.lock:
            try:
                self._require_active("commit")
                if snapshot is not None or end is not False:
                    snapshot, end = _flag("commit: snapshot", snapshot), require_bool("commit: end", end)
                self._commit(self._host.contents.tokens(tokens), snapshot, end)
            except BaseException as error:
                self._host.give_up(error)
                raise

    def _commit(self, tokens: np.ndarray, snapshot: bool | None = None, end: bool = False) -> None:
        """`commit` of an active sequence; `tokens` as `Contents.tokens` gives them."""
        if self._ids is not None:
            tokens = self._with_content(tokens)
        self._require_committable(len(tokens))
        position = self._committed + len(tokens)
        ahead = position - self._length
        if ahead <= 0 and snapshot and self._in_flight and position not in self._pending:
            raise SequenceStateError(
                f"commit(snapshot=True) of older tokens, up to {position}: a step from {self._length} on is in "
                "flight, so the state there cannot be kept; ask for it in the advance that reaches it"
            )
        if ahead > 0:
            self._move_to(position)
            snapshot = position in self._points if snapshot is None else snapshot
        if snapshot and not (end and self._can_hand_over(position)):
            self._keep_state(position, True)
        early = self._host.tree.min_snapshot and not self._pending
        if len(tokens):
            self._committed = position
            if early:
                self._slide()  # what no endpoint to come needs is freed before the tree ever sees it
            self._publish(tokens)
        if self._pending:
            self._publish_endpoints()
        if self._marks:
            self._end_marks(0, self._committed)
        if end:
            self._stop()
        if end or not early:
            self._slide()

    def _with_content(self, tokens: np.ndarray) -> np.ndarray:
        """`tokens`, committed next, with the prompt's content where they repeat its ids."""
        prompt = self._prompt[self._committed :][: len(tokens)]
        if not len(prompt) or prompt.min() >= 0:
            return tokens
        same = (prompt < 0) & (tokens[: len(prompt)] == self._ids[self._committed :][: len(prompt)])
        return np.concatenate((np.where(same, prompt, tokens[: len(prompt)]), tokens[len(prompt) :]))

    def _require_committable(self, n: int) -> None:
        """Raises unless `n` more tokens can be committed now."""
        if self._stopped:
            raise SequenceStateError(f"commit: {self!r} has stopped committing")
        ahead = self._committed + n - self._length
        if ahead > 0:
            self._require_prepared("commit", ahead)

    @changing
    def plan_snapshots(self, positions: Iterable[int]) -> np.ndarray:
        """Slots for the states that the next step leaves on its way, at no extra pass.

        A model that computes states at chunk ends anyway (SSD, chunked delta rule) writes them in the step with
        `write_state(state, layer, slots=slots, values=...)`, every recurrent layer all of them. The commit that reaches
        a position publishes its snapshot; a step that ends before it, or does not run, frees it. The slots are those of
        now: call it again after `resize_tier` or `rebalance` has given the device's pools other sizes.

        Args:
          positions: lengths in (length, capacity]; call it between `reserve` and the step.

        Returns:
          int32[n]: the slot for each position; 0 where none can be had: writes there go nowhere. Without recurrent
          layers zeros; the positions become resumable all the same.

        Raises:
          ConfigError: a position out of range.
          SequenceStateError: not active, or stopped committing.

        >>> import jkv
        >>> layers = {"ssm": jkv.RecurrentLayer({"h": jkv.Buffer((4,))})}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> seq.plan_snapshots([2, 4])
        array([2, 3], dtype=int32)
        """
        self._require_active("plan_snapshots")
        if self._stopped:
            raise SequenceStateError(f"plan_snapshots: {self!r} has stopped committing")
        listed = items_of("plan_snapshots: positions", positions, "ints")
        wanted = [require_int("positions", position, 0) for position in listed]
        for position in wanted:
            if not self._length < position <= self._capacity:
                raise ConfigError(
                    f"plan_snapshots: position {position} is not in ({self._length}, {self._capacity}], beyond the "
                    "length and within the capacity"
                )
        return np.array([self._plan_snapshot(position) for position in wanted], np.int32)

    @changing
    def rewind(self, n: int) -> None:
        """Forgets the last `n` uncommitted tokens, in all groups.

        Raises:
          ConfigError: more than length - committed.
          SequenceStateError: not active, a step is in flight, there is a recurrent state (it cannot be rewound), or
            window pages that the shorter length needs are gone. Nothing has changed then.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.advance(5)
        >>> seq.rewind(2)
        >>> seq.length
        3
        """
        self._require_active("rewind")
        n = require_int("n", n, 0)
        length = self._length - n
        if length < self._committed:
            raise ConfigError(f"rewind({n}): only {self._length - self._committed} tokens are not committed")
        if self._in_flight:
            raise SequenceStateError(f"rewind({n}): a step is in flight; report it with advance or commit first")
        if n and self._slot != NO_SLOT:
            raise SequenceStateError(
                f"rewind({n}): a recurrent state cannot be taken back from {self._length} to {length} tokens"
            )
        self._require_window(f"rewind({n})", length)
        if n:
            self._go_back_to(length)

    # --- to another process ------------------------------------------------------------------------------------------

    @serialised
    def transfer_plan(self, start: int = 0) -> dict[str, dict[str, Transfer]]:
        """What another cache needs to go on with this sequence, and where it lies: its live pages and its state.

        The sender exports with its plan (`export_pages`, or a transport of its own that reads the bytes where they
        are). The receiver opens the same prompt, resumes, and makes room: `resize(length, length)`, then `prepare`;
        its plan, with the `start` that was its length before, says where what arrives has to go (`import_pages`).
        Then `commit(tokens, snapshot=True)` publishes it as if it had been computed there. Both plans list the same
        `first_tokens` in the same order.

        Args:
          start: tokens that the receiver has; pages wholly below are left out.

        Returns:
          {layer: {buffer: Transfer}} of the layers that have KV, or a state, of their own.

        Raises:
          ConfigError: `start` beyond `length`.
          SequenceStateError: not active, a step is in flight, or device work is pending: call `prepare` first.

        >>> import jkv, jax.numpy as jnp
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
        >>> state = manager.init()
        >>> seq = manager.open(range(11))
        >>> seq.resume(), seq.resize(10, 10)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.transfer_plan()["attn"]["kv"].first_tokens
        array([ 0,  4,  8, -1], dtype=int32)
        """
        self._require_active("transfer_plan")
        host, page_size, length = self._host, self._host.layout.page_size, self._length
        if require_int("start", start, 0) > length:
            raise ConfigError(f"transfer_plan(start={start}): the length is {length}")
        if self._in_flight or not host.builder.empty:
            what = "a step is in flight" if self._in_flight else "device work is pending; call prepare first"
            raise SequenceStateError(f"transfer_plan: {what}")
        plan: dict[str, dict[str, Transfer]] = {}
        for group in host.layout.groups:
            if group.recurrent:
                places, tokens = np.array([self._slot]), np.array([length])
            else:
                columns = np.flatnonzero(self._table(group.ordinal)[: self._num_pages(length)] > 0)
                columns = columns[columns >= start // page_size]
                places, tokens = self._table(group.ordinal)[columns], columns * page_size
            pages, first_tokens = padded(places), padded(tokens)
            unit = 1 if group.recurrent else page_size
            for layer in group.layers:
                buffers = host.layout.place(layer).buffers
                plan[layer] = {
                    name: Transfer(pages, first_tokens, unit * buffer.nbytes) for name, buffer in buffers.items()
                }
        return plan

    # --- drafts ------------------------------------------------------------------------------------------------------

    @changing
    def accept(self, j: int, *, snapshot: bool | None = None) -> None:
        """The oldest verify step in flight wrote j + 1 tokens that count: its input token and j accepted drafts.

        Without recurrent layers it is `advance(j + 1)`. With them:

        Candidate `j` becomes the live state, without a copy: what that step wrote to the j-th of its current
        `candidate_slots`. The next verify step may be in flight already.

        Args:
          j: accepted drafts, at most the config's max_drafts where there are recurrent layers.
          snapshot: as for `advance`.

        Raises:
          ConfigError: j out of range.
          SequenceStateError: not active, more than the last `prepare` had reserved, or, with recurrent layers, no step
            in flight.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.accept(2)  # of four drafts
        >>> seq.length
        3
        """
        self._require_active("accept")
        j = require_int("j", j, 0)
        snapshot = _flag("accept: snapshot", snapshot)
        if self._slot != NO_SLOT and j > self._host.layout.config.max_drafts:
            raise ConfigError(f"accept({j}): the config's max_drafts is {self._host.layout.config.max_drafts}")
        self._require_prepared("accept", j + 1, verifies=True)
        self._adopt(j)
        self._length += j + 1
        self._drop_pending(self._length)
        self._after_advance(snapshot)

    @changing
    def checkpoint(self) -> Mark | None:
        """A mark to roll back to: a private copy of the live state in the next plan, before the next step.

        It is good until tokens beyond it are committed, the sequence goes back to before it, or closes.

        Returns:
          None: no state slot can be had now; nothing changed.

        Raises:
          SequenceStateError: not active, or a step is in flight.

        >>> import jkv
        >>> layers = {"ssm": jkv.RecurrentLayer({"h": jkv.Buffer((4,))})}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.checkpoint()
        (True, <Mark at 0>)
        """
        self._require_active("checkpoint")
        if self._in_flight:
            raise SequenceStateError(f"checkpoint: {self!r} has a step in flight; its state is not known yet")
        pool = self._host.tree.state_pool
        if pool is not None and not pool.available:
            return None
        mark = Mark(self._length, NO_SLOT if pool is None else self._copied_live())
        self._marks.append(mark)
        return mark

    @changing
    def rollback(self, mark: Mark) -> None:
        """Goes back to where `mark` was made, length and live state, and uses it up. A step in flight is forgotten.

        Raises:
          ConfigError: not a mark.
          SequenceStateError: not active, the mark is good no more or another sequence's, or window pages that its
            length needs are gone. Nothing has changed then.

        >>> import jkv
        >>> layers = {"ssm": jkv.RecurrentLayer({"h": jkv.Buffer((4,))})}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> mark = seq.checkpoint()
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.advance(5)
        >>> seq.rollback(mark)
        >>> seq.length
        0
        """
        self._require_active("rollback")
        if not isinstance(mark, Mark):
            raise ConfigError(f"rollback takes a mark from checkpoint, got {shown(mark)}")
        if mark not in self._marks:
            raise SequenceStateError(
                f"rollback: {mark!r} is not one of {self!r}, or good no more: used, committed past, or gone back before"
            )
        self._require_window(f"rollback to {mark.position}", mark.position)
        self._restore(mark)
        self._land()
        self._go_back_to(mark.position)

    @changing
    def fork(self, n: int) -> tuple[Sequence, ...]:
        """`n` active copies, which go their own ways: samples of one prompt, beams, branches of a search.

        They share what is committed in whole pages and get private copies of the rest: pages behind it, and the live
        state. Their capacity is `length`. Marks, and snapshots that are not published yet, stay with the original.

        Returns:
          The copies; (): not enough rows, pages or state slots now, nothing changed.

        Raises:
          ConfigError: n below 1.
          SequenceStateError: not active, or a step is in flight.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.commit([3, 1, 4, 1, 5])
        >>> [fork.length for fork in seq.fork(1)]
        [5]
        """
        self._require_active("fork")
        n = require_int("n", n, 1)
        if self._in_flight:
            raise SequenceStateError(f"fork: {self!r} has a step in flight; report it with advance or commit first")
        if len(self._host.free_rows) < n or not self._can_copy(n):
            return ()
        return tuple(self._forked() for _ in range(n))

    def _forked(self) -> Sequence:
        fork = copy.copy(self)
        fork.row, fork._marks = None, []
        fork._become_copy_of(self)
        fork._take_row()
        self._host.sequences[fork] = None
        return fork

    def _require_window(self, operation: str, length: int) -> None:
        group = self._lacks_window(length)
        if group is not None:
            raise SequenceStateError(
                f"{operation}: at length {length} group {group.name!r} needs pages that are gone, or were held back "
                f"for a chunk up to {self._capacity}, less max_rewind; nothing has changed"
            )

    def _go_back_to(self, length: int) -> None:
        self._length = length
        self._reserved = min(self._reserved, length)  # what is written there next needs a step of its own
        self._drop_pending(length)
        self._end_marks(length + 1)

    def _advance_to(self, length: int, snapshot: bool | None) -> None:
        """The tokens up to `length` are written, whatever their ids."""
        self._move_to(length)
        self._after_advance(snapshot)

    def _after_advance(self, snapshot: bool | None) -> None:
        length = self._length
        self._keep_state(length, length in self._points if snapshot is None else snapshot)
        if self._stopped:
            self._slide()

    def _move_to(self, length: int) -> None:
        self._length = length
        self._land()
        self._drop_pending(length)

    def _forget_step(self) -> None:
        """The last prepared step did not run."""
        if self._steps_in_flight > 1:
            self._steps_in_flight -= 1
            self._current ^= 1
        else:
            self._land()
        self._drop_pending(self._length)

    def _require_active(self, operation: str) -> None:
        if self._entered:
            self._take_back()
        if self.status is not Status.ACTIVE:
            raise SequenceStateError(f"{operation}: {self!r} is {self.status.value}, not active")
        self._host.require_whole(operation)

    def _require_prepared(self, operation: str, n: int, verifies: bool = False) -> None:
        """A step may write what was reserved at the last prepare; with recurrent layers it reports once."""
        if n and self._steps_in_flight > 1 and not verifies:
            raise SequenceStateError(
                f"{operation}: {self!r} was prepared for two verify steps; report them with accept, or with advance(0) "
                "one that did not run"
            )
        reserved = min(self._reserved, self._capacity)
        if self._length + n > reserved:
            raise SequenceStateError(
                f"{operation} of {n} tokens at length {self._length}: the last prepare had room up to {reserved}, "
                f"{max(0, reserved - self._length)} more"
            )
        if n and self._slot != NO_SLOT and not self._in_flight:
            raise SequenceStateError(
                f"{operation} of {n} tokens at length {self._length}: with recurrent layers the length moves once per "
                "prepare, and no step is in flight"
            )
        if n and self._host.scratch is not None:
            self._require_window(operation, self._length + n)

    # --- the ledger --------------------------------------------------------------------------------------------------

    def _entry(self) -> Entry:
        """What our row of the ledger starts from."""
        host = self._host
        commit_mark = length_mark = num_pages = -1
        planned = any(position > self._length for position in self._pending)  # which a shorter step frees
        content = self._ids is not None and self._committed < len(self._prompt)
        if not (self._stopped or planned or content or host.candidates or (host.scratch and self._holds_back())):
            num_pages = self._num_pages(self._capacity)
            length_mark = min((point for point in self._points if point > self._length), default=NEVER)
            commit_mark = self._commit_mark()
        return Entry(self._committed, self._length, self._capacity, self._reserved, commit_mark, length_mark, num_pages)

    def _commit_mark(self) -> int:
        """The committed length at which a page is full, a window slides or a mark ends."""
        page_size = self._host.layout.page_size
        mark = (self._published + 1) * page_size
        for group in self._host.tree.windows:
            mark = min(mark, (self._live_from[group.ordinal] + 1) * page_size + group.window - 1)
        return min(mark, self._marks[0].position + 1) if self._marks else mark

    def _enter(self) -> None:
        """From now on our row of the ledger, which has our entry, has the lengths, until `_take_back`."""
        self._host.ledger.partial[self.row, : len(self._partial)] = self._partial
        self._entered = True

    def _commit_in_ledger(self, tokens: np.ndarray) -> bool:
        """`_commit` of a row of the ledger, where the run grows in place and at most windows slide.

        Returns:
          False: it takes more, nothing changed.
        """
        host, tree, row, node = self._host, self._host.tree, self.row, self._node
        if self._pending or self._marks or not self._may_extend(node):
            return False
        ledger, page_size, first = host.ledger, host.layout.page_size, self._published
        committed = int(ledger.committed[row])
        position, known = committed + len(tokens), committed - first * page_size
        whole = position // page_size - first
        if tree.min_snapshot:
            self._slide(position)  # as in `_commit`
        if whole:
            tokens = np.concatenate((ledger.partial[row, :known], tokens))
            pages = [self._handed_over(group, first, first + whole) for group in tree.groups]
            tree.extend(node, tokens[: whole * page_size], pages, self._live_from)
            tokens, known = tokens[whole * page_size :], 0
            self._published += whole
        ledger.partial[row, known : known + len(tokens)] = tokens
        ledger.committed[row] = position
        if not tree.min_snapshot:
            self._slide(position)
        ledger.commit_mark[row] = self._commit_mark()
        return True

    def _take_back(self) -> None:
        """Undoes `_enter`, with what batch verbs have done since."""
        if not self._entered:
            return
        ledger, row = self._host.ledger, self.row
        self._committed, self._length = int(ledger.committed[row]), int(ledger.length[row])
        self._capacity, self._reserved = int(ledger.capacity[row]), int(ledger.reserved[row])
        self._in_flight = bool(ledger.in_flight[row])
        if not self._stopped:
            count = self._committed - self._published * self._host.layout.page_size
            self._partial = ledger.partial[row, :count].copy()
        ledger.entered[row] = self._entered = False
        ledger.count -= 1

    # --- the end -----------------------------------------------------------------------------------------------------

    @changing
    def stop_committing(self) -> None:
        """No more tokens will be committed: the partial page and, if no step is in flight, the live state go to the
        tree without a copy. A later `reserve` plans private copies of them.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> seq.commit([3, 1, 4, 1, 5])
        >>> manager.probe([3, 1, 4, 1, 5, 9]).tokens
        4
        >>> seq.stop_committing()
        >>> manager.probe([3, 1, 4, 1, 5, 9]).tokens
        5
        """
        self._require_active("stop_committing")
        if not self._stopped:
            self._stop()
            self._slide()

    @serialised
    def plan_drop(self) -> Drop:
        """A handle that can take back what this sequence left at its end, when a later turn has made it useless.

        Raises:
          SequenceStateError: it may still commit; call `stop_committing` or `close` first.

        >>> import jkv, jax.numpy as jnp
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32), window=4)}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
        >>> state = manager.init()
        >>> with manager.open(range(8)) as seq:
        ...     _ = seq.resume(), seq.reserve(8)
        ...     state, rows = manager.prepare(state, [seq])
        ...     seq.commit(range(8))
        >>> turn = seq.plan_drop()
        >>> manager.probe(range(9)).tokens
        8
        >>> turn.drop()
        >>> manager.probe(range(9)).tokens
        4
        """
        if not self._stopped and self.status is not Status.CLOSED:
            raise SequenceStateError(f"plan_drop: {self!r} may still commit; call stop_committing first")
        last = self._last
        ends_here = last is not None and last.alive and last.position == self._committed
        return Drop(self._host, self, last if ends_here else None)

    @changing
    def suspend(self) -> None:
        """Gives up the row; pages and the live state are kept. `resume` brings it back.

        With a HostTier all of it may move to host memory when others need the room.

        Raises:
          SequenceStateError: not active, or a step is in flight.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume()
        True
        >>> seq.suspend()
        >>> seq.status
        <Status.SUSPENDED: 'suspended'>
        """
        self._require_active("suspend")
        if self._in_flight:
            raise SequenceStateError(f"suspend: {self!r} has a step in flight; report it with advance or commit first")
        self._leave_row()
        self._fall_asleep()
        self.status = Status.SUSPENDED

    @changing
    def close(self) -> None:
        """Leaves what is committed to the tree and frees the rest. In flight, no state is left. Idempotent.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.close()
        >>> seq.status
        <Status.CLOSED: 'closed'>
        """
        if self.status is Status.CLOSED:
            return
        if self._host.broken:
            self._abandon()
            return
        self._take_back()
        if self._arrival is not None:
            leave(self._host, self._arrival, self)
            self._arrival = None
        if self._node is not None:
            self._host.usage.note(self._capacity, self._length)
            if self._age:
                self._stir()
            if not self._stopped:
                self._stop(closing=True)
            if self._marks:
                self._end_marks(0)
            self._renew()
            self._let_go()
            if self._scope.epoch != self._host.tree.epoch and self._scope in self._host.tree.roots:
                self._host.tree.drop_unheld(self._host.tree.roots[self._scope])
        if self.row is not None:
            self._leave_row()
        self._abandon()

    def _move_to_root(self, root: Root) -> None:
        """Before the first resume: the weights are others now, and so is what can be reused."""
        if self._arrival is not None:
            leave(self._host, self._arrival, self)
        self._arrival = self._landed = self._promise = self._digests = None
        self.status = Status.SUSPENDED
        self._scope = root

    def _abandon(self) -> None:
        """Closed, without a word to the tree: after `close`, or when the device's contents are lost."""
        self._take_back()
        self.status = Status.CLOSED
        self.row = None
        self._capacity = self._length = self._committed
        self._land()
        if self in self._host.sequences:
            (self._host.retried if self._work.retry else self._host.work).add(self._work)
            del self._host.sequences[self]
        self._host.prompting.pop(self, None)

    def _leave_row(self) -> None:
        host, row = self._host, self.row
        host.rows[row] = None
        host.free_rows.append(row)
        host.row_changes += 1
        pages = self._num_pages(self._capacity)
        for g, table in enumerate(self._tables):
            self._tables[g] = table[:pages].copy()
            table[:pages] = NO_PAGE
            host.builder.mark(row, g, 0, pages)
        if host.tree.state_pool is not None:
            host.slots[row] = NO_SLOT
            host.builder.slots_changed = True
        self.row = None


def _flag(field: str, value: bool | None) -> bool | None:
    return None if value is None else require_bool(field, value)


def find_everywhere(
    host: Host, scope: Root, tokens: np.ndarray, limit: int, digests: Iterable[bytes] | None = None
) -> Match:
    """The match of `tokens` in all tiers; `digests`: of their pages, where they are known."""
    known = [] if digests is None else [host.tree.scope_digest(scope), *digests]
    search = None if host.shelf is None else Search(host, scope, tokens, known)
    return look_up(host, search, limit, find(host, scope, tokens, limit, search))


def with_digest(host: Host, scope: Root, tokens: np.ndarray, match: Match) -> Match:
    """`match`, which nobody has seen yet, and which now knows how to get `first_new_digest`."""

    reused = match.tokens

    def digest() -> bytes | None:
        return new_digest(host.tree, scope, tokens, reused)

    if host.contents.pairs and len(tokens) and tokens.min() < 0:  # later its contents may be forgotten
        found = digest()
        object.__setattr__(match, "new_digest", lambda: found)
    else:
        object.__setattr__(match, "new_digest", digest)  # `dataclasses.replace` costs 5 us
    return match


def find(host: Host, scope: Root, tokens: np.ndarray, limit: int, search: Search | None) -> Hit:
    """The match of `tokens` in the tree, with what active sequences are computing of them."""
    hit = host.tree.match(scope, tokens, limit, 0 if search is None else search.known())
    if host.prompting:
        for seq in [seq for seq in host.prompting if not seq._is_prompting]:
            del host.prompting[seq]
        raw = ahead = hit.match.raw_tokens
        for seq in host.prompting:
            ahead = max(ahead, seq._ahead_with(scope, tokens, ahead))
        if ahead > raw:
            hit.match = dataclasses.replace(hit.match, in_flight=ahead - raw)
    return hit
