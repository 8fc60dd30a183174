"""`compact`: makes an incremental checkpoint whole, in its place.

    step-300 (rows) -> step-200 (rows) -> step-100      ->      step-300 (everything)

New data files are written beside the old ones; then another manifest takes the place of the first, at once. An
interruption leaves the one or the other, and files that no manifest names. The id stays: later checkpoints that
continue this one are as whole as before.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tilerec.checkpoint.chain import Chain, Wanted, open_chain
from tilerec.checkpoint.data_file import chunks_of
from tilerec.checkpoint.folder import CheckpointFolder, folder_at
from tilerec.checkpoint.manifest import MANIFEST, manifest_text
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.checkpoint.saving import file_errors
from tilerec.checkpoint.streamed_save import StreamedBox, StreamedTensor, write_streamed
from tilerec.errors import FileError, InputError


def compact(path: str | Path) -> bool:
    """Make a checkpoint independent of its bases; return False if it has none. One process calls it.

    Memory: one chunk, and the default budget of `load`. Do not compact a checkpoint that a job is loading.

    Args:
        path: of the checkpoint: a folder, or a URL of fsspec.

    Raises:
        FileError, InputError: it cannot be read, or is damaged, or files cannot be written. It is unchanged then.
    """
    folder = folder_at(path)
    chain = open_chain(folder)
    manifest = chain.manifest
    if manifest.base is None:
        _remove_others(folder, manifest.files)  # an interrupted compaction may have left some
        return False
    tensors = {name: _streamed(chain, name) for name in manifest.tensors}
    try:
        files, saved = write_streamed(folder, tensors, f"whole-{os.urandom(4).hex()}")
        text = manifest_text(manifest.state.value, saved, files, manifest.metadata, manifest.id)
        with file_errors(folder):
            folder.replace_manifest(text)
    except BaseException:
        with suppress(FileError, InputError):  # whichever manifest is there now decides
            _remove_others(folder, open_chain(folder).manifest.files)
        raise
    _remove_others(folder, files)
    return True


def _streamed(chain: Chain, name: str) -> StreamedTensor:
    saved = chain.tensors[name]
    boxes = [part for box in chain.boxes(name) for part in chunks_of(box, saved.dtype)]
    return StreamedTensor(
        saved.dtype, saved.shape, tuple(StreamedBox(box, partial(_read, chain, name, box)) for box in boxes)
    )


def _read(chain: Chain, name: str, box: Box) -> Tensor:
    out = torch.empty(box.sizes, dtype=chain.tensors[name].dtype)
    if box.cells:
        chain.read([Wanted(Piece(box, out), name)])
    return out


def _remove_others(folder: CheckpointFolder, files: Collection[str]) -> None:
    """Remove what the manifest does not name."""
    with file_errors(folder):
        for name in folder.names():
            if name != MANIFEST and name not in files:
                folder.remove_file(name)
