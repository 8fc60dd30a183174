"""`Teams`: ranks in groups that each hold everything, so that a rank reads within its own.

Nouns
  team      ranks that together hold every table once (a sharding group of 2D parallelism)
  axis      the ranks that hold what this one holds, one of each team: they talk over a group of their own

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
class Teams:
    """Who reads where, and over what replicas talk.

    Args:
        of: the team of each rank of the tables' group.
        axis: the replicas of this rank, as a group; ranks in the order of their teams.
        peers: their ranks in the tables' group, ascending; none where that group is one team, and the others are
            outside of it.
        moment_scale: of what a gradient adds to the moment of row-wise Adagrad, where teams train apart.
        names: what errors call the ranks of the tables' group; none: by their numbers in it.
        replica_names: what they call the ranks of the axis, likewise.
        everyone: a channel over the ranks of all teams, where a batch that one refuses is to be refused by all.
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
        """Whether the other teams are outside of the tables' group: each has gradients and updates of its own."""
        return not self.peers

    def __deepcopy__(self, memo: dict[int, Any]) -> Teams:
        return self  # a copied module talks through the same groups


def meeting(group: Group, teams: Teams | None, owners: Sequence[int]) -> tuple[Group, tuple[int, ...]]:
    """Over which group the owners of a tile talk, and their ranks there: all of a group talk faster than some of it."""
    if teams is not None and tuple(owners) == teams.peers:
        return teams.axis, tuple(range(teams.axis.size))
    return group, tuple(owners)


def mean_over_teams(teams: Teams, grads: Sequence[Tensor]) -> None:
    """Replace gradients by their means over the teams, in place; one message for all of them."""
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        own = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in own])
        teams.axis.all_reduce_("dense gradients of replicas", flat).wait()
        for grad, mean in zip(own, (flat / teams.axis.size).split([g.numel() for g in own]), strict=True):
            grad.copy_(mean.view(grad.shape))
