"""Options and markers of the test suite."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # `import oracle`, whether tests/ is a package or not


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-steps", type=int, default=1000, help="operations per configuration of the random driver")
    parser.addoption("--random-seed", type=int, default=0, help="first seed of the random driver")
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes longer than half a minute; runs with --run-slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: give --run-slow"))
