"""`QuantEmbeddingCollection`: one row per id from quantized tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.id_clamp import OnBadId, key_starts
from tilerec.ops.quantized.definition import quantized_sequence_lookup
from tilerec.ops.runtime.upload import constants
from tilerec.quantized.collection import QuantTableCollection, converted
from tilerec.quantized.convert import TableConverter
from tilerec.quantized.row_type import AnyRowType
from tilerec.quantized.table import QuantTable, QuantTables
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingConfig


class QuantEmbeddingCollection(QuantTableCollection):
    """Rows of a batch of sparse features, one per id, for inference (sequence embeddings).

    Args:
        tables, row_types, device, output_dtype, on_bad_id, modules: as in `QuantEmbeddingBagCollection`.
        need_indices: whether to return the ids as the `weights()` of each result.

    State: `embeddings.<table>.weight`, uint8 `[rows, row_bytes]` or floats `[rows, dim]`.
    """

    embeddings: QuantTables

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        row_types: Sequence[AnyRowType],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        output_dtype: torch.dtype = torch.float32,
        on_bad_id: OnBadId = "error",
        modules: Sequence[QuantTable] | None = None,
    ) -> None:
        super().__init__(tables, row_types, device, "embeddings", output_dtype, on_bad_id, modules)
        self._need_indices = need_indices

    @classmethod
    def from_float(
        cls,
        module: EmbeddingCollection,
        row_types: AnyRowType | Sequence[AnyRowType] = "int8",
        *,
        output_dtype: torch.dtype = torch.float32,
        converter: TableConverter | None = None,
    ) -> QuantEmbeddingCollection:
        """Quantize the tables of a float collection; see `QuantEmbeddingBagCollection.from_float`."""
        tables, types = converted(module, row_types, converter)
        made = cls(
            module.embedding_configs(), types, need_indices=module.need_indices(), output_dtype=output_dtype,
            on_bad_id=module._on_bad_id, modules=tables,
        )  # fmt: skip
        return made.train(module.training)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the row of every id; results and errors as of `EmbeddingCollection.forward`."""
        ids = self._ids(features)
        rows = self._weights()
        keys, sizes = features.keys(), features.length_per_key()
        results: dict[str, JaggedTensor] = {}
        for lookup in self._lookups(keys):
            own_ids, own_sizes = ids[lookup.form], [sizes[k] for k in lookup.keys]
            if lookup.keys != tuple(range(len(keys))):
                starts, order = key_starts(features), constants(lookup.keys, own_ids.device)
                own_starts = torch.ops.tilerec.offsets_from_lengths((starts[1:] - starts[:-1])[order])
                own_ids = torch.ops.tilerec.select_segments(own_ids, starts, order, own_starts, sum(own_sizes))
            bounds = torch.tensor(list(accumulate(own_sizes, initial=0)), device="cpu")
            out = quantized_sequence_lookup(
                rows, self._table_dims, self._bits, own_ids, bounds, lookup.tables, self._output_dtype, lookup.names
            )
            for r, k, values in zip(lookup.reads, lookup.keys, out.split(own_sizes), strict=True):
                feature = features[keys[k]]
                results[self._reads[r].name] = JaggedTensor(
                    values,
                    feature.values() if self._need_indices else None,
                    feature.lengths(),
                    feature.offsets_or_none(),
                )
        return {read.name: results[read.name] for read in self._reads}

    def _split(self, read: int) -> int:
        return self._reads[read].dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the table configs; `data_type` is the type that the table was trained with."""
        return list(self._configs)  # type: ignore[arg-type]

    def need_indices(self) -> bool:
        """Return True if results have the ids as weights."""
        return self._need_indices
