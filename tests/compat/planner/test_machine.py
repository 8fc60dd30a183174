"""Machines are described as for TorchRec."""

from __future__ import annotations

import copy

import pytest

from tilerec.compat.planner.machine import BasicCommsBandwidths, CustomTopologyData, Topology
from tilerec.compat.planner.types import DeviceHardware, Perf, Storage
from tilerec.errors import ConfigError


def test_topologies_are_set_up_as_for_torchrec() -> None:
    with pytest.warns(UserWarning, match="Topology: got settings without effect: bwd_compute_multiplier") as caught:
        topology = Topology(
            world_size=2,
            compute_device="cuda",
            bwd_compute_multiplier=2.0,
            custom_topology_data=CustomTopologyData({"hbm_cap": [10, 20], "ddr_cap": [5, 5]}, world_size=2),
            weighted_feature_bwd_compute_multiplier=1.0,
            uneven_sharding_perf_multiplier=1.0,
            generalized_comms_bandwidths=BasicCommsBandwidths(inter_host_bw=3.0, intra_host_bw=4.0),
            created_by_factory=True,
        )
    assert len(caught) == 1
    assert (topology.hbm_caps, topology.ddr_caps, topology.ddr_cap) == ((10, 20), None, 5)
    assert (topology.inter_host_bw, topology.intra_host_bw) == (3.0, 4.0)
    with pytest.raises(ConfigError, match="CustomTopologyData: data: got key 'disk'; expected one of"):
        CustomTopologyData({"disk": [1, 2]}, 2)
    with pytest.raises(ConfigError, match="hbm_cap: got 1 numbers; expected 2"):
        CustomTopologyData({"hbm_cap": [1]}, 2)
    with pytest.raises(ConfigError, match="got key 'ddr_cap'; expected"):
        CustomTopologyData({"hbm_cap": [1]}, 1).get_data("ddr_cap")


def test_a_topology_has_devices_with_their_memory() -> None:
    topology = Topology(3, "cuda", hbm_cap=7, ddr_cap=9, local_world_size=3)
    assert topology.devices[2] == DeviceHardware(2, Storage(7, 9), Perf(0, 0, 0, 0))
    copied = copy.deepcopy(topology)
    copied.devices[0].storage -= Storage(1, 1)
    assert topology.devices[0].storage == Storage(7, 9)
    assert topology.intra_group_size == 3
