"""The state machine of `machine.py` under fixed seeds: every setup, without faults, with them, and listened to.

`python -m tests.soak --minutes 30` looks longer, and elsewhere.
"""

import numpy as np
import pytest
from machine import EVENTS, OPERATIONS, SETUPS, STRUCK, Machine, drive

LEAST = 200  # operations of a setup without faults, and with them


@pytest.fixture
def location(tmp_path):
    """Gives a new directory each time."""
    numbers = iter(range(10**6))
    return lambda: str(tmp_path / str(next(numbers)))


@pytest.fixture
def tried(record_property):
    """Notes what a test tried, for the summary of the run."""
    operations, struck = OPERATIONS.copy(), STRUCK.copy()
    yield
    record_property("operations", (OPERATIONS - operations).total())
    record_property("faults", dict(STRUCK - struck))


@pytest.mark.parametrize("name", SETUPS)
def test_any_order_of_events(name, location, tried):
    """Without faults, with them, and (SPEC S55) listened to: without partial reuse a router that knows the events alone
    knows exactly what `probe` finds. One test, so that it compiles once."""
    assert drive(name, LEAST, location=location, examples=2) >= LEAST
    assert drive(name, LEAST, faulty=True, location=location, examples=4) >= LEAST
    config = {"partial_reuse": False, "reuse_backoff": 0, "events": EVENTS}
    drive(name, 1, location=location, examples=1, **config)


@pytest.mark.parametrize("name", ["full+window+recurrent, tiny, P=6", "full+window, shared, tiny", "full, images"])
def test_the_same_calls_make_the_same_decisions(name):
    """No clock, no randomness, no hash order: page for page."""
    left = []

    class Remembered(Machine):
        def teardown(self):
            super().teardown()
            left.append((self.lines, self.w.manager.stats(), self.w.tables, self.w.bytes))

    for _ in range(2):
        drive(name, 1, base=Remembered)
    half = len(left) // 2
    for (lines, stats, tables, contents), other in zip(left[:half], left[half:], strict=True):
        assert lines == other[0] and stats == other[1]
        for these, those in ((tables, other[2]), (contents, other[3])):
            assert all(np.array_equal(these[key], those[key]) for key in these)


def test_a_wrong_byte_is_found_and_shrunk_to_a_script():
    """The machine itself can fail: somebody writes over a page, and the error carries what it takes to see it."""

    class Clumsy(Machine):
        def _write(self, run, new):
            super()._write(run, new)
            if len(run.held) + len(new) > 6:
                self.w.bytes["full.0", "k"][self.w.table(run, "full")[0]] += 1
                self.do("verify", "w.verify()")

    with pytest.raises(AssertionError, match=r"full.0.k is wrong") as caught:
        drive("full", 200, base=Clumsy)
    script = [line for line in caught.value.__notes__[0].split("\n") if line.startswith(("w", "r1"))]
    assert len(script) < 12 and script[0].startswith("w = World('full'") and script[-1] == "w.verify()"
