"""`traffic`: what a sharded model sent, readable and resettable."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.shard import shard
from tilerec.parallel.traffic import traffic
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks


def tables() -> nn.ModuleDict:
    torch.manual_seed(0)
    config = EmbeddingBagConfig(6, 4, "t", feature_names=["t"])
    return nn.ModuleDict({name: EmbeddingBagCollection([config]) for name in ("one", "other")})


def test_collections_of_a_model_count_together_and_start_anew_after_a_reset() -> None:
    base = tables()
    halves = Tiling.of("t", 6, 4, [(0, 3, 0, 4, 0), (3, 6, 0, 4, 1)])
    plan = {"one": {"t": halves}, "other": {"t": halves}}

    def run(group: Group) -> None:
        model = shard(copy.deepcopy(base), plan=plan, mesh=group)
        counted = traffic(model)
        for part in model.children():
            part(random_batch(["t"], 6, 5, seed=group.rank))
        assert counted["ids"].calls == 2
        assert counted["rows"].total > 0
        assert "bytes sent" in str(counted)
        counted.reset()
        assert traffic(model).total() == 0

    run_virtual_ranks(2, run)


def test_a_model_of_none_or_several_shardings_is_told_apart() -> None:
    with pytest.raises(ConfigError, match="shard it first"):
        traffic(tables())
    whole = Tiling.of("t", 6, 4, [(0, 6, 0, 4, 0)])

    def run(group: Group) -> None:
        model: Any = copy.deepcopy(tables())
        for part in model.children():
            shard(part, plan={"t": whole}, mesh=group)
        with pytest.raises(ConfigError, match=r"2 shard\(\) calls"):
            traffic(model)

    run_virtual_ranks(1, run)
