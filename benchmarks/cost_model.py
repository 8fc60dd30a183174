"""Compare the planner's cost model with measurements: predicted and measured seconds of a step, over many plans.

    python benchmarks/cost_model.py [--plans 36] [--ranks 2] [--topology topology.json] [--stages] [--csv FILE]

Sets of tables and plans are drawn at random with a fixed seed: dims 8 to 256, 1 to 20 ids per bag, tables of 1,000 to
400,000 rows, SGD, row-wise Adagrad or Adam. A third of the plans have one sharding type for all tables, the others mix
them. Each is run for some steps on 2 ranks with one thread each over gloo, in several passes over all plans, so that a
slow minute does not affect one plan alone. A measured time is the median step (the slower rank counts), the least over
passes. Predicted times come from `planner/cost/price.py` with the speeds that `tilerec calibrate` measured just before
(or those of --topology). Output: every plan, Spearman's rank correlation, and the median and the 90th percentile of
|predicted / measured - 1|.

--ranks 4: more ranks than two cores can run at once. A measured time is then composed. For every stage, it takes the
median seconds that each rank's thread is on a processor, and counts the slowest rank. It adds all-to-alls of the same
bytes, timed by themselves (four processes on two cores). Speeds of the work are still those of two ranks, which have a
core each. Bytes and calls between ranks cost as much as bare all-to-alls of the four.

--stages: sums over plans of the least seconds of each part, predicted and measured (clocks around ops cost a little).
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from tilerec.comms.process import ProcessGroupComms  # noqa: E402
from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.optim.attach import apply_optimizer_in_backward  # noqa: E402
from tilerec.parallel.shard import shard  # noqa: E402
from tilerec.planner.cost.calibrate import _Bench, calibrate  # noqa: E402
from tilerec.planner.cost.default_speeds import default_speeds  # noqa: E402
from tilerec.planner.cost.model import Model  # noqa: E402
from tilerec.planner.cost.price import price  # noqa: E402
from tilerec.planner.cost.workload import Reads, TableWork, Workload  # noqa: E402
from tilerec.sharding.strategies import complete  # noqa: E402
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor  # noqa: E402
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad  # noqa: E402
from tilerec.spec.plan import ParameterSharding  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig  # noqa: E402
from tilerec.spec.topology import Topology  # noqa: E402
from tilerec.testing.ranks import Ranks  # noqa: E402

RANKS = 2
KINDS = ("table_wise", "column_wise", "row_wise", "data_parallel")
MOST_CELLS = 60_000_000  # of all tables of a plan: several copies must fit
OPTIMIZERS: tuple[OptimizerSpec, ...] = (SGD(0.1), SGD(0.1), RowWiseAdagrad(0.1), Adam(1e-3))


class Plan:
    """One set of tables with its tilings."""

    def __init__(self, seed: int, ranks: int = RANKS) -> None:
        world = ranks
        draw = random.Random(seed)
        count = draw.choice([2, 4, 8, 12, 16, 24])
        batch = draw.choice([256, 512, 1024, 2048])
        optimizer = draw.choice(OPTIMIZERS)
        uniform = draw.choice(KINDS) if seed % 3 == 0 else None
        dims = draw.choice([(8, 16, 32), (32, 64), (64, 128), (16, 64, 256), (128,), (64,)])
        lengths = draw.choice([(1,), (1, 2, 5), (10,), (1, 20), (5,)])
        self.name, self.works, self.kinds, cells = f"plan {seed}", [], [], 0
        for t in range(count):
            rows, dim = int(10 ** draw.uniform(3, 5.6)), draw.choice(dims)
            rows = min(rows, max(1000, (MOST_CELLS - cells) // dim // (count - t)))
            cells += rows * dim
            kind = uniform or draw.choice(KINDS)
            if kind == "data_parallel":
                rows = min(rows, 100_000)
            ranks = {"table_wise": [draw.randrange(world) if uniform is None else t % world]}.get(kind)
            reads = Reads(batch, draw.choice(lengths))
            self.works.append(TableWork(f"t{t}", rows, dim, optimizer=optimizer, reads=[reads]))
            self.kinds.append((kind, ranks))
        self.batch, self.optimizer, self.world = batch, optimizer, world
        kinds = sorted({kind for kind, _ in self.kinds})
        self.about = (
            f"{count} tables, dims {'/'.join(map(str, dims))}, ids {'/'.join(map(str, lengths))}, batch {batch}, "
            f"{type(optimizer).__name__}, {'+'.join(kinds)}"
        )

    def shardings(self) -> dict[str, ParameterSharding]:
        return {
            work.name: ParameterSharding(kind, ranks=ranks, ids_per_bag=work.ids_per_bag)
            for work, (kind, ranks) in zip(self.works, self.kinds, strict=True)
        }

    def predicted(self, topology: Topology) -> Any:
        tilings = []
        for work, (kind, ranks) in zip(self.works, self.kinds, strict=True):
            own = ParameterSharding(kind, ranks=ranks)
            made = complete(own, work.name, work.rows, work.dim, topology)
            assert made.tiling is not None
            tilings.append(made.tiling)
        return price(tilings, Model(Workload(self.works), topology))


class Run:
    """A plan on this rank: a module and batches."""

    def __init__(self, plan: Plan, group: ProcessGroupComms, batches: int = 4) -> None:
        configs = [EmbeddingBagConfig(w.rows, w.dim, w.name, feature_names=[w.name]) for w in plan.works]
        module: Any = EmbeddingBagCollection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(plan.optimizer, module.parameters())
        self.module = shard(
            module,
            plan={"": plan.shardings()},
            mesh=group,
            topology=Topology(group.size, "cpu"),
            device="cpu",
        )
        for parameter in self.module.parameters():
            parameter.data.zero_()
        generator = torch.Generator().manual_seed(group.rank)
        names = [w.name for w in plan.works]
        lengths = torch.cat([torch.full((plan.batch,), int(w.ids_per_bag), dtype=torch.int32) for w in plan.works])
        self.batches = [
            KeyedJaggedTensor(
                names,
                torch.cat(
                    [torch.randint(w.rows, (plan.batch * int(w.ids_per_bag),), generator=generator) for w in plan.works]
                ),
                lengths=lengths,
            )
            for _ in range(batches)
        ]
        self.grad = torch.randn(plan.batch, sum(w.dim for w in plan.works), generator=generator)

    def step(self, k: int) -> None:
        batch = self.batches[k % len(self.batches)]
        again = KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths())
        values: Any = self.module(again).values()
        values.backward(self.grad)


def measured_speeds() -> dict[str, Any]:
    torch.set_num_threads(1)
    return calibrate(ProcessGroupComms(), Topology(RANKS, "cpu")).to_json()


def measured_links() -> dict[str, float]:
    """Return the seconds of an empty all-to-all, and the seconds per byte."""
    torch.set_num_threads(1)
    topology = Topology(ProcessGroupComms().size, "cpu")
    return _Bench(ProcessGroupComms(), torch.device("cpu"), topology)._links(default_speeds(topology))


def measure(seed: int, steps: int, stages: bool) -> tuple[list[float], dict[str, list[float]]]:
    """Return the seconds of each step and its stages on this rank: elapsed, and the main thread's processor time."""
    torch.set_num_threads(1)
    clock: Any = None
    if stages:
        import sharded_step

        if sharded_step.CLOCK is None:
            sharded_step.CLOCK = sharded_step.Clock()
        clock = sharded_step.CLOCK
    group = ProcessGroupComms()
    run = Run(Plan(seed), group)
    for k in range(2):
        run.step(k)
    taken = []
    lines: dict[str, list[list[float]]] = {}
    for k in range(steps):
        if clock is not None:
            clock.spent.clear()
        group.barrier()
        before, busy = time.perf_counter(), time.thread_time()
        run.step(k)
        taken.append(time.perf_counter() - before)
        if clock is not None:
            for stage, line in clock.spent.items():
                if stage != "barrier":
                    lines.setdefault(stage, []).append(line[:2])
            lines.setdefault("step", []).append([taken[-1], time.thread_time() - busy])
    spent = {stage: [min(column) for column in zip(*line, strict=True)] for stage, line in lines.items()}
    exchange = run.module.exchange
    group.barrier()
    for channel in (exchange.group, exchange.route_group):
        channel.close()
    return taken, spent


