"""The topology of a group's ranks: from the caller, from the plan's hosts, or from the launcher."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.spec.topology import Topology, launcher_local_size


def topology_of(
    group: Group, topology: Topology | None, hosts: Sequence[Sequence[int]] | None, compute_device: str
) -> Topology:
    """Return the topology of a group's ranks.

    Args:
        topology: returned unchanged if given.
        hosts: the plan's hosts. Without them, each host has LOCAL_WORLD_SIZE ranks, numbered as by torchrun; if that
            variable is not set, all ranks are on one host.
        compute_device: "cpu" or "cuda", for a topology that is made here.

    Raises:
        ConfigError: the topology or the hosts do not cover the group's ranks.
    """
    if topology is not None:
        if topology.world_size != group.size:
            raise ConfigError(
                f"shard: topology: got {topology.world_size} ranks; expected {group.size}. Pass the topology of the "
                "group's ranks."
            )
        return topology
    if hosts and sorted(rank for host in hosts for rank in host) != list(range(group.size)):
        raise ConfigError(
            f"shard: hosts of the plan: got {[list(host) for host in hosts]}; expected the ranks 0 to "
            f"{group.size - 1}. Plan again, or leave out hosts."
        )
    return Topology(group.size, compute_device, hosts=hosts or _launcher_hosts(group))


def launched_topology(group: ProcessGroupComms, compute_device: str) -> Topology:
    """Return the topology of the ranks as their launcher placed them, on hosts of any sizes. Collective.

    A launcher sets LOCAL_WORLD_SIZE to the size of a rank's own host, so ranks of hosts that differ exchange it.

    Args:
        compute_device: "cpu" or "cuda".

    Raises:
        ConfigError: the sizes contradict each other: the ranks of a host are not consecutive, as torchrun's are.
    """
    sizes = group.all_gather_object(launcher_local_size())
    hosts = None if len(set(sizes)) == 1 else _consecutive_hosts(sizes)
    return topology_of(group, None, hosts, compute_device)


def _consecutive_hosts(sizes: Sequence[object]) -> list[list[int]]:
    """Return the ranks of each host; sizes: of each rank's host."""
    hosts: list[list[int]] = []
    first = 0
    while first < len(sizes):
        size = sizes[first]
        if not isinstance(size, int) or list(sizes[first : first + size]) != [size] * size:
            raise ConfigError(
                f"LOCAL_WORLD_SIZE in the environment: got {list(sizes)} on the ranks; expected consecutive ranks on "
                "each host, with the size of their host. Start the ranks with torchrun."
            )
        hosts.append(list(range(first, first + size)))
        first += size
    return hosts


def _launcher_hosts(group: Group) -> list[list[int]] | None:
    local_size = launcher_local_size()
    if not isinstance(group, ProcessGroupComms) or local_size is None:
        return None  # ranks that are threads of one process share a host
    by_host: dict[int, list[int]] = {}
    for rank, global_rank in enumerate(dist.get_process_group_ranks(group.process_group)):
        by_host.setdefault(global_rank // local_size, []).append(rank)
    return list(by_host.values())
