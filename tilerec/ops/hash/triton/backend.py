"""The hash ops by Triton: `zch_buckets`, `zch_find`, `zch_assign_`, `zch_assign_each_`, `zch_resize` on GPUs.

`definition.py` says what they mean, and has the nouns. The results are those of the reference, bit for bit.

More nouns
    entry     one of a batch's ids, with what comes with it; entries of one bucket must be taken in their order
    event     an entry whose turn can change the bucket: its id had no row when the batch came, or lost it since
    walk      one program's way through one bucket's entries, from event to event
    order     the entries' positions, sorted by bucket, stably
    report    [taken, N - (first entry of a bucket that is not held), N - (first entry with a bad number), 0]

How one after the other becomes parallel
    Buckets share nothing, so each is walked by a program of its own. In a bucket only events need their turn:

    - An id that had a row keeps it until somebody evicts it, and nobody evicts from a row that an earlier entry of the
      batch has used. So an entry that found its id at the start of the batch finds it there at its turn, after as many
      probes, unless the row was given away before: then it is an event, too.
    - Whom an event evicts depends only on rows that nobody has used in this step. Of those, `last`, `hits` and
      `expires` are what they were at the start. So hits need only mark their rows as touched (`last`) before the next
      event; that `hits` grows and `expires` moves can wait until all is decided. Both are sums and maxima of integers,
      in whose result no order can be seen.

    1 find    every entry looks its id up in the table as it is; a bucket to which no new id comes needs no walk
    2 sort    positions by bucket; `runs` finds where each bucket's begin and end
    3 walk    per bucket, CHUNK entries at a time: those that still have their rows mark them, events take their turns
    4 hit     every hit counts itself

    Nothing waits for another program: no locks, no compare-and-swap. Within a walk, lanes read what other lanes wrote,
    so barriers stand between.

Example: one bucket of 2 slots, LRU, step 9, ids [5, 6], last [3, 4]; entries [6, 7, 5].
    find: rows [1, -1, 0]. walk: 6 marks row 1 (last 9). Event 7: row 0 is untouched, so 5 goes and 7 has row 0. Where 5
    was is now 7: an event, too; both rows are touched, so it is rejected. hit: row 1 counts one more.

`zch_assign_each_` waits for nothing. `zch_assign_` waits for the device once: it returns a list of evictions, whose
length the host must know. `zch_resize` waits at its end: no state may be replaced by what was made of a bad one.

The kernels are in files of the reference's names: `hash_place.py`, `hash_policy.py`, `hash_find.py`,
`hash_assign.py`, `hash_resize.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.hash.checks import checked
from tilerec.ops.hash.triton.assign import zch_assign_, zch_assign_each_
from tilerec.ops.hash.triton.find import zch_buckets, zch_find
from tilerec.ops.hash.triton.resize import zch_resize
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.library import on_own_device


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by op name, behind their ops' checks."""
    made: dict[str, Callable[..., Any]] = {
        "zch_buckets": zch_buckets,
        "zch_find": zch_find,
        "zch_assign_": zch_assign_,
        "zch_assign_each_": zch_assign_each_,
        "zch_resize": zch_resize,
    }
    return {name: checked(name, kernel) for name, kernel in made.items()}


def register(key: str = "CUDA") -> None:
    """Let these kernels serve the ops under a dispatch key."""
    for name, kernel in kernels().items():
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