# Maps stages of `sharded_step.py` to the model's; the remainder ("rest") is Python's time, before the first wait.
STAGES_OF = {
    "lookup": 1, "rows in host": 1, "rows": 1, "scatter": 2, "gather": 2, "rows'": 2, "rows' in host": 2, "sums": 3,
    "update": 3, "row sums": 3, "replica counts": 3, "replica rows": 3, "replica ids": 3, "replica gradients": 3,
    "replica gradients, dense": 3,
}  # fmt: skip


def measure_alone(seed: int, steps: int) -> tuple[list[float], float]:
    """Return this rank's processor seconds in each stage, and the seconds of the step's exchanges by themselves."""
    import sharded_step

    torch.set_num_threads(1)
    if sharded_step.CLOCK is None:
        sharded_step.CLOCK = sharded_step.Clock()
    clock: Any = sharded_step.CLOCK
    group = ProcessGroupComms()
    run = Run(Plan(seed, group.size), group)
    for k in range(2):
        run.step(k)
    traffic = run.module.exchange.group.traffic
    lines = []
    for k in range(steps):
        traffic.reset()
        clock.spent.clear()
        group.barrier()
        clock.spent.clear()
        busy = time.thread_time()
        run.step(k)
        whole = time.thread_time() - busy
        line = [0.0] * 4
        for stage, (_, own, *_) in clock.spent.items():
            line[STAGES_OF.get(stage, 0)] += own
            whole -= own
        line[0] += whole
        lines.append(line)
    own_bytes: Any = group.all_gather_object({line.name: sum(line.bytes) for line in traffic})
    exchange = 0.0
    for name in own_bytes[0]:
        each = max(int(line.get(name, 0)) for line in own_bytes) // 4 // max(1, group.size - 1)
        splits = [each] * group.size
        out, into = torch.zeros(each * group.size), torch.zeros(each * group.size)
        taken = []
        for _ in range(steps):
            group.barrier()
            before = time.perf_counter()
            group.all_to_all("again", out, into, splits, splits).wait()
            taken.append(time.perf_counter() - before)
        exchange += statistics.median(taken)
    group.barrier()
    for channel in (run.module.exchange.group, run.module.exchange.route_group):
        channel.close()
    return [statistics.median(column) for column in zip(*lines, strict=True)], exchange


