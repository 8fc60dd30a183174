"""What two plans do differently."""

from __future__ import annotations

from tilerec.planner.report.plan_diff import moved_cells, plan_diff
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, Wire
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling


def tiling(*tiles: tuple[int, int, int, int, object]) -> Tiling:
    return Tiling.of("t", 4, 2, tiles)


def plan(**tables: Tiling) -> ShardingPlan:
    part = {n: ParameterSharding("explicit", tiling=t, data_type=DataType.BF16) for n, t in tables.items()}
    return ShardingPlan({"ebc": EmbeddingModuleShardingPlan(part)}, 2)


WHOLE_0, WHOLE_1 = tiling((0, 4, 0, 2, 0)), tiling((0, 4, 0, 2, 1))
ROWS = tiling((0, 2, 0, 2, 0), (2, 4, 0, 2, 1))
COLUMNS = tiling((0, 4, 0, 1, 0), (0, 4, 1, 2, 1))
COPIES = tiling((0, 4, 0, 2, (0, 1)))


def test_cells_move_where_a_rank_did_not_hold_them() -> None:
    assert moved_cells(WHOLE_0, WHOLE_0) == 0
    assert moved_cells(WHOLE_0, WHOLE_1) == 8
    assert moved_cells(WHOLE_0, ROWS) == 4
    assert moved_cells(ROWS, COLUMNS) == 4
    assert moved_cells(ROWS, COPIES) == 8
    assert moved_cells(COPIES, ROWS) == 0


def test_equal_plans_are_the_same() -> None:
    found = plan_diff(plan(a=WHOLE_0), plan(a=WHOLE_0))
    assert found.changes == ()
    assert str(found) == "the same: 1 tables have the same placement in both plans"


def test_changes_are_named_with_the_bytes_that_move() -> None:
    found = plan_diff(plan(a=WHOLE_0, b=ROWS, c=ROWS), plan(a=WHOLE_1, b=ROWS, d=ROWS))
    assert [(c.name, c.before is None, c.after is None, c.moved) for c in found.changes] == [
        ("a", False, False, 8), ("c", False, True, 0), ("d", True, False, 0),
    ]  # fmt: skip
    assert found.moved_bytes == 16
    text = str(found)
    assert text.startswith("3 of 4 tables differ; 16 B of weights move from the first plan to the second")
    assert "not there" in text


def test_tables_of_other_sizes_are_no_move_but_a_question() -> None:
    other = Tiling.of("t", 8, 2, [(0, 8, 0, 2, 1)])
    found = plan_diff(plan(a=WHOLE_0, b=ROWS), plan(a=other, b=WHOLE_1))
    assert (found.moved_bytes, found.others) == (8, 1)
    assert "1 are in one plan only, or differ in size: are they plans of the same model?" in str(found)
    assert "explicit on 0, 4 x 2  explicit on 1, 8 x 2" in str(found)


def test_another_wire_or_type_is_a_difference() -> None:
    def made(wire: Wire | None, kind: DataType) -> ShardingPlan:
        sharding = ParameterSharding("explicit", tiling=ROWS, wire=wire, data_type=kind)
        return ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"a": sharding})}, 2)

    found = plan_diff(made(None, DataType.FP32), made(Wire("bf16", "int8"), DataType.BF16))
    assert len(found.changes) == 1
    assert found.moved_bytes == 0
    assert "explicit on 0-1, fp32, wire not set  explicit on 0-1, bf16, wire bf16 and int8" in str(found)
    found = plan_diff(made(Wire(), DataType.FP32), made(Wire(distinct=False), DataType.FP32))
    assert (
        "explicit on 0-1, wire fp32 and fp32  explicit on 0-1, wire fp32 and fp32, repeated ids travel each time"
        in (str(found))
    )


def test_other_hot_rows_are_a_difference_and_the_copies_that_ranks_lack_move() -> None:
    def made(*hot: int, tiling: Tiling = ROWS, none: bool = False) -> ShardingPlan:
        sharding = ParameterSharding("explicit", tiling=tiling, hot=None if none else HotRows(hot))
        return ShardingPlan({"": EmbeddingModuleShardingPlan({"t": sharding})}, 2)

    assert not plan_diff(made(), made(none=True)).changes
    assert not plan_diff(made(0, 3), made(tiling=ROWS.with_hot("t", HotRows([0, 3]), 2), none=True)).changes
    found = plan_diff(made(0, 3), made(1, 2, 3))
    assert found.changes[0].moved == 2 * 2  # rows 1 and 2, of two columns, each to the rank that lacks it
    assert "2 hot rows (1 of them only here)" in str(found)
    assert "3 hot rows (2 of them only here)" in str(found)
    assert "no hot rows" in str(plan_diff(made(0), made()))
    assert plan_diff(made(0), made(0, tiling=WHOLE_1)).changes[0].moved == 4
