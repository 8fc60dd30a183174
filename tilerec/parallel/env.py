"""`ShardingEnv`: the ranks of a sharded model, as `DistributedModelParallel` takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.comms.threads import ThreadWorld
from tilerec.errors import ConfigError

_ALONE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ShardingEnv:
    """Which ranks there are, and over what they talk.

    Args:
        world_size, rank: the number of ranks, and this one's.
        pg: the process group; None for a model on one rank.
        output_dtensor: kept for callers that pass it; state dicts hold DTensors wherever a table lies on several
            ranks, whether it is set or not.
    """

    world_size: int
    rank: int
    pg: dist.ProcessGroup | None = None
    output_dtensor: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"ShardingEnv: rank {self.rank} is outside [0, {self.world_size}); ranks count from 0."
            )

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """`pg`."""
        return self.pg

    @staticmethod
    def from_process_group(pg: dist.ProcessGroup) -> ShardingEnv:
        """The ranks of a process group, e.g. `torch.distributed.group.WORLD`."""
        return ShardingEnv(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @staticmethod
    def from_local(world_size: int, rank: int) -> ShardingEnv:
        """Ranks without a process group: a world of one."""
        return ShardingEnv(world_size, rank, None)

    def group(self) -> Group:
        """The ranks as a `Group`.

        Raises:
            ConfigError: several ranks and no process group.
        """
        if self.pg is not None:
            return ProcessGroupComms(self.pg)
        if self.world_size != 1:
            raise ConfigError(
                f"ShardingEnv: {self.world_size} ranks and no process group to talk over; use "
                "ShardingEnv.from_process_group(torch.distributed.group.WORLD), or from_local(1, 0) on one rank."
            )
        return ThreadWorld(1, _ALONE_TIMEOUT_S).group(0)
