"""Fixed charges: costs that a plan pays once if any table needs them, such as the latency of a further collective.

Legend: T tables, O options, F charges.
"""

from __future__ import annotations

import numpy as np

from tilerec.planner.cost.price import Price

CHARGES = (
    "exchange", "replicas", "replica rows", "replica row numbers", "dense replicas", "hosts", "row sums",
    "partly filled",
)  # fmt: skip
"""All charges. Each is the latency of one or more collectives; "partly filled" sets an output to zeros beforehand."""

_CHARGES_OF_TRAFFIC = {
    "rows": ("exchange",),
    "replica gradients": ("replicas", "replica rows"),
    "replica rows": ("replicas", "replica row numbers"),
    "replica gradients, dense": ("replicas", "dense replicas"),
    "dense gradients": ("dense replicas",),
    "rows in host": ("hosts",),
    "row sums": ("row sums",),
}


def charges_paid_by(priced: Price) -> frozenset[str]:
    """Return the charges that a price contains."""
    kinds = (
        _CHARGES_OF_TRAFFIC[name]
        for name, sent in priced.sent.items()
        if name in _CHARGES_OF_TRAFFIC and np.any(sent > 0)
    )
    return frozenset(kind for some in kinds for kind in some)
