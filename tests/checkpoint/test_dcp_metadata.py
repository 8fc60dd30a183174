"""Hostile and damaged `.metadata` files: refused by name, and nothing in them is imported or called."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from tilerec.checkpoint import import_dcp
from tilerec.checkpoint.dcp_metadata import ADMITTED, parse_metadata
from tilerec.checkpoint.pickle_data import Made, parse_pickle
from tilerec.errors import FileError, InputError, TilerecError


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A DCP checkpoint."""
    dcp.save({"model": {"t": torch.arange(6.0).view(3, 2)}, "steps": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def changed(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change the metadata of a checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(folder: Path, match: str) -> None:
    out = folder.with_name("own")
    with pytest.raises(InputError, match=match):
        import_dcp(folder, out)
    assert not out.exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch {}",), r"(posix|nt)\.system"),
        (eval, ("open('{}', 'w')",), r"(builtins|__builtin__)\.eval"),
        (exec, ("open('{}', 'w')",), r"(builtins|__builtin__)\.exec"),
        (getattr, (os, "system"), r"(builtins|__builtin__)\.getattr|opcode|cannot"),
        (open, ("{}", "w"), r"(io|_io|builtins)\.open"),
        (torch.load, ("{}",), r"torch\.serialization\.load"),
        (torch.hub.load, ("{}", "x"), r"torch\.hub\.load"),
    ],
)
def test_nothing_that_a_pickle_names_is_called(
    folder: Path, protocol: int, function: Any, arguments: tuple[Any, ...], name: str
) -> None:
    mark = folder.parent / "mark"
    given = [text.format(mark) if isinstance(text, str) else "os" for text in arguments]
    hostile = pickle.dumps({"state_dict_metadata": Call(function, *given)}, protocol=protocol)
    (folder / ".metadata").write_bytes(hostile)
    refused(folder, name if protocol >= 2 else f"{name}|opcode")
    assert not mark.exists()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_members_of_enumerations_are_read_as_every_python_writes_them(folder: Path, protocol: int) -> None:
    """Python 3.11.0 to 3.11.3 write `getattr(class, name)`, others `class(value)`. Debian 12 has 3.11.2."""
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING

    class AsOlder(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return (getattr, (encoding, obj.name)) if isinstance(obj, encoding) else NotImplemented

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    file = io.BytesIO()
    AsOlder(file, protocol).dump(metadata)
    assert b"getattr" in file.getvalue()
    (folder / ".metadata").write_bytes(file.getvalue())
    import_dcp(folder, folder.with_name("own"))
    member = parse_pickle(pickle.dumps(Call(getattr, encoding, "TORCH_PRESERVE_FORMAT")), "file", ADMITTED)
    assert member.kind == f"{encoding.__module__}.{encoding.__name__}"
    assert member.arguments == ("TORCH_PRESERVE_FORMAT",)


def test_attributes_of_admitted_modules_are_no_way_out(folder: Path) -> None:
    for module, name in (
        ("builtins", "getattr.__call__"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.serialization", "os.system"),
        ("torch", "Size.__class__"),
        ("torch", "load"),
        ("collections", "OrderedDict.__reduce__"),
    ):
        text = [struct.pack("<BB", 0x8C, len(part)) + part.encode() for part in (module, name)]
        (folder / ".metadata").write_bytes(b"\x80\x04" + text[0] + text[1] + b"\x93.")
        refused(folder, name.replace(".", r"\."))


def test_calls_of_admitted_names_stay_records() -> None:
    made = parse_pickle(pickle.dumps(Call(torch.Size, ["rm"])), "it", ADMITTED)
    assert type(made) is Made
    assert (made.kind, made.arguments) == ("torch.Size", (["rm"],))
    made = parse_pickle(pickle.dumps(Path("/a")), "it", ADMITTED | {f"{type(Path()).__module__}.PosixPath"})
    assert made.arguments == ("/", "a")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04",
        b"not a pickle",
        b"\x80\x04N",
        b"\x80\x04(.",
        b"\x80\x04e.",
        b"\x80\x04}(N.",
        b"\x80\x04Nb.",
        b"\x80\x04]\x94h\x07.",
        b"\x80\x04)\x94)s.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fa.",  # bytes beyond the end
        b"\x80\x04\x82\x01.",  # an extension's code
        b"\x80\x04Q.",  # a persistent id
        b"I" + b"9" * 10_000 + b"\n.",
    ],
)
def test_damaged_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"it: got .*; expected .*\."):
        parse_metadata(data, "it", {})


def test_memory_numbers_and_nesting_take_no_memory_or_time() -> None:
    parse_pickle(b"\x80\x04Nr\xff\xff\xff\xff.", "it", ())  # CPython's unpickler makes a list of 2^32 entries
    nested = b"\x80\x04)\x94" + b"h\x00h\x00\x86q\x00" * 200 + b"."  # 2^200 tuples for a recursive walk
    with pytest.raises(InputError):
        parse_metadata(nested, "it", {})
    with pytest.raises(InputError):
        parse_metadata(b"\x80\x04" + b"]\x94a" * 3 + b"(" * 100_000 + b".", "it", {})


