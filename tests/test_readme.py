"""The pages a new user reads first: their code runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tilerec.recipes.registry import RECIPES, make_run, needs_data
from tilerec.testing.ranks import run_ranks
from tilerec.train.override import settings

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
]

pytestmark = pytest.mark.skipif(not README.exists(), reason="the pages are part of the repository, not of the wheel")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def _run_example(source: str) -> tuple[int, list[str]]:
    scope: dict[str, Any] = {}
    # The ranks of a test have their process group already.
    exec(compile(source.replace('dist.init_process_group("gloo")\n', ""), str(README), "exec"), scope)
    dense = [name for name, parameter in scope["ebc"].named_parameters() if parameter.grad is not None]
    return scope["logits"].shape[0], dense


def test_readme_example_runs_on_two_ranks() -> None:
    (source,) = _blocks("python")
    assert 'dist.init_process_group("gloo")' in source
    assert '\nprint(f"loss {' in source
    for samples, dense in run_ranks(2, _run_example, source):
        assert samples == 2
        assert dense == [], "these have a dense gradient although their optimizer is attached"


def test_readme_example_without_ranks_trains_the_rows_it_touches() -> None:
    (source,) = _blocks("python")
    for line in ('dist.init_process_group("gloo")', "shard(ebc)"):
        source = re.sub(rf"^{re.escape(line)}.*\n", "", source, flags=re.MULTILINE)
    source = source.replace(
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3 * 64, 1))", "torch.nn.Linear(3 * 64, 1)"
    )
    source = source.replace(', device="meta"', "")
    scope: dict[str, Any] = {}
    exec(compile(source, str(README), "exec"), scope)
    for name, parameter in scope["ebc"].named_parameters():
        assert parameter.grad is None, f"{name} has a dense gradient although its optimizer is attached"
        assert scope["ebc"].fused_optimizer.state[parameter]["step"] == 1


def test_the_readme_fits_on_one_screen() -> None:
    assert len(README.read_text().split()) <= 700


def test_readme_example_is_as_short_as_its_heading_says() -> None:
    (source,) = _blocks("python")
    statements = [line for line in source.splitlines() if line.strip()]
    assert len(statements) <= 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # code calls: a[0](b)
    missing = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing, f"{page.name} links to {missing}"


def test_make_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    command = re.compile(r"(?:^|`)make ([a-z-]+)(?=`| [A-Z_]+=| +#|$)", re.MULTILINE)
    named = {name for page in PAGES for name in command.findall(page.read_text())}
    assert {"train", "test", "bench", "wheel"} <= named
    missing = [target for target in sorted(named) if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    assert not missing, f"pages name {missing}"


def test_settings_that_pages_and_the_makefile_name_exist() -> None:
    pages = [*PAGES, ROOT / "Makefile"]
    named = {match for page in pages for match in re.findall(r"--set (\w+(?:\.\w+)+)=", page.read_text())}
    assert named
    runs = [make_run(name, "data" if needs_data(recipe) else None) for name, recipe in RECIPES.items()]
    assert not named - {name for run in runs for name in settings(run)}


def test_ci_runs_nothing_that_the_readme_does_not_name() -> None:
    commands = [
        line.split("#")[0].strip()
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if line.strip() and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["make test", "make docs"]
    assert all(f"`{command}`" in (ROOT / "CONTRIBUTING.md").read_text() for command in commands)
