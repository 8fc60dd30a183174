"""Saves while training goes on have the bits of the moment at which they began."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.checkpoint_models import State, train, whole, wrapped
from tests.parallel.checkpoint_models import same as same_state
from tests.storage.cached_tables import batch, ebc, output
from tilerec.checkpoint import CheckpointManager, announce_write, load, planned_save, save, save_ahead
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.folder import _LocalFolder
from tilerec.checkpoint.row_snapshot import RowSnapshot
from tilerec.errors import ConfigError, FileError
from tilerec.modules.cached_tables import cache_tables, iter_table_rows
from tilerec.optim.attach import set_sparse_grad
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.storage.table_rows import TableRows
from tilerec.testing.ranks import Ranks

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="a second form: nightly")
Pool = Callable[[int], Ranks]
Values = dict[str, Tensor]
SPEC = RowWiseAdagrad(lr=0.1)


def step(module: Any, dice: random.Random) -> None:
    output(module, batch(dice)).square().sum().backward()


def values_of(module: Any) -> Values:
    """Copies of all weights and slots."""
    found = {name: value.clone() for name, value in module.state_dict().items()}
    for name, state in FusedOptimizer(module).state_dict()["state"].items():
        found |= {f"{name}.{slot}": torch.as_tensor(value).clone() for slot, value in state.items()}
    return found


def loaded(path: Path | str, spec: Any) -> Values:
    fresh = ebc(spec)
    load(path, {"model": fresh, "optimizer": FusedOptimizer(fresh)})
    return values_of(fresh)


def same(got: Values, want: Values) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


class Gate:
    """Lets the writer read one block per `open`, and no block before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = threading.Semaphore(0)
        self.ended = False
        read = RowSnapshot.read

        def gated(snapshot: RowSnapshot, k: int, first: int, count: int) -> memoryview:
            if not self.ended:
                self.blocks.acquire()
            return read(snapshot, k, first, count)

        monkeypatch.setattr(RowSnapshot, "read", gated)
        monkeypatch.setattr(planned_save, "BLOCK", 256)  # a few rows

    def open(self, blocks: int) -> None:
        for _ in range(blocks):
            self.blocks.release()

    def end(self) -> None:
        self.ended = True
        self.blocks.release()


@pytest.mark.parametrize("spec", [Adam(lr=0.1), RowWiseAdagrad(lr=0.1)], ids=["Adam", "RowWiseAdagrad"])
@pytest.mark.parametrize("pace", [0, 3, 12])
def test_a_save_has_the_bits_of_its_beginning_whatever_is_trained_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Any, pace: int
) -> None:
    module, dice, gate = ebc(spec), random.Random(5), Gate(monkeypatch)
    step(module, dice)
    want = values_of(module)
    running = save_ahead(tmp_path / "step-1", {"model": module, "optimizer": FusedOptimizer(module)})
    for _ in range(6):
        step(module, dice)
        gate.open(pace)
    assert not running.done
    gate.end()
    running.wait()
    assert running.copied_bytes > 0
    same(loaded(tmp_path / "step-1", spec), want)


def test_a_save_of_cached_tables_has_the_bits_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Adam(lr=0.1)
    module, dice, gate = ebc(spec), random.Random(6), Gate(monkeypatch)
    cache_tables(module, 0.1)
    step(module, dice)
    want = values_of(module)
    running = save_ahead(tmp_path / "step-1", {"model": module, "optimizer": FusedOptimizer(module)})
    for _ in range(6):
        step(module, dice)
        gate.open(3)
    gate.end()
    running.wait()
    same(loaded(tmp_path / "step-1", spec), want)


