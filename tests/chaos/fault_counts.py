"""Counts of injected faults, printed at the end of a test session."""

from __future__ import annotations

from typing import NamedTuple

import pytest

Counts = dict[str, int]
FAULTS = "faults injected"
HALF = "half or changed checkpoints accepted"
KILLS = "kills at random moments"
IN_SAVE = "of these, in a save"
RESUMED = "of these, continued with the same samples and bits (on other numbers of ranks, within 1e-6)"


class Bar(NamedTuple):
    """Least and most of a count that a whole session must reach; the last is -1 for no limit."""

    least: int
    most: int = -1


BARS = {FAULTS: Bar(200), HALF: Bar(0, 0), KILLS: Bar(50), IN_SAVE: Bar(5), RESUMED: Bar(50)}


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Counts:
    """Counts of this test; reports carry them to the end of the session, from other processes too."""
    found = dict.fromkeys(BARS, 0)
    request.node.user_properties.append(("faults", found))
    return found
