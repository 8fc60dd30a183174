"""`ShardingEnv`: the ranks of a sharded model, an argument of `DistributedModelParallel`."""

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
    """The ranks of a sharded model and their process group.

    Args:
        world_size: number of ranks.
        rank: this rank.
        pg: the process group; None for a model on one rank.
        output_dtensor: accepted for TorchRec scripts, without effect. State dicts hold DTensors for every table that
            lies on several ranks.
    """

    world_size: int
    rank: int
    pg: dist.ProcessGroup | None = None
    output_dtensor: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"ShardingEnv: rank: got {self.rank}; expected a number in [0, {self.world_size})."
            )

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """`pg`."""
        return self.pg

    @staticmethod
    def from_process_group(pg: dist.ProcessGroup) -> ShardingEnv:
        """Return the ranks of a process group, e.g. `torch.distributed.group.WORLD`."""
        return ShardingEnv(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @staticmethod
    def from_local(world_size: int, rank: int) -> ShardingEnv:
        """Return ranks without a process group; only a world of one rank can be used."""
        return ShardingEnv(world_size, rank, None)

    def group(self) -> Group:
        """Return the ranks as a `Group`.

        Raises:
            ConfigError: there are several ranks and no process group.
        """
        if self.pg is not None:
            return ProcessGroupComms(self.pg)
        if self.world_size != 1:
            raise ConfigError(
                f"ShardingEnv: got {self.world_size} ranks without a process group; use "
                "ShardingEnv.from_process_group(torch.distributed.group.WORLD), or from_local(1, 0) on one rank."
            )
        return ThreadWorld(1, _ALONE_TIMEOUT_S).group(0)
