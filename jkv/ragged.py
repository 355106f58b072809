"""Ragged: prefill chunks and decodes of different sequences in one flat step.

    sequences      a: 3 tokens    b: 1    c: 2    padding
    positions    [ 0  1  2      | 17    | 4  5  | -1 -1 ]      int32[T]
    cu_q_lens    [ 0              3       4       6   6 ]      int32[R+1]: sequence i is tokens [cu[i], cu[i+1])
    rows         [ 5,             0,      2,     -1     ]      int32[R]
    kv_lens      [ 3,             18,     6,      0     ]      int32[R]: tokens after this step
    num_seqs     [ 3 ]                                         int32[1]

These are the arguments of JAX's ragged paged attention kernels for TPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """A batch of R sequences with T tokens back to back; from `CacheManager.prepare_ragged`.

    Every op takes it where it takes `rows`. Positions are then [T], values [T, *shape], queries and results of `attend`
    [T, H, D]; states are [R, *shape].

    Args:
      rows: int32[R], rows of the page tables; -1: padding, behind the sequences.
      positions: int32[T], position of each token in its sequence; -1: padding, behind the tokens.
      cu_q_lens: int32[R+1], where each sequence's tokens begin; the total in all entries from num_seqs on.
      kv_lens: int32[R], tokens of each sequence once this step has run; 0: padding.
      num_seqs: int32[1].

    >>> batch = Ragged(np.array([5, -1]), np.array([0, 1, 2, -1]), np.array([0, 3, 3]), np.array([3, 0]), np.array([1]))
    >>> batch.sequence_of_tokens().tolist()
    [0, 0, 0, 2]
    """

    rows: Any
    positions: Any
    cu_q_lens: Any
    kv_lens: Any
    num_seqs: Any

    def sequence_of_tokens(self) -> jax.Array:
        """int32[T]: the index of each token's sequence; R for padding."""
        rows, tokens = np.shape(self.rows)[0], np.shape(self.positions)[0]
        starts = jnp.asarray(self.cu_q_lens, jnp.int32)
        index = jnp.searchsorted(starts, jnp.arange(tokens, dtype=jnp.int32), side="right").astype(jnp.int32) - 1
        return jnp.minimum(index, rows)


def make_ragged(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, pad_tokens: int, pad_sequences: int
) -> Ragged:
    """A Ragged of fresh NumPy arrays.

    Args:
      rows: int32[n], n <= pad_sequences.
      starts: int[n], position of each sequence's first token.
      counts: int[n], tokens of each; their sum is at most pad_tokens.
      pad_tokens: T.
      pad_sequences: R.
    """
    n, total = len(rows), int(counts.sum())
    cu_q_lens = np.full(pad_sequences + 1, total, np.int32)
    cu_q_lens[0] = 0
    np.cumsum(counts, out=cu_q_lens[1 : n + 1])
    positions = np.full(pad_tokens, -1, np.int32)
    positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(starts - cu_q_lens[:n], counts)
    padded_rows = np.full(pad_sequences, -1, np.int32)
    padded_rows[:n] = rows
    kv_lens = np.zeros(pad_sequences, np.int32)
    kv_lens[:n] = starts + counts
    return Ragged(padded_rows, positions, cu_q_lens, kv_lens, np.array([n], np.int32))
