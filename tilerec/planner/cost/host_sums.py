"""Rows that are added up inside hosts before they cross to another: how many there are, for each option.

Legend: T tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.search.instance import Ints


class Sums(NamedTuple):
    """Rows that are added up inside hosts before they cross to another. On hosts of several sizes: the most, or least.

    merge: [T] 1 where they are. most: members of a sum. apart: members whose rows come as they are on their own host.
    proxies: ranks of the host whose proxies take most. far: homes for which they add
    rows up, if all proxies had as many turns.
    turn: what a member sends on as a proxy, divided by the members' mean. sent: [T] bags of that, for each home.
    home: [T] bags of all sums of a home. union: [T] bags of a sum of `apart`.
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


def sums_inside_hosts(model: Model, on: int, parts: float, even: Floats, t: Ints, *, lower: bool) -> Sums:
    """The sums of an option of tables t, whose pieces lie on `on` ranks each.

    Single pieces are not added up where they share a host (`realise.py`).
    """
    work, topology, ranks = model.workload, model.topology, model.ranks
    none = np.zeros(len(t))
    if topology.host_count == 1 or on == 1:
        return Sums(none, 1.0, 1.0, 1.0, 0.0, 1.0, none, none, none)
    hosts = [len(host) for host in topology.host_ranks] if on == ranks else [on] * int(parts / on)
    sizes = sorted(set(hosts))
    union = {n: work.present(np.minimum(even * float(n), 1.0))[0][t] for n in sizes}
    merge = np.where((sizes[-1] > 1) & (work.fan_in[t] > 1.0), 1.0, 0.0)
    # Homes elsewhere that a host's ranks add up for in turn: each of them for as many, or for one more.
    turns = {n: (ranks - n + (0 if lower else n - 1)) // n * n if n > 1 else 0 for n in sizes}
    # A sum of many members has less of each.
    sender, apart = sizes[-1 if lower else 0], sizes[0 if lower else -1]
    proxies = apart if lower else max(sizes, key=lambda n: turns[n] * (n - 1) / n)
    turn = 1.0
    if lower and topology.nic == "device":  # else a host's card sends it all
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
