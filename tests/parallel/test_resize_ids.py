"""Capacity of a running model: ids, rows and optimizer state follow, as on one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.sharding.test_managed_collision import (
    STEPS,
    assert_same,
    build,
    global_batch,
    local_batch,
    sizes_of,
    train,
    upstream,
)
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.reshard import reshard
from tilerec.parallel.resize_ids import resize_ids
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d import GroupConfig, ReplicaSettings, shard_2d
from tilerec.planner.helpers import column_wise, data_parallel, row_wise, table_wise
from tilerec.spec.optimizer import SGD
from tilerec.testing.virtual import run_virtual_ranks

POLICY = "lru and lfu, shared rows"
LATE = "rejected and admitted late"
HALF = 3

# `user` has 6 buckets of 8 rows, `item` 10 of 4 (POLICY) or 5 of 8 (LATE).
CHANGES: dict[str, tuple[str, str, int | None, int | None]] = {
    "more rows": (POLICY, "user", 96, None),
    "fewer rows": (POLICY, "user", 24, None),
    "buckets split": (POLICY, "item", None, 30),
    "buckets merge": (POLICY, "user", None, 3),
    "merge and keep their rows": (POLICY, "user", 48, 3),
    "split and keep their rows": (POLICY, "user", 48, 12),
    "split late": (LATE, "item", None, 10),
}


def plan(world: int) -> dict[str, dict[str, Any]]:
    cuts = {"user": row_wise(num_buckets=3), "item": column_wise([0, world - 1]), "plain": table_wise(rank=0)}
    return {"_embedding_module": cuts}


def alone(change: str) -> tuple[dict[str, Tensor], Any, Any]:
    policy, table, rows, buckets = CHANGES[change]
    module = build(policy)
    for step in range(STEPS):
        if step == HALF:
            moved = module.resize(table, rows, buckets)
        out, _ = module(global_batch(step))
        (out.values() * upstream(step, 12, 35)).sum().backward()
    return dict(module.state_dict()), moved, module.stats()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_running_model_changes_its_capacity_as_one_process_does(change: str, world: int) -> None:
    policy, table, rows, buckets = CHANGES[change]
    state, moved, stats = alone(change)

    def fn(group: Group) -> Any:
        module = build(policy)
        shard(module, plan(world), group, exact=True)
        train(module, group, sizes_of(world), range(HALF))
        told = resize_ids(module, table, rows, buckets)
        own = plan_of(module).plan["_embedding_module"][table].tiling
        assert own == module.embedding_module._tables[table].tiling
        assert own.rows == module.embedding_module._tables[table].config.num_embeddings
        train(module, group, sizes_of(world), range(HALF, STEPS))
        reshard(module, {"_embedding_module": dict.fromkeys(["user", "item", "plain"], data_parallel())})
        return full_state_dict(module), told, module.stats()

    for full, told, counted in run_virtual_ranks(world, fn):
        assert_same(full, state)
        assert told.kept == moved.kept
        assert sorted(told.dropped_ids.tolist()) == sorted(moved.dropped_ids.tolist())
        assert counted == stats


def test_replicas_of_2d_change_together() -> None:
    state, _, _ = alone("more rows")

    def fn(group: Group) -> Any:
        module = build(POLICY)
        config = GroupConfig({"_embedding_module": plan(2)["_embedding_module"]}, 2)
        shard_2d(module, [config], group, ReplicaSettings(sync="exact", exact=True))
        train(module, group, sizes_of(4), range(HALF))
        resize_ids(module, "user", 96)
        train(module, group, sizes_of(4), range(HALF, STEPS))
        return full_state_dict(module)

    for full in run_virtual_ranks(4, fn):
        assert_same(full, state)


def test_a_batch_that_was_routed_before_the_capacity_changed_gets_the_rows_of_now() -> None:
    def fn(group: Group) -> None:
        module = build(POLICY)
        shard(module, plan(2), group, exact=True)
        train(module, group, sizes_of(2), range(2))
        routed = module.route(local_batch(2, group, sizes_of(2)))
        resize_ids(module, "user", 96)
        _, remapped = module(routed)
        ids = local_batch(2, group, sizes_of(2))["u"].values().tolist()
        for rank in range(2):
            for id_ in range(150):
                place = module.inspect("u", id_)
                if rank == group.rank and id_ in ids:
                    assert remapped["u"].values()[ids.index(id_)] in (place.row, place.shared_row)

    run_virtual_ranks(2, fn)


def test_an_unsharded_model_is_resized_too() -> None:
    module = build(POLICY)
    module(global_batch(0))
    live = module.stats()["user"].live
    assert resize_ids(module, "user", 96).kept == live


@pytest.mark.parametrize(
    ("table", "rows", "buckets", "words"),
    [
        ("user", 49, None, "49 rows do not fill 6 buckets"),
        ("user", None, 4, "6 buckets cannot become 4"),
        ("user", None, 2, "2 buckets cannot be shared by 3 ranks"),
        ("item", 80, None, r"cut at 14, inside of a bucket \(4 rows\); cut at multiples of 4"),
        ("plain", 80, None, "0 modules map a table 'plain'"),
    ],
)
def test_what_cannot_be_changes_nothing_on_any_rank(
    table: str, rows: int | None, buckets: int | None, words: str
) -> None:
    def fn(group: Group) -> None:
        module = build(POLICY)
        cuts = {"user": row_wise(num_buckets=3), "item": row_wise(), "plain": table_wise(rank=0)}
        shard(module, {"_embedding_module": cuts}, group, exact=True)
        train(module, group, sizes_of(3), range(2))
        before = full_state_dict(module)
        with pytest.raises(ConfigError, match=words):
            resize_ids(module, table, rows, buckets)
        assert_same(full_state_dict(module), before)
        train(module, group, sizes_of(3), range(2, 3))

    run_virtual_ranks(3, fn)


def test_ranks_that_want_other_sizes_are_named() -> None:
    def fn(group: Group) -> str:
        module = build(POLICY)
        shard(module, plan(2), group)
        with pytest.raises(ConfigError) as caught:
            resize_ids(module, "user", 96 + 48 * group.rank)
        return str(caught.value)

    for words in run_virtual_ranks(2, fn):
        assert "['rows'] is 96 on rank 0 and 144 on rank 1" in words


def test_a_table_that_others_step_is_refused() -> None:
    def fn(group: Group) -> None:
        module = build(POLICY)
        for table in module.embedding_module._tables.values():
            table.rows.spec = table.rows.group = None
            table.rows.takes_gradients = False
        shard(module, plan(2), group)
        with pytest.raises(ConfigError, match="stepped by an optimizer that would not follow"):
            resize_ids(module, "user", 96)
        apply_optimizer_in_backward(SGD(lr=0.5), module.parameters())
        resize_ids(module, "user", 96)
        out, _ = module(local_batch(0, group, sizes_of(2)))
        out.values().sum().backward()

    run_virtual_ranks(2, fn)


def test_replicas_that_are_averaged_are_not_resized() -> None:
    def fn(group: Group) -> None:
        module = build(POLICY)
        shard_2d(module, [GroupConfig(table_wise(rank=0), 1)], group, ReplicaSettings(sync="average"))
        with pytest.raises(ConfigError, match="averaged now and then"):
            resize_ids(module, "user", 96)

    run_virtual_ranks(2, fn)
