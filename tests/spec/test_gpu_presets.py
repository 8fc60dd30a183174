"""GPUs by name."""

from __future__ import annotations

import json

import pytest

from tilerec.errors import ConfigError
from tilerec.spec.gpu_presets import GB, MACHINES
from tilerec.spec.topology import Topology


@pytest.mark.parametrize("name", list(MACHINES))
def test_a_preset_has_the_figures_of_its_machine_in_bytes_per_millisecond(name: str) -> None:
    topology, machine = Topology.preset(name, hosts=2), MACHINES[name]
    assert (topology.world_size, topology.host_count, topology.nic) == (16, 2, "device")
    assert topology.memory_cap == machine.memory
    assert 1000 * topology.hbm_mem_bw == machine.memory_bw
    assert 1000 * topology.inter_host_bw == machine.network_bw
    assert 1000 * topology.intra_host_bw == machine.link_bw
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology


def test_arguments_replace_figures_of_the_preset() -> None:
    topology = Topology.preset("h100", gpus_per_host=4, hbm_cap=40 * GB, nic="host")
    assert (topology.world_size, topology.hbm_cap, topology.nic) == (4, 40 * GB, "host")
    assert Topology.preset("h100", gpus_per_host=2, hbm_caps=[1, 2]).hbm_caps == (1, 2)


def test_an_unknown_machine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="got machine 'v100'; expected one of a100, h100, h200, b200"):
        Topology.preset("v100")
    with pytest.raises(ConfigError, match="got gpus_per_host=0"):
        Topology.preset("h100", gpus_per_host=0)


def test_ranks_of_cpus_share_their_hosts_card_unless_told_otherwise() -> None:
    assert (Topology(2, "cpu").nic, Topology(2).nic, Topology(2, "cpu", nic="device").nic) == (
        "host",
        "device",
        "device",
    )
    with pytest.raises(ConfigError, match="got nic='rack'; expected 'device' or 'host'"):
        Topology(2, nic="rack")  # type: ignore[arg-type]
