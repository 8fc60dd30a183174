"""`DistributedDataParallel` in compiled programs: one op stands for the work around the module's forward.

    prepare(handle)      compiled: an op; eager: as DDP's forward
    module(...)          traced
    backward             the hooks of the parameters reduce their gradients, as in eager mode

torch's own `DistributedDataParallel.forward` breaks the graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY
from tilerec.torch_private import (
    after_backward,
    begin_ddp_forward,
    ddp_parameters,
    defers_first_reduction,
    keep_order,
    reduce_deferred,
)

_HANDLES = itertools.count(1)
_WRAPPERS: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
_WAITING: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def handle_of(wrapper: DistributedDataParallel) -> Tensor:
    """Return a new handle of a wrapper, for `prepare`."""
    handle = next(_HANDLES)
    _WRAPPERS[handle] = wrapper
    return torch.tensor([handle], device="cpu")


def prepare(handle: Tensor) -> None:
    """Prepare the wrapper for a forward of its module and the backward after it, in a compiled program."""
    torch.ops.tilerec.prepare_ddp(handle, torch.is_grad_enabled())


@LIBRARY.op("prepare_ddp(Tensor collection, bool trains) -> ()")
def _prepare(collection: Tensor, trains: bool) -> None:
    wrapper = _WRAPPERS[int(collection)]
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        raise ConfigError(
            "DistributedModelParallel: got find_unused_parameters=True in a compiled program; expected "
            "static_graph=True, the default, or find_unused_parameters=False. A compiled graph does not change."
        )
    with torch.set_grad_enabled(trains):
        begin_ddp_forward(wrapper)
    if trains and defers_first_reduction(wrapper) and wrapper not in _WAITING:
        _WAITING.add(wrapper)
        _reduce_after_first_backward(wrapper)


def _reduce_after_first_backward(wrapper: DistributedDataParallel) -> None:
    """Reduce all gradients at the end of the first backward, in which a static graph learns the use of parameters."""
    hooks: list[Any] = []

    def first(*_: Any) -> None:
        while hooks:
            hooks.pop().remove()
        if defers_first_reduction(wrapper):
            after_backward(reduce_deferred(wrapper))

    for parameter in ddp_parameters(wrapper):
        if parameter.requires_grad:
            hooks.append(parameter.register_hook(first))


keep_order(torch.ops.tilerec.prepare_ddp.default)
