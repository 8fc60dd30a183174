"""Stated changes: what a job may have that its checkpoint lacks, and a job that is started again with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.storage.cached_tables import ebc
from tilerec.checkpoint import Changes, CheckpointManager, load, save
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.manager import read_metadata
from tilerec.errors import ConfigError
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.optimizer import Adagrad, Adam, RowWiseAdagrad


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drop": "model.*"}, "got drop='model.*'; expected a list of names"),
        ({"keep": [3]}, "got keep=[3]; expected a list of names"),
        ({"resize": {"a": "b"}}, "got resize={'a': 'b'}; expected a list of names"),
        ({"rename": ["a"]}, "got rename=['a']; expected a dict from names"),
        ({"rename": {"a": 1}}, "got rename={'a': 1}; expected a dict from names"),
    ],
)
def test_changes_that_are_no_names_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Changes: {message}")):
        Changes(**given)


def test_lists_and_tuples_state_the_same() -> None:
    assert Changes(drop=["a"], rename={"a": "b"}) == Changes(drop=("a",), rename={"a": "b"})
    assert Changes().note == {}
    assert Changes(keep=["a.*"]).note == {"changes": {"rename": {}, "drop": [], "keep": ["a.*"], "resize": []}}


def tables(spec: Any) -> dict[str, Any]:
    module = ebc(spec)
    return {"model": module, "optimizer": FusedOptimizer(module)}


def slots(parts: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{name}.{slot}": value.clone()
        for name, state in parts["optimizer"].state_dict()["state"].items()
        for slot, value in state.items()
    }


def filled(parts: dict[str, Any], value: float) -> dict[str, Any]:
    with torch.no_grad():
        for parameter in parts["model"].parameters():
            parameter.fill_(value)
        for state in parts["optimizer"].state_dict()["state"].values():
            for slot in state.values():
                slot.fill_(value)
    return parts


def test_the_refusal_names_the_keys_that_allow_it(tmp_path: Path) -> None:
    save(tmp_path / "a", tables(RowWiseAdagrad(lr=0.1)))
    fresh = filled(tables(Adam(lr=0.1)), 5.0)
    with pytest.raises(ConfigError, match=r"without optimizer\..*exp_avg.*the unknown optimizer\..*sum") as caught:
        load(tmp_path / "a", fresh)
    text = str(caught.value)
    assert "Changes(keep=, drop=, rename=); in a run file, checkpoint.changes.keep, checkpoint.changes.drop" in text
    assert "To begin an optimizer anew, drop all of its state: 'optimizer.*'." in text
    assert all(bool((value == 5).all()) for value in [*fresh["model"].parameters(), *slots(fresh).values()])
    save(tmp_path / "b", {"x": nn.Linear(2, 3)})
    with pytest.raises(ConfigError, match=r"resize=\[\.\.\.\]\), in a run file checkpoint.changes.resize, or use"):
        load(tmp_path / "b", {"x": nn.Linear(2, 4)})
    with pytest.raises(ConfigError, match=r"float64 .* Begin it anew: .* checkpoint.changes.drop and .keep, or use"):
        load(tmp_path / "b", {"x": nn.Linear(2, 3).double()})


def test_a_part_whose_tensors_are_all_dropped_is_left_as_it_is(tmp_path: Path) -> None:
    saved = filled(tables(RowWiseAdagrad(lr=0.1)), 2.0)
    save(tmp_path / "a", saved)
    fresh = filled(tables(Adam(lr=0.1)), 5.0)
    values = load(tmp_path / "a", fresh, changes=Changes(drop=["optimizer.*"]))
    assert all(bool((value == 2).all()) for value in fresh["model"].parameters())
    assert all(bool((value == 5).all()) for value in slots(fresh).values())
    assert list(values) == ["model", "optimizer"]


def test_kept_state_of_tables_stays_beside_loaded_state(tmp_path: Path) -> None:
    """Adagrad's sum and step are loaded for two tables; the third one has state of its own."""
    save(tmp_path / "a", filled(tables(Adagrad(lr=0.1)), 2.0))
    fresh = filled(tables(Adagrad(lr=0.1)), 5.0)
    names = [f"{part}.embedding_bags.b.*" for part in ("model", "optimizer.state")]
    load(tmp_path / "a", fresh, changes=Changes(drop=names, keep=names))
    for name, value in slots(fresh).items():
        assert bool((value == (5 if ".b." in name else 2)).all()), name
    assert bool((fresh["model"].embedding_bags["b"].weight == 5).all())


