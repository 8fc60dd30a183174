"""Groups of ranks from an axis of a device mesh, a process group, or the hosts of a topology.

mesh [replicate 2, shard 4], axis "shard":  two groups of 4 ranks, each rank in its own
Topology.hosts ((0, 1), (2, 3)):            `within_host` gives a group of 2 ranks per host
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.spec.topology import Topology


def group_of(mesh: Group | DeviceMesh | dist.ProcessGroup | None = None, axis: str | None = None) -> Group:
    """Return the group over which tables are sharded.

    Args:
        mesh: a `DeviceMesh` (one of its axes), a process group, a `Group` (returned unchanged), or None for the default
            process group.
        axis: name of the mesh's axis; required if the mesh has more than one.

    Raises `ConfigError` for an axis that the mesh lacks, for a mesh of several axes without `axis`, and for an `axis`
    without a `DeviceMesh`.
    """
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        if axis is None:
            if mesh.ndim != 1:
                raise ConfigError(
                    f"The mesh has {mesh.ndim} axes {names or '(without names)'}; expected one. Name the axis over "
                    f"which tables are sharded with axis=, or pass a mesh of that axis: mesh['shard']."
                )
            return ProcessGroupComms(mesh.get_group())
        if axis not in (names or ()):
            raise ConfigError(f"The mesh has no axis {axis!r}; its axes are {names or 'without names'}.")
        return ProcessGroupComms(mesh.get_group(axis))
    if axis is not None:
        raise ConfigError(f"axis={axis!r} is for a DeviceMesh, got {type(mesh).__name__}; leave it out.")
    return mesh if isinstance(mesh, Group) else ProcessGroupComms(mesh)


def within_host(group: Group, topology: Topology) -> Group:
    """Return a channel of the ranks of `group` on this rank's host, in ascending order.

    All ranks of the group call it, on every host. Raises `ConfigError` if the topology has another world size.
    """
    if topology.world_size != group.size:
        raise ConfigError(
            f"The topology has {topology.world_size} ranks, the group {group.size}; pass the topology of the group's "
            f"ranks."
        )
    return group.partition("host", [sorted(host) for host in topology.host_ranks])
