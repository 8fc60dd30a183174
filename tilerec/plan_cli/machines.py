"""The machines of a plan, from the options of `tilerec plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tilerec.errors import ConfigError
from tilerec.planner.report.variation import world
from tilerec.spec.topology import Topology

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


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


def bytes_of(option: str, text: str) -> int:
    word = text.strip().lower().replace(" ", "")
    number = word.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = word[len(number) :]
    try:
        value = float(number) * _BYTES[unit]
        if not 0 <= value < 2**62:
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(f"{option}: got {text!r}; expected a number of bytes. Write 80GB, 79GiB, or bytes.") from None
    return int(value)
