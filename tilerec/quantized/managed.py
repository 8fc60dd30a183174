"""`QuantManagedCollisionEmbeddings`: quantized tables for arbitrary int64 ids."""

from __future__ import annotations

from torch import nn

from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.ops.runtime.graph_break import graph_break
from tilerec.quantized.embedding import QuantEmbeddingCollection
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor


class QuantManagedCollisionEmbeddings(nn.Module):
    """Managed collision, then a lookup in quantized tables.

    The id maps are read only, in every mode: a new id would need a row, and rows are not written.

    Args:
        embedding_module: the tables.
        managed_collision_collection: the id maps of the trained model; set to evaluation mode.
        return_remapped_features: whether `forward` also returns the batch of row numbers.
    """

    def __init__(
        self,
        embedding_module: QuantEmbeddingBagCollection | QuantEmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
    ) -> None:
        super().__init__()
        self._managed_collision_collection = managed_collision_collection.eval()
        self._embedding_module = embedding_module
        self._return_remapped_features = return_remapped_features

    def train(self, mode: bool = True) -> QuantManagedCollisionEmbeddings:
        """Set the mode of the module; the id maps stay in evaluation mode."""
        super().train(mode)
        self._managed_collision_collection.eval()
        return self

    @graph_break
    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Map ids to rows, then look up; results as of the float modules."""
        remapped = self._managed_collision_collection(features, mutate_miss_lengths)
        found = self._embedding_module(remapped)
        return found, remapped if self._return_remapped_features else None
