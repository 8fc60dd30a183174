"""`rebalance`: plan for the measured load, and reshard if the predicted gain pays for the move.

    load ──► seconds of a step now ──► a plan for this load ──► seconds under it ──► seconds of the move ──► move or not

    pays   if   (before - after) x horizon  >  move      and      before - after  >=  least_gain x before

Rank 0 decides and sends the plan and the reasons to all other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from torch import nn
from torch.optim import Optimizer

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.model_tables import Name, ties_of
from tilerec.parallel.resharding.chunked_transfer import TableTransfer as MoveLoad
from tilerec.parallel.resharding.chunked_transfer import TensorTransfer, sent_by_rank
from tilerec.parallel.resharding.external_optimizers import check_given, unattached_tables
from tilerec.parallel.resharding.measured_load import FeatureLoad, Load, load_of
from tilerec.parallel.resharding.move_progress import ProgressOption, check_progress
from tilerec.parallel.resharding.move_reduction import (
    Tilings,
    keep_tables_in_place,
    permute_ranks,
    tilings_of,
)
from tilerec.parallel.resharding.move_schedule import schedule, seconds_of
from tilerec.parallel.resharding.mover import Resharded
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.reshard_2d import group_topology
from tilerec.parallel.resharding.reshard_checks import present_plan, sharded_collections
from tilerec.parallel.table_optimizers import with_storage_of
from tilerec.parallel.two_d.running_groups import TwoD
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.workload import Workload
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.request import PlanRequest
from tilerec.planner.tables import PlannedTable, tables_of
from tilerec.sharding.embedding import ShardedCollection
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology


@dataclass(frozen=True)
class Rebalanced:
    """Decision of `rebalance`, and report of its move; equal on every rank.

    Attributes:
        load: the load that the decision is based on.
        before_s, after_s: predicted seconds of the tables' part of a step, under the current plan and under the
            proposed one.
        move_s, move_bytes: predicted seconds of the move, and bytes sent between ranks.
        horizon: number of steps in which the move has to pay.
        pays: True if the gain pays for the move and is at least `least_gain`.
        why: the reason, as text.
        plan: the proposed plan.
        moved: report of the move; None if there was none.
    """

    load: Load
    before_s: float
    after_s: float
    move_s: float
    move_bytes: int
    horizon: int
    pays: bool
    why: str
    plan: ShardingPlan
    moved: Resharded | None = None

    @property
    def gain_s(self) -> float:
        """Predicted seconds saved per step."""
        return self.before_s - self.after_s

    @property
    def pays_after(self) -> float:
        """Number of steps after which the move has paid; infinite without a gain."""
        return self.move_s / self.gain_s if self.gain_s > 0 else float("inf")

    def __str__(self) -> str:
        lines = [
            f"load    {self.load}",
            f"step    {_milliseconds(self.before_s)} now, {_milliseconds(self.after_s)} proposed",
            f"move    {self.move_bytes:,} bytes, {_milliseconds(self.move_s)}",
            f"so      {self.why}",
        ]
        return "\n".join([*lines, f"done    {self.moved}"] if self.moved is not None else lines)


def rebalance(
    model: nn.Module,
    planner: EmbeddingShardingPlanner | None = None,
    *,
    horizon: int = 1000,
    least_gain: float = 0.05,
    step_seconds: float | None = None,
    load: Load | None = None,
    apply: bool = True,
    budget_bytes: int | None = None,
    progress: ProgressOption = None,
    optimizers: Sequence[Optimizer] | None = None,
) -> Rebalanced:
    """Reshard a running model if another plan is faster for its measured load and the move pays. Collective.

    The load is the bags and ids that the batches of all ranks have read since the last call (`load_of`). The planner
    gets it as bags and ids per bag, in addition to its constraints. Its plan is then brought close to the present one:
    interchangeable ranks are permuted, and tables whose move saves little time stay.

    Args:
        model: a model that `reshard` accepts. For a `DMPCollection`, the plan is for one sharding group, and all groups
            follow it. The load is that of all ranks, or that of rank 0's group if groups train separately. Parts with
            groups of different sizes are planned one by one, and their step times are added.
        planner: a planner with constraints and a topology (calibrated, if prices are to be this machine's seconds). Its
            batch size and pooling factors are replaced by the measured ones. None: a planner for the model's topology.
            A part whose groups have another size uses the planner's speeds and constraints.
        horizon: number of steps in which the move must pay, usually those until the next call.
        least_gain: fraction of the step that a new plan must save. Smaller gains are within the model's error.
        step_seconds: measured seconds of the tables' part of a step; predicted seconds are scaled to it. None: no
            scaling.
        load: a load to use instead of the measured one; the one that rank 0 passes is used.
        apply: False: only return the decision.
        budget_bytes, progress, optimizers: see `reshard`.

    Returns:
        The decision: step times before and after, the price of the move, the reason, and the report of the move.

    Raises:
        ConfigError: the model is not sharded, an option is wrong, or the planner or `reshard` raises it.
        PlannerError: no plan fits the memory of the planner's topology.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"rebalance: model: got a {type(model).__name__}; expected a sharded module.")
    outer = model
    model = getattr(model, "module") if hasattr(model, "_dmp_wrapped_module") else model  # noqa: B009
    two_d = vars(outer).get("_two_d")
    collections = sharded_collections(model, "rebalance", two_d=two_d is not None)
    group = next(iter(collections.values())).exchange.group if two_d is None else two_d.world
    group.begin("rebalance")
    measured = load_of(model) if load is None else load
    outcome: tuple[str, Any]
    try:
        _check(planner, horizon, least_gain, step_seconds)
        if not isinstance(measured, Load):
            raise ConfigError(
                f"rebalance: load: got a {type(load).__name__}; expected the Load that load_of(model) returns."
            )
        check_progress(progress)
        if apply and optimizers is None:
            check_given(unattached_tables(collections), None, "rebalance")
        outcome = "", None
        parts = _parts(model, collections, two_d)
        if group.rank == 0:
            proposals = [
                _proposal(model, part, planner, measured, len(parts) == 1, budget_bytes, least_gain)
                for part in parts
            ]
            outcome = "", _decision(proposals, measured, horizon, least_gain, step_seconds)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}", error
    found = _broadcast_decision(group, outcome)
    if found.pays and apply:
        moved = reshard(
            outer, found.plan, budget_bytes=budget_bytes, progress=progress, optimizers=optimizers
        )
        return replace(found, moved=moved)
    return found


