"""Vocabularies that a run keeps: values of features, so that later commands map values to rows without its data.

<log_dir>/vocabulary/<feature>.parquet     one column `value`; row i is row i + 1 of the feature's table
<log_dir>/checkpoints/step-100             the same files as tensors of bytes, the part "vocabulary"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from torch import Tensor

from tilerec.atomic_file import open_replacement
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.data_file import bytes_of
from tilerec.checkpoint.manifest import MANIFEST
from tilerec.checkpoint.pieces import Box
from tilerec.errors import InputError, TilerecError

VOCABULARY_FOLDER = "vocabulary"
VOCABULARY_PART = "vocabulary"
"""The part of a checkpoint with the vocabularies."""


def write_vocabularies(folder: Path, vocabularies: Mapping[str, pa.Array]) -> None:
    """Write vocabularies into the log folder of a run, if there are some. Raises FileError."""
    for name, values in vocabularies.items():
        (folder / VOCABULARY_FOLDER).mkdir(parents=True, exist_ok=True)
        with open_replacement(folder / VOCABULARY_FOLDER / f"{name}.parquet", "Vocabulary") as file:
            parquet.write_table(pa.table({"value": values}), file)


def vocabulary_tensors(vocabularies: Mapping[str, pa.Array]) -> dict[str, Tensor]:
    """Return the files of vocabularies as bytes, uint8 `[N]`, by feature."""
    found = {}
    for name, values in vocabularies.items():
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.table({"value": values}), sink)
        found[name] = torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)
    return found


def read_vocabularies(place: Path, names: Iterable[str] | None = None) -> dict[str, pa.Array]:
    """Return vocabularies of a run, by feature.

    Args:
        place: a folder of `write_vocabularies`, or a checkpoint.
        names: of features; None: all that are there.

    Raises:
        InputError: one is missing, damaged or something else.
    """
    found: dict[str, pa.Array] = {}
    try:
        saved = SavedContents(place) if (place / MANIFEST).is_file() else None
        for name in _names_at(place, saved) if names is None else names:
            file = place / f"{name}.parquet" if saved is None else _saved_file(saved, name)
            found[name] = parquet.read_table(file).column("value").combine_chunks()
    except (OSError, KeyError, pa.ArrowException, TilerecError) as error:
        raise InputError(
            f"data.vocabulary: {place}: got {' '.join(str(error).split())[:200]}; expected the vocabulary of a run. "
            "Use the folder vocabulary of its log folder, or a checkpoint of it."
        ) from error
    return found


def _names_at(place: Path, saved: SavedContents | None) -> list[str]:
    if saved is None:
        return sorted(file.stem for file in place.glob("*.parquet"))
    start = f"{VOCABULARY_PART}."
    return [name.removeprefix(start) for name in saved.manifest.tensors if name.startswith(start)]


def _saved_file(saved: SavedContents, name: str) -> pa.BufferReader:
    tensor = f"{VOCABULARY_PART}.{name}"
    shape = saved.manifest.tensors[tensor].shape
    return pa.BufferReader(bytes_of(saved.box_of(tensor, Box((0,) * len(shape), shape))))
