"""Pools of ranks, and the sum of all faults at the end of the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.fault_counts import BARS, SEED, missed
from tests.chaos.fault_counts import counts as counts
from tilerec.testing.ranks import Ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """`pool(2)`: two gloo ranks; they start again after they were killed."""
    pools: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size, timeout_s=120.0))

    yield of
    for ranks in pools.values():
        ranks.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums. With TILEREC_CHAOS=1, the session fails unless they reach the bars."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    found = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "faults"
    ]
    enforced = os.environ.get("TILEREC_CHAOS") == "1"
    if not found and not enforced:
        return
    total = {name: sum(one[name] for one in found) for name in BARS}
    terminalreporter.section(f"checkpoints under faults, seed {SEED}")
    for name, count in total.items():
        terminalreporter.line(f"{count:6,} {name}")
    if enforced and (short := missed(total)):
        for text in short:
            terminalreporter.line(f"not reached: {text}", red=True)
        terminalreporter._session.exitstatus = 1  # type: ignore[union-attr]
