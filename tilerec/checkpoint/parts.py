"""Parts of a job: objects with `state_dict` and `load_state_dict`, or plain values; and the ranks that save them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.comms.threads import ThreadWorld
from tilerec.errors import ConfigError
from tilerec.optim.fused import FusedOptimizer
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer


def ranks_of_job(group: Group | dist.ProcessGroup | None) -> Group:
    """Return the ranks that save together: the given ones; else the default process group; else this process."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return ThreadWorld(1).group(0)
    return group_of(group)


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of every part by its name. Collective if a part's `state_dict` is."""
    for name in parts:
        if not name or "." in name:
            raise ConfigError(f"Checkpoint: got a part named {name!r}; expected a name without dots. Rename it.")
    return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in parts.items()}


def has_fixed_names(part: object) -> bool:
    """Return True if a part has exactly the tensors of its state dict, as modules and optimizers of tables do.

    Optimizers of torch make their state at the first step, and take all that a checkpoint has for them.
    """
    return isinstance(part, (nn.Module, FusedOptimizer, ShardedFusedOptimizer))
