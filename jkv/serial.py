"""Calls from several threads, one at a time, and what an exception in the middle of one leaves behind.

A call that refuses raises a CacheError, and has changed nothing. Anything else may come up in the middle of a change:
the device's errors, a MemoryError, Ctrl-C. What is half done then cannot be relied on, and is not: `Host.give_up`.
"""

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


def changing(method: Method) -> Method:
    """`serialised`, for a method that changes what its `_host` stands for."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **options: Any) -> Any:
        with self._host.lock:
            try:
                return method(self, *args, **options)
            except BaseException as error:
                # else it was called wrongly and never ran, or had come to its end
                if error.__traceback__ and error.__traceback__.tb_next:
                    self._host.give_up(error)
                raise

    return cast(Method, locked)
