"""`import_dcp`: converts a checkpoint of `torch.distributed.checkpoint` (DCP) into one of tilerec.

    .metadata, read as data  ->  nested state, with a place for each tensor  ->  tree and names
        ->  boxes, loaded and written one after the other

No process group is needed, and no code of the checkpoint runs (docs/checkpoints-import.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilerec.checkpoint.dcp_folder import DcpFolder
from tilerec.checkpoint.dcp_metadata import StoredTensor
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.streamed_save import StreamedBox, StreamedTensor, save_streamed
from tilerec.checkpoint.tree import flatten
from tilerec.errors import ConfigError, InputError

KeyPath = tuple[str | int, ...]
"""Keys from the top of a state to a value; an int is a place in a list."""


@dataclass(frozen=True)
class Imported:
    """What an import wrote.

    Args:
        tensors: number of tensors. skipped: names of values that were left out.
    """

    tensors: int
    skipped: tuple[str, ...] = ()


@dataclass
class ForeignState:
    """State of a job under the names that tilerec uses, with tensors that are still on disk.

    Args:
        tensors, values: by path. skipped: names of values that are left out.
    """

    tensors: dict[KeyPath, StreamedTensor] = field(default_factory=dict)
    values: dict[KeyPath, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def save(self, path: str | Path, part: str | None, source: str) -> Imported:
        """Write a checkpoint of the state.

        Args:
            part: name of the part that gets all of it; None: its top keys are the parts.
            source: the folder that it is from, for the manifest and errors.
        """
        places = {key: torch.empty(0, device="meta") for key in self.tensors}
        state: dict[str, Any] = {}
        for key, value in {**places, **self.values}.items():
            _set(state, key, value, source)
        if part is not None:
            state = {part: state}
        _check_parts(state, source)
        tree, names = flatten(state)
        prefix = [] if part is None else [part]
        streamed = {".".join(map(str, [*prefix, *key])): tensor for key, tensor in self.tensors.items()}
        tensors = {name: streamed[name] if value.is_meta else _in_memory(value) for name, value in names.items()}
        save_streamed(path, tree, tensors, {"imported_from": source})
        return Imported(len(tensors), tuple(self.skipped))


def import_dcp(folder: str | Path, path: str | Path, *, part: str | None = None, skip_values: bool = False) -> Imported:
    """Convert a DCP checkpoint of logical tensors: plain tensors, DTensors and ShardedTensors.

        import_dcp("dcp/step-100", "run/checkpoints/step-100")          # of {"model": ..., "optimizer": ...}
        import_dcp("dcp/weights", "weights", part="model")              # of model.state_dict()

    Memory: two times the largest box that a rank saved.

    Args:
        folder: of the DCP checkpoint, or a URL of fsspec.
        path: of the new checkpoint, which must not exist.
        part: name of the part that gets all of it; None: its top keys become the parts.
        skip_values: leave out values that are no tensors and hold objects of other classes than numbers, strings,
            lists and dicts; False: refuse them.

    Raises:
        FileError: the folder is no DCP checkpoint, or `path` exists or cannot be written.
        InputError: the checkpoint is damaged, or has something that is not imported.
        ConfigError: its top keys cannot be parts.
    """
    source = DcpFolder(folder)
    return state_of(source, skip_values=skip_values).save(path, part, source.path)


def state_of(source: DcpFolder, *, skip_values: bool) -> ForeignState:
    """Return the state of a DCP checkpoint, under its own names."""
    contents, found = source.contents, ForeignState()
    for name, tensor in contents.tensors.items():
        found.tensors[contents.paths[name]] = streamed(source, name, tensor)
    for name in contents.values:
        try:
            value = source.value(name)
            flatten({name: value})
        except InputError:
            if not skip_values:
                raise
            found.skipped.append(name)
        except ConfigError as error:
            if not skip_values:
                raise InputError(
                    f"DCP checkpoint {source.path}: got {name!r} with a value that JSON cannot hold ({error}); "
                    "expected numbers, strings, lists and dicts. Leave such values out: skip_values (--skip-values)."
                ) from error
            found.skipped.append(name)
        else:
            found.values[contents.paths[name]] = value
    return found


def streamed(source: DcpFolder, name: str, tensor: StoredTensor) -> StreamedTensor:
    """Return a tensor of a DCP checkpoint, to be read box by box."""
    boxes = tuple(
        StreamedBox(item.box, lambda item=item: source.tensor(name, item))  # type: ignore[misc]
        for item in tensor.items
        if item.box is not None
    )
    return StreamedTensor(tensor.dtype, tensor.shape, boxes)


def _in_memory(value: Tensor) -> StreamedTensor:
    box = Box((0,) * value.dim(), tuple(value.shape))
    return StreamedTensor(value.dtype, box.sizes, (StreamedBox(box, lambda: value),) if box.cells else ())


def _set(state: dict[str, Any], path: KeyPath, value: Any, source: str) -> None:
    """Put a value at its path, and make the dicts and lists on the way."""
    here: Any = state
    for i, key in enumerate(path):
        fits = (isinstance(here, dict) and isinstance(key, str)) or (isinstance(here, list) and isinstance(key, int))
        if fits and isinstance(key, int):
            here.extend([None] * (key + 1 - len(here)))
        inner = (here[key] if isinstance(key, int) else here.get(key)) if fits else None
        last = i + 1 == len(path)
        if not fits or (last and inner is not None):
            raise InputError(
                f"DCP checkpoint {source}: got the path {path!r:.100} below or above another value; expected dicts and "
                "lists on the way. Import another checkpoint."
            )
        if last:
            here[key] = value
            return
        if inner is None:
            inner = here[key] = {} if isinstance(path[i + 1], str) else []
        here = inner


def _check_parts(state: Mapping[str, Any], source: str) -> None:
    wrong = next((name for name in state if not name or "." in name), None)
    if wrong is not None:
        raise ConfigError(
            f"DCP checkpoint {source}: got the top key {wrong!r:.80}; expected names of parts, without dots. Pass "
            "part='model' (--part model): all of it becomes that part."
        )
