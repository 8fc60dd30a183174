"""`Bins`: the ranks, or the hosts, onto which `pack` places pieces, with the load and the free memory of each.

Legend: S stages, M memory tiers, R ranks, H hosts, T tables, B bins, k pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilerec.planner.search.instance import PER_MILLE, Bools, Floats, Instance, Ints
from tilerec.planner.search.relaxed import Relaxed


@dataclass(eq=False)
class Bins:
    """Bins of one kind: all ranks, or all hosts of one size.

    Args:
        time: [B, S] load in ps before any piece is placed.
        slow: [B, S] time of a unit of work, relative to the fastest bin.
        room: [B, M] free bytes; `pack` updates them.
        host: [B] index of each bin's host.
        host_room: [H, M] free bytes under the caps of hosts; None if hosts have no caps of their own.
        size: [H] number of bins of each host.
        shared: [S] True for stages of a network link that the bins of a host share.
        allowed: [T, B] bins that may hold a table; None for all.
    """

    time: Floats
    slow: Floats
    room: Ints
    host: Ints
    host_room: Ints | None
    size: Ints
    shared: Bools
    allowed: Bools | None

    def least(self, score: Floats, k: int, table: int, size: Ints) -> list[int] | None:
        """Return the k bins of the least score for the pieces of a table, or None if they do not fit.

        The bins are distinct if there are enough of them. Otherwise every allowed bin occurs equally often, and the
        best ones once more.

        Args:
            score: [B]; infinite for bins without room for one piece.
            size: [M] bytes of one piece.
        """
        allowed = None if self.allowed is None else self.allowed[table]
        open_bins = len(score) if allowed is None else int(allowed.sum())
        if open_bins == 0:
            return None
        repeat, k = divmod(k, open_bins)
        chosen: list[int] = []
        if repeat:
            chosen = np.flatnonzero(np.ones(len(score)) if allowed is None else allowed).tolist() * repeat
            if np.any(self.room[chosen] < size * (repeat + (k > 0))) or self.host_room is not None:
                return None
        if k:
            edge = float(np.partition(score, k - 1)[k - 1])
            if edge == np.inf:
                return None
            if self.shared.any() and len(self.size) > 1:
                best = spread_over_hosts(score, k, self.host, self.size).tolist()
            else:
                below = np.flatnonzero(score < edge)
                best = np.concatenate([below, np.flatnonzero(score == edge)[: k - len(below)]]).tolist()
            if self.host_room is not None:
                counts = np.bincount(self.host[best], minlength=len(self.host_room))
                if np.any(counts[:, None] * size > self.host_room):
                    return None
            chosen = chosen + best
        return sorted(chosen)


def rank_bins(relaxed: Relaxed, base: Ints, work: Ints, bytes_now: Ints) -> Bins:
    """Return all ranks as bins.

    Args:
        base: [R, S] ps that do not depend on the speed of a rank.
        work: [R, S] ps of the pieces placed so far.
        bytes_now: [R, M] bytes in use.
    """
    instance = relaxed.instance
    # The bins of a tier are adjacent, which compares faster.
    room = np.asfortranarray(instance.cap - bytes_now)
    host_room = None
    if bool((instance.host_cap < instance.host_cap.max(initial=0)).any()) or _hosts_have_caps(instance):
        host_room = instance.host_cap - instance.by_host(bytes_now)
    return Bins(
        (base + work * instance.slow // PER_MILLE).astype(np.float64),
        instance.slow / PER_MILLE,
        room,
        instance.host_of,
        host_room,
        instance.host_sizes,
        instance.shared,
        instance.allowed,
    )


def host_bins(relaxed: Relaxed, hosts: Ints, base: Ints, work: Ints, bytes_now: Ints) -> Bins:
    """Return hosts as bins, each with the load of its slowest rank and the room of its fullest rank.

    Args:
        hosts: indices of hosts of one size.
        base, work, bytes_now: as in `rank_bins`.
    """
    instance = relaxed.instance
    time = base + work * instance.slow // PER_MILLE
    ranks = [instance.host_ranks[h] for h in hosts.tolist()]
    room = np.stack([(instance.cap - bytes_now)[r].min(0) for r in ranks])
    if _hosts_have_caps(instance):
        left = np.stack(
            [instance.host_cap[h] - bytes_now[r].sum(0) for h, r in zip(hosts.tolist(), ranks, strict=True)]
        )
        room = np.minimum(room, left // instance.host_sizes[hosts][:, None])
    allowed = None
    if instance.allowed is not None:
        allowed = np.stack([instance.allowed[:, r].all(1) for r in ranks], 1)
    top, mean = np.stack([time[r].max(0) for r in ranks]), np.stack([time[r].sum(0) // len(r) for r in ranks])
    return Bins(
        np.where(instance.shared, mean, top).astype(np.float64),
        np.stack([instance.slow[r].max(0) for r in ranks]) / PER_MILLE,
        room,
        np.arange(len(hosts)),
        None,
        np.ones(len(hosts), np.int64),
        instance.shared,
        allowed,
    )


def _hosts_have_caps(instance: Instance) -> bool:
    """Return True if some host's cap is below the sum of its ranks' caps."""
    together = instance.by_host(np.minimum(instance.cap, (1 << 62) // instance.ranks))
    return bool(np.any(instance.host_cap < together))


def spread_over_hosts(score: Floats, k: int, host: Ints, size: Ints) -> Ints:
    """Return the k bins of the least score, as few of them per host as possible.

    Pieces of one table on one host share its network link.

    Args:
        score: [B]; bins with an infinite score are never chosen. host: [B]. size: [H], only its length is used.
    """
    order = np.argsort(score, kind="stable")
    order = order[score[order] < np.inf]
    by_host = np.argsort(host[order], kind="stable")
    counts = np.bincount(host[order], minlength=len(size))
    turn = np.empty(len(order), np.int64)
    turn[by_host] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.argsort(turn, kind="stable")[:k]]
