"""FAULTS with host memory and a store: F2, F10, F12, F17, F20 to F24, F27, and what suspended sequences take along."""

import logging
import pathlib
import shutil

import pytest
from oracle import World, fresh, join, tokens
from test_spec_tiers import GROUPS, HYBRID, crowd_out, loaded, places_of, push_out, small, store_of, value_size

import jkv
from jkv.layout import HOST

# ------------------------------------------------------------------------------------------------- the samples


def test_f02_a_state_never_beyond_the_hit_from_host_memory():
    w = small(HYBRID, host=20)
    w.turn(tokens(8), [4, 4])
    push_out(w)
    run = w.start(tokens(8))
    assert (run.reused, run.seq.match.attention_tokens) == (4, 7)
    run.prefill()  # the oracle: from state@4 on
    run.close()
    assert w.hit(tokens(8)) == 8


def test_f02_a_state_never_beyond_the_hit_from_the_store(tmp_path):
    w = small(HYBRID, host=8, store=store_of(tmp_path))
    w.turn(tokens(8), [4, 4])
    w.restart()
    run = w.start(tokens(8))
    assert (run.reused, dict(run.seq.match.tier_tokens)) == (4, {"store": 4})
    run.prefill()


@pytest.mark.parametrize("host", [1, 3])
def test_f10_one_shot_requests_do_not_push_out_a_long_chain(host):
    pages = {"full": 64, "recurrent": 5}
    w = World("full recurrent", page_size=8, pages=pages, host={"full": 8, "recurrent": host}, max_sequences=1)
    w.turn(tokens(32), [8, 8, 8, 8])
    for key in range(12):
        w.turn(tokens(6, f"one-shot {key}"), snapshot=None)
    run = w.start(tokens(36))
    assert run.reused == 32
    run.prefill()


@pytest.mark.parametrize("min_snapshot", [True, False])
@pytest.mark.parametrize("close_asleep", [True, False])
def test_f12_one_page_id_for_two_positions(min_snapshot, close_asleep):
    w = World("window:4", pages=2, host=4, max_length=16, max_sequences=1, min_snapshot=min_snapshot)
    a = w.start(tokens(12)).prefill([4, 4, 4])
    a.suspend()
    (b,) = crowd_out(w)
    assert all(place >= HOST for place in places_of(a))
    b.close()
    if not close_asleep:
        assert a.resume()
        w.prepare(a)
    a.close()
    assert w.hit(tokens(12)) == 12
    w.manager.clear()
    w.check()
    assert all(pool.free == pool.total for _, _, pool in w.every_pool())


@pytest.mark.parametrize("last", [4, 3])
@pytest.mark.parametrize("host", [1, 4])
def test_f17_making_room_for_a_snapshot_moves_the_one_before(last, host):
    """One slot beside the live one; the snapshot at 8 leaves the device for the one at 12 (11)."""
    w = World("recurrent", pages=2, host=host, max_sequences=1)
    a = w.start(tokens(8 + last)).prefill([8, last], snapshot=True)
    a.suspend()
    assert a.resume()
    a.step(fresh(5), snapshot=True)
    with pytest.raises(jkv.SequenceStateError, match="1 sequences are open"):
        w.manager.clear()
    a.step(fresh(2), snapshot=True)
    a.close()
    assert w.hit(a.held) == len(a.held)
    if host == 4:
        assert [w.probe(a.held[:n]).tokens for n in (8, 8 + last)] == [8, 8 + last]


@pytest.mark.parametrize("groups", GROUPS)
def test_f20_offloaded_in_the_step_that_wrote_it(groups):
    """No prepare lies between the step that writes a's pages and the decisions that move them and give them away."""
    w = small(groups, host=64)
    w.waits = False
    for number in range(6):
        a = w.start(tokens(16, number))
        a.dispatch(tokens(16, number))
        a.commit(snapshot=True)
        a.close()
        w.delay(0.005)
        b = w.start(tokens(30, f"b{number}"))
        b.dispatch(tokens(30, f"b{number}"))
        b.commit()
        b.close()
        again = w.start(tokens(16, number), max_reuse=16)
        assert again.reused == 16
        w.prepare(again)  # from arrays that have not landed
        again.step(fresh(3))
        again.close()
    w.waits = True
    w.flush()


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_f20_pages_change_places(groups):
    """What comes up takes the pages of what goes down, and the other way round, in one plan."""
    host = {group: 2 if group == "recurrent" else 8 for group in groups.split()}
    w = small(groups, host=host)
    w.waits = False
    a, b = w.start(tokens(29)), w.open(tokens(29, "b"))
    a.prefill()
    for turn in range(9):
        a.suspend()
        assert b.resume(), w.stats()
        if turn % 3 == 0:
            w.delay(0.005)
        b.prefill() if turn == 0 else w.prepare(b)
        a, b = b, a
    w.waits = True
    w.flush()


