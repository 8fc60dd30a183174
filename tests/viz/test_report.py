"""The page as text: what is in it, and that nothing in it can break it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.planner.plan_requests import plan_request
from tests.viz.reports import STAGES, entry, large, plan_of, report, small
from tilerec.errors import ConfigError
from tilerec.planner.make_plan import make_plan
from tilerec.planner.report.explanation import explain
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.what_if import WhatIf
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.topology import Topology
from tilerec.viz.report import report_html, write_report


class Page(HTMLParser):
    """Tags with their attributes, text by id, and the page's JSON."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.inside.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.inside.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for _, name in self.inside:
            if name is not None:
                self.texts[name] = self.texts.get(name, "") + data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.texts["data"])


def test_the_page_is_well_formed_and_says_the_main_figures() -> None:
    made = small()
    page = Page(report_html(plan_of(made), made))
    assert not page.inside
    assert (page.texts["cost"], page.texts["bound"], page.texts["gap"]) == ("6.98 ms", "6.84 ms", "2.0 %")
    assert page.texts["most-loaded"] == "rank 5" == f"rank {made.slowest_rank}"
    assert sum(tag == "title" for tag, _ in page.tags) == 1


def test_nothing_is_fetched() -> None:
    made = small()
    page = Page(report_html(None, made))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "action", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_numbers_are_the_reports() -> None:
    made = small()
    data = Page(report_html(plan_of(made), made)).data
    assert np.array_equal(np.reshape(data["load"], made.load_ps.shape), made.load_ps)
    assert np.array_equal(np.reshape(data["memory"], made.memory.shape), made.memory)
    assert np.array_equal(np.reshape(data["cap"], made.cap.shape), made.cap)
    assert data["stages"] == list(STAGES)
    assert data["hosts"] == ["0-3", "4-7"]
    for t, one in enumerate(made.tables):
        assert data["names"][t] == one.name
        assert data["paths"][data["path"][t]] == one.path
        assert data["tilings"][data["tiling"][t]] == one.tiling.to_json()
        assert (data["rows"][t], data["dims"][t], data["bytes"][t]) == (one.rows, one.dim, one.bytes)
        assert (tuple(data["own"][t]), tuple(data["home"][t])) == (one.owner_ps, one.home_ps)
        assert data["words"][data["kind"][t]] == one.sharding_type
    assert data["notes"] == ["a note"]


def test_what_only_the_plan_says_is_beside_the_table() -> None:
    made = small()
    plan = plan_of(made)
    wired = ParameterSharding("explicit", tiling=made.tables[0].tiling, wire=Wire(forward="bf16", backward="fp16"))
    page = Page(report_html(plan.replaced("ebc", "user", wired), made))
    assert page.data["about"][:2] == ["rows are sent as bf16, gradients as fp16", "kernel fused"]


@pytest.mark.parametrize(
    "name",
    [
        "</script><script>alert(1)</script>",
        "<!-- <script>",
        "]]>",
        "\"' & $style ${x}",
        "\u2028\u202e\0\ud800",
        "a" * 10_000,
        "",
    ],
)
def test_hostile_names_stay_names(name: str) -> None:
    topology = Topology(2)
    made = report([entry(name, 10, 8, "table_wise", [1], topology, path=name)], topology, notes=(name,))
    calm = report([entry("calm", 10, 8, "table_wise", [1], topology, path="calm")], topology)
    made = replace(made, planner=name.replace("\ud800", ""))
    page = Page(report_html(None, made))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in Page(report_html(None, calm)).tags]
    assert page.data["names"] == [name]
    assert page.data["notes"] == [name]
    assert not page.inside


def test_the_same_report_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = (
        "import hashlib; from tests.viz.reports import *; from tilerec.viz.report import report_html; m = small();"
        "print(hashlib.sha256(report_html(plan_of(m), m).encode()).hexdigest())"
    )
    about = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True, env=about).stdout.strip()
    made = small()
    assert hashlib.sha256(report_html(plan_of(made), made).encode()).hexdigest() == other


def test_a_report_read_back_gives_the_same_page() -> None:
    made = small()
    again = PlanReport.from_json(json.loads(json.dumps(made.to_json())))
    assert report_html(None, again) == report_html(None, made)


