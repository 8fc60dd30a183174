"""`python -m tilerec.compat.torchrec`: command lines that cannot be run."""

from __future__ import annotations

import pytest

from tilerec.compat.standins.run import run


def test_help_and_missing_programs_install_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "usage:" in capsys.readouterr().out
    assert run([]) == 2
    assert run(["nowhere.py"]) == 2
    assert "nowhere.py: no such file" in capsys.readouterr().err
