"""How OpenMP's threads wait in a process that runs the `tilerec` command: they sleep.

libgomp's threads wait in a loop for some milliseconds before they sleep. Beside another busy process, a thread that
waits this way takes a core from the thread that it waits for (figures in docs/training.md). libgomp reads the policy
when torch is imported, so this file is imported first. It changes nothing in a program that imports tilerec as a
library, and it keeps a policy that is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from itertools import pairwise

WAIT_POLICY = "OMP_WAIT_POLICY"
PASSIVE = "PASSIVE"


def is_command(original: Sequence[str]) -> bool:
    """Return True for the arguments of a process that runs the command: `tilerec ...` or `python -m tilerec ...`."""
    if ("-m", "tilerec") in pairwise(original):
        return True
    return any(os.path.basename(argument) == "tilerec" for argument in original[:2])


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Set the policy in an environment, unless a policy or a spin count is set."""
    if "GOMP_SPINCOUNT" not in environment:
        environment.setdefault(WAIT_POLICY, PASSIVE)


if is_command(sys.orig_argv):
    wait_passively(os.environ)
