"""What `import jkv` adds to `import jax`.

    python -m tests.benchmarks.bench_import [import] [--json FILE]

Processes that import JAX, then jkv, and time both, with the bytecode that installed packages have. (The difference
between whole processes with and without jkv says the same on average, and is lost in what JAX's own import varies by.)
"""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys

from tests.benchmarks.report import Report, main

ROUNDS = 15
HERE = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
PROGRAM = """
import time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import jkv
print(middle - start, time.perf_counter() - middle)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=HERE, env=ENVIRONMENT, check=True, capture_output=True, text=True)


def slowest_modules(count: int = 3) -> dict[str, float]:
    """Milliseconds of the slowest among the modules of jkv and what only it imports."""
    lines = python("-X", "importtime", "-c", "import jax; import jkv").stderr.splitlines()
    after_jax = next(i for i, line in enumerate(lines) if line.endswith("| jax")) + 1
    fields = [line.removeprefix("import time:").split("|") for line in lines[after_jax:]]
    slowest = sorted(((int(own) / 1e3, name.strip()) for own, _, name in fields), reverse=True)
    return {name: milliseconds for milliseconds, name in slowest[:count]}


def bench_import(report: Report) -> None:
    """Seconds that jkv adds to the import of JAX."""
    python("-c", PROGRAM)  # writes the bytecode
    taken = [python("-c", PROGRAM).stdout.split() for _ in range(ROUNDS)]
    alone, added = (statistics.median(float(each[at]) for each in taken) for at in range(2))
    report.add("import jkv, beside import jax", added, "s", at_most=0.15, jax=alone, **slowest_modules())


PARTS = {"import": bench_import}

if __name__ == "__main__":
    main(__doc__, PARTS)
