"""`run`: runs a program as `python PROGRAM ARGS` does, with stand-ins of TorchRec installed."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tilerec.compat.standins.session import install

USAGE = """usage: python -m tilerec.compat.torchrec [-m] PROGRAM [ARGS ...]

Runs a program that imports torchrec on tilerec. With -m, PROGRAM is the name of a module.
On several ranks: torchrun --nproc-per-node 2 -m tilerec.compat.torchrec PROGRAM ARGS ..."""


def run(arguments: Sequence[str]) -> int:
    """Run a program; return the exit status for a command line that cannot be run.

    Args:
        arguments: path of the program, or `-m` and the name of a module; then its own arguments.
    """
    as_module = list(arguments[:1]) == ["-m"]
    program, *rest = arguments[1:] if as_module else arguments or [""]
    if program in ("", "-h", "--help"):
        print(USAGE, file=sys.stdout if program else sys.stderr)
        return 0 if program else 2
    if not as_module and not Path(program).is_file():
        print(f"tilerec.compat.torchrec: {program}: no such file; expected the path of a program.", file=sys.stderr)
        return 2
    install()
    sys.argv = [program, *rest]
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    return 0
