"""Bytes of a step by plans of rows: hot rows on every rank, the other rows cut by rows, repeated ids sent once.

    python benchmarks/row_plans.py [--ranks 8] [--exponent 1.05] [--cases bags,sequence]

Ranks are threads, and bytes are counted (`model.traffic()`), so the figures are exact and no time is measured.

    bags       8 tables x 100,000 x 128, 2,048 samples of a rank, one id per bag
    sequence   8 tables x 100,000 x 64, 1,024 samples of a rank, 20 ids each, unpooled

Ids follow a Zipf law. "scrambled": frequent ids are anywhere. "sorted": id 0 is the most frequent one, as in a table in
frequency order. A head of h rows is a copy on every rank. The other rows are cut evenly, or, "by reads", so that
each rank's rows get an equal number of distinct ids. "HotRows": the h most frequent ids of a scrambled table are hot,
and all its rows are cut evenly.

    python benchmarks/row_plans.py --map     nanoseconds per id of the op that finds hot ids

    MB         sent by a rank in a step, the mean over ranks: ids, rows, gradients, and gradients of copies
    largest    the rank that sends most, over the mean
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from lookup import machine
from torch import Tensor

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from tilerec.comms.group import Group
from tilerec.ops.hot.definition import finder_of
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.parallel.traffic import traffic
from tilerec.sharding.strategies import data_parallel, row_wise
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding, ShardingType, Wire
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

CASES = {"bags": (8, 128, 2048, 1), "sequence": (8, 64, 1024, 20)}
"""Tables, columns, samples of a rank, ids of a sample."""
ROWS = 100_000
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


def plans(dim: int, ranks: int, samples: int, length: int, exponent: float) -> Iterator[RowPlan]:
    topology = Topology(ranks, "cpu")
    expected = -torch.expm1(samples * length * torch.log1p(-probabilities(exponent)))  # reads of a row by one rank
    yield RowPlan("row-wise, scrambled", row_wise("t", ROWS, dim, None, topology), True)
    yield RowPlan("row-wise, sorted", row_wise("t", ROWS, dim, None, topology), False)
    yield RowPlan("row-wise by reads, sorted", tailed(0, dim, ranks, expected), False)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--map", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.map:
        print(machine())
        map_times(args.exponent)
        return
    print(machine(), f"\n{args.ranks} ranks, exponent {args.exponent}\n")
    for case in args.cases:
        _, dim, samples, length = CASES[case]
        print(f"{case:40}{'each id: MB':>14}{'largest':>10}{'once: MB':>14}{'largest':>10}")
        for plan in plans(dim, args.ranks, samples, length, args.exponent):
            line = f"{plan.name:40}"
            for distinct in (False, True):
                found = run_virtual_ranks(args.ranks, sent, case, plan, distinct, args.exponent)
                mean = sum(found) / len(found)
                line += f"{mean / 1e6:14.2f}{max(found) / mean:10.2f}"
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
