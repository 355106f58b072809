"""CacheManager: the facade that ties the deciding host half to the device half."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np

from jkv.apply import apply
from jkv.batches import Batch, Batches
from jkv.config import CacheConfig, Scope, as_counts, as_tokens, require_int
from jkv.errors import ConfigError, SequenceStateError
from jkv.holdings import Candidates, Host
from jkv.integrity import check_host
from jkv.layout import make_layout
from jkv.ledger import Ledger
from jkv.pages import PagePool
from jkv.plan import NO_CANDIDATES, PlanBuilder
from jkv.radix import Match
from jkv.ragged import Ragged, make_ragged
from jkv.retention import Retention
from jkv.sequence import Sequence, Status, find
from jkv.state import CacheState, init_state
from jkv.stats import CacheStats, Counters, PoolStats

NO_ENTRIES = np.zeros(0, np.int32)
NO_SCOPE = Scope()


class CacheManager:
    """Decides what is kept where, on the host; never looks at device data and never waits for the device.

    Args:
      config: the model's layers and the cache's budget.
      mesh: must be None: sharded pools are not supported.

    Not thread-safe. Decisions depend only on the sequence of calls.

    >>> import jax, jkv, jax.numpy as jnp
    >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
    >>> state = manager.init()
    >>> seq = manager.open([3, 1, 4])
    >>> seq.resume(), seq.reserve(3)
    (True, True)
    >>> state, rows = manager.prepare(state, [seq])
    >>> seq.commit([3, 1, 4]); seq.close()
    >>> manager.probe([3, 1, 4, 1]).tokens
    3
    """

    def __init__(self, config: CacheConfig, mesh: Any = None):
        if not isinstance(config, CacheConfig):
            raise ConfigError(f"CacheManager takes a CacheConfig, got {type(config).__name__}")
        if mesh is not None:
            raise ConfigError("CacheManager.mesh: sharded pools are not supported, pass None")
        self.config = config
        self.layout = make_layout(config)
        self._counters = Counters()
        self._snapshots_evicted = 0  # by trees of earlier lives
        self._evicted = {pool.name: 0 for pool in self.layout.pools}
        self._start_over()

    def _start_over(self) -> None:
        layout = self.layout
        pools = [PagePool(pool) for pool in layout.pools]
        slots = np.zeros(layout.max_sequences, np.int32)
        candidates = Candidates.of(layout)
        builder = PlanBuilder(layout, self._table_of, slots, candidates.shown if candidates else NO_CANDIDATES)
        self._host = Host(
            layout=layout,
            pools=pools,
            tree=Retention(layout, pools),
            counters=self._counters,
            builder=builder,
            rows=[None] * layout.max_sequences,
            free_rows=list(range(layout.max_sequences - 1, -1, -1)),
            slots=slots,
            candidates=candidates,
            scratch=self.config.window_scratch if any(g.window for g in layout.attention_groups) else None,
            ledger=Ledger(layout),
            sequences={},
            prompting={},
        )
        self._batches = Batches(self._host)

    def _table_of(self, row: int, group: int) -> np.ndarray:
        owner = self._host.rows[row]
        return NO_ENTRIES if owner is None else owner._table(group)

    # --- state -------------------------------------------------------------------------------------------------

    def init(self) -> CacheState:
        """A fresh device state: all zeros, committed to the default device. Pass it through every step."""
        return init_state(self.layout)

    def reset(self) -> CacheState:
        """The device state was lost or deleted: closes all sequences, forgets what the device held.

        As after a jitted step that failed once it had been given the donated state. Do not go on with the old one.

        Returns:
          A fresh state of the same shapes: nothing recompiles.
        """
        for seq in list(self._host.sequences):
            seq._abandon()
        self._keep_totals()
        self._start_over()
        return self.init()

    def _keep_totals(self) -> None:
        self._snapshots_evicted += self._host.tree.snapshots_evicted
        for pool in self._host.pools:
            self._evicted[pool.name] += pool.evicted

    def clear(self) -> None:
        """Drops everything reusable.

        Raises:
          SequenceStateError: sequences are open; nothing was dropped.
        """
        count = len(self._host.sequences)
        if count:
            raise SequenceStateError(f"clear: {count} sequences are open; close them first")
        self._host.tree.clear()

    # --- requests ----------------------------------------------------------------------------------------------

    def open(
        self,
        tokens: Any = (),
        *,
        scope: Scope = NO_SCOPE,
        priority: int = 0,
        max_reuse: int | None = None,
        retry: bool = False,
    ) -> Sequence:
        """A new, suspended sequence that holds nothing until its first `resume`.

        Args:
          tokens: the prompt's host ids, int[n].
          scope: namespace of reuse.
          priority: what it commits is evicted after everything of lower priority.
          max_reuse: most tokens to reuse; None: n - 1, since a model needs one token to produce logits.
          retry: this work was done before and preempted: its lookup is not counted.

        Raises:
          ConfigError: bad ids, or a prompt longer than max_length.
        """
        ids = self._prompt(tokens)
        self._check_scope(scope)
        if max_reuse is not None:
            require_int("max_reuse", max_reuse, 0)
        if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
            raise ConfigError(f"priority must be an int, got {priority!r}")
        seq = Sequence(self._host, ids, scope, int(priority), max_reuse, retry)
        self._host.sequences[seq] = None
        return seq

    def probe(self, tokens: Any, *, scope: Scope = NO_SCOPE, max_reuse: int | None = None) -> Match:
        """What `open` with the same arguments would reuse now. Reads only."""
        ids = self._prompt(tokens)
        self._check_scope(scope)
        limit = max(0, len(ids) - 1) if max_reuse is None else min(require_int("max_reuse", max_reuse, 0), len(ids))
        return find(self._host, self._host.key(scope), ids, limit).match

    def _prompt(self, tokens: Any) -> np.ndarray:
        ids = as_tokens(tokens)
        if len(ids) > self.layout.max_length:
            raise ConfigError(f"a prompt of {len(ids)} tokens, max_length is {self.layout.max_length}")
        return ids.copy() if ids is tokens else ids

    def _check_scope(self, scope: Scope) -> None:
        if not isinstance(scope, Scope):
            raise ConfigError(f"scope must be a Scope, got {scope!r}")

    def can_ever_fit(self, prompt_length: int, new_tokens: int) -> bool:
        """Whether an empty cache could serve this request alone: the prompt in one chunk, then token by token."""
        prompt = require_int("prompt_length", prompt_length, 0)
        total = prompt + require_int("new_tokens", new_tokens, 0)
        if total > self.layout.max_length:
            return False
        page_size = self.layout.page_size
        worst = [0] * len(self.layout.pools)  # while the prompt is written
        for group in self.layout.attention_groups:
            worst[group.pool] += -(-prompt // page_size)
            if self.config.window_scratch is not None:  # no pages for what leaves the window within the chunk
                sinks, first = group.first_live(max(0, prompt - self.config.window_scratch.max_rewind), page_size)
                worst[group.pool] -= first - sinks
        # what decoding takes repeats with the page, a page of full attention larger each time: the last page is worst
        for length in range(max(prompt, total - page_size), total):
            pages = [0] * len(self.layout.pools)
            for group in self.layout.attention_groups:
                sinks, first = group.first_live(length, page_size)
                pages[group.pool] += -(-(length + 1) // page_size) - (first - sinks)
            worst = [max(a, b) for a, b in zip(worst, pages, strict=True)]
        return all(n <= pool.num_pages for n, pool in zip(worst, self.layout.pools, strict=True))

    # --- steps -------------------------------------------------------------------------------------------------

    def prepare(self, state: CacheState, sequences: Iterable[Sequence]) -> tuple[CacheState, np.ndarray]:
        """Applies all pending device work in one dispatch and puts the sequences' next step in flight.

        Args:
          state: the latest state; donated where there is work to do.
          sequences: active sequences of this manager, each once.

        Returns:
          The new state, and rows: int32[len(sequences)], in their order, for the model's step.

        Raises:
          SequenceStateError: a sequence is not active, of another manager or listed twice, or the state was donated.
        """
        batch = self._batches.of("prepare", sequences)
        return self._prepared(state, batch), batch.rows.astype(np.int32)

    def prepare_ragged(
        self,
        state: CacheState,
        sequences: Iterable[Sequence],
        counts: Any,
        *,
        pad_tokens: int | Iterable[int],
        pad_sequences: int | Iterable[int],
    ) -> tuple[CacheState, Ragged]:
        """`prepare` for a step that takes different numbers of tokens of its sequences, back to back.

        Args:
          state: the latest state; donated where there is work to do.
          sequences: active sequences of this manager, each once.
          counts: int[n]: tokens that the step writes of each, from its length on; an int: as many of each.
          pad_tokens: T, the step's static number of tokens; of several (buckets) the smallest that fits.
          pad_sequences: R, likewise.

        Returns:
          The new state, and the batch: NumPy arrays padded to T and R.

        Raises:
          ConfigError: a count below 1, or too many tokens or sequences for every bucket.
          SequenceStateError: as `prepare`; or more tokens than a sequence has reserved.
        """
        batch = self._batches.of("prepare_ragged", sequences)
        wanted = as_counts("prepare_ragged", "counts", counts, len(batch.rows), least=1)
        starts, capacities = self._batches.lengths(batch)
        tokens = _bucket("pad_tokens", pad_tokens, int(wanted.sum()))
        rows = _bucket("pad_sequences", pad_sequences, len(wanted))
        short = np.flatnonzero(starts + wanted > capacities).tolist()
        if short:
            i = short[0]
            raise SequenceStateError(
                f"prepare_ragged: counts[{i}] is {wanted[i]}, but {batch.sequences[i]!r} has room for "
                f"{capacities[i] - starts[i]} more; reserve first"
            )
        state = self._prepared(state, batch)
        return state, make_ragged(batch.rows, starts, wanted, tokens, rows)

    def _prepared(self, state: CacheState, batch: Batch) -> CacheState:
        self._check_state(state)
        builder = self._host.builder
        if self._host.candidates is not None:
            self._batches.show_candidates(batch)
        if not builder.empty:
            state = apply(state, builder.build())
            builder.clear()
        self._batches.put_in_flight(batch)
        return state

    # Many sequences at once: the outcome of the sequences' own calls, at a cost that hardly depends on their number
    # where none of them needs, fills or loses a page.

    def reserve(self, sequences: Iterable[Sequence], counts: Any) -> int:
        """`Sequence.reserve` for each in order, until one finds no room.

        Args:
          sequences: active sequences of this manager, each once.
          counts: int[n]: tokens for each; an int: as many for each.

        Returns:
          How many of them, from the first on, have room now. The others are unchanged.

        Raises:
          ConfigError: wrong counts.
          OutOfPagesError: not even an empty cache could give one what it asks for; those before it have room.
          SequenceStateError: a sequence is not active, of another manager or listed twice.
        """
        return self._batches.reserve(sequences, counts)

    def advance(self, sequences: Iterable[Sequence], counts: Any) -> None:
        """`Sequence.advance` for each, all or none.

        Args:
          sequences: active sequences of this manager, each once.
          counts: int[n]: tokens that the step wrote of each; an int: as many of each.

        Raises:
          ConfigError: wrong counts.
          SequenceStateError: as `Sequence.advance`, or a sequence is listed twice. Nothing has changed then.
        """
        self._batches.advance(sequences, counts)

    def commit(self, sequences: Iterable[Sequence], tokens: Any, lengths: Any) -> None:
        """`Sequence.commit` for each, all or none.

        Args:
          sequences: active sequences of this manager, each once.
          tokens: host ids, int[sum of lengths], the sequences' tokens back to back.
          lengths: int[n]: tokens of each; an int: as many of each.

        Raises:
          ConfigError: wrong ids or lengths.
          SequenceStateError: as `Sequence.commit`, or a sequence is listed twice. Nothing has changed then.
        """
        self._batches.commit(sequences, tokens, lengths)

    def _check_state(self, state: CacheState) -> None:
        if not isinstance(state, CacheState) or state.layout is not self.layout:
            raise SequenceStateError("prepare: this state was not made by this manager's init")
        # one array of each part that a call donates as a whole
        (first_buffer, *_) = state.pools[0][0].values()
        for array in (first_buffer, *state.page_tables.values(), *state.state_slots.values()):
            if array.is_deleted():
                raise SequenceStateError(
                    "prepare: this state was donated to an earlier call; pass the state that call returned"
                )

    # --- looking at it -----------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counters and the pools' present ownership."""
        host, counters = self._host, self._counters
        evicted = {pool.name: self._evicted[pool.name] + pool.evicted for pool in host.pools}
        pools = {
            pool.name: PoolStats(pool.total, pool.free, pool.tree, pool.private, pool.evictable) for pool in host.pools
        }
        suspended = sum(seq.status is Status.SUSPENDED for seq in host.sequences)
        fields = dataclasses.asdict(counters)
        fields["lost_tokens"] = MappingProxyType(dict(counters.lost_tokens))
        return CacheStats(
            **fields,
            snapshots_evicted=self._snapshots_evicted + host.tree.snapshots_evicted,
            evicted_pages=MappingProxyType(evicted),
            pools=MappingProxyType(pools),
            active=host.active,
            suspended=suspended,
        )

    def check(self) -> None:
        """Full integrity check: tree structure, ownership, free lists, tables, counters against a recount.

        Raises:
          IntegrityError: names the broken invariant.
        """
        check_host(self._host)


def _bucket(field: str, sizes: int | Iterable[int], needed: int) -> int:
    """The smallest of `sizes` that holds `needed`."""
    buckets = sorted(require_int(field, size, 1) for size in (sizes if isinstance(sizes, Iterable) else (sizes,)))
    for size in buckets:
        if size >= needed:
            return size
    raise ConfigError(f"prepare_ragged: {field}={buckets} is too small for {needed}")
