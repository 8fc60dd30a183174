"""Plans that are kept: read back, never trusted, never half written."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.plan_requests import plan_request
from tilerec.planner import planner as face
from tilerec.planner.make_plan import make_plan
from tilerec.planner.plan_cache import PlanCache
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.topology import Topology

TABLES = [EmbeddingBagConfig(1000, 64, "user"), EmbeddingBagConfig(10, 4, "item")]


def request() -> PlanRequest:
    return plan_request({"a": 1000, "b": 10}, Topology(2))


def test_a_plan_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PlanRequest] = []

    def counting(asked_for: PlanRequest) -> ShardingPlan:
        made.append(asked_for)
        return make_plan(asked_for)

    monkeypatch.setattr(face, "make_plan", counting)
    planner = EmbeddingShardingPlanner(Topology(2), cache=tmp_path)
    first, second = planner.plan(TABLES), planner.plan(TABLES)
    assert first == second
    assert first.report.to_json() == second.report.to_json()
    assert len(made) == 1
    EmbeddingShardingPlanner(Topology(2), 64, cache=tmp_path).plan(TABLES)
    assert len(made) == 2
    EmbeddingShardingPlanner(Topology(2)).plan(TABLES)
    assert len(made) == 3
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("harm", ["half", "empty", "no json", "other version", "edited", "binary"])
def test_an_entry_that_cannot_be_read_is_warned_of_and_made_anew(tmp_path: Path, harm: str) -> None:
    planner = EmbeddingShardingPlanner(Topology(2), cache=tmp_path)
    plan = planner.plan(TABLES)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_bytes(
        {
            "half": text[: len(text) // 2],
            "empty": "",
            "no json": "[1, 2",
            "other version": text.replace('"version":1', '"version":99', 1),
            "edited": text.replace('"rows":1000', '"rows":1001'),
            "binary": "",
        }[harm].encode()
        + (b"\xff\xfe" if harm == "binary" else b"")
    )
    with pytest.warns(UserWarning, match="is ignored and will be written again"):
        assert planner.plan(TABLES) == plan
    assert path.read_text() == text
    assert planner.plan(TABLES) == plan


def test_an_entry_under_another_requests_name_is_not_used(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    plan = make_plan(request())
    cache.store(request(), plan, plan.report)
    other = plan_request({"a": 1001, "b": 10}, Topology(2))
    cache.path(request()).rename(cache.path(other))
    with pytest.warns(UserWarning, match="it is for another request"):
        assert cache.load(other) is None


def test_writers_of_one_entry_do_not_harm_each_other(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "deep" / "folder")
    plan = make_plan(request())
    read: list[object] = []

    def work() -> None:
        for _ in range(10):
            cache.store(request(), plan, plan.report)
            read.append(cache.load(request()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(entry is not None and entry[0] == plan for entry in read)  # type: ignore[index]
    assert [path.name for path in cache.folder.iterdir()] == [cache.path(request()).name]


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        plan = EmbeddingShardingPlanner(Topology(2), cache=tmp_path / "file" / "x").plan(TABLES)
    assert plan.report is not None


def test_requests_that_differ_have_entries_of_their_own(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    assert cache.path(request()) == cache.path(request())
    assert cache.path(replace(request(), reserved=1)) != cache.path(request())
    assert cache.load(request()) is None


def test_an_entry_of_the_same_tables_under_another_requests_name_is_not_used(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    plan = make_plan(request())
    cache.store(request(), plan, plan.report)
    other = request().with_constraint("ebc.a", ranks=[1])
    cache.path(request()).rename(cache.path(other))
    with pytest.warns(UserWarning, match="it is for another request"):
        assert cache.load(other) is None


def test_entries_have_the_permissions_that_files_have_there(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    plan = make_plan(request())
    cache.store(request(), plan, plan.report)
    (tmp_path / "usual").write_text("")
    assert cache.path(request()).stat().st_mode == (tmp_path / "usual").stat().st_mode
