"""`LookupCounts`: ids that a model's collections look up on this rank, by table, and the time of their calls.

Hooks on the collections see the features of every forward. The number of ids of a feature is on the host already, or
is computed there from the offsets; of a batch on a GPU it is added up on the device, without a wait. The features of
the latest forward are kept, so that a log event can count distinct ids of one batch: no step pays for that.

Legend: F features, N ids.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from tilerec.modules.collection import TableCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddings
from tilerec.pipelines.stage_times import StageTimes
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

LOOKUP = "lookup"
"""Stage of the collections' forwards."""


class Sample(NamedTuple):
    """Ids of one table in one batch, and the number of distinct ones."""

    ids: int
    distinct: int


@final
class LookupCounts:
    """Counts of the ids in this rank's batches, with managed collision before they are mapped.

    Args:
        model: its collections get hooks, until `close`.
        times: gets the time of the collections' forwards, as the stage "lookup".
    """

    def __init__(self, model: nn.Module, times: StageTimes) -> None:
        managed = [part for part in model.modules() if isinstance(part, ManagedCollisionEmbeddings)]
        inner = {id(part.embedding_module) for part in managed}
        tables = [part for part in model.modules() if isinstance(part, TableCollection) and id(part) not in inner]
        self._collections = [_Collection(part, times) for part in (*managed, *tables)]
        self.tables = sorted({table for one in self._collections for table in one.features})

    def ids(self) -> dict[str, int]:
        """Return the ids of each table since the start. Waits for counts on a GPU."""
        totals = dict.fromkeys(self.tables, 0)
        for one in self._collections:
            for table, count in one.ids_by_table().items():
                totals[table] += count
        return totals

    def ids_looked_up_here(self) -> int:
        """Return the ids of collections without sharding, which look up all their ids on this rank."""
        return sum(sum(one.ids_by_table().values()) for one in self._collections if not one.sharded)

    def samples(self) -> dict[str, Sample]:
        """Return the latest batch's ids of each table. A table that several collections read has their sums."""
        totals = dict.fromkeys(self.tables, Sample(0, 0))
        for one in self._collections:
            for table, found in one.samples().items():
                totals[table] = Sample(totals[table].ids + found.ids, totals[table].distinct + found.distinct)
        return totals

    def pause(self, paused: bool = True) -> None:
        """Leave out forwards from now on, such as those of an evaluation; or count them again."""
        for one in self._collections:
            one.paused = paused

    def close(self) -> None:
        """Remove the hooks."""
        for one in self._collections:
            one.close()


class _Collection:
    """Counts of one collection."""

    def __init__(self, part: nn.Module, times: StageTimes) -> None:
        tables = part.embedding_module if isinstance(part, ManagedCollisionEmbeddings) else part
        assert isinstance(tables, TableCollection)
        self.features = {config.name: list(config.feature_names) for config in tables._configs}
        self.sharded = isinstance(tables, ShardedCollection)
        self.paused = False
        self._totals: dict[tuple[str, ...], list[int]] = {}
        self._on_device: dict[tuple[str, ...], Tensor] = {}  # int64 [F + 1], sums of the ends of features
        self._latest: KeyedJaggedTensor | None = None
        self._span = times.span(LOOKUP)
        self._hooks = [part.register_forward_pre_hook(self._begin), part.register_forward_hook(self._end)]

    def _begin(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.paused:
            return
        features = arguments[0] if arguments else None
        if not isinstance(features, KeyedJaggedTensor):
            features = getattr(features, "features", None)  # of a batch that was routed before
        if isinstance(features, KeyedJaggedTensor):
            self._add(features)
        self._span.__enter__()

    def _end(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if not self.paused:
            self._span.__exit__(None, None, None)

    def _add(self, features: KeyedJaggedTensor) -> None:
        self._latest = features
        keys = tuple(features.keys())
        lengths = features.length_per_key_or_none()
        if lengths is None and features.device().type == "cpu":
            lengths = features.length_per_key()
        if lengths is not None:
            total = self._totals.get(keys)
            self._totals[keys] = lengths if total is None else [a + b for a, b in zip(total, lengths, strict=True)]
        else:
            ends = feature_ends(features)
            total_ends = self._on_device.get(keys)
            self._on_device[keys] = ends if total_ends is None else total_ends + ends

    def ids_by_table(self) -> dict[str, int]:
        found = defaultdict[str, int](int)
        on_device = [(keys, ends.diff().tolist()) for keys, ends in self._on_device.items()]
        for keys, lengths in (*self._totals.items(), *on_device):
            for key, length in zip(keys, lengths, strict=True):
                found[key] += length
        return {table: sum(found[feature] for feature in features) for table, features in self.features.items()}

    def samples(self) -> dict[str, Sample]:
        features, self._latest = self._latest, None
        if features is None:
            return {}
        ids_N, starts = features.values(), features.offset_per_key()
        segments = {key: ids_N[a:b] for key, a, b in zip(features.keys(), starts, starts[1:], strict=False)}
        of_table = {
            table: torch.cat([segments[key] for key in keys if key in segments] or [ids_N[:0]])
            for table, keys in self.features.items()
        }
        return dict(zip(of_table, distinct_counts(list(of_table.values())), strict=True))

    def close(self) -> None:
        self._latest = None
        for hook in self._hooks:
            hook.remove()


def feature_ends(features: KeyedJaggedTensor) -> Tensor:
    """Return the start of each feature's ids and the end of the last, int64 [F + 1], without waiting for the device."""
    offsets = features.offsets()
    if not features.variable_stride_per_key() and features.stride():
        return offsets[:: features.stride()].long()
    places = torch.tensor(features.lengths_offset_per_key(), device=offsets.device)
    return offsets[places].long()


def distinct_counts(tables: list[Tensor]) -> list[Sample]:
    """Return the numbers of ids and of distinct ids of integer tensors [N] on one device; waits for it once."""
    if any(ids_N.device.type != "cpu" for ids_N in tables):
        return counts_on_device(tables)
    # numpy sorts with AVX-512: 4,096 ids in 30 us, where torch's CPU sort takes 150 us.
    return [Sample(len(ids_N), _distinct(np.sort(ids_N.detach().numpy()))) for ids_N in tables]


def counts_on_device(tables: list[Tensor]) -> list[Sample]:
    """Return the numbers of `distinct_counts`, computed on the device of the tensors."""
    sorted_ids = [ids_N.sort().values for ids_N in tables]
    steps = torch.stack([(ids_N[1:] != ids_N[:-1]).sum() for ids_N in sorted_ids]).tolist()
    return [Sample(len(ids_N), more + (len(ids_N) > 0)) for ids_N, more in zip(tables, steps, strict=True)]


def _distinct(sorted_N: np.ndarray[Any, Any]) -> int:
    """Return the number of distinct values of a sorted array."""
    return int(np.count_nonzero(sorted_N[1:] != sorted_N[:-1])) + (len(sorted_N) > 0)
