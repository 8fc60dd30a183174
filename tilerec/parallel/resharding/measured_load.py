"""`Load`: the ids that batches have read from each table, and the ids that each rank has looked up.

Nouns
  step    one routed batch of a collection, training or not
  reads   ids that a rank looks up for all homes: of repeated ids that travel once, one each; if a table has column
          blocks, each block's owner reads the id once

Every forward pass adds to the counts (`sharding/read_counts.py`). They start at 0 with `shard`, `reshard`, and each
`load_of` that resets them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import nn

from tilerec.errors import ConfigError
from tilerec.parallel.model_tables import Name
from tilerec.parallel.resharding.hot_load import HotLoad, merged
from tilerec.parallel.resharding.running_plan import sharded_collections
from tilerec.parallel.two_d.running_groups import unwrapped
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.hot_counts import FrequentIds
from tilerec.sharding.layout import reader
from tilerec.spec.hot_rows import MOST_HOT_ROWS


@dataclass(frozen=True)
class FeatureLoad:
    """Bags and ids that one feature reads from one table: means over ranks and steps.

    Attributes:
        bags: samples of a rank's batch (times lookups per sample).
        ids: ids in these bags, repetitions included.
        distinct: share of distinct ids in a batch, over the batches whose repeated ids travelled once; None: no batch.
    """

    feature: str
    bags: float
    ids: float
    distinct: float | None = None

    @property
    def ids_per_bag(self) -> float:
        return self.ids / self.bags if self.bags else 0.0


@dataclass(frozen=True)
class Load:
    """Measured load since the counts were last reset; equal on every rank.

    Attributes:
        steps: largest number of counted batches of any rank and collection.
        features: (path, table) -> load of each of its features.
        reads: (path, table) -> ids per step that each rank looks up.
        hot: (path, table) -> its most frequent ids, of tables whose ids are counted (`count_hot_ids`).
    """

    steps: int
    features: Mapping[Name, tuple[FeatureLoad, ...]]
    reads: Mapping[Name, tuple[float, ...]] = field(default_factory=dict)
    hot: Mapping[Name, HotLoad] = field(default_factory=dict)

    @property
    def reads_per_rank(self) -> tuple[float, ...]:
        """Ids per step that each rank looks up in all tables; indexed by rank in the group if groups differ in size."""
        return tuple(map(sum, itertools.zip_longest(*self.reads.values(), fillvalue=0.0)))

    @property
    def imbalance(self) -> float:
        """The busiest rank's reads divided by the mean: 1 is even. 1 if nothing was read."""
        reads = self.reads_per_rank
        total = sum(reads)
        return max(reads) * len(reads) / total if total else 1.0

    def __str__(self) -> str:
        reads = ", ".join(f"{own:,.0f}" for own in self.reads_per_rank)
        hot = sorted(self.reads, key=lambda name: -sum(self.reads[name]))[:4]
        tables = ", ".join(f"'{name}' {sum(self.reads[(path, name)]):,.0f}" for path, name in hot)
        return f"{self.steps} steps; ids per step and rank: {reads}; most of them of {tables or 'no table'}"


def load_of(model: nn.Module, *, reset: bool = True) -> Load:
    """Return the load of a sharded model's tables over all ranks since the last reset. Collective.

    With sharding groups that train separately (a `DMPCollection` that averages), each group returns its own load.

    Args:
        reset: True: set the counts to 0.

    Raises:
        ConfigError: the model is not sharded.
    """
    model, _ = unwrapped(model)
    collections = sharded_collections(model, "load_of", two_d=True)
    features: dict[Name, tuple[FeatureLoad, ...]] = {}
    reads: dict[Name, tuple[float, ...]] = {}
    hot: dict[Name, HotLoad] = {}
    most = 0
    groups = {id(part.exchange.group): part.exchange.group for part in collections.values()}
    for group in groups.values():  # several only if parts differ in their sharding groups
        here = {path: part for path, part in collections.items() if part.exchange.group is group}
        group.begin("load_of")
        own = {path: (_counted(part, reset), _frequent(part, reset)) for path, part in here.items()}
        counts_of_all = cast("list[dict[str, Any]]", group.all_gather_object(own))
        for path, part in here.items():
            counts_by_rank = [facts[path][0] for facts in counts_of_all]
            for t, table in enumerate(part.exchange.layout.tables):
                found = merged(facts[path][1].get(t) for facts in counts_of_all)
                if found is not None:
                    hot[(path, table.name)] = found
            steps = sum(counts.steps for counts in counts_by_rank)
            most = max(most, *(counts.steps for counts in counts_by_rank))
            mean_steps = max(1.0, steps / group.size)
            _add(path, part, counts_by_rank, mean_steps, features, reads)
    return Load(most, features, reads, hot)


