"""`ShardingEnv`: the ranks of a sharded model, an argument of `DistributedModelParallel`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
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
        pg: the process group; None for a model on one rank, and for ranks that are threads (`from_group`).
        output_dtensor: accepted for TorchRec scripts, without effect. State dicts hold DTensors for every table that
            lies on several ranks.
        threads: the group of ranks that are threads.

    Raises:
        ConfigError: `rank` is not a rank of the world; there are several ranks, and neither a process group nor
            `threads`.
    """

    world_size: int
    rank: int
    pg: dist.ProcessGroup | None = None
    output_dtensor: bool = False
    threads: Group | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"ShardingEnv: rank: got {self.rank}; expected a number in [0, {self.world_size}).")
        if self.world_size > 1 and self.pg is None and self.threads is None:
            raise ConfigError(
                f"ShardingEnv: got {self.world_size} ranks without a process group; use "
                "ShardingEnv.from_process_group(torch.distributed.group.WORLD), or from_local(1, 0) on one rank."
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
    def from_group(group: Group) -> ShardingEnv:
        """Return the ranks of a group, which may be threads."""
        if isinstance(group, ProcessGroupComms):
            return ShardingEnv(group.size, group.rank, group.process_group)
        return ShardingEnv(group.size, group.rank, threads=group)

    @staticmethod
    def from_local(world_size: int, rank: int) -> ShardingEnv:
        """Return ranks without a process group.

        Raises:
            ConfigError: `world_size` is not 1.
        """
        return ShardingEnv(world_size, rank, None)

    def group(self) -> Group:
        """Return the ranks as a `Group`."""
        if self.pg is not None:
            return ProcessGroupComms(self.pg)
        return ThreadWorld(1, _ALONE_TIMEOUT_S).group(0) if self.threads is None else self.threads


Ranks = ShardingEnv | Group | DeviceMesh | dist.ProcessGroup
"""The accepted descriptions of a set of ranks."""


def group_of_ranks(who: str, **given: Ranks | None) -> Group:
    """Return the group of the one argument that is not None; without one, of the default process group.

    Args:
        who: name of the calling function, for errors.
        given: argument name -> value; the names are synonyms.

    Raises:
        ConfigError: several arguments are given, or one is not a set of ranks.
    """
    chosen = {name: ranks for name, ranks in given.items() if ranks is not None}
    if len(chosen) > 1:
        raise ConfigError(f"{who}: got both {' and '.join(chosen)}, two names of one argument; keep one of them.")
    for name, ranks in chosen.items():
        if not isinstance(ranks, Ranks):
            raise ConfigError(
                f"{who}: {name}: got a {type(ranks).__name__}; expected a ShardingEnv, a process group, a DeviceMesh, "
                "or None for the default process group."
            )
        return ranks.group() if isinstance(ranks, ShardingEnv) else group_of(ranks)
    return group_of()


def env_of(who: str, name: str, ranks: Ranks | None) -> ShardingEnv:
    """Return the ranks as a `ShardingEnv`; None: the default process group.

    Args:
        who, name: names of the calling function and its argument, for errors.

    Raises:
        ConfigError: there is no default process group, or the argument is not a set of ranks.
    """
    if isinstance(ranks, ShardingEnv):
        return ranks
    if ranks is None and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{who}: torch.distributed has no process group; call "
            "torch.distributed.init_process_group() first, or pass env=ShardingEnv.from_local(1, 0) for one rank."
        )
    return ShardingEnv.from_group(group_of_ranks(who, **{name: ranks}))
