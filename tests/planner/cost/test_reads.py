"""Constraints become reads, feature by feature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.reads import reads_of
from tilerec.planner.cost.workload import Reads


def test_without_constraints_each_feature_reads_one_id_per_sample() -> None:
    assert reads_of("t", ["a", "b"], 64, ParameterConstraints()) == (Reads(64.0, 1.0), Reads(64.0, 1.0))
    assert reads_of("t", ["a"], None, ParameterConstraints()) == (Reads(512.0, 1.0),)
    assert reads_of("t", [], 64, ParameterConstraints()) == ()


def test_constraints_say_it_for_each_feature_or_once_for_all() -> None:
    limits = ParameterConstraints(pooling_factors=[2.5, 10], num_poolings=[3], batch_sizes=[8, 16], is_weighted=True)
    assert reads_of("t", ["a", "b"], 64, limits) == (Reads(24.0, 2.5, True), Reads(48.0, 10.0, True))


def test_numbers_that_do_not_go_with_the_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="Table 't': pooling_factors has 2 numbers for 3 features"):
        reads_of("t", ["a", "b", "c"], 8, ParameterConstraints(pooling_factors=[1, 2]))
    with pytest.raises(ConfigError, match=r"num_poolings is .nan."):
        reads_of("t", ["a"], 8, ParameterConstraints(num_poolings=[float("nan")]))


@pytest.mark.parametrize("value", [-1, -0.5, float("inf"), float("nan"), "2", None])
def test_numbers_that_no_feature_can_have_are_refused(value: Any) -> None:
    """`ParameterConstraints` may be made by another library, which checks less."""
    given: Any = SimpleNamespace(batch_sizes=None, num_poolings=None, pooling_factors=[2.0, value], is_weighted=False)
    with pytest.raises(ConfigError, match="Table 't': pooling_factors has"):
        reads_of("t", ["a", "b"], 8, given)


def test_a_feature_may_read_nothing() -> None:
    limits = ParameterConstraints(pooling_factors=[0], num_poolings=[0.5])
    assert reads_of("t", ["a", "b"], 8, limits) == (Reads(4.0, 0.0), Reads(4.0, 0.0))
