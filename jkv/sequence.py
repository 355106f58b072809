"""Sequence: the life of one request, from match to close.

    suspended ──resume──▶ active ──(reserve, prepare, step, commit or advance)*──▶ close
        ▲                    │
        └──────suspend───────┘

What it has of pages and states, and what becomes of them, is `holdings.py`'s business. NumPy only.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from jkv.config import Scope, as_tokens, require_int
from jkv.errors import ConfigError, OutOfPagesError, SequenceStateError
from jkv.holdings import Holdings, Host
from jkv.radix import NO_SLOT, Match, node_of


class Status(enum.StrEnum):
    """What a sequence is doing; also a str.

    >>> Status.ACTIVE == "active"
    True
    """

    ACTIVE = "active"
    SUSPENDED = "suspended"
    CLOSED = "closed"


class Sequence(Holdings):
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
      committed: tokens published for reuse.
      length: tokens whose KV and state the cache holds.
      capacity: token positions that have pages. committed <= length <= capacity.
    """

    def __init__(self, host: Host, tokens: np.ndarray, scope: Scope, priority: int, max_reuse: int | None, retry: bool):
        super().__init__(host, host.key(scope), priority)
        self._prompt = tokens
        self._max_reuse = max(0, len(tokens) - 1) if max_reuse is None else min(max_reuse, len(tokens))
        self._retry = retry
        self.status = Status.SUSPENDED
        # from the first resume on:
        self._match: Match | None = None
        self._points: tuple[int, ...] = ()
        self._reserved = 0  # capacity at the last prepare

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
    def match(self) -> Match:
        """What was reused; before the first successful resume, what would be reused now."""
        if self._match is not None:
            return self._match
        return self._host.tree.match(self._scope, self._prompt, self._max_reuse).match

    @property
    def snapshot_points(self) -> tuple[int, ...]:
        """Lengths beyond `length`, ascending, where ending a chunk leaves a snapshot that others can use."""
        return tuple(point for point in self._points if point > self.length)

    # --- admission ---------------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Gets a row; the first time also matches, holds what is reused and plans private copies: one step.

        Returns:
          False: not now, nothing changed. Let others finish or suspend first.

        Raises:
          SequenceStateError: the sequence is closed or active.
        """
        host = self._host
        if self.status is not Status.SUSPENDED:
            raise SequenceStateError(f"resume: {self!r} is {self.status.value}, not suspended")
        if not host.free_rows or self._too_full():
            return False
        if self._match is None and not self._start():
            return False
        self.row = host.free_rows.pop()
        host.rows[self.row] = self
        for group in host.layout.attention_groups:
            self._mark(group.ordinal, 0, self._num_pages(self.capacity))
        self._reserved = self.length
        self._set_slot(self._slot)
        self.status = Status.ACTIVE
        return True

    def _too_full(self) -> bool:
        """Whether active sequences and what is held leave too little room in some growing pool (SPEC S43)."""
        host = self._host
        if not host.active:
            return False
        share = host.layout.config.max_utilization_for_resume
        own = self._own_pages()
        return any(
            pool.total - pool.available - own[pool.ordinal] > share * pool.total
            for pool in host.pools
            if pool is not host.tree.state_pool
        )

    def _start(self) -> bool:
        """The first resume, all or nothing: match, check room, then hold, allocate and plan the copies."""
        tree, page_size = self._host.tree, self._host.layout.page_size
        hit = tree.match(self._scope, self._prompt, self._max_reuse)
        length = hit.match.tokens
        whole = length // page_size
        node = source = None  # where the whole pages end; where the partly matched page lies
        for candidate in hit.path:
            if candidate.start < whole * page_size:
                node = candidate
            if candidate.start <= whole * page_size < length:
                source = candidate
        for group in tree.windows:
            self._live_from[group.ordinal] = group.live_from(length, page_size)
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
        self._partial = self._prompt[whole * page_size : length].copy()
        self.committed = self.length = self.capacity = length
        self._match = hit.match
        self._points = self._choose_points(hit.match.raw_tokens)
        if not self._retry:
            self._count_lookup(hit.match)
        return True

    def _choose_points(self, raw_tokens: int) -> tuple[int, ...]:
        """Where the tree leaves this prompt, and where this prompt comes again; each cut to a page boundary."""
        backoff, page_size = self._host.layout.config.reuse_backoff, self._host.layout.page_size
        lengths = (raw_tokens - backoff, len(self._prompt) - max(1, backoff))
        return tuple(sorted({n - n % page_size for n in lengths if n > 0}))

    def _count_lookup(self, match: Match) -> None:
        counters = self._host.counters
        counters.lookups += 1
        counters.hits += match.tokens > 0
        counters.looked_up_tokens += len(self._prompt)
        counters.reused_tokens += match.tokens
        if match.limited_by is not None:
            backoff = self._host.layout.config.reuse_backoff
            lost = min(match.raw_tokens - backoff, self._max_reuse) - match.tokens
            counters.lost_tokens[match.limited_by] = counters.lost_tokens.get(match.limited_by, 0) + lost

    # --- room --------------------------------------------------------------------------------------------------------

    def reserve(self, n: int) -> bool:
        """Room for `n` more tokens: capacity = length + n. See `resize`."""
        return self.resize(self.length + require_int("n", n, 0))

    def resize(self, capacity: int, length: int | None = None) -> bool:
        """Sets the capacity, and optionally a larger length.

        A larger length reports a step in flight, as `advance` does; with no step in flight (attention layers only) it
        says that something else wrote the KV up to there.

        Returns:
          False: not enough pages now, nothing changed.

        Raises:
          ConfigError: `length` below the present one, or above `capacity`.
          OutOfPagesError: not even an empty cache could give that.
          SequenceStateError: not active, or a length beyond what the last `prepare` had reserved for the step.
        """
        self._require_active("resize")
        capacity = require_int("capacity", capacity, 0)
        length = self.length if length is None else require_int("length", length, 0)
        if not self.length <= length <= capacity:
            raise ConfigError(
                f"resize(capacity={capacity}, length={length}): length may only grow from {self.length}, up to capacity"
            )
        if length > self.length and (self._in_flight or self._slot != NO_SLOT):
            self._require_prepared("resize", length - self.length)
        layout = self._host.layout
        if capacity > layout.max_length:
            raise OutOfPagesError(f"a capacity of {capacity} tokens was asked for, max_length is {layout.max_length}")
        old, new = self._num_pages(self.capacity), self._num_pages(capacity)
        if new > old or (self._is_lending and capacity > self.length):
            if not self._grow(old, max(old, new), capacity > self.length):
                return False
        if new < old:
            self._shrink(old, new)
        self.capacity = capacity
        if length > self.length:
            self._advance_to(length, None)
        return True

    # --- steps -------------------------------------------------------------------------------------------------------

    def _put_in_flight(self) -> None:
        """`prepare` has listed this sequence: a step may be dispatched now."""
        self._reserved = self.capacity
        self._in_flight = self._in_flight or self.capacity > self.length

    def advance(self, n: int, *, snapshot: bool | None = None) -> None:
        """A dispatched step wrote `n` more tokens whose ids the host may not know yet: length += n.

        Args:
          n: tokens; 0: the step did not run.
          snapshot: True: keep the state at the new length; False: do not; None: at a snapshot point.

        Raises:
          SequenceStateError: not active, or more than the last `prepare` had reserved.
        """
        self._require_active("advance")
        n = require_int("n", n, 0)
        self._require_prepared("advance", n)
        if n == 0:
            self._in_flight = False
            return
        self._advance_to(self.length + n, snapshot)

    def commit(self, tokens: Any, *, snapshot: bool | None = None, end: bool = False) -> None:
        """Publishes the ids of the tokens at `committed`..; advances first if they go past `length`.

        Args:
          tokens: host ids, int[n].
          snapshot: True: leave the new length resumable (recurrent: keep its state); False: do not; None: if it is a
            snapshot point that this call reaches.
          end: also `stop_committing`.

        Raises:
          ConfigError: ids of a wrong dtype or range, or a jax.Array.
          SequenceStateError: not active, stopped, more than the last `prepare` had reserved, or snapshot=True of
            tokens that a step in flight goes on from.
        """
        self._require_active("commit")
        if self._stopped:
            raise SequenceStateError(f"commit: {self!r} has stopped committing")
        tokens = as_tokens(tokens)
        position = self.committed + len(tokens)
        ahead = position - self.length
        if ahead > 0:
            self._require_prepared("commit", ahead)
        elif snapshot and self._in_flight and position not in self._pending:
            raise SequenceStateError(
                f"commit(snapshot=True) of older tokens, up to {position}: a step from {self.length} on is in flight, "
                "so the state at that position cannot be kept; ask for it in the advance that reaches it"
            )
        if ahead > 0:
            self._move_to(position)
            snapshot = position in self._points if snapshot is None else snapshot
        if snapshot and not (end and self._can_hand_over(position)):
            self._keep_state(position, True)
        if len(tokens):
            self.committed = position
            if self._host.tree.min_snapshot and not self._pending:
                self._slide()  # what no endpoint to come needs is freed before the tree ever sees it
            self._publish(tokens)
        self._publish_endpoints()
        if end:
            self._stop()
        self._slide()

    def rewind(self, n: int) -> None:
        """Forgets the last `n` uncommitted tokens, in all groups.

        Raises:
          ConfigError: more than length - committed.
          SequenceStateError: not active, a step is in flight, there is a recurrent state (it cannot be rewound), or
            window pages that the shorter length needs are gone. Nothing has changed then.
        """
        self._require_active("rewind")
        n = require_int("n", n, 0)
        length = self.length - n
        if length < self.committed:
            raise ConfigError(f"rewind({n}): only {self.length - self.committed} tokens are not committed")
        if self._in_flight:
            raise SequenceStateError(f"rewind({n}): a step is in flight; report it with advance or commit first")
        if n and self._slot != NO_SLOT:
            raise SequenceStateError(
                f"rewind({n}): a recurrent state cannot be taken back from {self.length} to {length} tokens"
            )
        for group in self._host.tree.windows:
            first = group.live_from(length, self._host.layout.page_size)
            if first < self._live_from[group.ordinal]:
                raise SequenceStateError(
                    f"rewind({n}): at length {length} group {group.name!r} needs pages from {first} on, they are kept "
                    f"from {self._live_from[group.ordinal]} on"
                )
        self.length = length
        self._reserved = min(self._reserved, length)  # what is written there next needs a step of its own
        self._drop_pending(length)

    def _advance_to(self, length: int, snapshot: bool | None) -> None:
        """The tokens up to `length` are written, whatever their ids."""
        self._move_to(length)
        self._keep_state(length, length in self._points if snapshot is None else snapshot)
        if self._stopped:
            self._slide()

    def _move_to(self, length: int) -> None:
        self.length = length
        self._in_flight = False

    def _require_active(self, operation: str) -> None:
        if self.status is not Status.ACTIVE:
            raise SequenceStateError(f"{operation}: {self!r} is {self.status.value}, not active")

    def _require_prepared(self, operation: str, n: int) -> None:
        """A step may write what was reserved at the last prepare; with recurrent layers it reports once."""
        reserved = min(self._reserved, self.capacity)
        if self.length + n > reserved:
            raise SequenceStateError(
                f"{operation} of {n} tokens at length {self.length}: the last prepare had room up to {reserved}, "
                f"{max(0, reserved - self.length)} more"
            )
        if n and self._slot != NO_SLOT and not self._in_flight:
            raise SequenceStateError(
                f"{operation} of {n} tokens at length {self.length}: with recurrent layers the length moves once per "
                "prepare, and no step is in flight"
            )

    # --- the end -----------------------------------------------------------------------------------------------------

    def stop_committing(self) -> None:
        """No more tokens will be committed: the partial page and, if no step is in flight, the live state go to the
        tree without a copy. A later `reserve` plans private copies of them."""
        self._require_active("stop_committing")
        if not self._stopped:
            self._stop()
            self._slide()

    def suspend(self) -> None:
        """Gives up the row; pages and the live state stay. `resume` brings it back.

        Raises:
          SequenceStateError: not active, or a step is in flight.
        """
        self._require_active("suspend")
        if self._in_flight:
            raise SequenceStateError(f"suspend: {self!r} has a step in flight; report it with advance or commit first")
        self._leave_row()
        self.status = Status.SUSPENDED

    def close(self) -> None:
        """Leaves what is committed to the tree and frees the rest. In flight, no state is left. Idempotent."""
        if self.status is Status.CLOSED:
            return
        if self._node is not None:
            if not self._stopped:
                self._stop(closing=True)
            self._let_go()
        if self.row is not None:
            self._leave_row()
        self._abandon()

    def _abandon(self) -> None:
        """Closed, without a word to the tree: after `close`, or when the device's contents are lost."""
        self.status = Status.CLOSED
        self.row = None
        self.capacity = self.length = self.committed
        self._in_flight = False
        self._host.sequences.pop(self, None)

    def _leave_row(self) -> None:
        host, row = self._host, self.row
        host.rows[row] = None
        host.free_rows.append(row)
        for group in host.layout.attention_groups:
            host.builder.mark(row, group.ordinal, 0, self._num_pages(self.capacity))
        if host.tree.state_pool is not None:
            host.slots[row] = NO_SLOT
            host.builder.slots_changed = True
        self.row = None
