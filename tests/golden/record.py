"""The files of golden hashes: one line for each case, in the order of their names.

    {
     "sharded/row_wise-adam-sum-2-fp32-as_is": {"outputs": "03d8a9624c45886c", "weights": "83a11fa6e18136f4"},
     …
    }

The native library and the reference kernels sum weighted and averaged bags in another order, so each has a file of its
own. Both have the same bits on every machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.golden.training import Marks
from tilerec import backends

DAILY_FILE = Path(__file__).with_name("hashes.json" if backends.NATIVE_CPU else "hashes_reference.json")
NIGHTLY_FILE = Path(__file__).with_name("hashes_nightly.json")
"""Of the native library."""


def read(path: Path) -> dict[str, Marks]:
    """Return the hashes of a file; none if it does not exist."""
    found: dict[str, Marks] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, hashes: Mapping[str, Marks]) -> None:
    """Replace a file of hashes as a whole."""
    lines = [f" {json.dumps(name)}: {json.dumps(hashes[name])}" for name in sorted(hashes)]
    replace(path, "{\n" + ",\n".join(lines) + "\n}\n")


def replace(path: Path, text: str) -> None:
    """Replace a file as a whole, or leave it as it is."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def changes(before: Mapping[str, Marks], after: Mapping[str, Marks]) -> list[str]:
    """Return a line for each case that is new, gone or has other hashes."""
    lines = [f"new      {name}" for name in sorted(after.keys() - before.keys())]
    lines += [f"gone     {name}" for name in sorted(before.keys() - after.keys())]
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        parts = [part for part in {**old, **new} if old.get(part) != new.get(part)]
        if parts:
            lines.append(f"changed  {name}: {', '.join(parts)}")
    return lines
