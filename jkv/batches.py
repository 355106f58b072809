"""Batch verbs: reserve, advance and commit of many sequences in one call.

Where no sequence needs, fills or loses a page they are a few NumPy operations on the `Ledger`, whatever the batch's
size. So is one more page for each of many. The others go through their own methods, one by one. The outcome is that of
the sequences' own calls in order, except that room is made for all pages at once. The host half of jkv: NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np

from jkv.config import as_counts, items_of
from jkv.errors import CacheError, ConfigError, SequenceStateError
from jkv.holdings import Host
from jkv.sequence import Sequence, Status
from jkv.stats import ALLOCATED, PER_GROUP

_row = attrgetter("row")


class Batch(NamedTuple):
    """Distinct active sequences of one manager."""

    sequences: list[Sequence]
    rows: np.ndarray  # intp[n]: the kind of index that NumPy takes as it is
    row_changes: int  # Host.row_changes when this was found to be so


class Batches:
    """The batch verbs on one manager's sequences."""

    def __init__(self, host: Host):
        self._host = host
        self._last = Batch([], np.zeros(0, np.intp), 0)
        self._counters = [PER_GROUP * group.ordinal + ALLOCATED for group in host.tree.groups]

    # --- who -----------------------------------------------------------------------------------------------------

    def of(self, operation: str, sequences: Iterable[Sequence]) -> Batch:
        """The sequences as a Batch; every one must be active, ours and listed once.

        Raises:
          ConfigError: not an iterable of sequences.
          SequenceStateError: one is not active, of another manager, or listed twice.
        """
        self._host.require_whole(operation)
        listed = items_of(f"{operation}: sequences", sequences, "sequences")
        last = self._last
        if last.row_changes == self._host.row_changes and _same(listed, last.sequences):
            return last
        owners = self._host.rows
        try:
            rows = list(map(_row, listed))
            ours = all(map(is_, map(owners.__getitem__, rows), listed))
        except (AttributeError, TypeError, IndexError):
            ours = False
        if not ours:
            raise self._refusal(operation, listed)
        if len(set(rows)) != len(rows):
            raise SequenceStateError(f"{operation}: a sequence is listed twice; rows {rows}")
        self._last = Batch(listed, np.array(rows, np.intp), self._host.row_changes)
        return self._last

    def _refusal(self, operation: str, listed: list[Any]) -> CacheError:
        for i, seq in enumerate(listed):
            if not isinstance(seq, Sequence):
                return ConfigError(f"{operation}: sequences[{i}] is a {type(seq).__name__}, not a Sequence")
            if seq.status is not Status.ACTIVE:
                return SequenceStateError(f"{operation}: sequences[{i}], {seq!r}, is not active")
            if seq not in self._host.sequences:
                break
        return SequenceStateError(f"{operation}: sequences[{i}], {seq!r}, belongs to another manager")

    def _entered(self, batch: Batch) -> np.ndarray:
        """The batch's rows, all of them in the ledger."""
        alone = self._alone(batch)
        if alone:
            owners = [batch.sequences[i] for i in alone]
            entries = [seq._entry() for seq in owners]
            self._host.ledger.enter(batch.rows[alone], entries, [seq._in_flight for seq in owners])
            for seq in owners:
                seq._enter()
        return batch.rows

    def _alone(self, batch: Batch) -> list[int]:
        """Indices of the sequences whose lengths are not in the ledger."""
        if self._host.ledger.count == self._host.active:
            return []
        entered = self._host.ledger.entered.take(batch.rows)
        return [] if entered.all() else np.flatnonzero(~entered).tolist()

    def lengths(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] each: the sequences' lengths and capacities."""
        ledger, rows = self._host.ledger, self._entered(batch)
        return ledger.length.take(rows), ledger.capacity.take(rows)

    def show_candidates(self, batch: Batch) -> None:
        """The next plan tells the step of these sequences where its recurrent states lie (with max_drafts)."""
        for seq in batch.sequences:
            seq._take_back()
            seq._require_free_set()
        for seq in batch.sequences:
            seq._show_candidates()

    def put_in_flight(self, batch: Batch) -> None:
        """A step of these sequences may be dispatched now."""
        if self._host.ledger.count == 0:
            for seq in batch.sequences:
                seq._put_in_flight()
            return
        rows, alone = batch.rows, self._alone(batch)
        for i in alone:
            batch.sequences[i]._put_in_flight()
        self._host.ledger.put_in_flight(np.delete(rows, alone) if alone else rows)

    # --- verbs ---------------------------------------------------------------------------------------------------

    def reserve(self, sequences: Iterable[Sequence], counts: Any) -> int:
        """See `CacheManager.reserve`."""
        batch = self.of("reserve", sequences)
        counts = as_counts("reserve", "counts", counts, len(batch.sequences))
        ledger, rows = self._host.ledger, self._entered(batch)
        capacity = ledger.length.take(rows) + counts
        fits = ledger.fits(rows, capacity)
        if not fits.all() and self._append_pages(batch, np.flatnonzero(~fits), capacity):
            fits[:] = True
        if fits.all():
            ledger.capacity[rows] = capacity
            return len(rows)
        done = 0
        try:
            for i in np.flatnonzero(~fits).tolist():
                done = i
                if not batch.sequences[i].reserve(int(counts[i])):
                    break
            else:
                done = len(rows)
        finally:
            fits[done:] = False
            ledger.capacity[rows[fits]] = capacity[fits]
        return done

    def _append_pages(self, batch: Batch, at: np.ndarray, capacity: np.ndarray) -> bool:
        """One more page in every group for each of the batch's sequences `at`.

        Returns:
          False: for capacity[at] that is not what some of them need, or there is not enough room. Nothing changed.
        """
        host, tree, ledger = self._host, self._host.tree, self._host.ledger
        if host.scratch is not None:  # then windows get and lose other pages
            return False
        rows, capacity = batch.rows[at], capacity[at]
        columns = ledger.num_pages.take(rows)
        one_more = -(-capacity // ledger.page_size) == columns + 1
        one_more &= (columns >= 0) & (capacity <= ledger.max_length)
        counts = [0] * len(host.pools)
        for group in tree.groups:
            counts[group.pool] += len(at)
        if not one_more.all() or not tree.can_allocate(counts):
            return False
        for pool, count in zip(host.pools, counts, strict=True):
            if not count:
                continue
            pages = host.allocate(pool, count)
            groups = [group.ordinal for group in tree.groups if group.pool == pool.ordinal]
            for g, column in zip(groups, pages.reshape(len(at), -1).T, strict=True):  # to each sequence in turn
                host.tables[g, rows, columns] = column
                host.builder.mark_each(g, rows, columns)
        ledger.num_pages[rows] += 1
        for i in at.tolist():
            taken = batch.sequences[i]._work.pages
            for counter in self._counters:
                taken[counter] += 1
        return True

    def advance(self, sequences: Iterable[Sequence], counts: Any) -> None:
        """See `CacheManager.advance`."""
        batch = self.of("advance", sequences)
        counts = as_counts("advance", "counts", counts, len(batch.sequences))
        ledger, rows = self._host.ledger, self._entered(batch)
        length = ledger.length.take(rows) + counts
        simple = self._is_arithmetic(rows, length, counts)
        others = self._others(batch, simple)
        for i in others:
            batch.sequences[i]._require_prepared("advance", int(counts[i]))
        if others:
            rows, length = rows[simple], length[simple]
        ledger.length[rows] = length
        ledger.in_flight[rows] = False
        for i in others:
            batch.sequences[i].advance(int(counts[i]))

    def commit(self, sequences: Iterable[Sequence], tokens: Any, lengths: Any) -> None:
        """See `CacheManager.commit`."""
        batch = self.of("commit", sequences)
        counts = as_counts("commit", "lengths", lengths, len(batch.sequences))
        tokens = self._host.contents.tokens(tokens)
        if len(tokens) != counts.sum():
            raise ConfigError(f"commit: {len(tokens)} tokens for lengths that sum to {counts.sum()}")
        ledger, rows = self._host.ledger, self._entered(batch)
        committed, length = ledger.committed.take(rows) + counts, ledger.length.take(rows)
        ahead = np.maximum(committed - length, 0)
        allowed = self._is_arithmetic(rows, length + ahead, ahead) & (ledger.num_pages.take(rows) >= 0)
        others = self._others(batch, allowed)
        for i in others:
            batch.sequences[i]._require_committable(int(counts[i]))
        if ahead.any():
            moved = allowed & (ahead > 0)
            ledger.length[rows[moved]] += ahead[moved]
            ledger.in_flight[rows[moved]] = False
        simple = allowed & (committed < ledger.commit_mark.take(rows))
        if simple.all():
            ledger.note(rows, tokens, counts)
            return
        stops = np.cumsum(counts).tolist()
        parts = [tokens[a:b] for a, b in zip([0, *stops], stops, strict=False)]
        ledger.note(rows[simple], tokens[np.repeat(simple, counts)], counts[simple])
        for i in np.flatnonzero(~simple).tolist():
            seq = batch.sequences[i]
            if not allowed[i] or not seq._commit_in_ledger(parts[i]):
                seq._take_back()
                seq._commit(parts[i])

    def _is_arithmetic(self, rows: np.ndarray, length: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """bool[n]: whether moving to `length`, by `moved`, is allowed and nothing but arithmetic."""
        ledger = self._host.ledger
        allowed = length <= ledger.reserved.take(rows)
        allowed &= length <= ledger.capacity.take(rows)
        if self._host.tree.state_pool is not None:
            allowed &= ledger.in_flight.take(rows)
        allowed |= moved == 0
        allowed &= length < ledger.length_mark.take(rows)
        return allowed

    def _others(self, batch: Batch, simple: np.ndarray) -> list[int]:
        """Indices of the sequences that go through their own methods; they leave the ledger."""
        if simple.all():
            return []
        others = np.flatnonzero(~simple).tolist()
        for i in others:
            batch.sequences[i]._take_back()
        return others


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
