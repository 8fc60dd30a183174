"""Topology: hosts, ranks, memory per rank and bandwidth of the machines.

Nouns
  rank        one process with one device; ranks are 0 … world_size - 1
  host        the ranks that share a machine; hosts are numbered 0 … host_count - 1
  local rank  a rank's position within its host
  HBM, DDR    a device's own memory; host memory. Caps are bytes per rank
  bandwidth   bytes per millisecond, per rank (memory) or per pair of ranks (links)

A topology contains the caller's numbers only: it never queries a device or a process group.
"""

from __future__ import annotations

import math
import os
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, read_json
from tilerec.spec.gpu_presets import MACHINES
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.ranks import MOST_RANKS, is_int_from, ranks_to_text, read_hosts, text_to_ranks
from tilerec.spec.speeds import Speeds

GIB = 2**30
HBM_CAP = 32 * GIB
DDR_CAP = 128 * GIB
MOST_BYTES = 2**60
"""Upper bound of caps, so that sums over ranks and tables fit in 64-bit integers."""


def gigabytes_per_second(figure: float) -> float:
    """Convert GiB per second to this file's unit, bytes per millisecond."""
    return figure * GIB / 1000


def launcher_local_size() -> int | None:
    """Return the number of ranks per host that the launcher (torchrun) set in LOCAL_WORLD_SIZE, if it did."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None


@dataclass(frozen=True)
class Topology:
    """Hosts, ranks, memory and links.

    Args:
        world_size: number of ranks.
        compute_device: "cuda" or "cpu" (or another device type of torch).
        hbm_cap: device memory, bytes per rank; default 32 GiB, or 0 on "cpu".
        ddr_cap: host memory, bytes per rank; default 128 GiB.
        ssd_cap: disk, bytes per rank; stored, without effect.
        local_world_size: ranks per host; default: all ranks are on one host. Must divide `world_size`; pass hosts of
            different sizes as `hosts=`.
        pod_size: ranks that the fast links connect, if more than one host; stored, without effect.
        hbm_caps, ddr_caps: bytes of each rank, in the order of ranks, for ranks that differ. Leave out `hbm_cap` and
            `ddr_cap` then: they become the maximum.
        hbm_mem_bw, ddr_mem_bw, ssd_mem_bw, hbm_to_ddr_mem_bw: memory bandwidth, bytes per millisecond.
        intra_host_bw, inter_host_bw: links within a host and between hosts, bytes per millisecond of one rank, one way.
        nic: "device": each rank has its own network card. "host": the ranks of a host share its network cards, whose
            bandwidth is the sum of the ranks' `inter_host_bw`. Default: "host" on "cpu", else "device".
        custom_topology_data: TorchRec's alternative to `hbm_caps` and `ddr_caps`.
        generalized_comms_bandwidths: TorchRec's alternative to `intra_host_bw` and `inter_host_bw`.
        bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier, uneven_sharding_perf_multiplier: parameters of
            TorchRec's cost model; ignored, with a warning. created_by_factory: ignored.
        hosts: ranks of each host, in the order of their local ranks: `[[0, 1, 2], [3, 4]]`. Sizes may differ, and
            ranks need not be contiguous.
        speeds: measured speeds for the planner's cost model, from `tilerec calibrate`; by default derived from the
            bandwidths.

    Raises:
        ConfigError: inconsistent sizes, a rank on two hosts or on none, a negative cap, an unknown device.

    `Topology(16, local_world_size=8).hosts == ((0, …, 7), (8, …, 15))`.
    """

    world_size: int
    compute_device: str = "cuda"
    hbm_cap: int | None = None
    ddr_cap: int | None = None
    ssd_cap: int | None = None
    local_world_size: int | None = None
    pod_size: int | None = None
    hbm_mem_bw: float = gigabytes_per_second(897)
    ddr_mem_bw: float = gigabytes_per_second(51)
    ssd_mem_bw: float = gigabytes_per_second(0.1)
    hbm_to_ddr_mem_bw: float = gigabytes_per_second(32)
    intra_host_bw: float = gigabytes_per_second(600)
    inter_host_bw: float = gigabytes_per_second(12.5)
    bwd_compute_multiplier: InitVar[float | None] = None
    custom_topology_data: InitVar[Any] = None
    weighted_feature_bwd_compute_multiplier: InitVar[float | None] = None
    uneven_sharding_perf_multiplier: InitVar[float | None] = None
    generalized_comms_bandwidths: InitVar[Any] = None
    created_by_factory: InitVar[bool] = False
    hosts: Sequence[Sequence[int]] | None = field(default=None, kw_only=True)
    speeds: Speeds | None = field(default=None, kw_only=True)
    hbm_caps: Sequence[int] | None = field(default=None, kw_only=True)
    ddr_caps: Sequence[int] | None = field(default=None, kw_only=True)
    nic: Literal["device", "host"] | None = field(default=None, kw_only=True)

    def __post_init__(
        self,
        bwd_compute_multiplier: float | None,
        custom_topology_data: Any,
        weighted_feature_bwd_compute_multiplier: float | None,
        uneven_sharding_perf_multiplier: float | None,
        generalized_comms_bandwidths: Any,
        created_by_factory: bool,
    ) -> None:
        def fill(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        multipliers = {
            "bwd_compute_multiplier": bwd_compute_multiplier,
            "weighted_feature_bwd_compute_multiplier": weighted_feature_bwd_compute_multiplier,
            "uneven_sharding_perf_multiplier": uneven_sharding_perf_multiplier,
        }
        warn_ignored_settings("Topology", multipliers, dict.fromkeys(multipliers, _OWN_COST_MODEL), 3)
        if not is_int_from(self.world_size, 1) or self.world_size > MOST_RANKS:
            raise ConfigError(
                f"Topology: got world_size={self.world_size!r:.80}; expected a whole number from 1 to {MOST_RANKS:,}. "
                "Pass the number of ranks."
            )
        _check_device(self.compute_device)
        if custom_topology_data is not None:
            for name in ("hbm", "ddr"):
                if getattr(self, f"{name}_caps") is None:
                    fill(f"{name}_caps", _custom_caps(custom_topology_data, f"{name}_cap"))
        if generalized_comms_bandwidths is not None:
            for name in ("intra_host_bw", "inter_host_bw"):
                fill(name, _link(generalized_comms_bandwidths, name))
        for name in ("hbm", "ddr"):
            self._read_caps(name, fill)
        if self.speeds is not None and not isinstance(self.speeds, Speeds):
            raise ConfigError(
                f"Topology: got a {type(self.speeds).__name__} as speeds; expected Speeds. Load a file of tilerec "
                "calibrate with Topology.load."
            )
        if self.nic is None:
            fill("nic", "host" if self.compute_device == "cpu" else "device")
        elif self.nic not in ("device", "host"):
            raise ConfigError(f"Topology: got nic={self.nic!r:.80}; expected 'device' or 'host'. Pass one of them.")
        self._read_numbers(fill)
        self._read_hosts(fill)

    def _read_numbers(self, fill: Any) -> None:
        """Check capacities and bandwidths, and store defaults for those that are None."""
        for name, default in (
            ("hbm_cap", 0 if self.compute_device == "cpu" else HBM_CAP),
            ("ddr_cap", DDR_CAP),
            ("ssd_cap", None),
        ):
            cap = getattr(self, name)
            if cap is None:
                fill(name, default)
            elif not is_int_from(cap, 0) or cap >= MOST_BYTES:
                raise ConfigError(
                    f"Topology: got {name}={cap!r:.200}; expected a whole number of bytes from 0 (below 2^60)."
                    + (f" For ranks that differ pass {name}s=." if isinstance(cap, Sequence) else " Pass one.")
                )
        for name in _BANDWIDTHS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(
                    f"Topology: got {name}={value!r}; expected a number above 0. Pass bytes per millisecond."
                )
            fill(name, float(value))
        for name, why in (
            ("ssd_cap", "no rows are kept on disk"),
            ("pod_size", "the fast links are those within a host"),
        ):
            if getattr(self, name) is not None:
                warnings.warn(f"Topology: {name} is stored but has no effect: {why}.", stacklevel=4)

    def _read_hosts(self, fill: Any) -> None:
        """Check the hosts, and store them as tuples of ranks; store their size if all have the same."""
        if self.local_world_size is not None and not is_int_from(self.local_world_size, 1):
            raise ConfigError(
                f"Topology: got local_world_size={self.local_world_size!r:.80}; expected a whole number from 1. Pass "
                "the ranks per host."
            )
        if self.hosts is None:
            fill("hosts", self._blocks())
        else:
            fill("hosts", _checked_hosts(self.hosts, self.world_size))
        sizes = {len(host) for host in self.host_ranks}
        if self.local_world_size is not None and sizes != {self.local_world_size}:
            raise ConfigError(
                f"Topology: got local_world_size={self.local_world_size} and hosts of {sorted(sizes)} ranks; expected "
                "the same size. Give one of them."
            )
        # If all hosts have one size, it is the local world size, also if only `hosts` was given.
        fill("local_world_size", sizes.pop() if len(sizes) == 1 else None)

    def _read_caps(self, name: str, fill: Any) -> None:
        """Store `hbm_caps` or `ddr_caps` as a tuple, or None if all ranks are equal; store the maximum as the cap."""
        given = getattr(self, f"{name}_caps")
        if given is None:
            return
        caps = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
        if len(caps) != self.world_size or not all(is_int_from(cap, 0) and cap < MOST_BYTES for cap in caps):
            raise ConfigError(
                f"Topology: got {name}_caps={given!r:.200}; expected whole numbers of bytes from 0. Pass one for each "
                f"of the {self.world_size} ranks."
            )
        single = getattr(self, f"{name}_cap")
        if single not in (None, max(caps)):
            raise ConfigError(
                f"Topology: got {name}_cap={single} and {name}_caps with the maximum {max(caps)}; expected one of "
                "them. Leave one out."
            )
        fill(f"{name}_cap", max(caps))
        fill(f"{name}_caps", caps if len(set(caps)) > 1 else None)

    def _blocks(self) -> tuple[tuple[int, ...], ...]:
        size = self.world_size if self.local_world_size is None else self.local_world_size
        if self.world_size % size:
            raise ConfigError(
                f"Topology: got local_world_size={size}; expected a divisor of world_size={self.world_size}. Write "
                "hosts of different sizes as hosts=[[0, 1, 2], [3, 4]]."
            )
        return tuple(tuple(range(r, r + size)) for r in range(0, self.world_size, size))

    @property
    def host_ranks(self) -> tuple[tuple[int, ...], ...]:
        """`hosts` as stored: one tuple of ranks per host."""
        return self.hosts  # type: ignore[return-value]

    @property
    def host_count(self) -> int:
        """Number of hosts."""
        return len(self.host_ranks)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self._position(rank)[0]

    def local_rank(self, rank: int) -> int:
        """Return a rank's position within its host."""
        return self._position(rank)[1]

    def turn(self, rank: int, host: int) -> int:
        """Return a rank's index, from 0, among the ranks of all hosts except `host`."""
        return rank - bisect_left(self._ascending[host], rank)

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Return a host's ranks, in the order of their local ranks."""
        if not is_int_from(host, 0) or host >= self.host_count:
            raise ConfigError(
                f"Topology: got host {host!r}; expected 0 to {self.host_count - 1}, the hosts of the {self.world_size} "
                "ranks. Pass one of these."
            )
        return self.host_ranks[host]

    @property
    def memory_cap(self) -> int:
        """Bytes per rank of the memory that holds tables: DDR on "cpu", else HBM. The maximum, if ranks differ."""
        cap = self.ddr_cap if self.compute_device == "cpu" else self.hbm_cap
        assert cap is not None
        return cap

    @cached_property
    def caps(self) -> tuple[tuple[int, int], ...]:
        """Bytes of (device, host) memory of each rank."""
        hbm = self.hbm_caps or (self.hbm_cap or 0,) * self.world_size
        ddr = self.ddr_caps or (self.ddr_cap or 0,) * self.world_size
        return tuple(zip(hbm, ddr, strict=True))

    @property
    def memory_caps(self) -> tuple[int, ...]:
        """`memory_cap` of each rank."""
        tier = 1 if self.compute_device == "cpu" else 0
        return tuple(cap[tier] for cap in self.caps)

    @cached_property
    def _ascending(self) -> tuple[list[int], ...]:
        """Ranks of each host in ascending order."""
        return tuple(sorted(ranks) for ranks in self.host_ranks)

    @cached_property
    def _positions(self) -> dict[int, tuple[int, int]]:
        return {rank: (h, i) for h, host in enumerate(self.host_ranks) for i, rank in enumerate(host)}

    def _position(self, rank: int) -> tuple[int, int]:
        if rank not in self._positions:
            raise ConfigError(
                f"Topology: got rank {rank!r}; expected 0 to {self.world_size - 1}. Pass one of these ranks."
            )
        return self._positions[rank]

    @staticmethod
    def from_launcher(compute_device: str = "cuda", environ: Mapping[str, str] | None = None) -> Topology:
        """Build the topology from a launcher's (torchrun) WORLD_SIZE and LOCAL_WORLD_SIZE; without them, one rank.

        Args:
            compute_device: as in the class.
            environ: mapping to read instead of `os.environ`.

        Raises:
            ConfigError: a variable is not a number, or LOCAL_WORLD_SIZE does not divide WORLD_SIZE (hosts differ).
        """
        given = os.environ if environ is None else environ
        sizes: list[int] = []
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            text = given.get(name, str(sizes[0]) if sizes else "1")
            if not text.isdecimal() or int(text) < 1:
                raise ConfigError(
                    f"Topology: got {name}={text!r} in the environment; expected a number from 1. Start the processes "
                    "with torchrun, or set it."
                )
            sizes.append(int(text))
        return Topology(sizes[0], compute_device, local_world_size=sizes[1])

    @staticmethod
    def preset(machine: str, hosts: int = 1, gpus_per_host: int = 8, **more: Any) -> Topology:
        """Build the topology of hosts with a named GPU; each GPU has its own network card.

        Args:
            machine: "a100", "h100", "h200" or "b200"; figures and sources: `tilerec/spec/gpu_presets.py`.
            hosts, gpus_per_host: number of hosts, and of GPUs per host; each GPU has one rank.
            more: further arguments of `Topology`, which override those of the GPU.

        Raises:
            ConfigError: an unknown name, or counts that are not whole numbers from 1.
        """
        if machine not in MACHINES:
            raise ConfigError(
                f"Topology: got machine {machine!r:.80}; expected one of {', '.join(MACHINES)}. Use one of these, or "
                "pass hbm_cap=, hbm_mem_bw=, intra_host_bw= and inter_host_bw= to Topology."
            )
        for name, count in (("hosts", hosts), ("gpus_per_host", gpus_per_host)):
            if not is_int_from(count, 1):
                raise ConfigError(
                    f"Topology: got {name}={count!r:.80}; expected a whole number from 1. Pass the number of them."
                )
        of, per_ms = MACHINES[machine], 1e-3
        figures = {
            "hbm_cap": of.memory, "hbm_mem_bw": of.memory_bw * per_ms, "hbm_to_ddr_mem_bw": of.host_bw * per_ms,
            "intra_host_bw": of.link_bw * per_ms, "inter_host_bw": of.network_bw * per_ms,
        }  # fmt: skip
        if "hbm_caps" in more:
            figures.pop("hbm_cap")
        return Topology(hosts * gpus_per_host, "cuda", local_world_size=gpus_per_host, **{**figures, **more})

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values; `hosts` are strings such as `"0-7"`."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["hosts"] = [ranks_to_text(host) for host in self.host_ranks]
        out["speeds"] = None if self.speeds is None else self.speeds.to_json()
        for name in ("hbm_caps", "ddr_caps"):
            caps = out.pop(name)
            if caps is not None:
                out[name], out[name[:-1]] = list(caps), None
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> Topology:
        """Build from a dict that `to_json` returned; missing fields get their defaults."""
        value = JsonValue.of(data, "Topology JSON")
        found = value.record([f.name for f in fields(Topology)], ("world_size",))
        # A null means the default: `to_json` writes null for a None.
        found = {key: each for key, each in found.items() if each.value is not None}
        for name, each in found.items():
            if name.endswith("_caps"):
                each.wholes()
            elif name.endswith("_bw"):
                each.number()
            elif name in ("local_world_size", "pod_size") or name.endswith("_cap"):
                each.whole()
        kwargs = {key: each.value for key, each in found.items()}
        if "world_size" in found:
            kwargs["world_size"] = found["world_size"].whole(1, MOST_RANKS)
        if "hosts" in found:
            kwargs["hosts"] = read_hosts(found["hosts"])
        if "speeds" in found:
            kwargs["speeds"] = Speeds.from_json(found["speeds"])
        try:
            return Topology(**kwargs)
        except ConfigError as error:
            raise value.refused(error) from error

    @staticmethod
    def load(path: str | Path) -> Topology:
        """Read a file that `tilerec calibrate` wrote, or that you wrote by hand.

        Raises:
            FileError: the file cannot be read. ConfigError: it is not a topology.
        """
        return Topology.from_json(read_json(path, "Topology"))

    def __str__(self) -> str:
        hosts = " | ".join(ranks_to_text(host) for host in self.host_ranks)
        return (
            f"{self.world_size} {self.compute_device} ranks on {self.host_count} "
            f"host{'s' * (self.host_count > 1)}: {hosts}"
        )


