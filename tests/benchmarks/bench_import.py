"""What `import jkv` adds to `import jax`.

    python -m tests.benchmarks.bench_import [import] [--json FILE]

Processes that import JAX alone, and JAX and jkv, in turn; what is already compiled to bytecode stays so.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
from collections import Counter

from tests.benchmarks.report import Report, main
from tests.benchmarks.timing import alternate

ROUNDS = 15
HERE = pathlib.Path(__file__).parents[2]


def python(*arguments: str) -> str:
    """What a process prints to stderr."""
    return subprocess.run([sys.executable, *arguments], cwd=HERE, check=True, capture_output=True, text=True).stderr


def slowest_modules() -> dict[str, float]:
    """Of three runs the median, in milliseconds: the modules of jkv and what only it imports, the three slowest."""
    taken: dict[str, list[float]] = {}
    for _ in range(3):
        lines = python("-X", "importtime", "-c", "import jax; import jkv").splitlines()
        after_jax = next(i for i, line in enumerate(lines) if line.endswith("| jax")) + 1
        for line in lines[after_jax:]:
            own, _, name = line.removeprefix("import time:").split("|")
            taken.setdefault(name.strip(), []).append(int(own) / 1e3)
    return dict(Counter({name: statistics.median(times) for name, times in taken.items()}).most_common(3))


def bench_import(report: Report) -> None:
    """Seconds that jkv adds to the import of JAX."""
    codes = "import jax", "import jax, jkv"
    for code in codes:  # to bytecode
        python("-c", code)
    alone, both = alternate(*(lambda _, code=code: python("-c", code) for code in codes), rounds=ROUNDS)
    report.add("import jkv, beside import jax", both - alone, "s", at_most=0.15, jax=alone, **slowest_modules())


PARTS = {"import": bench_import}

if __name__ == "__main__":
    main(__doc__, PARTS)
