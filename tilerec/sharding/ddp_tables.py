"""torch's `DistributedDataParallel` around a model with sharded tables leaves the tables alone.

Otherwise it would send rank 0's tiles to the other ranks, and average the gradients of tiles with different rows. It
takes the model as a submodule before it looks for parameters; torch calls a hook then.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from tilerec.errors import ConfigError
from tilerec.sharding.managed_collision import ShardedManagedCollisionCollection
from tilerec.sharding.table import ShardedTable


def sharded_names(model: nn.Module) -> set[str]:
    """Return the names of a model's parameters and buffers that are parts of sharded tables and ids."""
    kinds = ShardedTable, ShardedManagedCollisionCollection
    parts = [(path, part) for path, part in model.named_modules(remove_duplicate=False) if isinstance(part, kinds)]
    return {
        f"{path}.{name}" if path else name
        for path, part in parts
        for own in (part.named_parameters(remove_duplicate=False), part.named_buffers(remove_duplicate=False))
        for name, _ in own
    }


def _leave_tables(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    if name != "module" or model is None or not isinstance(wrapper, DistributedDataParallel):
        return
    sharded = sharded_names(model)
    if not sharded:
        return
    wrapper.parameters_to_ignore |= sharded
    if not any(p.requires_grad for own, p in model.named_parameters() if own not in wrapper.parameters_to_ignore):
        raise ConfigError(
            f"DistributedDataParallel: got a {type(model).__name__} with sharded tables and no other trained "
            "parameters; expected gradients to average. Lookups exchange the gradients of tables themselves: leave "
            "this wrapper out."
        )


register_module_module_registration_hook(_leave_tables)  # type: ignore[no-untyped-call, unused-ignore]
