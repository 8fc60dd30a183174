"""State dicts and optimizer states have the names of the golden list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.names import FILE, SECTIONS


@pytest.fixture(scope="module", autouse=True)
def _processes_find_these_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        yield


def _sections() -> dict[str, list[str]]:
    parts = FILE.read_text().split("\n[")
    heads = [part.removeprefix("[").split("]\n", 1) for part in parts]
    return {title: lines.strip("\n").split("\n") for title, lines in heads}


def test_the_list_has_every_section_and_no_other() -> None:
    assert list(_sections()) == list(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_names_of_state_are_those_of_the_golden_list(title: str) -> None:
    assert SECTIONS[title]() == _sections()[title], "checkpoints are found again by these names"
