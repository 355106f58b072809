"""A Hypothesis state machine that drives a World and its Model: any calls in any order, and faults among them.

Every operation is a line of Python that is noted, then executed. What Hypothesis has shrunk a failure to is therefore
a script, which the error carries: paste it into a test.

Arguments never depend on what is there, so that a sequence of operations stays one while it is shrunk: `which` counts
through those that an operation can be done to.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import faults
import hypothesis
import numpy as np
import pytest
from faults import STRUCK
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from model import Model, listen
from oracle import Run, World, image, join

import jkv

OPERATIONS: collections.Counter[str] = collections.Counter()  # {kind: how many were done in this process}
STEPS = 60  # operations of an example at most, hubs and the like counting as one
SCOPES = (jkv.Scope(), jkv.Scope(salt=0), jkv.Scope(adapter="", version="0"))


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a machine drives.

    Attributes:
      groups: as World takes them.
      config: fields of its config.
      exact: the pools are so large that nothing need ever be evicted.
      images: kinds of content behind placeholders.
      store: with a store in a directory.
    """

    groups: str
    config: Mapping[str, Any]
    exact: bool = False
    images: int = 0
    store: bool = False


def _setup(groups: str, *, exact: bool = False, images: int = 0, store: bool = False, **config: Any) -> Setup:
    config = {"max_length": 64 if exact else 40, "max_sequences": 4, "page_size": 4, **config}
    return Setup(groups, config, exact, images, store)


EVENTS = 100_000
SETUPS = {
    # so large that the model foretells every match
    "full": _setup("full", exact=True, pages=2000, events=EVENTS),
    "full, whole pages": _setup("full", exact=True, pages=2000, partial_reuse=False, events=EVENTS),
    "full, backoff, P=3": _setup("full", exact=True, pages=2000, page_size=3, reuse_backoff=2),
    "full, images": _setup("full", exact=True, images=2, pages=2000, events=EVENTS),
    "full+window": _setup("full window:8", exact=True, pages=2000),
    "two windows, min_snapshot, P=2": _setup(
        "full window:3 window:9", exact=True, pages=3000, page_size=2, min_snapshot=True, events=EVENTS
    ),
    "full+recurrent": _setup("full recurrent", exact=True, pages=2000, events=EVENTS),
    "full+recurrent, whole pages": _setup("full recurrent", exact=True, pages=2000, partial_reuse=False, events=EVENTS),
    "full+recurrent, no min_snapshot, P=8": _setup(
        "full recurrent", exact=True, pages=2000, min_snapshot=False, page_size=8
    ),
    "full+window+recurrent, drafts": _setup("full window:8 recurrent", exact=True, pages=2000, max_drafts=2),
    "recurrent, P=5": _setup("recurrent", exact=True, pages=900, page_size=5),
    # so small that everything is evicted
    "full, P=1, tiny": _setup("full", pages=40, page_size=1),
    "full, tiny": _setup("full", pages=10, max_utilization_for_resume=0.8, events=EVENTS),
    "full, P=7, scrub": _setup("full", pages=9, page_size=7, scrub=True),
    "full+window, shared, tiny": _setup(
        "full window:7", pages=(("full", 10), ("window:7", 11)), shared=True, partial_reuse=False, events=EVENTS
    ),
    "full+window, min_snapshot, scrub": _setup("full window:6", pages=12, min_snapshot=True, scrub=True),
    "full+window, scratch": _setup("full window:8", pages=14, window_scratch=jkv.WindowScratch(4), events=EVENTS),
    "two windows, P=2": _setup("full window:3 window:9", pages=24, page_size=2, events=EVENTS),
    "window and sinks": _setup("window:5+3", pages=12),
    "windows and sinks, min_snapshot, P=3": _setup(
        "window:1+6 window:6", pages=10, max_length=30, page_size=3, min_snapshot=True, events=EVENTS
    ),
    "full+recurrent, tiny": _setup("full recurrent", pages=(("full", 12), ("recurrent", 5)), events=EVENTS),
    "full+window+recurrent, P=3": _setup("full window:5 recurrent", pages=40, max_length=64, page_size=3),
    "full+window+recurrent, tiny, P=6": _setup(
        "full window:4+2 recurrent",
        pages=(("full", 8), ("window:4+2", 7), ("recurrent", 3)),
        page_size=6,
        max_sequences=2,
        partial_reuse=False,
        events=EVENTS,
    ),
    "full+window+recurrent, two layers, backoff": _setup(
        "full window:6 recurrent", pages=16, max_length=48, layers=2, min_snapshot=False, reuse_backoff=1
    ),
    "full+window+recurrent, drafts, scratch, tiny": _setup(
        "full window:6 recurrent",
        pages=(("full", 20), ("window:6", 16), ("recurrent", 6)),
        max_drafts=2,
        window_scratch=jkv.WindowScratch(8),
        events=EVENTS,
    ),
    "recurrent, tiny, P=5": _setup("recurrent", pages=4, page_size=5, max_sequences=3, events=EVENTS),
    # host memory below the device
    "host: full": _setup("full", pages=10, host=7, events=EVENTS),
    "host: full, P=1, scrub": _setup("full", pages=40, host=30, page_size=1, scrub=True),
    "host: full+window": _setup("full window:6", pages=(("full", 10), ("window:6", 11)), host=9, events=EVENTS),
    "host: full+window, shared": _setup("full window:7", pages=21, host=9, shared=True),
    "host: full+window, min_snapshot": _setup("full window:6", pages=12, host=12, min_snapshot=True),
    "host: window and sinks": _setup("window:5+3", pages=12, host=6, partial_reuse=False, events=EVENTS),
    "host: windows and sinks, shared, min_snapshot, P=3": _setup(
        "window:1+6 window:6", pages=21, host=9, max_length=30, page_size=3, min_snapshot=True, shared=True
    ),
    "host: full+recurrent": _setup("full recurrent", pages=(("full", 12), ("recurrent", 5)), host=9),
    "host: full+window+recurrent": _setup(
        "full window:4+2 recurrent",
        pages=(("full", 12), ("window:4+2", 12), ("recurrent", 5)),
        host=14,
        partial_reuse=False,
        events=EVENTS,
    ),
    "host: full+window+recurrent, one slot, P=5": _setup(
        "full window:5 recurrent",
        pages=(("full", 9), ("window:5", 8), ("recurrent", 2)),
        host=3,
        page_size=5,
        max_sequences=2,
    ),
    "host: full+window+recurrent, drafts": _setup(
        "full window:6 recurrent",
        pages=(("full", 16), ("window:6", 16), ("recurrent", 6)),
        host=10,
        max_drafts=2,
        events=EVENTS,
    ),
    "host: full+window+recurrent, images": _setup(
        "full window:5 recurrent",
        images=2,
        pages=(("full", 12), ("window:5", 12), ("recurrent", 5)),
        host=14,
        events=EVENTS,
    ),
    "host: recurrent, P=5": _setup("recurrent", pages=4, host=5, page_size=5, max_sequences=3),
    # and a store below that
    "store: full": _setup("full", store=True, pages=10, host=6, events=EVENTS),
    "store: full, whole pages": _setup(
        "full", store=True, pages=12, host=9, partial_reuse=False, events=EVENTS
    ),
    "store: full, no host memory of its own": _setup("full", store=True, pages=10),
    "store: full+window": _setup("full window:6", store=True, pages=12, host=9),
    "store: full+window, shared, two layers": _setup(
        "full window:7", store=True, pages=21, host=9, shared=True, layers=2
    ),
    "store: window and sinks": _setup("window:5+3", store=True, pages=12, host=7, events=EVENTS),
    "store: full+recurrent, backoff": _setup(
        "full recurrent", store=True, pages=(("full", 12), ("recurrent", 5)), host=8, reuse_backoff=1
    ),
    "store: full+window+recurrent": _setup(
        "full window:4+2 recurrent",
        store=True,
        pages=(("full", 12), ("window:4+2", 12), ("recurrent", 5)),
        host=10,
        partial_reuse=False,
        events=EVENTS,
    ),
    "store: full+window+recurrent, images": _setup(
        "full window:5 recurrent",
        store=True,
        images=2,
        pages=(("full", 12), ("window:5", 12), ("recurrent", 5)),
        host=10,
    ),
    "store: recurrent, P=5": _setup(
        "recurrent", store=True, pages=4, host=3, page_size=5, max_sequences=3, events=EVENTS
    ),
}  # fmt: skip

