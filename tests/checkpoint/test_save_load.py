"""Checkpoints of whole jobs: saved under one plan and world size, loaded bit for bit under any other."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from tests.parallel.checkpoint_models import State, model, same, train, whole, wrapped
from tilerec.checkpoint import Changes, load, save
from tilerec.checkpoint.blocks import BLOCK
from tilerec.checkpoint.manifest import parse_manifest
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.optim.fused import FusedOptimizer
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
Contents = tuple[dict[str, Tensor], State]


def save_sharded(path: str) -> Contents:
    dmp = wrapped(0, 0)
    train(dmp)
    save(path, {"model": dmp, "optimizer": dmp.fused_optimizer, "run": {"steps": 3, "rates": [0.1, 0.2]}})
    return whole(dmp)


def load_sharded(path: str, turn: int) -> tuple[Contents, Any]:
    dmp = wrapped(5, turn)
    train(dmp)
    values = load(path, {"model": dmp, "optimizer": dmp.fused_optimizer, "run": None})
    return whole(dmp), values["run"]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Contents]:
    """A checkpoint of two ranks, and what is in it."""
    path = str(tmp_path_factory.mktemp("checkpoint") / "step-3")
    return path, pool(2).run(save_sharded, path)[0]


@pytest.mark.parametrize(("size", "turn"), [(1, 1), (2, 0), (2, 3), (3, 1), (4, 2)])
def test_weights_and_state_load_under_any_plan_and_world_size(
    pool: Pool, saved: tuple[str, Contents], size: int, turn: int
) -> None:
    path, want = saved
    for got, run in pool(size).run(load_sharded, path, turn):
        same(got, want)
        assert run == {"steps": 3, "rates": [0.1, 0.2]}


def test_a_process_without_ranks_loads_what_two_ranks_saved(saved: tuple[str, Contents]) -> None:
    path, want = saved
    own = model(5)
    face = FusedOptimizer(own)
    load(path, {"model": own, "optimizer": face})
    same((own.state_dict(), face.state_dict()["state"]), want)


def test_the_files_are_plain_safetensors(saved: tuple[str, Contents]) -> None:
    path, (weights, _) = saved
    found: dict[str, Tensor] = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 # it is not a dict
    assert torch.equal(found["model.over.weight"], weights["over.weight"])
    name = "ebc.embedding_bags.uneven.weight"
    rows = [found[f"model.{name}[{span}, 0:6]"] for span in ("0:5", "5:7")]
    assert torch.equal(torch.cat(rows), weights[name])


def test_torch_optimizers_without_state_take_the_saved_state(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(layer.parameters())
        for _ in range(steps):
            layer(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return layer, optimizer

    layer, optimizer = trained(2)
    save(tmp_path / "a", {"layer": layer, "optimizer": optimizer})
    other, fresh = trained(0)
    load(tmp_path / "a", {"layer": other, "optimizer": fresh})
    for own in (layer, other):
        own.zero_grad()
        own(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fresh.step()
    assert torch.equal(layer.weight, other.weight)


VALUES = {
    "none": None,
    "numbers": [True, -3, 2**70, 0.1, float("inf"), 1e300, float("-inf")],
    "pair": (1, "a"),
    "by number": {0: torch.arange(3), 7: "x"},
    "empty": {"list": [], "dict": {}, "rows": torch.zeros(0, 4)},
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "flags": torch.tensor([True, False]),
    "half": torch.ones(2, 3, dtype=torch.bfloat16),
}


def test_values_come_back_with_their_types(tmp_path: Path) -> None:
    save(tmp_path / "a", {"values": VALUES})
    got = load(tmp_path / "a", {"values": None})["values"]
    assert repr(got) == repr(VALUES)


def test_a_rank_whose_first_tensor_has_no_rows_saves(tmp_path: Path) -> None:
    """Its window of samples may be empty, for example."""
    saved = {"none": torch.zeros(0, 3), "some": torch.arange(4.0)}
    for name, parts in {"both": saved, "one": {"none": saved["none"]}}.items():
        save(tmp_path / name, parts)
        found = load(tmp_path / name, dict.fromkeys(parts))
        assert all(torch.equal(found[key], value) for key, value in parts.items())


def test_large_tensors_are_cut_into_chunks_of_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerec.checkpoint.data_file.CHUNK_BYTES", 100)
    monkeypatch.setattr("tilerec.checkpoint.saving.FILE_BYTES", 250)
    rows = torch.randn(40, 6)
    save(tmp_path / "a", {"rows": rows})
    manifest = parse_manifest((tmp_path / "a" / "manifest.json").read_bytes(), "a")
    chunks = manifest.tensors["rows"].chunks
    assert {chunk.box.sizes for chunk in chunks} == {(4, 6)}
    assert len(manifest.files) == 5
    assert torch.equal(load(tmp_path / "a", {"rows": None})["rows"], rows)


def test_a_rank_reads_only_the_blocks_of_its_rows(tmp_path: Path) -> None:
    """Damage elsewhere in the table does not concern it."""
    rows = torch.arange(6 * BLOCK // 4).view(-1, 64).float()
    save(tmp_path / "a", {"rows": rows})
    file = next((tmp_path / "a").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    few = torch.zeros(1000, 64)
    load(tmp_path / "a", {"rows": few}, changes=Changes(resize=["rows"]))
    assert torch.equal(few, rows[:1000])
    with pytest.raises(InputError, match=r"checksum .* of bytes 2.,.*damaged"):
        load(tmp_path / "a", {"rows": None})


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": 1})
    with pytest.raises(FileError, match="File exists"):
        save(tmp_path / "a", {"x": 2})
    assert load(tmp_path / "a", {"x": None}) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def save_own_rank(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        save(path, {"run": {"steps": dist.get_rank()}})
    return str(caught.value)


def test_states_that_differ_between_ranks_are_refused(pool: Pool, tmp_path: Path) -> None:
    for text in pool(2).run(save_own_rank, str(tmp_path / "a")):
        assert "steps" in text
        assert "is 0 on rank 0 and 1 on rank 1" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "part named 'a.b'"),
        ({"a": {"b.c": torch.ones(1), "b": {"c": torch.ones(1)}}}, "two tensors named 'a.b.c'"),
        ({"a": {1.5: 2}}, "key of type float"),
        ({"a": {"b": {1, 2}}}, "got a set at 'a.b'"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "torch.complex64"),
        ({"a": torch.ones(2).to_sparse()}, "torch.sparse_coo"),
    ],
)
def test_states_that_json_and_safetensors_cannot_hold_are_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        save(tmp_path / "a", state)
    assert not list(tmp_path.iterdir())


def test_other_names_shapes_and_dtypes_are_refused_by_name_and_nothing_is_read(tmp_path: Path) -> None:
    save(tmp_path / "a", {"layer": nn.Linear(3, 2)})
    other = nn.Linear(4, 2)
    before = other.weight.clone()
    with pytest.raises(ConfigError, match=r"got layer.weight torch.float32 \[2, 3\]; expected torch.float32 \[2, 4\]"):
        load(tmp_path / "a", {"layer": other})
    with pytest.raises(ConfigError, match=r"got layer.weight torch.float32 .* expected torch.float64"):
        load(tmp_path / "a", {"layer": nn.Linear(3, 2).double()})
    with pytest.raises(ConfigError, match=r"the unknown layer\.bias; expected"):
        load(tmp_path / "a", {"layer": nn.Linear(3, 2, bias=False)})
    with pytest.raises(ConfigError, match="got the parts layer; expected optimizer among them"):
        load(tmp_path / "a", {"optimizer": None})
    assert torch.equal(other.weight, before)


def test_stated_changes_are_accepted(tmp_path: Path) -> None:
    old = nn.ModuleDict({"a": nn.Linear(3, 2), "gone": nn.Linear(1, 1)})
    save(tmp_path / "a", {"model": old})
    new = nn.ModuleDict({"b": nn.Linear(5, 4), "more": nn.Linear(2, 2)})
    before = {name: value.clone() for name, value in new.state_dict().items()}
    changes = Changes(rename={"model.a": "model.b"}, drop=["model.gone.*"], keep=["model.more.*"], resize=["model.b.*"])
    load(tmp_path / "a", {"model": new}, changes=changes)
    assert torch.equal(new["b"].weight[:2, :3], old["a"].weight)
    assert torch.equal(new["b"].weight[2:], before["b.weight"][2:])
    assert torch.equal(new["b"].weight[:, 3:], before["b.weight"][:, 3:])
    assert torch.equal(new["more"].weight, before["more.weight"])


@pytest.mark.parametrize("damage", ["no manifest", "flipped manifest", "short manifest", "no file", "short file"])
def test_damaged_checkpoints_are_refused_before_anything_is_read(tmp_path: Path, damage: str) -> None:
    layer = nn.Linear(3, 2)
    save(tmp_path / "a", {"layer": nn.Linear(3, 2)})
    manifest = tmp_path / "a" / "manifest.json"
    file = next((tmp_path / "a").glob("*.safetensors"))
    text = manifest.read_bytes()
    before = layer.weight.clone()
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "flipped manifest":
        manifest.write_bytes(text.replace(b'"F32"', b'"I32"'))
    elif damage == "short manifest":
        manifest.write_bytes(text[:-7])
    elif damage == "no file":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises((FileError, InputError), match=r"Checkpoint .*/a: got"):
        load(tmp_path / "a", {"layer": layer})
    assert torch.equal(layer.weight, before)


def hostile(text: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a manifest with a change and a right checksum."""
    inner = json.loads(text)["manifest"]
    change(inner)
    data = json.dumps(inner).encode()
    return b'{"crc32": "%08x", "manifest": ' % zlib.crc32(data) + data + b"}"


