"""`docs/torchrec-users.md` says where each trouble is held: the tests it names exist, and none of ours is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/torchrec-users.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def held() -> list[tuple[str, str]]:
    """(file, beginning of a test's name) pairs that the page names; the beginning may be empty."""
    found = []
    for row in rows():
        file = ""
        for word in re.findall(r"`([^`]+)`", row[3] if len(row) > 3 else ""):
            if word.endswith(".py"):
                file = word if word.startswith("benchmarks/") else f"tests/{word}"
                found.append((file, ""))
            else:
                found.append((file, word.removesuffix("…")))
    return found


def test_every_trouble_has_its_row() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, 27))
    for row in rows():
        number, trouble, here = row[:3]
        assert trouble, number
        assert here, number
        # Either something holds it, or the page says that it does not exist.
        assert len(row) > 3 or "not yet" in here, number


def test_every_test_that_the_page_names_exists() -> None:
    named = held()
    assert len(named) > 40
    for file, beginning in named:
        source = (ROOT / file).read_text()
        assert f"def {beginning}" in source, f"{file} has no test that begins with {beginning}"


def test_every_test_of_a_trouble_is_on_the_page() -> None:
    beginnings = [beginning for _, beginning in held() if beginning]
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name == Path(__file__).name:
            continue
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            assert any(name.startswith(beginning) for beginning in beginnings), f"{path.name}: {name}"


def test_threads_are_linked_by_their_number() -> None:
    links = re.findall(
        r"\[([^\]]*?)(\d+)\]\((https://github\.com/[\w-]+/[\w-]+/(?:issues|pull)/(\d+))\)", PAGE.read_text()
    )
    assert len(links) > 50
    for words, number, link, there in links:
        assert number == there, link
        assert ("/pull/" in link) == ("PR" in words or "TorchEasyRec" in words), link
