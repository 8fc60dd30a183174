"""Whoever reads and writes rows besides lookups and updates sees those in caches: ids, averages, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.parallel.resharding.test_rebalance import HOT, NAMES, ROWS, planner, together
from tests.parallel.resharding.test_rebalance import base as rebalanced_base
from tests.parallel.test_cached import Model, batch, cached_plan, everything, plan, train
from tests.parallel.test_model_parallel import Pool
from tests.parallel.two_d.test_shard_2d import model as two_d_model
from tests.parallel.two_d.test_shard_2d import train as train_two_d
from tests.sharding.managed_models import (
    POLICIES,
    STEPS,
    alone,
    assert_same,
    build,
    global_batch,
    sizes_of,
    upstream,
)
from tests.sharding.managed_models import train as train_managed
from tilerec import apply_optimizer_in_backward, cache_tables, flush_caches, shard
from tilerec.comms.group import Group
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.resize_ids import resize_ids
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.helpers import column_wise, row_wise, table_wise
from tilerec.spec.optimizer import Adam
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks


@pytest.mark.parametrize("policy", POLICIES)
def test_evicted_ids_rows_begin_anew_in_the_cache(policy: str) -> None:
    maps, state, _ = alone(policy)
    module = cache_tables(build(policy), 0.3)
    for step in range(STEPS):
        out, remapped = module(global_batch(step))
        (out.values() * upstream(step, 12, out.values().shape[1])).sum().backward()
        assert torch.equal(remapped.values(), maps[step].values())
    assert_same(dict(module.state_dict()), state)


@pytest.mark.parametrize("policy", POLICIES)
def test_evicted_ids_rows_begin_anew_in_the_caches_of_their_owners(policy: str) -> None:
    _, state, _ = alone(policy)
    cuts = {"user": row_wise(), "item": column_wise([0, 1]), "plain": table_wise(rank=1)}
    base = cache_tables(build(policy), 0.3)

    def run(group: Group) -> dict[str, Any]:
        module = shard(copy.deepcopy(base), {"_embedding_module": cuts}, mesh=group, exact=True)
        train_managed(module, group, sizes_of(2), range(STEPS))
        assert module._embedding_module.cache_stats()
        return full_state_dict(module)

    for own in run_virtual_ranks(2, run):
        assert_same(own, state)


def test_a_cached_table_gets_another_capacity_with_its_newest_rows() -> None:
    policy = "lru and lfu, shared rows"
    cuts = {"user": row_wise(num_buckets=3), "item": column_wise([0, 1]), "plain": table_wise(rank=0)}

    def run(group: Group, base: Any) -> dict[str, Any]:
        module = shard(copy.deepcopy(base), {"_embedding_module": cuts}, mesh=group, exact=True)
        train_managed(module, group, sizes_of(2), range(3))
        resize_ids(module, "user", 96)
        train_managed(module, group, sizes_of(2), range(3, STEPS))
        return full_state_dict(module)

    plain = run_virtual_ranks(2, run, build(policy))
    cached = run_virtual_ranks(2, run, cache_tables(build(policy), 0.3))
    for want, own in zip(plain, cached, strict=True):
        assert_same(own, want)


@pytest.mark.parametrize(
    "settings", [ReplicaSettings("exact"), ReplicaSettings("average", 1), ReplicaSettings("average", 2)]
)
def test_replicas_that_are_averaged_average_the_newest_rows(settings: ReplicaSettings) -> None:
    def run(group: Group, base: Any) -> dict[str, Any]:
        module = copy.deepcopy(base)
        two = shard_2d(module, lambda: ([GroupConfig(None, 2)], {}), group, settings)
        caches = [rows.cache for table in module.ebc._leaves.tables for rows in table.tile_rows]
        assert [own is not None for own in caches] == [
            table.rows.cache is not None for table in base.ebc._tables.values()
        ]
        state = train_two_d(module, group, two, steps=5)
        return {
            **state,
            **{f"again {name}": value for name, value in train_two_d(module, group, two, steps=2).items()},
        }

    plain = run_virtual_ranks(4, run, two_d_model())
    cached = run_virtual_ranks(4, run, cache_tables(two_d_model(), 0.3))
    for want, own in zip(plain, cached, strict=True):
        assert_same(own, want)


def test_a_rebalance_moves_cached_tables_and_leaves_them_cached() -> None:
    def run(group: Group, base: Any) -> dict[str, Any]:
        module = shard(copy.deepcopy(base), together(0), mesh=group)
        cached = [table.rows.cache is not None for table in base._tables.values()]
        for step in range(4):
            if step == 2:
                assert rebalance(module, planner(), load=HOT, horizon=10_000).moved is not None
            kjt = random_batch(list(NAMES), ROWS, 8, seed=10 * step + group.rank)
            module(kjt).values().square().sum().backward()
        assert [table.rows.cache is not None for table in module._tables.values()] == cached
        return full_state_dict(module)

    torch.manual_seed(0)
    base = rebalanced_base()
    plain = run_virtual_ranks(2, run, base)
    cached = run_virtual_ranks(2, run, cache_tables(copy.deepcopy(base), 0.1))
    for want, own in zip(plain, cached, strict=True):
        assert_same(own, want)


def checkpointed(path: str) -> None:
    """Saved from one cut of cached tables, loaded into another, and into tables without a cache."""
    from tilerec.comms.process import ProcessGroupComms

    def made(own: Any) -> Any:
        torch.manual_seed(0)
        model = Model()
        apply_optimizer_in_backward(Adam(0.1), model.parameters())
        return shard(model, own)

    def parts(model: Any) -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "ebc": model.ebc.fused_optimizer.state_dict(),
            "ec": model.ec.fused_optimizer.state_dict(),
        }

    group = ProcessGroupComms()
    first = made(cached_plan("row_wise"))
    train(first, group, range(3))
    dcp.save(parts(first), checkpoint_id=path)
    want = everything(first)
    for own in (cached_plan("column_wise"), plan("row_wise")):
        other = made(own)
        train(other, group, range(7, 9))
        state = parts(other)
        dcp.load(state, checkpoint_id=path)
        other.load_state_dict(state["model"])
        other.ebc.fused_optimizer.load_state_dict(state["ebc"])
        other.ec.fused_optimizer.load_state_dict(state["ec"])
        for a, b in zip(everything(other), want, strict=True):
            assert torch.equal(a, b)
    # Gradients of both ranks, in both: training goes on alike.
    again = made(cached_plan("row_wise"))
    state = parts(again)
    dcp.load(state, checkpoint_id=path)
    again.load_state_dict(state["model"])
    again.ebc.fused_optimizer.load_state_dict(state["ebc"])
    again.ec.fused_optimizer.load_state_dict(state["ec"])
    for model in (first, again):
        train(model, group, range(3, 5))
    for a, b in zip(everything(first), everything(again), strict=True):
        assert torch.equal(a, b)
    flush_caches(first)
    assert dist.get_world_size() == 2
    assert batch(0, 0).keys() == ["f", "g"]


def test_distributed_checkpoints_have_the_newest_rows_whatever_the_plan(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(checkpointed, str(tmp_path / "saved"))