def torch_parts(sizes: list[int]) -> dict[str, Any]:
    layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)
    optimizer = torch.optim.Adam(layers.parameters())
    sum(layer(torch.ones(1, size)).sum() for layer, size in zip(layers, sizes, strict=True)).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {"model": layers, "optimizer": optimizer}


def test_state_of_torchs_optimizers_is_dropped_and_renamed_by_its_number(tmp_path: Path) -> None:
    saved = torch_parts([2, 3, 4])
    save(tmp_path / "a", saved)
    layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in (5, 4, 3))
    optimizer = torch.optim.Adam(layers.parameters())
    changes = Changes(
        drop=["model.0.*", "optimizer.state.0.*"],
        keep=["model.0.*"],
        rename={f"{part}.{old}": f"{part}.{3 - old}" for part in ("model", "optimizer.state") for old in (1, 2)},
    )
    load(tmp_path / "a", {"model": layers, "optimizer": optimizer}, changes=changes)
    state = optimizer.state_dict()["state"]
    assert {number: one["exp_avg"].shape[1] for number, one in state.items() if one} == {1: 4, 2: 3}
    sum(layer(torch.ones(1, layer.in_features)).sum() for layer in layers).backward()  # type: ignore[union-attr]
    optimizer.step()  # the first parameter begins
    assert [int(one["step"]) for _, one in sorted(optimizer.state_dict()["state"].items())] == [1, 2, 2]


def continued(folder: Path, changes: Changes | None) -> tuple[CheckpointManager, nn.Module, int]:
    """Continue a job whose bias begins at 5."""
    manager, layer = CheckpointManager(folder, keep_last=0, incremental=True), nn.Linear(2, 2)
    nn.init.constant_(layer.bias, 5)
    found = manager.resume({"model": layer}, changes=changes)
    assert found is not None
    return manager, layer, found[0]


def test_a_job_that_is_started_again_with_its_changes_keeps_what_it_has_trained_since(tmp_path: Path) -> None:
    first = nn.Linear(2, 2)
    nn.init.constant_(first.bias, 1)
    CheckpointManager(tmp_path).save(1, {"model": first})
    changes = Changes(drop=["model.bias"], keep=["model.bias"])
    manager, layer, step = continued(tmp_path, changes)
    assert (step, layer.bias[0].item()) == (1, 5)
    nn.init.constant_(layer.bias, 7)
    manager.save(2, {"model": layer})
    assert read_metadata(tmp_path / "step-2")["changes"] == changes.note["changes"]
    assert "changes" not in read_metadata(tmp_path / "step-1")
    manager, layer, step = continued(tmp_path, changes)
    assert (step, layer.bias[0].item()) == (2, 7)
    manager.save(3, {"model": layer})
    # A loaded checkpoint without changes is a base, one with them is not.
    assert [SavedContents(tmp_path / f"step-{step}").manifest.base is None for step in (2, 3)] == [True, False]
    # Other changes are made to any checkpoint, and these to an earlier one if the newer ones are damaged.
    assert continued(tmp_path, Changes(drop=["model.b*"], keep=["model.b*"]))[1].bias[0].item() == 5
    for step in (2, 3):
        (tmp_path / f"step-{step}" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="passed over"):
        assert continued(tmp_path, changes)[1].bias[0].item() == 5


def test_the_same_statement_counts_again_where_a_noted_checkpoint_does_not_fit(tmp_path: Path) -> None:
    changes = Changes(keep=["model.new*"])
    CheckpointManager(tmp_path).save(1, {"model": nn.ParameterDict({"a": torch.ones(2)})})
    for step, names in ((2, ["new1"]), (3, ["new1", "new2"])):
        manager = CheckpointManager(tmp_path)
        model = nn.ParameterDict({"a": torch.zeros(2), **{name: torch.full((2,), float(step)) for name in names}})
        assert manager.resume({"model": model}, changes=changes) is not None
        assert [model[name][0].item() for name in ("a", *names)] == [1, 2, 3][: 1 + len(names)]
        manager.save(step, {"model": model})
