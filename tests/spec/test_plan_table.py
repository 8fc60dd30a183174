"""The print of a plan."""

from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling, ceil_chunks


def row_wise(rows: int, dim: int, ranks: int) -> ParameterSharding:
    cuts = ceil_chunks(rows, ranks)
    tiles = [(cuts[i], cuts[i + 1], 0, dim, i) for i in range(len(cuts) - 1)]
    return ParameterSharding("row_wise", "fused", tiling=Tiling.of("t", rows, dim, tiles), data_type=DataType.FP32)


def test_the_print_says_what_each_rank_holds_and_where() -> None:
    two_tiles = Tiling.of("b", 4, 6, [(0, 4, 0, 2, 0), (0, 4, 2, 4, 3), (0, 4, 4, 6, 0)])
    plan = ShardingPlan(
        {
            "model.ebc": EmbeddingModuleShardingPlan(
                {"user": row_wise(7, 4, 4), "b": ParameterSharding("column_wise", "dense", tiling=two_tiles)}
            ),
            "ec": EmbeddingModuleShardingPlan({"later": ParameterSharding("table_wise", ranks=[1])}),
        },
        4,
        [[0, 1], [2, 3]],
    )
    assert str(plan) == (
        "plan for 4 ranks on 2 hosts (ranks 0-1 | 2-3)\n"
        "\n"
        "module     table  rows x dim  type         kernel  ranks  hosts     each holds  bytes each\n"
        "model.ebc  user        7 x 4  row_wise     fused   0-2    0-1            2 x 4        32 B\n"
        "                                                   3      1              1 x 4        16 B\n"
        "model.ebc  b           4 x 6  column_wise  dense   0      0      4 x 2 + 4 x 2           ?\n"
        "                                                   3      1              4 x 2           ?\n"
        "ec         later           ?  table_wise           1      0        not yet cut\n"
        "\n"
        "in all\n"
        "ranks  hosts  tables  bytes each\n"
        "0      0           2           ?\n"
        "1-2    0-1         1        32 B\n"
        "3      1           2           ?"
    )


def test_a_thousand_ranks_take_a_few_lines() -> None:
    part = EmbeddingModuleShardingPlan({f"t{i}": row_wise(10**6 + i, 8, 1000) for i in range(3)})
    text = str(ShardingPlan({"": part}, 1000, [range(i, i + 8) for i in range(0, 1000, 8)]))
    assert "0-999" in text
    assert len(text.splitlines()) < 20


def test_uneven_plans_show_their_extremes() -> None:
    part = EmbeddingModuleShardingPlan(
        {
            f"t{i}": ParameterSharding(
                "table_wise",
                tiling=Tiling.of("t", i + 1, 1, [(0, i + 1, 0, 1, i)]),
                data_type=DataType.FP32,
            )
            for i in range(99)
        }
    )
    end = str(ShardingPlan({"": part}, 100)).split("\n\n")[-1].splitlines()
    assert end[0] == "in all 100 ranks: the emptiest, the median, the fullest"
    assert [line.split() for line in end[2:]] == [
        ["99", "0", "0", "B"],
        ["49", "1", "200", "B"],
        ["98", "1", "396", "B"],
    ]


def test_ranks_without_a_table_are_listed_as_empty() -> None:
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"t": row_wise(1, 1, 1)})}, 3)
    assert str(plan).splitlines()[-1].split() == ["1-2", "0", "0", "B"]


def test_a_plan_without_tables_says_so() -> None:
    assert str(ShardingPlan({}, 2)) == "plan for 2 ranks: no tables"
    assert str(ShardingPlan({})) == "plan for an unknown number of ranks: no tables"


def test_the_part_of_a_module_prints_alike() -> None:
    text = str(EmbeddingModuleShardingPlan({"t": row_wise(7, 4, 2)}))
    assert "row_wise" in text
    assert "4 x 4" in text
    assert "3 x 4" in text


def test_bytes_have_units_of_1024() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 2**31, 5 * 2**60, None)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "2.0 GiB",
        "5120.0 PiB",
        "?",
    ]
