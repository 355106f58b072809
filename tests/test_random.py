"""A random driver: every kind of call in any order, every byte compared, every match against a brute-force model.

With one, two and three tiers. `pytest tests/test_random.py --random-steps 5000 --random-seed 7` looks longer, and
elsewhere.
"""

import contextlib
import pathlib

import numpy as np
import pytest
from oracle import Run, World, image, join

import jkv

# name: (groups, config, exact). exact: while nothing was evicted, the model foretells every match.
CONFIGS = {
    "full": ("full", {"pages": 2000}, True),
    "full, whole pages": ("full", {"pages": 2000, "partial_reuse": False}, True),
    "full, backoff": ("full", {"pages": 2000, "page_size": 3, "reuse_backoff": 2}, True),
    "full, images": ("full", {"pages": 2000, "images": 2}, True),
    "full, P=1, tiny": ("full", {"pages": 40, "page_size": 1, "max_length": 40}, False),
    "full, tiny": ("full", {"pages": 10, "max_length": 40, "max_utilization_for_resume": 0.8}, False),
    "full+window": ("full window:8", {"pages": 2000}, True),
    "full+window, shared, tiny": (
        "full window:7",
        {"pages": {"full": 10, "window:7": 11}, "max_length": 40, "shared": True},
        False,
    ),
    "full+window, min_snapshot": ("full window:6", {"pages": 12, "max_length": 40, "min_snapshot": True}, False),
    "two windows": ("full window:3 window:9", {"pages": 24, "page_size": 2, "max_length": 40}, False),
    "two windows, min_snapshot": (
        "full window:3 window:9",
        {"pages": 300, "page_size": 2, "min_snapshot": True},
        False,
    ),
    "window and sinks": ("window:5+3", {"pages": 12, "max_length": 40}, False),
    "window and sinks, min_snapshot": (
        "window:1+6 window:6",
        {"pages": 10, "max_length": 30, "page_size": 3, "min_snapshot": True},
        False,
    ),
    "full+recurrent": ("full recurrent", {"pages": 2000}, True),
    "full+recurrent, whole pages": ("full recurrent", {"pages": 2000, "partial_reuse": False}, True),
    "full+recurrent, no min_snapshot": ("full recurrent", {"pages": 2000, "min_snapshot": False, "page_size": 8}, True),
    "full+recurrent, tiny": ("full recurrent", {"pages": {"full": 12, "recurrent": 5}, "max_length": 40}, False),
    "full+window+recurrent": ("full window:5 recurrent", {"pages": 40, "page_size": 3}, False),
    "full+window+recurrent, tiny": (
        "full window:4+2 recurrent",
        {"pages": {"full": 8, "window:4+2": 7, "recurrent": 3}, "page_size": 6, "max_length": 40, "max_sequences": 2},
        False,
    ),
    "full+window+recurrent, two layers": (
        "full window:6 recurrent",
        {"pages": 16, "max_length": 48, "layers": 2, "min_snapshot": False, "reuse_backoff": 1},
        False,
    ),
    "recurrent": ("recurrent", {"pages": 900, "page_size": 5}, True),
    "recurrent, tiny": ("recurrent", {"pages": 4, "page_size": 5, "max_length": 40, "max_sequences": 3}, False),
}

# name: (groups, config), with host memory below the device. Everything is tiny, so that everything moves.
HOST_CONFIGS = {
    "full": ("full", {"pages": 10, "host": 7, "max_length": 40}),
    "full, P=1": ("full", {"pages": 40, "host": 30, "page_size": 1, "max_length": 40}),
    "full+window": ("full window:6", {"pages": {"full": 10, "window:6": 11}, "host": 9, "max_length": 40}),
    "full+window, shared": ("full window:7", {"pages": 21, "host": 9, "max_length": 40, "shared": True}),
    "full+window, min_snapshot": ("full window:6", {"pages": 12, "host": 12, "max_length": 40, "min_snapshot": True}),
    "window and sinks": ("window:5+3", {"pages": 12, "host": 6, "max_length": 40}),
    "windows and sinks, shared, min_snapshot": (
        "window:1+6 window:6",
        {"pages": 21, "host": 9, "max_length": 30, "page_size": 3, "min_snapshot": True, "shared": True},
    ),
    "full+recurrent": ("full recurrent", {"pages": {"full": 12, "recurrent": 5}, "host": 9, "max_length": 40}),
    "full+window+recurrent": (
        "full window:4+2 recurrent",
        {"pages": {"full": 12, "window:4+2": 12, "recurrent": 5}, "host": 14, "max_length": 40},
    ),
    "full+window+recurrent, one slot": (
        "full window:5 recurrent",
        {
            "pages": {"full": 9, "window:5": 8, "recurrent": 2},
            "host": 3,
            "page_size": 5,
            "max_length": 40,
            "max_sequences": 2,
        },
    ),
    "full+window+recurrent, images": (
        "full window:5 recurrent",
        {"pages": {"full": 12, "window:5": 12, "recurrent": 5}, "host": 14, "max_length": 40, "images": 2},
    ),
    "recurrent": ("recurrent", {"pages": 4, "host": 5, "page_size": 5, "max_length": 40, "max_sequences": 3}),
}

