"""Bytes of a step by plans of rows: hot rows on every rank, the other rows cut by rows, repeated ids sent once.

    python benchmarks/row_plans.py [--ranks 8] [--exponent 1.05] [--cases bags,sequence]

Ranks are threads, and bytes are counted (`model.traffic()`), so the figures are exact and no time is measured.

    bags       8 tables x 100,000 x 128, 2,048 samples of a rank, one id per bag
    sequence   8 tables x 100,000 x 64, 1,024 samples of a rank, 20 ids each, unpooled

Ids follow a Zipf law. "scrambled": frequent ids are anywhere. "sorted": id 0 is the most frequent one, as in a table in
frequency order. A head of h rows is a copy on every rank. The other rows are cut evenly, or, "by reads", so that
each rank's rows get an equal number of distinct ids. "Planner": the ranges that the planner cuts. "HotRows": the h most
frequent ids of a scrambled table are hot, and all its rows are cut evenly.

    python benchmarks/row_plans.py --map     nanoseconds per id of the op that finds hot ids
    python benchmarks/row_plans.py --step    seconds of a step on 2 processes, with hot ids and without, step by step

    MB         sent by a rank in a step, the mean over ranks: ids, rows, gradients, and gradients of copies
    largest    the rank that sends most, over the mean
    price      the same two numbers as the planner's cost model predicts them
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lookup import machine
from torch import Tensor

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.ops.hot.definition import finder_of
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.parallel.traffic import traffic
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.realise import sharding_of
from tilerec.planner.cost.ways import Option, Way
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload
from tilerec.sharding.strategies import data_parallel, row_wise
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.ranks import run_ranks
from tilerec.testing.virtual import run_virtual_ranks

CASES = {"bags": (8, 128, 2048, 1), "sequence": (8, 64, 1024, 20)}
"""Tables, columns, samples of a rank, ids of a sample."""
ROWS = 100_000
STEP_TABLES, STEPS, STEP_HEADS = 26, 24, (200, 1_000)
Array = npt.NDArray[np.float64]
META = torch.device("meta")  # each rank makes its own rows only


class RowPlan(NamedTuple):
    """A tiling of every table, and the order of its rows."""

    name: str
    tiling: Tiling
    scrambled: bool
    hot: HotRows | None = None


def probabilities(exponent: float) -> Tensor:
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent
    return weights / weights.sum()


def tailed(head: int, dim: int, ranks: int, expected: Tensor | None) -> Tiling:
    """Return `head` rows on every rank and the others cut by rows; expected: distinct reads of each row, or None."""
    tiles: list[tuple[int, int, int, int, Any]] = [(0, head, 0, dim, tuple(range(ranks)))] if head else []
    if expected is None:
        edges = torch.linspace(head, ROWS, ranks + 1).round().long().tolist()
    else:
        sums = expected[head:].cumsum(0)
        inner = torch.searchsorted(sums, sums[-1] * torch.arange(1, ranks) / ranks) + head + 1
        edges = [head, *inner.tolist(), ROWS]
    tiles += [(low, high, 0, dim, rank) for rank, (low, high) in enumerate(itertools.pairwise(edges))]
    return Tiling.of("t", ROWS, dim, tiles)


def work(name: str, case: str, exponent: float, *, scrambled: bool, distinct: bool) -> TableWork:
    """Return a table as the planner sees it."""
    _, dim, samples, length = CASES[case]
    skew = Skew(ROWS, exponent, ordered=not scrambled)
    reads = [Reads(samples, length)]
    return TableWork(name, ROWS, dim, optimizer=SGD(0.1), reads=reads, skew=skew, wire=Wire(distinct=distinct),
                     each_id=length > 1)  # fmt: skip


def plans(case: str, ranks: int, exponent: float, distinct: bool) -> Iterator[RowPlan]:
    _, dim, samples, length = CASES[case]
    topology = Topology(ranks, "cpu")
    expected = -torch.expm1(samples * length * torch.log1p(-probabilities(exponent)))  # reads of a row by one rank
    yield RowPlan("row-wise, scrambled", row_wise("t", ROWS, dim, None, topology), True)
    yield RowPlan("row-wise, sorted", row_wise("t", ROWS, dim, None, topology), False)
    yield RowPlan("row-wise by reads, sorted", tailed(0, dim, ranks, expected), False)
    model = Model(Workload([work("t", case, exponent, scrambled=False, distinct=distinct)]), topology)
    made = sharding_of(model, 0, Option(Way.ROWS, 1, ranks), (), None).tiling
    assert made is not None
    yield RowPlan("row-wise, planner, sorted", made, False)
    even = row_wise("t", ROWS, dim, None, topology)
    for share in (0.0005, 0.002, 0.01, 0.05):
        head = int(share * ROWS)
        yield RowPlan(f"head {share:.2%}, others by reads", tailed(head, dim, ranks, expected), False)
        yield RowPlan(f"HotRows {share:.2%}, row-wise, scrambled", even, True, HotRows(scrambled()[:head]))
    yield RowPlan("data-parallel", data_parallel("t", ROWS, dim, None, topology), False)


def scrambled() -> Tensor:
    """Return the id of each row of a table in frequency order."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))


