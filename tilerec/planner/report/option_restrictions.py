"""Reasons why an option is not allowed for a table: one sentence for each restriction that the option violates.

The restrictions are those used to build options: `planner/cost/options.py` (`_allowed`), `PlanRequest.limits` and
`max_ranks` (`planner/decision.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.ways import MIN_PARTITION, Limits, Option, Way, is_of
from tilerec.planner.cost.workload import TableWork
from tilerec.planner.search.instance import Bools
from tilerec.spec.plan import ShardingType
from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.topology import Topology


def violated_restrictions(
    option: Option,
    work: TableWork,
    limits: Limits,
    given: ParameterConstraints,
    topology: Topology,
    allowed: Bools | None,
) -> list[str]:
    """Return a sentence for each restriction of a table that an option violates; [] if the option is allowed.

    Args:
        option: an option that the table's size, storage and optimizer permit.
        work: the table.
        limits: the restrictions with which the table's options were built.
        given: the table's constraints, as the user wrote them.
        topology: the machines.
        allowed: [R] True for ranks that may hold pieces; None for all.
    """
    found = (
        _type(option, work, limits, given, topology),
        _columns(option, work.dim, limits),
        _ranks(option, limits, topology, allowed),
        _most(option, given, topology),
    )
    return [reason for reason in found if reason]


def _type(
    option: Option,
    work: TableWork,
    limits: Limits,
    given: ParameterConstraints,
    topology: Topology,
) -> str:
    def of(types: Sequence[ShardingType]) -> bool:
        ordered = work.skew is not None and work.skew.ordered
        return is_of(option, types, topology.world_size, topology.host_count, ordered=ordered)

    if not limits.types or of(limits.types):
        return ""
    wanted = [kind for kind in given.types_allowed() if of((kind,))]
    if wanted:
        simpler = " or ".join(kind.value for kind in limits.types)
        return f"{wanted[0].value} reduces to {simpler} here: {_too_narrow(wanted, work.dim, given, topology)}"
    types = given.sharding_types_said()
    if types and not of(types):
        return f"its sharding_types are {', '.join(kind.value for kind in types)}"
    forbidden = (ShardingType(kind).value for kind in given.forbidden_types)
    return f"its forbidden_types are {', '.join(forbidden)}"


def _too_narrow(wanted: Sequence[ShardingType], dim: int, given: ParameterConstraints, topology: Topology) -> str:
    """Return the reason why no column split of the allowed types is possible."""
    sizes = [len(host) for host in topology.host_ranks]
    most = topology.world_size
    if ShardingType.COLUMN_WISE not in wanted:
        most = max(sizes) if ShardingType.TABLE_COLUMN_WISE in wanted else topology.host_count
    least = _least(given.min_partition)
    return f"no split of its {dim} columns into 2 to {most} even tiles leaves {least} in each"


def _columns(option: Option, dim: int, limits: Limits) -> str:
    if option.way not in (Way.COLUMNS, Way.GRID):
        return ""
    width = dim // option.pieces
    if width >= (MIN_PARTITION if limits.min_partition is None else limits.min_partition):
        return ""
    return f"column tiles of {width} are narrower than min_partition, {_least(limits.min_partition)}"


def _least(min_partition: int | None) -> str:
    return f"{MIN_PARTITION} columns by default" if min_partition is None else f"{min_partition} columns"


def _ranks(option: Option, limits: Limits, topology: Topology, allowed: Bools | None) -> str:
    ranks = topology.world_size
    if allowed is not None and option.width == 1 and option.pieces > int(allowed.sum()):
        where = ranks_to_text(np.flatnonzero(allowed).tolist())
        return f"it has {option.pieces} pieces, but the table may only use ranks {where}"
    if ranks == 1:
        return ""
    own = set(range(ranks)) if allowed is None else set(allowed.nonzero()[0].tolist())
    if limits.ranks is not None and len(set(limits.ranks)) < ranks and (option.width == ranks or option.head):
        return f"it takes all {ranks} ranks, but the table may only use {_shown(limits.ranks)}"
    if 1 < option.width < ranks and not any(
        len(host) == option.width and own.issuperset(host) for host in topology.host_ranks
    ):
        return f"it takes all {option.width} ranks of a host, but the table may only use {_shown(own)}"
    return ""


def _most(option: Option, given: ParameterConstraints, topology: Topology) -> str:
    held = topology.world_size if option.head else min(option.width * option.pieces, topology.world_size)
    if given.max_ranks is None or held <= given.max_ranks:
        return ""
    return f"it takes {held} ranks, and max_ranks is {given.max_ranks}"


def _shown(ranks: Sequence[int] | set[int]) -> str:
    text = ranks_to_text(sorted(set(ranks)))
    return f"ranks {text}" if len(text) <= 40 else f"{len(set(ranks))} ranks"
