"""A move's batches and its price: computed by hand for machines of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilerec.errors import ConfigError
from tilerec.parallel.resharding.chunked_transfer import TableTransfer, TensorTransfer
from tilerec.parallel.resharding.move_schedule import (
    CALLS,
    CALLS_OF_BATCH,
    LEAST_TOGETHER,
    SECONDS_PER_TABLE,
    schedule,
    seconds_of,
)
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

TWO = Topology(2, "cpu")
SLOW = replace(default_speeds(TWO), copy=1.0, link_in=10.0, link_out=100.0, call=0.0, call_peer=0.0, fresh=1000.0)


def load(old: Tiling, new: Tiling) -> TableTransfer:
    return TableTransfer(old, new, [TensorTransfer("weight", True, 4, [])], TWO)


def on(rows: int, dim: int, *owners: int) -> Tiling:
    return Tiling.of("t", rows, dim, [(0, rows, 0, dim, owners)])


def columns(rows: int, dim: int) -> Tiling:
    return Tiling.of("t", rows, dim, [(0, rows, 0, dim // 2, 0), (0, rows, dim // 2, dim, 1)])


def test_a_table_that_goes_to_another_rank_costs_its_links_and_new_memory_at_the_receiver() -> None:
    loads = [load(on(10, 2, 0), on(10, 2, 1))]  # 80 bytes
    plan = schedule(loads, 2, None)
    seconds = seconds_of(loads, plan, TWO, SLOW)
    assert seconds == pytest.approx(SECONDS_PER_TABLE + max(80 * 100.0, 80 * (10.0 + 1.0 + 999.0)))
    # Memory that a rank has had costs the clearing only: rank 1 gives a table of that size before it gets one.
    loads = [load(on(10, 2, 1), on(10, 2, 0)), load(on(10, 2, 0), on(10, 2, 1))]
    plan = replace(plan, batches=((0,), (1,)))
    first, second = 80 * (10.0 + 1.0 + 999.0), max(80 * 100.0, 80 * (10.0 + 1.0))
    assert seconds_of(loads, plan, TWO, SLOW) == pytest.approx(2 * SECONDS_PER_TABLE + first + second)


def test_columns_are_packed_where_they_are_no_one_piece() -> None:
    whole_to_columns, back = load(on(10, 2, 0), columns(10, 2)), load(columns(10, 2), on(10, 2, 0))
    assert whole_to_columns.packed_between() == {(0, 0): (40, 40, 0), (0, 1): (40, 40, 0)}
    assert back.packed_between() == {(0, 0): (40, 0, 40), (1, 0): (40, 0, 40)}
    assert load(on(10, 2, 0), on(10, 2, 1)).packed_between() == {(0, 1): (80, 0, 0)}


def test_each_message_and_batch_is_a_call() -> None:
    loads = [load(on(100, 2, 0), on(100, 2, 1)) for _ in range(3)]
    calls = replace(default_speeds(TWO), copy=0.0, link_in=0.0, link_out=0.0, call=1.0, call_peer=0.0, fresh=0.0)
    plan = replace(schedule(loads, 2, None), most=300, batches=((0, 2), (1,)))
    # 1,600 and 800 bytes in messages of 300: 6 and 3 rounds.
    assert seconds_of(loads, plan, TWO, calls) == pytest.approx(
        CALLS + 2 * CALLS_OF_BATCH + 6 + 3 + 3 * SECONDS_PER_TABLE
    )
    assert seconds_of([], plan, TWO, calls) == 0.0


def test_without_a_speed_for_new_memory_it_is_a_copy() -> None:
    loads = [load(on(10, 2, 0), on(10, 2, 1))]
    plan = schedule(loads, 2, None)
    unknown, same = replace(SLOW, fresh=None), replace(SLOW, fresh=SLOW.copy)
    assert seconds_of(loads, plan, TWO, unknown) == seconds_of(loads, plan, TWO, same)


def test_small_tables_move_together_and_large_ones_by_pairs_that_change_places() -> None:
    small = [load(on(100, 2, i % 2), on(100, 2, 1 - i % 2)) for i in range(40)]
    plan = schedule(small, 2, None)
    assert len(plan.batches) == 1
    # All new tiles beside all old ones, 20 of 800 bytes on each rank, and messages in and out.
    assert 20 * 800 <= plan.extra <= 20 * 800 + 2 * 20 * 800
    rows = 8 * LEAST_TOGETHER  # 256 MiB a table, 2 columns of fp32
    large = [load(on(rows, 2, i % 2), on(rows, 2, 1 - i % 2)) for i in range(4)]
    assert schedule(large, 2, None).batches == ((0, 1), (2, 3))


def test_a_budget_below_a_table_is_refused_with_the_number_that_does() -> None:
    loads = [load(on(100, 2, 0), columns(100, 2))]
    with pytest.raises(ConfigError, match="budget_bytes: got 100, but a rank needs ") as caught:
        schedule(loads, 2, 100)
    enough = int(str(caught.value).split("a rank needs ")[1].split()[0].replace(",", ""))
    assert schedule(loads, 2, enough).extra <= enough
    with pytest.raises(ConfigError):
        schedule(loads, 2, enough - 1)
