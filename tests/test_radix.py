"""The tree against a brute-force reading of DESIGN section 4, "Match"; splits, probes, many siblings.

Trees grow through the CacheManager, without a device: what is tested decides on the host alone. Few different token
ids and pages of 2 or 3 tokens make many branches.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.radix import NO_TOKENS, common_tokens, node_of, pages_on, path_to, spans

# ------------------------------------------------------------------------------------------------ growing a tree


def make_manager(windows=(), pages=500, page_size=3, max_length=60, recurrent=False, **fields):
    """Full attention and `windows`, each (window, sinks), every group with its own pool; optionally a state."""
    layers = {"full": jkv.AttentionLayer(jkv.kv_buffers(1, 1, jnp.float32))}
    for i, (window, sinks) in enumerate(windows):
        layers[f"window{i}"] = jkv.AttentionLayer(jkv.kv_buffers(1, 2 + i, jnp.float32), window=window, sinks=sinks)
    if recurrent:
        layers["state"] = jkv.RecurrentLayer({"h": jkv.Buffer((2,), jnp.float32)})
    tier = jkv.DeviceTier(pages=pages)
    return jkv.CacheManager(jkv.CacheConfig(layers, 4, max_length, page_size=page_size, tiers=(tier,), **fields))


def write(manager, seq, ids, **options):
    """reserve, the plan for prepare, commit; no device. False: no room."""
    if not seq.reserve(len(ids)):
        return False
    manager._host.builder.build()
    manager._host.builder.clear()
    seq._put_in_flight()
    seq.commit(ids, **options)
    return True


def publish(manager, prompt, chunk=None, close=True, **options):
    """One whole request, committed in chunks. Returns the sequence, or None without room."""
    seq = manager.open(prompt)
    if not seq.resume():
        seq.close()
        return None
    while seq.length < len(prompt):
        at = seq.length
        if not write(manager, seq, prompt[at : at + (chunk or len(prompt))], **options):
            break
    if close:
        seq.close()
    return seq


def random_prompt(rng, alphabet=2, longest=30):
    return rng.integers(0, alphabet, rng.integers(1, longest + 1)).astype(np.int32)


def grow(manager, rng, requests, check=True):
    """Random requests: chunks, endpoints, ends, sequences that stay open and rewrite what others hold."""
    active = []
    for _ in range(requests):
        options = {"snapshot": [None, True, False][rng.integers(3)]}
        prompt = random_prompt(rng)
        stays = rng.random() < 0.2 and len(active) < 2
        seq = publish(manager, prompt, int(rng.integers(1, 8)), close=not stays, **options)
        if stays and seq is not None:
            active.append(seq)
        if active and rng.random() < 0.4:
            active.pop(int(rng.integers(len(active)))).close()
        if check:
            manager.check()
    return active


def root_of(manager):
    return manager._host.tree.roots.get(manager._host.root(jkv.Scope()))


# ------------------------------------------------------------------------------------------------ the brute force


@dataclasses.dataclass
class Path:
    """All nodes from below the root to one node, oldest page first."""

    tokens: np.ndarray
    pages: list[np.ndarray]  # per group, of the whole path
    age: tuple[int, ...]  # serials from the top: the smaller is the older path
    endpoints: set[int]
    ends_in_tail: bool


def all_paths(manager):
    """Every path of the tree, from the tree's own contents; each node ends one."""
    tree = manager._host.tree
    found, stack = [], [(root_of(manager), None)] if root_of(manager) else []
    while stack:
        node, above = stack.pop()
        if node.parent is None:
            path = Path(NO_TOKENS, [NO_TOKENS for _ in tree.groups], (), set(), False)
        else:
            num_pages = -(-node.size // tree.page_size)
            path = Path(
                np.concatenate((above.tokens, node.tokens[: node.size])),
                [np.concatenate((a, b[:num_pages])) for a, b in zip(above.pages, node.pages, strict=True)],
                (*above.age, node.serial),
                above.endpoints | {endpoint.position for endpoint in node.endpoints},
                node.size < tree.page_size,
            )
        found.append(path)
        stack += [(child, path) for child in node.children.values()]
    return found


def pages_overlapping(first, stop, page_size):
    """Pages that overlap tokens [first, stop)."""
    return {token // page_size for token in range(max(first, 0), stop)}


def has(path, group, n, page_size):
    """Whether the path has, at n, what the group needs."""
    if group.recurrent:
        return n in path.endpoints
    if group.window is None:
        needed = pages_overlapping(0, n, page_size)
    else:
        needed = pages_overlapping(n + 1 - group.window, n, page_size)
        needed |= pages_overlapping(0, min(group.sinks, n), page_size)
    return all(path.pages[group.ordinal][page] >= 0 for page in needed)


def common(path, prompt):
    n = 0
    while n < min(len(path.tokens), len(prompt)) and path.tokens[n] == prompt[n]:
        n += 1
    return n


def brute_force(manager, prompt, max_reuse):
    """DESIGN section 4, "Match", one path and one n after the other.

    Returns:
      tokens, attention_tokens, raw_tokens, limited_by.
    """
    config, groups, page_size = manager.config, manager.layout.groups, manager.config.page_size
    paths = all_paths(manager)
    raw = max((common(path, prompt) for path in paths), default=0)
    cap = min(raw - config.reuse_backoff, max_reuse)

    def allowed(path, n):
        if config.partial_reuse or n % page_size == 0:
            return True
        return n == len(prompt) and n in path.endpoints

    def largest(paths, groups):
        lengths = [
            n
            for path in paths
            for n in range(1, min(cap, common(path, prompt)) + 1)
            if allowed(path, n) and all(has(path, group, n, page_size) for group in groups)
        ]
        return max(lengths, default=0)

    hit, upper = largest(paths, groups), cap if config.partial_reuse else cap - cap % page_size
    attention = largest(paths, [group for group in groups if not group.recurrent])
    limited_by = None
    if hit < upper:
        longest = min((path for path in paths if common(path, prompt) == raw), key=lambda path: path.age)
        lengths = {group.name: largest([longest], [group]) for group in groups}
        limited_by = min(lengths, key=lengths.get)  # ties: the first in the groups' order
    return hit, attention, raw, limited_by


# ------------------------------------------------------------------------------------------------ match

WINDOWS = {
    "full": (),
    "one window": ((5, 0),),
    "sinks": ((4, 2),),
    "two windows": ((3, 0), (8, 0)),
    "one token and sinks": ((1, 0), (6, 4)),
}
STATES = pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "hybrid"])
FIELDS = {
    "plain": {},
    "no partial reuse": {"partial_reuse": False},
    "backoff": {"reuse_backoff": 2},
    "min_snapshot": {"min_snapshot": True},
    "small pools": {"pages": 24},
    "small pools, no partial reuse": {"pages": 24, "partial_reuse": False, "min_snapshot": True},
    "pages of 2": {"page_size": 2, "min_snapshot": True},
}


