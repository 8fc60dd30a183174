"""The planner keeps its word on a few random instances; `benchmarks/planner_check.py` runs hundreds.

The checks themselves are tested first: against sums worked out by hand, and on plans that are wrong.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.tables import PlannedTable
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.speeds import PER_WIDTH, SINGLE, WIDTHS, Speeds
from tilerec.spec.table import DataType
from tilerec.spec.tile import ColumnBlock, Tile, Tiling
from tilerec.spec.topology import Topology

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

if not BENCHMARKS.exists():
    pytest.skip("benchmarks are part of the repository, not of the wheel", allow_module_level=True)


def _benchmark(name: str) -> Any:
    """A file of benchmarks/, which finds its neighbours by their names."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


checks, cases, prices = (_benchmark(name) for name in ("planner_check", "planner_check_cases", "planner_check_price"))
arrangements, planned = _benchmark("planner_check_arrangements"), _benchmark("planner_check_planned")

LARGE = 8  # tables x ranks of a case that takes too long here


def _small_case(kind: str) -> Any:
    """The first case of a kind that is planned in a moment."""
    return next(case for seed in range(100) if (case := cases.case_of(kind, seed)).size <= LARGE)


_NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="half a minute: nightly")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[_NIGHTLY] if i % 3 else []) for i, kind in enumerate(cases.KINDS)]
)
def test_the_planner_keeps_its_word(kind: str) -> None:
    result = checks.check(_small_case(kind))
    assert [(v.check, v.text, v.case.once) for v in result.violations] == []
    assert result.outcome in ("planned", "no plan")


# ---------------------------------------------------------------------------------------------- the own price, by hand


def _speeds(*, duplex: bool = False, **given: float) -> Speeds:
    """Nothing takes time but what is given."""
    return Speeds(
        **{name: [given.get(name, 0.0)] * len(WIDTHS) for name in PER_WIDTH},
        **{name: given.get(name, 0.0) for name in SINGLE},
        cache=0,
        duplex=duplex,
    )


def _price(tiling: Tiling, topology: Topology) -> Any:
    """The own price of one table of 1,000 rows and 64 columns that each rank reads with 10 bags of one id."""
    table = PlannedTable((("", "t"),), 1000, 64, DataType.FP32, ("f",), SGD())
    pricing = prices.Pricing([prices.table_of(table, None, 10)], prices.World(topology))
    return pricing.price({"t": prices.Placement(tiling)})


def _whole(rank: int) -> Tiling:
    return Tiling(1000, 64, (ColumnBlock(0, 64, (0, 1000), ((rank,),)),))


def test_links_carry_ids_one_way_and_rows_the_other() -> None:
    topology = Topology(2, "cpu", speeds=_speeds(link_in=1.0, link_out=100.0))
    found = _price(_whole(0), topology).stages
    # Rank 1 sends 4 + 8 bytes of header and 10 ids of 4 bytes; rank 0 sends 4 bytes of header and 10 rows of 256.
    assert found["ids"].tolist() == [100 * 4 + 12 + 40, 100 * (12 + 40) + 4]
    assert found["rows"].tolist() == [100 * 2560, 2560]
    assert found["gradients"].tolist() == [2560, 100 * 2560]


def test_full_duplex_links_take_the_slower_direction_of_each_exchange() -> None:
    topology = Topology(2, "cpu", speeds=_speeds(duplex=True, link_in=1.0, link_out=100.0))
    # Header: max(400, 12) and max(1200, 4); ids: max(0, 40) and max(4000, 0).
    assert _price(_whole(0), topology).stages["ids"].tolist() == [400 + 40, 1200 + 4000]


def test_a_shared_network_card_takes_the_mean_of_its_hosts_ranks() -> None:
    speeds = _speeds(network_in=1.0, network_out=1.0)
    apart = _price(_whole(0), Topology(4, "cpu", local_world_size=2, speeds=speeds, nic="device")).stages
    assert apart["rows"].tolist() == [2 * 2560, 0, 2560, 2560]
    together = _price(_whole(0), Topology(4, "cpu", local_world_size=2, speeds=speeds, nic="host")).stages
    assert together["rows"].tolist() == [0, 0, 0, 0]
    assert together["rows between hosts"].tolist() == [2560, 2560, 2560, 2560]


def test_bytes_of_a_whole_table() -> None:
    found = _price(_whole(1), Topology(2, "cuda", speeds=_speeds())).memory
    output, rows = 2 * 10 * 64 * 4, 10 * 64 * 4  # output and its gradient; the rows that come home
    sent = 2 * 10 * 4  # ids of this batch and the next
    owned = 1000 * 64 * 4 + 2 * (2 * 10 * 4 + 10 * 64 * 4 + 10 * 16)  # for two homes: ids, rows, sort keys
    assert found.tolist() == [[output + rows + sent, 0], [output + rows + sent + owned, 0]]