_OWN_COST_MODEL = "tilerec's cost model measures backward passes and uneven splits (tilerec calibrate)"
_BANDWIDTHS = (
    "hbm_mem_bw", "ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw", "inter_host_bw",
)  # fmt: skip


def _check_device(kind: object) -> None:
    try:
        known = isinstance(kind, str) and torch.device(kind).type == kind
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(
            f"Topology: got compute_device={kind!r}; expected a device type of torch without a number. Pass 'cuda' or "
            "'cpu'."
        )


def _custom_caps(data: Any, key: str) -> Any:
    """Return the values per rank from TorchRec's CustomTopologyData; None if it has no such key."""
    try:
        return list(data.get_data(key)) if data.has_data(key) else None
    except (AttributeError, TypeError):
        raise ConfigError(
            f"Topology: got a {type(data).__name__} as custom_topology_data; expected a CustomTopologyData. Pass one, "
            "or hbm_caps= and ddr_caps=."
        ) from None


def _link(bandwidths: Any, name: str) -> Any:
    if not hasattr(bandwidths, name):
        raise ConfigError(
            f"Topology: got a {type(bandwidths).__name__} without {name} as generalized_comms_bandwidths; expected a "
            "BasicCommsBandwidths. Pass one, or intra_host_bw= and inter_host_bw=."
        )
    return getattr(bandwidths, name)


def _checked_hosts(hosts: Sequence[Sequence[int]], world_size: int) -> tuple[tuple[int, ...], ...]:
    stored = tuple(text_to_ranks(list(host), "Topology: hosts") for host in hosts)
    if not all(stored):
        raise ConfigError(
            f"Topology: got no ranks in hosts[{stored.index(())}]; expected at least one. Leave that host out."
        )
    seen: set[int] = set()
    for rank in (rank for host in stored for rank in host):
        if rank in seen or rank >= world_size:
            raise ConfigError(
                f"Topology: got rank {rank} "
                + ("twice in hosts" if rank in seen else f"in hosts with world_size={world_size}")
                + f"; expected each of the ranks 0 to {world_size - 1} on exactly one host. Correct hosts."
            )
        seen.add(rank)
    if len(seen) < world_size:
        missing = ranks_to_text(r for r in range(world_size) if r not in seen)
        raise ConfigError(f"Topology: got hosts without ranks {missing}; expected every rank. Add them to hosts.")
    return stored