Planned = tuple[dict[str, ShardedCollection], ShardingPlan, Topology]
"""Collections that are planned together, their present plan, and its topology."""


def _parts(model: nn.Module, collections: dict[str, ShardedCollection], two_d: TwoD | None) -> list[Planned]:
    """Return the parts that are planned one by one. In 2D parallelism, each has one sharding group."""
    if two_d is None:
        topology = next(iter(collections.values())).exchange.topology
        return [(collections, present_plan(model, collections, "rebalance"), topology)]
    return [
        ({path: collections[path] for path in part.paths}, part.plan.group_plan, group_topology(part))
        for part in two_d.parts
        if part.paths
    ]


def _planner_for(
    planner: EmbeddingShardingPlanner | None, own: Topology, tables: Sequence[PlannedTable], alone: bool
) -> EmbeddingShardingPlanner:
    """Return the user's planner if there is one part, else a planner for this part with its speeds and constraints.

    Args:
        own: topology of the part.
        alone: True if there is one part.
    """
    if planner is None:
        return EmbeddingShardingPlanner(own)
    given = planner.topology
    if alone and (given is None or given.world_size != own.world_size):
        raise ConfigError(
            f"rebalance: planner: got the topology {given}; expected one of {own.world_size} ranks, which hold the "
            "model's tables. Pass EmbeddingShardingPlanner(topology=...) with such a topology."
        )
    if alone:
        return planner
    if given is None or given.world_size != own.world_size:
        given = own if given is None else replace(own, speeds=given.speeds)
    keys = {key for table in tables for path, name in table.names for key in (f"{path}.{name}", name)}
    limits = {name: limit for name, limit in planner.constraints.items() if name in keys}
    return EmbeddingShardingPlanner(given, constraints=limits, effort=planner.effort)


def _check(planner: Any, horizon: Any, least_gain: Any, step_seconds: Any) -> None:
    if planner is not None and not isinstance(planner, EmbeddingShardingPlanner):
        raise ConfigError(
            f"rebalance: planner: got a {type(planner).__name__}; expected an EmbeddingShardingPlanner, or None."
        )
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ConfigError(f"rebalance: horizon: got {horizon!r}; expected a whole number of steps from 1.")
    for name, value in (("least_gain", least_gain), ("step_seconds", step_seconds)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf")
        ):
            raise ConfigError(f"rebalance: {name}: got {value!r}; expected a finite number from 0.")