def test_f20_freed_in_a_step_and_the_target_of_an_onboard_in_it():
    w = small("full")
    w.waits = False
    w.turn(tokens(32))
    w.turn(tokens(32, "b"))  # the first is in host memory
    for turn in range(4):
        x = w.start(fresh(17), max_reuse=0)
        x.dispatch(x.prompt)
        x.close()  # in flight: its pages are free, and being written
        run = w.start(tokens(32, "b" if turn % 2 else 0), max_reuse=32)
        assert run.reused == 32
        w.delay(0.002)
        w.prepare(run)
        run.close()


def test_f21_room_for_a_request_is_not_made_from_what_it_reuses():
    w = small("full", host=2)
    w.turn(tokens(8))
    w.turn(tokens(32, "b"))  # takes the device: tokens(8) fills host memory
    assert w.probe(tokens(8)).tier_tokens == {"host": 8}
    run = w.start(join(tokens(8), tokens(23, "on")))
    assert run.reused in (0, 4, 8)
    reused = run.reused
    run.prefill()
    run.close()
    assert reused == 8
    assert w.hit(run.held) == 31


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("host", [1, 4])
def test_f21_full_tiers_and_requests_for_all_of_the_device(groups, host):
    w = small(groups, host=host)
    w.turn(tokens(8))
    for turn in range(4):
        w.turn(tokens(30, turn % 3))
        w.turn(join(tokens(8), tokens(23, f"on {turn}")))


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_f22_all_pages_reach_the_store(groups, tmp_path):
    w = small(groups, host=4, store=store_of(tmp_path))
    w.turn(tokens(32), [16, 16])
    w.restart(killed=True)  # nothing has left the device
    assert w.probe(tokens(32)).tokens == 0
    w.turn(tokens(32), [16, 16])
    w.turn(tokens(32, "b"), [16, 16])
    w.turn(tokens(32, "c"), [16, 16])
    w.flush()
    w.restart(killed=True)
    assert w.probe(tokens(32)).tokens == 32
    w.restart()
    assert w.probe(tokens(32)).tier_tokens == {"store": 32}


def files_of(path):
    """The store's values, oldest first, without what it keeps for itself."""
    files = [
        p for p in pathlib.Path(path).rglob("*") if p.is_file() and "order" not in p.parts and "probe" not in p.parts
    ]
    return sorted(files, key=lambda p: (p.stat().st_mtime_ns, p.name))


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    value = bytearray(file.read_bytes())
    value[-5] ^= 16
    file.write_bytes(value)


def empty(file):
    file.write_bytes(b"")


def replace(file):
    """By another good value of the same size."""
    other = next(p for p in file.parent.iterdir() if p != file)
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("harm", [truncate, flip, empty, replace, pathlib.Path.unlink])
def test_f23_an_entry_that_was_harmed(harm, tmp_path):
    w = small("full", host=8, store=store_of(tmp_path))
    w.turn(tokens(4))
    known = set(files_of(tmp_path))
    w.restart()
    files = []
    for n in (8, 12):
        w.turn(tokens(n))
        w.restart()
        known |= set(files)
        files = [p for p in files_of(tmp_path) if p not in known]
    harmed = files_of(tmp_path)
    assert len(harmed) == 3
    (third,) = files
    harm(third)
    w.faulty = ("store",)
    w.restart(killed=True)
    before = w.probe(join(tokens(12), fresh())).tokens
    run = w.start(join(tokens(12), tokens(3, "on")))
    assert (before, run.reused) in ((12, 8), (8, 8))
    run.prefill()
    run.close()
    w.settle()
    stats = w.manager.stats().tiers["store"]
    assert sum(stats.failures.values()) == (before == 12)
    w.restart()
    assert w.hit(tokens(12)) == 12  # written anew


