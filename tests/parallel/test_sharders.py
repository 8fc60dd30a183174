"""Sharders and number formats in TorchRec's words."""

from __future__ import annotations

from typing import Any

import pytest

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.qcomms import (
    CommOp,
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from tilerec.parallel.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    get_default_sharders,
)
from tilerec.planner.sharder import sharder_of
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import Wire
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["t"])])


def test_a_sharder_speaks_of_one_kind_of_collection() -> None:
    sequences = EmbeddingCollection([EmbeddingConfig(5, 4, "t", feature_names=["t"])])
    defaults = get_default_sharders()
    assert [sharder.module_type for sharder in defaults] == [EmbeddingBagCollection, EmbeddingCollection]
    assert sharder_of(bags(), defaults) is defaults[0]
    assert sharder_of(sequences, defaults) is defaults[1]
    assert sharder_of(sequences, defaults[:1]) is None
    assert sharder_of(sequences, None) is None
    own = bags()
    assert defaults[0].shardable_parameters(own) == {"t": own.embedding_bags["t"].weight}
    with pytest.raises(ConfigError, match="wanted a EmbeddingBagCollection"):
        defaults[0].shardable_parameters(sequences)


def test_every_sharding_type_is_offered_on_every_device() -> None:
    sharder = EmbeddingBagCollectionSharder()
    assert sharder.sharding_types("cpu") == sharder.sharding_types("cuda")
    assert {"row_wise", "grid_shard", "data_parallel"} <= set(sharder.sharding_types("cpu"))
    assert sharder.compute_kernels("row_wise", "cpu") == ["dense", "fused"]


def test_a_sharder_keeps_what_it_was_given_and_what_it_means() -> None:
    params, wire = {"learning_rate": 0.5}, Wire("bf16", "fp16")
    sharder = EmbeddingBagCollectionSharder(params, wire)
    assert (sharder.fused_params, sharder.optimizer) == (params, SGD(0.5))
    assert sharder.qcomm_codecs_registry is sharder.wire is wire
    bare = EmbeddingCollectionSharder()
    assert (bare.fused_params, bare.optimizer, bare.wire) == ({}, None, None)


def test_formats_in_torchrecs_words_are_a_plans_wire() -> None:
    config = QCommsConfig(forward_precision=CommType.BF16, backward_precision="FP16")
    assert get_qcomm_codecs(config) == Wire("bf16", "fp16")
    assert get_qcomm_codecs(None) == Wire()
    registry = get_qcomm_codecs_registry(config)
    assert EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry).wire == Wire("bf16", "fp16")
    assert EmbeddingCollectionSharder(qcomm_codecs_registry=registry).wire == Wire("bf16", "fp16")
    pooled = get_qcomm_codecs_registry(config, [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL])
    assert EmbeddingCollectionSharder(qcomm_codecs_registry=pooled).wire is None


@pytest.mark.parametrize("wrong", [3, {"POOLED_EMBEDDINGS_ALL_TO_ALL": "bf16"}])
def test_a_registry_that_cannot_be_read_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="wanted a Wire"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=wrong)
    with pytest.raises(ConfigError, match="forward_precision"):
        QCommsConfig("mx4").wire()
