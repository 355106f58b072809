"""Whole batches in one call: `prepare_ragged`, and `reserve`, `advance`, `commit` of the manager.

The batch verbs are the sequences' own calls one after the other: two worlds get the same traffic, one of them in
batches, and must agree in everything that can be seen.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

KINDS = ["full", "full window:6", "window:5+3", "recurrent", "full window:6 recurrent"]


def batching(groups="full window:6 recurrent", **config):
    pages = {group: 12 if group == "recurrent" else 64 for group in groups.split()}
    return World(groups, **{"max_length": 64, "pages": pages, **config})


def two(**config):
    """Two runs after 6 and 9 tokens."""
    w = batching("full recurrent", **config)
    return w, w.start(tokens(30, "a")[:6]).prefill(), w.start(tokens(30, "b")[:9]).prefill()


def renamed(table):
    """Page ids by their first appearance: a batch makes room for all its pages at once, so it may get others."""
    names = {0: 0}
    return [[names.setdefault(page, len(names)) for page in row] for row in table.tolist()]


def agree(one, two):
    """Everything that a caller can see is the same in both worlds."""
    for w in (one, two):
        w.flush()
    assert one.manager.stats() == two.manager.stats()
    for a, b in zip(one.runs, two.runs, strict=True):
        seen = [
            (r.seq.status, r.seq.row, r.seq.committed, r.seq.length, r.seq.capacity, r.seq.snapshot_points)
            for r in (a, b)
        ]
        assert seen[0] == seen[1]
    for group in one.tables:
        assert np.array_equal(renamed(one.tables[group]), renamed(two.tables[group]))
    if one.recurrent:
        assert np.array_equal(one.slots, two.slots)


# ------------------------------------------------------------------------------------------------ ragged steps


@pytest.mark.parametrize("groups", KINDS)
def test_s59_a_ragged_step_leaves_the_bytes_of_padded_ones(groups):
    """Prefill chunks and decodes of three sequences in one step, one after the other in another world."""
    flat, padded = batching(groups), batching(groups)
    texts = [tokens(40, key) for key in "abc"]
    steps = [(7, 5, 1), (1, 1, 9), (1, 8, 1), (3, 1, 12), (1, 1, 1)]
    for w in (flat, padded):
        runs = [w.start(text) for text in texts]
        for counts in steps:
            news = [run.prompt[run.seq.length :][:n] for run, n in zip(runs, counts, strict=True)]
            for run, n in zip(runs, counts, strict=True):
                assert run.reserve(n)
            if w is flat:
                w.write_ragged(w.prepare_ragged(runs, counts), runs, news)
            else:
                w.prepare(*runs)
                for run, new in zip(runs, news, strict=True):
                    run.write(new)
            for run in runs:
                run.commit(snapshot=True)
        for run in runs:
            run.close()
    agree(flat, padded)
    for text, n in zip(texts, (13, 16, 24), strict=True):
        assert flat.probe(text) == padded.probe(text)
        assert flat.hit(text) == padded.hit(text) == n


def test_s59_rows_in_any_order_and_padding():
    w = batching()
    runs = [w.start(tokens(20, key)) for key in "abcd"]
    runs[1].suspend()
    for order in ([3, 0, 2], [2], [0, 3]):
        batch = [runs[i] for i in order]
        counts = [1 + i for i in order]
        for run, n in zip(batch, counts, strict=True):
            assert run.reserve(n + 2)  # more than the step takes
        ragged = w.prepare_ragged(batch, counts, pad_tokens=11, pad_sequences=3)
        assert ragged.positions.shape == (11,) and ragged.rows.shape == (3,) and ragged.cu_q_lens.shape == (4,)
        w.write_ragged(ragged, batch, [run.prompt[run.seq.length :][:n] for run, n in zip(batch, counts, strict=True)])
        for run in batch:
            run.commit()
        w.flush()


def test_s59_buckets():
    w, a, b = two()
    assert a.reserve(5) and b.reserve(1)
    for counts, tokens_, sequences in (([5, 1], 8, 2), ([1, 1], 2, 2), ([2, 1], 4, 2)):
        batch = w.prepare_ragged([a, b], counts, pad_tokens=[2, 4, 8], pad_sequences=(4, 2))
        assert (batch.positions.shape, batch.rows.shape) == ((tokens_,), (sequences,))
        a.advance(0)
        b.advance(0)
    batch = w.prepare_ragged([b], [1], pad_tokens=np.array([1, 2]), pad_sequences=np.int32(1))
    assert (batch.positions.shape, batch.rows.shape) == ((1,), (1,))
    b.advance(0)
    batch = w.prepare_ragged([], [], pad_tokens=4, pad_sequences=2)
    assert batch.rows.tolist() == [-1, -1] and batch.num_seqs.tolist() == [0]


def test_s59_puts_them_in_flight():
    w, a, b = two()
    assert a.reserve(3) and b.reserve(2)
    w.prepare_ragged([b], [1])
    a.suspend()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        b.seq.suspend()
    b.advance(0)
    b.suspend()


def test_s59_a_step_may_be_shorter_than_what_was_reserved():
    w, a, b = two()
    t = tokens(30, "a")
    assert a.reserve(10) and b.reserve(4)
    batch = w.prepare_ragged([a, b], [3, 4])
    w.write_ragged(batch, [a, b], [t[6:9], tokens(13, "b")[9:]])
    w.advance([a, b])
    batch = w.prepare_ragged([a], [1])
    w.write_ragged(batch, [a], [t[9:10]])
    w.commit([a, b])
    w.flush()


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ([6, 1], {}),  # five were reserved
        ([5, 2], {}),
        ([0, 1], {}),
        ([-1, 1], {}),
        ([5], {}),
        ([5, 1, 1], {}),
        ([5.0, 1], {}),
        (["5", 1], {}),
        (None, {}),
        ([5, 1], {"pad_tokens": 5}),
        ([5, 1], {"pad_tokens": [2, 4]}),
        ([5, 1], {"pad_sequences": 1}),
        ([5, 1], {"pad_tokens": 0}),
        ([5, 1], {"pad_tokens": []}),
        ([5, 1], {"pad_tokens": "8"}),
        ([5, 1], {"pad_sequences": None}),
    ],
)
def test_s59_bad_batches(counts, options):
    w, a, b = two()
    assert a.reserve(5) and b.reserve(1)
    options = {"pad_tokens": 16, "pad_sequences": 4, **options}
    with w.unchanged(), pytest.raises(jkv.CacheError):
        w.manager.prepare_ragged(w.state, [a.seq, b.seq], counts, **options)
    a.suspend()  # nothing is in flight
    w.flush()


def test_s59_bad_sequences():
    w, a, b = two()
    assert a.reserve(5) and b.reserve(1)
    other = batching("full recurrent").start()
    suspended, closed = w.start(), w.start()
    suspended.suspend()
    closed.close()
    for batch in ([a.seq, a.seq], [a.seq, suspended.seq], [closed.seq, b.seq], [a.seq, other.seq], [a.seq, None], 5):
        with w.unchanged(), pytest.raises(jkv.CacheError):
            w.manager.prepare_ragged(w.state, batch, [1, 1], pad_tokens=16, pad_sequences=4)
    state = w.state
    w.prepare_ragged([a, b], [5, 1])
    a.advance(0)
    assert a.reserve(9)
    w.prepare_ragged([a], [9])
    with w.unchanged(), pytest.raises(jkv.SequenceStateError, match="donated"):
        w.manager.prepare_ragged(state, [b.seq], [1], pad_tokens=16, pad_sequences=4)


def test_s59_beside_drafts_and_scratch():
    w = batching(max_drafts=2, window_scratch=jkv.WindowScratch(2))
    a, b = w.start(tokens(40, "a")), w.start(tokens(40, "b"))
    assert w.reserve([a, b], [30, 2]) == 2
    w.write_ragged(w.prepare_ragged([a, b], [30, 2], pad_tokens=32), [a, b], [tokens(30, "a"), tokens(2, "b")])
    w.advance([a, b])
    b.draft(tokens(5, "b")[2:])
    a.dispatch(tokens(31, "a")[30:])
    b.accept(1)
    w.advance([a])
    w.commit([b, a])
    w.flush()


# ------------------------------------------------------------------------------------------------ reserve


def test_batch_reserve_counts_the_leading_ones():
    w = batching("full", pages=6)
    runs = [w.start(tokens(4, key)).prefill() for key in "abc"]
    assert w.reserve(runs, [4, 4, 4]) == 3
    assert w.pool("full").free == 0
    assert w.reserve(runs, [4, 5, 4]) == 1  # the third keeps what it has
    assert [run.seq.capacity for run in runs] == [8, 8, 8]
    assert w.reserve(runs, 1) == 3
    assert w.reserve(runs[::-1], np.array([0, 8, 8])) == 2
    assert [run.seq.capacity for run in runs] == [5, 12, 4]
    w.flush()


def test_batch_reserve_of_a_sequence_that_could_never_have_it():
    w = batching("full", pages=6)
    runs = [w.start(tokens(4, key)).prefill() for key in "ab"]
    for counts in ([1, 40], [40, 1], [61, 1]):
        with pytest.raises(jkv.OutOfPagesError):
            w.manager.reserve([run.seq for run in runs], counts)
        w.check()
    w.flush()


def test_batch_reserve_for_one_that_lends_its_tail():
    one, other = batching("full recurrent"), batching("full recurrent")
    for w in (one, other):
        a, b = w.start(tokens(6, "a")).prefill(), w.start(tokens(6, "b")).prefill(end=True)
        if w is one:
            assert w.reserve([a, b], 2) == 2
        else:
            assert a.reserve(2) and b.reserve(2)
        w.prepare(a, b)
        a.write(fresh(2))
        b.write(fresh(2))
        if w is one:
            w.advance([a, b])
        else:
            a.advance()
            b.advance()
    agree(one, other)


# ------------------------------------------------------------------------------------------------ advance, commit


def test_batch_snapshot_points_are_reached():
    w = batching()
    prompts = [tokens(13, "a"), tokens(10, "b")]
    a, b = (w.start(prompt) for prompt in prompts)
    assert w.reserve([a, b], [12, 8]) == 2
    w.prepare(a, b)
    a.write(prompts[0][:12])
    b.write(prompts[1][:8])
    w.advance([a, b])
    assert a.seq.snapshot_points == b.seq.snapshot_points == ()
    assert w.pool("recurrent").private == 4
    w.commit([a, b], [12, 0])
    w.commit([b], 8)
    assert w.pool("recurrent").private == 2
    assert w.reserve([a, b], [1, 2]) == 2
    w.prepare(a, b)
    a.write(prompts[0][12:])
    b.write(prompts[1][8:])
    w.commit([a, b])
    for run in (a, b):
        run.dispatch(fresh())
        run.close()
    assert [w.hit(prompt) for prompt in prompts] == [12, 8]


def test_batch_advance_of_nothing():
    w, a, b = two()
    w.advance([], [])
    w.commit([], [])
    assert w.reserve([], []) == 0
    assert a.reserve(2) and b.reserve(2)
    w.prepare(a, b)
    w.advance([a, b], 0)  # the step did not run
    a.suspend()
    b.suspend()


def test_batch_reading_in_between():
    """Properties, scalar calls and batches of other members see the same lengths."""
    w, a, b = two()
    for i in range(12):
        assert w.reserve([a, b], 1) == 2
        assert (a.seq.capacity, b.seq.capacity) == (7 + i, 10 + i)
        w.prepare(a, b)
        a.write(fresh())
        b.write(fresh())
        w.advance([b, a])
        assert (a.seq.length, b.seq.length) == (7 + i, 10 + i)
        assert f"length={7 + i}" in repr(a.seq)
        w.commit([a, b] if i % 2 else [b, a])
        assert (a.seq.committed, b.seq.committed) == (7 + i, 10 + i)
    a.step(fresh(3))
    w.commit([a, b], 0)
    (copy,) = b.fork(1)
    assert (copy.seq.length, b.seq.length) == (21, 21)
    w.flush()


def test_batch_and_then_another_size_of_the_device():
    """Pages that move to other ids are shown as such, those that batch verbs took included."""
    layers = {"a": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32))}
    manager = jkv.CacheManager(jkv.CacheConfig(layers, 4, 64, page_size=4, tiers=jkv.DeviceTier(pages=40)))
    state, first = manager.init(), manager.open()
    assert first.resume() and first.reserve(30)
    active = [manager.open() for _ in range(3)]
    assert all(seq.resume() for seq in active)
    for step in range(15):
        assert manager.reserve(active, 1) == 3
        state, _ = manager.prepare(state, active)
        manager.commit(active, [step, step + 1, step + 2], 1)
    first.close()
    for pages in (16, 30):
        state = manager.resize_tier(state, "device", pages=pages)
        state, _ = manager.prepare(state, active)
        for seq in active:
            assert np.array_equal(np.asarray(state.page_tables["full"])[seq.row, :4], seq._table(0))
        manager.check()


@pytest.mark.parametrize("window", [1, 4])
def test_batch_reserve_with_window_scratch_is_that_of_the_sequence(window):
    def reserved(by_batch):
        layers = {
            "a": jkv.AttentionLayer(jkv.kv_buffers(1, 8, jnp.float32)),
            "w": jkv.AttentionLayer(jkv.kv_buffers(2, 8, jnp.float32), window=window),
        }
        config = jkv.CacheConfig(
            layers, 3, 64, page_size=4, window_scratch=jkv.WindowScratch(), tiers=jkv.DeviceTier(pages=40)
        )
        manager = jkv.CacheManager(config)
        state, seq = manager.init(), manager.open()
        assert seq.resume()
        assert manager.reserve([seq], 5) == 1
        state, _ = manager.prepare(state, [seq])
        manager.commit([seq], [1] * 5, 5)
        seen = []
        for n in (3, 7, 11):
            assert manager.reserve([seq], n) == 1 if by_batch else seq.reserve(n)
            manager.check()
            seen.append([seq._table(g).tolist() for g in range(2)])
        return seen, manager.stats()

    assert reserved(True) == reserved(False)


@pytest.mark.parametrize("end", ["close", "suspend", "end", "exception"])
def test_batch_and_then_the_end(end):
    w, a, b = two()
    for _ in range(5):
        assert w.reserve([a, b], 1) == 2
        w.prepare(a, b)
        a.write(fresh())
        b.write(fresh())
        w.commit([a, b])
    held = a.held
    if end == "close":
        a.close()
    elif end == "suspend":
        a.suspend()
        c = w.start(fresh(5)).prefill()
        assert a.resume()
        w.reserve([c, a, b], 2)
        w.flush()
        a.close()
    elif end == "end":
        a.step(fresh(), end=True)
        held = a.held
        with w.unchanged(), pytest.raises(jkv.SequenceStateError):
            w.manager.commit([b.seq, a.seq], [5], [0, 1])
        a.close()
    else:
        with pytest.raises(RuntimeError), a.seq:
            raise RuntimeError
        a.close()
    assert w.probe(join(held, fresh())).tokens == len(held)
    assert w.reserve([b], 1) == 1
    w.prepare(b)
    b.write(fresh())
    w.commit([b])
    w.flush()


@pytest.mark.parametrize("verb", ["advance", "commit"])
@pytest.mark.parametrize("groups", ["full", "full recurrent"])
def test_batch_errors_leave_everything(verb, groups):
    w = batching(groups, max_sequences=5)
    a, b, c, d = (w.start(tokens(5, key)).prefill() for key in "abcd")
    closed, other = w.start(), batching(groups).start()
    closed.close()
    assert w.reserve([a, b, c, d], 2) == 4
    w.prepare(a, b, c)
    for run in (a, b, c):
        run.write(fresh(2))
    d.suspend()

    def refused(runs, counts, ids=None, error=jkv.CacheError):
        seqs = [getattr(run, "seq", run) for run in runs] if isinstance(runs, list) else runs
        with w.unchanged(), pytest.raises(error):
            if verb == "advance":
                w.manager.advance(seqs, counts)
            else:
                w.manager.commit(seqs, fresh(sum(counts)) if ids is None else ids, counts)

    refused([a, b], [2, 3], error=jkv.SequenceStateError)  # beyond what was reserved
    refused([a, d], [2, 2], error=jkv.SequenceStateError)  # suspended
    refused([a, other], [2, 2], error=jkv.SequenceStateError)
    refused([a, b, a], [1, 1, 1])
    refused([a, closed], [1, 1])
    refused([a, b], [2])
    refused([a, b], [2, 2, 2])
    refused([a, b], [2, -1], ids=fresh(2), error=jkv.ConfigError)
    refused([a, b], ["2", 2], ids=fresh(4), error=jkv.ConfigError)
    refused([a, b], [1.0, 2], ids=fresh(3), error=jkv.ConfigError)
    refused([a, b], None, ids=fresh(4), error=jkv.ConfigError)
    refused(5, [2, 2], ids=fresh(4), error=jkv.ConfigError)
    if verb == "commit":
        refused([a, b], [2, 2], ids=fresh(3), error=jkv.ConfigError)
        refused([a, b], [2, 2], ids=fresh(5), error=jkv.ConfigError)
        refused([a, b], [2, 2], ids=[1, 2, 3, -4], error=jkv.ConfigError)
        refused([a, b], [2, 2], ids=[1, 2, 3, 2**31], error=jkv.ConfigError)
        refused([a, b], [2, 2], ids=jnp.arange(4), error=jkv.ConfigError)
        c.stop_committing()
        refused([a, c], [2, 2], error=jkv.SequenceStateError)
    c.advance()
    if w.recurrent:
        refused([a, c], [2, 1] if verb == "advance" else [2, 3])  # moved already
    w.advance([a, b])
    w.commit([b, a])
    d.resume()
    w.flush()
    d.close()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        w.manager.advance([d.seq], [0])


def test_batch_reserve_errors():
    w, a, b = two()
    for seqs, counts in (
        ([a.seq, b.seq], [1]),
        ([a.seq, b.seq], [1, -1]),
        ([a.seq, b.seq], [1, 1.5]),
        ([a.seq, None], [1, 1]),
        (a.seq, 1),
        ([a.seq, a.seq], [1, 2]),
        ([a.seq, batching("full").start().seq], [1, 1]),
    ):
        with w.unchanged(), pytest.raises(jkv.CacheError):
            w.manager.reserve(seqs, counts)
    b.suspend()
    with w.unchanged(), pytest.raises(jkv.SequenceStateError):
        w.manager.reserve([a.seq, b.seq], 1)


# ------------------------------------------------------------------------------------------------ the same as alone


class Twins:
    """The same traffic on two worlds: calls on `batched` go through the manager as often as chance says."""

    def __init__(self, groups, seed, **config):
        self.batched, self.alone = batching(groups, **config), batching(groups, **config)
        self.rng = np.random.default_rng(seed)
        self.next = 0

    def pairs(self, status="active"):
        return [pair for pair in zip(self.batched.runs, self.alone.runs, strict=True) if pair[0].seq.status == status]

    def some(self, pairs, least=1):
        if len(pairs) < least:
            return []
        order = self.rng.permutation(len(pairs))[: int(self.rng.integers(least, len(pairs) + 1))]
        return [pairs[i] for i in order]

    def chance(self, share):
        return self.rng.random() < share

    def both(self, call):
        """The same call on both; the same answer."""
        a, b = call(self.batched), call(self.alone)
        assert a == b
        return a

    def each(self, pair, call):
        a, b = call(pair[0]), call(pair[1])
        assert a == b
        return a

    def open(self):
        length, key = int(self.rng.integers(0, 24)), int(self.rng.integers(3))
        prompt = join(tokens(length, key), tokens(int(self.rng.integers(1, 9)), int(self.rng.integers(3))))
        self.both(lambda w: w.open(prompt).resume())

    def step(self):
        going = []
        pairs = [pair for pair in self.pairs() if not len(pair[0].flight) and len(pair[0].held) < 56]
        pairs = self.some(pairs)
        counts = [1 if self.chance(0.6) else int(self.rng.integers(1, 8)) for _ in pairs]
        for pair, n in zip(pairs, counts, strict=True):
            left = len(pair[0].prompt) - len(pair[0].held)
            going.append((pair, min(n, left) if left > 0 else n))
        if not going:
            return
        batched, alone = [a for (a, _), _ in going], [b for (_, b), _ in going]
        counts = [n for _, n in going]
        if self.chance(0.8):
            done = self.batched.reserve(batched, counts)
        else:
            done = self.alone_reserve(batched, counts)
        assert done == self.alone_reserve(alone, counts)
        if done < len(going):
            self.each(self.some(self.pairs())[0], lambda run: run.close())
        going = [(pair, n) for pair, n in going[:done] if pair[0].seq.status == "active"]
        if not going:
            return
        batched, alone = [a for (a, _), _ in going], [b for (_, b), _ in going]
        counts = [n for _, n in going]
        news = []
        for (run, _), n in going:
            rest = run.prompt[len(run.held) :][:n]
            news.append(rest if len(rest) == n else tokens(64, int(self.rng.integers(3)))[len(run.held) :][:n])
        if self.chance(0.2):
            pair, n = going[0]
            positions = sorted({int(self.rng.integers(1, n + 1)) + len(pair[0].held) for _ in range(2)})
            if not pair[0].ended:
                self.each(pair, lambda run: run.plan_snapshots(positions).tolist())
        planned = any(run.kept for run in batched)
        if self.chance(0.5) and sum(counts) <= 16 and not planned:
            self.batched.write_ragged(self.batched.prepare_ragged(batched, counts), batched, news)
        else:
            self.batched.prepare(*batched)
            for run, new in zip(batched, news, strict=True):
                run.write(new)
        self.alone.prepare(*alone)
        for run, new in zip(alone, news, strict=True):
            run.write(new)

    @staticmethod
    def alone_reserve(runs, counts):
        done = 0
        while done < len(runs) and runs[done].reserve(counts[done]):
            done += 1
        return done

    def report(self):
        pairs = self.some([pair for pair in self.pairs() if len(pair[0].flight)])
        if not pairs:
            return
        batched, alone = [a for a, _ in pairs], [b for _, b in pairs]
        counts = [len(a.flight) for a in batched]
        if not self.batched.recurrent and self.chance(0.2):
            counts = [int(self.rng.integers(0, n + 1)) for n in counts]
        if self.chance(0.1):
            for pair in pairs:
                self.each(pair, lambda run: run.advance(snapshot=True))
        elif self.chance(0.5) or any(a.ended for a in batched):
            if self.chance(0.8):
                self.batched.advance(batched, counts)
            else:
                for run, n in zip(batched, counts, strict=True):
                    run.advance(n)
            for run, n in zip(alone, counts, strict=True):
                run.advance(n)
        else:
            self.commit(pairs, [len(a.written) - a.seq.committed for a in batched])

    def late_commit(self):
        pairs = [(a, b) for a, b in self.pairs() if a.seq.length > a.seq.committed and not a.ended]
        pairs = self.some(pairs)
        if pairs:
            self.commit(pairs, [int(self.rng.integers(0, a.seq.length - a.seq.committed + 1)) for a, _ in pairs])

    def commit(self, pairs, lengths):
        batched, alone = [a for a, _ in pairs], [b for _, b in pairs]
        if self.chance(0.85):
            self.batched.commit(batched, lengths)
        else:
            for run, n in zip(batched, lengths, strict=True):
                run.commit(n)
        for run, n in zip(alone, lengths, strict=True):
            run.commit(n)

    def other(self):
        pairs = self.some(self.pairs())
        if not pairs:
            return
        pair, kind = pairs[0], int(self.rng.integers(10))
        a = pair[0]
        if kind == 0 and not len(a.flight):
            self.each(pair, lambda run: run.suspend())
        elif kind == 1:
            self.each(pair, lambda run: run.close())
        elif kind == 2 and not len(a.flight) and not a.ended and self.chance(0.5):
            self.each(pair, lambda run: run.stop_committing())
        elif kind == 3 and not self.batched.recurrent and not len(a.flight):
            n = int(self.rng.integers(0, a.seq.length - a.seq.committed + 1))
            self.each(pair, lambda run: run.rewind(n))
        elif kind == 4 and not len(a.flight) and len(self.batched.runs) < 5:
            self.each(pair, lambda run: len(run.fork(1)))
        elif kind == 5:
            capacity = int(self.rng.integers(a.seq.length + len(a.flight), a.seq.capacity + 1))
            self.each(pair, lambda run: run.seq.resize(capacity))
        elif kind == 6:
            for pair in self.pairs("suspended"):
                self.each(pair, lambda run: run.resume())
        elif kind == 7 and not len(a.flight):
            marks = [run.checkpoint() for run in pair]
            assert (marks[0] is None) == (marks[1] is None)
            for run, mark in zip(pair, marks, strict=True):
                run.mark = mark
        elif kind == 8 and getattr(a, "mark", None) is not None:
            self.each(pair, self.rolled_back)
        else:
            assert a.seq.length == len(a.held) and a.seq.capacity >= a.seq.length >= a.seq.committed

    @staticmethod
    def rolled_back(run):
        """Back to the last checkpoint, unless that is good no more."""
        mark, run.mark = run.mark, None
        try:
            run.rollback(mark)
        except jkv.SequenceStateError:
            return False
        return True

    def run(self, steps):
        for at in range(steps):
            kind = self.rng.integers(10)
            if not self.pairs() and self.batched.runs:
                pair = (self.batched.runs[0], self.alone.runs[0])
                if not self.each(pair, lambda run: run.resume()):
                    self.each(pair, lambda run: run.close())
            elif len(self.batched.runs) < 5 and (kind == 0 or not self.batched.runs):
                self.open()
            elif kind < 5:
                self.step()
            elif kind < 8:
                self.report()
            elif kind < 9:
                self.late_commit()
            else:
                self.other()
            assert self.batched.manager.stats() == self.alone.manager.stats()
            if at % 10 == 0:
                agree(self.batched, self.alone)
        for key in range(3):
            for n in (5, 12, 30):
                assert self.batched.probe(tokens(n, key)) == self.alone.probe(tokens(n, key))
        self.batched.close_all()
        self.alone.close_all()
        agree(self.batched, self.alone)
        for key in range(3):
            assert self.batched.hit(tokens(30, key)) == self.alone.hit(tokens(30, key))


TWINS = {
    "full": ("full", {"pages": 22, "max_sequences": 4}),
    "full, pages of one token": ("full", {"pages": 80, "page_size": 1, "max_sequences": 4}),
    "window": ("full window:5", {"pages": 26, "max_sequences": 4, "min_snapshot": True}),
    "window and sinks, shared": ("full window:6+2", {"pages": 22, "shared": True}),
    "window scratch": ("full window:6", {"pages": 26, "window_scratch": jkv.WindowScratch(7)}),
    "recurrent": ("recurrent", {"pages": 7, "page_size": 5}),
    "hybrid": ("full window:5 recurrent", {"pages": {"full": 26, "window:5": 16, "recurrent": 7}}),
    "hybrid with drafts": ("full recurrent", {"pages": {"full": 40, "recurrent": 9}, "max_drafts": 2}),
}


@pytest.mark.parametrize("name", TWINS)
def test_batches_are_the_calls_one_by_one(name):
    groups, config = TWINS[name]
    Twins(groups, seed=list(TWINS).index(name), **config).run(90)