@pytest.mark.parametrize("groups", ["full", HYBRID, "window:8 window:5+3"])
def test_f23_any_entry_of_any_group(groups, tmp_path):
    """Whatever is harmed, the hit is shorter and right, and the request finishes."""
    w = small(groups, host=24, store=store_of(tmp_path))
    w.faulty = ("store",)
    prompt = tokens(14)
    w.turn(prompt, [8, 6])
    w.restart()
    hits = []
    for i in range(8):
        files = files_of(tmp_path)
        (flip, truncate, pathlib.Path.unlink)[i % 3](files[5 * i % len(files)])
        w.restart(killed=True)
        run = w.start(prompt, max_reuse=14)
        hits.append(run.reused)
        run.prefill([8 - run.reused, 6] if run.reused < 8 else None)
        run.close()
        w.restart()
        assert w.hit(prompt) == 14
    assert 0 <= min(hits) < 14


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_f24_a_location_that_cannot_be_used(where, tmp_path):
    (tmp_path / "taken").write_text("x")
    location = tmp_path / "taken" if where == "a file" else tmp_path / "taken" / "below"
    with pytest.raises(jkv.StoreError, match="taken"):
        World("full", pages=4, host=4, store=store_of(location))


class FullDisk:
    """A KvStore whose writes fail from the third on."""

    def __init__(self, kvstore):
        self.kvstore, self.left = kvstore, 2

    def __getattr__(self, name):
        return getattr(self.kvstore, name)

    def write(self, key, value, **options):
        if value is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")
        return self.kvstore.write(key, value, **options)


def test_f24_a_disk_that_is_full_at_the_third_write(tmp_path, caplog):
    w = small("full", host=8, store=store_of(tmp_path))
    w.faulty = ("store",)
    w.manager._store.kvstore = FullDisk(w.manager._store.kvstore)
    with caplog.at_level(logging.WARNING, logger="jkv"):
        for number in range(12):
            w.turn(tokens(16, number))
            w.flush()
            w.settle()
    stats = w.manager.stats().tiers["store"]
    assert stats.off and stats.failures["write"] >= 1 and stats.entries == 2 and stats.skipped > 0
    assert 1 <= len([r for r in caplog.records if r.name == "jkv"]) <= 2  # one line per kind and minute
    for number in (10, 11):
        assert w.hit(tokens(16, number)) == 16
    w.restart(killed=True)
    assert len(files_of(tmp_path)) == 2


def test_f24_the_limit_holds_over_two_runs(tmp_path):
    limit = 8 * value_size()
    w = small("full", host=4, store=jkv.StoreTier(str(tmp_path), bytes=limit))
    w.turn(tokens(16, "old"))
    w.restart()
    assert w.manager.stats().tiers["store"].entries == 4
    w.turn(tokens(16, "new"))
    w.restart()
    assert w.manager.stats().tiers["store"].entries == 8
    w.turn(tokens(8, "newer"))
    w.restart()
    stats = w.manager.stats().tiers["store"]
    assert stats.entries == 8 and stats.bytes <= limit
    assert w.probe(tokens(16, "new")).tokens == 16
    assert w.probe(tokens(8, "newer")).tokens == 8
    assert w.probe(tokens(16, "old")).tokens < 16
    assert sum(p.stat().st_size for p in files_of(tmp_path)) <= limit


def test_f24_a_directory_that_is_removed_while_running(tmp_path):
    w = small("full", host=4, store=store_of(tmp_path / "here"))
    w.faulty = ("store",)
    w.turn(tokens(16))
    w.restart()
    shutil.rmtree(tmp_path / "here")
    run = w.start(tokens(20))
    assert run.reused == 0
    run.prefill()
    run.close()
    for number in range(4):
        w.turn(tokens(16, number))
    w.flush()
    assert w.hit(tokens(16)) in (0, 4, 8, 12, 16)


