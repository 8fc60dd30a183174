"""`EmbeddingShardingPlanner`: a plan for a model, from what its tables, the machines and the user say."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch.distributed as dist
from torch import nn

from tilerec.comms.agree import agree
from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.greedy import USED, Choice, place
from tilerec.planner.sharder import Sharder, listed
from tilerec.planner.tables import PlannedTable, device_type_of, tables_of
from tilerec.sharding.strategies import STRATEGIES
from tilerec.spec.plan import (
    KERNELS_IN_USE,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


class EmbeddingShardingPlanner:
    """Plans by bytes: every table of every embedding collection gets a place (`planner/greedy.py`).

    Args:
        topology: the world, with memory per rank. None: the launcher's WORLD_SIZE and LOCAL_WORLD_SIZE (in
            `collective_plan`: the group's ranks), on the device that the tables are on.
        constraints: table -> what is allowed; holds for every collection that has a table of this name.
        batch_size, enumerator, storage_reservation, proposer, partitioner, performance_model, stats, callbacks,
            timeout_seconds, plan_loader: parts of another planner; they do not fit this search, which warns.
        debug: takes no effect; `print(plan)` shows a plan as a table.

    The plan counts weights, the attached optimizer's state and dense gradients against `Topology.memory_cap`. It is
    the same for the same model, topology and constraints, on every rank.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Any = None,
        storage_reservation: Any = None,
        proposer: Any = None,
        partitioner: Any = None,
        performance_model: Any = None,
        stats: Any = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: Sequence[Any] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: Any = None,
    ) -> None:
        given = {
            "batch_size": batch_size,
            "enumerator": enumerator,
            "storage_reservation": storage_reservation,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "stats": stats,
            "callbacks": callbacks,
            "timeout_seconds": timeout_seconds,
            "plan_loader": plan_loader,
        }
        unused = [name for name, value in given.items() if value is not None]
        if unused:
            warnings.warn(
                f"EmbeddingShardingPlanner: {', '.join(unused)} {'have' if len(unused) > 1 else 'has'} no effect; "
                "tables are placed by their bytes. Say what a table may become with constraints=.",
                stacklevel=2,
            )
        self.topology = topology
        self.constraints = dict(constraints or {})
        for table, limits in self.constraints.items():
            if not isinstance(limits, ParameterConstraints):
                raise ConfigError(
                    f"EmbeddingShardingPlanner: constraints['{table}'] is a {type(limits).__name__}, wanted "
                    "ParameterConstraints."
                )
        ignored: dict[str, list[str]] = {}
        for table, limits in self.constraints.items():
            for field in limits.said():
                if field not in USED:
                    ignored.setdefault(field, []).append(table)
        if ignored:
            shown = "; ".join(
                f"{field} (of {', '.join(tables[:4])}{', …' * (len(tables) > 4)})"
                for field, tables in ignored.items()
            )
            warnings.warn(
                f"EmbeddingShardingPlanner: of the constraints, {shown} has no effect: tables are placed by their "
                "bytes.",
                stacklevel=2,
            )

    def plan(self, module: nn.Module, sharders: Sequence[Sharder] | None = None) -> ShardingPlan:
        """A plan for the embedding collections below `module` (or for `module`, if it is one).

        Args:
            sharders: those that the model will be sharded with. Their optimizers, of the tables of their kind that have
                none attached, count in bytes. They do not choose what is planned, as TorchRec's do: sharding places
                every table, with or without a sharder for it, and refuses a plan that forgets one. So every collection
                is in the plan.

        Raises:
            PlannerError: a table fits nowhere in the way its constraints allow.
            ConfigError: the model has no tables, constraints name one that it lacks or do not go with its optimizer, or
                the sharders are no list of sharders of different kinds.
        """
        topology = self.topology or Topology.from_launcher(device_type_of(module))
        return self._plan(module, sharders, topology)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[Sharder] | None = None,
        pg: dist.ProcessGroup | Group | None = None,
    ) -> ShardingPlan:
        """`plan`, called by every rank of `pg` (None: the default process group).

        Every rank plans for itself, and one small collective checks that they planned the same: nobody waits for rank
        0's search.

        Raises:
            ConfigError: as `plan`; the topology is for another number of ranks; the plans differ, with the place.
        """
        if pg is None and not dist.is_initialized():
            whole = self.plan(module, sharders)
            if whole.world_size == 1:
                return whole  # there is nobody to ask
        group = group_of(pg)
        topology = self.topology or _topology_of(group, device_type_of(module))
        if topology.world_size != group.size:
            raise ConfigError(
                f"EmbeddingShardingPlanner: the topology has {topology.world_size} ranks and the group {group.size}; "
                "pass the topology of the group's ranks."
            )
        whole = self._plan(module, sharders, topology)
        agree(group, "the plan", whole.to_json())
        return whole

    def _plan(
        self, module: nn.Module, sharders: Sequence[Sharder] | None, topology: Topology
    ) -> ShardingPlan:
        given = listed(sharders, "EmbeddingShardingPlanner")
        dense = {name for name, limits in self.constraints.items() if _only_dense(limits)}
        tables = tables_of(module, given, dense)
        if not tables:
            raise ConfigError(
                f"EmbeddingShardingPlanner: {type(module).__name__} has no embedding collection with tables; pass the "
                "model that holds them."
            )
        named = {name for table in tables for _, name in table.names}
        strange = [name for name in self.constraints if name not in named]
        if strange:
            shown = sorted(named)
            near = {name: get_close_matches(name, shown, n=1) for name in strange[:8]}
            meant = ", ".join(f"'{found[0]}' for '{name}'" for name, found in near.items() if found)
            raise ConfigError(
                f"EmbeddingShardingPlanner: constraints name {strange[:8]}, which is no table of the model; it has "
                f"{shown[:8]}{' and more' if len(shown) > 8 else ''}."
                + (f" Close are {meant}." if meant else "")
            )
        limits = {table.names[0]: self._limits(table) for table in tables}
        known = {names: limit for names, limit in limits.items() if limit is not None}
        choices = place(tables, known, topology)
        paths = dict.fromkeys(path for table in tables for path, _ in table.names)
        modules = {path: EmbeddingModuleShardingPlan() for path in paths}
        made: dict[tuple[Any, ...], Tiling] = {}
        for table, choice in zip(tables, choices, strict=True):
            mark = (choice, table.rows, table.dim)
            if mark not in made:
                made[mark] = STRATEGIES[choice.kind](
                    table.names[0][1], table.rows, table.dim, choice.ranks, topology
                )
            sharding = _sharding(table, choice, made[mark], limits[table.names[0]])
            for path, name in table.names:
                modules[path][name] = sharding
        return ShardingPlan(modules, topology.world_size, topology.host_ranks)

    def _limits(self, table: PlannedTable) -> ParameterConstraints | None:
        """A table's constraints; where collections share it, those of its first name that has any."""
        return next((self.constraints[name] for _, name in table.names if name in self.constraints), None)


