"""`Rates`: seconds of the parts of a step: amounts (ids, rows, bytes) times the speeds of a machine.

All arguments are numbers or arrays that broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilerec.planner.cost.portable import Floats
from tilerec.spec.speeds import Speeds


class Rates:
    """Seconds of operations on one machine."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self.widths = np.array(speeds.widths, np.float64)
        self._curves: dict[str, tuple[Floats, Floats]] = {}  # seconds per row at `widths`, and the slopes in between

    def at(self, name: str, width: Any) -> Floats:
        """Return seconds per row at a width in columns.

        The rate is linear between measured widths, constant below the first, and proportional to the width above the
        last.
        """
        if name not in self._curves:
            rates = np.array(getattr(self.speeds, name))
            self._curves[name] = rates, np.diff(rates, append=0.0) / np.diff(self.widths, append=1.0)
        widths, (rates, slopes) = self.widths, self._curves[name]
        width = np.maximum(np.asarray(width, np.float64), widths[0])
        at: Any = np.zeros(width.shape, np.int8)  # the widths below; faster than a binary search among so few
        for edge in widths[1:].tolist():
            at += width > edge
        at = at.astype(np.intp)  # else each `take` converts them
        found: Floats = rates.take(at) + (width - widths.take(at)) * slopes.take(at)
        beyond = width > widths[-1]
        return np.where(beyond, rates[-1] / widths[-1] * width, found) if beyond.any() else found

    def lookup(self, ids: Any, far: Any, bags: Any, width: Any, element: Any) -> Floats:
        """Return seconds to read `ids` rows, `far` of them from memory, and to write `bags` sums.

        Args:
            width: columns. element: bytes of a cell.
        """
        row = width * element / 4.0
        near = np.maximum(np.asarray(ids) - far, 0.0)
        return (
            far * self.at("lookup_far", row) + near * self.at("lookup_near", row) + bags * self.at("lookup_bag", width)
        )

    def update(
        self, ids: Any, bags: Any, distinct: Any, far: Any, width: Any, element: Any, cell_state: Any, row_state: Any
    ) -> Floats:  # fmt: skip
        """Return seconds to sort ids, to add gradients of bags, and to update each distinct row and its state once.

        Args:
            far: distinct rows that come from memory. cell_state, row_state: bytes of state per cell and per row.
        """
        row = width * (np.asarray(element) + cell_state) / 4.0
        near = np.maximum(np.asarray(distinct) - far, 0.0)
        line = np.where(np.asarray(row_state) > 0, 0.5 * self.at("update_far", 0.0), 0.0)
        return (
            ids * self.at("update_id", width)
            + bags * self.at("update_bag", width)
            + far * (self.at("update_far", row) + line)
            + near * self.at("update_near", row)
        )

    def exchanged(self, sent: Any, received: Any, *, network: bool = False) -> Floats:
        """Return seconds of an exchange, for the bytes that a rank sends and receives over one kind of link."""
        speeds = self.speeds
        out, inward = (speeds.network_out, speeds.network_in) if network else (speeds.link_out, speeds.link_in)
        sent, received = np.asarray(sent, np.float64) * out, np.asarray(received, np.float64) * inward
        return np.maximum(sent, received) if speeds.duplex else sent + received

    def copied(self, count: Any) -> Floats:
        """Return seconds to copy `count` bytes."""
        return np.asarray(count, np.float64) * self.speeds.copy
