"""Verifies the host half's invariants against a recount: what `CacheManager.check` runs."""

from __future__ import annotations

import numpy as np

from jkv.errors import IntegrityError
from jkv.holdings import Host
from jkv.pages import EvictionOrder
from jkv.radix import HELD, NEEDED, NO_SLOT, Node, pages_on, path_to, spans
from jkv.retention import Retention
from jkv.sequence import Sequence

HeldPath = tuple[Node, list[tuple[int, int, int]]]  # deepest node; window pages: (group, first, stop)


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
    owned = check_tree(host.tree, [_held_path(seq) for seq in started])
    for seq in host.sequences:
        _check_lengths(seq)
    for seq in started:
        _check_table(host, seq)
        for parts, pages in zip(owned, _private_pages(host, seq), strict=True):
            parts.append(pages)
    for pool, parts in zip(host.pools, owned, strict=True):
        if pool is host.tree.state_pool and host.candidates is not None:
            parts.append(host.candidates.sets.reshape(-1))
        everything = np.concatenate([*parts, pool.free_pages()]).astype(np.int64)
        size = host.layout.pools[pool.ordinal].num_rows
        counts = np.bincount(everything, minlength=size)
        lost, shared = np.flatnonzero(counts[1:] == 0) + 1, np.flatnonzero(counts > 1)
        sane = len(counts) == size and not counts[0] and not len(lost) and not len(shared)
        demand(sane, f"pool {pool.name!r}: pages without an owner {lost.tolist()}, with two {shared.tolist()}")
    vacant = [row for row, owner in enumerate(host.rows) if owner is None]
    demand(sorted(host.free_rows) == vacant, f"free rows {sorted(host.free_rows)}, rows without a sequence {vacant}")
    entered = [seq.row for seq in host.sequences if seq._entered]
    agree = sorted(entered) == np.flatnonzero(host.ledger.entered).tolist() and len(entered) == host.ledger.count
    demand(agree, f"rows {entered} are in the ledger, which says {np.flatnonzero(host.ledger.entered).tolist()}")
    for row, owner in enumerate(host.rows):
        slot = NO_SLOT if owner is None else owner._slot
        demand(host.slots[row] == slot, f"row {row}: live slot {host.slots[row]}, its sequence has {slot}")


def _held_path(seq: Sequence) -> HeldPath:
    """The deepest node that `seq` holds, and the window pages it holds."""
    ranges = []
    for group in seq._host.tree.windows:
        ranges += [(group.ordinal, first, stop) for first, stop in seq._live_ranges(group, 0, seq._tree_pages)]
    return seq._node, ranges


def _private_pages(host: Host, seq: Sequence) -> list[np.ndarray]:
    """Per pool the page ids and slots that `seq` owns."""
    pages: list[list[int]] = [[] for _ in host.pools]
    for group in host.tree.groups:
        entries = seq._table(group.ordinal)[seq._tree_pages :]
        pages[group.pool].extend(entries[entries > 0].tolist())
    if host.tree.state_pool is not None:
        live = [] if seq._lent is not None else [seq._slot]
        marks = [mark.slot for mark in seq._marks]
        pages[host.tree.state_pool.ordinal].extend([*live, *seq._pending.values(), *marks])
    return [np.array(ids, np.int32) for ids in pages]


def _check_lengths(seq: Sequence) -> None:
    demand(seq.committed <= seq.length <= seq.capacity, f"{seq!r}: committed <= length <= capacity does not hold")
    if seq._node is None:
        empty = not seq.capacity and seq._slot == NO_SLOT and seq.row is None
        demand(empty, f"{seq!r} holds something before its first resume")
        return
    lent = seq._lent
    demand(lent is None or (lent.alive and lent.pinned and lent.slot == seq._slot), f"{seq!r}: its lent state is lost")
    page_size = seq._host.layout.page_size
    end = seq._node.start if seq._lends_tail else seq._node.end
    partial = seq.committed - end if seq._entered else len(seq._partial)
    agree = end == seq._published * page_size and seq.committed == end + partial and 0 <= partial
    demand(agree, f"{seq!r}: a path of {end} tokens, {seq._published} published pages, {partial} tokens more")
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


