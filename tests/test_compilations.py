"""Nothing recompiles because traffic changed: compilations by the backend, counted, not only traces."""

import pytest
from benchmarks.bench_compilations import compilations, count_compilations

STEPS = 240


@pytest.fixture(scope="module")
def traffic_and_counts():
    return count_compilations(STEPS)


def test_random_traffic_compiles_nothing_in_the_second_half(traffic_and_counts):
    traffic, counts = traffic_and_counts
    assert sum(counts[: STEPS // 2]) >= 3, "the listener hears the three shapes of the step at least"
    assert sum(counts[STEPS // 2 :]) == 0, f"compilations in steps {[i for i, n in enumerate(counts) if n]}"
    stats = traffic.manager.stats()
    evicted = sum(stats.evicted_pages.values())
    assert stats.hits > 5 and stats.snapshots_taken > 5 and evicted > 20, "traffic of all kinds"
    traffic.manager.check()


def test_a_fresh_state_of_the_same_shapes_compiles_nothing(traffic_and_counts):
    traffic, _ = traffic_and_counts
    traffic.active.clear()
    traffic.suspended.clear()
    traffic.state = traffic.manager.reset()
    with compilations() as seen:
        for _ in range(40):
            traffic.step()
    assert not seen
