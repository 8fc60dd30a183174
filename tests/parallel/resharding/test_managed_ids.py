"""Managed collision in a whole model: checkpoints between world sizes, `DistributedModelParallel`, 2D, resharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from tests.sharding.managed_models import (
    STEPS,
    alone,
    assert_same,
    build,
    global_batch,
    local_batch,
    sizes_of,
    train,
)
from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.helpers import column_wise, row_wise, table_wise
from tilerec.sharding.tiled_tensor import TiledTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.testing.batches import concat_batches
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

Pool = Callable[[int], Ranks]
POLICY = "lru and lfu, shared rows"
IDS = "_managed_collision_collection._managed_collision_modules.user.ids"


def columns(ranks: list[int]) -> dict[str, dict[str, Any]]:
    """The wide tables in columns."""
    cut = column_wise(ranks)
    return {"_embedding_module": {"user": cut, "item": cut, "plain": table_wise(rank=ranks[-1])}}


def _states(module: Any) -> dict[str, Any]:
    return {"model": module.state_dict(), "optimizer": module.embedding_module.fused_optimizer.state_dict()}


def _save(folder: str, policy: str, steps: range) -> str:
    group = group_of(None)
    module = build(policy)
    shard(module, row_wise(), exact=True)
    train(module, group, sizes_of(group.size), steps)
    dcp.save(_states(module), checkpoint_id=folder)
    return type(module.state_dict()[IDS]).__name__


def _load(folder: str, policy: str, steps: range) -> dict[str, Tensor]:
    group = group_of(None)
    module = build(policy)
    module(global_batch(77))  # what it had before does not count
    shard(module, columns([0, group.size - 1]), exact=True)
    states = _states(module)
    dcp.load(states, checkpoint_id=folder)
    module.load_state_dict(states["model"])
    module.embedding_module.fused_optimizer.load_state_dict(states["optimizer"])
    train(module, group, sizes_of(group.size), steps)
    return full_state_dict(module)


@pytest.mark.parametrize("policy", [POLICY, "rejected and admitted late"])
def test_a_job_moves_between_numbers_of_ranks_and_goes_on_with_the_bits_of_one_process(
    pool: Pool, tmp_path: Path, policy: str
) -> None:
    kinds = pool(2).run(_save, str(tmp_path), policy, range(3))
    assert set(kinds) <= {"DTensor", "TiledTensor"}
    for full in pool(3).run(_load, str(tmp_path), policy, range(3, STEPS)):
        assert_same(full, alone(policy)[1])


def test_a_checkpoint_of_many_ranks_is_one_of_a_process(pool: Pool, tmp_path: Path) -> None:
    pool(3).run(_save, str(tmp_path), POLICY, range(STEPS))
    module = build(POLICY)
    states = _states(module)
    dcp.load(states, checkpoint_id=str(tmp_path))
    module.load_state_dict(states["model"])
    assert_same(dict(module.state_dict()), alone(POLICY)[1])


def _refused(folder: str) -> tuple[str, bool]:
    module = build("rejected and admitted late")
    shard(module, row_wise(), exact=True)
    train(module, group_of(None), sizes_of(2), range(2))
    before = full_state_dict(module)
    try:
        states = module.state_dict()
        dcp.load({"model": states}, checkpoint_id=folder)
        module.load_state_dict(states)
        words = ""
    except CheckpointException as error:
        words = f"{error} {getattr(error, 'failures', '')}"
    after = full_state_dict(module)
    dist.barrier()
    return words, all(torch.equal(after[name], value) for name, value in before.items())


def test_a_checkpoint_of_other_buckets_is_refused_and_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    """`user` has six buckets of seven own rows there and of eight here; `item` ten there and five here."""
    pool(3).run(_save, str(tmp_path), POLICY, range(2))
    for words, same in pool(2).run(_refused, str(tmp_path)):
        assert "ize mismatch" in words or "Missing key" in words
        assert same


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = build(POLICY)
        self.over = nn.Linear(35, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, _ = self.ids(features)
        return self.over(pooled.values())


def _model_parallel() -> tuple[list[float], list[str], int]:
    torch.manual_seed(0)
    group = group_of(None)
    model = DistributedModelParallel(Model(), plan={"ids._embedding_module": row_wise()})
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name.startswith("over")], lr=0.1)
    sizes, losses = [6, 6], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(local_batch(step, group, sizes)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    names = list(model.state_dict())
    copy = model.copy("cpu")
    copy(local_batch(0, group, sizes))
    return losses, names, sum(stats.live for stats in model.module.ids.stats().values())


def test_a_model_with_a_dense_part_trains_as_on_one_process(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    want = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = model(global_batch(step)).pow(2)
        each.mean().backward()
        optimizer.step()
        want.append((each[:6].mean().item(), each[6:].mean().item()))
    results = pool(2).run(_model_parallel)
    for rank, (losses, names, live) in enumerate(results):
        assert losses == pytest.approx([pair[rank] for pair in want], rel=1e-4)
        assert names == list(model.state_dict())
        assert live == sum(stats.live for stats in model.ids.stats().values())


def _threads_have_no_dtensors() -> None:
    module = build(POLICY)
    shard(module, row_wise())
    state = module.state_dict()
    assert isinstance(state[IDS], DTensor | TiledTensor)
    assert tuple(state[IDS].shape) == (42,)
    assert torch.equal(state[IDS].full_tensor(), full_state_dict(module)[IDS])


def test_state_is_logical(pool: Pool) -> None:
    pool(3).run(_threads_have_no_dtensors)


@pytest.mark.parametrize("form", ["path", "module", "plan", "bare"])
def test_a_plan_may_name_the_module_or_its_tables(form: str) -> None:
    """TorchRec's plans name the module with managed collision."""
    cuts = {"user": row_wise(), "item": table_wise(rank=1), "plain": table_wise(rank=0)}

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ids = build(POLICY)

    def fn(group: Group) -> Any:
        model = Around() if form != "bare" else build(POLICY)
        forms: dict[str, Any] = {
            "path": {"ids._embedding_module": cuts},
            "module": {"ids": cuts},
            "bare": cuts,
        }
        if form == "plan":
            first = Around()
            shard(first, {"ids": cuts}, group)
            forms["plan"] = ShardingPlan({"ids": plan_of(first).plan["ids._embedding_module"]})
        shard(model, forms[form], group)
        return plan_of(model).plan

    (plan, other) = run_virtual_ranks(2, fn)
    assert list(plan) == (["_embedding_module"] if form == "bare" else ["ids._embedding_module"])
    assert plan == other
    assert next(iter(plan.values()))["item"].ranks == (1,)