@pytest.mark.parametrize("host", [1, 2, 4])
@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_f27_everybody_finishes(groups, host):
    """Pages for two of four; each in turn gives way to the others."""
    w = small(groups, pages=8, host=host, max_sequences=4)
    texts = {w.start(tokens(8, key)).prefill(): tokens(24, key) for key in "abcd"}
    dropped = 0

    def give_way(head):
        """Somebody else is suspended, or, if nobody is active, dropped."""
        nonlocal dropped
        others = [run for run in texts if run is not head]
        active = [run for run in others if run.seq.status == "active"]
        if active:
            active[-1].suspend()
        else:
            others[-1].close()  # to start over, later
            texts.pop(others[-1])
            dropped += 1

    while texts:
        head, text = next(iter(texts.items()))
        while head.seq.status == "suspended" and not head.resume():
            give_way(head)
        while head.seq.length < len(text):
            while not head.reserve(1):
                give_way(head)
            w.prepare(head)
            head.write(text[head.seq.length :][:1])
            head.commit()
        head.close()
        texts.pop(head)
    assert dropped <= {1: 3, 2: 2, 4: 0}[host]


# ----------------------------------------------------------------------------- what a suspended sequence takes along


def away_and_back(w, *runs):
    """The runs are suspended, leave the device, and come back."""
    for run in runs:
        run.suspend()
    others = crowd_out(w)
    assert all(place >= HOST for run in runs for place in places_of(run))
    for run in others:
        run.close()
    for run in runs:
        assert run.resume()
    w.prepare(*runs)
    for run in runs:
        run.advance(0)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", [12, 14])
def test_a_lent_tail_and_a_lent_state(groups, length):
    w = small(groups, host=20)
    a = w.start(tokens(length))
    a.dispatch(tokens(length))
    a.commit(end=True)
    away_and_back(w, a)
    assert w.hit(tokens(length)) == length
    a.dispatch(fresh(5))  # private copies now
    a.advance()
    away_and_back(w, a)
    assert w.hit(tokens(length)) == length
    b = w.start(join(tokens(length), tokens(4, "b")))
    assert b.reused == length
    b.prefill()
    a.close()
    b.step(fresh(2))


@pytest.mark.parametrize("groups", GROUPS)
def test_a_lent_tail_that_others_read_while_its_owner_sleeps(groups):
    w = small(groups, pages=16, host=24, max_sequences=4)
    a = w.start(tokens(14))
    a.dispatch(tokens(14))
    a.commit(end=True)
    a.suspend()
    b = w.start(join(tokens(14), tokens(5, "b")))
    assert b.reused == 14
    b.prefill([5], snapshot=True)
    away_and_back(w, b)
    assert a.resume()
    a.dispatch(fresh(4))
    a.advance()
    b.step(fresh(3))
    a.close()
    b.close()
    assert w.hit(tokens(14)) == 14
    assert w.hit(b.held) == len(b.held)


@pytest.mark.parametrize("groups", GROUPS)
def test_marks(groups):
    w = small(groups, host=20, slots=2)
    a = w.start(tokens(10)).prefill()
    first = a.checkpoint()
    a.dispatch(fresh(2))
    a.advance()
    second = a.checkpoint()
    a.dispatch(fresh(1))
    a.advance()
    assert first is not None and second is not None
    a.suspend()
    push_out(w)
    assert a.resume()
    a.rollback(second)
    w.flush()
    a.suspend()
    push_out(w)
    assert a.resume()
    a.rollback(first)
    w.flush()
    a.step(fresh(4))
    a.close()
    assert w.hit(a.held) == len(a.held)


@pytest.mark.parametrize("groups", GROUPS)
def test_snapshots_that_wait_for_their_page(groups):
    """The endpoint at 10 is inside a page that is not whole yet."""
    w = small(groups, slots=2)
    a = w.start(tokens(10)).prefill(snapshot=True)
    a.suspend()
    push_out(w)
    assert a.resume()
    a.step(tokens(14)[10:])
    a.suspend()
    push_out(w)
    assert a.resume()
    w.prepare(a)
    a.close()
    assert w.hit(tokens(10)) == 10
    assert w.hit(tokens(14)) == 14


