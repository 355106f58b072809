"""Groups and pools: which layers live together, and whose arrays they share. Static and hashable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jkv.config import Buffer

INT32_MAX = 2**31 - 1

# A place is where a page, or a state, lies: its id on the device, or HOST + its id in host memory. Both count from 1.
HOST = 1 << 30


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers with one life cycle and arrays of their own. `window` None: full attention, or recurrent."""

    name: str
    ordinal: int  # position in Layout.groups; among attention groups also the row of a node's page arrays
    layers: tuple[str, ...]
    window: int | None
    sinks: int
    recurrent: bool
    pool: int

    def sink_pages(self, page_size: int) -> int:
        """Pages that hold sinks, once a sequence is long enough."""
        return -(-self.sinks // page_size)

    def live_from(self, length: int, page_size: int) -> int:
        """The page from which on, beside the sink pages, a sequence of `length` tokens keeps its pages."""
        return max(self.first_live(length, page_size)[1], self.sink_pages(page_size))

    def first_live(self, length: int, page_size: int) -> tuple[int, int]:
        """The stale page range [sink_pages, first_live) of a sequence of `length` tokens (SPEC S18).

        A window of W needs W-1 tokens of history beside the token in flight.
        """
        if self.window is None:
            return 0, 0
        sink_pages = min(-(-length // page_size), self.sink_pages(page_size))
        return sink_pages, max(sink_pages, (length + 1 - self.window) // page_size)

    def needed(self, length: int, page_size: int) -> tuple[int, int, int]:
        """Pages that resuming at `length` reads: [0, sinks) and [first, stop), as (sinks, first, stop)."""
        stop = -(-length // page_size)
        if self.window is None:
            return 0, 0, stop
        sink_pages = -(-min(length, self.sinks) // page_size)
        first_token = max(0, length + 1 - self.window)
        if first_token >= length:  # a window of one token has no history
            return sink_pages, stop, stop
        return sink_pages, max(sink_pages, first_token // page_size), stop


@dataclasses.dataclass(frozen=True)
class Pool:
    """The device arrays behind one group, or behind several with equal buffers."""

    ordinal: int
    groups: tuple[str, ...]
    num_pages: int  # usable
    page_bytes: int  # of one page, or one state, in all layers
    buffers: tuple[Mapping[str, Buffer], ...]  # per layer of the pool
    recurrent: bool
    scratch: int = 0  # candidate slots, behind the usable ones

    @property
    def num_rows(self) -> int:
        """First dimension of its arrays: the null page, the usable ones and the scratch."""
        return 1 + self.num_pages + self.scratch

    @property
    def name(self) -> str:
        """The groups it serves, e.g. "full" or "full,window:128"."""
        return ",".join(self.groups)
