"""Seconds per byte of the two sides of an exchange, on hosts of every size.

Nouns
  owner's side   bytes between a rank and all homes on other ranks, for the pieces on the rank
  home's side    bytes between a rank and all owners on other ranks, for its own batch

**Duplex links.** The slower direction counts. On hosts of one size it is the owner's side on the slowest rank, and the
home's side counts as 0. On hosts of several sizes, homes on other hosts may take longer for the pieces of a host:
V_h other. The estimate gives the host that time, which is exact for two hosts with one card each. With a card for each
rank it would be n v other, too much if the ranks of a host hold different amounts. There the geometric mean of it and
of the owner's side counts.

**Sums inside hosts.** Hosts that add many rows send few bytes, and their ranks wait for the bytes that they receive.
With a card for each rank, the home's side of rows and gradients is then a stage of its own, and the step waits for the
longer one. On hosts of one size it takes V (R - n) / R other, as if pieces were spread evenly. No price is below that:
on a host with less than its part of V, homes receive more; on a host with more, some owner sends as much. Therefore the
faster direction counts. Links inside the host count for pieces on whole hosts only, and not for pinned tables.

**Other links.** The seconds of both directions add up. A home exchanges nothing with itself, and nothing over the
network with its own host. With V bytes per home for all pieces, v of them on a rank and V_h on its host of n ranks, the
seconds are

    links inside the host          v (n - 1) own    + (V_h - v) other
    network, a card for each rank  v (R - n) own    + (V - V_h) other
    network, a card for each host  V_h (R - n) own / n + (V - V_h) other        (the mean of the host's ranks)

The last line equals V other + V_h ((R - n) own - n other) / n, wherever pieces are. For the first two lines, V_h is
unknown unless there is one host. An estimate assumes that the V - v bytes are spread evenly over the R - 1 other ranks;
a bound leaves the home's side out.

An owner's side below 0 (of large hosts with one card) counts as 0: the step waits for the slowest host, whose side is
above 0, and V other counts there, too. If it is below 0 on all hosts, pieces are assumed to be spread evenly.

Legend: R ranks, n ranks of a host, Z sizes of hosts, S stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilerec.planner.cost.model import NETWORK_OF_STAGE, Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.search.instance import PER_MILLE, Ints

OWNER_DIRECTION = {"ids": "in", "rows": "out", "gradients": "in"}
"""By exchange: "in" if owners receive, "out" if they send."""
LEAST_SLOW = 250.0
"""Least factor on the cost of pieces, in per mille.

A rank that is alone on its host has no links inside. With smaller factors, averages over ranks treat links as free, and
the search cuts too finely: on 16 ranks on hosts of 1 and 15, plans cost 20 % more.
"""


@dataclass(frozen=True, eq=False)
class Sides:
    """Seconds per byte on hosts of each size.

    Args:
        whole: [Z] of an owner, for a byte to each home on another rank.
        own: [Z] the same, minus the seconds that it saves as a home, since it holds the piece itself.
        home: [Z] of a home, for a byte of all pieces together.
    """

    whole: Floats
    own: Floats
    home: Floats

    def __add__(self, other: Sides) -> Sides:
        return Sides(self.whole + other.whole, self.own + other.own, self.home + other.home)


def sides_of(model: Model, exchange: str, *, lower: bool, pinned: bool = False) -> tuple[Sides, Sides]:
    """Return both sides of an exchange on links inside hosts, and on the network, by size of the host, ascending.

    Args:
        lower: lower bounds of the homes' sides.
        pinned: tables with given places may fill one rank, so that other pieces are not spread evenly.
    """
    speeds, topology, ranks = model.speeds, model.topology, float(model.ranks)
    sizes = np.array(sorted({len(host) for host in topology.host_ranks}), np.float64)
    link, network = (speeds.link_in, speeds.link_out), (speeds.network_in, speeds.network_out)
    if OWNER_DIRECTION[exchange] == "out":
        link, network = link[::-1], network[::-1]
    near, far = (sizes - 1.0) * link[0], (ranks - sizes) * network[0]
    if speeds.duplex:
        none, longest = np.zeros(len(sizes)), far
        if len(sizes) > 1 and not lower:
            longest = np.maximum(far, sizes * network[1])
            longest = longest if topology.nic == "host" else np.sqrt(far * longest)
        return Sides(near, near, none), Sides(far, longest, none)
    # If a host has all ranks or one rank, the bytes on a rank's host are known.
    known = topology.host_count in (1, model.ranks) or not lower
    others = max(ranks - 1.0, 1.0)
    inside, outside = (
        link[1] * known * ((sizes - 1.0) / others),
        network[1] * known * ((ranks - sizes) / others),
    )
    cards: Floats | float = 1.0
    if topology.nic == "host":
        outside, cards = np.full(len(sizes), network[1]), sizes
    spread = None if lower and pinned else ranks
    return _both(near, inside, 1.0, spread), _both(far, outside, cards, spread)


def home_network(model: Model) -> float:
    """Return seconds per byte of all pieces on a home's network card, for hosts of one size and an even spread."""
    speeds, ranks = model.speeds, model.ranks
    away = ranks - len(model.topology.host_ranks[0])
    return min(speeds.network_in, speeds.network_out) * away / ranks


def _both(whole: Floats, home: Floats, cards: Floats | float, spread: float | None) -> Sides:
    """Return the sides on links that are not duplex.

    Args:
        cards: ranks that save the home's side of a piece, as they share its card.
        spread: number of ranks over which pieces are spread if that is better; None: all may be on one host.
    """
    own = whole - home * cards
    if own.max() < 0.0:
        home = home + own / (cards if spread is None else spread)
    return Sides(whole, np.maximum(own, 0.0), home)


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
        host = [self.sizes.index(len(self.topology.ranks_of(self.topology.host_of(r)))) for r in range(self.ranks)]
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
