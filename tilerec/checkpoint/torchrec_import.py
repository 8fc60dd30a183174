"""`import_torchrec`: converts a checkpoint of a TorchRec `DistributedModelParallel` model, saved by DCP.

    ebc.embedding_bags.t.weight / t.momentum1                 ->  sum        (Adagrad, row-wise Adagrad)
    ebc.embedding_bags.t.weight / t.momentum1, t.exp_avg_sq   ->  exp_avg, exp_avg_sq, step     (Adam and its relatives)

Weights keep their names. State with a number per row has, in TorchRec, a number per row for each column shard:

    [rows x column shards], shard after shard   ->   [rows], the mean weighted by the widths of the shards

Row-wise Adagrad adds the mean square of a row's gradient. The weighted mean over shards is that sum of the whole row.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.dcp_folder import DcpFolder
from tilerec.checkpoint.dcp_import import ForeignState, Imported, KeyPath, state_of, streamed
from tilerec.checkpoint.dcp_metadata import StoredItem, StoredTensor
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.streamed_save import StreamedBox, StreamedTensor
from tilerec.errors import ConfigError, InputError

_TABLE = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")
_FIRST = "momentum1"  # TorchRec's name of the first slot of every optimizer
_STEP = "step"


class _Slot(NamedTuple):
    """A slot of a table's optimizer: full name in the checkpoint, path of its table's slots, and its own name."""

    name: str
    table: KeyPath
    slot: str


def import_torchrec(
    folder: str | Path, path: str | Path, *, steps: int | None = None, skip_values: bool = False
) -> Imported:
    """Convert a checkpoint that DCP wrote of a TorchRec model and its optimizer.

        dcp.save({"model": dmp.state_dict(), "optimizer": dmp.fused_optimizer.state_dict()}, checkpoint_id=folder)

        import_torchrec(folder, "run/checkpoints/step-100", steps=100)
        load("run/checkpoints/step-100", {"model": model, "optimizer": model.fused_optimizer})

    Args:
        folder, path, skip_values: as for `import_dcp`.
        steps: number of optimizer steps that the model was trained. TorchRec does not save it, and the bias correction
            of Adam requires it. None: refused for tables with Adam's state, else 0, which changes nothing.

    Raises:
        FileError, InputError, ConfigError: as for `import_dcp`; state of an unknown layout; no steps for Adam.
    """
    if steps is not None and (type(steps) is not int or steps < 0):
        raise ConfigError(f"import_torchrec: got steps={steps!r}; expected a whole number >= 0. Pass the run's steps.")
    source = DcpFolder(folder)
    found = state_of(source, skip_values=skip_values)
    weights: dict[str | int, StoredTensor] = {}
    for name, tensor in source.contents.tensors.items():
        if len(tensor.shape) == 2 and 0 not in tensor.shape:
            weights.setdefault(source.contents.paths[name][-1], tensor)
    for table, slots in _tables(source).items():
        _convert(source, found, slots, weights.get(table[-1]), steps)
    return found.save(path, None, source.path)


def _tables(source: DcpFolder) -> dict[KeyPath, list[_Slot]]:
    """Return the slots of each table with an optimizer in the backward pass, by the path of its slots."""
    tables: dict[KeyPath, list[_Slot]] = {}
    for name, path in source.contents.paths.items():
        if len(path) != 4 or path[1] != "state" or name not in source.contents.tensors:
            continue
        match = _TABLE.fullmatch(str(path[2]))
        if match is not None and str(path[3]).startswith(f"{match[1]}."):
            slot = _Slot(name, path[:3], str(path[3])[len(match[1]) + 1 :])
            tables.setdefault(slot.table, []).append(slot)
    return tables


def _convert(
    source: DcpFolder, found: ForeignState, slots: list[_Slot], weight: StoredTensor | None, steps: int | None
) -> None:
    """Replace the slots of a table by those of tilerec."""
    table = slots[0].table
    names = {slot.slot for slot in slots}
    adam = "exp_avg_sq" in names
    if names - {_FIRST, "exp_avg_sq"} or _FIRST not in names:
        raise InputError(
            f"DCP checkpoint {source.path}: got the slots {', '.join(sorted(names))} of {table[-1]!r}; expected "
            "momentum1, or momentum1 and exp_avg_sq. Import the model alone, or use another optimizer."
        )
    if adam and steps is None:
        raise ConfigError(
            f"DCP checkpoint {source.path}: got Adam's state of {table[-1]!r} without a number of steps; expected the "
            "steps that the model was trained, for the bias correction. Pass steps=N (--steps N)."
        )
    if weight is None:
        raise InputError(
            f"DCP checkpoint {source.path}: got {slots[0].name!r} without the weight {table[-1]!r}; expected both. "
            "Save the model and the optimizer in one checkpoint."
        )
    new = {_FIRST: "exp_avg" if adam else "sum", "exp_avg_sq": "exp_avg_sq"}
    for slot in slots:
        del found.tensors[source.contents.paths[slot.name]]
        key: KeyPath = (*table, new[slot.slot])
        found.tensors[key] = _folded(source, slot, weight)
    count = torch.tensor(steps or 0)
    key = (*table, _STEP)
    found.tensors[key] = StreamedTensor(count.dtype, (), (StreamedBox(Box((), ()), lambda: count),))


def _folded(source: DcpFolder, slot: _Slot, weight: StoredTensor) -> StreamedTensor:
    """Return a slot in the shape of tilerec: as it is, or with one number per row."""
    stored = source.contents.tensors[slot.name]
    rows = weight.shape[0]
    if stored.shape in (weight.shape, (rows,)):
        return streamed(source, slot.name, stored)
    columns = sorted({(item.box.offsets[1], item.box.sizes[1]) for item in weight.items if item.box is not None})
    whole = sum(width for _, width in columns) == weight.shape[1]
    if not whole or stored.shape != (rows * len(columns),) or not stored.dtype.is_floating_point:
        raise InputError(
            f"DCP checkpoint {source.path}: got {slot.name!r} of shape {list(stored.shape)}; expected "
            f"{list(weight.shape)}, or {rows} numbers for each of its {len(columns)} column shards. Import the model "
            "alone."
        )
    widths = [width for _, width in columns]
    edges = {0, rows}  # rows at which a box of any shard begins or ends
    for item in stored.items:
        assert item.box is not None
        first = item.box.offsets[0]
        edges |= {first % rows, (first + item.box.sizes[0] - 1) % rows + 1}
    cuts = sorted(edges)
    boxes = []
    for low, high in itertools.pairwise(cuts):
        read = partial(_mean, source, slot.name, stored, widths, rows, low, high)
        boxes.append(StreamedBox(Box((low,), (high - low,)), read))
    return StreamedTensor(stored.dtype, (rows,), tuple(boxes))


def _mean(
    source: DcpFolder, name: str, stored: StoredTensor, widths: list[int], rows: int, low: int, high: int
) -> Tensor:
    """Return the mean over column shards for rows [low, high), weighted by width, summed in float64."""
    total = torch.zeros(high - low, dtype=torch.float64)
    for shard, width in enumerate(widths):
        want = Box((shard * rows + low,), (high - low,))
        for item, part in _parts(stored, want):
            assert item.box is not None
            values = item.box.within(source.tensor(name, item), part)
            first = part.offsets[0] - want.offsets[0]
            total[first : first + part.sizes[0]].add_(values, alpha=width)
    return total.div_(sum(widths)).to(stored.dtype)


def _parts(stored: StoredTensor, want: Box) -> list[tuple[StoredItem, Box]]:
    """Return the items that hold cells of a box, each with these cells."""
    found = ((item, item.box.overlap(want)) for item in stored.items if item.box is not None)
    return [(item, part) for item, part in found if part is not None]