@pytest.mark.parametrize("groups", GROUPS)
def test_uncommitted_tokens_and_sliding_windows(groups):
    w = small(groups, host=20)
    a = w.start(tokens(9)).prefill()
    for turn in range(5):
        a.dispatch(tokens(40)[a.seq.length :][:4])
        a.advance()
        away_and_back(w, a)
        a.commit(3 + turn % 2)
    if not w.recurrent and len(a.held) > a.seq.committed:
        a.rewind(1)
    a.commit()
    a.close()
    assert w.hit(a.held) == len(a.held)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_commit_where_the_tree_has_the_pages_colder(groups):
    """The same tokens computed again: ours become the tree's, and host memory is free again."""
    w = small(groups, host=20)
    w.turn(tokens(16), [8, 8])
    push_out(w)
    assert w.probe(tokens(16)).tokens == 16
    a = w.start(tokens(16), max_reuse=0)
    a.prefill([8, 8])
    if "full" in groups:
        assert w.probe(tokens(16)).tier_tokens == {"device": 16}
        assert w.pool("full", "host").tree == 0
    w.flush()
    away_and_back(w, a)
    a.close()
    assert w.hit(tokens(16)) == 16


@pytest.mark.parametrize("groups", GROUPS)
def test_a_fork_after_a_wake_up(groups):
    w = small(groups, pages=16, host=24, max_sequences=4)
    a = w.start(tokens(10)).prefill()
    a.dispatch(fresh(3))
    a.advance()
    a.suspend()
    push_out(w)
    assert a.resume()  # nothing has come up yet: the copies are of what is still in host memory
    copies = a.fork(2)
    assert len(copies) == 2
    w.prepare(a, *copies)
    for run in (a, *copies):
        run.advance(0)
        run.commit()
    for run in copies:
        run.step(fresh(3))
    away_and_back(w, *copies)
    a.step(fresh(2))
    w.close_all()


@pytest.mark.parametrize("groups", [HYBRID, "recurrent"])
def test_a_fresh_state_is_zero_in_a_slot_that_was_offloaded(groups):
    w = small(groups, host=12)
    for number in range(3):
        w.turn(tokens(9, number))
        run = w.start(fresh(3))
        w.prepare(run)
        assert not any(w.bytes["ssm0", name][w.slot(run)].any() for name in ("h", "c"))
        run.suspend()
        push_out(w)
        assert run.resume()  # still zero
        w.prepare(run)
        assert not any(w.bytes["ssm0", name][w.slot(run)].any() for name in ("h", "c"))
        run.close()


def test_what_arrives_while_a_plan_is_pending(tmp_path):
    """What is read from the store lands in host pages that a plan, made but not carried out yet, still reads."""
    w = small("full", host=4, store=store_of(tmp_path))
    w.turn(tokens(16, "stored"))
    w.restart()
    a = w.start(tokens(16, "a")).prefill()
    a.suspend()
    push_out(w)
    assert a.resume()  # its four pages are to be read from host memory by the next plan
    b = w.open(tokens(16, "stored"))
    loaded(b, "host")
    w.prepare(a)
    a.advance(0)
    assert w.hit(tokens(16, "stored")) == 16


@pytest.mark.parametrize("groups", ["full", HYBRID])
@pytest.mark.parametrize("backoff", [0, 1, 3])
def test_what_a_probe_promises_of_the_store_is_kept(groups, backoff, tmp_path):
    w = small(groups, host=24, reuse_backoff=backoff, store=store_of(tmp_path))
    w.turn(tokens(16), [4, 4, 4, 4])
    for prompt in (tokens(16), tokens(17), join(tokens(12), tokens(5, "b")), join(tokens(10), fresh())):
        w.restart()
        w.hit(prompt)  # says so itself


@pytest.mark.parametrize("groups", GROUPS)
def test_raw_tokens_are_tokens_that_somebody_had(groups, tmp_path):
    w = small(groups, host=24, store=store_of(tmp_path))
    w.turn(tokens(13), [8, 5])
    w.restart()
    match = w.probe(join(tokens(10), tokens(15, "b")))
    assert match.raw_tokens <= 10
    match = w.probe(tokens(30))
    assert match.raw_tokens <= 13 and match.tokens == 13
