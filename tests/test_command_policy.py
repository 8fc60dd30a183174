"""Threads of the command wait a few microseconds before they sleep; a library does not change its program."""

from __future__ import annotations

import pytest

from tilerec.command_policy import is_command, wait_briefly


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["python", "-m", "tilerec", "train", "synthetic"], True),
        (["python", "-X", "importtime", "-m", "tilerec"], True),
        (["/venv/bin/python", "/venv/bin/tilerec", "train"], True),
        (["/venv/bin/tilerec"], True),
        (["python", "train.py", "tilerec"], False),
        (["python", "-m", "pytest", "tilerec"], False),
        (["python", "-c", "import tilerec"], False),
        ([], False),
    ],
)
def test_a_command_is_known_by_its_arguments(arguments: list[str], command: bool) -> None:
    assert is_command(arguments) == command


def test_a_policy_or_a_spin_count_that_is_set_stays() -> None:
    empty: dict[str, str] = {}
    wait_briefly(empty)
    assert empty == {"GOMP_SPINCOUNT": "1000"}
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "300000")):
        given = {name: value}
        wait_briefly(given)
        assert given == {name: value}
