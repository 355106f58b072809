"""PagePool: every page has one owner. EvictionOrder: what leaves first."""

import random

import numpy as np
import pytest

import jkv
from jkv.errors import IntegrityError
from jkv.layout import Pool
from jkv.pages import EvictionOrder, PagePool

# ------------------------------------------------------------------------------------------------ the free list


def make_pool(pages=8):
    return PagePool(Pool(0, ("full",), pages, 1024, (), False))


def ids(*pages):
    return np.array(pages, np.int32)


def test_page_0_is_never_given_out():
    pool = make_pool(8)
    pages = pool.allocate(8)
    assert pages.dtype == np.int32 and sorted(pages.tolist()) == list(range(1, 9))


def test_the_page_freed_last_is_given_out_first():
    pool = make_pool(8)
    pool.allocate(5)
    pool.release(ids(2))
    pool.release_one(4)
    assert pool.allocate_one() == 4
    assert pool.allocate(2).tolist() == [2, 6]


def test_allocating_again_gives_the_released_pages_in_their_order():
    pool = make_pool(8)
    pages = pool.allocate(6)
    pool.release(pages[2:5])
    assert pool.allocate(3).tolist() == pages[2:5].tolist()


def test_allocated_ids_are_the_callers_own():
    pool = make_pool(8)
    pages = pool.allocate(4)
    pages[:] = 7
    assert pool.allocate(4).tolist() == [5, 6, 7, 8]


def test_nothing_to_allocate_and_nothing_to_release():
    pool = make_pool(2)
    assert len(pool.allocate(0)) == 0
    pool.release(ids())
    assert pool.free == 2


@pytest.mark.parametrize("taken", [0, 3, 8])
def test_more_than_there_is(taken):
    pool = make_pool(8)
    pool.allocate(taken)
    with pytest.raises(IntegrityError, match=rf"{9 - taken}.*{8 - taken}"):
        pool.allocate(9 - taken)
    assert pool.free == 8 - taken
    if taken == 8:
        with pytest.raises(IntegrityError, match="full"):
            pool.allocate_one()


@pytest.mark.parametrize("bad", [(3,), (2, 3), (3, 1), (5,)])
def test_freed_twice(bad):
    pool = make_pool(8)
    pool.allocate(4)
    pool.release(ids(3))
    with pytest.raises(IntegrityError, match="twice"):
        pool.release(ids(*bad))
    assert pool.free == 5
    assert sorted(pool.free_pages().tolist()) == [3, 5, 6, 7, 8]


def test_one_page_freed_twice():
    pool = make_pool(8)
    pool.allocate(4)
    pool.release_one(3)
    for page in (3, 8):
        with pytest.raises(IntegrityError, match=rf"{page}.*twice"):
            pool.release_one(page)
    assert pool.free == 5


@pytest.mark.parametrize("page", [0, -1, 9])
def test_what_is_no_page_cannot_be_freed(page):
    pool = make_pool(8)
    pool.allocate(8)
    for release in (lambda: pool.release(ids(1, page)), lambda: pool.release_one(page)):
        with pytest.raises(IntegrityError):
            release()
    assert pool.free == 0


def test_the_sums():
    pool = make_pool(8)
    pool.allocate(5)
    pool.tree, pool.held = 3, 1
    assert (pool.total, pool.free, pool.tree, pool.private) == (8, 3, 3, 2)
    assert pool.evictable == 2 and pool.available == 5


def test_random_traffic_against_a_set():
    pool, rng, used = make_pool(50), random.Random(0), set()
    for _ in range(2000):
        if rng.random() < 0.5:
            count = rng.randint(0, pool.free)
            pages = pool.allocate(count).tolist() if rng.random() < 0.8 or not count else [pool.allocate_one()]
            assert not used.intersection(pages) and len(set(pages)) == len(pages)
            used.update(pages)
        else:
            pages = rng.sample(sorted(used), rng.randint(0, len(used)))
            pool.release(ids(*pages))
            used.difference_update(pages)
        assert pool.free == 50 - len(used)
        assert set(pool.free_pages().tolist()) == set(range(1, 51)) - used


# ------------------------------------------------------------------------------------------------ the ranked class


def popped(order, count):
    return [order.pop_ranked()[3] for _ in range(count)]


def evict(order):
    """Takes the lowest item and ages the rest, as the tree does."""
    entry = order.pop_ranked()
    order.level = max(order.level, entry[1])
    return entry[3]


def test_cheap_things_first_and_old_ones_among_equals():
    order = EvictionOrder()
    for item, gain in (("dear", 9), ("cheap", 2), ("old", 5), ("young", 5)):
        order.put(item, 0, gain)
    assert popped(order, 4) == ["cheap", "old", "young", "dear"]


def test_priority_before_everything_else():
    order = EvictionOrder()
    order.put("low and dear", 0, 1000)
    order.put("high and cheap", 1, 1)
    order.put("negative", -1, 5000)
    assert popped(order, 3) == ["negative", "low and dear", "high and cheap"]


def test_a_later_put_replaces_the_rank():
    order = EvictionOrder()
    order.put("a", 0, 1)
    order.put("b", 0, 2)
    order.put("a", 0, 3)
    assert sorted(order.items()) == ["a", "b"]
    assert popped(order, 2) == ["b", "a"]
    with pytest.raises(IntegrityError):
        order.pop_ranked()