def queries(manager, rng, count):
    """Random prompts, and prompts near what the tree has: cut, extended, one token changed."""
    paths = [path.tokens for path in all_paths(manager) if len(path.tokens)]
    for _ in range(count):
        prompt = random_prompt(rng)
        if paths and rng.random() < 0.7:
            prompt = paths[rng.integers(len(paths))][: rng.integers(1, 61)].copy()
            if rng.random() < 0.5:
                prompt[rng.integers(len(prompt))] = rng.integers(0, 3)
            if rng.random() < 0.5:
                prompt = np.concatenate((prompt, random_prompt(rng, longest=5)))[:60]
        yield prompt, int(rng.integers(len(prompt) + 1)) if rng.random() < 0.2 else len(prompt)


@STATES
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_match_is_the_largest_length_that_every_group_can_serve(windows, fields, recurrent):
    rng = np.random.default_rng(len(windows) * 100 + len(fields))
    for _ in range(2):
        manager = make_manager(WINDOWS[windows], recurrent=recurrent, **FIELDS[fields])
        grow(manager, rng, int(rng.integers(5, 25)))
        for prompt, max_reuse in queries(manager, rng, 30):
            match = manager.probe(prompt, max_reuse=max_reuse)
            found = match.tokens, match.attention_tokens, match.raw_tokens
            assert found == brute_force(manager, prompt, max_reuse)[:3], (prompt, max_reuse)
            assert match.tier_tokens == ({"device": match.tokens} if match.tokens else {})


