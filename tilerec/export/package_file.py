"""A package as a file: a zip archive (PT2) of uncompressed parts, the weights first.

    byte 0      header of the first part, padded
    4096        weights: each tensor once, at a multiple of 64 bytes, ready to be mapped into memory
    ...         manifest.json
    ...         the compiled model, as AOTInductor packages it

package_writing.py writes it. A reader in any language finds the weights without reading the archive. torch's loader
extracts only the compiled model.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilerec.errors import ConfigError, FileError
from tilerec.export.archive import AGAIN, WEIGHTS_AT, open_file, read_archive
from tilerec.export.arrays import ARRAY_DTYPES, Array
from tilerec.export.manifest import Manifest
from tilerec.json_document import MOST_NUMBER, parse_json
from tilerec.spec.quantized_row import row_bytes

ALIGNMENT = 64
"""Of the first byte of a weight."""

_CHUNK_BYTES = 1 << 24
_ROW_BITS = {"int8": 8, "int4": 4, "int2": 2}
"""Bits of a number of quantized rows, by the data type of their table."""


class OpenPackage(NamedTuple):
    """A package whose weights are mapped.

    Attributes:
        weights: by name. Pages are read when they are used, and shared with other processes; this process alone sees
            its writes.
    """

    manifest: Manifest
    weights: dict[str, Array]


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
            archive = read_archive(file, what)
            manifest = Manifest.of(parse_json(archive.manifest, f"{what}: manifest"))
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        if isinstance(error, ConfigError):
            raise
        raise FileError(
            f"{what}: got '{error.strerror or error}'; expected a readable file. Check the path.", error.errno
        ) from error
    return OpenPackage(manifest, _mapped(manifest, memory, archive.weights, what))


def _mapped(manifest: Manifest, memory: mmap.mmap, size: int, what: str) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for own in manifest.weights:
        dtype, count = ARRAY_DTYPES[own.dtype], math.prod(own.shape)
        too_large = math.prod(max(1, length) for length in own.shape) > MOST_NUMBER
        if own.start % ALIGNMENT or too_large or own.start + count * dtype.itemsize > size:
            raise ConfigError(
                f"{what}: manifest: weight '{own.name}' of shape {list(own.shape)} begins at byte {own.start}; "
                f"expected a place in the {size} bytes of the weights. {AGAIN}"
            )
        flat = np.empty(0, dtype)
        if count:
            flat = np.frombuffer(memory, dtype, count, WEIGHTS_AT + own.start)
        out[own.name] = flat.reshape(own.shape)
    for table in manifest.tables:
        rows = out.get(table.weight)
        bits = _ROW_BITS.get(table.data_type, 0)
        width = row_bytes(table.dim, bits) if bits else table.dim
        if rows is None or tuple(rows.shape) != (table.rows, width):
            got = "no weight" if rows is None else f"the shape {list(rows.shape)}"
            raise ConfigError(
                f"{what}: manifest: table '{table.name}' has {got}; expected {[table.rows, width]} in "
                f"'{table.weight}'. {AGAIN}"
            )
    return out


def check_lines(package: OpenPackage, stated: Mapping[str, str], wanted: set[str], what: str) -> None:
    """Raise a `ConfigError` if the manifest describes another model than the compiled part.

    Args:
        stated: texts of the compiled part.
        wanted: names of the weights that it reads.
    """
    lines = package.manifest.lines()
    if any(stated.get(name) != text for name, text in lines.items()) or not wanted <= set(package.weights):
        raise ConfigError(
            f"{what}: its manifest describes another model than its compiled part; expected the manifest of the "
            f"export. {AGAIN}"
        )


def check_weights(package: OpenPackage, what: str) -> None:
    """Raise a `ConfigError` if the weights are not those that the manifest describes. Reads all of them."""
    for own in package.manifest.weights:
        if _digest(package.weights[own.name]) != own.sha256:
            raise ConfigError(
                f"{what}: weight '{own.name}' has other bytes than the manifest states; expected digest "
                f"{own.sha256[:16]}. {AGAIN}"
            )


def _digest(weight: Array) -> str:
    digest, flat = hashlib.sha256(), weight.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _CHUNK_BYTES):
        digest.update(flat[start : start + _CHUNK_BYTES].data)
    return digest.hexdigest()