def batch_of(case: str, rank: int, exponent: float, *, scramble: bool) -> KeyedJaggedTensor:
    tables, _, samples, length = CASES[case]
    draws = torch.rand(tables * samples * length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    ids = torch.searchsorted(probabilities(exponent).cumsum(0), draws).clamp(max=ROWS - 1)
    if scramble:
        ids = scrambled()[ids]
    return KeyedJaggedTensor(
        [f"f{t}" for t in range(tables)], ids, lengths=torch.full((tables * samples,), length)
    )  # fmt: skip


def sent(group: Group, case: str, plan: RowPlan, distinct: bool, exponent: float) -> int:
    """Return the bytes that this rank sends in a step."""
    tables, dim, _, length = CASES[case]
    names = [(f"t{t}", [f"f{t}"]) for t in range(tables)]
    module: Any
    if length == 1:
        module = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, dim, t, feature_names=f) for t, f in names], device=META
        )
    else:
        module = EmbeddingCollection([EmbeddingConfig(ROWS, dim, t, feature_names=f) for t, f in names], device=META)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    one = ParameterSharding(ShardingType.EXPLICIT, tiling=plan.tiling, wire=Wire(distinct=distinct), hot=plan.hot)
    module = shard(module, plan={"": dict.fromkeys([t for t, _ in names], one)}, mesh=group)
    traffic(module).reset()
    batch = batch_of(case, group.rank, exponent, scramble=plan.scrambled)
    found = module(batch)
    values = found.values() if length == 1 else torch.cat([own.values() for own in found.values()])
    values.sum().backward()
    return sum(line.total for line in traffic(module).table())


def predicted(case: str, plan: RowPlan, ranks: int, distinct: bool, exponent: float) -> Array:
    """Return the bytes that each rank sends by the planner's price."""
    works = [work(f"t{t}", case, exponent, scrambled=plan.scrambled, distinct=distinct) for t in range(CASES[case][0])]
    tiling = plan.tiling.with_hot("t", plan.hot, ranks)
    sent = price([tiling] * len(works), Model(Workload(works), Topology(ranks, "cpu"))).sent
    return np.sum(list(sent.values()), axis=0)


def map_times(exponent: float) -> None:
    """Print the time of `hot_ids` per id, for both cases of one rank: the median of 30 calls."""
    for case in CASES:
        batch = batch_of(case, 0, exponent, scramble=True)
        tables, samples = CASES[case][0], CASES[case][2]
        line = f"{case:12}{batch.values().numel():9,} ids:"
        for head in (50, 200, 1_000, 5_000):
            hot = scrambled()[:head].sort()[0]
            finder, plain, seconds = finder_of(hot.numpy()), batch.values(), []
            arguments = (
                batch.offsets(), list(range(tables)), [samples], [hot] * tables, [finder] * tables, [ROWS] * tables, ""
            )  # fmt: skip
            for _ in range(31):
                begun = time.perf_counter()
                found = torch.ops.tilerec.hot_ids(plain, *arguments)
                seconds.append(time.perf_counter() - begun)
            assert torch.equal(found >= ROWS, torch.isin(plain, hot))
            line += f"  head {head:,} {statistics.median(seconds[1:]) / plain.numel() * 1e9:.1f} ns"
        print(line, flush=True)


