"""Pause Python's cyclic garbage collector while many objects are made that stay.

The collector scans all of them again and again as their number grows: the records of a plan, the modules of a server.
Without the pause, planning 10,000 tables on 1,024 ranks takes 2.42 s instead of 1.95 s (medians of 3 alternating runs
on 2 cores of a server); 856 tables on 128 ranks take as long either way.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection in the whole process, and restore its previous setting on exit."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
