"""Failures: what went wrong below the device, which is never fatal. Counted, and said once a minute."""

from __future__ import annotations

import logging
import threading
from time import monotonic

LOGGER = logging.getLogger("jkv")
SILENCE = 60.0  # seconds between two log lines of one kind


class Failures:
    """Counts by kind; the first of a kind, and after a minute the next, is one log line.

    Args:
      source: what the log lines begin with, e.g. the location of a store.

    >>> failures = Failures("/cache/")
    >>> failures.add("read", "no such device")
    >>> failures.counts
    {'read': 1}
    """

    def __init__(self, source: str):
        self.source = source
        self._counts: dict[str, int] = {}
        self._logged: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        """{kind: failures so far}, the caller's own."""
        with self._lock:
            return dict(self._counts)

    def add(self, kind: str, reason: object) -> None:
        """One more failure of this kind. From any thread."""
        with self._lock:
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            now = monotonic()
            silent = now - self._logged.get(kind, -SILENCE) < SILENCE
            if not silent:
                self._logged[kind] = now
        if not silent:
            LOGGER.warning(
                "%s: %s: %s (%d so far; no more of this kind for a minute)", self.source, kind, reason, count
            )
