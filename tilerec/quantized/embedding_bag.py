"""`QuantEmbeddingBagCollection`: pooled lookups in quantized tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.id_clamp import OnBadId
from tilerec.modules.inverse_indices import check_samples, sample_bags
from tilerec.ops.quantized.definition import quantized_pooled_lookup
from tilerec.quantized.collection import QuantLookup, QuantTableCollection, converted
from tilerec.quantized.convert import TableConverter
from tilerec.quantized.row_type import AnyRowType
from tilerec.quantized.table import QuantTable, QuantTables
from tilerec.sparse.columns import Columns
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import EmbeddingBagConfig


class QuantEmbeddingBagCollection(QuantTableCollection):
    """Pooled embeddings of a batch of sparse features, for inference.

    `quantize_tables` makes it from an `EmbeddingBagCollection`. Results have the bits of that module with the rows
    that the quantized ones stand for.

    Args:
        tables: configs, as of the float collection.
        row_types: of each table, in the order of `tables`.
        is_weighted: whether each id has a weight (`features.weights()`). It receives no gradient.
        device: of the tables; "meta" allocates nothing. Rows are not initialised: load a state dict.
        output_dtype: of the result.
        on_bad_id: as in `EmbeddingBagCollection`.
        modules: the tables; None makes them.

    State: `embedding_bags.<table>.weight`, uint8 `[rows, row_bytes]` or floats `[rows, dim]`.

    Example:
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["item"])])
        >>> kjt = KeyedJaggedTensor.from_lengths_sync(["item"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
        >>> quantize_tables(ebc, "int8")(kjt)["item"].shape
        torch.Size([3, 4])
    """

    embedding_bags: QuantTables

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        row_types: Sequence[AnyRowType],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        output_dtype: torch.dtype = torch.float32,
        on_bad_id: OnBadId = "error",
        modules: Sequence[QuantTable] | None = None,
    ) -> None:
        super().__init__(tables, row_types, device, "embedding_bags", output_dtype, on_bad_id, modules)
        self._is_weighted = is_weighted
        self._dims = [read.dim for read in self._reads]
        self._columns = Columns([read.name for read in self._reads], self._dims)

    @classmethod
    def from_float(
        cls,
        module: EmbeddingBagCollection,
        row_types: AnyRowType | Sequence[AnyRowType] = "int8",
        *,
        output_dtype: torch.dtype = torch.float32,
        converter: TableConverter | None = None,
    ) -> QuantEmbeddingBagCollection:
        """Quantize the tables of a float collection, which stays as it is.

        Args:
            row_types: one for all tables, or one per table.
            converter: of a whole model; see `quantize_tables`.

        Raises:
            ConfigError, InputError: as of `quantize_tables`.
        """
        tables, types = converted(module, row_types, converter)
        made = cls(
            module.embedding_bag_configs(), types, module.is_weighted(), output_dtype=output_dtype,
            on_bad_id=module._on_bad_id, modules=tables,
        )  # fmt: skip
        return made.train(module.training)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool; shapes and errors as of `EmbeddingBagCollection.forward`."""
        ids = self._ids(features)
        offsets = features.offsets()
        weights = features.weights() if self._is_weighted else None
        variable = features.variable_stride_per_key()
        batches = features.stride_per_key() if variable else [features.stride()]
        rows, dtype = self._weights(), self._output_dtype
        lookups = self._lookups(features.keys())
        blocks: list[Tensor | None] = [None] * len(self._reads)
        for lookup in lookups:
            out = quantized_pooled_lookup(
                rows, self._table_dims, self._bits, ids[lookup.form], offsets, weights, lookup.tables, lookup.keys,
                lookup.means, batches, dtype, lookup.names,
            )  # fmt: skip
            if len(lookups) == 1 and not variable:
                return KeyedTensor.from_columns(self._columns, out)
            dims = [self._dims[r] for r in lookup.reads]
            parts = self._expanded(features, lookup, out, dims, batches) if variable else out.split(dims, dim=1)
            for r, part in zip(lookup.reads, parts, strict=True):
                blocks[r] = part
        if not blocks:  # no table reads a feature
            return KeyedTensor.from_columns(
                self._columns, torch.empty(features.stride(), 0, dtype=dtype, device=self.device)
            )
        together = torch.cat([block for block in blocks if block is not None], dim=1)
        return KeyedTensor.from_columns(self._columns, together)

    def _expanded(
        self, features: KeyedJaggedTensor, lookup: QuantLookup, out: Tensor, dims: list[int], batches: list[int]
    ) -> list[Tensor]:
        """Return the blocks `[B, dim]` of a variable batch, expanded by each feature's inverse indices."""
        wanted = [self._reads[r].feature for r in lookup.reads]
        check_samples(type(self).__name__, wanted, features)
        bag_of = sample_bags(features)
        if len(batches) == 1:  # with one key, the op returned the uniform layout
            return [part[bag_of[name]] for part, name in zip(out.split(dims, dim=1), wanted, strict=True)]
        parts = out.split([batches[k] * dim for k, dim in zip(lookup.keys, dims, strict=True)])
        return [
            part.view(batches[k], dim)[bag_of[name]]
            for part, k, dim, name in zip(parts, lookup.keys, dims, wanted, strict=True)
        ]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the table configs; `data_type` is the type that the table was trained with."""
        return list(self._configs)  # type: ignore[arg-type]

    def is_weighted(self) -> bool:
        """Return True if ids have weights."""
        return self._is_weighted
