"""A package as a file: a zip archive (PT2) of uncompressed parts, the weights first.

    byte 0      header of the first part, padded
    4096        weights: each tensor once, at a multiple of 64 bytes, ready to be mapped into memory
    ...         manifest.json
    ...         the compiled model, as AOTInductor packages it

A reader in any language finds the weights without reading the archive. torch's loader extracts only the compiled model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import torch
from torch import Tensor

from tilerec.errors import ConfigError, FileError
from tilerec.export.manifest import Manifest, Weight
from tilerec.export.signature import DTYPES, dtype_name
from tilerec.json_document import MOST_BYTES, MOST_NUMBER, parse_json
from tilerec.quantized.row_type import ROW_TYPES
from tilerec.storage.row_file import fetch, release
from tilerec.torch_private import readable_op_calls

WEIGHTS_AT = 4096
"""First byte of the weights in the file."""

_WEIGHTS = "model/data/weights/tilerec.bin"
_MANIFEST = "model/extra/tilerec.json"
_CODE = "model/data/aotinductor/"
_OF_THE_COMPILER = (".kernel.cpp", ".kernel_metadata.json", "/serialization_id")
"""Parts of a compiled model that no loader reads: a source with paths of the machine, and a hash of sources."""
_OWN_NAME = re.compile(r"[^/]+(?=\.wrapper[._])")
"""The compiler's name of a model, which depends on paths of the machine."""
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24
_AGAIN = "Export the model again, or copy the file again."


