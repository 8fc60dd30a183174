"""`Placement`: this process's place among the ranks that a launcher started, from the environment.

    launcher                                 variables
    torchrun, PyTorchJob, TrainJob           RANK, WORLD_SIZE, and others of torchrun
    srun of Slurm, one task per rank         SLURM_STEP_ID, SLURM_PROCID, SLURM_NTASKS, ...
    none                                     neither: one process

Variables of torchrun take precedence, so `srun torchrun` is a torchrun. The script of `sbatch` itself has no step, so
it is no rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from tilerec.errors import ConfigError

_FIRST_PORT, _PORTS = 15_000, 15_000
"""Ports of rendezvous under Slurm: below those that systems assign to clients (from 32768)."""


@dataclass(frozen=True)
class Placement:
    """Rank of this process, number of ranks, and the variables of torchrun that are not set yet.

    Attributes:
        missing: by name; see `export`.
    """

    rank: int
    size: int
    missing: Mapping[str, str]

    @staticmethod
    def of(environ: Mapping[str, str]) -> Placement | None:
        """Return the place of this process; None if no launcher started it as one of the ranks.

        Raises:
            ConfigError: a variable is malformed; tasks of Slurm lie on nodes in a way that plans cannot describe.
        """
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return Placement(number(environ, "RANK"), number(environ, "WORLD_SIZE"), {})
        step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
        if not step.isdecimal() or "SLURM_PROCID" not in environ:
            return None
        size = number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
        return _of_slurm(environ, int(step), size) if size > 1 else None

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set the missing variables: the planner, the device and the rendezvous read those of torchrun."""
        environ.update(self.missing)


def _of_slurm(environ: Mapping[str, str], step: int, size: int) -> Placement:
    rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID")
    node = number(environ, "SLURM_NODEID")
    sizes = tasks_per_node(_first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"Slurm: got {sizes} tasks on the nodes; expected equally many on each. Set --ntasks-per-node."
        )
    if rank != node * sizes[0] + local_rank:
        raise ConfigError(
            f"Slurm: got task {rank} as number {local_rank} on node {node}; expected consecutive tasks on each node. "
            "Set --distribution=block."
        )
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": sizes[0],
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(sizes),
    }
    missing = {name: str(value) for name, value in found.items()}
    if "MASTER_ADDR" not in environ:
        missing["MASTER_ADDR"] = first_host(_first(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST"))
    if "MASTER_PORT" not in environ:
        # Jobs and steps that share a node get ports of their own.
        missing["MASTER_PORT"] = str(_FIRST_PORT + (number(environ, "SLURM_JOB_ID") * 31 + step) % _PORTS)
    return Placement(rank, size, missing)


def tasks_per_node(text: str) -> list[int]:
    """Return the numbers of tasks on the nodes, of Slurm's "2(x3),1"."""
    sizes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE in the environment: got {text!r}; expected such as '2(x3),1'.")
        sizes += [int(found[1])] * int(found[2] or 1)
    return sizes


def first_host(text: str) -> str:
    """Return the first host of Slurm's "node[03-05,9]-ib,login"."""
    found = re.match(r"[^,\[]+(?:\[([0-9]+)[^\]]*\])?[^,\[]*", text)
    if found is None:
        raise ConfigError(f"SLURM_NODELIST in the environment: got {text!r}; expected names such as 'node[01-03]'.")
    return re.sub(r"\[[^\]]*\]", found[1] or "", found[0])


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a number of the environment.

    Raises:
        ConfigError: it is not one, or is not set and has no default.
    """
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} in the environment: got {text!r}; expected a number.")
    return int(text)


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if name in environ), "")
