"""Benchmark of the planner from a model's configs to the plan's file: time, gap to the bound, and memory.

    python benchmarks/planner.py [--cases NAME ...] [--ids even] [--repeat 3] [--peer PYTHON] [--peer-limit 120]
                                 [--curve FILE.svg]

- Time: from the built module to the written plan file, without imports; the least of `--repeat` runs, and that of the
  first one. The module is on meta; above 2,500 tables, time starts from its configs. Each case runs in a fresh process.
- Memory: the growth of the process.
- Gap: to the bound on the same objective.

`--ids` is what is known of the ids: "even", nothing; "skewed", Zipf's law of exponent 1.05; "ordered", the law in
frequency order; "named", the law and the most frequent ids, a twentieth of the rows and at most 50,000 a table.

`--peer` is a Python with TorchRec 1.8.0. It plans the same tables on the same topology with its defaults, in a separate
process that is stopped after `--peer-limit` seconds. This library's cost model then prices both plans.
`planner_against.py` compares the two planners on random tables.

`--curve` draws time against tables, 100 to 100,000, with the exponent; with `--peer` also TorchRec's time for up to 50
tables. The picture in the documentation is made by

    python benchmarks/planner.py --cases --peer PYTHON --curve docs/img/planner-time.svg
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loglog import Series, exponent, write
from planner_cases import CASES, Case, lognormal

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.planner import EmbeddingShardingPlanner, FixedPercentageStorageReservation, ParameterConstraints
from tilerec.planner.cost.workload import Skew
from tilerec.planner.planner_error import PlannerError
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

AS_MODULE = 2_500
PEER_TABLES = 200
CURVE = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
PEER_CURVE = (12, 25, 50)
MANY = 3_000
HERE = Path(__file__).parent


def configs_of(case: Case) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(rows, dim, f"t{i:06d}", feature_names=[f"f{i}_{k}" for k in range(len(bags))])
        for i, (rows, dim, bags) in enumerate(zip(case.rows, case.dims, case.bags, strict=True))
    ]


def planner_of(case: Case, topology: Topology, ids: str = "even") -> EmbeddingShardingPlanner:
    limits = {
        f"t{i:06d}": ParameterConstraints(pooling_factors=list(bags), skew=skew)
        for i, (bags, skew) in enumerate(zip(case.bags, skews_of(case, ids), strict=True))
        if skew is not None or any(bag != 1.0 for bag in bags)
    }
    return EmbeddingShardingPlanner(
        topology,
        case.batch,
        storage_reservation=FixedPercentageStorageReservation(0),
        constraints=limits,
    )


def skews_of(case: Case, ids: str) -> list[Skew | None]:
    """Return what is known of the ids of each table."""
    if ids == "even":
        return [None] * len(case.rows)
    draw, found = np.random.default_rng(1), list[Skew | None]()
    for rows in case.rows:
        hot = np.zeros(0, np.int64)
        if ids == "named":
            hot = np.unique(draw.integers(0, rows, min(rows // 20, 50_000)))
            draw.shuffle(hot)
        found.append(Skew(rows, 1.05, ordered=ids == "ordered", hot=hot))
    return found


SHARDERS = [EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1})]


def one(case: Case, ids: str, repeat: int, keep: Path | None) -> dict[str, Any]:
    """Plan a case in this process."""
    configs = configs_of(case)
    module: Any = configs
    if len(configs) <= AS_MODULE:
        module = EmbeddingBagCollection(configs, device=torch.device("meta"))
    planner = planner_of(case, case.topology(), ids)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeat):
            began = time.perf_counter()
            try:
                plan = planner.plan(module, SHARDERS)
            except PlannerError as error:
                return {"error": str(error).splitlines()[0]}
            plan.save(Path(folder) / "plan.json")
            times.append(time.perf_counter() - began)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if keep is not None:
        plan.save(keep)
    report = plan.report
    return {
        "seconds": min(times),
        "first": times[0],
        "gap": report.gap,
        "step_ms": 1e3 * report.cost_s,
        "grown_mib": grown / 1024,
        "full": max(report.memory_per_rank) / max(1, report.topology.memory_cap),
    }


def in_process(name: str, ids: str, repeat: int, keep: Path) -> dict[str, Any]:
    """Run `one` in a separate process."""
    command = [
        sys.executable, __file__, "--one", name, "--ids", ids, "--repeat", str(repeat), "--keep", str(keep),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def case_json(case: Case) -> dict[str, Any]:
    """Return a case in the JSON format of `planner_peer.py`."""
    topology = case.topology()
    return {
        "tables": [
            {"name": c.name, "rows": c.num_embeddings, "dim": c.embedding_dim, "features": list(c.feature_names),
             "pooling": list(bags)}
            for c, bags in zip(configs_of(case), case.bags, strict=True)
        ],
        "ranks": topology.world_size, "local": topology.local_world_size, "hbm": topology.hbm_cap,
        "batch": case.batch,
    }  # fmt: skip


def by_peer(python: str, case: Case, limit: float) -> dict[str, Any]:
    """Return TorchRec's plan of the same tables, its seconds and its rating; or an "error"."""
    return ask_peer(python, [{"case": case_json(case), "search": True, "plans": {}}], limit)[0]


