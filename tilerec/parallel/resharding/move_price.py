"""The price of a move before it is made: bytes of each table, seconds and bytes of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilerec.errors import ConfigError
from tilerec.parallel.model_tables import Name
from tilerec.parallel.resharding.chunked_transfer import TableTransfer as MoveLoad
from tilerec.parallel.resharding.chunked_transfer import TensorTransfer, sent_by_rank
from tilerec.parallel.resharding.move_reduction import new_hot_rows, tilings_of
from tilerec.parallel.resharding.move_schedule import schedule, seconds_of
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.rates import Rates
from tilerec.sharding.embedding import ShardedCollection
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology


def cell_bytes(collections: Mapping[str, ShardedCollection]) -> dict[Name, int]:
    """Return the bytes of a cell of each table, optimizer state of the same shape included."""
    found: dict[Name, int] = {}
    for path, part in collections.items():
        for name, table in part._tables.items():
            slots = [s for s in table.rows.state.values() if s.dim() == 2]
            found[(path, name)] = table.weight.element_size() + sum(s.element_size() for s in slots)
    return found


def move_loads(
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
        old, new = before[(path, name)].bare, after[(path, name)].bare
        if old == new:
            continue
        table = collections[path]._tables[name]
        parts = [TensorTransfer("weight", True, table.weight.element_size(), [])]
        for slot, state in table.rows.state.items():
            if state.dim():
                parts.append(TensorTransfer(slot, state.dim() == 2, state.element_size(), []))
        loads.append(MoveLoad(old, new, parts, topology))
    return loads


def head_bytes(
    collections: Mapping[str, ShardedCollection],
    ties: Sequence[Sequence[Name]],
    present: ShardingPlan,
    proposed: ShardingPlan,
) -> int:
    """Return the bytes of rows that become hot, weights and attached optimizers' state, sent to one rank."""
    before, after, found = tilings_of(present), tilings_of(proposed), 0
    for names in ties:
        path, name = names[0]
        table = collections[path]._tables[name]
        row = table.tiling.dim * table.weight.element_size()
        for state in table.rows.state.values():
            row += state.element_size() * (table.tiling.dim if state.dim() == 2 else state.dim())
        found += new_hot_rows(before[names[0]], after[names[0]]) * row
    return found


def price_of_move(
    loads: Sequence[MoveLoad], topology: Topology, present: Topology, budget: int | None, heads: int = 0
) -> tuple[float, int]:
    """Return (seconds of the move, bytes sent between ranks). heads: bytes of new hot rows for each rank."""
    speeds, ranks = topology.speeds or default_speeds(topology), topology.world_size
    try:
        plan = schedule(loads, ranks, budget)
    except ConfigError:  # the budget is too small: `reshard` raises, with all state included
        plan = schedule(loads, ranks, None)
    seconds = seconds_of(loads, plan, present, speeds) + float(Rates(speeds).exchanged(heads, heads))
    return seconds, sum(sent_by_rank(loads, ranks)[0]) + heads * (ranks - 1)
