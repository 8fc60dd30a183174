"""Wrappers that average the gradients of dense parameters: torch's `DistributedDataParallel`, or a user's own.

torch's own `forward` of a wrapper breaks a compiled graph. There, one op stands for its work around the module's:

    prepare(handle)      compiled: an op
    module(...)          traced
    backward             hooks of the parameters average their gradients, as in eager mode
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.errors import ConfigError
from tilerec.modules.table import Table
from tilerec.ops.runtime.gpu import is_gpu
from tilerec.ops.runtime.library import LIBRARY
from tilerec.parallel.env import ShardingEnv
from tilerec.sharding.broadcast import broadcast_tensor
from tilerec.torch_private import (
    after_backward,
    begin_ddp_forward,
    ddp_parameters,
    defers_first_reduction,
    ignore_in_ddp,
    keep_order,
    reduce_deferred,
)


class Wrappable(Protocol):
    """The attributes of a `DistributedModelParallel` that a wrapper uses."""

    _dmp_wrapped_module: nn.Module

    @property
    def module(self) -> nn.Module:
        """The model without wrappers."""


class DataParallelWrapper(ABC):
    """Interface of wrappers for the dense part of a sharded model."""

    @abstractmethod
    def wrap(self, dmp: Wrappable, env: ShardingEnv, device: torch.device) -> None:
        """Replace `dmp._dmp_wrapped_module` by a wrapped module; do not touch `table_parameters(dmp.module)`."""

    def options(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks: numbers, strings, sequences and mappings.

        Sharding compares them between the ranks.
        """
        return {}


def table_parameters(module: nn.Module) -> set[str]:
    """Return the names of all table parameters, sharded or not; lookups reduce their gradients."""
    own = {id(p) for part in module.modules() if isinstance(part, Table) for p in part.parameters()}
    return {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in own}


@final
class DefaultDataParallelWrapper(DataParallelWrapper):
    """`DistributedDataParallel` over all parameters outside tables; no wrapper if none of them is trained.

    Args:
        bucket_cap_mb, static_graph, find_unused_parameters: see `DistributedDataParallel`.
        allreduce_comm_precision: "fp16" or "bf16" to send dense gradients in that format.
        params_to_ignore: names of further parameters whose gradients are not reduced.
        ddp_kwargs: further arguments of `DistributedDataParallel`. Each rank keeps its own buffers unless one of them
            concerns buffers. `gradient_as_bucket_view` is True unless it is set here.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: Literal["fp16", "bf16"] | None = None,
        params_to_ignore: Sequence[str] | None = None,
        ddp_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if allreduce_comm_precision not in (None, *_FORMATS):
            raise ConfigError(
                f"DefaultDataParallelWrapper: allreduce_comm_precision: got {allreduce_comm_precision!r}; expected "
                "'fp16', 'bf16' or None."
            )
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": True,
            **(ddp_kwargs or {}),
        }
        self._ignore_buffers = not any("buffers" in key for key in ddp_kwargs or ())
        self._precision = allreduce_comm_precision
        self._ignored = set(params_to_ignore or ())

    def options(self) -> dict[str, object]:
        """See `DataParallelWrapper`. For objects in `ddp_kwargs` the value is the name of their type."""
        plain = (bool, int, float, str, type(None))
        own = {
            name: value if isinstance(value, plain) else type(value).__qualname__
            for name, value in self._options.items()
        }
        return {
            **own,
            "allreduce_comm_precision": self._precision,
            "params_to_ignore": sorted(self._ignored),
        }

    def wrap(self, dmp: Wrappable, env: ShardingEnv, device: torch.device) -> None:
        """See `DataParallelWrapper`."""
        module = dmp.module
        names = dict(module.named_parameters(remove_duplicate=False))
        unknown = sorted(self._ignored - set(names))
        if unknown:
            raise ConfigError(
                f"DefaultDataParallelWrapper: params_to_ignore: got {unknown}, which the model lacks; expected "
                f"names such as {sorted(names)[:8]}."
            )
        ignored = table_parameters(module) | self._ignored
        if env.pg is None and env.world_size == 1:
            return  # no gradients to reduce
        if not any(p.requires_grad for name, p in names.items() if name not in ignored):
            # No gradients to reduce, but ranks compute with rank 0's values even if the model is not trained.
            group = env.group()
            for name, parameter in module.named_parameters():
                if name not in ignored:
                    broadcast_tensor(group, parameter)
            return
        if env.pg is None:
            raise ConfigError(
                "DefaultDataParallelWrapper: got ranks that are threads, and DistributedDataParallel needs a process "
                "group; expected processes (run_ranks), or a dense part without training. Freeze it, pass "
                "init_data_parallel=False, or pass a data_parallel_wrapper of your own."
            )
        if self._ignore_buffers:
            ignored |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        ignore_in_ddp(module, sorted(ignored))
        wrapped = DistributedDataParallel(
            module,
            device_ids=[device] if is_gpu(device) else None,
            process_group=env.pg,
            **self._options,
        )
        if self._precision is not None:
            wrapped.register_comm_hook(env.pg, _low_precision_hook(_FORMATS[self._precision], env.world_size))
        dmp._dmp_wrapped_module = wrapped


_FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _low_precision_hook(dtype: torch.dtype, size: int) -> Callable[[dist.ProcessGroup, dist.GradBucket], Any]:
    """Return a hook that averages gradients in another format; torch's own hook for bfloat16 needs NCCL."""

    # No annotations: torch compares them with its classes, and in this file annotations are strings.
    def hook(group, bucket):  # type: ignore[no-untyped-def]
        narrow = bucket.buffer().div(size).to(dtype)
        sent = dist.all_reduce(narrow, group=group, async_op=True)
        assert sent is not None
        return sent.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

    return hook


# ------------------------------------------------------------------------------------------------ compiled programs

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
