"""Hot rows in 2D parallelism: with exact or two averaged replicas the bits of models without them; equal copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.test_hot_rows import HOT, assert_alike, plan, state_of, train, unsharded
from tests.sharding.managed_models import STEPS, alone, assert_same, build, sizes_of
from tests.sharding.managed_models import train as train_managed
from tests.sharding.test_hot_managed import HALF, POLICY, hot_plan, resized_alone
from tests.sharding.test_hot_managed import HOT as HOT_ROWS
from tilerec.comms.group import Group
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.rebalance import rebalance
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.resize_ids import resize_ids
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding
from tilerec.testing.virtual import run_virtual_ranks


def model_2d(group: Group, size: int, hot: bool, kernel: str | None = None) -> Any:
    """A model over sharding groups of so many ranks."""
    model = unsharded()
    made = DMPCollection(
        model,
        "cpu",
        {"": plan(hot, size, kernel)},
        group.size,
        size,
        group,
        sync="exact",
        exact=True,
        init_data_parallel=False,
    )
    assert made.module is model
    return model, made


@pytest.mark.parametrize(("world", "size", "kernel"), [(4, 2, None), (6, 2, None), (4, 2, "fused_uvm_caching")])
def test_exact_replicas_with_hot_rows_have_the_bits_of_those_without(world: int, size: int, kernel: str | None) -> None:
    def live(group: Group) -> None:
        (model, _), (plain, _) = model_2d(group, size, True, kernel), model_2d(group, size, False)
        for step in range(3):
            assert torch.equal(train(model, group.rank, step), train(plain, group.rank, step))
        for name, table in model._tables.items():
            assert table.tiling.head.hot == HotRows(np.array(HOT[name]))
            assert table.tiling.head.owners == tuple(range(world))
        assert_alike(model, state_of(plain))
        check_replicas(model)

    run_virtual_ranks(world, live)


def test_hot_rows_of_exact_replicas_move_and_the_plan_of_a_group_has_them() -> None:
    def live(group: Group) -> None:
        (model, made), (plain, _) = model_2d(group, 2, True), model_2d(group, 2, False)
        other = {
            "rows": ParameterSharding("table_wise", ranks=[1], hot=HotRows(np.array([3, 4]))),
            "one": ParameterSharding("row_wise", hot=HotRows()),
        }
        for act in (lambda: reshard(made, {"": other}, progress=False), lambda: None):
            for step in range(2):
                assert torch.equal(train(model, group.rank, step), train(plain, group.rank, step))
            act()
        hot = {name: sharding.hot for _, name, sharding in made.plan.group_plan.tables()}
        assert hot == {
            "rows": HotRows(np.array([3, 4])),
            "one": HotRows(),
            "columns": HotRows(np.array(HOT["columns"])),
        }
        assert_alike(model, state_of(plain))
        check_replicas(model)

    run_virtual_ranks(4, live)


def test_a_rebalance_of_exact_replicas_leaves_hot_rows_as_they_are() -> None:
    def live(group: Group) -> None:
        model, made = model_2d(group, 2, True)
        train(model, group.rank, 0)
        rebalance(made, least_gain=0.0, horizon=10**9, progress=False)
        for name, table in model._tables.items():
            assert table.tiling.head.hot == HotRows(np.array(HOT[name]))
        check_replicas(model)

    run_virtual_ranks(4, live)


def test_exact_replicas_of_managed_tables_reset_copies_and_follow_ids() -> None:
    state, _, _ = resized_alone("more rows")
    _, plain, _ = alone(POLICY)

    def fn(group: Group) -> Any:
        found = []
        for resized in (False, True):
            module = build(POLICY)
            config = GroupConfig(hot_plan(2), 2)
            two_d = shard_2d(module, lambda own=config: ([own], {}), group, ReplicaSettings(sync="exact", exact=True))  # type: ignore[misc]
            vars(module)["_two_d"] = two_d
            train_managed(module, group, sizes_of(4), range(HALF))
            if resized:
                resize_ids(module, "user", 96)
                own = plan_of(module).plan["_embedding_module"]["user"]
                assert own.hot == module.embedding_module._tables["user"].tiling.head.hot
                assert two_d.parts[0].plan.group_plan.plan["_embedding_module"]["user"].hot == own.hot
            train_managed(module, group, sizes_of(4), range(HALF, STEPS))
            check_replicas(module)
            found.append(full_state_dict(module))
        return found

    for without, resized in run_virtual_ranks(4, fn):
        assert_same(without, plain)
        assert_same(resized, state)


def averaged(group: Group, size: int, hot: bool, kernel: str | None = None, **more: Any) -> Any:
    """A model of averaged replicas over sharding groups of so many ranks."""
    model = unsharded()
    made = DMPCollection(
        model, "cpu", {"": plan(hot, size, kernel)}, group.size, size, group, sync="average", exact=True,
        init_data_parallel=False, **more,
    )  # fmt: skip
    return model, made


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kernel", [None, "fused_uvm_caching"])
def test_two_averaged_replicas_with_hot_rows_have_the_bits_of_those_without(kernel: str | None, wait: bool) -> None:
    """A sum of two replicas has one order."""

    def live(group: Group) -> None:
        (model, made), (plain, other) = averaged(group, 2, True, kernel), averaged(group, 2, False)
        for step in range(6):
            assert torch.equal(train(model, group.rank, step), train(plain, group.rank, step))
            if step % 2:
                for own in (made, other):
                    own.sync(include_optimizer_state=step > 1, wait=wait)
        for name, table in model._tables.items():
            assert table.tiling.head.hot == HotRows(np.array(HOT[name]))
        assert_alike(model, state_of(plain))
        check_replicas(model)

    run_virtual_ranks(4, live)


@pytest.mark.parametrize("hooked", [False, True])
def test_copies_of_three_averaged_replicas_are_those_of_the_rows_on_every_rank(hooked: bool) -> None:
    """Even if an all-reduce adds replicas in another order in each replica group, as this hook does."""

    def live(group: Group) -> Any:
        model, made = averaged(group, 2, True)
        axis = model._tables["rows"].tile_rows[0].peers.teams.axis

        def hook(tensors: list[torch.Tensor]) -> None:
            turn = range(3) if group.rank < 3 else range(2, -1, -1)
            for tensor in tensors:
                parts = axis.all_gather_object(tensor.clone())
                tensor.copy_(sum(parts[replica] for replica in turn) / 3)

        if hooked:
            made.set_all_reduce_hook(hook)
        for step in range(4):
            train(model, group.rank, step)
            if step % 2:
                made.sync()
        state = state_of(model)
        assert_alike(model, state)
        check_replicas(model)
        return state

    first, *others = run_virtual_ranks(6, live)
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def test_hot_rows_of_averaged_replicas_move_and_untouched_copies_stay_equal() -> None:
    def live(group: Group) -> None:
        (model, made), (plain, other) = averaged(group, 2, False), averaged(group, 2, False)
        for hot in ([1, 2, 3], [3, 4], []):
            for step in range(2):
                assert torch.equal(train(model, group.rank, step), train(plain, group.rank, step))
            move = {"rows": ParameterSharding("row_wise", hot=HotRows(np.array(hot, np.int64)))}
            reshard(made, {"": move}, progress=False)
            other.sync()  # replicas with hot rows are averaged before they move
        assert model._tables["rows"].tiling.head is None
        assert_alike(model, state_of(plain))

    run_virtual_ranks(4, live)


def test_averaged_replicas_of_managed_tables_reset_copies_and_follow_ids() -> None:
    def fn(group: Group) -> Any:
        found = []
        for hot in (True, False):
            module = build(POLICY)
            config = GroupConfig(hot_plan(2, HOT_ROWS if hot else {name: [] for name in HOT_ROWS}), 2)
            two_d = shard_2d(module, lambda own=config: ([own], {}), group, ReplicaSettings(sync="average", exact=True))  # type: ignore[misc]
            vars(module)["_two_d"] = two_d
            train_managed(module, group, sizes_of(4), range(HALF))
            two_d.sync()
            resize_ids(module, "user", 96)
            train_managed(module, group, sizes_of(4), range(HALF, STEPS))
            two_d.sync()
            check_replicas(module)
            found.append(full_state_dict(module))
        return found

    for state, plain in run_virtual_ranks(4, fn):
        assert_same(state, plain)
