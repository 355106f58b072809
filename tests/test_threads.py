"""Calls from several threads: probes while somebody drives, and drivers that take turns."""

import sys
import threading

import numpy as np
import pytest
from oracle import World, fresh, join, tokens

import jkv

THREADS = 8


@pytest.fixture(autouse=True)
def many_switches():
    """Threads change places all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(count, work):
    """work(i) in `count` threads; their first exception is raised here."""
    errors = []

    def run(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("shared", [False, True])
def test_probes_from_seven_threads_while_one_drives(shared):
    """What an open sequence holds is always found; every byte is right; nothing of it is in a probe's way."""
    groups = "full window:7" if shared else "full window:5 recurrent"
    w = World(groups, page_size=4, pages=30, host=14, max_length=40, shared=shared)
    kept = np.arange(100, 108, dtype=np.int32)
    w.start(kept).step(kept, snapshot=True)
    done, counts = threading.Event(), [0] * THREADS

    def drive():
        generator = np.random.default_rng(5)
        for _ in range(60):
            prompt = generator.integers(0, 3, generator.integers(2, 20)).astype(np.int32)
            run = w.open(prompt)
            if run.resume() and run.reserve(len(prompt) - run.seq.length):
                w.prepare(run)
                run.write(prompt[run.seq.length :])
                run.commit(snapshot=bool(generator.integers(2)))
                if generator.random() < 0.3:
                    run.suspend()
            if run.seq.status == "active" or len(w.runs) > 5:
                w.runs[-1].close()

    def work(i):
        if i == 0:
            try:
                drive()
            finally:
                done.set()
            return
        generator = np.random.default_rng(i)
        while not done.is_set():
            match = w.manager.probe(kept, max_reuse=len(kept))
            assert (match.tokens, match.raw_tokens) == (8, 8)
            prompt = generator.integers(0, 3, 20).astype(np.int32)
            match = w.manager.probe(prompt)
            assert 0 <= match.tokens <= match.attention_tokens <= match.raw_tokens <= len(prompt)
            assert sum(match.tier_tokens.values()) == match.tokens
            counts[i] += 1

    in_threads(THREADS, work)
    assert min(counts[1:]) > 0
    assert sum(w.manager.stats().evicted_pages.values()) > 10
    w.close_all()
    w.manager.check()


def test_eight_threads_with_sequences_of_their_own():
    """Opening, matching, taking pages, publishing and closing take turns; only the state's way is the caller's."""
    w = World("full window:8 recurrent", page_size=4, pages=400, max_sequences=THREADS)
    manager, turn = w.manager, threading.Lock()
    shared = tokens(16)

    def work(i):
        for round_ in range(12):
            prompt = join(shared, tokens(4 + (i + round_) % 3, f"{i} {round_ % 4}"))
            with manager.open(prompt, priority=i % 2) as seq:
                assert seq.resume() and seq.reserve(len(prompt) - seq.length)
                with turn:
                    w.state, _ = manager.prepare(w.state, [seq])
                seq.commit(prompt[seq.length :], snapshot=True)
                assert seq.committed == len(prompt)
                manager.stats()
                manager.check()
            assert manager.probe(join(prompt, fresh())).tokens == len(prompt)

    in_threads(THREADS, work)
    manager.check()
    stats = manager.stats()
    assert (stats.lookups, stats.active, stats.suspended) == (THREADS * 12, 0, 0)
    assert all(pool.private == 0 for pool in stats.pools.values())


def test_batch_verbs_and_events_take_turns():
    w = World("full", page_size=4, pages=64, max_sequences=THREADS, events=10_000)
    manager, turn, heard = w.manager, threading.Lock(), []

    def work(i):
        for _ in range(20):
            if i == 0:
                heard.extend(manager.take_events())
                manager.take_stats()
                continue
            seq = manager.open()
            assert seq.resume()
            ids = fresh(4)
            assert manager.reserve([seq], 4) == 1
            with turn:
                w.state, _ = manager.prepare(w.state, [seq])
            manager.commit([seq], ids, 4)
            seq.close()

    in_threads(THREADS, work)
    heard.extend(manager.take_events())
    manager.check()
    assert [event.id for event in heard] == list(range(len(heard)))
    assert sum(event.kind == "stored" for event in heard) == 7 * 20


def test_a_call_from_another_thread_waits_for_the_one_that_runs():
    w = World("full", page_size=4)
    entered, order = threading.Event(), []

    def work(i):
        if i == 0:
            with w.manager._lock:
                entered.set()
                threading.Event().wait(0.05)
                order.append("first")
        else:
            entered.wait()
            assert w.manager.probe(tokens(4)) == jkv.Match()
            order.append("probe")

    in_threads(2, work)
    assert order == ["first", "probe"]
