"""The state machine for as long as you like, with new seeds: any calls in any order, faults among them.

    python -m tests.soak --minutes 30 [--seed 1000] [--setup store] [--no-faults]

Prints what was tried now and then. The first failure ends it: Hypothesis shrinks it, and what is left is printed as a
script to paste into a test; the exit status is 1. Run several beside each other with seeds far apart.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from machine import OPERATIONS, SETUPS, STRUCK, drive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1000, help="the first; tests use those from 0 on")
    parser.add_argument("--setup", default="", help="only setups with this in their name")
    parser.add_argument("--no-faults", action="store_true")
    options = parser.parse_args()
    names = [name for name in SETUPS if options.setup in name]
    if not names:
        parser.error(f"no setup has {options.setup!r} in its name; they are: {'; '.join(SETUPS)}")
    until, seed = time.monotonic() + 60 * options.minutes, options.seed
    while True:
        for name in names:
            for faulty in (False, True)[: 1 if options.no_faults else 2]:
                with tempfile.TemporaryDirectory() as directory:
                    try:
                        drive(name, 1, seed, faulty, lambda: tempfile.mkdtemp(dir=directory))
                    except BaseException as error:
                        return _report(error, f"{name!r}, seed {seed}, {'' if faulty else 'no '}faults")
                if time.monotonic() > until:
                    print(f"{_tried()}; nothing found, seeds {options.seed} to {seed}")
                    return 0
        print(f"{_tried()}, seed {seed}", flush=True)
        seed += 1


def _tried() -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(STRUCK.items()))
    return f"{OPERATIONS.total()} operations, {STRUCK.total()} faults ({kinds})"


def _report(error: BaseException, where: str) -> int:
    if isinstance(error, KeyboardInterrupt):
        print(_tried())
        return 130
    while isinstance(error, BaseExceptionGroup):  # more than one kind of failure was found
        error = error.exceptions[0]
    print(f"{_tried()}; found in {where}:\n", flush=True)
    traceback.print_exception(error)  # its notes are the script
    return 1


if __name__ == "__main__":
    sys.exit(main())
