"""Plans of this planner and of TorchRec's on random tables, compared by a simple roofline and by this library's price.

    python benchmarks/planner_roofline.py PYTHON [--sets 12] [--tables 10 60] [--machine h100] [--limit 300]

PYTHON has TorchRec 1.8.0. Both plan the same tables for the same machine (memory and link bandwidths of its data
sheet), each with its defaults. The roofline is independent of both planners. Per rank and direction:

    seconds = bytes read and written in memory / its bandwidth
            + the longer of bytes sent and received inside the host / a link's bandwidth
            + the longer of bytes sent and received between hosts / a network card's bandwidth

The forward reads rows and sends pooled rows home; the backward sends gradients back and changes rows. The time of a
step is the slowest rank's forward plus the slowest rank's backward. With "every", row splits send a row for every bag,
as in TorchRec's runtime; with "present", only for bags with an id in the piece. A ratio below 1 means
that this planner's step is faster.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence

import numpy as np
from planner import SHARDERS, by_peer, configs_of, plan_of_peer, planner_of
from planner_cases import Case, lognormal

from tilerec.planner import price_plan
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology

BYTES = 4.0  # of a cell


class On(Case):
    """A case on one of the machines known by name."""

    machine = "h100"

    def topology(self) -> Topology:
        return Topology.preset(self.machine, hosts=self.ranks // 8, gpus_per_host=8)


def roofline(case: Case, plan: ShardingPlan, topology: Topology, *, present: bool) -> float:
    """Return the seconds of a step."""
    ranks = topology.world_size
    host = np.array([topology.host_of(rank) for rank in range(ranks)])
    memory, sent = np.zeros((2, ranks)), np.zeros((ranks, ranks))
    shardings = {name: sharding for _, name, sharding in plan.tables()}
    for name, rows, bags in zip((c.name for c in configs_of(case)), case.rows, case.bags, strict=True):
        tiling = shardings[name].tiling
        assert tiling is not None
        for tile in tiling.tiles():
            share, width = (tile.r1 - tile.r0) / rows, tile.c1 - tile.c0
            copied = len(tile.owners) == ranks > 1
            for owner in tile.owners:
                homes = 1.0 if copied else float(ranks)
                for length in bags:
                    ids = case.batch * length * share
                    there = case.batch * (1.0 - (1.0 - share) ** length) if present and share < 1 else case.batch
                    memory[0, owner] += homes * (ids + there) * width * BYTES
                    memory[1, owner] += homes * (2.0 * ids + there) * width * BYTES
                    if not copied:
                        sent[owner] += there * width * BYTES
            if copied:  # an all-reduce of the gradients: a ring over all ranks
                ring = 2.0 * (ranks - 1) / ranks * (tile.r1 - tile.r0) * width * BYTES
                for rank in range(ranks):
                    sent[(rank + 1) % ranks, rank] += ring
    np.fill_diagonal(sent, 0.0)
    near = sent * (host[:, None] == host[None, :])
    far = sent - near
    link, network = 1000.0 * topology.intra_host_bw, 1000.0 * topology.inter_host_bw
    exchange = (
        np.maximum(near.sum(0), near.sum(1)) / link + np.maximum(far.sum(0), far.sum(1)) / network
    )  # either direction
    return float(sum((memory[way] / (1000.0 * topology.hbm_mem_bw) + exchange).max() for way in (0, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python")
    parser.add_argument("--sets", type=int, default=12)
    parser.add_argument("--tables", type=int, nargs=2, default=(10, 60))
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--limit", type=float, default=300.0)
    given = parser.parse_args()
    On.machine = given.machine
    rng = np.random.default_rng(5)
    sizes = np.exp(rng.uniform(math.log(given.tables[0]), math.log(given.tables[1]), given.sets))
    ratios: dict[int, list[Sequence[float]]] = {}
    print("tables ranks |  every present   price | ours ms   TorchRec ms (present)")
    for i, size in enumerate(sizes.tolist()):
        drawn = lognormal(round(size), (8, 16)[i % 2], 300 + i)
        case = On(**vars(drawn))
        theirs = by_peer(given.python, case, given.limit)
        if "error" in theirs:
            print(f"{len(case.rows):>6} {case.ranks:>5} | {theirs['error']}")
            continue
        topology = case.topology()
        planner = planner_of(case, topology)
        own = planner.plan(configs_of(case), SHARDERS)
        other = plan_of_peer(case, theirs["plan"], topology)
        request = planner.request(configs_of(case), SHARDERS)
        found = [
            [roofline(case, plan, topology, present=present) for present in (False, True)]
            + [price_plan(request, plan).seconds]
            for plan in (own, other)
        ]
        row = [a / b for a, b in zip(*found, strict=True)]
        ratios.setdefault(case.ranks, []).append(row)
        print(
            f"{len(case.rows):>6} {case.ranks:>5} | {row[0]:>6.3f} {row[1]:>7.3f} {row[2]:>7.3f} | "
            f"{1e3 * found[0][1]:.3f} {1e3 * found[1][1]:.3f}",
            flush=True,
        )
    for ranks, rows in ratios.items():
        for name, of in (("mean", statistics.fmean), ("worst", max)):
            print(f"{name:>6} {ranks:>5} | " + " ".join(f"{of(column):>7.3f}" for column in zip(*rows, strict=True)))


if __name__ == "__main__":
    main()
