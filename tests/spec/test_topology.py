"""Topologies: what they say of ranks and hosts, what they refuse, and that they ask no device."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from tilerec.errors import ConfigError
from tilerec.spec.topology import DDR_CAP, HBM_CAP, Topology, gigabytes_per_second


def test_hosts_are_blocks_of_local_world_size() -> None:
    topology = Topology(16, "cuda", local_world_size=8)
    assert topology.hosts == (tuple(range(8)), tuple(range(8, 16)))
    assert topology.host_count == 2
    assert [topology.host_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert [topology.local_rank(rank) for rank in (0, 7, 8, 15)] == [0, 7, 0, 7]
    assert topology.ranks_of(1) == tuple(range(8, 16))


def test_without_local_world_size_the_world_is_one_host() -> None:
    topology = Topology(3)
    assert topology.hosts == ((0, 1, 2),)
    assert topology.local_world_size == 3


def test_hosts_may_differ_in_size_and_hold_ranks_in_any_order() -> None:
    topology = Topology(5, hosts=[[4, 0, 2], [3, 1]])
    assert topology.host_of(4) == 0
    assert topology.local_rank(4) == 0
    assert topology.local_rank(1) == 1
    assert topology.local_world_size is None
    assert Topology(4, hosts=[[0, 2], [1, 3]]).local_world_size == 2


def test_names_positions_defaults_and_units_are_those_that_users_know() -> None:
    names = [f.name for f in dataclasses.fields(Topology) if not f.kw_only]
    assert names[:7] == [
        "world_size",
        "compute_device",
        "hbm_cap",
        "ddr_cap",
        "ssd_cap",
        "local_world_size",
        "pod_size",
    ]
    topology = Topology(2, "cuda")
    assert (topology.hbm_cap, topology.ddr_cap) == (HBM_CAP, DDR_CAP) == (32 * 2**30, 128 * 2**30)
    # Bytes per millisecond; the figures that TorchRec's Topology shows.
    assert topology.hbm_mem_bw == pytest.approx(963146416.128)
    assert topology.ddr_mem_bw == pytest.approx(54760833.024)
    assert topology.hbm_to_ddr_mem_bw == pytest.approx(34359738.368)
    assert topology.intra_host_bw == pytest.approx(644245094.4)
    assert topology.inter_host_bw == pytest.approx(13421772.8) == gigabytes_per_second(12.5)


def test_ranks_of_other_hosts_take_turns() -> None:
    topology = Topology(6, hosts=[[0], [4, 1], [2, 3, 5]])
    assert [topology.turn(rank, 1) for rank in (0, 2, 3, 5)] == [0, 1, 2, 3]
    assert [topology.turn(rank, 2) for rank in (0, 1, 4)] == [0, 1, 2]
    even = Topology(12, local_world_size=3)
    for rank in range(3, 12):
        assert even.turn(rank, 0) % 3 == even.local_rank(rank)


def test_tables_of_a_cpu_world_live_in_host_memory() -> None:
    assert Topology(1, "cpu").hbm_cap == 0
    assert Topology(1, "cpu").memory_cap == DDR_CAP
    assert Topology(1, "cpu", ddr_cap=7).memory_cap == 7
    assert Topology(1, "cuda").memory_cap == HBM_CAP


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"world_size": 0}, "got world_size=0"),
        ({"world_size": True}, "got world_size=True"),
        (
            {"world_size": 10, "local_world_size": 8},
            r"got local_world_size=8; expected a divisor of world_size=10. Write hosts .* hosts=",
        ),
        ({"world_size": 4, "local_world_size": 0}, "got local_world_size=0"),
        ({"world_size": 4, "hosts": [[0, 1], [1, 2, 3]]}, "got rank 1 twice in hosts"),
        ({"world_size": 4, "hosts": [[0, 1], [2, 4]]}, "got rank 4 in hosts with world_size=4"),
        ({"world_size": 4, "hosts": [[0, 1], [3]]}, "got hosts without ranks 2"),
        ({"world_size": 2, "hosts": [[0, 1], []]}, r"got no ranks in hosts\[1\]"),
        (
            {"world_size": 4, "hosts": [[0], [1, 2, 3]], "local_world_size": 2},
            "expected the same size. Give one of them",
        ),
        ({"world_size": 2, "hbm_cap": -1}, "got hbm_cap=-1"),
        ({"world_size": 2, "ddr_cap": 1.5}, "got ddr_cap=1.5"),
        ({"world_size": 2, "inter_host_bw": 0}, "got inter_host_bw=0"),
        ({"world_size": 2, "inter_host_bw": "fast"}, "got inter_host_bw='fast'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(**kwargs)  # type: ignore[arg-type]


def test_ranks_and_hosts_that_are_not_there_are_refused() -> None:
    topology = Topology(4, local_world_size=2)
    with pytest.raises(ConfigError, match="got rank 4; expected 0 to 3"):
        topology.host_of(4)
    with pytest.raises(ConfigError, match="got host 2; expected 0 to 1, the hosts of the 4 ranks"):
        topology.ranks_of(2)
    with pytest.raises(ConfigError, match="got host -1; expected 0 to 1"):
        topology.ranks_of(-1)


def test_settings_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="pod_size is stored but has no effect"):
        Topology(4, pod_size=4)
    with pytest.warns(UserWarning, match="ssd_cap is stored but has no effect"):
        Topology(4, ssd_cap=4)


def test_the_launcher_says_world_and_hosts() -> None:
    environ = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    assert Topology.from_launcher("cpu", environ) == Topology(6, "cpu", local_world_size=3)
    assert Topology.from_launcher("cpu", {}) == Topology(1, "cpu")
    assert Topology.from_launcher("cpu", {"WORLD_SIZE": "4"}).host_count == 1
    with pytest.raises(ConfigError, match="got WORLD_SIZE='two' in the environment"):
        Topology.from_launcher("cpu", {"WORLD_SIZE": "two"})
    with pytest.raises(ConfigError, match="got local_world_size=4; expected a divisor of world_size=6"):
        Topology.from_launcher("cpu", {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "topology",
    [
        Topology(1),
        Topology(16, "cpu", local_world_size=8, ddr_cap=10),
        Topology(5, hosts=[[4, 0, 2], [3, 1]], intra_host_bw=3.5),
    ],
)
def test_json_keeps_a_topology(topology: Topology) -> None:
    text = json.dumps(topology.to_json())
    assert Topology.from_json(json.loads(text)) == topology


def test_json_that_is_no_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match='got an object without "world_size"'):
        Topology.from_json({})
    with pytest.raises(ConfigError, match='got unknown "wurld"'):
        Topology.from_json({"world_size": 1, "wurld": 2})
    with pytest.raises(ConfigError, match="hosts: got 3; expected a list"):
        Topology.from_json({"world_size": 1, "hosts": 3})


def test_a_topology_is_frozen_hashable_and_prints_its_hosts() -> None:
    topology = Topology(4, "cpu", local_world_size=2)
    assert hash(topology) == hash(Topology(4, "cpu", hosts=[[0, 1], [2, 3]]))
    assert str(topology) == "4 cpu ranks on 2 hosts: 0-1 | 2-3"
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.world_size = 5  # type: ignore[misc]


def test_a_topology_asks_no_device_and_no_process_group() -> None:
    code = (
        "import torch\n"
        "def never(*a, **k): raise AssertionError('asked')\n"
        "for owner, names in ((torch.cuda, ('is_available', 'device_count', 'get_device_properties')),\n"
        "                     (torch.distributed, ('get_world_size', 'is_initialized'))):\n"
        "    for name in names: setattr(owner, name, never)\n"
        "from tilerec.spec.topology import Topology\n"
        "print(Topology(1024, 'cuda', local_world_size=8).host_count)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "128", done.stderr


def test_ranks_may_differ_in_memory() -> None:
    topology = Topology(3, "cuda", hbm_caps=[10, 30, 20], ddr_cap=5)
    assert (topology.hbm_cap, topology.memory_cap, topology.memory_caps) == (30, 30, (10, 30, 20))
    assert topology.caps == ((10, 5), (30, 5), (20, 5))
    assert Topology(3, "cpu", hbm_caps=[1, 2, 3], ddr_cap=5).memory_caps == (5, 5, 5)
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology
    assert Topology(2, hbm_caps=[7, 7]) == Topology(2, hbm_cap=7)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"hbm_caps": [1, 2, 3]}, "got hbm_caps=.* one for each of the 2 ranks"),
        ({"ddr_caps": [1, -2]}, "got ddr_caps="),
        ({"hbm_caps": "12"}, "got hbm_caps='12'"),
        (
            {"hbm_caps": [1, 2], "hbm_cap": 5},
            "got hbm_cap=5 and hbm_caps with the maximum 2; expected one of them",
        ),
        ({"hbm_cap": [1, 2]}, "For ranks that differ pass hbm_caps="),
        ({"hbm_cap": 2**60}, r"below 2\^60"),
        (
            {"compute_device": "banana"},
            "got compute_device='banana'; expected a device type of torch",
        ),
        ({"compute_device": "cuda:0"}, "got compute_device='cuda:0'"),
        ({"intra_host_bw": float("inf")}, "got intra_host_bw=inf"),
        ({"custom_topology_data": 5}, "got a int as custom_topology_data"),
        (
            {"generalized_comms_bandwidths": 5},
            "got a int without intra_host_bw as generalized_comms_bandwidths",
        ),
    ],
)
def test_machines_that_cannot_be_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(2, **kwargs)


@pytest.mark.parametrize("data", [None, [{"world_size": 2}], "topology", 5])
def test_json_that_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r'Topology JSON: got .*; expected an object with "world_size"'):
        Topology.from_json(data)
