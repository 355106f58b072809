"""Faults on purpose: what happens to a World when memory, the device, a disk or the program fails.

Each of them strikes once or a few times, in the middle of calls of the manager or on their way to colder tiers, and is
counted in `STRUCK` when it does.
"""

from __future__ import annotations

import collections
import functools
import linecache
import pathlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import pytest
from oracle import World

import jkv
import jkv.apply
import jkv.tiers.host

PACKAGE = str(pathlib.Path(jkv.__file__).parent)
STRUCK: collections.Counter[str] = collections.Counter()  # {kind: faults that struck in this process}


class Interrupt(BaseException):
    """What Ctrl-C is."""


class Broken(Exception):
    """What the device says."""


# ---------------------------------------------------------------------------------------------- in the middle of a call


def refused(w: World, k: int, call: Callable[[], Any]) -> Any:
    """call(), in which the k-th question whether there is room is answered: no."""
    asked, tree = 0, w.manager._host.tree

    def answer(method: Callable[..., bool]) -> Callable[..., bool]:
        def answered(*args: Any) -> bool:
            nonlocal asked
            asked += 1
            if asked == k:
                STRUCK["allocation refused"] += 1
            return asked != k and method(*args)

        return answered

    with (
        mock.patch.object(tree, "can_allocate", answer(tree.can_allocate)),
        mock.patch.object(tree, "can_claim", answer(tree.can_claim)),
    ):
        return call()


