"""All benchmarks, each in a process of its own: `python -m tests.benchmarks [NAME ...] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("bench_*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], help="all by default")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all lines and the machine there, too")
    options = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names or NAMES:
            print(f"\n== {name}", flush=True)
            path = pathlib.Path(scratch) / f"{name}.json"
            subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}", "--json", str(path)], check=True)
            written = json.loads(path.read_text())
            found["machine"] = written["machine"]
            found[name] = written["lines"]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