def longest_paths(manager, prompt):
    """The paths of the longest token match that lead to no other such path's node from above."""
    paths = all_paths(manager)
    raw = max(common(path, prompt) for path in paths)
    ages = {path.age for path in paths if common(path, prompt) == raw}
    return [age for age in ages if not any(age[:n] in ages for n in range(len(age)))]


@STATES
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_limited_by_is_the_group_that_shortens_the_longest_path_most(windows, fields, recurrent):
    """Where several paths are the longest, see the test of ties below."""
    rng = np.random.default_rng(len(windows) * 100 + len(fields) + 50)
    for _ in range(2):
        manager = make_manager(WINDOWS[windows], recurrent=recurrent, **FIELDS[fields])
        grow(manager, rng, int(rng.integers(5, 25)), check=False)
        for prompt, max_reuse in queries(manager, rng, 20):
            if len(longest_paths(manager, prompt)) == 1:
                match = manager.probe(prompt, max_reuse=max_reuse)
                assert match.limited_by == brute_force(manager, prompt, max_reuse)[3], (prompt, max_reuse)


def test_ties_go_to_the_oldest_of_the_siblings():
    """Five endings share two tokens of a page of three; the oldest is neither neighbour of what is asked for."""
    manager = make_manager()
    for ending in (9, 1, 5, 3, 7):
        publish(manager, [0, 0, 0, 4, 4, ending])
    hit = manager._host.tree.match(manager._host.root(jkv.Scope()), np.array([0, 0, 0, 4, 4, 4], np.int32), 6)
    assert hit.match.tokens == 5
    assert hit.path[-1].tokens.tolist() == [4, 4, 9]


def test_another_scope_or_model_shares_nothing():
    manager = make_manager()
    publish(manager, [1, 2, 3, 4])
    assert manager.probe([1, 2, 3, 4, 5]).tokens == 4
    assert manager.probe([1, 2, 3, 4, 5], scope=jkv.Scope(salt=0)).raw_tokens == 0


def test_nothing_matches_an_empty_tree_or_an_empty_prompt():
    manager = make_manager()
    assert manager.probe([1, 2, 3]) == jkv.Match()
    publish(manager, [1, 2, 3])
    assert manager.probe([]) == jkv.Match()


def test_a_walked_path_with_a_hole_yields_to_a_sibling_that_shares_less():
    """Windows pages of the exact path are gone; another ending of its first page still has them."""
    manager = make_manager(((3, 0),), page_size=4, min_snapshot=True)
    publish(manager, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3], chunk=12)  # keeps window pages at its end alone
    publish(manager, [1, 1, 1, 1, 2, 2, 9, 9], chunk=4, snapshot=True)
    prompt = [1, 1, 1, 1, 2, 2, 2, 2, 5]
    assert manager.probe(prompt).tokens == brute_force(manager, np.array(prompt), 8)[0] == 6
    assert manager.probe(prompt).raw_tokens == 8


