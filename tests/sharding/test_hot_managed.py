"""Hot rows of tables with managed collision: evicted copies begin anew, and copies follow their ids to other sizes."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parallel.resharding.test_resize_ids import CHANGES, HALF
from tests.parallel.resharding.test_resize_ids import alone as resized_alone
from tests.sharding.managed_models import STEPS, alone, assert_same, build, sizes_of, train
from tilerec.comms.group import Group
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.measured_load import count_hot_ids, load_of
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.resize_ids import resize_ids
from tilerec.parallel.shard import shard
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.tile import Tiling
from tilerec.testing.virtual import run_virtual_ranks

POLICY = "lru and lfu, shared rows"
OTHER = "rejected and admitted late"
MAIN_CHANGES = ("more rows", "fewer rows", "buckets merge", "split and keep their rows")
HOT = {"user": [*range(0, 48, 3), 47], "item": [*range(1, 40, 2)], "plain": [0, 9]}
"""Among them rows of ids that are evicted, and rows that ids without one share."""


NONE: dict[str, list[int]] = {"user": [], "item": [], "plain": []}


def hot_plan(world: int, hot: dict[str, list[int]] = HOT) -> dict[str, Any]:
    """Rows of "user" are cut at whole buckets, also where two of them merge."""
    cuts = {2: (0, 32, 48), 3: (0, 16, 32, 48)}[world]
    tilings = {
        "user": Tiling.of("user", 48, 8, [(a, b, 0, 8, rank) for rank, (a, b) in enumerate(pairwise(cuts))]),
        "item": Tiling.of("item", 40, 16, [(0, 40, 0, 8, 0), (0, 40, 8, 16, world - 1)]),
        "plain": Tiling.of("plain", 10, 3, [(0, 10, 0, 3, world - 1)]),
    }
    ids = {name: HotRows(np.array(own, dtype=np.int64)) for name, own in hot.items()}
    return {
        "_embedding_module": {
            name: ParameterSharding("explicit", tiling=tiling, hot=ids[name]) for name, tiling in tilings.items()
        }
    }


def reset_counts(module: Any) -> list[int]:
    """Number of evicted copies that `train` resets from now on."""
    counts = [0]
    tables, own = module.embedding_module._tables, module._reset

    def counted(lost: dict[str, Tensor | None]) -> None:
        for name, rows in lost.items():
            if rows is not None and (head := tables[name].tiling.head) is not None:
                counts[0] += int(np.isin(rows.numpy(), head.hot.ids).sum())
        own(lost)

    module._reset = counted
    return counts


NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="further cases: nightly")


@pytest.mark.parametrize(
    ("policy", "cached"),
    [(POLICY, False), (POLICY, True), ("times to live", False), pytest.param(OTHER, False, marks=NIGHTLY)],
)
def test_the_map_and_weights_are_those_of_one_process_and_evicted_copies_begin_anew(policy: str, cached: bool) -> None:
    _, state, stats = alone(policy)
    base = cache_tables(build(policy), 0.3) if cached else build(policy)

    def fn(group: Group) -> Any:
        module = shard(copy.deepcopy(base), hot_plan(group.size), group, exact=True)
        counts = reset_counts(module)
        for step in range(STEPS):
            train(module, group, sizes_of(group.size), range(step, step + 1))
            check_replicas(module)
        return full_state_dict(module), module.stats(), counts[0]

    results = run_virtual_ranks(2, fn)
    for full, counted, resets in results:
        assert_same(full, state)
        assert counted == stats
        assert resets > 0
    assert len({resets for _, _, resets in results}) == 1  # every rank resets its copies


def test_ranks_that_do_not_look_at_their_devices_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, state, stats = alone(POLICY)
    monkeypatch.setattr(ManagedCollisionModule, "host_looks", property(lambda self: False))

    def fn(group: Group) -> Any:
        module = shard(build(POLICY), hot_plan(group.size), group, exact=True)
        train(module, group, sizes_of(group.size), range(STEPS))
        check_replicas(module)
        return full_state_dict(module), module.stats()

    for full, counted in run_virtual_ranks(3, fn):
        assert_same(full, state)
        assert counted == stats


def test_rows_under_an_init_fn_begin_anew_alike() -> None:
    def fn(group: Group) -> Any:
        found = []
        for hot in (HOT, NONE):
            module = build(POLICY)
            for table in module.embedding_module._tables.values():
                table.config = replace(table.config, init_fn=torch.nn.init.ones_)
            shard(module, hot_plan(group.size, hot), group, exact=True)
            train(module, group, sizes_of(group.size), range(STEPS))
            check_replicas(module)
            found.append(full_state_dict(module))
        assert_same(*found)

    run_virtual_ranks(2, fn)


@pytest.mark.parametrize(
    "change", [name if name in MAIN_CHANGES else pytest.param(name, marks=NIGHTLY) for name in CHANGES]
)
def test_copies_follow_their_ids_to_another_capacity(change: str) -> None:
    policy, table, rows, buckets = CHANGES[change]
    state, _, stats = resized_alone(change)

    def fn(group: Group) -> Any:
        module = shard(build(policy), hot_plan(group.size), group, exact=True)
        train(module, group, sizes_of(group.size), range(HALF))
        before = module.embedding_module._tables[table]
        hot = before.tiling.head.hot.ids
        kept = {bytes(row.numpy().tobytes()) for row in full_state_dict(module)[weight_of(table)][hot.tolist()]}
        resize_ids(module, table, rows, buckets)
        check_replicas(module)
        head = module.embedding_module._tables[table].tiling.head
        assert plan_of(module).plan["_embedding_module"][table].hot == head.hot
        after = {
            bytes(row.numpy().tobytes()) for row in full_state_dict(module)[weight_of(table)][head.hot.ids.tolist()]
        }
        assert after <= kept
        assert 0 < len(after) <= min(len(head.hot), len(hot))  # where buckets split, a shared row becomes several
        train(module, group, sizes_of(group.size), range(HALF, STEPS))
        check_replicas(module)
        return full_state_dict(module), module.stats()

    for full, counted in run_virtual_ranks(2, fn):
        assert_same(full, state)
        assert counted == stats


def weight_of(table: str) -> str:
    return f"_embedding_module.embedding_bags.{table}.weight"


def test_a_table_whose_hot_rows_all_lose_their_ids_has_no_copies_any_more() -> None:
    def fn(group: Group) -> None:
        module = shard(build(POLICY), hot_plan(group.size, {**HOT, "user": [0, 1, 2]}), group, exact=True)
        for row in (0, 1, 2):  # no batch has come yet, so no row has an id
            assert all(module.inspect("u", id_).row != row for id_ in range(5))
        resize_ids(module, "user", 96)
        assert module.embedding_module._tables["user"].tiling.head is None
        assert not plan_of(module).plan["_embedding_module"]["user"].hot
        train(module, group, sizes_of(group.size), range(2))

    run_virtual_ranks(2, fn)


def test_hot_rows_are_counted_behind_the_map_and_moved_in_a_running_model() -> None:
    _, state, _ = alone(POLICY)

    def fn(group: Group) -> Any:
        module = build(POLICY)
        shard(module, hot_plan(group.size, NONE), group, exact=True)
        count_hot_ids(module, 3)
        train(module, group, sizes_of(group.size), range(2))
        found = load_of(module).hot
        hot = {
            name: list(found["_embedding_module", name].ids) if ("_embedding_module", name) in found else []
            for name in HOT
        }
        assert hot["user"]
        reshard(module, hot_plan(group.size, hot), progress=False)
        train(module, group, sizes_of(group.size), range(2, STEPS))
        check_replicas(module)
        return full_state_dict(module)

    for full in run_virtual_ranks(2, fn):
        assert_same(full, state)
