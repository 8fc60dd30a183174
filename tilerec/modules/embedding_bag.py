"""`EmbeddingBagCollection`: several tables, one pooled vector per feature and sample.

  out[b, f] = s * sum_p w_p * W_f[id_p]   over the ids p of feature f in sample b;  s = 1 (sum) or 1 / L (mean)

This single-process module is the specification: every sharding of it returns the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilerec.modules.cached_lookup import eager_forward
from tilerec.modules.collection import Lookup, TableCollection
from tilerec.modules.id_clamp import OnBadId
from tilerec.modules.inverse_indices import check_samples, sample_bags
from tilerec.modules.recorded_call import RecordedCall, is_proxy
from tilerec.modules.table import Tables
from tilerec.ops.gradient.definition import bag_starts, pooled_blocks, sort_in_advance
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.lookup.definition import pooled_lookup
from tilerec.sparse.columns import Columns
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.storage.located_batch import FeatureBatch


class EmbeddingBagCollection(RecordedCall, TableCollection):
    """Pooled embeddings of a batch of sparse features.

    Args:
        tables: configs; names must differ. Dims, data types and pooling may differ between tables. Several features may
            share a table, and a feature may read several tables (its output is then named `feature@table`).
        is_weighted: whether each id has a weight (`features.weights()`), which receives gradients.
        device: of the parameters; "meta" allocates nothing.
        output_dtype: of the result; None takes the promoted type of the tables at the time of the call.
        on_bad_id: "error" raises an error that names table, feature and id. "clamp" clamps ids into the table, counts
            them and warns.

    Parameters are leaves named `embedding_bags.<table>.weight`.

    Example:
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["item"])])
        >>> kjt = KeyedJaggedTensor.from_lengths_sync(["item"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
        >>> ebc(kjt)["item"].shape
        torch.Size([3, 4])
    """

    embedding_bags: Tables

    if TYPE_CHECKING:
        plan: ShardingPlan  # set by `tilerec.shard`

        def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor: ...

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        output_dtype: DataType | torch.dtype | None = None,
        on_bad_id: OnBadId = "error",
    ) -> None:
        super().__init__(tables, device, "embedding_bags", output_dtype, on_bad_id)
        self._is_weighted = is_weighted
        self._dims = [read.dim for read in self._reads]
        self._columns = Columns([read.name for read in self._reads], self._dims)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: keys in any order; keys that no table reads are ignored. F features of B samples, or a variable
                batch with `inverse_indices`.

        Returns:
            `KeyedTensor` `[B, sum of dims]`, one key per (table, feature) in the order of the tables.

        Raises:
            InputError: a feature is missing, an id is outside its table, ids are not integers, or weights are missing.
        """
        if is_proxy(features):
            return self._record(features)
        if torch.compiler.is_compiling() and self._has_caches():
            pooled: KeyedTensor = eager_forward(self, features)
            return pooled
        ids = self._checked(features)
        offsets = features.offsets()
        weights = features.weights() if self._is_weighted else None
        variable = features.variable_stride_per_key()
        batches = features.stride_per_key() if variable else [features.stride()]
        leaves, attached, cached, sinks, no_sinks = self._operands()
        dtype = self._dtype(leaves)
        lookups = self._lookups(features.keys(), attached, cached, self._split())
        blocks: list[Tensor | None] = [None] * len(self._reads)
        for lookup in lookups:
            own_sinks = sinks if lookup.attached else no_sinks
            own_ids = ids[lookup.form]
            out, _ = pooled_lookup(
                leaves, own_sinks, own_ids, offsets, weights, lookup.tables, lookup.keys, lookup.means, batches, dtype,
                lookup.names, location=self._location(features, lookup, own_ids),
            )  # fmt: skip
            if len(lookups) == 1 and not variable:
                return KeyedTensor.from_columns(self._columns, out)
            dims = [self._dims[s] for s in lookup.reads]
            parts = self._expanded(features, lookup, out, dims, batches) if variable else out.split(dims, dim=1)
            for s, part in zip(lookup.reads, parts, strict=True):
                blocks[s] = part
        if not blocks:  # no table reads a feature
            return KeyedTensor.from_columns(
                self._columns, torch.empty(features.stride(), 0, dtype=dtype, device=self.device)
            )
        together = torch.cat([block for block in blocks if block is not None], dim=1)
        return KeyedTensor.from_columns(self._columns, together)

    def _feature_batch(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor) -> FeatureBatch:
        variable = features.variable_stride_per_key()
        batches = features.stride_per_key() if variable else [features.stride()]
        starts, bags = bag_starts(lookup.keys, batches)
        return replace(
            super()._feature_batch(features, lookup, ids),
            offsets=features.offsets(),
            sample_weights=features.weights() if self._is_weighted else None,
            starts=starts,
            bags=bags,
        )

    def _order_ahead(self, features: KeyedJaggedTensor, lookup: Lookup, ids: Tensor) -> None:
        rows = [table.rows for table in self._tables.values()]
        variable = features.variable_stride_per_key()
        batches = features.stride_per_key() if variable else [features.stride()]
        starts, bags = bag_starts(lookup.keys, batches)
        dims = [self._dims[s] for s in lookup.reads]
        places, strides = pooled_blocks(dims, bags, len(batches) == 1)
        weights = features.weights() if self._is_weighted else None
        sort_in_advance(
            GradientRecord(
                0, ids, ids, features.offsets(), weights, tuple([rows[t].handle for t in lookup.tables]), tuple(dims),
                tuple(starts), tuple(bags), tuple(places), tuple(strides), lookup.means,
            )
        )  # fmt: skip

    def _expanded(
        self, features: KeyedJaggedTensor, lookup: Lookup, out: Tensor, dims: list[int], batches: list[int]
    ) -> list[Tensor]:
        """Return the blocks `[B, dim]` of a variable batch, expanded by each feature's inverse indices."""
        check_samples(type(self).__name__, [self._reads[s].feature for s in lookup.reads], features)
        bag_of = sample_bags(features)
        if len(batches) == 1:  # with one key, the op returned the uniform layout
            return [
                part[bag_of[self._reads[s].feature]]
                for part, s in zip(out.split(dims, dim=1), lookup.reads, strict=True)
            ]
        parts = out.split([batches[k] * dim for k, dim in zip(lookup.keys, dims, strict=True)])
        return [
            part.view(batches[k], dim)[bag_of[self._reads[s].feature]]
            for part, k, dim, s in zip(parts, lookup.keys, dims, lookup.reads, strict=True)
        ]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the table configs, as given."""
        return list(self._configs)  # type: ignore[arg-type]

    def is_weighted(self) -> bool:
        """Return True if ids have weights."""
        return self._is_weighted
