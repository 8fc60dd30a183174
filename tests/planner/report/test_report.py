"""The report: its numbers, its text, its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.planner.plan_requests import plan_request
from tilerec.errors import ConfigError
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.make_plan import make_plan
from tilerec.planner.report.plan_report import PlanReport, TableEntry
from tilerec.planner.report.report_text import gap_text, time_text
from tilerec.planner.report.variation import with_changes
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
        "Bottleneck: update, 50 % of the step (1.5 us); then ids 33 %, collectives as such 17 %.",
        "Rank 1 has the most work: 2 us, 21 % above the mean. Ranks wait for the slowest of each stage for 28 % of "
        "the step, longest in 'update' for rank 1, which takes 67 % more than the mean there.",
        "The heaviest tables on rank 1: ebc.user 800 ps, ebc.item 210 ps.",
        "collectives as such         17 %   500 ns  500 ns           all",
        "note: made up",
    ):
        assert word in text
    assert "no bound is known" in str(replace(report(), bound_ps=0))
    many = replace(report(), tables=report().tables[:1] * 30)
    names = ", ".join(["ebc.user"] * 8)
    assert f"… and 10 tables that add less, 1.6 KiB together: {names} … ebc.user (tilerec plan show" in str(many)
    few = replace(report(), tables=report().tables[:1] * 21)
    assert "… and 1 table that adds less, 160 B together: ebc.user" in str(few)
    assert "ebc.user 800 ps; 25 other tables there, 20 ns together" in str(many)


def test_balanced_ranks_are_called_balanced_and_no_rank_is_blamed() -> None:
    even = replace(report(), load_ps=np.array([[1_000_000, 1_000_000], [1_040_000, 1_000_000]]))
    assert even.bottleneck.balanced
    assert not even.bottleneck.waits
    text = str(even)
    assert "The ranks are balanced: none has more than 2.04 us of work, 1.0 % above the mean." in text
    assert "has the most work" not in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(("ids ", "update "))] == [
        "balanced", "balanced",
    ]  # fmt: skip
    assert not report().bottleneck.balanced
    # Balanced in all, and waiting in each stage.
    crossed = replace(report(), load_ps=np.array([[2_000_000, 1_000_000], [1_000_000, 2_000_000]]))
    assert crossed.bottleneck.balanced
    assert crossed.bottleneck.waits
    assert "Ranks wait for the slowest of each stage for 22 % of the step, longest in 'ids' for rank 0" in str(crossed)
    alone = replace(report(), topology=Topology(1), load_ps=np.array([[5, 6]]), memory=np.array([[1, 0]]), tables=())
    assert "The only rank has 11 ps of work." in str(replace(alone, cap=np.array([[10, 0]])))


def test_time_of_no_table_is_named() -> None:
    """Of rank 1's 500 + 1500 ns, its tables take 100 + 700 and 30 * 2 / 6 + 600 * 2 / 6 ps, its batch 40 ps."""
    known = replace(report(), tables=report().tables[:2])
    assert "ebc.item 210 ps; 2 us for no single table (fixed costs, and collectives that" in str(known)
    assert "no single table" not in str(report())  # one is by hand, and its time unknown
    busy = np.array([[0, 0], [110 + 10 + 10, 700 + 200 + 25]])
    assert "no single table" not in str(replace(known, load_ps=busy, cost_ps=2_000))


def test_stages_between_hosts_are_one_bottleneck() -> None:
    made = replace(
        report(),
        stages=("ids", "rows between hosts", "gradients between hosts"),
        load_ps=np.array([[3_000_000, 2_000_000, 2_500_000]] * 2),
        tables=(),
        topology=Topology(2, local_world_size=1),
    )
    assert [(one.name, one.ps, one.stages) for one in made.bottleneck.resources] == [
        ("network between hosts", 4_500_000, (1, 2)), ("ids", 3_000_000, (0,)), ("collectives as such", 500_000, ()),
    ]  # fmt: skip
    assert sum(one.share for one in made.bottleneck.resources) == pytest.approx(1)
    assert (
        "Bottleneck: network between hosts, 56 % of the step (4.5 us): gradients between hosts 2.5 us, rows between "
        "hosts 2 us; then ids 38 %, collectives as such 6.2 %."
    ) in str(made)