which = st.integers(0, 7)
count = st.integers(0, 7)
snapshots = st.sampled_from([None, True, False])
new_ids = st.lists(st.integers(0, 4), max_size=9)
HEADER = "from faults import *\nfrom oracle import World, image, join\nimport jkv, pytest\n"
READY = "active", "in flight"  # what may be done to a sequence that is active


class Machine(RuleBasedStateMachine):
    """Drives one World. Subclasses give `setup`, `faults` (whether there are any) and `location` (of the store)."""

    setup: Setup
    faults = False
    location: Callable[[], str] = staticmethod(lambda: "")

    def __init__(self) -> None:
        super().__init__()
        setup, config = self.setup, dict(self.setup.config)
        said = ", ".join(f"{name}={value!r}" for name, value in config.items())
        if setup.store:
            config["store"] = jkv.StoreTier(self.location())
            said += ", store=jkv.StoreTier(tmp_path)"
        self.lines = [f"w = World({setup.groups!r}, {said})"]
        self.w = World(setup.groups, **config)
        self.names: dict[str, Any] = {"w": self.w, "jkv": jkv, "image": image, "join": join, "pytest": pytest}
        self.names.update({name: getattr(faults, name) for name in dir(faults) if not name.startswith("_")})
        self.model = Model(self.w)
        self.space = 0, self.w.config.model  # of what is published now
        self.longest = self.w.config.max_length
        self.seen = [np.zeros(0, np.int32)]  # strings that prompts are made from
        self.refusal = 0  # the so-manieth question for room, in the next call that asks, is answered: no
        self.failed = self.losing = False
        self.sizes = {tier: dict(_sizes(self.w, tier)) for tier in self.w.manager.stats().tiers if tier != "store"}
        self.made = 0

    # --- doing -------------------------------------------------------------------------------------------------------

    def do(self, kind: str, line: str, name: str | None = None) -> Any:
        """Notes and executes a line of Python, an operation of that kind; its value gets a name."""
        OPERATIONS[kind] += 1
        self.lines.append(line if name is None else f"{name} = {line}")
        try:
            value = eval(line, self.names)
            if name is not None:
                self.names[name] = value
            if self.w.config.events and not self.w.manager._host.broken:
                listen(self.w, images=bool(self.setup.images))
            return value
        except BaseException as error:
            self.failed = True
            error.add_note("\n" + HEADER + "\n".join(self.lines))
            raise

    def expect(self, truth: Any, message: str = "") -> None:
        """An assertion about what was done last."""
        if not truth:
            self.failed = True
            error = AssertionError(message)
            error.add_note("\n" + HEADER + "\n".join(self.lines))
            raise error

    def asking(self, kind: str, call: str) -> Any:
        """`do`, for a call that asks for room and is told that there is none if a refusal is due."""
        k, self.refusal = self.refusal, 0
        return self.do(kind, f"refused(w, {k}, lambda: {call})" if k else call)

    def name(self, prefix: str) -> str:
        self.made += 1
        return f"{prefix}{self.made}"

    @property
    def skipped(self) -> int:
        """Snapshots that were asked for, and not taken."""
        stats = self.w.manager.stats()
        return stats.snapshots_skipped + stats.retried.snapshots_skipped

    # --- who ---------------------------------------------------------------------------------------------------------

    def of(self, *statuses: str, flying: bool | None = False) -> list[Run]:
        runs = [run for run in self.w.runs if run.seq.status in statuses]
        return [run for run in runs if flying is None or flying == bool(run.flying or run.verifying)]

    def pick(self, which: int, *statuses: str, flying: bool | None = False) -> Run | None:
        """One of those that something can be done to."""
        runs = self.of(*statuses, flying=flying)
        return runs[which % len(runs)] if runs else None

    def stepping(self, which: int) -> Run | None:
        """One that can take a step; if there is none, one that is resumed, or opened, for it."""
        run = self.pick(which, "active")
        if run is None and not self.of("active", flying=None):
            run = self.pick(which, "suspended", "loading")
            if run is None:
                run = self._open(self._prompt(which, which, [which % 3, 1, 0, 2, 1]))
            else:
                self._resume(run)
        return run if run is not None and run.seq.status == "active" else None

    # --- tokens ------------------------------------------------------------------------------------------------------

    def ids(self, drawn: Sequence[int]) -> np.ndarray:
        """Tokens; ids of 3 and 4 are images, where there are any."""
        if not self.setup.images:
            return np.array([token % 3 for token in drawn], np.int32)
        return np.array(
            [image(token % 2, token % self.setup.images) if token > 2 else token for token in drawn], np.int32
        )

    def _prompt(self, base: int, cut: int, new: Sequence[int]) -> np.ndarray:
        """A conversation that goes on, a fork of one, the same again, or something new."""
        old = self.seen[-1 - base % len(self.seen)]
        old = old[: len(old) - cut * (cut + 1) // 2] if cut < 7 else old[:0]
        prompt = join(old, self.ids(new))[: self.longest - 1]
        self._remember(prompt)
        return prompt

    def _remember(self, tokens: np.ndarray) -> None:
        self.seen = [*self.seen[-7:], tokens]

    def _next(self, run: Run, n: int, drawn: Sequence[int]) -> np.ndarray:
        """The n tokens after what the run has written: the prompt's, then others."""
        at = len(run.written)
        drawn = list(drawn) or [1]
        others = self.ids([drawn[i % len(drawn)] for i in range(n)])
        return join(run.prompt[at : at + n], others)[:n]

    # --- a request's life --------------------------------------------------------------------------------------------

    @rule(base=which, cut=which, new=new_ids, scope=which, reuse=count, priority=count, ttl=count)
    def open(self, base: int, cut: int, new: list[int], scope: int, reuse: int, priority: int, ttl: int) -> None:
        if len(self.w.runs) >= 6:
            self.close(which=base, failing=False)
            return
        prompt = self._prompt(base, cut, new)
        options = {
            "scope": SCOPES[max(0, scope - 5)],
            "max_reuse": {5: 0, 6: len(prompt) // 2, 7: len(prompt)}.get(reuse),
            "priority": max(0, priority - 5),
            "ttl": {5: 20, 6: 3, 7: 1}.get(ttl),
            "retry": cut == 6,
        }
        self._open(prompt, **{name: value for name, value in options.items() if value})

    def _open(self, prompt: np.ndarray, **options: Any) -> Run:
        name = self.name("r")
        said = "".join(f", {option}={_said(value)}" for option, value in options.items())
        run = self.do("open", f"w.open({prompt.tolist()}{said})", name)
        run.name, run.planned, run.flying, run.marks, run.rights = name, [], False, [], []
        run.max_reuse = min(options.get("max_reuse") or max(0, len(prompt) - 1), len(prompt))
        if "max_reuse" in options:
            run.max_reuse = min(options["max_reuse"], len(prompt))
        run.space = self.space
        self._resume(run)
        return run

    @rule(which=which)
    def resume(self, which: int) -> None:
        run = self.pick(which, "suspended", "loading")
        if run is not None:
            self._resume(run)

    def _resume(self, run: Run) -> None:
        first, refusal, before = not run.started, self.refusal, self.w.stats()
        try:
            if not self.asking("resume", f"{run.name}.arrive()"):
                if not self.setup.store and not self.losing:  # what never arrived is forgotten when it is missed
                    self.expect(self.w.stats() == before, f"a refused resume changed something: {before}")
                alone = not self.of("active", flying=None)
                others = [r for r in self.w.runs if r is not run and (r.started or r.seq.status == "loading")]
                possible = alone and (run.started or not others) and not refusal and not self.losing
                self.expect(not possible, f"{run} is alone and cannot resume: {before}")
                return
        except jkv.SequenceStateError:
            self._lost(run)
            return
        if first:
            run.space = self.space
            space = run.space, run.scope
            self._checked(lambda: self.model.check(run.seq.match, space, run.prompt, run.max_reuse))

    def _lost(self, run: Run) -> None:
        """Part of it never arrived in host memory: it says so, and is closed."""
        self.failed = False
        self.expect(self.losing, f"{run} says that something of it was lost")
        self._close(run)

    @rule(base=which, cut=which, new=new_ids, scope=which)
    def probe(self, base: int, cut: int, new: list[int], scope: int) -> None:
        prompt, scope = self._prompt(base, cut, new), SCOPES[max(0, scope - 5)]
        match = self.do("probe", f"w.probe({prompt.tolist()}, scope={_said(scope)})")
        self._checked(lambda: self.model.check(match, (self.space, scope), prompt, len(prompt)))
        if self.w.config.events and self.w.manager._host.builder.empty:
            self.w.settle()
            self._checked(lambda: listen(self.w, [(scope, prompt)], bool(self.setup.images)))

    def _checked(self, check: Callable[[], Any]) -> None:
        try:
            check()
        except AssertionError as error:
            self.expect(False, str(error))

    # --- steps -------------------------------------------------------------------------------------------------------

    @rule(which=which, n=count, more=count, new=new_ids, report=count, snapshot=snapshots)
    def step(self, which: int, n: int, more: int, new: list[int], report: int, snapshot: bool | None) -> None:
        """reserve, prepare, the step, and one of the reports; n = 0: up to a snapshot point, or all of the prompt."""
        run = self.stepping(which)
        if run is None:
            return
        length = run.seq.length
        if n == 0:
            stops = [stop for stop in (*run.seq.snapshot_points, len(run.prompt)) if stop > length]
            n = min(stops, default=length + 1) - length
        n = min(n, self.longest - length)
        if n == 0:
            return
        most = (
            self.longest if self.w.scratch is None else self.w.scratch.max_rewind
        )  # else the window goes with the chunk
        more = 0 if more < 6 else min(2 * more, self.longest - length - n, most)
        if not self._reserve(run, n + more):
            return
        self._prepare([run])
        if report == 7:
            return  # dispatched or not, nothing was written
        self._write(run, self._next(run, n, new))
        if report < 6:
            self._report(run, ("commit", "commit", "commit", "end", "advance", "advance")[report], snapshot)

    @rule(which=which, share=count, n=count, new=new_ids, ragged=st.booleans(), report=count)
    def batch(self, which: int, share: int, n: int, new: list[int], ragged: bool, report: int) -> None:
        """A step of several at once, with the batch verbs."""
        runs = self.of("active")[share % 2 :][: 2 + which % 3]
        runs = [run for run in runs if run.seq.length + n + 1 <= self.longest]
        if not runs:
            return
        names = ", ".join(run.name for run in runs)
        counts = [1 + (n * i + which) % (n + 1) for i in range(len(runs))]
        before = self.w.stats()
        done = self.asking("reserve", f"w.reserve([{names}], {counts})")
        if done == 0:
            self.expect(self.w.stats() == before, "a refused reserve changed something")
        runs, counts = runs[:done], counts[:done]
        if not runs:
            return
        names = ", ".join(run.name for run in runs)
        news = [self._next(run, k, new) for run, k in zip(runs, counts, strict=True)]
        if ragged:
            self.do("prepare", f"w.prepare_ragged([{names}], {counts}, pad_tokens=(8, 16, 32))", "batch")
            self.do("step", f"w.write_ragged(batch, [{names}], {[each.tolist() for each in news]})")
            for run in runs:
                run.flying = True
        else:
            self._prepare(runs)
            for run, each in zip(runs, news, strict=True):
                self._write(run, each)
        stopped = any(run.ended for run in runs)
        points, skipped = [run.seq.snapshot_points for run in runs], self.skipped
        if report < 3 and not stopped:
            self.do("commit", f"w.commit([{names}])")
        elif report < 6:
            self.do("advance", f"w.advance([{names}])")
        else:
            return
        self.model.whole &= self.skipped == skipped
        for run, each in zip(runs, points, strict=True):
            run.flying = False
            self._planned(run, None, each)
            self._publish(run)

    def _reserve(self, run: Run, n: int) -> bool:
        before = self.w.stats()
        if self.asking("reserve", f"{run.name}.reserve({n})"):
            return True
        self.expect(self.w.stats() == before, "a refused reserve changed something")
        return False

    def _prepare(self, runs: Sequence[Run]) -> None:
        self.do("prepare", f"w.prepare({', '.join(run.name for run in runs)})")
        for run in runs:
            run.flying = True

    def _write(self, run: Run, new: np.ndarray) -> None:
        self.do("step", f"{run.name}.write({new.tolist()})")

    @rule(which=which, kind=st.sampled_from(["commit", "advance", "end"]), snapshot=snapshots)
    def report(self, which: int, kind: str, snapshot: bool | None) -> None:
        """advance or commit, now that it is known what was in flight."""
        runs = [run for run in self.of("active", flying=True) if run.flying]
        if runs:
            self._report(runs[which % len(runs)], kind, snapshot)

    def _report(self, run: Run, kind: str, snapshot: bool | None) -> None:
        points, n, skipped, run.flying = run.seq.snapshot_points, len(run.flight), self.skipped, False
        if n == 0:
            self.do("advance", f"{run.name}.advance(0)")
            return
        option = "" if snapshot is None else f"snapshot={snapshot}"
        if run.ended or kind == "advance":
            self.do("advance", f"{run.name}.advance({n}{option and ', '}{option})")
        elif kind == "end":
            snapshot = True
            self.do("commit", f"{run.name}.commit(end=True)")
        else:
            self.do("commit", f"{run.name}.commit({option})")
        if self.skipped == skipped:
            self._planned(run, snapshot, points)
        self._publish(run)

    def _planned(self, run: Run, snapshot: bool | None, points: Sequence[int]) -> None:
        """Its present length will be an endpoint, if there is room for a state."""
        length = run.seq.length
        if run.ended and length != run.seq.committed:
            return
        if snapshot is True or (snapshot is None and length in points):
            run.planned.append(length)

    def _publish(self, run: Run) -> None:
        """What others may find of it from now on."""
        size, committed = self.w.page_size, run.seq.committed
        run.marks = [name for name in run.marks if self.names[name].length >= committed]
        if run.space != self.space and not self.setup.store:
            return
        end = committed if run.closed or run.ended else committed // size * size
        due = [n for n in run.planned if n <= end]
        run.planned = [n for n in run.planned if n > end]
        if run.space == self.space:  # what is left behind in an earlier epoch, nobody finds
            self.model.publish((run.space, run.scope), run.held[:end], due)

    @rule(which=which, n=count, end=st.booleans(), snapshot=st.booleans())
    def late_commit(self, which: int, n: int, end: bool, snapshot: bool) -> None:
        """The ids of tokens that were advanced over arrive, all (n = 0) or some."""
        runs = [r for r in self.of("active", flying=None) if not r.ended and r.seq.length > r.seq.committed]
        if not runs:
            return
        run = runs[which % len(runs)]
        left = run.seq.length - run.seq.committed
        n = min(n or left, left)
        whole, busy = n == left, bool(run.flying or run.verifying)
        options = ", end=True" * (whole and not busy and end) + ", snapshot=True" * (snapshot and not busy and not end)
        skipped = self.skipped
        self.do("commit", f"{run.name}.commit({n}{options})")
        if options and self.skipped == skipped:
            run.planned.append(run.seq.committed)
        self._publish(run)

    @rule(which=which, n=count)
    def rewind(self, which: int, n: int) -> None:
        runs = [r for r in self.of("active") if not r.ended and r.seq.length > r.seq.committed]
        if not runs:
            return
        run = runs[which % len(runs)]
        n = 1 + n % (run.seq.length - run.seq.committed)
        if self.w.recurrent:
            self._refusal(f"{run.name}.seq.rewind({n})")
            return
        try:
            self.do("rewind", f"{run.name}.rewind({n})")
        except jkv.SequenceStateError:
            self.failed = False
            self.expect(self.w.scratch, "only a chunk's window scratch takes the window away")
            return
        self._went_back(run)

    def _went_back(self, run: Run) -> None:
        run.planned = [position for position in run.planned if position <= run.seq.length]
        run.marks = [name for name in run.marks if self.names[name].length <= run.seq.length]
        run.flying, run.rights = False, []

    @rule(which=which, new=new_ids, right=count, overlapped=st.booleans(), snapshot=snapshots)
    def draft(self, which: int, new: list[int], right: int, overlapped: bool, snapshot: bool | None) -> None:
        """A verify step, perhaps before the one before it is accepted."""
        runs = [run for run in self.of("active", flying=None) if not run.flying and not run.ended]
        if not runs or (self.w.recurrent and not self.w.config.max_drafts):
            return
        run = runs[which % len(runs)]
        while len(run.verifying) == 2 or (run.verifying and not overlapped):
            self._accept(run, snapshot)
        new = self.ids((new or [1])[: self.w.drafts])
        room = sum(len(step.tokens) for step in run.verifying) + len(new)
        if run.seq.length + room > self.longest or not self._reserve(run, room):
            return
        self.do("prepare", f"w.prepare({run.name})")
        accepted = run.rights[-1] if run.verifying else None
        self.do("step", f"{run.name}.verify({new.tolist()}, accepted={accepted})")
        run.rights.append(right % len(new))

    @rule(which=which, snapshot=snapshots)
    def accept(self, which: int, snapshot: bool | None) -> None:
        runs = [run for run in self.of("active", flying=True) if run.verifying]
        if runs:
            self._accept(runs[which % len(runs)], snapshot)

    def _accept(self, run: Run, snapshot: bool | None) -> None:
        points, length, skipped = run.seq.snapshot_points, run.seq.length, self.skipped
        try:
            self.do("accept", f"{run.name}.accept({run.rights[0]}, snapshot={snapshot})")
        except jkv.SequenceStateError:
            self.failed = False
            self.expect(self.w.scratch and run.seq.length == length, "only window scratch forbids what was verified")
            self._close(run)
            return
        run.rights.pop(0)
        if self.skipped == skipped:
            self._planned(run, snapshot, points)

    @rule(which=which)
    def checkpoint(self, which: int) -> None:
        run = self.pick(which, "active")
        if run is not None and not run.ended:
            name = self.name("m")
            if self.do("checkpoint", f"{run.name}.checkpoint()", name) is not None:
                run.marks.append(name)

    @rule(which=which, mark=count)
    def rollback(self, which: int, mark: int) -> None:
        runs = [run for run in self.of("active", flying=None) if run.marks and not run.ended]
        if not runs:
            return
        run = runs[which % len(runs)]
        at = mark % len(run.marks)
        try:
            self.do("rollback", f"{run.name}.rollback({run.marks[at]})")
        except jkv.SequenceStateError:
            self.failed = False
            self.expect(self.w.scratch, "only a chunk's window scratch takes the window away")
            return
        run.marks = run.marks[:at]
        self._went_back(run)

    @rule(which=which, first=count, apart=count, new=new_ids)
    def planned_snapshots(self, which: int, first: int, apart: int, new: list[int]) -> None:
        """A step that leaves states from inside the chunk."""
        run = self.stepping(which)
        if run is None or run.ended or run.seq.length + 9 > self.longest or not self._reserve(run, 9):
            return
        length = run.seq.length
        positions = sorted({length + 1 + first, length + 1 + (first + apart) % 9})
        skipped = self.skipped
        self.do("plan_snapshots", f"{run.name}.plan_snapshots({positions})")
        self._prepare([run])
        self._write(run, self._next(run, 9, new))
        run.flying = False
        self.do("commit", f"{run.name}.commit(snapshot=False)")
        self.model.whole &= self.skipped == skipped
        run.planned += positions
        self._publish(run)

    @rule(which=which, n=st.integers(1, 2))
    def fork(self, which: int, n: int) -> None:
        run = self.pick(which, "active")
        if run is None or len(self.w.runs) > 5:
            return
        name = self.name("f")
        k, self.refusal = self.refusal, 0
        call = f"{run.name}.fork({n})"
        copies = self.do("fork", f"refused(w, {k}, lambda: {call})" if k else call, name)
        for i, copy in enumerate(copies):
            copy.name, copy.planned, copy.marks, copy.rights = self.name("r"), [], [], []
            self.names[copy.name] = copy
            self.lines.append(f"{copy.name} = {name}[{i}]")

    @rule(which=which, share=count)
    def resize(self, which: int, share: int) -> None:
        """A smaller capacity."""
        run = self.pick(which, "active")
        if run is not None:
            capacity = run.seq.length + (run.seq.capacity - run.seq.length) * share // 7
            self.do("resize", f"({run.name}.seq.resize({capacity}), w.check())")

    @rule(which=which)
    def suspend(self, which: int) -> None:
        run = self.pick(which, "active")
        if run is not None:
            self.do("suspend", f"{run.name}.suspend()")

    @rule(which=which, tier=st.sampled_from(["device", "host", "store"]))
    def prefetch(self, which: int, tier: str) -> None:
        run = self.pick(which, "suspended", "loading")
        if run is None or tier not in self.w.manager.stats().tiers:
            return
        before, status = self.w.stats(), run.seq.status
        try:
            if not self.asking("prefetch", f"{run.name}.prefetch({tier!r})"):
                unchanged = status == "loading" or self.losing or self.w.stats() == before
                self.expect(unchanged, "a refused prefetch changed something")
        except jkv.SequenceStateError:
            self._lost(run)

    @rule(which=which)
    def stop_committing(self, which: int) -> None:
        run = self.pick(which, "active", flying=None)
        if run is not None and not run.ended:
            if run.seq.length == run.seq.committed and not run.flying:
                run.planned.append(run.seq.length)
            self.do("stop_committing", f"{run.name}.stop_committing()")
            self._publish(run)

    @rule(which=which, failing=st.booleans())
    def close(self, which: int, failing: bool) -> None:
        if self.w.runs:
            self._close(self.w.runs[which % len(self.w.runs)], failing)

    def _close(self, run: Run, failing: bool = False) -> None:
        flying = run.flying or run.verifying
        if run.started and not flying and not run.ended and run.seq.length == run.seq.committed:
            run.planned.append(run.seq.length)
        self.do("close", f"{run.name}.fail()" if failing else f"{run.name}.close()")
        if run.started:
            self._publish(run)
            if len(run.held):
                self._remember(run.held[: run.seq.committed])
        self.names["drop"] = run.seq.plan_drop()
        self.lines.append(f"drop = {run.name}.seq.plan_drop()")

    @rule()
    def drop(self) -> None:
        """What the last one that was closed left at its end has become useless."""
        if "drop" in self.names:
            self.do("drop", "(drop.drop(), w.check())")
            del self.names["drop"]
            self.model.whole = False

    @rule(base=which, cut=which, siblings=st.integers(3, 12))
    def hub(self, base: int, cut: int, siblings: int) -> None:
        """Many that begin alike, and differ inside a page."""
        head = self._prompt(base, cut, [0])[: self.longest - 2]
        for i in range(siblings):
            if len(self.w.runs) >= 6:
                return
            run = self._open(join(head, [10 + i]))
            if run.seq.status == "active" and self._reserve(run, len(run.prompt) - run.seq.length):
                self._prepare([run])
                self._write(run, run.prompt[run.seq.length :])
                self._report(run, "commit", None)
            if run.seq.status != "closed":
                self._close(run)

    # --- everything at once ------------------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.do("flush", "(w.flush(), w.verify_rest())")

    @rule(clear=st.booleans(), new=new_ids)
    def drain(self, clear: bool, new: list[int]) -> None:
        """Without sequences everything is evictable, and the largest request fits."""
        self.refusal = 0
        for run in list(self.w.runs):
            self._close(run)
        self._nobody_owns_anything()
        if clear:
            self.do("clear", "(w.manager.clear(), w.check())")
            self.model.whole = False
            if not self.setup.store:
                self.model.forget()
            self.expect(all(pool.free == pool.total for _, _, pool in self.w.every_pool()), "clear left something")
        ids = self.ids([(new or [1])[i % max(1, len(new))] for i in range(self.longest)])
        run = self._open(ids)
        self.expect(run.seq.status == "active" or self.losing, "the largest request does not fit an empty cache")
        if run.seq.status == "active":
            self.expect(self._reserve(run, len(ids) - run.seq.length), "no room in an empty cache")
            self._prepare([run])
            self._write(run, ids[run.seq.length :])
            self._report(run, "commit", None)
            self._close(run)

    def _nobody_owns_anything(self) -> None:
        for tier, name, pool in self.w.every_pool():
            self.expect(pool.private == 0 and pool.evictable == pool.tree, f"{tier} {name}: {pool}")

    @rule(share=count)
    def new_epoch(self, share: int) -> None:
        """Other weights, or with a store perhaps those of before."""
        if share:
            return
        model = "other" if self.w.manager.config.model == self.w.config.model else self.w.config.model
        self.do("new_epoch", f"(w.manager.new_epoch({model!r}), w.check())")
        self.space = (0 if self.setup.store else self.space[0] + 1), model
        self.model.whole = not self.setup.store and self.model.whole
        for run in self.w.runs:
            if not run.started:
                run.space = self.space

    @rule(tier=st.sampled_from(["device", "host"]), more=st.booleans())
    def resize_tier(self, tier: str, more: bool) -> None:
        """Between two sizes, so that steps compile seldom."""
        if tier not in self.sizes or self.setup.exact:
            return
        pages = {group: pages + 3 * more for group, pages in self.sizes[tier].items()}
        try:
            self.do("resize_tier", f"w.resize_tier({tier!r}, pages={pages})")
        except jkv.OutOfPagesError:
            self.failed = False

    @rule(share=count)
    def reset(self, share: int) -> None:
        if share == 0:
            self._reset()

    @rule(share=count)
    def release(self, share: int) -> None:
        """Training: the device's memory is given back, and had again."""
        if share == 0:
            for run in list(self.w.runs):
                self._close(run)
            self.do("release", "w.manager.release(w.state)")
            self._reset()

    def _reset(self) -> None:
        self.do("reset", "w.reset()")
        self._started_over()
        gone = all(pool.tree == pool.private == 0 for pool in self.w.pools().values())
        self.expect(gone, "the device still has something")

    def _started_over(self) -> None:
        self.names.pop("drop", None)
        self.model.whole = False
        if not self.setup.store and "host" not in self.sizes:
            self.model.forget()

    @rule(killed=st.booleans(), share=count)
    def restart(self, killed: bool, share: int) -> None:
        """The program ends, or is killed, and starts again."""
        if not self.setup.store or share > 2:
            return
        if not killed:
            for run in list(self.w.runs):
                self._close(run)
        STRUCK["killed"] += killed
        self.do("restart", f"w.restart(killed={killed})")
        if self.faults:
            self.do("fail_store", "failing_store(w, 'read', 0)")  # what was to fail still will
        self.space = 0, self.w.config.model
        self._started_over()

    @rule(seconds=st.sampled_from([0.0, 0.002]), waits=st.booleans())
    def pace(self, seconds: float, waits: bool) -> None:
        """What goes to host memory takes its time, and nobody waits for it."""
        if "host" in self.sizes:
            STRUCK["host copy delayed"] += bool(seconds)
            self.do("pace", f"(setattr(w, 'waits', {waits}), w.delay({seconds}))")

    @rule(which=which, kind=count)
    def misuse(self, which: int, kind: int) -> None:
        """What is refused changes nothing."""
        calls = ["w.manager.open([-1])", "w.manager.open([1], max_reuse=-1)"]
        if self.w.runs:
            name = self.w.runs[which % len(self.w.runs)].name
            seq = f"{name}.seq"
            calls += ["w.manager.clear()", f"w.manager.prepare(w.state, [{seq}, {seq}])", f"{seq}.advance(64)"]
            calls += [f"{seq}.commit([1] * 64)", f"{seq}.fork(0)", f"{seq}.rewind(64)", f"{seq}.accept(64)"]
            calls.append(f"{seq}.resize(10**6)")
        self._refusal(calls[(which + 8 * kind) % len(calls)])

    def _refusal(self, call: str) -> None:
        """A call that must be refused, and change nothing."""
        self.do("misuse", f"refuses(w, lambda: {call})")

    # --- faults ------------------------------------------------------------------------------------------------------

    @rule(k=st.integers(1, 4))
    def refuse(self, k: int) -> None:
        """The next call that asks for room is told at its k-th question that there is none."""
        if self.faults:
            self.refusal = k

    @rule(which=which, kind=count, k=st.integers(1, 400), share=count)
    def interrupt(self, which: int, kind: int, k: int, share: int) -> None:
        """Ctrl-C in the middle of a call."""
        if not self.faults or share > 3:
            return
        calls = ["w.manager.open([1, 0])", "w.manager.new_epoch('third')", "w.manager.reset()", "w.manager.stats()"]
        calls += ["w.manager.prepare(w.state, [])"]
        run = self.pick(which, "active", flying=None)
        if run is not None:
            seq, new = f"{run.name}.seq", run.written[run.seq.committed :].tolist()
            calls += [f"{seq}.reserve(9)", f"{seq}.commit({new})", f"{seq}.close()", f"{seq}.suspend()"] * 2
            calls += [f"{seq}.fork(1)", f"{seq}.stop_committing()", f"{seq}.advance({len(run.flight)})"]
        run = self.pick(which, "suspended", "loading")
        if run is not None:
            calls += [f"{run.name}.seq.resume()"] * 4
        call = calls[(which + 8 * kind) % len(calls)]
        self.do("interrupt", f"interrupted(w, {k}, lambda: attempt(lambda: {call}))")
        self.model.whole = False
        self._reset()
        self.do("flush", "(w.flush(), w.verify_rest())")

    @rule(which=which, k=st.integers(1, 3), share=count)
    def break_dispatch(self, which: int, k: int, share: int) -> None:
        """The device refuses in the middle of a plan."""
        if not self.faults or share > 3:
            return
        run = self.pick(which, "active")
        if run is not None and run.seq.length < self.longest:
            self._reserve(run, 1)
        runs = "" if run is None else f"{run.name}.seq"
        self.do("break_dispatch", f"undispatched(w, {k}, lambda: w.manager.prepare(w.state, [{runs}]))")
        self._reset()
        self.do("flush", "(w.flush(), w.verify_rest())")

    @rule(kind=st.sampled_from(["gathers", "landings"]), n=st.integers(1, 3))
    def fail_saves(self, kind: str, n: int) -> None:
        """Nothing can be had where the next pages go to host memory."""
        if not self.faults or "host" not in self.sizes:
            return
        self.losing, self.model.whole = True, False
        self.do("fail_saves", f"failing_{kind}(w, {n})")

    @rule(kind=st.sampled_from(["read", "write", "torn", "list"]), n=st.integers(1, 3))
    def fail_store(self, kind: str, n: int) -> None:
        if self.faults and self.setup.store:
            self.model.whole = False
            self.do("fail_store", f"failing_store(w, {kind!r}, {n})")

    @rule(which=which, way=st.integers(0, 2), bit=st.integers(0, 63))
    def damage(self, which: int, way: int, bit: int) -> None:
        if self.faults and self.setup.store:
            self.model.whole = False
            self.do("damage", f"damage(w, {which}, {way}, {bit})")

    # --- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if not self.failed:
                self._end()
        finally:
            if self.w.manager._memory is not None:
                self.w.manager._memory.close()

    def _end(self) -> None:
        for run in list(self.w.runs):
            self._close(run)
        self.w.waits = True
        self.do("flush", "(w.flush(), w.verify_rest())")
        self._nobody_owns_anything()


def _said(value: Any) -> str:
    return f"jkv.{value!r}" if isinstance(value, jkv.Scope) else repr(value)


def _sizes(world: World, tier: str) -> list[tuple[str, int]]:
    """(group, pages) of a tier; of what groups share each gets a part."""
    sizes = []
    for name, pool in world.manager.stats().tiers[tier].pools.items():
        groups = name.split(",")
        sizes += [(group, pool.total // len(groups) + (i < pool.total % len(groups))) for i, group in enumerate(groups)]
    return sizes


def drive(
    name: str,
    least: int,
    seed: int = 0,
    faulty: bool = False,
    location: Callable[[], str] = lambda: "",
    base: type[Machine] = Machine,
    examples: int = 5,
    **config: Any,
) -> int:
    """Drives a setup with one seed after the other until at least so many operations are done.

    Args:
      name: of one of SETUPS.
      faulty: with faults.
      location: a new directory for each store.
      examples: runs of up to STEPS operations with each seed.
      **config: fields of its config that shall be others.

    Returns:
      How many operations were done.
    """
    setup = dataclasses.replace(SETUPS[name], config={**SETUPS[name].config, **config})
    members = {"setup": setup, "faults": faulty, "location": staticmethod(location)}
    before = OPERATIONS.total()
    while OPERATIONS.total() - before < least:
        mixed = zlib.crc32(f"{name} {faulty} {config} {seed}".encode())
        machine = hypothesis.seed(mixed)(type("Driven", (base,), members))
        run_state_machine_as_test(machine, settings=hypothesis.settings(SETTINGS, max_examples=examples))
        seed += 1
    return OPERATIONS.total() - before


SETTINGS = hypothesis.settings(
    stateful_step_count=STEPS,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