def _only_dense(limits: ParameterConstraints) -> bool:
    return limits.kernels_allowed() == (EmbeddingComputeKernel.DENSE,)


def _sharding(
    table: PlannedTable, choice: Choice, tiling: Tiling, limits: ParameterConstraints | None
) -> ParameterSharding:
    return ParameterSharding(
        choice.kind,
        _kernel(table, () if limits is None else limits.kernels_allowed()),
        choice.ranks,
        tiling=tiling,
        data_type=table.data_type,
        ids_per_bag=None if limits is None else limits.ids_per_bag(),
    )


def _kernel(
    table: PlannedTable, allowed: tuple[EmbeddingComputeKernel, ...]
) -> EmbeddingComputeKernel | None:
    """What is known or must be; None leaves it to what is attached when the model is sharded."""
    dense = EmbeddingComputeKernel.DENSE
    if not allowed:
        return table.kernel
    updating = sorted((k for k in allowed if k is not dense), key=lambda k: k not in KERNELS_IN_USE)
    if table.kernel is None and dense in allowed:
        return None if updating else dense
    if not updating:
        raise ConfigError(
            f"{table}: an optimizer is attached, so its kernel is 'fused', which compute_kernels "
            f"{[k.value for k in allowed]} does not allow; allow 'fused', or do not attach an optimizer."
        )
    return updating[0]


def _topology_of(group: Group, compute_device: str) -> Topology:
    """The group's ranks on hosts of LOCAL_WORLD_SIZE each where that divides them, else on one host."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(text) if text.isdecimal() and int(text) else group.size
    return Topology(group.size, compute_device, local_world_size=local if group.size % local == 0 else None)
