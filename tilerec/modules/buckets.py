"""Buckets: how the rows of a table are cut for its ids.

    row = bucket * size + slot          size = rows / count
    slots [0, size - shared)            each belongs to one id
    slots [size - shared, size)         are shared: by ids of this bucket that have no row of their own

An id never leaves its bucket, so no row number depends on how many ranks hold them; a rank holds whole buckets
`[first, last)`. The hash ops number slots of own ids only: place = bucket * slots + slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.hash.definition import zch_buckets

DEFAULT_BUCKETS = 768
_SALT = 0x5851F42D4C957F2D


@dataclass(frozen=True)
class Buckets:
    """See the head of this file. Make one with `of`, which checks."""

    rows: int
    count: int
    shared: int = 0
    first: int = 0
    last: int = 0
    percent: float = 0.0  # that `shared` was made of

    @staticmethod
    def of(
        who: str, rows: int, count: int, *, first: int = 0, last: int | None = None, shares: bool = False,
        percent_shared: float = 0.0,
    ) -> Buckets:  # fmt: skip
        """Checked buckets.

        Args:
            shares: ids without a row share one: at least one row of each bucket is kept for that.
            percent_shared: of a bucket's rows that are kept for it.

        Raises:
            ConfigError: rows that do not fill the buckets; buckets without a row for ids of their own.
        """
        for name, value in (("zch_size", rows), ("total_num_buckets", count)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{who}: {name} is {value!r}; it must be a whole number of at least 1.")
        if rows % count:
            raise ConfigError(
                f"{who}: {rows} rows do not fill {count} buckets equally; use {_near_sizes(rows, count)} rows, or "
                f"{_near_counts(rows, count)} buckets."
            )
        if not 0 <= percent_shared < 100:
            raise ConfigError(
                f"{who}: percent_reserved_slots is {percent_shared}; wanted 0 up to, not including, 100."
            )
        size = rows // count
        shared = max(1, int(size * percent_shared / 100)) if shares else 0
        if size - shared < 1:
            raise ConfigError(
                f"{who}: {rows} rows in {count} buckets are {size} per bucket, of which {shared} would be shared by "
                f"ids without a row, and none is left for others; use at least {2 * count} rows, fewer buckets, or "
                "disable_fallback=True."
            )
        whole = Buckets(rows, count, shared, 0, count, percent_shared)
        return whole.checked_cut(who, first, count if last is None else last)

    @property
    def size(self) -> int:
        """Rows of a bucket."""
        return self.rows // self.count

    @property
    def slots(self) -> int:
        """Rows of a bucket that ids have for themselves."""
        return self.size - self.shared

    @property
    def held(self) -> int:
        """Buckets that are here."""
        return self.last - self.first

    def cut(self, first: int, last: int) -> Buckets:
        """The same table, of which other buckets are here."""
        return replace(self, first=first, last=last)

    def checked_cut(self, who: str, first: int, last: int) -> Buckets:
        """As `cut`, of buckets that a user named."""
        if not 0 <= first < last <= self.count:
            raise ConfigError(
                f"{who}: buckets [{first}, {last}) are not among the {self.count} there are; wanted "
                "0 <= start_bucket < end_bucket <= total_num_buckets."
            )
        return self.cut(first, last)

    def rows_of(self, places_N: Tensor) -> Tensor:
        """Rows of places; -1 stays."""
        if not self.shared:
            return places_N
        # Rounded down: of -1 it is -1, too.
        above_N = torch.div(places_N, self.slots, rounding_mode="floor") * self.shared
        return torch.where(places_N < 0, places_N, places_N + above_N)

    def shared_rows(self, ids_N: Tensor, bucket_N: Tensor | None = None) -> Tensor:
        """The row that an id shares while it has none of its own; `bucket_N` where their buckets are known."""
        rows_N = (zch_buckets(ids_N, self.count) if bucket_N is None else bucket_N) * self.size + self.slots
        # Other bits than those that chose the bucket.
        return rows_N if self.shared == 1 else rows_N + zch_buckets(ids_N ^ _SALT, self.shared)


def bucket_cuts(count: int, parts: int) -> tuple[int, ...]:
    """Whole buckets in contiguous ranges over `parts` ranks, as even as they come: 8 over 3 -> (0, 2, 5, 8)."""
    return tuple(count * part // parts for part in range(parts + 1))


def divisor_near(rows: int, most: int, least_size: int) -> int:
    """The largest number of equal buckets, at most `most`, of at least `least_size` rows each; 1 if there is none."""
    for count in range(min(most, rows // least_size), 1, -1):
        if rows % count == 0:
            return count
    return 1


def _near_sizes(rows: int, count: int) -> str:
    below = rows // count * count
    return f"{below} or {below + count}" if below else str(count)


def _near_counts(rows: int, count: int) -> str:
    below = next((n for n in range(min(count, rows), 0, -1) if rows % n == 0), 1)
    above = next((n for n in range(count, min(rows, 8 * count) + 1) if rows % n == 0), None)
    return str(below) if above is None else f"{below} or {above}"
