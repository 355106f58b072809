"""Verifies the host half's invariants against a recount: what `CacheManager.check` runs."""

from __future__ import annotations

import dataclasses

import numpy as np

from jkv.arrivals import Arrival
from jkv.errors import IntegrityError
from jkv.eviction import Eviction
from jkv.holdings import Host
from jkv.layout import HOST
from jkv.pages import EvictionOrder, PagePool
from jkv.radix import HELD, HOLDS, KEPT, NEEDED, NO_SLOT, STAYS, Node, pages_on, path_to, spans
from jkv.sequence import Sequence

Held = list[tuple[int, int, int]]  # window pages: (group, first, stop)


@dataclasses.dataclass
class HeldPath:
    """What a sequence, or an arrival, has of the tree."""

    node: Node  # the deepest one
    windows: Held
    how: int  # HELD by an active sequence, KEPT by another


@dataclasses.dataclass
class Count:
    """What a recount finds in one pool of one tier."""

    places: list[np.ndarray]  # with an owner, ids
    tree: int = 0
    held: int = 0
    kept: int = 0
    idle: int = 0


def demand(condition: object, message: str) -> None:
    """Raises IntegrityError with `message` unless `condition` holds."""
    if not condition:
        raise IntegrityError(message)


def check_host(host: Host) -> None:
    """Every page and slot has exactly one owner, and tree, sequences and rows agree with each other.

    Raises:
      IntegrityError: names the broken invariant.
    """
    started = [seq for seq in host.sequences if seq._node is not None]
    arrivals = list(dict.fromkeys(host.arriving.values()))
    paths = [_held_path(seq) for seq in started] + [_kept_path(arrival) for arrival in arrivals]
    counts = check_tree(host.tree, paths)
    for seq in host.sequences:
        _check_lengths(seq)
    for seq in started:
        if not seq._age:
            _check_table(host, seq)
        _count_private(host, seq, counts)
    for arrival in arrivals:
        for want, place in zip(arrival.find.wanted, arrival._places, strict=True):
            _count(host, host.pools[arrival._pool_of(want)], np.array([place], np.int32), counts)
    for pool in host.tree.all_pools():
        _check_owners(host, pool, counts[pool])
    vacant = [row for row, owner in enumerate(host.rows) if owner is None]
    demand(sorted(host.free_rows) == vacant, f"free rows {sorted(host.free_rows)}, rows without a sequence {vacant}")
    entered = [seq.row for seq in host.sequences if seq._entered]
    agree = sorted(entered) == np.flatnonzero(host.ledger.entered).tolist() and len(entered) == host.ledger.count
    demand(agree, f"rows {entered} are in the ledger, which says {np.flatnonzero(host.ledger.entered).tolist()}")
    for row in vacant:
        demand(not host.tables[:, row].any(), f"row {row} is free and shows pages")
    for row, owner in enumerate(host.rows):
        slot = NO_SLOT if owner is None else owner._slot
        demand(host.slots[row] == slot, f"row {row}: live slot {host.slots[row]}, its sequence has {slot}")


def _held_path(seq: Sequence) -> HeldPath:
    """What `seq` holds, or keeps."""
    ranges = []
    for group in seq._host.tree.windows:
        ranges += [(group.ordinal, first, stop) for first, stop in seq._live_ranges(group, 0, seq._tree_pages)]
    return HeldPath(seq._node, ranges, KEPT if seq._age else HELD)


def _kept_path(arrival: Arrival) -> HeldPath:
    ranges = []
    for group in arrival._host.tree.windows:
        ranges += [(group.ordinal, first, stop) for first, stop in arrival._live_ranges(group, 0, arrival._kept)]
    return HeldPath(arrival._anchor, ranges, KEPT)


def _count(host: Host, pool: PagePool, places: np.ndarray, counts: dict[PagePool, Count]) -> None:
    for tier in host.tree.tiers(pool):
        counts[tier].places.append(tier.own(places))


def _count_private(host: Host, seq: Sequence, counts: dict[PagePool, Count]) -> None:
    """The pages and slots that `seq` owns."""
    for group in host.tree.groups:
        entries = seq._table(group.ordinal)[seq._tree_pages :]
        _count(host, host.pools[group.pool], entries[entries > 0], counts)
    pool = host.tree.state_pool
    if pool is not None:
        live = [] if seq._lent is not None else [seq._slot]
        marks = [mark.slot for mark in seq._marks]
        _count(host, pool, np.array([*live, *seq._pending.values(), *marks], np.int32), counts)
    if seq._age:
        for pool, idle in zip(host.pools, seq._idle_pages(), strict=True):
            counts[pool].idle += idle
            queued = pool.order.sleepers.get((seq._priority, seq._age)) is seq
            demand(queued == (idle > 0), f"{seq!r}: {idle} idle pages in pool {pool.name!r}, queued {queued}")


