"""`export_dcp`: writes a checkpoint in the format of `torch.distributed.checkpoint` (DCP), in bounded memory.

torch's own `FileSystemWriter` writes the files. Its planner reads the chunks of tensors one after the other, when the
writer gets to them.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.tree import unflatten
from tilerec.errors import ConfigError, FileError, TilerecError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

_MOVE = "Choose another path, or free space."


class _Leaf(NamedTuple):
    """An entry of a DCP checkpoint: its path, and a tensor's name here, or a value."""

    path: tuple[str | int, ...]
    value: Any


def export_dcp(path: str | Path, folder: str | Path, *, part: str | None = None) -> int:
    """Write a checkpoint as one of DCP, which `torch.distributed.checkpoint.load(..., no_dist=True)` reads.

        export_dcp("run/checkpoints/step-100", "dcp/step-100")             # {"model": ..., "optimizer": ...}
        export_dcp("run/checkpoints/step-100", "dcp/weights", part="model")

    Args:
        path: of the checkpoint. folder: of the new DCP checkpoint, which must not exist.
        part: the part to write, under its own names; None: all parts, below their names.

    Returns:
        The number of tensors.

    Raises:
        FileError: there is no checkpoint, or the folder exists or cannot be written. No part of it remains.
        InputError: the checkpoint is damaged. ConfigError: it has no such part.
    """
    contents = SavedContents(path)
    entries = _entries(contents, part)
    if "://" in str(folder):
        raise FileError(f"DCP checkpoint {folder}: got a URL; expected a local folder. Export to one, and copy it.")
    final = Path(os.path.abspath(folder))
    if os.path.lexists(final):
        raise FileError(f"DCP checkpoint {folder}: got a path that exists; expected a new folder. {_MOVE}", 17)
    temporary = final.with_name(f"{final.name}.tmp-{os.urandom(8).hex()}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _write(contents, entries, temporary)
        if os.path.lexists(final):
            raise FileError(f"DCP checkpoint {folder}: got a path that exists; expected a new folder. {_MOVE}", 17)
        os.rename(temporary, final)
        descriptor = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, TilerecError):
            raise
        raise FileError(
            f"DCP checkpoint {folder}: got '{error.strerror or error}'; expected a folder that can be written. {_MOVE}",
            error.errno,
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sum(type(leaf.value) is _Named for leaf in entries.values())


class _Named:
    """The name of a tensor, in its place in a state."""

    def __init__(self, name: str) -> None:
        self.name = name


def _entries(contents: SavedContents, part: str | None) -> dict[str, _Leaf]:
    """Return the entries by the names that DCP gives them."""
    state = contents.manifest.state
    if part is not None:
        parts = state.members()["dict"].members()
        if part not in parts:
            raise ConfigError(
                f"Checkpoint {contents.path}: got part={part!r}; expected one of {', '.join(parts)}. List them with "
                "tilerec checkpoint inspect."
            )
        state = parts[part]
    values = unflatten(state, lambda name, _: cast(Tensor, _Named(name)))
    entries: dict[str, _Leaf] = {}
    for leaf in _leaves((), values):
        name = ".".join(map(str, leaf.path))
        if not name or name in entries:
            raise ConfigError(
                f"Checkpoint {contents.path}: got two values with the name {name!r} in DCP; expected one of each. "
                "Export one part: part= (--part)."
            )
        entries[name] = leaf
    return entries


def _leaves(path: tuple[str | int, ...], value: Any) -> Iterator[_Leaf]:
    """Yield the entries below a value, cut as DCP cuts states: dicts, and lists that hold tensors or dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, (list, tuple)) and _holds_entries(value):
        for i, inner in enumerate(value):
            yield from _leaves((*path, i), inner)
    else:
        yield _Leaf(path, value)


def _holds_entries(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_entries(item) for item in value)
    return isinstance(value, (dict, _Named))


def _write(contents: SavedContents, entries: dict[str, _Leaf], folder: Path) -> None:
    """Write the files of a DCP checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist=True intends that
            # The writer holds the newest box of every tensor until it has written their file: one file for each box.
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
            dcp.save({}, storage_writer=writer, planner=_planner(contents, entries), no_dist=True)
    except CheckpointException as error:  # a BaseException, which holds the errors of ranks
        cause = next((failure[0] for failure in error.failures.values()), error)
        if isinstance(cause, (TilerecError, OSError)):
            raise cause from error
        raise FileError(
            f"DCP checkpoint {folder}: got '{cause}'; expected a folder that can be written. {_MOVE}"
        ) from error


def _planner(contents: SavedContents, entries: dict[str, _Leaf]) -> SavePlanner:
    """Return a planner for torch's writer that reads each chunk when it is written."""
    # torch.distributed.checkpoint takes more than a second to import
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

    def items_of(name: str, leaf: _Leaf) -> Iterator[WriteItem]:
        if type(leaf.value) is not _Named:
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            return
        saved = contents.manifest.tensors[leaf.value.name]
        properties, size = TensorProperties(dtype=saved.dtype), torch.Size(saved.shape)
        boxes = contents.chain.boxes(leaf.value.name) or [Box((0,) * len(saved.shape), saved.shape)]
        for i, box in enumerate(boxes):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, properties, size)
            yield WriteItem(MetadataIndex(name, box.offsets, i), WriteItemType.SHARD, tensor_data=data)

    class Planner(SavePlanner):
        """Plan of one process that writes everything."""

        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            pass

        def create_local_plan(self) -> SavePlan:
            return SavePlan([item for name, leaf in entries.items() for item in items_of(name, leaf)])

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = create_default_global_save_plan(all_plans)
            metadata.planner_data = {name: leaf.path for name, leaf in entries.items()}
            return plans, metadata

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return new_plan

        def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
            value = entries[write_item.index.fqn].value
            if type(value) is not _Named:
                data = io.BytesIO()
                torch.save(value, data)
                return data
            assert write_item.tensor_data is not None
            chunk = write_item.tensor_data.chunk
            return contents.box_of(value.name, Box(tuple(chunk.offsets), tuple(chunk.sizes)))

    return Planner()
