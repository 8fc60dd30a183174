"""`docs/torchrec-users.md`, porting: the script runs, every name on the page is where the page says."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.compat.standins.name_table import absent, names_of
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.full_state import full_state_dict
from tilerec.testing.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "torchrec-users.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")
TABLES = "model.sparse_arch.embedding_bag_collection.embedding_bags"


def between(mark: str) -> str:
    (text,) = re.findall(rf"<!-- {mark}: begin -->\n(.*?)<!-- {mark}: end -->", PAGE.read_text(), re.DOTALL)
    return str(text)


def code(mark: str) -> str:
    (text,) = re.findall(r"```python\n(.*?)```", between(mark), re.DOTALL)
    return str(text)


def names(mark: str) -> list[tuple[str, str, str, str]]:
    """(their module, their name, our module, our name) for every name of a table."""
    found = []
    for line in between(mark).splitlines()[2:]:
        theirs, pairs, ours = (cell.strip() for cell in line.strip("|").split("|"))
        for pair in pairs.split(", "):
            theirs_name, *ours_name = re.findall(r"`(\w+)`", pair)
            found.append((theirs.strip("`"), theirs_name, ours.strip("`"), (ours_name or [theirs_name])[0]))
    return found


def imported(source: str) -> dict[str, str]:
    """name -> module of the `from … import …` lines."""
    return {
        alias.name: node.module or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("mark", ["paths", "cousins", "compat"])
def test_every_name_of_the_tables_is_where_the_page_says(mark: str) -> None:
    rows = names(mark)
    assert len(rows) > 7
    missing = [f"{module}.{name}" for _, _, module, name in rows if not hasattr(importlib.import_module(module), name)]
    assert not missing
    assert len(set(rows)) == len(rows)


def test_the_page_lists_the_names_of_compat_and_those_that_are_not_there() -> None:
    there = {
        (module, name, home.module, home.attribute)
        for module, names in names_of().items()
        for name, home in names.items()
        if home.module.startswith("tilerec.compat")
    }
    assert set(names("compat")) == there
    shown = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in between("absent").splitlines()[2:]]
    known = {(module, "all" if name == "*" else name, why) for (module, name), why in absent().items() if name != "-"}
    assert {tuple(row) for row in shown} == known


def test_the_two_import_blocks_name_the_same_things_at_the_places_of_the_table() -> None:
    before, after = imported(code("port, before")), imported(code("port, imports"))
    assert set(before) == set(after)
    places = {(theirs, name): (ours, own) for theirs, name, ours, own in names("paths")}
    for name, theirs in before.items():
        ours, own = places[theirs, name]
        there = getattr(importlib.import_module(ours), own)
        assert getattr(importlib.import_module(after[name]), name) is there, name


def run(source: str) -> dict[str, Any]:
    """The script on a rank whose process group is there; what it leaves behind."""
    scope: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(source, str(PAGE), "exec"), scope)
    model, optimizer = scope["model"], scope["optimizer"]
    torch.manual_seed(0)
    first = EmbeddingBagCollection(scope["tables"]).state_dict()
    now: dict[str, Tensor] = full_state_dict(model)
    return {
        "loss": scope["loss"].item(),
        "moved": {
            name: (now[f"model.sparse_arch.embedding_bag_collection.{name}"] != value).any(dim=1).sum().item()
            for name, value in first.items()
        },
        "dense": {name: value for name, value in now.items() if "embedding_bags" not in name},
        "grads": [name for name, p in model.named_parameters() if "embedding_bags" in name and p.grad is not None],
        "state": sorted(optimizer.state_dict()["state"]),
        "owners": {name: sharding.ranks for _, name, sharding in model.plan.tables()},
    }


def test_the_ported_script_trains_on_two_ranks() -> None:
    body = code("port, body")
    start = 'dist.init_process_group("gloo")\n'
    assert body.startswith(start)
    first, second = run_ranks(2, run, code("port, imports") + body.removeprefix(start))
    for rank in (first, second):
        assert 0.3 < rank["loss"] < 1.5
        assert rank["grads"] == []
        # 3 steps of 2 ranks touch up to 48 of a table's 1,000 rows, and those only.
        assert all(30 <= moved <= 48 for moved in rank["moved"].values()), rank["moved"]
        assert {f"tables.{TABLES}.t_{f}.weight" for f in ("user", "item", "shop")} <= set(rank["state"])
        assert any(name.startswith("dense.model.over_arch") for name in rank["state"])
    assert {rank for ranks in first["owners"].values() for rank in ranks} == {0, 1}
    assert first["dense"].keys() == second["dense"].keys()
    assert all(torch.equal(value, second["dense"][name]) for name, value in first["dense"].items())


def test_the_script_is_as_short_as_a_port_should_be() -> None:
    assert len(code("port, body").splitlines()) <= 36
