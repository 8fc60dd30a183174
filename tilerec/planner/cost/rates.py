"""`Rates`: formulas of seconds. Amounts (ids, rows, bytes) times a machine's speeds, on arrays that broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilerec.planner.cost.portable import Floats
from tilerec.spec.speeds import Speeds


class Rates:
    """What things take on one machine, in seconds."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds

    def at(self, name: str, width: Any) -> Floats:
        """A rate per row at a width: linear between the measured ones, flat below the first, in proportion above."""
        widths, rates = np.array(self.speeds.widths, np.float64), np.array(getattr(self.speeds, name))
        width = np.asarray(width, np.float64)
        slopes = np.diff(rates, append=0.0) / np.diff(widths, append=1.0)
        last = len(widths) - 1
        at = np.minimum(np.maximum(np.searchsorted(widths, width) - 1, 0), last)
        inside = rates[at] + (width - widths[at]) * slopes[at]
        above = np.where(width > widths[last], rates[last] / widths[last] * width, inside)
        found: Floats = np.where(width <= widths[0], rates[0], above)
        return found

    def lookup(self, ids: Any, far: Any, bags: Any, width: Any, element: Any) -> Floats:
        """Read `ids` rows, `far` of them from memory, and write `bags` sums."""
        row = width * element / 4.0
        near = np.maximum(np.asarray(ids) - far, 0.0)
        return (
            far * self.at("lookup_far", row)
            + near * self.at("lookup_near", row)
            + bags * self.at("lookup_bag", width)
        )

    def update(
        self, ids: Any, bags: Any, distinct: Any, far: Any, width: Any, element: Any, cell_state: Any, row_state: Any
    ) -> Floats:  # fmt: skip
        """Sort ids, add the gradients of their bags, and change each distinct row and its optimizer state once."""
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
        """Seconds of an exchange on each rank, of the bytes that it sends and receives over one kind of link."""
        speeds = self.speeds
        out, inward = (
            (speeds.network_out, speeds.network_in) if network else (speeds.link_out, speeds.link_in)
        )
        sent, received = np.asarray(sent, np.float64) * out, np.asarray(received, np.float64) * inward
        return np.maximum(sent, received) if speeds.duplex else sent + received

    def copied(self, count: Any) -> Floats:
        return np.asarray(count, np.float64) * self.speeds.copy
