"""The average of replicas that is due, in a compiled program: one op without a result.

A tracer would follow the messages of an average into its graph. The op runs the eager code. It is an ordered effect, as
the ops of sharded lookups are: a compiler keeps it, before the lookups that follow, on all ranks.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from tilerec.ops.runtime.library import LIBRARY
from tilerec.parallel.two_d.running_groups import TwoD
from tilerec.torch_private import autograd_visible, keep_order

_NUMBERS = itertools.count(1)
_TWO_D: weakref.WeakValueDictionary[int, TwoD] = weakref.WeakValueDictionary()


def sync_handle(two_d: TwoD) -> Tensor:
    """Return a number that stands for an object in compiled programs."""
    handle = torch.tensor(float(next(_NUMBERS)), device="cpu")
    _TWO_D[int(handle)] = two_d
    return handle


def sync_traced(handle: Tensor) -> None:
    """Average if that is due, as `TwoD.sync_if_due(wait=False)`. Collective."""
    torch.ops.tilerec.sync_replicas(handle)


@LIBRARY.op("sync_replicas(Tensor two_d) -> ()")
def _sync_replicas(two_d: Tensor) -> None:
    with autograd_visible():
        _TWO_D[int(two_d)].sync_if_due(wait=False)


keep_order(torch.ops.tilerec.sync_replicas.default)
