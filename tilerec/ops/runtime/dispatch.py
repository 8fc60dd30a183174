"""Detection of tracers, modes and transforms: they see a call only if it passes through the dispatcher.

The dispatcher boxes and unboxes every argument, which costs an op with many lists about 10 us per call. Some functions
compute nothing themselves: an autograd formula that calls the op below autograd, or an op that passes on a record. They
may be called directly as Python functions if no tracer, mode or transform is active. Ops that compute are called
through the dispatcher, so that a profiler records them. Lookups in quantized rows are the exception: for a single
sample, the dispatcher takes several times as long as the lookup. They use it if a profiler is active.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tilerec.torch_private import dispatch_mode_count, function_mode_count, functorch_is_active

_OWN = frozenset((Tensor, nn.Parameter))


def can_bypass_dispatcher(tensors: Iterable[Tensor]) -> bool:
    """Return True if a call with these tensors may bypass the dispatcher.

    It may if all are of torch's own tensor types and no tracer, mode or transform is active. Autograd does not count.
    """
    return not (
        is_compiling()  # a tracer evaluates only this condition; through `torch`, it would guard that of each file
        or dispatch_mode_count()
        or function_mode_count()
        or torch.jit.is_tracing()
        or functorch_is_active()
    ) and _OWN.issuperset(map(type, tensors))
