"""Writers and followers of a log on one process: what they publish, apply and refuse."""

from __future__ import annotations

import json
import random
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.checkpoint.file_faults import Faults, Killed
from tests.sharding.managed_models import build, global_batch
from tests.storage.cached_tables import batch, ebc, output
from tilerec.checkpoint.contents import SavedContents
from tilerec.cli import app
from tilerec.delta import DeltaLog, DeltaRefused, DeltaWriter, EntryName, Follower
from tilerec.delta.row_history import row_history, row_of_id
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.modules.cached_tables import cache_tables
from tilerec.spec.optimizer import RowWiseAdagrad

SPEC = RowWiseAdagrad(lr=0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = ebc(SPEC)
        self.over = nn.Linear(2 * 8 + 12 + 12 + 3, 1)

    def forward(self, features: Any) -> Tensor:
        pooled: Tensor = self.ebc(features).values()
        return pooled.square().sum()


def step(model: Model, dice: random.Random) -> None:
    output(model.ebc, batch(dice)).square().sum().backward()
    with torch.no_grad():
        model.over.weight += 1


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(got: nn.Module, want: dict[str, Tensor]) -> None:
    for name, value in got.state_dict().items():
        assert torch.equal(value, want[name]), name


def published(folder: Path, count: int = 3, **options: Any) -> tuple[Model, list[dict[str, Tensor]]]:
    """A log of a base and some deltas, and the states."""
    torch.manual_seed(1)
    model, dice = Model(), random.Random(5)
    writer = DeltaWriter(folder, model, **options)
    states = []
    for number in range(count + 1):
        if number:
            step(model, dice)
        writer.publish(10 * number)
        states.append(copies(model))
    writer.close()
    return model, states


def test_a_follower_goes_from_state_to_state(tmp_path: Path) -> None:
    model, dice = Model(), random.Random(5)
    writer = DeltaWriter(tmp_path, model)
    writer.publish(0)
    other = Model()
    follower = Follower(tmp_path, other, lock=threading.Lock())
    for number in (1, 2, 3):
        step(model, dice)
        writer.publish(number)
        (record,) = follower.poll()
        assert (record.sequence, record.step) == (number, number)
        same(other, copies(model))
    assert follower.poll() == []


def test_a_delta_has_the_written_rows_only(tmp_path: Path) -> None:
    _, states = published(tmp_path, 1)
    entry = DeltaLog(tmp_path).open(EntryName(1, False))
    for name in "abc":
        weight = f"ebc.embedding_bags.{name}.weight"
        listed = sum(rows.count for rows in entry.manifest.tensors[f"model.{weight}"].rows)
        changed = int((states[0][weight] != states[1][weight]).any(1).sum())
        assert 0 < changed <= listed < len(states[0][weight]) / 2
    assert entry.manifest.tensors["model.over.bias"].chunks == ()  # dense weights without a change
    assert entry.manifest.tensors["model.over.weight"].is_whole


def test_a_cached_table_publishes_the_rows_in_its_cache(tmp_path: Path) -> None:
    model, dice = Model(), random.Random(5)
    cache_tables(model.ebc, 0.1)
    writer = DeltaWriter(tmp_path, model)
    for number in range(3):
        step(model, dice)
        writer.publish(number)
    other = Model()
    Follower(tmp_path, other).poll()
    same(other, copies(model))


def test_a_table_without_an_attached_optimizer_is_compared(tmp_path: Path) -> None:
    module, other = ebc(None), ebc(None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    writer, dice = DeltaWriter(tmp_path, module), random.Random(5)
    writer.publish(0)
    output(module, batch(dice)).square().sum().backward()
    optimizer.step()
    made = writer.publish(1)
    Follower(tmp_path, other).poll()
    same(other, copies(module))
    tensors = SavedContents(made.path).manifest.tensors
    assert 0 < sum(rows.count for rows in tensors["model.embedding_bags.a.weight"].rows) < 150


def test_a_writer_goes_on_with_a_log_and_publishes_what_went_back(tmp_path: Path) -> None:
    model, states = published(tmp_path)
    other = Model()
    Follower(tmp_path, other).poll()
    model.load_state_dict(states[1])  # an earlier checkpoint
    writer = DeltaWriter(tmp_path, model)
    assert writer.sequence == 4
    step(model, random.Random(8))
    follower = Follower(tmp_path, other)
    made = writer.publish(15)
    assert made.sequence == 4
    assert follower.poll()[-1].sequence == 4
    same(other, copies(model))
    entry = DeltaLog(tmp_path).open(EntryName(4, False))
    weight = "ebc.embedding_bags.a.weight"
    differ = int((states[3][weight] != model.state_dict()[weight]).any(1).sum())
    assert sum(rows.count for rows in entry.manifest.tensors[f"model.{weight}"].rows) == differ


def test_bases_are_written_when_due_and_old_entries_removed(tmp_path: Path) -> None:
    _, states = published(tmp_path, 7, base_every=2, keep_bases=2)
    log = DeltaLog(tmp_path)
    assert [str(name) for name in log.names()] == ["base-4", "delta-5", "delta-6", "base-6", "delta-7"]
    other = Model()
    follower = Follower(tmp_path, other)
    assert follower.sequence == 6
    follower.poll()
    same(other, states[7])


def test_a_follower_that_is_late_begins_again_at_a_base(tmp_path: Path) -> None:
    model, dice = Model(), random.Random(5)
    writer = DeltaWriter(tmp_path, model, base_every=2, keep_bases=1)
    writer.publish(0)
    other = Model()
    follower = Follower(tmp_path, other)
    for number in range(1, 6):
        step(model, dice)
        writer.publish(number)
    assert [record.sequence for record in follower.poll()] == [4, 5]
    same(other, copies(model))


def test_weights_of_a_known_state_need_no_base(tmp_path: Path) -> None:
    _, states = published(tmp_path)
    other = Model()
    other.load_state_dict(states[1])
    state = DeltaLog(tmp_path).open(EntryName(1, False)).record.state
    follower = Follower(tmp_path, other, state=state)
    assert [record.sequence for record in follower.poll()] == [2, 3]
    same(other, states[3])
    with pytest.raises(ConfigError, match="got the state 'other'"):
        Follower(tmp_path, other, state="other")


def moved(log: Path, one: str, two: str) -> None:
    shutil.rmtree(log / two, ignore_errors=True)
    shutil.copytree(log / one, log / two)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def of_another(name: str) -> Any:
    def replace(folder: Path) -> None:
        published(folder.parent / "another")
        shutil.rmtree(folder / name)
        shutil.copytree(folder.parent / "another" / name, folder / name)

    return replace


def of_another_branch(folder: Path) -> None:
    """Delta 3 of the same run after another delta 2."""
    branch = folder.parent / "branch"
    shutil.copytree(folder, branch)
    for name in ("delta-2", "delta-3"):
        shutil.rmtree(branch / name)
    writer = DeltaWriter(branch, Model())
    writer.publish(0)
    writer.publish(0)
    shutil.rmtree(folder / "delta-3")
    shutil.copytree(branch / "delta-3", folder / "delta-3")


FAULTS = {
    "missing": (lambda folder: shutil.rmtree(folder / "delta-2"), "gap"),
    "a byte": (lambda folder: flipped(folder / "delta-3" / "rank0-0.safetensors"), "damaged"),
    "manifest": (lambda folder: flipped(folder / "delta-3" / "manifest.json"), "damaged"),
    "half a file": (lambda folder: (folder / "delta-3" / "rank0-0.safetensors").write_bytes(b"12"), "damaged"),
    "no file": (lambda folder: (folder / "delta-3" / "rank0-0.safetensors").unlink(), "damaged"),
    "another name": (lambda folder: moved(folder, "delta-2", "delta-3"), "damaged"),
    "another run": (of_another("delta-3"), "other run"),
    "another branch": (of_another_branch, "other base"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_delta_is_refused_and_changes_nothing(tmp_path: Path, fault: str) -> None:
    folder, (spoil, reason) = tmp_path / "log", FAULTS[fault]
    _, states = published(folder)
    other = Model()
    base = DeltaLog(folder).open(EntryName(0, True))
    follower = Follower(folder, other)
    first = 1 if reason == "gap" else 2
    for number in range(1, first + 1):
        follower.apply(EntryName(number, False))
    spoil(folder)
    with pytest.raises(DeltaRefused) as refused:
        follower.poll()
    assert refused.value.reason == reason
    assert "Delta log" in str(refused.value) or "Checkpoint" in str(refused.value)
    same(other, states[first])
    assert follower.record.run == base.record.run


def test_deltas_out_of_order_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    follower = Follower(tmp_path, Model())
    for number, reason in ((2, "gap"), (1, ""), (1, "repeated"), (3, "gap")):
        with suppress(DeltaRefused) if not reason else pytest.raises(DeltaRefused) as refused:
            follower.apply(EntryName(number, False))
        if reason:
            assert refused.value.reason == reason


def test_another_model_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(DeltaRefused, match=r"got model\.over\.weight .* for nothing of the target") as refused:
        Follower(tmp_path, {name: t for name, t in Model().state_dict().items() if "over" not in name})
    assert refused.value.reason == "other model"
    tensors = {name: t for name, t in Model().state_dict().items() if "over" not in name}
    assert Follower(tmp_path, tensors, partial=True).poll()


def test_a_folder_without_a_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="got no whole base"):
        Follower(tmp_path, Model())


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full disk"])
def test_a_writer_that_stops_anywhere_leaves_a_log_that_goes_on(tmp_path: Path, error: BaseException) -> None:
    at, fired = 0, True
    while fired:
        folder = tmp_path / str(at)
        torch.manual_seed(1)
        model, dice = Model(), random.Random(5)
        writer = DeltaWriter(folder, model, base_every=2)
        writer.publish(0)
        step(model, dice)
        writer.publish(1)
        step(model, dice)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, error)
            with suppress(Killed, FileError):
                writer.publish(2)  # a delta and a base
        fired = faults.fired
        if isinstance(error, Killed):
            writer.close()
            writer = DeltaWriter(folder, model)
        step(model, dice)
        writer.publish(3)
        writer.close()
        other = Model()
        Follower(folder, other).poll()
        same(other, copies(model))
        assert not [path for path in folder.iterdir() if "." in path.name]
        at += 1
    assert at > 8


def test_a_damaged_log_goes_on_with_a_new_base(tmp_path: Path) -> None:
    model, _ = published(tmp_path)
    flipped(tmp_path / "delta-2" / "manifest.json")
    with pytest.warns(UserWarning, match="goes on with a new base"):
        writer = DeltaWriter(tmp_path, model)
    made = writer.publish(40)
    assert Path(made.path).name == "base-4"
    other = Model()
    Follower(tmp_path, other).poll()
    same(other, copies(model))


# -- budgets ---------------------------------------------------------------------------------------------------


def test_a_budget_publishes_the_largest_changes_first_and_states_the_bound(tmp_path: Path) -> None:
    model, dice = Model(), random.Random(5)
    writer = DeltaWriter(tmp_path, model, max_bytes=400)
    writer.publish(0)
    other = Model()
    follower = Follower(tmp_path, other)
    for number in range(1, 6):
        step(model, dice)
        made = writer.publish(number)
        entry = DeltaLog(tmp_path).open(EntryName(number, False))
        sent = sum(
            rows.count * (8 + 4 * saved.shape[1])
            for name, saved in entry.manifest.tensors.items() if "ebc" in name for rows in saved.rows
        )  # fmt: skip
        assert 0 < sent <= 400
        follower.poll()
        for table, left in made.left_out.items():
            weight = f"ebc.embedding_bags.{table}.weight"
            gaps = (model.state_dict()[weight] - other.state_dict()[weight]).abs().amax(1)
            assert left.largest == float(gaps.max())
            assert left.rows == int((gaps > 0).sum())
        assert entry.record.left_out == made.left_out
    while writer.publish(9).left_out:
        pass
    follower.poll()
    same(other, copies(model))


def test_a_restarted_writer_keeps_to_its_budget(tmp_path: Path) -> None:
    model, dice = Model(), random.Random(5)
    first = DeltaWriter(tmp_path, model, max_bytes=400)
    first.publish(0)
    step(model, dice)
    left = first.publish(1).left_out
    first.close()
    again = DeltaWriter(tmp_path, model, max_bytes=0)
    assert again.publish(1).left_out == left
    assert sum(one.rows for one in left.values())


def test_ids_that_change_hands_are_published_with_their_rows_under_any_budget(tmp_path: Path) -> None:
    model = build("lru and lfu, shared rows")
    writer = DeltaWriter(tmp_path, model, max_bytes=0, base_every=99)
    other = build("lru and lfu, shared rows")
    for number in range(4):
        out, _ = model(global_batch(number))
        out.values().square().sum().backward()
        writer.publish(number)
    Follower(tmp_path, other, partial=True).poll()
    want = model.state_dict()
    for name, value in other.state_dict().items():
        if "plain" not in name and name.rsplit(".", 1)[-1] in ("ids", "used", "weight"):
            assert torch.equal(value, want[name]), name
    assert not torch.equal(*(m.state_dict()["_embedding_module.embedding_bags.plain.weight"] for m in (model, other)))


# -- looking into a log ----------------------------------------------------------------------------------------


def test_the_history_of_a_row(tmp_path: Path) -> None:
    _, states = published(tmp_path)
    weight = "ebc.embedding_bags.a.weight"
    row = int((states[3][weight] != states[2][weight]).any(1).nonzero()[0])
    found = list(row_history(DeltaLog(tmp_path), weight, row))
    assert str(found[0].entry.name) == "delta-3"
    assert str(found[-1].entry.name) == "base-0"
    for write in found:
        assert torch.equal(write.values, states[write.entry.record.sequence][weight][row])
        assert write.rank == 0
    with pytest.raises(InputError, match="got row 300"):
        list(row_history(DeltaLog(tmp_path), weight, 300))
    shutil.rmtree(tmp_path / "delta-2")
    with pytest.raises(InputError, match=r"got delta-1 before it, .*expected number 2 of the same log"):
        list(row_history(DeltaLog(tmp_path), weight, row))


def test_the_row_of_a_raw_id(tmp_path: Path) -> None:
    model = build("lru and lfu, shared rows")
    model(global_batch(0))
    model(global_batch(1))
    DeltaWriter(tmp_path, model).publish(0)
    modules = model.managed_collision_collection.modules_by_table
    weight = "_embedding_module.embedding_bags.{}.weight"
    for table, feature in (("user", "u"), ("item", "i")):
        own = modules[table].id_map.state
        for id_ in own.ids_E[own.used_E].tolist():
            assert row_of_id(DeltaLog(tmp_path), weight.format(table), id_) == modules[table].inspect(feature, id_).row
    with pytest.raises(InputError, match="has no row of its own"):
        row_of_id(DeltaLog(tmp_path), weight.format("user"), 99_999)


def test_the_commands(tmp_path: Path) -> None:
    published(tmp_path)
    runner = CliRunner()
    listed = runner.invoke(app, ["delta", "list", str(tmp_path)])
    assert listed.exit_code == 0
    assert "delta-3" in listed.output
    assert runner.invoke(app, ["delta", "verify", str(tmp_path)]).exit_code == 0
    weight = "ebc.embedding_bags.a.weight"
    shown = runner.invoke(app, ["delta", "inspect", str(tmp_path), weight, "--row", "0"])
    assert shown.exit_code == 0
    assert "base-0" in shown.output
    assert runner.invoke(app, ["delta", "inspect", str(tmp_path), weight]).exit_code == 2
    file = tmp_path / "file"
    file.touch()
    no_folder = runner.invoke(app, ["delta", "list", str(file)])
    assert (no_folder.exit_code, "expected a folder that can be listed" in no_folder.output) == (1, True)
    flipped(tmp_path / "delta-2" / "rank0-0.safetensors")
    assert runner.invoke(app, ["delta", "verify", str(tmp_path)]).exit_code == 1
    assert json.loads((tmp_path / "delta-1" / "manifest.json").read_text())["manifest"]["metadata"]["delta"]


# -- logs that begin anew, and requests meanwhile ----------------------------------------------------------------


def test_a_log_that_begins_anew_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    follower = Follower(tmp_path, Model())
    follower.poll()
    shutil.rmtree(tmp_path)
    published(tmp_path, 2)
    with pytest.raises(DeltaRefused, match="the log has begun anew") as refused:
        follower.poll()
    assert refused.value.reason == "other run"


def test_a_log_without_its_base_keeps_its_run(tmp_path: Path) -> None:
    model, _ = published(tmp_path, 1)
    other = Model()
    follower = Follower(tmp_path, other)
    follower.poll()
    flipped(tmp_path / "base-0" / "manifest.json")
    DeltaWriter(tmp_path, model).publish(9)
    assert [record.sequence for record in follower.poll()] == [2]
    same(other, copies(model))


def test_deltas_before_a_refused_one_are_reported(tmp_path: Path) -> None:
    published(tmp_path)
    follower = Follower(tmp_path, Model())
    flipped(tmp_path / "delta-3" / "rank0-0.safetensors")
    assert [record.sequence for record in follower.poll()] == [1, 2]
    with pytest.raises(DeltaRefused, match="damaged"):
        follower.poll()


def test_a_state_is_found_below_a_damaged_entry(tmp_path: Path) -> None:
    published(tmp_path)
    state = DeltaLog(tmp_path).open(EntryName(1, False)).record.state
    flipped(tmp_path / "delta-3" / "manifest.json")
    assert Follower(tmp_path, Model(), state=state).sequence == 1


def test_a_target_with_none_of_the_tensors_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(DeltaRefused, match="none of the target's"):
        Follower(tmp_path, {"other": torch.zeros(1)}, partial=True)


class Reading:
    """A lock whose holder looks up rows first, as a request may."""

    def __init__(self, model: Model) -> None:
        self._model, self._rng = model, random.Random(5)

    def __enter__(self) -> None:
        with torch.no_grad():
            output(self._model.ebc, batch(self._rng))

    def __exit__(self, *_: object) -> None:
        pass


def test_requests_meanwhile_leave_no_old_rows_in_a_cache(tmp_path: Path) -> None:
    model, _ = published(tmp_path)
    other = Model()
    cache_tables(other.ebc, 0.1)
    Follower(tmp_path, other, lock=Reading(other)).poll()
    features = batch(random.Random(5))
    with torch.no_grad():
        assert torch.equal(output(other.ebc, features), output(model.ebc, features))


def test_equal_changes_fit_a_budget_in_part(tmp_path: Path) -> None:
    model = Model()
    writer = DeltaWriter(tmp_path, model, max_bytes=400, base_every=99)
    writer.publish(0)
    with torch.no_grad():
        for table in "abc":
            model.ebc.embedding_bags[table].weight += 2.0
    waiting = [sum(left.rows for left in writer.publish(number).left_out.values()) for number in (1, 2, 3)]
    assert 577 > waiting[0] > waiting[1] > waiting[2]


def test_a_change_of_a_zero_s_sign_is_published(tmp_path: Path) -> None:
    model, other = Model(), Model()
    with torch.no_grad():
        model.ebc.embedding_bags["a"].weight[3] = 0.0
    writer = DeltaWriter(tmp_path, model, max_bytes=4000)
    writer.publish(0)
    with torch.no_grad():
        model.ebc.embedding_bags["a"].weight[3] = -0.0
    writer.publish(1)
    Follower(tmp_path, other).poll()
    assert torch.signbit(other.ebc.embedding_bags["a"].weight[3]).all()
