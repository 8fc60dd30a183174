"""Capacity of a running model: ids, rows and optimizer state follow, as on one process, bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharding.managed_models import (
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
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding import table_resize as resized_table
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.resize_ids import resize_ids
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.helpers import column_wise, data_parallel, row_wise, table_wise
from tilerec.sharding import resize_ids as sharding_resize_ids
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
        shard_2d(module, lambda: ([config], {}), group, ReplicaSettings(sync="exact", exact=True))
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
        ("user", 49, None, "got 49 rows in 6 buckets"),
        ("user", None, 4, "total_num_buckets=4 for a map of 6 buckets"),
        ("user", None, 2, "2 buckets cannot be shared by 3 ranks"),
        ("item", 80, None, r"cut at 14, inside a bucket \(4 rows\); cut at multiples of 4"),
        ("plain", 80, None, "got 'plain', which 0 modules map"),
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
        assert "rows is 96 on rank 0 and 144 on rank 1" in words


def places(module: Any, ids: range) -> dict[int, int]:
    found = {id_: module.inspect("u", id_).row for id_ in ids}
    return {id_: row for id_, row in found.items() if row is not None}


WEIGHT = "_embedding_module.embedding_bags.user.weight"


@pytest.mark.parametrize("size", [1, 2])
def test_replicas_that_are_averaged_keep_what_each_has_learned(size: int) -> None:
    """Each row goes on with this replica's values, its optimizer state, and the mark that it was touched."""

    def fn(group: Group) -> None:
        module = build(POLICY)
        cuts = {"user": row_wise(num_buckets=2), "item": table_wise(rank=0), "plain": table_wise(rank=0)}
        two_d = shard_2d(module, lambda: ([GroupConfig(cuts, size)], {}), group, ReplicaSettings(sync="average"))
        vars(module)["_two_d"] = two_d
        train(module, group, sizes_of(4), range(HALF))
        rows, before = places(module, range(150)), full_state_dict(module)[WEIGHT].clone()
        fresh = build(POLICY)
        fresh.resize("user", 96)
        table = module.embedding_module._tables["user"]
        marked = sum(int(tile.touched.marks.sum()) for tile in table.tile_rows)
        sums = [tile.state["sum"].sum() for tile in table.tile_rows]
        assert resize_ids(module, "user", 96).kept == len(rows)
        now, after = places(module, range(150)), full_state_dict(module)[WEIGHT]
        assert set(now) == set(rows)
        assert torch.equal(after[list(now.values())], before[list(rows.values())])
        used = [*now.values(), *range(15, 96, 16)]  # rows that are shared, too
        others = [row for row in range(96) if row not in used]
        assert torch.equal(after[others], fresh.embedding_module._tables["user"].weight[others])
        assert sum(int(tile.touched.marks.sum()) for tile in table.tile_rows) == marked
        assert marked or group.rank == 3  # which has no samples
        assert [tile.state["sum"].sum() for tile in table.tile_rows] == sums
        assert two_d.parts[0].plan.group_plan.plan["_embedding_module"]["user"].tiling == table.tiling
        train(module, group, sizes_of(4), range(HALF, STEPS))
        reshard(module, {"_embedding_module": {"user": table_wise(rank=size - 1)}})
        train(module, group, sizes_of(4), range(1))
        two_d.sync()
        same = group.all_gather_object(full_state_dict(module)[WEIGHT].tolist())
        assert all(weights == same[0] for weights in same)

    run_virtual_ranks(4, fn)


def test_replicas_of_2d_are_cut_anew_after_their_capacity_changed() -> None:
    state, _, _ = alone("more rows")

    def fn(group: Group) -> Any:
        module = build(POLICY)
        config = GroupConfig({"_embedding_module": plan(2)["_embedding_module"]}, 2)
        settings = ReplicaSettings(sync="exact", exact=True)
        vars(module)["_two_d"] = shard_2d(module, lambda: ([config], {}), group, settings)
        train(module, group, sizes_of(4), range(HALF))
        resize_ids(module, "user", 96)
        reshard(module, {"_embedding_module": {"item": row_wise()}})
        train(module, group, sizes_of(4), range(HALF, STEPS))
        return full_state_dict(module)

    for full in run_virtual_ranks(4, fn):
        assert_same(full, state)


