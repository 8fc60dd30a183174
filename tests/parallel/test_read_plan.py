"""What a plan says twice must agree, and each form of a plan is told where it belongs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.model_tables import collections_of
from tilerec.parallel.read_plan import complete_plan_of, read_plan
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import (
    Cut,
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
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

FOUR = Topology(4, "cpu", local_world_size=2)


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 12, "t", feature_names=["f"])])


def model() -> nn.Module:
    return nn.ModuleDict({"ebc": bags()})


def planned(cut: Cut) -> ShardingPlan:
    """On two hosts of two ranks, whole, as sharding would take it."""
    part = construct_module_sharding_plan(bags(), {"t": cut}, topology=FOUR)
    return complete_plan_of(ShardingPlan({"ebc": part}), collections_of(model()), FOUR)


def reread(data: Any) -> ShardingPlan:
    return complete_plan_of(ShardingPlan.from_json(data), collections_of(model()), FOUR)


CUTS = {
    "whole": table_wise(3),
    "copies": data_parallel(),
    "rows": row_wise(),
    "rows of given sizes": row_wise(([7, 0, 3], ["rank:2/cpu", "rank:3/cpu", "rank:0/cpu"])),
    "rows in buckets": row_wise(num_buckets=5),
    "rows of one rank": row_wise(([10], "cpu")),
    "columns": column_wise([3, 1, 0]),
    "columns of given widths": column_wise([3, 1], [5, 7]),
    "columns that meet": column_wise([3, 3, 1]),
    "columns of given widths that meet": column_wise([3, 3, 1], [2, 3, 7]),
    "rows of a host": table_row_wise(1),
    "columns of a host": table_column_wise(1, [5, 7]),
    "grid": grid_shard([1, 0]),
    "grid of given widths": grid_shard([0, 0, 1], [1, 2, 9]),
    "grid of one host": grid_shard([1]),
    "any": explicit([(0, 9, 0, 12, 1), (9, 10, 0, 12, (0, 3))]),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
def test_every_plan_of_a_helper_comes_back_from_its_file_as_it_was(cut: Cut, tmp_path: Path) -> None:
    plan = planned(cut)
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert complete_plan_of(loaded, collections_of(model()), FOUR) == plan


@pytest.mark.parametrize(
    ("cut", "edit"),
    [
        (row_wise(), {"ranks": "0-1,3,2"}),
        (row_wise(), {"sharding_type": "table_row_wise"}),
        (row_wise(), {"sharding_type": "grid_shard"}),
        (row_wise(([7, 3], "cpu")), {"ranks": "1,0"}),
        (row_wise(([7, 3], "cpu")), {"ranks": "0-2"}),
        (table_wise(1), {"ranks": "1-2"}),
        (column_wise([3, 1, 0]), {"ranks": "0,1,3"}),
        (column_wise([3, 1], [5, 7]), {"ranks": "3,1,0"}),
        (column_wise([0, 2]), {"sharding_type": "table_column_wise"}),
        (column_wise([0, 2]), {"sharding_type": "grid_shard", "ranks": "0-3"}),
        (grid_shard([1, 0]), {"ranks": "0-3"}),
    ],
)
def test_a_file_whose_type_or_ranks_were_edited_beside_a_tiling_that_stays_is_refused(
    cut: Cut, edit: dict[str, str]
) -> None:
    data = planned(cut).to_json()
    item = data["plan"]["ebc"]["t"]
    item.update(edit)
    kind = item["sharding_type"]
    with pytest.raises(
        ConfigError, match=rf"Table 't' of module 'ebc': {kind} over ranks .* does not produce .*tiling"
    ):
        reread(data)
    item.update(sharding_type="explicit")  # the advice in the message
    item.pop("ranks")
    assert reread(data).plan["ebc"]["t"].tiling == planned(cut).plan["ebc"]["t"].tiling


def test_ranks_edited_in_a_file_count_once_the_tiling_is_taken_out() -> None:
    data = planned(row_wise()).to_json()
    item = data["plan"]["ebc"]["t"]
    item["ranks"] = "3,1"
    del item["tiling"]
    want = Tiling.of("t", 10, 12, [(0, 5, 0, 12, 3), (5, 10, 0, 12, 1)])
    assert reread(data).plan["ebc"]["t"].tiling == want


def test_ranks_beside_an_explicit_tiling_are_those_it_lies_on() -> None:
    data = planned(CUTS["any"]).to_json()
    data["plan"]["ebc"]["t"]["ranks"] = "0-3"
    with pytest.raises(ConfigError, match=r"ranks: got '0-3'; expected the ranks of the tiling, '0-1,3'"):
        reread(data)


def test_a_data_type_in_the_plan_that_is_not_the_tables_is_said_to_have_no_effect() -> None:
    data = planned(row_wise()).to_json()
    data["plan"]["ebc"]["t"]["data_type"] = "BF16"
    with pytest.warns(UserWarning, match="Table 't' of module 'ebc': data_type BF16 in the plan has no effect"):
        assert reread(data) == planned(row_wise())


def test_an_edit_that_says_the_same_cut_in_another_way_is_taken() -> None:
    data = planned(table_row_wise(1)).to_json()
    data["plan"]["ebc"]["t"]["sharding_type"] = "row_wise"
    assert reread(data).plan["ebc"]["t"].ranks == (2, 3)


def test_copies_on_some_ranks_only_are_no_data_parallel() -> None:
    for sharding in (
        ParameterSharding("data_parallel", ranks=[0, 2]),
        ParameterSharding("data_parallel", tiling=Tiling.of("t", 10, 12, [(0, 10, 0, 12, (0, 2))])),
    ):
        plan = ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"t": sharding})})
        with pytest.raises(ConfigError, match=r"Table 't' of module 'ebc': data_parallel .* ranks '0,2' of 4\. Leave"):
            complete_plan_of(plan, collections_of(model()), FOUR)
    data = planned(data_parallel()).to_json()
    assert reread(data).plan["ebc"]["t"].ranks == (0, 1, 2, 3)
    bigger = ShardingPlan.from_json({**data, "world_size": None, "hosts": None})
    with pytest.raises(ConfigError, match="data_parallel is a copy on every rank"):
        complete_plan_of(bigger, collections_of(model()), Topology(8, "cpu"))


def test_a_plan_by_hand_for_another_world_is_refused_on_every_rank() -> None:
    part = construct_module_sharding_plan(bags(), {"t": row_wise()}, local_size=2, world_size=4)

    def run(group: Group, plan: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            shard(model(), plan=plan, mesh=group)
        return str(caught.value)

    for plan in ({"ebc": part}, ShardingPlan({"ebc": part})):
        messages = run_virtual_ranks(2, run, plan)
        assert all("got a plan for 4 ranks; expected one for the 2 ranks" in message for message in messages)
    without = EmbeddingModuleShardingPlan({"t": ParameterSharding("row_wise")})
    run_virtual_ranks(2, lambda group: shard(model(), plan={"ebc": without}, mesh=group))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"t": ParameterSharding("row_wise")}, r"table 't' is in module 'ebc': plan=\{'ebc': \{'t': …\}\}"),
        ({"u": ParameterSharding("row_wise")}, r"collections are \['ebc'\], and none has a table 'u'"),
        (
            {"": {"t": ParameterSharding("row_wise")}},
            r"by itself \(''\).*put its plan under its path: \{'ebc'",
        ),
    ],
)
def test_a_plan_of_the_collection_given_for_the_model_says_under_which_path_it_belongs(plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_virtual_ranks(1, lambda group: shard(model(), plan=plan, mesh=group))


def test_a_plan_of_the_model_given_for_its_collection_says_that_its_path_is_empty() -> None:
    plan = {"ebc": {"t": ParameterSharding("row_wise")}}
    with pytest.raises(ConfigError, match=r"whose path is ''.*\{'': plan\['ebc'\]\}"):
        run_virtual_ranks(1, lambda group: shard(bags(), plan=plan, mesh=group))


def test_a_module_plan_keeps_its_world_in_any_mapping() -> None:
    part = construct_module_sharding_plan(bags(), {"t": row_wise()}, topology=FOUR)
    for plan in ({"ebc": part}, {"ebc": copy.deepcopy(part)}):
        read = read_plan(plan, collections_of(model()))
        assert (read.world_size, read.hosts) == (4, ((0, 1), (2, 3)))
    alone = read_plan(part, collections_of(bags()))
    assert (alone.world_size, list(alone.plan)) == (4, [""])
    assert json.loads(alone.dumps())["hosts"] == ["0-1", "2-3"]