def weight_places(tensors: Mapping[str, Tensor]) -> list[Weight]:
    """Return the places of tensors in a package, in the order of their names, with their digests.

    Raises:
        ConfigError: a tensor is on another device than the CPU, or not contiguous.
    """
    out: list[Weight] = []
    places: dict[tuple[object, ...], tuple[int, str]] = {}
    end = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ConfigError(
                f"export: got the weight '{name}' on {tensor.device} with strides {tensor.stride()}; expected "
                "contiguous memory of the CPU. Call .cpu() on the model, or .contiguous() on the weight."
            )
        key = tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
        if key not in places or not tensor.numel():
            places[key] = -(-end // _ALIGNMENT) * _ALIGNMENT, _digest(tensor)
            end = places[key][0] + tensor.nbytes
        start, digest = places[key]
        out.append(Weight(name, dtype_name(tensor), tuple(tensor.shape), start, digest))
    return out


def write_package(file: BinaryIO, compiled: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a package.

    Args:
        compiled: archive of AOTInductor.
        tensors: the weights by name.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with archive.open(_first_part(), "w", force_zip64=True) as out:
            _write_weights(out, manifest, tensors)
        archive.writestr(_part(_MANIFEST), manifest.to_json())
        with zipfile.ZipFile(compiled) as code:
            for name in sorted(code.namelist()):
                if name.endswith(_OF_THE_COMPILER):
                    continue
                data = code.read(name)
                if name.endswith("_metadata.json"):
                    data = json.dumps({**json.loads(data), **manifest.lines()}).encode()
                elif name.endswith(".json"):
                    data = readable_op_calls(data)
                elif name.endswith(".cpp"):
                    data = b""  # torch < 2.13 finds the metadata by the name of this file, and does not read it
                archive.writestr(_part(_OWN_NAME.sub("model", name)), data)


def _part(name: str) -> zipfile.ZipInfo:
    part = zipfile.ZipInfo(name)  # with a fixed time
    part.external_attr = 0o644 << 16
    return part


def _first_part() -> zipfile.ZipInfo:
    """Return the entry of the weights; its header ends at `WEIGHTS_AT`."""
    part = _part(_WEIGHTS)
    used = 30 + len(_WEIGHTS) + 20  # header, name, sizes of 64 bits
    padding = WEIGHTS_AT - used - 4
    part.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
    return part


def _write_weights(out: IO[bytes], manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    end = 0
    for own in manifest.weights:
        if own.start < end:  # shares the memory of an earlier one
            continue
        out.write(bytes(own.start - end))
        tensor = tensors[own.name]
        for chunk in _chunks_of(tensor):
            out.write(chunk)
        end = own.start + tensor.nbytes


def _chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor."""
    for chunk in tensor.detach().reshape(-1).view(torch.uint8).split(_CHUNK_BYTES):
        fetch(chunk)
        yield chunk.numpy().data
        release(chunk)


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks_of(tensor):
        digest.update(chunk)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ reading


class OpenPackage(NamedTuple):
    """A package whose weights are mapped.

    Attributes:
        tensors: weights by name. Pages are read when they are used, and shared with other processes; this process alone
            sees its writes.
    """

    manifest: Manifest
    tensors: dict[str, Tensor]


def open_package(path: str | Path, *, name: str = "") -> OpenPackage:
    """Map the weights of a package and read its manifest.

    Args:
        name: of the file in errors; "": the path.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no package, not all of one, or its manifest does not fit it.
    """
    what = f"Package {name or path}"
    try:
        with open_file(path, what) as file:
            start = file.read(4)
            if start != b"PK\x03\x04":
                raise ConfigError(f"{what}: got no archive; expected a file of tilerec.export.export(). {_AGAIN}")
            text, size = _parts(file, what)
            manifest = Manifest.of(parse_json(text, f"{what}: manifest"))
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        if isinstance(error, ConfigError):
            raise
        raise FileError(
            f"{what}: got '{error.strerror or error}'; expected a readable file. Check the path.", error.errno
        ) from error
    return OpenPackage(manifest, _mapped(manifest, memory, size, what))


def open_file(path: str | Path, what: str) -> BinaryIO:
    """Open a file for reading. A pipe is refused: `open` would wait for its writer.

    Raises:
        ConfigError: the path is none. OSError: the file cannot be opened, or is no regular file.
    """
    # open(3) would read the caller's descriptor 3, and close it.
    if not isinstance(path, (str, PathLike)) or "\0" in str(path):
        raise ConfigError(f"{what}: got {path!r} as its path; expected a str or a Path. Pass the path of the file.")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def _parts(file: BinaryIO, what: str) -> tuple[bytes, int]:
    """Return the text of the manifest, and the size of the weights."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = {part.filename: part for part in archive.infolist()}
            if _MANIFEST not in parts or _WEIGHTS not in parts:
                raise ConfigError(
                    f"{what}: got an archive without {_MANIFEST}; expected a file of tilerec.export.export(). Load "
                    "files of torch.export.save() or aoti_compile_and_package() with torch's functions."
                )
            first = parts[_WEIGHTS]
            wrong = first.header_offset != 0 or first.compress_type != zipfile.ZIP_STORED
            file.seek(26)
            name, extra = struct.unpack("<HH", file.read(4))
            if wrong or 30 + name + extra != WEIGHTS_AT or not any(own.startswith(_CODE) for own in parts):
                raise ConfigError(f"{what}: got an archive that was packed again; expected the exported file. {_AGAIN}")
            stated = parts[_MANIFEST]
            if stated.file_size > MOST_BYTES or stated.compress_type != zipfile.ZIP_STORED or stated.flag_bits & 1:
                raise ConfigError(
                    f"{what}: got a manifest of {stated.file_size:,} bytes, or one that is compressed or encrypted; "
                    f"expected at most {MOST_BYTES:,} bytes, as they are. {_AGAIN}"
                )
            return archive.read(stated), first.file_size
    except zipfile.BadZipFile as error:
        raise ConfigError(
            f"{what}: got a part of a package, or a damaged one ({error}); expected the whole file. {_AGAIN}"
        ) from error


def _mapped(manifest: Manifest, memory: mmap.mmap, size: int, what: str) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for own in manifest.weights:
        dtype, count = DTYPES[own.dtype], math.prod(own.shape)
        too_large = math.prod(max(1, length) for length in own.shape) > MOST_NUMBER
        if own.start % _ALIGNMENT or too_large or own.start + count * dtype.itemsize > size:
            raise ConfigError(
                f"{what}: manifest: weight '{own.name}' of shape {list(own.shape)} begins at byte {own.start}; "
                f"expected a place in the {size} bytes of the weights. {_AGAIN}"
            )
        flat = torch.empty(0, dtype=dtype)
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=WEIGHTS_AT + own.start)
        out[own.name] = flat.view(own.shape)
    for table in manifest.tables:
        rows = out.get(table.weight)
        width = ROW_TYPES[table.data_type].width(table.dim) if table.data_type in ROW_TYPES else table.dim
        if rows is None or tuple(rows.shape) != (table.rows, width):
            got = "no weight" if rows is None else f"the shape {list(rows.shape)}"
            raise ConfigError(
                f"{what}: manifest: table '{table.name}' has {got}; expected {[table.rows, width]} in "
                f"'{table.weight}'. {_AGAIN}"
            )
    return out


def check_weights(package: OpenPackage, what: str) -> None:
    """Raise a `ConfigError` if the weights are not those that the manifest describes. Reads all of them."""
    for own in package.manifest.weights:
        if _digest(package.tensors[own.name]) != own.sha256:
            raise ConfigError(
                f"{what}: weight '{own.name}' has other bytes than the manifest states; expected digest "
                f"{own.sha256[:16]}. {_AGAIN}"
            )


def check_parts(path: str | Path, what: str) -> None:
    """Raise a `ConfigError` if a part of the archive is not the one that was written. Weights have digests instead."""
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                if part.filename != _WEIGHTS:
                    archive.read(part)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ConfigError(f"{what}: got a damaged part ({error}); expected the exported file. {_AGAIN}") from error
