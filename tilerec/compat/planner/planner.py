"""TorchRec's planner: tilerec's search, or a program's own parts.

stock parts   (those of this package)        tilerec's search makes the plan; the parts have no effect
own parts     (subclasses and other objects)  enumerate, propose, partition, rate; the best rated plan is returned
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tilerec.compat.planner.enumerator import EmbeddingEnumerator
from tilerec.compat.planner.machine import Topology
from tilerec.compat.planner.partitioners import GreedyPerfPartitioner, NoopPerfModel
from tilerec.compat.planner.proposers import GreedyProposer
from tilerec.compat.planner.types import ShardingOption, Stats
from tilerec.modules.collection import TableCollection
from tilerec.planner import planner as native
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner_error import PlannerError, PlannerErrorType
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.torch_private import older_sharding_spec


class EmbeddingStats(Stats):
    """Prints a plan; with tilerec's search, its report as well."""

    def log(self, sharding_plan: Any, topology: Any, batch_size: int, storage_reservation: Any, *rest: Any,
            **more: Any) -> None:  # fmt: skip
        print(sharding_plan)
        if getattr(sharding_plan, "report", None) is not None:
            print(sharding_plan.report)


class NoopEmbeddingStats(Stats):
    """Prints nothing."""

    def log(self, sharding_plan: Any, topology: Any, batch_size: int, storage_reservation: Any, *rest: Any,
            **more: Any) -> None:  # fmt: skip
        return


class EmbeddingShardingPlanner(native.EmbeddingShardingPlanner):
    """`tilerec.EmbeddingShardingPlanner` that also runs a program's own parts. See there for the arguments.

    A table whose constraints allow only the kernel `dense` loses an attached optimizer: the program's own optimizer
    steps it.
    """

    def __init__(
        self, topology: Any = None, batch_size: int | None = None, enumerator: Any = None,
        storage_reservation: Any = None, proposer: Any = None, partitioner: Any = None, performance_model: Any = None,
        stats: Any = None, constraints: Mapping[str, ParameterConstraints] | None = None, debug: bool = True,
        callbacks: Sequence[Any] | None = None, timeout_seconds: int | None = None, plan_loader: Any = None,
        **more: Any,
    ) -> None:  # fmt: skip
        proposers = list(proposer) if isinstance(proposer, (list, tuple)) else [proposer] if proposer else []
        parts = [part for part in (enumerator, partitioner, performance_model, *proposers) if part is not None]
        self._own_parts = any(not type(part).__module__.startswith(__package__) for part in parts)
        self._parts = (enumerator, proposers, partitioner, performance_model)
        ignored = (
            (None, None, None, None) if self._own_parts else (enumerator, proposer, partitioner, performance_model)
        )
        shown = list(stats) if isinstance(stats, (list, tuple)) else [stats] if stats is not None else []
        self._stats = [each for each in shown if not isinstance(each, NoopEmbeddingStats)]
        self._callbacks = list(callbacks or ())
        super().__init__(
            topology, batch_size, ignored[0], storage_reservation, ignored[1], ignored[2], ignored[3], None,
            constraints, debug, None, timeout_seconds, plan_loader, **more,
        )  # fmt: skip

    def plan(self, module: Any, sharders: Any = None) -> ShardingPlan:
        """Return a plan for all collections in a model; see `tilerec.EmbeddingShardingPlanner.plan`."""
        if isinstance(module, nn.Module):
            self._detach_dense(module)
        made = self._plan_by_parts(module, sharders) if self._own_parts else super().plan(module, sharders)
        return self._finished(made)

    def collective_plan(self, module: Any, sharders: Any = None, pg: Any = None) -> ShardingPlan:
        """Return the same plan on all ranks. A program's own parts plan on every rank, from the same input."""
        if isinstance(module, nn.Module):
            self._detach_dense(module)
        if self._own_parts:
            return self._finished(self._plan_by_parts(module, sharders))
        return self._finished(super().collective_plan(module, sharders, pg))

    def _finished(self, plan: ShardingPlan) -> ShardingPlan:
        for callback in self._callbacks:
            changed = callback(plan)
            plan = plan if changed is None else changed
        for stats in self._stats:
            stats.log(plan, self.topology, self.batch_size, self.storage_reservation)
        return plan

    def _detach_dense(self, module: nn.Module) -> None:
        dense = {name for name, limits in self.constraints.items() if limits.only_dense()}
        for collection in module.modules():
            if isinstance(collection, TableCollection):
                for name, table in collection._tables.items():
                    if name in dense and table.rows.spec is not None:
                        table.rows.detach()

    def _plan_by_parts(self, module: nn.Module, sharders: Any) -> ShardingPlan:
        topology = self.topology or Topology.from_launcher("cpu")
        enumerator, proposers, partitioner, model = self._parts
        enumerator = enumerator or EmbeddingEnumerator(topology, self.batch_size, self.constraints)
        partitioner, model = partitioner or GreedyPerfPartitioner(), model or NoopPerfModel(topology)
        space = enumerator.enumerate(module, list(sharders or ()))
        best: tuple[float, list[ShardingOption]] | None = None
        failed: PlannerError | None = None
        for proposer in proposers or [GreedyProposer()]:
            proposer.load(search_space=space, enumerator=enumerator)
            proposal = proposer.propose()
            while proposal is not None:
                try:
                    plan = partitioner.partition(proposal=proposal, storage_constraint=topology)
                except PlannerError as error:
                    failed = error
                    proposer.feedback(partitionable=False, plan=proposal, storage_constraint=topology)
                else:
                    rating = model.rate(plan=plan)
                    if best is None or rating < best[0]:
                        best = rating, plan
                    proposer.feedback(partitionable=True, plan=plan, perf_rating=rating, storage_constraint=topology)
                proposal = proposer.propose()
        if best is None:
            raise failed or PlannerError(
                "EmbeddingShardingPlanner: got no proposal from the proposers; expected one. Check the constraints.",
                error_type=PlannerErrorType.OTHER,
            )
        return to_sharding_plan(best[1], topology)


class EmbeddingPlannerBase(EmbeddingShardingPlanner):
    """Base of a program's own planners: override `plan`."""


def to_sharding_plan(sharding_options: list[ShardingOption], topology: Any) -> ShardingPlan:
    """Return the plan of options whose shards have ranks."""
    plan: dict[str, dict[str, ParameterSharding]] = {}
    for option in sharding_options:
        device = topology.compute_device
        places = [
            (shard.offset, shard.size, f"rank:{shard.rank}/{device}{'' if device == 'cpu' else f':{shard.rank}'}")
            for shard in option.shards
        ]
        replicated = option.sharding_type == "data_parallel"
        plan.setdefault(option.path, {})[option.name] = ParameterSharding(
            sharding_type=option.sharding_type,
            compute_kernel=option.compute_kernel,
            ranks=[shard.rank or 0 for shard in option.shards],
            sharding_spec=None if replicated else older_sharding_spec(places),
        )
    return ShardingPlan({path: EmbeddingModuleShardingPlan(tables) for path, tables in plan.items()})
