"""Timing: what is compared runs in turn, so that both see the same machine; medians.

H, the unit of host costs, is the time of `sha_chain` over H_TOKENS tokens in the same run.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

PAGE = 16
H_TOKENS = 2_048


def sha_chain(tokens: np.ndarray) -> bytes:
    """What a manager that finds pages by hash computes for a lookup alone: tokens int32[n]."""
    digest = b""
    for at in range(0, len(tokens), PAGE):
        digest = hashlib.sha256(digest + tokens[at : at + PAGE].tobytes()).digest()
    return digest


def alternate(*calls: Callable[[int], object], rounds: int) -> list[float]:
    """Median seconds of each call; each gets the round's number."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call(i)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def against_h(*calls: Callable[[int], object], rounds: int) -> list[float]:
    """Like `alternate`, in H."""
    tokens = np.random.default_rng(9).integers(0, 50_000, H_TOKENS, dtype=np.int32)
    *taken, h = alternate(*calls, lambda _: sha_chain(tokens), rounds=rounds)
    return [each / h for each in taken]


def medians(runs: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1) -> dict[str, float]:
    """Median milliseconds of a call of each run, `calls` calls of each per round, until the device is done."""
    for run in runs.values():
        for _ in range(2):
            jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                out = run()
            jax.block_until_ready(out)
            times[name].append(1e3 * (time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}
