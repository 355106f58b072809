"""Transfer: what of a sequence moves from one process to another, and where it lies. NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NO_PLACE = -1


class Transfer(NamedTuple):
    """One buffer of one layer of a sequence: pages, or its state. A pytree; see `Sequence.transfer_plan`.

    Attributes:
      pages: int32[m], ids in the array that `pool(state, layer, buffer)` gives, in pages of the cache's page_size; -1
        behind the last one. m is a power of two, so that what is compiled for a plan serves many.
      first_tokens: int32[m], the position of each page's first token; of a state the position after its last one.
      page_bytes: bytes of a page, or of the state, in this buffer.

    >>> Transfer(np.array([7, 3, -1, -1], np.int32), np.array([0, 16, -1, -1], np.int32), 4096).byte_offsets
    array([28672, 12288])
    """

    pages: np.ndarray
    first_tokens: np.ndarray
    page_bytes: int

    @property
    def num_pages(self) -> int:
        """Pages without the padding."""
        return int(np.count_nonzero(np.asarray(self.pages) >= 0))

    @property
    def byte_offsets(self) -> np.ndarray:
        """int64[num_pages]: where each page begins in the buffer's array."""
        return np.asarray(self.pages)[: self.num_pages].astype(np.int64) * self.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.num_pages * self.page_bytes


def padded(values: np.ndarray) -> np.ndarray:
    """int32[m]: `values`, and -1 behind them; m is the next power of two."""
    size = 1 << max(0, len(values) - 1).bit_length()
    result = np.full(size, NO_PLACE, np.int32)
    result[: len(values)] = values
    return result