def test_only_one_copy_of_a_table_is_read_by_each_rank() -> None:
    copies = Tiling(1000, 64, (ColumnBlock(0, 64, (0, 1000), ((0, 1),)),))
    found = _price(copies, Topology(2, "cpu", speeds=_speeds(lookup_near=1.0, lookup_far=1.0, call=1.0)))
    assert found.stages["lookup"].tolist() == [10.0, 10.0]
    # The header; counts, rows and their gradients of the copies.
    assert found.calls == 4.0


def test_a_chance_of_rare_ids_keeps_its_digits() -> None:
    assert prices._hit(1e-15, 1000.0) == pytest.approx(1e-12, rel=1e-9)
    assert prices.missed(0.5, 1.5) == pytest.approx(0.375)


# ---------------------------------------------------------------------------------------------- wrong plans


def _planned(sharding: ParameterSharding | None = None, limits: ParameterConstraints | None = None) -> Any:
    """A plan of one table for two ranks, with another sharding put in its place."""
    table = PlannedTable((("", "t"),), 1000, 64, DataType.FP32, ("f",), SGD())
    case = cases.Case("plain", 0, (table,), Topology(2, "cpu", ddr_cap=10**7), 16)
    found = planned.Planned(case.request())
    if limits is not None:
        found.request = replace(found.request, constraints={"t": limits})
    if sharding is not None:
        found.plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"t": sharding})}, 2, ((0, 1),))
    return found


def _as(kind: str, *tiles: Tile) -> ParameterSharding:
    return ParameterSharding(kind, tiling=Tiling.of("t", 1000, 64, tiles))


def test_a_right_plan_passes() -> None:
    assert list(planned.wrong_cover(_planned())) == []
    assert planned.over_cap(_planned()) is None


def test_a_missing_cell_is_noticed() -> None:
    whole = _as("table_wise", Tile(0, 1000, 0, 64, (0,)))
    assert whole.tiling is not None
    cut = object.__new__(Tiling)  # what `Tiling` itself would refuse
    vars(cut).update(rows=1000, dim=64, blocks=(ColumnBlock(0, 63, (0, 1000), ((0,),)),))
    vars(whole)["tiling"] = cut
    assert any("63000 cells" in text for text in planned.wrong_cover(_planned(whole)))


def test_a_rank_beyond_the_world_is_noticed() -> None:
    assert any(
        "owners (2,)" in text for text in planned.wrong_cover(_planned(_as("table_wise", Tile(0, 1000, 0, 64, (2,)))))
    )


@pytest.mark.parametrize(
    ("limits", "noticed"),
    [
        (ParameterConstraints(sharding_types=["table_wise"]), "is not among"),
        (ParameterConstraints(ranks=[1]), "allowed are (1,)"),
        (ParameterConstraints(max_ranks=1), "max_ranks is 1"),
        (ParameterConstraints(min_partition=33), "min_partition is 33"),
    ],
)
def test_a_plan_against_constraints_is_noticed(limits: ParameterConstraints, noticed: str) -> None:
    columns = _as("column_wise", Tile(0, 1000, 0, 32, (0,)), Tile(0, 1000, 32, 64, (1,)))
    assert list(planned.wrong_cover(_planned(columns))) == []
    assert any(noticed in text for text in planned.wrong_cover(_planned(columns, limits)))


def test_too_many_bytes_are_noticed() -> None:
    found = _planned(_as("table_wise", Tile(0, 1000, 0, 64, (1,))))
    found.topology = replace(found.topology, ddr_cap=200_000)
    over = planned.over_cap(found)
    assert over is not None
    assert "rank 1" in over[0]


# ---------------------------------------------------------------------------------------------- all arrangements


def test_all_arrangements_of_a_table_on_two_ranks() -> None:
    found = arrangements.Arrangements(_planned())
    # On either rank; a copy on each; in two column blocks; in two ranges of rows.
    assert found.count == 5
    seconds, (placed,) = found.best()
    own = _planned()
    assert seconds <= own.price.seconds
    assert own.pricing.price({"t": placed}).seconds == pytest.approx(seconds, rel=1e-12)


def test_an_arrangement_beyond_memory_is_none() -> None:
    found = _planned()
    found.topology = replace(found.topology, ddr_cap=1000)
    assert arrangements.Arrangements(found).best() is None
