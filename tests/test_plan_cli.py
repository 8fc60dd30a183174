"""`tilerec plan`: made, shown, explained, compared, varied; and what is wrong in one line."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.file_kind import PLAN, PLAN_PAGE, PLAN_REPORT, PLAN_REQUEST
from tilerec.planner.plan_price import price_plan
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.time_text import time_text
from tilerec.planner.report.variation import with_changes
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.tile import ColumnBlock, Tiling
from tilerec.spec.topology import Topology

TABLES: list[dict[str, Any]] = [
    {"name": "user", "num_embeddings": 2_000_000, "embedding_dim": 64, "optimizer": "RowWiseAdagrad"},
    {
        "name": "item",
        "num_embeddings": 50_000,
        "embedding_dim": 32,
        "constraints": {"sharding_types": ["row_wise"]},
    },
    {"name": "ad", "num_embeddings": 100, "embedding_dim": 16, "feature_names": ["a", "b"]},
]
QUICK = "--no-what-ifs"
WORLD = ("--ranks-per-host", "4", QUICK)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.json").write_text(json.dumps(TABLES))
    return tmp_path


@pytest.fixture
def planned(here: Path) -> Path:
    code, text = run("tables.json", *WORLD)
    assert code == 0, text
    return here


def test_a_plan_of_a_list_of_tables_is_made_written_and_shown(planned: Path) -> None:
    plan = ShardingPlan.load("plan.json")
    assert list(plan.plan[""]) == ["user", "item", "ad"]
    assert plan.world_size == 4
    assert plan.plan[""]["item"].kind.value == "row_wise"
    report = PlanReport.load("plan.report.json")
    code, text = run("show", QUICK)
    assert code == 0
    assert text.strip() == str(report)
    code, text = run("show", "plan.json", "--tables", QUICK)
    assert text.startswith("plan for 4 ranks on 1 host")
    assert str(report) in text


def test_a_full_disk_keeps_the_earlier_plan_and_the_new_one_is_shown(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_text() for path in planned.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tilerec.atomic_file.os.fsync", full)
    code, text = run("make", "tables.json", "--ranks-per-host", "2", QUICK, "--html", "r.html")
    assert code == 1
    assert "on 2 cuda ranks" in text
    assert "error: ShardingPlan: plan.json cannot be written: got 'No space left on device'" in text
    assert text.index("on 2 cuda ranks") < text.index("error:")
    assert {path.name: path.read_text() for path in planned.iterdir()} == before
    code, text = run("show", QUICK, "--html", "r.html")
    assert code == 1
    assert text.startswith(str(PlanReport.load("plan.report.json")))
    assert "error: Report page: r.html cannot be written" in text


def test_the_same_source_gives_the_same_files(planned: Path) -> None:
    before = {path.name: path.read_text() for path in planned.iterdir()}
    assert run("make", "tables.json", *WORLD)[0] == 0
    assert {path.name: path.read_text() for path in planned.iterdir()} == before


def test_a_recipes_model_is_planned_with_its_optimizer_and_batch(here: Path) -> None:
    code, text = run("synthetic", "--hosts", 2, "--ranks-per-host", 2, "--device", "cpu", QUICK, "--html", "r.html")
    assert code == 0
    assert "on 4 cpu ranks of 2 hosts, 512 samples each" in text
    assert "; wrote plan.json and r.html" in text
    assert {s.kernel.value for _, _, s in ShardingPlan.load("plan.json").tables() if s.kernel} == {"fused"}
    page = (here / "r.html").read_text()
    assert page.startswith("<!")
    assert run("show", QUICK, "--html", "again.html")[0] == 0
    kinds = {"plan.json": PLAN, "plan.report.json": PLAN_REPORT, "plan.request.json": PLAN_REQUEST, "r.html": PLAN_PAGE}
    assert [name for name, kind in kinds.items() if not kind.has(name)] == []
    assert (here / "again.html").read_text() == page


def test_a_table_is_explained(planned: Path) -> None:
    code, text = run("explain", "user")
    assert code == 0
    assert text.startswith("Table 'user': ")
    assert "chosen" in text
    code, text = run("explain", "item", "--plan", "plan.json")
    assert "ruled out: its sharding_types are row_wise" in text
    code, text = run("explain", "nobody")
    assert code == 1
    assert "error: There is no table 'nobody'; there are ['user', 'item', 'ad']" in text


def test_plans_are_compared(planned: Path) -> None:
    assert run("tables.json", "--ranks-per-host", 2, "--hosts", 2, QUICK, "--out", "b.json")[0] == 0
    code, text = run("diff", "plan.json", "b.json")
    assert code == 0
    assert "1 x 4 cuda" in text
    assert "2 x 2 cuda" in text
    assert "of 3 tables differ" in text or "the same: 3 tables" in text
    code, text = run("diff", "plan.json", "plan.json")
    assert "the same: 3 tables have the same placement in both plans" in text


def test_what_would_be_is_told_beside_what_is(planned: Path) -> None:
    arguments = ("--hosts", 2, "--hbm", "80GB", "--batch-size", 8192, "--dtype", "bf16", "--out", "then.json")
    code, text = run("whatif", *arguments)
    assert code == 0
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert rows["samples per rank"] == ["512", "8,192"]
    assert "74.5" in rows["its capacity"]
    assert ShardingPlan.load("then.json").world_size == 8
    assert PlanReport.load("then.report.json").tables[0].data_type == "bf16"
    assert ShardingPlan.load("plan.json").world_size == 4
    code, text = run("whatif", "--hbm", "20MiB")
    assert code == 1
    assert "error: No plan exists for 3 tables" in text
    assert "Remedies, each with a plan" in text


def test_statistics_fixed_parts_and_types_are_taken(planned: Path, tmp_path: Path) -> None:
    one = {
        "samples": 10, "ids": 70, "empty": 0, "longest": 9, "distinct": 5, "distinct_error": 0.0, "population": 5,
        "exponent": 1.1, "distance": 0.0, "ordered": False, "heavy": [], "heavy_error": 0,
    }  # fmt: skip
    stats = {
        "version": 1,
        "source": "made up",
        "rows": 10,
        "skipped": 0,
        "table_rows": True,
        "features": {"user": one},
    }
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    code, text = run(
        "tables.json", *WORLD, "--stats", "stats.json", "--dtype", "bf16", "--optimizer", "SGD", "--cache", "kept",
        "--reserve", 0, "--batch-size", 64, "--out", "c.json",
    )  # fmt: skip
    assert code == 0, text
    request = json.loads((tmp_path / "c.request.json").read_text())
    assert request["tables"][0]["constraints"] == {
        "pooling_factors": [7.0], "skew": {"distinct": 5, "exponent": 1.1, "ordered": False},
    }  # fmt: skip
    assert [table["optimizer"]["optimizer"] for table in request["tables"]] == [
        "RowWiseAdagrad",
        "SGD",
        "SGD",
    ]
    assert len(list((tmp_path / "kept").iterdir())) == 1
    code, text = run("tables.json", *WORLD, "--fixed", "plan.json", "--out", "d.json")
    assert code == 1
    assert "Table 'item': it is in fixed=, and" in text


def test_a_topology_file_says_the_machines(planned: Path) -> None:
    assert run("tables.json", *WORLD)[0] == 0
    topology = json.loads(Path("plan.request.json").read_text())["topology"]
    Path("topology.json").write_text(json.dumps({**topology, "hbm_cap": 2**34}))
    assert run("tables.json", "--topology", "topology.json", QUICK, "--out", "e.json")[0] == 0
    assert PlanReport.load("e.report.json").topology.hbm_cap == 2**34
    assert run("tables.json", "--topology", "topology.json", "--hosts", 3, QUICK, "--out", "e.json")[0] == 0
    assert ShardingPlan.load("e.json").world_size == 12
    code, text = run("tables.json", "--topology", "topology.json", "--device", "cpu")
    assert code == 1
    assert "error: --device: got cpu with topology.json; expected cuda" in text


def test_machines_are_known_by_name(here: Path) -> None:
    code, text = run("tables.json", "--machine", "h100", "--hosts", "2", "--hbm", "60GB")
    assert code == 0, text
    assert ShardingPlan.load("plan.json").world_size == 16
    topology = PlanRequest.load("plan.request.json").topology
    assert topology == Topology.preset("h100", hosts=2, hbm_cap=60 * 10**9)


def test_a_list_of_tables_is_read_from_yaml(here: Path) -> None:
    (here / "t.yaml").write_text("- {name: user, num_embeddings: 10, embedding_dim: 4}\n")
    assert run("t.yaml", *WORLD)[0] == 0
    assert list(ShardingPlan.load("plan.json").plan[""]) == ["user"]


def test_without_the_package_yaml_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "t.yaml").write_text("- {name: user, num_embeddings: 10, embedding_dim: 4}\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, text = run("t.yaml", *WORLD)
    assert code == 1
    assert "got YAML without the package pyyaml; expected JSON, or pyyaml. Install tilerec[yaml], or write JSON" in text


def test_a_key_twice_in_a_yaml_mapping_is_refused(here: Path) -> None:
    (here / "t.yaml").write_text("- {name: user, num_embeddings: 10, embedding_dim: 4, num_embeddings: 20}\n")
    code, text = run("t.yaml", *WORLD)
    assert code == 1
    assert "got the key 'num_embeddings' twice in one mapping; expected it once" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("tables.json",),
            "Machines: got none of --machine, --ranks-per-host and --topology; expected one. Give --machine h100",
        ),
        (("tables.json", "--machine", "h10"), "got machine 'h10'; expected one of a100, h100, h200, b200"),
        (
            ("tables.json", "--machine", "h100", "--device", "cpu"),
            "--machine: got h100 and --device cpu; expected one of them",
        ),
        (
            ("tables.json", "--machine", "h100", "--topology", "t.json"),
            "--machine: got h100 and --topology t.json; expected one of them",
        ),
        (("nothing.json", *WORLD), "nothing.json cannot be read"),
        (("half.json", *WORLD), "half.json is not JSON"),
        (("object.json", *WORLD), 'got an object without "tables"'),
        (("syntetic", *WORLD), "There is no recipe 'syntetic'. Did you mean 'synthetic'?"),
        (
            ("synthetic", *WORLD, "--optimizer", "SGD"),
            "--optimizer: got SGD with a recipe; expected it only with a list of tables",
        ),
        (
            ("tables.json", *WORLD, "--hbm", "80 apples"),
            "--hbm: got '80 apples'; expected a number of bytes. Write 80GB",
        ),
        (("tables.json", *WORLD, "--dtype", "fp4"), "data type 'fp4' is none of"),
        (
            ("tables.json", *WORLD, "--out", "no/where.json"),
            "expected a file in an existing folder. Create no first",
        ),
        (("tables.json", *WORLD, "--reserve", "2"), "percentage is 2.0; it is a part of the memory"),
        (("show", "nothing.json"), "nothing.json cannot be read"),
        (("show", "half.json"), "half.json is not JSON"),
        (
            ("explain", "user"),
            "plan.request.json: got no such file; expected the request that plan.json was made from",
        ),
        (("whatif", "--hosts", "2"), "plan.request.json: got no such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(here: Path, arguments: tuple[str, ...], message: str) -> None:
    (here / "half.json").write_text('[{"name": "us')
    (here / "object.json").write_text("{}")
    code, text = run(*arguments)
    assert code == 1
    assert text.startswith("error: ")
    assert message in text


def test_a_plan_file_of_a_newer_version_or_without_a_report_says_so(planned: Path) -> None:
    data = json.loads(Path("plan.json").read_text())
    Path("new.json").write_text(json.dumps({**data, "version": 2}))
    code, text = run("show", "new.json")
    assert code == 1
    assert "got 2; expected 1, the version that this release reads. Plan again" in text
    os.rename("plan.report.json", "away.json")
    code, text = run("show")
    assert code == 0
    assert "no report: plan.report.json does not exist" in text
    code, text = run("show", "--html", "x.html")
    assert code == 1
    assert "plan.report.json: got no such file; expected the report of plan.json, which --html draws" in text


def test_a_plan_made_by_hand_is_shown_with_its_price(planned: Path) -> None:
    """By the request beside it, or by that of other machines; a plan that does not fit shows by how much."""
    plan, request = ShardingPlan.load("plan.json"), PlanRequest.load("plan.request.json")
    for modules in plan.plan.values():
        for name, sharding in modules.items():
            assert sharding.tiling is not None
            rows, dim = sharding.tiling.rows, sharding.tiling.dim
            modules[name] = ParameterSharding(
                "table_wise", ranks=[0], tiling=Tiling(rows, dim, (ColumnBlock(0, dim, (0, rows), ((0,),)),))
            )
    plan.save("plan.json")
    price = price_plan(request, plan)
    code, text = run("show")
    assert code == 0
    assert f"{time_text(price.cost_ps)} a step, as predicted" in text
    assert "DOES NOT FIT" not in text
    small = (
        with_changes(request, ddr_cap=1000)
        if request.topology.compute_device == "cpu"
        else with_changes(request, hbm_cap=1000)
    )
    Path("small.json").write_text(json.dumps(small.to_json()))
    code, text = run("show", "--request", "small.json")
    assert code == 0
    assert "ranks are over their memory, by up to" in text


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("80GB", 80 * 10**9), ("1.5GiB", 3 * 2**29), ("12", 12), ("7 kb", 7000), ("1TiB", 2**40)],
)
def test_bytes_have_units(here: Path, text: str, bytes_: int) -> None:
    small = [{"name": "t", "num_embeddings": 1, "embedding_dim": 1}]
    (here / "tables.json").write_text(json.dumps({"tables": small, "batch_size": 1}))
    run("tables.json", *WORLD, "--ddr", text, "--out", "b.json")
    assert PlanReport.load("b.report.json").topology.ddr_cap == bytes_


def test_a_plan_that_was_edited_is_not_shown_with_another_plans_figures(planned: Path) -> None:
    run("tables.json", *WORLD, "--batch-size", "64", "--out", "other.json")
    text = Path("plan.json").read_text()
    moved = json.loads(text)
    moved["plan"][""]["ad"] = {
        "sharding_type": "table_wise",
        "rows": 100,
        "dim": 16,
        "ranks": "3",
        "tiling": [{"ranks": "3"}],
    }
    moved["plan"][""]["user"] = {
        **moved["plan"][""]["user"],
        "ranks": "3",
        "tiling": [{"ranks": "3"}],
        "sharding_type": "table_wise",
    }
    Path("plan.json").write_text(json.dumps(moved))
    code, shown = run("show", QUICK)
    assert code == 0
    assert "plan.report.json: got the report of another plan" in shown
    assert "no plan takes less" not in shown
    code, why = run("explain", "user")
    assert code == 0
    assert "plan.json: got another placement of 'user' than its request gives" in why
    code, found = run("diff", "plan.json", "other.json")
    assert code == 0
    assert "no reports are compared" in found
    code, text = run("show", "--html", "r.html")
    assert code == 1
    assert (
        "plan.report.json: got the report of another plan; expected the report of plan.json, which --html draws" in text
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tables.json", *WORLD, "--out", "folder"), "--out: got the folder folder; expected a file"),
        (
            ("tables.json", *WORLD, "--html", "no/x.html"),
            "--html: got no/x.html; expected a file in an existing folder",
        ),
        (("tables.json", *WORLD, "--html", "folder"), "--html: got the folder folder; expected a file"),
        (("show", "--html", "no/x.html"), "expected a file in an existing folder. Create no first"),
        (("whatif", "--out", "folder"), "--out: got the folder folder; expected a file"),
        (("tables.json", "--topology", "tables.json"), "got a list of 3; expected an object with"),
        (("tables.json", *WORLD, "--fixed", "none.json"), "the plan in fixed= cannot be read"),
        (("tables.json", *WORLD, "--device", "tpu"), "got compute_device='tpu'"),
    ],
)
def test_wrong_paths_are_refused_before_any_work(planned: Path, arguments: tuple[str, ...], message: str) -> None:
    (planned / "folder").mkdir()
    before = {path.name for path in planned.iterdir()}
    code, text = run(*arguments)
    assert code == 1
    assert message in text
    assert {path.name for path in planned.iterdir()} == before


def test_machines_that_differ_in_memory_come_in_by_a_file(here: Path) -> None:
    caps = [200 * 2**20, 900 * 2**20]
    (here / "machines.json").write_text(json.dumps({"world_size": 2, "compute_device": "cuda", "hbm_caps": caps}))
    code, text = run("tables.json", "--topology", "machines.json", QUICK)
    assert code == 0, text
    report = PlanReport.load("plan.report.json")
    assert report.cap[:, 0].tolist() == caps
    assert report.memory[0, 0] <= caps[0] < report.memory[1, 0]
    assert run("whatif", "--hbm", "1GB")[0] == 0
    assert run("tables.json", "--topology", "machines.json", QUICK, "--hbm", "1GB")[0] == 0


def test_what_would_help_is_shown_by_plan_and_show_unless_it_is_left_out(here: Path) -> None:
    (here / "tables.json").write_text(json.dumps(TABLES[:1]))
    code, made = run("tables.json", "--ranks-per-host", "2", "--html", "r.html")
    assert code == 0
    assert "what would help" in made
    (line,) = [line for line in made.splitlines() if line.startswith("twice the batch")]
    # The same as the command that it names.
    step = re.split(r" {2,}", line)[1]
    code, text = run("whatif", "--batch-size", 1024)
    rows = {row[:20].strip(): row[20:] for row in text.splitlines()}
    assert rows["step"].split()[-2:] == step.split()
    code, shown = run("show", "--html", "again.html")
    assert shown.strip() == made[: made.index("\nplanned in")].strip()
    assert (here / "again.html").read_text() == (here / "r.html").read_text()
    assert "what would help" not in run("show", QUICK)[1]
    os.rename("plan.request.json", "away.json")
    code, text = run("show")
    assert code == 0
    assert "what would help" not in text


def test_the_request_of_another_plan_beside_a_plan_is_not_used(planned: Path) -> None:
    run("tables.json", *WORLD, "--batch-size", "64", "--out", "other.json")
    os.replace("other.request.json", "plan.request.json")
    code, text = run("show")
    assert code == 0
    assert "plan.request.json: got a request that cannot be used; reasons and suggestions are missing" in text
    assert "what would help   " not in text


def test_a_what_if_has_the_memory_of_a_plan_made_afresh(planned: Path) -> None:
    """Two batches of input are reserved: of the new batch, with --reserve 0, too."""
    for more in ((), ("--reserve", "0")):
        assert run("synthetic", "--ranks-per-host", 2, QUICK, "--batch-size", 64, *more)[0] == 0
        assert run("whatif", "--batch-size", 4096, "--wire", "bf16", "--out", "then.json")[0] == 0
        fresh = ("--batch-size", 4096, "--wire", "bf16", *more, "--out", "fresh.json")
        assert run("synthetic", "--ranks-per-host", 2, QUICK, *fresh)[0] == 0
        for what in ("json", "report.json", "request.json"):
            assert Path(f"then.{what}").read_text() == Path(f"fresh.{what}").read_text()
