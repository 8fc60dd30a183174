"""The ways to cut that are considered, listed by hand."""

from __future__ import annotations

import pytest

from tilerec.planner.cost.ways import (
    HEADS,
    MIN_PARTITION,
    Limits,
    Option,
    Way,
    enumerate_options,
    is_of,
    row_splits_below,
)
from tilerec.spec.plan import ShardingType
from tilerec.spec.topology import Topology


def splits(options: tuple[Option, ...], way: Way, width: int = 1) -> list[int]:
    return [option.pieces for option in options if option.way is way and option.width == width]


def test_columns_are_cut_into_these_numbers_of_blocks_where_a_table_has_as_many() -> None:
    many = Topology(128, local_world_size=128)
    dims = [k * 7 for k in range(1, 129)]
    assert splits(enumerate_options(many, dims), Way.COLUMNS) == [2, 3, 4, 5, 6, 8, 12, 16, 32, 64]
    assert splits(enumerate_options(many, [24, 10]), Way.COLUMNS) == [2, 3, 4, 5, 6, 8, 12]
    assert splits(enumerate_options(Topology(5), [24, 10]), Way.COLUMNS) == [2, 3, 4, 5]
    assert splits(enumerate_options(many, [1]), Way.COLUMNS) == []


def test_rows_are_cut_into_any_number_of_ranges_on_up_to_sixteen_ranks() -> None:
    assert row_splits_below(1) == row_splits_below(2) == []
    assert row_splits_below(3) == [2]
    assert row_splits_below(16) == list(range(2, 16))
    assert row_splits_below(17) == [2, 3, 4, 6, 8, 16]
    assert row_splits_below(32) == [2, 3, 4, 6, 8, 16]
    assert row_splits_below(33) == [2, 3, 4, 6, 8, 16, 32]
    assert row_splits_below(128) == [2, 3, 4, 6, 8, 16, 32, 64]


def test_further_numbers_of_ranges_are_those_between_one_and_all_ranks() -> None:
    found = splits(enumerate_options(Topology(17), [8], row_splits=[1, 2, 5, 17, 20]), Way.ROWS)
    assert found == [2, 3, 4, 5, 6, 8, 16]
    assert splits(enumerate_options(Topology(17), [8]), Way.ROWS, 17) == [1]


def test_heads_are_tried_beside_fewer_cuts_of_more_than_a_thousand_tables() -> None:
    topology = Topology(16, local_world_size=8)
    for tables, cuts in (
        (1000, ["rows over 16 ranks", "whole", "columns x 2", "columns x 4", "rows x 2", "rows x 4",
                "rows over 8 ranks", "grid x 2 over 8 ranks"]),
        (1001, ["rows over 16 ranks", "whole", "columns x 2", "columns x 4"]),
    ):  # fmt: skip
        found = enumerate_options(topology, [128] * tables, heads=True)
        assert [str(o._replace(head=0.0)) for o in found if o.head == HEADS[0]] == cuts
        assert len([o for o in found if o.head]) == len(HEADS) * len(cuts)


def test_on_several_hosts_rows_lie_on_a_host_and_grids_on_as_many_as_there_are_of_a_size() -> None:
    alike = enumerate_options(Topology(34, local_world_size=2), [48])
    assert splits(alike, Way.GRID, 2) == [2, 3, 4, 6, 8, 16]
    assert splits(alike, Way.ROWS, 2) == splits(alike, Way.ROWS, 34) == [1]
    assert splits(enumerate_options(Topology(8, local_world_size=2), [9]), Way.GRID, 2) == [3]
    sizes = enumerate_options(Topology(9, hosts=[[0], [1, 2], [3, 4], [5, 6], [7], [8]]), [12])
    assert splits(sizes, Way.GRID, 2) == [2, 3]
    assert splits(sizes, Way.ROWS, 2) == [1]
    assert splits(sizes, Way.GRID, 1) == []  # a host of one rank: rows over it are a whole table
    assert [o for o in enumerate_options(Topology(4), [12]) if o.way is Way.GRID] == []


def test_the_list_begins_with_whole_tables_and_copies_and_each_is_there_once() -> None:
    assert enumerate_options(Topology(1), [64], cached=True) == (
        Option(Way.WHOLE, 1, 1), Option(Way.WHOLE, 1, 1, True),
    )  # fmt: skip
    found = enumerate_options(Topology(2), [64], cached=True)
    assert found == (
        Option(Way.WHOLE, 1, 1), Option(Way.COPIES, 1, 2), Option(Way.COLUMNS, 2, 1), Option(Way.ROWS, 1, 2),
        Option(Way.WHOLE, 1, 1, True), Option(Way.COLUMNS, 2, 1, True), Option(Way.ROWS, 1, 2, True),
    )  # fmt: skip
    assert enumerate_options(Topology(2), [64]) == found[:4]
    assert not any(option.cached for option in found[:4])


def test_an_option_is_written_with_its_pieces_its_ranks_and_its_cache() -> None:
    assert str(Option(Way.WHOLE, 1, 1)) == "whole"
    assert str(Option(Way.ROWS, 2, 1)) == "rows x 2"
    assert str(Option(Way.ROWS, 1, 2, True)) == "rows over 2 ranks, cached"
    assert str(Option(Way.GRID, 2, 4)) == "grid x 2 over 4 ranks"


@pytest.mark.parametrize(
    ("option", "hosts", "kinds"),
    [
        (Option(Way.WHOLE, 1, 1), 2, ["table_wise"]),
        (Option(Way.COPIES, 1, 4), 2, ["data_parallel"]),
        (Option(Way.COLUMNS, 2, 1), 2, ["column_wise", "table_column_wise"]),
        (Option(Way.GRID, 2, 2), 2, ["grid_shard"]),
        (Option(Way.ROWS, 2, 1), 2, ["row_wise"]),
        (Option(Way.ROWS, 1, 2), 2, ["table_row_wise"]),
        (Option(Way.ROWS, 1, 4), 2, ["row_wise"]),
        (Option(Way.ROWS, 1, 4), 1, ["grid_shard", "row_wise", "table_row_wise"]),
        (Option(Way.ROWS, 2, 1), 1, ["row_wise"]),
    ],
    ids=str,
)
def test_an_option_is_of_the_types_that_its_tiling_has(option: Option, hosts: int, kinds: list[str]) -> None:
    assert sorted(kind.value for kind in ShardingType if is_of(option, [kind], 4, hosts, ordered=True)) == kinds
    assert not is_of(option, [], 4, hosts, ordered=True)


def test_without_limits_tables_lie_on_devices_alone_and_all_types_are_allowed() -> None:
    limits = Limits()
    assert (limits.types, limits.min_partition, limits.ranks) == ((), None, None)
    assert limits.on_device
    assert not limits.cached
    assert MIN_PARTITION == 32  # columns of the narrowest tile that a planner makes by default
