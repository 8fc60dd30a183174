"""Which ranks share a host: told, written in the plan, or as the launcher says."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.spec.topology import Topology


def topology_of(
    group: Group, topology: Topology | None, hosts: Sequence[Sequence[int]] | None, compute_device: str
) -> Topology:
    """The topology of a group's ranks.

    Args:
        topology: taken as it is, if given.
        hosts: of the plan, otherwise; without them ranks are on hosts of LOCAL_WORLD_SIZE each, as torchrun numbers
            them, and on one host without that.
        compute_device: "cpu" or "cuda", where the topology is made here.

    Raises:
        ConfigError: the topology or the hosts are for other ranks.
    """
    if topology is not None:
        if topology.world_size != group.size:
            raise ConfigError(
                f"shard: the topology has {topology.world_size} ranks and the group {group.size}; pass the topology "
                "of the group's ranks."
            )
        return topology
    if hosts and sorted(rank for host in hosts for rank in host) != list(range(group.size)):
        raise ConfigError(
            f"shard: the plan's hosts are {[list(host) for host in hosts]}, and the group has the ranks 0 to "
            f"{group.size - 1}; plan again, or leave out hosts."
        )
    return Topology(group.size, compute_device, hosts=hosts or _launched(group))


def _launched(group: Group) -> list[list[int]] | None:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not isinstance(group, ProcessGroupComms) or not text.isdecimal() or int(text) < 1:
        return None  # virtual ranks are threads of one process
    by_host: dict[int, list[int]] = {}
    for rank, global_rank in enumerate(dist.get_process_group_ranks(group.process_group)):
        by_host.setdefault(global_rank // int(text), []).append(rank)
    return list(by_host.values())
