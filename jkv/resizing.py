"""Another size for a tier: what must leave it leaves, what stays moves to ids that will exist.

    pages    1 2 3 4 5 6 7 8         x: in use, after eviction to 5 pages
             x . x x . . x x
    moved              7 -> 2, 8 -> 5

And what survives the loss of the device: the paths that lie wholly in host memory. The host half of jkv: NumPy only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from collections.abc import Sequence as Each

import numpy as np

from jkv.errors import OutOfPagesError
from jkv.eviction import Eviction
from jkv.holdings import Host
from jkv.layout import HOST
from jkv.pages import PagePool
from jkv.radix import KEPT, NO_SLOT, Node
from jkv.sequence import Sequence

Moved = dict[int, np.ndarray]  # {pool ordinal: int32[2, n]}: [0] ids until now, [1] ids from now on


def shrink(host: Host, tiers: Each[PagePool], totals: Each[int]) -> None:
    """Evicts from `tiers`, the pools of one tier, until what is left fits `totals`.

    Raises:
      OutOfPagesError: what must stay does not fit; nothing has changed.
    """
    for pool, total in zip(tiers, totals, strict=True):
        stays = pool.total - pool.available
        if stays > total:
            raise OutOfPagesError(f"pool {pool.name!r}: {stays} pages are in use and cannot leave; {total} asked for")
    for pool, total in zip(tiers, totals, strict=True):
        host.tree.make_free(pool, pool.total - total)


def move_together(host: Host, tiers: Each[PagePool], totals: Each[int]) -> Moved:
    """Gives what `tiers` have the ids that `totals` leave, and the pools these sizes."""
    moved = {}
    for pool, total in zip(tiers, totals, strict=True):
        pairs = pool.resize(total)
        if pairs.shape[1]:
            moved[pool.ordinal] = pairs
            _rename(host, pool, pairs)
        if pool is host.tree.state_pool and host.candidates is not None:
            slots = host.candidates.shown
            slots[slots >= pool.num_ids] = NO_SLOT  # of steps that are over
    return moved


def _rename(host: Host, pool: PagePool, pairs: np.ndarray) -> None:
    """Everybody who knows pages[0] of a pool's tier knows them as pages[1] from now on."""
    tree = host.tree
    old, new = pairs + pool.offset
    order = np.argsort(old)
    old, new = old[order], new[order]

    def renamed(places: np.ndarray) -> np.ndarray:
        at = np.searchsorted(old, places).clip(max=len(old) - 1)
        return np.where(old[at] == places, new[at], places).astype(np.int32)

    def renamed_slot(slot: int) -> int:
        return int(renamed(np.array([slot], np.int32))[0])

    groups = [group.ordinal for group in tree.groups if group.pool == pool.ordinal]
    is_state = tree.state_pool is not None and pool.ordinal == tree.state_pool.ordinal
    for node in tree.nodes():
        for g in groups if node.pages else ():
            node.pages[g] = renamed(node.pages[g])
        for endpoint in node.endpoints if is_state else ():
            endpoint.slot = renamed_slot(endpoint.slot)
    for seq in host.sequences:
        _rename_of(seq, groups, renamed)
        if is_state:
            seq.change_every_slot(renamed_slot)
    if is_state and host.candidates is not None and not pool.offset:
        for slots in (host.candidates.sets, host.candidates.shown):
            slots[:] = renamed(slots.reshape(-1)).reshape(slots.shape)
    for arrival in dict.fromkeys(host.arriving.values()):
        for i, want in enumerate(arrival.find.wanted):
            if arrival._pool_of(want) == pool.ordinal:
                arrival._places[i] = renamed_slot(arrival._places[i])


def _rename_of(seq: Sequence, groups: list[int], renamed: Callable[[np.ndarray], np.ndarray]) -> None:
    for g in groups:
        if len(seq._tables[g]):
            seq._tables[g][:] = renamed(seq._tables[g])  # in place: an active sequence's is a row of Host.tables
            seq._mark(g, 0, seq._num_columns)


@dataclasses.dataclass
class Graft:
    """A node of a lost tree, and what it has become."""

    old: Node
    new: Node


def graft(old: Eviction, new: Eviction, lost: Collection[tuple[int, int]]) -> None:
    """Takes over what a tree that has lost the device still has: the paths that lie wholly in host memory.

    Args:
      old: nobody holds or keeps anything there any more.
      new: empty; its pools in host memory are as large as the old one's.
      lost: (pool ordinal, host page) of what never arrived there.
    """
    gone = [np.array(sorted(page for p, page in lost if p == pool.ordinal), np.int32) for pool in new.pools]
    grafted = []
    for root in old.roots.values():
        stack = [Graft(root, new.root(root.key))]
        new.keep(stack[0].new)
        grafted.append(stack[0].new)
        while stack:
            above = stack.pop()
            for child in above.old.children.values():
                node = _graft_node(old, new, child, above.new, gone)
                if node is not None:
                    grafted.append(node)
                    if node.size == child.size:
                        stack.append(Graft(child, node))
    for node in reversed(grafted):  # every part was kept while it came
        if node.parent is not None:
            for group in new.windows:
                stop = node.first_page + new.num_pages(node)
                new.change_window(node, group.ordinal, node.first_page, stop, -KEPT)
        new.unkeep_child(node, node.priority)
        new.kept_paths -= node.parent is None


def _graft_node(old: Eviction, new: Eviction, node: Node, parent: Node, gone: list[np.ndarray]) -> Node | None:
    """What is left of `node`, below `parent`; None: nothing."""
    size = old.num_pages(node)
    pages = []
    for group in old.groups:
        places = node.pages[group.ordinal][:size]
        pages.append(np.where((places >= HOST) & ~np.isin(places - HOST, gone[group.pool]), places, np.int32(-1)))
    keep = size
    if old.full is not None:
        missing = pages[old.full] < 0
        keep = int(missing.argmax()) if missing.any() else size
    tokens = node.tokens[: min(node.size, keep * old.page_size)]
    if not keep:
        return None
    for group, places in zip(old.groups, pages, strict=True):
        kept = places[:keep]
        new.pools[group.pool].below.adopt(kept[kept >= 0] - HOST)
    copy = new.attach(parent, tokens, [places[:keep] for places in pages], [0] * len(pages), node.priority, KEPT)
    copy.stored = min(node.stored, copy.end)
    new.renew(copy, node.expires)
    for endpoint in node.endpoints:
        slot = endpoint.slot
        if slot != NO_SLOT:
            if slot < HOST or slot - HOST in gone[new.state_pool.ordinal]:
                continue
        if endpoint.position <= copy.end:
            if slot != NO_SLOT:
                new.state_pool.below.adopt(np.array([slot - HOST], np.int32))
            new.renew(new.add_endpoint(copy, endpoint.position, slot, endpoint.priority), endpoint.expires)
    return copy
