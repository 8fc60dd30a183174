"""docs/modules.md: its examples run, in the order in which a reader meets them, and print what the page says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import tilerec
import tilerec.models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "modules.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def sections() -> dict[str, str]:
    """The page's examples by heading; fences are blanked so that line numbers stay."""
    text = re.sub(r"^```\w*$", "", PAGE.read_text(), flags=re.MULTILINE)
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_example_prints_what_the_page_says() -> None:
    scope: dict[str, object] = {}
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    for heading, text in sections().items():
        examples = doctest.DocTestParser().get_doctest(text, scope, heading, str(PAGE), 0)
        runner.run(examples, out=said.append, clear_globs=False)
        scope = examples.globs  # later sections use what earlier ones made
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 25


def test_every_section_about_modules_has_an_example() -> None:
    without = [heading for heading, text in sections().items() if ">>>" not in text]
    assert without == ["Coming from TorchRec"]


def test_every_module_that_a_table_names_exists_with_these_arguments() -> None:
    homes = [tilerec, tilerec.models] + [
        importlib.import_module(f"tilerec.modules.{name}")
        for name in ("mlp", "activation", "crossnet", "deepfm", "feature_processor", "feature_processed")
    ]
    rows = re.findall(r"^\| `(\w+)(?:\(([^)]*)\))?`", PAGE.read_text(), flags=re.MULTILINE)
    names = [(name, arguments) for name, arguments in rows if name[0].isupper()]
    assert len(names) > 15
    for name, arguments in names:
        home = next((h for h in homes if hasattr(h, name)), None)
        assert home is not None, f"{PAGE.name} names {name}, which does not exist"
        parameters = list(inspect.signature(getattr(home, name).__init__).parameters)[1:]
        written = [a.split("=")[0].strip() for a in arguments.split(",") if a.strip()]
        if written[:1] == ["…"]:
            assert set(written[1:]) <= set(parameters), name
        else:
            assert [p for p in parameters if p in written] == written, name
