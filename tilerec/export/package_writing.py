"""A package is written: its weights once, its manifest, and the compiled part (the format is in package_file.py)."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, BinaryIO

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.export.archive import MANIFEST, WEIGHTS, WEIGHTS_AT
from tilerec.export.arguments import dtype_name
from tilerec.export.manifest import Manifest, Weight
from tilerec.export.package_file import ALIGNMENT
from tilerec.storage.row_file import fetch, release
from tilerec.torch_private import readable_op_calls

_OF_THE_COMPILER = (".kernel.cpp", ".kernel_metadata.json", "/serialization_id")
"""Parts of a compiled model that no loader reads: a source with paths of the machine, and a hash of sources."""
_OWN_NAME = re.compile(r"[^/]+(?=\.wrapper[._])")
"""The compiler's name of a model, which depends on paths of the machine."""
_CHUNK_BYTES = 1 << 24


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
            places[key] = -(-end // ALIGNMENT) * ALIGNMENT, _digest(tensor)
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
        archive.writestr(_part(MANIFEST), manifest.to_json())
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
    part = _part(WEIGHTS)
    used = 30 + len(WEIGHTS) + 20  # header, name, sizes of 64 bits
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
