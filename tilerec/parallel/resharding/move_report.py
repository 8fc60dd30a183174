"""`Resharded`: the report of a move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerec.errors import ConfigError


@dataclass(frozen=True)
class Resharded:
    """Report of a move; equal on every rank except for `seconds`.

    Attributes:
        tables: names of the tables with a new tiling (`'t' of module 'ebc'`).
        bytes_sent: bytes sent by all ranks together.
        bytes_copied: bytes copied within ranks.
        busiest_bytes: largest sum of bytes sent and received by one rank.
        extra_bytes: largest bytes that a rank needed beyond max(its tables before the move, its tables after it).
        seconds: duration on this rank, checks included.
    """

    tables: tuple[str, ...]
    bytes_sent: int
    bytes_copied: int
    busiest_bytes: int
    extra_bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.tables:
            return "nothing moved: every table already has the tiling of the plan"
        moved = "1 table" if len(self.tables) == 1 else f"{len(self.tables)} tables"
        return (
            f"{moved} moved: {_size(self.bytes_sent)} sent, {_size(self.bytes_copied)} copied, in "
            f"{self.seconds:.3f} s; at most {_size(self.extra_bytes)} beside the tables on any rank"
        )


def merged_report(reports: Sequence[Resharded]) -> Resharded:
    """Return one report for consecutive moves."""
    if not reports:
        raise ConfigError("reshard: model: got one without sharded tables; shard it first.")
    return Resharded(
        tuple(name for report in reports for name in report.tables),
        sum(report.bytes_sent for report in reports),
        sum(report.bytes_copied for report in reports),
        sum(report.busiest_bytes for report in reports),
        max(report.extra_bytes for report in reports),
        reports[-1].seconds,
    )


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError
