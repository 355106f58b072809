"""What a benchmark prints and writes: a table of measured ratios with their aims, the machine, and JSON.

    python -m tests.benchmarks [NAME ...] [--json FILE]              all of them, each in a process of its own
    python -m tests.benchmarks.bench_host [PART ...] [--json FILE]   one of them

A benchmark module has PARTS = {name: function of a Report} and ends in `main(__doc__, PARTS)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Line:
    """One measured number.

    Attributes:
      what: of what; with `part`, what identifies the line.
      part: of the benchmark.
      value: mostly a ratio of two medians of one run.
      unit: of `value`; "H": times a SHA-256 chain over the 16-token pages of 2,048 tokens; "": a plain ratio.
      at_most, at_least: the aim, where there is one.
      details: whatever else helps to read it, {name: number or text}.
    """

    what: str
    part: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    @property
    def cells(self) -> tuple[str, ...]:
        aim = ""
        if self.at_most is not None:
            aim = f"<= {_short(self.at_most)}"
        elif self.at_least is not None:
            aim = f">= {_short(self.at_least)}"
        verdict = {None: "", True: "met", False: "missed"}[self.met]
        details = ", ".join(f"{name} {_short(value)}" for name, value in self.details.items())
        return self.what, f"{_short(self.value)} {self.unit}".strip(), aim, verdict, details


class Report:
    """Lines, printed as they come."""

    def __init__(self) -> None:
        self.part = ""
        self.lines: list[Line] = []

    def add(
        self,
        what: str,
        value: float,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        **details: Any,
    ) -> None:
        """See Line."""
        line = Line(what, self.part, float(value), unit, at_most, at_least, details)
        self.lines.append(line)
        what, measured, aim, verdict, rest = line.cells
        print(f"{what:<66} {measured:>10} {aim:>10} {verdict:<6} {rest}".rstrip(), flush=True)


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    import jax
    import jaxlib
    import numpy

    return {
        "cpu": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "devices": ", ".join(sorted({device.device_kind for device in jax.devices()})),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}",
        "numpy": numpy.__version__,
    }


def main(description: str | None, parts: Mapping[str, Callable[[Report], None]]) -> None:
    """The command line of one benchmark: which parts, and where the JSON goes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="all by default")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the lines and the machine there, too")
    options = parser.parse_args()
    here, report = machine(), Report()
    print("; ".join(f"{name}: {value}" for name, value in here.items()))
    for name in options.parts or parts:
        report.part = name
        print(f"\n{name}: {(parts[name].__doc__ or '').strip().partition(chr(10))[0]}")
        parts[name](report)
    if options.json is not None:
        lines = [{**dataclasses.asdict(line), "met": line.met} for line in report.lines]
        options.json.write_text(json.dumps({"machine": here, "lines": lines}, indent=1) + "\n")
    missed = sum(line.met is False for line in report.lines)
    print(f"\n{sum(line.met is True for line in report.lines)} aims met, {missed} missed", file=sys.stderr)


def _cpu_model() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _short(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
