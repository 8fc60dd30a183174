"""Triton kernels of the hash ops: `zch_buckets`, `zch_find`, `zch_assign_`, `zch_assign_each_`, `zch_resize` on GPUs.

`definition.py` defines the ops and the nouns. The results are those of the reference, bit for bit.

More nouns
    entry     one of a batch's ids, with its count, its ttl and its permission to be inserted; the entries of one bucket
              must be processed in their order
    event     an entry that can change the bucket: its id had no row at the start of the batch, or has lost it since
    walk      one program's pass over one bucket's entries, from event to event
    order     the entries' positions, sorted by bucket, stably
    report    [taken, N - (first entry of a bucket that is not held), N - (first entry with a bad number), 0]

Parallel form of a sequential definition
    Buckets share nothing, so a program of its own walks each of them. In a bucket only events are sequential:

    - An id that had a row keeps it until an event evicts it, and no event evicts from a row that an earlier entry of
      the batch has used. So an entry whose id was found at the start of the batch finds it again, after as many probes,
      unless an event took the row before. Then the entry is an event, too.
    - The row that an event evicts depends only on rows that are unused in this step. Their `last`, `hits` and `expires`
      still have the values of the start. So hits need only mark their rows as touched (`last`) before the next event.
      `hits` and `expires` are updated after all events: both are sums and maxima of integers, whose results do not
      depend on the order.

    1 find    looks every entry's id up in the unchanged table; a bucket without new ids needs no walk
    2 sort    sorts positions by bucket; `runs` finds where each bucket's entries begin and end
    3 walk    per bucket, CHUNK entries at a time: entries that still have their rows mark them, events run in order
    4 hit     adds each hit's count

    No program waits for another: there are no locks and no compare-and-swap. Within a walk, lanes read values that
    other lanes wrote, so barriers separate the two.

Example: one bucket of 2 slots, LRU, step 9, ids [5, 6], last [3, 4]; entries [6, 7, 5].
    find: rows [1, -1, 0]. walk: 6 marks row 1 (last 9). Event 7: row 0 is untouched, so 7 replaces 5 in row 0. Entry 5
    finds 7 in its row, so it is an event, too; both rows are touched, so it is rejected. hit: row 1 counts one more.

`zch_assign_each_` never waits. `zch_assign_` waits for the device once: it returns a list of evictions, whose length
the host must know. `zch_resize` waits at its end: the result of resizing a bad state must not replace it.

The kernels are in files of the reference's names: `place.py`, `policy.py`, `find.py`, `assign.py`, `resize.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.hash.triton.assign import zch_assign_, zch_assign_each_
from tilerec.ops.hash.triton.find import zch_buckets, zch_find
from tilerec.ops.hash.triton.resize import zch_resize

KERNELS: dict[str, Callable[..., Any]] = {
    "zch_buckets": zch_buckets,
    "zch_find": zch_find,
    "zch_assign_": zch_assign_,
    "zch_assign_each_": zch_assign_each_,
    "zch_resize": zch_resize,
}
"""Kernels by op name."""
