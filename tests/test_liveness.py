"""From any state something can progress (FAULTS, kind 8): every request that fits an empty cache finishes.

A scheduler as a user of jkv would write it, on pools that are barely large enough, and `can_ever_fit` at its boundary.
"""

import dataclasses
import re
from typing import ClassVar

import numpy as np
import pytest
from oracle import Run, World, fresh, join, make_config, tokens

import jkv

MIXES = ("full", "full window:6", "window:5+3", "full recurrent", "full window:4+2 recurrent", "recurrent")
LONGEST = 24
ROWS = 3


def pages_for(groups, prompt, new, extra=0, **config):
    """The fewest pages of each group with which `can_ever_fit` says yes, and `extra` more; of states one per row."""
    names = groups.split()
    pages = dict.fromkeys(names, 2 * config["max_length"])
    for name in names:
        for count in range(1, 2 * config["max_length"]):
            fewer = {**pages, name: ROWS + extra if name == "recurrent" else count}
            manager = jkv.CacheManager(make_config(groups, pages=tuple(fewer.items()), max_sequences=ROWS, **config))
            if manager.can_ever_fit(prompt, new):
                pages = fewer
                break
    return {name: count + (name != "recurrent") * extra for name, count in pages.items()}


# ------------------------------------------------------------------------------------------------ a scheduler


@dataclasses.dataclass(eq=False)
class Request:
    """What is wanted, and how far it is.

    Attributes:
      text: the prompt, and what the model is going to say.
      known: tokens of it whose ids are known: the prompt, and what was said so far.
      copies: other samples of the same prompt that are wanted.
      run: its sequence; None: it has none, or none any more.
      age: which of all requests it is.
    """

    text: np.ndarray
    known: int
    copies: int = 0
    run: Run | None = None
    age: int = 0
    retry: bool = False

    @property
    def asleep(self):
        """Whether it keeps pages without running."""
        return self.run is not None and self.run.started and self.run.seq.row is None


class Scheduler:
    """Continuous batching: admission in order, prefill in chunks beside decode, the youngest gives way.

    What runs are the oldest of all that are open: the head of the queue is admitted or nobody, and whoever is preempted
    is the youngest that runs. So the oldest request of all is never preempted, and it gets a token in every step: in
    the worst case it runs alone. Behind a tier for it the preempted are suspended, else closed and opened again.

    Args:
      overlaps: the ids of a step arrive when the next one was dispatched.
      drafts: tokens guessed in each decode step, of which some are rejected; attention only.
      generator: what is left open, such as which steps leave snapshots, and which drafts are accepted.
    """

    def __init__(self, world, chunk, generator, overlaps=False, drafts=0):
        self.world, self.chunk, self.generator = world, chunk, generator
        self.overlaps, self.drafts = overlaps, drafts
        self.suspends = world.manager.config.host_tier is not None
        self.running: list[Request] = []  # oldest first
        self.waiting: list[Request] = []
        self.work = self.steps = self.submitted = self.preempted = self.forked = 0
        self.finished: list[Request] = []

    def submit(self, request):
        """False: it could never be served."""
        new = len(request.text) - request.known
        if not self.world.manager.can_ever_fit(request.known, new + self.drafts):
            return False
        self._enter(request)
        self.waiting.append(request)
        return True

    def _enter(self, request):
        self.submitted += 1
        self.work += len(request.text)
        request.age = self.submitted

    @property
    def busy(self):
        return bool(self.running or self.waiting)

    def step(self):
        self.steps += 1
        self._admit()
        counts = {request: self._make_room(request) for request in list(self.running) if request in self.running}
        batch = [request for request in counts if request in self.running]
        oldest = self.running[0]
        assert oldest in batch
        assert all(oldest.age < request.age for request in self.waiting)
        before = oldest.run.seq.length
        self.world.prepare(*[request.run for request in batch])
        for request in batch:
            self._write(request, counts[request])
        assert oldest.run.closed or oldest.run.seq.length > before

    def _admit(self):
        while self.waiting and len(self.running) < ROWS:
            head = self.waiting[0]
            if head.run is None:
                head.run = self.world.open(head.text[: head.known], retry=head.retry)
            if head.run.resume():
                self.running.append(self.waiting.pop(0))
            elif self.running:
                return
            else:
                self._drop_one_asleep(head)

    def _make_room(self, request):
        """The tokens that it writes next, with room for them; 0: it gave way."""
        run = request.run
        n = max(1, min(self.chunk, request.known - run.seq.length))
        if self._decodes(request):
            n += self.drafts
        while True:
            try:
                if run.reserve(n):
                    return n
            except jkv.OutOfPagesError:  # what a preempted request has said can be more than a prompt may be
                assert n > 1
                self.world.check()
                n = (n + 1) // 2
            else:
                if not self._make_way(request):
                    return 0

    def _make_way(self, request):
        """Something gives way; False: `request` itself."""
        late = [other for other in self.running if other.run.seq.committed < other.run.seq.length]
        if late:  # windows keep what is behind the committed length
            for other in late:
                other.run.commit()
            return True
        youngest = self.running[-1]
        if len(self.running) > 1:
            self._preempt(youngest)
            return youngest is not request
        self._drop_one_asleep(request)
        return True

    def _preempt(self, request):
        self.preempted += 1
        self.running.remove(request)
        self.waiting = sorted([request, *self.waiting], key=lambda each: each.age)
        if self.suspends:
            request.run.suspend()
        else:
            self._drop(request)

    def _drop_one_asleep(self, needed_by):
        asleep = [request for request in self.waiting if request.asleep and request is not needed_by]
        assert asleep, f"nobody is left to give way to {needed_by.run}: {self.world.manager.stats()}"
        self._drop(asleep[-1])

    def _drop(self, request):
        """Closed; later it starts over with all that is known."""
        request.run.close()
        request.run, request.retry = None, True

    def _decodes(self, request):
        return request.run.seq.length >= request.known and self.drafts

    def _write(self, request, n):
        run, text, length = request.run, request.text, request.run.seq.length
        if self._decodes(request):
            right = min(int(self.generator.integers(1, n + 1)), len(text) - length)
            run.write(join(text[length : length + right], fresh(n - right)))
            run.advance()
            run.rewind(n - right)
            run.commit()
        else:
            run.write(text[length : length + n])
            self._report(run)
        request.known = max(request.known, run.seq.length)
        if request.copies and run.seq.length >= request.known:
            self._sample(request)
        if run.seq.length == len(text):
            if run.seq.committed < run.seq.length:
                run.commit()
            assert np.array_equal(run.held, text)
            run.close()
            self.running.remove(request)
            self.finished.append(request)

    def _report(self, run):
        snapshot = [None, True, False][self.generator.integers(3)]
        if self.overlaps:
            if run.seq.committed < run.seq.length:
                run.commit(run.seq.length - run.seq.committed)
            run.advance(snapshot=snapshot)
        else:
            run.commit(snapshot=snapshot)

    def _sample(self, request):
        """The other samples: copies of the sequence, and if there is no room for them requests of their own."""
        count, request.copies = request.copies, 0
        texts = [join(request.text[: request.known], fresh(len(request.text) - request.known)) for _ in range(count)]
        copies = request.run.fork(count) if len(self.running) + count <= ROWS and not self.waiting else []
        self.forked += len(copies)
        for i, text in enumerate(texts):
            other = Request(text, request.known, run=copies[i] if copies else None)
            self._enter(other)
            (self.running if copies else self.waiting).append(other)