def interrupted(w: World, k: int, call: Callable[[], Any]) -> bool:
    """call(), cut short before the k-th line of jkv's own code in it; whether it had so many.

    After that the manager is whole, or refuses everything but a reset. Lines of `with` are passed over: on the way out
    Python looks for signals only once the lock is free, but traces the line before that.
    """
    lines = 0

    def step(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line" and not _line_of(frame).startswith("with "):
            lines += 1
            if lines == k:
                raise Interrupt
        return step

    def enter(frame: Any, event: str, _: Any) -> Any:
        return step if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except Interrupt:
        sys.settrace(before)
        STRUCK["interrupted"] += 1
        _check_whole_or_closed(w)
        return True
    finally:
        sys.settrace(before)
        w.last_stats = w.manager.stats()  # what the call has counted by then, it has counted
    return False


def _line_of(frame: Any) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()


def _check_whole_or_closed(w: World) -> None:
    manager = w.manager
    if not manager._host.broken:
        manager.check()
        return
    assert all(run.seq.status == "closed" for run in w.runs)
    with pytest.raises(jkv.IntegrityError, match="cut short"):
        manager.check()
    seqs = [run.seq for run in w.runs]
    calls = [manager.clear, manager.open, lambda: manager.probe([1]), lambda: manager.probe_digests([])]
    calls += [lambda: manager.new_epoch("x"), lambda: manager.resize_tier(w.state, "device", pages=99)]
    calls += [functools.partial(manager.prepare, w.state, some) for some in ([], seqs)]
    calls += [functools.partial(verb, seqs, 0) for verb in (manager.reserve, manager.advance)]
    calls += [lambda: manager.commit(seqs, [], 0)]
    for call in calls:
        with pytest.raises(jkv.SequenceStateError, match="cut short"):
            call()


def attempt(call: Callable[[], Any]) -> Any:
    """call(), which may refuse."""
    try:
        return call()
    except jkv.CacheError as error:
        return error


def refuses(w: World, call: Callable[[], Any]) -> None:
    """call(), which must refuse, and leave everything as it was."""
    with w.unchanged(), pytest.raises(jkv.CacheError):
        call()


def undispatched(w: World, k: int, call: Callable[[], Any]) -> bool:
    """call(), in which the k-th dispatch of a plan's work raises; whether there were so many."""
    dispatched = 0

    def dispatch(function: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch_or_fail(*args: Any) -> Any:
            nonlocal dispatched
            dispatched += 1
            if dispatched == k:
                raise Broken("out of memory on the device")
            return function(*args)

        return dispatch_or_fail

    places = [(jkv.apply, "_enter"), (jkv.apply, "_copy_and_enter"), (jkv.apply, "_replaced")]
    places.append((jkv.tiers.host, "_scatter"))
    patches = [mock.patch.object(module, name, dispatch(getattr(module, name))) for module, name in places]
    for patch in patches:
        patch.start()
    try:
        call()
    except Broken:
        STRUCK["dispatch failed"] += 1
        assert w.manager._host.broken
        _check_whole_or_closed(w)
        return True
    finally:
        for patch in patches:
            patch.stop()
    return False


# ------------------------------------------------------------------------------------------- on the way to host memory


def failing_gathers(w: World, count: int) -> None:
    """The next `count` dispatches that gather what goes to host memory find no memory on the device."""
    memory = w.manager._memory
    gather = type(memory)._gather.__get__(memory)
    w.faulty = (*w.faulty, "host")

    def fail(*args: Any) -> Any:
        nonlocal count
        if count <= 0:
            return gather(*args)
        count -= 1
        STRUCK["gather failed"] += 1
        error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        with mock.patch.object(jkv.tiers.host, "_gather", side_effect=error):
            return gather(*args)

    memory._gather = fail


def failing_landings(w: World, count: int) -> None:
    """The next `count` pieces of work in host memory find none."""
    memory = w.manager._memory
    w.faulty = (*w.faulty, "host")

    def failing(work: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any) -> Any:
            nonlocal count
            if count <= 0:
                return work(*args)
            count -= 1
            STRUCK["landing failed"] += 1
            raise MemoryError

        return fail

    memory._land, memory._set = failing(type(memory)._land.__get__(memory)), failing(type(memory)._set.__get__(memory))


# --------------------------------------------------------------------------------------------------- below host memory


class Unreliable:
    """A KvStore of which some calls fail.

    Args:
      kvstore: the real one.
      faults: {"read", "write" or "list": how many of the next such calls fail; "torn": how many of the next writes
        leave half a value, and say that all went well}.
    """

    def __init__(self, kvstore: Any, faults: collections.Counter[str]):
        self.kvstore, self.faults = kvstore, faults

    def _strikes(self, kind: str) -> bool:
        if self.faults[kind] <= 0:
            return False
        self.faults[kind] -= 1
        STRUCK[f"store: {kind} failed" if kind != "torn" else "store: torn value"] += 1
        return True

    def read(self, key: Any) -> Any:
        if self._strikes("read"):
            raise ValueError("UNAVAILABLE: reading")
        return self.kvstore.read(key)

    def write(self, key: Any, value: Any, **options: Any) -> Any:
        if value is not None and self._strikes("write"):
            raise ValueError("RESOURCE_EXHAUSTED: no space left on device")
        if value is not None and self._strikes("torn"):
            value = value[: len(value) // 2]
        return self.kvstore.write(key, value, **options)

    def list(self) -> Any:
        if self._strikes("list"):
            raise ValueError("UNAVAILABLE: listing")
        return self.kvstore.list()


def failing_store(w: World, kind: str, count: int) -> None:
    """The next `count` calls of that kind fail; see `Unreliable`. To be said again after a restart."""
    store = w.manager._store
    w.settle()
    faults = vars(w).setdefault("store_faults", collections.Counter())
    faults[kind] += count
    if not isinstance(store.kvstore, Unreliable):
        store.kvstore = Unreliable(store.kvstore, faults)
    store._off_until = -1e9  # a minute has passed since the last fault
    w.faulty = (*w.faulty, "store")


def damage(w: World, which: int, way: int, bit: int) -> None:
    """Somebody lays hands on a file of the store: it is removed, cut off, or a bit of it flips."""
    w.settle()
    files = sorted(path for path in pathlib.Path(w.config.store_tier.location).rglob("*") if path.is_file())
    if not files:
        return
    file = files[which % len(files)]
    value = bytearray(file.read_bytes())
    if way == 0:
        file.unlink()
    elif way == 1:
        file.write_bytes(value[: len(value) * bit // 64])
    elif value:
        value[bit * len(value) // 64 % len(value)] ^= 1 << bit % 8
        file.write_bytes(value)
    w.faulty = (*w.faulty, "store")
    STRUCK["store: file damaged"] += 1
