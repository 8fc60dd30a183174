"""`EmbeddingShardingPlanner`: makes a plan for a model from its tables, the topology and constraints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.errors import ConfigError
from tilerec.planner.constraints import FIELDS_READ, ParameterConstraints
from tilerec.planner.cost.reads import BATCH_SIZE
from tilerec.planner.decision import decide, topology_of_ranks
from tilerec.planner.gc_paused import gc_paused
from tilerec.planner.plan_cache import PlanCache
from tilerec.planner.plan_price import PlanPrice, price_plan
from tilerec.planner.planner_error import planner_error_of
from tilerec.planner.rank_result import Outcome
from tilerec.planner.report.report_builder import build_report
from tilerec.planner.request import PlanRequest
from tilerec.planner.reservation import HeuristicalStorageReservation, StorageReservation
from tilerec.planner.sharder import Sharder, checked_sharders
from tilerec.planner.tables import (
    AnyTable,
    PlannedTable,
    device_type_at_home,
    device_type_of,
    tables_of,
    tables_of_configs,
)
from tilerec.spec.plan import EmbeddingComputeKernel, ParameterSharding, ShardingPlan, ShardingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

RESERVED = 0.15
"""Part of the memory that is reserved by default (`storage_reservation=None`)."""

Fixed = ShardingPlan | str | Path | Mapping[str, Mapping[str, ParameterSharding | Tiling]]


class EmbeddingShardingPlanner:
    """Planner that minimizes the predicted time of a step within the memory of every rank (docs/planner.md).

    The plan is the same for the same model, topology and constraints, on every machine. Its `report` (`PlanReport`)
    contains cost, bound, memory and stages. The report is not part of the plan's file.

    Args:
        topology: the machines: ranks, hosts, memory, speeds. None: the launcher's WORLD_SIZE and LOCAL_WORLD_SIZE (in
            `collective_plan`: the group's ranks), on the device of the tables.
        batch_size: samples per rank and step; None: 512.
        enumerator, proposer, partitioner, performance_model, stats, callbacks, timeout_seconds, plan_loader: parts of
            TorchRec's planner, accepted with a warning; they have no effect on this search.
        storage_reservation: memory that tables must not use; None: `HeuristicalStorageReservation(0.15)`.
        constraints: `ParameterConstraints` by table name, for every collection with a table of this name. The key
            `"<path>.<name>"` is for the table of one collection.
        debug: no effect. `print(plan.report)` prints the cost of a plan, `print(plan)` its placement.
        fixed: a plan of some tables made by hand, or the path of its file. These tables are pinned, and the others are
            planned around them.
        cache: folder of a plan cache, keyed by all inputs of the plan; None: no cache.
        effort: amount of search; 1 is the fastest, and each further step doubles the work.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Any = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Any = None,
        partitioner: Any = None,
        performance_model: Any = None,
        stats: Any = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: Sequence[Any] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: Any = None,
        *,
        fixed: Fixed | None = None,
        cache: str | Path | None = None,
        effort: int = 1,
    ) -> None:
        given = {
            "enumerator": enumerator,
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
                f"EmbeddingShardingPlanner: {', '.join(unused)} {'have' if len(unused) > 1 else 'has'} no effect: the "
                "search has no such parts, and needs no time limit. Restrict a table's placement with constraints=.",
                stacklevel=2,
            )
        if topology is not None and not isinstance(topology, Topology):
            raise ConfigError(
                f"EmbeddingShardingPlanner: topology is a {type(topology).__name__}, wanted a Topology."
            )
        if storage_reservation is not None and not isinstance(storage_reservation, StorageReservation):
            raise ConfigError(
                f"EmbeddingShardingPlanner: storage_reservation is a {type(storage_reservation).__name__}, wanted one "
                "of tilerec.planner, such as FixedPercentageStorageReservation(0.1)."
            )
        self.topology = topology
        self.batch_size = BATCH_SIZE if batch_size is None else batch_size
        self.storage_reservation = storage_reservation or HeuristicalStorageReservation(RESERVED)
        if not isinstance(constraints, (Mapping, type(None))):
            raise ConfigError(
                f"EmbeddingShardingPlanner: constraints is a {type(constraints).__name__}, wanted a dict of table -> "
                "ParameterConstraints."
            )
        if not isinstance(cache, (str, Path, type(None))):
            raise ConfigError(
                f"EmbeddingShardingPlanner: cache is a {type(cache).__name__}, wanted the path of a folder."
            )
        self.constraints = dict(constraints or {})
        self.effort = effort
        self.cache = None if cache is None else PlanCache(cache)
        if isinstance(fixed, (str, Path)):
            fixed = _loaded(fixed)
        self.fixed = {} if fixed is None else _read_fixed(fixed)
        self._fixed_world = fixed.world_size if isinstance(fixed, ShardingPlan) else None
        self._check_constraints()

    def _check_constraints(self) -> None:
        ignored: dict[str, list[str]] = {}
        for table, limits in self.constraints.items():
            if not isinstance(table, str):
                raise ConfigError(
                    f"EmbeddingShardingPlanner: constraints name {table!r}, wanted names of tables."
                )
            if not isinstance(limits, ParameterConstraints):
                raise ConfigError(
                    f"EmbeddingShardingPlanner: constraints['{table}'] is a {type(limits).__name__}, wanted "
                    "ParameterConstraints."
                )
            for field in limits.said():
                if field not in FIELDS_READ:
                    ignored.setdefault(field, []).append(table)
        if ignored:
            shown = "; ".join(
                f"{field} (of {', '.join(tables[:4])}{', …' * (len(tables) > 4)})"
                for field, tables in ignored.items()
            )
            warnings.warn(
                f"EmbeddingShardingPlanner: of the constraints, {shown} has no effect on a plan.",
                stacklevel=3,
            )

    def plan(
        self, module: nn.Module | Sequence[AnyTable], sharders: Sequence[Sharder] | None = None
    ) -> ShardingPlan:
        """Return a plan for all embedding collections in `module` (or for `module`, if it is a collection).

        Args:
            module: a model; or a list of table configs, planned as one collection at path ""; or a list of
                `PlannedTable`s.
            sharders: the sharders of the later sharding. Bytes and seconds include their optimizers, for tables of
                their kind without an attached one, and their wire formats. Unlike TorchRec's, they do not select the
                planned collections: the plan contains every collection, as sharding places every table and rejects a
                plan that lacks one.

        Raises:
            PlannerError: no plan fits the memory of every rank, or none was found. It names the memory that is too
                small, and remedies.
            ConfigError: the model has no tables; constraints name an unknown table, contradict each other or contradict
                the table's optimizer; or `sharders` is not a list of sharders of different kinds.
        """
        return self.make(self.request(module, sharders))

    def request(
        self, module: nn.Module | Sequence[AnyTable], sharders: Sequence[Sharder] | None = None
    ) -> PlanRequest:
        """Return all inputs of `plan` as a record that can be stored, varied and explained."""
        topology = self.topology or Topology.from_launcher(_device_type(module))
        return self._request(module, sharders, topology)

    def price(
        self,
        module: nn.Module | Sequence[AnyTable],
        plan: ShardingPlan,
        sharders: Sequence[Sharder] | None = None,
    ) -> PlanPrice:
        """Return the price of a plan, made by any planner or by hand: seconds of a step, bytes of each rank.

            planner.price(model, plan).seconds

        Args:
            module, sharders: as in `plan`.

        Raises:
            ConfigError: as in `price_plan`.
        """
        return price_plan(self.request(module, sharders), plan)

    def collective_plan(
        self,
        module: nn.Module | Sequence[AnyTable],
        sharders: Sequence[Sharder] | None = None,
        pg: dist.ProcessGroup | Group | None = None,
    ) -> ShardingPlan:
        """Return the plan of `plan` on every rank of `pg` (None: the default process group). Collective.

        All ranks use rank 0's topology. Every rank runs the search itself, and ranks then compare digests, so no rank
        waits for rank 0's search. The topology may have fewer ranks than `pg` if their number divides the size of
        `pg`: it then describes one sharding group (`DMPCollection`), and so does the plan.

        Raises:
            ConfigError: as in `plan`; or the topology's number of ranks does not divide the size of `pg`; or ranks
                differ in their inputs or plans. The message names the first difference.
        """
        if pg is None and not dist.is_initialized():
            whole = self.plan(module, sharders)
            if whole.world_size == 1:
                return whole  # a world of one rank: nothing to compare
        group = group_of(pg)
        topology = self._shared_topology(group, module)
        outcome = Outcome()
        try:
            outcome.request = self._request(module, sharders, topology)
            outcome.digest = outcome.request.digest()
            outcome.plan = self.make(outcome.request)
            outcome.fingerprint = outcome.plan.fingerprint()
        except Exception as error:
            # Take part in the comparison all the same: the other ranks wait there, and raise this error, too.
            outcome.trouble = str(error) or type(error).__name__
            outcome.compare(group, raises=False)
            raise
        outcome.compare(group)
        assert outcome.plan is not None
        return outcome.plan

    def _shared_topology(self, group: Group, module: Any) -> Topology:
        own = self.topology
        if group.rank == 0 and own is None:
            own = topology_of_ranks(group.size, _device_type(module))
        shared = group.all_gather_object(None if own is None or group.rank else own.to_json())[0]
        if group.rank or own is None:
            assert isinstance(shared, dict)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rank 0 has already warned
                own = Topology.from_json(shared)
        if group.size % own.world_size:
            raise ConfigError(
                f"EmbeddingShardingPlanner: the topology has {own.world_size} ranks and the group {group.size}; pass "
                "the topology of the group's ranks, or of one sharding group of DMPCollection, whose size divides it."
            )
        return own

    # -------------------------------------------------------------------------------------------- building requests

    @gc_paused()
    def _request(
        self,
        module: Any,
        sharders: Sequence[Sharder] | None,
        topology: Topology,
    ) -> PlanRequest:
        given = checked_sharders(sharders, "EmbeddingShardingPlanner")
        dense = {name for name, limits in self.constraints.items() if _only_dense(limits)}
        if isinstance(module, nn.Module):
            tables = tables_of(module, given, dense)
            what = f"{type(module).__name__} has no embedding collection with tables; pass the model that holds them."
        elif isinstance(module, (list, tuple)):
            tables = tables_of_configs(module, given, dense)
            what = "the list of tables is empty."
        else:
            raise ConfigError(
                f"EmbeddingShardingPlanner: module is a {type(module).__name__}; wanted a module, or a list of configs."
            )
        if not tables:
            raise ConfigError(f"EmbeddingShardingPlanner: {what}")
        if self._fixed_world not in (None, topology.world_size):
            raise ConfigError(
                f"EmbeddingShardingPlanner: the plan in fixed= was made for {self._fixed_world} ranks, and the "
                f"topology has {topology.world_size}; give one for these."
            )
        request = PlanRequest(
            tuple(tables), topology, self.batch_size, self._by_key(tables), effort=self.effort
        )
        cap, part = topology.memory_cap, self.storage_reservation.percentage
        model, one = module if isinstance(module, nn.Module) else None, request.input_bytes()
        reserved = self.storage_reservation.reserved(cap, model, one) - math.ceil(cap * part)
        # Reserved input is stored as a number of batches, so that it scales when a what-if changes the batch size.
        batches = (
            max(0, reserved + math.ceil(cap * part) - self.storage_reservation.reserved(cap, model, 0)) // one
        )
        return replace(
            request, reserved=max(0, reserved - batches * one), reserved_part=part, reserved_batches=batches
        )

    def _by_key(self, tables: Sequence[PlannedTable]) -> dict[str, ParameterConstraints]:
        """Return constraints and pins by `PlannedTable.key`.

        A table with several names gets the constraints of its first name that has any.
        """
        used: set[str] = set()
        pinned: set[tuple[str, str]] = set()
        found: dict[str, ParameterConstraints] = {}
        for table in tables:
            for path, name in table.names:
                for given in (f"{path}.{name}" if path else name, name):
                    if given in self.constraints:
                        used.add(given)
                        found.setdefault(table.key, self.constraints[given])
                if (path, name) in self.fixed:
                    pinned.add((path, name))
                    limits = found.get(table.key, ParameterConstraints())
                    if limits.sharding is not None:
                        raise ConfigError(
                            f"{table}: got both fixed= and the sharding= of its constraints; expected one of them, as "
                            "each gives the placement. Leave one out."
                        )
                    try:
                        found[table.key] = replace(limits, sharding=self.fixed[(path, name)])
                    except ConfigError as error:
                        raise ConfigError(f"{table}: it is in fixed=, and {error}") from error
        strange = [name for name in self.constraints if name not in used]
        if strange:
            names = sorted({name for table in tables for _, name in table.names})
            near = {name: get_close_matches(name, names, n=1) for name in strange[:8]}
            meant = ", ".join(f"'{close[0]}' for '{name}'" for name, close in near.items() if close)
            raise ConfigError(
                f"EmbeddingShardingPlanner: constraints name {strange[:8]}, which is no table of the model; it has "
                f"{names[:8]}{' and more' if len(names) > 8 else ''}."
                + (f" Close are {meant}." if meant else "")
            )
        lost = sorted(set(self.fixed) - pinned)
        if lost:
            path, name = lost[0]
            raise ConfigError(
                f"EmbeddingShardingPlanner: fixed= has a table '{name}' of module '{path}', which the model lacks; "
                "take it out, or correct its name."
            )
        return found

    def make(self, request: PlanRequest) -> ShardingPlan:
        """Return the plan of a request, from the cache if possible.

        Raises:
            PlannerError, ConfigError: as in `plan`.
        """
        kept = None if self.cache is None else self.cache.load(request)
        if kept is not None:
            plan, report = kept
            return replace(plan, report=report)
        plan = make_plan(request)
        if self.cache is not None:
            self.cache.store(request, plan, plan.report)
        return plan


