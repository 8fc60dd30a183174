"""Whole steps: the cost of a step beside the work of its ids and rows, fitted to timed steps of small models.

A loop over one kernel measures the cost of a row. In a step, kernels find their caches full of other data, ranks wait
for each other at every collective, and Python runs in between. So steps of some small models are timed, and

    seconds = load x (predicted seconds of ids and rows) + sum over (step, part, call, replica, row_sum) of cost x count

is solved for the load and the five costs: least squares of the relative error, no number below 0. This is repeated for
several sizes of the processor's cache, and the best fit is the result.

Nouns
  shape  a model to time: tables of one size, and their placement on the ranks
  load   the time of work inside a step, relative to a loop of the same work
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.portable import Floats
from tilerec.planner.cost.price import price
from tilerec.planner.cost.workload import Reads, TableWork, Workload
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sharding.strategies import column_wise, data_parallel, row_wise, table_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, OptimizerSpec, RowWiseAdagrad
from tilerec.spec.speeds import PER_WIDTH, SINGLE, Speeds
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

FITTED = ("step", "part", "call", "replica", "row_sum")
_WORK = tuple(name for name in SINGLE if name not in (*FITTED, "call_peer"))
_LEAST_LOAD, _MOST_LOAD = 0.5, 4.0
_BATCHES = 3  # distinct batches of a shape
_CACHE_SIZES = 7  # sizes of the cache that are tried: all of it, a half, a quarter …


@dataclass(frozen=True)
class StepShape:
    """A model whose steps are timed.

    Args:
        kinds: placements of its tables, in turn: "whole", "rows", "columns", "copies".
        tables: number per rank. rows: of a table.
        columns: of a table; with "columns", of each block.
        ids_per_bag, bags: of the feature of each table, on each rank.
        rule: optimizer of all tables.
    """

    kinds: tuple[str, ...]
    tables: int
    rows: int
    columns: int
    ids_per_bag: int
    bags: int
    rule: OptimizerSpec

    def works(self, ranks: int) -> list[TableWork]:
        """Return the tables."""
        return [
            TableWork(
                f"t{t}",
                self.rows,
                self.columns * (ranks if self._kind(t) == "columns" else 1),
                optimizer=self.rule,
                reads=[Reads(self.bags, self.ids_per_bag)],
            )
            for t in range(self.tables * ranks)
        ]

    def _kind(self, t: int) -> str:
        return self.kinds[t % len(self.kinds)]

    def tilings(self, topology: Topology) -> list[Tiling]:
        """Return the tiling of each table."""
        size, whole = topology.world_size, 0
        made = []
        for t, work in enumerate(self.works(size)):
            table, kind = (work.name, work.rows, work.dim), self._kind(t)
            if kind == "whole":
                made.append(table_wise(*table, [whole % size], topology))
                whole += 1
            elif kind == "rows":
                made.append(row_wise(*table, None, topology))
            elif kind == "columns":
                made.append(column_wise(*table, range(size), topology))
            else:
                made.append(data_parallel(*table, None, topology))
        return made

    def work(self, topology: Topology, speeds: Speeds) -> float:
        """Return the predicted seconds of the ids and rows of a step."""
        return self._priced(topology, replace(speeds, **dict.fromkeys((*FITTED, "call_peer"), 0.0)))  # type: ignore[arg-type]

    def counts(self, topology: Topology, speeds: Speeds) -> list[float]:
        """Return the number of times that each of FITTED occurs in a step."""
        zeros = dict.fromkeys(SINGLE, 0.0) | dict.fromkeys(PER_WIDTH, (0.0,) * len(speeds.widths))
        none: Speeds = replace(speeds, **zeros)  # type: ignore[arg-type]
        return [self._priced(topology, replace(none, **{name: 1.0})) for name in FITTED]  # type: ignore[arg-type]

    def _priced(self, topology: Topology, speeds: Speeds) -> float:
        work = Workload(self.works(topology.world_size))
        return price(self.tilings(topology), Model(work, replace(topology, speeds=speeds))).seconds

    def ready(self, topology: Topology, device: torch.device, channels: list[Group]) -> Callable[[], None]:
        """Return a function that runs one step. The caller closes `channels` (batches, ids) afterwards."""
        group, routes = channels
        works = self.works(topology.world_size)
        module: Any = EmbeddingBagCollection(
            [EmbeddingBagConfig(w.rows, w.dim, w.name, feature_names=[w.name]) for w in works],
            device=torch.device("meta"),
        )
        apply_optimizer_in_backward(self.rule, module.parameters())
        tilings = dict(zip((w.name for w in works), self.tilings(topology), strict=True))
        fan_in = {w.name: float(self.ids_per_bag) for w in works}
        shard_collection(module, tilings, group, routes, topology, device=device, fan_in=fan_in)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        return _ShapeStep(self, works, module, group.rank, device)


class _ShapeStep:
    """One step of a shape, with the next of its batches in each call."""

    def __init__(self, shape: StepShape, works: list[TableWork], module: Any, rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(rank)
        count = len(works) * shape.bags
        self.names, self.module, self.turn = [w.name for w in works], module, 0
        self.lengths = torch.full((count,), shape.ids_per_bag, dtype=torch.int32, device=device)
        self.ids = [
            torch.randint(shape.rows, (count * shape.ids_per_bag,), generator=generator).to(device)
            for _ in range(_BATCHES)
        ]
        self.grad = torch.ones(shape.bags, sum(w.dim for w in works), device=device)

    def __call__(self) -> None:
        self.turn += 1
        batch = KeyedJaggedTensor(self.names, self.ids[self.turn % _BATCHES], lengths=self.lengths)
        self.module(batch).values().backward(self.grad)


_SGD, _ROWWISE = SGD(0.0), RowWiseAdagrad(0.0)
SHAPES = (
    StepShape(("whole",), 1, 1_000, 16, 1, 64, _SGD),
    StepShape(("whole",), 12, 20_000, 32, 1, 256, _SGD),
    StepShape(("whole",), 3, 100_000, 64, 10, 512, _SGD),
    StepShape(("whole",), 4, 100_000, 128, 10, 2048, _ROWWISE),
    StepShape(("rows",), 8, 20_000, 32, 1, 256, _SGD),
    StepShape(("rows",), 4, 50_000, 64, 5, 1024, _ROWWISE),
    StepShape(("rows",), 6, 100_000, 64, 10, 2048, _SGD),
    StepShape(("columns",), 2, 20_000, 32, 2, 512, _ROWWISE),
    StepShape(("columns",), 8, 20_000, 16, 1, 256, _ROWWISE),
    StepShape(("copies",), 2, 5_000, 32, 1, 256, _SGD),
    StepShape(("copies",), 8, 20_000, 32, 2, 256, _ROWWISE),
    StepShape(("whole", "copies"), 4, 20_000, 64, 5, 512, _SGD),
    StepShape(("rows", "whole", "columns", "copies"), 2, 50_000, 64, 2, 256, _SGD),
    StepShape(("rows", "whole", "columns", "copies"), 4, 50_000, 64, 5, 1024, _ROWWISE),
)


def fitted(group: Group, topology: Topology, speeds: Speeds, device: torch.device, rounds: int, steps: int) -> Speeds:
    """Return `speeds` with loads applied, the costs of FITTED, and the cache size that fits best. Collective.

    Args:
        rounds, steps: each round runs so many steps of every shape.
    """
    shapes = [s for s in SHAPES if group.size > 1 or s.kinds == ("whole",)]
    taken = _timed(group, topology, device, shapes, rounds, steps)
    # Only a part of the processor's cache keeps rows until the next step, since other data pass through it.
    caches = [replace(speeds, cache=speeds.cache >> halved) for halved in range(_CACHE_SIZES)]
    counts = [shape.counts(topology, speeds) for shape in shapes]
    fits = [
        _fit(own, np.array([[s.work(topology, own), *n] for s, n in zip(shapes, counts, strict=True)]), taken)
        for own in caches
    ]
    return min(fits, key=lambda fit: fit[0])[1]


def _fit(speeds: Speeds, amounts: Floats, taken: Floats) -> tuple[float, Speeds]:
    """Fit one size of the cache; return the sum of squared relative errors, and the speeds.

    Args:
        amounts: [shapes, 1 + FITTED] predicted seconds of ids and rows, then counts. taken: [shapes] measured seconds.
    """
    known = amounts.sum(0) > 0
    found = np.zeros(amounts.shape[1])
    found[known] = _least_squares(amounts[:, known] / taken[:, None])
    found[0] = np.clip(found[0], _LEAST_LOAD, _MOST_LOAD)
    load = float(found[0])
    rates: dict[str, Any] = {n: tuple(load * r for r in getattr(speeds, n)) for n in PER_WIDTH}
    rates |= {name: load * getattr(speeds, name) for name in _WORK}
    own = replace(speeds, **rates, **dict(zip(FITTED, found[1:].tolist(), strict=True)))
    return float(((amounts @ found / taken - 1.0) ** 2).sum()), own


def _timed(
    group: Group,
    topology: Topology,
    device: torch.device,
    shapes: Sequence[StepShape],
    rounds: int,
    steps: int,
) -> Floats:
    """Return [shapes] seconds of a step on the slowest rank: the median of a round, the least of all rounds."""
    channels = [group.split("calibrate"), group.split("calibrate, ids")]
    ready = [shape.ready(topology, device, channels) for shape in shapes]
    mine: list[list[float]] = [[] for _ in shapes]
    for _ in range(rounds):
        for own, step in zip(mine, ready, strict=True):
            for _ in range(_BATCHES):
                step()
            for _ in range(steps):
                wait(device)
                group.barrier()
                before = time.perf_counter()
                step()
                wait(device)
                own.append(time.perf_counter() - before)
    everyone: Any = group.all_gather_object(mine)
    group.barrier()
    for channel in channels:
        channel.close()
    slowest = np.array(everyone).max(axis=0).reshape(len(shapes), rounds, steps)
    least: Floats = np.median(slowest, axis=2).min(axis=1)
    return least


def wait(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _least_squares(lines: Floats) -> Floats:
    """Return x >= 0 that minimizes |lines x - 1|: unknowns that become negative are set to 0, the lowest first."""
    kept = np.arange(lines.shape[1])
    while True:
        scale = lines[:, kept].max(axis=0)
        found = np.linalg.lstsq(lines[:, kept] / scale, np.ones(len(lines)), rcond=None)[0] / scale
        if found.min() >= 0 or len(kept) == 1:
            break
        kept = np.delete(kept, int((found * scale).argmin()))
    out = np.zeros(lines.shape[1])
    out[kept] = np.maximum(found, 0.0)
    return out