# ------------------------------------------------------------------------------------------------ split


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("shared", [3, 4, 6, 14])
def test_a_split_keeps_paths_holders_and_pages(windows, shared):
    manager = make_manager(WINDOWS[windows])
    tree, prompt = manager._host.tree, np.arange(16, dtype=np.int32)
    first = publish(manager, prompt, close=False)
    (run,) = [node for node in tree.nodes() if node.size]
    serial, before = run.serial, [pages_on(run, g, 0, 5).copy() for g in range(len(tree.groups))]

    second = manager.open(np.concatenate((prompt[:shared], [99, 98, 97])))
    assert second.resume()
    manager.check()
    kept = second.length // 3
    if not kept:
        return
    assert first._node is run and second._node is run.parent, "the old object stays the lower half"
    head = run.parent
    assert (head.start, head.end, run.start, run.end) == (0, 3 * kept, 3 * kept, 15)
    assert (head.holders, run.holders) == (2, 1)
    assert head.serial == run.serial == serial
    for g, pages in enumerate(before):
        np.testing.assert_array_equal(pages_on(run, g, 0, 5), pages)
    for seq in (first, second):
        assert write(manager, seq, [50, 51, 52, 53])
        manager.check()
    second.close()
    first.close()
    manager.check()
    assert manager.probe([*prompt, 50, 51]).raw_tokens == 18


def test_a_split_of_nobodys_run_keeps_both_halves():
    manager = make_manager(((5, 0),))
    publish(manager, np.arange(15), chunk=3, snapshot=True)
    seq = manager.open([0, 1, 2, 3, 4, 5, 70])
    assert seq.resume() and seq.length == 6
    manager.check()
    head = seq._node
    (lower,) = head.children.values()
    assert (head.holders, lower.holders, lower.size) == (1, 0, 9)
    assert [e.position for e in head.endpoints] == [3, 6] and [e.position for e in lower.endpoints] == [9, 12, 15]
    seq.close()
    assert manager.probe(np.arange(15), max_reuse=15).tokens == 15


def test_a_sequence_between_whose_pages_a_split_falls_goes_on_in_place():
    """The lower half has one holder and no children: it grows in place."""
    manager = make_manager()
    first = publish(manager, np.arange(12), close=False)
    run = first._node
    publish(manager, [0, 1, 2, 3, 4, 5, 40, 41, 42])
    assert write(manager, first, [12, 13, 14])
    assert first._node is run and run.end == 15
    manager.check()
    second = publish(manager, np.arange(16), close=False)  # another holder
    assert write(manager, first, [70, 71, 72])
    assert first._node is not run and run.end == 15
    second.close()
    first.close()
    manager.check()


# ------------------------------------------------------------------------------------------------ probe reads only


def dump(manager):
    """All of the tree, the queues and the pools that a later decision could depend on."""
    tree, picture = manager._host.tree, []
    stack = [(node, None) for node in tree.roots.values()]
    while stack:
        node, parent = stack.pop()
        assert node.parent is parent
        uses = [None if u is None else u.tolist() for u in node.uses]
        endpoints = [(e.position, e.slot, e.priority, e.alive, len(e.extensions)) for e in node.endpoints]
        marks = {key: [id(e) for e in marks] for key, marks in node.marks.items()}
        picture.append((
            id(node), node.key, node.start, node.first_page, node.size, node.tokens.tolist(), node.serial, node.holders,
            node.priority, node.level, node.resident, [p.tolist() for p in node.pages], uses, endpoints, marks,
            list(node.children), list(node.order or ()),
        ))  # fmt: skip
        stack += [(child, node) for child in node.children.values()]
    for pool in manager._host.pools:
        order = pool.order
        queues = [list(map(repr, queue)) for queue in (order.unneeded, order.superseded)]
        ranks = [(entry[:3], id(entry[3]), entry[4]) for entry in order._heap]
        picture.append((pool.free, pool.tree, pool.held, pool.free_pages().tolist(), order.level, queues, ranks))
    return picture, tree._serial, manager._host.builder.snapshot(), manager.stats()


@pytest.mark.parametrize("windows", WINDOWS)
def test_probing_never_changes_the_tree(windows):
    rng = np.random.default_rng(7)
    manager = make_manager(WINDOWS[windows], pages=24)
    for _ in range(4):
        grow(manager, rng, 8)
        waiting = manager.open(random_prompt(rng))
        before = dump(manager)
        for prompt, max_reuse in queries(manager, rng, 60):
            manager.probe(prompt, max_reuse=max_reuse)
            manager.probe(prompt, scope=jkv.Scope(adapter="other"))
            assert waiting.match.tokens >= 0
        assert dump(manager) == before
        waiting.close()


