"""Benchmark of the planner's search: time, gap to its bound, memory, and growth with the number of tables.

    python benchmarks/planner_search.py [--cases NAME ...] [--repeat 3]       the cases of planner_cases.py
    python benchmarks/planner_search.py --scaling [--csv FILE]               time against tables, and the exponent
    python benchmarks/planner_search.py --made-up                            instances of simpler costs

Times are processor seconds of one process, the least of `--repeat` runs. The parts are: making the tables' records,
building the instance (`options.build`), the search (`solve`), and writing the plan (a checked tiling for each table).
Each case runs in a separate process, so that the peak memory belongs to this case (with about 230 MiB of libraries).

The made-up instances have simple formulas (bytes over bandwidth) with five stages: lookup and update at the owner, rows
over the links inside a host, rows over the host's network link, and combining at home. They vary parameters that the
library's cost model (docs/planner-cost.md) does not: dense exchanges, uneven splits.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from planner_cases import CASES, CRITEO, Case, lognormal

from tilerec.planner.cost.options import build
from tilerec.planner.search.instance import Instance, Ints
from tilerec.planner.search.solve import solve

Array = np.ndarray

# Bytes per second.
MEMORY = 2.0e12
LINK = 200e9
NETWORK = 25e9  # per rank; the ranks of a host share its link
PS = 1e12
BATCH = 1024
SPLITS = (2, 4, 8, 16)
SCALING = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


def instance_of(
    rows: Ints,
    dim: Ints,
    bag: np.ndarray,
    ranks: int,
    per_host: int = 8,
    cap: int = 80 * 2**30,
    divisible: bool = False,
    batch: int = BATCH,
    dense: bool = False,
) -> Instance:
    """Return an instance for tables of `rows` × `dim` with `bag` ids per bag, with all the usual options.

    `dense`: each piece of a row split sends every bag, as in a reduce-scatter; else only bags with an id in it.
    """
    hosts = max(ranks // per_host, 1)
    size = ranks // hosts
    tables = len(rows)
    rows_f, dim_f = rows.astype(float), dim.astype(float)
    whole = rows_f * dim_f * 8  # weights and an optimizer's state
    samples = float(batch * ranks)
    columns: list[tuple[Array, ...]] = []

    def option(
        there: Array, width: int, pieces: int, ids: Array, bags: Array, d: Array, mem: Array, home_bags: Array,
        replicated: bool = False,
    ) -> None:  # fmt: skip
        """Add an option; a rank with a piece looks up `ids` and sends `bags`, of width `d`."""
        # A row takes at least 64 bytes' worth of time.
        lookup = ids * np.maximum(d * 4, 64) / MEMORY
        if replicated:
            distinct = np.minimum(rows_f, samples * bag) * dim_f * 4
            inside, across = 2 * distinct / LINK, 2 * distinct / NETWORK * (hosts > 1)
        else:
            inside = 2 * bags * d * 4 * (size - 1) / size / LINK + ids * 4 / LINK
            across = (2 * bags * d * 4 + ids * 4) * (hosts - 1) / hosts / NETWORK
        cost = np.stack([lookup, 2.5 * lookup, inside, across, np.zeros(tables)], 1)
        home = np.zeros((tables, 5))
        home[:, 4] = home_bags * dim_f * 4 * 3 / MEMORY
        columns.append((np.where(there, width, 0), np.full(tables, pieces), cost, home, mem))

    yes = np.ones(tables, bool)
    zero = np.zeros(tables)
    ids = samples * bag
    per = samples * np.ones(tables)
    option(yes, ranks, 1, batch * bag, zero, dim_f, whole * 1.5, zero, replicated=True)
    if ranks > 1:
        option(yes, 1, 1, ids, per, dim_f, whole, per / ranks)
        for k in (2, 4, 8, 16, 32):
            if k <= ranks:
                option(dim % (4 * k) == 0, 1, k, ids, per, dim_f / k, whole / k, per / ranks)
        for k in (*SPLITS, ranks):
            if k <= ranks and (k == ranks or k < ranks):
                bags = per if dense else samples * (1 - (1 - 1 / k) ** bag)
                home = per / ranks * np.minimum(k, bag)
                wide = k == ranks
                option(rows >= k, k if wide else 1, 1 if wide else k, ids / k, bags, dim_f, whole / k, home)
        if hosts > 1:
            bags = per if dense else samples * (1 - (1 - 1 / size) ** bag)
            for k in (1, 2, 4, 8):
                option(
                    (rows >= size) & (dim % (4 * k) == 0), size, k, ids / size, bags * 0.5 + samples / size * 0.5,
                    dim_f / k, whole / size / k, per / ranks,
                )  # fmt: skip
    width = np.stack([c[0] for c in columns], 1).astype(np.int64)
    pieces = np.stack([c[1] for c in columns], 1).astype(np.int64)
    cost = np.stack([np.ceil(c[2] * PS) for c in columns], 1).astype(np.int64)
    home = np.stack([np.ceil(c[3] * PS) for c in columns], 1).astype(np.int64)
    memory = np.stack([np.ceil(c[4]) for c in columns], 1).astype(np.int64)[:, :, None]
    row_split = np.zeros(width.shape, bool)
    if divisible and ranks > 1:
        row_split = width == ranks
        row_split[:, 0] = False
    return Instance(
        [f"t{i:06d}" for i in range(tables)],
        width,
        pieces,
        cost,
        home,
        memory,
        np.full((ranks, 1), cap, np.int64),
        np.repeat(np.arange(hosts), size),
        shared=np.array([False, False, False, True, False]),
        divisible=row_split,
    )


def fill_to(instance: Instance, share: float) -> Instance:
    """Return the instance with caps of which the tables, each in one copy, fill the given share."""
    held = instance.memory[:, :, 0] * instance.pieces * instance.width
    least = int(np.where(instance.there, held, held.max()).min(1).sum())
    return replace(instance, cap=np.full_like(instance.cap, int(least / share / instance.ranks)))


def _lognormal(tables: int, ranks: int, seed: int = 0, per_host: int = 8, **more: object) -> Instance:
    rng = np.random.default_rng(seed)
    rows = np.clip(np.exp(rng.normal(11, 2.6, tables)), 10, 5e8).astype(np.int64)
    dim = rng.choice([16, 32, 64, 128, 256], tables, p=[0.15, 0.2, 0.35, 0.2, 0.1]).astype(np.int64)
    bag = np.clip(np.round(np.exp(rng.normal(1.2, 1.2, tables))), 1, 200)
    return instance_of(rows, dim, bag, ranks, per_host, **more)  # type: ignore[arg-type]


def small500() -> Instance:
    rng = np.random.default_rng(0)
    return instance_of(rng.integers(2, 1000, 500), rng.choice([4, 8, 16], 500), np.ones(500), 8)


def criteo(ranks: int, divisible: bool = False, dense: bool = False) -> Instance:
    rows = np.array(CRITEO, np.int64)
    dim, cap = np.full(26, 128, np.int64), 60 * 2**30
    return instance_of(rows, dim, np.ones(26), ranks, cap=cap, divisible=divisible, dense=dense)


MADE_UP: dict[str, Callable[[], Instance]] = {
    "500 x 8": small500,
    "criteo x 8": lambda: criteo(8),
    "criteo x 128": lambda: criteo(128),
    "criteo x 8, dense": lambda: criteo(8, dense=True),
    "criteo x 128, dense": lambda: criteo(128, dense=True),
    "criteo x 8 uneven": lambda: criteo(8, True),
    "criteo x 128 uneven": lambda: criteo(128, True),
    "856 x 128": lambda: _lognormal(856, 128),
    "100 x 128": lambda: _lognormal(100, 128, 1),
    "300 x 128": lambda: _lognormal(300, 128, 1),
    "10k x 1024, 30%": lambda: fill_to(_lognormal(10_000, 1024), 0.30),
    "10k x 1024, 86%": lambda: fill_to(_lognormal(10_000, 1024), 0.86),
    "100k x 4096": lambda: fill_to(_lognormal(100_000, 4096), 0.30),
}


def measured(name: str, case: Case, repeat: int, effort: int) -> dict[str, Any]:
    """Return the seconds of every part, and figures of the result."""
    topology = case.topology()
    seconds: list[list[float]] = []
    for _ in range(repeat):
        clock = [time.process_time()]
        tables = case.tables()
        clock.append(time.process_time())
        problem = build(tables, topology)
        clock.append(time.process_time())
        found = solve(problem.instance, effort=effort)
        clock.append(time.process_time())
        for t in range(len(found.option)):
            problem.sharding(t, int(found.option[t]), found.places[t], found.rows.get(t))
        clock.append(time.process_time())
        seconds.append(np.diff(clock).tolist())
    read, built, solved, written = (min(column) for column in zip(*seconds, strict=True))
    return {
        "case": name,
        "tables": problem.instance.tables,
        "ranks": problem.instance.ranks,
        "read s": read,
        "build s": built,
        "solve s": solved,
        "write s": written,
        "all s": min(map(sum, seconds)),
        "cost ms": found.cost / 1e9,
        "gap %": 100 * found.gap if found.bound else float("nan"),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _alone(name: str, case: Case, repeat: int, effort: int) -> dict[str, Any]:
    """Run `measured` in a separate process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (name, case, repeat, effort))


