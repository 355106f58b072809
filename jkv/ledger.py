"""Ledger: the lengths of active sequences as arrays by row, for calls that move a whole batch at once.

A sequence's lengths are its own attributes until a batch verb enters it here. From then on its row of the ledger is
what counts, and three marks say up to where moving a length is arithmetic and nothing else:

    committed ......... length ......... capacity
              < commit_mark    < length_mark     in num_pages pages      beyond: more than arithmetic

What fills a page or needs one goes through the sequence one by one, but may leave it here. The first call on the
sequence alone takes it back. The host half of jkv: NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jkv.layout import Layout


class Entry(NamedTuple):
    """What a sequence enters with; the names are those of Ledger's arrays."""

    committed: int
    length: int
    capacity: int
    reserved: int
    commit_mark: int
    length_mark: int
    num_pages: int


class Ledger:
    """Arrays by row; a row counts where `entered`.

    Args:
      layout: the cache's geometry.

    Attributes:
      committed, length, capacity, reserved: int64[rows], as the sequence's own.
      in_flight: bool[rows].
      commit_mark: committing up to here publishes something, lets a window slide or ends a mark.
      length_mark: advancing up to here keeps a state, or more.
      num_pages: int64[rows], pages that the capacity takes; another number of pages is not arithmetic. -1: every call
        is more than arithmetic.
      partial: int32[rows, page_size], committed tokens of the last page.
    """

    def __init__(self, layout: Layout):
        rows, self.page_size, self.max_length = layout.max_sequences, layout.page_size, layout.max_length
        self._values = np.zeros((len(Entry._fields), rows), np.int64)
        self.committed, self.length, self.capacity, self.reserved = self._values[:4]
        self.commit_mark, self.length_mark, self.num_pages = self._values[4:]
        self.in_flight, self.entered = np.zeros((2, rows), bool)
        self.partial = np.zeros((rows, self.page_size), np.int32)
        self.count = 0  # rows entered

    def enter(self, rows: np.ndarray, entries: list[Entry], in_flight: list[bool]) -> None:
        """From now on these rows count, which did not."""
        self._values[:, rows] = np.array(entries, np.int64).T
        self.in_flight[rows] = in_flight
        self.entered[rows] = True
        self.count += len(rows)

    def fits(self, rows: np.ndarray, capacity: np.ndarray) -> np.ndarray:
        """bool[n]: whether these capacities take the pages that the rows have, no more and no fewer."""
        room = self.num_pages.take(rows) * self.page_size
        fits = capacity <= room
        fits &= capacity > room - self.page_size
        if self.max_length % self.page_size:
            fits &= capacity <= self.max_length
        return fits

    def put_in_flight(self, rows: np.ndarray) -> None:
        """A step of these rows may be dispatched now."""
        capacity = self.capacity.take(rows)
        self.reserved[rows] = capacity
        writes = capacity > self.length.take(rows)
        self.in_flight[rows if writes.all() else rows[writes]] = True

    def note(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """The next counts[i] committed tokens of rows[i], back to back in `tokens`; none of them fills a page."""
        at = self.committed.take(rows)
        if (counts == 1).all():  # decode
            self.partial[rows, at % self.page_size] = tokens
        else:
            first = np.cumsum(counts) - counts
            at = np.repeat(at - first, counts) + np.arange(len(tokens))
            self.partial[np.repeat(rows, counts), at % self.page_size] = tokens
        self.committed[rows] += counts