def _broadcast_decision(group: Group, outcome: tuple[str, Any]) -> Rebalanced:
    """Return rank 0's decision on every rank.

    Args:
        outcome: ("", the decision on rank 0 and None on others), or (text of the error, the error).

    Raises:
        ConfigError: another rank has failed. A failed rank raises its own error.
    """
    text, own = outcome
    own_outcome = (text, None if text else own)
    outcomes = cast("list[tuple[str, Rebalanced | None]]", group.all_gather_object(own_outcome))
    if text:
        raise own
    for rank, (trouble, _) in enumerate(outcomes):
        if trouble:
            raise ConfigError(f"rebalance: rank {rank} failed: {trouble}")
    found = outcomes[0][1]
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------ the decision


class Proposal(NamedTuple):
    """A plan for tables that are planned together, and predicted seconds of their step before and after the move."""

    before_s: float
    after_s: float
    move_s: float
    move_bytes: int
    present: ShardingPlan
    plan: ShardingPlan

    @property
    def moves(self) -> bool:
        return tilings_of(self.present) != tilings_of(self.plan)


def _proposal(
    model: nn.Module, part: Planned, planner: EmbeddingShardingPlanner | None, load: Load, alone: bool,
    budget: int | None, least_gain: float,
) -> Proposal:  # fmt: skip
    collections, present, own = part
    tables = _tables(model, present)
    planner = _planner_for(planner, own, tables, alone)
    if not load.steps or not any(
        f.ids for path, name in tilings_of(present) for f in load.features[path, name]
    ):
        return Proposal(0.0, 0.0, 0.0, 0, present, present)
    request = _request(planner, tables, load)
    ties = [list(names) for names in ties_of(cast("dict[str, TableCollection]", collections))]
    step = _StepSeconds(request)
    before = step(tilings_of(present))
    proposed = with_storage_of(planner.make(request), present)
    bytes_of_cell = _cell_bytes(collections)
    topology = request.topology
    if topology.host_ranks == own.host_ranks:
        other = permute_ranks(proposed, present, bytes_of_cell, topology)
        if step(tilings_of(other)) <= step(tilings_of(proposed)) * 1.001:
            proposed = other
    after = step(tilings_of(proposed))
    # Up to half of the least gain may be given up for tables that then stay in place.
    most = after + max(0.0, min(0.1 * (before - after), 0.5 * least_gain * before))
    proposed = keep_tables_in_place(proposed, present, ties, bytes_of_cell, topology, step, most)
    after = step(tilings_of(proposed))
    loads = _move_loads(collections, ties, present, proposed, own)
    move_s, move_bytes = _price_of_move(loads, topology, own, budget)
    return Proposal(before, after, move_s, move_bytes, present, replace(proposed, report=None))


def _decision(
    proposals: Sequence[Proposal], load: Load, horizon: int, least_gain: float, step_seconds: float | None
) -> Rebalanced:
    """Return the decision for all parts. Parts of a step run one after the other, so their seconds are added.

    If there are several parts, those without a gain keep their plan.
    """
    if len(proposals) > 1:
        proposals = [
            p
            if p.after_s < p.before_s
            else p._replace(after_s=p.before_s, move_s=0.0, move_bytes=0, plan=p.present)
            for p in proposals
        ]
    before, after = sum(p.before_s for p in proposals), sum(p.after_s for p in proposals)
    scale = step_seconds / before if step_seconds and before else 1.0
    plan = proposals[0].plan
    if len(proposals) > 1:
        sizes = {p.plan.world_size for p in proposals}
        paths = {path: tables for p in proposals for path, tables in p.plan.plan.items()}
        plan = ShardingPlan(paths, sizes.pop() if len(sizes) == 1 else None)
    found = Rebalanced(
        load,
        scale * before,
        scale * after,
        sum(p.move_s for p in proposals),
        sum(p.move_bytes for p in proposals),
        horizon,
        False,
        "nothing was read since the last call",
        plan,
    )
    if not before:
        return found
    pays, why = _verdict(found, least_gain, any(p.moves for p in proposals))
    return replace(found, pays=pays, why=why)


