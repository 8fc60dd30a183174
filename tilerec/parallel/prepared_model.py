"""`PreparedModel`: a model with its complete plan, after the checks that one rank can make alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.parallel.hosts import topology_of
from tilerec.parallel.made_plan import make_plan
from tilerec.parallel.managed_collision_paths import with_table_paths
from tilerec.parallel.model_tables import (
    Name,
    check_ties,
    collections_of,
    device_type_of,
    properties_to_compare,
    sizes_of,
    ties_of,
)
from tilerec.parallel.read_plan import AnyPlan, read_complete_plan, sharding_type_of
from tilerec.parallel.table_optimizers import give_sharder_optimizers, with_kernels, with_wire_formats
from tilerec.sharders.table_sharders import ModuleSharder
from tilerec.sharding.shard_ids import IdsBelow, described_ids, ids_below
from tilerec.sharding.table import check_rule
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


class PreparedModel(NamedTuple):
    """A model, or a part of it, that has passed this rank's checks and can be sharded."""

    collections: dict[str, TableCollection]
    ties: list[dict[Name, Table]]
    plan: ShardingPlan
    topology: Topology
    ids: dict[str, IdsBelow]

    def described(self) -> dict[str, object]:
        """Return the properties that must be equal on all ranks."""
        return {
            "modules": properties_to_compare(self.collections),
            "ids": described_ids(self.ids),
            "plan": self.plan.to_json(),
        }

    @property
    def tables(self) -> list[Table]:
        """The distinct tables."""
        return [next(iter(names.values())) for names in self.ties]


def prepare_sharding(
    module: nn.Module,
    plan: AnyPlan | None,
    group: Group,
    topology: Topology | None,
    device: torch.device | None,
    sharders: Sequence[ModuleSharder],
    only: Collection[str] | None = None,
    lone_ids: bool = True,
) -> PreparedModel:
    """Check and complete the plan on this rank alone, and attach the optimizers of sharders.

    Args:
        only: paths of the collections to shard; None: all.
        lone_ids: with `only`: whether to include managed-collision ids that no collection reads.
    """
    collections = collections_of(module, only)
    ties = ties_of(collections)
    device_type = device_type_of(device, collections)

    def world(hosts: Sequence[Sequence[int]] | None) -> Topology:
        return topology_of(group, topology, hosts, device_type)

    kind = sharding_type_of(plan)
    if plan is None or kind is not None:
        used = world(None)
        complete_plan = make_plan(module, collections, used, sharders, kind)
    else:
        complete_plan, used = read_complete_plan(with_table_paths(plan, module), collections, group.size, world)
    complete_plan.check(sizes_of(collections), group.size)
    tilings = {(path, table): cast(Tiling, s.tiling) for path, table, s in complete_plan.tables()}
    check_ties(ties, tilings)
    give_sharder_optimizers(complete_plan, collections, ties, sharders)
    for names in ties:
        for name, table in names.items():
            check_rule(table, tilings[name])
    whole = with_wire_formats(complete_plan, collections, sharders)
    whole = replace(with_kernels(whole, collections, sharders), report=complete_plan.report)
    ids = ids_below(module)
    if only is not None:
        chosen = ids_below(module, list(collections.values()))
        ids = {p: own for p, own in ids.items() if p in chosen or (lone_ids and own.reader is None)}
    return PreparedModel(collections, ties, whole, used, ids)