@gc_paused()
def make_plan(request: PlanRequest) -> ShardingPlan:
    """Return the plan of a request, with its report.

    Raises:
        PlannerError: no plan fits the memory of every rank, or none was found.
        ConfigError: constraints leave a table without options.
    """
    decision = decide(request)
    if not decision.found:
        raise planner_error_of(decision)
    plan = decision.plan()
    return replace(plan, report=build_report(decision, plan))


def _device_type(module: Any) -> str:
    return device_type_of(module) if isinstance(module, nn.Module) else device_type_at_home()


def _only_dense(limits: ParameterConstraints) -> bool:
    return limits.kernels_allowed() == (EmbeddingComputeKernel.DENSE,)


def _loaded(path: str | Path) -> ShardingPlan:
    try:
        return ShardingPlan.load(path)
    except ConfigError as error:
        raise ConfigError(f"EmbeddingShardingPlanner: the plan in fixed= cannot be read: {error}") from error


def _read_fixed(fixed: Any) -> dict[tuple[str, str], ParameterSharding]:
    """Return shardings by (module path, table name)."""
    if isinstance(fixed, ShardingPlan):
        return {(path, name): sharding for path, name, sharding in fixed.tables()}
    found: dict[tuple[str, str], ParameterSharding] = {}
    if not isinstance(fixed, Mapping):
        raise ConfigError(
            f"EmbeddingShardingPlanner: fixed is a {type(fixed).__name__}; wanted a ShardingPlan, the path of one, or "
            "{module path: {table: ParameterSharding or Tiling}}."
        )
    for path, tables in fixed.items():
        odd = tables if not isinstance(tables, Mapping) else None
        for name, item in {} if odd is not None else tables.items():
            if isinstance(item, Tiling):
                item = ParameterSharding(ShardingType.EXPLICIT, tiling=item)
            if not isinstance(item, ParameterSharding):
                odd = item
                break
            found[(path, name)] = item
        if odd is not None:
            raise ConfigError(
                f"EmbeddingShardingPlanner: fixed['{path}'] is or has a {type(odd).__name__}; wanted "
                "{table: ParameterSharding or Tiling}."
            )
    return found
