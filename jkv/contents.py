"""Contents: images, audio and other content behind placeholder ids, as tokens of their own.

Each pair of id and content gets a *symbol*, a negative int32, for as long as this manager needs it. Token ids are never
negative, so nothing can collide: to the tree a prompt is a row of int32, compared exactly, as ever. Digests, which
other processes have to come to as well, are of the ids and the contents (`jkv.tiers.keys`). NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jkv.config import Tokens, as_tokens
from jkv.tiers.keys import plain_ids, typed

UNKNOWN = np.iinfo(np.int32).min  # a token that is known by its page's digest alone; never a symbol
FIRST_SWEEP = 4096


class Contents:
    """The symbols of one manager.

    Args:
      used: gives arrays of all tokens that still matter, when symbols are swept.

    Attributes:
      pairs: {symbol: (id, content as bytes)}.

    >>> contents = Contents(lambda: [])
    >>> contents.tokens(Tokens([7, 9, 9], {1: "cat.png", 2: "dog.png"}))
    array([ 7, -1, -2], dtype=int32)
    >>> contents.tokens(Tokens([9], {0: "dog.png"})), contents.ids(np.array([7, -2], np.int32))
    (array([-2], dtype=int32), array([7, 9], dtype=int32))
    """

    def __init__(self, used: Callable[[], Iterable[np.ndarray]]):
        self._used = used
        self._symbols: dict[tuple[int, bytes], int] = {}
        self.pairs: dict[int, tuple[int, bytes]] = {}
        self._next = -1
        self._sweep_at = FIRST_SWEEP

    def tokens(self, tokens: Any) -> np.ndarray:
        """Host ids as `as_tokens` gives them; of Tokens, with a symbol wherever there is content.

        Raises:
          ConfigError: as `as_tokens`.
        """
        if not isinstance(tokens, Tokens):
            return as_tokens(tokens)
        if not tokens.content:
            return tokens.ids
        if len(self.pairs) >= self._sweep_at:
            self._sweep()
        row = tokens.ids.copy()
        for position, digest in tokens.content.items():
            row[position] = self._symbol(int(row[position]), typed(digest))
        return row

    def _symbol(self, token: int, content: bytes) -> int:
        pair = token, content
        symbol = self._symbols.get(pair)
        if symbol is None:
            while self._next in self.pairs or self._next == UNKNOWN:
                self._next = -1 if self._next == UNKNOWN else self._next - 1
            symbol = self._next
            self.pairs[symbol] = pair  # first: whatever comes between the two, no symbol is given twice
            self._symbols[pair] = symbol
        return symbol

    def ids(self, tokens: np.ndarray) -> np.ndarray:
        """The ids behind `tokens`: int32[n]."""
        return plain_ids(tokens, self.pairs)

    def _sweep(self) -> None:
        """Forgets the symbols that nobody uses; next time when their number has doubled."""
        used: set[int] = set()
        for tokens in self._used():
            used.update(tokens[tokens < 0].tolist())
        for symbol in [symbol for symbol in self.pairs if symbol not in used]:
            del self._symbols[self.pairs[symbol]]
            del self.pairs[symbol]
        self._sweep_at = max(FIRST_SWEEP, 2 * len(self.pairs))
