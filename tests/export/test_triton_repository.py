"""A model repository for Triton: its config is one of the server's format, and versions follow each other."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message
from torch import nn
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.errors import ConfigError, FileError
from tilerec.export.exporting import prepared
from tilerec.export.package_writing import write_package
from tilerec.export.triton_repository import triton_config, write_triton
from tilerec.export.whole_model import whole_model
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

TYPES = [
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "STRING", "BF16",
]  # fmt: skip
INT, INT32, STRING = 3, 5, 9  # types of protobuf fields
MESSAGE, ENUM = 11, 14


def _config_class() -> type[Message]:
    """Return the class of Triton's ModelConfig with the fields that are written, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="config.proto", package="inference", syntax="proto3")
    file.enum_type.add(name="DataType").value.extend(
        descriptor_pb2.EnumValueDescriptorProto(name=f"TYPE_{name}", number=i) for i, name in enumerate(TYPES)
    )
    file.enum_type.add(name="Kind").value.extend(
        descriptor_pb2.EnumValueDescriptorProto(name=f"KIND_{name}", number=i)
        for i, name in enumerate(("AUTO", "GPU", "CPU", "MODEL"))
    )
    tensor = [("name", STRING, ""), ("data_type", ENUM, "DataType"), ("dims", INT, "*")]
    fields = {
        "Tensor": tensor,
        "Group": [("count", INT32, ""), ("kind", ENUM, "Kind")],
        "Value": [("string_value", STRING, "")],
        "Parameter": [("key", STRING, ""), ("value", MESSAGE, "Value")],
        "ModelConfig": [
            ("name", STRING, ""), ("backend", STRING, ""), ("max_batch_size", INT32, ""), ("input", MESSAGE, "*Tensor"),
            ("output", MESSAGE, "*Tensor"), ("instance_group", MESSAGE, "*Group"),
            ("parameters", MESSAGE, "*Parameter"),
        ],
    }  # fmt: skip
    for name, own in fields.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, of) in enumerate(own, 1):
            label = 3 if of.startswith("*") else 1  # repeated, or optional
            type_name = f".inference.{of.lstrip('*')}" if kind in (MESSAGE, ENUM) else None
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)  # type: ignore[arg-type]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[attr-defined]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


class Small(nn.Module):
    def __init__(self, keys: tuple[str, ...] = ("user", "item")) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, key, feature_names=[key]) for key in keys])

    def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return {"logit": self.tables(features).values().sum(1)}


def written(path: Path, *keys: str) -> Path:
    """Write a package without a compiled part, which nothing here runs."""
    example = KeyedJaggedTensor(list(keys), torch.arange(3 * len(keys)), lengths=torch.ones(3 * len(keys)).int())
    whole = whole_model(Small(keys).eval())
    assert whole is not None
    made = prepared(whole, example)
    code = path.with_suffix(".code")
    with zipfile.ZipFile(code, "w") as archive:
        archive.writestr("model/data/aotinductor/model/model.so", b"code")
    with path.open("wb") as file:
        write_package(file, code, made.manifest, made.weights)
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("package") / "clicks.pt2", "user", "item")


def test_the_config_names_types_and_dims_of_the_package(package: Path, tmp_path: Path) -> None:
    version = write_triton(package, tmp_path / "models", instances=3, threads=2)
    assert version == tmp_path / "models" / "clicks" / "1"
    found = text_format.Parse((version.parent / "config.pbtxt").read_text(), _config_class()())
    config = {field.name: value for field, value in found.ListFields()}
    assert (config["name"], config["backend"], found.max_batch_size) == ("clicks", "python", 0)  # type: ignore[attr-defined]
    types = {"features.values": ("INT64", [-1]), "features.lengths": ("INT32", [2, -1])}
    assert {own.name: (TYPES[own.data_type], list(own.dims)) for own in config["input"]} == types
    assert [(own.name, TYPES[own.data_type], list(own.dims)) for own in config["output"]] == [
        ("output['logit']", "FP32", [-1])
    ]
    assert [(own.count, own.kind) for own in config["instance_group"]] == [(3, 2)]
    assert [(own.key, own.value.string_value) for own in config["parameters"]] == [("threads", "2")]
    assert (version / "model.pt2").read_bytes() == package.read_bytes()


def test_a_second_package_is_the_next_version_under_the_same_config(package: Path, tmp_path: Path) -> None:
    first = write_triton(package, tmp_path, "a")
    config = first.parent / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 7"))
    assert write_triton(package, tmp_path, "a").name == "2"
    assert "count: 7" in config.read_text()
    assert sorted(own.name for own in first.parent.iterdir()) == ["1", "2", "config.pbtxt"]


def test_a_package_with_other_inputs_is_no_version_of_the_model(package: Path, tmp_path: Path) -> None:
    write_triton(package, tmp_path, "a")
    with pytest.raises(ConfigError, match="a model with other inputs or outputs; expected that of this package"):
        write_triton(written(tmp_path / "other.pt2", "user"), tmp_path, "a")
    assert not (tmp_path / "a" / "2").exists()


def test_what_the_server_cannot_have_is_refused(package: Path, tmp_path: Path) -> None:
    from tilerec.export.package_file import open_package

    manifest = open_package(package).manifest
    with pytest.raises(ConfigError, match="got 0 instances of 1 threads; expected at least 1"):
        triton_config(manifest, "a", instances=0)
    with pytest.raises(ConfigError, match=r"got the name '\.\./b'; expected letters, digits"):
        write_triton(package, tmp_path, "../b")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="expected a writable folder"):
        write_triton(package, tmp_path / "file")
    ended = CliRunner().invoke(app, ["serve-files", str(package)])
    assert ended.exit_code == 1
    assert "got neither; expected one or both" in ended.output
