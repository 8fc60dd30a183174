"""Small random instances for the tests of the search, as fixtures that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tilerec.planner.search.instance import Instance


def _small_instance(seed: int, divisible: bool = False) -> Instance:
    """2 to 6 tables, 2 to 4 ranks; half of them memory-tight; hosts that differ, links that are shared, charges.

    Every third has ranks that bear unlike parts of home.
    """
    rng = np.random.default_rng(seed)
    tables, ranks = int(rng.integers(2, 7)), int(rng.integers(2, 5))
    hosts = {2: [[0, 0], [0, 1]], 3: [[0, 0, 0], [0, 0, 1]], 4: [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]]}[ranks]
    host_of = np.array(hosts[int(rng.integers(len(hosts)))])
    stages, tiers = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    sizes = np.bincount(host_of)
    kinds: list[tuple[int, int, float]] = [(ranks, 1, 1.0), (1, 1, 1.0), (1, 2, 0.5), (1, 4, 0.25)]
    kinds += [(ranks, 1, 1 / ranks)]
    kinds += [(int(n), 1, 1 / n) for n in np.unique(sizes) if 1 < n < ranks]
    kinds += [(int(n), 2, 0.5 / n) for n in np.unique(sizes) if 1 < n < ranks]
    options = len(kinds) * tiers
    weight = np.exp(rng.normal(0, 1.2, tables))
    bulk = np.exp(rng.normal(0, 1.2, tables))
    width, pieces = np.zeros((tables, options), np.int64), np.zeros((tables, options), np.int64)
    cost, home = np.zeros((tables, options, stages), np.int64), np.zeros((tables, options, stages), np.int64)
    memory = np.zeros((tables, options, tiers), np.int64)
    mix = rng.random((tables, stages)) + 0.05
    for o in range(options):
        w, k, part = kinds[o % len(kinds)]
        tier = o // len(kinds)
        there = rng.random(tables) < (0.9 if o != 1 else 1.0)
        width[:, o], pieces[:, o] = np.where(there, w, 0), k
        dear = rng.uniform(0.9, 1.6, (tables, stages)) * (1.0 + 2.0 * tier)
        cost[:, o] = weight[:, None] * mix * part * dear * 1e6
        home[:, o] = weight[:, None] * rng.random((tables, stages)) * 5e4
        memory[:, o, tier] = bulk * part * 1e9
    tight = seed % 2 == 0
    total = float(bulk.sum()) * 1e9
    cap = np.full((ranks, tiers), int(total / ranks * (rng.uniform(1.05, 1.3) if tight else 4.0)), np.int64)
    host_cap = None
    if tiers == 2:
        cap[:, 1] = int(total)
        host_cap = np.full((len(sizes), 2), np.iinfo(np.int64).max)
        host_cap[:, 1] = int(total * 0.3)
    slow = np.full((ranks, stages), 1000, np.int64)
    if rng.random() < 0.4:
        slow[host_of == 0] = rng.integers(1000, 2000)
    reach = np.full((ranks, stages), 1000, np.int64)
    if seed % 3 == 1:
        reach[host_of == 0] = np.random.default_rng(seed).integers(0, 1000, stages)
    instance = Instance(
        [f"t{i}" for i in range(tables)],
        width,
        pieces,
        cost,
        home,
        memory,
        cap,
        host_of,
        uses=rng.random((tables, options, 2)) < 0.3,
        charge=rng.integers(0, 300_000, 2),
        shared=np.arange(stages) == 2,
        host_cap=host_cap,
        slow=slow,
        reach=reach,
        base_cost=rng.integers(0, 200_000, (ranks, stages)) * (rng.random() < 0.5),
        base_memory=np.zeros((ranks, tiers), np.int64),
        allowed=(rng.random((tables, ranks)) < 0.8) | (np.arange(ranks) == 0) if rng.random() < 0.3 else None,
        divisible=(width == ranks) & (np.arange(options) % len(kinds) == 4) if divisible else None,
    )
    # A third takes memory on every rank besides that of pieces: up to a fifth of a whole table's over all of them.
    at_home = rng.random((tables, options, tiers)) * (memory > 0) * (rng.random() < 1 / 3)
    held = at_home * bulk[:, None, None] * 1e9 / (5 * ranks)
    return replace(instance, home_memory=held.astype(np.int64))


def _planted_instance(tables: int, ranks: int, fill: float, seed: int, splits: bool = True) -> Instance:
    """Tables that fill every rank to `fill` of its memory in one arrangement that is known to exist.

    Each lies whole on one rank there; with `splits` it may also be cut in two or four.
    """
    rng = np.random.default_rng(seed)
    cap = 1_000_000_000
    counts = np.full(ranks, tables // ranks)
    counts[: tables % ranks] += 1
    sizes = []
    for n in counts.tolist():
        cuts = np.sort(rng.random(n - 1))
        parts = np.diff(np.concatenate([[0.0], cuts, [1.0]])) * 0.9 + 0.1 / n
        sizes.append(np.floor(parts * cap * fill).astype(np.int64))
    held = rng.permutation(np.concatenate(sizes))
    options = 3 if splits else 1
    k = np.array([1, 2, 4])[:options]
    weight = np.exp(rng.normal(0, 1, (tables, 1, 2))) * 1e8
    cost = (weight / k[None, :, None] * (1 + 0.1 * np.arange(options))[None, :, None]).astype(np.int64)
    return Instance(
        [f"t{i:04d}" for i in range(tables)],
        np.ones((tables, options), np.int64),
        np.tile(k, (tables, 1)),
        cost,
        np.zeros_like(cost),
        -(-held[:, None] // k)[:, :, None],
        np.full((ranks, 1), cap),
        np.zeros(ranks, np.int64),
    )


@pytest.fixture
def small_instance() -> Callable[..., Instance]:
    return _small_instance


@pytest.fixture
def planted_instance() -> Callable[..., Instance]:
    return _planted_instance
