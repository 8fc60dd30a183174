"""What the two sides of an exchange take, in seconds per byte, on hosts of every size.

Nouns
  owner's side   bytes between a rank and all homes elsewhere, of the pieces on the rank
  home's side    bytes between a rank and all owners elsewhere, of its own batch

Of duplex links the slower direction counts. On hosts of one size that is the owner's on the slowest rank, and the
home's side counts as 0. On hosts of several sizes, homes elsewhere may take longer for a host's pieces, V_h other. Then
an estimate gives the host that time: exact for two hosts that share cards. With a card for each rank that would be
n v other, too much where a host's ranks hold unlike amounts: the geometric mean of it and of the owner's side counts.

Sums inside hosts are an exception: hosts that add up many rows send few bytes, and their ranks wait for what they
receive. With a card for each rank, the home's side of rows and gradients is then a stage of its own, and the step waits
for the longer one. On hosts alike it takes V (R - n) / R other, as if pieces lay evenly, on top of what a host's ranks
all bear. No price is below that: on a host with less than its part of V homes receive more, and on one with more, some
owner sends as much. So the faster direction counts. Links inside the host count for pieces on whole hosts alone, and
tables with given places do not.

On other links the seconds of both directions add up. A home exchanges nothing with itself, nor over the network with
its host. So with V bytes per home of all pieces, v of them on a rank and V_h on its host of n ranks, the seconds are

    links inside the host          v (n - 1) own    + (V_h - v) other
    network, a card for each rank  v (R - n) own    + (V - V_h) other
    network, a card for each host  V_h (R - n) own / n + (V - V_h) other        (the mean of the host's ranks)

The last is V other + V_h ((R - n) own - n other) / n wherever pieces lie. V_h is not known for the first two, unless
there is one host: there an estimate takes the V - v bytes to lie alike on the R - 1 other ranks, and a bound leaves the
home's side out.

Where the owner's side is below 0 (of large hosts on shared cards), it counts as 0. The step waits for the slowest host,
and that is one where the side is above 0: there is V other too. If it is below 0 on all hosts, pieces are taken to lie
evenly.

Legend: R ranks, n ranks of a host, Z sizes of hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.portable import Floats

OWNER_DIRECTION = {"ids": "in", "rows": "out", "gradients": "in"}
"""By exchange: "in" if owners receive, "out" if they send."""


@dataclass(frozen=True, eq=False)
class Sides:
    """Seconds per byte on hosts of each size.

    Args:
        whole: [Z] what an owner takes, of a byte to each home elsewhere.
        own: [Z] the same beyond what it saves as a home, because the piece lies on itself.
        home: [Z] what a home takes, of a byte of all pieces.
    """

    whole: Floats
    own: Floats
    home: Floats

    def __add__(self, other: Sides) -> Sides:
        return Sides(self.whole + other.whole, self.own + other.own, self.home + other.home)


def sides_of(model: Model, exchange: str, *, lower: bool, pinned: bool = False) -> tuple[Sides, Sides]:
    """Both sides of an exchange on links inside hosts, and on the network, on hosts of each size, ascending.

    Args:
        lower: homes' sides are the least that they can be.
        pinned: tables with given places may load one rank so that pieces are not spread evenly.
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
    # A host is all ranks, or one: then a rank's host holds everything, or what the rank itself does.
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
    """Seconds that a home takes on its network card, of a byte of all pieces; hosts are alike, pieces lie evenly."""
    speeds, ranks = model.speeds, model.ranks
    away = ranks - len(model.topology.host_ranks[0])
    return min(speeds.network_in, speeds.network_out) * away / ranks


def _both(whole: Floats, home: Floats, cards: Floats | float, spread: float | None) -> Sides:
    """Of links that are not duplex.

    Args:
        cards: ranks of which a piece saves the home's side, those that share its card.
        spread: ranks that pieces lie on where that is better than on one; None: all may lie on one host.
    """
    own = whole - home * cards
    if own.max() < 0.0:
        home = home + own / (cards if spread is None else spread)
    return Sides(whole, np.maximum(own, 0.0), home)
