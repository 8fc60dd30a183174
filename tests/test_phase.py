"""Phases: one line for those that a person waits for, none for others."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tilerec import phase as phases
from tilerec.phase import phase
from tilerec.progress import row_progress


def _console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=100), text


def test_a_phase_that_takes_a_second_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "LINE_AFTER_S", 0.0)
    console, text = _console()
    with phase("open [bold] data", console):
        pass
    assert re.fullmatch(r"open \[bold\] data: 0\.\d s\n", text.getvalue())


def test_a_short_phase_and_one_without_a_console_print_nothing() -> None:
    console, text = _console()
    with phase("open the data", console):
        pass
    with phase("open the data", None):
        pass
    assert text.getvalue() == ""


def test_a_phase_that_fails_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "LINE_AFTER_S", 0.0)
    console, text = _console()
    with pytest.raises(ValueError, match="bad"), phase("open the data", console):
        raise ValueError("bad")
    assert text.getvalue() == ""


def test_a_bar_over_rows_ends_with_the_line_of_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(phases, "LINE_AFTER_S", 0.0)
    for show in (True, False):
        with row_progress("predict", 10, show=show) as add:
            add(4)
            add(6)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"predict: 0\.\d s\n", captured.err)
