"""Table configs: what they accept, what they refuse, what they never change."""

import dataclasses
import math

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.spec.table import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    dtype_to_data_type,
    pooling_type_to_str,
)


@pytest.mark.parametrize("given", [DataType.BF16, torch.bfloat16, "BF16", "bf16"])
def test_data_type_and_dtype_are_one_field_in_two_words(given) -> None:
    for config in (EmbeddingConfig(3, 2, "t", given), EmbeddingConfig(3, 2, "t", dtype=given)):
        assert config.data_type is DataType.BF16
        assert config.torch_dtype == torch.bfloat16
        assert config == EmbeddingConfig(3, 2, "t", data_type=DataType.BF16)


def test_replace_keeps_a_config_whole() -> None:
    config = EmbeddingBagConfig(3, 2, "t", "FP16", ["a", "b"], pooling="mean")
    wider = dataclasses.replace(config, embedding_dim=8)
    assert (wider.embedding_dim, wider.data_type, wider.pooling) == (8, DataType.FP16, PoolingType.MEAN)
    assert wider.feature_names == ("a", "b")


def test_configs_are_frozen() -> None:
    names = ["a"]
    config = EmbeddingBagConfig(3, 2, "t", feature_names=names)
    names.append("b")
    assert config.feature_names == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"  # type: ignore[misc]


def test_a_table_without_features_is_read_by_the_feature_of_its_name() -> None:
    assert EmbeddingBagConfig(3, 2, "t").feature_names == ("t",)


def test_initial_bounds_default_to_the_root_of_the_rows() -> None:
    config = EmbeddingBagConfig(16, 2, "t")
    assert (config.get_weight_init_min(), config.get_weight_init_max()) == (-0.25, 0.25)
    assert EmbeddingBagConfig(16, 2, "t", weight_init_max=3.0).get_weight_init_max() == 3.0
    assert math.isclose(config.get_weight_init_max() ** 2, 1 / 16)


def test_types_translate_both_ways() -> None:
    for data_type in DataType:
        assert dtype_to_data_type(data_type_to_dtype(data_type)) is data_type
    assert pooling_type_to_str(PoolingType.MEAN) == "mean"
    with pytest.raises(ConfigError, match="complex64, which has no DataType"):
        dtype_to_data_type(torch.complex64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_embeddings": 0}, "got num_embeddings=0"),
        ({"embedding_dim": -4}, "got embedding_dim=-4"),
        ({"embedding_dim": 2.5}, "got embedding_dim=2.5"),
        ({"num_embeddings": True}, "got num_embeddings=True"),
        ({"data_type": DataType.INT8}, "got data_type INT8; expected a type that can be trained"),
        ({"data_type": "FP31"}, "got 'FP31'"),
        ({"data_type": "FP16", "dtype": torch.bfloat16}, "expected the same type"),
        ({"feature_names": "user"}, "got feature_names='user', a string"),
        ({"feature_names": ["a", "a"]}, "expected each feature once"),
        ({"weight_init_min": 1.0, "weight_init_max": 0.0}, "above weight_init_max"),
        (
            {"init_fn": torch.nn.init.zeros_, "weight_init_max": 0.0},
            "both init_fn and weight_init_min or weight_init_max",
        ),
        ({"pooling": "max"}, "got 'max'"),
        ({"pooling": PoolingType.NONE}, "Use EmbeddingConfig"),
    ],
)
def test_contradictions_are_refused_by_name(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=r"Table 't'.*" + message):
        EmbeddingBagConfig(**{"num_embeddings": 4, "embedding_dim": 2, "name": "t", **arguments})


@pytest.mark.parametrize("kind", [EmbeddingConfig, EmbeddingBagConfig])
@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"num_embeddings_post_pruning": 2}, "num_embeddings_post_pruning .*serving"),
        ({"need_pos": True}, "need_pos .*PositionWeightedModule"),
        ({"input_dim": 100}, "input_dim .*below num_embeddings"),
        ({"total_num_buckets": 2}, r"total_num_buckets .*row_wise\(num_buckets="),
        ({"virtual_table_eviction_policy": object()}, "virtual_table_eviction_policy .*none is evicted"),
        ({"enable_embedding_update": True}, "enable_embedding_update .*serving"),
        ({"stash_weights": True}, "stash_weights .*memory of their device"),
    ],
)
def test_an_argument_of_torchrecs_configs_without_effect_is_warned_about(kind, argument: dict, reason) -> None:
    with pytest.warns(UserWarning, match=f"Table 't': got settings without effect: {reason}") as seen:
        config = kind(4, 2, "t", **argument)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert config == kind(4, 2, "t")
    assert hash(config) == hash(kind(4, 2, "t"))
    assert dataclasses.replace(config, embedding_dim=3) == kind(4, 3, "t")  # and says nothing again


def test_arguments_that_ask_for_what_is_there_say_nothing() -> None:
    more = {"need_pos": False, "use_virtual_table": False, "enable_embedding_update": False}
    same = {
        "input_dim": 4,
        "num_embeddings_post_pruning": 4,
        "total_num_buckets": None,
        "stash_weights": False,
    }
    assert EmbeddingBagConfig(4, 2, "t", **more, **same, pooling="mean") == EmbeddingBagConfig(
        4, 2, "t", pooling="mean"
    )


def test_a_virtual_table_is_refused_with_what_to_do_instead() -> None:
    for kind in (EmbeddingConfig, EmbeddingBagConfig):
        with pytest.raises(
            ConfigError,
            match=r"Table 't': got use_virtual_table=True.*set num_embeddings to the number of rows",
        ):
            kind(2**60, 2, "t", use_virtual_table=True)


@pytest.mark.parametrize("rows", [2**62, 2**64])
def test_a_table_of_more_numbers_than_memory_addresses_is_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"Table 't': got num_embeddings={rows} rows of 4; expected at most"):
        EmbeddingBagConfig(rows, 4, "t")