def test_a_probe_is_repeatable():
    rng = np.random.default_rng(8)
    manager = make_manager(((5, 2),), pages=24)
    grow(manager, rng, 20)
    asked = list(queries(manager, rng, 40))
    first = [manager.probe(prompt, max_reuse=cap) for prompt, cap in asked]
    assert [manager.probe(prompt, max_reuse=cap) for prompt, cap in reversed(asked)] == first[::-1]


# ------------------------------------------------------------------------------------------------ many siblings


@pytest.mark.parametrize("windows", ["full", "one window", "sinks"])
def test_a_hundred_siblings_that_differ_inside_the_first_page(windows):
    """Ids far apart, so that the order of bytes is not the order of numbers; tails among them."""
    rng = np.random.default_rng(3)
    manager = make_manager(WINDOWS[windows], pages=1500, page_size=4, max_length=40)
    system = [7, 7, 7, 7]
    publish(manager, [*system, 5], snapshot=True)
    endings = {tuple(rng.choice([0, 1, 255, 256, 2**31 - 1], 4).tolist()) for _ in range(200)}
    endings = sorted(endings)[:100]
    assert len(endings) == 100
    for i in rng.permutation(100):
        ending = endings[i]
        publish(manager, [*system, *ending[: 4 if i % 5 else 3]], snapshot=True)
    manager.check()
    (node,) = [node for node in manager._host.tree.nodes() if len(node.children) > 5]
    assert node.end == 4 and len(node.children) > 85
    for _ in range(80):
        prompt = np.array([*system, *rng.choice([0, 1, 2, 255, 256, 2**31 - 1], rng.integers(1, 6))], np.int32)
        match = manager.probe(prompt, max_reuse=len(prompt))
        assert (match.tokens, match.raw_tokens) == brute_force(manager, prompt, len(prompt))[:3:2], prompt
    for ending in endings:
        assert manager.probe([*system, *ending, 3]).tokens >= 7


# ------------------------------------------------------------------------------------------------ the small pieces


@pytest.mark.parametrize("seed", range(5))
def test_common_tokens(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        a, b = (rng.choice([0, 1, 256, 65536, 2**31 - 1], rng.integers(0, 6)).astype(np.int32) for _ in range(2))
        if rng.random() < 0.5:
            b = np.concatenate((a, b))
        wanted = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
        assert common_tokens(a.tobytes(), b.tobytes()) == wanted


def test_paths_and_spans():
    """Three nodes of 2, 1 and 2 pages."""
    manager = make_manager(page_size=2)
    publish(manager, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    publish(manager, [0, 1, 2, 3, 4, 5, 50, 51])
    publish(manager, [0, 1, 2, 3, 60, 61])
    deepest = max(manager._host.tree.nodes(), key=lambda node: (node.end, -node.serial))
    a, b, c = list(path_to(deepest))[-2::-1]
    assert [(node.first_page, node.size // 2) for node in (a, b, c)] == [(0, 2), (2, 1), (3, 2)]
    assert spans(c, 1, 4) == [(c, 0, 1), (b, 0, 1), (a, 1, 2)]
    assert spans(c, 3, 3) == [] and spans(c, 0, 1) == [(a, 0, 1)]
    everything = np.concatenate([node.pages[0] for node in (a, b, c)])
    for first in range(6):
        for stop in range(first, 6):
            np.testing.assert_array_equal(pages_on(c, 0, first, stop), everything[first:stop])
    assert [node_of(c, n) for n in (1, 4, 5, 6, 7, 10)] == [a, a, b, b, c, c]


def test_check_sees_a_broken_tree():
    manager = make_manager(((5, 0),))
    seq = publish(manager, np.arange(12), close=False)
    manager.check()
    seq._node.holders += 1
    with pytest.raises(jkv.IntegrityError, match="holders"):
        manager.check()
    seq._node.holders -= 1
    seq._node.tokens[0] = 77
    with pytest.raises(jkv.IntegrityError, match="key"):
        manager.check()