def unattached() -> Any:
    module = build(POLICY)
    for table in module.embedding_module._tables.values():
        table.rows.spec = table.rows.group = None
        table.rows.takes_gradients = False
        table.rows.state = {}
    return module


STEPPERS: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
}


@pytest.mark.filterwarnings("ignore:Table .* evicted rows get their initial values")
@pytest.mark.parametrize(("kind", "change"), [("Adam", "more rows"), ("Adagrad", "buckets merge")])
def test_an_optimizer_that_steps_the_table_follows(kind: str, change: str) -> None:
    _, table, rows, buckets = CHANGES[change]

    def fn(group: Group) -> Any:
        module = unattached()
        shard(module, plan(group.size), group, exact=True)
        optimizer = STEPPERS[kind](module.parameters())
        for step in range(STEPS):
            if step == HALF:
                own = module.embedding_module._tables[table]
                slot = {"Adam": "exp_avg", "Adagrad": "sum"}[kind]
                parameter = own.weight
                at, old = places(module, range(0, 150, 4)), optimizer.state[parameter][slot].clone()
                resize_ids(module, table, rows, buckets, optimizers=[optimizer])
                now, new = places(module, range(0, 150, 4)), optimizer.state[parameter][slot]
                assert own.weight is parameter
                assert new.shape == parameter.shape == (own.place_of(0).r1 - own.place_of(0).r0, 8)
                if group.size == 1:
                    assert torch.equal(new[list(now.values())], old[[at[id_] for id_ in now]])
                    assert (new == {"Adam": 0.0, "Adagrad": 0.5}[kind]).all(1).any()  # rows that nobody had
            train(module, group, sizes_of(group.size), range(step, step + 1))
            optimizer.step()
            optimizer.zero_grad()
        return full_state_dict(module)

    (one,) = run_virtual_ranks(1, fn)
    for full in run_virtual_ranks(2, fn):
        assert_same(full, one)


def test_a_gradient_that_is_there_follows_its_rows() -> None:
    def fn(group: Group) -> None:
        module = unattached()
        shard(module, plan(2), group, exact=True)
        train(module, group, sizes_of(2), range(1))
        table = module.embedding_module._tables["user"]
        before, weight = table.weight.grad.clone(), table.weight.detach().clone()
        resize_ids(module, "user", 96)
        after = table.weight.grad
        assert after.shape == table.weight.shape
        some = before.abs().sum(1).nonzero().squeeze(1)
        assert some.numel()
        for row in some:
            (found,) = (table.weight == weight[row]).all(1).nonzero().squeeze(1)
            assert torch.equal(after[found], before[row])
        assert after.abs().sum() == before.abs().sum()

    run_virtual_ranks(2, fn)


@pytest.mark.parametrize("where", ["ids", "tiles"])
def test_a_rank_that_cannot_make_its_part_leaves_all_as_they_were(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module_of = {"ids": sharding_resize_ids, "tiles": resized_table}[where]
    name = {"ids": "resize_id_map", "tiles": "fill_initial"}[where]
    real, broken = getattr(module_of, name), threading.local()

    def fails(*arguments: Any) -> Any:
        if getattr(broken, "now", False):
            raise MemoryError("no room for it")
        return real(*arguments)

    monkeypatch.setattr(module_of, name, fails)
    state, _, _ = alone("buckets merge")

    def fn(group: Group) -> Any:
        module = build(POLICY)
        shard(module, plan(3), group, exact=True)
        train(module, group, sizes_of(3), range(HALF))
        before = {name: value.clone() for name, value in full_state_dict(module).items()}
        broken.now = group.rank == 1
        expected: Any = MemoryError if group.rank == 1 else ConfigError
        with pytest.raises(expected, match="no room for it"):
            resize_ids(module, "user", None, 3)
        broken.now = False
        assert_same(full_state_dict(module), before)
        resize_ids(module, "user", None, 3)
        train(module, group, sizes_of(3), range(HALF, STEPS))
        return full_state_dict(module)

    for full in run_virtual_ranks(3, fn):
        assert_same(full, state)
