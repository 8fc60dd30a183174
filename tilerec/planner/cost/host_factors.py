"""`HostFactors`: for hosts of several sizes, the size that costs are computed for, and factors for the other ranks.

Legend: R ranks, S stages.
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.cost.home_side import OWNER_DIRECTION, Sides, sides_of
from tilerec.planner.cost.model import NETWORK_OF_STAGE, Model
from tilerec.planner.search.instance import PER_MILLE, Ints

LEAST_SLOW = 250.0
"""Least factor on the cost of pieces, in per mille.

A rank that is alone on its host has no links inside. With smaller factors, averages over ranks treat links as free, and
the search cuts too finely: on 16 ranks on hosts of 1 and 15, plans cost 20 % more.
"""


class HostFactors:
    """The sides of all exchanges on the hosts where they take longest; for a bound, where they take least.

    sizes: sizes of hosts, ascending. sides: by exchange, on links inside hosts and on the network. links: by stage, ps
    of single pieces, and of their work at home, that are spent on exchanges.
    """

    def __init__(self, model: Model, *, lower: bool, pinned: bool) -> None:
        self.topology, self.ranks, self.stages, self.lower = model.topology, model.ranks, model.stages, lower
        self.sizes = sorted({len(host) for host in self.topology.host_ranks})
        self.alike = len(self.sizes) == 1
        self.sides = {name: sides_of(model, name, lower=lower, pinned=pinned) for name in OWNER_DIRECTION}
        self.links = {kind: [0] * len(model.stages) for kind in ("cost", "home")}

    def together(self, name: str) -> list[tuple[str, Sides]]:
        """Return the stages of an exchange with its sides there: two if the ranks of a host share a card, else one."""
        near, far = self.sides[name]
        if self.topology.nic == "host":
            return [(name, near), (NETWORK_OF_STAGE[name], far)]
        return [(name, near + far)]

    def host(self, name: str, *, network: bool, on: int = 1) -> int:
        """Return the index of the host size for which the owner's side is computed.

        Args:
            on: ranks of a piece.
        """
        if 1 < on < self.ranks and (self.alike or self.lower):
            return self.sizes.index(on)
        sides = self.together(name)[-1 if network else 0][1]
        return int(sides.whole.argmin() if self.lower else sides.own.argmax())

    def home_host(self, name: str, *, network: bool) -> int:
        """Return the index of the host size for which the home's side is computed."""
        home = self.together(name)[-1 if network else 0][1].home
        return int(home.argmin() if self.lower else home.argmax())

    def factors(self, kind: str, singles: Ints) -> Ints:
        """Return [R, S] per mille: time of a piece, or of a home, on each rank, relative to the host of the costs.

        Links depend on the size of the host, and other work does not. Their parts follow from the sums over single
        pieces.

        Args:
            kind: "cost" for pieces, "home" for homes. singles: [S] ps of all pieces on single ranks.
        """
        factors = np.full((self.ranks, len(singles)), PER_MILLE, np.int64)
        if self.alike or self.lower:
            return factors
        host = [
            self.sizes.index(len(self.topology.ranks_of(self.topology.host_of(r)))) for r in range(self.ranks)
        ]
        for name in OWNER_DIRECTION:
            for stage, sides in self.together(name):
                side = sides.own if kind == "cost" else sides.home
                s = self.stages.index(stage)
                links = self.links[kind][s]
                if links:
                    every = int(singles[s])
                    parts = 1.0 - links / every * (1.0 - side / side.max())
                    inside = self.topology.nic == "host" and stage == name
                    least = LEAST_SLOW if inside and kind == "cost" else 1.0
                    factors[:, s] = np.maximum(np.rint(parts * PER_MILLE), least)[host]
        return factors
