"""The site has every page, every command and every public name; `make docs` builds it."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tilerec.lazy_names import MODULES
from tilerec.testing import run_virtual_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "docs_site.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the site is part of the repository, not of the wheel")


@pytest.fixture(scope="module")
def site() -> Any:
    spec = importlib.util.spec_from_file_location("docs_site", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation(site: Any) -> None:
    assert site.unlisted_pages() == []


def test_every_public_name_has_a_docstring_and_a_place_in_the_reference(site: Any, tmp_path: Path) -> None:
    names = site.public_names()
    assert site.undocumented(names) == []
    assert {*MODULES} - {"__version__"} <= set(names["tilerec"])
    site.write_pages(tmp_path / "pages")
    api = {page.stem: page.read_text() for page in (tmp_path / "pages" / "reference" / "api").glob("*.md")}
    entries = [path for text in api.values() for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    assert sorted(entries) == sorted({path for each in names.values() for path in each.values()})
    assert "`tilerec checkpoint verify`" in (tmp_path / "pages" / "reference" / "cli.md").read_text()
    assert "batch_size" in (tmp_path / "pages" / "reference" / "settings.md").read_text()
    assert "](../examples" not in (tmp_path / "pages" / "cluster.md").read_text()


def test_a_class_without_a_docstring_is_found(site: Any) -> None:
    assert site.undocumented({"tests": {"bare": "tests.docs.test_site.bare"}}) == ["tests.docs.test_site.bare"]


def bare() -> None: ...


@pytest.mark.parametrize("page", ["debugging.md", "gpu-start.md"])
def test_programs_of_short_pages_run(page: str) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert ast.parse(source).body
    exec(compile(source, page, "exec"), {"run_virtual_ranks": run_virtual_ranks})
