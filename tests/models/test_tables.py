from __future__ import annotations

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.models.tables import common_dim, output_names, prefetched
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.feature_processed import FeatureProcessedEmbeddingBagCollection
from tilerec.modules.feature_processor import PositionWeightedModule
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise
from tilerec.sharding.exchange import RoutedFeatures
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.virtual import run_virtual_ranks


def test_a_feature_of_several_tables_is_named_with_each() -> None:
    configs = [
        EmbeddingBagConfig(9, 4, "t1", feature_names=["a", "b"]),
        EmbeddingBagConfig(9, 4, "t2", feature_names=["b", "c"]),
    ]
    assert output_names(configs) == ["a", "b@t1", "b@t2", "c"]


def test_the_common_dim_is_that_of_every_table() -> None:
    assert common_dim("M", [EmbeddingBagConfig(9, 4, "t1"), EmbeddingBagConfig(8, 4, "t2")]) == 4
    with pytest.raises(ConfigError, match="M: got embedding_dim 5 of table 't2' and 4 of table 't1'"):
        common_dim("M", [EmbeddingBagConfig(9, 4, "t1"), EmbeddingBagConfig(8, 5, "t2")])


def test_tables_are_asked_to_make_a_batch_ready_where_they_read_it_as_it_is() -> None:
    batch = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1, 2]), torch.tensor([2]))
    tables = [EmbeddingBagConfig(9, 4, "t", feature_names=["a"])]
    assert prefetched(EmbeddingBagCollection(tables), batch) is batch
    weighted = EmbeddingBagCollection(tables, is_weighted=True)
    processed = FeatureProcessedEmbeddingBagCollection(weighted, {"a": PositionWeightedModule(3)})
    assert prefetched(processed, batch) is batch
    module = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(SGD(lr=0.1), module.parameters())

    def routed(group: object) -> None:
        shard(module, {"t": row_wise()}, mesh=group)
        ready = prefetched(module, batch)
        assert isinstance(ready, RoutedFeatures)
        assert torch.equal(module(ready).values(), module(batch).values())

    run_virtual_ranks(1, routed)
