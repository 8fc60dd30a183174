"""Bytes of a step on 64 to 4,096 ranks, counted without running them: what each rank sends, in all and between hosts.

    python benchmarks/scale.py [--sets criteo,jumbo] [--ranks 64,256,1024,4096] [--samples 512] [--svg FILE]

A few ranks (`--homes`) get a random batch each. The runtime's own layout, router and row exchange handle it, with a
group that records the messages and answers as if all other batches were empty. So the counts of these homes are exact,
for this plan and these ids; no cost model is involved. The load of owners is the mean over homes, times the number of
ranks.

Table sets: `criteo` is MLPerf's DLRM-DCNv2 with its published ids per sample, and `criteo-1` the same with one id. The
others are those of NVIDIA Merlin's distributed-embeddings. Ids follow a Zipf law (`--exponent`). The planner makes the
plans, for 8 ranks per host.

    each id      every id of a batch travels
    once         repeated ids of a rank's batch travel once, where the runtime decides so
    head N       besides, large tables are in frequency order. Rows that a batch reads N times or more on average are on
                 every rank (`--often`), and the others are cut by reads
    no sums      as "once", but hosts do not add up rows before they leave (`ParameterSharding.ids_per_bag=1`)
    groups       as "once", in 2D: groups of `--group` ranks hold all tables, and replicas send gradients in shares

    MB           sent by a rank, the mean over homes: ids, rows (and gradients, as many), gradients of replicas
    far          the part of them that leaves the host
    messages     ranks to which a home sends ids
    largest      rows that the largest owner sends, over the mean; over a few homes only, so an upper bound for plans
                 with many small pieces
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_lookup import MULTI_HOT
from home_bytes import Count, count_home
from loglog import Series, write
from planner import SHARDERS, configs_of, planner_of
from planner_cases import CRITEO, GIB, Case, merlin
from torch import Tensor

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.planner.planner_error import PlannerError
from tilerec.sharding.layout import TableLayout
from tilerec.sharding.replicas import GradientForm, choose_form
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

PER_HOST = 8
DRAWN = ("once", "head 1")
LARGE = 100_000
"""Rows from which a table gets a head."""


@dataclass(frozen=True)
class TableSet:
    """A table set: its case, and the ids of every feature in order of frequency, or scattered over the table."""

    case: Case
    exponent: float
    seed: int = 0
    slots: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots.extend((t, length) for t, own in enumerate(self.case.bags) for length in own)

    def draw(self, home: int, samples: int, ordered: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
        """Return ids and lengths of each slot, for the batch of one home."""
        dice = torch.Generator().manual_seed(self.seed * 1_000_003 + home)
        ids, lengths = [], []
        for t, length in self.slots:
            count = samples * round(length)
            found = zipf(self.case.rows[t], self.exponent, count, dice)
            ids.append(found if ordered[t] else scattered(found, self.case.rows[t]))
            lengths.append(torch.full((samples,), round(length), dtype=torch.int64))
        return ids, lengths


def zipf(rows: int, exponent: float, count: int, dice: torch.Generator) -> Tensor:
    """Return ids by Zipf's law, the most frequent one 0, from the continuous law between 1 and rows + 1."""
    u = torch.rand(count, generator=dice, dtype=torch.float64)
    if exponent == 0:
        return (u * rows).long().clamp_(max=rows - 1)
    if abs(exponent - 1) < 1e-9:
        return (torch.exp(u * torch.log(torch.tensor(rows + 1.0))) - 1).long().clamp_(max=rows - 1)
    power = 1 - exponent
    return (((rows + 1.0) ** power - 1) * u + 1).pow_(1 / power).sub_(1).long().clamp_(0, rows - 1)