# and a store below that.
STORE_CONFIGS = {
    "full": ("full", {"pages": 10, "host": 6, "max_length": 40}),
    "full, whole pages": ("full", {"pages": 12, "host": 9, "max_length": 40, "partial_reuse": False}),
    "full+window": ("full window:6", {"pages": 12, "host": 9, "max_length": 40}),
    "full+window, shared, two layers": (
        "full window:7",
        {"pages": 21, "host": 9, "max_length": 40, "shared": True, "layers": 2},
    ),
    "window and sinks": ("window:5+3", {"pages": 12, "host": 7, "max_length": 40}),
    "full+recurrent, backoff": (
        "full recurrent",
        {"pages": {"full": 12, "recurrent": 5}, "host": 8, "max_length": 40, "reuse_backoff": 1},
    ),
    "full+window+recurrent": (
        "full window:4+2 recurrent",
        {"pages": {"full": 12, "window:4+2": 12, "recurrent": 5}, "host": 10, "max_length": 40},
    ),
    "full+window+recurrent, images": (
        "full window:5 recurrent",
        {"pages": {"full": 12, "window:5": 12, "recurrent": 5}, "host": 10, "max_length": 40, "images": 2},
    ),
    "recurrent": ("recurrent", {"pages": 4, "host": 3, "page_size": 5, "max_length": 40, "max_sequences": 3}),
}

ALPHABET = 3
SCOPES = (jkv.Scope(), jkv.Scope(salt=0))


def sized(world, tier):
    """(group, pages) of a tier; of what groups share each gets a part."""
    for name, pool in world.manager.stats().tiers[tier].pools.items():
        groups = name.split(",")
        for i, group in enumerate(groups):
            yield group, pool.total // len(groups) + (i < pool.total % len(groups))


def common_prefix(a, b):
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class Model:
    """What was ever published, as plain token arrays: matches can be no better, and with room no worse."""

    def __init__(self, world: World):
        self.page_size, self.config = world.page_size, world.config
        self.clear()

    def clear(self):
        """A manager without a store forgets everything."""
        self.strings = {scope: {} for scope in SCOPES}  # published tokens; keys are their bytes
        self.states = {scope: set() for scope in SCOPES}  # prefixes that have a snapshot, as bytes

    def publish(self, run):
        """Called when `run` may have published more."""
        whole = run.seq.committed // self.page_size * self.page_size
        published = run.held[: run.seq.committed if run.closed or run.ended else whole]
        if len(published):
            self.strings[run.scope][published.tobytes()] = published
        for n in [n for n in run.planned if n <= len(published)]:
            run.planned.remove(n)
            self.states[run.scope].add(published[:n].tobytes())

    def raw(self, prompt, scope):
        return max((common_prefix(prompt, s) for s in self.strings[scope].values()), default=0)

    def hits(self, prompt, scope, max_reuse, recurrent):
        """(without states, with states): the largest reusable n that each allows; only where nothing was evicted."""
        raw = self.raw(prompt, scope)
        most = max(0, min(raw - self.config.reuse_backoff, max_reuse))
        fits = [n for n in range(most + 1) if self.config.partial_reuse or n % self.page_size == 0 or n == len(prompt)]
        if not self.config.partial_reuse:  # at the end of the prompt: only where a tail of the tree ends
            fits = [n for n in fits if n % self.page_size == 0 or prompt.tobytes() in self.strings[scope]]
        with_state = [n for n in fits if n == 0 or prompt[:n].tobytes() in self.states[scope]]
        return max(fits), max(with_state) if recurrent else max(fits)


