"""Which ranks form a group: axes of meshes, process groups, hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of, within_host
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.spec.topology import Topology
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks


def members(group: Group) -> list[object]:
    """The global ranks of a group, by its own means."""
    return group.all_gather_object(dist.get_rank())


def _axes_of_a_mesh() -> dict[str, list[object]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard = group_of(mesh, "shard")
    found = {
        "shard": members(shard),
        "replicate": members(group_of(mesh, "replicate")),
        "submesh": members(group_of(mesh["shard"])),
        "submesh by name": members(group_of(mesh["shard"], "shard")),
        "parts": members(shard.partition("alone", [[0], [1]])),
        "split": members(shard.split("route")),
    }
    for wrong, words in (
        ({}, r"has 2 axes \('replicate', 'shard'\); expected one. Name the axis"),
        ({"axis": "rows"}, "has no axis 'rows'; its axes are"),
    ):
        with pytest.raises(ConfigError, match=words):
            group_of(mesh, **wrong)
    return found


def test_an_axis_of_a_mesh_is_a_group_of_this_ranks_row_of_it(pool: Callable[[int], Ranks]) -> None:
    for rank, found in enumerate(pool(4).run(_axes_of_a_mesh)):
        row, column = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        assert found == {
            "shard": row,
            "replicate": column,
            "submesh": row,
            "submesh by name": row,
            "parts": [rank],
            "split": row,
        }


def _meshes_without_names() -> None:
    flat = init_device_mesh("cpu", (4,))
    assert members(group_of(flat)) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="no axis 'shard'; its axes are without names"):
        group_of(flat, "shard")
    square = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ConfigError, match=r"2 axes \(without names\)"):
        group_of(square)


def test_a_mesh_of_one_axis_needs_no_name(pool: Callable[[int], Ranks]) -> None:
    pool(4).run(_meshes_without_names)


def _other_things() -> None:
    whole = group_of()
    assert group_of(whole) is whole
    assert members(whole) == [0, 1, 2, 3]
    assert members(group_of(dist.group.WORLD)) == [0, 1, 2, 3]
    odd = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        group = group_of(odd)
        assert (group.rank, group.size) == (dist.get_rank() // 2, 2)
        assert members(group) == [1, 3]
        assert isinstance(group, ProcessGroupComms)
        assert group.process_group is odd
    else:
        with pytest.raises(ConfigError, match="is no member of the process group"):
            group_of(odd)
    with pytest.raises(ConfigError, match="axis='shard' is for a DeviceMesh, got ProcessGroupComms"):
        group_of(whole, "shard")
    with pytest.raises(ConfigError, match="got NoneType; leave it out"):
        group_of(None, "shard")


def test_process_groups_and_groups_are_taken_as_they_are(pool: Callable[[int], Ranks]) -> None:
    pool(4).run(_other_things)


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"call\s+torch\.distributed\.init_process_group\(\) first"):
        group_of()


def _hosts(group: Group, hosts: list[list[int]]) -> tuple[int, list[object]]:
    """This rank's number in its host's group, and the group's members; what the group sends is counted."""
    near = within_host(group, Topology(group.size, "cpu", hosts=hosts))
    everyone = near.all_gather_object(group.rank)
    group.traffic.reset()
    total = torch.ones(8)
    near.all_reduce_("sum", total).wait()
    assert total.tolist() == [near.size] * 8
    assert group.traffic.between(hosts) == {"sum": 0}
    return near.rank, everyone


def _hosts_on_processes(hosts: list[list[int]]) -> tuple[int, list[object]]:
    return _hosts(ProcessGroupComms(), hosts)


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[3, 0, 2], [1]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]], ids=str)
def test_the_ranks_of_a_host_are_a_group_in_ascending_order(
    hosts: list[list[int]], pool: Callable[[int], Ranks]
) -> None:
    expected = []
    for rank in range(4):
        home = sorted(next(host for host in hosts if rank in host))
        expected.append((home.index(rank), home))
    assert run_virtual_ranks(4, _hosts, hosts) == expected
    assert pool(4).run(_hosts_on_processes, hosts) == expected


def test_a_topology_of_another_world_is_refused() -> None:
    def ask(group: Group) -> None:
        with pytest.raises(ConfigError, match="The topology has 4 ranks, the group 2"):
            within_host(group, Topology(4, "cpu"))

    run_virtual_ranks(2, ask)
