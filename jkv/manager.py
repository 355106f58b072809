"""CacheManager: the facade that ties the deciding host half to the device half."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jkv.announcing import Announcing
from jkv.apply import apply, compile_apply
from jkv.batches import Batch, Batches
from jkv.config import (
    CacheConfig,
    DeviceTier,
    HostTier,
    Scope,
    StoreTier,
    as_counts,
    items_of,
    require_bool,
    require_int,
    shown,
)
from jkv.contents import Contents
from jkv.errors import ConfigError, IntegrityError, OutOfPagesError, SequenceStateError
from jkv.events import Event, Journal
from jkv.eviction import Eviction
from jkv.holdings import Candidates, Host
from jkv.integrity import check_host
from jkv.layout import Layout, Pool, host_pages, make_layout
from jkv.ledger import Ledger
from jkv.pages import PagePool
from jkv.plan import NO_CANDIDATES, PlanBuilder
from jkv.radix import Match, Root
from jkv.ragged import Ragged, make_ragged
from jkv.resizing import graft, move_together, shrink
from jkv.routing import Routes
from jkv.sequence import WAITING, Sequence, find_everywhere, with_digest
from jkv.serial import changing, serialised
from jkv.sizing import Usage, advice, max_length
from jkv.state import CacheState, init_state, resized_state
from jkv.stats import CacheStats, Moves, PoolStats, TierStats, Work, WorkStats, since
from jkv.tiers.host import HostMemory
from jkv.tiers.keys import DIGEST_BYTES
from jkv.tiers.store import Store

NO_SCOPE = Scope()


class CacheManager:
    """Decides what is kept where, on the host; never looks at device data and never waits for the device.

    Args:
      config: the model's layers and the cache's budget.
      mesh: must be None: sharded pools are not supported.

    Calls from several threads, sequences' included, take place one at a time: `probe` may come from any thread while
    another drives the decode loop. Decisions depend only on the sequence of calls.

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
        tier = config.host_tier
        self._host_pages = host_pages(self.layout, tier)
        self._store = Store(config.store_tier, self.layout) if config.store_tier else None
        self._memory = HostMemory(self.layout, self._host_pages, tier.staging, self._store) if tier else None
        self._work, self._retried = (Work(len(self.layout.groups), retry) for retry in (False, True))
        self._released = False
        self._usage = Usage()
        self._lock = threading.RLock()
        self._contents = Contents(self._tokens_in_use)
        self._journal = Journal(config.events) if config.events else None
        self._taken: CacheStats | None = None
        moved = {(pool.name, host): Moves() for pool in self.layout.pools for host in (False, True)}
        self._take_over(self._fresh_host(), 0, moved)

    def _fresh_host(self) -> Host:
        layout = self.layout
        pools = [self._page_pool(pool) for pool in layout.pools]
        slots = np.zeros(layout.max_sequences, np.int32)
        tables = np.zeros((len(layout.attention_groups), layout.max_sequences, layout.max_pages), np.int32)
        candidates = Candidates.of(layout)
        builder = self._make_builder(layout, tables, slots, candidates)
        return Host(
            layout=layout,
            pools=pools,
            tree=self._make_tree(layout, pools, builder),
            model=self.config.model,
            contents=self._contents,
            work=self._work,
            retried=self._retried,
            builder=builder,
            rows=[None] * layout.max_sequences,
            free_rows=list(range(layout.max_sequences - 1, -1, -1)),
            tables=tables,
            slots=slots,
            candidates=candidates,
            scrub=self.config.scrub,
            scratch=self.config.window_scratch if any(g.window for g in layout.attention_groups) else None,
            ledger=Ledger(layout),
            usage=self._usage,
            sequences={},
            prompting={},
            shelf=self._store,
            memory=self._memory,
            lock=self._lock,
        )

    def _tokens_in_use(self) -> Iterator[np.ndarray]:
        """Everything that the symbols of contents may stand in."""
        for node in self._host.tree.nodes():
            yield node.tokens[: node.size]
        for seq in self._host.sequences:
            yield from seq._tokens_in_use()
        yield self._host.ledger.partial.reshape(-1)

    def _make_tree(self, layout: Layout, pools: list[PagePool], builder: PlanBuilder) -> Eviction:
        if self._journal is None:
            return Eviction(layout, pools, builder, self._store, self._contents.pairs)
        return Announcing(layout, pools, builder, self._store, self._contents.pairs, self._journal)

    def _make_builder(
        self, layout: Layout, tables: np.ndarray, slots: np.ndarray, candidates: Candidates | None
    ) -> PlanBuilder:
        shown = candidates.shown if candidates else NO_CANDIDATES
        return PlanBuilder(layout, tables, slots, shown, self._host_pages if self._memory else ())

    def _page_pool(self, pool: Pool) -> PagePool:
        below = PagePool(pool, num_pages=self._host_pages[pool.ordinal]) if self._memory else None
        return PagePool(pool, below)

    # --- state -------------------------------------------------------------------------------------------------

    def init(self) -> CacheState:
        """A fresh device state: all zeros, committed to the default device. Pass it through every step.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.init()
        CacheState(pools=[full: 16 pages in 1 layers, 0.0 MB], max_sequences=2)
        """
        return init_state(self.layout)

    @serialised
    def reset(self) -> CacheState:
        """The device state was lost, deleted or released: closes all sequences, forgets what the device held.

        As after a jitted step that failed once it had been given the donated state. Do not go on with the old one.
        What lies in host memory with all that comes before it stays reusable, and what is in the store.

        Also the only way on after a call of this manager or its sequences was cut short: an error of the device in
        `prepare`, a MemoryError, Ctrl-C. That has closed all sequences, and every call that needs what it may have left
        half done raises SequenceStateError. If it was not the device in `prepare`, host memory is forgotten as well.

        Returns:
          A fresh state of the same shapes: nothing recompiles.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> state = manager.reset()
        >>> seq.status
        <Status.CLOSED: 'closed'>
        """
        try:
            state = self.init()
        except BaseException as error:  # no room on the device yet: another reset may find it
            self._host.give_up(error, planned=True)
            raise
        self._forget_device()
        return state

    @changing
    def _forget_device(self) -> None:
        old = self._host
        for seq in list(old.sequences):
            seq._abandon()
        if old.unplanned:
            self._contents = Contents(self._tokens_in_use)
        new = self._fresh_host()
        new.tree.go_on_from(old.tree)
        if isinstance(new.tree, Announcing):
            new.tree.forget()
        if self._memory is not None and old.unplanned:
            self._memory.forget(self._host_pages)
        elif self._memory is not None:
            self._memory.wait()
            graft(old.tree, new.tree, {*old.builder.host_destinations(), *self._memory.lost})
        old.over = True
        self._take_over(new, *self._totals())
        self._released = False

    def _take_over(self, host: Host, snapshots_evicted: int, moved: dict[tuple[str, bool], Moves]) -> None:
        """From now on `host` is in charge; the others are totals of those before it."""
        batches, routes = Batches(host), Routes(host.tree)
        self._host, self._batches, self._routes = host, batches, routes
        self._snapshots_evicted, self._moved = snapshots_evicted, moved

    def _totals(self) -> tuple[int, dict[tuple[str, bool], Moves]]:
        """Snapshots evicted, and {(pool, in host memory): Moves}, this host's included."""
        tree = self._host.tree
        moved = {(pool.name, bool(pool.offset)): self._moves_of(pool) for pool in tree.all_pools()}
        return self._snapshots_evicted + tree.snapshots_evicted, moved

    def _moves_of(self, pool: PagePool) -> Moves:
        return self._moved[pool.name, bool(pool.offset)].with_those_of(pool)

    @changing
    def release(self, state: CacheState) -> None:
        """Gives the device's memory back, before training for instance; only `reset` is valid next.

        Closes all sequences, offloads what lower tiers take, has the store, if there is one, keep a copy of everything,
        waits until all has arrived, and deletes the state's arrays.

        Args:
          state: the latest state.

        Raises:
          SequenceStateError: the state was donated to an earlier call.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.release(manager.init())  # train
        >>> state = manager.reset()
        """
        self._check_state("release", state)
        for seq in list(self._host.sequences):
            seq.close()
        tree = self._host.tree
        if self._memory is not None:
            for pool in self._host.pools:
                tree.make_free(pool, pool.free + pool.evictable)
        if self._store is not None:
            tree.persist_all()
        try:
            if self._store is not None:
                self._store.patient = True
            state = self._carried_out(state)
            if self._memory is not None:
                self._memory.wait()
            if self._store is not None:
                self._store.flush()
        finally:
            if self._store is not None:
                self._store.patient = False
        self._released = True
        for array in jax.tree.leaves(state):
            array.delete()

    @changing
    def resize_tier(
        self, state: CacheState, tier: str, *, bytes: int | None = None, pages: int | Mapping[str, int] | None = None
    ) -> CacheState:
        """Another size for a tier. Shrinking evicts what is worth least; what still fits is still right.

        Args:
          state: the latest state; donated.
          tier: "device", "host" or "store".
          bytes, pages: as DeviceTier, HostTier and StoreTier take them; of the store bytes alone, None: no limit.

        Returns:
          The state from now on. With tier="device" its shapes are new, and steps compile anew.

        Raises:
          ConfigError: no such tier in the config, or a size that could never work.
          OutOfPagesError: what sequences hold or keep does not fit, or there is no such host memory. Nothing has
            changed. Where the device has no memory for its new pools, that is JAX's error, and only `reset` is valid.
          SequenceStateError: the state was donated to an earlier call.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state = manager.resize_tier(manager.init(), "device", pages=32)
        >>> manager.stats().pools["full"].total
        32
        """
        self._check_state("resize_tier", state)
        if not isinstance(tier, str):
            raise ConfigError(f"resize_tier: tier must be a str, got {shown(tier)}")
        if tier == "device":
            return self._resize_device(state, self._config_with(DeviceTier(bytes, pages)))
        if tier == "host" and self.config.host_tier is not None:
            return self._resize_host(state, HostTier(bytes, pages, self.config.host_tier.staging))
        if tier == "store" and self._store is not None:
            if pages is not None:
                raise ConfigError(f"resize_tier('store', pages={shown(pages)}): a store's size is bytes")
            self.config = self._config_with(StoreTier(self.config.store_tier.location, bytes))
            self._store.resize(bytes)
            return state
        tiers = [name for name, there in self._tiers() if there]
        raise ConfigError(f"resize_tier({shown(tier)}): the tiers are {', '.join(tiers)}")

    def _tiers(self) -> tuple[tuple[str, bool], ...]:
        return ("device", True), ("host", self._memory is not None), ("store", self._store is not None)

    def _config_with(self, tier: DeviceTier | HostTier | StoreTier) -> CacheConfig:
        """The config in which `tier` takes the place of the one of its kind."""
        order = (DeviceTier, HostTier, StoreTier)
        tiers = [old for old in self.config.tiers if type(old) is not type(tier)]
        tiers = sorted([*tiers, tier], key=lambda each: order.index(type(each)))
        return dataclasses.replace(self.config, tiers=tuple(tiers))

    def _resize_host(self, state: CacheState, tier: HostTier) -> CacheState:
        host, totals = self._host, host_pages(self.layout, tier)
        below = [pool.below for pool in host.pools]
        try:
            arenas = self._memory.arenas_for(totals)  # first: what comes next cannot be taken back
        except MemoryError as error:
            raise OutOfPagesError(f"host memory for {totals} pages, per pool, cannot be had") from error
        shrink(host, below, totals)
        state = self._carried_out(state)
        self._memory.resize(arenas, lambda: move_together(host, below, totals))
        host.builder.host_pages = totals
        self._host_pages, self.config = totals, self._config_with(tier)
        return state

    def _resize_device(self, state: CacheState, config: CacheConfig) -> CacheState:
        host, layout = self._host, make_layout(config)
        totals = [pool.num_pages for pool in layout.pools]
        shrink(host, host.pools, totals)
        state = self._carried_out(state)
        moved = move_together(host, host.pools, totals)
        state = resized_state(state, layout, moved)
        host.layout = layout
        self.layout, self.config = layout, config
        host.builder = self._make_builder(layout, host.tables, host.slots, host.candidates)
        host.tree.builder = host.builder
        host.builder.slots_changed = host.tree.state_pool is not None
        host.builder.candidates_changed = host.candidates is not None
        for seq in host.sequences:
            seq._mark_all()
        return state

    def _carried_out(self, state: CacheState) -> CacheState:
        """Applies what is pending."""
        if not self._host.builder.empty:
            plan = self._host.builder.build()
            try:
                state = apply(state, plan) if self._memory is None else self._memory.dispatch(state, plan)
            except Exception as error:
                self._host.give_up(error, planned=True)
                raise
            self._host.builder.clear()
        return state

    @changing
    def clear(self) -> None:
        """Drops everything reusable.

        Raises:
          SequenceStateError: sequences are open; nothing was dropped.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.clear()
        >>> manager.stats().pools["full"].free
        16
        """
        self._require_whole("clear")
        count = len(self._host.sequences)
        if count:
            raise SequenceStateError(f"clear: {count} sequences are open; close them first")
        self._host.tree.clear()

    # --- requests ----------------------------------------------------------------------------------------------

    @changing
    def open(
        self,
        tokens: Any = (),
        *,
        scope: Scope = NO_SCOPE,
        priority: int = 0,
        max_reuse: int | None = None,
        retry: bool = False,
        ttl: int | None = None,
    ) -> Sequence:
        """A new, suspended sequence that holds nothing until its first `resume`.

        Args:
          tokens: the prompt's host ids, int[n], or Tokens.
          scope: namespace of reuse.
          priority: what it commits is evicted after everything of lower priority.
          max_reuse: most tokens to reuse; None: n - 1, since a model needs one token to produce logits.
          retry: this work was done before and preempted: its lookup is not counted as one.
          ttl: steps, calls of `prepare` or `prepare_ragged`, after which what this sequence left or reused, and nobody
            has used since, is the first to go when room is needed. Until it goes it is found as ever. Of several who
            used it the longest time counts. None: no limit.

        Raises:
          ConfigError: bad ids, or a prompt longer than max_length.
          SequenceStateError: the device's memory was released, and not reset.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.open([3, 1, 4], priority=1)
        <Sequence suspended row=None committed=0 length=0 capacity=0>
        """
        self._require_whole("open")
        ids = self._prompt(tokens)
        self._check_scope(scope)
        if max_reuse is not None:
            require_int("max_reuse", max_reuse, 0)
        if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
            raise ConfigError(f"priority must be an int, got {shown(priority)}")
        seq = Sequence(self._host, ids, scope, int(priority), max_reuse, require_bool("retry", retry))
        if ttl is not None:
            seq._ttl = require_int("ttl", ttl, 1)
            self._host.tree.expiry.start()
        self._host.sequences[seq] = None
        return seq

    @serialised
    def probe(self, tokens: Any, *, scope: Scope = NO_SCOPE, max_reuse: int | None = None) -> Match:
        """What `open` with the same arguments would reuse now. Reads only.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.probe([3, 1, 4]).tokens
        0
        """
        self._require_whole("probe")
        ids = self._prompt(tokens)
        self._check_scope(scope)
        limit = max(0, len(ids) - 1) if max_reuse is None else min(require_int("max_reuse", max_reuse, 0), len(ids))
        root = self._host.root(scope)
        return with_digest(self._host, root, ids, find_everywhere(self._host, root, ids, limit))

    @serialised
    def block_digests(self, tokens: Any, scope: Scope = NO_SCOPE) -> tuple[bytes, ...]:
        """The keys of a prompt's whole pages: what the store, the events and `Match.first_new_digest` call them.

        SHA-256, chained: a digest stands for all tokens up to its page's end, their contents, the model and the scope.
        Processes with the same `model` and `page_size` come to the same ones; groups and layers are no part of them.

        Args:
          tokens: host ids, int[n], or Tokens.
          scope: namespace of reuse.

        Returns:
          n // page_size digests of 32 bytes.

        >>> import jkv, jax.numpy as jnp
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
        >>> one, two = manager.block_digests(range(8)), manager.block_digests(range(10))
        >>> len(two), one == two, one == manager.block_digests(range(8), jkv.Scope(salt=1))
        (2, True, False)
        """
        ids = self._contents.tokens(tokens)
        self._check_scope(scope)
        tree, size = self._host.tree, self.layout.page_size
        root = tree.scope_digest(self._host.root(scope))
        return tuple(tree.page_digests(root, ids[: len(ids) // size * size]))

    @serialised
    def probe_digests(self, digests: Iterable[bytes], scope: Scope = NO_SCOPE) -> Match:
        """`probe` for those who know a prompt by its `block_digests` alone, as routers do. Reads only.

        Args:
          digests: of the prompt's first whole pages, in order: a chain, as `block_digests` gives it. The store knows
            each by itself, so that of what is no chain it may promise more than any prompt finds.
          scope: namespace of reuse.

        Returns:
          What a request with these pages would reuse; all of them, if they are there.

        Raises:
          ConfigError: something else than digests, or more of them than a prompt of max_length has.

        >>> import jkv, jax.numpy as jnp
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
        >>> manager.probe_digests(manager.block_digests(range(8))).tokens
        0
        """
        self._require_whole("probe_digests")
        digests = [digests] if isinstance(digests, bytes) else items_of("probe_digests: digests", digests, "bytes")
        if not all(isinstance(digest, bytes) and len(digest) == DIGEST_BYTES for digest in digests):
            raise ConfigError(f"probe_digests: digests of {DIGEST_BYTES} bytes, as block_digests gives them")
        self._check_scope(scope)
        length = len(digests) * self.layout.page_size
        if length > self.layout.max_length:
            raise ConfigError(f"probe_digests: {length} tokens, max_length is {self.layout.max_length}")
        root = self._host.root(scope)
        match = find_everywhere(self._host, root, self._routes.tokens(root, digests), length, digests)
        page = match.tokens // self.layout.page_size
        first_new = digests[page] if page < len(digests) else None
        return dataclasses.replace(match, new_digest=lambda: first_new)

    @changing
    def new_epoch(self, model: str) -> None:
        """The weights are others from now on. `model` takes the place of the config's in every key.

        Nothing older is matched any more, in any tier. What no open sequence holds is freed at once; the store keeps
        its entries, which an epoch of their model finds again. Sequences that have been resumed go on, on what they
        have, and leave nothing behind; the others will match in the new epoch.

        Args:
          model: identity of the new weights. Without a store the name may be the old one.

        Raises:
          ConfigError: not a str; with a store an empty one, or that of now.
          SequenceStateError: the device's memory was released, and not reset.

        >>> import jkv, jax.numpy as jnp
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=(jkv.DeviceTier(pages=16),)))
        >>> manager.new_epoch("step 2000")
        >>> manager.config.model
        'step 2000'
        """
        host = self._host
        self._require_whole("new_epoch")
        if not isinstance(model, str):
            raise ConfigError(f"new_epoch: model must be a str, got {shown(model)}")
        if self._store is not None and model in ("", host.model):
            raise ConfigError(
                f"new_epoch({shown(model)}): the store would take the old weights' entries for the new ones'"
            )
        for seq in host.sequences:
            if seq._match is None:
                seq._move_to_root(Root(model, seq._scope.scope, host.tree.epoch + 1))
        host.tree.retire()
        host.model = model
        self.config = dataclasses.replace(self.config, model=model)

    def _prompt(self, tokens: Any) -> np.ndarray:
        ids = self._contents.tokens(tokens)
        if len(ids) > self.layout.max_length:
            raise ConfigError(f"a prompt of {len(ids)} tokens, max_length is {self.layout.max_length}")
        return ids.copy() if ids is tokens else ids

    def _check_scope(self, scope: Scope) -> None:
        if not isinstance(scope, Scope):
            raise ConfigError(f"scope must be a Scope, got {shown(scope)}")

    def max_length_for(self, batch_size: int) -> int:
        """The longest length, in tokens, up to which `batch_size` sequences can be decoded at once on the device.

        They share nothing, and none of them is suspended. 0: not even one token each, or more than max_sequences.

        >>> import jkv, jax.numpy as jnp
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 4, 64, page_size=4, tiers=(jkv.DeviceTier(pages=20),)))
        >>> manager.max_length_for(2), manager.max_length_for(4)
        (40, 20)
        """
        count = require_int("batch_size", batch_size, 1)
        return max_length(count, self.config, self.layout.pools, self.layout.groups)

    @serialised
    def rebalance_advice(self) -> Mapping[str, float] | None:
        """How the device's bytes had better be split, going by the capacity and length of sequences when they closed.

        Returns:
          {group: share of the bytes}, a `CacheConfig.pool_ratio`; groups that share a pool have equal parts of it.
          None: fewer than 2,000 sequences have closed since the last `rebalance`, each pool has what it should have
          within a factor of 1.25, or a sequence of max_length would not fit these bytes.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.rebalance_advice() is None  # nothing has closed yet
        True
        """
        return advice(self._usage, self._device_bytes(), self.config, self.layout.pools, self.layout.groups)

    @changing
    def rebalance(self, state: CacheState) -> CacheState:
        """Splits the bytes of the device, and those of host memory, as `rebalance_advice` says. All data stays right.

        What no longer fits a pool that gets smaller is evicted, as in `resize_tier`. Host memory stays as it is where
        what suspended sequences have there does not fit.

        Args:
          state: the latest state; donated if there is advice.

        Returns:
          The state from now on; with advice its shapes are new, and steps compile anew.

        Raises:
          OutOfPagesError: what sequences hold or keep on the device does not fit. Nothing has changed.
          SequenceStateError: the state was donated to an earlier call.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state = manager.init()
        >>> manager.rebalance(state) is state  # nothing has closed yet
        True
        """
        self._check_state("rebalance", state)
        ratio = self.rebalance_advice()
        if ratio is None:
            return state
        config = dataclasses.replace(self._config_with(DeviceTier(bytes=self._device_bytes())), pool_ratio=ratio)
        state = self._resize_device(state, config)
        self._usage.restart()
        tier = self.config.host_tier
        if tier is not None:
            size = sum(count * pool.page_bytes for count, pool in zip(self._host_pages, self.layout.pools, strict=True))
            with contextlib.suppress(OutOfPagesError):
                state = self._resize_host(state, HostTier(bytes=size, staging=tier.staging))
        return state

    def can_ever_fit(self, prompt_length: int, new_tokens: int) -> bool:
        """Whether an empty cache could serve this request alone: the prompt in one chunk, then token by token.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.can_ever_fit(60, 4), manager.can_ever_fit(60, 5)
        (True, False)
        """
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

    @changing
    def prepare(self, state: CacheState, sequences: Iterable[Sequence]) -> tuple[CacheState, np.ndarray]:
        """Applies all pending device work in one dispatch and puts the sequences' next step in flight.

        Args:
          state: the latest state; donated where there is work to do.
          sequences: active sequences of this manager, each once.

        Returns:
          The new state, and rows: int32[len(sequences)], in their order, for the model's step.

        Raises:
          SequenceStateError: a sequence is not active, of another manager or listed twice, or the state was donated.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, rows = manager.prepare(state, [seq])
        >>> rows
        array([0], dtype=int32)
        """
        batch = self._batches.of("prepare", sequences)
        return self._prepared(state, batch), batch.rows.astype(np.int32)

    @changing
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

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume(), seq.reserve(5)
        (True, True)
        >>> state, batch = manager.prepare_ragged(state, [seq], 5, pad_tokens=(4, 8), pad_sequences=2)
        >>> batch.positions
        array([ 0,  1,  2,  3,  4, -1, -1, -1], dtype=int32)
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
        self._check_state("prepare", state)
        if self._host.candidates is not None:
            self._batches.show_candidates(batch)
        self._host.tree.expiry.step += 1
        for pool in self._host.pools:
            pool.note_peak()
        state = self._carried_out(state)
        self._batches.put_in_flight(batch)
        return state

    @serialised
    def warmup(self, state: CacheState) -> None:
        """Compiles every variant of `prepare` up front: afterwards traffic compiles nothing but the model's own steps.

        They are two for `prepare`, and with host memory two more for each pool. Nothing runs on the device: `state` is
        as it was. Other threads wait meanwhile. New shapes, as after `rebalance` or `resize_tier` of the device, are to
        be warmed up anew.

        Args:
          state: the latest state; not donated.

        Raises:
          SequenceStateError: the state is another manager's, or was donated to an earlier call.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state = manager.init()
        >>> manager.warmup(state)
        """
        self._check_state("warmup", state)
        compile_apply(state, self._host.builder.blank())
        if self._memory is not None:
            self._memory.compile(state)

    # Many sequences at once: the outcome of the sequences' own calls, at a cost that hardly depends on their number.

    @changing
    def reserve(self, sequences: Iterable[Sequence], counts: Any) -> int:
        """`Sequence.reserve` for each in order, until one finds no room. Room is made for all at once where it can be.

        Args:
          sequences: active sequences of this manager, each once.
          counts: int[n]: tokens for each; an int: as many for each.

        Returns:
          How many of them, from the first on, have room now. The others are unchanged.

        Raises:
          ConfigError: wrong counts.
          OutOfPagesError: not even an empty cache could give one what it asks for; those before it have room.
          SequenceStateError: a sequence is not active, of another manager or listed twice.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seqs = manager.init(), [manager.open([1, 2]), manager.open([3, 4])]
        >>> [seq.resume() for seq in seqs]
        [True, True]
        >>> manager.reserve(seqs, 2)
        2
        >>> [seq.capacity for seq in seqs]
        [2, 2]
        """
        return self._batches.reserve(sequences, counts)

    @changing
    def advance(self, sequences: Iterable[Sequence], counts: Any) -> None:
        """`Sequence.advance` for each, all or none.

        Args:
          sequences: active sequences of this manager, each once.
          counts: int[n]: tokens that the step wrote of each; an int: as many of each.

        Raises:
          ConfigError: wrong counts.
          SequenceStateError: as `Sequence.advance`, or a sequence is listed twice. Nothing has changed then.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seqs = manager.init(), [manager.open([1, 2]), manager.open([3, 4])]
        >>> [seq.resume() for seq in seqs]
        [True, True]
        >>> manager.reserve(seqs, 2)
        2
        >>> state, rows = manager.prepare(state, seqs)
        >>> manager.advance(seqs, 2)
        >>> [seq.length for seq in seqs]
        [2, 2]
        """
        self._batches.advance(sequences, counts)

    @changing
    def commit(self, sequences: Iterable[Sequence], tokens: Any, lengths: Any) -> None:
        """`Sequence.commit` for each, all or none.

        Args:
          sequences: active sequences of this manager, each once.
          tokens: host ids, int[sum of lengths], or Tokens: the sequences' tokens back to back.
          lengths: int[n]: tokens of each; an int: as many of each.

        Raises:
          ConfigError: wrong ids or lengths.
          SequenceStateError: as `Sequence.commit`, or a sequence is listed twice. Nothing has changed then.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seqs = manager.init(), [manager.open([1, 2]), manager.open([3, 4])]
        >>> [seq.resume() for seq in seqs]
        [True, True]
        >>> manager.reserve(seqs, 2)
        2
        >>> state, rows = manager.prepare(state, seqs)
        >>> manager.commit(seqs, [1, 2, 3, 4], 2)
        >>> [seq.committed for seq in seqs]
        [2, 2]
        """
        self._batches.commit(sequences, tokens, lengths)

    def _require_whole(self, operation: str) -> None:
        """Raises where nothing but `reset` is valid."""
        self._host.require_whole(operation)
        if self._released:
            raise SequenceStateError(f"{operation}: the device's memory was released; call reset first")

    def _check_state(self, operation: str, state: CacheState) -> None:
        self._require_whole(operation)
        if not isinstance(state, CacheState) or state.layout is not self.layout:
            raise SequenceStateError(f"{operation}: this state was not made by this manager's init")
        # one array of each part that a call donates as a whole
        (first_buffer, *_) = state.pools[0][0].values()
        for array in (first_buffer, *state.page_tables.values(), *state.state_slots.values()):
            if array.is_deleted():
                raise SequenceStateError(
                    f"{operation}: this state was donated to an earlier call; pass the state that call returned"
                )

    # --- looking at it -----------------------------------------------------------------------------------------

    @serialised
    def stats(self) -> CacheStats:
        """Totals since the manager was made, and what there is now.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.stats().pools["full"].free
        16
        """
        host = self._host
        tiers = {"device": self._tier_stats(host.pools, self._device_bytes())}
        if self._memory is not None:
            below = [pool.below for pool in host.pools]
            tiers["host"] = self._tier_stats(below, self._memory.bytes, self._memory.failures)
        if self._store is not None:
            tiers["store"] = TierStats(**vars(self._store.stats()))
        suspended = sum(seq.status in WAITING for seq in host.sequences)
        work, retried = self._work_of(self._work), self._work_of(self._retried)
        return CacheStats(
            **work.fields(self.layout),
            retried=WorkStats(**retried.fields(self.layout)),
            snapshots_evicted=self._snapshots_evicted + host.tree.snapshots_evicted,
            evicted_pages=tiers["device"].evicted,
            pools=tiers["device"].pools,
            tiers=tiers,
            active=host.active,
            suspended=suspended,
        )

    @serialised
    def take_stats(self) -> CacheStats:
        """`stats` of the time since the last call, or since the manager was made: of totals the differences.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> state, seq = manager.init(), manager.open([3, 1, 4, 1, 5])
        >>> seq.resume()
        True
        >>> manager.take_stats().lookups, manager.take_stats().lookups
        (1, 0)
        """
        now, before = self.stats(), self._taken
        self._taken = now
        for pool in self._host.tree.all_pools():
            pool.peak = 0
        return copy.deepcopy(now) if before is None else since(now, before)

    def _work_of(self, closed: Work) -> Work:
        """`closed`, and what open sequences did."""
        work = Work(len(self.layout.groups))
        work.add(closed)
        for seq in self._host.sequences:
            if seq._work.retry == closed.retry:
                work.add(seq._work)
        return work

    def _device_bytes(self) -> int:
        return sum(pool.num_rows * pool.page_bytes for pool in self.layout.pools)

    def _tier_stats(self, pools: list[PagePool], limit: int, failures: Mapping[str, int] | None = None) -> TierStats:
        moves = {pool.name: self._moves_of(pool) for pool in pools}
        used = 0
        for pool, geometry in zip(pools, self.layout.pools, strict=True):
            used += (pool.total - pool.free) * geometry.page_bytes
        return TierStats(
            bytes=used,
            limit=limit,
            pools={pool.name: _pool_stats(pool) for pool in pools},
            evicted={name: each.evicted for name, each in moves.items()},
            offloaded={name: each.offloaded for name, each in moves.items()},
            onboarded={name: each.onboarded for name, each in moves.items()},
            failures=dict(failures or {}),
        )

    @serialised
    def take_events(self, *, replay: bool = False) -> tuple[Event, ...]:
        """What became reusable, moved or was lost since the last call, oldest first. Tails are left out.

        What the store's writers, this one and others, did is noticed here, so it may come later than it happened.

        Args:
          replay: instead of what happened, what there is now: "cleared", then everything as "stored", parents first.
            For a listener that starts, or that has lost some.

        Raises:
          ConfigError: `CacheConfig.events` is 0.

        >>> import jkv, jax.numpy as jnp
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
        >>> tiers = (jkv.DeviceTier(pages=16),)
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=tiers, events=1000))
        >>> state = manager.init()
        >>> with manager.open([1, 2, 3, 4, 5]) as seq:
        ...     _ = seq.resume(), seq.reserve(5)
        ...     state, rows = manager.prepare(state, [seq])
        ...     seq.commit([1, 2, 3, 4, 5])
        >>> [(event.kind, event.group, event.tokens) for event in manager.take_events()]
        [('stored', 'full', (1, 2, 3, 4))]
        """
        tree = self._host.tree
        require_bool("take_events: replay", replay)
        if not isinstance(tree, Announcing):
            raise ConfigError("take_events: CacheConfig.events is 0; set it to how many may wait to be taken")
        settled = self._host.builder.empty and (self._memory is None or self._memory.idle)
        if not self._host.broken:
            tree.look_into_store(settled)
        return self._journal.replay() if replay else self._journal.take()

    @serialised
    def check(self) -> None:
        """Full integrity check: tree structure, ownership, free lists, tables, counters against a recount.

        Raises:
          IntegrityError: names the broken invariant, or what cut an earlier call short.

        >>> import jkv
        >>> layers = {"attn": jkv.AttentionLayer(jkv.kv_buffers(1, 8))}
        >>> manager = jkv.CacheManager(jkv.CacheConfig(layers, 2, 64, page_size=4, tiers=jkv.DeviceTier(pages=16)))
        >>> manager.check()
        """
        if self._host.broken:
            raise IntegrityError(f"an earlier call was cut short by {self._host.broken}; call reset")
        check_host(self._host)


def _pool_stats(pool: PagePool) -> PoolStats:
    return PoolStats(pool.total, pool.free, pool.tree, pool.private, pool.evictable, pool.peak, pool.page_bytes)


def _bucket(field: str, sizes: int | Iterable[int], needed: int) -> int:
    """The smallest of `sizes` that holds `needed`."""
    several = items_of(field, sizes, "ints") if isinstance(sizes, Iterable) else [sizes]
    buckets = sorted(require_int(field, size, 1) for size in several)
    for size in buckets:
        if size >= needed:
            return size
    raise ConfigError(f"prepare_ragged: {field}={buckets} is too small for {needed}")