def ranks_of(values: list[float]) -> list[float]:
    """Return places in ascending order; equal values share theirs."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def spearman(a: list[float], b: list[float]) -> float:
    return statistics.correlation(ranks_of(a), ranks_of(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=36)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument(
        "--quantile", type=float, default=0.5, help="of the steps of a pass; 0 on a machine that is not quiet"
    )
    parser.add_argument("--topology", type=Path, help="measured by `tilerec calibrate`; None: measure now")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--csv", type=Path, help="write the rows there too")
    given = parser.parse_args()
    plans = [Plan(seed, given.ranks) for seed in range(given.plans)]
    with Ranks(RANKS, timeout_s=600) as ranks:
        if given.topology is not None:
            topology = Topology.from_json(json.loads(given.topology.read_text()))
        else:
            topology = Topology.from_json(ranks.run(measured_speeds)[0])
        best = [float("inf")] * len(plans)
        stages: dict[str, list[list[float]]] = {}
        for _ in range(given.passes if given.ranks == RANKS else 0):
            for i in range(len(plans)):
                results = ranks.run(measure, i, given.steps, given.stages)
                slowest = [max(step) for step in zip(*(steps for steps, _ in results), strict=True)]
                best[i] = min(best[i], sorted(slowest)[int(given.quantile * (len(slowest) - 1))])
                for _, spent in results:
                    for stage, seconds in spent.items():
                        stages.setdefault(stage, []).append([s / RANKS / given.passes for s in seconds])
    if given.ranks != RANKS:
        with Ranks(RANKS, timeout_s=600) as ranks:
            two = ranks.run(measured_links)[0]
        with Ranks(given.ranks, timeout_s=600) as ranks:
            more, speeds = ranks.run(measured_links)[0], topology.speeds
            assert speeds is not None
            dearer = max(0.0, more["call"] - two["call"])
            more["call"], more["call_peer"] = speeds.call + dearer, 0.0
            topology = Topology(given.ranks, "cpu", speeds=replace(speeds, **more))
            for i in range(len(plans)):
                several = ranks.run(measure_alone, i, given.steps)
                slowest = [max(stage) for stage in zip(*(stages for stages, _ in several), strict=True)]
                best[i] = sum(slowest) + max(exchange for _, exchange in several)
    predicted = [plan.predicted(topology) for plan in plans]
    print(f"{'plan':8}  {'measured ms':>11}  {'predicted ms':>12}  {'ratio':>6}  about")
    rows = []
    for plan, took, found in zip(plans, best, predicted, strict=True):
        ratio = found.seconds / took
        rows.append((plan.name, 1e3 * took, 1e3 * found.seconds, ratio, plan.about))
        print(f"{plan.name:8}  {1e3 * took:11.2f}  {1e3 * found.seconds:12.2f}  {ratio:6.2f}  {plan.about}")
    errors = sorted(abs(ratio - 1) for *_, ratio, _ in rows)
    correlation = spearman([row[1] for row in rows], [row[2] for row in rows])
    print(
        f"\nSpearman {correlation:.3f}; error: median {100 * statistics.median(errors):.1f} %, 90th percentile "
        f"{100 * errors[int(0.9 * (len(errors) - 1))]:.1f} %; median ratio {statistics.median(r[3] for r in rows):.2f}"
    )
    middle = statistics.median(row[3] for row in rows)
    left = statistics.median(abs(row[3] / middle - 1) for row in rows)
    print(f"with one factor for all plans ({1 / middle:.2f}): median {100 * left:.1f} %")
    if given.stages:
        print("\nmeasured, ms over all plans: elapsed, and on the processor (no waits)")
        for stage, several in stages.items():
            elapsed, busy = (1e3 * sum(column) for column in zip(*several, strict=True))
            print(f"  {stage:26} {elapsed:9.1f} {busy:9.1f}")
        print("predicted, ms over all plans (mean of ranks)")
        for name in predicted[0].parts:
            print(f"  {name:26} {1e3 * sum(float(p.parts[name].mean()) for p in predicted):9.1f}")
        print(f"  {'calls':26} {1e3 * sum(p.calls for p in predicted):9.1f}")
    if given.csv is not None:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["plan", "measured_ms", "predicted_ms", "ratio", "about"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