def _check_owners(host: Host, pool: PagePool, count: Count) -> None:
    name = f"pool {pool.name!r}" + (" in host memory" if pool.offset else "")
    parts, size = [*count.places, pool.free_pages()], pool.total + 1
    if pool is host.tree.state_pool and host.candidates is not None:
        parts.append(host.candidates.sets.reshape(-1))
        size = host.layout.pools[pool.ordinal].num_rows
    owners = np.bincount(np.concatenate(parts).astype(np.int64), minlength=size)
    lost, shared = np.flatnonzero(owners[1:] == 0) + 1, np.flatnonzero(owners > 1)
    sane = len(owners) == size and not owners[0] and not len(lost) and not len(shared)
    demand(sane, f"{name}: pages without an owner {lost.tolist()}, with two {shared.tolist()}")
    for field in ("tree", "held", "kept", "idle"):
        recount, counter = getattr(count, field), getattr(pool, field)
        demand(recount == counter, f"{name}: {recount} {field} pages, the counter says {counter}")
    demand(pool.order.sleepers or not pool.idle, f"{name}: idle pages, and nobody is queued to give them up")


def _check_lengths(seq: Sequence) -> None:
    demand(seq.committed <= seq.length <= seq.capacity, f"{seq!r}: committed <= length <= capacity does not hold")
    if seq._node is None:
        empty = not seq.capacity and seq._slot == NO_SLOT and seq.row is None
        demand(empty, f"{seq!r} holds something before its first resume")
        return
    lent = seq._lent
    lends = lent is None or (lent.alive and lent.pinned and (seq._age or lent.slot == seq._slot))
    demand(lends, f"{seq!r}: its lent state is lost")
    page_size = seq._host.layout.page_size
    end = seq._node.start if seq._lends_tail else seq._node.end
    partial = seq.committed - end if seq._entered else len(seq._partial)
    agree = end == seq._published * page_size and seq.committed == end + partial and 0 <= partial
    demand(agree, f"{seq!r}: a path of {end} tokens, {seq._published} published pages, {partial} tokens more")
    if seq.row is not None:
        own = all(np.shares_memory(a, b[seq.row]) for a, b in zip(seq._tables, seq._host.tables, strict=True))
        demand(own, f"{seq!r}: its tables are not its row")
    if seq._entered and seq._host.ledger.num_pages[seq.row] >= 0:
        marks = seq._host.ledger.num_pages[seq.row], seq._host.ledger.commit_mark[seq.row]
        wanted = seq._num_columns, seq._commit_mark()
        demand(marks == wanted, f"{seq!r}: pages and commit mark in the ledger are {marks}, not {wanted}")
    good = all(seq.committed <= mark.position <= seq.length for mark in seq._marks)
    demand(good, f"{seq!r}: marks at {[mark.position for mark in seq._marks]}")


