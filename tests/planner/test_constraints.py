"""Constraints: names, order and what they refuse."""

import dataclasses

import pytest

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.spec.plan import EmbeddingComputeKernel, ShardingType


def test_names_and_order_are_those_that_users_know() -> None:
    assert [f.name for f in dataclasses.fields(ParameterConstraints)] == [
        "sharding_types",
        "compute_kernels",
        "min_partition",
        "pooling_factors",
        "num_poolings",
        "batch_sizes",
        "is_weighted",
        "cache_params",
        "enforce_hbm",
        "stochastic_rounding",
        "bounds_check_mode",
        "feature_names",
        "output_dtype",
        "device_group",
        "key_value_params",
        "use_virtual_table",
    ]


def test_words_are_read_as_enums() -> None:
    limits = ParameterConstraints(["row_wise", ShardingType.TABLE_WISE, "ROW_WISE"], ["fused"])
    assert limits.types_allowed() == (ShardingType.ROW_WISE, ShardingType.TABLE_WISE)
    assert limits.kernels_allowed() == (EmbeddingComputeKernel.FUSED,)
    assert ParameterConstraints("row_wise").types_allowed() == (ShardingType.ROW_WISE,)
    assert ParameterConstraints().types_allowed() == ()
    assert hash(limits) == hash(ParameterConstraints(["row_wise", "table_wise"], ["fused"]))


def test_what_was_said_is_known() -> None:
    assert ParameterConstraints().said() == ()
    assert ParameterConstraints(min_partition=8, is_weighted=True).said() == ("min_partition", "is_weighted")


def test_ids_per_bag_are_the_largest_pooling_factor() -> None:
    assert ParameterConstraints(pooling_factors=[1, 3.5]).ids_per_bag() == 3.5
    assert ParameterConstraints().ids_per_bag() is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"sharding_types": ["row"]},
            r"sharding_types got 'row', wanted a ShardingType or one of \['data_parallel'",
        ),
        ({"sharding_types": []}, "sharding_types is empty, so nothing is allowed"),
        ({"sharding_types": ["explicit"]}, "explicit, which a planner cannot choose"),
        ({"compute_kernels": ["warm"]}, "compute_kernels got 'warm'"),
        ({"min_partition": 0}, "min_partition is 0"),
        ({"min_partition": 2.5}, "min_partition is 2.5"),
        ({"pooling_factors": [-1.0]}, "pooling_factors is"),
    ],
)
def test_what_cannot_be_meant_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="ParameterConstraints: .*" + message):
        ParameterConstraints(**kwargs)  # type: ignore[arg-type]
