"""Nothing recompiles because traffic changed: compilations by the backend, counted, not only traces."""

from benchmarks.bench_compilations import compilations, count_compilations

STEPS = 300


def test_random_traffic_compiles_nothing_in_the_second_half():
    traffic, counts = count_compilations(STEPS)
    assert sum(counts[: STEPS // 2]) >= 3, "the listener hears the three shapes of the step at least"
    assert sum(counts[STEPS // 2 :]) == 0, f"compilations in steps {[i for i, n in enumerate(counts) if n]}"
    stats = traffic.manager.stats()
    assert stats.hits > 5 and stats.snapshots_taken > 5 and sum(stats.evicted_pages.values()) > 20, "traffic of all kinds"
    traffic.manager.check()


def test_a_fresh_state_of_the_same_shapes_compiles_nothing():
    traffic, _ = count_compilations(60)
    traffic.active.clear()
    traffic.suspended.clear()
    traffic.state = traffic.manager.reset()
    with compilations() as seen:
        for _ in range(40):
            traffic.step()
    assert not seen