def count_hot_ids(model: nn.Module, most: int) -> None:
    """Count the most frequent ids of all tables of a sharded model from now on, for `load_of` and `rebalance`.

    Tables with hot rows are counted anyway. Call it on every rank. Counts begin anew.

    Args:
        model: a model from `shard` or `DistributedModelParallel`.
        most: number of ids per table; 0: count tables with hot rows only.

    Raises:
        ConfigError: the model is not sharded, or `most` is no number of ids.
    """
    if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= MOST_HOT_ROWS:
        raise ConfigError(
            f"count_hot_ids: most: got {most!r}; expected a whole number of ids, 0 to {MOST_HOT_ROWS:,}. Pass one."
        )
    for part in sharded_collections(unwrapped(model)[0], "count_hot_ids", two_d=True).values():
        part.exchange.count_hot(most)


def own_reads(part: ShardedCollection) -> list[int]:
    """Return the ids of this rank's batches that each rank of a collection's group has looked up since the last reset.

    The sum over ranks of these lists is `Load.reads`, times the steps and added over tables. Not collective.
    """
    exchange = part.exchange
    team_of = exchange.teams.of if exchange.teams is not None else None
    reads = [0] * exchange.group.size
    ids = _counted(part, False).ids
    for piece, count in zip(exchange.layout.parts, ids, strict=True):
        if count:
            reads[reader(piece.owners, exchange.group.rank, exchange.layout.topology, team_of)] += count * len(
                piece.units
            )
    return reads


class _Counts(NamedTuple):
    """Counts of one rank's batches.

    Args:
        bags: of each slot. repeated: ids and distinct ids of each slot, in batches whose repeated ids travelled once.
        ids: of each part in canonical order.
    """

    steps: int
    bags: list[int]
    repeated: list[tuple[int, int]]
    ids: list[int]


def _counted(part: ShardedCollection, reset: bool) -> _Counts:
    """Return the counts of this rank."""
    layout = part.exchange.layout
    steps, bags, ids = 0, [0] * len(layout.slots), [0] * len(layout.parts)
    repeated = [(0, 0)] * len(layout.slots)
    for stages in part.exchange.all_stages():
        counts = stages.router.reads
        steps += counts.steps
        bags = [a + b for a, b in zip(bags, counts.bags(), strict=True)]
        repeated = [(a + c, b + d) for (a, b), (c, d) in zip(repeated, counts.repeated(), strict=True)]
        in_wire = counts.ids(len(layout.parts))
        ids = [total + in_wire[layout.wire[p]] for p, total in enumerate(ids)]
        if reset:
            counts.reset()
    return _Counts(steps, bags, repeated, ids)


def _frequent(part: ShardedCollection, reset: bool) -> dict[int, FrequentIds]:
    """Return the most frequent ids of this rank's batches, by table."""
    counts = part.exchange.hot_counts
    if counts is None:
        return {}
    found = {t: own for t in range(len(part.exchange.layout.tables)) if (own := counts.top(t)) is not None}
    if reset:
        counts.reset()
    return found


def _add(
    path: str,
    part: ShardedCollection,
    counts_by_rank: list[_Counts],
    mean_steps: float,
    features: dict[Name, tuple[FeatureLoad, ...]],
    reads: dict[Name, tuple[float, ...]],
) -> None:
    """Add one collection's load to `features` and `reads`.

    Args:
        counts_by_rank: counts of each rank, as `_counted` returns them.
        mean_steps: mean steps of a rank.
    """
    layout, size = part.exchange.layout, part.exchange.group.size
    team_of = part.exchange.teams.of if part.exchange.teams is not None else None
    names = [table.name for table in layout.tables]
    by_slot = [0.0] * len(layout.slots)
    by_table = {name: [0.0] * size for name in names}
    # The parts of a slot's first route contain each of its rows exactly once.
    whole = {p for route in _first_routes(layout.routes) for p in route}
    for home, counts in enumerate(counts_by_rank):
        for s, (all_ids, distinct) in enumerate(counts.repeated):
            by_slot[s] += all_ids - distinct
        for p, count in enumerate(counts.ids):
            piece = layout.parts[p]
            if p in whole:
                by_slot[piece.slot] += count
            table = names[layout.slots[piece.slot].table]
            by_table[table][reader(piece.owners, home, layout.topology, team_of)] += count * len(piece.units)
    repeated = [
        [sum(pair[i] for pair in own) for i in (0, 1)]
        for own in zip(*(c.repeated for c in counts_by_rank), strict=True)
    ]
    for t, name in enumerate(names):
        features[(path, name)] = tuple(
            FeatureLoad(
                slot.feature,
                sum(counts.bags[s] for counts in counts_by_rank) / (mean_steps * size),
                by_slot[s] / (mean_steps * size),
                repeated[s][1] / repeated[s][0] if repeated[s][0] else None,
            )
            for s, slot in enumerate(layout.slots)
            if slot.table == t
        )
        reads[(path, name)] = tuple(count / mean_steps for count in by_table[name])


def _first_routes(routes: Any) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for route in routes:
        found.setdefault(route.slot, route.parts)
    return list(found.values())
