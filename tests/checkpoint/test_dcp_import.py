"""Import of checkpoints of torch.distributed.checkpoint, and export back: bit for bit, and nothing in them runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.parallel.checkpoint_models import model, same, train, whole, wrapped
from tilerec.checkpoint import export_dcp, import_dcp, load, save
from tilerec.checkpoint.contents import SavedContents
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.optim.fused import FusedOptimizer
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
STATE: dict[str, Any] = {
    "model": {
        "table.weight": torch.arange(12.0).view(4, 3),
        "half": torch.ones(5).bfloat16(),
        "flag": torch.tensor(True),
    },
    "run": {"steps": 3, "name": "a", "rates": [0.1, 0.2], "nested": [torch.ones(2), {"deep": 7}]},
}


def values(path: Path | str, name: str) -> Tensor:
    contents = SavedContents(path)
    parts = [part.reshape(-1) for _, part in contents.parts_of(name)]
    return torch.cat(parts).view(contents.manifest.tensors[name].shape)


def save_spread(folder: str) -> dict[str, Tensor]:
    """Save a sharded model, its optimizer and a DTensor cut in both dimensions."""
    dmp = wrapped(0, 0)
    train(dmp)
    mesh = init_device_mesh("cpu", (2, 1))
    grid = torch.arange(35.0).view(5, 7)
    spread = {"grid": distribute_tensor(grid, mesh, [Shard(0), Shard(1)])}
    dcp.save(
        {"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict(), "spread": spread},
        checkpoint_id=folder,
    )
    return {"grid": grid, "whole": whole(dmp)}  # type: ignore[dict-item]


def test_a_checkpoint_of_spread_tensors_loads_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    want: Any = pool(2).run(save_spread, str(tmp_path / "dcp"))[0]
    import_dcp(tmp_path / "dcp", tmp_path / "own")
    assert SavedContents(tmp_path / "own").verify() > 0
    assert torch.equal(values(tmp_path / "own", "spread.grid"), want["grid"])
    plain = model(5)
    face = FusedOptimizer(plain)
    load(tmp_path / "own", {"model": plain, "optimizer": face})
    same((plain.state_dict(), face.state_dict()["state"]), want["whole"])


def test_values_lists_and_dtypes_come_back(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = import_dcp(tmp_path / "dcp", tmp_path / "own")
    assert (done.tensors, done.skipped) == (4, ())
    got = load(tmp_path / "own", {"model": {}, "run": {}})
    assert got["run"].pop("nested")[0].equal(torch.ones(2))
    assert got["run"] == {"steps": 3, "name": "a", "rates": [0.1, 0.2]}
    for name, value in STATE["model"].items():
        assert got["model"][name].dtype == value.dtype
        assert torch.equal(got["model"][name], value)


def test_a_checkpoint_of_one_module_becomes_a_part(tmp_path: Path) -> None:
    saved, other = nn.Linear(3, 2), nn.Linear(3, 2)
    over = nn.Sequential(saved)
    dcp.save(over.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ConfigError, match="part='model'"):
        import_dcp(tmp_path / "dcp", tmp_path / "own")
    import_dcp(tmp_path / "dcp", tmp_path / "own", part="model")
    load(tmp_path / "own", {"model": nn.Sequential(other)})
    assert torch.equal(saved.weight, other.weight)


def test_boxes_larger_than_a_chunk_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerec.checkpoint.data_file.CHUNK_BYTES", 100)
    monkeypatch.setattr("tilerec.checkpoint.streamed_save.FILE_BYTES", 300)
    table = torch.randn(50, 4)
    dcp.save({"model": {"t": table, "empty": torch.empty(0, 4)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "own")
    contents = SavedContents(tmp_path / "own")
    assert torch.equal(values(tmp_path / "own", "model.t"), table)
    assert len(contents.manifest.tensors["model.t"].chunks) == 9
    assert len(contents.manifest.files) > 2


class Plain:
    """A class that no checkpoint may need."""


def test_values_of_other_classes_are_refused_by_name_or_skipped(tmp_path: Path) -> None:
    state = {"model": {"t": torch.ones(2)}, "run": {"object": Plain(), "set": {1, 2}, "steps": 1}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(InputError, match=r"run\.object.*Plain"):
        import_dcp(tmp_path / "dcp", tmp_path / "own")
    assert not (tmp_path / "own").exists()
    done = import_dcp(tmp_path / "dcp", tmp_path / "own", skip_values=True)
    assert done.skipped == ("run.object", "run.set")
    assert load(tmp_path / "own", {"run": None})["run"] == {"steps": 1}


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = file.read_bytes()
    with pytest.raises(FileError, match=r"\.metadata"):
        import_dcp(tmp_path / "nothing", tmp_path / "own")
    file.write_bytes(data[:-10])
    with pytest.raises(InputError, match="bytes in"):
        import_dcp(tmp_path / "dcp", tmp_path / "own")
    file.write_bytes(bytes(len(data)))
    with pytest.raises(InputError, match="undamaged bytes"):
        import_dcp(tmp_path / "dcp", tmp_path / "own")
    file.unlink()
    with pytest.raises(FileError, match="No such file"):
        import_dcp(tmp_path / "dcp", tmp_path / "own")
    file.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(data)
    with pytest.raises((FileError, InputError)):  # a link could lead out of the folder
        import_dcp(tmp_path / "dcp", tmp_path / "own")
    assert not list(tmp_path.glob("own*"))


def test_a_checkpoint_on_an_object_store_is_imported(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    fsspec.filesystem("memory").put(str(tmp_path / "dcp"), f"{tmp_path}/dcp", recursive=True)
    import_dcp(f"memory://{tmp_path}/dcp", f"memory://{tmp_path}/own")
    import_dcp(tmp_path / "dcp", tmp_path / "own")
    assert SavedContents(f"memory://{tmp_path}/own").digest() == SavedContents(tmp_path / "own").digest()


def test_an_existing_checkpoint_is_kept(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save(tmp_path / "own", {"x": torch.ones(1)})
    with pytest.raises(FileError, match="new folder"):
        import_dcp(tmp_path / "dcp", tmp_path / "own")
    assert list(SavedContents(tmp_path / "own").manifest.tensors) == ["x"]


# ------------------------------------------------------------------------------------------------------------- export


def save_own(path: str) -> Any:
    dmp = wrapped(0, 1)
    train(dmp)
    save(path, {"model": dmp, "optimizer": dmp.fused_optimizer, "run": {"steps": 3, "rates": [0.5], "names": ("a",)}})
    return whole(dmp)


def test_torch_reads_an_export_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    want = pool(2).run(save_own, str(tmp_path / "own"))[0]
    export_dcp(tmp_path / "own", tmp_path / "dcp")
    plain = model(5)
    face = FusedOptimizer(plain)
    state: dict[str, Any] = {"model": plain.state_dict(), "optimizer": face.state_dict()}
    state["run"] = {"steps": 0, "rates": [], "names": ()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    plain.load_state_dict(state["model"])
    face.load_state_dict(state["optimizer"])
    same((plain.state_dict(), face.state_dict()["state"]), want)
    assert state["run"] == {"steps": 3, "rates": [0.5], "names": ("a",)}
    export_dcp(tmp_path / "own", tmp_path / "weights", part="model")
    other = model(6).state_dict()
    dcp.load(other, checkpoint_id=tmp_path / "weights", no_dist=True)
    assert all(torch.equal(value, want[0][name]) for name, value in other.items())
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    assert SavedContents(tmp_path / "back").digest() == SavedContents(tmp_path / "own").digest()


def test_an_export_is_whole_or_not_at_all(tmp_path: Path) -> None:
    save(tmp_path / "own", {"model": OrderedDict(t=torch.arange(8.0))})
    with pytest.raises(ConfigError, match="expected one of model"):
        export_dcp(tmp_path / "own", tmp_path / "dcp", part="other")
    file = next((tmp_path / "own").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="checksum"):
        export_dcp(tmp_path / "own", tmp_path / "dcp")
    assert not list(tmp_path.glob("dcp*"))
    with pytest.raises(FileError, match="a local folder"):
        export_dcp(tmp_path / "own", "memory://dcp")
    (tmp_path / "dcp").mkdir()
    with pytest.raises(FileError, match="exists"):
        export_dcp(tmp_path / "own", tmp_path / "dcp")
