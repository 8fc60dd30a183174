"""A sharded model's plan is at `.plan`, and at `plan_of` whatever names the model has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.shard import shard
from tilerec.sharding.table import ShardedTable
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.virtual import run_virtual_ranks


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "t", feature_names=["f"])])


class HasPlan(nn.Module):
    """A model with a part called `plan`."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.plan, self.traffic = bags(), nn.Linear(2, 2), nn.Linear(2, 2)


class Plans(nn.Module):
    """A model with a method called `plan`."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags()

    def plan(self) -> str:
        return "its own"


PLAN = {"ebc": {"t": ParameterSharding("row_wise")}}


def test_a_part_of_the_model_called_plan_stays_and_the_model_is_sharded() -> None:
    def run(group: Group) -> None:
        model = HasPlan()
        own = model.plan
        shard(model, plan=PLAN, mesh=group)
        assert model.plan is own
        assert isinstance(model.ebc.embedding_bags["t"], ShardedTable)
        assert plan_of(model).world_size == 2
        other: Any = shard(Plans(), plan=PLAN, mesh=group)
        assert other.plan() == "its own"
        assert plan_of(other) == plan_of(model)
        assert plan_of(copy.deepcopy(other)) == plan_of(model)

    run_virtual_ranks(2, run)


def test_a_wrapped_model_with_parts_of_the_wrappers_names_works() -> None:
    dmp = DistributedModelParallel(HasPlan(), ShardingEnv.from_local(1, 0), plan=PLAN)
    assert dmp.plan is plan_of(dmp) is plan_of(dmp.module)
    assert dmp.traffic().total() == 0
    assert {name.split(".")[0] for name in dmp.state_dict()} == {"ebc", "plan", "traffic"}
    assert dmp.copy("cpu").plan == dmp.plan


def test_without_a_name_of_its_own_the_model_shows_the_plan() -> None:
    def run(group: Group) -> None:
        model: Any = shard(nn.ModuleDict({"ebc": bags()}), plan=PLAN, mesh=group)
        assert model.plan is plan_of(model)

    run_virtual_ranks(2, run)


def test_a_model_that_is_not_sharded_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="HasPlan has no plan; pass the module"):
        plan_of(HasPlan())
