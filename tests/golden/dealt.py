"""Runs dealt over the axes of `training.Run`: every pair of choices of two axes meets in at least one of them.

Every tiling meets every other optimizer each day and the rest of them each night; the choices on the other axes are
dealt greedily, so that pairs that have not met come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

from tests.golden.optimizers import OPTIMIZERS
from tests.golden.training import FORMS, TILINGS, TYPES, WIRES, WORLDS, Run

Choice = tuple[int, str]


def _deal(given: Iterable[tuple[str, ...]], axes: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Complete each tuple of given choices by one choice of every further axis."""
    met: Counter[tuple[Choice, Choice]] = Counter()
    used: Counter[Choice] = Counter()
    dealt = []
    for first in given:
        row = list(enumerate(first))
        for axis, choices in enumerate(axes, len(row)):
            best = min(
                ((axis, choice) for choice in choices),
                key=lambda one: (-sum(not met[other, one] for other in row), used[one]),
            )
            used[best] += 1
            row.append(best)
        met.update(combinations(row, 2))
        dealt.append(tuple(choice for _, choice in row))
    return dealt


def sharded_runs() -> tuple[list[Run], list[Run]]:
    """The runs on several ranks: of each day, and of each night only."""
    pairs = [
        [(t, o) for i, t in enumerate(TILINGS) for j, o in enumerate(OPTIMIZERS) if (i + j) % 2 == night]
        for night in (0, 1)
    ]
    axes = [list(WORLDS), FORMS, list(TYPES), list(WIRES)]
    return tuple([_run(row) for row in _deal(own, axes)] for own in pairs)  # type: ignore[return-value]


def _run(row: tuple[str, ...]) -> Run:
    tiling, optimizer, world, form, data_type, wire = row
    return Run(tiling, optimizer, form, world, data_type, wire)


def unsharded_runs() -> list[Run]:
    """The runs of one process: every optimizer with two data types and two forms."""
    given = [(optimizer, turn) for optimizer in OPTIMIZERS for turn in ("first", "second")]
    dealt = _deal(given, [list(TYPES), FORMS])
    return [Run("table_wise", optimizer, form, "1", kind) for optimizer, _, kind, form in dealt]
