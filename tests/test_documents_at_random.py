"""Files of every kind, changed at random: what is not read is refused with an error of the library."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.document_fuzzer import READERS, changed, documents, outcome


@pytest.fixture(scope="module")
def valid() -> dict[str, Any]:
    return documents()


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_was_changed_at_random_is_read_or_refused(kind: str, valid: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(kind)
    found = [outcome(kind, changed(valid[kind], draw), tmp_path) for _ in range(120)]
    refused = [text for text in found if text != "read"]
    assert 0 < len(refused) < len(found)
    assert all(f"{kind}.json" in text and len(text) < 3000 for text in refused)
