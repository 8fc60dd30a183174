"""`EmbeddingShardingPlanner`: makes a plan for a model from its tables, the topology and constraints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tilerec.comms.agreement import agreeing
from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.errors import ConfigError
from tilerec.planner.constraints import FIELDS_READ, ParameterConstraints
from tilerec.planner.make_plan import make_plan
from tilerec.planner.model_request import Fixed, model_request, read_fixed
from tilerec.planner.plan_cache import PlanCache
from tilerec.planner.plan_price import PlanPrice, price_plan
from tilerec.planner.request import PlanRequest
from tilerec.planner.reservation import HeuristicalStorageReservation, StorageReservation
from tilerec.planner.sharder import Sharder
from tilerec.planner.tables import AnyTable, device_type_at_home, device_type_of
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology, launcher_local_size


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
        a_reservation = "one of tilerec.planner, such as FixedPercentageStorageReservation(0.1)"
        for name, value, kind, wanted in (
            ("topology", topology, Topology, "a Topology"),
            ("storage_reservation", storage_reservation, StorageReservation, a_reservation),
            ("constraints", constraints, Mapping, "a dict of table -> ParameterConstraints"),
            ("cache", cache, (str, Path), "the path of a folder"),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"EmbeddingShardingPlanner: {name} is a {type(value).__name__}, wanted {wanted}.")
        self.topology = topology
        self.batch_size = PlanRequest.batch_size if batch_size is None else batch_size
        self.storage_reservation = storage_reservation or HeuristicalStorageReservation()
        self.constraints = dict(constraints or {})
        self.effort = effort
        self.cache = None if cache is None else PlanCache(cache)
        self.fixed, self._fixed_world = read_fixed(fixed)
        self._check_constraints()

    def _check_constraints(self) -> None:
        ignored: dict[str, list[str]] = {}
        for table, limits in self.constraints.items():
            if not isinstance(table, str):
                raise ConfigError(f"EmbeddingShardingPlanner: constraints name {table!r}, wanted names of tables.")
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
                f"{field} (of {', '.join(tables[:4])}{', …' * (len(tables) > 4)})" for field, tables in ignored.items()
            )
            warnings.warn(
                f"EmbeddingShardingPlanner: of the constraints, {shown} has no effect on a plan.",
                stacklevel=3,
            )

    def plan(self, module: nn.Module | Sequence[AnyTable], sharders: Sequence[Sharder] | None = None) -> ShardingPlan:
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

    def request(self, module: nn.Module | Sequence[AnyTable], sharders: Sequence[Sharder] | None = None) -> PlanRequest:
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

        All ranks use rank 0's topology. They compare digests of their inputs, run the search, and compare digests of
        their plans. Every rank searches, so no rank waits for rank 0's search. The topology may have fewer ranks than
        `pg` if their number divides the size of `pg`: it then describes one sharding group (`DMPCollection`), and so
        does the plan.

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
        with agreeing(group, "the plan") as found:
            request = self._request(module, sharders, topology)
            found["inputs"] = _inputs(request)
        with agreeing(group, "the plan") as found:
            plan = self.make(request)
            found["plan"] = plan.to_json()
        return plan

    def _request(self, module: Any, sharders: Sequence[Sharder] | None, topology: Topology) -> PlanRequest:
        if self._fixed_world not in (None, topology.world_size):
            raise ConfigError(
                f"EmbeddingShardingPlanner: the plan in fixed= was made for {self._fixed_world} ranks, and the "
                f"topology has {topology.world_size}; give one for these."
            )
        return model_request(
            module,
            sharders,
            topology,
            self.constraints,
            self.fixed,
            self.storage_reservation,
            batch_size=self.batch_size,
            effort=self.effort,
        )

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


def _device_type(module: Any) -> str:
    return device_type_of(module) if isinstance(module, nn.Module) else device_type_at_home()


def topology_of_ranks(ranks: int, compute_device: str) -> Topology:
    """Return a topology with LOCAL_WORLD_SIZE ranks per host if that divides `ranks`, else with one host."""
    local = launcher_local_size()
    even = local is not None and ranks % local == 0
    return Topology(ranks, compute_device, local_world_size=local if even else None)


def _inputs(request: PlanRequest) -> dict[str, Any]:
    """Return the request in a form that ranks compare, with tables by key."""
    inputs = request.to_json()
    inputs["tables"] = {t.key: item for t, item in zip(request.tables, inputs["tables"], strict=True)}
    inputs["order of tables"] = [t.key for t in request.tables]
    return inputs
