"""The report: its numbers, its text, its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilerec.errors import ConfigError
from tilerec.planner.report import PlanReport, TableEntry
from tilerec.planner.report_text import gap_text, time_text
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


def report() -> PlanReport:
    whole = Tiling.of("user", 10, 4, [(0, 10, 0, 4, 1)])
    by_hand = Tiling.of("by hand", 8, 4, [(0, 8, 0, 4, 1)])
    cut = Tiling.of("item", 8, 4, [(0, 6, 0, 4, 0), (6, 8, 0, 4, 1)])
    return PlanReport(
        cost_ps=3_000_000,
        bound_ps=2_400_000,
        stages=("ids", "update"),
        load_ps=np.array([[1_000_000, 300_000], [500_000, 1_500_000]]),
        charge_ps=500_000,
        memory=np.array([[100, 0], [300, 0]]),
        cap=np.array([[1000, 0], [1000, 0]]),
        tables=(
            TableEntry("ebc", "user", 10, 4, "fp32", 160, "table_wise", "whole", whole, (100, 700), (10, 20)),
            TableEntry("ebc", "item", 8, 4, "fp32", 128, "row_wise", "rows x 2", cut, (30, 600), (5, 5)),
            TableEntry("", "by hand", 8, 4, "bf16", 64, "table_wise", "pinned", by_hand),
        ),
        topology=Topology(2),
        batch_size=64,
        planner="tilerec planner 1",
        notes=("made up",),
    )


def test_figures_are_those_of_the_slowest_and_the_fullest() -> None:
    one = report()
    assert (one.cost_s, one.bound_s) == (3e-6, 2.4e-6)
    assert one.gap == 0.25
    assert one.stage_s == {"ids": 1e-6, "update": 1.5e-6}
    assert one.memory_per_rank == [100, 300]
    assert (one.slowest_rank, one.fullest_rank) == (1, 1)
    assert replace(one, cost_ps=0, bound_ps=0).gap == 0
    assert replace(one, bound_ps=0).gap == float("inf")


def test_memory_of_a_cpu_rank_is_the_hosts() -> None:
    cpu = replace(report(), topology=Topology(2, "cpu"), memory=np.array([[0, 5], [0, 7]]))
    assert cpu.memory_per_rank == [5, 7]


def test_tables_weigh_on_a_rank_in_proportion_to_what_lies_there() -> None:
    (user, first), (item, second) = report().weighs_most(1)
    assert (user.name, first) == ("user", 800 / 1e12)
    assert (item.name, second) == ("item", (630 * 8 // 24) / 1e12)
    assert [entry.name for entry, _ in report().weighs_most(0)] == ["item"]
    assert report().weighs_most(1, 1)[0][0].name == "user"
    assert report().tables[0].seconds == (110 / 1e12, 720 / 1e12)


def test_tiles_are_rectangles_with_their_ranks() -> None:
    assert [tuple(tile) for tile in report().tables[1].tiles] == [(0, 6, 0, 4, (0,)), (6, 8, 0, 4, (1,))]
    assert report().tables[1].ranks == (0, 1)


def test_the_text_says_what_counts() -> None:
    text = str(report())
    for word in (
        "3 tables on 2 cuda ranks of 1 host, 64 samples each: 3 us a step; no plan takes less than 2.4 us (gap 25.0 %)",
        "rank 1 has the most to do: 2 us. What weighs most there: ebc.user 800 ps",
        "collectives as such   500 ns",
        "note: made up",
    ):
        assert word in text
    assert "no bound is known" in str(replace(report(), bound_ps=0))
    many = replace(report(), tables=report().tables[:1] * 30)
    assert "… and 10 tables that add less" in str(many)


def test_a_report_is_read_back_from_its_file(tmp_path: Path) -> None:
    report().save(tmp_path / "r.json")
    back = PlanReport.load(tmp_path / "r.json")
    assert back.to_json() == report().to_json()
    assert back.tables == report().tables
    assert str(back) == str(report())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: got 2; expected 1, the version that this release reads"),
        ({"tables": [["ebc", "user"]]}, r"tables\[0\]: got .*; expected 11 values: .* Plan again"),
        (
            {"load_ps": [[1, 2]]},
            r"load_ps: got a list of 1; expected 2 lists \(one for each rank\) of 2 whole numbers",
        ),
        ({"columns": ["name"]}, "columns: got"),
        ({"cost_ps": "much"}, 'cost_ps: got "much"; expected a whole number from 0'),
        ({"load_ps": [[1, True], [1, 2]]}, "load_ps: .*and not true among them"),
        ({"notes": [1]}, r"notes\[0\]: got 1; expected a text"),
        ({"batch_size": 10.5}, "batch_size: got 10.5"),
    ],
)
def test_what_is_no_report_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"PlanReport JSON: {message}"):
        PlanReport.from_json({**report().to_json(), **change})


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(report().to_json())[:200])
    with pytest.raises(ConfigError, match=r"PlanReport: .*r\.json is not JSON"):
        PlanReport.load(path)
    with pytest.raises(ConfigError, match=r"got unknown .plan.; expected"):
        PlanReport.from_json({"plan": {}})


def test_times_and_gaps_as_text() -> None:
    assert [time_text(ps) for ps in (0, 999, 1000, 1_234_000, 123_456_000_000, 2 * 10**12)] == [
        "0", "999 ps", "1 ns", "1.23 us", "123 ms", "2 s",
    ]  # fmt: skip
    assert [gap_text(gap) for gap in (0.0, 0.0213, float("inf"))] == ["0.0 %", "2.1 %", "unknown"]


def test_the_fullest_rank_is_the_one_with_least_room_for_its_size() -> None:
    differ = replace(report(), cap=np.array([[110, 0], [1000, 0]]))
    assert differ.fullest_rank == 0
    assert "90 %" in str(differ)


def test_a_report_knows_its_plan() -> None:
    one = report()
    parts: dict[str, EmbeddingModuleShardingPlan] = {}
    for entry in one.tables:
        sharding = ParameterSharding("explicit", tiling=entry.tiling)
        parts.setdefault(entry.path, EmbeddingModuleShardingPlan())[entry.name] = sharding
    plan = ShardingPlan(parts, 2)
    assert one.is_of(plan)
    assert not one.is_of(replace(plan, world_size=3))
    moved = ParameterSharding("explicit", tiling=Tiling.of("user", 10, 4, [(0, 10, 0, 4, 0)]))
    assert not one.is_of(plan.replaced("ebc", "user", moved))
    assert not one.is_of(ShardingPlan({"ebc": parts["ebc"]}, 2))