def requests(world, generator, count):
    """Random requests, of which some just fit, and some just do not; their beginnings are few."""
    for _ in range(count):
        prompt = int(generator.integers(1, LONGEST))
        fitting = [new for new in range(LONGEST - prompt + 1) if world.manager.can_ever_fit(prompt, new)]
        most = fitting[-1] if fitting else 0
        new = min(LONGEST - prompt, [most, most + 1, int(generator.integers(most + 1))][generator.integers(3)])
        shared = int(generator.integers(prompt + 1))
        text = join(tokens(shared, int(generator.integers(2))), tokens(prompt + new - shared, generator.integers(4)))
        yield Request(text, prompt, copies=int(generator.integers(3) == 0 and new > 0))


def serve_all(world, scheduler, arriving, generator):
    """Submits and steps until everything is finished.

    The oldest request gets a token in every step, so there are no more steps than tokens in all requests.
    """
    refused = 0
    while scheduler.busy or arriving:
        while arriving and (not scheduler.busy or generator.integers(3) == 0):
            refused += not scheduler.submit(arriving.pop(0))
        if scheduler.busy:
            scheduler.step()
            assert scheduler.steps <= scheduler.work
    assert len(scheduler.finished) == scheduler.submitted and not world.runs
    world.flush()
    for tier, name, pool in world.every_pool():
        assert pool.private == 0 and pool.free + pool.tree == pool.total, f"{tier}, {name}: {pool}"
        assert pool.evictable == pool.tree, f"{tier}, {name}: {pool}"
    return refused


def churn(groups, generator, **config):
    """Random requests, with and without host memory, for pools that the largest just fits, or nearly."""
    config = {"max_length": LONGEST, **config}
    prompt, new = int(generator.integers(2, 12)), int(generator.integers(4, 12))
    pages = pages_for(groups, prompt, new, extra=int(generator.integers(2)), **config)
    for host in (None, int(generator.integers(1, 12))):
        w = World(groups, pages=pages, host=host, max_sequences=ROWS, **config)
        w.waits = bool(generator.integers(2))
        drafts = 0 if "recurrent" in groups else int(generator.integers(3))
        chunk, overlaps = int(generator.integers(1, 9)), bool(generator.integers(2))
        serve_all(w, Scheduler(w, chunk, generator, overlaps, drafts), list(requests(w, generator, 6)), generator)


