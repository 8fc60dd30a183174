"""`TableStats`: how a run's tables are used between two log events, from counts that the library keeps anyway.

    ids_per_second/<table>      ids that all ranks look up                                     sharded tables
    reads_per_step/rank_<r>     ids per step that rank r looks up in all tables                sharded tables
    imbalance                   the busiest rank's reads divided by the mean; 1 is even        sharded tables
    wire_bytes_per_step         bytes that this rank sends for its tables                      sharded tables
    cache_hit_rate/<table>      hits per distinct row of a batch, on this rank                 cached tables
    distinct_rate/<table>       distinct rows per id of a batch, on this rank                  cached tables

Reading a count of a GPU waits for the device, so it happens at log events only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import nn

from tilerec.comms.group import Group
from tilerec.modules.collection import TableCollection
from tilerec.parallel.resharding.measured_load import load_of
from tilerec.parallel.traffic import traffic


@dataclass
class _Counts:
    """Counts since the tables were sharded or cached."""

    steps: float = 0.0
    ids: dict[str, float] = field(default_factory=dict)  # by table
    reads: dict[str, float] = field(default_factory=dict)  # by rank
    bytes: float = 0.0
    cache: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # ids, rows and hits by table

    def minus(self, other: _Counts) -> _Counts:
        return _Counts(
            self.steps - other.steps,
            {name: count - other.ids.get(name, 0) for name, count in self.ids.items()},
            {name: count - other.reads.get(name, 0) for name, count in self.reads.items()},
            self.bytes - other.bytes,
            {
                name: tuple(a - b for a, b in zip(count, other.cache.get(name, (0, 0, 0)), strict=True))  # type: ignore[misc]
                for name, count in self.cache.items()
            },
        )


@final
class TableStats:
    """Use of a model's tables since the last log event. All ranks call all methods.

    Args:
        model: the model, sharded if there is a group.
        group: the ranks; None for one process.
    """

    def __init__(self, model: nn.Module, group: Group | None) -> None:
        self._model = model
        self._collections = [part for part in model.modules() if isinstance(part, TableCollection)]
        self._sharded = group is not None and bool(self._collections)
        self._active = self._sharded or any(part.cache_stats() for part in self._collections)
        self._since = self._counts()
        self._paused: _Counts | None = None

    def pause(self) -> None:
        """Leave out lookups from here to `resume`, such as those of an evaluation."""
        self._paused = self._counts()

    def resume(self) -> None:
        """Count lookups again."""
        if self._paused is not None:
            # Shift the start by everything that was counted in between.
            self._since = self._counts().minus(self._paused.minus(self._since))
            self._paused = None

    def values(self, seconds: float) -> dict[str, float]:
        """Return the values since the last call, by name; none for tables without counts.

        Args:
            seconds: of training since the last call.
        """
        now = self._counts()
        spent, self._since = now.minus(self._since), now
        values: dict[str, float] = {}
        if self._sharded and spent.steps > 0:
            if seconds > 0:
                values |= {f"ids_per_second/{name}": ids / seconds for name, ids in spent.ids.items()}
            reads = {name: count / spent.steps for name, count in spent.reads.items()}
            values |= {f"reads_per_step/{name}": count for name, count in reads.items()}
            if sum(reads.values()) > 0:
                values["imbalance"] = max(reads.values()) * len(reads) / sum(reads.values())
            values["wire_bytes_per_step"] = spent.bytes / spent.steps
        for name, (ids, rows, hits) in spent.cache.items():
            if ids and rows:
                values[f"cache_hit_rate/{name}"] = hits / rows
                values[f"distinct_rate/{name}"] = rows / ids
        return values

    def _counts(self) -> _Counts:
        counts = _Counts()
        if not self._active:
            return counts
        if self._sharded:
            load = load_of(self._model, reset=False)
            counts.steps = load.steps
            ranks = len(load.reads_per_rank)
            for (_, table), features in load.features.items():
                ids = sum(feature.ids for feature in features) * load.steps * ranks
                counts.ids[table] = counts.ids.get(table, 0) + ids
            counts.reads = {f"rank_{rank}": reads * load.steps for rank, reads in enumerate(load.reads_per_rank)}
            counts.bytes = traffic(self._model).total()
        for part in self._collections:
            for name, stats in part.cache_stats().items():
                counts.cache[name] = (stats.ids, stats.rows, stats.hits)
        return counts
