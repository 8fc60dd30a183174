"""The planner's search on made-up tables: how long, how far from the bound, how much memory.

    python benchmarks/planner_search.py [--cases NAME ...] [--repeat 1]

The costs come from simple formulas (bytes over bandwidth) with five stages: lookup and update at the owner, rows over
the links inside a host, rows over the host's network link, combining at home. The formulas of the library's own cost
model are in docs/planner-cost.md; here only the shape of the numbers matters.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilerec.planner.instance import Instance, Ints
from tilerec.planner.search import solve

Array = np.ndarray

# Bytes per second.
MEMORY = 2.0e12
LINK = 200e9
NETWORK = 25e9  # of a rank: a host's link is shared by its ranks
PS = 1e12
BATCH = 1024
SPLITS = (2, 4, 8, 16)
CRITEO = (
    *(
        40_000_000,
        39_060,
        17_295,
        7_424,
        20_265,
        3,
        7_122,
        1_543,
        63,
        40_000_000,
        3_067_956,
        405_282,
        10,
        2_209,
    ),
    *(11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)


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
    """Tables of `rows` × `dim` with `bag` ids per bag, cut in all the usual ways.

    `dense`: each part of a row split sends every bag, as a reduce-scatter does, instead of those it has ids of.
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
        """`ids` and `bags` that a rank with a piece looks up and sends, of width `d`."""
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
    """With caps such that the tables, each in one copy, fill that share of them."""
    held = instance.memory[:, :, 0] * instance.pieces * instance.width
    least = int(np.where(instance.there, held, held.max()).min(1).sum())
    return replace(instance, cap=np.full_like(instance.cap, int(least / share / instance.ranks)))


def lognormal(tables: int, ranks: int, seed: int = 0, per_host: int = 8, **more: object) -> Instance:
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


CASES: dict[str, Callable[[], Instance]] = {
    "500 x 8": small500,
    "criteo x 8": lambda: criteo(8),
    "criteo x 128": lambda: criteo(128),
    "criteo x 8, dense": lambda: criteo(8, dense=True),
    "criteo x 128, dense": lambda: criteo(128, dense=True),
    "criteo x 8 uneven": lambda: criteo(8, True),
    "criteo x 128 uneven": lambda: criteo(128, True),
    "856 x 128": lambda: lognormal(856, 128),
    "100 x 128": lambda: lognormal(100, 128, 1),
    "300 x 128": lambda: lognormal(300, 128, 1),
    "10k x 1024, 30%": lambda: fill_to(lognormal(10_000, 1024), 0.30),
    "10k x 1024, 86%": lambda: fill_to(lognormal(10_000, 1024), 0.86),
    "100k x 4096": lambda: fill_to(lognormal(100_000, 4096), 0.30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--effort", type=int, default=1)
    args = parser.parse_args()
    print("| case | build s | solve s | CPU s | cost ms | bound ms | gap % | peak MiB |\n" + "|---" * 8 + "|")
    for name in args.cases:
        start = time.perf_counter()
        instance = CASES[name]()
        built = time.perf_counter() - start
        wall, busy = [], []
        for _ in range(args.repeat):
            start, cpu = time.perf_counter(), time.process_time()
            found = solve(instance, effort=args.effort)
            wall.append(time.perf_counter() - start)
            busy.append(time.process_time() - cpu)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        middle = args.repeat // 2
        print(
            f"| {name} | {built:.2f} | {sorted(wall)[middle]:.3f} | {sorted(busy)[middle]:.3f} | "
            f"{found.cost / 1e9:.4f} | {found.bound / 1e9:.4f} | {100 * found.gap:.2f} | {peak:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
