"""2D parallelism: bytes and time of a step in every layout of 4 ranks, and the cost model's projection to thousands.

    python benchmarks/two_d.py [--quick] [--no-projection] [--only-projection]

Measured: 4 gloo processes with one thread each on this machine; row-wise tables under row-wise Adagrad, ids by a power
law; forward, backward, update, and the average if it is due. Layouts are replicas x shards. They take turns in
short rounds over the same batches. A time is the median over rounds of the slowest rank's mean step. Before anything is
timed, weights after three steps are compared with the unsharded module: exact layouts, and averaged ones (SGD, every
step) too. Bytes are those that a rank sends to others, mean over ranks: in its sharding group (ids, rows, gradients),
and to its replicas. All "links" are this machine's memory, so only the bytes apply to other machines.

Projected (not measured): tables of a large model on 8-GPU hosts, priced by the planner's cost model with its default
speeds of GPUs (docs/planner-cost.md). One dimension: a plan over all W GPUs. Two: a plan of one sharding group. Its
step is extended by the bytes that a rank sends to its replicas, H of them on its host, over the links that they cross:

    exact     U(G) (4 D + 4)                       rows touched by a group in a step, from each replica to each:
              times H - 1 inside the host, times R - H over the network
    average   2 (R - 1) / R U(W N) (4 D + 4) / N   rings over weights and moment of all rows touched in N steps:
              inside the host, and one H-th of it over the network, where H rings share the links of H GPUs (as NCCL's)

U(k ranks' ids): distinct rows, ids uniform. Nothing overlaps. This is a disadvantage for 2D, whose averaging runs in
parallel with the next batch's routing.

Legend: W ranks, G of a sharding group, R replicas, H of them on a host, U distinct rows, D columns, N steps from
average to average.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from lookup import machine  # noqa: E402

from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.optim.attach import apply_optimizer_in_backward  # noqa: E402
from tilerec.parallel.full_state import full_state_dict  # noqa: E402
from tilerec.parallel.two_d.dmp_collection import DMPCollection  # noqa: E402
from tilerec.planner import EmbeddingShardingPlanner, ParameterConstraints, row_wise  # noqa: E402
from tilerec.sharding.replicas import MOST_COPIES  # noqa: E402
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor  # noqa: E402
from tilerec.spec.optimizer import SGD, OptimizerSpec, RowWiseAdagrad  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig  # noqa: E402
from tilerec.spec.topology import Topology  # noqa: E402
from tilerec.testing.batches import concat_batches, random_batch  # noqa: E402
from tilerec.testing.ranks import Ranks  # noqa: E402

RANKS = 4
REPLICA_CALLS = "replica"


@dataclass(frozen=True)
class Size:
    """Sizes of the measured tables, batches and rounds."""

    tables: int
    rows: int
    dim: int
    batch: int
    ids: float
    rounds: int
    steps: int  # of a round


FULL = Size(8, 100_000, 64, 512, 10.0, 9, 16)
QUICK = Size(3, 5_000, 16, 64, 4.0, 3, 16)


@dataclass(frozen=True)
class Layout:
    """Replicas x shards."""

    group_size: int
    sync: str
    interval: int | None = None

    def __str__(self) -> str:
        shape = f"{RANKS // self.group_size} x {self.group_size}"
        return f"{shape}  {self.sync}" + (f" every {self.interval}" if self.interval else "")


LAYOUTS = (
    Layout(4, "exact"),
    Layout(2, "exact"),
    Layout(2, "average", 1),
    Layout(2, "average", 4),
    Layout(2, "average", 16),
    Layout(1, "exact"),
    Layout(1, "average", 1),
    Layout(1, "average", 4),
    Layout(1, "average", 16),
)


class Model(nn.Module):
    """Tables alone, with a loss that has gradients of all sizes."""

    def __init__(self, size: Size, spec: OptimizerSpec) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(size.rows, size.dim, f"t{t}", feature_names=[f"f{t}"]) for t in range(size.tables)]
        )
        apply_optimizer_in_backward(spec, list(self.ebc.parameters()))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return (self.ebc(features).values() + 1.0).square().mean(dim=1).sum()


def batch(size: Size, rank: int, step: int) -> KeyedJaggedTensor:
    keys = [f"f{t}" for t in range(size.tables)]
    return random_batch(keys, size.rows, size.batch, mean_length=size.ids, exponent=1.05, seed=1000 * step + rank)


def wrapped(size: Size, spec: OptimizerSpec, layout: Layout) -> DMPCollection:
    return DMPCollection(
        Model(size, spec), "cpu", {"ebc": row_wise()}, RANKS, layout.group_size,
        sync=layout.sync, sync_interval=layout.interval,
    )  # fmt: skip


def check(size: Size) -> float:
    """Return the largest deviation from the unsharded module after three steps, over layouts that equal it."""
    rank, worst = dist.get_rank(), 0.0
    for spec, layouts in (
        (RowWiseAdagrad(lr=0.05), [layout for layout in LAYOUTS if layout.sync == "exact"]),
        (SGD(lr=0.05), [layout for layout in LAYOUTS if layout.interval == 1]),
    ):
        whole = Model(size, spec)
        for step in range(3):
            whole(concat_batches([batch(size, peer, step) for peer in range(RANKS)])).backward()
        want = whole.state_dict()
        for layout in layouts:
            dmp = wrapped(size, spec, layout)
            for step in range(3):
                (dmp(batch(size, rank, step)) * RANKS).backward()
            dmp.sync()
            got = full_state_dict(dmp)
            worst = max([worst, *(float((got[name] - value).abs().max()) for name, value in want.items())])
            if worst > 1e-4:
                raise AssertionError(f"{layout}: off by {worst}; nothing is timed")
    return worst


@dataclass(frozen=True)
class Measured:
    """Results of one layout on one rank."""

    seconds: list[float]  # of each round, a step
    group_bytes: float  # of a step, to the sharding group
    replica_bytes: float


def measure(size: Size) -> list[Measured]:
    rank = dist.get_rank()
    spec = RowWiseAdagrad(lr=0.05)
    models = [wrapped(size, spec, layout) for layout in LAYOUTS]
    batches = [batch(size, rank, step) for step in range(size.steps)]
    times: list[list[float]] = [[] for _ in LAYOUTS]
    sent = [(0.0, 0.0)] * len(LAYOUTS)
    for turn in range(size.rounds + 1):  # the first one warms up
        for i, dmp in enumerate(models):
            dmp.traffic().reset()
            dist.barrier()
            start = time.perf_counter()
            for features in batches:
                dmp(features).backward()
            if LAYOUTS[i].interval:  # a round ends with the average that its last steps need
                dmp.sync()
            if turn:
                times[i].append((time.perf_counter() - start) / size.steps)
            lines = [(line.name.startswith(REPLICA_CALLS), line.total) for line in dmp.traffic()]
            sent[i] = tuple(sum(n for mine, n in lines if mine == which) / size.steps for which in (False, True))
    return [Measured(own, *pair) for own, pair in zip(times, sent, strict=True)]


def print_measured(size: Size) -> None:
    with Ranks(RANKS, timeout_s=600) as ranks:
        worst = max(ranks.run(check, size))
        found = ranks.run(measure, size)
    print(
        f"{RANKS} ranks, {size.tables} tables of {size.rows:,} x {size.dim}, {size.batch} samples a rank, {size.ids:g} "
        f"ids a bag, power law 1.05; largest deviation from unsharded before timing {worst:.1e}\n"
    )
    print(f"{'replicas x shards':24} {'ms / step':>10} {'MB to group':>12} {'MB to replicas':>15}")
    for i, layout in enumerate(LAYOUTS):
        own = [rank[i] for rank in found]
        slowest = [max(rounds) for rounds in zip(*(m.seconds for m in own), strict=True)]
        group, replicas = (
            statistics.mean(getattr(m, name) for m in own) / 1e6 for name in ("group_bytes", "replica_bytes")
        )
        print(f"{layout!s:24} {1e3 * statistics.median(slowest):10.2f} {group:12.3f} {replicas:15.3f}")


# ---------------------------------------------------------------------------------------------------- projected

SMALLEST, HOST, BATCH = 256, 8, 1024
WORLDS = ((256, 256), (512, 256), (1024, 256), (2048, 256), (4096, 512), (4096, 256))
"""GPUs, and those of a sharding group. The last one's 16 replicas do not fit on a host."""
EVERY = (1, 16)


