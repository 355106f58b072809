"""Options and markers of the test suite, and what the state machine tried."""

import collections
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # `import oracle`, whether tests/ is a package or not


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes longer than half a minute; runs with --run-slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: give --run-slow"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many operations and faults the state machine has tried, in all processes."""
    operations, faults = 0, collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                noted = dict(report.user_properties)
                operations += noted.get("operations", 0)
                faults.update(noted.get("faults", {}))
    if operations:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
        terminalreporter.write_line(f"state machine: {operations} operations, {faults.total()} faults ({kinds})")
