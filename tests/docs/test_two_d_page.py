"""What docs/two-d.md shows is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tilerec.testing.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "two-d.md"


def run_example(source: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/two-d.md", "exec"), {})
    return printed.getvalue()


def test_the_example_prints_what_the_page_says() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (_, source), (_, want), *_ = blocks
    assert run_ranks(4, run_example, source) == [want] * 4
