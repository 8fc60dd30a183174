"""Saves of tables that are moved, resized, renewed or averaged meanwhile, or between two incremental ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sharding.managed_models import build, sizes_of, train
from tests.storage.cached_tables import ebc
from tilerec.checkpoint import CheckpointManager, save, save_ahead
from tilerec.checkpoint.contents import SavedContents, differences, value_differences
from tilerec.checkpoint.job_tables import known_rows
from tilerec.checkpoint.row_changes import JobChanges
from tilerec.checkpoint.row_snapshot import RowSnapshot
from tilerec.comms.process import ProcessGroupComms
from tilerec.modules.cached_tables import iter_table_rows
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.resize_ids import resize_ids
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.settings import GroupConfig, ReplicaSettings
from tilerec.parallel.two_d.shard_2d import shard_2d
from tilerec.planner.helpers import column_wise, row_wise, table_wise
from tilerec.spec.optimizer import Adam
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
POLICY = "lru and lfu, shared rows"


def plan(turn: int) -> dict[str, dict[str, Any]]:
    first = {"user": row_wise(num_buckets=3), "item": column_wise([0, 1]), "plain": table_wise(rank=0)}
    second = {"user": row_wise(num_buckets=3), "item": table_wise(rank=1), "plain": row_wise()}
    return {"_embedding_module": second if turn else first}


def parts(module: Any) -> dict[str, Any]:
    return {"model": module, "optimizer": module.embedding_module.fused_optimizer}


def same(one: Path, two: Path) -> None:
    first, second = SavedContents(one), SavedContents(two)
    assert not list(differences(first, second))
    assert not value_differences(first, second)


CHANGES: dict[str, Callable[[Any], object]] = {
    "steps, which evict rows": lambda module: None,
    "reshard": lambda module: reshard(module, plan(1), progress=False),
    "resize_ids": lambda module: resize_ids(module, "user", 96),
    "fewer rows": lambda module: resize_ids(module, "user", 24),
}


def save_meanwhile(folder: Path, change: str) -> None:
    begun, read = threading.Event(), RowSnapshot.read

    def late(snapshot: RowSnapshot, k: int, first: int, count: int) -> memoryview:
        begun.wait()
        return read(snapshot, k, first, count)

    RowSnapshot.read = late  # type: ignore[method-assign]
    try:
        group = ProcessGroupComms()
        module = build(POLICY)
        shard(module, plan(0), group, exact=True)
        train(module, group, sizes_of(2), range(2))
        save(folder / "before", parts(module), group=group)
        running = save_ahead(folder / "ahead", parts(module), group=group)
        train(module, group, sizes_of(2), range(2, 4))
        CHANGES[change](module)
        train(module, group, sizes_of(2), range(4, 6))
    finally:
        RowSnapshot.read = read  # type: ignore[method-assign]
        begun.set()
    running.wait()


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_has_the_bits_of_its_beginning_whatever_happens_to_the_tables(
    pool: Pool, tmp_path: Path, change: str
) -> None:
    pool(2).run(save_meanwhile, tmp_path, change)
    same(tmp_path / "before", tmp_path / "ahead")


def save_chain(folder: Path, change: str) -> None:
    group = ProcessGroupComms()
    module = build(POLICY)
    shard(module, plan(0), group, exact=True)
    manager = CheckpointManager(folder / "run", incremental=True, keep_last=0, group=group)
    for step in range(6):
        if step == 3:
            CHANGES[change](module)
        manager.save(step, parts(module))
        save(folder / f"whole-{step}", parts(module), group=group)
        train(module, group, sizes_of(2), range(step, step + 1))


@pytest.mark.parametrize("change", CHANGES)
def test_each_incremental_save_equals_a_whole_one(pool: Pool, tmp_path: Path, change: str) -> None:
    pool(2).run(save_chain, tmp_path, change)
    for step in range(6):
        same(tmp_path / "run" / f"step-{step}", tmp_path / f"whole-{step}")
    assert SavedContents(tmp_path / "run" / "step-1").manifest.base is not None


def save_replicas(folder: Path, sync: Any) -> None:
    group = ProcessGroupComms()
    module = build(POLICY)
    config = GroupConfig(plan(0), 2)
    settings = ReplicaSettings(sync, 3 if sync == "average" else None)
    two = shard_2d(module, lambda: ([config], {}), group, settings)
    manager = CheckpointManager(folder / "run", incremental=True, keep_last=0, group=group)
    for step in range(4):
        manager.save(step, parts(module))
        save(folder / f"whole-{step}", parts(module), group=group)
        for turn in (2 * step, 2 * step + 1):
            train(module, group, sizes_of(4), range(turn, turn + 1))
            two.sync_if_due()


@pytest.mark.parametrize("sync", ["exact", "average"])
def test_each_incremental_save_of_replicas_equals_a_whole_one(pool: Pool, tmp_path: Path, sync: str) -> None:
    pool(4).run(save_replicas, tmp_path, sync)
    for step in range(4):
        same(tmp_path / "run" / f"step-{step}", tmp_path / f"whole-{step}")
    rows = [saved.rows for saved in SavedContents(tmp_path / "run" / "step-1").manifest.tensors.values()]
    assert any(rows)


def test_copies_of_a_module_are_not_observed() -> None:
    module = ebc(Adam(lr=0.1))
    JobChanges().begin_tables(known_rows({"model": module}))
    assert all(rows.observers for _, rows in iter_table_rows(module))
    assert not any(rows.observers for _, rows in iter_table_rows(copy.deepcopy(module)))
    assert torch.equal(copy.deepcopy(module).embedding_bags["a"].weight, module.embedding_bags["a"].weight)