@pytest.mark.parametrize(
    "write",
    [
        lambda module, other: module.load_state_dict(other.state_dict()),
        lambda module, other: FusedOptimizer(module).load_state_dict(FusedOptimizer(other).state_dict()),
        lambda module, other: module.double(),
        lambda module, other: [table.reset_parameters() for table, _ in iter_table_rows(module)],
    ],
    ids=["load", "load the optimizer", "another precision", "initial values"],
)
def test_a_write_of_any_rows_meanwhile_does_not_reach_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any, Any], object]
) -> None:
    spec, dice = Adam(lr=0.1), random.Random(7)
    module, other, gate = ebc(spec), ebc(spec), Gate(monkeypatch)
    for _ in range(3):
        step(other, dice)
    step(module, dice)
    want = values_of(module)
    running = save_ahead(tmp_path / "step-1", {"model": module, "optimizer": FusedOptimizer(module)})
    gate.open(7)
    step(module, dice)
    write(module, other)
    gate.end()
    running.wait()
    same(loaded(tmp_path / "step-1", spec), want)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_a_save_of_tables_that_torch_steps_has_the_bits_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool, dense: bool
) -> None:
    if fused and not dense:
        pytest.skip("torch has no fused step of sparse gradients")
    module, dice, gate = ebc(None), random.Random(8), Gate(monkeypatch)
    set_sparse_grad(list(module.parameters()), not dense)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
    manager = CheckpointManager(tmp_path, asynchronous=True, incremental=True)
    want: Values = {}
    for number in range(2):
        want = {name: value.clone() for name, value in module.state_dict().items()}
        manager.save(number, {"model": module})
        step(module, dice)
        optimizer.step()
        gate.end()
    manager.wait()
    fresh = ebc(None)
    load(tmp_path / "step-1", {"model": fresh})
    same(dict(fresh.state_dict()), want)


def by_hand(module: Any) -> None:
    with torch.no_grad():
        module.embedding_bags["b"].weight[7] = 3.0


def a_slot(module: Any) -> None:
    FusedOptimizer(module).state[module.embedding_bags["b"].weight]["exp_avg"][9] = 5.0


@pytest.mark.parametrize("write", [by_hand, a_slot])
@pytest.mark.parametrize("step_after", [False, True])
def test_a_write_by_hand_fails_the_save_unless_it_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], None], step_after: bool
) -> None:
    for announced in (False, True):
        module, gate = ebc(Adam(lr=0.1)), Gate(monkeypatch)
        want = values_of(module)
        path = tmp_path / str(announced)
        running = save_ahead(path, {"model": module, "optimizer": FusedOptimizer(module)})
        if announced:
            announce_write(module)
        write(module)
        if step_after:
            step(module, random.Random(1))
        gate.end()
        if announced:
            running.wait()
            same(loaded(path, Adam(lr=0.1)), want)
        else:
            with pytest.raises(ConfigError, match="'b': got a write by hand"):
                running.wait()
            assert not path.exists()
        monkeypatch.undo()


def test_loading_the_optimizer_alone_does_not_reach_a_running_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, dice = Adam(lr=0.1), random.Random(9)
    module = ebc(spec)
    step(module, dice)
    save(tmp_path / "other", {"optimizer": FusedOptimizer(module)})
    step(module, dice)
    want, gate = values_of(module), Gate(monkeypatch)
    running = save_ahead(tmp_path / "own", {"model": module, "optimizer": FusedOptimizer(module)})
    load(tmp_path / "other", {"optimizer": FusedOptimizer(module)})
    gate.end()
    running.wait()
    same(loaded(tmp_path / "own", spec), want)


def test_metadata_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, gate = {"at": {"step": 1}}, Gate(monkeypatch)
    running = save_ahead(tmp_path / "a", {"model": ebc(SPEC)}, metadata=metadata)
    metadata["at"]["step"] = 2
    gate.end()
    running.wait()
    assert SavedContents(tmp_path / "a").manifest.metadata["at"] == {"step": 1}


def test_a_program_that_ends_has_its_save(tmp_path: Path) -> None:
    text = f"""if True:
        import torch
        from tilerec.checkpoint import save_ahead
        save_ahead({str(tmp_path / "a")!r}, {{"rows": torch.arange(3_000_000)}})
    """
    subprocess.run([sys.executable, "-c", text], check=True)
    values = load(tmp_path / "a", {"rows": None})
    assert torch.equal(values["rows"], torch.arange(3_000_000))


def test_a_save_that_cannot_begin_leaves_no_observer() -> None:
    module = ebc(SPEC)
    with pytest.raises(FileError):
        save_ahead("nosuch://x/y", {"model": module})
    assert all(not rows.observers for _, rows in iter_table_rows(module))


