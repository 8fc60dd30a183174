"""Checks before tables move, on one rank alone, and the description of a move that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.hot_tables import refused
from tilerec.parallel.model_tables import Name, check_ties, table_word, ties_of
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers
from tilerec.parallel.resharding.move_progress import check_progress
from tilerec.parallel.resharding.mover import MoveOptions, PreparedMove
from tilerec.parallel.resharding.table_move import TableMove
from tilerec.parallel.table_optimizers import check_not_dense, sharder_optimizers
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.table import ShardedTable, check_rule
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.torch_private import graph_task_id

PLAN = "the plan to reshard to"


def check_outside_backward() -> None:
    """Raise if a backward pass is running: its gradients belong to the current tiles.

    Raises:
        ConfigError: a backward pass is running.
    """
    if graph_task_id() != -1:
        raise ConfigError(
            "reshard: called inside a backward pass (from a hook of a tensor), whose gradients belong to the current "
            "tiles. Call it between two steps."
        )


def check_options(options: MoveOptions) -> None:
    """Raise if an option has a wrong type or value.

    Raises:
        ConfigError: names the option.
    """
    budget = options.budget
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise ConfigError(f"reshard: budget_bytes: got {budget!r}; expected a whole number of bytes from 1, or None.")
    check_progress(options.progress)


def prepare_move(
    collections: Mapping[str, ShardedCollection],
    present: ShardingPlan,
    whole: ShardingPlan,
    topology: Topology,
    optimizers: Sequence[Optimizer] | None,
) -> PreparedMove:
    """Return the move to a complete plan, after all checks that one rank can make alone.

    Args:
        present: the current plan.
        whole: the complete new plan.

    Raises:
        ConfigError: the plan conflicts with ties, attached optimizers or the exact mode, or `optimizers` do not fit the
            tables.
    """
    ties = ties_of(cast("dict[str, TableCollection]", collections))
    tilings = {(path, name): cast(Tiling, s.tiling) for path, name, s in whole.tables()}
    check_ties(ties, tilings)
    check_not_dense(whole, ties)
    sharder_optimizers(whole, cast("dict[str, TableCollection]", collections), ties, [])
    moving: list[tuple[list[Name], ShardedTable, Tiling]] = []
    for names in ties:
        table = cast(ShardedTable, next(iter(names.values())))
        for place in names:
            check_rule(table, tilings[place])
        new = tilings[next(iter(names))]
        if (new.head or table.tiling.head) and new != table.tiling and table.rows.spec is None:
            raise refused(*next(iter(names)), "a move of a table without an attached optimizer")
        if new != table.tiling:
            moving.append((list(names), table, new))
    for path, part in collections.items():
        for name, sharding in whole.plan[path].items():
            if part.exchange.exact and sharding.wire is not None and not sharding.wire.keeps_bits:
                raise ConfigError(
                    f"reshard: plan: table {table_word((path, name))}: got the wire {sharding.wire}, which rounds or "
                    "adds up gradients on the way, but the model was sharded with exact=True. Leave the wire out of "
                    "the plan."
                )
    stepped = {table_word(names[0]): table for names, table, _ in moving if table.rows.spec is None}
    steppers = ExternalOptimizers(stepped, optimizers)
    moves = [TableMove(names, table, new, topology, steppers) for names, table, new in moving]
    return PreparedMove(whole, present, topology, moves, steppers)


def move_description(ready: PreparedMove, budget: int | None) -> dict[str, Any]:
    """Return a description of a move that ranks can compare."""
    return {
        "plan": ready.plan.to_json(),
        "present plan": ready.present.to_json(),
        "given budget_bytes": budget,
        "optimizers": ready.steppers.described(),
    }
