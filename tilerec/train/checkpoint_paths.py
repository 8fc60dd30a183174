"""`checkpoint_paths`: the checkpoints that a path names."""

from __future__ import annotations

from tilerec.checkpoint.folder import folder_at
from tilerec.checkpoint.manager import checkpoints, names_in
from tilerec.checkpoint.manifest import MANIFEST
from tilerec.train.run_metadata import FOLDER


def checkpoint_paths(path: str) -> list[str]:
    """Return the checkpoints at a path: itself, or those of a folder or of a run's log folder, oldest first."""
    names = names_in(path)
    if MANIFEST in names:
        return [path]
    base = f"{path.rstrip('/')}/{FOLDER}" if FOLDER in names else path
    return [folder_at(found.path).path for found in checkpoints(base)]
