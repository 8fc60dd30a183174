"""`ReplicaGroups`: groups of ranks that each hold every table, so that a rank reads only within its own group.

Nouns
  team      ranks that together hold every table once (a sharding group of 2D parallelism)
  axis      the ranks that hold the same tiles as this one, one of each team; they have their own process group

    W ranks = R teams x G ranks;  every tile has an owner in each team

Legend: W ranks, R teams, G ranks of a team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilerec.comms.group import Group


@dataclass(frozen=True)
class ReplicaGroups:
    """Team of every rank, and the process groups between teams.

    Args:
        of: team of each rank of the tables' group.
        axis: group of the replicas of this rank; ranks in the order of their teams.
        peers: ranks of the replicas in the tables' group, ascending; empty if that group is one team and the other
            teams are outside it.
        moment_scale: factor of a gradient's contribution to the moment of row-wise Adagrad, if teams train apart.
        names: numbers of the tables' group's ranks in errors; empty: their ranks in the group.
        replica_names: the same for the ranks of the axis.
        everyone: channel over the ranks of all teams, set if a batch that one rank refuses must be refused by all.
    """

    of: tuple[int, ...]
    axis: Group
    peers: tuple[int, ...]
    moment_scale: float = 1.0
    names: tuple[int, ...] = ()
    replica_names: tuple[int, ...] = ()
    everyone: Group | None = None

    @property
    def apart(self) -> bool:
        """True if other teams are outside the tables' group, so each team has its own gradients and updates."""
        return not self.peers

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGroups:
        return self  # a copied module uses the same groups


def exchange_group(group: Group, teams: ReplicaGroups | None, owners: Sequence[int]) -> tuple[Group, tuple[int, ...]]:
    """Return the group in which the owners of a tile exchange, and their ranks in it.

    An exchange between all ranks of a group is faster than one between some of its ranks.
    """
    if teams is not None and tuple(owners) == teams.peers:
        return teams.axis, tuple(range(teams.axis.size))
    return group, tuple(owners)


def mean_over_replica_groups(teams: ReplicaGroups, grads: Sequence[Tensor]) -> None:
    """Replace gradients by their means over the teams, in place; one message for all of them."""
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        own = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in own])
        teams.axis.all_reduce_("dense gradients of replicas", flat).wait()
        for grad, mean in zip(own, (flat / teams.axis.size).split([g.numel() for g in own]), strict=True):
            grad.copy_(mean.view(grad.shape))
