"""Speculation: drafts that a verify step may reject, where a recurrent state cannot be taken back.

A verify step leaves a state after its input token and after each draft, in the *current* one of the row's two sets of
candidate slots. It starts from the accepted candidate of the step before it, in the *previous* set:

    slots of a row   live: L     set A: a b c     set B: d e f

    prepare          previous    current
    step 1           L  L  L     a  b  c
    step 2           a  b  c     d  e  f       step 1 is in flight: only the device knows what was accepted
    accept(1)                                  b is the live state, L takes its place in set A
    step 3           d  e  f     a  L  c
    accept(0)                                  d is the live state, b takes its place in set B
    accept(2)                                  c is the live state, d takes its place in set A
    step 4           c  c  c     a  L  d       nothing is in flight: any index reads the live state

Models that cannot leave such states keep a copy of the live one, a `Mark`, and go back to it. The host half of jkv:
NumPy only.
"""

from __future__ import annotations

from jkv.errors import SequenceStateError
from jkv.holdings import Host
from jkv.radix import NO_SLOT, Root
from jkv.room import Room

STEPS_IN_FLIGHT = 2  # one for each set of candidates


class Mark:
    """A length to which a sequence can be rolled back; from `Sequence.checkpoint`.

    Attributes:
      position: that length, in tokens.
    """

    __slots__ = ("position", "slot")

    def __init__(self, position: int, slot: int):
        self.position = position
        self.slot = slot  # the copy of the state; NO_SLOT without recurrent layers

    def __repr__(self) -> str:
        return f"<Mark at {self.position}>"


class Speculation(Room):
    """The steps in flight, candidates and marks of one sequence."""

    # Here and not in __init__: from 31 attributes on CPython gives each instance a hash table of its own for them.
    _steps_in_flight = 0  # counted with candidates only: without, a step is reported before the next one
    _current = 0  # the set of candidates that the last prepared step writes

    def __init__(self, host: Host, scope: Root, priority: int):
        super().__init__(host, scope, priority)
        self._marks: list[Mark] = []

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def _next_set(self) -> int:
        """The set of candidates that the next step writes."""
        return self._current ^ 1 if self._steps_in_flight else self._current

    def _require_free_set(self) -> None:
        if self._steps_in_flight == STEPS_IN_FLIGHT and self._capacity > self._length:
            raise SequenceStateError(
                f"prepare: {self!r} has {STEPS_IN_FLIGHT} verify steps in flight and no third set of candidate slots; "
                "report the first one with accept"
            )

    def _show_candidates(self) -> None:
        """The next plan says where the step to be prepared finds its states."""
        candidates, builder, row = self._host.candidates, self._host.builder, self.row
        if candidates is None or self._capacity == self._length:
            return
        sets, shown = candidates.sets[row], candidates.shown[row]
        shown[0] = sets[self._current] if self._steps_in_flight else self._slot
        shown[1] = sets[self._next_set]
        builder.candidates_changed = True

    def _put_in_flight(self) -> None:
        """`prepare` has listed this sequence: a step may be dispatched now."""
        self._reserved = self._capacity
        if self._capacity > self._length:
            self._in_flight = True
            if self._host.candidates is not None:
                self._current = self._next_set
                self._steps_in_flight += 1

    def _land(self) -> None:
        """No step is in flight any more."""
        self._in_flight = False
        if self._steps_in_flight:
            self._steps_in_flight = 0

    def _adopt(self, j: int) -> None:
        """Candidate `j` of the oldest step in flight becomes the live state."""
        if self._host.candidates is not None:
            oldest = self._host.candidates.sets[self.row, self._current ^ (self._steps_in_flight - 1)]
            slot, oldest[j] = int(oldest[j]), self._slot
            self._set_slot(slot)
        self._steps_in_flight = max(0, self._steps_in_flight - 1)
        self._in_flight = self._steps_in_flight > 0

    # --- marks -------------------------------------------------------------------------------------------------------

    def _end_marks(self, first: int, stop: int | None = None) -> None:
        """Marks at positions in [first, stop) are good no more."""
        ended = [mark for mark in self._marks if first <= mark.position and (stop is None or mark.position < stop)]
        for mark in ended:
            self._marks.remove(mark)
            self._free_slot(mark.slot)

    def _restore(self, mark: Mark) -> None:
        """The state that `mark` keeps becomes the live one."""
        self._marks.remove(mark)
        if mark.slot == NO_SLOT:
            return
        if self._lent is not None:
            self._host.tree.unpin(self._lent)
            self._lent = None
        else:
            self._free_slot(self._slot)
        self._set_slot(mark.slot)