def test_tuples_are_no_keys() -> None:
    key = b")\x94" + b"h\x00h\x00\x86q\x00" * 30 + b"h\x00"  # its hash visits 2^30 tuples
    with pytest.raises(InputError, match="a tuple as a key"):
        parse_pickle(b"\x80\x04" + key + b"}h\x00Ns.", "it", ())


@pytest.mark.parametrize("cut", range(0, 900, 37))
def test_a_shortened_file_is_refused(folder: Path, cut: int) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: cut % len(data)])
    refused(folder, "whole pickle")


def test_flipped_bytes_never_raise_anything_else(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.distcp")}
    for i in range(len(data)):
        for bit in (1, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[i] ^= bit
            with contextlib.suppress(TilerecError):
                parse_metadata(bytes(damaged), "it", _Sizes(sizes))


class _Sizes(dict[str, int]):
    def __missing__(self, name: str) -> int:
        raise FileError(f"{name}: got no such file; expected one. Check it.")


def _box(metadata: Metadata) -> ChunkStorageMetadata:
    return metadata.state_dict_metadata["model.t"].chunks[0]  # type: ignore[union-attr, no-any-return]


def _set(path: str, value: Any) -> Callable[[Metadata], None]:
    """Return a change of the place of `model.t`."""

    def change(metadata: Metadata) -> None:
        setattr(metadata.storage_data[MetadataIndex("model.t", [0, 0])], path, value)

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_set("relative_path", "../secret"), "the file '../secret'"),
        (_set("relative_path", "/etc/passwd"), "the file '/etc/passwd'"),
        (_set("relative_path", ".metadata"), "the file"),
        (_set("length", 1 << 60), "bytes in"),
        (_set("length", -1), "whole numbers"),
        (_set("offset", 1.5), "whole numbers"),
        (_set("length", 8), "8 bytes for the box"),
        (_set("transform_descriptors", ["zstd"]), "transformed bytes"),
        (lambda m: setattr(_box(m), "sizes", torch.Size([1 << 40, 2])), "box"),
        (lambda m: setattr(_box(m), "sizes", torch.Size([2, 2])), "holes or overlaps"),
        (lambda m: m.state_dict_metadata["model.t"].chunks.append(_box(m)), "holes or overlaps"),
        (lambda m: setattr(m.state_dict_metadata["model.t"], "size", torch.Size([1 << 40, 1 << 40])), "2\\^60 cells"),
        (lambda m: setattr(m.state_dict_metadata["model.t"], "size", torch.Size([4, 2])), "holes or overlaps"),
        (lambda m: setattr(m.state_dict_metadata["model.t"].properties, "dtype", torch.complex64), "complex64"),
        (lambda m: setattr(m, "storage_data", {}), "no place of"),
        (lambda m: setattr(m, "storage_data", None), "no dict"),
        (lambda m: m.planner_data.update({"model.t": ("model", 1 << 40)}), "places in lists"),
        (lambda m: m.planner_data.update({"model.t": ("steps",)}), "two values at"),
        (lambda m: m.planner_data.update({"model.t": ("steps", "t")}), "above another value"),
    ],
)
def test_impossible_statements_are_refused(folder: Path, change: Callable[[Metadata], object], match: str) -> None:
    changed(folder, change)
    refused(folder, match)


def test_overlapping_boxes_are_refused(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        sizes = [torch.Size([2, 2]), torch.Size([1, 2])]
        boxes = [ChunkStorageMetadata(torch.Size([row, 0]), size) for row, size in enumerate(sizes)]
        metadata.state_dict_metadata["model.t"].chunks = boxes  # type: ignore[union-attr]
        places = metadata.storage_data
        places[MetadataIndex("model.t", [1, 0])] = places[MetadataIndex("model.t", [0, 0])]

    changed(folder, change)
    refused(folder, "holes or overlaps")


def test_compressed_boxes_are_refused(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    place = pickle.loads((folder / ".metadata").read_bytes()).storage_data[MetadataIndex("model.t", [0, 0])]
    data = file.read_bytes()[place.offset : place.offset + place.length]
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with file.open("ab") as end:
        start = end.tell()
        end.write(packed.getvalue())
    size = len(packed.getvalue())
    changed(folder, lambda metadata: (_set("offset", start)(metadata), _set("length", size)(metadata)))
    refused(folder, "compressed or shared bytes")


def test_values_that_share_bytes_are_refused(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        places = metadata.storage_data
        places[MetadataIndex("steps")] = places[MetadataIndex("model.t", [0, 0])]

    changed(folder, change)
    refused(folder, "share bytes")


def test_other_tensors_than_stated_are_refused(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.t"].properties.dtype = torch.int32  # type: ignore[union-attr]

    changed(folder, change)
    refused(folder, "torch.float32")
