"""The report at the end of a program."""

from __future__ import annotations

import warnings

from tilerec.compat.standins.name_table import Home
from tilerec.compat.standins.report import Report


def test_a_program_without_stand_ins_has_no_report() -> None:
    assert Report().lines() == []


def test_the_report_lists_names_operators_ignored_settings_and_other_numbers() -> None:
    report = Report()
    report.add_name("torchrec", "EmbeddingBagCollection", Home("tilerec", "EmbeddingBagCollection"))
    report.operators["dense_to_jagged"] += 3
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        report.watch_warnings()
        warnings.warn("debug has no effect: reasons", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        report.stop_watching()
    assert len(shown) == 2
    text = "\n".join(report.lines())
    assert "substituted by tilerec: 1 names" in text
    assert "dense_to_jagged (3)" in text
    assert "ignored (no effect): 1\n  debug has no effect: reasons" in text
    assert "something else" not in text
    assert "EmbeddingBagCollection: initial values" in text