def test_an_interrupted_wait_leaves_the_save_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, dice, gate = ebc(SPEC), random.Random(2), Gate(monkeypatch)
    manager = CheckpointManager(tmp_path, asynchronous=True, incremental=True, keep_last=0)
    job = {"model": module, "optimizer": FusedOptimizer(module)}
    manager.save(1, job)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.wait()
    gate.end()
    want = []
    for number in (2, 3):
        step(module, dice)
        want.append(values_of(module))
        manager.save(number, job)
    manager.wait()
    for number, values in zip((2, 3), want, strict=True):
        same(loaded(tmp_path / f"step-{number}", SPEC), values)
    assert SavedContents(tmp_path / "step-3").manifest.base is not None


def rows_of_table(count: int) -> TableRows:
    module = ebc(RowWiseAdagrad(lr=0.1))
    table = next(rows for _, rows in iter_table_rows(module) if rows.leaf.shape[0] == count)
    table.module = module  # type: ignore[attr-defined]  # keeps the rows alive
    return table


def test_each_row_is_copied_once_and_rows_outside_of_the_leaf_are_none() -> None:
    table = rows_of_table(300)
    snapshot = RowSnapshot(table, None)
    for ids in ([3, 3, 7, -1, 300], [7, 3], []):
        snapshot.before_write(table, torch.tensor(ids, dtype=torch.int64))
    # Rows 0 and 299 stand for the ids -1 and 300; 8 float32 weights and one sum.
    assert snapshot.copied_bytes == 4 * (8 * 4 + 4) + 4 * 8


def test_a_snapshot_of_some_rows_copies_those_alone() -> None:
    table = rows_of_table(300)
    wanted = torch.tensor([2, 3, 50, 299])
    want = table.leaf.detach()[wanted].clone()
    snapshot = RowSnapshot(table, wanted)
    snapshot.before_write(table, torch.arange(1, 60))
    assert snapshot.copied_bytes == 3 * (8 * 4 + 4) + 3 * 8
    table.leaf.detach()[1:60] += 1
    got = torch.frombuffer(bytearray(snapshot.read(0, 1, 3)), dtype=torch.float32).view(3, 8)
    assert torch.equal(got, want[1:])


def test_the_tables_are_observed_no_longer_than_the_save(tmp_path: Path) -> None:
    module = ebc(Adam(lr=0.1))
    save_ahead(tmp_path / "a", {"model": module}).wait()
    assert all(not rows.observers for _, rows in iter_table_rows(module))


def test_an_error_of_the_files_is_raised_by_wait_and_the_next_save_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ebc(Adam(lr=0.1))
    manager = CheckpointManager(tmp_path, asynchronous=True, incremental=True)
    manager.save(1, {"model": module})
    manager.wait()
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(_LocalFolder, "commit", full)
        manager.save(2, {"model": module})
        with pytest.raises(FileError, match="No space left"):
            manager.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    manager.save(2, {"model": module})
    manager.wait()
    assert SavedContents(tmp_path / "step-2").manifest.base is None  # rows of the failed save are among its rows


def save_while_training(folder: str) -> tuple[tuple[Values, State], int]:
    dmp = wrapped(0, 0)
    train(dmp)
    want = whole(dmp)
    manager = CheckpointManager(folder, asynchronous=True)
    turn = threading.Event()
    begin = _LocalFolder.begin

    def late(*args: Any, **kwargs: Any) -> None:
        turn.wait()
        begin(*args, **kwargs)

    _LocalFolder.begin = late  # type: ignore[method-assign]
    try:
        manager.save(3, {"model": dmp, "optimizer": dmp.fused_optimizer})
        train(dmp)
    finally:
        _LocalFolder.begin = begin  # type: ignore[method-assign]
        turn.set()
    manager.wait()
    return want, manager._ranks.rank


def load_saved(path: str, turn: int) -> tuple[Values, State]:
    dmp = wrapped(5, turn)
    load(path, {"model": dmp, "optimizer": dmp.fused_optimizer})
    return whole(dmp)


@pytest.mark.parametrize("size", [pytest.param(1, marks=NIGHTLY), pytest.param(2, marks=NIGHTLY), 3])
def test_ranks_save_the_state_of_one_moment_under_every_tiling(pool: Pool, tmp_path: Path, size: int) -> None:
    (want, _), *_ = pool(size).run(save_while_training, str(tmp_path))
    for got in pool(2).run(load_saved, str(tmp_path / "step-3"), 2):
        same_state(got, want)
