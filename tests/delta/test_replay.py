"""Base and deltas together are the model, bit for bit, whatever happened in between."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharding.managed_models import build, sizes_of, train
from tilerec.checkpoint import load, save
from tilerec.checkpoint.contents import SavedContents
from tilerec.comms.process import ProcessGroupComms
from tilerec.delta import DeltaLog, DeltaRefused, DeltaWriter, Follower
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.resize_ids import resize_ids
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, row_wise, table_wise
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
POLICY = "lru and lfu, shared rows"
NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"


def plan(turn: int, world: int) -> dict[str, dict[str, Any]]:
    last = world - 1
    plans = [
        {"user": row_wise(num_buckets=3), "item": column_wise([0, last]), "plain": table_wise(rank=0)},
        {"user": row_wise(num_buckets=3), "item": table_wise(rank=last), "plain": row_wise()},
    ]
    return {"_embedding_module": plans[turn]}


def parts(module: Any) -> dict[str, Any]:
    return {"model": module, "optimizer": module.embedding_module.fused_optimizer}


def life(folder: Path, seed: int, number: int) -> None:
    """One process group: it continues from a checkpoint, and trains, moves, resizes and publishes at random."""
    group, dice = ProcessGroupComms(), random.Random(100 * seed + number)
    module = build(POLICY)
    shard(module, plan(dice.randrange(2), group.size), group, exact=True)
    checkpoints = sorted(folder.glob("checkpoint-*"))
    if checkpoints:  # not always the newest: the model goes back
        load(dice.choice(checkpoints), parts(module), group=group)
    writer = DeltaWriter(folder / "deltas", module, group=group, base_every=dice.choice([None, 2]), keep_bases=0)
    step = 10 * number
    for turn in range(8):
        action = dice.choice(["train", "train", "publish", "publish", "reshard", "resize", "save"])
        if action == "train":
            train(module, group, sizes_of(group.size), range(step, step + 1))
            step += 1
        elif action == "publish":
            made = writer.publish(step)
            save(folder / f"whole-{made.sequence}", {"model": module}, group=group)
        elif action == "reshard":
            reshard(module, plan(dice.randrange(2), group.size), progress=False)
        elif action == "resize" and dice.random() < 0.3:
            resize_ids(module, "user", dice.choice([48, 96, 24]))
        elif action == "save" and rows_of(module) == 48:  # with which the next life begins
            save(folder / f"checkpoint-{number}-{turn}", parts(module), group=group)
    writer.close()


def rows_of(module: Any) -> int:
    return int(module.managed_collision_collection.modules_by_table["user"].output_size())


def values(path: str) -> dict[str, Tensor]:
    contents = SavedContents(path)
    return {
        name: torch.cat([value.reshape(-1) for _, value in contents.parts_of(name)]).reshape(saved.shape)
        for name, saved in contents.manifest.tensors.items()
    }


@pytest.mark.parametrize("seed", range(40) if NIGHTLY else range(3))
def test_every_published_state_is_the_model_of_its_moment(pool: Pool, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(3):
        pool(dice.choice([1, 2, 3])).run(life, tmp_path, seed, number)
    log = DeltaLog(tmp_path / "deltas")
    for name in log.names():
        want = values(str(tmp_path / f"whole-{name.sequence}"))
        got = values(log.open(name).path)
        assert set(got) <= set(want)
        for key, value in got.items():
            assert torch.equal(value, want[key]), (str(name), key)


@pytest.mark.parametrize("seed", range(40) if NIGHTLY else range(2))
def test_a_follower_has_each_state_after_its_delta(pool: Pool, tmp_path: Path, seed: int) -> None:
    for number in range(2):
        pool(2).run(life, tmp_path, seed, number)
    log = DeltaLog(tmp_path / "deltas")
    target: dict[str, Tensor] = {}
    follower: Follower | None = None
    for name in log.names():
        want = {k.removeprefix("model."): v for k, v in values(log.open(name).path).items()}
        try:
            if follower is None:
                raise LookupError
            if not name.is_base:
                follower.apply(name)
        except (LookupError, DeltaRefused):
            if not name.is_base:
                continue
            target = {key: torch.empty_like(value) for key, value in want.items()}
            follower = at(log, name.sequence, target)
        for key, value in want.items():
            assert torch.equal(target[key], value), (str(name), key)


def at(log: DeltaLog, sequence: int, target: dict[str, Tensor]) -> Follower:
    """Return a follower that has the base of a sequence number."""
    base = next(name for name in log.names() if name.is_base and name.sequence == sequence)
    for key, value in values(log.open(base).path).items():
        target[key.removeprefix("model.")].copy_(value)
    return Follower(log.path, target, state=log.open(base).record.state)
