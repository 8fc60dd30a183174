"""Digests, differences and exports of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parallel.checkpoint_models import train, wrapped
from tilerec.checkpoint import load, save
from tilerec.checkpoint.contents import SavedContents, differences, value_differences
from tilerec.errors import InputError
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]


def save_again(first: str, second: str, turn: int) -> None:
    """Save what a checkpoint holds under another plan."""
    dmp = wrapped(3, turn)
    parts = {"model": dmp, "optimizer": dmp.fused_optimizer}
    load(first, parts)
    save(second, parts)


def save_trained(path: str) -> None:
    dmp = wrapped(0, 0)
    train(dmp)
    save(path, {"model": dmp, "optimizer": dmp.fused_optimizer})


def test_the_digest_does_not_depend_on_plan_or_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "abc"]
    pool(2).run(save_trained, paths[0])
    pool(3).run(save_again, paths[0], paths[1], 1)
    pool(1).run(save_again, paths[1], paths[2], 2)
    contents = [SavedContents(path) for path in paths]
    assert len({one.digest() for one in contents}) == 1
    assert not list(differences(contents[0], contents[2]))
    chunks = [{name: len(t.chunks) for name, t in one.manifest.tensors.items()} for one in contents]
    assert chunks[0] != chunks[1]


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
        torch.tensor([[2.0, 1.0], [3.0, 4.0]]),
        torch.tensor([[3.0, 4.0], [1.0, 2.0]]),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double(),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(torch.int32),
    ],
)
def test_the_digest_of_other_values_places_shapes_and_dtypes_differs(tmp_path: Path, other: Tensor) -> None:
    save(tmp_path / "a", {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    save(tmp_path / "b", {"x": other})
    assert SavedContents(tmp_path / "a").digest() != SavedContents(tmp_path / "b").digest()


def test_the_digest_of_a_large_tensor_does_not_depend_on_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", {"x": torch.arange(3000.0).view(500, 6)})
    whole = SavedContents(tmp_path / "a").tensor_digest("x")
    monkeypatch.setattr("tilerec.checkpoint.contents.PART_BYTES", 100)
    assert SavedContents(tmp_path / "a").tensor_digest("x") == whole


def test_differences_name_tensors_and_numbers(tmp_path: Path) -> None:
    nan = float("nan")
    first: dict[str, Any] = {"x": torch.tensor([1.0, nan, 3.0]), "y": torch.ones(2), "run": {"steps": 1, "name": "a"}}
    second = {"x": torch.tensor([1.0, nan, 5.5]), "y": torch.ones(3), "z": torch.ones(1), "run": {"steps": 2}}
    save(tmp_path / "a", first)
    save(tmp_path / "b", second)
    one, two = SavedContents(tmp_path / "a"), SavedContents(tmp_path / "b")
    found = {each.name: (each.what, each.cells, each.largest, each.text) for each in differences(one, two)}
    assert found == {
        "x": ("values", 1, 2.5, ""),
        "y": ("shape", 0, 0.0, "[2] and [3]"),
        "z": ("only in the second", 0, 0.0, ""),
    }
    assert value_differences(one, two) == ['run.name: "a" and nothing', "run.steps: 1 and 2"]


def test_an_export_holds_whole_tensors(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(save_trained, str(tmp_path / "a"))
    contents = SavedContents(tmp_path / "a")
    names = [name for name in contents.manifest.tensors if name.startswith("model.")]
    contents.export(tmp_path / "whole.safetensors", names)
    found = load_file(tmp_path / "whole.safetensors")
    assert set(found) == set(names)
    for name in names:
        assert torch.equal(
            found[name], torch.cat([values.reshape(-1) for _, values in contents.parts_of(name)]).view_as(found[name])
        )
    with pytest.raises(InputError, match="the name 'nothing'"):
        contents.export(tmp_path / "whole.safetensors", ["nothing"])
