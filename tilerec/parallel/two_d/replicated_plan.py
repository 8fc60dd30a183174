"""`ReplicatedPlan`: the plan of one sharding group, and the groups of the world that use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilerec.parallel.two_d.rank_grid import RankGrid
from tilerec.spec.plan import (
    EmbeddingModuleShardingPlan,
    Held,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


@dataclass(frozen=True)
class ReplicatedPlan:
    """The plan of a model in 2D parallelism; `print(model.plan)` shows it.

    Args:
        group_plan: the complete plan of one sharding group, whose ranks are numbered from 0. The user's own plan object
            is never changed.
        grid: the ranks of each sharding group and replica group.
        topology: the topology of the world.
        hosts_from: source of the group plan's hosts: "the machines", "node_group_size" or "the plan".
        kept: description of how replicas are kept equal, for the printed plan.
        others: plans for parts of the model that are sharded over groups of other sizes.

    `save`, `dumps` and `to_json` write the group plan, which may be passed as `plan=` again.
    """

    group_plan: ShardingPlan
    grid: RankGrid
    topology: Topology
    hosts_from: str
    kept: str
    others: tuple[ReplicatedPlan, ...] = ()

    def world_plan(self) -> ShardingPlan:
        """Return the plan of the whole world: every tile with its owners in all sharding groups."""
        parts: dict[str, EmbeddingModuleShardingPlan] = {}
        for path, part in self.group_plan.plan.items():
            parts[path] = EmbeddingModuleShardingPlan(
                {name: self._over_replicas(name, sharding) for name, sharding in part.items()}
            )
        return ShardingPlan(parts, self.grid.world_size, self.topology.host_ranks)

    def _over_replicas(self, name: str, sharding: ParameterSharding) -> ParameterSharding:
        assert sharding.tiling is not None, "the group plan is complete"
        tiling = self.grid.over_replicas(name, sharding.tiling)
        everywhere = sharding.kind is ShardingType.DATA_PARALLEL
        return ParameterSharding(
            ShardingType.DATA_PARALLEL if everywhere else ShardingType.EXPLICIT,
            sharding.kernel,
            cache_params=sharding.cache,
            key_value_params=sharding.files,
            tiling=tiling,
            wire=sharding.wire,
            data_type=sharding.data_type,
            ids_per_bag=sharding.ids_per_bag,
        )

    def as_run(self, executed: ShardingPlan) -> ReplicatedPlan:
        """Return this plan with the kernels, storage and wire formats of `executed`, which sharding has filled in."""
        parts = {
            path: EmbeddingModuleShardingPlan(
                {
                    name: replace(
                        sharding,
                        compute_kernel=executed.plan[path][name].kernel,
                        cache_params=executed.plan[path][name].cache,
                        key_value_params=executed.plan[path][name].files,
                        wire=executed.plan[path][name].wire,
                    )
                    for name, sharding in part.items()
                }
            )
            for path, part in self.group_plan.plan.items()
        }
        return replace(self, group_plan=replace(self.group_plan, plan=parts))

    @property
    def plan(self) -> Any:
        """The group plan as a mapping, by module path and table."""
        return self.group_plan.plan

    @property
    def report(self) -> Any:
        """The planner's report on the group plan, or None."""
        return self.group_plan.report

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the group plan of a module."""
        return self.group_plan.get_plan_for_module(module_path)

    def tables(self) -> Iterable[tuple[str, str, ParameterSharding]]:
        """Return the tables of the group plan; see `ShardingPlan.tables`."""
        return self.group_plan.tables()

    def tiling(self, path: str, table: str) -> Tiling:
        """Return a table's tiling over one sharding group."""
        tiling = self.group_plan.plan[path][table].tiling
        assert tiling is not None, "the group plan is complete"
        return tiling

    def held_by(self, rank: int) -> tuple[Held, ...]:
        """Return the tiles of a rank of the world."""
        return self.group_plan.held_by(self.grid.member_of(rank))

    def to_json(self) -> dict[str, Any]:
        """Return the group plan as JSON data."""
        return self.group_plan.to_json()

    def dumps(self) -> str:
        """Return the group plan as JSON text."""
        return self.group_plan.dumps()

    def save(self, path: str | Path) -> None:
        """Write the group plan to a JSON file."""
        self.group_plan.save(path)

    def __str__(self) -> str:
        hosts = {
            "the machines": "as the machines are",
            "node_group_size": "runs of node_group_size members, independent of the machines",
            "the plan": "from the plan, independent of the machines",
        }[self.hosts_from]
        own = "\n".join(
            [
                self.grid.described(self.topology),
                f"{'replicas':15}  {self.kept}",
                f"{'hosts below':15}  {hosts}",
                "",
                f"of each sharding group, {self.group_plan}",
            ]
        )
        return "\n\n".join([own, *map(str, self.others)])
