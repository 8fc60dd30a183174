"""TorchRec's functions about the ranks of a host."""

from __future__ import annotations

import torch.distributed as dist

from tilerec.errors import ConfigError
from tilerec.spec.topology import launcher_local_size


def _world(world_size: int | None) -> int:
    if world_size is not None:
        return world_size
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "get_local_size: torch.distributed has no process group; expected one, or world_size=. Call "
            "torch.distributed.init_process_group() first."
        )
    return dist.get_world_size()


def get_local_size(world_size: int | None = None) -> int:
    """Return the number of ranks of a host: the launcher's LOCAL_WORLD_SIZE if it divides the world, else all ranks.

    Args:
        world_size: number of ranks; None: that of the default process group.
    """
    world = _world(world_size)
    local = launcher_local_size() or world
    return local if world % local == 0 else world


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of a rank (None: this rank) within its host."""
    local = get_local_size(world_size)
    return (dist.get_rank() if rank is None else rank) % local


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the host of a rank (None: this rank)."""
    local = get_local_size(world_size)
    return (dist.get_rank() if rank is None else rank) // local


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of hosts."""
    return _world(world_size) // get_local_size(world_size)
