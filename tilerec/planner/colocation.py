"""Co-located tables: each group becomes one table of the instance, so all its tables get the same option and ranks.

Legend: T tables, O options, G tables and groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.search.instance import Instance, Ints


def merge_colocated(instance: Instance, groups: Sequence[Sequence[str]]) -> tuple[Instance, Ints]:
    """Return an instance in which each group is one table, and the index [T] of each old table in it.

    A group is named after its alphabetically first table. Its costs and bytes are the sums over its tables.

    Raises:
        ConfigError: the tables of a group have no option, or no rank, in common.
    """
    if not groups:
        return instance, np.arange(instance.tables)
    number = {name: t for t, name in enumerate(instance.names)}
    first = np.arange(instance.tables)
    for group in groups:
        members = [number[name] for name in group]
        first[members] = number[min(group)]
    kept, row = np.unique(first, return_inverse=True)
    count = len(kept)

    def summed(values: Ints) -> Ints:
        total = np.zeros((count, *values.shape[1:]), np.int64)
        np.add.at(total, row, values)
        return total

    there = np.ones((count, instance.width.shape[1]), np.bool_)
    np.logical_and.at(there, row, instance.there)
    allowed = None
    if instance.allowed is not None:
        allowed = np.ones((count, instance.ranks), np.bool_)
        np.logical_and.at(allowed, row, instance.allowed)
    for group in groups:
        g = row[number[group[0]]]
        everywhere = bool((there[g] & instance.everywhere(instance.width).any(0)).any())
        if not there[g].any() or (allowed is not None and not allowed[g].any() and not everywhere):
            what = "way to be cut" if not there[g].any() else "rank"
            raise ConfigError(
                f"Tables {sorted(group)[:8]} are co-located (with_table), but there is no {what} that all of their "
                "constraints and sizes allow. Relax the constraints of one of them, or leave with_table out."
            )
    uses = np.zeros((count, *instance.uses.shape[1:]), np.bool_)
    np.logical_or.at(uses, row, instance.uses)
    # All tables of a group get the same uneven row shares, so each of them must allow an uneven split.
    divisible = np.ones((count, instance.width.shape[1]), np.bool_)
    np.logical_and.at(divisible, row, instance.divisible)
    return (
        replace(
            instance,
            names=tuple(instance.names[t] for t in kept.tolist()),
            width=np.where(there, instance.width.max(0, initial=0, where=instance.there)[None, :], 0),
            pieces=instance.pieces[kept],
            cost=summed(instance.cost),
            home=summed(instance.home),
            memory=summed(instance.memory),
            home_memory=summed(instance.home_memory),
            least_memory=summed(instance.least_memory),
            uses=uses,
            allowed=allowed,
            divisible=divisible,
            fixed=summed(instance.fixed),
        ),
        row.astype(np.int64),
    )