@pytest.mark.parametrize("page_size", range(1, 9))
@pytest.mark.parametrize("groups", MIXES)
def test_every_request_finishes(groups, page_size):
    churn(groups, np.random.default_rng([MIXES.index(groups), page_size]), page_size=page_size)


@pytest.mark.parametrize(
    "config",
    [
        {"shared": True},
        {"min_snapshot": True},
        {"min_snapshot": False},
        {"window_scratch": jkv.WindowScratch(2)},
        {"partial_reuse": False},
        {"reuse_backoff": 3},
        {"max_utilization_for_resume": 1.0},
        {"max_utilization_for_resume": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", ["full window:6", "window:3 window:5+3", "full window:4+2 recurrent"])
def test_every_request_finishes_whatever_the_configuration(groups, config):
    churn(groups, np.random.default_rng(len(groups)), page_size=3, **config)


@pytest.mark.parametrize("host", [None, 2, 30])
@pytest.mark.parametrize("groups", ["full", "full window:6", "full recurrent"])
def test_what_the_scheduler_does_when_it_is_tight(groups, host):
    """Two requests and another sample of the second; each fits alone, two do not."""
    generator = np.random.default_rng(0)
    w = World(groups, pages=6, host=host, max_sequences=ROWS, max_length=LONGEST)
    scheduler = Scheduler(w, 4, generator)
    arriving = [Request(tokens(LONGEST, key), 2, copies=key) for key in range(2)]
    assert serve_all(w, scheduler, arriving, generator) == 0
    assert scheduler.preempted and scheduler.forked


# ------------------------------------------------------------------------------------------------ can_ever_fit


class HostHalf:
    """A manager without a device: what fits is decided without one."""

    states: ClassVar = {}

    def __init__(self, groups, **config):
        self.config = config
        self.manager = jkv.CacheManager(make_config(groups, max_sequences=ROWS, **config))
        if groups not in self.states:
            self.states[groups] = self.manager.init()
        self.state = dataclasses.replace(self.states[groups], layout=self.manager.layout)

    def serve(self, prompt, new, chunk=None, snapshot=None):
        """One request alone: the prompt in one chunk, then token by token."""
        ids = fresh(prompt + new)
        with self.manager.open(ids[:prompt]) as seq:
            assert seq.resume(), f"refused: {self.manager.stats()}"
            ends = [
                *range(chunk or prompt or 1, prompt, chunk or prompt or 1),
                prompt,
                *range(prompt + 1, prompt + new + 1),
            ]
            for end in ends:
                assert seq.reserve(end - seq.length), f"{seq}: {self.manager.stats()}"
                self.state, _ = self.manager.prepare(self.state, [seq])
                seq.commit(ids[seq.length : end], snapshot=snapshot)
        self.manager.check()


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr("jkv.manager.apply", lambda state, plan: state)


VARIANTS = {
    "": {},
    "min_snapshot": {"min_snapshot": True},
    "shared": {"shared": True},
    "scratch": {"window_scratch": jkv.WindowScratch(0)},
    "scratch, rewind": {"window_scratch": jkv.WindowScratch(3)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("groups", [*MIXES, "window:1", "full window:3 window:9+1"])
def test_can_ever_fit_is_exact(groups, page_size, variant, no_device):
    """Yes: it runs to its end, beside whatever is cached. No: an error that names the number of pages that will do."""
    generator = np.random.default_rng(page_size)
    config = {"page_size": page_size, "max_length": LONGEST, **VARIANTS[variant]}
    growing = [group for group in groups.split() if group != "recurrent"]
    whole = -(-LONGEST // page_size)
    for _ in range(6):
        pages = {group: int(generator.integers(1, whole + 2)) for group in growing}
        pages.update({"recurrent": ROWS} if "recurrent" in groups else {})
        half = HostHalf(groups, pages=tuple(pages.items()), **config)
        for prompt in (int(n) for n in generator.integers(0, LONGEST + 1, 4)):
            fits = [new for new in range(LONGEST - prompt + 1) if half.manager.can_ever_fit(prompt, new)]
            assert fits == list(range(len(fits)))
            if fits:
                for snapshot in (None, True, False):
                    half.serve(prompt, fits[-1], snapshot=snapshot)
            if len(fits) <= LONGEST - prompt:
                enlarge(groups, pages, config, prompt, len(fits))


def enlarge(groups, pages, config, prompt, new):
    """Serves what does not fit `pages`, after as many errors as it takes, each of which names what it needs."""
    pages, half = dict(pages), HostHalf(groups, pages=tuple(pages.items()), **config)
    while not half.manager.can_ever_fit(prompt, new):
        with pytest.raises(jkv.OutOfPagesError) as raised:
            half.serve(prompt, new)
        half.manager.check()
        needed, pool, there = re.search(
            r"needs (\d+) pages of pool '(.*)', which has (\d+)", str(raised.value)
        ).groups()
        assert int(needed) > int(there) == half.manager.stats().pools[pool].total
        pages[pool.split(",")[0]] += int(needed) - int(there)
        half = HostHalf(groups, pages=tuple(pages.items()), **config)
        if int(needed) > int(there) + 1:
            fewer = {**pages, pool.split(",")[0]: pages[pool.split(",")[0]] - 1}
            assert not HostHalf(groups, pages=tuple(fewer.items()), **config).manager.can_ever_fit(prompt, new)
    half.serve(prompt, new)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("groups", [*MIXES, "window:1", "window:3"])
def test_alone_there_is_room_or_an_error(groups, page_size, no_device):
    """No "not now" where nobody else has anything and all is committed: waiting would not help."""
    generator = np.random.default_rng(page_size)
    for case in range(12):
        pages = {group: int(generator.integers(1, 8)) for group in groups.split()}
        pages.update({"recurrent": ROWS} if "recurrent" in groups else {})
        scratch = [None, jkv.WindowScratch(0), jkv.WindowScratch(2)][case % 3]
        half = HostHalf(
            groups, pages=tuple(pages.items()), page_size=page_size, max_length=LONGEST, window_scratch=scratch
        )
        seq = half.manager.open(fresh(4))
        assert seq.resume()
        stopped = False
        for _ in range(30):
            n = int(generator.integers(0, LONGEST - seq.length + 1))
            try:
                assert seq.reserve(n), f"{seq}, {n} more: {half.manager.stats().pools}"
            except jkv.OutOfPagesError:
                assert seq.reserve(0)
                continue
            shortest = max(0, n - scratch.max_rewind) if scratch else 0
            n = int(generator.integers(shortest, n + 1))
            if n and not stopped and generator.integers(2):
                seq.plan_snapshots(generator.integers(seq.length + 1, seq.length + n + 1, 1))
            half.state, _ = half.manager.prepare(half.state, [seq])
            if stopped or not n:
                seq.advance(n)
            else:
                seq.commit(fresh(n), snapshot=[None, True, False][generator.integers(3)])
            if generator.integers(15) == 0:
                seq.stop_committing()
                stopped = True
            half.manager.check()
        seq.close()


def test_an_endpoint_in_a_page_that_is_not_full_keeps_its_window():
    """P=4, W=3: the endpoint at 5 needs page 0 until page 1 is full, so of 2 pages none is left for position 8."""
    w = World("window:3", pages=2)
    run = w.start(tokens(5)).prefill(snapshot=True)
    run.step(fresh(2), snapshot=False)
    with w.unchanged(), pytest.raises(jkv.OutOfPagesError, match="needs 3 pages"):
        run.seq.reserve(2)
    run.step(fresh())
    run.step(fresh())


@pytest.mark.parametrize("groups", MIXES)
def test_longer_than_max_length(groups):
    w = World(groups, pages=64, max_length=LONGEST)
    assert w.manager.can_ever_fit(LONGEST, 0) and w.manager.can_ever_fit(0, LONGEST)
    for prompt, new in ((LONGEST, 1), (LONGEST - 1, 2), (LONGEST + 1, 0), (0, LONGEST + 1)):
        assert not w.manager.can_ever_fit(prompt, new)
    with pytest.raises(jkv.ConfigError, match=rf"{LONGEST + 1} .*{LONGEST}"):
        w.open(tokens(LONGEST + 1))
    run = w.start(tokens(LONGEST)).prefill()
    with w.unchanged(), pytest.raises(jkv.OutOfPagesError, match=rf"{LONGEST + 1} .*{LONGEST}"):
        run.seq.reserve(1)
    run.close()


@pytest.mark.parametrize("host", [None, 3])
@pytest.mark.parametrize("groups", MIXES)
def test_what_just_fits_runs_in_a_full_cache(groups, host):
    """Alone, but beside what others left, its own beginning among it; every byte compared."""
    config = {"page_size": 4, "max_length": LONGEST}
    pages = pages_for(groups, 9, 12, **config)
    w = World(groups, pages=pages, host=host, max_sequences=ROWS, **config)
    text = tokens(21)
    for shared in (0, 3, 8, 9, 21):
        for reused in (9, 0):
            run = w.start(join(text[:shared], fresh(9))[:9], max_reuse=reused).prefill(snapshot=shared % 2 == 0)
            while run.seq.length < 21:
                known = np.array_equal(run.held, text[: run.seq.length])
                run.step(text[run.seq.length : run.seq.length + 1] if known else fresh())
            run.close()
