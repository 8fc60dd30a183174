"""Rewrite the golden hashes and names with those of today's code, and print what changed.

    .venv/bin/python tests/golden/write.py               the daily cases
    .venv/bin/python tests/golden/write.py --nightly     the nightly ones, too (minutes)
    .venv/bin/python tests/golden/write.py --check       print what would change, and write nothing
    TILEREC_NATIVE=0 .venv/bin/python tests/golden/write.py     the daily cases of the reference kernels

A run of the first and the last of these rewrites all that `make pytest` compares.

A refactoring changes none of them. Where bits change on purpose (a better summation order, a fixed rule), commit the
new file together with the change, and say in the commit message which cases changed and why they should.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo's own words, in every process

from tests.golden import files, names, record
from tests.golden.cases import CASES, NIGHTLY, Case
from tilerec import backends


def _hashes(cases: Mapping[str, Case]) -> dict[str, dict[str, str]]:
    return {name: case() for name, case in cases.items()}


def main() -> int:
    """Write the files; with --check return 1 if one of them would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nightly", action="store_true", help="the nightly cases, too")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--files", action="store_true", help="first write files/ anew: users keep their old ones")
    options = parser.parse_args()
    if options.files:
        files.write()
    kept = [(record.DAILY_FILE, CASES)]
    if options.nightly:
        if not backends.NATIVE_CPU:
            parser.error("--nightly: the nightly cases are of the native library; leave TILEREC_NATIVE=0 out")
        kept.append((record.NIGHTLY_FILE, NIGHTLY))
    changed = False
    for path, cases in kept:
        made = _hashes(cases)
        lines = record.changes(record.read(path), made)
        changed |= bool(lines)
        print("\n".join([f"{path.name}: {len(made)} cases, {len(lines)} changes", *lines]))
        if not options.check:
            record.write(path, made)
    if backends.NATIVE_CPU:
        text, before = names.text(), names.FILE.read_text() if names.FILE.exists() else ""
        lines = [line for line in difflib.ndiff(before.split("\n"), text.split("\n")) if line[0] in "+-"]
        changed |= bool(lines)
        print("\n".join([f"{names.FILE.name}: {len(lines)} changes", *lines]))
        if not options.check:
            record.replace(names.FILE, text)
    return int(options.check and changed)


if __name__ == "__main__":
    sys.exit(main())
