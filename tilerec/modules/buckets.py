"""Buckets: equal ranges of a table's rows, between which its ids are distributed.

    row = bucket * size + slot          size = rows / count
    slots [0, size - shared)            each belongs to one id
    slots [size - shared, size)         are shared by ids of this bucket that have no row of their own

An id never leaves its bucket, so its row number does not depend on the number of ranks. A rank holds whole buckets
`[first, last)`. The hash ops number only the slots that belong to one id: place = bucket * slots + slot.
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
    """Bucket layout of one table; see the head of this file. `of` checks its arguments; the constructor does not."""

    rows: int
    count: int
    shared: int = 0
    first: int = 0
    last: int = 0
    percent: float = 0.0  # the percentage that `shared` was computed from

    @staticmethod
    def of(
        who: str, rows: int, count: int, *, first: int = 0, last: int | None = None, shares: bool = False,
        percent_shared: float = 0.0,
    ) -> Buckets:  # fmt: skip
        """Return a checked bucket layout.

        Args:
            shares: ids without a row share one; at least one row of each bucket is reserved for that.
            percent_shared: percentage of a bucket's rows reserved for sharing.

        Raises:
            ConfigError: the rows do not fill the buckets equally, or all rows of a bucket are reserved.
        """
        for name, value in (("zch_size", rows), ("total_num_buckets", count)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{who}: got {name}={value!r}; expected an integer of at least 1.")
        if rows % count:
            raise ConfigError(
                f"{who}: got {rows} rows in {count} buckets; expected a multiple of the bucket count. Use "
                f"{_near_sizes(rows, count)} rows, or {_near_counts(rows, count)} buckets."
            )
        if not 0 <= percent_shared < 100:
            raise ConfigError(
                f"{who}: got percent_reserved_slots={percent_shared}; expected at least 0 and less than 100."
            )
        size = rows // count
        shared = max(1, int(size * percent_shared / 100)) if shares else 0
        if size - shared < 1:
            raise ConfigError(
                f"{who}: got {rows} rows in {count} buckets, {size} per bucket, of which {shared} would be shared and "
                f"none would be left for own ids. Use at least {2 * count} rows, fewer buckets, or "
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
        """Rows of a bucket that belong to one id each."""
        return self.size - self.shared

    @property
    def held(self) -> int:
        """Number of buckets that this rank holds."""
        return self.last - self.first

    def cut(self, first: int, last: int) -> Buckets:
        """Return the layout of the same table, with the buckets `[first, last)` held."""
        return replace(self, first=first, last=last)

    def checked_cut(self, who: str, first: int, last: int) -> Buckets:
        """Return `cut(first, last)` after a check of the user's range."""
        if not 0 <= first < last <= self.count:
            raise ConfigError(
                f"{who}: got buckets [{first}, {last}) of {self.count}; expected "
                "0 <= start_bucket < end_bucket <= total_num_buckets."
            )
        return self.cut(first, last)

    def cut_of_rows(self, who: str, rows: tuple[int, int]) -> Buckets:
        """Return `cut` for the buckets of rows [rows[0], rows[1]); raise a `ConfigError` if they split a bucket."""
        if any(row % self.size for row in rows):
            raise ConfigError(
                f"{who}: got output_id_range={list(rows)}; expected multiples of {self.size}, the rows of a bucket."
            )
        return self.checked_cut(who, rows[0] // self.size, rows[1] // self.size)

    def rows_of(self, places_N: Tensor) -> Tensor:
        """Return the rows of places; -1 stays -1."""
        if not self.shared:
            return places_N
        # Floor division keeps -1 at -1.
        above_N = torch.div(places_N, self.slots, rounding_mode="floor") * self.shared
        return torch.where(places_N < 0, places_N, places_N + above_N)

    def shared_rows(self, ids_N: Tensor, bucket_N: Tensor | None = None) -> Tensor:
        """Return the shared row of each id, used while the id has no own row; `bucket_N`: their buckets, if known."""
        rows_N = (zch_buckets(ids_N, self.count) if bucket_N is None else bucket_N) * self.size + self.slots
        # The salt makes this choice independent of the bucket's.
        return rows_N if self.shared == 1 else rows_N + zch_buckets(ids_N ^ _SALT, self.shared)


def bucket_cuts(count: int, parts: int) -> tuple[int, ...]:
    """Return boundaries of nearly equal contiguous bucket ranges over `parts` ranks: 8 over 3 -> (0, 2, 5, 8)."""
    return tuple(count * part // parts for part in range(parts + 1))


def divisor_near(rows: int, most: int, least_size: int) -> int:
    """Return the largest count of equal buckets, at most `most`, with at least `least_size` rows each; 1 if none."""
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
