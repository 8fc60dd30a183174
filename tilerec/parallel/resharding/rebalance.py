"""`rebalance`: look at what was read, ask the planner, and reshard if the predicted gain pays for the move.

    load ──► seconds of a step now ──► a plan for this load ──► seconds under it ──► seconds of the move ──► move or not

    pays   if   (before - after) x horizon  >  move      and      before - after  >=  least_gain x before

Rank 0 decides for all: every other rank hears the plan and the reasons.
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
from tilerec.parallel.resharding.checks import present_plan, sharded_collections
from tilerec.parallel.resharding.chunked_transfer import Load as MoveLoad
from tilerec.parallel.resharding.chunked_transfer import Part, sent_by_rank
from tilerec.parallel.resharding.least_move import Tilings, renamed, tilings_of, with_what_stays
from tilerec.parallel.resharding.load import FeatureLoad, Load, load_of
from tilerec.parallel.resharding.move_progress import ProgressOption, check_progress
from tilerec.parallel.resharding.move_schedule import schedule, seconds_of
from tilerec.parallel.resharding.mover import Resharded
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.reshard_2d import group_topology
from tilerec.parallel.table_optimizers import stored_as
from tilerec.parallel.two_d.two_d import TwoD
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
    """What `rebalance` found and did; the same on every rank.

    Attributes:
        load: what it went by.
        before_s, after_s: seconds of the tables' part of a step, as predicted: under the plan that was in use, and
            under the one that was proposed.
        move_s, move_bytes: of the move, as predicted; bytes that travel between ranks.
        horizon: steps in which the move had to pay.
        pays: whether the gain pays for the move, and is enough.
        why: in words.
        plan: the proposed one.
        moved: what the move did; None if there was none.
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
        """Seconds that a step is to take less."""
        return self.before_s - self.after_s

    @property
    def pays_after(self) -> float:
        """Steps after which the move has paid; infinite where there is no gain."""
        return self.move_s / self.gain_s if self.gain_s > 0 else float("inf")

    def __str__(self) -> str:
        lines = [
            f"load    {self.load}",
            f"step    {_ms(self.before_s)} now, {_ms(self.after_s)} proposed",
            f"move    {self.move_bytes:,} bytes, {_ms(self.move_s)}",
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
    """Reshard a running model if its measured load asks for another plan and the move pays. Every rank calls it.

    The load is what all ranks' batches have read of each feature since the last call (`load_of`). The planner gets it
    as bags and ids per bag, on top of its constraints. Its plan is brought close to the present one: ranks that are
    alike are renamed, and tables whose place matters little stay.

    Args:
        model: as `reshard` takes it. Of a `DMPCollection`, one sharding group is planned for, by the load of all ranks
            (where groups train apart: of rank 0's), and all groups follow. Parts with groups of their own sizes are
            planned one by one, and their steps added up.
        planner: with a topology (calibrated, for prices in this machine's seconds) and constraints; its batch size and
            pooling factors are the measured ones. None: one for the model's own topology. A part of another size takes
            its speeds and its constraints.
        horizon: steps in which the move must pay: until the next call, as a rule.
        least_gain: part of the step that a new plan must save: smaller ones are within the model's error.
        step_seconds: what the tables' part of a step takes now, as measured; predicted seconds are scaled to it. None:
            they are taken as they are.
        load: instead of what was measured; rank 0's counts.
        apply: False only says what it would do.
        budget_bytes, progress, optimizers: as of `reshard`.

    Returns:
        What was found: before, after, the price of the move, why or why not, and what the move did.

    Raises:
        ConfigError: the model is not sharded; an option makes no sense; what the planner or `reshard` refuse.
        PlannerError: no plan fits the memory of the planner's topology.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"rebalance: model is a {type(model).__name__}; wanted a sharded module.")
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
                f"rebalance: load is a {type(load).__name__}; wanted what load_of(model) returns."
            )
        check_progress(progress)
        outcome = "", None
        parts = _parts(model, collections, two_d)
        if group.rank == 0:
            proposals = [
                _proposed(model, part, planner, measured, len(parts) == 1, budget_bytes, least_gain)
                for part in parts
            ]
            outcome = "", _together(proposals, measured, horizon, least_gain, step_seconds)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}", error
    found = _of_rank_0(group, outcome)
    if found.pays and apply:
        moved = reshard(
            outer, found.plan, budget_bytes=budget_bytes, progress=progress, optimizers=optimizers
        )
        return replace(found, moved=moved)
    return found


Planned = tuple[dict[str, ShardedCollection], ShardingPlan, Topology]
"""Collections that are planned for together, the plan to better, and its machines."""


def _parts(model: nn.Module, collections: dict[str, ShardedCollection], two_d: TwoD | None) -> list[Planned]:
    """In 2D parallelism: one sharding group of each part."""
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
    """The user's, where it is for these ranks and these tables only; one like it for a part of several."""
    if planner is None:
        return EmbeddingShardingPlanner(own)
    given = planner.topology
    if alone and (given is None or given.world_size != own.world_size):
        raise ConfigError(
            f"rebalance: the planner's topology is {given}, and the model's tables lie on {own.world_size} "
            "ranks; pass EmbeddingShardingPlanner(topology=...) with one of these."
        )
    if alone:
        return planner
    if given is None or given.world_size != own.world_size:
        given = own if given is None else replace(own, speeds=given.speeds)
    said = {said for table in tables for path, name in table.names for said in (f"{path}.{name}", name)}
    limits = {name: limit for name, limit in planner.constraints.items() if name in said}
    return EmbeddingShardingPlanner(given, constraints=limits, effort=planner.effort)


def _check(planner: Any, horizon: Any, least_gain: Any, step_seconds: Any) -> None:
    if planner is not None and not isinstance(planner, EmbeddingShardingPlanner):
        raise ConfigError(
            f"rebalance: planner is a {type(planner).__name__}; wanted an EmbeddingShardingPlanner, or None."
        )
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ConfigError(f"rebalance: horizon is {horizon!r}; it must be a whole number of steps from 1.")
    for name, value in (("least_gain", least_gain), ("step_seconds", step_seconds)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf")
        ):
            raise ConfigError(f"rebalance: {name} is {value!r}; it must be a number from 0.")


def _of_rank_0(group: Group, outcome: tuple[str, Any]) -> Rebalanced:
    """Rank 0's decision, on every rank; or any rank's error."""
    text, own = outcome
    told = (text, None if text else own)
    said = cast("list[tuple[str, Rebalanced | None]]", group.all_gather_object(told))
    if text:
        raise own
    for rank, (trouble, _) in enumerate(said):
        if trouble:
            raise ConfigError(f"rebalance: rank {rank} could not go on: {trouble}")
    found = said[0][1]
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------ the decision


class Proposal(NamedTuple):
    """For tables that are planned together: seconds of their step under the present plan and under the other one."""

    before_s: float
    after_s: float
    move_s: float
    move_bytes: int
    present: ShardingPlan
    plan: ShardingPlan

    @property
    def moves(self) -> bool:
        return tilings_of(self.present) != tilings_of(self.plan)


def _proposed(
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
    step = _Step(request)
    before = step(tilings_of(present))
    proposed = stored_as(planner.make(request), present)
    bytes_of_cell = _cells(collections)
    topology = request.topology
    if topology.host_ranks == own.host_ranks:
        other = renamed(proposed, present, bytes_of_cell, topology)
        if step(tilings_of(other)) <= step(tilings_of(proposed)) * 1.001:
            proposed = other
    after = step(tilings_of(proposed))
    # Half of the least gain may go for tables that can stay.
    most = after + max(0.0, min(0.1 * (before - after), 0.5 * least_gain * before))
    proposed = with_what_stays(proposed, present, ties, bytes_of_cell, topology, step, most)
    after = step(tilings_of(proposed))
    loads = _move_loads(collections, ties, present, proposed, own)
    move_s, move_bytes = _price_of_move(loads, topology, own, budget)
    return Proposal(before, after, move_s, move_bytes, present, replace(proposed, report=None))


def _together(
    proposals: Sequence[Proposal], load: Load, horizon: int, least_gain: float, step_seconds: float | None
) -> Rebalanced:
    """Parts of a step follow each other: what they take is added up. Those that would gain nothing stay."""
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
        "nothing was read since the last look",
        plan,
    )
    if not before:
        return found
    pays, why = _judged(found, least_gain, any(p.moves for p in proposals))
    return replace(found, pays=pays, why=why)


def _judged(found: Rebalanced, least_gain: float, moves: bool) -> tuple[bool, str]:
    """Whether it pays, and why or why not."""
    gain = found.gain_s / found.before_s if found.before_s else 0.0
    if not moves:
        return False, "the present plan is as good as any that the planner knows for this load"
    if gain < least_gain or found.gain_s <= 0:
        return False, f"a step would gain {gain:.1%}, less than the {least_gain:.1%} asked for (least_gain)"
    after = found.pays_after
    if after >= found.horizon:
        return False, (
            f"a step would gain {gain:.1%}, and the move takes what {after:,.0f} steps save: more than the horizon of "
            f"{found.horizon:,}"
        )
    steps = max(1, round(after))
    return True, f"a step gains {gain:.1%}, and the move has paid after {steps:,} of {found.horizon:,} steps"


class _Step:
    """Seconds of a step under tilings, by the planner's cost model."""

    def __init__(self, request: PlanRequest) -> None:
        works = request.works()
        self._names = [request.by_key[work.name].names[0] for work in works]
        self._model = Model(Workload(works), request.topology)

    def __call__(self, tilings: Tilings) -> float:
        return price([tilings[name] for name in self._names], self._model).seconds


def _tables(model: nn.Module, present: ShardingPlan) -> list[PlannedTable]:
    """The model's tables, with the wires that they have."""
    found = []
    for table in tables_of(model):
        path, name = table.names[0]
        if path not in present.plan:  # of another part
            continue
        found.append(replace(table, wire=present.plan[path][name].wire))
    return found


def _request(planner: EmbeddingShardingPlanner, tables: Sequence[PlannedTable], load: Load) -> PlanRequest:
    """What the planner is asked: its own constraints, and the load as it was measured."""
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
    """Of all names of a table, in their order."""
    return [feature for name in table.names for feature in features.get(name, ())]


def _cells(collections: Mapping[str, ShardedCollection]) -> dict[Name, int]:
    """Bytes of a cell of each table, with its state of the same shape."""
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
    """What would travel, of weights and attached optimizers' state."""
    before, after = tilings_of(present), tilings_of(proposed)
    loads = []
    for names in ties:
        path, name = names[0]
        if before[(path, name)] == after[(path, name)]:
            continue
        table = collections[path]._tables[name]
        parts = [Part("weight", True, table.weight.element_size(), [])]
        for slot, state in table.rows.state.items():
            if state.dim():
                parts.append(Part(slot, state.dim() == 2, state.element_size(), []))
        loads.append(MoveLoad(before[(path, name)], after[(path, name)], parts, topology))
    return loads


def _price_of_move(
    loads: Sequence[MoveLoad], topology: Topology, present: Topology, budget: int | None
) -> tuple[float, int]:
    """(seconds, bytes that travel)."""
    speeds, ranks = topology.speeds or default_speeds(topology), topology.world_size
    try:
        plan = schedule(loads, ranks, budget)
    except ConfigError:  # `reshard` will say so, with what lies beside the tables
        plan = schedule(loads, ranks, None)
    return seconds_of(loads, plan, present, speeds), sum(sent_by_rank(loads, ranks)[0])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms"
