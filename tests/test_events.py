"""SPEC S55: events, and what a listener that replays them knows."""

import pytest
from model import Listener, listen
from oracle import World, fresh, join, tokens

import jkv
import jkv.tiers.index
from jkv.events import Event, Journal
from jkv.tiers.keys import page_digests, root_digest, tail_digest


def kinds(world, group=None):
    events = world.manager.take_events()
    return [(e.kind, e.group, e.tier, e.position) for e in events if group in (None, e.group)]


def test_s55_one_stored_per_page_and_group_parents_first():
    w = World("full window:8", page_size=4, events=100)
    w.turn(tokens(10), [4, 6], close=False)
    events = w.manager.take_events()
    assert [(e.kind, e.group, e.position) for e in events] == [
        ("stored", "full", 4), ("stored", "window:8", 4), ("stored", "full", 8), ("stored", "window:8", 8),
    ]  # fmt: skip
    root = root_digest("", None, 0, None)
    one, two = page_digests(root, tokens(8), 4)
    assert [(e.parent, e.digest) for e in events] == [(root, one), (root, one), (one, two), (one, two)]
    assert [e.tokens for e in events[::2]] == [tuple(tokens(4).tolist()), tuple(tokens(8)[4:].tolist())]
    assert {(e.tier, e.scope) for e in events} == {("device", jkv.Scope())}
    w.close_all()  # a tail, which is not announced
    w.turn(tokens(10))
    assert w.manager.take_events() == ()


def test_s55_a_snapshot_is_one_event_with_its_position():
    w = World("full recurrent", page_size=4, events=100)
    w.turn(tokens(8), [4, 2, 2], snapshot=True)
    events = [e for e in w.manager.take_events() if e.group == "recurrent"]
    assert [(e.kind, e.position) for e in events] == [("stored", 4), ("stored", 6), ("stored", 8)]
    one, two = page_digests(root_digest("", None, 0, None), tokens(8), 4)
    assert [e.digest for e in events] == [one, tail_digest(one, tokens(6)[4:]), two]


def test_s55_moved_on_a_change_of_tier_and_removed_once():
    w = World("full", page_size=4, pages=4, host=4, events=100)
    w.turn(tokens(8))
    assert kinds(w) == [("stored", "full", "device", 4), ("stored", "full", "device", 8)]
    w.turn(tokens(16, "other"))
    moved = [event for event in kinds(w) if event[0] == "moved"]
    assert moved == [("moved", "full", "host", 8), ("moved", "full", "host", 4)]
    w.turn(tokens(16, "third"))  # to host memory goes what was second
    removed = [event for event in kinds(w) if event[0] == "removed"]
    assert removed == [("removed", "full", "host", 8), ("removed", "full", "host", 4)]


def test_s55_what_the_store_has_is_moved_there(tmp_path):
    w = World("full", page_size=4, pages=4, host=4, store=jkv.StoreTier(str(tmp_path)), events=100)
    listen(w)
    w.turn(tokens(8))
    w.turn(tokens(16, "other"))
    w.turn(tokens(16, "third"))
    w.flush()
    w.settle()
    assert {e.tier for e in listen(w).known.values()} == {"device", "host", "store"}
    assert listen(w, [(jkv.Scope(), tokens(8))]).match(jkv.Scope(), tokens(8)) == 8
    kept = {key for key, event in w.listener.known.items()}
    w.restart()
    known = listen(w, [(jkv.Scope(), tokens(8)), (jkv.Scope(), tokens(16, "third"))]).known
    assert known.keys() >= kept
    assert {(e.tier, e.parent, e.tokens, e.scope) for e in known.values()} == {("store", b"", (), None)}


def test_s55_what_another_process_removes_is_gone(tmp_path):
    w = World("full", page_size=4, pages=4, store=jkv.StoreTier(str(tmp_path)), events=100)
    w.turn(tokens(8))
    w.restart()
    assert len(listen(w).known) == 2
    store = w.manager._store
    store.resize(1)
    store.flush()
    assert not listen(w).known