def large_model() -> tuple[list[EmbeddingBagConfig], dict[str, ParameterConstraints], list[float]]:
    """Make 120 tables, 3.3 TB: rows from 100,000 to 400 million, 64 to 256 columns, 1 to 20 ids a bag."""
    configs, limits, ids = [], {}, []
    for t in range(120):
        rows, dim = int(10 ** (5 + 3.6 * ((37 * t) % 120) / 119)), (64, 128, 256)[t % 3]
        each = float(1 + (13 * t) % 20)
        configs.append(EmbeddingBagConfig(rows, dim, f"t{t}", feature_names=[f"f{t}"]))
        limits[f"t{t}"] = ParameterConstraints(pooling_factors=[each])
        ids.append(each)
    return configs, limits, ids


def planned(ranks: int, plan_for: list[EmbeddingBagConfig], limits: dict[str, ParameterConstraints]) -> Any:
    topology = Topology(ranks, "cuda", local_world_size=HOST, hbm_cap=72 * 2**30)
    module = EmbeddingBagCollection(plan_for, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.05), list(module.parameters()))
    return EmbeddingShardingPlanner(topology, BATCH, constraints=limits).plan(module)


def replica_seconds(
    configs: list[EmbeddingBagConfig], ids: list[float], group: int, replicas: int, every: int | None
) -> float:
    """Return the seconds of a step for the messages between replicas; `every=None`: exact."""
    if replicas == 1:
        return 0.0
    topology = Topology(group * replicas, "cuda", local_world_size=HOST)
    inside, outside = 1000.0 * topology.intra_host_bw, 1000.0 * topology.inter_host_bw
    here = min(replicas, HOST)  # replicas are neighbours
    steps = every or 1

    def touched(ranks: int) -> float:
        """Return the bytes of a rank's rows that so many ranks' batches touch; rows are spread over the group."""
        total = 0.0
        for config, each in zip(configs, ids, strict=True):
            drawn = each * BATCH * ranks * steps
            distinct = config.num_embeddings * -math.expm1(-drawn / config.num_embeddings)
            total += distinct / group * (4 * config.embedding_dim + 4) / steps
        return total

    if every is None:
        # Copies for each other replica, or shares: rows to the replicas that add them up, and the sums to all.
        to_each = touched(group)
        if replicas > MOST_COPIES:
            to_each = (touched(group) + touched(group * replicas)) / replicas
        return to_each * ((here - 1) / inside + (replicas - here) / outside)
    ring = 2 * (replicas - 1) / replicas * touched(group * replicas)
    return ring / inside + (ring / here / outside if replicas > here else 0.0)


