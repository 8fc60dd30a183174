"""Plans by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.planner.helpers import (
    Cut,
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    explicit,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Rectangle, Tiling
from tilerec.spec.topology import Topology


def bags(rows: int = 10, dim: int = 512, names: str = "t") -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(rows, dim, name) for name in names]
    return EmbeddingBagCollection(tables, device=torch.device("meta"))


def planned(cut: Cut, rows: int = 10, dim: int = 512) -> ParameterSharding:
    """In a world of two hosts with two ranks each."""
    return construct_module_sharding_plan(bags(rows, dim), {"t": cut}, local_size=2, world_size=4, device_type="cpu")[
        "t"
    ]


def tiles(cut: Cut, rows: int = 10, dim: int = 512) -> list[tuple[int, ...]]:
    """(r0, r1, c0, c1, owners...) of every tile."""
    tiling = planned(cut, rows, dim).tiling
    assert tiling is not None
    return [(*tile.rectangle, *tile.owners) for tile in tiling.tiles()]


def test_grid_shard_covers_the_whole_table() -> None:
    """As a user of two hosts and 512 columns expects; half of it would be covered by two blocks of 128."""
    assert tiles(grid_shard([0, 1])) == [
        (0, 5, 0, 256, 0),
        (5, 10, 0, 256, 1),
        (0, 5, 256, 512, 2),
        (5, 10, 256, 512, 3),
    ]
    assert tiles(grid_shard([1], [512])) == [(0, 5, 0, 512, 2), (5, 10, 0, 512, 3)]
    assert tiles(grid_shard([1, 0], [500, 12]))[2:] == [(0, 5, 500, 512, 0), (5, 10, 500, 512, 1)]
    assert tiles(grid_shard([1, 0, 1, 0]))[4:6] == [(0, 5, 256, 384, 2), (5, 10, 256, 384, 3)]


def test_row_wise_uses_all_ranks() -> None:
    assert tiles(row_wise()) == [(0, 3, 0, 512, 0), (3, 6, 0, 512, 1), (6, 9, 0, 512, 2), (9, 10, 0, 512, 3)]
    assert planned(row_wise()).ranks == (0, 1, 2, 3)


def test_row_sizes_and_placements_may_be_given() -> None:
    assert tiles(row_wise(([3, 7, 0, 0], "cpu"))) == [(0, 3, 0, 512, 0), (3, 10, 0, 512, 1)]
    assert tiles(row_wise(([3, 7], ["rank:2/cpu", "rank:0/cpu"]))) == [(0, 3, 0, 512, 2), (3, 10, 0, 512, 0)]
    with pytest.raises(ConfigError, match=r"row_wise got sizes \[3, 6\] for 2 pieces of 10 rows"):
        planned(row_wise(([3, 6], "cpu")))
    with pytest.raises(ConfigError, match="2 sizes and 1 placements"):
        row_wise(([3, 7], ["cpu"]))
    with pytest.raises(ConfigError, match=r"names rank 2 more than once; expected each rank once"):
        row_wise(([3, 3, 4], ["rank:2/cpu", "rank:0/cpu", "rank:2/cpu"]))
    with pytest.raises(ConfigError, match="got device 'cuda'; expected the world's 'cpu'"):
        planned(row_wise(([3, 7], "cuda")))


def test_buckets_are_never_cut() -> None:
    assert [t[1] - t[0] for t in tiles(row_wise(num_buckets=5))] == [4, 2, 2, 2]
    assert [t[1] - t[0] for t in tiles(row_wise(num_buckets=2))] == [5, 5]
    with pytest.raises(ConfigError, match="num_buckets=3, which does not divide its 10 rows"):
        planned(row_wise(num_buckets=3))
    with pytest.raises(ConfigError, match="got both sizes_placement and num_buckets; expected one of them"):
        row_wise(([3, 7], "cpu"), num_buckets=2)


def test_column_wise_takes_ranks_and_sizes() -> None:
    assert tiles(column_wise()) == [(0, 10, c, c + 128, c // 128) for c in range(0, 512, 128)]
    assert tiles(column_wise([3, 1], [128, 384])) == [(0, 10, 0, 128, 3), (0, 10, 128, 512, 1)]
    assert tiles(column_wise(size_per_rank=[500, 12])) == [(0, 10, 0, 500, 0), (0, 10, 500, 512, 1)]
    assert tiles(column_wise([0, 1], device_types=["cpu", "cpu"]))
    with pytest.raises(ConfigError, match="3 column tiles do not divide embedding_dim 512"):
        planned(column_wise([0, 1, 2]))
    with pytest.raises(ConfigError, match="Table 't': column_wise got widths"):
        planned(column_wise([3, 1], [128, 128]))
    with pytest.raises(ConfigError, match="column_wise names rank 4; the world has ranks 0 to 3"):
        planned(column_wise([4], [512]))


def test_helpers_of_hosts_use_the_hosts_ranks() -> None:
    assert tiles(table_row_wise(1)) == [(0, 5, 0, 512, 2), (5, 10, 0, 512, 3)]
    assert tiles(table_column_wise(1)) == [(0, 10, 0, 256, 2), (0, 10, 256, 512, 3)]
    assert tiles(table_column_wise(0, [512])) == [(0, 10, 0, 512, 0)]
    assert tiles(table_column_wise(1), dim=7) == [(0, 10, 0, 7, 2)]
    for cut in (table_row_wise(2), grid_shard([0, 2]), table_column_wise(2)):
        with pytest.raises(ConfigError, match="names host 2; 4 ranks are on hosts 0 to 1"):
            planned(cut)
    with pytest.raises(ConfigError, match="names no host"):
        planned(grid_shard([]))


def test_one_rank_or_all() -> None:
    assert tiles(table_wise(3)) == [(0, 10, 0, 512, 3)]
    assert tiles(data_parallel()) == [(0, 10, 0, 512, 0, 1, 2, 3)]
    with pytest.raises(ConfigError, match="table_wise names rank 5; the world has ranks 0 to 3"):
        planned(table_wise(5))
    with pytest.raises(ConfigError, match="got device 'cuda'"):
        planned(table_wise(1, "cuda"))


def test_any_cover_may_be_given() -> None:
    cover = [(0, 9, 0, 512, 1), (9, 10, 0, 512, (0, 3))]
    assert tiles(explicit(cover)) == [(0, 9, 0, 512, 1), (9, 10, 0, 512, 0, 3)]
    assert tiles(explicit(Tiling.of("t", 10, 512, cover)))[0] == (0, 9, 0, 512, 1)
    assert planned(explicit(iter(cover))).kind is ShardingType.EXPLICIT
    with pytest.raises(ConfigError, match=r"got no tile with rows \[9, 10\) x columns \[0, 512\)"):
        planned(explicit(cover[:1]))
    with pytest.raises(ConfigError, match="on rank 4; expected ranks 0 to 3"):
        planned(explicit([(0, 10, 0, 512, 4)]))


def test_the_kernel_is_the_callers_or_says_whether_an_optimizer_is_attached() -> None:
    assert planned(table_wise(0)).kernel is EmbeddingComputeKernel.DENSE
    assert planned(data_parallel()).kernel is EmbeddingComputeKernel.DENSE
    assert planned(table_wise(0, compute_kernel="fused")).kernel is EmbeddingComputeKernel.FUSED
    module = bags()
    apply_optimizer_in_backward(RowWiseAdagrad(), list(module.parameters()))
    plan = construct_module_sharding_plan(module, {"t": row_wise()}, world_size=1)
    assert plan["t"].kernel is EmbeddingComputeKernel.FUSED
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    fused = construct_module_sharding_plan(bags(), {"t": row_wise()}, sharder, world_size=1)
    assert fused["t"].kernel is EmbeddingComputeKernel.FUSED
    with pytest.raises(ConfigError, match="table_wise: compute_kernel: got 'quick'"):
        table_wise(0, compute_kernel="quick")


def test_the_plan_knows_the_tables_data_type() -> None:
    module = EmbeddingCollection([EmbeddingConfig(7, 3, "t", data_type=DataType.BF16)], device=torch.device("meta"))
    assert construct_module_sharding_plan(module, {"t": row_wise()}, world_size=2)["t"].data_type is DataType.BF16


def test_the_world_is_the_launchers_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert construct_module_sharding_plan(bags(), {"t": row_wise()})["t"].ranks == (0,)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert construct_module_sharding_plan(bags(), {"t": table_row_wise(1)})["t"].ranks == (2, 3)
    uneven = Topology(3, "cpu", hosts=[[0], [1, 2]])
    plan = construct_module_sharding_plan(bags(), {"t": table_row_wise(1)}, topology=uneven)
    assert plan["t"].tiling is not None
    assert plan["t"].tiling.tiles_of(2) == (Rectangle(5, 10, 0, 512),)


def test_each_table_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"'b' has no sharding .*the module has"):
        construct_module_sharding_plan(bags(names="ab"), {"a": row_wise()}, world_size=1)
    with pytest.raises(ConfigError, match="'c' is no table of the module"):
        construct_module_sharding_plan(bags(names="a"), {"a": row_wise(), "c": row_wise()}, world_size=1)
    with pytest.raises(
        ConfigError,
        match="per_param_sharding\\['a'\\] is a str; wanted the return value of a helper such as row_wise",
    ):
        construct_module_sharding_plan(bags(names="a"), {"a": "row_wise"}, world_size=1)  # type: ignore[dict-item]


def test_a_plan_is_of_one_collection() -> None:
    model = nn.ModuleList([bags(), bags()])
    with pytest.raises(ConfigError, match="ModuleList has 2 embedding collections, wanted one"):
        construct_module_sharding_plan(model, {"t": row_wise()}, world_size=1)
    with pytest.raises(ConfigError, match="Linear has 0 embedding collections"):
        construct_module_sharding_plan(nn.Linear(1, 1), {}, world_size=1)


def test_apply_to_all_repeats_a_helper() -> None:
    module = bags(names="abc")
    plan = construct_module_sharding_plan(module, apply_to_all(module, data_parallel()), world_size=2)
    assert {sharding.kind.value for sharding in plan.values()} == {"data_parallel"}
    assert list(plan) == ["a", "b", "c"]


def test_a_sharder_of_another_kind_or_none_at_all_is_refused() -> None:
    for sharder, message in (
        (
            EmbeddingCollectionSharder(),
            "got a sharder for EmbeddingCollection; expected one for EmbeddingBagCollection",
        ),
        (EmbeddingBagCollectionSharder, "is the class EmbeddingBagCollectionSharder; wanted a sharder of it"),
        (3, "sharder is a int; wanted a sharder of tilerec.parallel"),
    ):
        with pytest.raises(ConfigError, match=message):
            construct_module_sharding_plan(bags(), {"t": row_wise()}, sharder, world_size=1)  # type: ignore[arg-type]


def test_a_plan_by_hand_knows_its_world_and_the_hosts_that_were_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def made(**world: Any) -> EmbeddingModuleShardingPlan:
        return construct_module_sharding_plan(bags(), {"t": data_parallel()}, device_type="cpu", **world)

    both = made(local_size=2, world_size=4)
    assert (both.world_size, both.hosts) == (4, ((0, 1), (2, 3)))
    with pytest.raises(ConfigError, match="got a plan for 4 ranks; expected one for the 2 ranks"):
        ShardingPlan({"ebc": both}).check({"ebc": {"t": (10, 512)}}, 2)
    size_alone = made(world_size=4)
    assert (size_alone.world_size, size_alone.hosts) == (4, None)
    told = made(topology=Topology(3, "cpu", hosts=[[0], [1, 2]]))
    assert (told.world_size, told.hosts) == (3, ((0,), (1, 2)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert made(world_size=4).hosts == ((0, 1), (2, 3))


def test_ranks_of_pieces_of_given_sizes_are_those_that_hold_some() -> None:
    assert planned(row_wise(([3, 7, 0, 0], "cpu"))).ranks == (0, 1)
    assert planned(row_wise(([3, 7], ["rank:2/cpu", "rank:0/cpu"]))).ranks == (2, 0)
    assert planned(row_wise(num_buckets=2)).ranks == (0, 1)
    assert planned(column_wise([3, 3, 1], [128, 128, 256])).ranks == (3, 1)
    assert planned(grid_shard([1, 0], [500, 12])).ranks == (2, 3, 0, 1)
