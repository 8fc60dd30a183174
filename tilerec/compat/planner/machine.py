"""Descriptions of machines with TorchRec's names, for `Topology`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

from tilerec.compat.planner.types import DeviceHardware, Perf, Storage
from tilerec.errors import ConfigError
from tilerec.spec import topology as native
from tilerec.spec.topology import gigabytes_per_second


class Topology(native.Topology):
    """`tilerec.Topology` with a list of devices, which partitioners read."""

    @cached_property
    def devices(self) -> list[DeviceHardware]:
        """Memory and load of each rank; a program may change them in a copy of the topology."""
        return [DeviceHardware(rank, Storage(hbm, ddr), Perf(0, 0, 0, 0)) for rank, (hbm, ddr) in enumerate(self.caps)]

    @property
    def intra_group_size(self) -> int:
        """Ranks of a host."""
        return self.local_world_size or self.world_size


@final
class CustomTopologyData:
    """Memory sizes per rank for `Topology(custom_topology_data=...)`, equivalent to its `hbm_caps` and `ddr_caps`.

    Args:
        data: "hbm_cap" or "ddr_cap" -> bytes of each rank.
        world_size: number of ranks.

    Raises:
        ConfigError: `data` has another key, or a list whose length is not `world_size`.
    """

    supported_fields = ("ddr_cap", "hbm_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for key, values in data.items():
            if key not in self.supported_fields:
                raise ConfigError(
                    f"CustomTopologyData: data: got key {key!r}; expected one of "
                    f"{list(self.supported_fields)}. Pass other settings to Topology."
                )
            if len(values) != world_size:
                raise ConfigError(
                    f"CustomTopologyData: {key}: got {len(values)} numbers; expected {world_size}, one per rank."
                )
        self._data = {key: list(values) for key, values in data.items()}

    def has_data(self, key: str) -> bool:
        """Return True if `data` has the key."""
        return key in self._data

    def get_data(self, key: str) -> list[int]:
        """Return the bytes of each rank."""
        if key not in self._data:
            raise ConfigError(f"CustomTopologyData: got key {key!r}; expected {list(self._data)}.")
        return list(self._data[key])


@final
class BasicCommsBandwidths:
    """Link bandwidths in bytes per millisecond, for `Topology(generalized_comms_bandwidths=...)`."""

    def __init__(
        self,
        inter_host_bw: float = gigabytes_per_second(12.5),
        intra_host_bw: float = gigabytes_per_second(600),
    ) -> None:
        self.inter_host_bw, self.intra_host_bw = inter_host_bw, intra_host_bw
