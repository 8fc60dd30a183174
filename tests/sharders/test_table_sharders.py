"""Sharders and number formats in TorchRec's words."""

from __future__ import annotations

import pickle
import warnings
from enum import Enum
from typing import Any, get_origin

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.planner.sharder import sharder_of
from tilerec.sharders.qcomms import CommOp, CommType, QCommsConfig, get_qcomm_codecs, get_qcomm_codecs_registry
from tilerec.sharders.table_sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
    get_default_sharders,
)
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
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
    with pytest.raises(ConfigError, match="expected a EmbeddingBagCollection"):
        defaults[0].shardable_parameters(sequences)


def test_a_sharder_is_written_for_a_kind_of_module() -> None:
    assert issubclass(EmbeddingBagCollectionSharder, ModuleSharder)
    assert get_origin(ModuleSharder[EmbeddingBagCollection]) is ModuleSharder

    class Own(ModuleSharder[nn.Module]):
        pass

    assert Own.__mro__[1] is ModuleSharder


def test_every_sharding_type_is_offered_on_every_device() -> None:
    sharder = EmbeddingBagCollectionSharder()
    assert sharder.sharding_types("cpu") == sharder.sharding_types("cuda")
    assert {"row_wise", "grid_shard", "data_parallel"} <= set(sharder.sharding_types("cpu"))
    assert sharder.compute_kernels("row_wise", "cpu") == ["dense", "fused"]
    assert sharder.compute_kernels("row_wise", "cuda")[2:] == ["fused_uvm", "fused_uvm_caching"]


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
    with pytest.raises(ConfigError, match="expected a Wire"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=wrong)


@pytest.mark.parametrize("name", ["mx4", "fp4"])
def test_a_format_that_is_not_here_is_named_with_those_that_are(name: str) -> None:
    class Theirs(Enum):
        FORMAT = name

    here = "the formats of tilerec are fp32, fp16, bf16, int8, fp8"
    with pytest.raises(ConfigError, match=rf"CommType\('{name}'\) is not supported: {here}"):
        CommType(name)
    with pytest.raises(AttributeError, match=rf"CommType.{name.upper()} is not supported: {here}"):
        getattr(CommType, name.upper())
    assert not hasattr(CommType, name.upper())
    for given in (name, Theirs.FORMAT):
        with pytest.raises(ConfigError, match=rf"backward_precision: got .*{name}.*{here}"):
            QCommsConfig(backward_precision=given)  # type: ignore[arg-type]


def test_formats_are_plain_members_of_an_enum() -> None:
    assert [kind.name for kind in CommType] == ["FP32", "FP16", "BF16", "INT8", "FP8"]
    assert CommType["INT8"] is CommType("int8") is CommType.INT8 is pickle.loads(pickle.dumps(CommType.INT8))
    assert CommType.BF16.name == "BF16"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"forward_loss_scale": 2.0}, "forward_loss_scale .*sent unscaled.*use bf16"),
        ({"backward_loss_scale": 128.0}, "backward_loss_scale .*sent unscaled.*use bf16"),
        ({"fp8_quantize_dim": 16}, "fp8_quantize_dim .*one scale per row"),
        ({"fp8_quantize_dim_bwd": 16}, "fp8_quantize_dim_bwd .*one scale per row"),
        ({"fp8_bwd_uses_143": True}, "fp8_bwd_uses_143 .*e4m3"),
        ({"fp8_output_dtype": "fp16"}, "fp8_output_dtype .*dtype of the sums"),
        (
            {"mx4_quantize_dim": 32, "mx4_quantize_dim_bwd": 32},
            "mx4_quantize_dim .*mx4_quantize_dim_bwd .*them",
        ),
        ({"mx4_rounding_mode": "even"}, "mx4_rounding_mode .*no mx4"),
        ({"output_dtype": "fp16"}, "output_dtype .*the collection's"),
    ],
)
def test_a_setting_of_formats_without_effect_is_warned_about(setting: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=f"QCommsConfig: got settings without effect: {reason}") as seen:
        config = QCommsConfig(CommType.FP16, CommType.BF16, **setting)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert config == QCommsConfig("fp16", "bf16")


def test_settings_that_ask_for_nothing_are_not_warned_about() -> None:
    config = QCommsConfig(CommType.FP16, CommType.FP16, 1.0, None, None, None, False)
    assert config.wire() == Wire("fp16", "fp16")


def test_a_registry_is_the_same_on_every_device_and_for_anybodys_words() -> None:
    class Theirs(Enum):
        POOLED = "pooled_embeddings_all_to_all"

    config = QCommsConfig("bf16", "bf16")
    ops = list(CommOp)
    assert get_qcomm_codecs_registry(config, ops, torch.device("cuda:0")) == get_qcomm_codecs_registry(
        config, device="cpu"
    )
    pooled = get_qcomm_codecs_registry(config, [Theirs.POOLED])  # type: ignore[list-item]
    assert pooled == {"POOLED_EMBEDDINGS_ALL_TO_ALL": Wire("bf16", "bf16")}
    for wrong in (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL, "all", 3):
        with pytest.raises(ConfigError, match="expected a list of CommOps"):
            get_qcomm_codecs_registry(config, wrong)  # type: ignore[arg-type]


def test_a_sharder_names_the_class_that_sharding_makes() -> None:
    pooled, sequences = get_default_sharders()
    assert pooled.sharded_module_type is ShardedEmbeddingBagCollection
    assert sequences.sharded_module_type is ShardedEmbeddingCollection


def test_arguments_of_a_sharder_without_effect_are_taken_with_a_warning() -> None:
    wire = Wire("bf16", "bf16")
    with pytest.warns(UserWarning, match="BagCollectionSharder: .*sharded_module_order_overwrite") as seen:
        pooled = EmbeddingBagCollectionSharder({"learning_rate": 0.5}, wire, sharded_module_order_overwrite=["t"])
    assert seen[0].filename == __file__
    assert pooled.optimizer == SGD(0.5)
    assert pooled.wire == wire
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EmbeddingBagCollectionSharder(None, None, None)


def test_index_dedup_sends_distinct_ids() -> None:
    wire = Wire("bf16", "bf16")
    for given, dedup, wanted in [
        (None, False, None), (wire, False, wire), (None, True, Wire(distinct=True)),
        (wire, True, Wire("bf16", "bf16", distinct=True)),
    ]:  # fmt: skip
        assert EmbeddingCollectionSharder(None, given, use_index_dedup=dedup).wire == wanted