def test_discard_and_drop():
    order = EvictionOrder()
    for item in "abc":
        order.put(item, 0, 1)
        order.superseded[item] = None
    order.discard("a")
    order.drop("b")
    order.discard("never there")
    order.drop("never there")
    assert not order.ranked("a") and not order.ranked("b") and order.ranked("c")
    assert list(order.superseded) == ["a", "c"]
    assert popped(order, 1) == ["c"]


def test_put_back_undoes_pop():
    order = EvictionOrder()
    order.put("a", 0, 1)
    order.put("b", 0, 2)
    entry = order.pop_ranked()
    assert not order.ranked("a")
    order.put_back(entry)
    assert order.ranked("a")
    assert popped(order, 2) == ["a", "b"]


def test_greedy_dual_dear_things_age_too():
    """Something dear stays while cheap ones come and go, until what was evicted has cost more than it."""
    order = EvictionOrder()
    order.put("dear", 0, 50)
    for round_ in range(5):  # levels 10, 20, .. 50
        order.put(round_, 0, 10)
        if round_ < 4:
            assert evict(order) == round_
    assert evict(order) == "dear"  # 50, as old as the last cheap one is: the older goes
    assert evict(order) == 4


def test_greedy_dual_what_is_used_again_starts_at_the_present_level():
    order = EvictionOrder()
    order.put("once", 0, 30)
    order.put("again", 0, 30)
    for round_ in range(2):
        order.put(round_, 0, 10)
        assert evict(order) == round_
    order.put("again", 0, 30)
    assert order.level == 20
    order.put("new", 0, 15)
    assert [evict(order) for _ in range(3)] == ["once", "new", "again"]


def test_an_explicit_level_is_that_of_the_last_use():
    order = EvictionOrder()
    order.level = 100
    order.put("used now", 0, 1)
    order.put("used long ago", 0, 50, level=10)
    entry = order.pop_ranked()
    assert entry[0] == 0 and entry[1] == 60 and entry[3] == "used long ago" and entry[4] == 10


def test_clear_forgets_all_but_the_level():
    order = EvictionOrder()
    order.put("a", 0, 7)
    order.unneeded["b"] = order.superseded["c"] = None
    assert evict(order) == "a"
    order.put("d", 0, 1)
    order.clear()
    assert not order.items() and not order.unneeded and not order.superseded and order.level == 7
    with pytest.raises(IntegrityError):
        order.pop_ranked()


def test_the_lazy_heap_stays_bounded():
    order, rng = EvictionOrder(), random.Random(0)
    for step in range(20_000):
        order.put(rng.randrange(30), rng.randrange(3), rng.randrange(1000))
        if step % 3 == 0:
            order.discard(rng.randrange(30))
        assert len(order._heap) <= 2 * 30 + 65
    for item in order.items():
        order.discard(item)
    for i in range(200):  # the discarded ones go, too
        order.put(("new", i % 3), 0, i)
    assert len(order._heap) <= 2 * 3 + 65


def test_random_ranks_against_sorting():
    order, rng, ranks = EvictionOrder(), random.Random(1), {}
    for serial in range(3000):
        item = rng.randrange(40)
        match rng.random():
            case x if x < 0.6:
                rank = (rng.randrange(3), rng.randrange(20))
                order.put(item, *rank)
                ranks[item] = (rank[0], order.level + rank[1], serial)
            case x if x < 0.8:
                order.discard(item)
                ranks.pop(item, None)
            case _ if ranks:
                wanted = min(ranks, key=ranks.get)
                assert evict(order) == wanted
                del ranks[wanted]
        assert set(order.items()) == set(ranks)


# ------------------------------------------------------------------------------------------------ the three classes


def host_only(manager, seq, ids, **options):
    """reserve, the plan for prepare, commit; no device."""
    assert seq.reserve(len(ids))
    manager._host.builder.build()
    manager._host.builder.clear()
    seq._put_in_flight()
    seq.commit(ids, **options)


def test_first_the_unneeded_then_the_superseded_then_the_rest():
    """12 tokens with endpoints at 4 and 12, window 4, page size 2. What needs each window page:

    page        0    1    2    3    4    5
    endpoint    4    4    -    -   12   12        4 is superseded: its chain went on to 12
    """
    layers = {
        "full": jkv.AttentionLayer(jkv.kv_buffers(1, 2, np.float32)),
        "window": jkv.AttentionLayer(jkv.kv_buffers(1, 1, np.float32), window=4),
    }
    tier = jkv.DeviceTier(pages={"full": 20, "window:4": 6})
    manager = jkv.CacheManager(jkv.CacheConfig(layers, 1, 64, page_size=2, min_snapshot=False, tiers=(tier,)))
    seq = manager.open()
    assert seq.resume()
    host_only(manager, seq, range(4), snapshot=True)
    host_only(manager, seq, range(4, 12))
    seq.close()
    manager.check()
    tree, pool = manager._host.tree, manager._host.pools[1]
    assert pool.free == 0 and pool.evictable == 6
    (node,) = [node for node in tree.nodes() if node.size]
    held, gone = [], [set()]
    for _ in range(6):
        held.append(tree.allocate_one(pool))
        gone.append(set(np.flatnonzero(node.pages[1] < 0).tolist()))
    assert gone[1] < gone[2] == {2, 3} and gone[3] < gone[4] == {0, 1, 2, 3} and gone[5] < gone[6] == set(range(6))
    for page in held:
        pool.release_one(page)
    manager.check()
