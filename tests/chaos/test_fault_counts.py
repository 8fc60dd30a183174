"""`make chaos` fails if fewer faults were injected than it states, or if a kill was not survived."""

from __future__ import annotations

import pytest

from tests.chaos.fault_counts import BARS, FAULTS, HALF, IN_COMPACTION, KILLS, RANDOM, RESUMED, missed, survived


def test_a_session_that_reaches_every_bar_passes() -> None:
    total = {name: bar.least for name, bar in BARS.items()}
    assert not missed(total)


@pytest.mark.parametrize("name", [FAULTS, KILLS, RANDOM, IN_COMPACTION])
def test_a_session_with_too_few_faults_fails(name: str) -> None:
    total = {name: bar.least for name, bar in BARS.items()} | {name: BARS[name].least - 1}
    assert any(text.startswith(name) for text in missed(total))


def test_one_half_checkpoint_fails_a_session() -> None:
    total = {name: bar.least for name, bar in BARS.items()} | {HALF: 1}
    assert missed(total) == [f"{HALF}: got 1; expected 0"]


def test_a_kill_without_the_same_bits_fails_a_session() -> None:
    total = {name: bar.least + 5 for name, bar in BARS.items()} | {HALF: 0}
    survived(total, RANDOM)
    assert not missed(total)
    total[KILLS] += 1
    assert any(text.startswith(RESUMED) for text in missed(total))
