"""Comparison of this planner with TorchRec's on random tables: both cost models price each plan.

    python benchmarks/planner_against.py PYTHON [--sets 14] [--tables 10 100] [--limit 300] [--keep FOLDER]

PYTHON has TorchRec 1.8.0. It plans each set with its defaults; this search plans it restricted to tilings that TorchRec
can express (even rows over all ranks or over a host's, columns no narrower than its 128, no grids), three times:

    own     for this library's runtime and cost model. Both plans are priced by this cost model ("here"), and by
            TorchRec's estimator ("there").
    its     for the machine and the runtime of TorchRec's estimator: bandwidths without fixed costs, and row splits that
            send a row for every bag (this library's send rows only for bags with an id in the piece). Priced by
            TorchRec's estimator.
    prices  for TorchRec's options at its estimator's prices, and its objective, the slowest rank's sum. This measures
            the search alone. Priced by TorchRec's estimator.

TorchRec's estimator models its own runtime. A plan that is fast because this library's row splits send less is slow
there, which is no statement about the search. "its" compares like with like; it uses no numbers of the estimator.
A ratio below 1 is a faster step of this planner. `--keep` stores TorchRec's plans, which take most of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from planner import (
    SHARDERS,
    ask_peer,
    by_peer,
    case_json,
    configs_of,
    plan_json,
    plan_of_peer,
    planner_of,
    priced,
)
from planner_cases import Case, lognormal

from tilerec.planner.cost.allowed import Allowed
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.option_amounts import OptionAmounts
from tilerec.planner.cost.options import problem_of
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.ways import Way
from tilerec.planner.cost.workload import Ints, Workload
from tilerec.planner.decision import Decision, _of_lowest_price
from tilerec.planner.plan_price import priced as priced_by_request
from tilerec.planner.search.instance import Instance
from tilerec.planner.search.solve import solve
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology

NARROWEST = 128
CHARGES = ("call", "call_peer", "step", "part", "replica", "row_sum")


class EveryBag(Workload):
    """Tables of a runtime whose row splits send a row for each bag, including bags without an id in the piece."""

    def present(self, share: Any, tables: Ints | None = None) -> tuple[Floats, Floats, Floats]:
        _, ids, _ = super().present(share, tables)
        bags = self.per_table(self.bags)
        return bags, ids, bags


def bare(topology: Topology) -> Topology:
    """Return the topology with bandwidths only, without fixed costs."""
    return replace(topology, speeds=replace(default_speeds(topology), **dict.fromkeys(CHARGES, 0.0)))


def searched(case: Case, *, own: bool) -> ShardingPlan:
    """Return this planner's plan, restricted to tilings that TorchRec can express.

    Args:
        own: plan for this library's runtime; if False, for the machine and runtime of TorchRec's estimator.
    """
    topology = case.topology() if own else bare(case.topology())
    request = planner_of(case, topology).request(configs_of(case), SHARDERS)
    work = (Workload if own else EveryBag)(request.works())
    model = Model(work, topology)
    allowed = Allowed(model, {}, NARROWEST, lower=False, together=())
    problem = problem_of(OptionAmounts(model, allowed, lower=False, pinned=False, even_room=True), None, None, None)
    instance = problem.instance
    width = instance.width.copy()
    for o, option in enumerate(problem.options):
        if option.way is Way.GRID or (option.way is Way.ROWS and option.width == 1):
            width[:, o] = 0
    instance = replace(instance, width=width, divisible=np.zeros_like(instance.divisible))
    found = Decision(request, {}, problem, instance, np.arange(instance.tables), solve(instance))
    if own:
        found = _of_lowest_price(replace(found, priced=priced_by_request(request, found.shardings())))
    return found.plan()


def at_prices(case: Case, options: list[dict[str, Any]]) -> dict[str, Any]:
    """Return this planner's plan at TorchRec's prices, in the JSON format of `planner_peer.py`.

    Args:
        options: options of all tables, as listed by `planner_peer.py`.
    """
    topology = case.topology()
    ranks, names = topology.world_size, [c.name for c in configs_of(case)]
    known = {(o["name"], o["type"]): o["shards"] for o in options}
    # Sharding types, and the number of ranks of each piece; 0: one piece per shard.
    widths = {"table_wise": 0, "column_wise": 0, "data_parallel": ranks, "row_wise": ranks}
    if topology.host_count > 1:
        widths["table_row_wise"] = len(topology.ranks_of(0))
    shape = (len(names), len(widths))
    width, pieces = np.zeros(shape, np.int64), np.ones(shape, np.int64)
    cost, memory = np.zeros((*shape, 1), np.int64), np.zeros((*shape, 1), np.int64)
    for t, name in enumerate(names):
        for o, (kind, on) in enumerate(widths.items()):
            shards = known.get((name, kind))
            if shards:
                width[t, o], pieces[t, o] = (on, 1) if on else (1, len(shards))
                cost[t, o, 0] = max(math.ceil(1e9 * shard[4]) for shard in shards)
                memory[t, o, 0] = max(shard[5] for shard in shards)
    found = solve(
        Instance(
            names=names,
            width=width,
            pieces=pieces,
            cost=cost,
            home=np.zeros_like(cost),
            memory=memory,
            cap=np.full((ranks, 1), topology.memory_cap),
            host_of=np.array([topology.host_of(rank) for rank in range(ranks)]),
        )
    )
    rows: dict[str, Any] = {}
    for t, name in enumerate(names):
        kind = list(widths)[int(found.option[t])]
        places: Sequence[int] = found.places[t]
        if kind == "table_row_wise":
            places = topology.ranks_of(places[0])
        elif widths[kind]:
            places = range(ranks)
        shards = [[*shard[:4], rank] for shard, rank in zip(known[name, kind], places, strict=True)]
        rows[name] = {"type": kind, "shards": shards}
    return rows


def sets(count: int, least: int, most: int) -> list[tuple[int, int, int]]:
    """Yield tables, ranks and seed of each random set."""
    rng = np.random.default_rng(11)
    sizes = np.exp(rng.uniform(math.log(least), math.log(most), count))
    return [(round(size), (8, 16)[i % 2], 100 + i) for i, size in enumerate(sizes.tolist())]


def peer_plan(python: str, case: Case, limit: float, kept: Path | None) -> dict[str, Any]:
    """Return TorchRec's plan, from the file `kept` if it exists."""
    if kept is not None and kept.is_file():
        return dict(json.loads(kept.read_text()))
    found = by_peer(python, case, limit)
    if kept is not None and "error" not in found:
        kept.write_text(json.dumps(found))
    return found


