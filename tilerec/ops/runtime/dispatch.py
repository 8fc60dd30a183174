"""Who watches ops: tracers, modes and transforms see a call only if it goes by way of the dispatcher.

The dispatcher turns every argument into its own and back, which costs an op of many lists some 10 us each time. An op
that computes nothing itself (a formula that calls the op below autograd, a record that is handed in) may be called as
the Python function that it is, if nobody watches; the op that computes is called by way of the dispatcher, always.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tilerec.torch_private import dispatch_mode_count, function_mode_count, functorch_is_active

_OWN = frozenset((Tensor, nn.Parameter))


def unwatched(tensors: Iterable[Tensor]) -> bool:
    """Whether nobody but autograd watches what is done to these: they are torch's own tensors, and no tracer, mode or
    transform is active."""
    return not (
        torch.compiler.is_compiling()  # the rest is not asked while a graph is traced
        or dispatch_mode_count()
        or function_mode_count()
        or torch.jit.is_tracing()
        or functorch_is_active()
    ) and _OWN.issuperset(map(type, tensors))
