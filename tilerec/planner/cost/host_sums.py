"""Sums inside hosts: counts of the rows that a proxy adds before they cross to another host, for each option.

Nouns
  sum      for one home on another host: the sum of the rows that several ranks of a host (its members) hold of a bag
  proxy    the member that adds the rows; the members take turns, by home
  turns    number of homes for which a member is the proxy

If hosts have several sizes, numbers are those of the size with the highest cost; in a bound, with the lowest.

Legend: n tables of an option.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.search.instance import Ints


class Sums(NamedTuple):
    """Counts of the sums of an option.

    Args:
        merge: [n] 1 for tables whose rows are added inside hosts, else 0.
        most: members of a sum.
        apart: members on a home's own host, whose rows arrive one by one.
        proxies: members of the host whose proxies work longest. far: homes of such a host, if turns were equal.
        turn: bags that a member sends as a proxy, relative to the mean of the members.
        sent: [n] bags that a member sends, per home.
        home: [n] bags of all sums that a home receives.
        union: [n] bags of a sum of `apart` members.
    """

    merge: Floats
    most: float
    apart: float
    proxies: float
    far: float
    turn: float
    sent: Floats
    home: Floats
    union: Floats


def sums_inside_hosts(
    model: Model, on: int, parts: float, even: Floats, once: Floats, t: Ints, distinct: Floats, *, lower: bool
) -> Sums:
    """Return the sums of an option. The rows of single pieces are never added inside hosts (realise.py).

    Args:
        on: ranks of a piece. parts: parts of a home. even, once: [T] share of an even part, and of
            the distinct ids of one home in it. t: [n] tables.
        distinct: [F] as of `Workload.present`.
        lower: for a bound.
    """
    work, topology, ranks = model.workload, model.topology, model.ranks
    none = np.zeros(len(t))
    if topology.host_count == 1 or on == 1:
        return Sums(none, 1.0, 1.0, 1.0, 0.0, 1.0, none, none, none)
    hosts = [len(host) for host in topology.host_ranks] if on == ranks else [on] * int(parts / on)
    sizes = sorted(set(hosts))
    shares = {n: np.minimum(even * float(n), 1.0) for n in sizes}
    union = {n: work.present(share, distinct, np.minimum(once * float(n), 1.0))[0][t] for n, share in shares.items()}
    merge = np.where((sizes[-1] > 1) & (work.fan_in[t] > 1.0), 1.0, 0.0)
    # Homes on other hosts, by size of the host: its ranks take turns, each with equally many homes, or one more.
    turns = {n: (ranks - n + (0 if lower else n - 1)) // n * n if n > 1 else 0 for n in sizes}
    # A larger sum has fewer bags per member.
    sender, apart = sizes[-1 if lower else 0], sizes[0 if lower else -1]
    proxies = apart if lower else max(sizes, key=lambda n: turns[n] * (n - 1) / n)
    turn = 1.0
    if lower and topology.nic == "device":  # otherwise the card of the host sends all sums
        turn = min(turns[n] / (ranks - n) if n > 1 else 1.0 for n in sizes)
    return Sums(
        merge,
        float(sizes[-1]),
        float(apart),
        float(proxies),
        float(min(turns.values()) if lower else turns[proxies]),
        turn,
        union[sender] / sender * turn,
        sum((hosts.count(n) * union[n] for n in sizes), none),
        union[apart],
    )
