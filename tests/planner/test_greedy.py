"""The greedy search: balance, memory, constraints, determinism."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.greedy import _PLACERS, SPLIT_ABOVE, Choice, PlannerError, _Loads, place
from tilerec.planner.tables import PlannedTable
from tilerec.sharding.strategies import STRATEGIES
from tilerec.spec.plan import EmbeddingComputeKernel, ShardingType
from tilerec.spec.table import DataType
from tilerec.spec.tile import rectangles
from tilerec.spec.topology import Topology

KINDS = [kind for kind in ShardingType if kind is not ShardingType.EXPLICIT]
MIB = 2**20


def table(name: str, rows: int, dim: int = 64) -> PlannedTable:
    """Of fp32 weights and nothing else: 256 bytes per row of 64."""
    return PlannedTable((("ebc", name),), rows, dim, DataType.FP32, 4 * dim, 0, EmbeddingComputeKernel.FUSED)


def of_mib(name: str, size: int) -> PlannedTable:
    return table(name, size * MIB // 256)


def on_cpu(world_size: int, cap: int = 2**40, local_world_size: int | None = None) -> Topology:
    return Topology(world_size, "cpu", ddr_cap=cap, local_world_size=local_world_size)


def only(*kinds: str, least: int | None = None) -> ParameterConstraints:
    return ParameterConstraints(list(kinds), min_partition=least)


def limits(**tables: ParameterConstraints) -> dict[tuple[str, str], ParameterConstraints]:
    return {("ebc", name): limit for name, limit in tables.items()}


def loads(tables: list[PlannedTable], choices: list[Choice], topology: Topology) -> list[int]:
    """Bytes per rank of the tilings that the choices mean."""
    held = [0] * topology.world_size
    for each, choice in zip(tables, choices, strict=True):
        tiling = STRATEGIES[choice.kind](each.names[0][1], each.rows, each.dim, choice.ranks, topology)
        for tile in rectangles(tiling):
            for rank in tile.owners:
                held[rank] += each.bytes_of(tile.r1 - tile.r0, tile.c1 - tile.c0)
    return held


def test_the_largest_table_goes_first_onto_the_emptiest_rank() -> None:
    sizes = {"a": 1, "b": 5, "c": 3, "d": 4, "e": 2}
    tables = [of_mib(name, size) for name, size in sizes.items()]
    choices = place(tables, {}, on_cpu(2))
    # b -> 0; d -> 1; c -> 1 (4 < 5); e -> 0 (5 < 7); a -> 0 (7 = 7).
    assert [choice.ranks for choice in choices] == [(0,), (0,), (1,), (1,), (0,)]
    assert {choice.kind for choice in choices} == {ShardingType.TABLE_WISE}


def test_a_table_larger_than_a_share_is_cut_by_rows() -> None:
    small = [of_mib(f"s{i}", 8) for i in range(8)]
    topology = on_cpu(8, local_world_size=4)
    choices = place([of_mib("big", 1000), *small], {}, topology)
    assert choices[0] == Choice(ShardingType.ROW_WISE, tuple(range(8)))
    middle = place([of_mib("big", 100), *[of_mib(f"s{i}", 30) for i in range(16)]], {}, topology)
    assert middle[0] == Choice(ShardingType.TABLE_ROW_WISE, (0, 1, 2, 3))


def test_tables_as_many_as_ranks_stay_whole_where_that_is_even() -> None:
    choices = place([of_mib(f"t{i}", 100) for i in range(4)], {}, on_cpu(4))
    assert [choice.ranks for choice in choices] == [(0,), (1,), (2,), (3,)]
    # Five tables on four ranks: whole, one rank would hold 1.6 shares.
    tables = [of_mib(f"t{i}", 100) for i in range(5)]
    assert max(loads(tables, place(tables, {}, on_cpu(4)), on_cpu(4))) <= 126 * MIB


def test_a_small_table_is_never_cut_for_balance() -> None:
    tables = [of_mib("only", SPLIT_ABOVE // MIB)]
    assert place(tables, {}, on_cpu(8))[0].kind is ShardingType.TABLE_WISE


def test_a_world_of_one_cuts_nothing() -> None:
    choices = place([of_mib("a", 10_000), of_mib("b", 1)], {}, on_cpu(1))
    assert [choice.kind.value for choice in choices] == ["table_wise"] * 2


def test_a_table_that_fits_no_rank_is_cut() -> None:
    tables = [of_mib(f"t{i}", 8) for i in range(3)]
    choices = place(tables, {}, on_cpu(2, cap=12 * MIB))
    assert max(loads(tables, choices, on_cpu(2))) <= 12 * MIB
    assert [choice.kind.value for choice in choices].count("row_wise") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharding_type_that_is_asked_for_is_used(kind: ShardingType) -> None:
    tables = [of_mib("a", 4), of_mib("b", 40)]
    topology = on_cpu(4, local_world_size=2)
    choices = place(tables, limits(a=only(kind.value)), topology)
    assert choices[0].kind is kind
    hosts = {topology.host_of(rank) for rank in choices[0].ranks}
    if kind in (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE):
        assert len(hosts) == 1
    assert loads(tables, choices, topology)


def test_the_preferred_type_gives_way_only_where_it_does_not_fit() -> None:
    tables = [of_mib("a", 8)]
    limit = limits(a=only("table_wise", "column_wise", "row_wise"))
    assert place(tables, limit, on_cpu(4))[0].kind is ShardingType.TABLE_WISE
    assert place(tables, limit, on_cpu(4, cap=4 * MIB))[0].kind is ShardingType.COLUMN_WISE


def test_min_partition_is_the_least_width_of_a_column_tile() -> None:
    def blocks(least: int | None, kind: str = "column_wise") -> list[int]:
        topology = on_cpu(4, local_world_size=2)
        choice = place([table("a", 1000, 96)], limits(a=only(kind, least=least)), topology)[0]
        tiling = STRATEGIES[choice.kind]("a", 1000, 96, choice.ranks, topology)
        return [block.c1 - block.c0 for block in tiling.blocks]

    assert blocks(None) == [24, 24, 24, 24]
    assert blocks(40) == [48, 48]
    assert blocks(32) == [32, 32, 32]
    assert blocks(97) == [96]
    assert blocks(None, "grid_shard") == [48, 48]
    assert blocks(None, "table_column_wise") == [48, 48]


def test_more_column_tiles_than_ranks_share_ranks_side_by_side() -> None:
    choice = place([table("a", 1000, 64)], limits(a=only("column_wise", least=8)), on_cpu(4))[0]
    assert choice.ranks == (0, 0, 1, 1, 2, 2, 3, 3)
    grid = place(
        [table("a", 1000, 64)], limits(a=only("grid_shard", least=16)), on_cpu(4, local_world_size=2)
    )[0]
    assert grid.ranks == (0, 1, 0, 1, 2, 3, 2, 3)


def test_the_order_of_tables_and_their_names_do_not_unsettle_a_plan() -> None:
    rng = random.Random(0)
    tables = [table(f"t{i}", rng.choice([100, 1000, 50_000])) for i in range(60)]
    topology = on_cpu(6, local_world_size=3)
    first = dict(zip((t.names for t in tables), place(tables, {}, topology), strict=True))
    rng.shuffle(tables)
    assert dict(zip((t.names for t in tables), place(tables, {}, topology), strict=True)) == first


def test_what_fits_nowhere_is_named_with_its_size_and_the_way_out() -> None:
    tables = [of_mib("a", 8), of_mib("b", 2)]
    with pytest.raises(
        PlannerError, match=r"Table 'a' of module 'ebc': no place found for its .* \(8\.0 MiB"
    ):
        place(tables, limits(a=only("table_wise")), on_cpu(2, cap=6 * MIB))
    with pytest.raises(
        PlannerError, match=r"as table_wise; the emptiest of 2 ranks has 6.0 MiB left .* Allow it other"
    ):
        place(tables, limits(a=only("table_wise")), on_cpu(2, cap=6 * MIB))
    with pytest.raises(PlannerError, match=r"all 2 tables are 10.0 MiB for 4.0 MiB in all\. Use more ranks"):
        place(tables, {}, on_cpu(2, cap=2 * MIB))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("full", "cap"), [((3,), 5), ((1, 3), 5), ((1, 3), 9), ((3,), 9)])
def test_a_type_that_does_not_fit_leaves_no_bytes_behind(
    kind: ShardingType, full: tuple[int, ...], cap: int
) -> None:
    """16 MiB as column tiles of 4 or grid tiles of 4: some find a place before the last one does not."""
    loads = _Loads(on_cpu(4, cap=cap * MIB, local_world_size=2))
    for rank in full:
        loads.add(rank, cap * MIB)
    before = list(loads.own)
    found = _PLACERS[kind](loads, of_mib("a", 16), None)
    if found is None:
        assert loads.own == before
        assert loads.everywhere == 0
        assert loads.emptiest() == 0
    else:
        assert max(loads.own) + loads.everywhere <= cap * MIB
        assert not set(found) & set(full)


@given(st.data())
def test_plans_hold_what_they_promise(data: st.DataObject) -> None:
    """Random tables, constraints, hosts and caps: memory is never exceeded, types are among those allowed."""
    hosts = data.draw(st.sampled_from([[[0]], [[0, 1]], [[0, 1], [2, 3]], [[0, 3], [1], [2, 4, 5]]]))
    tables = [
        table(f"t{i}", data.draw(st.integers(1, 300_000)), data.draw(st.sampled_from([1, 3, 64, 96])))
        for i in range(data.draw(st.integers(1, 7)))
    ]
    allowed = {
        each.names[0]: ParameterConstraints(kinds, min_partition=data.draw(st.sampled_from([None, 1, 32])))
        for each in tables
        if (kinds := data.draw(st.lists(st.sampled_from(KINDS), max_size=3)))
    }
    world = sum(len(host) for host in hosts)
    total = sum(each.bytes for each in tables)
    cap = data.draw(st.sampled_from([total, total // world + 1, 2 * total // world + 1]))
    topology = Topology(world, "cpu", ddr_cap=cap, hosts=hosts)
    try:
        choices = place(tables, allowed, topology)
    except PlannerError:
        assert cap < total or any(limit.types_allowed() for limit in allowed.values())
        return
    assert max(loads(tables, choices, topology)) <= cap
    for each, choice in zip(tables, choices, strict=True):
        limit = allowed.get(each.names[0])
        assert limit is None or choice.kind in limit.types_allowed()


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 8]))
def test_no_rank_holds_more_than_two_shares_and_what_is_too_small_to_cut(rows: list[int], world: int) -> None:
    tables = [table(f"t{i}", n) for i, n in enumerate(rows)]
    topology = on_cpu(world)
    held = loads(tables, place(tables, {}, topology), topology)
    share = sum(held) / world
    assert max(held) <= share + max(share, SPLIT_ABOVE) + 256 * len(rows)


def test_ten_thousand_tables_over_a_thousand_ranks_balance() -> None:
    rng = random.Random(1)
    tables = [
        table(f"t{i}", int(10 ** rng.uniform(2, 7.5)), rng.choice([16, 64, 128])) for i in range(10_000)
    ]
    topology = on_cpu(1024, local_world_size=8)
    held = loads(tables, place(tables, {}, topology), topology)
    assert max(held) <= 1.25 * sum(held) / 1024