class Driver:
    """Random calls on one World."""

    def __init__(self, groups, config, exact, seed, ops=None):
        self.rng = np.random.default_rng(seed)
        self.ops = ops or OPS
        config = dict(config)
        self.images = config.pop("images", 0)
        self.w = World(groups, **{"max_length": 64, "max_sequences": 4, **config})
        self.model = Model(self.w)
        self.exact = exact
        self.tiers = self.w.manager.stats().tiers
        self.store = "store" in self.tiers
        self.log = []
        self.seen = [np.zeros(0, np.int32)]
        self.longest = self.w.config.max_length
        self.sizes = {tier: dict(sized(self.w, tier)) for tier in self.tiers if tier != "store"}
        self.drops = []

    def note(self, text, *values):
        self.log.append(f"{text} {' '.join(map(str, values))}")

    def chance(self, share):
        return self.rng.random() < share

    def pick(self, runs):
        return runs[self.rng.integers(len(runs))] if runs else None

    def random_tokens(self, n):
        tokens = self.rng.integers(0, ALPHABET + 2 * bool(self.images), n).astype(np.int32)
        shown = tokens >= ALPHABET
        tokens[shown] = [image(self.rng.integers(2), self.rng.integers(self.images)) for _ in range(shown.sum())]
        return tokens

    def prompt(self):
        """A conversation going on, a fork of one, the same prompt again, or something new."""
        old = self.seen[self.rng.integers(len(self.seen))]
        cut = len(old) if self.chance(0.5) else int(self.rng.integers(len(old) + 1))
        new = self.random_tokens(self.rng.integers(0, 9) if self.chance(0.8) else 0)
        prompt = join(old[:cut], new)[: self.longest - 1]
        self.remember(prompt)
        return prompt

    def remember(self, tokens):
        self.seen = [*self.seen[-7:], tokens]

    # -- runs by what may be done to them

    def active(self, in_flight=False):
        return [r for r in self.w.runs if r.seq.status == "active" and bool(r.flying) == in_flight]

    def idle(self):
        return [r for r in self.w.runs if r.seq.status in ("suspended", "loading")]

    # -- operations

    def op_open(self):
        if len(self.w.runs) >= 6:
            return
        prompt, scope = self.prompt(), SCOPES[int(self.chance(0.2))]
        max_reuse = [None, None, len(prompt), 0, len(prompt) // 2][self.rng.integers(5)]
        self.note("open", prompt.tolist(), f"max_reuse={max_reuse} salt={scope.salt}")
        ttl = [None, None, 3, 20][self.rng.integers(4)] if "epoch" in self.ops else None
        run = Run(self.w, prompt, scope=scope, max_reuse=max_reuse, retry=self.chance(0.1), ttl=ttl)
        run.max_reuse = max(0, len(prompt) - 1) if max_reuse is None else max_reuse
        run.planned, run.flying, run.reserved = [], False, 0
        if self.chance(0.8):
            self.resume(run)

    def op_resume(self):
        run = self.pick(self.idle())
        if run is not None:
            self.resume(run)

    def resume(self, run, wait=False):
        before, status = self.w.stats(), run.seq.status
        match = run.seq.match
        self.note("resume", run)
        if not (run.arrive() if wait else run.resume()):
            self.note("  refused", run.seq.status)
            if "loading" in (status, run.seq.status) or (wait and self.store):
                return
            assert self.w.stats() == before
            alone = not any(r.seq.status == "active" for r in self.w.runs)
            others = [r for r in self.w.runs if r is not run and (r.started or r.seq.status == "loading")]
            assert not (alone and (run.started or not others)), f"{run} is alone and cannot resume: {before}"
            return
        if run.checked or not self.store:
            assert run.seq.match == match
        match = run.seq.match
        if not run.checked:
            run.checked = True
            self.check_match(match, run.prompt, run.scope, run.max_reuse)

    def check_match(self, match, prompt, scope, max_reuse):
        stats = self.w.manager.stats()
        raw = self.model.raw(prompt, scope)
        backoff = self.w.config.reuse_backoff
        assert match.tokens <= match.attention_tokens <= match.raw_tokens <= raw, f"{match}, {raw} at most"
        assert match.tokens <= max(0, min(match.raw_tokens - backoff, max_reuse))
        if not self.w.config.partial_reuse:
            assert match.tokens % self.w.page_size == 0 or match.tokens == len(prompt)
        if match.tokens and self.w.recurrent:
            assert prompt[: match.tokens].tobytes() in self.model.states[scope], f"{match}: nobody left this state"
        evicted = sum(stats.evicted_pages.values()) + stats.snapshots_evicted
        if self.exact and not evicted:
            attention, tokens = self.model.hits(prompt, scope, max_reuse, bool(self.w.recurrent))
            if self.w.attention:  # else tokens without a snapshot are forgotten
                assert match.raw_tokens == raw, f"{match}, {raw} expected"
            ends = len(prompt) in (match.tokens, attention, tokens)
            if not self.w.config.partial_reuse and len(prompt) % self.w.page_size and ends:
                return  # the end of the prompt inside a page: the model does not know which tails are still tails
            assert match.tokens == tokens, f"{match}: {tokens} expected for {prompt.tolist()}"
            if self.w.attention:
                assert match.attention_tokens == attention, f"{match}: attention {attention} expected"

    def op_probe(self):
        prompt, scope = self.prompt(), SCOPES[int(self.chance(0.2))]
        self.note("probe", prompt.tolist(), f"salt={scope.salt}")
        self.check_match(self.w.probe(prompt, scope=scope), prompt, scope, len(prompt))

    def op_step(self):
        """Several sequences in one prepare, then each reports, or stays in flight."""
        runs = [r for r in self.active() if self.chance(0.7)]
        going = []
        for run in runs:
            if run.closed:
                continue
            left = len(run.prompt) - len(run.held)
            n = int(self.rng.integers(1, 8))
            if left > 0:
                n = min(n, left)
                points = [p - run.seq.length for p in run.seq.snapshot_points if p < len(run.prompt)]
                if points and self.chance(0.6):
                    n = int(points[0])
                elif self.chance(0.4):
                    n = left
            n = min(n, self.longest - run.seq.length)
            if n == 0:
                continue
            extra = int(self.rng.integers(0, self.longest - run.seq.length - n + 1)) if self.chance(0.2) else 0
            before = self.w.stats()
            if not run.reserve(n + extra):
                self.note("no room", run, n + extra)
                assert self.w.stats() == before
                if self.chance(0.3):
                    self.close(self.pick([r for r in self.w.runs if r not in [run for run, _ in going]]))
                continue
            going.append((run, n))
        if not going:
            return
        self.w.prepare(*(run for run, _ in going))
        for run, n in going:
            run.flying, run.reserved = True, run.seq.capacity
            if self.chance(0.05):
                self.note("prepared, not run", run)
                continue
            new = run.prompt[len(run.held) :][:n] if len(run.held) < len(run.prompt) else self.random_tokens(n)
            self.note("step", run, new.tolist())
            run.write(new)
        for run, _ in going:
            if self.chance(0.8):
                self.report(run)

    def op_report(self):
        run = self.pick(self.active(in_flight=True))
        if run is not None:
            self.report(run)

    def report(self, run):
        """advance or commit: what was in flight is known now."""
        n = len(run.flight)
        if not n:
            self.note("advance 0", run)
            run.flying = False
            run.advance(0)
            return
        snapshot = [None, None, True, False][self.rng.integers(4)]
        if run.ended or self.chance(0.25):
            if not self.w.recurrent and self.chance(0.3):
                n = int(self.rng.integers(1, n + 1))
            points = run.seq.snapshot_points
            self.note("advance", run, n, f"snapshot={snapshot}")
            run.flying = False
            run.advance(n, snapshot=snapshot)
            self.plan(run, snapshot, points)
            return
        end = self.chance(0.08)
        points = run.seq.snapshot_points
        self.note("commit", run, f"snapshot={snapshot} end={end}")
        run.flying = False
        run.commit(snapshot=None if end else snapshot, end=end)
        self.plan(run, True if end else snapshot, points)
        self.model.publish(run)

    def plan(self, run, snapshot, points):
        """The state at the present length will be a snapshot, if there is room."""
        if run.ended and run.seq.length != run.seq.committed:
            return
        if snapshot is True or (snapshot is None and run.seq.length in points):
            run.planned.append(run.seq.length)

    def op_late_commit(self):
        runs = [r for r in self.w.runs if r.seq.status == "active" and not r.ended and r.seq.length > r.seq.committed]
        run = self.pick(runs)
        if run is None:
            return
        n = run.seq.length - run.seq.committed
        n = n if self.chance(0.6) else int(self.rng.integers(1, n + 1))
        self.note("late commit", run, n)
        whole = run.seq.committed + n == run.seq.length
        end = whole and not run.flying and self.chance(0.1)
        run.commit(n, **({"end": True} if end else {}))
        if end:
            run.planned.append(run.seq.length)
        self.model.publish(run)

    def op_rewind(self):
        run = self.pick([r for r in self.active() if not r.ended and r.seq.length > r.seq.committed])
        if run is None:
            return
        n = int(self.rng.integers(1, run.seq.length - run.seq.committed + 1))
        self.note("rewind", run, n)
        if self.w.recurrent:
            with pytest.raises(jkv.SequenceStateError):
                run.seq.rewind(n)
            self.w.check()
        else:
            run.rewind(n)

    def op_resize(self):
        run = self.pick(self.active())
        if run is not None:
            capacity = int(self.rng.integers(run.seq.length, run.seq.capacity + 1))
            self.note("resize", run, capacity)
            assert run.seq.resize(capacity)
            self.w.check()

    def op_suspend(self):
        run = self.pick(self.active())
        if run is not None:
            self.note("suspend", run)
            run.suspend()

    def op_prefetch(self):
        run = self.pick(self.idle())
        if run is not None:
            tier = self.pick(list(self.tiers))
            self.note("prefetch", run, tier)
            before, status = self.w.stats(), run.seq.status
            if not run.prefetch(tier):
                self.note("  refused")
                assert status == "loading" or self.w.stats() == before

    def op_pace(self):
        """What goes to host memory takes its time, and nobody waits for it."""
        self.w.waits = self.chance(0.3)
        if self.chance(0.3):
            self.w.delay(0.002)

    def op_reset(self):
        self.note("reset")
        self.w.reset()
        assert all(pool.tree == pool.private == 0 for pool in self.w.pools().values())

    def op_resize_tier(self):
        """Between two sizes, so that steps compile seldom."""
        tier = self.pick(list(self.sizes))
        more = 3 * int(self.rng.integers(2))
        self.note("resize_tier", tier, f"+{more}")
        with contextlib.suppress(jkv.OutOfPagesError):
            self.w.resize_tier(tier, pages={group: pages + more for group, pages in self.sizes[tier].items()})

    def op_epoch(self):
        """Other weights, or with a store perhaps those of before."""
        name = "other" if self.w.manager.config.model == self.w.config.model else self.w.config.model
        self.note("new_epoch", name)
        self.w.manager.new_epoch(name)
        self.w.check()

    def op_drop(self):
        if self.drops:
            self.note("drop")
            self.drops.pop(self.rng.integers(len(self.drops))).drop()
            self.w.check()

    def op_restart(self):
        killed = self.chance(0.3)
        self.note("restart", "killed" * killed)
        if not killed:
            for run in list(self.w.runs):
                self.close(run)
        self.w.restart(killed=killed)

    def op_damage(self):
        """Somebody lays hands on a file of the store."""
        files = sorted(p for p in pathlib.Path(self.w.config.store_tier.location).rglob("*") if p.is_file())
        if not files:
            return
        self.w.settle()
        self.w.faulty = ("store",)
        file, way = files[self.rng.integers(len(files))], self.rng.integers(3)
        self.note("damage", file, way)
        if way == 0:
            file.unlink(missing_ok=True)
        elif file.exists() and file.stat().st_size:
            value = bytearray(file.read_bytes())
            at = int(self.rng.integers(len(value)))
            value = (
                value[:at]
                if way == 1
                else value[:at] + bytes([value[at] ^ 1 << self.rng.integers(8)]) + value[at + 1 :]
            )
            file.write_bytes(value)

    def op_stop_committing(self):
        run = self.pick([r for r in self.active() if not r.ended])
        if run is not None and self.chance(0.3):
            self.note("stop_committing", run)
            if run.seq.length == run.seq.committed:
                run.planned.append(run.seq.length)
            run.stop_committing()
            self.model.publish(run)

    def op_close(self):
        run = self.pick(self.w.runs)
        if run is not None:
            self.close(run)

    def close(self, run):
        self.note("close", run, "in flight" if run.flying else "")
        if run.started and not run.flying and not run.ended and run.seq.length == run.seq.committed:
            run.planned.append(run.seq.length)
        run.close()
        self.drops = [*self.drops[-7:], run.seq.plan_drop()]
        if run.started:
            self.model.publish(run)
            if len(run.held):
                self.remember(run.held)

    def op_flush(self):
        self.note("flush")
        self.w.flush()

    def op_drain(self):
        """Liveness: without sequences everything is evictable, and the largest request fits."""
        if not self.chance(0.25):
            return
        self.note("drain")
        for run in list(self.w.runs):
            self.close(run)
        self.nobody_owns_anything()
        if self.chance(0.3):
            self.note("clear")
            self.w.manager.clear()
            self.w.check()
            if not self.store:
                self.model.clear()
            assert all(pool.free == pool.total for _, _, pool in self.w.every_pool())
        run = Run(self.w, self.random_tokens(self.longest))
        run.max_reuse = len(run.prompt) - 1
        run.planned, run.flying = [], False
        self.resume(run, wait=True)
        assert run.seq.status == "active"
        points = run.seq.snapshot_points
        run.dispatch(run.prompt[run.seq.length :])
        run.commit()
        self.plan(run, None, points)
        self.close(run)

    def nobody_owns_anything(self):
        for tier, name, pool in self.w.every_pool():
            assert pool.private == 0 and pool.evictable == pool.tree, f"{tier} {name}: {pool}"

    def run(self, steps):
        names, weights = list(self.ops), np.array(list(self.ops.values()))
        for _ in range(steps):
            getattr(self, f"op_{self.rng.choice(names, p=weights / weights.sum())}")()
        for run in list(self.w.runs):
            self.close(run)
        self.w.waits = True
        self.w.flush()
        self.nobody_owns_anything()


OPS = {
    "open": 4, "resume": 3, "probe": 2, "step": 9, "report": 2, "late_commit": 4, "rewind": 1, "resize": 1,
    "suspend": 1.5, "stop_committing": 0.5, "close": 3, "flush": 0.5, "drain": 0.3,
}  # fmt: skip

HOST_OPS = {
    **OPS, "suspend": 4, "resume": 4, "prefetch": 1, "pace": 0.5, "reset": 0.1, "resize_tier": 0.2, "epoch": 0.1,
    "drop": 1,
}  # fmt: skip
STORE_OPS = {**HOST_OPS, "restart": 0.2}

Run.checked = False


def drive(driver, name, request, share=1.0):
    try:
        driver.run(int(share * request.config.getoption("--random-steps")))
    except BaseException as error:
        last, seed = "\n  ".join(driver.log[-60:]), request.config.getoption("--random-seed")
        error.add_note(f"{name!r} with --random-seed {seed}, the last of {len(driver.log)} operations:\n  {last}")
        raise


@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic(name, request):
    seed = [request.config.getoption("--random-seed"), list(CONFIGS).index(name)]
    drive(Driver(*CONFIGS[name], seed=seed), name, request)


@pytest.mark.parametrize("name", HOST_CONFIGS)
def test_random_traffic_with_host_memory(name, request):
    seed = [request.config.getoption("--random-seed"), list(HOST_CONFIGS).index(name)]
    drive(Driver(*HOST_CONFIGS[name], False, seed, HOST_OPS), name, request, 0.3)


@pytest.mark.parametrize("damage", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("name", STORE_CONFIGS)
def test_random_traffic_with_a_store(name, damage, request, tmp_path):
    seed = [request.config.getoption("--random-seed"), list(STORE_CONFIGS).index(name)]
    groups, config = STORE_CONFIGS[name]
    config = {**config, "store": jkv.StoreTier(str(tmp_path), bytes=5_000 if damage else None)}
    ops = {**STORE_OPS, "damage": 1} if damage else STORE_OPS
    drive(Driver(groups, config, False, seed, ops), name, request, 0.15 if damage else 0.3)


@pytest.mark.parametrize("name", ["full+window+recurrent, tiny", "full+window, shared, tiny"])
def test_the_same_calls_make_the_same_decisions(name):
    """No clock, no randomness, no hash order: page for page."""
    drivers = [Driver(*CONFIGS[name], seed=3) for _ in range(2)]
    for driver in drivers:
        driver.run(100)
    one, two = drivers
    assert one.log == two.log
    assert one.w.manager.stats() == two.w.manager.stats()
    for group in one.w.tables:
        assert np.array_equal(one.w.tables[group], two.w.tables[group])
    for key in one.w.bytes:
        assert np.array_equal(one.w.bytes[key], two.w.bytes[key])


# ------------------------------------------------------------------------------------ found by the driver, shrunk


def test_found_two_private_copies_of_one_page_and_no_room():
    """The counters promised a page that eviction could not find."""
    w = World("window:1+6 window:6", pages=10, max_length=30, page_size=3, min_snapshot=True)
    a = w.start([1, 2, 0, 0, 0, 2, 0, 0, 0, 2, 2, 1])
    a.step([1, 2, 0, 0, 0, 2])
    a.close()
    b = w.start([1, 2, 1, 1, 0, 2, 2])
    c = w.start([1, 2, 1, 2, 2, 0, 2, 2, 1, 1])
    assert (b.reused, c.reused) == (2, 2)
    b.reserve(5)
    c.reserve(19)
    w.prepare(b, c)
    w.close_all()
    w.turn([0] * 30)


def test_found_attention_tokens_are_no_fewer_than_tokens():
    """The hit lay on a shorter branch than the one that attention_tokens was counted on."""
    w = World("full window:5 recurrent", page_size=3, pages=40)
    a = [2, 1, 0, 2, 2, 0, 2, 1, 0, 1, 2, 1]
    w.turn(a, [7, 5], close=False)
    b = [2, 1, 0, 2, 2, 0, 2, 0, 2, 2, 0, 0, 1]
    assert w.turn(b, snapshot=None, close=False).reused == 7
    match = w.probe([*b[:12], 2, 0])
    assert (match.raw_tokens, match.limited_by) == (12, "window:5")
    assert match.tokens == 7
    assert match.attention_tokens >= 7


def test_found_a_lent_state_whose_page_is_evicted():
    """b's lent state hung on a page that only a, closed, had: evicting the page gave the slot away under b."""
    w = World("full recurrent", pages={"full": 12, "recurrent": 5}, max_length=40)
    text = [2, 1, 2, 0, 1, 2, 2, 0, 1, 0, 1, 1, 0, 2, 0, 2]
    a = w.start(text)
    a.step(text[:12], snapshot=True)
    a.close()
    b = w.start(text[:6], max_reuse=3)
    b.step(text[:4])
    b.dispatch(text[4:6])
    b.commit(end=True)
    x = w.start([0, 0], max_reuse=0)
    x.dispatch([0] * 14)
    x.advance()
    assert x.reserve(23) in (True, False)
    w.flush()  # b's state is still b's
    b.close()
    x.close()
    w.turn([0] * 40)


def test_found_an_end_that_hands_over_a_state_in_a_full_pool():
    """The state went to the tree, and the node that it went to was gone."""
    w = World("recurrent", page_size=5, pages=4, max_length=40, max_sequences=3)
    a = w.start([0] * 30, max_reuse=0)
    a.step([0, 0], snapshot=True)
    a.close()
    b = w.start([0, 0, 1, 2, 1, 1, 2, 1, 1, 1, 2])
    b.step([1, 2, 1, 1, 2, 1, 1, 1], snapshot=True)
    b.close()
    c = w.start([0, 0])
    w.start([0, 0, 2, 1, 2, 1], max_reuse=0)
    w.start([0, 2, 1, 1], max_reuse=0)
    c.dispatch([0, 0])
    c.commit(end=True)
    w.flush()
    w.close_all()
    assert w.hit([0, 0, 3]) in (0, 2)