@pytest.mark.parametrize("two_d", [False, True])
def test_a_plan_to_reshard_to_may_name_the_module(two_d: bool, tmp_path: Path) -> None:
    cuts = {"user": row_wise(), "item": table_wise(rank=1), "plain": table_wise(rank=0)}

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ids = build(POLICY)

    def fn(group: Group) -> None:
        model = Around()
        if two_d:
            settings = ReplicaSettings(sync="exact")
            vars(model)["_two_d"] = shard_2d(model, lambda: ([GroupConfig({"ids": cuts}, 2)], {}), group, settings)
        else:
            shard(model, {"ids": cuts}, group)
        user = model.ids.embedding_module._tables["user"]
        reshard(model, {"ids": {"user": table_wise(rank=0)}})
        assert [tile.r1 for tile in user.tiling.tiles_of(0)] == [48]
        item = ParameterSharding("table_wise", ranks=[0])
        ShardingPlan({"ids": EmbeddingModuleShardingPlan({"item": item})}).save(tmp_path / f"{group.rank}.json")
        reshard(model, tmp_path / f"{group.rank}.json")
        assert model.ids.embedding_module._tables["item"].tiling.tiles_of(0)

    run_virtual_ranks(2, fn)


# --------------------------------------------------------------------------------------------------------------- 2D


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_replicas_share_one_map(size: int, across: bool) -> None:
    """1 x 4, 2 x 2 and 4 x 1 ranks, gradients exchanged: weights, too, are those of one process."""

    def fn(group: Group) -> Any:
        module = build(POLICY)
        config = GroupConfig(row_wise(), size, across_hosts=across)
        shard_2d(module, lambda: ([config], {}), group, ReplicaSettings(sync="exact", exact=True))
        train(module, group, sizes_of(4), range(STEPS))
        return full_state_dict(module), module.stats()

    for full, stats in run_virtual_ranks(4, fn):
        assert_same(full, alone(POLICY)[1])
        assert stats == alone(POLICY)[2]


def test_replicas_that_are_averaged_share_one_map() -> None:
    """Their weights differ between two averages; which id has which row never does."""

    def fn(group: Group) -> Any:
        module = build(POLICY)
        config = GroupConfig({"_embedding_module": table_wise(rank=1)}, 2)
        two_d = shard_2d(module, lambda: ([config], {}), group, ReplicaSettings(sync="average"))
        maps = train(module, group, sizes_of(4), range(2))
        two_d.sync()
        maps += train(module, group, sizes_of(4), range(2, STEPS))
        two_d.sync()
        return maps, full_state_dict(module), module.stats()

    results = run_virtual_ranks(4, fn)
    maps, state, stats = alone(POLICY)
    for step in range(STEPS):
        together = concat_batches([own[step] for own, _, _ in results])
        assert torch.equal(together.values(), maps[step].values())
    for _, full, counted in results:
        for name, value in state.items():
            if not value.dtype.is_floating_point:
                assert torch.equal(full[name], value), name
            else:
                assert torch.equal(full[name], results[0][1][name]), name
        assert counted == stats


def _two_replicas(sync: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    group = group_of(None)
    model = DMPCollection(
        Model(), torch.device("cpu"), {"ids": table_wise(rank=0)}, world_size=2, sharding_group_size=1,
        global_pg=dist.group.WORLD, sync=sync,
    )  # fmt: skip
    for step in range(STEPS):
        model(local_batch(step, group, sizes_of(2))).sum().backward()
        model.sync()
    return full_state_dict(model), [p.detach().clone() for p in model.module.ids.parameters()]


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_dmp_collection_has_one_map_too(pool: Pool, sync: str) -> None:
    (one, weights), (other, others) = pool(2).run(_two_replicas, sync)
    for name, value in alone(POLICY)[1].items():
        if not value.dtype.is_floating_point:
            assert torch.equal(one[f"ids.{name}"], value), name
            assert torch.equal(other[f"ids.{name}"], value), name
    for mine, theirs in zip(weights, others, strict=True):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------------------------------------------- resharding


def test_ids_stay_where_they_are_when_tables_move() -> None:
    def fn(group: Group) -> Any:
        module = build(POLICY)
        shard(module, row_wise(), group, exact=True)
        train(module, group, sizes_of(3), range(3))
        reshard(module, columns([2, 0]))
        train(module, group, sizes_of(3), range(3, STEPS))
        return full_state_dict(module)

    for full in run_virtual_ranks(3, fn):
        assert_same(full, alone(POLICY)[1])
