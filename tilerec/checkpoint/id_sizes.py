"""`saved_id_sizes`: loads a checkpoint into tables with managed ids of other sizes.

    model of 12 buckets  ->  the checkpoint's 6  ->  load  ->  12 again; ids keep their rows, with all of their state

The bucket of an id depends on the number of buckets. So the ids of another size cannot be read in place: a table takes
the size of the checkpoint, and is then resized as a running one (`resize_ids`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.parts import ranks_of_job
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.tree import flatten
from tilerec.comms.agreement import agreeing
from tilerec.comms.group import Group
from tilerec.errors import TilerecError
from tilerec.modules.id_resize import Resized

_GEOMETRY = ".geometry"  # a tensor of a table's ids: buckets, rows of a bucket, shared rows of it, longest probe


class _Size(NamedTuple):
    """Rows and buckets of a table."""

    rows: int
    buckets: int


class _Sizes(NamedTuple):
    """Sizes of a table of a part: here, and in the checkpoint."""

    part: str
    table: str
    here: _Size
    saved: _Size


@contextmanager
def saved_id_sizes(
    path: str | Path,
    parts: Mapping[str, Any],
    *,
    group: Group | dist.ProcessGroup | None = None,
    changes: Changes | None = None,
    optimizers: Sequence[Optimizer] | None = None,
) -> Iterator[dict[str, Resized]]:
    """Give tables with managed ids the sizes of a checkpoint within the block, and then their own again. Collective.

        with saved_id_sizes(path, parts):
            load(path, parts)

    Use it for parts that have not been trained: their ids do not matter. After an error of the library in the block the
    tables have their own sizes, too.

    Args:
        path, parts, group, changes: as for `load`.
        optimizers: see `resize_ids`.

    Yields:
        After the block, the result of `resize_ids` for each table whose size differs, by name: ids that found no place
        are in `dropped_ids`.

    Raises:
        ConfigError: a table cannot have the size of the checkpoint, or not its own again (numbers of buckets that do
            not divide each other, rows cut inside of a bucket). The error names the table.
        FileError, InputError: as `load`.
    """
    from tilerec.parallel.resharding.resize_ids import resize_ids  # imports the planner, which followers do not need

    ranks = ranks_of_job(group)
    with agreeing(ranks, "the checkpoint's ids") as found:
        differing = _differing(SavedContents(path), parts, changes or Changes())
        found["sizes"] = [list(map(str, sizes)) for sizes in differing]
    results: dict[str, Resized] = {}
    resized: list[_Sizes] = []

    def restore() -> None:
        while resized:
            part, table, here, _ = resized.pop()
            results[table] = resize_ids(parts[part], table, *here, optimizers=optimizers)

    try:
        for sizes in differing:
            resize_ids(parts[sizes.part], sizes.table, *sizes.saved, optimizers=optimizers)
            resized.append(sizes)
        yield results
    except TilerecError:
        restore()
        raise
    restore()


def _differing(saved: SavedContents, parts: Mapping[str, Any], changes: Changes) -> list[_Sizes]:
    """Return the tables with managed ids of another size in the checkpoint."""
    names = {changes.name_here(name): name for name in saved.manifest.tensors if name.endswith(_GEOMETRY)}
    found = []
    for part, module in parts.items():
        if not isinstance(module, nn.Module):
            continue
        _, tensors = flatten({part: module.state_dict()})
        for name, tensor in tensors.items():
            if name in names:
                table = name.removesuffix(_GEOMETRY).rsplit(".", 1)[-1]
                whole = Box((0,), saved.manifest.tensors[names[name]].shape)
                sizes = _Sizes(part, table, _size(tensor), _size(saved.box_of(names[name], whole)))
                if sizes.here != sizes.saved:
                    found.append(sizes)
    return found


def _size(geometry: Tensor) -> _Size:
    buckets, rows = geometry.tolist()[:2]
    return _Size(buckets * rows, buckets)
