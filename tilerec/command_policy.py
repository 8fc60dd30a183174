"""How OpenMP's threads wait in a process that runs the `tilerec` command: a few microseconds, then they sleep.

libgomp's threads wait in a loop for some milliseconds before they sleep. Beside another busy process, a thread that
waits this way takes a core from the thread that it waits for. Threads that sleep at once cost a wake-up per parallel
region. A loop of 1,000 turns avoids most of both (figures in docs/training.md). libgomp reads the count when torch is
imported, so this file is imported first. It changes nothing in a program that imports tilerec as a library, and it
keeps a policy that is set.

While the command imports its modules, Ctrl-C ends the process at once. As an exception it could be lost: callbacks of
weak references and C code ignore exceptions, and the command would run on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from itertools import pairwise

WAIT_POLICY = "OMP_WAIT_POLICY"
SPIN_COUNT = "GOMP_SPINCOUNT"
TURNS = "1000"


def is_command(original: Sequence[str]) -> bool:
    """Return True for the arguments of a process that runs the command: `tilerec ...` or `python -m tilerec ...`."""
    if ("-m", "tilerec") in pairwise(original):
        return True
    return any(os.path.basename(argument) == "tilerec" for argument in original[:2])


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Set the spin count in an environment, unless a wait policy or a spin count is set."""
    if WAIT_POLICY not in environment:
        environment.setdefault(SPIN_COUNT, TURNS)


def interrupt_by_signal() -> None:
    """Let Ctrl-C end the process at once, unless a program has set its own handler or ignores the signal."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_by_exception() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that the command cleans up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command(sys.orig_argv):
    wait_briefly(os.environ)
    interrupt_by_signal()
