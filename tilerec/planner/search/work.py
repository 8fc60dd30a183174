"""How much a search may still do. Work is counted, never timed: every rank and every machine stops at the same place.

Nouns
  unit   about a nanosecond of one core of a server of 2020: passes count array elements and calls, and know what
         each takes. A unit is the same on every machine, however long it lasts there
"""

from __future__ import annotations

CALLS = 20_000  # units of a handful of numpy calls on small arrays


class Work:
    """Units that are left, of this and of the whole that this is a part of."""

    def __init__(self, units: int, whole: Work | None = None) -> None:
        self.left, self.whole = units, whole

    def part(self, units: int) -> Work:
        """At most so many of them, for one pass."""
        return Work(min(units, self.left), self)

    def spend(self, units: int) -> bool:
        """Count units; whether some are left."""
        self.left -= units
        if self.whole is not None:
            self.whole.spend(units)
        return self.left > 0

    @property
    def over(self) -> bool:
        """Nothing is left."""
        return self.left <= 0
