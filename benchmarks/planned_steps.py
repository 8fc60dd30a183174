"""Compare measured steps of this planner's plans with those of other plans, all in this library's runtime.

    python benchmarks/planned_steps.py [--peer PYTHON] [--sets 10] [--topology topology.json]

Sets of 8 to 40 tables are drawn at random with a fixed seed: 1,000 to 400,000 rows, 16 to 128 columns, 1 to about 30
ids per bag (log-normal), 512 to 2,048 samples a rank, SGD or row-wise Adagrad, ids uniform. Each is planned for 2 ranks
four times:

    tilerec   this planner, with the speeds that `tilerec calibrate` measured just before (or those of --topology)
    TorchRec  its planner with its defaults for CPU, in the environment of --peer; its shards become tiles
    by size   whole tables, the largest first, each to the rank that has least so far
    row-wise  every table in two ranges of rows

The plans of a set take turns, step by step, on 2 ranks with one thread each over gloo. A time is the median of 60
steps; of a step, the slower rank counts. Output: milliseconds, the ratio to this planner's plan (above one: tilerec is
faster), and the predicted time of tilerec's plan.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from cost_model import RANKS, Run, measured_speeds  # noqa: E402
from planner import ask_peer  # noqa: E402

from tilerec.comms.process import ProcessGroupComms  # noqa: E402
from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.optim.attach import apply_optimizer_in_backward  # noqa: E402
from tilerec.planner import (  # noqa: E402
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
)  # fmt: skip
from tilerec.planner.cost.workload import Reads, TableWork  # noqa: E402
from tilerec.sharding.strategies import row_wise, table_wise  # noqa: E402
from tilerec.spec.optimizer import SGD, OptimizerSpec, RowWiseAdagrad  # noqa: E402
from tilerec.spec.plan import ParameterSharding  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig  # noqa: E402
from tilerec.spec.tile import Tiling  # noqa: E402
from tilerec.spec.topology import Topology  # noqa: E402
from tilerec.testing.ranks import Ranks  # noqa: E402

MOST_CELLS = 60_000_000
WARM = 4
PLANNERS = ("tilerec", "TorchRec", "by size", "row-wise")


class Set:
    """Random tables with the features that read them. With tilings: a plan that `Run` runs."""

    def __init__(self, seed: int, tilings: dict[str, Tiling] | None = None) -> None:
        draw = random.Random(1000 + seed)
        count = round(math.exp(draw.uniform(math.log(8), math.log(40))))
        self.batch = draw.choice([512, 1024, 2048])
        self.optimizer: OptimizerSpec = draw.choice((SGD(0.1), RowWiseAdagrad(0.1)))
        self.works, cells = [], 0
        for t in range(count):
            rows, dim = int(10 ** draw.uniform(3, 5.6)), draw.choice((16, 32, 64, 128))
            rows = min(rows, max(1000, (MOST_CELLS - cells) // dim // (count - t)))
            cells += rows * dim
            ids = max(1, min(32, round(math.exp(draw.gauss(0.7, 1.0)))))
            reads = [Reads(self.batch, ids)]
            self.works.append(TableWork(f"t{t}", rows, dim, optimizer=self.optimizer, reads=reads))
        self.tilings = tilings or {}

    def shardings(self) -> dict[str, ParameterSharding]:
        return {
            w.name: ParameterSharding("explicit", tiling=self.tilings[w.name], ids_per_bag=w.ids_per_bag)
            for w in self.works
        }

    def module(self) -> EmbeddingBagCollection:
        configs = [EmbeddingBagConfig(w.rows, w.dim, w.name, feature_names=[w.name]) for w in self.works]
        module = EmbeddingBagCollection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(self.optimizer, module.parameters())
        return module

    def request(self) -> dict[str, Any]:
        """Return the request that `planner_peer.py` reads."""
        tables = [
            {"name": w.name, "rows": w.rows, "dim": w.dim, "features": [w.name], "pooling": [w.ids_per_bag]}
            for w in self.works
        ]
        case = {"tables": tables, "ranks": RANKS, "local": RANKS, "batch": self.batch}
        return {"case": {**case, "device": "cpu", "hbm": 0}, "search": True, "plans": {}}


def planned(tables: Set, topology: Topology) -> tuple[dict[str, Tiling], float]:
    """Return this planner's tilings, and predicted milliseconds."""
    planner = EmbeddingShardingPlanner(
        topology,
        tables.batch,
        storage_reservation=FixedPercentageStorageReservation(0),
        constraints={w.name: ParameterConstraints(pooling_factors=[w.ids_per_bag]) for w in tables.works},
    )
    plan = planner.plan(tables.module())
    tilings = {name: sharding.tiling for _, name, sharding in plan.tables()}
    return tilings, 1e3 * plan.report.cost_s  # type: ignore[return-value]