def check_tree(tree: Retention, paths: list[HeldPath]) -> list[list[np.ndarray]]:
    """Verifies structure, keys, counters and eviction queues.

    Args:
      tree: the tree.
      paths: per sequence that holds something its deepest node (a tail it lent included) and the window page ranges
        it holds: (group ordinal, first, stop).

    Returns:
      Per pool the page ids that the tree owns.

    Raises:
      IntegrityError: names the node and what differs.
    """
    nodes = list(tree.nodes())
    known = set(nodes)
    holders, uses = _recount(tree, nodes, paths)
    demand(all(node in known for node in holders), "a sequence's path is not in the tree")
    owned: list[list[np.ndarray]] = [[] for _ in tree.pools]
    held = [0] * len(tree.pools)
    for node in nodes:
        _check_node(tree, node, holders.get(node, 0))
        for group, pool in zip(tree.groups, tree.group_pools, strict=True):
            if node.parent is None:
                continue
            g, size = group.ordinal, tree.num_pages(node)
            ids = node.pages[g][:size]
            owned[pool.ordinal].append(ids[ids >= 0])
            if group.window is None:
                demand(len(ids) == size and (ids > 0).all(), f"node at {node.start}: holes in full attention")
                held[pool.ordinal] += size if node.holders else 0
                continue
            counts = uses.get((node, g), np.zeros(size, np.int64))
            demand(np.array_equal(node.uses[g][:size], counts), f"node at {node.start}: uses of window pages differ")
            held[pool.ordinal] += int(np.count_nonzero((counts % NEEDED > 0) & (ids >= 0)))
            idle = ((ids >= 0) & (counts == 0)).any()
            queued = not tree.min_snapshot and (node, g) in pool.order.unneeded
            demand(not idle or queued, f"node at {node.start}: idle window pages are neither freed nor queued")
        if tree.state_pool is not None:
            owned[tree.state_pool.ordinal] += [np.array([e.slot], np.int32) for e in node.endpoints]
            held[tree.state_pool.ordinal] += sum(e.pinned for e in node.endpoints)
    for pool in tree.pools:
        count = sum(map(len, owned[pool.ordinal]))
        demand(count == pool.tree, f"pool {pool.name!r}: {count} pages in the tree, the counter says {pool.tree}")
        recount = held[pool.ordinal]
        demand(recount == pool.held, f"pool {pool.name!r}: {recount} held pages, the counter says {pool.held}")
        _check_order(pool.order, known)
    return owned


def _recount(
    tree: Retention, nodes: list[Node], paths: list[HeldPath]
) -> tuple[dict[Node, int], dict[tuple[Node, int], np.ndarray]]:
    """Holders per node, and uses per (node, window group), from the sequences and the endpoints."""
    holders: dict[Node, int] = {}
    uses: dict[tuple[Node, int], np.ndarray] = {}

    def add(node: Node, g: int, first: int, stop: int, amount: int) -> None:
        for current, a, b in spans(node, first, stop):
            counts = uses.setdefault((current, g), np.zeros(tree.num_pages(current), np.int64))
            counts[a:b] += amount

    for deepest, ranges in paths:
        for current in path_to(deepest):
            holders[current] = holders.get(current, 0) + 1
        for g, first, stop in ranges:
            add(deepest, g, first, stop, HELD)
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
    for item in order.items():
        alive = item in known if isinstance(item, Node) else item.alive
        demand(alive, "something that is gone has a rank for eviction")


def _check_node(tree: Retention, node: Node, holders: int) -> None:
    where = f"node at {node.start}"
    demand(node.holders == holders, f"{where}: {holders} holders, the counter says {node.holders}")
    if node.parent is None:
        demand(tree.roots.get(node.key) is node, f"{where}: not the root of its scope")
        demand(node.children or node.holders, f"{where}: a bare root stays in the tree")
        demand(not node.endpoints, f"{where}: an endpoint on a root")
    else:
        _check_run(tree, node, node.parent, where)
    demand(sorted(node.children) == list(node.order or ()), f"{where}: sorted keys differ from the children")
    heads = sorted(key for key, child in node.children.items() if tree.has_head(child))
    demand(heads == list(tree.heads(node) or ()), f"{where}: sorted heads differ from the children")
    _check_endpoints(tree, node, where)


def _check_run(tree: Retention, node: Node, parent: Node, where: str) -> None:
    tail = node.size < tree.page_size
    demand(parent.children.get(node.key) is node, f"{where}: not its parent's child")
    demand(node.key == node.tokens[: min(node.size, tree.page_size)].tobytes(), f"{where}: wrong key")
    demand(node.start == parent.end, f"{where}: its parent ends at {parent.end}")
    demand(node.first_page * tree.page_size == node.start, f"{where}: first page {node.first_page}")
    demand(tail or node.size % tree.page_size == 0, f"{where}: {node.size} tokens are not whole pages")
    demand(not tail or not node.children, f"{where}: a tail with children")
    present = sum(int(np.count_nonzero(ids[: tree.num_pages(node)] >= 0)) for ids in node.pages)
    demand(present == node.resident, f"{where}: {present} pages, the counter says {node.resident}")
    kept = present or node.endpoints or node.children or node.holders
    demand(kept, f"{where}: a bare node stays in the tree")
    if tree.full_pool is not None:
        order = tree.full_pool.order
        leaf = not node.holders and not node.children
        demand(leaf == order.ranked(node), f"{where}: evictable {leaf}, ranked {order.ranked(node)}")
        queued = (node, tree.full) in order.unneeded
        demand(queued or not (leaf and tree.dead_pages(node)), f"{where}: dead pages are not queued")


def _check_endpoints(tree: Retention, node: Node, where: str) -> None:
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
