"""Counts of injected faults, and the bars that a whole session must reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import pytest

SEED = int(os.environ.get("TILEREC_CHAOS_SEED", "0"))
"""Of the random moments; other seeds kill at other moments."""

Counts = dict[str, int]
FAULTS = "faults injected"
HALF = "half or changed checkpoints accepted"
EIO = "of the faults, EIO of a write, an fsync or a read"
KILLS = "of the faults, kills with SIGKILL"
RANDOM = "of the kills, at random moments"
IN_SAVE = "of the kills, in a save"
IN_LOAD = "of the kills, in a load"
IN_RESHARD = "of the kills, in a reshard"
IN_RESIZE = "of the kills, in a resize"
IN_COMPACTION = "of the kills, in a compaction"
RESUMED = "kills after which the run had the same samples and bits (on other numbers of ranks, within 1e-6)"


class Bar(NamedTuple):
    """Least and most of a count that a whole session must reach; the last is -1 for no limit."""

    least: int
    most: int = -1


BARS = {
    FAULTS: Bar(200), HALF: Bar(0, 0), EIO: Bar(50), KILLS: Bar(200), RANDOM: Bar(50), IN_SAVE: Bar(50),
    IN_LOAD: Bar(30), IN_RESHARD: Bar(10), IN_RESIZE: Bar(10), IN_COMPACTION: Bar(20), RESUMED: Bar(200),
}  # fmt: skip


def missed(total: Mapping[str, int]) -> list[str]:
    """Return the bars that a session has not reached, as texts; none if all kills were survived and counted."""
    found = []
    for name, (least, most) in BARS.items():
        if total[name] < least:
            found.append(f"{name}: got {total[name]}; expected at least {least}")
        elif 0 <= most < total[name]:
            found.append(f"{name}: got {total[name]}; expected {most}")
    if total[RESUMED] != total[KILLS]:
        found.append(f"{RESUMED}: got {total[RESUMED]}; expected {total[KILLS]}, the number of kills")
    return found


def survived(counts: Counts, places: str, kills: int = 1) -> None:
    """Count kills after which the run had the same bits. places: `RANDOM`, or one of `IN_SAVE` and so on."""
    for name in (FAULTS, KILLS, RESUMED, places):
        counts[name] += kills


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Counts:
    """Counts of this test; reports carry them to the end of the session, from other processes too."""
    found = dict.fromkeys(BARS, 0)
    request.node.user_properties.append(("faults", found))
    return found
