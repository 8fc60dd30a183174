"""Constraints: names, order and what they refuse."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import Skew
from tilerec.spec.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from tilerec.spec.tile import Tiling


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
        "forbidden_types",
        "ranks",
        "hosts",
        "max_ranks",
        "with_table",
        "sharding",
        "skew",
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
            r"sharding_types: got 'row'; expected a ShardingType or one of \['data_parallel'",
        ),
        ({"sharding_types": []}, "sharding_types is empty, so nothing is allowed"),
        ({"sharding_types": ["explicit"]}, "explicit, which a planner cannot choose"),
        ({"compute_kernels": ["warm"]}, "compute_kernels: got 'warm'"),
        ({"min_partition": 0}, "min_partition is 0"),
        ({"min_partition": 2.5}, "min_partition is 2.5"),
        ({"pooling_factors": [-1.0]}, "pooling_factors is"),
        ({"pooling_factors": [float("nan")]}, r"pooling_factors is \[nan\]; give ids per bag, from 0"),
        ({"pooling_factors": []}, "pooling_factors is"),
        ({"num_poolings": ["many"]}, "num_poolings is"),
        ({"batch_sizes": [float("inf")]}, "batch_sizes is"),
        ({"max_ranks": 0}, "max_ranks is 0; it must be a whole number of ranks"),
        ({"ranks": []}, "ranks is empty, so no rank may hold the table"),
        ({"ranks": "0-x"}, "ranks: got .0-x."),
        ({"hosts": -1}, "hosts: got -1"),
        (
            {"sharding_types": ["row_wise"], "forbidden_types": ["row_wise"]},
            r"\['row_wise'\] are all among forbidden_types",
        ),
        ({"sharding": "row_wise"}, "sharding is a str; wanted a ParameterSharding or a Tiling"),
        (
            {"sharding": ParameterSharding("row_wise"), "ranks": [0], "max_ranks": 2},
            "sharding gives the placement of the table, so ranks, max_ranks cannot restrict it",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="ParameterConstraints: .*" + message):
        ParameterConstraints(**kwargs)  # type: ignore[arg-type]


def test_types_that_are_forbidden_are_not_allowed() -> None:
    limits = ParameterConstraints(forbidden_types=["data_parallel", ShardingType.GRID_SHARD])
    assert ShardingType.ROW_WISE in limits.types_allowed()
    assert ShardingType.EXPLICIT not in limits.types_allowed()
    assert len(limits.types_allowed()) == 5
    both = ParameterConstraints(["row_wise", "table_wise"], forbidden_types="row_wise")
    assert both.types_allowed() == (ShardingType.TABLE_WISE,)


@pytest.mark.parametrize(
    "limits",
    [
        ParameterConstraints(),
        ParameterConstraints(["row_wise"], ["fused"], 16, [2.5, 1], [1], [64, 32], True),
        ParameterConstraints(ranks="0-3,6", hosts=[1], max_ranks=2, with_table="b", forbidden_types=["grid_shard"]),
        ParameterConstraints(skew=Skew(10, 1.1, True), device_group="cpu"),
        ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[3])),
    ],
)
def test_what_is_used_of_them_is_read_back_from_json(limits: ParameterConstraints) -> None:
    assert ParameterConstraints.from_json("t", json.loads(json.dumps(limits.to_json()))) == limits


def test_a_bare_tiling_is_written_as_an_explicit_sharding() -> None:
    tiling = Tiling.of("t", 4, 2, [(0, 4, 0, 2, 1)])
    back = ParameterConstraints.from_json("t", ParameterConstraints(sharding=tiling).to_json())
    assert back.sharding == ParameterSharding("explicit", tiling=tiling)


def test_strange_words_in_json_are_refused_with_the_table() -> None:
    with pytest.raises(ConfigError, match=r"Table 't': got unknown .rows.; expected"):
        ParameterConstraints.from_json("t", {"rows": 3})
    with pytest.raises(ConfigError, match="Table 't': ParameterConstraints: min_partition is 0"):
        ParameterConstraints.from_json("t", {"min_partition": 0})


def test_numbers_of_arrays_and_tensors_are_taken() -> None:
    limits = ParameterConstraints(
        pooling_factors=np.array([1.5, 2]),  # type: ignore[arg-type]
        num_poolings=[np.float32(2.0)],
        batch_sizes=torch.tensor([64]),  # type: ignore[arg-type]
        ranks=np.arange(3),  # type: ignore[arg-type]
        is_weighted=np.True_,  # type: ignore[arg-type]
    )
    assert (limits.pooling_factors, limits.num_poolings, limits.batch_sizes) == ((1.5, 2.0), (2.0,), (64,))
    assert limits.ranks == (0, 1, 2)
    assert json.loads(json.dumps(limits.to_json()))["is_weighted"] is True


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"skew": 1.1}, r"skew is 1.1 \(float\); wanted a Skew"),
        ({"is_weighted": "yes"}, "is_weighted is 'yes'"),
        ({"with_table": 3}, "with_table is 3"),
        ({"device_group": 0}, "device_group is 0"),
        ({"batch_sizes": [1.5]}, r"batch_sizes is \[1.5\]; give whole samples per batch"),
    ],
)
def test_things_of_another_kind_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="ParameterConstraints: " + message):
        ParameterConstraints(**kwargs)


def test_a_measured_curve_travels_in_json() -> None:
    given = ParameterConstraints(skew=Skew(9, 1.0, True, ((1, 0.5), (3, 0.8))))
    assert ParameterConstraints.from_json("t", json.loads(json.dumps(given.to_json()))) == given
    assert "curve" not in ParameterConstraints(skew=Skew(9)).to_json()["skew"]