def ask_peer(python: str, requests: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    """Run `planner_peer.py` and return its answers; or one answer with an "error"."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "requests.json", Path(folder) / "found.json"
        source.write_text(json.dumps(requests))
        command = [python, str(HERE / "planner_peer.py"), str(source), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return [{"error": f"> {limit:.0f} s"}]
        if done.returncode:
            return [{"error": done.stderr.strip().splitlines()[-1][:100]}]
        return list(json.loads(out.read_text()))


def priced(case: Case, plan: ShardingPlan) -> float:
    """Return the milliseconds of a step of a plan, by this library's cost model."""
    return 1e3 * planner_of(case, case.topology()).price(configs_of(case), plan, SHARDERS).seconds


def plan_of_peer(case: Case, shards: dict[str, Any], topology: Topology) -> ShardingPlan:
    part = EmbeddingModuleShardingPlan()
    for config in configs_of(case):
        tiles: dict[tuple[int, int, int, int], list[int]] = {}
        for r0, c0, rows, columns, rank in shards[config.name]["shards"]:
            tiles.setdefault((r0, r0 + rows, c0, c0 + columns), []).append(rank)
        cover = [(*edges, tuple(ranks)) for edges, ranks in tiles.items()]
        tiling = Tiling.of(config.name, config.num_embeddings, config.embedding_dim, cover)
        part[config.name] = ParameterSharding("explicit", tiling=tiling)
    return ShardingPlan({"": part}, topology.world_size, topology.host_ranks)


def plan_json(plan: ShardingPlan) -> dict[str, Any]:
    """Return a plan in the JSON format of `planner_peer.py`."""
    rows = {}
    for _, name, sharding in plan.tables():
        assert sharding.tiling is not None
        shards = [[t.r0, t.c0, t.r1 - t.r0, t.c1 - t.c0, rank] for t in sharding.tiling.tiles() for rank in t.owners]
        rows[name] = {"type": sharding.kind.value, "shards": shards}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--ids", choices=["even", "skewed", "ordered", "named"], default="even")
    parser.add_argument("--peer", help="a Python with TorchRec; with even ids")
    parser.add_argument("--peer-limit", type=float, default=120.0)
    parser.add_argument("--curve", type=Path, metavar="FILE.svg")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        tables = given.one.removeprefix("curve ")
        case = CASES[given.one]() if tables == given.one else of_curve(int(tables))
        print(json.dumps(one(case, given.ids, given.repeat, given.keep)))
        return
    if given.peer and given.ids != "even":
        parser.error("got --peer with --ids; expected even ids, as TorchRec's planner knows no others. Leave one out.")
    if given.cases:
        head = (
            f"{'case':<22} {'tables':>7} {'seconds':>8} {'first':>8} {'gap':>7} {'step':>10} {'memory':>9} {'full':>5}"
        )
        print(head + (f" {'TorchRec':>10}  priced tiling by tiling: ours, its" if given.peer else ""))
    with tempfile.TemporaryDirectory() as folder:
        for name in given.cases:
            case, keep = CASES[name](), Path(folder) / "plan.json"
            found = in_process(name, given.ids, given.repeat, keep)
            line = f"{name:<22} {len(case.rows):>7,} "
            if "error" in found:
                print(line + found["error"])
                continue
            line += (
                f"{found['seconds']:>8.3f} {found['first']:>8.3f} {100 * found['gap']:>6.2f}% "
                f"{found['step_ms']:>7.3f} ms {found['grown_mib']:>5.0f} MiB {100 * found['full']:>4.0f}%"
            )
            if given.peer:
                line += against(given, case, ShardingPlan.load(keep))
            print(line, flush=True)
    if given.curve:
        curve(given)


def against(given: argparse.Namespace, case: Case, own: ShardingPlan) -> str:
    """Return TorchRec's columns of an output line."""
    theirs = by_peer(given.peer, case, given.peer_limit)
    if "error" in theirs:
        return f" {theirs['error']:>10}"
    line = f" {theirs['seconds']:>8.2f} s"
    if len(case.rows) > PEER_TABLES:
        return line
    plan = plan_of_peer(case, theirs["plan"], case.topology())
    return line + f"  {priced(case, own):.3f} ms, {priced(case, plan):.3f} ms"


def curve(given: argparse.Namespace) -> None:
    """Print and draw seconds against tables on 64 ranks, with the exponents of fitted power laws."""
    own: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for count in CURVE:
        line = f"{count:>8,} tables x 64 "
        with tempfile.TemporaryDirectory() as folder:
            repeat = max(given.repeat, 3 if count < 10_000 else 1)
            found = in_process(f"curve {count}", given.ids, repeat, Path(folder) / "plan.json")
        if "error" in found:
            print(line, found["error"])
            continue
        own.append((count, found["seconds"]))
        print(f"{line} {found['seconds']:>8.3f} s  gap {100 * found['gap']:>5.2f}%", flush=True)
    for count in PEER_CURVE if given.peer else ():
        found = by_peer(given.peer, of_curve(count), given.peer_limit)
        print(f"{count:>8,} tables x 64  TorchRec ", end="")
        print(found["error"] if "error" in found else f"{found['seconds']:.2f} s", flush=True)
        if "error" not in found:
            theirs.append((count, found["seconds"]))
    series = [
        Series(name + growth(points), points)
        for name, points in (("tilerec", own), ("TorchRec 1.8.0", theirs))
        if len(points) > 1
    ]
    for one in series:
        print(one.name)
    if series:
        write(given.curve, "Planning on 64 ranks, from configs to the plan's file", "tables", "seconds", series)


def growth(points: list[tuple[float, float]]) -> str:
    """Return the exponents of fitted power laws, over all points and over those with at least `MANY` tables."""
    many = [point for point in points if point[0] >= MANY]
    last = f", from {MANY:,} on ^ {exponent(many):.2f}" if len(many) > 1 else ""
    return f": tables ^ {exponent(points):.2f}{last}"


def of_curve(tables: int) -> Case:
    """Return the case of one point of the curve. The tables fill half of the memory."""
    return lognormal(tables, 64, fill=0.5)


if __name__ == "__main__":
    main()
