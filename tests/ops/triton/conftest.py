"""Tests of kernels run under the sanitizer (`sanitizer.py`): a sample always, all with TILEREC_SANITIZE=1 (minutes)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops.triton.reasons import SAMPLE
from tests.ops.triton.sanitizer import Sanitizer, asked_for, sanitized

_WATCH = Sanitizer()


@pytest.fixture(autouse=True)
def _sanitized(request: pytest.FixtureRequest) -> Iterator[None]:
    file, name = request.path.name, getattr(request.node, "originalname", "")
    if file == "test_sanitizer.py" or not (asked_for() or name in SAMPLE.get(file, ())):
        yield
        return
    with sanitized(_WATCH):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not asked_for():
        return
    terminalreporter.section("sanitized kernels: launches, programs")
    for kernel, launches in sorted(_WATCH.launches.items()):
        terminalreporter.line(f"{kernel}: {launches}, {_WATCH.programs[kernel]}")
    terminalreporter.section("accesses of one warp that nothing but its step keeps in order")
    for line in sorted(_WATCH.one_warp):
        terminalreporter.line(line)
    if _WATCH.findings:
        terminalreporter.section("what the sanitizer found")
        for line in _WATCH.findings.values():
            terminalreporter.line(line)
