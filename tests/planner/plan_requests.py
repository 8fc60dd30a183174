"""Requests for tests."""

from __future__ import annotations

from typing import Any

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.request import PlanRequest
from tilerec.planner.tables import PlannedTable
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

ADAGRAD = RowWiseAdagrad()


def table(name: str, rows: int = 1000, dim: int = 64, **more: Any) -> PlannedTable:
    given: dict[str, Any] = {"data_type": DataType.FP32, "features": (name,), "optimizer": ADAGRAD, **more}
    return PlannedTable((("ebc", name),), rows, dim, **given)


def plan_request(
    tables: dict[str, int] | list[PlannedTable],
    topology: Topology,
    constraints: dict[str, ParameterConstraints] | None = None,
    **more: Any,
) -> PlanRequest:
    """A request for tables of so many rows; constraints by the table's name."""
    if isinstance(tables, dict):
        tables = [table(name, rows) for name, rows in tables.items()]
    limits = {f"ebc.{name}": limit for name, limit in (constraints or {}).items()}
    return PlanRequest(tuple(tables), topology, constraints=limits, **more)
