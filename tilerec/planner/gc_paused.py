"""Pause Python's cyclic garbage collector while a plan is made.

A plan of 100,000 tables consists of millions of small records without reference cycles. The collector scans all of
them repeatedly as their number grows, which takes 2 of 15 seconds.
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
