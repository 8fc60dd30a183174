"""Faults of a wrapped model on real processes: wrong plans, wrong batches on one rank, a rank that dies in a step.

`test_shard.py` has every way a plan can be wrong, on virtual ranks; `tests/comms/test_process.py` has death and silence
call by call and stage by stage. Here stands what the user meets: `DistributedModelParallel`, two kinds of collections,
a dense part in torch's `DistributedDataParallel`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.ranks import RankError, Ranks

Pool = Callable[[int], Ranks]
SIZE = 3
ROWS = {"rows": 9, "column": 9, "copies": 9, "sequence": 7}


class Model(nn.Module):
    """A table of every make, pooled with weights and not pooled; a dense layer."""

    def __init__(self, rows: int = 9) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(rows, 3, name, feature_names=[name]) for name in ROWS if name != "sequence"]
        self.ebc = EmbeddingBagCollection(tables, is_weighted=True)
        self.ec = EmbeddingCollection([EmbeddingConfig(7, 3, "sequence", feature_names=["sequence"])])
        self.over = nn.Linear(9, 1)
        self.fault: Callable[[str], object] = lambda place: None

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(features).values()
        self.fault("between")
        rows = torch.cat([jagged.values() for jagged in self.ec(features).values()])
        if rows.requires_grad:
            rows.register_hook(lambda grad: self.fault("backward"))
        return cast(Tensor, self.over(pooled * pooled).sum() + (rows * rows).sum())


def plan(size: int = SIZE) -> dict[str, dict[str, Tiling]]:
    last = size - 1
    ebc: dict[str, list[Any]] = {
        "rows": [(0, 4, 0, 3, 0), (4, 9, 0, 3, last)],
        "column": [(0, 9, 0, 1, last), (0, 9, 1, 3, 0)],
        "copies": [(0, 9, 0, 3, tuple(range(size)))],
    }
    return {
        "ebc": {name: Tiling.of(name, 9, 3, tiles) for name, tiles in ebc.items()},
        "ec": {"sequence": Tiling.of("sequence", 7, 3, [(0, 7, 0, 3, last)])},
    }


def built(rows: int = 9) -> Model:
    torch.manual_seed(0)
    model = Model(rows)
    apply_optimizer_in_backward(Adagrad(lr=0.1), [*model.ebc.parameters(), *model.ec.parameters()])
    return model


def batch(rank: int, step: int = 0) -> KeyedJaggedTensor:
    return random_batch(list(ROWS), list(ROWS.values()), 4, empty=0, weighted=True, seed=10 * step + rank)


def said(run: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        run()
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------- plans


def wrapped_with(given: Any) -> str:
    return said(lambda: DistributedModelParallel(built(), plan=given), ConfigError)


def test_a_plan_made_for_another_world_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    EmbeddingShardingPlanner(topology=Topology(2, "cpu")).plan(built()).save(path)
    for message in pool(SIZE).run(wrapped_with, str(path)):
        assert "2 ranks" in message
        assert "3" in message


def test_a_plan_made_for_another_model_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    EmbeddingShardingPlanner(topology=Topology(SIZE, "cpu")).plan(built(rows=11)).save(path)
    for message in pool(SIZE).run(wrapped_with, str(path)):
        assert "'rows'" in message
        assert "11 x 3" in message
        assert "9 x 3" in message


def test_a_plan_that_forgets_a_table_is_refused_on_every_rank(pool: Pool) -> None:
    forgetful = plan()
    del forgetful["ebc"]["copies"]
    for message in pool(SIZE).run(wrapped_with, forgetful):
        assert "'copies' of module 'ebc'" in message


def different_plans() -> str:
    own = plan()
    if dist.get_rank() == 1:
        own["ebc"]["rows"] = Tiling.of("rows", 9, 3, [(0, 5, 0, 3, 0), (5, 9, 0, 3, 2)])
    return said(lambda: DistributedModelParallel(built(), plan=own), ConfigError)


def test_ranks_whose_plans_differ_are_named_on_every_rank(pool: Pool) -> None:
    messages = pool(SIZE).run(different_plans)
    assert len(set(messages)) == 1
    assert "differs between ranks" in messages[0]
    assert "rank 1" in messages[0]
    assert "plan.ebc.rows" in messages[0]


# -------------------------------------------------------------------------------------------------------------- batches


def replaced(features: KeyedJaggedTensor, key: str, value: int) -> KeyedJaggedTensor:
    """The same batch with the first id of a feature changed."""
    values = features.values().clone()
    at = sum(features.length_per_key()[: features.keys().index(key)])
    values[at] = value
    return KeyedJaggedTensor(features.keys(), values, features.weights(), lengths=features.lengths())


def spoiled(how: str, features: KeyedJaggedTensor) -> Any:
    keys = features.keys()
    if how == "a feature is missing":
        return KeyedJaggedTensor.from_jt_dict({k: v for k, v in features.to_dict().items() if k != "copies"})
    if how == "a later module's feature is missing":
        return KeyedJaggedTensor.from_jt_dict({k: v for k, v in features.to_dict().items() if k != "sequence"})
    if how == "an id is too large":
        return replaced(features, "rows", 9)
    if how == "an id of a copied table is negative":
        return replaced(features, "copies", -1)
    if how == "an id of a later module is too large":
        return replaced(features, "sequence", 7)
    if how == "weights are missing":
        return KeyedJaggedTensor(keys, features.values(), lengths=features.lengths())
    assert how == "it is no batch"
    return None


BAD = {
    "a feature is missing": "feature 'copies' of table 'copies' is not in the batch",
    "a later module's feature is missing": "feature 'sequence' of table 'sequence' is not in the batch",
    "an id is too large": r"id 9 .*rows",
    "an id of a copied table is negative": r"id -1 .*copies",
    "an id of a later module is too large": r"id 7 .*sequence",
    "weights are missing": "weights",
    "it is no batch": "expected a KeyedJaggedTensor",
}


def spoiled_step(how: str) -> tuple[str, str]:
    """Good, bad, good steps; what the bad one said, and of what type."""
    rank = dist.get_rank()
    base, own = built(), built()
    dmp = DistributedModelParallel(own, plan=plan())
    dense = torch.optim.SGD([p for n, p in dmp.named_parameters() if n.startswith("over")], lr=0.01)
    reference = torch.optim.SGD(base.over.parameters(), lr=0.01)
    error: Exception | None = None
    for step in range(3):
        features: Any = batch(rank, step)
        if step == 1:
            before = {name: value.clone() for name, value in full_state_dict(dmp.module).items()}
            state = repr(dmp.fused_optimizer.state_dict())
            try:
                dmp(spoiled(how, features) if rank == 1 else features).backward()
            except Exception as caught:
                error = caught
            after = full_state_dict(dmp.module)
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert repr(dmp.fused_optimizer.state_dict()) == state
            continue
        dense.zero_grad()
        reference.zero_grad()
        dmp(features).mul(SIZE).backward()
        base(concat_batches([batch(home, step) for home in range(SIZE)])).backward()
        dense.step()
        reference.step()
    got = full_state_dict(dmp.module)
    for name, value in base.state_dict().items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)
    return type(error).__name__, str(error)


@pytest.mark.parametrize("how", BAD)
def test_a_bad_batch_on_one_rank_raises_on_all_names_the_rank_and_changes_nothing(how: str, pool: Pool) -> None:
    outcomes = pool(SIZE).run(spoiled_step, how)
    kind, message = outcomes.pop(1)
    assert kind == "InputError"
    assert re.search(BAD[how], message), message
    for kind, message in outcomes:
        assert kind == "InputError"
        assert "Rank 1 refused its batch" in message


def test_more_features_and_another_order_on_one_rank_are_fine(pool: Pool) -> None:
    pool(SIZE).run(other_keys)


def other_keys() -> None:
    rank = dist.get_rank()
    dmp = DistributedModelParallel(built(), plan=plan())
    plain = dmp(batch(rank)).detach()
    features = batch(rank)
    if rank == 1:
        jagged = features.to_dict()
        features = KeyedJaggedTensor.from_jt_dict({"unused": jagged["rows"], **dict(reversed(jagged.items()))})
    dist.barrier()
    torch.testing.assert_close(dmp(features).detach(), plain)


# ---------------------------------------------------------------------------------------------------------- lost ranks


def lost(place: str) -> tuple[str, float]:
    """Rank 1 dies in its second step; what the others hear, and after how many seconds."""
    dmp = DistributedModelParallel(built(), plan=plan())
    model = cast(Model, dmp.module)
    features = batch(dist.get_rank())
    dmp(features).backward()

    def die(at: str) -> None:
        if at == place and dist.get_rank() == 1:
            os._exit(3)

    model.fault = die
    start = time.monotonic()
    try:
        for _ in range(2):  # what a rank has sent may arrive after its death: then the next step misses it
            dmp(features).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("place", ["between", "backward"])
def test_a_rank_that_dies_in_a_step_is_an_error_on_the_others_long_before_the_time_out(place: str, pool: Pool) -> None:
    outcomes = pool(SIZE).run(lost, place, return_exceptions=True)
    dead = outcomes.pop(1)
    assert isinstance(dead, RankError)
    assert "exit code 3" in str(dead)
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        message, seconds = outcome
        assert message.startswith("CommsError: "), message
        assert "A peer has most likely died" in message
        assert seconds < 30  # of 60
