"""The options of each table that `rebuild` tries, as arrays: a few of the cheapest, and of dearer ones the finer cuts.

Legend: T tables, O options, S stages, M memory tiers, H hosts, J options of one table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilerec.planner.search.instance import Bools, Floats, Ints
from tilerec.planner.search.relaxed import Relaxed

OPTIONS_PER_TABLE = 8  # most options of a table that are tried
BYTES_PER_PS = 1e6  # when pieces are compared by size, as many bytes count as one ps


@dataclass(frozen=True, eq=False)
class Choices:
    """Options of one table that lie on bins of one kind.

    Args:
        option: [J]. pieces: [J] number of pieces.
        time: [J, S] ps of a piece.
        memory: [J, M] bytes on a rank that holds a piece, `at_home` included.
        at_home: [J, M] bytes on every rank.
        fair: [J] ps of the table, with its work at home, averaged over all ranks.
        fluid: [J] True if its rows can move between the ranks of a host.
        fixed: [J, S] ps that each rank of a fluid one bears whatever rows it holds.
    """

    option: Ints
    pieces: Ints
    time: Floats
    memory: Ints
    at_home: Ints
    fair: Floats
    fluid: Bools
    fixed: Floats


@dataclass(frozen=True, eq=False)
class TableChoices:
    """The options of one table by kind of bin.

    Args:
        single: options with pieces on single ranks; None if there are none.
        hosted: for each size of hosts, the indices of those hosts and the options with pieces on whole hosts.
        uniform: options with a piece on every rank; None if there are none.
    """

    single: Choices | None
    hosted: list[tuple[Ints, Choices]]
    uniform: Choices | None


def choices_of_tables(relaxed: Relaxed, usable: Bools, option: Ints, fractional: bool) -> list[TableChoices]:
    """Return the options to try for each table; equal tables share one record.

    Args:
        usable: [T, O] options that may be tried. option: [T] present options, which are always among them.
        fractional: the rows of tables on whole hosts can move between the ranks of the host.
    """
    found: list[TableChoices] = []
    alike: dict[bytes, TableChoices] = {}
    for t in range(relaxed.instance.tables):
        mark = _mark(relaxed, t, usable[t], int(option[t]))
        if mark not in alike:
            alike[mark] = _choices_of(relaxed, t, usable[t], int(option[t]), fractional)
        found.append(alike[mark])
    return found


def _mark(relaxed: Relaxed, t: int, usable: Bools, option: int) -> bytes:
    """Return bytes that are equal for tables with the same options and the same present option."""
    instance = relaxed.instance
    arrays = (
        instance.width, instance.pieces, instance.divisible, instance.cost, instance.home, instance.memory,
        instance.fixed, instance.home_memory,
    )  # fmt: skip
    return b"".join([usable.tobytes(), option.to_bytes(8, "little"), *(x[t].tobytes() for x in arrays)])


def _choices_of(relaxed: Relaxed, t: int, usable: Bools, present: int, fractional: bool) -> TableChoices:
    instance = relaxed.instance
    width, pieces = instance.width[t], instance.pieces[t]
    fair = relaxed.sums[t] / instance.ranks
    kept = _kept(relaxed, t, usable, fair)
    if present not in kept:
        kept.append(present)
    everywhere = instance.everywhere(width)

    def choices(which: list[int]) -> Choices | None:
        if not which:
            return None
        index = np.array(which)
        return Choices(
            index,
            pieces[index],
            instance.cost[t, index].astype(np.float64),
            instance.memory[t, index] + instance.home_memory[t, index],
            instance.home_memory[t, index],
            fair[index],
            instance.divisible[t, index] & fractional,
            instance.fixed[t, index].astype(np.float64),
        )

    hosted = []
    for n in sorted({int(width[o]) for o in kept if width[o] > 1 and not everywhere[o]}):
        hosts = np.flatnonzero(instance.host_sizes == n)
        some = choices([o for o in kept if width[o] == n and pieces[o] <= len(hosts)])
        if some is not None:
            hosted.append((hosts, some))
    single = choices([o for o in kept if width[o] == 1 and pieces[o] <= instance.ranks])
    return TableChoices(single, hosted, choices([o for o in kept if everywhere[o]]))


def _kept(relaxed: Relaxed, t: int, usable: Bools, fair: Floats) -> list[int]:
    """Return the cheapest option on average, and of dearer ones of each kind those with smaller pieces."""
    instance, width = relaxed.instance, relaxed.instance.width[t]
    kept: list[int] = []
    smallest = [np.inf, np.inf, np.inf]
    for o in np.argsort(fair, kind="stable").tolist():
        if not usable[o]:
            continue
        kind = 0 if width[o] == 1 else 2 if bool(instance.everywhere(width[o])) else 1
        size = float(instance.cost[t, o].sum()) + float(instance.memory[t, o].sum()) / BYTES_PER_PS
        if size < smallest[kind] and len(kept) < OPTIONS_PER_TABLE:
            smallest[kind] = size
            kept.append(o)
    return kept
