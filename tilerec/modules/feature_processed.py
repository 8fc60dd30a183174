"""`FeatureProcessedEmbeddingBagCollection`: feature processors, then a weighted `EmbeddingBagCollection`."""

from __future__ import annotations

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processor import (
    FeatureProcessor,
    FeatureProcessorDictWrapper,
    FeatureProcessorsCollection,
    apply_feature_processors_to_kjt,
)
from tilerec.modules.recorded_call import RecordedCall, is_proxy
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import EmbeddingBagConfig


class FeatureProcessedEmbeddingBagCollection(RecordedCall, nn.Module):
    """Feature processors, followed by a pooled lookup with the weights that they return.

    Args:
        embedding_bag_collection: with `is_weighted=True`.
        feature_processors: a `FeatureProcessor` for every feature that the tables read, or a collection that takes the
            whole batch.

    Shape: a `KeyedJaggedTensor` to the `KeyedTensor` of the embedding bag collection.

    State: `_embedding_bag_collection.*`; `_feature_processors.<feature>.position_weight`, or the names of the
    processors' collection (`_feature_processors.position_weights.<feature>`).

    Raises:
        ConfigError: the embedding bag collection takes no weights, or a dict's keys differ from the tables' features.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: dict[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ConfigError(
                "FeatureProcessedEmbeddingBagCollection: got an embedding_bag_collection that takes no weights. Build "
                "it with is_weighted=True, because feature processors return weights."
            )
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors: nn.Module
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
            return
        wanted = {name for table in self.embedding_bag_configs() for name in table.feature_names}
        missing, extra = sorted(wanted - set(feature_processors)), sorted(set(feature_processors) - wanted)
        if missing or extra:
            raise ConfigError(
                "FeatureProcessedEmbeddingBagCollection: feature_processors must have exactly the features of the "
                f"tables; missing: {missing}; not read by any table: {extra}. Add or remove these, or pass a "
                "FeatureProcessorsCollection."
            )
        self._feature_processors = nn.ModuleDict(feature_processors)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the table configs."""
        return list(self._embedding_bag_collection.embedding_bag_configs())

    def is_weighted(self) -> bool:
        """Return True, always."""
        return True

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._embedding_bag_collection.device

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """Return the two stages: the processors as one collection, and the tables."""
        processors = self._feature_processors
        if isinstance(processors, FeatureProcessorsCollection):
            return processors, self._embedding_bag_collection
        assert isinstance(processors, nn.ModuleDict)
        return FeatureProcessorDictWrapper(processors), self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if is_proxy(features):
            return self._record(features)
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processed = apply_feature_processors_to_kjt(features, dict(processors.items()))
        else:
            processed = processors(features)
        pooled: KeyedTensor = self._embedding_bag_collection(processed)
        return pooled
