"""The dense part of a sharded model: all parameters and buffers outside of tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.comms.agreement import digest, on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.table import Table, Tables
from tilerec.parallel.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from tilerec.sharding.broadcast import broadcast_tensor


@dataclass(frozen=True)
class DenseOptions:
    """Settings of the dense part; see `DistributedModelParallel`."""

    init_data_parallel: bool
    init_parameters: bool
    wrapper: DataParallelWrapper

    @staticmethod
    def of(init_data_parallel: bool, init_parameters: bool, wrapper: DataParallelWrapper | None) -> DenseOptions:
        """Return the settings with the default wrapper in place of None."""
        return DenseOptions(init_data_parallel, init_parameters, wrapper or DefaultDataParallelWrapper())

    def described(self) -> dict[str, object]:
        """Return the settings as values that ranks compare, since different settings would deadlock.

        Raises:
            Exception: the error from the wrapper's `options()`.
            ConfigError: an option has a value that ranks cannot compare.
        """
        compared: dict[str, object] = {
            "init_data_parallel": bool(self.init_data_parallel),
            "init_parameters": bool(self.init_parameters),
            "data_parallel_wrapper": type(self.wrapper).__qualname__,
            "wrapper_options": self.wrapper.options(),
        }
        digest("the dense part", compared)
        return compared


def dense_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers outside tables."""
    tables = {id(p) for part in module.modules() if isinstance(part, Table) for p in part.parameters()}
    return [t for t in [*module.parameters(), *module.buffers()] if id(t) not in tables]


def move_dense(module: nn.Module, device: torch.device, group: Group, init_parameters: bool) -> None:
    """Move the model to a device. If this fails on one rank, all ranks raise. Collective.

    Args:
        init_parameters: first allocate and initialize the dense modules that are on meta.

    Raises:
        ConfigError: a dense module on meta has no `reset_parameters`.
    """
    with on_all_ranks(group, "the sharded model", "its dense part"):
        for path, part in module.named_modules() if init_parameters else ():
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if isinstance(part, Table) or not any(t.is_meta for t in own):
                continue
            reset = getattr(part, "reset_parameters", None)
            if not callable(reset):
                raise ConfigError(
                    f"DistributedModelParallel: module '{path}' ({type(part).__name__}) is on meta and has no "
                    "reset_parameters, so its initial values are unknown. Give it one, build it on a real device, or "
                    "pass init_parameters=False and fill it yourself."
                )
            part.to_empty(device=device, recurse=False)
            reset()
        module.to(device)


@torch.no_grad()
def reset_dense(module: nn.Module, group: Group) -> None:
    """Reset every dense module that has `reset_parameters`, to the same values on all ranks. Collective."""
    for part in module.modules():
        if not isinstance(part, (Table, Tables)) and callable(getattr(part, "reset_parameters", None)):
            part.reset_parameters()  # type: ignore[operator]
    for dense in dense_tensors(module):
        broadcast_tensor(group, dense)