def _verdict(found: Rebalanced, least_gain: float, moves: bool) -> tuple[bool, str]:
    """Return whether the move pays, and the reason."""
    gain = found.gain_s / found.before_s if found.before_s else 0.0
    if not moves:
        return False, "the planner found no better plan than the present one for this load"
    if gain < least_gain or found.gain_s <= 0:
        return False, f"a step would gain {gain:.1%}, less than least_gain, {least_gain:.1%}"
    after = found.pays_after
    if after >= found.horizon:
        return False, (
            f"a step would gain {gain:.1%}, but the move would pay after {after:,.0f} steps, more than the horizon of "
            f"{found.horizon:,}"
        )
    steps = max(1, round(after))
    return True, f"a step gains {gain:.1%}, and the move pays after {steps:,} of {found.horizon:,} steps"


class _StepSeconds:
    """Predicted seconds of a step under given tilings, by the planner's cost model."""

    def __init__(self, request: PlanRequest) -> None:
        works = request.works()
        self._names = [request.by_key[work.name].names[0] for work in works]
        self._model = Model(Workload(works), request.topology)

    def __call__(self, tilings: Tilings) -> float:
        return price([tilings[name] for name in self._names], self._model).seconds


def _tables(model: nn.Module, present: ShardingPlan) -> list[PlannedTable]:
    """Return the tables of a plan's modules, with their present wires."""
    found = []
    for table in tables_of(model):
        path, name = table.names[0]
        if path not in present.plan:  # a table of another part
            continue
        found.append(replace(table, wire=present.plan[path][name].wire))
    return found


def _request(planner: EmbeddingShardingPlanner, tables: Sequence[PlannedTable], load: Load) -> PlanRequest:
    """Return the planner's request with its own constraints and the measured load."""
    request = planner.request(tables)
    samples = max(f.bags for own in load.features.values() for f in own)
    batch = max(1, round(samples))
    constraints: dict[str, ParameterConstraints] = dict(request.constraints)
    for table in tables:
        features = _features(table, load.features)
        if not features:
            continue
        limits = constraints.get(table.key, ParameterConstraints())
        constraints[table.key] = replace(
            limits,
            pooling_factors=tuple(f.ids_per_bag for f in features),
            num_poolings=tuple(f.bags / batch for f in features),
            batch_sizes=None,
        )
    return replace(request, batch_size=batch, constraints=constraints)


def _features(table: PlannedTable, features: Mapping[Name, Sequence[FeatureLoad]]) -> list[FeatureLoad]:
    """Return the load of each feature of a table, over all its names in order."""
    return [feature for name in table.names for feature in features.get(name, ())]


def _cell_bytes(collections: Mapping[str, ShardedCollection]) -> dict[Name, int]:
    """Return the bytes of a cell of each table, optimizer state of the same shape included."""
    found: dict[Name, int] = {}
    for path, part in collections.items():
        for name, table in part._tables.items():
            slots = [s for s in table.rows.state.values() if s.dim() == 2]
            found[(path, name)] = table.weight.element_size() + sum(s.element_size() for s in slots)
    return found


def _move_loads(
    collections: Mapping[str, ShardedCollection],
    ties: Sequence[Sequence[Name]],
    present: ShardingPlan,
    proposed: ShardingPlan,
    topology: Topology,
) -> list[MoveLoad]:
    """Return the loads of a move to the proposed plan: weights and attached optimizers' state."""
    before, after = tilings_of(present), tilings_of(proposed)
    loads = []
    for names in ties:
        path, name = names[0]
        if before[(path, name)] == after[(path, name)]:
            continue
        table = collections[path]._tables[name]
        parts = [TensorTransfer("weight", True, table.weight.element_size(), [])]
        for slot, state in table.rows.state.items():
            if state.dim():
                parts.append(TensorTransfer(slot, state.dim() == 2, state.element_size(), []))
        loads.append(MoveLoad(before[(path, name)], after[(path, name)], parts, topology))
    return loads


def _price_of_move(
    loads: Sequence[MoveLoad], topology: Topology, present: Topology, budget: int | None
) -> tuple[float, int]:
    """Return (seconds of the move, bytes sent between ranks)."""
    speeds, ranks = topology.speeds or default_speeds(topology), topology.world_size
    try:
        plan = schedule(loads, ranks, budget)
    except ConfigError:  # the budget is too small: `reshard` raises, with all state included
        plan = schedule(loads, ranks, None)
    return seconds_of(loads, plan, present, speeds), sum(sent_by_rank(loads, ranks)[0])


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms"
