"""`TableStats`: how a run's tables are used between two log events, and the time of its stages.

    ids_per_second/<table>      ids of all ranks' batches
    distinct_rate/<table>       distinct ids per id of one batch of a rank, the mean over ranks
    reads_per_step/rank_<r>     ids per step that rank r looks up in all tables
    imbalance                   the busiest rank's reads divided by the mean; 1 is even
    wire_bytes_per_step         bytes that all ranks send for their tables
    max_wire_bytes_per_step     those of the rank that sends most                                       several ranks
    cache_hit_rate/<table>      hits per distinct row of a batch, of all ranks                          cached tables
    ms_per_step/<stage>         time of a stage, the mean over ranks; "lookup" is a part of "forward"
    ms_per_step/step            time of a step, reading included
    max_ms_per_step/<stage>     time of a stage on the rank where it takes longest                      several ranks

The values come from counts that the library keeps, and from hooks that add numbers of ids (`lookup_counts.py`). Reading
a count of a GPU waits for the device, so it happens at log events only. There the ranks add up their numbers, with one
message.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import nn

from tilerec.comms.traffic import Traffic
from tilerec.modules.collection import TableCollection
from tilerec.parallel.resharding.measured_load import own_reads
from tilerec.pipelines.stage_times import StageTimes
from tilerec.sharding.embedding import ShardedCollection
from tilerec.train.lookup_counts import LookupCounts
from tilerec.train.world import World

STEP = "step"
"""Name of the whole step among the stages."""


class _Number(NamedTuple):
    """Key of a number that the ranks add up: a kind, and a table, a rank or a stage and a rank."""

    kind: str
    name: str = ""
    rank: int = 0


_Numbers = dict[_Number, float]


@final
class TableStats:
    """Use of a model's tables and time of its stages since the last log event. All ranks make the same calls.

    Args:
        model: the model, sharded if there is a group.
        world: the ranks.
        times: of the stages of the run; it gets the time of lookups, too.
        stages: names of all stages, equal on all ranks.
    """

    def __init__(self, model: nn.Module, world: World, times: StageTimes, stages: Sequence[str]) -> None:
        self._world, self._times = world, times
        self._stages = tuple(dict.fromkeys((*stages, "lookup", STEP)))
        self._collections = [part for part in model.modules() if isinstance(part, TableCollection)]
        self._sharded = [part for part in self._collections if isinstance(part, ShardedCollection)]
        self._lookups = LookupCounts(model, times)
        self._since = self._counts()
        self._paused: _Numbers | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the lookups and messages of a with block, such as those of an evaluation or a log event."""
        self._lookups.pause()
        self._paused = self._counts()
        yield
        # Shift the start by everything that was counted in between.
        now = self._counts()
        self._since = {key: count + now[key] - self._paused[key] for key, count in self._since.items()}
        self._paused = None
        self._lookups.pause(False)

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._lookups.close()

    def values(self, seconds: float, steps: int) -> dict[str, float]:
        """Return the values since the last call, by name. Collective; one all-reduce.

        Args:
            seconds: of training since the last call.
            steps: number of steps since the last call.
        """
        now = self._counts() if self._paused is None else self._paused
        own = {key: count - self._since[key] for key, count in now.items()}
        self._since = now
        for table, sample in self._lookups.samples().items():
            own[_Number("sampled", table)], own[_Number("distinct", table)] = sample
        taken = {**self._times.take(), STEP: seconds}
        for stage in self._stages:
            for rank in range(self._world.size):
                own[_Number("stage", stage, rank)] = taken.get(stage, 0.0) if rank == self._world.rank else 0.0
        total = self._summed(own)
        return self._values(total, steps) if steps else {}

    def _summed(self, own: _Numbers) -> _Numbers:
        """Return the sums over ranks. Collective."""
        totals = self._world.sum("table stats", torch.tensor(list(own.values()), dtype=torch.float64))
        return dict(zip(own, totals.tolist(), strict=True))

    def _values(self, total: Mapping[_Number, float], steps: int) -> dict[str, float]:
        """Return the values of all ranks' numbers; equal on all ranks."""
        values: dict[str, float] = {}
        size = self._world.size
        # The mean over ranks: each has its own clock.
        seconds = sum(total[_Number("stage", STEP, rank)] for rank in range(size)) / size
        for table in self._lookups.tables if seconds > 0 else ():
            values[f"ids_per_second/{table}"] = total[_Number("ids", table)] / seconds
        for table in self._lookups.tables:
            if total.get(_Number("sampled", table)):
                values[f"distinct_rate/{table}"] = total[_Number("distinct", table)] / total[_Number("sampled", table)]
        for table in self._lookups.tables:
            if total[_Number("rows", table)]:
                values[f"cache_hit_rate/{table}"] = total[_Number("hits", table)] / total[_Number("rows", table)]
        if self._collections:
            reads, sent = ([total[_Number(kind, rank=rank)] / steps for rank in range(size)] for kind in _OF_RANKS)
            values |= {f"reads_per_step/rank_{rank}": count for rank, count in enumerate(reads)}
            if sum(reads) > 0:
                values["imbalance"] = max(reads) * size / sum(reads)
            values["wire_bytes_per_step"] = sum(sent)
            if size > 1:
                values["max_wire_bytes_per_step"] = max(sent)
        for stage in self._stages:
            of_ranks = [total[_Number("stage", stage, rank)] * 1e3 / steps for rank in range(size)]
            if any(of_ranks):
                values[f"ms_per_step/{stage}"] = sum(of_ranks) / size
                if size > 1:
                    values[f"max_ms_per_step/{stage}"] = max(of_ranks)
        return values

    def _counts(self) -> _Numbers:
        """Return this rank's counts since the start."""
        ids = self._lookups.ids()
        counts: _Numbers = {_Number("ids", table): float(count) for table, count in ids.items()}
        for table in ids:
            counts[_Number("rows", table)] = counts[_Number("hits", table)] = 0.0
        for part in self._collections:
            for table, stats in part.cache_stats().items():
                counts[_Number("rows", table)] += stats.rows
                counts[_Number("hits", table)] += stats.hits
        for kind in _OF_RANKS:
            counts |= {_Number(kind, rank=rank): 0.0 for rank in range(self._world.size)}
        own = self._world.rank
        for part in self._sharded:
            for rank, reads in enumerate(own_reads(part)):
                counts[_Number("reads", rank=rank)] += reads
        counts[_Number("reads", rank=own)] += self._lookups.ids_looked_up_here()
        counts[_Number("sent", rank=own)] += sum(traffic.total() for traffic in self._traffic())
        return counts

    def _traffic(self) -> list[Traffic]:
        """Return the counts of bytes of the groups over which tables are sharded."""
        groups = {id(part.exchange.group): part.exchange.group for part in self._sharded}
        return [group.traffic for group in groups.values()]


_OF_RANKS = ("reads", "sent")
"""Kinds of numbers with one entry per rank."""