def kinds(tables: dict[str, Any]) -> str:
    """Return the number of tables of each sharding type as text, types as initials."""
    types = [row["type"] for row in tables.values()]
    short = {kind: "".join(word[0] for word in kind.split("_")).upper() for kind in types}
    return " ".join(f"{types.count(kind)} {short[kind]}" for kind in sorted(set(types)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python")
    parser.add_argument("--sets", type=int, default=14)
    parser.add_argument("--tables", type=int, nargs=2, default=(10, 100))
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = []
    requests: list[dict[str, Any]] = []
    lines: list[tuple[str, float]] = []
    for tables, ranks, seed in sets(given.sets, *given.tables):
        case = lognormal(tables, ranks, seed)
        name = f"{tables}-{ranks}-{seed}.json"
        theirs = peer_plan(given.python, case, given.limit, given.keep and given.keep / name)
        line = f"{tables:>6} {ranks:>5} |"
        if "error" in theirs:
            print(line, theirs["error"], flush=True)
            continue
        began = time.perf_counter()
        own = searched(case, own=True)
        line += f" {time.perf_counter() - began:>6.2f} s {theirs['seconds']:>7.2f} s |"
        plans = {"": theirs["plan"], "own": plan_json(own), "its": plan_json(searched(case, own=False))}
        converted = plan_of_peer(case, theirs["plan"], case.topology())
        lines.append((line, priced(case, own) / priced(case, converted)))
        requests.append({"case": case_json(case), "search": False, "plans": plans, "options": True})
        cases.append(case)
    found = ask_peer(given.python, [{**one, "plans": {}} for one in requests], given.limit)
    if not lines or "error" in found[0]:
        raise SystemExit(found[0]["error"] if found else "nothing to compare")
    for case, one, answer in zip(cases, requests, found, strict=True):
        one["options"] = False
        one["plans"]["prices"] = at_prices(case, answer["options"])
    found = ask_peer(given.python, requests, given.limit)
    print(
        "tables ranks |     ours  TorchRec |  own: here   there | its: there | prices: there | "
        "tables by type: own | its | prices | TorchRec"
    )
    ratios = []
    for (line, here), one, answer in zip(lines, requests, found, strict=True):
        rated = answer["ratings"]
        ratios.append((here, *(rated[name] / rated[""] for name in ("own", "its", "prices"))))
        types = " | ".join(kinds(one["plans"][name]) for name in ("own", "its", "prices", ""))
        print(f"{line} {as_text(ratios[-1])} | {types}")
    columns = list(zip(*ratios, strict=True))
    for name, row in (("mean", [sum(c) / len(c) for c in columns]), ("worst", [max(c) for c in columns])):
        print(f"{name:>12} | {'':>8} {'':>9} | {as_text(row)} |")


def as_text(row: Sequence[float]) -> str:
    return f"{row[0]:>10.3f} {row[1]:>7.3f} | {row[2]:>10.3f} | {row[3]:>13.3f}"


if __name__ == "__main__":
    main()
