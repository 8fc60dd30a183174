"""The machines of a plan, from the options of `tilerec plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tilerec.errors import ConfigError
from tilerec.planner.report.variation import world
from tilerec.spec.byte_text import bytes_of
from tilerec.spec.topology import Topology


def topology_of(
    path: Path | None, machine: str | None, hosts: int | None, per_host: int | None, device: str | None,
    hbm: str | None, ddr: str | None,
) -> Topology:  # fmt: skip
    caps = {
        name: bytes_of(option, text)
        for name, option, text in (("hbm_cap", "--hbm", hbm), ("ddr_cap", "--ddr", ddr))
        if text is not None
    }
    if machine is not None:
        if path is not None or device == "cpu":
            other = "--device cpu" if path is None else f"--topology {path}"
            raise ConfigError(f"--machine: got {machine} and {other}; expected one of them. Leave one out.")
        return Topology.preset(machine, hosts or 1, per_host or 8, **caps)
    if path is not None:
        topology = Topology.load(path)
        if device not in (None, topology.compute_device):
            raise ConfigError(
                f"--device: got {device} with {path}; expected {topology.compute_device}, the topology's device. Leave "
                "one of them out."
            )
        topology = replace(topology, **caps, **dict.fromkeys((f"{name}s" for name in caps), None))  # type: ignore[arg-type]
        if hosts is None and per_host is None:
            return topology
        return world(topology, hosts or 1, per_host or topology.local_world_size or topology.world_size)
    if per_host is None:
        raise ConfigError(
            "Machines: got none of --machine, --ranks-per-host and --topology; expected one. Give --machine h100, or "
            "--ranks-per-host (and --hosts), or --topology with a file that tilerec calibrate wrote."
        )
    return Topology((hosts or 1) * per_host, device or "cuda", local_world_size=per_host, **caps)  # type: ignore[arg-type]