def _row(values: dict[str, Any]) -> str:
    texts = [f"{v:.3f}" if isinstance(v, float) and v < 10 else f"{v:.1f}" if isinstance(v, float) else str(v)
             for v in values.values()]  # fmt: skip
    return "| " + " | ".join(texts) + " |"


def _head(columns: list[str]) -> str:
    return "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"


def run_cases(names: list[str], repeat: int, effort: int) -> None:
    for i, name in enumerate(names):
        found = _alone(name, CASES[name](), repeat, effort)
        if not i:
            print(_head(list(found)))
        print(_row(found), flush=True)


def run_scaling(path: str | None, repeat: int, effort: int) -> None:
    """Measure log-normal tables, with one rank per 10 tables (hosts of 8 ranks) and memory 30 % full."""
    rows = []
    for tables in SCALING:
        ranks = max(tables // 10 // 8 * 8, 8)
        case = lognormal(tables, ranks, fill=0.30)
        rows.append(_alone(f"{tables} x {ranks}", case, repeat if tables <= 10_000 else 1, effort))
        if len(rows) == 1:
            print(_head(list(rows[0])))
        print(_row(rows[-1]), flush=True)
    if path is not None:
        with open(path, "w", newline="") as file:
            out = csv.DictWriter(file, list(rows[0]))
            out.writeheader()
            out.writerows(rows)
    x = np.log10([row["tables"] for row in rows])
    for part in ("build s", "solve s", "write s", "all s"):
        y = np.log10([row[part] for row in rows])
        every, large = np.polyfit(x, y, 1)[0], np.polyfit(x[-4:], y[-4:], 1)[0]
        print(f"{part[:-2]:6s} ~ tables^{every:.2f} (from {SCALING[-4]:,} tables on: ^{large:.2f})")
    # One line of the plot for each size, 20 columns for a factor of ten.
    low = min(float(np.log10(row["all s"])) for row in rows)
    for row in rows:
        at = round((float(np.log10(row["all s"])) - low) * 20)
        print(f"{row['tables']:>8,} |{' ' * at}* {row['all s']:.2f} s")


def run_made_up(names: list[str], repeat: int, effort: int) -> None:
    print(_head(["case", "solve s", "cost ms", "gap %"]))
    for name in names:
        instance = MADE_UP[name]()
        best = float("inf")
        for _ in range(repeat):
            start = time.process_time()
            found = solve(instance, effort=effort)
            best = min(best, time.process_time() - start)
        print(f"| {name} | {best:.3f} | {found.cost / 1e9:.4f} | {100 * found.gap:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--effort", type=int, default=1)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--csv", help="where --scaling writes its table")
    parser.add_argument("--made-up", action="store_true")
    args = parser.parse_args()
    if args.scaling:
        run_scaling(args.csv, args.repeat, args.effort)
    elif args.made_up:
        run_made_up(args.cases or list(MADE_UP), args.repeat, args.effort)
    else:
        run_cases(args.cases or list(CASES), args.repeat, args.effort)


if __name__ == "__main__":
    main()
