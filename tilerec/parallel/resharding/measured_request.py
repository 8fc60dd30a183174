"""The planner's request for a measured load, and the price of tilings under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from tilerec.parallel.model_tables import Name
from tilerec.parallel.resharding.hot_load import of_names
from tilerec.parallel.resharding.measured_load import FeatureLoad, Load
from tilerec.parallel.resharding.move_reduction import Tilings
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.workload import MOST_EXPONENT, Reads, Skew, TableWork, Workload
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.request import PlanRequest
from tilerec.planner.tables import PlannedTable, tables_of
from tilerec.spec.plan import ShardingPlan

_HALVINGS = 16  # of the interval for an exponent: 1e-4


class StepSeconds:
    """Predicted seconds of a step under given tilings, by the planner's cost model."""

    def __init__(self, request: PlanRequest) -> None:
        works = request.works()
        self._names = [request.by_key[work.name].names[0] for work in works]
        self._model = Model(Workload(works), request.topology)

    def __call__(self, tilings: Tilings) -> float:
        return price([tilings[name] for name in self._names], self._model).seconds


def present_tables(model: nn.Module, present: ShardingPlan) -> list[PlannedTable]:
    """Return the tables of a plan's modules, with their present wires."""
    found = []
    for table in tables_of(model):
        path, name = table.names[0]
        if path not in present.plan:  # a table of another part
            continue
        found.append(replace(table, wire=present.plan[path][name].wire))
    return found


def measured_request(
    planner: EmbeddingShardingPlanner, tables: Sequence[PlannedTable], load: Load, *, heads: bool = True
) -> PlanRequest:  # fmt: skip
    """Return the planner's request with its own constraints and the measured load.

    Args:
        heads: False: no table gets other hot rows.
    """
    request = planner.request(tables)
    samples = max(f.bags for own in load.features.values() for f in own)
    batch = max(1, round(samples))
    constraints: dict[str, ParameterConstraints] = dict(request.constraints)
    for table in tables:
        features = _features(table, load.features)
        if not features:
            continue
        limits = constraints.get(table.key, ParameterConstraints())
        limits = replace(limits, skew=_with_hot(table, limits.skew or _skew(table, features), load, heads))
        constraints[table.key] = replace(
            limits,
            pooling_factors=tuple(f.ids_per_bag for f in features),
            num_poolings=tuple(f.bags / batch for f in features),
            batch_sizes=None,
        )
    return replace(request, batch_size=batch, constraints=constraints)


def _with_hot(table: PlannedTable, known: Skew | None, load: Load, heads: bool) -> Skew | None:
    """Return the skew by the measured hot ids of a table, if there are any, in place of the known one."""
    if known is not None and known.ordered:
        return known
    if not heads:
        return known and replace(known, hot=())
    measured = of_names([load.hot.get(name) for name in table.names])
    return known if measured is None else measured.skew(table.rows)


def _features(table: PlannedTable, features: Mapping[Name, Sequence[FeatureLoad]]) -> list[FeatureLoad]:
    """Return the load of each feature of a table, over all its names in order."""
    return [feature for name in table.names for feature in features.get(name, ())]


def _skew(table: PlannedTable, features: Sequence[FeatureLoad]) -> Skew | None:
    """Return Zipf's law over all rows with the measured number of distinct ids in a batch; None if it was not measured.

    The feature with the most ids counts.
    """
    measured = [f for f in features if f.distinct is not None and f.ids]
    if not measured:
        return None
    most = max(measured, key=lambda f: f.ids)
    low, high = 0.0, float(MOST_EXPONENT)
    for _ in range(_HALVINGS):
        exponent = (low + high) / 2.0
        law = TableWork("", table.rows, 1, reads=[Reads(most.ids)], skew=Skew(table.rows, exponent))
        fewer = float(Workload([law]).distinct(1)[0]) < most.ids * (most.distinct or 0.0)
        low, high = (low, exponent) if fewer else (exponent, high)
    return Skew(table.rows, low) if low else None
