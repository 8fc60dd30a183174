"""Ids of managed collision load into tables of other sizes: ids keep their rows' values and state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharding.managed_models import KEYS, POLICIES, STEPS, assert_same, build, sizes_of, train
from tilerec.checkpoint import CheckpointManager, load, save, saved_id_sizes
from tilerec.comms.process import ProcessGroupComms
from tilerec.comms.threads import ThreadWorld
from tilerec.errors import ConfigError
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.optim.fused import FusedOptimizer
from tilerec.parallel import DistributedModelParallel
from tilerec.parallel.full_state import full_state_dict
from tilerec.planner.helpers import row_wise, table_wise
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
POLICY = "lru and lfu, shared rows"
SIZES = {"more rows": (96, 6), "split": (96, 12), "merged": (48, 3), "fewer rows": (24, 6)}
"""Rows and buckets of `user` after the load; it was saved with 48 in 6."""


def wrapped(size: tuple[int, int] | None = None) -> DistributedModelParallel:
    """On all ranks: a model whose table `user` has another size."""
    module = build(POLICY)
    if size is not None:
        module.resize("user", *size)
    world = ProcessGroupComms().size
    cuts = {"user": row_wise(num_buckets=3), "item": table_wise(rank=world - 1), "plain": table_wise(rank=0)}
    return DistributedModelParallel(module, plan={"_embedding_module": cuts})


def parts_of(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model, "optimizer": model.fused_optimizer}


def save_trained(path: str) -> None:
    group, model = ProcessGroupComms(), wrapped()
    train(model, group, sizes_of(group.size), range(STEPS))
    save(path, parts_of(model))


def load_resized(path: str, size: tuple[int, int]) -> tuple[dict[str, Tensor], Any, dict[str, Any]]:
    """Return the whole state after a load and a further step, and the resizes."""
    group, model = ProcessGroupComms(), wrapped(size)
    with saved_id_sizes(path, parts_of(model)) as resized:
        load(path, parts_of(model))
    train(model, group, [12, 0, 0][: group.size], range(STEPS, STEPS + 1))
    return full_state_dict(model), model.fused_optimizer.full_state_dict()["state"], dict(resized)


def alone(path: str) -> Any:
    """Return an unsharded model with the values of a checkpoint."""
    module = build(POLICY)
    load(path, {"model": module, "optimizer": FusedOptimizer(module)})
    return module


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("ids") / "step-1")
    pool(2).run(save_trained, path)
    return path


@pytest.mark.parametrize(("change", "world"), [("more rows", 1), ("split", 3), ("merged", 1), ("fewer rows", 2)])
def test_ids_load_into_another_size_as_a_running_table_takes_it(
    pool: Pool, saved: str, change: str, world: int
) -> None:
    module = alone(saved)
    want = module.resize("user", *SIZES[change])
    train(module, ThreadWorld(1).group(0), [12], range(STEPS, STEPS + 1))
    for got, state, resized in pool(world).run(load_resized, saved, SIZES[change]):
        assert_same(got, dict(module.state_dict()), exactly=world == 1)
        assert list(resized) == ["user"]
        assert resized["user"].kept == want.kept
        assert sorted(resized["user"].dropped_ids.tolist()) == sorted(want.dropped_ids.tolist())
        own = FusedOptimizer(module).state_dict()["state"]
        for name, slots in own.items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(state[name][slot], value)


def test_each_id_keeps_the_values_of_its_row(saved: str) -> None:
    before, after = alone(saved), build(POLICY)
    after.resize("user", 192, 12)
    with saved_id_sizes(saved, {"model": after}):
        load(saved, {"model": after})
    rows = 0
    for id_ in range(KEYS["u"]):
        places = [module.inspect("u", id_).row for module in (before, after)]
        if places[0] is not None and places[1] is not None:
            values = [
                module.state_dict()["_embedding_module.embedding_bags.user.weight"][place]
                for module, place in zip((before, after), places, strict=True)
            ]
            rows += 1
            assert torch.equal(*values)
    assert rows > 20


def test_equal_sizes_resize_nothing(saved: str) -> None:
    module = build(POLICY)
    with saved_id_sizes(saved, {"model": module}) as resized:
        load(saved, {"model": module})
    assert resized == {}
    assert_same(dict(module.state_dict()), dict(alone(saved).state_dict()))


def test_other_sizes_are_refused_by_name_without_it_or_if_buckets_do_not_divide(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(POLICY)
    module.resize("user", 48, 3)
    with pytest.raises(ConfigError, match=r"user\.ids.*saved_id_sizes"):
        load(saved, {"model": module})
    eight = HashZchManagedCollisionModule(48, "cpu", 8, eviction_policy_name="LRU_EVICTION")
    monkeypatch.setitem(POLICIES, "eight", lambda: (eight, POLICIES[POLICY]()[1]))
    other = build("eight")
    with pytest.raises(ConfigError, match=r"Table .user.: .*8 buckets"), saved_id_sizes(saved, {"model": other}):
        raise AssertionError
    assert other.state_dict()["_managed_collision_collection._managed_collision_modules.user.counts"].shape[0] == 8


def test_a_resume_takes_it_too(saved: str, tmp_path: Path) -> None:
    first = alone(saved)
    CheckpointManager(tmp_path).save(7, {"model": first})
    module = build(POLICY)
    module.resize("user", 96, 12)
    with saved_id_sizes(tmp_path / "step-7", {"model": module}):
        assert CheckpointManager(tmp_path).resume({"model": module}) is not None
    first.resize("user", 96, 12)
    assert_same(dict(module.state_dict()), dict(first.state_dict()))
