"""`Work`: a budget of the search. Work is counted, never timed, so all ranks and machines stop at the same place.

One unit is about a nanosecond of one core of a server of 2020. Each pass counts its array elements and numpy calls, and
multiplies them by constants that were measured there.
"""

from __future__ import annotations

CALLS = 20_000  # units of about ten numpy calls on small arrays


class Work:
    """A budget in units.

    Args:
        units: what is left.
        whole: budget that this one is a part of; units spent here are spent there, too.
    """

    def __init__(self, units: int, whole: Work | None = None) -> None:
        self.left, self.whole = units, whole

    def part(self, units: int) -> Work:
        """Return a budget of at most so many of the units that are left."""
        return Work(min(units, self.left), self)

    def spend(self, units: int) -> None:
        """Subtract units, here and from the whole."""
        self.left -= units
        if self.whole is not None:
            self.whole.spend(units)

    @property
    def over(self) -> bool:
        """True if no unit is left."""
        return self.left <= 0
