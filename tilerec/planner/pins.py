"""Tables whose placement is given: pinned tables, and groups of co-located tables (`with_table`)."""

from __future__ import annotations

from collections.abc import Mapping

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.placement import allowed_ranks
from tilerec.planner.request import PlanRequest
from tilerec.sharding.strategies import complete
from tilerec.spec.plan import ParameterSharding, ShardingType
from tilerec.spec.tile import Tiling


def pins_of(request: PlanRequest) -> dict[str, ParameterSharding]:
    """Return the shardings of the pinned tables, each with its tiling."""
    found: dict[str, ParameterSharding] = {}
    for key, limits in request.constraints.items():
        if limits.sharding is not None:
            table = request.by_key[key]
            found[key] = complete(limits.sharding, key, table.rows, table.dim, request.topology)
    _pin_colocated(request, found)
    return found


def _pin_colocated(request: PlanRequest, pins: dict[str, ParameterSharding]) -> None:
    """Pin the tables that are co-located with pinned tables, with the same sharding type and ranks.

    An explicit tiling does not carry over to another table; `limits` then restricts the ranks only.
    """
    colocated: dict[str, list[str]] = {}
    for key, limits in request.constraints.items():
        if limits.with_table is not None:
            colocated.setdefault(named_table(request, limits.with_table, key), []).append(key)
    waiting = [key for key in pins if key in colocated]
    while waiting:
        pin = pins[waiting[-1]]
        for key in colocated[waiting.pop()]:
            if key in pins or pin.kind is ShardingType.EXPLICIT:
                continue
            table, limits = request.by_key[key], request.constraints[key]
            allowed = limits.types_allowed()
            if allowed and pin.kind not in allowed:
                raise ConfigError(
                    f"Table '{key}': with_table='{limits.with_table}' makes it {pin.kind.value}, which its "
                    "constraints do not allow; leave out with_table or the constraints."
                )
            check_colocated(request, key, limits, pin.tiling)
            alike = ParameterSharding(pin.kind, ranks=pin.ranks)
            pins[key] = complete(alike, key, table.rows, table.dim, request.topology)
            if key in colocated:
                waiting.append(key)


def check_colocated(request: PlanRequest, key: str, limits: ParameterConstraints, tiling: Tiling | None) -> None:
    assert tiling is not None
    assert limits.with_table is not None
    own, allowed = tiling.ranks(), allowed_ranks(limits, request.topology)
    others = () if allowed is None else tuple(rank for rank in own if rank not in allowed)
    if others or len(own) > (limits.max_ranks or len(own)):
        other = named_table(request, limits.with_table, key)
        raise ConfigError(
            f"Table '{key}': with_table='{other}' puts it on ranks {list(own)[:16]}, which its "
            "constraints do not allow; leave out with_table or the constraints."
        )


def groups_of(request: PlanRequest, pins: Mapping[str, ParameterSharding]) -> list[list[str]]:
    """Return the groups of co-located tables: two or more keys in each group, none of them pinned."""
    leader: dict[str, str] = {}

    def find(key: str) -> str:
        while leader.get(key, key) != key:
            key = leader[key]
        return key

    for key, limits in request.constraints.items():
        if limits.with_table is None:
            continue
        other = named_table(request, limits.with_table, key)
        if other not in pins and key not in pins:
            first, second = sorted((find(key), find(other)))
            leader[second] = first
    if not leader:
        return []
    groups: dict[str, list[str]] = {}
    for table in request.tables:
        groups.setdefault(find(table.key), []).append(table.key)
    return [group for group in groups.values() if len(group) > 1]


def named_table(request: PlanRequest, name: str, beside: str) -> str:
    """Return the key of the table that `with_table` names: by key, or by name if the name is unique.

    Args:
        name: key or name of a table.
        beside: key of the table with this constraint; a table in its module takes precedence.
    """
    path = request.by_key[beside].names[0][0]
    near = f"{path}.{name}" if path else name
    found = [key for key in (near, name) if key in request.by_key][:1]
    if not found:
        found = [table.key for table in request.tables if any(own == name for _, own in table.names)]
    if found == [beside]:
        raise ConfigError(
            f"Table '{beside}': with_table='{name}' is the table itself; name another one, or leave it out."
        )
    if len(found) != 1:
        raise ConfigError(
            f"Table '{beside}': with_table='{name}' "
            + (f"may be any of {found}; use one of these." if found else "is no table of the model.")
        )
    return found[0]
