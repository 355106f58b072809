"""Expiry: logical time, and what is kept for a number of steps only."""

from __future__ import annotations

import heapq
from typing import Any

NEVER = 2**62  # a step that is not reached


class Expiry:
    """A clock of steps, and a heap of what outlives its time when.

    Attributes:
      step: so far.
      on: whether somebody uses a time to live.
      first: when new items expire until somebody says otherwise: NEVER, or, once this is on, at once.

    >>> expiry = Expiry()
    >>> expiry.start(); expiry.note("a", 5); expiry.note("b", 3)
    >>> expiry.step = 4
    >>> list(expiry.due())
    ['b']
    """

    def __init__(self) -> None:
        self.step = 0
        self.on = False
        self.first = NEVER
        self._heap: list[tuple[int, int, Any]] = []
        self._notes = 0

    def start(self) -> None:
        """Somebody uses a time to live."""
        self.on, self.first = True, 0

    def note(self, item: Any, step: int) -> None:
        """`item` may expire at `step`, if nobody renews it."""
        self._notes += 1
        heapq.heappush(self._heap, (step, self._notes, item))

    def clear(self) -> None:
        """Nothing of it is there any more; time goes on."""
        self._heap.clear()

    def due(self) -> Any:
        """Takes out what may have expired by now."""
        while self._heap and self._heap[0][0] <= self.step:
            yield heapq.heappop(self._heap)[2]
