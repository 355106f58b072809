"""Routing: the tree as those see it who know a prompt by the digests of its pages alone.

A digest stands for all tokens up to its page's end, so under a node it leads to one child at most. Which one is found
by hashing the first page of each child once; children are in the order of their age, so what came since the last look
is at the end. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jkv.contents import UNKNOWN
from jkv.eviction import Eviction
from jkv.radix import Node, Root

FIRST_LIMIT = 65_536


class Routes:
    """Keys of the children in one tree, by digest.

    Args:
      tree: it changes meanwhile.
    """

    def __init__(self, tree: Eviction):
        self._tree = tree
        self._keys: dict[bytes, bytes] = {}  # digest of a child's first page -> the child's key
        self._seen: dict[bytes, int] = {}  # digest above the children -> age of the youngest one that is in `_keys`
        self._limit = FIRST_LIMIT

    def tokens(self, root: Root, digests: Sequence[bytes]) -> np.ndarray:
        """The tokens of the pages that these digests stand for: int32[len(digests) * page_size].

        UNKNOWN where the tree does not have them: from some page on.
        """
        tree, size = self._tree, self._tree.page_size
        tokens = np.full(len(digests) * size, UNKNOWN, np.int32)
        node: Node | None = tree.roots.get(root)
        while node is not None and node.end < len(tokens):
            node = self._child(node, digests[node.end // size])
            if node is None:
                break
            tree.digests(node)
            pairs = zip(node.digests, digests[node.first_page :], strict=False)
            known = sum(digest == wanted for digest, wanted in pairs)
            tokens[node.start : node.start + known * size] = node.tokens[: known * size]
            if known * size < node.size:
                break
        return tokens

    def _child(self, node: Node, digest: bytes) -> Node | None:
        """The child of `node` whose first page has this digest."""
        tree, above = self._tree, self._tree.digests(node)
        seen = youngest = self._seen.get(above, 0)
        for child in reversed(node.children.values()):
            if child.serial <= seen:
                break
            youngest = max(youngest, child.serial)
            if child.size >= tree.page_size:
                tree.digests(child)
                self._keys[child.digests[0]] = child.key
        if youngest > seen:
            self._seen[above] = youngest
        if len(self._keys) > self._limit:  # half of it, at least, is of children that are gone
            self._keys.clear()
            self._seen.clear()
            self._limit = max(FIRST_LIMIT, 2 * sum(1 for _ in tree.nodes()))
            return self._child(node, digest)
        return node.children.get(self._keys.get(digest, b""))


def new_digest(tree: Eviction, root: Root, tokens: np.ndarray, reused: int) -> bytes | None:
    """The digest of the first whole page of a prompt that is not among its first `reused` tokens; None: there is none.

    Args:
      tokens: int32[n], the prompt.
    """
    end = (reused // tree.page_size + 1) * tree.page_size
    return tree.page_digests(tree.scope_digest(root), tokens[:end])[-1] if end <= len(tokens) else None