def scattered(ids: Tensor, rows: int) -> Tensor:
    """Return ids moved by a permutation of the rows: a product with a number prime to them, and a shift."""
    factor = max(1, int(rows * 0.6180339887) | 1)
    while _common(factor, rows) > 1:
        factor += 2
    return (ids * factor + rows // 3) % rows  # below 2^63 for tables of up to 2^31 rows


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


class Curve:
    """Expected distinct reads of a table in frequency order.

    Args:
        rows, exponent: of the table, and of the Zipf law of its ids.
        reads: ids read. often: see `self.often`.
    """

    def __init__(self, rows: int, exponent: float, reads: float, often: float = 1.0) -> None:
        few = min(rows, 256)
        self.edges = np.unique(np.concatenate((np.arange(few + 1.0), np.geomspace(few, rows, 4096).round())))
        counts = np.diff(self.edges)
        shares = ((self.edges[:-1] + self.edges[1:] + 1) / 2) ** -exponent
        shares /= (shares * counts).sum()
        self.sums = np.concatenate(([0.0], np.cumsum(counts * -np.expm1(reads * np.log1p(-shares)))))
        self.often = int(counts[shares * reads >= often].sum())  # rows that are read so often on average

    def between(self, r0: float, r1: float) -> float:
        """Return the distinct rows in [r0, r1) that are read."""
        low, high = np.interp((r0, r1), self.edges, self.sums)
        return float(high - low)

    def cuts(self, r0: int, parts: int) -> list[int]:
        """Return the edges of ranges from r0 to the end with equal numbers of distinct rows."""
        low = np.interp(r0, self.edges, self.sums)
        goals = low + (self.sums[-1] - low) * np.arange(1, parts) / parts
        inner = np.interp(goals, self.sums, self.edges).round().astype(int).tolist()
        return [r0, *inner, int(self.edges[-1])]


def with_head(tiling: Tiling, curve: Curve, ranks: int) -> tuple[Tiling, int]:
    """Return a tiling with rows that are read often on every rank, the others cut by reads; and the number of those."""
    head = curve.often
    if head == 0 or _copied(tiling, ranks):
        return tiling, 0
    tiles: list[tuple[int, int, int, int, Any]] = []
    for c0, c1, _, owners in tiling.blocks:
        tiles.append((0, head, c0, c1, tuple(range(ranks))))
        cut = itertools.pairwise(curve.cuts(head, len(owners)))
        tiles += [(low, high, c0, c1, own) for (low, high), own in zip(cut, owners, strict=True)]
    return Tiling.of("t", tiling.rows, tiling.dim, tiles), head


def replica_bytes(tables: TableSet, samples: int, blocks: Mapping[int, int], ranks: int, served: int = 1) -> float:
    """Return the bytes of gradients that a copy sends to the others, by the runtime's choice of their form.

    Args:
        blocks: tables with copies, and the number of their first rows that are copied.
        served: ranks whose batches a copy serves.
    """
    total, others = 0.0, ranks - 1
    for t, rows in blocks.items():
        dim, lengths = tables.case.dims[t], tables.case.bags[t]
        reads = sum(samples * length for length in lengths) * served
        below = zipf_share(tables.case.rows[t], rows, tables.exponent)
        ids = reads * below
        bags = sum(samples * served * -math.expm1(length * math.log1p(-min(below, 1 - 1e-12))) for length in lengths)
        form = choose_form(rows, dim, [(round(bags), round(ids))] * ranks, ranks, bags_can_travel=True, exact=False)
        touched = Curve(tables.case.rows[t], tables.exponent, reads).between(0, rows)
        together = Curve(tables.case.rows[t], tables.exponent, reads * ranks).between(0, rows)
        if form is GradientForm.DENSE:
            total += 8 * (dim + 1) * rows * others / ranks
        elif form is GradientForm.SHARES:
            total += ((4 * dim + 8) * touched + (4 * dim + 4) * together) * others / ranks
        elif form is GradientForm.ROWS:
            total += (4 * dim + 4) * touched * others
        else:
            total += (4 * dim * bags + 4 * ids) * others
    return total


def zipf_share(rows: int, below: int, exponent: float) -> float:
    """Return the share of the reads that the first rows get."""
    power = 1 - exponent
    if abs(power) < 1e-9:
        return math.log(below + 1) / math.log(rows + 1)
    return ((below + 1) ** power - 1) / ((rows + 1) ** power - 1)


@dataclass(frozen=True)
class Line:
    """Figures of one way."""

    way: str
    mb: float
    ids: float
    rows: float
    replicas: float
    far: float
    messages: float
    largest: float


def measured(
    way: str, counts: Sequence[Count], homes: Sequence[int], topology: Topology, copies: float, copies_far: float
) -> Line:
    """Return the means over homes.

    Args:
        copies: bytes of gradients that a rank sends to replicas; copies_far: to other hosts.
    """
    ranks = topology.world_size
    host = torch.tensor([topology.host_of(rank) for rank in range(ranks)])
    ids = rows = far = messages = 0.0
    owners = torch.zeros(ranks, dtype=torch.float64)
    for home, count in zip(homes, counts, strict=True):
        away = host != host[home]
        others = torch.arange(ranks) != home
        sent = count.header + count.ids
        ids += float(sent[others].sum())
        # Rows come, and gradients of the same size go back; sums inside hosts go both ways, too.
        rows += float(count.rows[others].sum() + count.inside.sum())
        far += float(sent[away].sum() + 2 * count.rows[away].sum())
        messages += int((count.ids[others] > 0).sum())
        owners += count.rows + count.inside
    n = len(homes)
    ids, rows, far = ids / n, rows / n, far / n + copies_far
    largest = float(owners.max() / owners.mean()) if float(owners.sum()) else 1.0
    return Line(
        way, (ids + 2 * rows + copies) / 1e6, ids / 1e6, rows / 1e6, copies / 1e6, far / 1e6, messages / n, largest
    )


def planned(case: Case) -> list[TableLayout]:
    """Return the tables as the planner cuts them."""
    module = EmbeddingBagCollection(configs_of(case), device=torch.device("meta"))
    plan = planner_of(case, case.topology()).plan(module, SHARDERS)
    (own,) = plan.plan.values()
    found = []
    for t, bags in enumerate(case.bags):
        sharding = own[f"t{t:06d}"]
        assert sharding.tiling is not None, "the planner returns tilings"
        found.append(TableLayout(f"t{t:06d}", sharding.tiling, sharding.ids_per_bag or max(bags)))
    return found


def ways(options: argparse.Namespace, tables: TableSet) -> Iterator[Line]:
    """Count every way of one table set on one number of ranks."""
    case, samples = tables.case, options.samples
    topology = case.topology()
    ranks = topology.world_size
    layouts = planned(case)
    homes = middle_ranks(ranks, options.homes)
    slots = [t for t, _ in tables.slots]
    copied = {t: own.tiling.rows for t, own in enumerate(layouts) if _copied(own.tiling, ranks)}

    def count(
        way: str, own: Sequence[TableLayout], drawn: Any, copies: Mapping[int, int], *, once: bool = True
    ) -> Line:
        found = [count_home(own, slots, topology, home, batch, once) for home, batch in zip(homes, drawn, strict=True)]
        sent = replica_bytes(tables, samples, copies, ranks)
        return measured(way, found, homes, topology, sent, sent * (ranks - PER_HOST) / (ranks - 1))

    batches = [tables.draw(home, samples, [False] * len(layouts)) for home in homes]
    yield count("each id", layouts, batches, copied, once=False)
    yield count("once", layouts, batches, copied)
    yield count("no sums", [replace(own, fan_in=1.0) for own in layouts], batches, copied)
    for often in options.often:
        headed, heads = [], dict(copied)
        for t, own in enumerate(layouts):
            tiling, head = own.tiling, 0
            if case.rows[t] >= LARGE:
                reads = samples * sum(case.bags[t])
                tiling, head = with_head(tiling, Curve(case.rows[t], tables.exponent, reads, often), ranks)
            headed.append(replace(own, tiling=tiling))
            heads |= {t: head} if head else {}
        ordered = [tables.draw(home, samples, [t in heads for t in range(len(layouts))]) for home in homes]
        yield count(f"head {often}", headed, ordered, heads)
    if ranks > options.group:
        yield from groups(options, tables, batches)


def groups(options: argparse.Namespace, tables: TableSet, batches: Sequence[Any]) -> Iterator[Line]:
    """Count 2D: messages inside a group of neighbours, and gradients between its replicas."""
    case, ranks = replace(tables.case, ranks=options.group), tables.case.ranks
    try:
        layouts = planned(case)
    except PlannerError:
        return  # the tables do not fit into one group
    topology, homes = case.topology(), middle_ranks(options.group, options.homes)
    slots = [t for t, _ in tables.slots]
    found = [
        count_home(layouts, slots, topology, home, batch, True) for home, batch in zip(homes, batches, strict=True)
    ]
    cut = {t: own.tiling.rows for t, own in enumerate(layouts) if not _copied(own.tiling, options.group)}
    copied = {t: own.tiling.rows for t, own in enumerate(layouts) if t not in cut}
    # A group holds one copy of the tables that are cut, and each of its ranks sends a part of their gradients.
    sent = replica_bytes(tables, options.samples, cut, ranks // options.group, options.group) / options.group
    sent += replica_bytes(tables, options.samples, copied, ranks)
    yield measured(f"groups of {options.group}", found, homes, topology, sent, sent)


def middle_ranks(ranks: int, count: int) -> list[int]:
    """Return ranks that are spread evenly."""
    return [(2 * k + 1) * ranks // (2 * count) for k in range(count)]


def _copied(tiling: Tiling, ranks: int) -> bool:
    return all(len(tile.owners) == ranks for tile in tiling.tiles())


def table_set(name: str, ranks: int, samples: int, exponent: float) -> TableSet:
    """Return a published table set for a number of ranks."""
    if name in ("criteo", "criteo-1"):
        bags = tuple((float(length if name == "criteo" else 1),) for length in MULTI_HOT)
        return TableSet(Case(CRITEO, (128,) * 26, bags, ranks, samples, cap=64 * GIB, per_host=PER_HOST), exponent)
    return TableSet(replace(merlin(name), ranks=ranks, batch=samples, cap=64 * GIB, per_host=PER_HOST), exponent)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=lambda text: text.split(","), default=["criteo-1", "criteo", "large", "jumbo"])
    parser.add_argument("--ranks", type=numbers, default=[64, 256, 1024, 4096])
    parser.add_argument("--samples", type=int, default=512, help="samples of a rank")
    parser.add_argument("--homes", type=int, default=4, help="ranks whose batches are drawn and routed")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the Zipf law of ids")
    parser.add_argument(
        "--often", type=numbers, default=[1, 16], help="reads per batch from which a row belongs to the head"
    )
    parser.add_argument("--group", type=int, default=64, help="ranks of a sharding group in 2D")
    parser.add_argument("--svg", type=Path, help="draw MB per rank against ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[tuple[float, float]]] = {}
    print(f"{options.samples} samples a rank, {options.homes} homes, Zipf {options.exponent}")
    print(
        f"{'set':8}{'ranks':>6}  {'way':14}{'MB':>8}{'ids':>8}{'rows':>8}{'copies':>8}{'far':>8}{'messages':>9}"
        "  largest"
    )
    for name in options.sets:
        for ranks in options.ranks:
            began = time.process_time()
            try:
                lines = list(ways(options, table_set(name, ranks, options.samples, options.exponent)))
            except PlannerError as error:
                print(f"{name:8}{ranks:6}  no plan: {str(error).splitlines()[0]}")
                continue
            for line in lines:
                print(
                    f"{name:8}{ranks:6}  {line.way:14}{line.mb:8.2f}{line.ids:8.2f}{line.rows:8.2f}{line.replicas:8.2f}"
                    f"{line.far:8.2f}{line.messages:9.0f}  {line.largest:7.2f}", flush=True,
                )  # fmt: skip
                if line.way in DRAWN:
                    curves.setdefault(f"{name}, {line.way}", []).append((ranks, line.mb))
            print(f"{name:8}{ranks:6}  ({time.process_time() - began:.0f} s)", flush=True)
    if options.svg is not None:
        drawn: list[Series] = []
        for name, points in curves.items():
            alike = any(
                all(abs(a - b) < 0.02 * b for (_, a), (_, b) in zip(points, one.points, strict=False)) for one in drawn
            )
            if len(points) > 1 and not alike:
                drawn.append(Series(name, points))
        write(options.svg, "MB that a rank sends in a step", "ranks", "MB", drawn)


if __name__ == "__main__":
    main()