def test_too_many_changes_of_the_store_are_announced_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(jkv.tiers.index, "MOST_CHANGED", 3)
    w = World("full recurrent", page_size=4, pages=8, host=8, max_length=24, store=jkv.StoreTier(tmp_path), events=1000)
    listen(w)
    for i in range(6):
        w.turn(tokens(12, i), [8, 4], snapshot=True)
        w.flush()
        w.settle()
    events = w.manager.take_events()
    assert [event.kind for event in events].count("cleared") == 1
    w.listener.hear(events)
    listen(w, [(jkv.Scope(), tokens(12, i)) for i in range(6)])
    assert {event.tier for event in w.listener.known.values()} == {"device", "host", "store"}


def test_clear_and_reset_say_so():
    w = World("full", page_size=4, host=8, events=100)
    w.turn(tokens(8))
    kinds(w)
    w.manager.clear()
    assert kinds(w) == [("cleared", "", "", 0)]
    w.turn(tokens(8))
    w.turn(tokens(4, "other"))
    w.manager._host.tree.make_free(w.manager._host.pools[0], w.manager._host.pools[0].total)
    w.flush()
    kinds(w)
    w.reset()
    after = kinds(w)
    assert after[0] == ("cleared", "", "", 0)
    assert sorted(after[1:]) == [("stored", "full", "host", n) for n in (4, 4, 8)]


def test_a_full_buffer_says_what_it_lost():
    w = World("full", page_size=4, events=3)
    w.turn(tokens(8))
    assert [e.id for e in w.manager.take_events()] == [0, 1]
    w.turn(tokens(20, "other"))
    lost, *events = w.manager.take_events()
    assert (lost.kind, lost.id) == ("lost", 3)
    assert [(e.id, e.position) for e in events] == [(4, 12), (5, 16), (6, 20)]
    w.turn(tokens(4, "third"))
    assert [(e.kind, e.id) for e in w.manager.take_events()] == [("stored", 7)]
    cleared, *events = w.manager.take_events(replay=True)
    assert cleared.kind == "cleared" and len(events) == 2 + 5 + 1
    assert [e.id for e in (cleared, *events)] == list(range(8, 17))
    w.turn(tokens(4, "fourth"))
    assert [e.id for e in w.manager.take_events()] == [17]


def test_a_replay_is_what_a_listener_knows():
    w = World("full window:6 recurrent", page_size=4, pages=12, host=12, events=1000)
    for i in range(8):
        w.turn(join(tokens(8), fresh(4 + i)))
    known = listen(w).known
    cleared, *events = w.manager.take_events(replay=True)
    assert cleared.kind == "cleared"
    assert {(e.group, e.digest): (e.tier, e.tokens, e.position) for e in events} == {
        key: (e.tier, e.tokens, e.position) for key, e in known.items()
    }
    late = Listener(w)
    late.next_id = cleared.id
    late.hear((cleared, *events))  # parents first


def test_found_two_snapshots_of_one_prefix_are_removed_once():
    """Pages that begin alike each had a state after the same token; the second one's end was an error in the commit."""
    w = World("full recurrent", page_size=4, pages={"full": 20, "recurrent": 6}, max_length=40, events=100)
    first = w.turn([0, 10], [1, 1], snapshot=True)
    second = w.start([0, 12, 0, 1, 0], max_reuse=0)
    second.step([0], snapshot=True)
    second.step([12, 0, 1, 0], snapshot=True)
    listen(w)
    one = [e for e in w.listener.known.values() if e.group == "recurrent" and e.position == 1]
    assert len(one) == 1
    copies = [e for node in w.manager._host.tree.nodes() for e in node.endpoints if e.position == 1]
    assert len(copies) == 2
    w.manager._host.tree.remove_endpoint(copies[0])
    assert one[0] in listen(w).known.values()
    w.manager._host.tree.remove_endpoint(copies[1])
    assert one[0] not in listen(w).known.values()
    assert first.closed and w.manager.take_events() == ()


def test_off_by_default():
    w = World("full", page_size=4)
    w.turn(tokens(8))
    with pytest.raises(jkv.ConfigError, match=r"events is 0"):
        w.manager.take_events()
    with pytest.raises(jkv.ConfigError, match=r"events"):
        World("full", events=-1)


def test_the_journal_drops_the_oldest():
    journal = Journal(2)
    for i in range(5):
        journal.there(Event(0, "", "full", "device", digest=bytes([i])))
    lost, *events = journal.take()
    assert (lost.kind, lost.id) == ("lost", 2)
    assert [event.id for event in events] == [3, 4]
    assert journal.take() == ()
