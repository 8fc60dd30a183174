"""docs/files.md: its code runs from top to bottom, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tilerec import shard
from tilerec.comms.group import Group
from tilerec.storage.row_file import BLOCK_BYTES, file_of
from tilerec.testing.virtual import run_virtual_ranks

HOME = Path(__file__).resolve().parents[2]
PAGE = (HOME / "docs" / "files.md").read_text()


def test_the_code_runs_and_the_plan_is_a_plan() -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/files.md", "exec"), scope)
    assert file_of(scope["ebc"].embedding_bags["item"].weight) is not None

    def run(group: Group) -> None:
        model = shard(scope["ebc"], scope["plan"], mesh=group)
        assert file_of(model.embedding_bags["item"].weight) is not None

    run_virtual_ranks(1, run)


def test_what_the_page_names_exists() -> None:
    assert BLOCK_BYTES == 32 * 2**20
    for path in re.findall(r"`([a-z_/]+\.(?:py|cpp))`", PAGE):
        assert (HOME / path).is_file(), path
