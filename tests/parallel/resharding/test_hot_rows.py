"""Hot rows come and go in a running model: its bits stay, and only rows that become hot travel."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parallel.resharding.test_reshard import TABLES, assert_same, check_move, sharded, tilings, train
from tests.parity.harness import OPTIMIZERS, WORLDS, Case, batches, build
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, ReshardError
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.table_move import TableMove
from tilerec.parallel.shard import shard
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.testing.virtual import run_virtual_ranks


def case_of(optimizer: str, world: str = "4", **more: Any) -> Case:
    sizes = (3, 2, 0, 4)[: sum(map(len, WORLDS[world]))]
    return Case(TABLES, {}, WORLDS[world], OPTIMIZERS[optimizer], sizes, steps=4, **more)


def with_hot(cuts: dict[str, Tiling], world: int, *ids: list[int]) -> dict[str, Tiling]:
    return {
        name: tiling.with_hot(name, HotRows(np.array(own, dtype=np.int64)), world)
        for (name, tiling), own in zip(cuts.items(), ids, strict=True)
    }


ONE = ("row_wise", "table_wise", "grid")
OTHER = ("column_wise", "row_wise", "table_wise")
HOT = ([0, 3, 9], [6], [1, 5, 16])
OTHER_HOT = ([3, 4], [], [5, 6, 7, 16])


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "sgd", "lamb"])
@pytest.mark.parametrize(
    "way", ["heads appear", "heads go", "heads change", "all at once"]
)
def test_training_goes_on_as_if_the_new_plan_had_been_used_from_that_state(optimizer: str, way: str) -> None:
    case = case_of(optimizer)
    one, other = tilings(ONE, case), tilings(OTHER, case)
    before, after = {
        "heads appear": (one, with_hot(one, 4, *HOT)),
        "heads go": (with_hot(one, 4, *HOT), one),
        "heads change": (with_hot(one, 4, *HOT), with_hot(one, 4, *OTHER_HOT)),
        "all at once": (with_hot(one, 4, *HOT), with_hot(other, 4, *OTHER_HOT)),
    }[way]
    check_move(case, before, _as_plan(after))


def _as_plan(cuts: dict[str, Tiling]) -> dict[str, Any]:
    """Without hot= a move keeps a table's hot rows, so tables without any say so."""
    return {
        name: ParameterSharding("explicit", tiling=tiling, hot=tiling.head.hot if tiling.head else HotRows())
        for name, tiling in cuts.items()
    }
