"""`EmbeddingCollection`: several tables, one row per id, in the order of the ids.

out[f].values()[p] = W_f[id_p]   for the p-th id of feature f;  out[f].lengths() are the lengths of feature f
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilerec.modules.cached_lookup import eager_forward
from tilerec.modules.collection import Lookup, TableCollection
from tilerec.modules.id_clamp import OnBadId, key_starts
from tilerec.modules.recorded_call import RecordedCall, is_proxy
from tilerec.modules.table import Tables
from tilerec.ops.gradient.definition import sort_in_advance
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.lookup.definition import sequence_lookup
from tilerec.ops.runtime.upload import constants
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.table import DataType, EmbeddingConfig
from tilerec.storage.prefetched_results import MAX_RESULTS, PrefetchedResults, Sources


class EmbeddingCollection(RecordedCall, TableCollection):
    """Rows of a batch of sparse features, one per id (sequence embeddings).

    Args:
        tables: configs; names must differ. Dims and data types may differ between tables. Several features may share a
            table, and a feature may read several tables (its output is then named `feature@table`).
        device: of the parameters; "meta" allocates nothing.
        need_indices: whether to return the ids as the `weights()` of each result.
        output_dtype, on_bad_id: as in `EmbeddingBagCollection`.

    Parameters are leaves named `embeddings.<table>.weight`.

    Example:
        >>> ec = EmbeddingCollection([EmbeddingConfig(10, 4, "item", feature_names=["item"])])
        >>> kjt = KeyedJaggedTensor.from_lengths_sync(["item"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
        >>> ec(kjt)["item"].values().shape
        torch.Size([3, 4])
    """

    embeddings: Tables

    if TYPE_CHECKING:
        plan: ShardingPlan  # set by `tilerec.shard`

        def __call__(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]: ...

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        output_dtype: DataType | torch.dtype | None = None,
        on_bad_id: OnBadId = "error",
    ) -> None:
        super().__init__(tables, device, "embeddings", output_dtype, on_bad_id)
        self._need_indices = need_indices
        self._dims = tuple(read.dim for read in self._reads)
        self._ordered = PrefetchedResults()  # per batch and lookup, ids in the order of its features

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the row of every id.

        Args:
            features: keys in any order; keys that no table reads are ignored.

        Returns:
            Embedding name to `JaggedTensor` with values `[ids of the feature, dim]` and the feature's lengths.

        Raises:
            InputError: a feature is missing, an id is outside its table, or ids are not integers.
        """
        if is_proxy(features):
            return self._record(features)
        if torch.compiler.is_compiling() and self._has_caches():
            found: dict[str, JaggedTensor] = eager_forward(self, features)
            return found
        ids = self._checked(features)
        leaves, attached, cached, sinks, no_sinks = self._operands()
        dtype = self._dtype(leaves)
        keys = features.keys()
        sizes = features.length_per_key()
        results: dict[str, JaggedTensor] = {}
        for lookup in self._lookups(keys, attached, cached, self._split()):
            own_ids, own_sizes = ids[lookup.form], [sizes[k] for k in lookup.keys]
            own_sinks = sinks if lookup.attached else no_sinks
            location = self._location(features, lookup, own_ids)
            if location is None and lookup.keys != tuple(range(len(keys))):
                own_ids = self._in_order(features, lookup, own_ids, own_sizes)
            # On the CPU, as the host has the sizes already (symbolic if traced). From a GPU tensor, the backward would
            # have to wait to read them.
            own_starts = torch.tensor(list(accumulate(own_sizes, initial=0)), device="cpu")
            out, _ = sequence_lookup(
                leaves, own_sinks, own_ids, own_starts, lookup.tables, dtype, lookup.names, location=location
            )
            for s, k, rows in zip(lookup.reads, lookup.keys, out.split(own_sizes), strict=True):
                feature = features[keys[k]]
                results[self._reads[s].name] = JaggedTensor(
                    rows,
                    feature.values() if self._need_indices else None,
                    feature.lengths(),
                    feature.offsets_or_none(),  # if None, computed at first use
                )
        return {read.name: results[read.name] for read in self._reads}

    def _in_order(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return `_by_keys` of these ids, or the result that `prefetch` has computed."""
        if not torch.compiler.is_compiling() and self._ordered:
            made = self._ordered.take(_sources(features, lookup), stays=not torch.is_grad_enabled())
            if made is not None:
                return made[0]
        return self._by_keys(features, lookup, ids, sizes)

    def _by_keys(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the ids of a lookup's features, concatenated."""
        starts, order = key_starts(features), constants(lookup.keys, ids.device)
        own_starts = torch.ops.tilerec.offsets_from_lengths((starts[1:] - starts[:-1])[order])
        own: Tensor = torch.ops.tilerec.select_segments(ids, starts, order, own_starts, sum(sizes))
        return own

    def _order_ahead(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor) -> None:
        sizes, own_ids = features.length_per_key(), ids
        bags = [sizes[k] for k in lookup.keys]
        if lookup.keys != tuple(range(len(sizes))):
            own_ids = self._by_keys(features, lookup, ids, bags)
            sources = _sources(features, lookup)
            self._ordered.keep(sources, [own_ids], ids.device, MAX_RESULTS * len(self._reads))
        rows, dim = [table.rows for table in self._tables.values()], self._dims[lookup.reads[0]]
        starts = list(accumulate(bags, initial=0))[:-1]
        count = len(bags)
        sort_in_advance(
            GradientRecord(
                0, own_ids, own_ids, None, None, tuple([rows[t].handle for t in lookup.tables]), (dim,) * count,
                tuple(starts), tuple(bags), tuple([start * dim for start in starts]), (dim,) * count, (0,) * count,
            )
        )  # fmt: skip

    def _split(self) -> Sequence[int]:
        return self._dims

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the table configs, as given."""
        return list(self._configs)  # type: ignore[arg-type]

    def need_indices(self) -> bool:
        """Return True if results have the ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the tables' common dim, or -1 if the dims differ."""
        dims = set(self._dims)
        return dims.pop() if len(dims) == 1 else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the embedding names of each table, in the order of the tables."""
        return [[read.name for read in self._reads if read.table == config.name] for config in self._configs]


def _sources(features: KeyedJaggedTensor, lookup: Lookup) -> Sources | None:
    """Return the tensors and keys that a lookup's reordered ids are computed from, as their cache key."""
    return Sources.of((features.values(), features.offsets()), (tuple(features.keys()), lookup.keys, lookup.form))