def step_module(head: int, distinct: bool, group: Group) -> Any:
    """Return 26 row-wise tables of 100,000 x 128 with SGD; head: number of hot rows."""
    names = [f"t{t}" for t in range(STEP_TABLES)]
    configs = [EmbeddingBagConfig(ROWS, 128, name, feature_names=[name]) for name in names]
    module = EmbeddingBagCollection(configs, device=META)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    hot = HotRows(scrambled()[:head]) if head else None
    one = ParameterSharding(ShardingType.ROW_WISE, wire=Wire(distinct=None if distinct else False), hot=hot)
    return shard(module, plan={"": dict.fromkeys(names, one)}, mesh=group)


def step_seconds(head: int, distinct: bool, exponent: float) -> list[tuple[float, float]]:
    """Return medians over steps, (seconds, MB sent) of a rank, without hot rows and with them, which take turns."""
    torch.set_num_threads(1)
    group = ProcessGroupComms()
    modules = [step_module(own, distinct, group) for own in (0, head)]
    generator = torch.Generator().manual_seed(group.rank)
    law, order = probabilities(exponent).cumsum(0), scrambled()
    names = [f"t{t}" for t in range(STEP_TABLES)]
    seconds: list[list[float]] = [[], []]
    sent = [0, 0]
    for step in range(STEPS + 3):
        draws = torch.rand(STEP_TABLES * 2048, generator=generator, dtype=torch.float64)
        ids = order[torch.searchsorted(law, draws).clamp(max=ROWS - 1)]
        batch = KeyedJaggedTensor(names, ids, lengths=torch.ones(STEP_TABLES * 2048, dtype=torch.int32))
        for k in (0, 1) if step % 2 else (1, 0):
            traffic(modules[k]).reset()
            group.all_gather_object(None)
            begun = time.perf_counter()
            modules[k](batch).values().sum().backward()
            group.all_gather_object(None)
            if step >= 3:
                seconds[k].append(time.perf_counter() - begun)
                sent[k] += sum(line.total for line in traffic(modules[k]).table())
    return [(statistics.median(own), count / STEPS / 1e6) for own, count in zip(seconds, sent, strict=True)]


def step_times(exponent: float) -> None:
    for distinct in (True, False):
        for head in STEP_HEADS:
            (plain, bare), (hot, less) = run_ranks(2, step_seconds, head, distinct, exponent)[0]
            print(
                f"ids {'once' if distinct else 'each'}, {head:,} hot: {plain * 1e3:.1f} -> {hot * 1e3:.1f} "
                f"ms ({hot / plain:.2f}), {bare:.2f} -> {less:.2f} MB",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--map", action="store_true")
    parser.add_argument("--step", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.step:
        print(machine())
        step_times(args.exponent)
        return
    if args.map:
        print(machine())
        map_times(args.exponent)
        return
    print(machine(), f"\n{args.ranks} ranks, exponent {args.exponent}\n")
    for case in args.cases:
        heads = "".join(
            f"{f'{name}: MB':>14}{'largest':>9}{'price: MB':>11}{'largest':>9}" for name in ("each id", "once")
        )
        print(f"{case:40}{heads}")
        lists = [plans(case, args.ranks, args.exponent, distinct) for distinct in (False, True)]
        for pair in zip(*lists, strict=True):
            line = f"{pair[0].name:40}"
            for distinct, plan in zip((False, True), pair, strict=True):
                found = run_virtual_ranks(args.ranks, sent, case, plan, distinct, args.exponent)
                mean, priced = sum(found) / len(found), predicted(case, plan, args.ranks, distinct, args.exponent)
                line += f"{mean / 1e6:14.2f}{max(found) / mean:9.2f}"
                line += f"{priced.mean() / 1e6:11.2f}{priced.max() / priced.mean():9.2f}"
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
