"""Ranks load a state from the memory that earlier processes have left, their own or that of other ranks."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.checkpoint_models import same, train, whole, wrapped
from tests.storage.cached_tables import ebc
from tilerec.checkpoint import memory_source
from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.loading import load_from
from tilerec.checkpoint.memory_file import read_memory, write_memory
from tilerec.checkpoint.memory_source import HeldMemory, MemorySource
from tilerec.checkpoint.step_memory import StepMemory
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.modules.cached_tables import cache_tables
from tilerec.optim.fused import FusedOptimizer
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.spec.optimizer import Adam
from tilerec.testing.ranks import Ranks

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="a second form: nightly")
Pool = Callable[[int], Ranks]


def parts_of(dmp: DistributedModelParallel) -> dict[str, object]:
    return {"model": dmp, "optimizer": dmp.fused_optimizer}


def file_of(folder: str) -> Path:
    return Path(folder) / f"rank{dist.get_rank()}"


def left(dmp: DistributedModelParallel, folder: str, reached: dict[int, list[int]]) -> StepMemory:
    """Train three steps, the last of them in part; leave the steps of this rank's list."""
    memory = StepMemory(parts_of(dmp))
    for step in range(3):
        memory.keep(step, {"position": 10 * step})
        if step == 1:
            train_in_full.append(whole(dmp))
        train(dmp)
    memory.write(file_of(folder), {step: {} for step in reached[dist.get_rank()]})
    memory.close()
    return memory


train_in_full: list[object] = []


def recovered(folder: str, message_bytes: int) -> None:
    """Load the memory of tiles of one plan into those of another one, in messages of some size."""
    memory_source.MESSAGE_BYTES = message_bytes
    train_in_full.clear()
    # The ranks can go back to steps 0 and 1, and to steps 1 and 2.
    left(wrapped(0, 0), folder, {0: [0, 1], 1: [1, 2], 2: [1]})
    for turn in (0, 1):
        fresh = wrapped(5, turn)
        group = ProcessGroupComms()
        source = MemorySource.of(group, HeldMemory(file_of(folder)))
        assert source is not None
        assert (source.step, source.values["position"]) == (1, 10)
        load_from(lambda _, found=source: found, parts_of(fresh), group, Changes())  # type: ignore[misc]
        same(whole(fresh), train_in_full[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [pytest.param(2, marks=NIGHTLY), 3])
@pytest.mark.parametrize("message_bytes", [1 << 24, 40])
def test_the_newest_step_of_all_ranks_is_loaded_under_every_plan(
    pool: Pool, tmp_path: Path, size: int, message_bytes: int
) -> None:
    pool(size).run(recovered, str(tmp_path), message_bytes)


class Replicated(nn.Module):
    """Parameters of which every rank has all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(40.0).reshape(10, 4))
        self.register_buffer("count", torch.tensor(3))


def without_one(folder: str) -> None:
    """Rank 1 has no memory: it gets replicas of its boxes, or all ranks raise and keep their values."""
    group, rank = ProcessGroupComms(), dist.get_rank()
    before = Replicated()
    memory = StepMemory({"model": before})
    memory.keep(0, {})
    memory.write(file_of(folder), {0: {}})
    with torch.no_grad():
        before.table.zero_()
    fresh = Replicated()
    nn.init.zeros_(fresh.table)
    source = MemorySource.of(group, None if rank == 1 else HeldMemory(file_of(folder)))
    assert source is not None
    load_from(lambda _: source, {"model": fresh}, group, Changes())
    assert torch.equal(fresh.table, torch.arange(40.0).reshape(10, 4))

    dmp = wrapped(0, 0)
    left(dmp, folder, {0: [1], 1: [1], 2: [1]})
    want = whole(dmp)
    source = MemorySource.of(group, None if rank == 1 else HeldMemory(file_of(folder)))
    assert source is not None
    with pytest.raises(ConfigError, match=r"no memory of|its plan failed"):
        load_from(lambda _: source, parts_of(dmp), group, Changes())
    same(whole(dmp), want)
    assert MemorySource.of(group, None) is None


def test_a_rank_without_memory_loads_replicas_of_its_boxes_only(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(without_one, str(tmp_path))


def apart(folder: str) -> None:
    """The ranks have no step in common."""
    left(wrapped(0, 0), folder, {0: [1], 1: [2]})
    assert MemorySource.of(ProcessGroupComms(), HeldMemory(file_of(folder))) is None


def test_ranks_without_a_common_step_have_no_memory(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(apart, str(tmp_path))


def test_a_file_in_memory_returns_the_values_and_the_reader_does_not_change_it(tmp_path: Path) -> None:
    tensors = [torch.tensor(True), torch.arange(5, dtype=torch.int64), torch.zeros(0, 3), torch.randn(3).bfloat16()]
    write_memory(tmp_path / "state", {"a": tensors, "b": {"c": (1, "x", None)}})
    found = read_memory(tmp_path / "state")
    assert found["b"] == {"c": (1, "x", None)}
    for got, want in zip(found["a"], tensors, strict=True):
        assert torch.equal(got, want)
    found["a"][1].zero_()
    assert torch.equal(read_memory(tmp_path / "state")["a"][1], tensors[1])


def test_a_rank_describes_its_memory_without_its_rows(tmp_path: Path) -> None:
    module = nn.Linear(1000, 100)
    memory = StepMemory({"model": module})
    memory.keep(4, {"counts": torch.arange(3)})
    memory.write(tmp_path / "state", {4: {"records": torch.zeros(8)}})
    described = HeldMemory(tmp_path / "state").described(4)
    assert torch.equal(described.values["counts"], torch.arange(3))
    assert len(pickle.dumps(described)) < 10_000


def test_an_optimizer_whose_state_begins_later_is_kept_from_then_on(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    memory, states = StepMemory({"dense": optimizer}), []
    for step in range(3):
        memory.keep(step, {})
        states.append({name: value.clone() for name, value in optimizer.state.get(layer.bias, {}).items()})
        layer(torch.ones(3)).sum().backward()
        optimizer.step()
    memory.write(tmp_path / "state", {step: {} for step in range(3)})
    held = HeldMemory(tmp_path / "state")
    for step, want in enumerate(states):
        pieces = held.pieces(step)
        assert bool(pieces) == bool(step)
        for name, value in want.items():
            assert torch.equal(pieces[f"dense.state.1.{name}"][0].memory, value)


def test_tensors_that_were_replaced_are_not_left(tmp_path: Path) -> None:
    module = Replicated()
    memory = StepMemory({"model": module})
    memory.keep(0, {})
    module.count = torch.tensor(4)
    with pytest.raises(ConfigError, match=r"other memory of model\.count"):
        memory.write(tmp_path / "state", {0: {}})
    assert not list(tmp_path.iterdir())


def test_cached_rows_are_refused() -> None:
    module = cache_tables(ebc(Adam(lr=0.1)))
    with pytest.raises(ConfigError, match="cached"):
        StepMemory({"model": module, "optimizer": FusedOptimizer(module)})