def test_speeds_that_were_not_measured_are_announced_with_the_next_move() -> None:
    one = replace(report(), topology=Topology(4, local_world_size=2, inter_host_bw=5 * 2**30 / 1000))
    one = replace(one, load_ps=np.ones((4, 2), np.int64), memory=np.ones((4, 2), np.int64), tables=())
    one = replace(one, cap=np.full((4, 2), 9))
    assert one.speeds_are_default
    text = str(one)
    assert "SPEEDS ARE DEFAULTS, NOT MEASURED: times assume 'default for cuda, from bandwidths; not measured'" in text
    assert "(memory 897 GiB/s, links 600 GiB/s, network 5 GiB/s a rank)" in text
    assert "tilerec calibrate --nproc 2 --device cuda --out topology.json" in text
    speeds = replace(default_speeds(one.topology), origin="measured, 2 cuda ranks, torch 2")
    measured = replace(one, topology=replace(one.topology, speeds=speeds))
    assert not measured.speeds_are_default
    assert "NOT MEASURED" not in str(measured)
    preset = replace(speeds, origin="default for H100")
    assert "times assume 'default for H100'" in str(replace(one, topology=replace(one.topology, speeds=preset)))


def test_a_report_made_by_hand_is_shown_with_what_it_has() -> None:
    """Of a plan by hand: stages and memory are priced as a whole, and nothing bounds them."""
    whole = Tiling.of("t", 10, 4, [(0, 10, 0, 4, 1)])
    made = replace(
        report(), bound_ps=0, tables=(TableEntry("", "t", 10, 4, "fp32", 160, "table_wise", "pinned", whole),)
    )
    text = str(made)
    assert "no bound is known" in text
    assert "Bottleneck: update, 50 % of the step" in text
    assert "The heaviest tables on" not in text


REQUEST = plan_request({"a": 40_000, "b": 300, "c": 90_000}, Topology(4, local_world_size=2), batch_size=1024)


def test_a_plan_is_made_and_shown_without_what_ifs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a what-if was planned")

    monkeypatch.setattr("tilerec.planner.report.plan_report.what_ifs", never)
    made = make_plan(REQUEST).report
    assert "Bottleneck" in str(made)
    assert json.dumps(made.to_json())
    with pytest.raises(AssertionError, match="a what-if was planned"):
        made.what_would_help()


def test_a_report_from_a_file_takes_its_request_and_no_other(tmp_path: Path) -> None:
    made = make_plan(REQUEST).report
    made.save(tmp_path / "r.json")
    back = PlanReport.load(tmp_path / "r.json")
    with pytest.raises(ConfigError, match=r"got a report without its request.*Call report\.with_request"):
        back.what_would_help()
    assert back.with_request(REQUEST).what_would_help() == made.what_would_help()
    for other in (
        with_changes(REQUEST, batch_size=1),
        with_changes(REQUEST, hosts=1),
        with_changes(REQUEST, data_type="bf16"),
    ):
        with pytest.raises(ConfigError, match="got a request with other tables, machines or another batch"):
            back.with_request(other)


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
        ({"notes": [1]}, r"notes\[0\]: got 1; expected a string"),
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


def test_time_on_network_cards_of_their_own_is_the_networks() -> None:
    """Two hosts whose cards are slow: no stage is named after the network, and yet it is the bottleneck."""
    topology = Topology(4, local_world_size=2, inter_host_bw=1e5)
    assert topology.nic == "device"
    report = make_plan(plan_request({f"t{i}": 20_000 for i in range(8)}, topology, batch_size=4096)).report
    assert not any("between hosts" in stage for stage in report.stages)
    largest = report.bottleneck.largest
    assert (largest.name, largest.share > 0.5) == ("network between hosts", True)
    assert sum(one.ps for one in report.bottleneck.resources) == report.cost_ps
    again = PlanReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again.bottleneck == report.bottleneck