def test_many_tables_make_a_small_file() -> None:
    made = large(2_000, 1_024, 8)
    size = len(report_html(None, made).encode())
    assert size < 2_000 * 600 + 1_024 * 200 + 80_000


def test_a_report_without_tables_bound_or_costs() -> None:
    topology = Topology(3, "cpu")
    none = report([], topology)
    page = Page(report_html(None, replace(none, bound_ps=0)))
    assert (page.texts["bound"], page.texts["gap"]) == ("no bound", "unknown")
    one = replace(entry("t", 5, 3, "row_wise", None, topology), owner_ps=(), home_ps=())
    assert Page(report_html(None, replace(none, tables=(one,)))).data["own"] == [[]]


def test_a_plan_of_other_tables_is_refused() -> None:
    made = small()
    fewer = replace(made, tables=made.tables[1:])
    with pytest.raises(ConfigError, match="Table 'user' of module 'ebc' is not in the report"):
        report_html(plan_of(made), fewer)
    with pytest.raises(ConfigError, match="Table 'user' of module 'ebc' is not in the plan"):
        report_html(plan_of(fewer), made)


def test_the_file_is_written_or_the_path_is_named(tmp_path: Path) -> None:
    made = small()
    write_report(plan_of(made), made, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == report_html(plan_of(made), made)
    with pytest.raises(ConfigError, match=r"none/r\.html cannot be written: got .No such file"):
        write_report(None, made, tmp_path / "none" / "r.html")


def planned(tables: int) -> PlanReport:
    """The report of a plan that a planner made."""
    return make_plan(plan_request({f"t{i:03d}": 500 + 37 * i for i in range(tables)}, Topology(2))).report


def test_the_page_explains_as_many_tables_as_it_is_said_and_names_the_command_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tilerec.viz.report.EXPLAINED", 5)
    made = planned(9)
    data = Page(report_html(None, made, what_ifs=False)).data
    heaviest = sorted(made.tables, key=lambda e: (-sum(e.owner_ps) - sum(e.home_ps), e.name))[:5]
    assert {made.tables[int(t)].name for t in data["why"]} == {entry.name for entry in heaviest}
    assert data["why_not"] == "This page explains the 5 tables that add most; of this one: tilerec plan explain"
    for t, (_, _, ways, *_) in data["why"].items():
        found = explain(made.request, made.tables[int(t)].name)  # type: ignore[arg-type]
        assert [way[6] for way in ways] == [way.step_ps for way in found.considered]
        assert [data["words"][way[0]] for way in ways] == [way.option for way in found.considered]


def test_what_ifs_and_explanations_need_the_plans_request() -> None:
    made = planned(2)
    with_them = Page(report_html(None, made))
    assert "helps" in with_them.texts
    assert made.what_would_help()[0].change in with_them.texts["helps"]
    without = Page(report_html(None, made, what_ifs=False))
    assert "helps" not in without.texts
    assert len(without.data["why"]) == 2
    bare = Page(report_html(None, replace(made, request=None)))
    assert "helps" not in bare.texts
    assert bare.data["why"] == {}
    assert "without the plan's request" in bare.data["why_not"]
    older = replace(made, cost_ps=made.cost_ps + 1)
    assert "made by another release" in Page(report_html(None, older, what_ifs=False)).data["why_not"]


def test_explanations_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fixed number of tables, about 500 bytes each, however many tables there are."""
    monkeypatch.setattr("tilerec.viz.report.EXPLAINED", 20)
    sizes = []
    for tables in (10, 60):
        data = Page(report_html(None, planned(tables), what_ifs=False)).data
        assert len(data["why"]) == min(20, tables)
        sizes.append(len(json.dumps(data["why"], separators=(",", ":"))))
    assert sizes[0] < sizes[1] < 20 * 1_000


def test_a_change_is_shown_as_text_whatever_is_in_it() -> None:
    made = planned(1)
    vars(made)["_what_ifs"] = (WhatIf("<b>&", "<i>", None, 0.0, trouble="<script>"),)
    page = Page(report_html(None, made))
    assert page.texts["helps"].endswith("<b>&<script>–<i>")
