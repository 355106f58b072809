"""Calls from several threads, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def serialised(method: Method) -> Method:
    """A method that holds the lock of its `_host` while it runs. Such methods may call each other."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **options: Any) -> Any:
        with self._host.lock:
            return method(self, *args, **options)

    return cast(Method, locked)