def from_peer(tables: Set, shards: dict[str, Any]) -> dict[str, Tiling]:
    made = {}
    for work in tables.works:
        tiles: dict[tuple[int, int, int, int], list[int]] = {}
        for r0, c0, rows, columns, rank in shards[work.name]["shards"]:
            tiles.setdefault((r0, r0 + rows, c0, c0 + columns), []).append(rank)
        cover = [(*edges, tuple(ranks)) for edges, ranks in tiles.items()]
        made[work.name] = Tiling.of(work.name, work.rows, work.dim, cover)
    return made


def by_size(tables: Set, topology: Topology) -> dict[str, Tiling]:
    taken, made = [0] * RANKS, {}
    for work in sorted(tables.works, key=lambda w: (-w.rows * w.dim, w.name)):
        rank = taken.index(min(taken))
        taken[rank] += work.rows * work.dim
        made[work.name] = table_wise(work.name, work.rows, work.dim, [rank], topology)
    return made


def by_rows(tables: Set, topology: Topology) -> dict[str, Tiling]:
    return {w.name: row_wise(w.name, w.rows, w.dim, None, topology) for w in tables.works}


def measure(seed: int, plans: dict[str, dict[str, Tiling]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step on this rank, of all plans in turns."""
    torch.set_num_threads(1)
    group = ProcessGroupComms()
    runs = {}
    for name, tilings in plans.items():
        tables: Any = Set(seed, tilings)
        runs[name] = Run(tables, group)
    taken: dict[str, list[float]] = {name: [] for name in plans}
    order = list(plans)
    for k in range(-WARM, rounds):
        order.append(order.pop(0))
        if k % len(order) == 0:  # no plan always follows the same one
            order.reverse()
        for name in order:
            group.barrier()
            before = time.perf_counter()
            runs[name].step(k)
            if k >= 0:
                taken[name].append(time.perf_counter() - before)
    group.barrier()
    for run in runs.values():
        run.module.exchange.group.close()
        run.module.exchange.route_group.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python with TorchRec")
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--only", type=int, nargs="+", help="these sets")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--topology", type=Path, help="measured by `tilerec calibrate`; None: measure now")
    given = parser.parse_args()
    chosen = given.only or range(given.sets)
    sets = [Set(seed) for seed in chosen]
    answers: list[Any] = [None] * len(sets)
    if given.peer:
        answers = ask_peer(given.peer, [tables.request() for tables in sets], 600)
        if "error" in answers[0]:
            raise SystemExit(answers[0]["error"])
    with Ranks(RANKS, timeout_s=600) as ranks:
        if given.topology is not None:
            topology = Topology.from_json(json.loads(given.topology.read_text()))
        else:
            topology = Topology.from_json(ranks.run(measured_speeds)[0])
        print(f"{'set':>3} {'tables':>6} {'batch':>5} {'ids':>5} {'predicted':>9} | milliseconds | ratio to tilerec")
        print(f"{'':>33} | {' '.join(f'{name:>9}' for name in PLANNERS)}")
        ratios: dict[str, list[float]] = {}
        for seed, tables, answer in zip(chosen, sets, answers, strict=True):
            own, predicted = planned(tables, topology)
            plans = {"tilerec": own}
            if answer is not None:
                plans["TorchRec"] = from_peer(tables, answer["plan"])
            plans |= {"by size": by_size(tables, topology), "row-wise": by_rows(tables, topology)}
            several = ranks.run(measure, seed, plans, given.rounds)
            slower = {n: [max(step) for step in zip(*(o[n] for o in several), strict=True)] for n in plans}
            median = {name: 1e3 * statistics.median(steps) for name, steps in slower.items()}
            for name in plans:
                ratios.setdefault(name, []).append(median[name] / median["tilerec"])
            ids = statistics.mean(w.ids_per_bag for w in tables.works)
            print(
                f"{seed:>3} {len(tables.works):>6} {tables.batch:>5} {ids:>5.1f} {predicted:>9.2f}  | "
                + " ".join(f"{median.get(name, math.nan):>9.2f}" for name in PLANNERS)
                + " | "
                + " ".join(f"{median.get(name, math.nan) / median['tilerec']:>5.2f}" for name in PLANNERS[1:]),
                flush=True,
            )
    for name, found in ratios.items():
        if name != "tilerec":
            print(f"{name:>9}: mean {statistics.mean(found):.2f}, least {min(found):.2f}, most {max(found):.2f}")


if __name__ == "__main__":
    main()
