"""An operation that one rank leaves out is named on all ranks, while that rank trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tilerec.comms.group import Group
from tilerec.errors import CommsError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.resharding.measured_load import load_of
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise, table_wise
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

OPERATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "reshard": lambda module: reshard(module, {"t": table_wise(rank=0)}, progress=False),
    "rebalance": lambda module: rebalance(module, horizon=10),
    "load_of": load_of,
    "full_state_dict": full_state_dict,
    "check_replicas": check_replicas,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_leaves_an_operation_out_is_named(operation: str) -> None:
    def fn(group: Group) -> str:
        module = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, "t", feature_names=["f"])])
        shard(module, row_wise(), group)
        try:
            if group.rank != 1:
                OPERATIONS[operation](module)
            module(random_batch(["f"], 20, 4))
        except CommsError as error:
            return str(error)
        return ""

    for said in run_virtual_ranks(2, fn, timeout_s=600.0):
        assert f"rank 0 waits in operation '{operation}', which rank 1 has not called" in said
        assert "rank 1 waits in all_to_all 'header', which rank 0 has not called" in said
