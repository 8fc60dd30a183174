"""Other machines, batches, types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.asked import asked
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.variation import varied
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

REQUEST = asked({"a": 100, "b": 10}, Topology(8, hbm_cap=1000, local_world_size=4), reserved=100)


def test_nothing_changes_nothing() -> None:
    assert varied(REQUEST).digest() == REQUEST.digest()


def test_what_is_given_changes_and_the_rest_stays() -> None:
    other = varied(REQUEST, hosts=3, hbm_cap=2000, batch_size=64, data_type="BF16")
    assert other.topology.host_ranks == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert (other.topology.hbm_cap, other.reserved, other.batch_size) == (2000, 100, 64)
    assert {table.data_type for table in other.tables} == {DataType.BF16}
    assert varied(REQUEST, ranks_per_host=2).topology.world_size == 4
    assert varied(REQUEST, ddr_cap=7).topology.ddr_cap == 7
    assert varied(REQUEST, ddr_cap=7).reserved == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": 0}, "hosts is 0; it must be at least 1"),
        ({"data_type": "fp4"}, r"data type 'fp4' is none of \['fp32', 'bf16'"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"hosts": 1}, r"name rank 7, and the topology has ranks 0 to 3"),
        ({"hbm_cap": -5}, "hbm_cap is -5"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        varied(REQUEST.with_constraint("ebc.a", ranks=[7]) if "hosts" in change else REQUEST, **change)


def test_hosts_of_different_sizes_need_a_size() -> None:
    uneven = asked({"a": 10}, Topology(3, hosts=[[0, 1], [2]]), {"a": ParameterConstraints()})
    with pytest.raises(ConfigError, match="The hosts differ in size"):
        varied(uneven, hosts=2)
    assert varied(uneven, hosts=2, ranks_per_host=2).topology.world_size == 4


def test_what_is_reserved_as_a_part_grows_with_the_memory() -> None:
    half = replace(REQUEST, reserved_part=0.5)
    assert varied(half, hbm_cap=3000).reserved_bytes() == [1600] * 8


def test_ranks_that_differ_in_memory_need_a_cap_for_new_ones() -> None:
    differ = asked({"a": 10}, Topology(2, hbm_caps=[2**30, 2**31], local_world_size=1))
    with pytest.raises(ConfigError, match=r"differ in memory \(hbm_caps\); say how much the new ones have"):
        varied(differ, hosts=4)
    other = varied(differ, hosts=4, hbm_cap=2**32).topology
    assert (other.world_size, other.memory_caps) == (4, (2**32,) * 4)