def _check_table(host: Host, seq: Sequence) -> None:
    """The page table shows the tree's live pages, then private ones, then nothing."""
    shared, stop = seq._tree_pages, -(-seq.capacity // host.layout.page_size)
    for group in host.tree.groups:
        table = seq._tables[group.ordinal]
        expected = np.zeros(shared, np.int32)
        for first, last in seq._live_ranges(group, 0, shared):
            expected[first:last] = pages_on(seq._node, group.ordinal, first, last)
        what = f"{seq!r}: group {group.name!r}"
        private = table[max(shared, seq._live_from[group.ordinal]) : stop]
        if host.scratch is not None and group.window is not None:  # what a chunk held back, the tree may have meanwhile
            expected[table[:shared] == 0] = 0
            live = group.live_from(seq.length, host.layout.page_size)
            private = table[live : -(-seq.length // host.layout.page_size)]
        demand(
            np.array_equal(table[:shared], expected), f"{what}: table {table.tolist()}, the tree {expected.tolist()}"
        )
        demand((private > 0).all() and not table[stop:].any(), f"{what}: wrong private part of {table.tolist()}")


def check_tree(tree: Eviction, paths: list[HeldPath]) -> dict[PagePool, Count]:
    """Verifies structure, keys and eviction queues.

    Args:
      tree: the tree.
      paths: what each sequence and arrival has of it.

    Returns:
      What the tree has in each pool of each tier, and why.

    Raises:
      IntegrityError: names the node and what differs.
    """
    nodes = list(tree.nodes())
    known = set(nodes)
    holders, uses = _recount(tree, nodes, paths)
    demand(all(node in known for node, _ in holders), "a sequence's path is not in the tree")
    counts = {pool: Count([]) for pool in tree.all_pools()}
    for node in nodes:
        _check_node(tree, node, holders)
        for group, pool in zip(tree.groups, tree.group_pools, strict=True):
            if node.parent is None:
                continue
            g, size = group.ordinal, tree.num_pages(node)
            places = node.pages[g][:size]
            if group.window is None:
                _check_full(node, places)
                held, stays = np.full(size, node.holders > 0), np.full(size, node.holders + node.keepers > 0)
            else:
                known_uses = uses.get((node, g), np.zeros(size, np.int64))
                same = np.array_equal(node.uses[g][:size], known_uses)
                demand(same, f"node at {node.start}: uses of window pages differ")
                held, stays = (known_uses & HOLDS) > 0, (known_uses & STAYS) > 0
                _check_queues(tree, node, g, places, known_uses)
            _count_tree(tree, pool, places, held, stays, counts)
        if tree.state_pool is not None:
            slots = np.array([e.slot for e in node.endpoints], np.int32)
            pinned = np.array([e.pinned for e in node.endpoints], np.int64)
            _count_tree(tree, tree.state_pool, slots, pinned == HELD, pinned > 0, counts)
            queued = all(
                (e, -1) in tree.state_pool.order.kept for e in node.endpoints if e.pinned == KEPT and e.slot < HOST
            )
            demand(queued, f"node at {node.start}: a kept snapshot is not queued to move down")
    for pool in tree.all_pools():
        _check_order(pool.order, known)
    return counts


def _count_tree(
    tree: Eviction,
    pool: PagePool,
    places: np.ndarray,
    held: np.ndarray,
    stays: np.ndarray,
    counts: dict[PagePool, Count],
) -> None:
    """Adds the tree's `places`, of which sequences hold or keep some."""
    for tier in tree.tiers(pool):
        here, count = tier.here(places), counts[tier]
        count.places.append(places[here] - tier.offset)
        count.tree += int(np.count_nonzero(here))
        if tier.offset:
            count.held += int(np.count_nonzero(here & stays))
        else:
            count.held += int(np.count_nonzero(here & held))
            count.kept += int(np.count_nonzero(here & stays & ~held))


def _check_full(node: Node, places: np.ndarray) -> None:
    """Full attention has no holes, and along a path first pages on the device, then pages in host memory."""
    where, warm = f"node at {node.start}", node.device
    demand((places > 0).all(), f"{where}: holes in full attention")
    parted = (places[:warm] < HOST).all() and (places[warm:] >= HOST).all()
    demand(parted, f"{where}: {warm} pages on the device, its places are {places.tolist()}")
    above = node.parent
    whole = above.parent is None or above.device * len(above.key) >= 4 * above.size
    demand(not warm or whole, f"{where}: on the device below host memory")
    demand(not node.holders or warm == len(places), f"{where}: an active sequence's path is not on the device")


def _check_queues(tree: Eviction, node: Node, g: int, places: np.ndarray, uses: np.ndarray) -> None:
    """Window pages that may leave a tier for no endpoint's sake are queued there."""
    where = f"node at {node.start}"
    for tier in tree.tiers(tree.group_pools[g]):
        here = tier.here(places)
        idle = (here & (uses == 0)).any()
        queued = not tree.min_snapshot and (node, g) in tier.order.unneeded
        demand(not idle or queued, f"{where}: idle window pages are neither freed nor queued")
        if tree.has_host and not tier.offset:
            kept = (here & ((uses & HOLDS) == 0) & ((uses & STAYS) > 0)).any()
            demand(not kept or (node, g) in tier.order.kept, f"{where}: kept window pages are not queued to move down")


def _recount(
    tree: Eviction, nodes: list[Node], paths: list[HeldPath]
) -> tuple[dict[tuple[Node, int], int], dict[tuple[Node, int], np.ndarray]]:
    """Holders per (node, how), and uses per (node, window group), from the sequences and the endpoints."""
    holders: dict[tuple[Node, int], int] = {}
    uses: dict[tuple[Node, int], np.ndarray] = {}

    def add(node: Node, g: int, first: int, stop: int, amount: int) -> None:
        for current, a, b in spans(node, first, stop):
            counts = uses.setdefault((current, g), np.zeros(tree.num_pages(current), np.int64))
            counts[a:b] += amount

    for path in paths:
        for current in path_to(path.node):
            holders[current, path.how] = holders.get((current, path.how), 0) + 1
        for g, first, stop in path.windows:
            add(path.node, g, first, stop, path.how)
    for node in nodes:
        for endpoint in node.endpoints:
            for group in tree.windows:
                sinks, first, stop = group.needed(endpoint.position, tree.page_size)
                add(node, group.ordinal, first, stop, NEEDED)
                add(node, group.ordinal, 0, min(sinks, first), NEEDED)
    return holders, uses


def _check_order(order: EvictionOrder, known: set[Node]) -> None:
    """Queues and ranks name only what is still in the tree."""
    for node, _ in order.unneeded:
        demand(node in known, "an unlinked node is queued for eviction")
    for endpoint in order.superseded:
        demand(endpoint.alive, "a lost endpoint is queued for eviction")
    for item in [*order.items(), *(item for item, _ in order.kept)]:
        alive = item in known if isinstance(item, Node) else item.alive
        demand(alive, "something that is gone has a rank for eviction")


def _check_node(tree: Eviction, node: Node, holders: dict[tuple[Node, int], int]) -> None:
    where = f"node at {node.start}"
    for name, how, counter in (("holders", HELD, node.holders), ("keepers", KEPT, node.keepers)):
        count = holders.get((node, how), 0)
        demand(counter == count, f"{where}: {count} {name}, the counter says {counter}")
    warm = sum(child.device > 0 for child in node.children.values())
    demand(node.warm == warm, f"{where}: {warm} children on the device, the counter says {node.warm}")
    if node.parent is None:
        demand(tree.roots.get(node.key) is node, f"{where}: not the root of its scope")
        demand(node.children or node.holders or node.keepers, f"{where}: a bare root stays in the tree")
        demand(not node.endpoints, f"{where}: an endpoint on a root")
    else:
        _check_run(tree, node, node.parent, where)
    demand(sorted(node.children) == list(node.order or ()), f"{where}: sorted keys differ from the children")
    heads = sorted(key for key, child in node.children.items() if tree.has_head(child))
    demand(heads == list(tree.heads(node) or ()), f"{where}: sorted heads differ from the children")
    _check_endpoints(tree, node, where)


def _check_run(tree: Eviction, node: Node, parent: Node, where: str) -> None:
    tail = node.size < tree.page_size
    demand(parent.children.get(node.key) is node, f"{where}: not its parent's child")
    demand(node.key == node.tokens[: min(node.size, tree.page_size)].tobytes(), f"{where}: wrong key")
    demand(node.start == parent.end, f"{where}: its parent ends at {parent.end}")
    demand(node.first_page * tree.page_size == node.start, f"{where}: first page {node.first_page}")
    demand(tail or node.size % tree.page_size == 0, f"{where}: {node.size} tokens are not whole pages")
    demand(not tail or not node.children, f"{where}: a tail with children")
    present = sum(int(np.count_nonzero(ids[: tree.num_pages(node)] >= 0)) for ids in node.pages)
    demand(present == node.resident, f"{where}: {present} pages, the counter says {node.resident}")
    kept = present or node.endpoints or node.children or node.holders or node.keepers
    demand(kept, f"{where}: a bare node stays in the tree")
    if tree.full_pool is not None:
        _check_ranks(tree, node, where)


def _check_ranks(tree: Eviction, node: Node, where: str) -> None:
    """The ends of what can leave a tier, and nothing else, are ranked there."""
    device_leaf = not node.holders and node.device > 0 and not node.warm
    host_leaf = not node.holders and not node.children and node.device < tree.num_pages(node)
    for tier, is_leaf in zip(tree.tiers(tree.full_pool), (device_leaf, host_leaf), strict=False):
        leaf = is_leaf and not node.keepers
        demand(leaf == tier.order.ranked(node), f"{where}: evictable {leaf}, ranked {tier.order.ranked(node)}")
        queued = (node, tree.full) in tier.order.unneeded
        demand(queued or not (leaf and tree.dead_pages(node, tier)), f"{where}: dead pages are not queued")
    queued = (node, tree.full) in tree.full_pool.order.kept
    demand(queued == bool(device_leaf and node.keepers), f"{where}: kept pages, queued to move down: {queued}")


def _check_endpoints(tree: Eviction, node: Node, where: str) -> None:
    positions = [endpoint.position for endpoint in node.endpoints]
    demand(positions == sorted(set(positions)), f"{where}: endpoints at {positions}")
    for endpoint in node.endpoints:
        what = f"{where}: endpoint {endpoint.position}"
        demand(endpoint.alive and endpoint.node is node, f"{what} is misplaced")
        demand(node.start < endpoint.position <= node.end, f"{what} is outside it")
        demand((endpoint.slot != NO_SLOT) == (tree.state_pool is not None), f"{what} has slot {endpoint.slot}")
        demand(all(order.ranked(endpoint) for order in tree.endpoint_orders), f"{what} is not ranked for eviction")
        if endpoint.position - node.start < tree.page_size:
            key = node.key[: 4 * (endpoint.position - node.start)]
            demand(endpoint in node.parent.marks.get(key, ()), f"{what} has no mark")
    for key, marks in node.marks.items():
        for endpoint in marks:
            demand(endpoint.alive and endpoint.node.parent is node, f"{where}: a mark of a lost endpoint")
            offset = endpoint.position - endpoint.node.start
            demand(key == endpoint.node.key[: 4 * offset], f"{where}: a mark under a wrong key")