def print_projection() -> None:
    configs, limits, ids = large_model()
    cells = sum(config.num_embeddings * config.embedding_dim for config in configs)
    print(
        f"\nPROJECTED by the cost model with default speeds of GPUs; nothing below is measured. {len(configs)} tables, "
        f"{4 * cells / 1e12:.1f} TB, {BATCH} samples a GPU, {HOST} GPUs a host; milliseconds of the tables' step, and "
        f"samples a second and GPU against {SMALLEST} GPUs\n"
    )
    heads = ["GPUs", "1D", "", "R x G", "exact", ""]
    heads += [word for n in EVERY for word in (f"avg {n}", "")]
    print("".join(f"{head:>10}" for head in heads))
    costs: dict[int, float] = {}

    def cost(ranks: int) -> float:
        if ranks not in costs:
            costs[ranks] = planned(ranks, configs, limits).report.cost_s
        return costs[ranks]

    base = cost(SMALLEST)
    for world, group in WORLDS:
        line = [
            f"{world:,}",
            f"{1e3 * cost(world):.1f}",
            f"{base / cost(world):.0%}",
            f"{world // group} x {group}",
        ]
        for every in (None, *EVERY):
            two = cost(group) + replica_seconds(configs, ids, group, world // group, every)
            line += [f"{1e3 * two:.1f}", f"{base / two:.0%}"]
        print("".join(f"{cell:>10}" for cell in line), flush=True)
    print(
        '\nThe paper (abstract of arXiv 2508.03854) reports "nearly linear training speed scaling up to 4K GPUs": of '
        "whole models, with their dense parts and overlap, on its machines. Other publications: docs/two-d.md."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small tables, few rounds")
    parser.add_argument("--no-projection", action="store_true", help="measure only")
    parser.add_argument("--only-projection", action="store_true", help="measure nothing")
    args = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}")
    if not args.only_projection:
        print_measured(QUICK if args.quick else FULL)
    if not args.no_projection:
        print_projection()


if __name__ == "__main__":
    main()
