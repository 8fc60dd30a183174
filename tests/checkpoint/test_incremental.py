"""Incremental saves: rows that have changed, exactly; chains of them; and their compaction."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.checkpoint.file_faults import Faults, Killed
from tests.checkpoint.test_asynchronous import same, step, values_of
from tests.parallel.checkpoint_models import State, train, whole, wrapped
from tests.parallel.checkpoint_models import same as same_state
from tests.storage.cached_tables import ebc
from tilerec.checkpoint import CheckpointManager, compact, load
from tilerec.checkpoint import manager as manager_module
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.manager import checkpoints
from tilerec.checkpoint.manifest import manifest_text
from tilerec.errors import FileError, InputError
from tilerec.modules.cached_tables import cache_tables, iter_table_rows
from tilerec.modules.row_reset import reset_rows
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.testing.ranks import Ranks

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="a second form: nightly")
Pool = Callable[[int], Ranks]
Values = dict[str, Tensor]
SPEC = RowWiseAdagrad(lr=0.1)


def manager(folder: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(folder, **{"incremental": True, "keep_last": 0, **options})


def parts(module: Any) -> dict[str, Any]:
    return {"model": module, "optimizer": FusedOptimizer(module)}


def loaded(path: Path | str, spec: Any = SPEC) -> Values:
    fresh = ebc(spec)
    load(path, parts(fresh))
    return values_of(fresh)


def listed(path: Path | str) -> dict[str, int]:
    """Number of listed rows of each weight of an incremental checkpoint; -1: all."""
    tensors = SavedContents(path).manifest.tensors
    return {
        name.split(".")[-2]: -1 if saved.is_whole else sum(rows.count for rows in saved.rows)
        for name, saved in tensors.items()
        if name.startswith("model") and name.endswith("weight")
    }


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("spec", [SPEC, Adam(lr=0.1, weight_decay=0.1)], ids=["RowWiseAdagrad", "Adam"])
def test_every_save_of_a_chain_has_the_bits_of_its_moment(
    tmp_path: Path, spec: Any, cached: bool, asynchronous: bool
) -> None:
    module, dice = ebc(spec), random.Random(8)
    if cached:
        cache_tables(module, 0.1)
    saves, want = manager(tmp_path, asynchronous=asynchronous), {}
    for number in range(5):
        step(module, dice)
        if number == 3:
            step(module, dice)
        want[number] = values_of(module)
        saves.save(number, parts(module))
    saves.wait()
    for number, values in want.items():
        same(loaded(tmp_path / f"step-{number}", spec), values)
    bases = [SavedContents(tmp_path / f"step-{number}").manifest.base for number in range(5)]
    assert [base and base.name for base in bases[:3]] == [None, "step-0", "step-1"]


def test_only_changed_rows_are_written_with_their_slots(tmp_path: Path) -> None:
    module, dice = ebc(SPEC), random.Random(9)
    saves = manager(tmp_path)
    saves.save(0, parts(module))
    before = values_of(module)
    step(module, dice)
    saves.save(1, parts(module))
    after = values_of(module)
    for name, count in listed(tmp_path / "step-1").items():
        weight = f"embedding_bags.{name}.weight"
        changed = (before[weight] != after[weight]).any(1).sum()
        assert 0 < int(changed) <= count < len(before[weight]) / 2
    saves.save(2, parts(module))
    assert listed(tmp_path / "step-2") == {"a": 0, "b": 0, "c": 0}


def write_by_hand(module: Any) -> None:
    with torch.no_grad():
        module.embedding_bags["b"].weight[7] = 3.0


def write_a_slot(module: Any) -> None:
    FusedOptimizer(module).state[module.embedding_bags["b"].weight]["sum"][9] = 5.0


@pytest.mark.parametrize(
    "write",
    [
        write_by_hand,
        write_a_slot,
        lambda module: module.load_state_dict({n: v + 1 for n, v in module.state_dict().items() if ".b." in n}, False),
        lambda module: [t.reset_parameters() for t, _ in iter_table_rows(module) if t.config.name == "b"],
    ],
    ids=["by hand", "a slot", "load", "initial values"],
)
def test_after_a_write_that_names_no_rows_all_rows_of_the_table_are_written(
    tmp_path: Path, write: Callable[[Any], object]
) -> None:
    module, dice = ebc(SPEC), random.Random(10)
    saves = manager(tmp_path)
    saves.save(0, parts(module))
    step(module, dice)
    write(module)
    step(module, dice)
    want = values_of(module)
    saves.save(1, parts(module))
    assert [count == -1 for count in listed(tmp_path / "step-1").values()] == [False, True, False]
    same(loaded(tmp_path / "step-1"), want)
    step(module, dice)
    saves.save(2, parts(module))
    assert -1 not in listed(tmp_path / "step-2").values()


def test_rows_that_are_reset_are_written(tmp_path: Path) -> None:
    module = ebc(SPEC)
    step(module, random.Random(11))
    saves = manager(tmp_path)
    saves.save(0, parts(module))
    reset_rows(module.embedding_bags["b"], torch.tensor([4, -1, 17, 4]))
    want = values_of(module)
    saves.save(1, parts(module))
    assert listed(tmp_path / "step-1")["b"] == 2
    same(loaded(tmp_path / "step-1"), want)


def test_a_resumed_run_continues_the_chain(tmp_path: Path) -> None:
    module, dice = ebc(SPEC), random.Random(12)
    saves = manager(tmp_path)
    saves.save(0, parts(module))
    step(module, dice)
    saves.save(1, parts(module))
    fresh, again = ebc(SPEC), manager(tmp_path)
    again.resume(parts(fresh))
    step(fresh, dice)
    want = values_of(fresh)
    again.save(2, parts(fresh))
    base = SavedContents(tmp_path / "step-2").manifest.base
    assert base is not None
    assert base.name == "step-1"
    same(loaded(tmp_path / "step-2"), want)


def test_parts_that_the_base_has_not_or_that_were_not_loaded_are_written_whole(tmp_path: Path) -> None:
    spec, dice = Adam(lr=0.1), random.Random(21)
    module = ebc(spec)
    for _ in range(3):
        step(module, dice)
    saves = manager(tmp_path / "grown")
    saves.save(1, {"model": module})
    step(module, dice)
    saves.save(2, parts(module))
    same(loaded(tmp_path / "grown" / "step-2", spec), values_of(module))

    manager(tmp_path / "resumed").save(1, parts(module))
    fresh, again = ebc(spec), manager(tmp_path / "resumed")
    again.resume({"model": fresh})
    step(fresh, dice)
    again.save(2, parts(fresh))
    assert SavedContents(tmp_path / "resumed" / "step-2").manifest.base is not None
    same(loaded(tmp_path / "resumed" / "step-2", spec), values_of(fresh))
    again.save(3, {"renamed": fresh, "optimizer": FusedOptimizer(fresh)})
    load(tmp_path / "resumed" / "step-3", {"renamed": ebc(spec)})


def test_an_unreadable_checkpoint_does_not_cost_the_bases_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, dice = ebc(SPEC), random.Random(22)
    saves = manager(tmp_path, keep_last=1)
    opened = manager_module.open_chain
    for number in range(4):
        step(module, dice)

        def once(folder: Any, *known: Any, number: int = number) -> Any:
            if folder.path.endswith(f"step-{number}"):
                raise FileError("a store that does not answer")
            return opened(folder, *known)

        with monkeypatch.context() as patch:
            patch.setattr(manager_module, "open_chain", once)
            saves.save(number, parts(module))
        same(loaded(tmp_path / f"step-{number}"), values_of(module))


def test_everything_is_written_once_the_rows_are_as_large_as_the_whole(tmp_path: Path) -> None:
    module, dice = ebc(SPEC), random.Random(13)
    saves = manager(tmp_path)
    for number in range(12):
        saves.save(number, parts(module))
        for _ in range(6):
            step(module, dice)
    found = [SavedContents(tmp_path / f"step-{number}").manifest for number in range(12)]
    wholes = [number for number, manifest in enumerate(found) if manifest.base is None]
    assert len(wholes) > 1
    later = sum(manifest.bytes for manifest in found[1 : wholes[1]])
    assert found[0].bytes <= later < 2 * found[0].bytes


def test_bases_of_kept_checkpoints_stay(tmp_path: Path) -> None:
    module, dice = ebc(SPEC), random.Random(14)
    saves = manager(tmp_path, keep_last=1)
    names = []
    for number in range(12):
        for _ in range(6):
            step(module, dice)
        saves.save(number, parts(module))
        names.append({found.step for found in checkpoints(tmp_path)})
    assert names[1] == {0, 1}
    for steps in names:
        assert steps == set(range(min(steps), max(steps) + 1))
    assert 0 not in names[-1]


def chain(folder: Path, saves: int = 3) -> dict[int, Values]:
    module, dice, made = ebc(SPEC), random.Random(15), manager(folder)
    want = {}
    for number in range(saves):
        step(module, dice)
        want[number] = values_of(module)
        made.save(number, parts(module))
    return want


def test_a_chain_without_a_link_falls_back_to_the_checkpoints_before_it_and_says_so(tmp_path: Path) -> None:
    want = chain(tmp_path, 4)
    shutil.rmtree(tmp_path / "step-2")
    fresh = ebc(SPEC)
    with pytest.warns(UserWarning, match=r"step-2: got no manifest.json .* It is passed over"):
        found = manager(tmp_path).resume(parts(fresh))
    assert found is not None
    assert found[0] == 1
    same(values_of(fresh), want[1])


def test_another_checkpoint_in_the_place_of_a_base_is_refused(tmp_path: Path) -> None:
    chain(tmp_path)
    shutil.rmtree(tmp_path / "step-1")
    CheckpointManager(tmp_path, keep_last=0).save(1, parts(ebc(SPEC)))
    with pytest.raises(InputError, match=r"expected .* the checkpoint that was continued"):
        load(tmp_path / "step-2", parts(ebc(SPEC)))


def test_a_compacted_checkpoint_has_the_same_contents_and_no_base(tmp_path: Path) -> None:
    want = chain(tmp_path)
    digest = SavedContents(tmp_path / "step-1").digest()
    assert compact(tmp_path / "step-1")
    shutil.rmtree(tmp_path / "step-0")
    assert SavedContents(tmp_path / "step-1").digest() == digest
    assert not compact(tmp_path / "step-1")
    same(loaded(tmp_path / "step-1"), want[1])
    same(loaded(tmp_path / "step-2"), want[2])  # its base has the same id


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full disk"])
def test_a_compaction_that_is_stopped_at_any_call_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    want = chain(tmp_path / "made")[2]
    fired = 0
    for at in range(1000):
        folder = tmp_path / f"try-{at}"
        shutil.copytree(tmp_path / "made", folder)
        with monkeypatch.context() as patch:
            faults = Faults(patch, at, error)
            if isinstance(error, Killed):  # what a killed process cannot do
                patch.setattr("tilerec.checkpoint.compaction._remove_others", lambda *_: None)
            with suppress(Killed, FileError):
                compact(folder / "step-2")
        same(loaded(folder / "step-2"), want)
        compact(folder / "step-2")
        names = {path.name for path in (folder / "step-2").iterdir()}
        assert names == {"manifest.json", *SavedContents(folder / "step-2").manifest.files}
        if not faults.fired:
            break
        fired += 1
        shutil.rmtree(folder)
    assert fired > 5


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda numbers: numbers[::-1].copy(), "expected ascending numbers"),
        (lambda numbers: numbers + 1000, "expected ascending numbers"),
    ],
    ids=["descending", "outside"],
)
def test_row_numbers_that_a_box_does_not_hold_are_refused(
    tmp_path: Path, damage: Callable[[Any], Any], says: str
) -> None:
    chain(tmp_path, 2)
    contents = SavedContents(tmp_path / "step-1")
    manifest = contents.manifest
    rows = next(saved.rows[0] for saved in manifest.tensors.values() if saved.rows)
    file = tmp_path / "step-1" / rows.numbers[0]
    data = bytearray(file.read_bytes())
    place = slice(rows.numbers[1], rows.numbers[1] + 8 * rows.count)
    data[place] = damage(torch.frombuffer(data[place], dtype=torch.int64).numpy()).tobytes()
    file.write_bytes(data)
    files = {rows.numbers[0]: type(next(iter(manifest.files.values())))(len(data), (zlib.crc32(data),))}
    text = manifest_text(manifest.state.value, manifest.tensors, files, manifest.metadata, manifest.id, manifest.base)
    (tmp_path / "step-1" / "manifest.json").write_bytes(text)
    with pytest.raises(InputError, match=says):
        load(tmp_path / "step-1", parts(ebc(SPEC)))


def test_a_chain_that_leads_back_to_itself_is_refused(tmp_path: Path) -> None:
    chain(tmp_path, 2)
    path = tmp_path / "step-1" / "manifest.json"
    inner = json.loads(path.read_bytes())["manifest"]
    inner["base"] = {"name": "step-1", "id": inner["id"]}
    text = json.dumps(inner).encode()
    path.write_bytes(b'{"crc32": "%08x", "manifest": %s}' % (zlib.crc32(text), text))
    with pytest.raises(InputError, match="without an end"):
        load(tmp_path / "step-1", {})


def save_chain(folder: str) -> list[tuple[Values, State]]:
    dmp = wrapped(0, 0)
    saves = CheckpointManager(folder, incremental=True, keep_last=0)
    want = []
    for number in range(3):
        saves.save(number, {"model": dmp, "optimizer": dmp.fused_optimizer})
        want.append(whole(dmp))
        train_some(dmp, number)
    return want


def train_some(dmp: Any, seed: int) -> None:
    """A step that reads few rows."""
    from tests.parallel.checkpoint_models import ROWS
    from tilerec.testing.batches import random_batch

    dmp.zero_grad()
    dmp(random_batch(list(ROWS), [2] * len(ROWS), 2, seed=10 * seed + dist.get_rank())).backward()


def load_one(path: str, turn: int) -> tuple[Values, State]:
    dmp = wrapped(5, turn)
    train(dmp)
    load(path, {"model": dmp, "optimizer": dmp.fused_optimizer})
    return whole(dmp)


@pytest.mark.parametrize("size", [pytest.param(2, marks=NIGHTLY), 3])
def test_ranks_save_chains_under_every_tiling_and_load_them_under_others(pool: Pool, tmp_path: Path, size: int) -> None:
    want, *_ = pool(size).run(save_chain, str(tmp_path))
    for number in (1, 2):
        path = str(tmp_path / f"step-{number}")
        assert any(saved.rows for saved in SavedContents(path).manifest.tensors.values())
        for turn, others in ((0, size), (2, 1), (3, 2)):
            for got in pool(others).run(load_one, path, turn):
                same_state(got, want[number])
