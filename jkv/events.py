"""Events: what became reusable, moved and was lost, for those who keep a picture of the cache elsewhere.

A router that applies them, in order, to a dictionary by (group, digest) has what `CacheManager.probe` would find, in
pages: full attention needs all pages of a prefix, a window the last ones, recurrent layers a snapshot at its end.

    stored    (group, digest) can be reused          moved      its best copy is in another tier now
    removed   its last copy is gone                  cleared    everything is gone
    lost      the buffer was full: what happened before this event is not known

The host half of jkv: NumPy only.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from jkv.config import Scope

NO_DIGEST = b""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; see `CacheManager.take_events`.

    Attributes:
      id: counts up by one from event to event, over those that were dropped as well.
      kind: "stored", "removed", "moved", "cleared" or "lost".
      group: "full", "window:W", "recurrent".
      tier: where its best copy is now; of what was removed, where it was.
      scope: namespace of reuse; None where it is not known.
      digest: 32 bytes that stand for all tokens up to `position`: those of `CacheManager.block_digests`, or of a prefix
        that ends inside a page.
      parent: the digest of the page before, or of the scope. b"" where it is not known.
      tokens: ids of the tokens between `parent` and `position`; () where they are not known.
      position: tokens up to the end of the page, or at the snapshot; 0 where it is not known.

    What only the store has when a manager starts, or what another process puts there, is known by its digest alone.

    >>> Event(7, "cleared").kind
    'cleared'
    """

    id: int
    kind: str
    group: str = ""
    tier: str = ""
    scope: Scope | None = None
    digest: bytes = NO_DIGEST
    parent: bytes = NO_DIGEST
    tokens: tuple[int, ...] = ()
    position: int = 0


class Journal:
    """What there is, as announced, and the events that are not taken yet.

    Args:
      limit: events that are kept; beyond that the oldest are dropped.

    >>> journal = Journal(limit=2)
    >>> for digest in (b"a", b"b", b"c"):
    ...     journal.there(Event(0, "stored", "full", "device", digest=digest))
    >>> [(event.id, event.kind, event.digest) for event in journal.take()]
    [(0, 'lost', b''), (1, 'stored', b'b'), (2, 'stored', b'c')]
    >>> journal.gone("full", b"b")
    >>> [(event.kind, event.digest) for event in journal.replay()]
    [('cleared', b''), ('stored', b'a'), ('stored', b'c')]
    """

    def __init__(self, limit: int):
        self._events: deque[Event] = deque(maxlen=limit)
        self._present: dict[tuple[str, bytes], Event] = {}  # parents first
        self._next_id = 0
        self._taken = 0  # ids below were taken

    def _note(self, event: Event, kind: str) -> Event:
        event = dataclasses.replace(event, id=self._next_id, kind=kind)
        self._next_id += 1
        self._events.append(event)
        return event

    def tier(self, group: str, digest: bytes) -> str | None:
        """Where it was announced to be; None: it is not there."""
        event = self._present.get((group, digest))
        return None if event is None else event.tier

    def in_memory(self) -> list[Event]:
        """What is on the device or in host memory, children first."""
        return [event for event in reversed(self._present.values()) if event.tier != "store"]

    def there(self, event: Event) -> None:
        """It is in `event.tier` now, wherever it was before."""
        key = event.group, event.digest
        before = self._present.get(key)
        if before is None:
            self._present[key] = self._note(event, "stored")
        elif before.tier != event.tier:
            if before.parent == NO_DIGEST:  # the store's: more is known now, and it comes behind its parent
                del self._present[key]
            else:
                event = dataclasses.replace(before, tier=event.tier)
            self._present[key] = self._note(event, "moved")

    def moved(self, group: str, digest: bytes, tier: str) -> None:
        """It has moved to `tier`."""
        before = self._present[group, digest]
        if before.tier != tier:
            self._present[group, digest] = self._note(dataclasses.replace(before, tier=tier), "moved")

    def gone(self, group: str, digest: bytes) -> None:
        """Its last copy is gone."""
        self._note(self._present.pop((group, digest)), "removed")

    def clear(self) -> None:
        """Everything is gone."""
        self._present.clear()
        self._note(Event(0, "cleared"), "cleared")

    def take(self) -> tuple[Event, ...]:
        """The events since the last call; the first one is "lost" where some are missing."""
        events = tuple(self._events)
        first = events[0].id if events else self._next_id
        if first > self._taken:
            events = (Event(first - 1, "lost"), *events)
        self._forget()
        return events

    def replay(self) -> tuple[Event, ...]:
        """What there is, as events: "cleared", then all of it as "stored", parents first."""
        first, events = self._next_id, [Event(0, "cleared"), *self._present.values()]
        self._next_id += len(events)
        self._forget()
        kinds = ["cleared"] + ["stored"] * len(self._present)
        return tuple(
            dataclasses.replace(event, id=first + i, kind=kind)
            for i, (event, kind) in enumerate(zip(events, kinds, strict=True))
        )

    def _forget(self) -> None:
        self._events.clear()
        self._taken = self._next_id