def _huge(inner: dict[str, Any]) -> None:
    inner["tensors"]["x"]["shape"] = [2**40, 3]


def _two_huge(inner: dict[str, Any]) -> None:
    inner["tensors"]["x"]["shape"] = [2**40, 3]
    inner["tensors"]["x"]["chunks"][0][3] = [2**40, 3]


def _outside(inner: dict[str, Any]) -> None:
    inner["files"]["../rank0-0.safetensors"] = inner["files"]["rank0-0.safetensors"]


def _overlap(inner: dict[str, Any]) -> None:
    file, start, _, _ = inner["tensors"]["x"]["chunks"][0]
    inner["tensors"]["x"]["chunks"] = [[file, start, [0, 0], [1, 3]], [file, start, [0, 0], [1, 3]]]


def _nested(inner: dict[str, Any]) -> None:
    inner["tensors"]["x"]["shape"] = [[2], [3]]


def _unknown_tensor(inner: dict[str, Any]) -> None:
    inner["state"]["dict"]["x"] = {"tensor": "y"}


def _no_parts(inner: dict[str, Any]) -> None:
    inner["state"] = {"tensor": "x"}


def _newer(inner: dict[str, Any]) -> None:
    inner["version"] = 2


@pytest.mark.parametrize("change", [_huge, _two_huge, _outside, _overlap, _nested, _unknown_tensor, _no_parts, _newer])
def test_impossible_manifests_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    save(tmp_path / "a", {"x": torch.ones(2, 3)})
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_bytes(hostile(manifest.read_bytes(), change))
    with pytest.raises((InputError, ConfigError), match=r"x|safetensors|version|dict"):
        load(tmp_path / "a", {"x": None})


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": torch.ones(2, 3)})
    file = next((tmp_path / "a").glob("*.safetensors"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((FileError, InputError)):
        load(tmp_path / "a", {"x": None})
